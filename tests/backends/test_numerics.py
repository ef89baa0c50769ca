"""Tests every case of the matrix against the float64 oracle: out, LSE and all gradients."""

import campaign_truth
import compare
import ffpa_attn
import oracle
import pytest
import torch
from cases import CASES, PACKED_CASES, Case, PackedCase, make_inputs, make_packed_inputs
from ffpa_attn.backends import reference_rows


def by_id(cases):
    return pytest.mark.parametrize("case", cases, ids=[case.id for case in cases])


def leaves(*tensors):
    """Returns copies for autograd, without the NaN around them."""
    return [x.detach().clone().requires_grad_(x.is_floating_point()) for x in tensors if x is not None]


def gradients(outputs, grads, inputs):
    """Computes gradients, of finite LSE only: a row without keys has nothing to pass on."""
    (out, lse), (g, g_lse) = outputs, grads
    seen = g_lse != 0
    loss = (out * g.to(out.dtype)).to(lse.dtype).sum() + (lse[seen] * g_lse[seen].to(lse.dtype)).sum()
    return torch.autograd.grad(loss, [x for x in inputs if x.requires_grad], materialize_grads=True)


def random_like(x, seed):
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).to(x)


@by_id(CASES)
def test_forward(case: Case, device):
    q, k, v, mask = make_inputs(case, device)
    rule = {**case.options(device), "layout": case.layout, "mask": mask}
    out, lse = ffpa_attn.ffpa(q, k, v, return_lse=True, **rule)
    want, want_lse = oracle.attention(q, k, v, **rule)
    base = compare.baseline(q, k, v, **rule)[0]
    assert out.dtype == case.dtype and out.is_contiguous()
    compare.assert_close("out", out, want, base)
    compare.assert_lse_close("lse", lse, want_lse, q, k, case.rule.get("scale"))

    alone = ffpa_attn.ffpa(q, k, v, **rule)  # this may take another path: no LSE is wanted
    compare.assert_close("out without lse", alone, want, base)
    given = torch.full_like(out, torch.nan)
    assert ffpa_attn.ffpa(q, k, v, out=given, **rule) is given
    assert torch.equal(given, alone)

    _, largest = ffpa_attn.ffpa(q, k, v, return_max_logits=True, **rule)
    q, k = (x.transpose(1, 2) if case.layout == "BNHD" else x for x in (q, k))
    want = oracle.largest_scores(q, k, mask=mask, **case.rule)
    compare.assert_lse_close("largest logits", largest, want, q, k, case.rule.get("scale"))


@by_id(CASES)
def test_gradients(case: Case, device):
    """Gradients are those of sum(out * g) + sum(lse * g_lse), additive masks and sinks included."""
    inputs = *make_inputs(case, device), case.options(device).get("sinks")
    named = {name: x for name, x in zip(("q", "k", "v", "mask", "sinks"), inputs, strict=True) if x is not None}
    ours, oracles, bases = (dict(zip(named, leaves(*named.values()), strict=True)) for _ in range(3))
    rule = {**case.rule, "layout": case.layout}

    out, lse = ffpa_attn.ffpa(**ours, return_lse=True, **rule)
    grads = random_like(out, 7), random_like(lse, 8) * torch.isfinite(lse)
    wanted = [name for name, x in ours.items() if x.requires_grad]
    got = torch.autograd.grad([out, lse], [ours[name] for name in wanted], grads)
    want = gradients(oracle.attention(**oracles, **rule), grads, oracles.values())
    base = gradients(compare.baseline(**bases, **rule), grads, bases.values())
    for name, x, *others in zip(wanted, got, want, base, strict=True):
        if name == "sinks":  # PyTorch's errors of so few numbers are small by luck
            others = of_sinks(case.layout, grads, *inputs, **case.rule).expected()
        compare.assert_close(f"d{name}", x, *others)


