"""Runs the backend for SGLang inside SGLang's own classes: .dev/serving_check.sh sglang, which reads these lines.

releases: 0.5.22 0.5.23
needs: msgspec regex psutil orjson pydantic requests
alone: dill

By hand, with FOLDER for the unzipped wheel (its .py files suffice), in an environment that has those packages:
    PYTHONPATH=ffpa:tests:FOLDER python -m pytest tests/integrations/serving/check_sglang.py

Whatever else SGLang imports is stood in for. Calls run on the reference path, and some in the emulator.
"""

import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
import time
import types
from pathlib import Path
from unittest import mock

import oracle
import pytest
import tomllib
import torch
from absent_modules import StandIn, stand_in_for_what_is_missing
from ffpa_attn.integrations import sglang as plugin
from ffpa_attn.integrations.sglang import step
from ffpa_attn.testing import emulate

ROOT = Path(__file__).resolve().parents[3]
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
LENGTHS = [37, 127, 16]
_OF_KERNELS = Path(importlib.util.find_spec("sglang").submodule_search_locations[0]) / "kernels" / "jit"
for _name in ("include", "csrc"):  # SGLang looks whether the sources of its kernels lie here
    (_OF_KERNELS / _name).mkdir(parents=True, exist_ok=True)
stand_in_for_what_is_missing("sglang")
_PATCHES = "sglang.srt.utils.hf_transformers_patches"  # of classes of transformers
sys.modules[_PATCHES] = StandIn(_PATCHES)

from sglang.srt import plugins, runtime_context  # noqa: E402
from sglang.srt.arg_groups import choices, kv_cache_hook, model_hook, overrides, resolution_hooks  # noqa: E402
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS  # noqa: E402
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend  # noqa: E402
from sglang.srt.layers.radix_attention import AttentionType  # noqa: E402
from sglang.srt.model_executor.model_runner_components import misc_utils  # noqa: E402
from sglang.srt.plugins import hook_registry  # noqa: E402
from sglang.srt.speculative.draft_utils import DraftBackendFactory  # noqa: E402
from sglang_arguments import Config, arguments, resolved_as_a_whole, resolved_by_the_last_step  # noqa: E402
from sglang_server import ABSORBED, ForwardMode, Server, backend_of, forward, forward_latent, layer  # noqa: E402

MODES = [
    (ForwardMode.DECODE, [1, 1, 1]),
    (ForwardMode.EXTEND, [5, 1, 12]),
    (ForwardMode.MIXED, [1, 7, 1]),
    (ForwardMode.TARGET_VERIFY, [3, 3, 3]),
    (ForwardMode.DRAFT_EXTEND_V2, [4, 4, 4]),
]
in_each_mode = pytest.mark.parametrize("mode, rows", MODES, ids=[mode.name.lower() for mode, _ in MODES])


# ---- arguments ----


