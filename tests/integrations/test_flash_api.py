"""Tests the functions of flash-attn 2 and of the PyPI package: arguments in its order, and what each of them means."""

import inspect
import re

import compare
import ffpa_attn
import numpy as np
import oracle
import pytest
import torch
import torch.nn.functional as F
from ffpa_attn import (
    Backend,
    CUDABackend,
    CuTeDSLBackend,
    SDPABackend,
    TritonBackend,
    ffpa_attn_func,
    ffpa_attn_varlen_func,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    is_nhd_zero_copy_input,
)
from ffpa_attn.integrations import masks
from torch.nn.attention.bias import causal_lower_right

BF16, F16 = torch.bfloat16, torch.float16


def t(*shape, dtype=BF16, device="cpu", seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(device, dtype)


def signature(function) -> str:
    """Returns names, order and defaults, without types."""
    whole = inspect.signature(function)
    names = [p.replace(annotation=inspect.Parameter.empty) for p in whole.parameters.values()]
    plain = whole.replace(parameters=names, return_annotation=inspect.Signature.empty)
    return re.sub(r"\s", "", str(plain))


FLASH = (
    "dropout_p=0.0,softmax_scale=None,causal=False,window_size=(-1,-1),softcap=0.0,alibi_slopes=None,"
    "deterministic=False,return_attn_probs=False"
)
SINKS = "*,s_aux=None,learnable_sink=None"
OFFSETS = "cu_seqlens_q,cu_seqlens_k,max_seqlen_q,max_seqlen_k"


@pytest.mark.parametrize(
    "function, written",
    [
        (flash_attn_func, f"(q,k,v,{FLASH},{SINKS},**unknown)"),
        (flash_attn_varlen_func, f"(q,k,v,{OFFSETS},{FLASH},block_table=None,{SINKS},seqused_k=None,**unknown)"),
        (
            flash_attn_with_kvcache,
            "(q,k_cache,v_cache,k=None,v=None,rotary_cos=None,rotary_sin=None,cache_seqlens=None,cache_batch_idx=None,"
            "cache_leftpad=None,block_table=None,softmax_scale=None,causal=False,window_size=(-1,-1),softcap=0.0,"
            "rotary_interleaved=True,alibi_slopes=None,num_splits=0,return_softmax_lse=False,*,page_table=None,"
            "cu_seqlens_q=None,cu_seqlens_k_new=None,max_seqlen_q=None,s_aux=None,learnable_sink=None,k_descale=None,"
            "v_descale=None,**unknown)",
        ),
        (
            ffpa_attn_func,
            "(query,key,value,attn_mask=None,dropout_p=0.0,is_causal=False,scale=None,enable_gqa=False,**kwargs)",
        ),
        (
            ffpa_attn_varlen_func,
            f"(q,k,v,{OFFSETS},*,dropout_p=0.0,softmax_scale=None,causal=False,enable_gqa=False,"
            "return_lse=False,**kwargs)",
        ),
    ],
)
def test_signatures(function, written):
    assert signature(function) == written


def graded(function, *tensors):
    """Returns (result, its gradients)."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = function(*leaves)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out)
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


def assert_means(function, tensors, layout="BNHD", **rule):
    """Checks that the function's result and gradients are those of the oracle."""
    got = graded(function, *tensors)
    want = graded(lambda *x: oracle.attention(*x, layout=layout, **rule)[0], *tensors)
    base = graded(lambda *x: compare.baseline(*x, layout=layout, **rule)[0], *tensors)
    for name, ours, exact, theirs in zip(("out", "dq", "dk", "dv"), got, want, base, strict=True):
        compare.assert_close(name, ours, exact, theirs)


# ---- flash-attn 2, dense ----

DENSE = {
    "plain": ({}, {}),
    "causal": ({"causal": True}, {"causal": True}),
    "scale": ({"softmax_scale": 0.3, "deterministic": True}, {"scale": 0.3}),
    "window": ({"window_size": (7, 3)}, {"window": (7, 3)}),
    "causal window": ({"window_size": (7, 0), "causal": True}, {"window": (7, 0), "causal": True}),
    "softcap": ({"softcap": 5.0}, {"softcap": 5.0}),
}
SHAPES = {
    "square": ((2, 33, 4, 64), (2, 33, 4, 64)),
    "more keys": ((2, 20, 4, 64), (2, 33, 2, 64)),
    "more rows": ((1, 40, 4, 320), (1, 33, 1, 320)),
    "padded": ((2, 20, 4, 20), (2, 33, 4, 20)),
}


@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", DENSE)
def test_flash(device, case, shape, dtype):
    arguments, rule = DENSE[case]
    q, k = (t(*x, dtype=dtype, device=device, seed=i) for i, x in enumerate(SHAPES[shape]))
    v = t(*k.shape, dtype=dtype, device=device, seed=2)
    assert_means(lambda *x: flash_attn_func(*x, **arguments), (q, k, v), **rule)


@pytest.mark.parametrize("by_batch", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_alibi(device, causal, by_batch):
    q, k, v = t(2, 20, 4, 64, device=device), t(2, 33, 2, 64, device=device), t(2, 33, 2, 64, device=device, seed=2)
    slopes = torch.rand((2, 4) if by_batch else (4,), generator=torch.Generator().manual_seed(0)).to(device)
    bias = torch.empty(2, 4, 20, 33)
    for b in range(2):
        for h in range(4):
            slope = slopes[b, h] if by_batch else slopes[h]
            for i in range(20):
                for j in range(33):
                    bias[b, h, i, j] = -slope * abs(i + 33 - 20 - j)
    function = lambda *x: flash_attn_func(*x, causal=causal, softcap=9.0, alibi_slopes=slopes)  # noqa: E731
    assert_means(function, (q, k, v), mask=bias.to(device), causal=causal, softcap=9.0)


def test_flash_gives_lse(device):
    q, k = t(2, 20, 4, 20, device=device), t(2, 12, 4, 20, device=device)
    out, lse, probabilities = flash_attn_func(q, k, k, causal=True, return_attn_probs=True)
    want, want_lse = oracle.attention(q, k, k, causal=True, layout="BNHD")
    assert out.shape == want.shape and lse.shape == (2, 4, 20) and probabilities is None
    compare.assert_lse_close("lse", lse, want_lse, q, k, None)
    assert not out[:, :8].any()


def test_columns_with_a_stride(device):
    q = t(2, 64, 4, 20, device=device).transpose(1, 3)
    torch.testing.assert_close(flash_attn_func(q, q, q), flash_attn_func(*[q.contiguous()] * 3))


# ---- packed ----

LENGTHS = (9, 0, 24, 5), (9, 7, 33, 2)


def packed(device, dtype=BF16, d=64, heads_kv=2):
    """Returns (q, k, v), and the offsets with the longest lengths."""
    rows, keys = map(sum, LENGTHS)
    tensors = (
        t(n, h, d, dtype=dtype, device=device, seed=i) for i, (n, h) in enumerate([(rows, 4), *[(keys, heads_kv)] * 2])
    )
    ends = [
        torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device) for lengths in LENGTHS
    ]
    return tuple(tensors), (*ends, *map(max, LENGTHS))


def by_sequence(function, q, k, v, **rule):
    """Returns [T, H, D] of a function of one [1, N, H, D] after the other."""
    parts = zip(
        *(x.split(list(lengths)) for x, lengths in zip((q, k, v), (*LENGTHS, LENGTHS[1]), strict=True)), strict=True
    )
    return torch.cat([function(*(x[None] for x in part), layout="BNHD", **rule)[0][0] for part in parts])


@pytest.mark.parametrize("d", [64, 20])
@pytest.mark.parametrize("case", DENSE)
def test_flash_varlen(device, case, d):
    arguments, rule = DENSE[case]
    tensors, offsets = packed(device, d=d)
    got = graded(lambda *x: flash_attn_varlen_func(*x, *offsets, **arguments), *tensors)
    want = graded(lambda *x: by_sequence(oracle.attention, *x, **rule), *tensors)
    base = graded(lambda *x: by_sequence(compare.baseline, *x, **rule), *tensors)
    for name, ours, exact, theirs in zip(("out", "dq", "dk", "dv"), got, want, base, strict=True):
        compare.assert_close(name, ours, exact, theirs)


def test_varlen_gives_lse(device):
    (q, k, v), offsets = packed(device)
    out, lse, probabilities = flash_attn_varlen_func(q, k, v, *offsets, causal=True, return_attn_probs=True)
    assert torch.equal(out, flash_attn_varlen_func(q, k, v, *offsets, causal=True))
    assert lse.shape == (4, q.shape[0]) and lse.dtype == torch.float32 and probabilities is None


def beside_sinks(attend, sinks):
    """Gives attention whose out [B, N, H, D] has sinks in its sums; the LSE has not."""

    def attention(*tensors, **rule):
        out, lse = attend(*tensors, **rule)
        share = torch.sigmoid(torch.where(lse.isneginf(), 0.0, lse) - sinks[:, None].to(lse))  # without keys out is 0
        return (out * share.transpose(1, 2)[..., None]).to(out.dtype), lse

    return attention


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("called", ["s_aux", "learnable_sink"])
@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_sinks(kind, called, dtype, device):
    (q, k, v), offsets = packed(device)
    sinks = torch.tensor([1.0, -torch.inf, 3.0, -2.0], dtype=dtype, device=device)
    if kind == "dense":
        q, k, v = t(2, 20, 4, 64, device=device), *(t(2, 12, 2, 64, device=device, seed=i) for i in (1, 2))
        one = lambda attend, *x, **rule: attend(*x, layout="BNHD", **rule)[0]  # noqa: E731
        call = lambda *x, **rule: flash_attn_func(*x, **rule)  # noqa: E731
    else:
        one, call = by_sequence, lambda *x, **rule: flash_attn_varlen_func(*x, *offsets, **rule)
    got = graded(lambda q, k, v, s: call(q, k, v, causal=True, **{called: s}), q, k, v, sinks)
    want, base = (
        graded(lambda *x, f=f: one(beside_sinks(f, x[3]), *x[:3], causal=True), q, k, v, sinks)
        for f in (oracle.attention, compare.baseline)
    )
    for name, ours, exact, theirs in zip(("out", "dq", "dk", "dv"), got, want, base, strict=False):
        compare.assert_close(name, ours, exact, theirs)
    torch.testing.assert_close(got[4], want[4].to(dtype), atol=0.05, rtol=0.03)
    _, lse, _ = call(q, k, v, causal=True, return_attn_probs=True, **{called: sinks})
    if kind == "dense":  # rows that see no key have their sink
        assert torch.equal(lse[:, :, :8], sinks.float()[:, None].expand(2, -1, 8))


# ---- ffpa-attn on PyPI ----


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("heads_kv", [4, 2])
def test_pypi(device, is_causal, heads_kv):
    """The last row sees the last key, whatever the lengths."""
    q, k, v = (t(2, h, n, 320, device=device, seed=i) for i, (h, n) in enumerate([(4, 20), *[(heads_kv, 33)] * 2]))
    function = lambda *x: ffpa_attn_func(*x, None, 0.0, is_causal, 0.2, enable_gqa=heads_kv < 4)  # noqa: E731
    assert_means(function, (q, k, v), layout="BHND", causal=is_causal, scale=0.2)


@pytest.mark.parametrize("shape", [(20, 33), (2, 20, 33), (4, 20, 33), (1, 20, 33), (2, 1, 1, 33)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, BF16])
def test_pypi_masks(device, shape, dtype):
    """A mask of 3 dims is [B, Nq, Nk] where that fits."""
    q, k = t(2, 4, 20, 64, device=device), t(2, 4, 33, 64, device=device)
    mask = t(*shape, dtype=torch.float32, device=device)
    mask = mask > -0.5 if dtype == torch.bool else mask.to(dtype)
    full = mask.unsqueeze(1) if shape[0] == 2 and len(shape) == 3 else mask
    out = ffpa_attn_func(q, k, k, mask)
    torch.testing.assert_close(out, ffpa_attn.ffpa(q, k, k, mask=full))

    seen = torch.ones(20, 33, dtype=torch.bool, device=device).tril(13)  # the last row sees the last key
    full = full & seen if dtype == torch.bool else full.masked_fill(~seen, -torch.inf)
    torch.testing.assert_close(
        ffpa_attn_func(q, k, k, mask, is_causal=True), ffpa_attn.ffpa(q, k, k, mask=full), atol=2e-2, rtol=2e-2
    )


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_pypi_mask_beside_is_causal(dtype):
    """ffpa takes the call without N² numbers of the mask; PyTorch is given both as one."""
    q, k = t(2, 4, 20, 64, dtype=dtype), t(2, 4, 33, 64, dtype=dtype)
    mask = torch.ones(2, 1, 1, 33, dtype=torch.bool)
    mask[1, ..., :9] = False
    want = F.scaled_dot_product_attention(q, k, k, mask & torch.ones(20, 33, dtype=torch.bool).tril(13))
    with pytest.MonkeyPatch.context() as patch:
        if dtype == BF16:
            patch.setattr(masks, "sees", None)
        found = ffpa_attn_func(q, k, k, mask, is_causal=True)
    torch.testing.assert_close(found, want, atol=2e-2, rtol=2e-2)


def test_pypi_takes_pytorchs_own_biases():
    q, k = t(2, 4, 20, 64), t(2, 4, 33, 64)
    bias = causal_lower_right(20, 33)
    torch.testing.assert_close(
        ffpa_attn_func(q, k, k, bias), ffpa_attn_func(q, k, k, is_causal=True), atol=2e-2, rtol=2e-2
    )
    with pytest.raises(ValueError, match="CausalBias should not be used with causal=True"):
        ffpa_attn_func(q, k, k, bias, is_causal=True)
    for wrong in (torch.ones(20, 33, dtype=torch.int32), torch.ones(33, dtype=torch.bool)):
        with pytest.raises((RuntimeError, IndexError)):
            ffpa_attn_func(q, k, k, wrong, is_causal=True)


BACKENDS = [
    {"backend": "triton"},
    {"forward_backend": "cuda", "backward_backend": "triton"},
    {"backend": CuTeDSLBackend()},
    {"backend": SDPABackend(high_precision_grad=True)},
    {"forward_backend": CUDABackend(acc="f32", stages=3, backward=False), "backward_backend": None},
    {"backward_backend": TritonBackend("triton", False, True, split_launch=True)},
]


@pytest.mark.parametrize("choice", BACKENDS, ids=str)
def test_pypi_backends_change_nothing(choice):
    q = t(1, 2, 9, 320)
    assert torch.equal(ffpa_attn_func(q, q, q, **choice), ffpa_attn_func(q, q, q))
    (q, k, v), offsets = packed("cpu", heads_kv=4)
    assert torch.equal(ffpa_attn_varlen_func(q, k, v, *offsets, **choice), ffpa_attn_varlen_func(q, k, v, *offsets))


def test_pypi_backends_hold_their_settings():
    backend = CUDABackend(acc="f32", stages=3)
    assert (backend.name, backend.acc, backend.stages, backend.tensor_layout) == ("cuda", "f32", 3, "HND")
    assert (backend.forward, CUDABackend(forward=True).forward, Backend("x").name) == (None, True, "x")
    assert backend == CUDABackend(stages=3, acc="f32") != CUDABackend(stages=2, acc="f32")
    assert {backend: 1}[CUDABackend(stages=3, acc="f32")]
    assert backend.is_nhd_supported(512) and isinstance(backend, Backend) and not isinstance(backend, TritonBackend)


def test_pypi_tensors_read_as_they_lie():
    packed = t(2, 9, 3 * 4 * 64)
    rows_first, odd = packed[..., :256].view(2, 9, 4, 64), t(2, 9, 4, 68)[..., :64]
    assert is_nhd_zero_copy_input(rows_first)
    assert not any(map(is_nhd_zero_copy_input, (odd, rows_first[0], rows_first.mT)))


def test_flags_and_windows_of_other_integers():
    """Flags and windows are taken as the bindings of flash-attn take them."""
    q = t(1, 12, 2, 64)
    want = flash_attn_func(q, q, q, causal=True, window_size=(3, 0))
    assert torch.equal(flash_attn_func(q, q, q, causal=1, window_size=(np.int64(3), np.int32(0))), want)
    assert torch.equal(flash_attn_func(q, q, q, causal=True, window_size=(np.int64(3), -7)), want)
    scale = torch.tensor(0.125)
    assert torch.equal(flash_attn_func(q, q, q, softmax_scale=scale, causal=True, window_size=(3, 0)), want)


@pytest.mark.parametrize("function", [flash_attn_varlen_func, ffpa_attn_varlen_func])
def test_longest_lengths_in_tensors(function):
    (q, k, v), (cu_q, cu_k, *longest) = packed("cpu", heads_kv=4)
    want = function(q, k, v, cu_q, cu_k, *longest)
    assert torch.equal(function(q, k, v, cu_q, cu_k, *(torch.tensor(n, dtype=torch.int32) for n in longest)), want)


def test_pypi_layout():
    q = t(2, 9, 4, 64)
    out = ffpa_attn_func(q, q, q, forward_backend=CUDABackend(tensor_layout="NHD"), is_causal=True)
    assert torch.equal(out, flash_attn_func(q, q, q, causal=True)) and out.is_contiguous()


LEFT_TO_PYTORCH = {
    "float32": ({"dtype": torch.float32}, {}),
    "float32, causal": ({"dtype": torch.float32}, {"is_causal": True}),
    "head dim": ({"d": 20}, {"is_causal": True}),
    "dropout": ({}, {"dropout_p": 0.5}),
}


@pytest.mark.parametrize("name", LEFT_TO_PYTORCH)
def test_pypi_leaves_to_pytorch(name):
    tensor, options = LEFT_TO_PYTORCH[name]
    q, k = (t(1, 2, n, tensor.get("d", 64), dtype=tensor.get("dtype", BF16)) for n in (9, 12))
    mask = torch.ones(9, 12, dtype=torch.bool).tril(3) if options.get("is_causal") else None
    torch.manual_seed(0)
    want = F.scaled_dot_product_attention(q, k, k, mask, options.get("dropout_p", 0.0))
    torch.manual_seed(0)
    assert torch.equal(ffpa_attn_func(q, k, k, **options), want)


def test_pypi_in_pytorchs_place(monkeypatch):
    """The PyPI package tells its users to put its function in PyTorch's place."""
    q = t(1, 2, 9, 64)
    want = F.scaled_dot_product_attention(q, q, q)
    monkeypatch.setattr(F, "scaled_dot_product_attention", ffpa_attn_func)
    torch.testing.assert_close(F.scaled_dot_product_attention(q, q, q), want, atol=1e-2, rtol=2e-2)


@pytest.mark.parametrize("causal", [False, True])
def test_pypi_varlen(device, causal):
    (q, k, v), (cu_q, cu_k, longest_q, longest_k) = packed(device)
    out, lse = ffpa_attn_varlen_func(
        q, k, v, cu_q, cu_k, longest_q, longest_k, causal=causal, enable_gqa=True, return_lse=True, softmax_scale=0.2,
        dropout_p=0.0, window_size=(None, None), softcap=0.0, num_splits=2, attn_mask=None,
    )  # fmt: skip
    want, want_lse = ffpa_attn.ffpa_varlen(
        q, k, v, cu_q, cu_k, longest_q, longest_k, causal=causal, scale=0.2, return_lse=True
    )
    assert torch.equal(out, want) and torch.equal(lse, want_lse)


def test_pypi_varlen_of_one_kind_of_offsets(device):
    (q, _, _), (cu, _, longest, _) = packed(device)
    out = ffpa_attn_varlen_func(q, q, q, cu, None, longest, longest)
    assert torch.equal(out, ffpa_attn_varlen_func(q, q, q, cu, cu, longest, longest))


# ---- all of them ----


def compiled_cases():
    q, k = t(1, 20, 4, 64), t(1, 33, 4, 64)
    tensors, offsets = packed("cpu", heads_kv=4)
    slopes = torch.rand(4)
    return {
        "flash": lambda: flash_attn_func(q, k, k, causal=True, alibi_slopes=slopes, return_attn_probs=True)[0],
        "flash, sinks": lambda: flash_attn_func(q, k, k, s_aux=slopes),
        "flash, padded": lambda: flash_attn_func(q[..., :20], k[..., :20], k[..., :20]),
        "flash varlen": lambda: flash_attn_varlen_func(*tensors, *offsets, causal=True),
        "pypi": lambda: ffpa_attn_func(q, k[:, :20], k[:, :20], is_causal=True, backend="triton"),
        "pypi varlen": lambda: ffpa_attn_varlen_func(*tensors, *offsets, return_lse=True)[1],
    }


@pytest.mark.parametrize("name", compiled_cases())
def test_compiled(name):
    function = compiled_cases()[name]
    torch.testing.assert_close(torch.compile(function, backend="aot_eager", fullgraph=True)(), function())


def flash(**arguments):
    q = t(2, 9, 4, 64)
    return flash_attn_func(q, arguments.pop("k", q), q, **arguments)


def varlen(**arguments):
    tensors, offsets = packed("cpu")
    return flash_attn_varlen_func(*tensors, *offsets, **arguments)


def pypi(**arguments):
    q = t(2, 4, 9, 64)
    return ffpa_attn_func(q, arguments.pop("key", q), arguments.pop("value", q), **arguments)


def pypi_varlen(**arguments):
    tensors, offsets = packed("cpu")
    return ffpa_attn_varlen_func(*tensors, *offsets, **arguments)


BAD = [
    (flash, {"dropout_p": 0.1}, NotImplementedError, "`dropout_p` is 0.1.*pass 0.0"),
    (flash, {"alibi_slopes": torch.ones(4, dtype=BF16)}, TypeError, "`alibi_slopes` has dtype.*alibi_slopes.float"),
    (flash, {"alibi_slopes": torch.ones(3)}, ValueError, r"`alibi_slopes` has shape \(3,\).*one slope for each head"),
    (flash, {"alibi_slopes": [1.0]}, TypeError, "`alibi_slopes` is list; pass a torch.Tensor"),
    (flash, {"alibi_slopes": torch.ones(4), "k": t(64)}, ValueError, "`k` has 1 dims"),
    (flash, {"causal": "top_left"}, TypeError, "`causal` is 'top_left'.*True or False"),
    (flash, {"k": None}, TypeError, "`k` is None"),
    (flash, {"k": torch.tensor(1.0)}, ValueError, "`k` has 0 dims"),
    (flash, {"s_aux": torch.ones(4), "learnable_sink": torch.ones(4)}, ValueError, "`s_aux` and `learnable_sink` are both"),
    (flash, {"s_aux": torch.ones(3)}, ValueError, "`s_aux` has shape"),
    (flash, {"learnable_sink": torch.ones(3)}, ValueError, "`learnable_sink` has shape"),
    (flash, {"window_size": (1, 2, 3)}, ValueError, "`window_size` has 3 entries"),
    (flash, {"softmax_scale": torch.ones(2)}, TypeError, "`softmax_scale` is a tensor"),
    (flash, {"return_attn_probs": None}, TypeError, "`return_attn_probs` is None"),
    (varlen, {"softmax_scale": "1"}, TypeError, "`softmax_scale` is '1'"),
    (varlen, {"dropout_p": 0.1}, NotImplementedError, "`dropout_p` is 0.1"),
    (varlen, {"alibi_slopes": torch.ones(4)}, NotImplementedError, "`alibi_slopes` is given.*flash_attn_func"),
    (varlen, {"block_table": [1.0]}, TypeError, "`block_table` is list; pass a torch.Tensor"),
    (varlen, {"block_table": torch.ones(4)}, ValueError, r"`block_table` has 1 dims.*\[B, entries\]"),
    (varlen, {"block_table": torch.ones(4, 1)}, ValueError, r"`k` has 3 dims.*\[pages, rows, H, D\]"),
    (varlen, {"seqused_k": torch.ones(4)}, ValueError, "`seqused_k` is given without `block_table`"),
    (pypi, {"acc": "f32"}, TypeError, "unexpected keyword argument 'acc'"),
    (pypi, {"backend": "metal"}, ValueError, "`backend` is 'metal'; allowed"),
    (pypi, {"forward_backend": 3}, TypeError, "`forward_backend` is a int; pass one of"),
    (pypi, {"is_causal": True, "key": t(2, 4, 5, 64), "value": t(2, 4, 5, 64)}, ValueError, "`key` has 5 rows but"),
    (pypi, {"key": None}, TypeError, "`key` is None"),
    (pypi, {"attn_mask": [1, 2], "is_causal": True}, TypeError, "attn_mask"),
    (pypi_varlen, {}, ValueError, "`enable_gqa` is False.*pass enable_gqa=True"),
    (pypi_varlen, {"dropout_p": 0.1}, NotImplementedError, "`dropout_p` is 0.1"),
    (pypi_varlen, {"sink": torch.ones(4)}, NotImplementedError, "`sink` is given.*sinks="),
    (pypi_varlen, {"return_lse": 1, "enable_gqa": True}, TypeError, "`return_lse` is 1"),
    (pypi_varlen, {"alibi_slopes": torch.ones(4)}, NotImplementedError, "`alibi_slopes` is given.*call ffpa with a mask"),
    (pypi_varlen, {"scale": 1.0}, TypeError, "unexpected keyword argument 'scale'"),
]  # fmt: skip


@pytest.mark.parametrize("call, arguments, error, message", BAD, ids=[case[3][:40] for case in BAD])
def test_bad_input(call, arguments, error, message):
    with pytest.raises(error, match=message):
        call(**arguments)
