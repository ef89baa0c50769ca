"""Runs the checks of the five designs that this project is measured against, through the public functions.

On a GPU each check has its own shapes. On the CPU the same kernels run in the emulator or in Triton's interpreter, with
the same shapes where these can afford them, else smaller ones. Where a check leaves something open, the stricter
reading is taken, and said.
"""

from contextlib import nullcontext

import compare
import ffpa_attn
import oracle
import pytest
import torch
from ffpa_attn.testing import emulate

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
_f16, _bf16, _e4m3, _e5m2 = torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
SCALE = 0.5  # scale of every check in Triton


def there_or_here(there, here):
    """Chooses the shapes for a GPU, or what the CPU can do of them."""
    return there if GPU else here


def normal(*shape, dtype=_f16, size=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * size).to(DEVICE, dtype)


@pytest.fixture
def triton(monkeypatch):
    """Forces the Triton kernels; a call that they cannot run raises."""
    monkeypatch.setenv("FFPA_BACKEND", "triton")
    monkeypatch.setenv("FFPA_STRICT", "1")
    if not GPU:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("triton", reason="Triton is an extra")  # Triton reads the line above when it is imported


def plain_attention(q, k, v, hidden):
    """Computes as the Triton tutorial does: matmul, softmax of float32 rounded to the inputs' type, matmul."""
    scores = (torch.matmul(q, k.transpose(2, 3)) * SCALE).masked_fill(hidden, float("-inf"))
    return torch.matmul(torch.softmax(scores.float(), -1).to(v.dtype), v)


def assert_within_a_hundredth(got, want):
    """Allows nothing for large numbers: the tutorial's relative tolerance is 0."""
    for name, ours, theirs in zip(("out", "dq", "dk", "dv"), got, want, strict=False):
        torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=0, msg=lambda m, name=name: f"{name}: {m}")


def out_and_gradients(function, grad, *inputs):
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*inputs)
    return out.detach(), *torch.autograd.grad(out, inputs, grad)


def tutorial_inputs(z, h, n_q, n_k, d, dtype=_f16):
    """Draws the tutorial's inputs, which are N(0, 0.5^2)."""
    return [normal(z, h, n, d, dtype=dtype, size=0.5, seed=seed) for seed, n in enumerate((n_q, n_k, n_k))]


def check_out_and_gradients(q, k, v, *, causal, align="bottom_right"):
    """Rows that see no key come first. They are 0; the reference gives NaN and leaves them out."""
    hidden = ~oracle.visible(q.shape[2], k.shape[2], causal, align, device=DEVICE)
    first = int(hidden.all(1).sum())
    grad = normal(*q.shape[:3], v.shape[3], dtype=q.dtype, seed=3)
    rule = {"scale": SCALE, "causal": causal, "align": align}
    out, dq, dk, dv = out_and_gradients(lambda *qkv: ffpa_attn.ffpa(*qkv, **rule), grad, q, k, v)
    assert not out[:, :, :first].any() and not dq[:, :, :first].any(), "rows without keys"
    seeing = slice(first, None)
    want = out_and_gradients(
        lambda *qkv: plain_attention(*qkv, hidden[seeing]), grad[:, :, seeing], q[:, :, seeing], k, v
    )
    assert_within_a_hundredth([out[:, :, seeing], dq[:, :, seeing], dk, dv], want)


# ---- FFPA, first release: split-D with mma.sync, fp16, D of 256 to 1024 in steps of 64, N a multiple of 128 ----


@pytest.mark.parametrize("acc", ["f32", "f16"])
@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("d", range(256, 1025, 64))
def test_ffpa_first_release(d, level, acc):
    """That release printed its difference from SDPA, judging none: ours may err twice as PyTorch does, by float64."""
    n, heads = there_or_here((1152, 4), (128, 1))
    q, k, v = (normal(1, heads, n, d, seed=seed) for seed in range(3))
    with nullcontext() if GPU else emulate("sm_80"):
        out = ffpa_attn.ffpa(q, k, v, level=level, acc=acc)
    want, _ = oracle.attention(q, k, v)
    base, _ = compare.baseline(q, k, v, acc_qk=acc, acc_pv=acc)
    compare.assert_close("out", out, want, base)


# ---- Triton's tutorial: FlashAttention-2, fp16 forward and backward, fp8 forward ----


@pytest.mark.parametrize("causal", there_or_here([True, False], [True]))
def test_triton_tutorial_forward(causal, triton):
    q, k, v = tutorial_inputs(1, 2, 1024, 1024, 64)
    hidden = ~oracle.visible(1024, 1024, causal, device=DEVICE)
    out = ffpa_attn.ffpa(q, k, v, causal=causal, scale=SCALE)
    assert_within_a_hundredth([out], [plain_attention(q, k, v, hidden)])


def test_triton_tutorial_gradients(triton):
    check_out_and_gradients(*tutorial_inputs(1, 2, 1024, 1024, 64), causal=True)


def attention_with_8_bit_p(q, k, v, causal):
    """Computes what a kernel that multiplies 8-bit floats does, in one tile: P, at most 1, is rounded to their type."""
    scores = q.float() @ k.float().transpose(2, 3) * SCALE
    if causal:
        scores = scores.masked_fill(~oracle.visible(*scores.shape[2:], causal=True, device=q.device), float("-inf"))
    p = torch.exp(scores - scores.amax(-1, keepdim=True))
    return p.to(q.dtype).float() @ v.float() / p.sum(-1, keepdim=True)


