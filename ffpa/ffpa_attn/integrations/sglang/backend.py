"""Serves SGLang's attention backend "ffpa" by our call for keys in pages. SGLang alone imports this."""

from __future__ import annotations

import torch
from sglang.srt.configs.model_config import AttentionArch, is_deepseek_dsa
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.verify_mask import maybe_create_verify_mask
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.layout.paged_view import paged_kv_view, paged_view
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import attention_backends, get_parallel, get_schedule, get_spec

from . import refusals, step


class FfpaBackend(AttentionBackend):
    """Serves prefill, decoding, verification of drafted chains and draft extends of one model's runner.

    `draft_step` is the place of a drafting step among those that run one after the other: its sequences have the tokens
    of the steps before, which SGLang does not count. Names without an underscore are SGLang's: its classes read them.
    """

    needs_cpu_seq_lens = False  # lengths stay on the GPU

    def __init__(self, model_runner, draft_step: int | None = None):
        super().__init__()
        parallel, drafting = get_parallel(), get_spec()
        config = model_runner.model_config
        is_mla = config.attention_arch == AttentionArch.MLA
        prefills = attention_backends()[0] == refusals.NAME
        also = {
            "a sequence that is split over ranks": parallel.attn_dcp_size > 1 or parallel.attn_cp_size > 1,
            "sparse attention": is_deepseek_dsa(config.hf_config),
            # SGLang itself unsets this before it makes a backend that is not on its list.
            "cached prefixes that are no longer latent (without --disable-chunked-prefix-cache)": (
                is_mla and prefills and not get_schedule().disable_chunked_prefix_cache
            ),
        }
        refusals.check_runner(model_runner, drafting.speculative_eagle_topk, also)
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.kv_index_translator = model_runner.kv_index_translator
        self.kv_cache_dtype = self.data_type = model_runner.kv_cache_dtype
        self.max_context_len = config.context_len
        self.page_size = model_runner.page_size
        self.device = model_runner.device
        self.forward_metadata: step.Sequences | None = None

        self._latents = None
        if is_mla:
            self._latents = config.kv_lora_rank + config.qk_rope_head_dim, config.kv_lora_rank
        self._eight_bits = self.kv_cache_dtype == refusals.E4M3
        pool = self.token_to_kv_pool
        for layer in model_runner.model.modules():  # what cannot be served is said before a request comes
            if isinstance(layer, RadixAttention):
                refusals.rule_of(layer, self._latents, False, self._eight_bits)
        self._windows = pool if isinstance(pool, SWAKVPool) and pool.swa_layer_nums > 0 else None
        self._longer = 0 if draft_step is None else draft_step + 1
        self._drafted = drafting.speculative_num_draft_tokens
        self._is_draft = model_runner.is_draft_worker
        self._rules: dict[torch.nn.Module, refusals.Rule] = {}
        self._entries = step.entries(self.req_to_token, self.page_size)
        self._buffers: step.Sequences | None = None
        self._offsets: dict[int, torch.Tensor] = {}  # of as many sequences as graphs have, by the rows of each
        self._captured: dict[tuple, step.Sequences] = {}
        self._verify_mask = None

    # ---- what is the same for all layers of a forward ----

    def init_forward_metadata(self, forward_batch) -> None:
        """Finds lengths and pages of a forward that no graph holds."""
        mode, batch = forward_batch.forward_mode, forward_batch.batch_size
        rows, longer = self._uniform(forward_batch)
        longest_k = self._entries * self.page_size
        if rows is None:
            of_rows, known = forward_batch.extend_seq_lens, forward_batch.extend_seq_lens_cpu
            offsets = torch.zeros(batch + 1, dtype=torch.int32, device=self.device)
            torch.cumsum(of_rows, 0, dtype=torch.int32, out=offsets[1:])
            total = forward_batch.input_ids.shape[0]
            rows = step.bound(max(known, default=1) if known is not None else total, max(total, 1))
            before = forward_batch.extend_prefix_lens_cpu
            if known is not None and before is not None and not mode.is_draft_extend_v2():
                longest = max((a + b for a, b in zip(before, known, strict=True)), default=1)
                longest_k = step.bound(longest, longest_k)
        else:
            offsets = torch.arange(0, batch * rows + 1, rows, dtype=torch.int32, device=self.device)
            if forward_batch.seq_lens_cpu is not None and batch:
                longest_k = step.bound(int(forward_batch.seq_lens_cpu.max()) + longer, longest_k)
        s = self._sequences(batch, offsets, rows, longest_k, longer)
        if self._windows is not None and forward_batch.out_cache_loc is not None:
            s.window_slots = torch.empty_like(forward_batch.out_cache_loc, dtype=torch.int64)
        self._fill(s, forward_batch)
        self.forward_metadata = s

    def _uniform(self, forward_batch) -> tuple[int | None, int]:
        """Returns how many rows each sequence has, None where they differ, and how many keys SGLang does not count."""
        mode, drafts = forward_batch.forward_mode, forward_batch.spec_info
        if mode.is_decode_or_idle():
            return 1, self._longer
        if mode.is_dllm_extend():
            raise NotImplementedError(
                "SGLang runs a diffusion language model, which the attention backend ffpa does not support: name "
                "another --attention-backend"
            )
        if not mode.is_target_verify():
            return None, 0
        if getattr(drafts, "ragged_verify_layout", None) is not None:
            raise NotImplementedError(
                "SGLang verifies drafts of different lengths at once, which the attention backend ffpa does not "
                "support: set SGLANG_RAGGED_VERIFY_MODE to static"
            )
        rows = max(1, forward_batch.positions.numel() // max(forward_batch.batch_size, 1))
        return rows, rows

    def _sequences(self, batch: int, offsets, rows: int, longest_k: int, longer: int) -> step.Sequences:
        def empty(*shape):
            return torch.empty(shape, dtype=torch.int32, device=self.device)

        s = step.Sequences(offsets, empty(batch), empty(batch, self._entries), rows, longest_k, longer)
        if self._windows is not None:
            s.window_table = empty(batch, self._entries)
        return s

    def _fill(self, s: step.Sequences, forward_batch) -> None:
        batch = len(s.seqused_k)
        lengths, requests = forward_batch.seq_lens[:batch], forward_batch.req_pool_indices[:batch]
        to_window = None if self._windows is None else self._windows.translate_loc_from_full_to_swa
        new_slots = None if s.window_slots is None else forward_batch.out_cache_loc
        step.fill(s, lengths, self.req_to_token, requests, self.page_size, to_window, new_slots)

    # ---- CUDA graphs ----

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Makes what captured graphs read, for as many sequences and rows."""
        offsets = torch.arange(max_bs + 1, dtype=torch.int32, device=self.device)
        self._offsets, self._captured = {1: offsets}, {}
        self._buffers = self._sequences(max_bs, offsets, 1, self._entries * self.page_size, 0)
        for x in (self._buffers.seqused_k, self._buffers.table, self._buffers.window_table):
            if x is not None:
                x.zero_()
        if self._windows is not None:
            self._buffers.window_slots = torch.zeros(max_num_tokens, dtype=torch.int64, device=self.device)
        # SGLang writes how drafts hang together here, and need not wait for lengths then; of a chain nobody reads it.
        self._verify_mask = maybe_create_verify_mask(
            is_draft_runner=self._is_draft, skip_prefill=False, max_bs=max_bs, max_context_len=self.max_context_len,
            num_draft_tokens=self._drafted, device=self.device, is_read=False,
        )  # fmt: skip

    def init_forward_metadata_out_graph(self, forward_batch, in_capture: bool = False) -> None:
        """Says which buffers the graph of such a batch reads; what is in them is filled in the graph itself."""
        mode, batch = forward_batch.forward_mode, forward_batch.batch_size
        kind = "decode" if mode.is_decode_or_idle() else "verify" if mode.is_target_verify() else "extend"
        if in_capture:
            self._captured[kind, batch] = self._captured_sequences(forward_batch)
        self.forward_metadata = self._captured[kind, batch]

    def _captured_sequences(self, forward_batch) -> step.Sequences:
        mode, batch = forward_batch.forward_mode, forward_batch.batch_size
        tokens = forward_batch.positions.numel()
        rows, longer = self._uniform(forward_batch)
        if rows is None and mode.is_draft_extend_v2():
            rows = tokens // batch
        elif rows is None:
            raise NotImplementedError(
                "SGLang captures a prefill in a full CUDA graph, which the attention backend ffpa does not support: "
                "pass --cuda-graph-backend-prefill breakable"
            )
        if rows not in self._offsets:
            self._offsets[rows] = self._offsets[1] * rows
        all_of = self._buffers
        windows = all_of.window_table
        return step.Sequences(
            self._offsets[rows][: batch + 1],
            all_of.seqused_k[:batch],
            all_of.table[:batch],
            rows,
            all_of.max_seqlen_k,
            longer,
            None if windows is None else windows[:batch],
            None if windows is None else all_of.window_slots[:tokens],
        )

    def init_forward_metadata_in_graph(self, forward_batch) -> None:
        """Fills the buffers; what runs here is captured, and runs again with each replay."""
        self._fill(self.forward_metadata, forward_batch)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Returns the keys of a sequence that only fills up a batch."""
        return 1

    def draft_extend_metadata_captured_in_graph(self) -> bool:
        """Says that a replay needs nothing but the graph."""
        return True

    @property
    def verify_mask(self):
        """Holds what SGLang writes the tree of drafts to."""
        return self._verify_mask

    def update_verify_buffers_to_fill_after_draft(self, spec_info, cuda_graph_bs) -> None:
        """Does nothing: the rows of a chain see what comes before them, whatever was drafted."""

    # ---- a layer ----

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache: bool = True, **others) -> torch.Tensor:
        """Returns the attention of one row for each sequence, [T, Hq * Dv], once k and v are in the pool."""
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, **others)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache: bool = True, **others) -> torch.Tensor:
        """Returns the attention of several rows for each sequence, [T, Hq * Dv], once k and v are in the pool."""
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, **others)

    def _forward(
        self, q, k, v, layer, forward_batch, save_kv_cache, q_rope=None, k_rope=None, sinks=None, **others
    ) -> torch.Tensor:
        refusals.no_others(others)
        rule = self._rules.get(layer) or self._first_call_of(layer)
        s = self.forward_metadata
        out = getattr(forward_batch, "_attn_output", None)
        out = None if out is None else out.view(-1, rule.heads, rule.d_v)
        if q_rope is None:
            q = q.reshape(-1, rule.heads, rule.d)
        else:
            parts = q.reshape(-1, rule.heads, rule.d_v), q_rope.reshape(-1, rule.heads, rule.d - rule.d_v)
            q = torch.cat(parts, -1)
        if rule.is_dense:
            return self._without_prefix(q, k, v, rule, forward_batch, sinks, out)
        if save_kv_cache and k is not None:
            self._write(layer, rule, forward_batch, k, v, k_rope)
        k_pages, v_pages = self._pages(layer, rule)
        scales = {}
        if self._eight_bits and layer.k_scale is not None:
            scales = {"k_scale": layer.k_scale, "v_scale": layer.k_scale if rule.is_latent else layer.v_scale}
        out = step.attend(q, k_pages, v_pages, rule, s, sinks=sinks, out=out, **scales)
        return out.view(-1, rule.heads * rule.d_v)

    def _first_call_of(self, layer) -> refusals.Rule:
        windows = self._windows is not None and self._windows.layers_mapping[layer.layer_id][1]
        rule = self._rules[layer] = refusals.rule_of(layer, self._latents, windows, self._eight_bits)
        return rule

    def _pages(self, layer, rule) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the pools of a layer, [pages, rows, Hkv, D]; SGLang may move them, so that none are kept."""
        pool, rows = self.token_to_kv_pool, self.page_size
        if rule.is_latent:
            k = paged_view(pool.get_key_buffer(layer.layer_id), rows)
            return k, k[..., : rule.d_v]
        k, v = pool.get_kv_buffer(layer.layer_id)
        return paged_kv_view(k, rows, rule.heads_kv, rule.d), paged_kv_view(v, rows, rule.heads_kv, rule.d_v)

    def _write(self, layer, rule, forward_batch, k, v, k_rope) -> None:
        """Writes new rows to the pool, divided by the layer's scales where it has 8 bits."""
        where = KVWriteLoc.for_batch(forward_batch, swa_loc=self.forward_metadata.window_slots)
        pool, k_scale = self.token_to_kv_pool, layer.k_scale if self._eight_bits else None
        if rule.is_latent:
            if k_scale is not None:
                k, k_rope = k / k_scale, None if k_rope is None else k_rope / k_scale
            if k_rope is None:
                pool.set_kv_buffer(layer, where, k, v)
            else:
                pool.set_mla_kv_buffer(layer, where, k, k_rope)
        elif k_scale is None:
            pool.set_kv_buffer(layer, where, k, v)
        else:  # SGLang divides in place what it is given
            pool.set_kv_buffer(layer, where, k.clone(), v.clone(), k_scale, layer.v_scale)

    def _without_prefix(self, q, k, v, rule, forward_batch, sinks, out) -> torch.Tensor:
        """Attends to MLA's keys and values as they come, of prompts that have nothing in the pool yet."""
        if len(k) != len(q) or forward_batch.mha_return_lse or forward_batch.attn_attend_prefix_cache:
            raise NotImplementedError(
                "SGLang attends to a cached prefix that is no longer latent, which the attention backend ffpa does not "
                "support: name another --attention-backend"
            )
        k, v = k.view(-1, rule.heads_kv, rule.d), v.view(-1, rule.heads_kv, rule.d_v)
        out = step.attend_to_rows(q, k, v, rule, self.forward_metadata, sinks=sinks, out=out)
        return out.view(-1, rule.heads * rule.d_v)