@pytest.fixture(scope="module", autouse=True)
def server_that_has_loaded_the_plugin():
    """Lets SGLang load the entry point that pyproject.toml declares, and then start with such arguments."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["sglang.srt.plugins"]
    points = [importlib.metadata.EntryPoint(*item, "sglang.srt.plugins") for item in declared.items()]
    assert "ffpa" not in choices.ATTENTION_BACKEND_CHOICES
    with mock.patch.object(plugins, "entry_points", lambda group: points if group == "sglang.srt.plugins" else []):
        plugins.load_plugins()
    points[0].load()()  # a second time changes nothing
    assert "ffpa" in ATTENTION_BACKENDS and choices.ATTENTION_BACKEND_CHOICES.count("ffpa") == 1
    args = arguments(model_path="dummy")
    args.resolve_once()
    runtime_context.publish(args, role="scheduler")
    assert runtime_context.attention_backends() == ("ffpa", "ffpa")
    schedule = runtime_context.get_schedule()
    assert not schedule.disable_chunked_prefix_cache
    with pytest.raises(ValueError, match="no longer latent.*--disable-chunked-prefix-cache"):
        backend_of(Server("latent", [ABSORBED], [3]))
    misc_utils.maybe_disable_chunked_prefix_cache(use_mla_backend=True, is_draft_worker=False)  # as a runner does
    assert schedule.disable_chunked_prefix_cache


def test_releases_without_hooks_are_named(monkeypatch):
    monkeypatch.setattr(plugin, "_version", lambda: "0.9.0")
    monkeypatch.delattr(hook_registry, "HookRegistry")
    with pytest.raises(ImportError, match=r"SGLang is 0\.9\.0, which lacks .* tried with 0\.5\.22, 0\.5\.23"):
        plugin.register()


@pytest.mark.parametrize(
    "architecture, words",
    [
        ("Gemma4ForCausalLM", "Gemma4 only supports"),
        ("Gemma4ForConditionalGeneration", "Gemma4 only supports"),
        ("Gemma4UnifiedForConditionalGeneration", "Gemma4 only supports"),
        ("GptOssForCausalLM", "GptOssForCausalLM requires one of"),
    ],
)
def test_models_with_lists_take_it(architecture, words):
    own = model_hook.handle_model_specific_adjustments
    resolution_hooks.run_hook(own, arguments(architecture))
    with pytest.raises(AssertionError, match=words):
        own(arguments(architecture))  # SGLang's own step, without ours around it
    with pytest.raises(AssertionError, match=words):
        resolution_hooks.run_hook(own, arguments(architecture, attention_backend="flashinfer"))
    for module in (overrides, kv_cache_hook, model_hook):  # everybody else sees what was chosen
        assert module.attention_backends_of(arguments(architecture)) == ("ffpa", "ffpa")


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma4ForCausalLM"])
@pytest.mark.parametrize(
    "given, size",
    [
        ({}, 64),
        ({"attention_backend": "triton", "decode_attention_backend": "ffpa"}, 64),
        ({"attention_backend": "triton", "speculative_draft_attention_backend": "ffpa"}, 64),
        ({"attention_backend": "triton"}, 1),
        ({"page_size": 16}, 16),
    ],
    ids=str,
)
def test_pages_have_a_size_where_none_is_given(monkeypatch, architecture, given, size):
    args = resolved_as_a_whole(monkeypatch, architecture=architecture, **given)
    assert args.page_size == size
    names = {"attention_backend": "ffpa"} | given
    assert model_hook.attention_backends_of(args)[1] == names.get(
        "decode_attention_backend", names["attention_backend"]
    )


def test_a_page_size_that_was_said_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="`--page-size` is 1; .*pass --page-size 64"):
        resolved_as_a_whole(monkeypatch, page_size=1)


@pytest.mark.parametrize(
    "given, words",
    [
        ({"page_size": 1}, "--page-size 64"),
        ({"page_size": 24}, "--page-size 64"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype fp8_e4m3"),
        ({"speculative_eagle_topk": 4}, "trees"),
        ({"dcp_size": 2}, "--dcp-size"),
        ({"attn_cp_size": 2}, "--attn-cp-size"),
        ({"dllm_algorithm": "LowConfidence"}, "--dllm-algorithm"),
        ({"cuda_graph_config": Config(prefill=Config(backend="full"))}, "--cuda-graph-backend-prefill"),
    ],
    ids=str,
)
def test_arguments_are_refused(given, words):
    with pytest.raises(ValueError, match=words):
        resolved_by_the_last_step(given)
    resolved_by_the_last_step(given, attention_backend="triton")  # others' affairs are not ours


@pytest.mark.parametrize(
    "given", [{}, {"kv_cache_dtype": "fp8_e4m3"}, {"speculative_eagle_topk": 1}, {"page_size": 16}], ids=str
)
def test_arguments_are_taken(given):
    resolved_by_the_last_step(given)


@pytest.mark.parametrize("mode", ["compact", "cap-accept"])
def test_drafts_of_different_lengths_are_refused(monkeypatch, mode):
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", mode)
    with pytest.raises(ValueError, match=f"SGLANG_RAGGED_VERIFY_MODE is {mode}; .*set it to static"):
        resolved_by_the_last_step({"speculative_algorithm": "DSPARK"})
    resolved_by_the_last_step({"speculative_algorithm": "EAGLE"})
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "static")
    resolved_by_the_last_step({"speculative_algorithm": "DSPARK"})


# ---- the backend ----


def test_members_are_answered():
    """Each member that the base class leaves to others is there, or belongs to a thing that a flag says is not."""
    backend = importlib.import_module("ffpa_attn.integrations.sglang.backend").FfpaBackend  # it imports SGLang
    members = {name: member for name, member in vars(AttentionBackend).items() if inspect.isfunction(member)}
    left = {name for name, member in members.items() if "raise NotImplementedError" in inspect.getsource(member)}
    assert {"forward_decode", "forward_extend", "init_cuda_graph_state"} <= left
    captured_prefills = {
        "init_forward_metadata_for_breakable_cuda_graph_capture",
        "prepare_forward_metadata_for_breakable_cuda_graph_replay",
    }
    assert not backend.use_captured_forward_metadata_for_breakable_cuda_graph
    on_npus = {"forward_mixed"}
    assert left - captured_prefills - on_npus <= set(vars(backend))
    assert not backend.needs_cpu_seq_lens


@pytest.mark.parametrize(
    "kind, layers, page_size, dtype, cache",
    [
        ("plain", [layer(512)], 16, BF16, None),
        ("plain", [layer(128, logit_cap=20.0)], 64, torch.float16, None),
        ("plain", [layer(192, d_v=128, window=20)], 32, BF16, None),
        ("windows", [layer(256, window=20), layer(512), layer(256, window=20)], 16, BF16, None),
        ("windows", [layer(256, window=100), layer(512)], 64, BF16, E4M3),
        ("plain", [layer(512)], 16, BF16, E4M3),
    ],
    ids=["512", "softcap", "192 and 128", "256 and 512", "256 and 512 in 8 bits", "512 in 8 bits"],
)
@in_each_mode
def test_layers_attend(kind, layers, page_size, dtype, cache, mode, rows):
    server = Server(kind, layers, LENGTHS, page_size, dtype, cache)
    backend = backend_of(server)
    for one in server.layers:
        if cache is not None:
            one.k_scale, one.v_scale = torch.tensor(0.5), torch.tensor(2.0)
        q, out = forward(server, backend, one, mode, rows)
        server.assert_right(one, rows, q, out)
    q, out = forward(server, backend, one, mode, rows, save=False)  # as layers that share keys
    server.assert_right(one, rows, q, out)


def test_sinks_count():
    server, sinks = Server("plain", [layer(128)], LENGTHS), torch.randn(4)
    q, out = forward(server, backend_of(server), server.layers[0], ForwardMode.EXTEND, [5, 1, 12], sinks=sinks)
    server.assert_right(server.layers[0], [5, 1, 12], q, out, sinks=sinks)


def test_scales_that_are_not_given_are_one():
    server = Server("plain", [layer(128)], LENGTHS, cache=E4M3)
    q, out = forward(server, backend_of(server), server.layers[0], ForwardMode.DECODE, [1, 1, 1])
    server.assert_right(server.layers[0], [1, 1, 1], q, out)


def test_results_go_where_sglang_wants_them():
    server, into = Server("plain", [layer(128)], LENGTHS), torch.full((18, 4, 128), torch.nan, dtype=BF16)
    q, out = forward(server, backend_of(server), server.layers[0], ForwardMode.EXTEND, [5, 1, 12], into=into)
    server.assert_right(server.layers[0], [5, 1, 12], q, into)
    assert out.data_ptr() == into.data_ptr()


@pytest.mark.parametrize("parts", [False, True], ids=["whole", "in two parts"])
@pytest.mark.parametrize("cache", [None, E4M3], ids=["16 bits", "8 bits"])
@in_each_mode
def test_latents_attend(mode, rows, cache, parts):
    server = Server("latent", [ABSORBED], LENGTHS, 64, cache=cache)
    server.layers[0].k_scale = None if cache is None else torch.tensor(0.25)
    q, out = forward_latent(server, backend_of(server), mode, rows, parts)
    server.assert_right(server.layers[0], rows, q, out)


def test_prompts_of_latent_models_attend_to_keys_that_are_none():
    dense = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 192, "v_head_dim": 128, "scaling": 192**-0.5}
    server, rows = Server("latent", [dense], [0, 0, 0], 64), [7, 20, 1]
    backend, batch, one = backend_of(server), server.batch(ForwardMode.EXTEND, rows), server.layers[0]
    backend.init_forward_metadata(batch)
    q, k, v = server.new_rows(one, rows)
    out = backend.forward(q, k, v, one, batch, save_kv_cache=False).view(28, 4, 128)
    for some in torch.arange(28).split(rows):
        want, _ = oracle.attention(*(x[some].transpose(0, 1)[None] for x in (q, k, v)), causal=True, scale=192**-0.5)
        assert (out[some].double() - want[0].transpose(0, 1)).abs().max() < 0.03
    batch.mha_return_lse = True
    with pytest.raises(NotImplementedError, match="no longer latent"):
        backend.forward(q, k, v, one, batch, save_kv_cache=False)


@pytest.mark.parametrize("fillers", [0, 2])
@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2])
def test_graphs_follow_their_batches(mode, fillers):
    """What a graph replays, with other requests and lengths in the same buffers, is what an eager call computes, also
    where sequences of nobody fill up the batch.
    """
    server = Server("windows", [layer(256, window=20), layer(512)], LENGTHS)
    backend, rows = backend_of(server), [1 if mode.is_decode() else 3] * 3
    backend.init_cuda_graph_state(5, 16)
    assert backend.get_cuda_graph_seq_len_fill_value() == 1
    batch = server.batch(mode, rows, fillers)
    real, nobody = sum(rows), fillers * rows[0]
    wanted = batch.req_pool_indices.clone(), batch.seq_lens.clone(), batch.out_cache_loc.clone()
    batch.req_pool_indices.zero_(), batch.seq_lens.fill_(1), batch.out_cache_loc.zero_()
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    backend.init_forward_metadata_in_graph(batch)
    held = backend.forward_metadata

    def places():
        return [x.data_ptr() for x in (held.table, held.window_table, held.seqused_k, held.window_slots)]

    before = places()
    for x, numbers in zip((batch.req_pool_indices, batch.seq_lens, batch.out_cache_loc), wanted, strict=True):
        x.copy_(numbers)
    backend.init_forward_metadata_out_graph(batch)
    backend.init_forward_metadata_in_graph(batch)
    assert backend.forward_metadata is held and before == places()
    outs = []
    for one in server.layers:
        q, k, v = of_all = server.new_rows(one, rows + [rows[0]] * fillers)
        out = backend.forward(q, k.clone(), v.clone(), one, batch)
        assert len(out) == real + nobody
        server.assert_right(one, rows, q[:real], out[:real])
        outs.append(([x[:real] for x in of_all], out[:real]))
    batch = server.batch(mode, rows)
    backend.init_forward_metadata(batch)
    for one, (of_real, out) in zip(server.layers, outs, strict=True):
        assert torch.equal(backend.forward(*of_real, one, batch), out), "sequences of nobody change others' results"
    with pytest.raises(NotImplementedError, match="full CUDA graph"):
        backend.init_forward_metadata_out_graph(server.batch(ForwardMode.EXTEND, rows), in_capture=True)


@pytest.mark.parametrize(
    "given, words",
    [
        ({"is_cross_attention": True}, "cross attention"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "encoder_only"),
        ({"attn_type": AttentionType.DECODER_BIDIRECTIONAL}, "decoder_bidirectional"),
    ],
    ids=str,
)
def test_models_are_refused_before_they_serve(given, words):
    with pytest.raises(NotImplementedError, match=words):
        backend_of(Server("plain", [layer(64, **given)], [3]))


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("page_size", 1, "--page-size 64"),
        ("kv_cache_dtype", torch.float8_e5m2, "fp8_e4m3"),
        ("dtype", torch.float32, "--dtype bfloat16"),
        ("kv_index_translator", types.SimpleNamespace(is_translating=True), "--enable-unified-memory"),
        ("prefill_aware_swa", True, "prefill-aware"),
        ("kv_cache_dtype", torch.float16, "--kv-cache-dtype auto"),
        (
            "model_config.hf_config",
            Config(architectures=["DeepseekV32ForCausalLM"], index_topk=2048),
            "sparse attention",
        ),
        ("model_config.is_encoder_decoder", True, "cross attention"),
        ("model_config.is_local_attention_model", True, "chunked local attention"),
    ],
)
def test_runners_are_refused(monkeypatch, name, value, words):
    server = Server("plain", [layer(64)], LENGTHS)
    of, _, own = name.rpartition(".")
    monkeypatch.setattr(getattr(server.runner, of) if of else server.runner, own, value, raising=False)
    with pytest.raises(ValueError, match=words):
        backend_of(server)


def test_head_dims_that_pages_of_eight_bits_lack_are_refused_before_they_serve():
    server = Server("plain", [layer(72)], LENGTHS, cache=E4M3)
    with pytest.raises(NotImplementedError, match="a head dim of 72; .*--kv-cache-dtype auto"):
        backend_of(server)
    backend_of(Server("plain", [layer(72)], LENGTHS))


def test_what_else_is_asked_for_is_refused():
    server = Server("plain", [layer(64)], LENGTHS)
    backend = backend_of(server)
    with pytest.raises(NotImplementedError, match="`score_mod`"):
        forward(server, backend, server.layers[0], ForwardMode.DECODE, [1, 1, 1], score_mod=1)
    batch = server.batch(ForwardMode.TARGET_VERIFY, [3, 3, 3])
    batch.spec_info.ragged_verify_layout = object()
    with pytest.raises(NotImplementedError, match="different lengths"):
        backend.init_forward_metadata(batch)


def test_drafts_have_their_steps():
    """SGLang's factory makes our steps for a draft model, each of which sees what the ones before it have written."""
    server, one_row = Server("plain", [layer(128)], LENGTHS), [1, 1, 1]
    factory = DraftBackendFactory(server.runner, 1, 4)
    wrap = "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper_for_draft_"
    with mock.patch(wrap + "decode", lambda runner, made: made), mock.patch(wrap + "extend", lambda runner, made: made):
        steps, extend = factory.create_decode_backend(), factory.create_draft_extend_backend()
    assert len(steps.attn_backends) == 3 and type(extend) is type(steps.attn_backends[0])
    one = server.layers[0]
    for i, backend in enumerate(steps.attn_backends):
        batch = server.batch(ForwardMode.DECODE, [1 + i] * 3)
        batch.seq_lens -= 1 + i  # SGLang counts none of the drafted tokens
        batch.out_cache_loc = batch.out_cache_loc.view(3, -1)[:, -1].contiguous()
        batch.positions = batch.positions[:3]
        backend.init_forward_metadata(batch)
        q, k, v = server.new_rows(one, one_row)
        out = backend.forward(q, k, v, one, batch)
        server.assert_right(one, one_row, q, out, before=[n + i for n in LENGTHS])
    steps.init_cuda_graph_state(4, 16)
    steps.init_forward_metadata_out_graph(batch, in_capture=True)
    steps.init_forward_metadata_in_graph(batch)
    counted = [backend.forward_metadata.seqused_k.tolist() for backend in steps.attn_backends]
    assert counted == [[n + 1 + i for n in LENGTHS] for i in range(3)]


