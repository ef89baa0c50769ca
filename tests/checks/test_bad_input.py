"""What a caller gets wrong raises ValueError or TypeError naming the argument, what it was, and the way out."""

import inspect
import re
from functools import partial

import ffpa_attn
import numpy as np
import pytest
import torch
from ffpa_attn import LevelType, MMAAccType, explain, ffpa, ffpa_varlen, merge
from ffpa_attn.checks import words
from torch._subclasses.fake_tensor import FakeTensorMode

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def t(*shape, dtype=BF16, device="cpu"):
    return torch.randn(shape, device=device).to(dtype)


def call(q=None, k=None, v=None, *args, **keywords):
    """Calls ffpa, with good tensors where none is given."""
    q, k, v = (t(2, 4, 10, 64) if x is None else x for x in (q, k, v))
    return ffpa(q, k, v, *args, **keywords)


def packed(q=None, k=None, v=None, cu_q=None, cu_k=None, max_q=10, max_k=10, **keywords):
    q, k, v = (t(20, 4, 64) if x is None else x for x in (q, k, v))
    cu_q, cu_k = (i32(0, 10, 20) if cu is None else cu for cu in (cu_q, cu_k))
    return ffpa_varlen(q, k, v, cu_q, cu_k, max_q, max_k, **keywords)


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def misaligned(*shape):
    """Returns a tensor whose rows start 2 bytes off."""
    return torch.empty(torch.Size(shape).numel() + 1, dtype=BF16)[1:].view(shape)


def odd_row_stride(*shape):
    return torch.empty(*shape[:-1], shape[-1] + 4, dtype=BF16)[..., : shape[-1]]


def overlapping():
    q = t(2, 4, 10, 64)
    return call(q, out=q)


def over_sinks():
    out = t(2, 4, 10, 64)
    return call(out=out, sinks=out[0, 0, 0, :4])


A_MASK = r"`o`, the fourth argument, takes the result, and it has "


def in_the_fourth_place(x):
    """Calls ffpa with as many keys as columns, so that a mask may have the shape of a result."""
    with torch.no_grad():
        return ffpa(good(64), t(2, 4, 64, 64), t(2, 4, 64, 64), x)


def under_autocast(device, dtype):
    with torch.autocast(device, dtype=BF16):
        return ffpa(*(good(64, dtype=dtype) for _ in range(3)))


def backward_under_autocast():
    """Calls the backward operator under autocast, which casts for no backward."""
    q = good(64, dtype=F32)
    with torch.autocast("cpu", dtype=BF16):
        return torch.ops.ffpa_attn.backward(q, None, q, q, q, q, t(2, 4, 10, dtype=F32))


def nested(layout):
    """Returns two sequences, heads after rows."""
    return torch.nested.nested_tensor([t(5, 4, 64), t(7, 4, 64)], layout=layout)


def with_grad(name):
    q, k, v = (t(2, 4, 10, 64).requires_grad_(x == name) for x in "qkv")
    return ffpa(q, k, v, out=t(2, 4, 10, 64).requires_grad_(name == "out"))


def forward_op(**options):
    """Calls the operator itself, as ring attention does."""
    q = t(2, 4, 10, 64)
    return torch.ops.ffpa_attn.forward(q, q, q, **options)


def backward(mask_grad=False, **changes):
    q = t(2, 4, 10, 64)
    out, lse = torch.ops.ffpa_attn.forward(q, q, q)
    args = {"grad_out": out, "grad_lse": None, "q": q, "k": q, "v": q, "out": out, "lse": lse, "mask": None} | changes
    return torch.ops.ffpa_attn.backward(*args.values(), mask_grad=mask_grad)


good = partial(t, 2, 4, 10)


def fake(device="cpu"):
    with FakeTensorMode():
        return torch.empty(2, 4, 10, 128, dtype=BF16, device=device)


