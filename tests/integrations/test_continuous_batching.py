"""Tests `model.generate_batch` with `attn_implementation="ffpa_flash_3"` on tiny random models: their tokens are those
that the same weights give in float32 without ffpa.
"""

import functools
import sys
import types
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).parents[2] / "bench"))

import continuous_batching as bench  # noqa: E402
from ffpa_attn.integrations import continuous_batching, flash_api  # noqa: E402
from ffpa_attn.integrations import transformers as ours  # noqa: E402
from transformers import modeling_flash_attention_utils as flash_utils  # noqa: E402
from transformers.generation.continuous_batching import continuous_api  # noqa: E402
from transformers.integrations import hub_kernels  # noqa: E402

ours.register()
NAME = continuous_batching.NAME
RELEASE = tuple(map(int, transformers.__version__.split(".")[:2]))
REFUSED = ("softcap", "window") if RELEASE < (5, 19) else ()
REFUSED += ("sinks",) if RELEASE < (5, 16) else ()  # that model has windows
VOCAB, OUTPUT = 97, 12
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
    "tie_word_embeddings": False,
}  # fmt: skip
LOCAL = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
CONFIGS = {
    "llama128": lambda: transformers.LlamaConfig(**SIZES, head_dim=128),
    "llama512": lambda: transformers.LlamaConfig(**SIZES, head_dim=512),
    "qwen128": lambda: transformers.Qwen3Config(**SIZES, head_dim=128),
    "qwen512": lambda: transformers.Qwen3Config(**SIZES, head_dim=512),
    "window": lambda: transformers.MistralConfig(**SIZES, head_dim=320, sliding_window=8),
    "softcap": lambda: transformers.Gemma2Config(
        **SIZES, **LOCAL, head_dim=64, query_pre_attn_scalar=1, attn_logit_softcapping=1.0
    ),
    "sinks": lambda: transformers.GptOssConfig(
        **{**SIZES, "intermediate_size": 32}, **LOCAL, head_dim=64, num_local_experts=4
    ),
}  # fmt: skip
PROMPTS = [torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 17, 40, 33)]


def build(name, device, attention=NAME, dtype=torch.float16):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation=attention)
    for weight in model.parameters():
        if weight.dim() > 1:
            # With these, attention counts, and few logits are close to one another.
            weight.data.normal_(0, weight.shape[-1] ** -0.5)
    return model.to(device=device, dtype=dtype).eval()


def generation():
    return transformers.GenerationConfig(max_new_tokens=OUTPUT, do_sample=False, eos_token_id=-1, pad_token_id=0)


def batched(model, page=32, **settings) -> list[list[int]]:
    """Returns the tokens of generate_batch, where prompts are cut into chunks."""
    names = set(continuous_api.ContinuousBatchingConfig.__dataclass_fields__)
    settings |= {"page_size" if "page_size" in names else "block_size": page}
    settings |= {"auto_switch_to_flash": False} if "auto_switch_to_flash" in names else {}
    if model.config.model_type == "gpt_oss" and "use_cuda_graph" in names:
        settings["use_cuda_graph"] = False  # a capture fails in transformers' experts, whatever the attention
    config = continuous_api.ContinuousBatchingConfig(num_blocks=32, max_batch_tokens=48, **settings)
    results = model.generate_batch(
        inputs=PROMPTS, generation_config=generation(), continuous_batching_config=config, progress_bar=False
    )
    errors = [x.error for x in results.values() if x.error]
    if errors or len(results) != len(PROMPTS):  # transformers logs errors
        raise RuntimeError(f"{len(results)} results, {errors[:1]}")
    return [x.generated_tokens for x in results.values()]


@functools.cache
def exact(name, device, dtype) -> tuple[list[torch.Tensor], float]:
    """Returns the logits, [OUTPUT, VOCAB], of the tokens that follow each prompt by eager attention in float32, one
    prompt after the other; and by how much a logit of that type may be off.
    """
    model, rounded = (build(name, device, "eager", of) for of in (torch.float32, dtype))
    logits, slack = [], 0.0
    for prompt in PROMPTS:
        row = torch.tensor([prompt], device=device)
        made = model.generate(row, generation_config=generation())
        with torch.no_grad():
            both = [x(made[:, :-1]).logits[0, len(prompt) - 1 :].float() for x in (model, rounded)]
        logits.append(both[0])
        slack = max(slack, 2 * (both[0] - both[1]).abs().max().item())
    return logits, slack


