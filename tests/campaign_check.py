"""Checks one problem: the call, the truth, and whether they agree."""

from __future__ import annotations

import contextlib
import os
import warnings

import campaign_tensors as tensors
import campaign_truth as truth
import compare
import ffpa_attn
import torch
from campaign_problems import EMULATED, FP8, Problem
from campaign_tensors import heads_first
from ffpa_attn import env
from ffpa_attn.operators import ops


class Refused(Exception):
    """The call is one that the contract lets a backend refuse."""


class Wrong(AssertionError):
    pass


def _device(p: Problem) -> str:
    return "cuda" if p.device == "cuda" else "cpu"


@contextlib.contextmanager
def running(p: Problem):
    """Makes the environment the one that the problem names."""
    flags = {"FFPA_BACKEND": p.backend, **dict(p.flags)}
    if p.device == "interpreter":
        flags["TRITON_INTERPRET"] = "1"
    with contextlib.ExitStack() as stack:
        for name, value in flags.items():
            stack.enter_context(env.overridden(name, value))
        if p.device in EMULATED:
            from ffpa_attn.testing import emulate

            if p.device == "fused":  # a compiler's choices do not depend on the instance: a few instances will do
                stack.enter_context(env.overridden("ENABLE_FFPA_DEBUG", "1"))
            stack.enter_context(emulate(p.arch, seed=p.schedule, exact=p.exact, fused=p.device == "fused"))
        if p.device != "cuda":
            torch.use_deterministic_algorithms(True)  # new memory holds NaN
            stack.callback(torch.use_deterministic_algorithms, False)
        said = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        yield
    failures = [str(w.message) for w in said if _is_failure(str(w.message))]
    if failures:
        raise Wrong(failures[0][:500])


def _is_failure(text: str) -> bool:
    """Says whether a warning or a refusal means that a kernel could not be compiled, loaded or launched."""
    return "ffpa_attn" in text and any(words in text for words in ("failed", "not ready", "Error"))