# Each row has what is wrong, the call, the exception, and words of the message.
BAD = [
    # not tensors
    ("q is None", lambda: ffpa(None, good(64), good(64)), TypeError, "`q` is None.*torch.Tensor"),
    ("k is a list", lambda: call(k=[1]), TypeError, "`k` is list.*torch.Tensor"),
    ("v is an array", lambda: call(v=np.zeros((2, 4, 10, 64))), TypeError, "`v` is ndarray.*torch.Tensor"),
    ("mask is a bool", lambda: call(mask=True), TypeError, "`mask` is True.*torch.Tensor"),
    ("out is a number", lambda: call(out=1.0), TypeError, "`out` is 1.0.*torch.Tensor"),
    # tensors that are no dense ones
    ("q nested", lambda: call(nested(torch.jagged)), TypeError, r"`q` is a nested tensor; .*ffpa_varlen: q.values\(\)"),
    ("mask nested", lambda: call(mask=nested(torch.jagged)), TypeError, "`mask` is a nested tensor; pass a dense one"),
    ("q nested, heads first", lambda: call(nested(torch.jagged).transpose(1, 2)), TypeError, "`q` is a nested tensor"),
    ("k nested, strided", lambda: call(k=nested(torch.strided)), TypeError, r"`k` is a nested tensor; .*torch.cat\(k.unbind\(\)\)"),
    ("q sparse", lambda: call(good(64).to_sparse()), TypeError, r"`q` has layout torch.sparse_coo; .*q.to_dense\(\)"),
    ("sinks as a list", lambda: call(sinks=[0.0] * 4), TypeError, "`sinks` is list; pass a torch.Tensor"),
    ("packed sinks as a number", lambda: packed(sinks=0.5), TypeError, r"`sinks` is 0.5 \(float\); pass a torch.Tensor"),
    ("sinks of a batch", lambda: call(sinks=t(2, 4)), ValueError, r"`sinks` has shape \(2, 4\); it must be \[Hq\] = \(4,\)"),
    ("sinks of the keys' heads", lambda: call(k=t(2, 2, 10, 64), v=t(2, 2, 10, 64), sinks=t(2)), ValueError, r"`sinks` has shape \(2,\); .*a logit for each head of `q`"),
    ("packed sinks of rows", lambda: packed(sinks=t(20)), ValueError, r"`sinks` has shape \(20,\); it must be \[Hq\] = \(4,\)"),
    ("sinks in float64", lambda: call(sinks=t(4).double()), TypeError, r"`sinks` has dtype torch.float64; allowed: torch.float32, torch.float16, torch.bfloat16; cast with .float\(\)"),
    ("sinks elsewhere", lambda: call(sinks=t(4, device="meta")), ValueError, r"`sinks` is on meta but `q` is on cpu; move it: sinks.to\(q.device\)"),
    ("return_max_logits as a number", lambda: call(return_max_logits=1), TypeError, r"`return_max_logits` is 1 \(int\); pass True or False"),
    ("packed return_max_logits as a word", lambda: packed(return_max_logits="yes"), TypeError, "`return_max_logits` is 'yes'"),
    ("sinks of other heads to their gradient", lambda: torch.ops.ffpa_attn.sink_gradient(good(64), None, good(64), t(2, 4, 10, dtype=F32), t(3)), ValueError, r"`sinks` has shape \(3,\); .*each head of `out`"),
    ("an LSE of 16 bits to sinks' gradient", lambda: torch.ops.ffpa_attn.sink_gradient(good(64), None, good(64), t(2, 4, 10), t(4)), TypeError, "`lse` has dtype torch.bfloat16; it must be torch.float32"),
    ("gradients of another shape to sinks' gradient", lambda: torch.ops.ffpa_attn.sink_gradient(good(72), None, good(64), t(2, 4, 10, dtype=F32), t(4)), ValueError, r"`grad_out` has shape \(2, 4, 10, 72\); it must be \(2, 4, 10, 64\)"),
    ("rows alone to sinks' gradient", lambda: torch.ops.ffpa_attn.sink_gradient(t(10, 64), None, t(10, 64), t(10, dtype=F32), t(4)), ValueError, r"`out` has 2 dims"),
    ("a sparse mask", lambda: call(mask=torch.ones(10, 10).to_sparse_csr()), TypeError, r"`mask` has layout torch.sparse_csr; .*mask.to_dense\(\)"),
    ("v of MKL-DNN", lambda: call(v=good(64, dtype=F32).to_mkldnn()), TypeError, r"`v` has layout torch._mkldnn; .*v.to_dense\(\)"),
    ("packed nested", lambda: packed(q=nested(torch.jagged)), TypeError, "`q` is a nested tensor"),
    ("explain: nested", lambda: explain(*[nested(torch.jagged)] * 3), TypeError, "`q` is a nested tensor"),
    ("merge: sparse", lambda: merge(good(64).to_sparse(), *[t(2, 4, 10, dtype=F32)] * 3), TypeError, "`o1` has layout"),
    # types of numbers
    ("q in float32", lambda: call(q=good(64, dtype=F32)), TypeError, r"`q` has dtype torch.float32; allowed: torch.float16, torch.bfloat16.*\.to\(torch.bfloat16\), or call ffpa under torch.autocast\('cpu'\)"),
    ("q in float32 in autocast of another device", lambda: under_autocast("cuda", F32), TypeError, r"torch.autocast\('cpu'\)"),
    ("q in float64", lambda: call(q=good(64, dtype=torch.float64)), TypeError, r"`q` has dtype torch.float64; .*cast with .to\(torch.bfloat16\)$"),
    ("q in float64 in autocast", lambda: under_autocast("cpu", torch.float64), TypeError, r"cast with .to\(torch.bfloat16\)$"),
    ("gradients in float32 in autocast", backward_under_autocast, TypeError, r"cast with .to\(torch.bfloat16\)$"),
    ("q in 8 bits", lambda: call(q=good(64, dtype=torch.float8_e4m3fn)), TypeError, r"`q` has dtype torch.float8_e4m3fn; .*ffpa_attn.ffpa_fp8, or cast with .to\(torch.bfloat16\)$"),
    ("q in int", lambda: call(q=torch.zeros(2, 4, 10, 64, dtype=torch.int64)), TypeError, "`q` has dtype torch.int64.*cast"),
    ("k in another type", lambda: call(k=good(64, dtype=F16)), TypeError, r"`k` has dtype torch.float16 but `q` has torch.bfloat16.*k.to\(torch.bfloat16\)"),
    ("v in another type", lambda: call(v=good(64, dtype=F32)), TypeError, "`v` has dtype torch.float32 but `q` has torch.bfloat16"),
    # devices
    ("k elsewhere", lambda: call(k=good(64, device="meta")), ValueError, r"`k` is on meta but `q` is on cpu.*k.to\(q.device\)"),
    ("mask elsewhere", lambda: call(mask=torch.ones(10, 10, dtype=torch.bool, device="meta")), ValueError, "`mask` is on meta but `q` is on cpu"),
    ("out elsewhere", lambda: call(out=good(64, device="meta")), ValueError, "`out` is on meta but `q` is on cpu"),
    # ranks and shapes
    ("3-D q", lambda: call(q=t(4, 10, 64)), ValueError, r"`q` has 3 dims, shape \(4, 10, 64\); it must have 4: \[B, H, N, D\].*unsqueeze"),
    ("5-D k", lambda: call(k=t(1, 2, 4, 10, 64)), ValueError, "`k` has 5 dims.*must have 4"),
    ("2-D v in BNHD", lambda: call(v=t(4, 64), layout="BNHD"), ValueError, r"`v` has 2 dims.*\[B, N, H, D\]"),
    ("batch of k", lambda: call(k=t(1, 4, 10, 64), v=t(1, 4, 10, 64)), ValueError, "`k` has batch 1 but `q` has 2.*k.expand.2, -1"),
    ("batch of v", lambda: call(v=t(3, 4, 10, 64)), ValueError, "`v` has batch 3 but `q` has 2; they must agree$"),
    ("rows of v", lambda: call(v=t(2, 4, 11, 64)), ValueError, "`v` has 11 rows but `k` has 10; each key needs one value"),
    ("rows of v in BNHD", lambda: call(v=t(2, 5, 10, 64), layout="BNHD"), ValueError, "`v` has 5 rows but `k` has 4.*layout is BNHD"),
    ("head dim of k", lambda: call(k=good(128)), ValueError, "`k` has head dim 128 but `q` has 64"),
    ("head dim of q not a multiple of 8", lambda: call(good(60), good(60)), ValueError, r"`q` has head dim 60; allowed: multiples of 8.*pad with zeros to 64 and pass scale=60 \*\* -0.5"),
    ("head dim of v not a multiple of 8", lambda: call(v=good(4)), ValueError, "`v` has head dim 4; allowed: multiples of 8.*pad with zeros to 8 and cut the result"),
    ("head dim 0", lambda: call(good(0), good(0)), ValueError, "`q` has head dim 0; allowed: multiples of 8 from 8"),
    ("heads of v", lambda: call(v=t(2, 2, 10, 64)), ValueError, "`v` has 2 heads but `k` has 4"),
    ("heads not a multiple", lambda: call(k=t(2, 3, 10, 64), v=t(2, 3, 10, 64)), ValueError, "`q` has 4 heads but `k` has 3.*multiple"),
    ("no heads", lambda: call(t(2, 0, 10, 64)), ValueError, "`q` has no heads"),
    ("no key heads", lambda: call(k=t(2, 0, 10, 64), v=t(2, 0, 10, 64)), ValueError, "`k` has no heads"),
    # memory
    ("head dim strided", lambda: call(q=good(128)[..., ::2]), ValueError, r"`q` has stride 2 in its last dim; it must be 1; make a copy with q.contiguous\(\)$"),
    ("head dim not last", lambda: call(k=t(2, 4, 64, 10).mT), ValueError, "`k` has stride 10 in its last dim"),
    ("start misaligned", lambda: call(v=misaligned(2, 4, 10, 64)), ValueError, r"`v` starts at an address that is not a multiple of 16 bytes; make a copy with v.clone\(\)$"),
    ("rows misaligned", lambda: call(q=odd_row_stride(2, 4, 10, 64)), ValueError, r"`q` has strides \(2720, 680, 68, 1\); all but the last must be multiples of 8.*q.contiguous\(\)$"),
    # scale, softcap, window
    ("scale NaN", lambda: call(scale=float("nan")), ValueError, "`scale` is nan; it must be finite"),
    ("scale infinite", lambda: call(scale=float("-inf")), ValueError, "`scale` is -inf; it must be finite"),
    ("scale a string", lambda: call(scale="1"), TypeError, r"`scale` is '1' \(str\); pass a float"),
    ("scale a bool", lambda: call(scale=True), TypeError, r"`scale` is True \(bool\)"),
    ("scale a tensor", lambda: call(scale=torch.tensor(0.1)), TypeError, "`scale` is a tensor; pass a Python float"),
    ("softcap negative", lambda: call(softcap=-1.0), ValueError, "`softcap` is -1.0; it must be >= 0"),
    ("softcap infinite", lambda: call(softcap=float("inf")), ValueError, "`softcap` is inf; it must be finite .in float32., 0.0 for none"),
    ("softcap None", lambda: call(softcap=None), TypeError, "`softcap` is None"),
    ("window a number", lambda: call(window=128), TypeError, r"`window` is 128 \(int\); pass \(left, right\)"),
    ("window of three", lambda: call(window=(1, 2, 3)), ValueError, r"`window` has 3 entries; pass \(left, right\)"),
    ("window of floats", lambda: call(window=(1.0, 0)), TypeError, r"`window` holds 1.0 \(float\)"),
    ("window below -1", lambda: call(window=(-2, 0)), ValueError, r"`window` is \(-2, 0\); both entries must be >= -1"),
    # names
    ("causal an int", lambda: call(causal=1), TypeError, r"`causal` is 1 \(int\); pass True, False"),
    ("causal an unknown name", lambda: call(causal="left"), ValueError, "`causal` is 'left'; allowed: True, False.*bottom_right.*top_left"),
    ("align unknown", lambda: call(align="middle"), ValueError, "`align` is 'middle'; allowed: .*bottom_right.*top_left"),
    ("align None", lambda: call(align=None), TypeError, "`align` is None"),
    ("layout unknown", lambda: call(layout="BHDN"), ValueError, "`layout` is 'BHDN'; allowed: .*BHND.*BNHD"),
    ("layout a tuple", lambda: call(layout=(0, 1)), TypeError, r"`layout` is \(0, 1\)"),
    ("return_lse a string", lambda: call(return_lse="yes"), TypeError, "`return_lse` is 'yes'.*pass True or False"),
    ("level 4", lambda: call(level=4), ValueError, r"`level` is 4; allowed: \(1, 2, 3\), LevelType.L1..L3, or None"),
    ("level 0", lambda: call(level=0), ValueError, "`level` is 0"),
    ("level a string", lambda: call(level="L1"), TypeError, r"`level` is 'L1' \(str\)"),
    ("level an accumulator", lambda: call(level=MMAAccType.FP32), TypeError, "`level` is <MMAAccType.FP32"),
    ("acc unknown", lambda: call(acc="bf16"), ValueError, "`acc` is 'bf16'; allowed: .*f32.*f16.*mixed"),
    ("acc a level", lambda: call(acc=LevelType.L1), TypeError, "`acc` is <LevelType.L1"),
    ("acc a type", lambda: call(acc=torch.float32), TypeError, "`acc` is torch.float32"),
    ("num_stages 5", lambda: call(num_stages=5), ValueError, r"`num_stages` is 5; allowed: \(1, 2, 3, 4\)"),
    ("num_stages 0", lambda: call(num_stages=0), ValueError, "`num_stages` is 0"),
    ("num_stages a float", lambda: call(num_stages=2.0), TypeError, r"`num_stages` is 2.0 \(float\)"),
    # masks
    ("mask of ints", lambda: call(mask=torch.ones(10, 10, dtype=torch.int64)), TypeError, "`mask` has dtype torch.int64; allowed: torch.bool"),
    ("mask of doubles", lambda: call(mask=torch.ones(10, 10, dtype=torch.float64)), TypeError, "`mask` has dtype torch.float64"),
    ("mask keys", lambda: call(mask=torch.ones(10, 11, dtype=torch.bool)), ValueError, r"`mask` has shape \(10, 11\); it must broadcast to \[B, H, Nq, Nk\] = \(2, 4, 10, 10\)"),
    ("mask by key head", lambda: call(k=t(2, 2, 10, 64), v=t(2, 2, 10, 64), mask=torch.ones(2, 2, 10, 10, dtype=torch.bool)), ValueError, r"`mask` has shape \(2, 2, 10, 10\)"),
    ("mask 5-D", lambda: call(mask=torch.ones(1, 1, 1, 10, 10, dtype=torch.bool)), ValueError, "`mask` has shape"),
    # out
    ("o and out", lambda: call(None, None, None, good(64), out=good(64)), ValueError, "`o` and `out` are both given"),
    ("a bool mask in the fourth place", lambda: in_the_fourth_place(torch.ones(10, 10, dtype=torch.bool)), TypeError, A_MASK + "dtype torch.bool but `q` has torch.bfloat16; a mask"),
    ("a float32 mask in the fourth place", lambda: in_the_fourth_place(t(2, 4, 10, 64, dtype=F32)), TypeError, A_MASK + "dtype torch.float32 but"),
    ("a mask of another 16-bit type in the fourth place", lambda: in_the_fourth_place(t(2, 4, 10, 64, dtype=F16)), TypeError, A_MASK + "dtype torch.float16 but"),
    ("a mask of keys in the fourth place", lambda: in_the_fourth_place(t(2, 4, 10, 10)), ValueError, A_MASK + r"shape \(2, 4, 10, 10\); a result has \(2, 4, 10, 64\); a mask"),
    ("a mask of all heads in the fourth place", lambda: in_the_fourth_place(t(10, 64)), ValueError, A_MASK + r"shape \(10, 64\)"),
    ("a mask of heads in the fourth place, expanded", lambda: in_the_fourth_place(t(1, 4, 10, 64).expand(2, -1, -1, -1)), ValueError, r"`o`, the fourth argument.*is expanded.*a mask\? pass mask="),
    ("a learned mask in the fourth place", lambda: in_the_fourth_place(t(2, 4, 10, 64).requires_grad_()), ValueError, r"`o`, the fourth argument.*requires grad; a mask\? pass mask="),
    ("a mask in the fourth place, in training", lambda: ffpa(good(64).requires_grad_(), good(64), good(64), good(64)), ValueError, r"`o`, the fourth argument.*an input requires grad.*a mask\? pass mask="),
    ("a number in the fourth place", lambda: in_the_fourth_place(0.0), TypeError, "`o` is 0.0.*torch.Tensor"),
    ("explain: a mask in the fourth place", lambda: explain(good(64), good(64), good(64), torch.ones(10, 10, dtype=torch.bool)), TypeError, A_MASK + "dtype torch.bool"),
    ("shape of out", lambda: call(out=good(128)), ValueError, r"`out` has shape \(2, 4, 10, 128\); it must be \(2, 4, 10, 64\)"),
    ("type of out", lambda: call(out=good(64, dtype=F32)), TypeError, "`out` has dtype torch.float32 but `q` has torch.bfloat16"),
    ("out strided", lambda: call(out=good(128)[..., ::2]), ValueError, "`out` has stride 2 in its last dim"),
    ("out misaligned", lambda: call(out=misaligned(2, 4, 10, 64)), ValueError, "`out` starts at an address"),
    ("out expanded", lambda: call(out=t(1, 4, 10, 64).expand(2, -1, -1, -1)), ValueError, r"`out` is expanded .*out.clone\(\)"),
    ("out is q", overlapping, ValueError, "`out` overlaps the memory of `q`"),
    ("sinks in out", over_sinks, ValueError, "`out` overlaps the memory of `sinks`"),
    ("out needs grad", lambda: with_grad("out"), ValueError, r"`out` requires grad.*out.detach\(\)"),
    ("k needs grad with out", lambda: with_grad("k"), ValueError, r"`out` is given but an input requires grad.*torch.no_grad\(\)"),
    # packed sequences
    ("packed 4-D", lambda: packed(q=good(64)), ValueError, r"`q` has 4 dims.*must have 3: \[T, H, D\]"),
    ("packed rows of v", lambda: packed(v=t(21, 4, 64)), ValueError, "`v` has 21 rows but `k` has 20"),
    ("offsets a list", lambda: packed(cu_q=[0, 10, 20]), TypeError, "`cu_seqlens_q` is list"),
    ("offsets int64", lambda: packed(cu_k=torch.tensor([0, 10, 20])), TypeError, r"`cu_seqlens_k` has dtype torch.int64; it must be torch.int32: cu_seqlens_k.to\(torch.int32\)"),
    ("offsets 2-D", lambda: packed(cu_q=i32(0, 10, 20)[None]), ValueError, r"`cu_seqlens_q` has 2 dims.*\[B \+ 1\]"),
    ("offsets empty", lambda: packed(cu_q=i32()), ValueError, "`cu_seqlens_q` is empty"),
    ("offsets strided", lambda: packed(cu_q=i32(0, 0, 10, 10, 20, 20)[::2]), ValueError, r"`cu_seqlens_q` is not contiguous.*contiguous\(\)"),
    ("offsets of different lengths", lambda: packed(cu_k=i32(0, 20)), ValueError, "`cu_seqlens_k` has 2 entries but `cu_seqlens_q` has 3"),
    ("offsets elsewhere", lambda: packed(cu_q=i32(0, 10, 20).to("meta")), ValueError, "`cu_seqlens_q` is on meta but `q` is on cpu"),
    ("offsets past the longest", lambda: packed(cu_q=i32(0, 15, 20)), ValueError, "`max_seqlen_q` is 10 but sequence 0 has 15 rows"),
    ("offsets fall within the longest", lambda: packed(cu_q=i32(0, 10, 5)), ValueError, "`cu_seqlens_q` falls from 10 to 5 at entry 2"),
    ("offsets past the end", lambda: packed(cu_k=i32(0, 10, 21), max_k=11), ValueError, r"`cu_seqlens_k` spans 0..21; the tensor has rows 0..20"),
    ("offsets negative", lambda: packed(cu_k=i32(-1, 10, 20)), ValueError, "`cu_seqlens_k` spans -1..20"),
    ("offsets past the end inside", lambda: packed(cu_q=i32(0, 25, 20), max_q=25), ValueError, "`cu_seqlens_q` falls from 25 to 20 at entry 2"),
    ("longest too short", lambda: packed(max_q=9), ValueError, "`max_seqlen_q` is 9 but sequence 0 has 10 rows"),
    ("longest negative", lambda: packed(max_k=-1), ValueError, "`max_seqlen_k` is -1; it must be >= 0"),
    ("longest a tensor", lambda: packed(max_q=torch.tensor(10)), TypeError, "`max_seqlen_q` is a tensor; pass a Python int"),
    ("longest a float", lambda: packed(max_q=10.0), TypeError, r"`max_seqlen_q` is 10.0 \(float\)"),
    ("packed out", lambda: packed(out=t(19, 4, 64)), ValueError, r"`out` has shape \(19, 4, 64\); it must be \(20, 4, 64\)"),
    ("packed mask", lambda: packed(mask=torch.ones(20, 20)), TypeError, r"ffpa_varlen\(\) got an unexpected keyword argument 'mask'; call ffpa with it, for one sequence at a time"),
    ("packed layout", lambda: packed(layout="BHND"), TypeError, "'layout'; leave it away"),
    # operators
    ("backward: shape of grad_out", lambda: backward(grad_out=good(128)), ValueError, r"`grad_out` has shape \(2, 4, 10, 128\)"),
    ("backward: type of lse", lambda: backward(lse=t(2, 4, 10)), TypeError, "`lse` has dtype torch.bfloat16; it must be torch.float32"),
    ("backward: shape of lse", lambda: backward(lse=t(2, 10, 4, dtype=F32)), ValueError, r"`lse` has shape \(2, 10, 4\); it must be \(2, 4, 10\)"),
    ("backward: type of grad_lse", lambda: backward(grad_lse=t(2, 4, 10)), TypeError, "`grad_lse` has dtype torch.bfloat16"),
    ("backward: type of out", lambda: backward(out=good(64, dtype=F32)), TypeError, "`out` has dtype torch.float32 but `q` has"),
    ("operator: align", lambda: forward_op(align="top-left"), ValueError, "`align` is 'top-left'; allowed"),
    ("operator: layout", lambda: forward_op(layout="BHDN"), ValueError, "`layout` is 'BHDN'; allowed"),
    ("operator: window", lambda: forward_op(window_left=-7), ValueError, r"`window` is \(-7, -1\)"),
    ("operator: scale", lambda: forward_op(scale=float("nan")), ValueError, "`scale` is nan"),
    ("operator: softcap", lambda: forward_op(softcap=-3.0), ValueError, "`softcap` is -3.0"),
    ("operator: acc", lambda: forward_op(acc="f64"), ValueError, "`acc` is 'f64'"),
    ("operator: level", lambda: forward_op(level=9), ValueError, "`level` is 9"),
    ("operator: stages", lambda: forward_op(num_stages=9), ValueError, "`num_stages` is 9"),
    ("backward: gradient of no mask", lambda: backward(mask_grad=True), ValueError, "`mask_grad` is True but `mask` is None"),
    ("backward: gradient of a bool mask", lambda: backward(mask=torch.ones(10, 10, dtype=torch.bool), mask_grad=True), ValueError, "`mask` is bool"),
    ("scale past float32", lambda: call(scale=1e300), ValueError, r"`scale` is 1e\+300; it must be finite .in float32."),
    ("explain: mask", lambda: explain(good(64), good(64), good(64), mask=True), TypeError, "`mask` is True"),
    ("explain: misaligned", lambda: explain(misaligned(2, 4, 10, 64), good(64), good(64)), ValueError, "`q` starts at an address"),
    ("explain: out", lambda: explain(good(64), good(64), good(64), out=good(32)), ValueError, "`out` has shape"),
    # merge and explain
    ("merge: shape of o2", lambda: merge(good(64), t(2, 4, 10, dtype=F32), good(32), t(2, 4, 10, dtype=F32)), ValueError, r"`o2` has shape \(2, 4, 10, 32\)"),
    ("merge: shape of lse1", lambda: merge(good(64), t(2, 10, 4, dtype=F32), good(64), t(2, 4, 10, dtype=F32)), ValueError, r"`lse1` has shape \(2, 10, 4\).*\(2, 4, 10\)"),
    ("merge: type of lse2", lambda: merge(good(64), t(2, 4, 10, dtype=F32), good(64), t(2, 4, 10)), TypeError, "`lse2` has dtype torch.bfloat16"),
    ("merge: rank of o1", lambda: merge(t(4, 64), t(4, dtype=F32), t(4, 64), t(4, dtype=F32)), ValueError, r"`o1` has shape \(4, 64\)"),
    ("explain: arch", lambda: explain(good(64), good(64), good(64), arch="hopper"), ValueError, "`arch` is 'hopper'; allowed: 'sm_80' and newer"),
    ("explain: old arch", lambda: explain(good(64), good(64), good(64), arch="sm_75"), ValueError, "`arch` is 'sm_75'"),
    ("explain: arch a number", lambda: explain(good(64), good(64), good(64), arch=90), TypeError, r"`arch` is 90 \(int\)"),
    ("explain: meta without arch", lambda: explain(*(good(64, device="meta"),) * 3), ValueError, "`arch` is None but `q` is on the meta device"),
    ("explain: direction", lambda: explain(good(64), good(64), good(64), direction="both"), ValueError, "`direction` is 'both'"),
    ("explain: fake rows", lambda: explain(*(fake()[..., ::2],) * 3), ValueError, "`q` has stride 2 in its last dim"),
    ("explain: meta rows", lambda: explain(*(good(128, device="meta")[..., ::2],) * 3, arch="sm_90"), ValueError, "`q` has stride 2"),
    ("explain: shapes", lambda: explain(good(64), good(128), good(64)), ValueError, "`k` has head dim 128"),
]  # fmt: skip


