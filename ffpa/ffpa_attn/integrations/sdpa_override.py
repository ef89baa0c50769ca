"""Puts ffpa in the place of PyTorch's scaled_dot_product_attention: in a `with` (`sdpa`) or everywhere (`enable_sdpa`).

A call is taken where ffpa means exactly what PyTorch means. Every other call, a bad one too, reaches PyTorch as it is.
"""

from __future__ import annotations

import functools
import inspect
import sys

import torch
from torch import _C, nn
from torch.autograd import forward_ad
from torch.backends import cuda
from torch.overrides import TorchFunctionMode, get_overridable_functions

from ..attention import ffpa
from ..backends.sdpa import torch_sdpa  # the function that torch.nn.functional holds, or held
from ..checks import arguments, memory_checks
from ..support import private_torch
from ..support.private_torch import FakeTensor, FunctionalTensor
from . import tf32


class sdpa(TorchFunctionMode):
    """`with sdpa():` has this thread's calls of scaled_dot_product_attention done by ffpa, whatever their name;
    `@sdpa()` has those of a function.

    Calls in float16 and bfloat16 (under autocast in float32, too) that mean the same to ffpa are taken, and large ones
    in float32 where torch.backends.cuda.matmul.allow_tf32 is set; PyTorch does the others. It works eagerly and under
    torch.compile, around a compiled function and in one. Every function of PyTorch takes a microsecond more in it, and
    those that are handed to it whole hide what they call: nn.MultiheadAttention, and `backward`. So what
    torch.utils.checkpoint computes again is PyTorch's, and it raises, as the two differ. `enable_sdpa` has neither cost
    nor gap: train with that.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return (scaled_dot_product_attention if function is torch_sdpa else function)(*args, **(kwargs or {}))

    def __init__(self, *functions):
        if functions:
            raise TypeError(f"sdpa takes no arguments and got {functions[0]!r}; as a decorator it is `@sdpa()`")
        super().__init__()

    def __call__(self, function):
        if inspect.iscoroutinefunction(function):
            raise TypeError(
                f"{function} is a coroutine, which `@sdpa()` does not reach; write `with sdpa():` within it"
            )
        return _context_decorator(lambda: sdpa(), function)


def _decorated(context, function):
    @functools.wraps(function)
    def within(*args, **kwargs):
        with context():
            return function(*args, **kwargs)

    return within


# PyTorch's decorator takes generators and classes as well.
_context_decorator = private_torch.find("torch.utils._contextlib.context_decorator") or _decorated


def enable_sdpa() -> None:
    """Does what `sdpa` does, in all threads till `disable_sdpa`: replaces the function in every module that has it."""
    get_overridable_functions()  # PyTorch and its compiler list once what modes override: now, with its own in place
    _replace(torch_sdpa, scaled_dot_product_attention)
    if not private_torch.no_torchscript:
        torch.jit._builtins._register_builtin(scaled_dot_product_attention, "aten::scaled_dot_product_attention")


def disable_sdpa() -> None:
    """Undoes `enable_sdpa`, in modules that were imported since, too."""
    _replace(scaled_dot_product_attention, torch_sdpa)


def _replace(old, new) -> None:
    for name, module in list(sys.modules.items()):
        if name not in (__name__, "ffpa_attn.backends.sdpa", "torch._C._nn"):
            variables = getattr(module, "__dict__", {})
            for variable in [variable for variable, value in list(variables.items()) if value is old]:
                variables[variable] = new


def scaled_dot_product_attention(*args, **kwargs):
    """Does what PyTorch's function of this name does, by ffpa where that is the same."""
    out = attend(*args, **kwargs)
    return torch_sdpa(*args, **kwargs) if out is None else out


