"""Runs every kind of Triton kernel there is, on small problems: `python tests/triton_ops/triton_kinds.py` runs them on a GPU and
compares with the oracle, one line for a kind that fails and a count at the end; under `compute-sanitizer --tool
memcheck` too. Nearly all the time goes into compiling: `--part 0/16` to `--part 15/16` are processes side by side,
about two minutes then (with `--all`, ten). `--compile sm_90` needs no GPU: it compiles the same kinds and looks for
products that may read what is no tile (`sass_descriptors.py`).

A kind has widths of Q and K, and of V, filled or not; is read by TMA, through pointers, or packed; rows apart by odd
multiples of 16 bytes; causal, masked, capped; forward and gradients.
"""

import argparse
import itertools
import os
import sys
import time
import warnings
import zlib
from pathlib import Path
from typing import NamedTuple

os.environ["FFPA_BACKEND"] = "triton"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "ffpa"))

import torch

_FILLED = (16, 32, 64, 128, 256)
_NOT_FILLED = (8, 24, 40, 104, 200)
SOURCES = ("descriptors", "pointers", "packed")
RULES = ("plain", "causal", "bool", "additive", "capped")
_LENGTHS = (65, 5, 0, 90), (65, 9, 74, 200)  # lengths of packed rows and keys
_HEADS = 4, 1


class Kind(NamedTuple):
    d_qk: int
    d_v: int
    source: str
    rule: str
    stages: int | None = None


def kinds(everything: bool) -> list[Kind]:
    """Returns each pair of widths in each source, with two of the rules, in turn, or all."""
    found = []
    pairs = itertools.product(range(len(_FILLED)), repeat=2)
    for i, (source, (wide_qk, wide_v)) in enumerate(itertools.product(SOURCES, pairs)):
        filled = (_FILLED, _NOT_FILLED)[i % 2], (_FILLED, _NOT_FILLED)[i // 2 % 2]
        turn = (i + wide_qk) % len(RULES)
        for rule in RULES if everything else {RULES[turn], RULES[(turn + 2) % len(RULES)]}:
            if source == "packed" and rule in ("bool", "additive"):
                continue  # packed sequences have no masks
            found.append(Kind(filled[0][wide_qk], filled[1][wide_v], source, rule))
    narrow = [Kind(d, 16, source, "plain") for d in (40, 104, 200) for source in ("pointers", "packed")]
    stages = [Kind(d, d_v, s, "plain", 1) for d, d_v, s in itertools.product((24, 128), (16, 128), SOURCES)]
    return list(dict.fromkeys([*narrow, *stages, *found]))


# ---- on a GPU ----


def _tensors(kind: Kind, dtype):
    """Returns q, k, v [B, H, N, D], or packed [T, H, D], rows apart by odd multiples of 8 elements, NaN between."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(kind).encode()))
    lengths = [sum(n) for n in _LENGTHS]
    result = []
    for n, heads, columns, slack in (
        (0, _HEADS[0], kind.d_qk, 208), (1, _HEADS[1], kind.d_qk, 16), (1, _HEADS[1], kind.d_v, 24)
    ):  # fmt: skip
        slack += 8 * ((columns + slack) // 8 % 2 == 0)
        outer = () if kind.source == "packed" else (2,)
        shape = (*outer, heads, lengths[n] if kind.source == "packed" else (150, 200)[n])
        block = torch.full((*shape, columns + slack), torch.nan, dtype=dtype, device="cuda")
        x = block[..., :columns]
        x.copy_(torch.randn(*shape, columns, generator=generator).to(dtype))
        if kind.source == "descriptors":
            x = x.contiguous()
        result.append(x.transpose(0, 1) if kind.source == "packed" else x)
    return result


def _rule(kind: Kind, q, k):
    import cases

    rule = {"scale": 0.05, "align": "top_left"}
    if kind.rule == "causal":
        rule["causal"] = True
    elif kind.rule == "capped":
        rule["softcap"] = 3.0
    elif kind.rule != "plain":
        case = cases.Case(batch=2, heads_q=_HEADS[0], n_q=q.shape[2], n_k=k.shape[2], dtype=q.dtype)
        rule["mask"] = cases.make_mask(kind.rule, case, "cuda", torch.Generator().manual_seed(2))
    return rule


def run(kind: Kind) -> None:
    """Raises where a result is not the oracle's."""
    import compare
    import ffpa_attn
    import oracle

    dtype = (torch.float16, torch.bfloat16)[sum(kind[:2]) // 8 % 2]
    q, k, v = (x.requires_grad_() for x in _tensors(kind, dtype))
    rule = _rule(kind, q, k)
    options = {} if kind.stages is None else {"num_stages": kind.stages}
    if kind.source == "packed":
        ends = [torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32, device="cuda") for n in _LENGTHS]
        longest = [max(n) for n in _LENGTHS]
        out, lse = ffpa_attn.ffpa_varlen(q, k, v, *ends, *longest, return_lse=True, **options, **rule)
        cuts = [[0, *itertools.accumulate(n)] for n in _LENGTHS]
        ranges = [tuple(slice(*cut[i : i + 2]) for cut in cuts) for i in range(len(_LENGTHS[0]))]
        parts = [tuple(x[at].transpose(0, 1)[None] for x, at in ((q, a), (k, b), (v, b))) for a, b in ranges]
        outs, lses = [out[a].transpose(0, 1)[None] for a, _ in ranges], [lse[:, a][None] for a, _ in ranges]
    else:
        out, lse = ffpa_attn.ffpa(q, k, v, return_lse=True, **options, **rule)
        parts, outs, lses = [(q, k, v)], [out], [lse]
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out)
    got = torch.autograd.grad(out, (q, k, v), grad)
    wants, bases = [], []
    for part, mine, my_lse in zip(parts, outs, lses, strict=True):
        want, want_lse = oracle.attention(*part, **rule)
        base, _ = compare.baseline(*part, **rule)
        compare.assert_close("out", mine, want, base)
        compare.assert_lse_close("lse", my_lse, want_lse, part[0], part[1], rule["scale"])
        wants.append(want), bases.append(base)
    if kind.source == "packed":
        grads = [grad[a].transpose(0, 1)[None] for a, _ in ranges]
    else:
        grads = [grad]
    wanted = torch.autograd.grad(wants, (q, k, v), [g.double() for g in grads], retain_graph=True)
    based = torch.autograd.grad(bases, (q, k, v), grads)
    for name, mine, want, base in zip(("dq", "dk", "dv"), got, wanted, based, strict=True):
        compare.assert_close(name, mine, want.double(), base)


