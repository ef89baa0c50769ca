"""Runs ffpa's backends of vLLM inside vLLM's own classes: .dev/serving_check.sh vllm, which reads these lines.

releases: 0.20.0 0.21.0 0.24.0 0.28.0 0.30.0 0.33.0
needs: numpy<2.4 transformers>=5.16.1,<5.21 pydantic pydantic-settings cbor2 psutil pyzmq msgspec cloudpickle pillow
needs: blake3 py-cpuinfo cachetools sentencepiece partial-json-parser lark einops tiktoken pybase64 requests aiohttp
needs: openai openai_harmony prometheus_client gguf uvloop fastapi uvicorn python-multipart
alone: xgrammar apache-tvm-ffi llguidance compressed-tensors loguru

What is compiled is stubbed: functions of extensions raise, but for the one that writes rows into pools, which is here
in PyTorch. vLLM takes this machine for one with an H100.
"""

import contextlib
import functools
import itertools
import os
import pickle
import re
import subprocess
import sys
import time
import types
from pathlib import Path
from unittest import mock

import pages
import pytest
import torch
from ffpa_attn.integrations import vllm as plugin
from ffpa_attn.testing import emulate
from vllm_stubs import DeviceCapability, Hopper

plugin.register()
from ffpa_attn.integrations.vllm import attention, backend, images, mla, releases  # noqa: E402
from vllm.config import AttentionConfig, CacheConfig, VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase  # noqa: E402
from vllm.v1.attention import backend as interface  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402
from vllm.v1.attention.selector import AttentionSelectorConfig, get_attn_backend  # noqa: E402
from vllm.v1.worker.cp_utils import check_attention_cp_compatibility  # noqa: E402
from vllm_layers import CPU, Latent, Requests, common_metadata, layer_of  # noqa: E402


@pytest.fixture(autouse=True)
def config():
    """Gives a configuration that names the backend, as `--attention-backend FFPA` makes it."""
    found = VllmConfig(attention_config=AttentionConfig(backend="FFPA"))
    with set_current_vllm_config(found):
        yield found


# ---- what vLLM asks before it loads a model ----

ATTRIBUTES = ("supports_pcp", "need_to_return_lse_for_decode")


def test_this_release_is_one_that_was_tried():
    assert releases.found() in releases.TRIED


def test_names_lead_to_classes():
    plugin.register()  # each process does so, and may do so twice
    assert AttentionBackendEnum["FFPA"].get_class() is backend.FfpaBackend
    assert AttentionBackendEnum["FFPA_MLA"].get_class() is mla.FfpaMlaBackend
    for name in plugin.BACKENDS:
        found = AttentionBackendEnum[name]
        assert found.get_class().get_name() == name and pickle.loads(pickle.dumps(found)) is found


@pytest.mark.parametrize("found", [backend.FfpaBackend, mla.FfpaMlaBackend])
def test_every_abstract_member_is_answered(found):
    for each in (found, found.get_impl_cls(), found.get_builder_cls()):
        assert not each.__abstractmethods__


def select(**given):
    layer = {"head_size": 512, "dtype": torch.bfloat16, "kv_cache_dtype": "auto"}
    return get_attn_backend(**layer | given)


