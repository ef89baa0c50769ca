"""Holds the SGLang plugin against SGLang's own classes, on the CPU: run by `bash .dev/serving_check.sh sglang`, or as

    python tests/integrations/serving/check_sglang.py FOLDER

FOLDER has the Python files of SGLang's wheel: `pip download --no-deps sglang==0.5.23`, unzipped; `.py` files suffice.
Besides torch, triton and numpy the check needs NEEDED, small packages whose classes SGLang's are made of (`pip install
--no-deps`); whatever else SGLang imports is stood in for. Calls run on the reference path, and some in the emulator.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
import time
import types
from pathlib import Path
from unittest import mock

import tomllib

NEEDED = (
    *("msgspec", "regex", "psutil", "dill", "orjson", "pydantic", "pydantic-core", "annotated-types"),
    *("typing-inspection", "requests", "urllib3", "idna", "certifi", "charset-normalizer"),
)
ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "ffpa"), str(ROOT / "tests"), str(Path(__file__).parent)]

import torch  # noqa: E402
from absent_modules import StandIn, stand_in_for_what_is_missing  # noqa: E402
from ffpa_attn.testing import emulate  # noqa: E402

HEADS = {"num_heads": 4, "num_kv_heads": 2}
E4M3 = torch.float8_e4m3fn


def make_importable(folder: Path) -> None:
    missing = [
        name
        for name in ("msgspec", "regex", "psutil", "pydantic", "orjson", "dill")
        if not importlib.util.find_spec(name)
    ]
    if missing:
        sys.exit(f"{', '.join(missing)} missing here: pip install --no-deps {' '.join(NEEDED)}")
    for name in ("include", "csrc"):  # SGLang looks whether the sources of its kernels lie here
        (folder / "sglang/kernels/jit" / name).mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(folder))
    stand_in_for_what_is_missing("sglang")
    patches = "sglang.srt.utils.hf_transformers_patches"  # of classes of transformers
    sys.modules[patches] = StandIn(patches)


def load_plugin() -> None:
    """Lets SGLang load the entry point that pyproject.toml declares, by its own means."""
    from sglang.srt import plugins
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["sglang.srt.plugins"]
    points = [importlib.metadata.EntryPoint(*item, "sglang.srt.plugins") for item in declared.items()]
    assert not {"ffpa", *points} & {*choices.ATTENTION_BACKEND_CHOICES}
    with mock.patch.object(plugins, "entry_points", lambda group: points if group == "sglang.srt.plugins" else []):
        plugins.load_plugins()
    assert "ffpa" in ATTENTION_BACKENDS and choices.ATTENTION_BACKEND_CHOICES.count("ffpa") == 1
    points[0].load()()  # a second time changes nothing
    assert choices.ATTENTION_BACKEND_CHOICES.count("ffpa") == 1


def other_releases_are_named() -> None:
    from ffpa_attn.integrations import sglang as plugin
    from sglang.srt.plugins import hook_registry

    with mock.patch.object(plugin, "_version", lambda: "0.5.10"), mock.patch.dict(vars(hook_registry)):
        del hook_registry.HookRegistry
        expect(ImportError, "SGLang is 0.5.10, which lacks", plugin.register)


class Config:
    """Is the config of a model of which SGLang asks what it likes: nothing is set."""

    def __init__(self, **known):
        vars(self).update(known)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)


def arguments(architecture: str = "Gemma4ForCausalLM", **given):
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(
        **{"model_path": "a/model", "attention_backend": "ffpa", "device": "cpu", "page_size": 64, **given}
    )
    hf = Config(architectures=[architecture])
    args._model_config = Config(hf_config=hf, hf_text_config=hf)
    args._resolved_overrides = []
    return args


def models_with_lists_take_it() -> None:
    """SGLang's own step for a model must accept "ffpa", and mean it by it."""
    from sglang.srt import runtime_context
    from sglang.srt.arg_groups import kv_cache_hook, model_hook, overrides
    from sglang.srt.arg_groups.resolution_hooks import run_hook

    step = model_hook.handle_model_specific_adjustments
    gemmas = "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration"
    for architecture in (*gemmas, "GptOssForCausalLM"):
        run_hook(step, arguments(architecture))
        words = "Gemma4 only supports" if architecture in gemmas else "GptOssForCausalLM requires one of"
        for name in ("ffpa", "flashinfer"):
            args = arguments(architecture, attention_backend=name)
            run = (step,) if name == "ffpa" else (run_hook, step)  # SGLang's own step, or as we have wrapped it
            expect(AssertionError, words, *run, args)
    args = arguments()
    for module in (overrides, kv_cache_hook, model_hook):
        assert module.attention_backends_of(args) == ("ffpa", "ffpa")
    plain = arguments()
    plain.model_path = "dummy"
    plain.resolve_once()
    runtime_context.publish(plain, role="scheduler")
    assert runtime_context.attention_backends() == ("ffpa", "ffpa")


