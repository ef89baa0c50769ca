"""What SGLang may ask of a backend and ffpa lacks is refused here, by its name and with what to write instead.

Nothing here imports SGLang: its arguments, runners and layers are read by the names of their attributes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

NAME = "ffpa"
PAGE_STEP = 16  # rows of a page are a multiple of these
PAGE_SIZE = 64  # rows of a page where the user says none
E4M3 = torch.float8_e4m3fn
_OF_CACHES = ("auto", "bf16", "bfloat16", "fp8_e4m3")
_ANOTHER = "name another --attention-backend"


def check_arguments(args) -> None:
    """Raises ValueError where a server is told to do what this backend cannot; `args` are SGLang's, resolved."""
    _check_page_size(args.page_size)
    if args.kv_cache_dtype not in _OF_CACHES:
        raise ValueError(
            f"`--kv-cache-dtype` is {args.kv_cache_dtype}, which the attention backend {NAME} cannot read; it is one "
            f"of {', '.join(_OF_CACHES)}: pass --kv-cache-dtype fp8_e4m3, or {_ANOTHER}"
        )
    _check_drafts(args.speculative_eagle_topk)
    for name in ("dcp_size", "attn_cp_size"):
        if getattr(args, name) > 1:
            raise ValueError(
                f"`--{name.replace('_', '-')}` is {getattr(args, name)}; the attention backend {NAME} does not split a "
                f"sequence over GPUs: pass 1, or {_ANOTHER}"
            )
    if args.dllm_algorithm is not None:
        raise ValueError(
            f"`--dllm-algorithm` is {args.dllm_algorithm}; the attention backend {NAME} serves no diffusion models: "
            f"{_ANOTHER}"
        )
    graphs = getattr(args, "cuda_graph_config", None)
    if graphs is not None and graphs.prefill.backend == "full":
        raise ValueError(
            f"The CUDA graph of a prefill is full; the attention backend {NAME} takes none or a breakable one: pass "
            "--cuda-graph-backend-prefill breakable"
        )


def check_verification(algorithm: str | None, mode: str) -> None:
    """Raises ValueError where drafts of different lengths would be verified at once; `mode` is SGLang's name for how."""
    if (algorithm or "").upper() == "DSPARK" and mode != "static":
        raise ValueError(
            f"SGLANG_RAGGED_VERIFY_MODE is {mode}; the attention backend {NAME} verifies drafts of one length: set it "
            f"to static, or {_ANOTHER}"
        )


def check_runner(runner, topk: int | None, also: dict[str, bool]) -> None:
    """Raises ValueError where a model's runner asks for what this backend lacks. `topk` says how many branches a draft
    has, and `also` names what else SGLang may ask for, and says of each whether it does.
    """
    _check_page_size(runner.page_size)
    if runner.kv_cache_dtype not in (torch.float16, torch.bfloat16, E4M3):
        raise ValueError(
            f"The cache of keys is {runner.kv_cache_dtype}; the attention backend {NAME} reads 16-bit ones and "
            "float8_e4m3fn: pass --kv-cache-dtype auto or fp8_e4m3"
        )
    if runner.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"The model is {runner.dtype}; the attention backend {NAME} takes 16-bit ones: --dtype bfloat16"
        )
    if runner.kv_cache_dtype not in (runner.dtype, E4M3):
        raise ValueError(
            f"The cache of keys is {runner.kv_cache_dtype}, and the model {runner.dtype}; the attention backend {NAME} "
            "reads 16-bit caches of the model's own type: pass --kv-cache-dtype auto"
        )
    _check_drafts(topk)
    config = runner.model_config
    asked = {
        "cross attention": config.is_encoder_decoder,
        "chunked local attention": config.is_local_attention_model,
        "windows that know of the prefill (prefill-aware SWA)": getattr(runner, "prefill_aware_swa", False),
        "a unified pool (--enable-unified-memory)": runner.kv_index_translator.is_translating,
        **also,
    }
    for what in (what for what, is_asked in asked.items() if is_asked):
        raise ValueError(f"SGLang asks for {what}, which the attention backend {NAME} does not support: {_ANOTHER}")