# ---- without a GPU ----


def compile_kind(kind: Kind, arch: str) -> list[str]:
    """Returns what the kernels of a kind do that they must not."""
    import sass_descriptors
    import triton_offline
    from ffpa_attn import env
    from ffpa_attn.backends import triton_attention
    from ffpa_attn.specs.problem import Problem, Visibility
    from ffpa_attn.triton_ops import backward_kernels, forward_kernels

    problem = Problem(
        "forward", "cuda", arch, "bf16", 2, *_HEADS, 150, 200, kind.d_qk, kind.d_v, None,
        Visibility(-1, 0 if kind.rule == "causal" else -1, True), 0.05, 0.0,
        kind.rule if kind.rule in ("bool", "additive") else None, True, None, "f32", kind.stages,
    )  # fmt: skip
    forward, backward = (
        triton_attention.plan(problem._replace(direction=direction), env.run_flags())
        for direction in ("forward", "backward")
    )
    options = {
        "PACKED": kind.source == "packed", "TOP_LEFT": True, "EDGES": True, "BLIND": kind.rule == "causal", "MASK": problem.mask or "none",
        "RAW": kind.rule in ("plain", "causal"), "CAPPED": kind.rule == "capped", "SINKS": False, "LARGEST": False,
        "TMA": forward.descriptors and kind.source == "descriptors", "D_QK": kind.d_qk, "D_V": kind.d_v,
        "WIDTH_QK": forward.widths[0], "WIDTH_V": forward.widths[1],
    }  # fmt: skip
    found = []
    for kernel, tiles in (
        (forward_kernels.forward_kernel, forward.over_rows),
        (backward_kernels.rows_gradient_kernel, backward.over_rows),
        (backward_kernels.keys_gradient_kernel, backward.over_keys),
        (backward_kernels.shares_kernel, backward.far),
        *([(backward_kernels.far_gradients_kernel, backward.far)] if options["RAW"] else []),
    ):
        result = triton_offline.compiled(kernel, tiles, arch, options, odd=kind.source != "descriptors")
        if arch == "sm_90":
            sass = triton_offline.dumped(result, "nvdisasm", "-c")
            wrong = sass_descriptors.wrong(sass, result.asm["ptx"], result.metadata.shared)
            found += [f"{kernel.__name__}: {line}" for line in wrong[:1]]
        # A narrow tile of K, which is all that this kernel copies, has fewer bytes for each thread.
        narrow = kernel is backward_kernels.shares_kernel and tiles.keys * options["WIDTH_QK"] < 256 * tiles.warps
        in_16_bytes = "cp.async.cg.shared.global" in result.asm["ptx"]
        if not options["TMA"] and not in_16_bytes and not narrow and tiles.stages > 1:
            found.append(f"{kernel.__name__}: no tile is copied by 16 bytes")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="0/1", help="I/N: every N-th kind, from the I-th on")
    parser.add_argument("--all", action="store_true", help="every rule with every width")
    parser.add_argument("--compile", metavar="ARCH", help="compile for sm_80, sm_90, … and run nothing")
    given = parser.parse_args()
    part, parts = map(int, given.part.split("/"))
    mine = kinds(given.all)[part::parts]
    failed, start = 0, time.monotonic()
    warnings.simplefilter("ignore")
    for kind in mine:
        try:
            wrong = compile_kind(kind, given.compile) if given.compile else run(kind)
        except Exception as error:  # whatever it is, the next kind is told about too
            wrong = [f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"]
        if wrong:
            failed += 1
            print(kind, *wrong, sep="\n    ", flush=True)
    print(f"{len(mine) - failed} passed, {failed} failed ({time.monotonic() - start:.0f} s)")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
