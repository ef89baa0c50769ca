"""Checks that merge makes attention over split keys attention over all of them."""

import oracle
import pytest
import torch
from ffpa_attn import ffpa, merge
from ffpa_attn.backends import triton_attention
from ffpa_attn.backends.triton_merge import merge_into
from ffpa_attn.triton_ops import launch as triton_launch


def parts(device, dtype=torch.float32, layout="BHND", n_q=20):
    generator = torch.Generator().manual_seed(3)
    shape = {"BHND": (2, 3, n_q, 16), "BNHD": (2, n_q, 3, 16), "THD": (n_q, 3, 16)}[layout]
    lse_shape = {"BHND": (2, 3, n_q), "BNHD": (2, 3, n_q), "THD": (3, n_q)}[layout]
    o1, o2 = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(2))
    lse1, lse2 = (torch.randn(lse_shape, generator=generator).mul(5).to(device) for _ in range(2))
    return o1, lse1, o2, lse2


@pytest.mark.parametrize("causal", [False, True])
def test_split_keys(device, causal):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 64, generator=generator).to(device, torch.bfloat16) for n in (50, 80, 80))
    near = ffpa(q, k[:, :, 30:], v[:, :, 30:], causal=causal, return_lse=True)
    far = ffpa(q, k[:, :, :30], v[:, :, :30], return_lse=True)
    out, lse = merge(*near, *far)
    want, want_lse = oracle.attention(q, k, v, causal=causal)
    torch.testing.assert_close(out.double(), want, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layout", ["BHND", "BNHD", "THD"])
def test_weights(device, layout):
    o1, lse1, o2, lse2 = parts(device, layout=layout)
    out, lse = merge(o1, lse1, o2, lse2, **({"layout": layout} if layout != "THD" else {}))
    by_rows = (lambda x: x[..., None]) if layout == "BHND" else (lambda x: x.transpose(-1, -2)[..., None])
    e1, e2 = (by_rows(x.double().exp()) for x in (lse1, lse2))
    torch.testing.assert_close(out.double(), (e1 * o1 + e2 * o2) / (e1 + e2), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(lse.double(), torch.logaddexp(lse1.double(), lse2.double()), atol=1e-6, rtol=1e-6)


def test_rows_without_keys(device):
    o1, lse1, o2, lse2 = parts(device)
    lse1[:, :, :10] = -torch.inf
    lse2[:, :, 5:15] = -torch.inf
    o1[:, :, :10] = torch.nan  # a part without keys may hold anything
    o2[:, :, 5:15] = torch.nan
    out, lse = merge(o1, lse1, o2, lse2)
    assert torch.equal(out[:, :, :5], o2[:, :, :5]) and torch.equal(out[:, :, 10:15], o1[:, :, 10:15])
    assert not out[:, :, 5:10].any() and torch.isneginf(lse[:, :, 5:10]).all()
    assert torch.isfinite(out).all() and torch.equal(lse[:, :, :5], lse2[:, :, :5])


def test_large_lse_do_not_overflow(device):
    o1, lse1, o2, lse2 = parts(device)
    out, lse = merge(o1, lse1 + 1e4, o2, lse2 + 1e4)
    assert torch.isfinite(out).all() and torch.isfinite(lse).all()


def test_types(device):
    half, full = parts(device, torch.bfloat16), parts(device)
    assert merge(*half)[0].dtype == torch.bfloat16
    assert merge(*full[:2], *half[2:])[0].dtype == torch.float32
    assert merge(*half)[1].dtype == torch.float32


def test_gradients(device):
    inputs = [x.double().requires_grad_() for x in parts(device, n_q=4)]
    o1, lse1, o2, lse2 = (x.detach().float().requires_grad_() for x in inputs)
    lse1.data[:, :, 0] = -torch.inf
    lse1.data[:, :, 1] = lse2.data[:, :, 1] = -torch.inf
    o1.data[:, :, :2] = o2.data[:, :, 1] = torch.nan  # a part without keys may hold anything
    out, lse = merge(o1, lse1, o2, lse2)
    grads = torch.autograd.grad(out.sum() + lse[:, :, 2:].sum(), (o1, lse1, o2, lse2))
    assert all(torch.isfinite(g).all() for g in grads)
    e1, e2 = (x.exp()[..., None] for x in (inputs[1], inputs[3]))
    want = torch.autograd.grad(
        (((e1 * inputs[0] + e2 * inputs[2]) / (e1 + e2)).sum() + torch.logaddexp(inputs[1], inputs[3]).sum()), inputs
    )
    for got, expected in zip(grads, want, strict=True):
        torch.testing.assert_close(got[:, :, 2:].double(), expected[:, :, 2:], atol=1e-5, rtol=1e-4)


LARGE = torch.finfo(torch.float32).max
NAN, INF = torch.nan, torch.inf
# Each row has its LSE in each part, and what these weigh in exact arithmetic; None: all is NaN.
ROWS = [
    ((0.0, 0.0), (0.5, 0.5)),
    ((-LARGE, -LARGE), (0.5, 0.5)),  # all keys of the row have finfo.min in the mask
    ((LARGE, LARGE), (0.5, 0.5)),
    ((1e30, 1e30), (0.5, 0.5)),
    ((-1e30, -1e30), (0.5, 0.5)),
    ((1e30, -1e30), (1, 0)),
    ((-LARGE, LARGE), (0, 1)),
    ((-LARGE, 3.0), (0, 1)),
    ((16777216.0, 16777218.0), (0.11920292, 0.88079708)),
    ((-INF, -LARGE), (0, 1)),
    ((-LARGE, -INF), (1, 0)),
    ((-INF, LARGE), (0, 1)),
    ((-INF, -INF), (0, 0)),
    ((NAN, 1.0), None),
    ((1.0, NAN), None),
    ((NAN, -INF), None),
    ((-INF, NAN), None),
    ((NAN, LARGE), None),
    ((NAN, NAN), None),
    ((INF, 1.0), None),  # softmax gives NaN, too
    ((-LARGE, INF), None),
]
WEIGHTS = torch.tensor([weights or (NAN, NAN) for _, weights in ROWS])


def rows_of_all_sizes(device, d=24):
    """Returns two parts' results [2, 1, 1, N, D] and LSEs [2, 1, 1, N], and their weights [2, N, 1]."""
    outs = torch.randn(2, 1, 1, len(ROWS), d, generator=torch.Generator().manual_seed(0)).to(device)
    lses = torch.tensor([lses for lses, _ in ROWS]).T[:, None, None].to(device)
    outs[lses == -INF] = 0
    return outs, lses.contiguous(), WEIGHTS.T[..., None].to(device)


def assert_merged(out, lse, outs, lses, weights):
    torch.testing.assert_close(out, (weights[:, None, None] * outs).sum(0), atol=1e-6, rtol=1e-5, equal_nan=True)
    want = lses.double().logsumexp(0).where(~weights[0, :, 0].isnan(), NAN).float()
    torch.testing.assert_close(lse, want, atol=1e-6, rtol=1e-6, equal_nan=True)


@pytest.mark.parametrize("layout", ["BHND", "BNHD"])
def test_lse_of_any_size(device, layout):
    outs, lses, weights = rows_of_all_sizes(device)
    leaves = [x.clone().requires_grad_() for x in (outs[0], lses[0], outs[1], lses[1])]
    o1, lse1, o2, lse2 = leaves
    if layout == "BNHD":
        o1, o2 = o1.transpose(1, 2), o2.transpose(1, 2)
    out, lse = merge(o1, lse1, o2, lse2, layout=layout)
    assert_merged(out if layout == "BHND" else out.transpose(1, 2), lse, outs, lses, weights)
    sees = ~lses.isneginf().all(0)[0, 0]
    grads = torch.autograd.grad(out.sum() + lse[:, :, sees].sum(), leaves)
    for part in (0, 1):
        d_out, d_lse = grads[2 * part][0, 0], grads[2 * part + 1][0, 0]
        blind = lses[part, 0, 0].isneginf()
        want = weights[part].where(~blind[:, None], 0.0)
        torch.testing.assert_close(d_out, want.expand_as(d_out), atol=1e-6, rtol=1e-6, equal_nan=True)
        over = (outs[part] - (weights[:, None, None] * outs).sum(0)).sum(-1)[0, 0]
        want = weights[part, :, 0] * (over + 1)
        torch.testing.assert_close(d_lse[~blind], want[~blind], atol=1e-5, rtol=1e-5, equal_nan=True)
        assert not d_lse[blind & sees & ~want.isnan()].any()


@pytest.mark.parametrize("lse1", [0.0, -1e4, -LARGE])
def test_nan_of_keys_that_weigh_nothing(device, lse1):
    """The whole softmax multiplies it by 0, which gives NaN. Only a part without keys may hold anything."""
    o1, _, o2, _ = parts(device)
    o1[:, :, 3, 5] = NAN
    ours, other = torch.full((2, 2, 3, 20), lse1, device=device)
    for out, _ in (merge(o1, ours, o2, other.zero_()), merge(o2, other, o1, ours)):
        assert out[:, :, 3, 5].isnan().all() and out.isnan().sum() == 6
    assert torch.equal(merge(o1, torch.full_like(ours, -INF), o2, other)[0], o2)


def test_nan_in_q(device):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 40, 64, generator=generator).to(device, torch.bfloat16) for _ in range(3))
    q[0, 1, 7, 3] = NAN
    halves = [ffpa(q, k[:, :, i : i + 20], v[:, :, i : i + 20], return_lse=True) for i in (0, 20)]
    out, lse = merge(*halves[0], *halves[1])
    is_nan = torch.zeros(1, 2, 40, dtype=torch.bool, device=device)
    is_nan[0, 1, 7] = True
    assert torch.equal(lse.isnan(), is_nan) and torch.equal(out.isnan(), is_nan[..., None].expand_as(out))


