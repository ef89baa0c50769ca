"""Tests `attn_implementation="ffpa"` on tiny random models, beside transformers' own attention in float32."""

import copy
import importlib
import pickle
import re
import subprocess
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

import ffpa_attn  # noqa: E402
from ffpa_attn.integrations import (  # noqa: E402
    masks,
    sdpa_override,
)
from ffpa_attn.integrations import transformers as ours  # noqa: E402
from transformers import masking_utils  # noqa: E402
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402

ours.register()
N, PAD, VOCAB = 20, 5, 97
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
LOCAL = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, head_dim=64),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, **LOCAL, head_dim=64, attn_logit_softcapping=5.0),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SIZES, **LOCAL, head_dim=320),
    "gemma4": lambda: transformers.Gemma4TextConfig(
        **SIZES, **LOCAL, head_dim=64, global_head_dim=512, num_kv_shared_layers=2, hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=VOCAB,
    ),
}  # fmt: skip
MODELS = sorted(CONFIGS)
PADDINGS = {
    "none": None,
    "ones": [[1] * N, [1] * N],
    "left": [[0] * PAD + [1] * (N - PAD), [1] * N],
    "right": [[1] * (N - PAD) + [0] * PAD, [1] * N],
    "both": [[0] * 3 + [1] * (N - PAD) + [0] * (PAD - 3), [0] * N],
    "holes": [[1] * PAD + [0] * 2 + [1] * (N - PAD - 2), [1] * N],
}


def build(config, device, attention="ffpa", dtype=torch.bfloat16, like=None):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation=attention, dtype=dtype
    )
    if like is not None:
        model.load_state_dict(like.state_dict())
    for name, weight in model.named_parameters():
        if "q_norm" in name:  # Gemma 4 scales scores by 1: with random weights all attention would be to one key
            weight.data.fill_(0.1)
    return model.to(device).eval()


def trio(name, device):
    """Returns one model three times: on ffpa, by transformers in that type, and by transformers in float32."""
    found = build(CONFIGS[name](), device)
    return (
        found,
        build(CONFIGS[name](), device, "eager", like=found),
        build(CONFIGS[name](), device, "eager", torch.float32, found),
    )


@pytest.fixture
def ids(device):
    return torch.randint(3, VOCAB, (2, N), generator=torch.Generator().manual_seed(1)).to(device)


def padding(kind, device):
    return None if PADDINGS[kind] is None else torch.tensor(PADDINGS[kind], device=device)


def assert_as_close(found, same, exact, times: float = 1.5):
    """Allows no more error than transformers' eager attention has in the same type, give or take."""
    error, allowed = (x.float() - exact for x in (found, same))
    assert error.norm() <= times * allowed.norm() + 1e-3 * exact.norm(), (error.norm(), allowed.norm(), exact.norm())