@pytest.mark.parametrize(
    "arch, d, mode, rows", [("sm_80", 512, ForwardMode.DECODE, 1), ("sm_90a", 256, ForwardMode.TARGET_VERIFY, 2)]
)
def test_kernels_attend_in_the_emulator(arch, d, mode, rows):
    server = Server("windows", [layer(d, window=20), layer(d)], [37, 17])
    backend = backend_of(server)
    for one in server.layers:
        with emulate(arch) as reports:
            q, out = forward(server, backend, one, mode, [rows, rows])
        assert reports, "no kernel ran"
        server.assert_right(one, [rows, rows], q, out)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("kind", ["latent", "8 bits"])
def test_kernels_read_other_pools_in_the_emulator(arch, kind):
    rows, lengths = [1, 1], [37, 17]
    with emulate(arch) as reports:
        if kind == "latent":
            server = Server(kind, [ABSORBED], lengths)
            one = server.layers[0]
            q, out = forward_latent(server, backend_of(server), ForwardMode.DECODE, rows, parts=True)
        else:
            server = Server("plain", [layer(64)], lengths, cache=E4M3)
            one = server.layers[0]
            one.k_scale, one.v_scale = torch.tensor(0.5), torch.tensor(2.0)
            q, out = forward(server, backend_of(server), one, ForwardMode.DECODE, rows)
    assert reports, "no kernel ran"
    server.assert_right(one, rows, q, out)


