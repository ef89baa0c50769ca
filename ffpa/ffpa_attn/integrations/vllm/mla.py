"""This module is the backend "FFPA_MLA" of vLLM: MLA decodes on latent vectors, whose first columns are the values."""

from __future__ import annotations

from typing import ClassVar

import torch

from . import releases
from .attention import Batch, Rule, attend_latent, bound, longest_keys, reserve
from .backend import CACHES, reason_against, rows_of_decoding

try:
    from vllm.model_executor.layers.attention.mla_attention import (
        MLACommonBackend,
        MLACommonImpl,
        MLACommonMetadata,
        MLACommonMetadataBuilder,
        QueryLenSupport,
    )
    from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, MultipleOf
except ImportError as error:
    raise ImportError(releases.unfit(error)) from error


class LatentBatch(Batch):
    """Holds rows that decode, with what vLLM's own code reads of a batch."""

    dcp_tot_seq_lens = None


class FfpaMlaMetadataBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
    """Makes of a step what all layers share; prompts are vLLM's own work."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config, kv_cache_spec) -> int | None:
        """Returns how many rows the requests of a captured batch may have, each its own number of them."""
        return rows_of_decoding(vllm_config)

    def _build_decode(self, **given) -> LatentBatch:
        """Takes vLLM's keywords, of which newer releases have more."""
        longest = given.get("max_query_len") or self.reorder_batch_threshold
        return LatentBatch(
            given["num_decode_tokens"],
            bound(longest),
            given["query_start_loc_device"],
            longest_keys(given["max_seq_len"], longest, self.model_config.max_model_len),
            given["seq_lens_device"],
            given["block_table_tensor"],
            slot_mapping=None,
        )


class FfpaMlaBackend(MLACommonBackend):
    """Says what ffpa serves of MLA."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = CACHES

    @staticmethod
    def get_name() -> str:
        return "FFPA_MLA"

    @staticmethod
    def get_impl_cls() -> type[FfpaMlaImpl]:
        return FfpaMlaImpl

    @staticmethod
    def get_builder_cls() -> type[FfpaMlaMetadataBuilder]:
        return FfpaMlaMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_combination(cls, head_size, dtype, kv_cache_dtype, *others) -> str | None:
        return reason_against(head_size, dtype, kv_cache_dtype, others[-1])


class FfpaMlaImpl(MLACommonImpl[MLACommonMetadata]):
    """Computes MLA's attention of one layer where it decodes; prompts are vLLM's own work."""

    supports_pcp: bool = False  # vLLM takes it for granted of MLA

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_args,
    ) -> None:
        """Takes vLLM's arguments."""
        of_scores = alibi_slopes, sliding_window, logits_soft_cap
        if any(of_scores) or attn_type != AttentionType.DECODER:
            raise NotImplementedError(
                "FFPA_MLA serves decoder layers without ALiBi, windows and caps of scores; choose another backend"
            )
        shape, rest = (num_heads, head_size, scale, num_kv_heads), (attn_type, kv_sharing_target_layer_name)
        super().__init__(*shape, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap, *rest, **mla_args)
        self.supports_quant_query_input = False  # q keeps its 16 bits beside an fp8 cache
        self.rule, self.has_eight_bits = Rule(float(scale)), kv_cache_dtype.startswith("fp8")

    def reserve_workspace(self) -> None:
        """Shows the workspace to the run that measures memory, in releases that ask for it."""
        reserve(torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu")

    def forward_mqa(
        self, q, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: MLACommonMetadata, layer
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attends with rows that decode, q [T, H, 576] or its two parts; returns [T, H, 512] and no LSE."""
        if isinstance(q, tuple):
            q = torch.cat(q, dim=-1)
        kv_scale = layer._k_scale if self.has_eight_bits else None
        batch = attn_metadata.decode
        return attend_latent(q, kv_c_and_k_pe_cache, batch, self.rule, self.kv_lora_rank, kv_scale), None