@pytest.mark.parametrize("wrong, call_it, exception, words", BAD, ids=[entry[0] for entry in BAD])
def test_bad_input(wrong, call_it, exception, words):
    with pytest.raises(exception) as caught:
        call_it()
    assert re.search(words, str(caught.value)), f"the message does not say it: {caught.value}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU is here")
def test_explain_of_a_gpu_that_is_not_here():
    with pytest.raises(ValueError, match="`arch` is None but `q` is on cuda:0.*arch='sm_90'"):
        explain(*(fake(device="cuda"),) * 3)


WORDS = [
    ("is_causal", "pass causal=True"),
    ("attn_mask", "pass it as mask="),
    ("dropout_p", "there is no dropout"),
    ("enable_gqa", "leave it away: heads"),
    ("softmax_scale", "pass it as scale="),
    ("window_size", r"pass it as window=\(left, right\)"),
    ("casual", "did you mean `causal`"),
    ("s_aux", r"pass it as sinks=, a tensor \[Hq\]"),
    ("sink", "pass it as sinks="),
    ("learnable_sink", "pass it as sinks="),
    ("attention_sinks", "pass it as sinks="),
    ("return_max_logit", "pass return_max_logits=True"),
    ("zzz", "allowed: q, k, v, o, num_stages, level, acc, causal"),
]


