"""Each step in which a draft model proposes a token of a chain has a backend of its own. SGLang alone imports this."""

from __future__ import annotations

from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode, build_inner_fb_view

from .backend import FfpaBackend


class FfpaDraftSteps:
    """Has the names by which SGLang runs several steps of drafting; the last one's token needs no step."""

    needs_cpu_seq_lens = False

    def __init__(self, model_runner, steps: int):
        if isinstance(model_runner.token_to_kv_pool, SWAKVPool):
            raise NotImplementedError(
                "The draft model has a pool of its own for layers with windows, which the attention backend ffpa does "
                "not support: pass --speculative-draft-attention-backend triton"
            )
        self.kv_index_translator = model_runner.kv_index_translator
        self.attn_backends = [FfpaBackend(model_runner, draft_step=i) for i in range(steps - 1)]
        self.attn_backend_list = self.attn_backends
        self.forward_metadata = None

    def init_forward_metadata(self, forward_batch) -> None:
        """Finds lengths and pages for each step."""
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Makes what captured graphs read, for each step."""
        for backend in self.attn_backends:
            backend.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, forward_batch, in_capture: bool = False) -> None:
        """Says which buffers each step's part of the graph reads."""
        batch = forward_batch.batch_size
        inner = build_inner_fb_view(forward_batch, bs=batch, forward_mode=ForwardMode.DECODE)
        for backend in self.attn_backends:
            backend.init_forward_metadata_out_graph(inner, in_capture)

    def init_forward_metadata_in_graph(self, forward_batch) -> None:
        """Fills the buffers of each step."""
        for backend in self.attn_backends:
            backend.init_forward_metadata_in_graph(forward_batch)