@pytest.fixture(autouse=True)
def nothing_said():
    """Makes a warning of ours an error, where a test does not expect one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="ffpa_attn")
        yield


@contextmanager
def unwritten():
    """Checks that no mask of N² numbers is made."""

    def never(*args, **kwargs):
        raise AssertionError("a mask was written down")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masks.RuleMask, "dense", never)
        patch.setattr(masking_utils, "sdpa_mask", never)
        yield


@pytest.mark.parametrize("kind", PADDINGS)
@pytest.mark.parametrize("name", MODELS)
def test_logits(name, kind, ids, device):
    mask = padding(kind, device)
    rows = slice(None) if mask is None else mask.bool()
    model, same, exact = trio(name, device)
    with torch.no_grad():
        with unwritten():
            found = model(ids, attention_mask=mask, use_cache=False).logits[rows]
        assert_as_close(
            found, same(ids, attention_mask=mask).logits[rows], exact(ids, attention_mask=mask).logits[rows]
        )


@pytest.mark.parametrize("kind", ["none", "left"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients(name, kind, ids, device):
    mask = padding(kind, device)
    labels = ids if mask is None else torch.where(mask.cumsum(1) > 1, ids, -100)

    def gradients(model):
        model.zero_grad()
        model(ids, attention_mask=mask, labels=labels, use_cache=False).loss.backward()
        return torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None])

    models = trio(name, device)
    found = gradients(models[0])
    assert_as_close(found, *map(gradients, models[1:]))
    models[0].train().gradient_checkpointing_enable()
    assert torch.equal(gradients(models[0]), found)


@pytest.mark.parametrize(
    "kind, how", [("left", ""), ("right", ""), ("both", ""), ("holes", ""), ("left", "compiled"), ("both", "compiled")]
)
def test_rows_before_a_text_are_as_with_sdpa(kind, how, ids, device):
    """Whoever masks the labels of padding alone reads the last of these rows: it predicts the first token."""
    torch.compiler.reset()
    mask = padding(kind, device)
    found = build(CONFIGS["llama"](), device)
    same, exact = (build(CONFIGS["llama"](), device, "sdpa", dtype, found) for dtype in (torch.bfloat16, torch.float32))
    if how:
        found.compile(backend="aot_eager")

    def gradients(model):
        loss = model(ids, attention_mask=mask, labels=torch.where(mask.bool(), ids, -100), use_cache=False).loss
        return torch.cat([x.flatten() for x in torch.autograd.grad(loss, list(model.parameters()))])

    assert_as_close(*map(gradients, (found, same, exact)))


def test_a_mask_of_tokens_that_a_batch_shares(ids, device):
    mask, model = padding("left", device), build(CONFIGS["llama"](), device)
    with torch.no_grad():
        found, want = (model(ids, attention_mask=x).logits for x in (mask[:1], mask[:1].expand(2, -1)))
    assert torch.equal(found, want)


@pytest.mark.parametrize("how", ["position_ids", "cu_seq_lens"])
@pytest.mark.parametrize("name", MODELS)
def test_packed_sequences_are_computed_apart(name, how, ids, device):
    model, lengths = build(CONFIGS[name](), device), (7, 1, 12)
    packed = {"position_ids": torch.cat([torch.arange(n) for n in lengths])[None].to(device)}
    rows = ids[:1]
    if how == "cu_seq_lens":
        offsets = torch.tensor([0, 7, 8, 20], dtype=torch.int32, device=device)
        packed |= {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 12, "max_length_k": 12}
    else:  # there are two entries, each of several sequences
        rows = ids
        packed["position_ids"] = packed["position_ids"].expand(2, -1)
    with torch.no_grad():
        with unwritten():
            found = model(rows, use_cache=False, **packed).logits
        apart = [model(part, use_cache=False).logits for part in rows.split(lengths, dim=1)]
    torch.testing.assert_close(found, torch.cat(apart, dim=1), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("how", ["", "compiled"])
def test_a_window_that_layers_do_not_hand_over(how, ids, device):
    """The layers of Qwen2-MoE know of their windows by the mask alone."""
    experts = {
        "num_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    }
    config = transformers.Qwen2MoeConfig(
        **SIZES,
        **experts,
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=0,
        layer_types=["sliding_attention"] * 4,
    )
    model = build(config, device)
    exact = build(config, device, "eager", torch.float32, model)
    same = build(config, device, "eager", like=model)
    run = torch.compile(model, backend="eager") if how else model
    with torch.no_grad():
        assert_as_close(*(f(ids, use_cache=False).logits for f in (run, same, exact)))


@pytest.mark.filterwarnings("default:ffpa_attn")
@pytest.mark.parametrize("how", ["", "compiled"])
@pytest.mark.parametrize("kind", ["none", "left"])
def test_models_with_attention_of_their_own_are_left_to_it(kind, how, ids, device, monkeypatch):
    """transformers asks whether models take functions only where SDPA is asked for."""
    torch.compiler.reset()
    config = transformers.BloomConfig(vocab_size=VOCAB, hidden_size=64, n_layer=2, n_head=4)
    model, mask = build(config, device), padding(kind, device)
    want = build(config, device, "eager", like=model)(ids, attention_mask=mask).logits
    monkeypatch.setattr(ours, "_said_of_traced", set())
    run = torch.compile(model, backend="eager") if how else model
    with pytest.warns(UserWarning, match="Bloom has attention of its own"):
        found = run(ids, attention_mask=mask).logits
    torch.testing.assert_close(found, want)
    monkeypatch.setenv("FFPA_STRICT", "1")
    with pytest.raises(NotImplementedError, match="Bloom has attention of its own.*choose another"):
        build(config, device)(ids, attention_mask=mask)


ENCODER = {
    "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
}  # fmt: skip
BOTH = {
    "vocab_size": VOCAB, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["none", "right"])
@pytest.mark.parametrize("name", ["Splinter", "BigBirdPegasus"])
def test_layers_that_count_on_numbers_get_them(name, kind, ids, device):
    """Nothing tells Splinter's layers that they see both ways, nor BigBirdPegasus's that they do not."""
    model_class = {"Splinter": "SplinterModel", "BigBirdPegasus": "BigBirdPegasusForCausalLM"}[name]
    config = getattr(transformers, f"{name}Config")(**(ENCODER if name == "Splinter" else BOTH))
    model_class, mask = getattr(transformers, model_class), padding(kind, device)
    found, same, exact = (
        model_class._from_config(copy.deepcopy(config), attn_implementation=attention, dtype=dtype).to(device).eval()
        for attention, dtype in (("ffpa", torch.bfloat16), ("eager", torch.bfloat16), ("eager", torch.float32))
    )
    for weight in found.parameters():
        if weight.dim() == 2:
            weight.data.normal_(0, 0.25, generator=torch.Generator(device).manual_seed(weight.shape[0]))
    rows = slice(None) if mask is None else mask.bool()
    for model in (same, exact):
        model.load_state_dict(found.state_dict())
    with torch.no_grad():
        results = [model(ids, attention_mask=mask)[0][rows] for model in (found, same, exact)]
    assert_as_close(*results)


def test_a_model_inside_another_that_counts_on_numbers_gets_them(device):
    """Gemma 4 has such a model for audio, beside that for text, which needs none."""
    config = transformers.Gemma4AudioConfig(num_hidden_layers=1, output_proj_dims=32)
    model_class = transformers.models.gemma4.modeling_gemma4.Gemma4AudioModel
    if model_class._supports_sdpa:
        pytest.skip("this transformers takes it for one that needs none")
    found, want = (
        model_class._from_config(copy.deepcopy(config), attn_implementation=attention).to(device).eval()
        for attention in ("ffpa", "eager")
    )
    found.load_state_dict(want.state_dict())
    sound = torch.randn(2, 128, 128, generator=torch.Generator().manual_seed(0)).to(device)
    there = torch.ones(2, 128, dtype=torch.bool, device=device)
    there[1, 70:] = False
    with torch.no_grad():
        found, want = (model(sound, there).last_hidden_state for model in (found, want))
    assert found.isfinite().all()
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("kind", ["none", "left"])
@pytest.mark.parametrize("name", MODELS)
def test_generation(name, kind, cache, ids, device):
    """With a cache each step's logits are those of the whole text without one."""
    model, mask = build(CONFIGS[name](), device), padding(kind, device)
    if mask is None:
        mask = torch.ones_like(ids)
    how = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    done = model.generate(ids, attention_mask=mask, cache_implementation=cache, disable_compile=True, **how)
    text, steps = done.sequences, torch.stack(done.logits, dim=1)
    mask = torch.cat([mask, torch.ones_like(text[:, N:])], dim=1)
    with torch.no_grad():
        whole = model(text, attention_mask=mask, use_cache=False).logits[:, N - 1 : -1]
    torch.testing.assert_close(steps.float(), whole.float(), atol=0.05, rtol=0.05)


@pytest.mark.parametrize("kind", ["none", "left"])
@pytest.mark.parametrize("name", MODELS)
def test_compile(name, kind, ids, device):
    torch.compiler.reset()
    mask = padding(kind, device)
    rows = slice(None) if mask is None else mask.bool()
    model, same, exact = (model.model for model in trio(name, device))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert_as_close(
            *(f(ids, attention_mask=mask, use_cache=False).last_hidden_state[rows] for f in (compiled, same, exact))
        )


