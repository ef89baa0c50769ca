"""This module checks what a caller passes. 8-bit floats are checked in fp8_checks.py, and what only memory tells in
memory_checks.py. A message names the argument, what it was, what is allowed and the way out.
"""

from __future__ import annotations

from enum import Enum
from numbers import Integral, Real

import torch

from ..specs.problem import ACCS, ALIGNS, HEAD_DIM_STEP, LAYOUTS, LEVELS, STAGES, LevelType, MMAAccType
from . import words
from .memory_checks import is_expanded

DTYPES = {torch.float16: "f16", torch.bfloat16: "bf16"}
FP8 = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
_LARGEST = 3.4028234663852886e38  # the largest float32: scores are kept in that type
_OF_16_BITS = "16-bit additive"
_KINDS = {torch.bool: "bool", torch.float16: _OF_16_BITS, torch.bfloat16: _OF_16_BITS, torch.float32: "additive"}
_FARTHEST = 2**31 - 1  # no key is farther away
_MOST_ROWS = 2**63 - 1  # the largest number that an operator's int holds
_SYMBOLS = (torch.SymBool, torch.SymFloat, torch.SymInt)


# ---- Python values ----


def known(value) -> bool:
    """Says whether a number is there yet. What a program computes from lengths is a symbol while the program is traced.
    It is asked nothing, as an answer would hold the trace to lengths of that answer; the operator checks it when it
    runs.
    """
    if isinstance(value, (bool, int, float, *_SYMBOLS)) and torch.compiler.is_compiling():
        tells = getattr(torch.fx.experimental.symbolic_shapes, "has_static_value", None)
        return tells(value) if tells else not isinstance(value, _SYMBOLS)
    return not isinstance(value, _SYMBOLS)


def described(value) -> str:
    return f"{value!r} ({type(value).__name__})"


def one_of(name: str, value, allowed: tuple, kind: type = str, more: str = ""):
    """Returns the value if it is one of those allowed; `more` says what else a caller may pass."""
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"`{name}` is {described(value)}; pass one of {allowed}{more}")
    if value not in allowed:
        raise ValueError(f"`{name}` is {value!r}; allowed: {allowed}{more}")
    return value


def level(value) -> int | None:
    if value is None:
        return None
    if isinstance(value, LevelType):
        return value.value
    return one_of("level", value, LEVELS, int, ", LevelType.L1..L3, or None to choose automatically")


def acc(value) -> str:
    if isinstance(value, MMAAccType):
        return value.value
    return one_of("acc", value, ACCS, more=" or MMAAccType.FP32, FP16, MIXED")


def num_stages(value) -> int | None:
    return None if value is None else one_of("num_stages", value, STAGES, int, ", or None to choose automatically")


def layout(value) -> str:
    return one_of("layout", value, LAYOUTS)


def _real(name: str, value, hint: str) -> float:
    if isinstance(value, torch.Tensor):
        raise TypeError(f"`{name}` is a tensor; pass a Python float (reading a tensor would wait for the GPU)")
    if isinstance(value, bool) or not isinstance(value, (int, float, Real, torch.SymFloat, torch.SymInt)):
        raise TypeError(f"`{name}` is {described(value)}; pass a float, {hint}")
    if not known(value):
        return torch.sym_float(value)
    if not abs(value) <= _LARGEST:
        raise ValueError(f"`{name}` is {value}; it must be finite (in float32), {hint}")
    return float(value)


def scale(value) -> float | None:
    return None if value is None else _real("scale", value, "or None for D ** -0.5")


def softcap(value) -> float:
    value = _real("softcap", value, "0.0 for none")
    if known(value) and value < 0:
        raise ValueError(f"`softcap` is {value}; it must be >= 0 (0.0 for none)")
    return value


def window(value) -> tuple[int, int]:
    way_out = "pass (left, right), keys around the diagonal, -1 = unbounded"
    if not isinstance(value, (tuple, list)):
        raise TypeError(f"`window` is {described(value)}; {way_out}")
    if len(value) != 2:
        raise ValueError(f"`window` has {len(value)} entries; {way_out}")
    for side in value:
        if not isinstance(side, (int, torch.SymInt)) or isinstance(side, bool):
            raise TypeError(f"`window` holds {described(side)}; both entries must be ints, -1 = unbounded")
        if known(side) and side < -1:
            raise ValueError(f"`window` is {tuple(value)}; both entries must be >= -1 (-1 = unbounded)")
    left, right = (min(side, _FARTHEST) if known(side) else side for side in value)
    return left, right