def of_sinks(layout: str, grads, q, k, v, mask, sinks, **rule) -> campaign_truth.Sum:
    """Returns what the gradient of sinks must be."""
    q, k, v, grad = (x.transpose(1, 2) if layout == "BNHD" else x for x in (q, k, v, grads[0]))
    return campaign_truth.sums(q, k, v, mask=mask, sinks=sinks, grad=grad, grad_lse=grads[1], **rule)["dsinks"]


def test_no_probability_is_above_1(device, monkeypatch):
    """P is at most 1 though a score is above the LSE: below 10^8 the next float32 is 8 less, and e^8 is 2981."""
    monkeypatch.setenv("FFPA_BACKEND", "reference")
    q, k = (torch.full((1, 1, n, 64), 4000.0, dtype=torch.float16, device=device) for n in (3, 1))
    out, lse = ffpa_attn.ffpa(q, k, k, return_lse=True)
    g = torch.ones_like(out)
    for below in (torch.nextafter(lse, torch.zeros_like(lse)), lse * (1 - 2.0**-18)):
        dv = torch.ops.ffpa_attn.backward(g, None, q, k, k, out, below)[2]
        assert torch.equal(dv, torch.full_like(dv, 3.0))


def spans(case: PackedCase):
    """Gives the rows and the keys of each sequence."""
    start_q, start_k = 0, 0
    for n_q, n_k in zip(case.lengths_q, case.lengths_k, strict=True):
        yield slice(start_q, start_q + n_q), slice(start_k, start_k + n_k)
        start_q, start_k = start_q + n_q, start_k + n_k


def by_sequence(case: PackedCase, function, q, k, v, *sinks):
    """Calls a dense function, sequence by sequence: (out [T, H, Dv], lse [H, T]) of the packed tensors."""
    outs, lses = [], []
    rule = {**case.options(q.device), **dict(zip(["sinks"], sinks, strict=False))}
    for rows, keys in spans(case):
        out, lse = function(q[None, rows], k[None, keys], v[None, keys], layout="BNHD", **rule)
        outs.append(out[0])
        lses.append(lse[0])
    if not outs:
        nothing = 0 * (q.sum() + k.sum() + v.sum())
        return nothing.expand(0, case.heads_q, v.shape[2]), nothing.expand(case.heads_q, 0)
    return torch.cat(outs), torch.cat(lses, 1)


@by_id(PACKED_CASES)
@pytest.mark.parametrize("lengths", ["read", "on the device"])
def test_packed(case: PackedCase, device, lengths, monkeypatch):
    if lengths == "on the device":  # a GPU has them there
        monkeypatch.setattr(reference_rows, "_lengths_may_be_read", lambda cu: False)
    q, k, v, *offsets = make_packed_inputs(case, device)
    rows, sinks = q.shape[0] - case.spare, case.options(device).get("sinks")
    ours, oracles, bases = (leaves(q, k, v, sinks) for _ in range(3))

    rule = {**case.rule, **dict(zip(["sinks"], ours[3:], strict=False))}
    out, lse = ffpa_attn.ffpa_varlen(*ours[:3], *offsets, return_lse=True, **rule)
    assert not out[rows:].any() and torch.isneginf(lse[:, rows:]).all(), "rows of no sequence"
    want_out, want_lse = by_sequence(case, oracle.attention, *oracles)
    base_out, base_lse = by_sequence(case, compare.baseline, *bases)
    compare.assert_close("out", out[:rows], want_out, base_out)
    inner = slice(0, k.shape[0] - case.spare)
    compare.assert_lse_close("lse", lse[:, :rows], want_lse, q[:rows], k[inner], case.rule.get("scale"))

    g, g_lse = random_like(out, 7), random_like(lse, 8) * torch.isfinite(lse)
    got = torch.autograd.grad([out, lse], ours, [g, g_lse])
    grads = g[:rows], g_lse[:, :rows]
    want = gradients((want_out, want_lse), grads, oracles)
    base = gradients((base_out, base_lse), grads, bases)
    for name, *three in zip(["dq", "dk", "dv"], got, want, base, strict=False):
        compare.assert_close(name, *three)
    if sinks is not None:
        total = campaign_truth.Sum(sinks.shape, sinks.dtype, device, 2)
        for of_q, of_k in spans(case):
            of_rows, one = (g[None, of_q], g_lse[None, :, of_q]), (q[None, of_q], k[None, of_k], v[None, of_k])
            total.add(slice(None), of_sinks("BNHD", of_rows, *one, None, sinks, **case.rule).part())
        compare.assert_close("dsinks", got[3], *total.expected())

    given = torch.full_like(out, torch.nan)
    with torch.no_grad():
        assert ffpa_attn.ffpa_varlen(q, k, v, *offsets, out=given, **case.options(device)) is given
        _, largest = ffpa_attn.ffpa_varlen(q, k, v, *offsets, return_max_logits=True, **case.options(device))
    assert torch.equal(given, out)
    for of_one, (of_q, of_k) in zip(largest, spans(case), strict=True):
        dense = (q[of_q].transpose(0, 1), k[of_k].transpose(0, 1))
        want = oracle.largest_scores(*(x[None] for x in dense), **case.rule)[0]
        compare.assert_lse_close("largest logits", of_one, want, *dense, case.rule.get("scale"))


