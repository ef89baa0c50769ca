"""The providers that can compute a workload: this project's kernels, and the others to compare with."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import product

import torch
import torch.nn.functional as F
from ffpa_attn import env, explain, ffpa, ffpa_varlen
from ffpa_attn.backends.choice import Choice, choose
from ffpa_attn.operators import forms
from ffpa_attn.specs.problem import ACCS, LEVELS, STAGES
from provider import SDPA_TAG, Provider, Unavailable
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from workload import Inputs, Workload, rows_of

_FALLBACKS = ("sdpa", "reference")  # backends that ffpa runs on where no kernel of ours can


# ---- ours ----


def _explain(w: Workload, x: Inputs, **forced) -> Choice:
    direction = "backward" if w.backward else "forward"
    if not w.packed:
        return explain(x.q, x.k, x.v, causal=w.causal, direction=direction, **forced)
    options = {"causal": w.causal, "return_lse": w.backward, **forced}
    return choose(forms.describe(forms.Packed(*x.offsets), direction, x.q, x.k, x.v, options), env.run_flags())


def _ours(w: Workload, tag: str, choice: Choice, **forced) -> Provider:
    def attention(x: Inputs) -> torch.Tensor:
        function = ffpa_varlen if w.packed else ffpa
        return function(x.q, x.k, x.v, *x.offsets, causal=w.causal, **forced)

    own_kernel = choice.backend not in _FALLBACKS
    more = {}
    if choice.plan:
        settings = choice.plan._asdict()
        spec = settings.pop("spec", None)  # compiled kernels have a spec
        more = {"settings": settings, "sums": tuple(getattr(spec, name, "f32") for name in ("acc_qk", "acc_pv"))}
    fallback = None if w.backward else choice.fallback
    return Provider(
        tag, choice.kernel, attention, is_ffpa=True, own_kernel=own_kernel, fallback=fallback, **more, **forced
    )


def our_providers(w: Workload, x: Inputs, refused: list[tuple[str, str]]) -> Iterator[Provider]:
    """Yields every (acc, level, stages) that a kernel exists for, then what runs when nothing is forced. On a GPU,
    `refused` gets the levels that have no kernel, and why.
    """
    for acc, level, num_stages in product(ACCS, LEVELS, STAGES) if not w.backward else ():
        forced = {"acc": acc, "level": level, "num_stages": num_stages}
        try:
            choice = _explain(w, x, **forced)
        except (NotImplementedError, ValueError) as error:  # no such kernel; or FFPA_BACKEND forces another family
            if x.q.is_cuda:
                refused.append((f"ffpa+acc+{acc}+L{level}+stage{num_stages}", str(error).splitlines()[0]))
            continue
        if choice.fallback is None:
            yield _ours(w, f"(ffpa+acc+{acc}+L{level}+stage{num_stages})", choice, **forced)
    yield _ours(w, "(ffpa+auto)", _explain(w, x))


# ---- the others ----


def _sequence_by_sequence(w: Workload, dense: Callable) -> Callable[[Inputs], torch.Tensor]:
    """Applies a dense function to packed inputs, as people do who have no varlen kernel."""

    def attention(x: Inputs) -> torch.Tensor:
        parts = (
            (rows_of(w, t, i, of_keys) for t, of_keys in ((x.q, False), (x.k, True), (x.v, True)))
            for i in range(w.batch)
        )
        return torch.cat([dense(*part)[0].transpose(0, 1) for part in parts])

    return attention if w.packed else lambda x: dense(x.q, x.k, x.v)


def _sdpa(tag: str, kernel: str, backend: SDPBackend | None) -> Callable[[Workload, Inputs], Provider]:
    def make(w: Workload, x: Inputs) -> Provider:
        if backend is not None and not x.q.is_cuda:
            raise Unavailable("PyTorch has this backend on GPUs only")
        if w.causal and any(n_q > n_kv for n_q, n_kv in w.sequences):
            raise Unavailable("SDPA gives NaN for rows that see no key")
        # The efficient backend knows no grouped heads: its users repeat K and V, so that is what they pay.
        grouped = w.heads != w.heads_kv
        repeats = w.heads // w.heads_kv if backend == SDPBackend.EFFICIENT_ATTENTION else 1

        def dense(q, k, v):
            if repeats > 1:
                k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
            n_q, n_kv = q.shape[2], k.shape[2]
            bias = causal_lower_right(n_q, n_kv) if w.causal and n_q != n_kv and n_q > 1 else None
            options = {"is_causal": w.causal and n_q == n_kv, "attn_mask": bias, "enable_gqa": grouped and repeats == 1}
            with sdpa_kernel(backend) if backend is not None else nullcontext():
                return F.scaled_dot_product_attention(q, k, v, **options)

        name = kernel + ("+repeat_kv" if repeats > 1 else "") + ("+loop" if w.packed else "")
        return Provider(tag, name, _sequence_by_sequence(w, dense))

    return make


def _unfused(w: Workload, x: Inputs) -> Provider:
    """Computes attention in three steps, with the scores in memory."""

    def dense(q, k, v):
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
        if w.causal:
            above = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu(k.shape[2] - q.shape[2] + 1)
            scores = scores.masked_fill(above, -torch.inf)
        return torch.softmax(scores, -1, dtype=torch.float32).nan_to_num(0.0).to(v.dtype) @ v

    return Provider("(unfused)", "mm+softmax+mm", _sequence_by_sequence(w, dense))


def _flash_attn(w: Workload, x: Inputs) -> Provider:
    if max(w.d, w.d_v) > 256:
        raise Unavailable("FlashAttention ends at D = 256")
    if w.d != w.d_v:
        raise Unavailable("FlashAttention wants one head dim")
    if not x.q.is_cuda:
        raise Unavailable("it runs on GPUs only")
    if importlib.util.find_spec("flash_attn") is None:
        raise Unavailable("flash-attn is not installed")
    import flash_attn

    def attention(x: Inputs) -> torch.Tensor:
        if w.packed:
            return flash_attn.flash_attn_varlen_func(x.q, x.k, x.v, *x.offsets, causal=w.causal)
        rows_first = (t.transpose(1, 2) for t in (x.q, x.k, x.v))
        return flash_attn.flash_attn_func(*rows_first, causal=w.causal).transpose(1, 2)

    return Provider("(flash)", f"flash-attn {flash_attn.__version__}", attention)


def _flex(w: Workload, x: Inputs) -> Provider:
    if not x.q.is_cuda:
        raise Unavailable("compiled for GPUs only")
    if w.packed:
        raise Unavailable("packed sequences need a block mask per batch")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # without this it would give up, silently, after a few head dims
    compiled = torch.compile(flex_attention, dynamic=False)
    mask = None
    if w.causal:
        shift = w.n_kv - w.n_q
        mask = create_block_mask(lambda b, h, row, key: key <= row + shift, None, None, w.n_q, w.n_kv, device="cuda")

    def attention(x: Inputs) -> torch.Tensor:
        return compiled(x.q, x.k, x.v, block_mask=mask, enable_gqa=w.heads != w.heads_kv)

    return Provider("(flex)", "FlexAttention", attention)


PEERS: dict[str, Callable[[Workload, Inputs], Provider]] = {
    "unfused": _unfused,
    "flash": _flash_attn,
    "sdpa-flash": _sdpa("(sdpa-flash)", "sdpa flash", SDPBackend.FLASH_ATTENTION),
    "sdpa-cudnn": _sdpa("(sdpa-cudnn)", "sdpa cudnn", SDPBackend.CUDNN_ATTENTION),
    "sdpa-math": _sdpa("(sdpa-math)", "sdpa math", SDPBackend.MATH),
    "flex": _flex,
}


def sdpa(w: Workload, x: Inputs) -> Provider:
    """Makes the baseline of every speedup: PyTorch's efficient attention, its one fused kernel for large head dims."""
    backend = SDPBackend.EFFICIENT_ATTENTION if x.q.is_cuda else None
    return _sdpa(SDPA_TAG, "efficient" if x.q.is_cuda else "sdpa cpu", backend)(w, x)