def visibility(causal, align, keys) -> dict:
    """Returns which keys a row sees, as operators take it. `causal` is a bool, or the name of an alignment to be causal
    at; for a symbol stands the window's right side.
    """
    align = one_of("align", align, ALIGNS)
    if not isinstance(causal, (bool, str, torch.SymBool)):
        raise TypeError(f"`causal` is {described(causal)}; pass True, False, or an alignment of {ALIGNS}")
    if isinstance(causal, str):
        if causal not in ALIGNS:
            raise ValueError(f"`causal` is {causal!r}; allowed: True, False, or an alignment of {ALIGNS}")
        causal, align = True, causal
    left, right = window(keys)
    if known(causal):  # a symbol may be known, too: n > 8 where n is 9 at least
        causal = True if causal else False
    else:
        causal, right = False, right * torch.sym_ite(causal, 0, 1)
    return {"causal": causal, "align": align, "window_left": left, "window_right": right}


def flag(name: str, value) -> bool:
    if isinstance(value, bool):
        return value
    raise TypeError(f"`{name}` is {described(value)}; pass True or False")


def max_seqlen(name: str, value) -> int:
    if isinstance(value, torch.Tensor):
        raise TypeError(f"`{name}` is a tensor; pass a Python int (reading a tensor would wait for the GPU)")
    if not isinstance(value, (int, torch.SymInt, Integral)) or isinstance(value, bool):
        raise TypeError(f"`{name}` is {described(value)}; pass the longest length as an int")
    if not known(value):
        return value
    if value < 0:
        raise ValueError(f"`{name}` is {value}; it must be >= 0")
    return min(int(value), _MOST_ROWS)


def options(given: dict, layout_given: str = "BHND") -> None:
    """Checks an operator's keyword arguments, which may come without `ffpa`; `given` has only those that are given."""
    layout(layout_given)
    one_of("align", given.get("align", ALIGNS[0]), ALIGNS)
    window((given.get("window_left", -1), given.get("window_right", -1)))
    scale(given.get("scale"))
    softcap(given.get("softcap", 0.0))
    level(given.get("level"))
    acc(given.get("acc", ACCS[0]))
    num_stages(given.get("num_stages"))


def mask_gradient(mask) -> None:
    if mask is None or mask.dtype == torch.bool:
        kind = "None" if mask is None else "bool"
        raise ValueError(f"`mask_grad` is True but `mask` is {kind}; pass an additive mask")


def only_tensors(**named) -> None:
    for name, value in named.items():
        if not isinstance(value, torch.Tensor):
            short = value is None or isinstance(value, (int, float, str, Enum))
            raise TypeError(f"`{name}` is {described(value) if short else type(value).__name__}; pass a torch.Tensor")
        if value.layout is not torch.strided or value.is_nested:
            raise TypeError(_not_dense(name, value))


def tensors_or_none(**named) -> None:
    only_tensors(**{name: value for name, value in named.items() if value is not None})


def _not_dense(name: str, x) -> str:
    if not x.is_nested:
        return f"`{name}` has layout {x.layout}; pass a dense tensor: {name}.to_dense()"
    if name not in ("q", "k", "v", "query", "key", "value"):
        return f"`{name}` is a nested tensor; pass a dense one"
    sequences = x.unbind()
    heads_first = sequences and sequences[0].dim() == 3 and len({len(one) for one in sequences}) == 1
    if x.layout is torch.jagged:
        rows = f"{name}.transpose(1, 2).values()" if heads_first else f"{name}.values()"
    else:
        one_by_one = f"[x.transpose(0, 1) for x in {name}.unbind()]" if heads_first else f"{name}.unbind()"
        rows = f"torch.cat({one_by_one})"
    return (
        f"`{name}` is a nested tensor; pass its sequences, [N, H, D] each, one after the other to ffpa_varlen: {rows}, and "
        "where they begin as cu_seqlens, in torch.int32"
    )