@pytest.mark.parametrize(
    "given",
    [
        {}, {"head_size": 256}, {"head_size": 1024}, {"dtype": torch.float16}, {"kv_cache_dtype": "bfloat16"},
        {"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8_e4m3"}, {"has_sink": True}, {"has_sliding_window": True},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_served(given):
    if "has_sliding_window" in given and "has_sliding_window" not in get_attn_backend.__code__.co_varnames:
        del given["has_sliding_window"]  # older releases do not ask
    assert select(**given) is backend.FfpaBackend


@pytest.mark.parametrize(
    "given, reason",
    [
        ({"head_size": 100}, "head_size not supported"),
        ({"dtype": torch.float32}, "dtype not supported"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype not supported"),
        ({"kv_cache_dtype": "float16"}, "a float16 cache under torch.bfloat16"),
        ({"kv_cache_dtype": "fp8", "head_size": 520}, "a multiple of 16, not 520"),
        ({"use_mla": True}, "MLA not supported"),
        ({"use_sparse": True}, "sparse not supported"),
        ({"attn_type": "encoder_only"}, "attention type encoder_only"),
        ({"use_per_head_quant_scales": True}, "per-head quant scales not supported"),
    ],
    ids=str,
)
def test_what_is_refused(given, reason):
    with pytest.raises(ValueError, match=reason):
        select(**given)


@pytest.mark.parametrize("of", ["decode", "prefill"])
@pytest.mark.parametrize(
    "name, given", [("FFPA", {"head_size": 512}), ("FFPA_MLA", {"head_size": 576, "use_mla": True})]
)
def test_contexts_over_several_gpus_are_refused(config, name, given, of):
    """The worker asserts it once weights are loaded; newer releases ask before."""
    found = AttentionBackendEnum[name]
    config.attention_config.backend = found
    impl = types.SimpleNamespace(**{x: getattr(found.get_class().get_impl_cls(), x) for x in ATTRIBUTES})
    layer = mock.MagicMock(spec=AttentionLayerBase, impl=impl)
    layer.get_attn_backend.return_value = found.get_class()
    config.compilation_config.static_forward_context["a layer"] = layer
    with mock.patch.object(config.parallel_config, f"{of}_context_parallel_size", 2):
        if f"use_{of[0]}cp" in AttentionSelectorConfig._fields:
            with pytest.raises(ValueError, match=f"{of[0].upper()}CP not supported"):
                select(**given)
        with pytest.raises(AssertionError, match="does not"):
            check_attention_cp_compatibility(config)


def test_an_older_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(Hopper, "capability", DeviceCapability(7, 5))
    with pytest.raises(ValueError, match="compute capability 8.0"):
        select(head_size=264)  # vLLM keeps the answers to questions that it asked before


def test_pages_that_are_no_multiple_of_16_rows_are_refused(config):
    config.cache_config = CacheConfig(block_size=8)
    with pytest.raises(ValueError, match="block_size not supported"):
        select()


def test_images_are_refused_where_builders_are_not_told_of_them():
    if backend.FfpaBackend.supports_mm_prefix():
        assert select(use_mm_prefix=True) is backend.FfpaBackend
    else:
        with pytest.raises(ValueError, match="partial multimodal token full attention"):
            select(use_mm_prefix=True)


def test_the_wide_layers_alone(config):
    if not hasattr(config.attention_config, "backend_per_kind"):
        pytest.skip("this release has one backend for all layers")
    per_kind = AttentionConfig(backend="TRITON_ATTN", backend_per_kind={"full_attention": "FFPA"})
    with set_current_vllm_config(VllmConfig(attention_config=per_kind)):
        assert select() is backend.FfpaBackend
        assert select(head_size=256, has_sliding_window=True).get_name() == "TRITON_ATTN"


@pytest.mark.parametrize(
    "option", [{"alibi_slopes": [0.5] * 4}, {"use_alibi_sqrt": True}, {"chunk_lookback": 3}], ids=str
)
def test_a_layer_that_wants_more_is_refused(option):
    args = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto"} | option
    with pytest.raises(NotImplementedError, match=next(iter(option))):
        backend.FfpaImpl(4, 64, 0.1, 2, **args)


# ---- layers ----


FIRST, NEXT = [30, 20, 0, 40], [1, 5, 25, 1]  # a request begins while others decode, one with several rows
LENGTHS = [a + b for a, b in zip(FIRST, NEXT, strict=True)]
LAYERS = {
    "plain": {},
    "auto": {"cache": "auto"},
    "window": {"per_layer_sliding_window": 17},
    "softcap": {"logits_soft_cap": 5.0},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "fp8": {"cache": "fp8"},
    "fp8_e4m3 window": {"cache": "fp8_e4m3", "per_layer_sliding_window": 17},
    "all": {"per_layer_sliding_window": 17, "logits_soft_cap": 5.0, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "D = 512": {"d": 512, "heads_kv": 1},
    "D = 256, window": {"d": 256, "per_layer_sliding_window": 17},
}


def serve(config, layout, size, **options) -> Requests:
    """Runs two steps of requests through a layer and compares both."""
    layer = layer_of(config, size=size, **options)
    requests = Requests(layer, config, LENGTHS, layout)
    layer._k_scale.fill_(0.25), layer._v_scale.fill_(0.5)
    for rows, padding in ((FIRST, 0), (NEXT, 5)):
        requests.assert_right(rows, *requests.step(rows, padding))
    return requests


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_layers(config, options, size, layout):
    serve(config, layout, size, **options)


WIDE_FP8 = {"cache": "fp8", "d": 512, "heads_kv": 1}


@pytest.mark.parametrize("options", [LAYERS["all"], LAYERS["fp8"], WIDE_FP8], ids=["all", "fp8", "D = 512, fp8"])
def test_layers_on_kernels(config, options):
    with emulate("sm_80", seed=3) as reports:
        serve(config, "NHD", 16, **options)
    assert reports


def test_a_run_that_measures_memory(config):
    layer = layer_of(config)
    q, k, v = (torch.randn(5, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2))
    with mock.patch.object(backend, "reserve") as taken:
        out = Requests(layer, config, [5]).forward(q, k, v, None)
    taken.assert_called_once_with(CPU)
    assert not out.any()


def test_graphs_are_replayed_with_padding(config):
    """Captures a batch as the server does, and writes other requests into its buffers, fewer than it has room for."""
    requests = Requests(layer_of(config, per_layer_sliding_window=17), config, LENGTHS)
    requests.step(LENGTHS)
    keys = requests.keys
    for rows in ([1, 1, 0, 0], [2, 1, 1, 0]):  # of 4; uniform, and of drafts of which some were dropped
        n = sum(x > 0 for x in rows)
        offsets, used = torch.arange(5, dtype=torch.int32), torch.ones(4, dtype=torch.int32)
        table, slots = torch.zeros_like(requests.table), torch.full((4,), -1)
        common = common_metadata([1] * 4, offsets, used, table, slots)
        common.max_query_len, common.max_seq_len = max(rows), max(LENGTHS)
        batch = requests.builder.build_for_cudagraph_capture(common)
        offsets[1:] = torch.tensor(rows).cumsum(0)
        used[:n] = torch.tensor(LENGTHS[:n])
        used[n:] = 0
        table[:n] = requests.table[:n]
        q, k, v = (torch.randn(4, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2))
        out = requests.forward(q, k, v, batch, slots)
        requests.keys = keys[:n]
        requests.assert_right(rows[:n], q, out)


@pytest.mark.parametrize("drafts, rows", [(None, 1), (3, 4)])
@pytest.mark.parametrize("found", [backend.FfpaBackend, mla.FfpaMlaBackend])
def test_graphs_of_requests_that_differ_in_rows(config, found, drafts, rows):
    speculative = drafts and types.SimpleNamespace(num_speculative_tokens=drafts, parallel_drafting=False)
    with mock.patch.object(config, "speculative_config", speculative):
        assert found.get_builder_cls().get_varlen_cudagraph_max_query_len(config, None) == rows
        if hasattr(interface, "max_decode_query_len"):  # older releases do not ask
            assert interface.max_decode_query_len(config) == rows


def test_a_batch_that_warms_up_is_of_the_kind_that_is_captured(config):
    config.model_config = mock.MagicMock(max_model_len=1000, use_mla=False)
    builder = backend.FfpaMetadataBuilder(mock.MagicMock(), ["a layer"], config, CPU)
    offsets, table = torch.tensor([0, 1, 2], dtype=torch.int32), torch.zeros(2, 64, dtype=torch.int32)
    for used, bound in (([1, 1], 1024), ([1, 9], 9), ([700, 3], 704)):
        common = common_metadata([1, 1], offsets, torch.tensor(used, dtype=torch.int32), table, offsets.long())
        assert builder.build(0, common).max_seq_len == bound
        assert builder.build_for_cudagraph_capture(common).max_seq_len == bound


@pytest.mark.parametrize("on_kernels", [False, True], ids=["", "on kernels"])
def test_images(config, on_kernels):
    if not backend.FfpaBackend.supports_mm_prefix():
        pytest.skip("this release does not tell builders where images are")
    from test_vllm import masks_of

    ranges = {0: [(3, 9), (12, 20)], 3: [(5, 15)]}
    requests = Requests(layer_of(config, per_layer_sliding_window=17), config, LENGTHS)
    with emulate("sm_80", seed=3) if on_kernels else contextlib.nullcontext(True) as reports:
        q, out = requests.step(FIRST, mm_req_doc_ranges=ranges)
    assert reports
    requests.assert_right(FIRST, q, out, masks=list(masks_of(FIRST, FIRST, ranges, (16, -1))))


def test_layers_that_are_not_causal_are_refused(config):
    requests = Requests(layer_of(config), config, [5])
    with pytest.raises(NotImplementedError, match="causal layers alone"):
        requests.builder.build(0, mock.MagicMock(causal=False))
    if not hasattr(config.attention_config, "use_non_causal"):
        return  # 0.20 asks a drafter's configuration
    config.attention_config.use_non_causal = True
    with pytest.raises(ValueError, match="non-causal attention not supported"):
        select()


# ---- MLA ----


@pytest.mark.parametrize("cache", ["auto", "fp8"])
@pytest.mark.parametrize("rows", [[1, 1, 1], [2, 2, 2], [2, 1, 2]], ids=["a row each", "drafts", "drafts dropped"])
def test_latent_vectors(config, cache, rows):
    decode_latent_vectors(config, cache, rows)


@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_latent_vectors_on_kernels(config, cache):
    with emulate("sm_80", seed=3) as reports:
        decode_latent_vectors(config, cache, [1, 1, 1])
    assert reports


def decode_latent_vectors(config, cache, rows):
    latent, lengths = Latent(config, cache), [30, 3, 17]
    latent.builder.reorder_batch_threshold = max(rows)
    dtype, scale = (torch.float8_e4m3fn, 0.5) if cache == "fp8" else (torch.bfloat16, 1.0)
    pool = pages.make(lengths, heads=1, d=576, d_v=512, layout="latent", dtype=dtype)
    q, offsets = pages.queries(rows, heads=16, d=576)
    slots = torch.zeros(sum(rows), dtype=torch.int64)
    metadata = latent.builder.build(0, common_metadata(rows, offsets, pool.used, pool.table, slots))
    assert metadata.num_decodes == 3 and metadata.prefill is None
    assert latent.impl.supports_quant_query_input is False
    layer = types.SimpleNamespace(_k_scale=torch.tensor(scale))
    with torch.inference_mode():
        parts = q[..., :512], q[..., 512:]
        out, lse = latent.impl.forward_mqa(parts, pool.k[:, :, 0], metadata, layer)
    assert lse is None and out.shape == (sum(rows), 16, 512)
    ends = list(itertools.accumulate(rows))
    for i, keys in enumerate(pool.sequences()):
        mine = slice(ends[i] - rows[i], ends[i])
        keys = [x.to(q.dtype) * scale for x in keys]
        pages.assert_attends(q[mine], keys, out[mine], causal=True, scale=192**-0.5)


def test_graphs_of_latent_vectors_are_replayed_with_padding(config):
    latent, lengths = Latent(config), [30, 3, 17, 8]
    latent.builder.reorder_batch_threshold = 2
    pool = pages.make(lengths, heads=1, d=576, d_v=512, layout="latent")
    q, _ = pages.queries([4], heads=16, d=576)
    offsets, used = torch.arange(5, dtype=torch.int32), torch.ones(4, dtype=torch.int32)
    table, slots = torch.zeros_like(pool.table), torch.full((4,), -1)
    common = common_metadata([1] * 4, offsets, used, table, slots)
    common.max_query_len, common.max_seq_len = 2, 1024
    metadata = latent.builder.build_for_cudagraph_capture(common)
    rows, keys = [2, 1, 0, 0], pool.sequences()
    offsets[1:] = torch.tensor(rows).cumsum(0)
    used.copy_(torch.tensor([30, 3, 0, 0]))
    table[:2] = pool.table[:2]
    with torch.inference_mode():
        out, _ = latent.impl.forward_mqa(q, pool.k[:, :, 0], metadata, None)
    for mine, of in ((slice(0, 2), keys[0]), (slice(2, 3), keys[1])):
        pages.assert_attends(q[mine], of, out[mine], causal=True, scale=192**-0.5)
    assert not out[3:].any()


def test_mla_is_selected(config):
    config.attention_config.backend = AttentionBackendEnum["FFPA_MLA"]
    assert select(head_size=576, use_mla=True) is mla.FfpaMlaBackend
    with pytest.raises(ValueError, match="non-MLA not supported"):
        select(head_size=576)
    with pytest.raises(ValueError, match="kv_cache_dtype not supported"):
        select(head_size=576, use_mla=True, kv_cache_dtype="fp8_ds_mla")


# ---- an engine ----


@pytest.mark.parametrize("how", [["64"], ["512"], ["64", "wrong"]], ids=" ".join)
def test_an_engine_on_this_cpu(how):
    """Serves a tiny model, prompts in chunks beside requests that decode, and compares with transformers' attention."""
    if releases.found() < "0.24":
        pytest.skip("the engine of this release has its worker in another process, whose calls nobody counts")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, Path(__file__).with_name("engine_vllm.py"), *how]
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    found = re.search(r"of (\d+) tokens (\d+) are .* same, (\d+) .* wrong; (\d+) calls of ffpa, (\d+)", run.stdout)
    assert found, run.stdout + run.stderr
    total, same, wrong, calls, of_prompts = map(int, found.groups())
    assert total == 4 * 24 and calls > of_prompts > 4
    if "wrong" in how:
        assert wrong > 0.1 * total, run.stdout
    else:
        assert wrong == 0 and same > 0.9 * total, run.stdout


# ---- host time ----


def time_of(call, name: str, capsys) -> float:
    """Measures and prints the median of the plugin's Python in a call, in microseconds; ffpa's calls do nothing. Time in
    which others have the core does not count.
    """
    kind = mock.patch.object(attention.steps, "kind", lambda *args: None)
    with kind, mock.patch.object(attention, "ffpa_varlen", lambda q, *args, **named: q), torch.inference_mode():
        times = []
        for _ in range(21):
            time.sleep(0.05)  # so that no burst of other work slows most of the rounds
            begin = time.thread_time()
            for _ in range(300):
                call()
            times.append((time.thread_time() - begin) / 300 * 1e6)
    median = sorted(times)[10]
    with capsys.disabled():
        print(f"\n{name}: {median:.1f} us of the plugin's Python on this CPU, ffpa's calls mocked")
    return median


@pytest.mark.parametrize("kind", ["bfloat16", "fp8", "images"])
def test_time_on_the_host(config, kind, capsys):
    """Measures a layer, with vLLM's writer mocked. Images take two more of PyTorch's operators, which copy rows."""
    layer = layer_of(config, d=512, heads_kv=1, cache="bfloat16" if kind == "images" else kind)
    requests = Requests(layer, config, [20, 20])
    q, k, v = (torch.randn(2, heads, 512, dtype=torch.bfloat16) for heads in (4, 1, 1))
    ints = torch.tensor([0, 1, 2], dtype=torch.int32)
    of_images = attention.Images(ints.long()[:2], ints[:2], ints[1:2], requests.table[:1], 2, 20)
    batch = attention.Batch(2, 1, ints, 20, ints[1:], requests.table, ints.long()[:2])
    batch.images = of_images if kind == "images" else None
    impl, pool, out = layer.impl, layer.kv_cache, torch.empty_like(q)
    impl.write = lambda *args: None

    def once():
        impl.do_kv_cache_update(layer, k, v, pool, batch.slot_mapping)
        impl.forward(layer, q, k, v, pool, batch, out)

    assert time_of(once, f"a layer, {kind}", capsys) <= 30


@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_time_on_the_host_of_latent_vectors(config, cache, capsys):
    latent, ints = Latent(config, cache), torch.tensor([0, 1, 2], dtype=torch.int32)
    dtype = torch.float8_e4m3fn if cache == "fp8" else torch.bfloat16
    pool, table = torch.zeros(4, 16, 576).to(dtype), torch.zeros(2, 4, dtype=torch.int32)
    metadata = latent.builder.build(0, common_metadata([1, 1], ints, ints[1:], table, ints.long()[:2]))
    layer = types.SimpleNamespace(_k_scale=torch.tensor(1.0))
    parts = torch.randn(2, 16, 576, dtype=torch.bfloat16).split([512, 64], 2)
    once = functools.partial(latent.impl.forward_mqa, parts, pool, metadata, layer)
    assert time_of(once, f"a layer of MLA, {cache}", capsys) <= 30


def test_time_on_the_host_of_finding_images(capsys):
    """Measures what a step with images takes once for each kind of layers."""
    ranges = {i: [(0, 255), (300, 555)] for i in range(4)}
    offsets, lengths = torch.arange(0, 2401, 600), torch.full((4,), 600)
    once = functools.partial(images.find, ranges, offsets, lengths, torch.zeros(4, 38, dtype=torch.int32))
    assert time_of(once, "8 images of 256 rows, once a step", capsys) <= 100