def _check_page_size(rows: int | None) -> None:
    if not rows or rows % PAGE_STEP:
        raise ValueError(
            f"`--page-size` is {rows}; the attention backend {NAME} reads pages of a multiple of {PAGE_STEP} rows: "
            f"pass --page-size {PAGE_SIZE}"
        )


def _check_drafts(topk: int | None) -> None:
    if topk is not None and topk > 1:
        raise ValueError(
            f"`--speculative-eagle-topk` is {topk}, so that drafts are trees; the attention backend {NAME} verifies "
            f"chains: pass 1 (with NGRAM --speculative-ngram-max-bfs-breadth 1), or {_ANOTHER}"
        )


class Rule(NamedTuple):
    """Holds what a layer's attention is."""

    heads: int
    heads_kv: int
    d: int
    d_v: int
    scale: float
    window: tuple[int, int]
    softcap: float
    is_latent: bool  # values are the first columns of keys
    is_dense: bool  # keys and values come with the call; the pool has latents instead
    in_window_pool: bool  # pages are those of the pool for layers with windows


def rule_of(layer, latents: tuple[int, int] | None, in_window_pool: bool, eight_bits: bool = False) -> Rule:
    """Returns the rule of one of SGLang's layers (RadixAttention), or raises NotImplementedError where it has another.
    `latents` are the columns of keys and of values in the pool of a model with MLA; `eight_bits` says of what pools are.
    """
    who = f"SGLang's layer {layer.layer_id}"
    if layer.is_cross_attention:
        raise NotImplementedError(
            f"{who} is cross attention, which the attention backend {NAME} does not support: {_ANOTHER}"
        )
    if layer.attn_type.value != "decoder":
        raise NotImplementedError(
            f"{who} is {layer.attn_type.value}, but the attention backend {NAME} lets rows see earlier ones alone: "
            f"{_ANOTHER}"
        )
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        raise NotImplementedError(
            f"{who} caps logits by {layer.logit_capping_method}; the attention backend {NAME} has tanh alone: "
            f"{_ANOTHER}"
        )
    if layer.xai_temperature_len > 0:
        raise NotImplementedError(
            f"{who} has a temperature for each length, which the attention backend {NAME} lacks: {_ANOTHER}"
        )
    is_latent = (layer.head_dim, layer.v_head_dim) == latents
    is_dense = latents is not None and not is_latent
    for name, d in (("head", layer.head_dim), ("value", layer.v_head_dim)):
        if d % 8:
            raise NotImplementedError(
                f"{who} has a {name} dim of {d}; the attention backend {NAME} takes multiples of 8: {_ANOTHER}"
            )
        if eight_bits and not is_dense and d % 16:
            raise NotImplementedError(
                f"{who} has a {name} dim of {d}; from 8-bit pages the attention backend {NAME} takes multiples of 16: "
                "pass --kv-cache-dtype auto, or bfloat16 where the model itself asks for 8 bits"
            )
    side = layer.sliding_window_size
    window = (side, 0) if side is not None and side >= 0 else (-1, -1)
    return Rule(
        layer.tp_q_head_num,
        layer.tp_k_head_num,
        layer.head_dim,
        layer.v_head_dim,
        float(layer.scaling),
        window,
        float(layer.logit_cap or 0.0),
        is_latent,
        is_dense,
        in_window_pool,
    )


def no_others(given: dict) -> None:
    """Raises where a model hands attention something that this backend does not know."""
    for name, value in given.items():
        if value is not None and value is not False:
            raise NotImplementedError(
                f"SGLang passes `{name}` to attention, which the attention backend {NAME} does not support: {_ANOTHER}"
            )