@pytest.mark.parametrize("word, way_out", WORDS)
@pytest.mark.parametrize("function", [ffpa, explain])
def test_words_of_other_functions(function, word, way_out):
    with pytest.raises(
        TypeError, match=rf"^{function.__name__}\(\) got an unexpected keyword argument '{word}'; {way_out}"
    ):
        function(good(64), good(64), good(64), **{word: None})


@pytest.mark.parametrize(
    "function, word, way_out",
    [
        (ffpa, "cu_seqlens_q", "packed sequences go to ffpa_varlen"),
        (explain, "page_table", "pass it as block_table="),
        (explain, "cache_seqlens", "a cache of keys goes to ffpa_with_kvcache; to explain it is k, v and seqused_k"),
        (ffpa_varlen, "is_causal", "pass causal=True"),
        (ffpa_varlen, "attn_mask", "ffpa_varlen has no `mask`; call ffpa with it, for one sequence at a time"),
        (ffpa_varlen, "page_table", "pass it as block_table="),
        (ffpa_varlen, "cache_seqlens", "a cache of keys goes to ffpa_with_kvcache"),
        (ffpa_attn.ffpa_fp8, "softmax_scale", "pass it as scale="),
        (ffpa_attn.ffpa_fp8, "mask", "call ffpa"),
        (ffpa_attn.ffpa_fp8, "s_aux", "pass it as sinks="),
        (ffpa_attn.distributed.ring_attention, "learnable_sink", "pass it as sinks="),
        (ffpa_attn.distributed.ring_attention, "is_causal", "pass causal=True"),
        (
            ffpa_attn.distributed.ring_attention,
            "window_size",
            "ring_attention has no `window`; ffpa and ffpa_varlen have it",
        ),
        (ffpa_attn.distributed.ulysses_attention, "softmax_scale", "pass it as scale="),
    ],
    ids=str,
)
def test_words_of_other_functions_elsewhere(function, word, way_out):
    tensors = [good(64)] * 3 if function is not ffpa_varlen else [t(20, 4, 64)] * 3 + [i32(0, 10, 20)] * 2 + [10, 10]
    with pytest.raises(TypeError, match=f"'{word}'; {way_out}"):
        function(*tensors, **{word: None})