@pytest.mark.parametrize("causal", there_or_here([True, False], [True]))
def test_triton_tutorial_fp8_forward(causal, triton):
    """The tutorial allows fp8 an error of 3, which excludes nothing. P in e5m2, with its 2 bits, is further than 1e-2
    from the truth by itself: ours may err twice as much as such a P in PyTorch, against float64 of the same 8-bit
    inputs.
    """
    q, k, v = (x.to(_e5m2) for x in tutorial_inputs(1, 2, 1024, 1024, 64))
    transposed = v.transpose(2, 3).contiguous()
    out = ffpa_attn.ffpa_fp8(q, k, transposed, v_transposed=True, causal=causal, scale=SCALE, out_dtype=_f16)
    want, _ = oracle.attention(q, k, v, causal=causal, scale=SCALE)
    compare.assert_close("out", out, want, attention_with_8_bit_p(q, k, v, causal).to(_f16))


# ---- FlashAttention in Triton, arbitrary lengths ----

SHORT, LONG = there_or_here((1234, 4321), (123, 432))
LENGTHS = [
    (SHORT, SHORT, True, "bottom_right"),
    (SHORT, LONG, False, "bottom_right"),
    *[(n_q, n_k, True, align) for n_q, n_k in ((SHORT, LONG), (LONG, SHORT)) for align in ("bottom_right", "top_left")],
]


@pytest.mark.parametrize("n_q, n_k, causal, align", LENGTHS)
def test_triton_arbitrary_lengths(n_q, n_k, causal, align, triton):
    check_out_and_gradients(*tutorial_inputs(1, 2, n_q, n_k, 64), causal=causal, align=align)


# ---- Triton on an NPU: a fixed number of cores, O in global memory ----


@pytest.mark.parametrize("cores", [None, 24], ids=["one program for each block", "persistent"])
@pytest.mark.parametrize("dtype", [_f16, _bf16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize(
    "z, h, n, d",
    there_or_here(
        [(1, 1, 128, 128), (1, 2, 256, 256), (2, 2, 128, 256), (4, 32, 64, 64), (4, 32, 1024, 64), (4, 32, 4096, 64)],
        [(1, 1, 128, 128), (1, 2, 256, 256), (2, 2, 128, 256), (4, 32, 64, 64), (1, 1, 512, 64)],
    ),
)
def test_triton_ascend(z, h, n, d, dtype, cores, triton, monkeypatch):
    """Both types are right to 1e-2 in the tutorial's distribution."""
    if not GPU and z * h > 8 and dtype == _bf16:
        pytest.skip("takes the interpreter too long")
    if cores:
        monkeypatch.setenv("FFPA_TRITON_CORES", str(cores))
    q, k, v = tutorial_inputs(z, h, n, n, d, dtype)
    assert ("persistent" in ffpa_attn.explain(q, k, v, scale=SCALE).kernel) == bool(cores)
    out = ffpa_attn.ffpa(q, k, v, scale=SCALE)
    nothing_hidden = torch.zeros(n, n, dtype=torch.bool, device=DEVICE)
    for i in range(z):  # the N^2 scores of one batch entry fit
        assert_within_a_hundredth([out[i]], [plain_attention(*(x[i : i + 1] for x in (q, k, v)), nothing_hidden)[0]])


# ---- Helion: attention of e4m3, V transposed beforehand, e4m3 out ----


def one_head_in_8_bits(q, k, v, factor_qk, factor_v):
    """Computes Helion's reference for one head: 8-bit products summed in float32, as by torch._scaled_mm on a GPU; P,
    normalised, and the result are rounded to their type.
    """
    p = torch.softmax(q.float() @ k.float().T * factor_qk, -1)
    return (p.to(_e4m3).float() @ v.float() * factor_v).to(_e4m3)


@pytest.mark.parametrize("scaled", [False, True], ids=["no scales", "a scale for each head"])
@pytest.mark.parametrize("b, h, n, d", [(1, 2, 128, 64), (2, 4, 256, 64), *there_or_here([(4, 8, 512, 128)], [])])
def test_helion_fp8(b, h, n, d, scaled, triton):
    """Results are right within 0.1, with no more for large numbers."""
    q, k, v = (normal(b, h, n, d, dtype=torch.float32, seed=seed) for seed in range(3))
    scales = torch.ones(3, b, h, device=DEVICE)
    if scaled:
        scales = torch.stack([x.abs().amax((2, 3)) / torch.finfo(_e4m3).max for x in (q, k, v)])
    q, k, v = ((x / s[..., None, None]).to(_e4m3) for x, s in zip((q, k, v), scales, strict=True))
    given = dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True)) if scaled else {}
    transposed = v.transpose(2, 3).contiguous()
    out = ffpa_attn.ffpa_fp8(q, k, transposed, v_transposed=True, out_dtype=_e4m3, **given)
    assert out.dtype == _e4m3
    for i in range(b):
        for j in range(h):
            q_scale, k_scale, v_scale = scales[:, i, j]
            want = one_head_in_8_bits(q[i, j], k[i, j], v[i, j], q_scale * k_scale * d**-0.5, v_scale)
            torch.testing.assert_close(out[i, j].float(), want.float(), atol=0.1, rtol=0)
