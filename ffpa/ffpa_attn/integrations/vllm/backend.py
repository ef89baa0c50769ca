"""This module is the backend "FFPA" of vLLM: it says what is served, makes a batch of a step, and attends."""

from __future__ import annotations

from typing import ClassVar

import torch

from . import images, releases
from .attention import EIGHT_BITS, Batch, Rule, attend, bound, longest_keys, pools, reserve

try:
    from vllm.v1.attention.backend import (
        AttentionBackend,
        AttentionCGSupport,
        AttentionImpl,
        AttentionMetadataBuilder,
        AttentionType,
        CommonAttentionMetadata,
        MultipleOf,
    )
except ImportError as error:
    raise ImportError(releases.unfit(error)) from error

releases.say_if_untried()
CACHES = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3"]


def reason_against(head_size: int, dtype: torch.dtype, cache: str | None, capability) -> str | None:
    """Says what a layer has that no flag of vLLM's is for, or returns None."""
    if capability is not None and capability < (8, 0):
        return "FFPA needs compute capability 8.0 or newer"
    if cache is not None and cache.startswith("fp8") and head_size % 16:
        return f"an fp8 cache needs a head size that is a multiple of 16, not {head_size}"
    if cache in ("float16", "bfloat16") and getattr(torch, cache) != dtype:
        return f"a {cache} cache under {dtype} is not supported: say --kv-cache-dtype auto"
    return None


def rows_of_decoding(vllm_config) -> int:
    """Returns how many rows a request that decodes has at most: one, and those of its drafted tokens."""
    drafts = vllm_config.speculative_config
    return 1 + (drafts.num_speculative_tokens or 0 if drafts else 0)


class FfpaMetadataBuilder(AttentionMetadataBuilder[Batch]):
    """Makes of a step what all layers of a kind share."""

    # A captured call may be replayed with other lengths; beside uniform batches vLLM asks for those that decode.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.few_rows = rows_of_decoding(vllm_config)
        self.most_keys = vllm_config.model_config.max_model_len if vllm_config.model_config else 0

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config, kv_cache_spec) -> int | None:
        """Returns how many rows the requests of a captured batch may have, each its own number of them."""
        return rows_of_decoding(vllm_config)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Batch:
        """Returns the batch of a step; common_prefix_len and fast_build change nothing."""
        common = common_attn_metadata
        if common.causal is not True:
            raise NotImplementedError(
                "FFPA serves causal layers alone here; choose another backend for a drafter that is not"
            )
        ranges = getattr(common, "mm_req_doc_ranges", None)
        of_images = ranges and images.find(
            ranges, common.query_start_loc_cpu, common.seq_lens_cpu_upper_bound, common.block_table_tensor
        )
        rows = common.max_query_len
        return Batch(
            common.num_actual_tokens,
            bound(rows),
            common.query_start_loc,
            longest_keys(common.max_seq_len, rows if rows <= self.few_rows else 0, self.most_keys),
            common.seq_lens,
            common.block_table_tensor,
            common.slot_mapping,
            images=of_images or None,
        )


class FfpaBackend(releases.StandardPool, AttentionBackend):
    """Says what ffpa serves; vLLM refuses a layer that wants more, with the reason, before it loads a model."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = CACHES
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        return "FFPA"

    @staticmethod
    def get_impl_cls() -> type[FfpaImpl]:
        return FfpaImpl

    @staticmethod
    def get_builder_cls() -> type[FfpaMetadataBuilder]:
        return FfpaMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size > 0 and head_size % 8 == 0

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """Releases before 0.24 tell implementations, not builders, where images are."""
        return "mm_req_doc_ranges" in CommonAttentionMetadata.__dataclass_fields__

    @classmethod
    def supports_combination(cls, head_size, dtype, kv_cache_dtype, *others) -> str | None:
        return reason_against(head_size, dtype, kv_cache_dtype, others[-1])


class FfpaImpl(AttentionImpl[Batch]):
    """Computes the attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **others,
    ) -> None:
        """Takes vLLM's arguments; `others` are those of some models, which have to be off."""
        wanted = {"alibi_slopes": alibi_slopes, **others}
        lacking = [name for name, value in wanted.items() if not (value is None or value is False or value == -1)]
        if lacking:
            raise NotImplementedError(f"FFPA has no {', '.join(lacking)}; choose another backend for this model")
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"FFPA serves decoder layers, not {attn_type}; choose another backend")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype, self.kv_sharing_target_layer_name = kv_cache_dtype, kv_sharing_target_layer_name
        self.sliding_window, self.logits_soft_cap, self.attn_type = sliding_window, logits_soft_cap, attn_type
        window = (-1 if sliding_window is None else sliding_window - 1, -1)
        self.rule = Rule(self.scale, window, float(logits_soft_cap or 0.0), sinks)
        self.has_eight_bits = kv_cache_dtype.startswith("fp8")
        self.write = releases.writer()

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping) -> None:
        """Writes the rows of this step into the pool; a slot of -1 is written nowhere."""
        k_pages, v_pages = pools(kv_cache, self.head_size, kv_cache.dtype)
        scales = layer._k_scale, layer._v_scale
        self.write(key, value, k_pages, v_pages, slot_mapping, self.kv_cache_dtype, *scales)

    def forward(
        self,
        layer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Batch | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attends to the pool, which has the rows of this step already; without a batch vLLM measures memory."""
        if attn_metadata is None:
            reserve(query.device)
            return output.fill_(0)
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("FFPA does not quantise its output; switch the fusion pass off that asks for it")
        dtype, scales = query.dtype, ()
        if self.has_eight_bits:
            dtype, scales = EIGHT_BITS, (layer._k_scale, layer._v_scale)
        attend(query, kv_cache, attn_metadata, output, self.rule, self.head_size, dtype, *scales)
        return output