def assert_same(found, name, device, dtype=torch.float16):
    """Checks tokens up to the first one that another is as likely as but for rounding: what follows it may differ."""
    logits, slack = exact(name, device, dtype)
    compared = 0
    for tokens, rows in zip(found, logits, strict=True):
        assert len(tokens) == OUTPUT
        same = next(
            (i for i, (token, row) in enumerate(zip(tokens, rows, strict=True)) if token != row.argmax()), OUTPUT
        )
        assert same == OUTPUT or rows[same].max() - rows[same, tokens[same]] <= slack, (name, tokens, same)
        compared += same
    least = 0.7 if dtype == torch.float16 else 0.5  # bfloat16 has more near ties, after which nothing is compared
    assert compared >= least * OUTPUT * len(PROMPTS), compared


@pytest.fixture
def calls(monkeypatch):
    """Counts how often transformers calls each of our functions."""
    counts = {}

    def counted(name):
        function = getattr(flash_api, name)

        @functools.wraps(function)
        def counting(*args, **options):
            counts[name] = counts.get(name, 0) + 1
            return function(*args, **options)

        return counting

    names = "flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"
    module = types.SimpleNamespace(**{name: counted(name) for name in names})
    monkeypatch.setattr(continuous_batching, "flash_api", module)
    monkeypatch.setattr(flash_utils, "_loaded_implementation", None)
    yield counts
    monkeypatch.undo()
    flash_utils._loaded_implementation = None  # what it has loaded counts


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens(name, device, calls):
    if name in REFUSED:
        with pytest.raises(RuntimeError):
            batched(build(name, device))
        return
    assert_same(batched(build(name, device)), name, device)
    assert calls["flash_attn_varlen_func"] >= SIZES["num_hidden_layers"]


def test_tokens_in_bfloat16(device):
    assert_same(batched(build("llama512", device, dtype=torch.bfloat16)), "llama512", device, torch.bfloat16)


@pytest.mark.parametrize("name", ["llama128", "qwen512"])
def test_tokens_of_transformers_own(name, device):
    assert_same(batched(build(name, device, "paged|eager")), name, device)


def test_another_attention_gives_other_tokens(device, monkeypatch):
    def shifted(*args, **options):
        return flash_api.flash_attn_varlen_func(*args, **{**options, "causal": False})

    functools.update_wrapper(shifted, flash_api.flash_attn_varlen_func)
    module = types.SimpleNamespace(**{**vars(flash_api), "flash_attn_varlen_func": shifted})
    monkeypatch.setattr(continuous_batching, "flash_api", module)
    monkeypatch.setattr(flash_utils, "_loaded_implementation", None)
    with pytest.raises(AssertionError):
        assert_same(batched(build("llama128", device)), "llama128", device)
    flash_utils._loaded_implementation = None


@pytest.fixture
def decoding_in_pages(device, monkeypatch):
    """Has transformers decode on its pages on a CPU, too: nothing but its check asks for a GPU."""
    initialization = pytest.importorskip("transformers.generation.continuous_batching.initialization")
    if device == "cpu":
        monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", lambda *args, **options: None)


@pytest.mark.parametrize("page", [16, 256])
@pytest.mark.parametrize("name", ["llama512", "qwen128"])
def test_decoding_reads_pages_where_they_lie(name, page, device, calls, decoding_in_pages):
    assert_same(batched(build(name, device), page, max_blocks_per_request=4), name, device)
    assert calls["flash_attn_with_kvcache"] >= SIZES["num_hidden_layers"]  # a captured graph calls nothing


def test_pages_have_a_multiple_of_16_rows(device, decoding_in_pages, caplog):
    with pytest.raises(RuntimeError):
        batched(build("llama128", device), 8, max_blocks_per_request=16)
    assert "`k_cache` has pages of 8 rows; allowed: multiples of 16" in caplog.text


def test_generate_without_batches(device):
    model = build("llama512", device)
    longest = max(map(len, PROMPTS))
    rows = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in PROMPTS], device=device)
    found = model.generate(rows, attention_mask=(rows != 0).long(), generation_config=generation())
    assert_same(found[:, longest:].tolist(), "llama512", device)