@pytest.mark.parametrize("kind", ["none", "left"])
@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
def test_layers_compiled_on_their_own(name, kind, ids, device):
    """A mask comes to the layers from outside of the graph, and Gemma 4's model has sliced it."""
    torch.compiler.reset()
    model, mask = build(CONFIGS[name](), device), padding(kind, device)
    rows = slice(None) if mask is None else mask.bool()
    want = model(ids, attention_mask=mask, use_cache=False).logits[rows]
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(
        model(ids, attention_mask=mask, use_cache=False).logits[rows], want, atol=0.05, rtol=0.05
    )


@pytest.mark.parametrize("kind", ["padding", "apart", "window"])
def test_compiled_code_slices_masks(kind, device):
    """Gemma 4's layers that share keys with others do so."""
    torch.compiler.reset()
    tokens = torch.tensor(PADDINGS["left"], device=device)[:, :12].bool()
    what = {"padding": {"keys": tokens}, "apart": {"keys": tokens, "offsets": masks._offsets_of_tokens(tokens)}}
    mask = masks.RuleMask((2, 1, 12, 12), True, 4, **what.get(kind, {"device": device}))
    for cut in (lambda m: ~m[:, :, -2:], lambda m: ~m[:, :, :, :4]):
        assert torch.equal(torch.compile(cut, backend="aot_eager", fullgraph=True)(mask), cut(mask))


@pytest.mark.parametrize("masked", [False, True])
def test_exported_with_any_length(masked, ids, device):
    model, length = build(CONFIGS["gemma3"](), device), torch.export.Dim("length", min=2, max=64)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)} if masked else {"input_ids": ids}
    shapes = {name: {1: length} for name in given} | {"use_cache": None}
    exported = torch.export.export(
        model, (), given | {"use_cache": False}, dynamic_shapes=shapes, strict=False
    ).module()
    for n in (5, 20):
        part = {name: x[:, :n] for name, x in given.items()}
        found, want = (f(**part, use_cache=False).logits for f in (exported, model))
        torch.testing.assert_close(found, want, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("kind", ["padding", "packed", "window"])
def test_a_compiled_layer_takes_masks_as_they_are(kind, device):
    torch.compiler.reset()
    shape, tokens = (2, 1, 12, 12), torch.tensor(PADDINGS["left"], device=device)[:, :12].bool()
    offsets = torch.tensor([[0, 5, 12, 20, 24]] * 2, dtype=torch.int32, device=device)
    what = {"padding": {"keys": tokens}, "packed": {"offsets": offsets}, "window": {"device": device}}[kind]
    mask = masks.RuleMask(shape, True, 4, **what)
    layer = Layer()
    compiled = torch.compile(lambda *args: ours.attention(layer, *args)[0], backend="aot_eager", fullgraph=True)
    with unwritten():
        found = compiled(*inputs(device), mask)
    torch.testing.assert_close(found, ours.attention(layer, *inputs(device), mask)[0])


def test_autocast(ids, device):
    model = build(CONFIGS["llama"](), device, dtype=torch.float32)
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        found = model(ids).logits
    exact = build(CONFIGS["llama"](), device, "eager", torch.float32, model)
    torch.testing.assert_close(found.float(), exact(ids).logits, atol=0.03, rtol=0.03)


# ---- the attention function, beside SDPA with a written mask ----


class Layer(torch.nn.Module):
    def __init__(self, is_causal=True):
        super().__init__()
        self.config, self.layer_idx, self.is_causal, self.num_key_value_groups = (
            transformers.LlamaConfig(),
            3,
            is_causal,
            2,
        )


def inputs(device, n_q=12, n_k=12, d=64, d_v=64, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(2)
    shapes = (2, 4, n_q, d), (2, 2, n_k, d), (2, 2, n_k, d_v)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def expected(q, k, v, mask, **rule):
    q, k, v = (x.float() for x in (q, k, v))
    return sdpa_attention_forward(Layer(), q, k, v, mask, is_causal=False, **rule)[0]


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("n_q", [12, 5, 1])
def test_the_layers_rule(n_q, is_causal, window, device):
    q, k, v = inputs(device, n_q)
    found, weights = ours.attention(Layer(is_causal), q, k, v, scaling=0.3, sliding_window=window)
    mask = masks.sees(n_q, 12, is_causal, window, device).expand(2, 4, n_q, 12)
    torch.testing.assert_close(found.float(), expected(q, k, v, mask, scaling=0.3), atol=0.02, rtol=0.02)
    assert weights is None and found.is_contiguous() and found.shape == (2, n_q, 4, 64)


@pytest.mark.parametrize("d, d_v", [(64, 64), (192, 128)])
@pytest.mark.parametrize(
    "kind", ["bool", "additive", "heads", "tokens", "tokens, no causality", "bias", "bias and tokens", "bias and mask"]
)
def test_masks(kind, d, d_v, device):
    q, k, v = inputs(device, d=d, d_v=d_v)
    generator = torch.Generator().manual_seed(3)
    hidden = torch.rand(2, 1, 12, 12, generator=generator).to(device) < 0.4
    hidden[..., 0] = False
    tokens = torch.ones(2, 12, dtype=torch.long, device=device)
    tokens[1, 7:] = 0
    bias = torch.randn(1, 4, 12, 12, generator=generator).to(device)
    causal = masks.sees(12, 12, True, None, device)
    of_tokens = causal & tokens.bool()[:, None, None]
    lowest = torch.finfo(torch.bfloat16).min
    given, bias_given, is_causal, want = {
        "bool": (~hidden, None, None, ~hidden),
        "additive": (torch.where(hidden, lowest, 0.0).bfloat16(), None, None, ~hidden),
        "heads": (bias, None, None, bias),
        "tokens": (tokens, None, None, of_tokens),
        "tokens, no causality": (tokens, None, False, tokens.bool()[:, None, None]),
        "bias": (None, bias, None, torch.where(causal, bias, -torch.inf)),
        "bias and tokens": (tokens, bias, None, torch.where(of_tokens, bias, -torch.inf)),
        "bias and mask": (~hidden, bias, None, torch.where(hidden, -torch.inf, bias)),
    }[kind]
    found, _ = ours.attention(Layer(), q, k, v, given, position_bias=bias_given, is_causal=is_causal)
    torch.testing.assert_close(found.float(), expected(q, k, v, want), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", ["nothing", "tokens", "bool", "additive", "window", "padding", "bias", "heads"])
def test_packed_sequences_beside_masks(kind, compiled, device):
    """Flattening collators say where texts end, models what else rows may see: chunks, images, padding."""
    q, k, v = (
        x.transpose(0, 1).flatten(1, 2)[None] for x in inputs(device, 6, 6)
    )  # two texts of 6 tokens, one after the other
    offsets = torch.tensor([0, 6, 12], dtype=torch.int32, device=device)
    apart = torch.block_diag(*[torch.ones(6, 6)] * 2).bool().to(device)
    hidden = torch.rand(1, 1, 12, 12, generator=torch.Generator().manual_seed(3)).to(device) < 0.3
    hidden &= ~torch.eye(12, dtype=torch.bool, device=device)
    tokens = torch.ones(1, 12, dtype=torch.long, device=device)
    tokens[0, 1] = 0
    bias = torch.randn(1, 4, 12, 12, generator=torch.Generator().manual_seed(4)).to(device)
    causal, no_token = masks.sees(12, 12, True, None, device), tokens.bool()[:, None, None]
    shape = (1, 1, 12, 12)
    given, want = {
        "nothing": (None, causal),
        "tokens": (tokens, causal & no_token),
        "bool": (~hidden, ~hidden),
        "additive": (torch.where(hidden, -torch.inf, 0.5).bfloat16(), ~hidden),
        "window": (masks.RuleMask(shape, True, 3, device=device), masks.sees(12, 12, True, 3, device)),
        "padding": (masks.RuleMask(shape, True, None, tokens.bool(), offsets.repeat(2, 1)), causal & no_token),
        "bias": (None, causal),
        "heads": (~hidden[0], ~hidden),
    }[kind]
    want = (want & apart).expand(1, 4, 12, 12)
    if kind == "bias":
        want = torch.where(want, bias, -torch.inf)

    layer, biases = Layer(), {"position_bias": bias} if kind == "bias" else {}

    def run(q, k, v, given):
        return ours.attention(layer, q, k, v, given, cu_seq_lens_q=offsets, **biases)[0]

    if compiled:
        torch.compiler.reset()
        run = torch.compile(run, backend="eager", fullgraph=True)
    found, exact = run(q, k, v, given), expected(q, k, v, want)
    torch.testing.assert_close(found.float(), exact, atol=0.02, rtol=0.02)


def test_queries_that_a_batch_shares(device):
    q, k, v = inputs(device)
    found, _ = ours.attention(Layer(False), q[:1], k, v)
    torch.testing.assert_close(found, ours.attention(Layer(False), q[:1].expand(2, -1, -1, -1), k, v)[0])


def test_offsets_of_padding():
    keys = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0], [0, 1, 1, 0]]).bool()
    # Each entry has rows of padding, keys of padding, tokens; then comes the rest.
    rows = [0, *(2, 2, 4), *(4, 4, 8), *(8, 8, 9), *(12, 12, 12), *(17, 17, 19), 20, 20]
    columns = [0, *(0, 2, 4), *(4, 4, 8), *(8, 8, 9), *(9, 12, 12), *(12, 17, 19), 19, 20]
    assert masks._offsets_of_tokens(keys).tolist() == [rows, columns]
    mask = masks.RuleMask((5, 1, 4, 4), True, None, keys, masks._offsets_of_tokens(keys))
    found = masks.seen_by(mask.shape, mask.device, True, None, mask).written(mask.shape, mask.device)
    tokens = keys[:, None, None] & keys[:, None, :, None]
    assert torch.equal(found, tokens & masks.sees(4, 4, True, None, mask.device))
    assert [masks._tokens_lie(x) for x in (keys, keys[1:2], torch.tensor([[True, False, True]]))] == [
        [False, True], [True, True], [False, False],
    ]  # fmt: skip