def arguments_are_refused() -> None:
    """What the backend lacks is said in SGLang's own resolution of arguments, before a model is loaded."""
    from sglang.srt.arg_groups.resolution_hooks import run_hook

    def handle_model_capability_adjustments(args):
        """Has the name of the step that is wrapped."""

    step = handle_model_capability_adjustments
    refused = [
        ({"page_size": 1}, "--page-size 64"),
        ({"page_size": 24}, "--page-size 64"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype fp8_e4m3"),
        ({"speculative_eagle_topk": 4}, "trees"),
        ({"dcp_size": 2}, "--dcp-size"),
        ({"attn_cp_size": 2}, "--attn-cp-size"),
        ({"dllm_algorithm": "LowConfidence"}, "--dllm-algorithm"),
        ({"cuda_graph_config": Config(prefill=Config(backend="full"))}, "--cuda-graph-backend-prefill"),
    ]
    for given, words in refused:
        args = arguments()
        args._resolved_overrides.append(("a step before", given))
        expect(ValueError, words, run_hook, step, args)
        args = arguments(attention_backend="triton")
        args._resolved_overrides.append(("a step before", given))
        run_hook(step, args)  # others' affairs are not ours
    for given in ({}, {"kv_cache_dtype": "fp8_e4m3"}, {"speculative_eagle_topk": 1}, {"page_size": 16}):
        args = arguments(**given)
        run_hook(step, args)


def backend_of(server):
    """Has SGLang choose and make the backend."""
    from sglang.srt.model_executor.model_runner_components.attention_backend_setup import get_attention_backend

    return get_attention_backend(model_runner=server.runner)


def members_are_answered() -> None:
    """Each member that the base class leaves to others is there, or belongs to a thing that a flag says is not."""
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    FfpaBackend = importlib.import_module("ffpa_attn.integrations.sglang.backend").FfpaBackend  # needs SGLang
    open_ones = {
        name for name, member in vars(AttentionBackend).items()
        if inspect.isfunction(member) and "raise NotImplementedError" in inspect.getsource(member)
    }  # fmt: skip
    assert {"forward_decode", "forward_extend", "init_cuda_graph_state"} <= open_ones
    captured_prefills = {
        "init_forward_metadata_for_breakable_cuda_graph_capture",
        "prepare_forward_metadata_for_breakable_cuda_graph_replay",
    }
    assert not FfpaBackend.use_captured_forward_metadata_for_breakable_cuda_graph
    on_npus = {"forward_mixed"}
    assert open_ones - captured_prefills - on_npus <= set(vars(FfpaBackend)), open_ones - set(vars(FfpaBackend))
    assert not FfpaBackend.needs_cpu_seq_lens and not inspect.isabstract(FfpaBackend)


def layer(d: int, window: int = -1, d_v: int | None = None, **more) -> dict:
    return {"head_dim": d, "v_head_dim": d_v or d, "scaling": d**-0.5, "sliding_window_size": window, **HEADS, **more}


def forward(server, backend, one, mode, rows, save=True, drafted=None, into=None, **more):
    """Runs a layer as SGLang does; returns q and what came. `into` is where SGLang wants the result."""
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    batch = server.batch(mode, rows, drafted)
    backend.init_forward_metadata(batch)
    q, k, v = server.new_rows(one, rows)
    given = (None, None) if not save else (k.clone(), v.clone())
    batch._attn_output = into
    with forward_context(ForwardContext(attn_backend=backend)):
        out = one(q, *given, batch, save_kv_cache=save, **more)
    assert out.shape == (sum(rows), one.tp_q_head_num * one.v_head_dim) and out.dtype == server.dtype
    if save:
        server.assert_written(one, rows, k, v)
    return q, out


def modes():
    """Returns each mode with rows that it may have."""
    from sglang_server import Drafted, ForwardMode

    yield ForwardMode.DECODE, [1, 1, 1], None
    yield ForwardMode.EXTEND, [5, 1, 12], None
    yield ForwardMode.MIXED, [1, 7, 1], None
    yield ForwardMode.TARGET_VERIFY, [3, 3, 3], Drafted()
    yield ForwardMode.DRAFT_EXTEND_V2, [4, 4, 4], None


def plain_layers_attend() -> None:
    from sglang_server import Server

    cases = [
        ("plain", [layer(512)], 16, torch.bfloat16, None),
        ("plain", [layer(128, logit_cap=20.0)], 64, torch.float16, None),
        ("plain", [layer(192, d_v=128, window=20)], 32, torch.bfloat16, None),
        ("windows", [layer(256, window=20), layer(512), layer(256, window=20)], 16, torch.bfloat16, None),
        ("windows", [layer(256, window=100), layer(512)], 64, torch.bfloat16, E4M3),
        ("plain", [layer(512)], 16, torch.bfloat16, E4M3),
    ]
    for kind, layers, page_size, dtype, cache in cases:
        for mode, rows, drafted in modes():
            server = Server(kind, layers, [37, 127, 16], page_size, dtype, cache)
            backend = backend_of(server)
            for one in server.layers:
                if cache is not None:
                    one.k_scale, one.v_scale = torch.tensor(0.5), torch.tensor(2.0)
                q, out = forward(server, backend, one, mode, rows, drafted=drafted)
                server.assert_right(one, rows, q, out)
            q, out = forward(server, backend, one, mode, rows, save=False, drafted=drafted)  # as layers that share keys
            server.assert_right(one, rows, q, out)


def sinks_scales_and_places_of_results_count() -> None:
    from sglang_server import ForwardMode, Server

    server = Server("plain", [layer(128)], [37, 130, 16])
    sinks, one = torch.randn(4), server.layers[0]
    q, out = forward(server, backend_of(server), one, ForwardMode.EXTEND, [5, 1, 12], sinks=sinks)
    server.assert_right(one, [5, 1, 12], q, out, sinks=sinks)
    into = torch.full((18, 4, 128), torch.nan, dtype=server.dtype)
    q, out = forward(server, backend_of(server), one, ForwardMode.EXTEND, [5, 1, 12], into=into)
    server.assert_right(one, [5, 1, 12], q, into)
    assert out.data_ptr() == into.data_ptr()
    server = Server("plain", [layer(128)], [37, 130, 16], cache=E4M3)  # without scales they are 1
    q, out = forward(server, backend_of(server), server.layers[0], ForwardMode.DECODE, [1, 1, 1])
    server.assert_right(server.layers[0], [1, 1, 1], q, out)


def latents_attend() -> None:
    """MLA: queries whole or in two parts over latents, and prompts without a prefix over keys that are none."""
    import oracle
    from sglang_server import ForwardMode, Server

    absorbed = {"num_heads": 16, "num_kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "scaling": 192**-0.5}
    dense = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 192, "v_head_dim": 128, "scaling": 192**-0.5}
    for cache in (None, E4M3):
        for mode, rows, drafted in modes():
            for parts in (False, True):
                server = Server("latent", [absorbed], [37, 130, 16], 64, cache=cache)
                backend, one = backend_of(server), server.layers[0]
                one.k_scale = None if cache is None else torch.tensor(0.25)
                batch = server.batch(mode, rows, drafted)
                backend.init_forward_metadata(batch)
                q, k, _ = server.new_rows(one, rows)
                if parts:
                    of_rope = {"q_rope": q[..., 512:], "k_rope": k[..., 512:]}
                    out = backend.forward(q[..., :512], k[..., :512], k[..., :512], one, batch, **of_rope)
                else:
                    out = backend.forward(q, k.clone(), k[..., :512].clone(), one, batch)
                server.assert_written(one, rows, k, k[..., :512])
                server.assert_right(one, rows, q, out)
    server = Server("latent", [dense], [0, 0, 0], 64)
    rows, one = [7, 20, 1], server.layers[0]
    backend, batch = backend_of(server), server.batch(ForwardMode.EXTEND, rows)
    backend.init_forward_metadata(batch)
    q, k, v = server.new_rows(one, rows)
    out = backend.forward(q, k, v, one, batch, save_kv_cache=False).view(28, 4, 128)
    for some in (slice(0, 7), slice(7, 27), slice(27, 28)):
        want, _ = oracle.attention(*(x[some].transpose(0, 1)[None] for x in (q, k, v)), causal=True, scale=192**-0.5)
        assert (out[some].double() - want[0].transpose(0, 1)).abs().max() < 0.03


def graphs_follow_their_batches() -> None:
    """What a graph replays, with other requests and lengths in the same buffers, is what an eager call computes."""
    from sglang_server import Drafted, ForwardMode, Server

    for mode, new in ((ForwardMode.DECODE, 1), (ForwardMode.TARGET_VERIFY, 3), (ForwardMode.DRAFT_EXTEND_V2, 3)):
        server = Server("windows", [layer(256, window=20), layer(512)], [37, 130, 16])
        backend, rows = backend_of(server), [new] * 3
        backend.init_cuda_graph_state(4, 16)
        assert backend.get_cuda_graph_seq_len_fill_value() == 1
        batch = server.batch(mode, rows, Drafted() if new > 1 else None)
        wanted = batch.req_pool_indices.clone(), batch.seq_lens.clone(), batch.out_cache_loc.clone()
        batch.req_pool_indices.zero_(), batch.seq_lens.fill_(1), batch.out_cache_loc.zero_()
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        backend.init_forward_metadata_in_graph(batch)
        held = backend.forward_metadata
        places = [x.data_ptr() for x in (held.table, held.window_table, held.seqused_k, held.window_slots)]
        for x, numbers in zip((batch.req_pool_indices, batch.seq_lens, batch.out_cache_loc), wanted, strict=True):
            x.copy_(numbers)
        backend.init_forward_metadata_out_graph(batch)
        backend.init_forward_metadata_in_graph(batch)
        assert backend.forward_metadata is held
        assert places == [x.data_ptr() for x in (held.table, held.window_table, held.seqused_k, held.window_slots)]
        for one in server.layers:
            q, k, v = server.new_rows(one, rows)
            server.assert_right(one, rows, q, backend.forward(q, k, v, one, batch))
    batch = server.batch(ForwardMode.EXTEND, [3, 3, 3])
    expect(NotImplementedError, "full CUDA graph", backend.init_forward_metadata_out_graph, batch, in_capture=True)


def expect(kind, words: str, function, *args, **given) -> None:
    """Raises where a call does not raise such an error."""
    try:
        function(*args, **given)
    except kind as error:
        if words in str(error):
            return
        raise
    raise LookupError(f"nothing was raised where {words!r} was expected")


def layers_and_runners_are_refused() -> None:
    from sglang.srt.layers.radix_attention import AttentionType
    from sglang_server import Drafted, ForwardMode, Server

    for given, words in [
        ({"is_cross_attention": True}, "cross attention"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "encoder_only"),
        ({"attn_type": AttentionType.DECODER_BIDIRECTIONAL}, "decoder_bidirectional"),
    ]:
        expect(NotImplementedError, words, backend_of, Server("plain", [layer(64, **given)], [3]))
    server = Server("plain", [layer(64)], [37, 130, 16])
    for name, value, words in [
        ("page_size", 1, "--page-size 64"),
        ("kv_cache_dtype", torch.float8_e5m2, "fp8_e4m3"),
        ("dtype", torch.float32, "--dtype bfloat16"),
        ("kv_index_translator", types.SimpleNamespace(is_translating=True), "--enable-unified-memory"),
        ("prefill_aware_swa", True, "prefill-aware"),
    ]:
        with mock.patch.object(server.runner, name, value, create=True):
            expect(ValueError, words, backend_of, server)
    for name in ("is_encoder_decoder", "is_local_attention_model"):
        with mock.patch.object(server.runner.model_config, name, True):
            expect(ValueError, "attention", backend_of, server)
    backend = backend_of(server)
    expect(
        NotImplementedError,
        "score_mod",
        forward,
        server,
        backend,
        server.layers[0],
        ForwardMode.DECODE,
        [1, 1, 1],
        score_mod=1,
    )
    ragged = Drafted()
    ragged.ragged_verify_layout = object()
    batch = server.batch(ForwardMode.TARGET_VERIFY, [3, 3, 3], ragged)
    expect(NotImplementedError, "different lengths", backend.init_forward_metadata, batch)


def drafts_have_their_steps() -> None:
    """SGLang's factory makes our steps for a draft model, each of which sees what the ones before it have written."""
    from sglang.srt.speculative.draft_utils import DraftBackendFactory
    from sglang_server import ForwardMode, Server

    server = Server("plain", [layer(128)], [37, 130, 16])
    wrap = "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper_for_draft_"
    with mock.patch(wrap + "decode", lambda runner, made: made), mock.patch(wrap + "extend", lambda runner, made: made):
        factory = DraftBackendFactory(server.runner, 1, 4)
        steps, extend = factory.create_decode_backend(), factory.create_draft_extend_backend()
    assert len(steps.attn_backends) == 3 and type(extend) is type(steps.attn_backends[0])
    one, drafted = server.layers[0], None
    for i, backend in enumerate(steps.attn_backends):
        batch = server.batch(ForwardMode.DECODE, [1 + i] * 3, drafted)
        batch.seq_lens -= 1 + i  # SGLang counts none of the drafted tokens
        batch.out_cache_loc = batch.out_cache_loc.view(3, -1)[:, -1].contiguous()
        batch.positions = batch.positions[:3]
        backend.init_forward_metadata(batch)
        q, k, v = server.new_rows(one, [1, 1, 1])
        out = backend.forward(q, k, v, one, batch)
        server.assert_right(one, [1, 1, 1], q, out, before=[n + i for n in server.lengths])
    steps.init_cuda_graph_state(4, 16)
    steps.init_forward_metadata_out_graph(batch, in_capture=True)
    steps.init_forward_metadata_in_graph(batch)
    assert [b.forward_metadata.seqused_k.tolist() for b in steps.attn_backends] == [
        [38, 131, 17],
        [39, 132, 18],
        [40, 133, 19],
    ]


def kernels_attend_in_the_emulator() -> None:
    from sglang_server import Drafted, ForwardMode, Server

    for arch, d, mode, rows, drafted in [
        ("sm_80", 512, ForwardMode.DECODE, [1, 1], None),
        ("sm_90a", 256, ForwardMode.TARGET_VERIFY, [2, 2], Drafted()),
    ]:
        server = Server("windows", [layer(d, window=20), layer(d)], [37, 17])
        backend = backend_of(server)
        for one in server.layers:
            with emulate(arch) as reports:
                q, out = forward(server, backend, one, mode, rows, drafted=drafted)
            assert reports, "no kernel ran"
            server.assert_right(one, rows, q, out)


def report_host_time() -> None:
    """Prints what the plugin takes on the host beside our call and SGLang's write, for each layer outside graphs."""
    from ffpa_attn.integrations.sglang import step
    from sglang_server import ForwardMode, Server

    server = Server("windows", [layer(256, window=20), layer(512)], [37, 130, 16])
    backend, rows = backend_of(server), [1, 1, 1]
    batch = server.batch(ForwardMode.DECODE, rows)
    backend.init_forward_metadata(batch)
    for one in server.layers:
        q, k, v = server.new_rows(one, rows)
        out = torch.empty(3, one.tp_q_head_num, one.v_head_dim, dtype=server.dtype)
        with mock.patch.object(step, "ffpa_varlen", lambda *args, **given: out):  # noqa: B023
            with mock.patch.object(type(server.pool), "set_kv_buffer", lambda *args: None):
                times = []
                for _ in range(7):
                    begin = time.thread_time()
                    for _ in range(1000):
                        backend.forward_decode(q, k, v, one, batch)
                    times.append(time.thread_time() - begin)
        print(
            f"   a layer of D = {one.head_dim}: {min(times) * 1e3:.1f} us of the host's time beside the call and the write"
        )


def main(folder: str) -> None:
    make_importable(Path(folder).resolve())
    checks = [
        load_plugin, other_releases_are_named, models_with_lists_take_it, arguments_are_refused, members_are_answered,
        plain_layers_attend, sinks_scales_and_places_of_results_count, latents_attend, graphs_follow_their_batches,
        layers_and_runners_are_refused, drafts_have_their_steps, report_host_time, kernels_attend_in_the_emulator,
    ]  # fmt: skip
    torch.manual_seed(0)
    for check in checks:
        begin = time.perf_counter()
        check()
        print(f"{check.__name__.replace('_', ' ')}: yes ({time.perf_counter() - begin:.1f} s)", flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
