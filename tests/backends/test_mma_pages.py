"""Tests the mma forwards that read keys in pages: each has the bits of the same kernel on packed keys."""

from dataclasses import replace

import compare
import oracle
import pytest
import torch
from cases import PackedCase, attending, make_packed_inputs, offsets
from ffpa_attn import env
from ffpa_attn.backends import levels
from ffpa_attn.backends.reference import Rule
from ffpa_attn.launching import emulated, native
from ffpa_attn.launching.attention_call import Pages
from ffpa_attn.specs import archs
from ffpa_attn.specs.problem import Problem, Visibility
from ffpa_attn.specs.spec import ForwardMmaKeys, ForwardMmaRows, ForwardMmaSplit, aot_specs
from ffpa_attn.testing import emulate
from test_numerics import by_sequence

F16 = torch.float16
CAP = 1 << 30
PAGED = [
    spec for spec in aot_specs(env.all_flags()) if isinstance(spec, ForwardMmaRows | ForwardMmaSplit) and spec.paged
]


def problem(case: PackedCase, arch: str, rows: int, entries: int, level=None) -> Problem:
    rule = {"causal": False, "align": "bottom_right", "window": (-1, -1), "softcap": 0.0, "scale": None, **case.rule}
    see = Visibility.of(rule["causal"], rule["align"], *rule["window"])
    return Problem(
        "forward", "cuda", arch, "f16" if case.dtype == F16 else "bf16", len(case.lengths_q), case.heads_q, case.heads_kv, max(case.lengths_q), max(case.lengths_k), case.d, case.d_v or case.d, (sum(case.lengths_q), sum(case.lengths_k)), see, rule["scale"] or case.d**-0.5, rule["softcap"], None, True, level, "f32", None, pages=(rows, entries),
    )  # fmt: skip