def test_softcap(device):
    q, k, v = inputs(device)
    hidden = torch.where(masks.sees(12, 12, True, None, device), 0.0, -torch.inf)
    found, _ = ours.attention(Layer(), q, k, v, scaling=2.0, softcap=3.0)
    eager = transformers.models.gemma2.modeling_gemma2.eager_attention_forward
    want, _ = eager(Layer().eval(), *(x.float() for x in (q, k, v)), hidden, scaling=2.0, softcap=3.0)
    torch.testing.assert_close(found.float(), want, atol=0.02, rtol=0.02)


def of_sequences(mask_function, position, sequence):
    """Composes it as transformers does, also as before 5.18."""
    if hasattr(masking_utils, "packed_sequence_compatibility_function"):
        return masking_utils.packed_sequence_compatibility_function(mask_function, position, sequence)
    return masking_utils.and_masks(mask_function, masking_utils.packed_sequence_mask_function(sequence))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kind", ["keys", "offsets"])
def test_a_rule_mask_is_the_mask_that_it_stands_for(kind, window, device):
    mask_function = masking_utils.causal_mask_function
    if window:
        mask_function = masking_utils.sliding_window_causal_mask_function(window)
    config = transformers.Gemma3TextConfig(sliding_window=window or 512)
    asked = {"batch_size": 2, "q_length": 12, "kv_length": 12, "config": config, "device": device, "local_size": window}
    if kind == "keys":
        tokens = torch.ones(2, 12, dtype=torch.bool, device=device)
        tokens[1, :5] = False
        asked |= {"attention_mask": tokens, "mask_function": mask_function}
    else:
        position = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, 12).to(device)
        sequence = masking_utils.find_packed_sequence_indices(position)
        asked |= {"mask_function": of_sequences(mask_function, position, sequence), "allow_is_causal_skip": False}
    found = ours.make_mask(**asked)
    asked.pop("config")
    want = masking_utils.sdpa_mask(**{**asked, "allow_is_causal_skip": False})
    assert type(found) is masks.RuleMask and torch.equal(found.dense(), want) and found.offsets is not None
    assert type(found[:, :, -4:, :]) is (masks.RuleMask if kind == "keys" else torch.Tensor)
    for part in (slice(None), slice(-4, None), slice(2, 9), slice(0, 12, 2), slice(12, None)):
        assert torch.equal(found[:, :, part] | False, want[:, :, part])
    assert torch.equal(found[1:, ..., 3:] | False, want[1:, ..., 3:])
    assert torch.equal(~found, ~want) and found.shape == want.shape and found.dtype == want.dtype
    assert torch.equal(copy.deepcopy(found).dense(), want)
    assert torch.equal(torch.logical_not(found, out=torch.empty_like(want)), ~want)
    own = found.clone()
    own[0, 0, 0, 5] = True
    assert type(own) is torch.Tensor and own[0, 0, 0, 5]
    for change in (
        lambda: found.masked_fill_(want, False),
        lambda: found.__setitem__((0, 0, 0, 5), True),
        lambda: torch.logical_not(want, out=found),
    ):
        with pytest.raises(TypeError, match="a rule and holds no numbers to change"):
            change()


