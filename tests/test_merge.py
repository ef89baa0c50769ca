"""merge: attention over split keys is attention over all of them."""

import oracle
import pytest
import torch
from ffpa_attn import ffpa, merge, triton_attention, triton_launch
from ffpa_attn.triton_merge import merge_into


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


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("several", [1, 3])
@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize(
    "rows, d, dtype",
    [(33, 72, torch.bfloat16), (5, 512, torch.float16), (16, 64, torch.float32), (0, 64, torch.float16)],
)
def test_into_what_is_there(device, monkeypatch, backend, rows, d, dtype, several, first):
    """As a ring adds what it computed on further keys: to the last rows of a float32 result, in place."""
    monkeypatch.setenv("FFPA_BACKEND", backend)
    if backend == "reference":
        monkeypatch.setattr(triton_attention, "why_not", lambda: "not wanted")
    elif device == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(triton_launch, "_unable", {})
    generator = torch.Generator().manual_seed(0)

    def random(*shape, dtype=torch.float32):
        return torch.randn(shape, generator=generator).to(device, dtype)

    out, lse = random(2, 3, rows + 7, d), random(2, 3, rows + 7)
    more, more_lse = random(several, 2, rows, 3, d, dtype=dtype).transpose(2, 3), 100 * random(several, 2, 3, rows)
    before = [out[:, :, :7].clone(), lse[:, :, :7].clone()]
    outs, lses = [*more.double()], [*more_lse.double()]
    if first:
        out[:, :, 7:], lse[:, :, 7:] = torch.nan, torch.nan  # nobody has written it
    else:
        outs.append(out[:, :, 7:].double())
        lses.append(lse[:, :, 7:].double())
    want_lse = torch.stack(lses).logsumexp(0)
    want = sum((x - want_lse).exp()[..., None] * y for x, y in zip(lses, outs, strict=True))
    merge_into(out[:, :, 7:], lse[:, :, 7:], more, more_lse, first)
    assert not triton_launch._unable
    assert torch.equal(out[:, :, :7], before[0]) and torch.equal(lse[:, :, :7], before[1])
    torch.testing.assert_close(out[:, :, 7:], want.float(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse[:, :, 7:], want_lse.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a race of a GPU's warps")
def test_on_a_gpu_all_warps_read_before_one_writes(monkeypatch):
    """Where a warp finds the LSE that another has left, a row in ten thousand is wrong."""
    monkeypatch.setattr(triton_launch, "_unable", {})
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator, device="cuda")

    for _ in range(20):
        out, lse, more, more_lse = (
            random(1, 4, 8192, 512),
            random(1, 4, 8192),
            random(1, 4, 8192, 512),
            random(1, 4, 8192),
        )
        share = torch.sigmoid(more_lse - lse)[..., None]
        want = out * (1 - share) + more * share
        merge_into(out, lse, more[None], more_lse[None], False)
        torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)
    assert not triton_launch._unable