def one_output(o, out):
    """Returns the output, which the caller may have named `out` or, as in the first release, `o`."""
    if o is not None and out is not None:
        raise ValueError("`o` and `out` are both given; they name the same output: pass one")
    tensors_or_none(o=o, out=out)
    return o if out is None else out


def not_a_mask(o, *inputs) -> None:
    """Refuses an `o` that cannot take a result: it is ffpa's fourth argument, where PyTorch's function has its mask."""
    q, _, v = inputs
    if q.dim() != 4 or v.dim() != 4:
        return  # the operator itself reports this
    shape = (*q.shape[:-1], v.shape[-1])
    error = ValueError
    if o.dtype not in DTYPES or (q.dtype in DTYPES and o.dtype != q.dtype):
        error, fault = TypeError, f"has dtype {o.dtype} but `q` has {q.dtype}"
    elif tuple(o.shape) != shape:
        fault = f"has shape {tuple(o.shape)}; a result has {shape}"
    elif is_expanded(o):
        fault = f"is expanded (strides {o.stride()}): several of its elements share memory"
    elif o.requires_grad:
        fault = "requires grad"
    elif torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        fault = "is given but an input requires grad, and what is written to a tensor cannot be differentiated"
    else:
        return
    raise error(f"`o`, the fourth argument, takes the result, and it {fault}; a mask? pass mask=...")


def no_grad_with_out(out, *inputs) -> None:
    if not torch.is_grad_enabled():
        return
    if out.requires_grad:
        raise ValueError("`out` requires grad; pass a plain buffer (out.detach()), or leave `out` away")
    if any(x is not None and x.requires_grad for x in inputs):
        raise ValueError(
            "`out` is given but an input requires grad; results written to `out` cannot be differentiated: "
            "leave `out` away, or call under torch.no_grad()"
        )


# ---- tensors: what shapes, types and devices tell, in fake tensors too ----


def names_of(dtypes) -> str:
    return ", ".join(map(str, dtypes))


def has_dtype(name: str, x, dtype: torch.dtype, way_out: str) -> None:
    if x.dtype != dtype:
        raise TypeError(f"`{name}` has dtype {x.dtype}; it must be {dtype}{way_out}")


def is_where(name: str, x, other: str, y) -> None:
    """Checks that x is on the device of y, which the caller knows as `other`."""
    if x.device != y.device:
        raise ValueError(
            f"`{name}` is on {x.device} but `{other}` is on {y.device}; move it: {name}.to({other}.device)"
        )


def _has_shape(name: str, x, shape) -> None:
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"`{name}` has shape {tuple(x.shape)}; it must be {tuple(shape)}")


def agree(name: str, number: int, other: str, wanted: int, has: str, way_out: str) -> None:
    """Checks that two arguments have the same number; `has` says of what, with {} in the number's place."""
    if number != wanted:
        raise ValueError(f"`{name}` has {has.format(number)} but `{other}` has {wanted}; {way_out}")


def one_dtype_and_device(q, k, v, dtypes) -> None:
    if q.dtype not in dtypes:
        way_out = _way_to_a_dtype(q, dtypes)
        raise TypeError(f"`q` has dtype {q.dtype}; allowed: {names_of(dtypes)}; {way_out}")
    if q.device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"`q` is on {q.device}; allowed: CUDA GPUs and the CPU; move it with .to('cuda')")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            way_out = f"they must agree: {name}.to({q.dtype})"
            raise TypeError(f"`{name}` has dtype {x.dtype} but `q` has {q.dtype}; {way_out}")
        is_where(name, x, "q", q)


def _way_to_a_dtype(q, dtypes) -> str:
    if dtypes is FP8:
        return "make q, k and v with ffpa_attn.quantize_fp8, or pass 16-bit tensors to ffpa"
    if q.dtype in FP8:
        return "pass dense 8-bit floats to ffpa_attn.ffpa_fp8, or cast with .to(torch.bfloat16)"
    way_out, device = "cast with .to(torch.bfloat16)", q.device.type
    # Autocast casts nothing else; where it is on, this very call was made under it.
    would_cast = q.dtype == torch.float32 and device in ("cpu", "cuda") and not torch.is_autocast_enabled(device)
    return f"{way_out}, or call ffpa under torch.autocast({device!r})" if would_cast else way_out