def as_integers(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def same_bits(a, b) -> bool:
    return all(torch.equal(as_integers(x), as_integers(y)) for x, y in zip(a, b, strict=True))


def _checksum(blocks) -> list[torch.Tensor]:
    return [as_integers(block).sum() for block in blocks]


# ---- the call ----


def call(p: Problem, x: tensors.Inputs, leaves, return_lse: bool, **more) -> dict[str, torch.Tensor]:
    """Returns what ffpa or ffpa_varlen gives, by name."""
    how = {**p.rule, "level": p.level, "acc": p.acc, "num_stages": p.num_stages, "return_lse": return_lse, **more}
    q, k, v, mask, sinks = leaves
    if sinks is not None:
        how["sinks"] = sinks
    if p.max_logits:
        how["return_max_logits"] = True
    if p.pages:
        (cu_q, _, *longest), (k, v, table, used) = x.offsets, x.pool
        if x.scales:
            how["k_scale"], how["v_scale"] = x.scales
        results = ffpa_attn.ffpa_varlen(q, k, v, cu_q, None, *longest, block_table=table, seqused_k=used, **how)
    elif p.packed:
        results = ffpa_attn.ffpa_varlen(q, k, v, *x.offsets, **how)
    else:
        results = ffpa_attn.ffpa(q, k, v, mask=mask, layout=p.layout, **how)
    names = ["out"] + ["lse"] * return_lse + ["max_logits"] * p.max_logits
    return dict(zip(names, results if len(names) > 1 else [results], strict=True))


_REFUSALS = ("exclude each other", "which means the mma family")


def own_output(p: Problem, x: tensors.Inputs) -> tensors.Placed:
    """Returns what is given as `out`, full of 7."""
    shape = p.batch, p.heads_q, heads_first(p, x.q).shape[-2], p.d_v
    sevens = torch.full(shape, 7.0, dtype=x.q.dtype, device=x.q.device)
    if p.packed:
        view, block = tensors.place(sevens[0], p.out, "HN")
        return tensors.Placed(view.transpose(0, 1), block)
    view, block = tensors.place(sevens, p.out)
    return tensors.Placed(view.transpose(1, 2) if p.layout == "BNHD" else view, block)


def forward(p: Problem, x: tensors.Inputs) -> dict[str, torch.Tensor]:
    """Returns results by name."""
    more, block, around = {}, None, None
    if p.out is not None:
        view, block = own_output(p, x)
        before = as_integers(block).long().sum() - as_integers(view).long().sum()
        more["out"] = view
    results = call(p, x, (x.q, x.k, x.v, x.mask, x.sinks), p.return_lse, **more)
    if block is not None:
        around = as_integers(block).long().sum() - as_integers(results["out"]).long().sum() - before
        if int(around):
            raise Wrong("out: what lies around it was written")
    return results


def random_gradients(p: Problem, out, lse, quiet):
    grad = tensors.normal(out.shape, p.seed * 7 + 4, out.device).to(out.dtype)
    if quiet is not None:
        grad = grad.masked_fill(quiet, 0.0)
    grad_lse = None
    if p.grad_lse:
        grad_lse = tensors.normal(lse.shape, p.seed * 7 + 5, out.device)
        grad_lse = grad_lse.masked_fill(~torch.isfinite(lse), 0.0)
        if quiet is not None:
            grad_lse = grad_lse.masked_fill(_rows_of_lse(p, quiet), 0.0)
    return grad, grad_lse


def _rows_of_lse(p: Problem, quiet):
    return heads_first(p, quiet)[..., 0]


def _quiet(p: Problem, x: tensors.Inputs):
    """Returns the rows all whose keys a finite mask hides, in the layout of out."""
    if not p.quiet_rows or p.mask is None or p.mask.dtype == "bool" or not p.n_k:
        return None
    mask = x.mask[(None,) * (4 - x.mask.dim())]
    import oracle

    seen = oracle.visible(p.n_q, p.n_k, p.causal, p.align, p.window, mask.device)
    values = mask.float().expand(p.batch, p.heads_q, p.n_q, p.n_k).masked_fill(~seen, -torch.inf)
    quiet = (values.amax(-1) < -1e3)[..., None]
    return quiet.transpose(1, 2) if p.layout == "BNHD" else quiet


def both(p: Problem, x: tensors.Inputs, quiet, grads=None):
    """Returns (results and gradients by name, those of out and lse that they come from: random, if none are given)."""
    named = {"q": x.q, "k": x.k, "v": x.v, "m": x.mask, "s": x.sinks}
    leaves = {name: t if t is None else t.detach().requires_grad_(name in p.wanted) for name, t in named.items()}
    results = call(p, x, tuple(leaves.values()), return_lse=True)
    if p.max_logits and results["max_logits"].requires_grad:
        raise Wrong("max_logits: they have no gradient, and want one")
    out, lse = results["out"], results["lse"]
    grads = grads or random_gradients(p, out.detach(), lse.detach(), quiet)
    wanted = [name for name in "qkvms" if name in p.wanted and leaves[name] is not None]
    outputs = [out, lse] if p.grad_lse else [out]
    got = torch.autograd.grad(outputs, [leaves[name] for name in wanted], [g for g in grads if g is not None])
    names = {"q": "dq", "k": "dk", "v": "dv", "m": "dmask", "s": "dsinks"}
    gradients = {names[name]: g for name, g in zip(wanted, got, strict=True)}
    return {name: t.detach() for name, t in results.items()} | gradients, grads


def run(p: Problem, x: tensors.Inputs):
    """Calls as often as the problem says, for the same bits: (results by name, gradients of out and lse)."""
    first = None
    with running(p):
        for _ in range(p.repeats):
            try:
                if p.backward:
                    found = both(p, x, _quiet(p, x))
                else:
                    found = forward(p, x), (None, None)
            except NotImplementedError as error:
                if (p.backend == "auto" and p.level is None) or _is_failure(f"ffpa_attn {error}"):
                    raise Wrong(str(error)) from None
                raise Refused(str(error)) from None
            except ValueError as error:
                if any(words in str(error) for words in _REFUSALS):
                    raise Refused(str(error)) from None
                raise
            if first is not None and not same_bits(first[0].values(), found[0].values()):
                raise Wrong("a second call gives other bits")
            first = found if first is None else first
    return first


# ---- the check ----


def check(p: Problem) -> str:
    """Raises Wrong, or whatever the call did; Refused where the contract lets it refuse. Gives the kernel's backend."""
    if p.dtype in FP8:
        from campaign_fp8 import check_fp8

        return check_fp8(p)
    device = _device(p)
    with torch.no_grad():
        x = tensors.make(p, device)
        sums = _checksum(x.blocks)
    ran = run(p, x)
    with torch.no_grad():
        comparisons = [_unwritten(sums, _checksum(x.blocks))]
        comparisons += _compare_packed(p, x, *ran) if p.packed else _compare_dense(p, x, *ran)
        try:
            compare.settle(*comparisons)  # this waits for the GPU once
        except AssertionError as error:
            raise Wrong(str(error)) from None
    return p.backend


def _unwritten(before: list[torch.Tensor], after: list[torch.Tensor]) -> compare.Comparison:
    def judge(*differ) -> None:
        assert not any(differ), "an input was written to"

    return compare.Comparison((torch.stack(before) != torch.stack(after)).double(), judge)


def _compare_dense(p, x, results, grads) -> list[compare.Comparison]:
    q, k, v = (heads_first(p, t) for t in (x.q, x.k, x.v))
    grad = None if grads[0] is None else heads_first(p, grads[0])
    got = {name: heads_first(p, t) if name in ("out", "dq", "dk", "dv") else t for name, t in results.items()}
    if "dmask" in got:
        got["dmask"] = got["dmask"][(None,) * (4 - x.mask.dim())]
    want = truth.expected(q, k, v, mask=x.mask, grad=grad, grad_lse=grads[1], **_how(p, x), **p.rule)
    return _compare(p, q, k, got, want)


def _how(p: Problem, x: tensors.Inputs) -> dict:
    """Says what else the truth depends on, and how sums are formed: the reference path's by a BLAS, and those of the
    interpreter too.
    """
    return {
        "sinks": x.sinks,
        "max_logits": p.max_logits,
        "acc_qk": "f16" if p.acc == "f16" else "f32",
        "acc_pv": "f32" if p.acc == "f32" else "f16",
        "ordered": p.device in ("cuda", *EMULATED) and p.backend != "reference",
    }


def _compare(p, q, k, got: dict, want: dict) -> list[compare.Comparison]:
    found = []
    for name, x in got.items():
        wanted, bases, moved, least = want[name]
        try:
            if name == "max_logits":  # what a head's are is left open where a NaN is among its scores
                x = torch.where(wanted.isnan(), torch.nan, x) if x.shape == wanted.shape else x
            if name in ("lse", "max_logits"):
                base = bases[0] if bases and p.acc == "f16" else None
                found.append(compare.lse_close(name, x, wanted, q, k, p.scale, base, moved, least))
            else:
                found.append(compare.close(name, x, wanted, bases, moved, least))
        except AssertionError as error:  # shapes or types are wrong
            raise Wrong(str(error)) from None
    return found


def _compare_packed(p, x, results, grads) -> list[compare.Comparison]:
    """Compares sequence by sequence; rows of no sequence give 0 and -inf."""
    shapes = {"out": (x.q.shape[0], p.heads_q, p.d_v), "dq": x.q.shape, "dk": x.k.shape, "dv": x.v.shape}
    shapes |= {"lse": (p.heads_q, x.q.shape[0]), "max_logits": (len(x.spans), p.heads_q), "dsinks": (p.heads_q,)}
    device, float32, totals = x.q.device, ("lse", "max_logits"), {}
    for name in results:
        dtype = torch.float32 if name in float32 else x.sinks.dtype if name == "dsinks" else x.q.dtype
        totals[name] = truth.Sum(shapes[name], dtype, device, {"max_logits": 0, "out": 1, "lse": 1}.get(name, 2))
        if name in float32:
            totals[name].fill(-torch.inf)
    live_q = torch.zeros(x.q.shape[0], dtype=torch.bool, device=device)
    live_k = torch.zeros(x.k.shape[0], dtype=torch.bool, device=device)
    for i, (rows, keys) in enumerate(x.spans):
        live_q[rows], live_k[keys] = True, True
        q, k, v = (t[part].transpose(0, 1)[None] for t, part in ((x.q, rows), (x.k, keys), (x.v, keys)))
        grad = None if grads[0] is None else grads[0][rows].transpose(0, 1)[None]
        grad_lse = None if grads[1] is None else grads[1][None, :, rows]
        of_sequence = truth.sums(q, k, v, grad=grad, grad_lse=grad_lse, **_how(p, x), **p.rule)
        for name, total in totals.items():
            if name == "lse":
                total.put((slice(None), rows), of_sequence[name].part().each(lambda t: t[0]))
            elif name == "max_logits":
                total.put(slice(i, i + 1), of_sequence[name].part())
            elif name == "dsinks":
                total.add(slice(None), of_sequence[name].part())
            else:
                part = rows if name in ("out", "dq") else keys
                total.add(part, of_sequence[name].part().each(lambda t: t[0].transpose(0, 1)))
    found = {name: total.expected() for name, total in totals.items()}
    q, k = (torch.where(live[:, None, None], t, 0.0) for live, t in ((live_q, x.q), (live_k, x.k)))
    return _compare(p, q, k, results, found)


def forget() -> None:
    """Clears what earlier calls are remembered by."""
    ops._plans.clear()


def clean_environment() -> None:
    for flag in env.FLAGS:
        if flag.scope == "run" and flag.name not in ("FFPA_CACHE_DIR", "TRITON_INTERPRET"):
            os.environ.pop(flag.name, None)