@pytest.fixture(params=["triton", "reference"])
def merging(request, device, monkeypatch):
    """Gives one path of merge_into, and checks that it was taken."""
    monkeypatch.setenv("FFPA_BACKEND", request.param)
    if request.param == "reference":
        monkeypatch.setattr(triton_attention, "why_not", lambda: "not wanted")
    elif device == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(triton_launch, "_unable", {})
    yield merge_into
    assert not triton_launch._unable


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("several", [1, 3])
@pytest.mark.parametrize(
    "rows, d, dtype",
    [(33, 72, torch.bfloat16), (5, 512, torch.float16), (16, 64, torch.float32), (0, 64, torch.float16)],
)
def test_into_what_is_there(device, merging, rows, d, dtype, several, first):
    """A ring adds what it computed on further keys to the last rows of a float32 result, in place."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape, dtype=torch.float32):
        return torch.randn(shape, generator=generator).to(device, dtype)

    out, top, total = random(2, 3, rows + 7, d), random(2, 3, rows + 7), random(2, 3, rows + 7).exp()
    more, more_lse = random(several, 2, rows, 3, d, dtype=dtype).transpose(2, 3), 100 * random(several, 2, 3, rows)
    last = [x[:, :, 7:] for x in (out, top, total)]
    before = [x[:, :, :7].clone() for x in (out, top, total)]
    outs, lses = [*more.double()], [*more_lse.double()]
    if first:
        for x in last:
            x.fill_(torch.nan)  # nobody has written it
    else:
        outs.append(last[0].double())
        lses.append(last[1].double() + last[2].double().log())
    want_lse = torch.stack(lses).logsumexp(0)
    want = sum((x - want_lse).exp()[..., None] * y for x, y in zip(lses, outs, strict=True))
    merging(*last, more, more_lse, first)
    assert all(torch.equal(x[:, :, :7], y) for x, y in zip((out, top, total), before, strict=True))
    torch.testing.assert_close(last[0], want.float(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(last[1] + last[2].log(), want_lse.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("at_once", [True, False])
def test_lse_of_any_size_into_what_is_there(device, merging, at_once):
    outs, lses, weights = rows_of_all_sizes(device)
    out, top, total = (torch.full_like(x, NAN) for x in (outs[0], lses[0], lses[0]))
    if at_once:
        merging(out, top, total, outs, lses, True)
    else:
        merging(out, top, total, outs[:1], lses[:1], True)
        merging(out, top, total, outs[1:], lses[1:], False)
    assert_merged(out, top + total.log(), outs, lses, weights)


@pytest.mark.parametrize("lse1", [0.0, -1e4, -LARGE])
def test_nan_of_keys_that_weigh_nothing_into_what_is_there(device, merging, lse1):
    o1, lse_0, o2, _ = (x[None] for x in parts(device))
    o1[:, :, :, 3, 5] = NAN
    own, other = torch.full_like(lse_0, lse1), torch.zeros_like(lse_0)
    for first, second in (((o1, own), (o2, other)), ((o2, other), (o1, own))):
        out, top, total = torch.empty_like(o1[0]), torch.empty_like(own[0]), torch.empty_like(own[0])
        merging(out, top, total, *first, True)
        merging(out, top, total, *second, False)
        assert out[:, :, 3, 5].isnan().all() and out.isnan().sum() == 6


@pytest.mark.parametrize("size", [1e6, -1e6, 6e8, -1e30, -LARGE])
def test_many_parts_weigh_as_they_should(device, merging, size):
    """Parts come one after the other; an LSE rounded each time would be that of the last ones alone."""
    outs = torch.randn(12, 1, 2, 20, 16, generator=torch.Generator().manual_seed(0)).to(device)
    lses = torch.full((12, 1, 2, 20), size, device=device)
    out, top, total = (torch.full_like(x, NAN) for x in (outs[0], lses[0], lses[0]))
    for i in range(0, 12, 3):
        merging(out, top, total, outs[i : i + 3], lses[i : i + 3], i == 0)
    torch.testing.assert_close(out, outs.mean(0), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(top + total.log(), lses.double().logsumexp(0).float(), atol=0, rtol=1e-7)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a race of a GPU's warps")
def test_on_a_gpu_all_warps_read_before_one_writes(monkeypatch):
    """If a warp finds the sums that another has left, a row in ten thousand is wrong."""
    monkeypatch.setattr(triton_launch, "_unable", {})
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator, device="cuda")

    for _ in range(20):
        out, top, more, more_lse = (
            random(1, 4, 8192, 512),
            random(1, 4, 8192),
            random(1, 4, 8192, 512),
            random(1, 4, 8192),
        )
        share = torch.sigmoid(more_lse - top)[..., None]
        want = out * (1 - share) + more * share
        merge_into(out, top, torch.ones_like(top), more[None], more_lse[None], False)
        torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)
    assert not triton_launch._unable