def in_pages(k, v, lengths, rows: int, entries: int, generator):
    """Returns pools [pages, rows, heads, columns], K and V in one storage, and the table, with the pages in any order.
    What no sequence has is NaN, as is what lies between K and V.
    """
    counts = [-(-n // rows) for n in lengths]
    pages = sum(counts) + 3
    order = torch.randperm(pages, generator=generator).to(torch.int32)
    d = k.shape[2]
    v_at = d + 32
    pool = torch.full((pages, rows, k.shape[1], v_at + v.shape[2] + 32), torch.nan, dtype=k.dtype)
    pools = pool[..., :d], pool[..., v_at : v_at + v.shape[2]]
    table = order[-1].expand(len(lengths), entries).clone()
    first = used = 0
    for i, (n, count) in enumerate(zip(lengths, counts, strict=True)):
        mine = order[used : used + count]
        table[i, :count] = mine
        for j, page in enumerate(mine.tolist()):
            some = slice(first + j * rows, first + min(n, (j + 1) * rows))
            for target, x in zip(pools, (k, v), strict=True):
                target[page, : some.stop - some.start] = x[some]
        first, used = first + n, used + count
    return *pools, table


class Setup:
    """A plan, the tensors of a packed case, and calls of its forward."""

    def __init__(self, case: PackedCase, arch: str, rows: int, device="cpu", level=None, splits=1, seed=0):
        self.case, self.device, self.rows = case, device, rows
        self.entries = max(-(-max(case.lengths_k) // rows), 1) + (rows % 16 == 0)
        asked = problem(case, arch, rows, self.entries, level)
        self.rule = Rule(asked.scale, asked.softcap, asked.visibility)
        plan = levels.plan(asked, env.run_flags())
        assert isinstance(plan, levels.LevelPlan) and plan.spec in PAGED, plan
        self.plan = plan._replace(splits=splits)
        *self.tensors, self.cu_q, self.cu_k, self.most_q, self.most_k = make_packed_inputs(case, "cpu", seed)
        sinks = case.options("cpu").get("sinks")
        self.sinks = None if sinks is None else sinks.to(device)
        self.generator = torch.Generator().manual_seed(seed)

    def _forward(self, plan, q, k, v, of_rows, pages=None):
        q, k, v = (x.to(self.device) for x in (q, k, v))
        columns = v.shape[-1]
        out = torch.full((*q.shape[:-1], columns), torch.nan, dtype=q.dtype, device=self.device)
        lse = torch.full(q.shape[:-1], torch.nan, device=self.device)
        plan.forward(q, k, v, out, lse, None, of_rows, self.rule, CAP, {}, sinks=self.sinks, pages=pages)
        return out, lse

    def packed(self, k=None, v=None):
        """Returns (out [H, T, D], lse [H, T]) of the kernel that reads no pages."""
        q, *kv = self.tensors
        k, v = kv if k is None else (k, v)
        plan = self.plan._replace(spec=replace(self.plan.spec, paged=False))
        of_rows = self.cu_q.to(self.device), self.cu_k.to(self.device), self.most_q, self.most_k
        return self._forward(plan, *(x.transpose(0, 1) for x in (q, k, v)), of_rows)

    def paged(self, pools, pages: Pages):
        k, v = (x.transpose(1, 2) for x in pools)
        on_device = {name: x.to(self.device) for name, x in pages._asdict().items() if isinstance(x, torch.Tensor)}
        of_rows = self.cu_q.to(self.device), None, self.most_q, pages.longest
        return self._forward(self.plan, self.tensors[0].transpose(0, 1), k, v, of_rows, pages._replace(**on_device))

    def pages(self, table, **more) -> Pages:
        used = torch.tensor(self.case.lengths_k, dtype=torch.int32)
        return Pages(used, table, self.most_k)._replace(**more)


def check(case: PackedCase, arch: str, rows: int, **how):
    setup = Setup(case, arch, rows, **how)
    q, k, v = setup.tensors
    *pools, table = in_pages(k, v, case.lengths_k, rows, setup.entries, setup.generator)
    out, lse = setup.paged(pools, setup.pages(table))
    assert all(torch.equal(a, b) for a, b in zip((out, lse), setup.packed(), strict=True))
    rows_of_all = sum(case.lengths_q)
    assert not out[:, rows_of_all:].any() and torch.isneginf(lse[:, rows_of_all:]).all(), "rows of no sequence"
    want, want_lse = by_sequence(case, oracle.attention, q, k, v)
    q, out, lse = q[:rows_of_all], out[:, :rows_of_all].transpose(0, 1).cpu(), lse[:, :rows_of_all].cpu()
    compare.assert_close("out", out, want, by_sequence(case, compare.baseline, q, k, v)[0])
    compare.assert_lse_close("lse", lse, want_lse, q, k[: sum(case.lengths_k)], case.rule.get("scale"))


SINKS = (0.5, -1.0, 2.0, -float("inf"))
SHORT = (5, 40, 0, 17), (33, 70, 12, 0)
CASES = [
    (PackedCase(*SHORT, d=64, rule={"causal": True}), 16, None),
    (PackedCase(*SHORT, d=64, heads_q=4, heads_kv=2, spare=9, sinks=SINKS), 48, None),
    (PackedCase((70, 3), (300, 90), d=128, rule={"causal": True, "align": "top_left"}), 16, None),
    (PackedCase((70, 3), (300, 590), d=128, heads_q=6, heads_kv=2, dtype=F16, rule={"window": (100, 20)}), 256, None),
    (PackedCase((31,), (170,), d=192, d_v=128, rule={"softcap": 6.0, "scale": 1.0, "window": (90, -1)}), 64, None),
    (PackedCase((31, 9), (70, 170), d=256, d_v=72, rule={"causal": True}), 48, None),
    (PackedCase((9, 40), (33, 300), d=72, d_v=40, heads_q=4, heads_kv=1, rule={"softcap": 2.0}), 16, None),
    (PackedCase((5, 40), (33, 300), d=320, rule={"causal": True}), 16, None),
    (PackedCase((5, 40), (33, 300), d=320, d_v=200, rule={"window": (50, -1), "align": "top_left"}), 48, 2),
    (PackedCase((5, 40, 3), (33, 300, 0), d=512, heads_q=4, heads_kv=1, rule={"causal": True}, sinks=SINKS), 64, None),
    (PackedCase((5, 70), (33, 300), d=512, dtype=F16, rule={"window": (-1, 20)}), 48, 1),
    (PackedCase((5,), (290,), d=64, spare=3, rule={"causal": True}), 16, 2),
    (PackedCase((5,), (290,), d=64, rule={"causal": True}), 16, 3),
    (PackedCase((7,), (290,), d=576, d_v=512, heads_q=4, heads_kv=1, rule={"causal": True}), 64, None),
    (PackedCase((7,), (290,), d=640, rule={"causal": True}), 256, 2),
    (PackedCase((9, 2), (270, 30), d=512, rule={"softcap": 6.0, "scale": 1.0, "causal": True}), 16, 3),
    (PackedCase((3, 2), (270, 30), d=1024, dtype=F16, rule={"causal": True}), 16, None),
    (PackedCase((3, 2), (270, 30), d=1152, rule={"causal": True}), 48, None),
    (PackedCase((3,), (270,), d=1152, d_v=1040, rule={"causal": True}), 32, 2),
]  # fmt: skip
LONG = [
    (PackedCase((1, 0, 1, 1), (1100, 30, 0, 600), heads_kv=1, d=512, dtype=F16, rule={"causal": True}), 48, level)
    for level in (1, 2, 3)
] + [
    (
        PackedCase((3, 40), (1300, 700), heads_kv=1, d=128, spare=5, rule={"window": (900, -1)}, sinks=SINKS[:2]),
        16,
        None,
    )
]
by_case = pytest.mark.parametrize(
    "case, rows, level", CASES + LONG, ids=[f"{case.id}-pages{n}-level{level or ''}" for case, n, level in CASES + LONG]
)


@by_case
def test_emulated(case, rows, level):
    splits = 3 if (case, rows, level) in LONG else 1
    arch = ("sm_80", "sm_90a")[len(case.id) % 2]
    with emulate(arch, seed=3) as reports:
        check(case, arch.rstrip("a"), rows, level=level, splits=splits)
    of_each = attending(reports)[: len(attending(reports)) // 2]
    assert ["merge" in report["kernel"] for report in of_each] == [False, True][: 1 + (splits > 1)]


@pytest.mark.skipif(not torch.cuda.is_available() or native.record() is None, reason="needs a GPU and a built library")
@by_case
def test_on_a_gpu(case, rows, level):
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    for splits in (1, 3):
        check(case, arch, rows, level=level, splits=splits, device="cuda")


DIMS = pytest.mark.parametrize("d, level", [(64, None), (256, None), (512, 1), (384, 3)])


@DIMS
def test_pages_outside_the_pool(d, level):
    """Keys on them count as zeros; nobody reads what would lie there, or beyond the table."""
    case, rows = PackedCase((20, 40), (300, 250), d=d), 48
    for numbers in ((-1, 10**9, 2**31 - 1, -(2**31)), (-(2**31), -7, None, None)):
        with emulate("sm_80"):
            setup = Setup(case, "sm_80", rows, level=level)
            _, k, v = setup.tensors
            *pools, table = in_pages(k, v, case.lengths_k, rows, setup.entries, setup.generator)
            k, v = k.clone(), v.clone()
            for number, (sequence, entry) in zip(numbers, [(0, 0), (1, 2), (1, 5), (0, 6)], strict=True):
                table[sequence, entry] = len(pools[0]) if number is None else number
                begin, end = (int(setup.cu_k[sequence]) + entry * rows, int(setup.cu_k[sequence + 1]))
                for x in (k, v):
                    x[begin : min(begin + rows, end)] = 0
            got = setup.paged(pools, setup.pages(table))
            assert all(torch.equal(a, b) for a, b in zip(got, setup.packed(k, v), strict=True))


@DIMS
def test_lengths_in_parts(d, level):
    """Lengths are `used`, with `more` rows and `added` ones; below 0 or beyond the longest they stop there."""
    case, rows = PackedCase((20, 40, 3), (200, 130, 0), d=d, rule={"causal": True}), 16
    with emulate("sm_80"):
        setup = Setup(case, "sm_80", rows, level=level)
        _, k, v = setup.tensors
        *pools, table = in_pages(k, v, case.lengths_k, rows, setup.entries, setup.generator)
        want = setup.packed()
        for used, more, added in (
            ((200 - 7, 130 - 7, -7), 7, None),
            ((150, 100, -(10**9)), 0, (50, 30, 0)),
            ((2**31 - 1, 130 - 2**20, -(2**31)), 2**20, (5, 0, 0)),
        ):
            added = added if added is None else offsets(added, "cpu")
            used = torch.tensor(used, dtype=torch.int32)
            got = setup.paged(pools, setup.pages(table, used=used, more=more, added=added))
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("is_indexed", [False, True], ids=["in order", "indexed"])
@DIMS
def test_contiguous_cache(d, level, is_indexed, splits):
    """Sequences have one page each, of any number of rows, begin anywhere in it, and have as many rows of q."""
    case, rows = PackedCase((13, 13, 13, 13), (600, 130, 1, 0), d=d, heads_q=4, heads_kv=2, rule={"causal": True}), 901
    first = torch.tensor([301, 5, 900, 10**9], dtype=torch.int32)
    with emulate("sm_80", seed=3):
        setup = Setup(case, "sm_80", rows, level=level, splits=splits)
        q, k, v = setup.tensors
        order = torch.tensor([2, 4, 0, 3] if is_indexed else range(4), dtype=torch.int32)
        pools = [torch.full((5, rows, 2, d), torch.nan, dtype=k.dtype) for _ in range(2)]
        for i, n in enumerate(case.lengths_k):
            for pool, x in zip(pools, (k, v), strict=True):
                pool[order[i], first[i] : first[i] + n] = x[setup.cu_k[i] : setup.cu_k[i + 1]]
        table = order[:, None] if is_indexed else None
        used = (first + setup.cu_k.diff()).clamp(max=rows)
        dense, k, v = q.unflatten(0, (4, 13)).transpose(1, 2), *(x.transpose(1, 2) for x in pools)
        out, lse = setup._forward(setup.plan, dense, k, v, None, Pages(used, table, setup.most_k, first))
        want, want_lse = setup.packed()
        assert torch.equal(out.transpose(0, 1).flatten(1, 2), want)
        assert torch.equal(lse.transpose(0, 1).flatten(1, 2), want_lse)


# ---- the plan ----


def test_shared_memory_is_what_the_kernel_asks_for():
    own_keys = [spec for spec in aot_specs(env.all_flags()) if isinstance(spec, ForwardMmaKeys)]
    for spec in [*PAGED, *own_keys]:
        d_qk = spec.head_dim if isinstance(spec, ForwardMmaRows) else 520
        for stages in (1, 2, 4):
            asked = emulated.launch_shape(spec, d_qk=d_qk, stages=stages, q_resident=True)[0]
            assert levels.smem_bytes(spec, d_qk, stages, True) == asked


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_120"])
@pytest.mark.parametrize("d", [8, 64, 96, 200, 256, 320, 512, 576, 640, 1024, 1152, 2048])
def test_every_gpu_has_a_plan(arch, d):
    case = PackedCase((100,), (5000,), d=d)
    for d_v in {d, max(d - 64, 8)}:
        for level in (None, 1, 2, 3)[: 4 if d_v <= 1024 else 1]:
            plan = levels.plan(problem(replace(case, d_v=d_v), arch, 16, 400, level), env.run_flags())
            assert plan.spec in PAGED and plan.level == (level or plan.level)
            smem = levels.smem_bytes(plan.spec, d, plan.stages, plan.q_resident)
            assert smem <= archs.shared_memory_bytes(arch)


def test_what_reads_no_pages(monkeypatch):
    asked = problem(PackedCase((100,), (5000,), d=512, dtype=F16), "sm_90", 16, 400)
    for acc in ("f16", "mixed"):
        assert "acc='f32' alone" in levels.plan(asked._replace(acc=acc), env.run_flags())
    monkeypatch.setenv("ENABLE_FFPA_REGISTERS_PIPE_KV", "0")
    assert "ENABLE_FFPA_REGISTERS_PIPE_KV" in levels.plan(asked, env.run_flags())
