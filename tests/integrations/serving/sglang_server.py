"""Has what of a server of SGLang its attention backend meets: pools, tables, layers and batches, with random contents.

check_sglang.py imports this once SGLang can be imported.
"""

from __future__ import annotations

from types import SimpleNamespace

import pages
import torch
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.model_runner_components.attention_backend_setup import get_attention_backend
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType

HEADS = {"num_heads": 4, "num_kv_heads": 2}
ABSORBED = {"num_heads": 16, "num_kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "scaling": 192**-0.5}  # MLA's layer
CONTEXT = 512
SLOTS = 2048


def _write_rows(buffer, slots, first, second):
    """Stands in for SGLang's Triton kernel that writes latents."""
    buffer[slots] = torch.cat([first, second], -1).view(len(slots), *buffer.shape[1:])


memory_pool.set_mla_kv_buffer_triton = _write_rows
memory_pool.set_mla_kv_buffer_dcp_sharded_triton = _write_rows


class Drafted(SpecInput):
    """Is what a verification of drafted tokens brings."""

    def __init__(self):
        super().__init__(SpecInputType.EAGLE_VERIFY)


class Server:
    """Holds requests whose first keys are in pages of a pool already, in any order; what nobody has written is NaN.

    kind    "plain", "windows" (SGLang's pool of two, of which the second serves layers with windows) or "latent".
    layers  keywords of RadixAttention, by layer.
    """

    def __init__(
        self, kind: str, layers: list[dict], lengths: list[int], page_size=16, dtype=torch.bfloat16, cache=None
    ):
        self.generator = torch.Generator().manual_seed(3)
        self.kind, self.dtype, self.page_size = kind, dtype, page_size
        self.cache_dtype = cache or dtype
        self.layers = [RadixAttention(layer_id=i, **layer) for i, layer in enumerate(layers)]
        self.requests = ReqToTokenPool(len(lengths), CONTEXT, "cpu", False)
        self.pool = self._pool(kind)
        self.lengths = list(lengths)
        self.ids = torch.randperm(len(lengths), generator=self.generator) + 1
        order = 1 + torch.randperm(SLOTS // page_size, generator=self.generator)  # page 0 is nobody's
        for i, n in zip(self.ids.tolist(), lengths, strict=True):
            count = -(-(n + 16) // page_size)
            mine, order = order[:count], order[count:]
            slots = (mine[:, None] * page_size + torch.arange(page_size)).flatten()[: n + 16]
            self.requests.req_to_token[i, : n + 16] = slots.int()
        self._map_windows()
        translator = KVIndexTranslator(
            req_to_token=self.requests.req_to_token, token_to_kv_pool_allocator=None, token_to_kv_pool=self.pool,
            page_size=page_size, device="cpu",
        )  # fmt: skip
        config = SimpleNamespace(
            context_len=CONTEXT,
            is_encoder_decoder=False,
            is_local_attention_model=False,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            attention_arch=AttentionArch.MLA if kind == "latent" else AttentionArch.MHA,
            hf_config=SimpleNamespace(architectures=["Gemma4ForCausalLM"], get_text_config=SimpleNamespace),
            hf_text_config=SimpleNamespace(),
            quantization=None,
            linear_attn_registry_result=None,
        )
        self.runner = SimpleNamespace(
            req_to_token_pool=self.requests,
            token_to_kv_pool=self.pool,
            kv_index_translator=translator,
            kv_cache_dtype=self.cache_dtype,
            dtype=dtype,
            page_size=page_size,
            device="cpu",
            is_draft_worker=False,
            use_mla_backend=kind == "latent",
            model=torch.nn.ModuleList(self.layers),
            model_config=config,
            server_args=None,
            draft_attention_backend=None,
            sliding_window_size=None,
        )
        for layer in self.layers:
            if not self.is_dense(layer):
                self._write_first_keys(layer)

    def is_dense(self, layer) -> bool:
        return self.kind == "latent" and layer.head_dim != 576

    def _pool(self, kind: str):
        size, page, dtype = SLOTS, self.page_size, self.cache_dtype
        if kind == "latent":
            return MLATokenToKVPool(size, page, dtype, 512, 64, len(self.layers), "cpu", False)
        full = [layer for layer in self.layers if layer.sliding_window_size < 0] or self.layers
        of_full = {"head_num": full[0].tp_k_head_num, "head_dim": full[0].head_dim, "v_head_dim": full[0].v_head_dim}
        if kind == "plain":
            return MHATokenToKVPool(
                size=size, page_size=page, dtype=dtype, layer_num=len(self.layers), device="cpu",
                enable_memory_saver=False, **of_full,
            )  # fmt: skip
        near = [layer for layer in self.layers if layer.sliding_window_size >= 0]
        of_both = {"page_size": page, "enable_memory_saver": False, "device": "cpu"}
        of_near = {"head_num": near[0].tp_k_head_num, "head_dim": near[0].head_dim, "v_head_dim": near[0].v_head_dim}
        return SWAKVPool(
            size, size, page, dtype, of_full["head_num"], of_full["head_dim"],
            swa_attention_layer_ids=[layer.layer_id for layer in near],
            full_attention_layer_ids=[layer.layer_id for layer in full], device="cpu",
            full_kv_pool_kwargs={**of_both, **of_full}, swa_kv_pool_kwargs={**of_both, **of_near},
        )  # fmt: skip

    def _map_windows(self) -> None:
        """Gives each page another number in the pool for windows, and none where no window sees it, as SGLang does."""
        if self.kind != "windows":
            return
        rows, side = self.page_size, max(layer.sliding_window_size for layer in self.layers)
        order = 1 + torch.randperm(SLOTS // rows, generator=self.generator)
        mapping = torch.zeros(SLOTS + rows + 1, dtype=torch.int64)
        mapping[-1] = -1
        for i, n in zip(self.ids.tolist(), self.lengths, strict=True):
            for first in range(0, n + 16, rows):
                slot = int(self.requests.req_to_token[i, first])
                if first + rows > n - side:
                    mapping[slot : slot + rows] = order[0] * rows + torch.arange(rows)
                    order = order[1:]
        self.pool.register_mapping(mapping)

    def slots(self, layer, request: int, end: int) -> torch.Tensor:
        """Returns where the layer's pool has a request's first tokens."""
        slots = self.requests.req_to_token[self.ids[request], :end].long()
        if self.kind == "windows" and layer.sliding_window_size >= 0:
            slots = self.pool.translate_loc_from_full_to_swa(slots)
        return slots

    def _buffers(self, layer):
        return self.pool.get_kv_buffer(layer.layer_id)

    def _write_first_keys(self, layer) -> None:
        k, v = self._buffers(layer)
        for x in (k, v)[: 1 if self.kind == "latent" else 2]:
            x.copy_(torch.full(x.shape, torch.nan).to(x.dtype))
            for i, n in enumerate(self.lengths):
                slots = self.slots(layer, i, n)
                seen = slots > 0
                numbers = torch.randn(n, *x.shape[1:], generator=self.generator)
                x[slots[seen]] = numbers[seen].to(x.dtype)

    def batch(self, mode: ForwardMode, rows: list[int], fillers: int = 0):
        """Returns a batch that brings so many new rows for each request; they follow what is there. A graph's batch is
        filled up by sequences of nobody, with as many rows: request 0, length 1 and slot 0 in SGLang's buffers.
        """
        at = [
            self.requests.req_to_token[i, n : n + new] for i, n, new in zip(self.ids, self.lengths, rows, strict=True)
        ]
        uncounted = mode.is_target_verify()
        lengths = torch.tensor([n if uncounted else n + new for n, new in zip(self.lengths, rows, strict=True)])
        extends = not uncounted and not mode.is_decode()
        made = ForwardBatch(
            forward_mode=mode, batch_size=len(rows), input_ids=torch.zeros(sum(rows), dtype=torch.int64),
            req_pool_indices=self.ids.clone(), seq_lens=lengths, out_cache_loc=torch.cat(at).long(), seq_lens_sum=None,
            positions=torch.zeros(sum(rows), dtype=torch.int64), spec_info=Drafted() if uncounted else None,
        )  # fmt: skip
        if fillers:
            made.batch_size += fillers
            zeros = torch.zeros(fillers * rows[0], dtype=torch.int64)
            made.req_pool_indices = torch.cat([made.req_pool_indices, zeros[:fillers]])
            made.seq_lens = lengths = torch.cat([lengths, torch.ones_like(zeros[:fillers])])
            made.out_cache_loc = torch.cat([made.out_cache_loc, zeros])
            made.input_ids, made.positions = (torch.cat([x, zeros]) for x in (made.input_ids, made.positions))
        if self.kind == "windows":  # SGLang tells the host lengths in some setups, and in others not
            made.seq_lens_cpu = lengths.clone()
        if extends:
            made.extend_seq_lens = torch.tensor(rows, dtype=torch.int32)
            made.extend_prefix_lens = torch.tensor(self.lengths, dtype=torch.int32)
            made.extend_seq_lens_cpu, made.extend_prefix_lens_cpu = list(rows), list(self.lengths)
        return made

    def new_rows(self, layer, rows: list[int]):
        """Returns q, k and v as a model hands them over, [T, H, D]."""

        def random(heads, d):
            return torch.randn(sum(rows), heads, d, generator=self.generator).to(self.dtype)

        q = random(layer.tp_q_head_num, layer.head_dim)
        return q, random(layer.tp_k_head_num, layer.head_dim), random(layer.tp_v_head_num, layer.v_head_dim)

    def assert_written(self, layer, rows, k, v) -> None:
        """Checks that the pool has new rows of keys and values, divided by scales; those here are powers of two."""
        slots = [self.slots(layer, i, n + new)[n:] for i, (n, new) in enumerate(zip(self.lengths, rows, strict=True))]
        scales = (layer.k_scale, layer.k_scale if self.kind == "latent" else layer.v_scale)
        for pool, x, scale in zip(self._buffers(layer), (k, v), scales, strict=True):
            x = x if scale is None else x / scale
            assert (pool[torch.cat(slots)].float() == x.to(self.cache_dtype).float()).all()

    def assert_right(self, layer, rows, q, out, before=None, **rule) -> None:
        """Compares what the backend gave with the oracle, over what the pool holds now."""
        k, v = self._buffers(layer)
        scales = [1.0, 1.0]
        if self.cache_dtype == torch.float8_e4m3fn and layer.k_scale is not None:
            scales = [float(layer.k_scale), float(layer.k_scale if self.kind == "latent" else layer.v_scale)]
        side = layer.sliding_window_size
        rule = {"causal": True, "scale": layer.scaling, "softcap": layer.logit_cap or 0.0, **rule}
        rule |= {"window": (side, 0)} if side >= 0 else {}
        first, out = 0, out.view(sum(rows), layer.tp_q_head_num, layer.v_head_dim)
        for i, (n, new) in enumerate(zip(before or self.lengths, rows, strict=True)):
            slots, some = self.slots(layer, i, n + new), slice(first, first + new)
            # Keys before all windows are not there any more; as the first keys of all they would not be seen.
            since = max(0, n - side) if side >= 0 else 0
            keys = [(x[slots[since:]].float() * scale).to(self.dtype) for x, scale in zip((k, v), scales, strict=True)]
            pages.assert_attends(q[some], keys, out[some], **rule)
            first += new


def backend_of(server):
    """Has SGLang choose and make the backend."""
    return get_attention_backend(model_runner=server.runner)


def layer(d: int, window: int = -1, d_v: int | None = None, **more) -> dict:
    """Returns keywords of a layer."""
    return {"head_dim": d, "v_head_dim": d_v or d, "scaling": d**-0.5, "sliding_window_size": window, **HEADS, **more}


def forward_latent(server, backend, mode, rows, parts: bool):
    """Runs a layer of MLA; returns q and what came. In `parts`, columns for positions come apart from the others."""
    one, batch = server.layers[0], server.batch(mode, rows)
    backend.init_forward_metadata(batch)
    q, k, _ = server.new_rows(one, rows)
    if parts:
        of_rope = {"q_rope": q[..., 512:], "k_rope": k[..., 512:]}
        out = backend.forward(q[..., :512], k[..., :512], k[..., :512], one, batch, **of_rope)
    else:
        out = backend.forward(q, k.clone(), k[..., :512].clone(), one, batch)
    server.assert_written(one, rows, k, k[..., :512])
    return q, out


def forward(server, backend, one, mode, rows, save=True, into=None, **more):
    """Runs a layer as SGLang does; returns q and what came. `into` is where SGLang wants the result."""
    batch = server.batch(mode, rows)
    backend.init_forward_metadata(batch)
    q, k, v = server.new_rows(one, rows)
    given = (None, None) if not save else (k.clone(), v.clone())
    batch._attn_output = into
    with forward_context(ForwardContext(attn_backend=backend)):
        out = one(q, *given, batch, save_kv_cache=save, **more)
    assert out.shape == (sum(rows), one.tp_q_head_num * one.v_head_dim) and out.dtype == server.dtype
    if save:
        assert torch.equal(given[0], k) and torch.equal(given[1], v), (
            "a model's own keys and values are left as they are"
        )
        server.assert_written(one, rows, k, v)
    return q, out