def exact_in_parts(q, k, v, layout):
    """Takes the oracle over 2^18 keys at a time: float64 of more would take four times the memory of the tensors."""
    rows = 2 if layout == "BHND" else 1
    parts = [
        oracle.attention(q, *x, layout=layout) for x in zip(k.split(1 << 18, rows), v.split(1 << 18, rows), strict=True)
    ]
    lse = torch.stack([part[1] for part in parts]).logsumexp(0)
    shares = ((part[1] - lse).exp()[..., None] for part in parts)
    if layout == "BNHD":
        shares = (share.transpose(1, 2) for share in shares)
    return sum(share * part[0] for share, part in zip(shares, parts, strict=True)), lse


@pytest.mark.large(gigabytes=30)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("layout", ["BHND", "BNHD"])
@pytest.mark.parametrize("long_side", ["q", "kv"])
def test_more_than_2_to_the_31_elements(long_side, layout):
    """Rows past element 2^31 of q, k, v and their gradients are held to the oracle on those rows alone."""
    heads, d, long, short = 2, 520, 2**21 + 77, 24
    n_q, n_k = (long, short) if long_side == "q" else (short, long)
    generator = torch.Generator("cuda").manual_seed(0)

    def tensor(n):
        shape = (1, heads, n, d) if layout == "BHND" else (1, n, heads, d)
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16).requires_grad_()

    def rows(x, which):
        return x[:, :, which] if layout == "BHND" else x[:, which]

    q, k, v = tensor(n_q), tensor(n_k), tensor(n_k)
    assert max(q.numel(), k.numel()) > 2**31
    out, lse = ffpa_attn.ffpa(q, k, v, layout=layout, return_lse=True)
    last = slice(-40, None) if long_side == "q" else slice(None)
    q_rows = rows(q.detach(), last)
    want, want_lse = exact_in_parts(q_rows, k.detach(), v.detach(), layout)
    base = compare.baseline(q_rows, k.detach(), v.detach(), layout=layout)[0]
    compare.assert_close("out", rows(out, last), want, base)
    compare.assert_lse_close("lse", lse[:, :, last], want_lse, q_rows, k, None)
    if long_side == "q":  # dq of a row needs that row alone
        g = torch.zeros_like(out)
        rows(g, last).copy_(torch.randn(rows(g, last).shape, generator=generator, device="cuda"))
        (dq,) = torch.autograd.grad(out, q, g)
        q2, q3 = (q_rows.clone().requires_grad_() for _ in range(2))
        (want_dq,) = torch.autograd.grad(
            (oracle.attention(q2, k.detach(), v.detach(), layout=layout)[0] * rows(g, last)).sum(), q2
        )
        (base_dq,) = torch.autograd.grad(
            (compare.baseline(q3, k.detach(), v.detach(), layout=layout)[0] * rows(g, last)).sum(), q3
        )
        compare.assert_close("dq", rows(dq, last), want_dq, base_dq)