def test_what_no_rule_says_is_written_as_for_sdpa(device):
    causal = masking_utils.causal_mask_function
    chunks = masking_utils.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.int, device=device))
    ahead = masking_utils.or_masks(causal, lambda b, h, q, k: k < 3)
    apart = masking_utils.packed_sequence_mask_function(torch.tensor([[0, 0, 0, 1, 1, 1]] * 2, device=device))
    own = {"allow_is_causal_skip": False}
    asked = {"batch_size": 2, "q_length": 6, "kv_length": 6, "device": device}
    for changes in (
        {"mask_function": chunks, "local_size": 4, "config": transformers.Gemma3TextConfig(sliding_window=6)},
        {"mask_function": ahead} | own,
        {"mask_function": masking_utils.and_masks(apart)} | own,
        {"mask_function": masking_utils.and_masks(apart, causal, lambda b, h, q, k: k != 1)} | own,
        {"kv_length": 9},  # a static cache of 6 tokens: the last key is not the last row's
        {"mask_function": masking_utils.bidirectional_mask_function} | own,
    ):
        given = {**asked, **changes}
        found = ours.make_mask(**given)
        given.pop("config", None)
        assert type(found) is torch.Tensor
        assert torch.equal(found, masking_utils.sdpa_mask(**{**given, "allow_is_causal_skip": False}))


def test_a_compiled_window_is_written(device):
    """Some models' layers do not know of their windows."""
    window = masking_utils.sliding_window_causal_mask_function(3)
    asked = {
        "batch_size": 2,
        "q_length": 12,
        "kv_length": 12,
        "mask_function": window,
        "local_size": 3,
        "device": device,
    }
    config = transformers.Gemma3TextConfig(sliding_window=3)
    torch.compiler.reset()
    found = torch.compile(lambda: ours.make_mask(config, **asked), backend="eager", fullgraph=True)()
    want = ours.make_mask(config, **asked)
    assert type(want) is masks.RuleMask and torch.equal(found, want.dense())


@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("kind", ["strided", "types"])
def test_tensors_as_layers_leave_them(kind, how, device):
    q, k, v = inputs(device)
    if kind == "types":  # some norms are kept in float32
        q, k = q.float(), k.float()
    else:  # rows begin anywhere; traced ones have no address yet
        first = 3 if how == "eager" else 0
        q, k, v = (torch.nn.functional.pad(x, (first, 2))[..., first:-2] for x in (q, k, v))
    layer = Layer(False)

    def attend(q, k, v):
        return ours.attention(layer, q, k, v)[0]

    if how == "compiled":
        torch.compiler.reset()
        attend = torch.compile(attend, backend="aot_eager", fullgraph=True)
    found = attend(q, k, v)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected(q, k, v, None), atol=0.02, rtol=0.02)


# ---- sinks ----


def deepseek_v4(**options):
    """The second and fourth layers choose some of their compressed keys; all see a window of the others."""
    few = {name: SIZES[name] for name in SIZES if name not in ("intermediate_size", "num_key_value_heads")}
    kinds = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    return transformers.DeepseekV4Config(
        **few, moe_intermediate_size=64, head_dim=64, sliding_window=8, q_lora_rank=32, o_groups=2, o_lora_rank=16,
        index_n_heads=2, index_head_dim=32, index_topk=3, n_routed_experts=2, num_experts_per_tok=1, num_hash_layers=4,
        hc_mult=2, layer_types=[*kinds, kinds[1]], compress_rates={kinds[1]: 4, kinds[2]: 8},
    )  # fmt: skip


WITH_SINKS = {
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES, **LOCAL, head_dim=64, num_local_experts=2, num_experts_per_tok=2
    ),
    "deepseek_v4": deepseek_v4,
}  # fmt: skip


def trio_with_sinks(name, device):
    """Returns what trio does; sinks are as large as scores, so that a wrong one would show."""
    if name not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {name}")
    found = build(WITH_SINKS[name](), device)
    generator = torch.Generator().manual_seed(4)
    for path, weight in found.named_parameters():
        if path.endswith("sinks"):
            weight.data.copy_(2 * torch.randn(weight.shape, generator=generator))
    models = (
        found,
        build(WITH_SINKS[name](), device, "eager", like=found),
        build(WITH_SINKS[name](), device, "eager", torch.float32, found),
    )
    choose_alike(models)
    return models