def test_our_functions_come_back_after_others(device, monkeypatch):
    def never(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
        raise AssertionError("another implementation is called")

    load = hub_kernels.load_and_register_attn_kernel
    other = types.SimpleNamespace(flash_attn_varlen_func=never, flash_attn_func=never, flash_attn_with_kvcache=never)
    monkeypatch.setattr(
        hub_kernels, "load_and_register_attn_kernel", lambda name, *args, **options: (
            other if name == "other_flash" else load(name, *args, **options)
        ),
    )  # fmt: skip
    model = build("qwen128", device)
    flash_utils.lazy_import_flash_attention("other_flash")
    assert flash_utils._flash_varlen_fn is never
    assert_same(batched(model), "qwen128", device)


@pytest.mark.parametrize("name", ["ffpa", "another"])
def test_our_other_names_say_what_to_write(name, device):
    ours.register(name)
    model = build("llama128", device, name)
    with pytest.raises(ValueError, match=f"{name!r} does not serve generate_batch.* write '{NAME}'"):
        batched(model)
    model.set_attn_implementation(NAME)
    assert_same(batched(model), "llama128", device)


def test_models_that_cannot_are_refused(device, monkeypatch):
    with pytest.raises(ValueError, match=r"the model has dtype torch.float32; allowed: .* load it with dtype="):
        batched(build("llama128", device, dtype=torch.float32))
    model = build("llama128", device)
    monkeypatch.setattr(transformers.LlamaPreTrainedModel, "_supports_flash_attn", False)
    with pytest.raises(ValueError, match="LlamaForCausalLM does not declare .*_supports_flash_attn"):
        batched(model)
    with pytest.raises(ValueError, match="Llama does not declare .*_supports_flash_attn"):
        model(torch.tensor(PROMPTS[:1], device=device))


def test_what_older_releases_lose_is_refused():
    calls, module = [], types.SimpleNamespace
    older, newer = (
        continuous_batching._refusing(lambda *args, **options: calls.append(options), release)
        for release in ("5.15.1", "5.16.0")
    )
    newer(module(sliding_window=8), 1, 2, 3, None, sliding_window=8, softcap=None)
    older(module(), 1, 2, 3, None, sliding_window=None)
    assert len(calls) == 2
    for attention, attributes, options in (
        (newer, {}, {"softcap": 5.0}),
        (newer, {}, {"sliding_window": 8}),
        (older, {"sliding_window": 8}, {"sliding_window": 8}),
    ):
        with pytest.raises(
            NotImplementedError, match=f"SimpleNamespace has `{next(iter(options))}`.*transformers>=5.19"
        ):
            attention(module(**attributes), 1, 2, 3, None, **options)


def test_a_release_that_loads_otherwise_is_named(monkeypatch):
    load = hub_kernels.load_and_register_attn_kernel
    monkeypatch.setattr(flash_utils, "_lazy_imports", lambda name: (print,) * 5)
    assert not continuous_batching._is_loaded()
    monkeypatch.delattr(hub_kernels, "load_and_register_attn_kernel")
    assert not continuous_batching._is_loaded()
    monkeypatch.undo()
    monkeypatch.setattr(hub_kernels, "load_and_register_attn_kernel", load)
    monkeypatch.setattr(continuous_batching, "when_imported", lambda *args: None)
    monkeypatch.setattr(continuous_batching, "_is_loaded", lambda: False)
    with pytest.warns(
        UserWarning, match=rf"transformers {transformers.__version__} loads .* run generate_batch with 'sdpa'"
    ):
        continuous_batching._register_once.__wrapped__()
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        continuous_batching.register("ffpa")


@pytest.mark.skipif(RELEASE < (5, 12), reason="a manager that stays serves one call there")
def test_bench(device, monkeypatch):
    monkeypatch.setattr(flash_utils, "_loaded_implementation", None)
    work = replace(
        bench.QUICK, requests=5, prompt=9, output=3
    )  # an answer parts at a near tie of bfloat16, which few tokens meet
    found = bench.measure(work, device, iters=1)
    flash_utils._loaded_implementation = None
    assert found["calls"]["flash_attn_varlen_func"] and found["same_tokens"] > 0.5
    assert all(len(times) == 1 and times[0] > 0 for times in found["seconds"].values())
    found["host_us"] = bench.host_us_of_a_layer(work, device, rounds=1, calls=3)
    assert all(own > 0 and whole > 0 for own, whole in found["host_us"].values())
    assert "makes" in (said := bench.report(found)) and all(
        name in said for name in (NAME, "| sdpa |", *bench.FUNCTIONS)
    )