def test_each_word_is_one_that_ffpa_does_not_know():
    ours = inspect.signature(ffpa).parameters
    assert not words.WAYS_OUT.keys() & (ours.keys() - {"mask", "layout", "sinks"})
    assert all(new is None or new in {*ours, "block_table"} for new, _ in words.WAYS_OUT.values())


@pytest.mark.parametrize("name", ["q", "k"])
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
@pytest.mark.parametrize("heads_first", [False, True])
def test_the_way_out_of_nested_tensors(name, layout, heads_first):
    x = nested(layout)
    parts, offsets = x.unbind(), i32(0, 5, 12)
    x = x.transpose(1, 2) if heads_first else x
    with pytest.raises(TypeError, match="nested") as caught:
        call(**{name: x})
    rows = eval(re.search(r"ffpa_varlen: (.*), and where", str(caught.value))[1], {name: x, "torch": torch})
    got = ffpa_varlen(rows, rows, rows, offsets, offsets, 7, 7)
    want = [ffpa(*[part.transpose(0, 1)[None]] * 3)[0].transpose(0, 1) for part in parts]
    torch.testing.assert_close(got, torch.cat(want), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize(
    "function, keywords, way_out",
    [
        (ffpa_attn.flash_attn_func, {"is_causal": True}, "pass causal=True"),
        (ffpa_attn.flash_attn_func, {"attn_mask": None}, "call ffpa with it"),
        (ffpa_attn.flash_attn_varlen_func, {"enable_gqa": True}, "leave it away"),
        (ffpa_attn.ffpa_attn_func, {"softmax_scale": 1.0}, "pass it as scale="),
        (ffpa_attn.ffpa_attn_func, {"window_size": (1, 1)}, "ffpa and ffpa_varlen have it"),
        (ffpa_attn.flash_attn_func, {"sinks": None}, "pass it as s_aux="),
        (ffpa_attn.flash_attn_varlen_func, {"attention_sinks": None}, "pass it as s_aux="),
        (ffpa_attn.ffpa_attn_func, {"sinks": None}, "has no `sinks`; ffpa and ffpa_varlen have it"),
        (ffpa_attn.ffpa_attn_func, {"causal": True}, "`is_causal`"),
        (ffpa_attn.ffpa_attn_varlen_func, {"is_causal": True}, "pass causal=True"),
    ],
)
def test_words_that_other_packages_functions_do_not_know(function, keywords, way_out):
    packed = [t(5, 2, 64)] * 3 + [i32(0, 5)] * 2 + [5, 5]
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{next(iter(keywords))}'; .*{way_out}"):
        function(*(packed if "varlen" in function.__name__ else [t(1, 5, 2, 64)] * 3), **keywords)


@pytest.mark.parametrize(
    "spoilt", [lambda: t(2, 4, 64, 10).mT, lambda: misaligned(2, 4, 10, 64), lambda: odd_row_stride(2, 4, 10, 64)]
)
def test_the_copy_that_a_message_names_will_do(spoilt):
    q = spoilt()
    with pytest.raises(ValueError, match="make a copy with") as caught:
        call(q)
    copy = re.search(r"make a copy with q\.(\w+)\(\)", str(caught.value))[1]
    assert call(getattr(q, copy)()).shape == (2, 4, 10, 64)


def test_there_are_many_kinds():
    assert len({entry[0] for entry in BAD}) >= 60


def test_nothing_is_computed_before_a_check():
    """A refused call leaves `out` as it was."""
    out = torch.full((2, 4, 10, 64), 7.0, dtype=BF16)
    with pytest.raises(ValueError, match="window"):
        call(out=out, window=(-3, 0))
    with pytest.raises(ValueError, match="`k` has head dim"):
        call(k=good(128), out=out)
    assert (out == 7.0).all()


def test_overlap_is_checked_at_every_call():
    """A good call of the same kind comes first: addresses are part of no plan."""
    q, k, v = (good(64) for _ in range(3))
    before = q.clone()
    call(q, k, v, out=torch.empty_like(q))
    with pytest.raises(ValueError, match="`out` overlaps the memory of `q`"):
        call(q, k, v, out=q)
    assert torch.equal(q, before)


def test_far_windows_are_unbounded_windows():
    q, k, v = (good(64) for _ in range(3))
    assert torch.equal(call(q, k, v, window=(2**40, 2**70)), call(q, k, v, window=(20, 20)))
    assert torch.equal(call(q, k, v, causal=True, window=(2**63, -1)), call(q, k, v, causal=True, window=(20, -1)))


def test_numbers_of_other_libraries():
    assert packed(max_q=np.int64(10), scale=np.float32(0.125)).shape == (20, 4, 64)


def test_slots_of_one_tensor_do_not_overlap():
    """`out` may be a slot of the packed tensor that q, k and v are slots of."""
    slots = t(2, 10, 4, 4, 64)
    q, k, v, out = (slots[:, :, i].transpose(1, 2) for i in range(4))
    want = ffpa(q.clone(), k.clone(), v.clone())
    assert torch.equal(ffpa(q, k, v, out=out), want)


def test_offsets_of_the_cpu_are_checked_at_every_call():
    """The same tensor with other values is another call."""
    cu = i32(0, 10, 20)
    packed(cu_q=cu, cu_k=cu)
    cu[1] = 25
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        packed(cu_q=cu, cu_k=cu, max_q=25, max_k=25)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestOnAGpu:
    def test_device_mix(self):
        with pytest.raises(ValueError, match="`v` is on cpu but `q` is on cuda:0"):
            ffpa(good(64).cuda(), good(64).cuda(), good(64))

    @pytest.mark.parametrize("values", [(0, 15, 10), (0, 30, 20), (-5, 10, 20), (20, 10, 0), (0, 2**31 - 1, -(2**31))])
    def test_bad_offsets_touch_nothing_else(self, values):
        """Never read on the host, offsets lead to no address outside the tensors; FFPA_CHECK=1 raises."""
        x = t(20, 4, 64).cuda()
        out = packed(q=x, k=x, v=x, cu_q=i32(*values).cuda(), cu_k=i32(*values).cuda(), max_q=20, max_k=20)
        torch.cuda.synchronize()
        assert torch.isfinite(out).all()

    def test_check_flag(self, monkeypatch):
        monkeypatch.setenv("FFPA_CHECK", "1")
        x = t(20, 4, 64).cuda()
        with pytest.raises(ValueError, match="`cu_seqlens_q` falls"):
            packed(q=x, k=x, v=x, cu_q=i32(0, 10, 5).cuda(), cu_k=i32(0, 10, 20).cuda())


def test_level_on_another_backend(monkeypatch):
    monkeypatch.setenv("FFPA_BACKEND", "triton")
    with pytest.raises(ValueError, match="`level` is 1.*FFPA_BACKEND=triton"):
        call(level=1)


def test_first_release_names():
    q = good(64)
    with pytest.raises(ValueError, match="`num_stages` is 9"):
        ffpa_attn.ffpa_mma_acc_f32_L1(q, q.clone(), q.clone(), torch.empty_like(q), 9)