@pytest.mark.parametrize(
    "kind, given, cache, parts",
    [
        ("windows", [layer(256, window=20), layer(512)], None, False),
        ("windows", [layer(256, window=20), layer(512)], E4M3, False),
        ("latent", [ABSORBED], None, False),
        ("latent", [ABSORBED], None, True),
        ("latent", [ABSORBED], E4M3, True),
    ],
    ids=["16 bits", "8 bits", "MLA", "MLA in two parts", "MLA in two parts and 8 bits"],
)
def test_the_host_needs_little_time(monkeypatch, capsys, request, kind, given, cache, parts):
    """The plugin may take 30 us of the host for a layer outside graphs, beside our call and SGLang's write. Copies that
    it makes for either count: of keys and values in 8 bits, and of queries in two parts.
    """
    server = Server(kind, given, LENGTHS, cache=cache)
    backend, batch = backend_of(server), server.batch(ForwardMode.DECODE, [1, 1, 1])
    backend.init_forward_metadata(batch)
    for write in {"set_kv_buffer", "set_mla_kv_buffer"} & set(dir(server.pool)):
        monkeypatch.setattr(type(server.pool), write, lambda *args: None)
    for one in server.layers:
        if cache is not None:
            one.k_scale, one.v_scale = torch.tensor(0.5), torch.tensor(2.0)
        q, k, v = server.new_rows(one, [1, 1, 1])
        out = torch.empty(3, one.tp_q_head_num, one.v_head_dim, dtype=BF16)
        of_rope = {"q_rope": q[..., 512:], "k_rope": k[..., 512:]} if parts else {}
        if parts:
            q, k = q[..., :512], k[..., :512]
        monkeypatch.setattr(step, "ffpa_varlen", lambda *args, **given: out)  # noqa: B023
        times = []
        for _ in range(7):
            begin = time.thread_time()
            for _ in range(1000):
                backend.forward_decode(q, k, v, one, batch, **of_rope)
            times.append(time.thread_time() - begin)
        least = min(times) * 1e3  # us of a call, of 1000 calls in s
        with capsys.disabled():
            print(f"\n{request.node.callspec.id}: a layer of D = {one.head_dim} takes {least:.1f} us of the host")
        assert least <= 30