def rows_and_heads(q, k, v, n: int, h: int, way_out: str) -> None:
    """Checks what is the same in both forms; rows are in dim `n`, heads in dim `h`."""
    agree("v", v.shape[n], "k", k.shape[n], "{} rows", way_out)
    d_q, d_v, heads_q, heads_k = q.shape[-1], v.shape[-1], q.shape[h], k.shape[h]
    agree("k", k.shape[-1], "q", d_q, "head dim {}", "q and k must share their last dim")
    of_padding = f"pass scale={max(d_q, 1)} ** -0.5, that of the true dim"
    for name, d, then in (("q", d_q, of_padding), ("v", d_v, "cut the result")):
        if d <= 0 or d % HEAD_DIM_STEP:
            raise ValueError(
                f"`{name}` has head dim {d}; allowed: multiples of {HEAD_DIM_STEP} from {HEAD_DIM_STEP} up; "
                f"pad with zeros to {max(-(-d // HEAD_DIM_STEP), 1) * HEAD_DIM_STEP} and {then}"
            )
    agree("v", v.shape[h], "k", heads_k, "{} heads", "k and v must have the same number of heads")
    if heads_q == 0 or heads_k == 0:
        raise ValueError(f"`{'q' if heads_q == 0 else 'k'}` has no heads; at least one is needed")
    if heads_q % heads_k:
        raise ValueError(f"`q` has {heads_q} heads but `k` has {heads_k}; the first must be a multiple of the second")


def has_rank(name: str, x, rank: int, means: str) -> None:
    if x.dim() != rank:
        hint = "; add the missing dim with x.unsqueeze(...)" if x.dim() < rank else ""
        raise ValueError(f"`{name}` has {x.dim()} dims, shape {tuple(x.shape)}; it must have {rank}: {means}{hint}")


def dense(q, k, v, mask, layout: str, dtypes=DTYPES) -> None:
    means = "[B, H, N, D]" if layout == "BHND" else "[B, N, H, D]"
    for name, x in (("q", q), ("k", k), ("v", v)):
        has_rank(name, x, 4, means)
    one_dtype_and_device(q, k, v, dtypes)
    n, h = (2, 1) if layout == "BHND" else (1, 2)
    batch = q.shape[0]
    for name, x in (("k", k), ("v", v)):
        if x.shape[0] != batch:
            way_out = f"; to share one, {name}.expand({batch}, -1, -1, -1)" if x.shape[0] == 1 else ""
            raise ValueError(f"`{name}` has batch {x.shape[0]} but `q` has {batch}; they must agree{way_out}")
    rows_and_heads(q, k, v, n, h, f"each key needs one value (layout is {layout})")
    if mask is not None:
        _mask(mask, q, (batch, q.shape[h], q.shape[n], k.shape[n]))


def _mask(mask, q, full) -> None:
    if mask.dtype not in _KINDS:
        raise TypeError(
            f"`mask` has dtype {mask.dtype}; allowed: torch.bool (True = take part) or additive float16, bfloat16, float32"
        )
    is_where("mask", mask, "q", q)
    fits = mask.dim() <= 4 and all(m == 1 or m == f for m, f in zip(reversed(mask.shape), reversed(full), strict=False))
    if not fits:
        raise ValueError(f"`mask` has shape {tuple(mask.shape)}; it must broadcast to [B, H, Nq, Nk] = {tuple(full)}")


def sinks(x, q, heads: int, of: str = "q") -> None:
    """Checks sinks of so many heads, those of a tensor which the caller knows as `of`."""
    if x is None:
        return
    allowed = (torch.float32, *DTYPES)
    if x.dtype not in allowed:
        raise TypeError(f"`sinks` has dtype {x.dtype}; allowed: {names_of(allowed)}; cast with .float()")
    is_where("sinks", x, of, q)
    if tuple(x.shape) != (heads,):
        raise ValueError(
            f"`sinks` has shape {tuple(x.shape)}; it must be [Hq] = ({heads},), a logit for each head of `{of}`"
        )


def mask_kind(mask) -> str | None:
    return None if mask is None else _KINDS[mask.dtype]