def choose_alike(models):
    """Lets the first model, which runs first, choose the keys of each row for all: two may be as good, but for rounding."""
    indexers = [[x for path, x in model.named_modules() if path.endswith("indexer")] for model in models]
    for first, *others in zip(*indexers, strict=True):
        chosen = []  # by one call after another, [B, rows, keys]

        def keep(layer, given, keys, chosen=chosen):
            chosen.append(keys)

        def take(layer, given, keys, chosen=chosen):
            return torch.cat([*chosen, keys[:, sum(x.shape[1] for x in chosen) :]], 1)

        first.register_forward_hook(keep)
        for layer in others:
            layer.register_forward_hook(take)


@pytest.mark.parametrize("how", ["", "compiled"])
@pytest.mark.parametrize("kind", PADDINGS)
@pytest.mark.parametrize("name", WITH_SINKS)
def test_logits_with_sinks(name, kind, how, ids, device):
    if how and (name != "gpt_oss" or kind not in ("none", "left")):
        pytest.skip("DeepSeek-V4 is not to be compiled as a whole" if name != "gpt_oss" else "two kinds will do")
    torch.compiler.reset()
    mask = padding(kind, device)
    rows = slice(None) if mask is None else mask.bool()
    models = trio_with_sinks(name, device)
    run = torch.compile(models[0], backend="aot_eager") if how else models[0]
    with torch.no_grad():
        assert_as_close(*(f(ids, attention_mask=mask, use_cache=False).logits[rows] for f in (run, *models[1:])))


@pytest.mark.parametrize("kind", ["none", "left"])
@pytest.mark.parametrize("name", WITH_SINKS)
def test_gradients_with_sinks(name, kind, ids, device):
    mask = padding(kind, device)
    labels = ids if mask is None else torch.where(mask.cumsum(1) > 1, ids, -100)

    def gradients(model):
        """Returns the gradients of all parameters, and those of sinks again."""
        model(ids, attention_mask=mask, labels=labels, use_cache=False).loss.backward()
        grads = {name: x.grad.flatten().float() for name, x in model.named_parameters() if x.grad is not None}
        return torch.cat(list(grads.values())), torch.cat([x for name, x in grads.items() if name.endswith("sinks")])

    of_all, of_sinks = zip(*map(gradients, trio_with_sinks(name, device)), strict=True)
    assert of_sinks[2].norm() > 0
    assert_as_close(*of_all)
    assert_as_close(*of_sinks, times=3)  # errors of so few numbers differ by chance: by half in one case of twenty


@pytest.mark.parametrize("name", WITH_SINKS)
def test_generation_with_sinks(name, ids, device):
    """Each step's logits are those of eager attention along the same text."""
    models = trio_with_sinks(name, device)
    how = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    done = models[0].generate(ids, attention_mask=torch.ones_like(ids), disable_compile=True, **how)
    with torch.no_grad():
        wanted = [model(done.sequences, use_cache=False).logits[:, N - 1 : -1] for model in models[1:]]
    assert_as_close(torch.stack(done.logits, dim=1), *wanted)


@pytest.mark.parametrize("how", ["dense", "a mask", "a float mask", "packed"])
@pytest.mark.parametrize("called", ["s_aux", "sinks"])
def test_sinks_of_either_name(called, how, device):
    q, k, v = inputs(device)
    sinks = torch.tensor([0.5, 2.0, -1.0, -torch.inf], device=device, requires_grad=True)
    seen = masks.sees(12, 12, True, 5, device)
    given = {"sliding_window": 5}
    if how == "a mask":
        given["attention_mask"] = seen = seen.roll(3, 0).expand(2, 1, 12, 12)  # the window is not applied again
    elif how == "a float mask":
        seen = seen.roll(3, 0)
        given["attention_mask"] = torch.where(seen, 0.0, torch.finfo(q.dtype).min).to(q.dtype).expand(2, 1, 12, 12)
    elif how == "packed":
        offsets = torch.tensor([0, 5, 12, 24], dtype=torch.int32, device=device)
        given |= {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
        of = torch.searchsorted(offsets[1:], torch.arange(24, device=device), right=True).view(2, 1, 12)
        seen = seen & (of[..., None] == of[..., None, :])
    found, _ = ours.attention(Layer(), q, k, v, **{called: sinks}, **given)
    scores = (q.float() @ k.float().repeat_interleave(2, 1).mT / 8).masked_fill(~seen, -torch.inf)
    exact = sinks.detach().clone().requires_grad_()
    joined = torch.cat([scores, exact.view(1, 4, 1, 1).expand(2, -1, 12, -1)], -1)
    there = torch.where(joined.isneginf().all(-1, keepdim=True), 0.0, joined)
    want = (there.softmax(-1)[..., :-1].masked_fill(~seen, 0.0) @ v.float().repeat_interleave(2, 1)).transpose(1, 2)
    torch.testing.assert_close(found.float(), want, atol=0.02, rtol=0.02)
    grad = torch.randn_like(want)
    (got,), (wanted,) = (torch.autograd.grad(x, y, grad.to(x)) for x, y in ((found, sinks), (want, exact)))
    torch.testing.assert_close(got, wanted, atol=0.1, rtol=0.02)


# ---- models that look up a class by the implementation's name ----


def sam_config():
    vision = {"image_size": 64, "patch_size": 16, "global_attn_indexes": [1], "window_size": 2, "num_pos_feats": 32}
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "mlp_dim": 64, "num_hidden_layers": 2}
    return transformers.SamConfig(
        vision_config={**vision, **sizes, "output_channels": 64},
        prompt_encoder_config={"hidden_size": 64, "image_size": 64, "patch_size": 16, "mask_input_channels": 4},
        mask_decoder_config={**sizes, "attention_downsample_rate": 2, "iou_head_hidden_dim": 16},
    )


def make_sam(attention, dtype, like=None):
    torch.manual_seed(3)
    model = transformers.SamModel._from_config(sam_config(), attn_implementation=attention, dtype=dtype)
    if like is not None:
        model.load_state_dict(like.state_dict())
    return model


def masks_of_sam(model, device):
    pixels = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(4))
    points = torch.tensor([[[[10.0, 20.0]]]])
    given = {"pixel_values": pixels, "input_points": points}
    return model.to(device)(**{name: x.to(device, model.dtype) for name, x in given.items()}).pred_masks.float()