def attend(
    query=None, key=None, value=None, attn_mask=None, dropout_p=0.0, is_causal=False, *more,
    scale=None, enable_gqa=False, align="top_left", **unknown,
):  # fmt: skip
    """Returns what ffpa makes of the arguments of PyTorch's function, or None where it would not do what that does."""
    if more or unknown or private_torch.no_override:
        return None
    if is_causal_bias(attn_mask):
        # The mask's class asks whether it was called by what torch.nn.functional holds, which may be our function.
        return attn_mask._dispatch(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    given = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    if dropout_p != 0 or not all(map(_plain, given)):
        return None
    if attn_mask is not None and align == "top_left" and is_causal:  # PyTorch's own function has no such thing
        return None
    if _transformed() or _only_math():
        return None
    q, k, v, mask = _with_heads(*_cast(query, key, value), attn_mask)
    in_tf32 = tf32.serves(q, k, v)
    dtypes = [torch.float32] if in_tf32 else arguments.DTYPES
    if not _means_the_same(q, k, v, mask, is_causal, scale, enable_gqa, dtypes):
        return None
    if not in_tf32 and not all(map(memory_checks.readable, (q, k, v))):
        return None
    rule = {"causal": is_causal, "align": align, "scale": scale}
    if in_tf32:
        out = tf32.attention(q, k, v, mask, rule)
    elif q.stride(1) < q.stride(2):  # out lies in memory as q does: models make [B, N, H * D] of it without a copy
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = ffpa(q, k, v, mask=mask, layout="BNHD", **rule).transpose(1, 2)
    else:
        out = ffpa(q, k, v, mask=mask, **rule)
    return out if query.dim() == 4 else out.squeeze(1)


def is_causal_bias(mask) -> bool:
    """Says whether it is one of PyTorch's masks that hold no numbers."""
    return isinstance(mask, _loaded("torch.nn.attention.bias", "CausalBias"))


def _transformed() -> bool:
    """Says whether vmap, torch.func.grad, torch.jit.trace or such are on: tensors then stand for something else."""
    if not torch.compiler.is_compiling() and _C._get_tracing_state():
        return True
    interpreter = _C._functorch.peek_interpreter_stack()
    return isinstance(interpreter, _C._functorch.CInterpreter) or forward_ad._current_level >= 0


def _only_math() -> bool:
    """Says whether torch.nn.attention.sdpa_kernel asks for math alone, which can be differentiated twice."""
    return not (cuda.flash_sdp_enabled() or cuda.mem_efficient_sdp_enabled() or cuda.cudnn_sdp_enabled())


_only_math._dynamo_marked_constant = True  # compiled code keeps what was chosen, as it does with PyTorch's own


def _plain(x) -> bool:
    """Says whether x is a dense tensor of numbers, whole or as DTensor's parts, and no other library's."""
    known = (
        type(x) in (torch.Tensor, nn.Parameter)
        or (isinstance(x, _loaded("torch.distributed.tensor", "DTensor")) and not _rows_are_apart(x))
        or (type(x) is FakeTensor and torch.compiler.is_compiling())
        or type(x) is FunctionalTensor
    )
    return known and x.layout is torch.strided and not x.is_nested and (x.is_cpu or x.is_cuda)


def _rows_are_apart(x) -> bool:
    """Says whether ranks hold rows of a DTensor: PyTorch's context parallelism may be at work, with other plans."""
    return any(placement.is_shard() and placement.dim >= x.dim() - 2 for placement in x.placements)


def _loaded(module: str, name: str):
    """Returns a class of PyTorch's, or () if nobody has taken the half second to import it: then nothing is of it."""
    return getattr(sys.modules.get(module), name, ())


def _cast(*tensors):
    """Casts as PyTorch's function does under autocast, which has all but float64 cast."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return [x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors]


def _with_heads(q, k, v, mask):
    """Turns [B, N, D] into [B, 1, N, D]; what has other dims is left to the checks."""
    if q.dim() != 3:
        return q, k, v, mask
    if mask is not None and mask.dim() > 2:
        mask = mask.unsqueeze(1)
    return q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), mask


def _means_the_same(q, k, v, mask, is_causal, scale, enable_gqa, dtypes) -> bool:
    """Says whether ffpa takes the call, by its own checks, and nothing in it is what PyTorch's function refuses."""
    try:
        arguments.flag("is_causal", is_causal)
        arguments.flag("enable_gqa", enable_gqa)
        arguments.scale(scale)
        arguments.dense(q, k, v, mask, "BHND", dtypes)
    except (TypeError, ValueError):
        return False
    if mask is not None and (mask.dim() < 2 or mask.dtype not in (torch.bool, torch.float32, q.dtype)):
        return False
    return enable_gqa or q.shape[1] == k.shape[1]


if private_torch.no_override:

    def _off(*_):
        raise NotImplementedError(private_torch.no_override)

    sdpa = enable_sdpa = _off