def is_added(mask) -> bool:
    """Says whether there is a mask that adds to scores."""
    return mask_kind(mask) not in (None, "bool")


def packed(q, k, v, cu_seqlens_q, cu_seqlens_k) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        has_rank(name, x, 3, "[T, H, D], the sequences one after the other")
    one_dtype_and_device(q, k, v, DTYPES)
    rows_and_heads(q, k, v, 0, 1, "each key needs one value")
    for name, cu in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        has_dtype(name, cu, torch.int32, f": {name}.to(torch.int32)")
        has_rank(name, cu, 1, "[B + 1], offsets of the sequences")
        if cu.shape[0] < 1:
            raise ValueError(f"`{name}` is empty; it must hold B + 1 offsets")
        is_where(name, cu, "q", q)
        if not cu.is_contiguous():
            raise ValueError(f"`{name}` is not contiguous; make a copy with {name}.contiguous()")
    entries, wanted = cu_seqlens_k.shape[0], cu_seqlens_q.shape[0]
    agree("cu_seqlens_k", entries, "cu_seqlens_q", wanted, "{} entries", "both must hold B + 1 offsets")


def output(name: str, x, shape, q, of: str = "q") -> None:
    """Checks a place for a result: a converted copy, which others may pass instead, would be none."""
    if x.dtype != q.dtype:
        raise TypeError(f"`{name}` has dtype {x.dtype} but `{of}` has {q.dtype}; they must agree")
    if x.device != q.device:
        raise ValueError(f"`{name}` is on {x.device} but `{of}` is on {q.device}; they must agree")
    _has_shape(name, x, shape)


def saved_lse(name: str, x, shape, q, of: str = "q") -> None:
    has_dtype(name, x, torch.float32, " (natural log)" if name == "lse" else "")
    is_where(name, x, of, q)
    _has_shape(name, x, shape)


# ---- the other functions ----


def arch(value, q) -> str | None:
    """Returns a name such as "sm_90", or None, which asks for the device of q."""
    if value is None:
        if q.is_cuda and not torch.cuda.is_available():
            where = f"on {q.device}, and no GPU is here"
            raise ValueError(f"`arch` is None but `q` is {where}; name one such as arch='sm_90'")
        if q.device.type == "meta":
            raise ValueError("`arch` is None but `q` is on the meta device; name a GPU such as arch='sm_90'")
        return None
    if not isinstance(value, str):
        raise TypeError(f"`arch` is {described(value)}; pass a string such as 'sm_90'")
    number = value.removeprefix("sm_").rstrip("a")
    if not (value.startswith("sm_") and number.isdigit() and int(number) >= 80):
        raise ValueError(f"`arch` is {value!r}; allowed: 'sm_80' and newer, such as 'sm_89' or 'sm_90'")
    return f"sm_{number}"


def no_mask_and_layout(beside: str, mask, given_layout) -> None:
    """Refuses what dense tensors alone have, beside an argument of other forms of a call."""
    for name, is_given in (("mask", mask is not None), ("layout", layout(given_layout) != "BHND")):
        if is_given:
            raise ValueError(f"`{name}` is given beside `{beside}`; {words.WAYS_OUT[name][1]}")


def merge_shapes(o1, lse1, o2, lse2, rows_first: bool) -> None:
    if o1.dim() not in (3, 4):
        raise ValueError(f"`o1` has shape {tuple(o1.shape)}; it must be [B, H, N, D], or packed [T, H, D]")
    heads_by_rows = o1.transpose(-3, -2).shape[:-1] if rows_first else o1.shape[:-1]
    for name, x, shape in (("o2", o2, o1.shape), ("lse1", lse1, heads_by_rows), ("lse2", lse2, heads_by_rows)):
        if tuple(x.shape) != tuple(shape):
            raise ValueError(
                f"`{name}` has shape {tuple(x.shape)}; with `o1` of shape {tuple(o1.shape)} it must be {tuple(shape)}"
            )
    for name, x in (("lse1", lse1), ("lse2", lse2)):
        has_dtype(name, x, torch.float32, " (natural log)")
    for name, x in (("lse1", lse1), ("o2", o2), ("lse2", lse2)):
        is_where(name, x, "o1", o1)