@pytest.mark.parametrize("how", ["evaluated", "checkpointed"])
def test_sam(how, device, monkeypatch):
    taken = []
    monkeypatch.setattr(sdpa_override, "ffpa", lambda *x, **y: (taken.append(x), ffpa_attn.ffpa(*x, **y))[1])
    found = make_sam("ffpa", torch.bfloat16)
    same, exact = (make_sam("eager", dtype, like=found) for dtype in (torch.bfloat16, torch.float32))
    if how == "checkpointed":
        found.train().gradient_checkpointing_enable()
        masks_of_sam(found, device).sum().backward()
        assert len(taken) == 4 and all(x.grad is None or x.grad.isfinite().all() for x in found.parameters())
        return
    with torch.no_grad():
        got, by_eager, truth = (masks_of_sam(model.eval(), device) for model in (found, same, exact))
    assert len(taken) == 2
    assert (got - truth).abs().max() <= 2 * (by_eager - truth).abs().max() + 1e-6
    assert pickle.loads(pickle.dumps(found)) is not None


def tables_of_attention():
    """`register` reaches the tables of all installed models, whether their modules were imported before it or after."""
    folder = Path(transformers.models.__file__).parent
    for path in sorted(folder.glob("*/modeling_*.py")):
        if "ATTENTION_CLASSES[" in path.read_text():
            yield f"transformers.models.{path.parent.name}.{path.stem}"


@pytest.mark.parametrize("module", tables_of_attention())
def test_every_table_of_attention_has_ours(module, monkeypatch):
    code = importlib.import_module(module)
    ours.register("ffpa_too")
    for name, table in vars(code).items():
        if name.endswith("ATTENTION_CLASSES"):
            assert {"ffpa", "ffpa_too"} <= table.keys() and table["ffpa"] is table["ffpa_too"]
            assert issubclass(table["ffpa"], table.get("sdpa", table["eager"]))


def test_a_class_that_calls_nothing_says_so():
    config = transformers.GPTNeoConfig(
        hidden_size=64,
        num_layers=2,
        attention_types=[[["global", "local"], 1]],
        num_heads=4,
        vocab_size=20,
        bos_token_id=1,
        eos_token_id=2,
    )
    with pytest.warns(UserWarning, match="GPTNeo has attention of its own.*choose another attn_implementation"):
        model = transformers.GPTNeoForCausalLM._from_config(config, attn_implementation="ffpa")
    same = transformers.GPTNeoForCausalLM._from_config(config, attn_implementation="eager")
    same.load_state_dict(model.state_dict())
    ids = torch.arange(7)[None]
    torch.testing.assert_close(model.eval()(ids).logits, same.eval()(ids).logits)


# ---- what ffpa cannot do ----


def has_20(config):
    config.head_dim = 20


def drops(config):
    config.attention_dropout = 0.5


UNSUPPORTED = {
    "dropout": (drops, "bfloat16", r"dropout of 0\.5.*attention_dropout=0\.0"),
    "type": (lambda config: None, "float32", r"float32.*dtype=torch\.bfloat16"),
    "head dim": (has_20, "bfloat16", r"head dims 20 and 20.*multiples of 8"),
}


