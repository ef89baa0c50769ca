"""Runs ffpa's backends of vLLM inside vLLM's own classes: .dev/serving_check.sh vllm, which reads these lines.

releases: 0.20.0 0.21.0 0.24.0 0.28.0 0.30.0 0.33.0
needs: numpy<2.4 transformers>=5.16.1,<5.21 pydantic pydantic-settings cbor2 psutil pyzmq msgspec cloudpickle pillow
needs: blake3 py-cpuinfo cachetools sentencepiece partial-json-parser lark einops tiktoken pybase64 requests aiohttp
needs: openai openai_harmony prometheus_client gguf uvloop fastapi uvicorn python-multipart
alone: xgrammar apache-tvm-ffi llguidance compressed-tensors loguru

What is compiled is stubbed: functions of extensions raise, but for the one that writes rows into pools, which is here
in PyTorch. vLLM takes this machine for one with an H100.
"""

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
from ffpa_attn.integrations.vllm import attention, backend, mla, releases  # noqa: E402
from vllm.config import AttentionConfig, CacheConfig, VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.forward_context import set_forward_context  # noqa: E402
from vllm.model_executor.layers.attention.attention import Attention  # noqa: E402
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402
from vllm.v1.attention.selector import get_attn_backend  # noqa: E402

CPU = torch.device("cpu")
_names = map("model.layers.{}.attn".format, itertools.count())


@pytest.fixture(autouse=True)
def config():
    """Gives a configuration that names the backend, as `--attention-backend FFPA` makes it."""
    found = VllmConfig(attention_config=AttentionConfig(backend="FFPA"))
    with set_current_vllm_config(found):
        yield found


# ---- what vLLM asks before it loads a model ----


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


def pool_of(layer, spec, count: int, layout: str) -> torch.Tensor:
    """Returns an empty pool as the server would lay it out: logically [pages, heads, rows, D of K and D of V]."""
    found = layer.attn_backend
    shape = count, spec.num_kv_heads, spec.block_size, 2 * spec.head_size
    order = (0, 2, 1, 3) if layout == "NHD" else (0, 1, 2, 3)
    if hasattr(attention_base(), "get_kv_cache_shape"):
        where = "vllm.v1.attention.backends.utils.get_kv_cache_layout"
        with mock.patch(where, lambda: layout):
            assert found.get_kv_cache_stride_order() == order
            assert found.get_kv_cache_stride_order(True)[0] == 1  # pages first
        sizes = count, spec.block_size, spec.num_kv_heads, spec.head_size
        assert found.get_kv_cache_shape(*sizes, cache_dtype_str=layer.kv_cache_dtype) == shape
        assert found.get_kv_cache_block_dim(*sizes[1:]) == 0 and found.supports_kv_connector() is False
    assert spec.page_size_bytes == shape[1] * shape[2] * shape[3] * spec.dtype.itemsize
    whole = torch.full([shape[i] for i in order], 0x7F, dtype=torch.uint8)  # NaN in 8 bits
    if spec.dtype != torch.uint8:
        whole = torch.full(whole.shape, torch.nan, dtype=spec.dtype)
    return whole.permute([order.index(i) for i in range(4)])


def attention_base():
    return backend.FfpaBackend.__mro__[2]


def common_metadata(rows, offsets, used, table, slots, **more) -> CommonAttentionMetadata:
    """Returns what vLLM's runners give to builders."""
    return CommonAttentionMetadata(
        query_start_loc=offsets,
        query_start_loc_cpu=offsets,
        seq_lens=used,
        num_reqs=len(rows),
        num_actual_tokens=sum(rows),
        max_query_len=max(rows),
        max_seq_len=int(used.max()),
        block_table_tensor=table,
        slot_mapping=slots,
        causal=True,
        seq_lens_cpu_upper_bound=used,
        **more,
    )


