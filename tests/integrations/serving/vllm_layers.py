"""Makes vLLM's layers and builders with ffpa's backends, and the requests that they serve, for check_vllm.py."""

import itertools
import types
from unittest import mock

import pages
import torch
from ffpa_attn.integrations.vllm import backend, mla
from vllm.config import CacheConfig
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata

CPU = torch.device("cpu")
_names = map("model.layers.{}.attn".format, itertools.count())


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
    """Keeps requests in the pages of one pool, and their keys and values beside it."""

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


class Latent:
    """Makes the builder and the layer of a model whose latent vectors have 576 columns; prompts are not run here."""

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