@pytest.mark.parametrize(
    "config, way_out",
    [
        (transformers.GPT2Config(), r"set attn_pdrop=0\.0 in the model's config"),
        (transformers.BertConfig(), r"set attention_probs_dropout_prob=0\.0 in"),
        (transformers.T5Config(), r"set the dropout of attention to 0 in the model's config"),
        (None, r"set the dropout of attention to 0 in"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_dropout_is_named_as_the_model_spells_it(config, way_out):
    layer = Layer(False)
    layer.config = config
    if config is None:
        del layer.config
    q, k, v = inputs("cpu", 5)
    with pytest.warns(UserWarning, match=way_out):
        ours.attention(layer, q, k, v, dropout=0.25)


@pytest.mark.parametrize("autocast", [False, True])
def test_autocast_is_no_way_out_for_doubles(autocast):
    q, k, v = inputs("cpu", 5, dtype=torch.float64)
    with torch.autocast("cpu", enabled=autocast), pytest.warns(UserWarning, match=r"float64.*dtype=torch.bfloat16\. "):
        ours.attention(Layer(False), q, k, v)


@pytest.mark.parametrize("kind", ["none", "left"])
@pytest.mark.parametrize("feature", UNSUPPORTED)
def test_a_feature_that_is_missing_is_named_once_and_computed(feature, kind, ids, device, monkeypatch):
    change, dtype, message = UNSUPPORTED[feature]
    config, mask = CONFIGS["llama"](), padding(kind, device)
    change(config)
    rows = slice(None) if mask is None else mask.bool()
    model = build(config, device, dtype=getattr(torch, dtype)).train()
    with warnings.catch_warnings(record=True) as said, torch.no_grad():
        warnings.simplefilter("always")
        torch.manual_seed(5)
        found = [model(ids, attention_mask=mask).logits[rows] for _ in range(2)][1]
    said = [str(x.message) for x in said if "ffpa_attn" in str(x.message)]
    assert len(said) == 1 and "LlamaAttention of layer 0" in said[0]
    assert re.search(message, said[0])
    if feature != "dropout":
        want = build(config, device, "sdpa", getattr(torch, dtype), model)(ids, attention_mask=mask).logits[rows]
        torch.testing.assert_close(found, want, atol=0.01, rtol=0.01)
    monkeypatch.setenv("FFPA_STRICT", "1")
    with pytest.raises(NotImplementedError, match="FFPA_STRICT=1.*layer 0.*" + message):
        model(ids, attention_mask=mask)


def test_a_causal_layer_that_is_left_to_sdpa_needs_no_mask(device, monkeypatch):
    warnings.filterwarnings("ignore", message="ffpa_attn")
    seen = []
    sdpa = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *args, **options: (seen.append((options["attn_mask"], options["is_causal"])), sdpa(*args, **options))[1],
    )
    for n_q, is_causal, none in ((12, True, True), (1, True, True), (5, True, False), (5, False, True)):
        q, k, v = inputs(device, n_q, dtype=torch.float32)
        found, _ = ours.attention(Layer(is_causal), q, k, v)
        assert (seen[-1][0] is None) == none and bool(seen[-1][1]) == (n_q == 12), seen
        want = expected(q, k, v, masks.sees(n_q, 12, is_causal, None, device).expand(2, 4, n_q, 12))
        torch.testing.assert_close(found, want)


@pytest.mark.filterwarnings("default:ffpa_attn")
def test_what_ffpa_cannot_do_compiles(ids, device, monkeypatch):
    torch.compiler.reset()
    monkeypatch.setattr(ours, "_said_of_traced", set())
    model = build(CONFIGS["llama"](), device, dtype=torch.float32)
    with torch.no_grad(), pytest.warns(UserWarning, match=r"LlamaAttention of layer 0.*float32.*dtype=") as said:
        found = torch.compile(model, backend="eager", fullgraph=True)(ids, use_cache=False).logits
    assert len([x for x in said if "ffpa_attn" in str(x.message)]) == 1
    torch.testing.assert_close(found, build(CONFIGS["llama"](), device, "sdpa", torch.float32, model)(ids).logits)


@pytest.mark.filterwarnings("default:ffpa_attn")
def test_dropout_compiles_for_any_number(ids, device, monkeypatch):
    torch.compiler.reset()
    monkeypatch.setattr(ours, "_said_of_traced", set())
    config = CONFIGS["llama"]()
    config.attention_dropout = 0.1
    model = build(config, device).model.train()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch.no_grad(), pytest.warns(UserWarning, match="LlamaAttention of layer 0 has dropout in attention"):
        assert compiled(ids, use_cache=False).last_hidden_state.isfinite().all()


@pytest.mark.filterwarnings("default:ffpa_attn")
def test_sinks_of_each_row_are_left_to_the_models_own_eager_function(device, monkeypatch):
    """Those of Inkling 2 are of this kind."""
    q, k, v = inputs(device)
    sinks = torch.zeros(2, 4, 12, 1, device=device)
    monkeypatch.setattr(sys.modules[__name__], "eager_attention_forward", lambda *_, sinks, **__: (sinks, None), False)
    with pytest.warns(UserWarning, match="Layer of layer 3 has attention sinks of each row"):
        assert ours.attention(Layer(), q, k, v, sinks=sinks)[0] is sinks


@pytest.mark.parametrize("name", ["indices", "block_indices"])
def test_chosen_keys_are_refused(name, device):
    """Only for transformers' own functions do layers that choose keys write them into the mask."""
    chosen = torch.zeros(2, 12, 3, dtype=torch.int32, device=device)
    with pytest.raises(NotImplementedError, match=f"Layer chooses the keys.*`{name}`.*attn_implementation='sdpa'"):
        ours.attention(Layer(), *inputs(device), **{name: chosen})
    assert ours.attention(Layer(), *inputs(device), **{name: None})[0].shape == (2, 12, 4, 64)


@pytest.mark.filterwarnings("default:ffpa_attn")
def test_packed_sequences_with_a_missing_feature(device):
    q, k, v = (x[:1] for x in inputs(device, dtype=torch.float32))
    offsets = torch.tensor([0, 5, 12], dtype=torch.int32, device=device)
    with pytest.warns(UserWarning, match="float32"):
        found, _ = ours.attention(Layer(), q, k, v, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets)
    parts = [slice(0, 5), slice(5, 12)]
    want = [
        expected(q[:, :, p], k[:, :, p], v[:, :, p], masks.sees(*[p.stop - p.start] * 2, True, None, device))
        for p in parts
    ]
    torch.testing.assert_close(found, torch.cat(want, dim=1))


def test_attention_weights_come_from_the_eager_function(ids, device):
    model = build(CONFIGS["llama"](), device)
    with pytest.warns(UserWarning, match="output_attentions"), torch.no_grad():
        _, weights = ours.attention(model.model.layers[0].self_attn, *inputs(device), output_attentions=True)
    assert weights.shape == (2, 4, 12, 12) and not weights.triu(1).any()


@pytest.mark.parametrize("found, says", [("4.40.1", "is 4.40.1"), ("5.3.9", "is 5.3.9"), (None, "not installed")])
def test_too_old_a_transformers_is_told_what_is_needed(found, says, monkeypatch):
    def version(name):
        if found is None:
            raise ours.importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(ours.importlib.metadata, "version", version)
    with pytest.raises(ImportError, match=rf"{says}.*5\.4 or newer.*pip install"):
        ours.register()


@pytest.mark.parametrize("name", ["my_flash", "Flash", "SDPA", "eager", "paged|ffpa", "kernels/ffpa"])
def test_names_that_transformers_takes_for_its_own(name):
    with pytest.raises(ValueError, match="for its own; use 'ffpa'"):
        ours.register(name)


def test_importing_ffpa_attn_imports_none_of_them():
    code = "import sys, ffpa_attn; print([x for x in ('transformers', 'diffusers', 'accelerate') if x in sys.modules])"
    path = str(Path(__file__).parents[2] / "ffpa")
    done = subprocess.run([sys.executable, "-c", code], cwd=path, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_recipe_of_a_training_step_runs():
    script = Path(__file__).parents[2] / "examples" / "gemma_step.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    losses = [line.split("losses ")[1].split() for line in done.stdout.splitlines() if "losses" in line]
    assert len(losses) == 2 and len(losses[0]) == 4, done.stdout + done.stderr
    (first, *later), (want, *want_later) = ([float(x) for x in of] for of in losses)
    assert abs(first - want) < 0.0015  # nothing is learned yet; texts seen as one would differ by 0.002
    torch.testing.assert_close(torch.tensor(later), torch.tensor(want_later), atol=0.02, rtol=0)
    assert later[-1] < first - 0.1