class Requests:
    """Requests in the pages of one pool, whose keys and values are kept beside it."""

    def __init__(self, layer, config, lengths, layout="NHD", seed=0):
        self.layer, self.config = layer, config
        with mock.patch.object(config, "model_config", types.SimpleNamespace(use_mla=False)):
            self.spec = layer.get_kv_cache_spec(config)
        self.size = self.spec.block_size
        self.counts = [-(-n // self.size) for n in lengths]
        self.generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(sum(self.counts) + 3, generator=self.generator) + 1  # page 0 is nobody's
        self.table = torch.zeros(len(lengths), max(self.counts) + 1, dtype=torch.int32)
        pages_of = order.split([*self.counts, 3])
        for i, mine in enumerate(pages_of[:-1]):
            self.table[i, : len(mine)] = mine
        layer.kv_cache = pool_of(layer, self.spec, len(order) + 1, layout)
        self.builder = layer.attn_backend.get_builder_cls()(self.spec, [layer.layer_name], config, CPU)
        self.keys = [torch.empty(0, 2, layer.num_kv_heads, layer.head_size) for _ in lengths]

    def step(self, rows, padding=0, **more):
        """Adds these rows to the requests, and returns q and the attention of the layer [T, H, D]."""
        layer, dtype = self.layer, self.dtype
        total, lengths = sum(rows), [len(keys) for keys in self.keys]

        def random(heads):
            return torch.randn(total + padding, heads, layer.head_size, generator=self.generator).to(dtype)

        q, k, v = random(layer.num_heads), random(layer.num_kv_heads), random(layer.num_kv_heads)
        ends = list(itertools.accumulate(rows))
        slots = []
        for i, (n, old) in enumerate(zip(rows, lengths, strict=True)):
            mine = slice(ends[i] - n, ends[i])
            self.keys[i] = torch.cat([self.keys[i], torch.stack([k[mine], v[mine]], 1)])
            slots += [int(self.table[i, at // self.size]) * self.size + at % self.size for at in range(old, old + n)]
        slots = torch.tensor(slots + [-1] * padding)
        used = torch.tensor([len(keys) for keys in self.keys], dtype=torch.int32)
        offsets = torch.tensor([0, *ends], dtype=torch.int32)
        batch = self.builder.build(0, common_metadata(rows, offsets, used, self.table, slots, **more))
        assert batch.max_query_len >= max(rows) and batch.max_seq_len >= int(used.max())
        return q, self.forward(q, k, v, batch, slots)

    @property
    def dtype(self):
        return self.layer.kv_cache_torch_dtype if self.layer.kv_cache_torch_dtype.itemsize > 1 else torch.bfloat16

    def forward(self, q, k, v, batch, slots=None):
        name = self.layer.layer_name
        where = {"slot_mapping": {} if slots is None else {name: slots}}
        metadata = None if batch is None else {name: batch}
        with set_forward_context(metadata, self.config, **where), torch.inference_mode():
            out = self.layer(*(x.flatten(1) for x in (q, k, v)))
        return out.view(len(q), self.layer.num_heads, -1).clone()

    def assert_right(self, rows, q, out, masks=None):
        ends, impl = list(itertools.accumulate(rows)), self.layer.impl
        assert not out[ends[-1] :].any()
        for i, n in enumerate(rows):
            mine, keys = slice(ends[i] - n, ends[i]), list(self.keys[i].unbind(1))
            if impl.has_eight_bits:
                scales = self.layer._k_scale, self.layer._v_scale
                keys = [(x / s).to(torch.float8_e4m3fn).float() * s for x, s in zip(keys, scales, strict=True)]
            left = -1 if self.layer.sliding_window is None else self.layer.sliding_window - 1
            see = {"causal": True, "window": (left, -1)} if masks is None else {"mask": masks[i]}
            pages.assert_attends(q[mine], [x.to(q.dtype) for x in keys], out[mine], **self.layer.asked, **see)
        page, last = divmod(len(self.keys[0]) - 1, self.size)
        if not impl.has_eight_bits:  # keys come first in a row of the pool
            row = self.layer.kv_cache[int(self.table[0, page]), :, last]
            assert torch.equal(row, self.keys[0][-1].movedim(0, 1).flatten(1).to(row.dtype))


def layer_of(config, heads=4, heads_kv=2, d=64, cache="bfloat16", size=16, **more) -> Attention:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16 if cache == "auto" else torch.bfloat16)
    try:
        config.cache_config = CacheConfig(block_size=size, cache_dtype=cache)
        args = {"num_kv_heads": heads_kv, "cache_config": config.cache_config, "prefix": next(_names)}
        layer = Attention(heads, d, 0.1, **args, **more)
    finally:
        torch.set_default_dtype(before)
    layer.asked = {"scale": 0.1, "softcap": more.get("logits_soft_cap", 0.0), "sinks": more.get("sinks")}
    layer.use_direct_call = True  # vLLM's operators are registered for GPUs
    assert type(layer.impl) is backend.FfpaImpl and layer.backend.name == "FFPA" and layer.query_quant is None
    return layer


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


@pytest.mark.parametrize("options", [LAYERS["all"], LAYERS["fp8"]], ids=["all", "fp8"])
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


def test_graphs_of_uniform_batches(config):
    requests = Requests(layer_of(config), config, [5])
    support = type(requests.builder).get_cudagraph_support(config, requests.spec)
    assert support == AttentionCGSupport.UNIFORM_BATCH


def test_a_batch_that_warms_up_is_of_the_kind_that_is_captured(config):
    config.model_config = mock.MagicMock(max_model_len=1000, use_mla=False)
    builder = backend.FfpaMetadataBuilder(mock.MagicMock(), ["a layer"], config, CPU)
    offsets, table = torch.tensor([0, 1, 2], dtype=torch.int32), torch.zeros(2, 64, dtype=torch.int32)
    for used, bound in (([1, 1], 1024), ([1, 9], 9), ([700, 3], 704)):
        common = common_metadata([1, 1], offsets, torch.tensor(used, dtype=torch.int32), table, offsets.long())
        assert builder.build(0, common).max_seq_len == bound
        assert builder.build_for_cudagraph_capture(common).max_seq_len == bound


def test_images(config):
    if not backend.FfpaBackend.supports_mm_prefix():
        pytest.skip("this release does not tell builders where images are")
    from test_vllm import masks_of

    ranges = {0: [(3, 9), (12, 20)], 3: [(5, 15)]}
    requests = Requests(layer_of(config, per_layer_sliding_window=17), config, LENGTHS)
    q, out = requests.step(FIRST, mm_req_doc_ranges=ranges)
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


class Latent:
    """The builder and the layer of a model whose latent vectors have 576 columns; prompts are not run here."""

    def __init__(self, config, cache="auto"):
        dims = {
            "q_lora_rank": 32,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
        }
        name = next(_names)
        config.compilation_config.static_forward_context[name] = mock.MagicMock(**dims, num_heads=16)
        config.model_config = mock.MagicMock(dtype=torch.bfloat16, max_model_len=1024)
        config.model_config.get_head_size.return_value = 576
        config.model_config.get_num_attention_heads.return_value = 16
        for key, value in dims.items():
            setattr(config.model_config.hf_text_config, key, value)
        spec = mock.MagicMock(block_size=16)
        self.builder = mla.FfpaMlaMetadataBuilder(spec, [name], config, CPU)
        dims.pop("q_lora_rank")
        more = {"q_lora_rank": 32, "qk_head_dim": 192, "kv_b_proj": None}
        rest = None, None, cache, None, "decoder", None
        self.impl = mla.FfpaMlaImpl(16, 576, 192**-0.5, 1, *rest, **dims, **more)


@pytest.mark.parametrize("cache", ["auto", "fp8"])
@pytest.mark.parametrize("rows", [[1, 1, 1], [2, 2, 2]], ids=["a row each", "drafts"])
def test_latent_vectors(config, cache, rows):
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


def test_mla_is_selected(config):
    config.attention_config.backend = AttentionBackendEnum["FFPA_MLA"]
    assert select(head_size=576, use_mla=True) is mla.FfpaMlaBackend
    with pytest.raises(ValueError, match="non-MLA not supported"):
        select(head_size=576)
    with pytest.raises(ValueError, match="kv_cache_dtype not supported"):
        select(head_size=576, use_mla=True, kv_cache_dtype="fp8_ds_mla")


# ---- an engine ----


@pytest.mark.parametrize("d", [64, 512])
def test_an_engine_on_this_cpu(d):
    """Serves a tiny model, prompts in chunks beside requests that decode, and compares with transformers' attention."""
    if releases.found() < "0.24":
        pytest.skip("the engine of this release has its worker in another process, whose calls nobody counts")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, Path(__file__).with_name("engine_vllm.py"), str(d)]
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    found = re.search(r"(\d+) of (\d+) tokens are the same; (\d+) calls of ffpa, (\d+) with prompts", run.stdout)
    assert found, run.stdout + run.stderr
    same, total, calls, of_prompts = map(int, found.groups())
    assert same > 0.95 * total and total == 4 * 24 and calls > of_prompts > 4


# ---- host time ----


@pytest.mark.parametrize("cache", ["bfloat16", "fp8"])
def test_time_on_the_host(config, cache, capsys):
    """Measures the plugin's Python alone, on this machine's CPU: ffpa's call does nothing, nor does vLLM's writer."""
    layer = layer_of(config, d=512, heads_kv=1, cache=cache)
    requests = Requests(layer, config, [20, 20])
    q, k, v = (torch.randn(2, heads, 512, dtype=torch.bfloat16) for heads in (4, 1, 1))
    ints = torch.tensor([0, 1, 2], dtype=torch.int32)
    batch = attention.Batch(2, 1, ints, 20, ints[1:], requests.table, ints.long()[:2])
    impl, pool, out = layer.impl, layer.kv_cache, torch.empty_like(q)
    impl.write = lambda *args: None
    with mock.patch.object(attention, "ffpa_varlen", lambda *args, **named: None), torch.inference_mode():

        def once():
            impl.do_kv_cache_update(layer, k, v, pool, batch.slot_mapping)
            impl.forward(layer, q, k, v, pool, batch, out)

        times = []
        for _ in range(20):
            begin = time.perf_counter()
            for _ in range(500):
                once()
            times.append((time.perf_counter() - begin) / 500 * 1e6)
    with capsys.disabled():
        print(f"\n{cache}: {sorted(times)[10]:.1f} us a layer of the plugin's Python, on this CPU, calls mocked")
    assert min(times) <= 30
