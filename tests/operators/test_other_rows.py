"""A packed call whose like was seen with another number of rows takes over what was planned, if the same is chosen for it."""

import pages
import pytest
import torch
from ffpa_attn import env, ffpa_varlen
from ffpa_attn.backends import choice, fused, levels, row_tiles, two_phase
from ffpa_attn.operators import again, ops
from ffpa_attn.specs.problem import Problem, Visibility
from ffpa_attn.testing import emulate

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
LENGTHS = (70, 33, 50)
ROWS = [(6, 1, 3), (8, 2, 8), (1, 8, 0), (8, 8, 8)]  # of the longest 8 rows each


@pytest.fixture(autouse=True)
def on_the_device(monkeypatch):
    """Nothing is known, and tables and lengths are not read, as on a GPU."""
    pages.forget_and_read_nothing(monkeypatch)


def forget() -> None:
    again._known.clear()
    ops._plans.clear()


def of_rows(rows, d=64, dtype=BF16, heads=2, layout="NHD", d_v=None, padding=0, **options) -> dict:
    pool = pages.make(LENGTHS, d=d, heads=heads, layout=layout, **({} if d_v is None else {"d_v": d_v}))
    q, cu = pages.queries([*rows, padding], heads=4, d=d)
    k, v = (x.nan_to_num().to(dtype) for x in pool[:2])
    v = k[..., : v.shape[-1]] if layout == "latent" else v
    return dict(
        q=q, k=k, v=v, cu_seqlens_q=cu[: len(rows) + 1], cu_seqlens_k=None, max_seqlen_q=8, max_seqlen_k=80, block_table=pool.table,
        seqused_k=pool.used, causal=True, **options,
    )  # fmt: skip


CALLS = {
    "sm_80": ("sm_80", {}),
    "sm_80, LSE": ("sm_80", {"return_lse": True, "window": (20, -1)}),
    "sm_80, 8 bits": ("sm_80", {"dtype": E4M3}),
    "sm_80, padding": ("sm_80", {"padding": 5}),
    "sm_90a": ("sm_90a", {"return_lse": True}),
    "sm_90a, latent": ("sm_90a", {"d": 576, "d_v": 512, "heads": 1, "layout": "latent"}),
    "sm_90a, two phases": ("sm_90a", {"d": 640}),
}


def results(given) -> list[torch.Tensor]:
    found = ffpa_varlen(**given)
    return list(found) if isinstance(found, tuple) else [found]


@pytest.mark.parametrize("arch, options", CALLS.values(), ids=CALLS)
def test_other_rows_take_over_the_plan(arch, options, monkeypatch):
    monkeypatch.setenv("FFPA_BACKEND", "hopper" if arch == "sm_90a" else "mma")
    with emulate(arch):
        wanted = []
        for rows in ROWS:
            forget()
            wanted.append(results(of_rows(rows, **options)))
        forget()
        results(of_rows(ROWS[-1], **options))
        monkeypatch.setattr(ops, "_forward_plan", None)
        for _ in range(2):
            for rows, want in zip(ROWS, wanted, strict=True):
                found = results(of_rows(rows, **options))
                assert all(map(torch.equal, found, want))
                assert all(x.shape == y.shape for x, y in zip(found, want, strict=True))


@pytest.mark.parametrize("arch, options", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("blocks", [2, 132])
def test_kernels_get_the_numbers_of_a_call_planned_anew(arch, options, blocks, monkeypatch):
    """Where few rows leave blocks idle, the number of blocks and the keys of a chunk hang on the rows, too."""
    monkeypatch.setenv("FFPA_BACKEND", "hopper" if arch == "sm_90a" else "mma")
    monkeypatch.setattr(row_tiles, "multiprocessors", lambda device: blocks)
    monkeypatch.setattr(levels, "multiprocessors", lambda device: blocks)

    def numbers() -> set:
        calls = [plan.memo["call"] for plan in ops._plans.values()]
        return {
            (bytes(kernel.params), kernel.spec, call.scratch, call.partial, call.zeros)
            for call in calls
            for kernel in call.launch.kernels
        }

    wanted, calls = set(), [of_rows(rows, **options | {"padding": 90 * i}) for i, rows in enumerate(ROWS)]
    with emulate(arch):
        for given in calls:
            forget()
            results(given)
            wanted |= numbers()
        for given in calls:
            results(given)
    assert numbers() == wanted and len(wanted) >= len(calls)


def test_what_is_chosen_decides(monkeypatch):
    """Another plan makes a new kind of call, which is checked and made ready; each of both is taken over."""
    plans, asked = [], []
    plan, choose = ops._forward_plan, choice.choose
    monkeypatch.setattr(ops, "_forward_plan", lambda *call: plans.append(call[1].shape[0]) or plan(*call))
    monkeypatch.setattr(choice, "choose", lambda p, flags: asked.append(p.packed[0]) or choose(p, flags))
    monkeypatch.setattr(levels, "_splits", lambda p, *_: 2 if p.packed[0] >= 20 else 1)
    monkeypatch.setattr(row_tiles, "of_whole_tiles", lambda p, *_: p)
    with emulate("sm_80"):
        for rows in [(8, 2, 1), (8, 8, 8), (8, 8, 1), (8, 8, 6), (8, 1, 1)]:
            results(of_rows(rows))
    assert plans == [11, 24] and asked == [11, 24, 24, 17, 22, 10]


def test_what_is_asked_for_is_said(monkeypatch, capsys):
    monkeypatch.setenv("FFPA_LOG", "1")
    with emulate("sm_80"):
        for rows in ROWS:
            results(of_rows(rows))
    assert capsys.readouterr().err.count("runs on") == len(ROWS)


def test_fewer_rows_than_the_longest_sequence(monkeypatch):
    """Those of the longest sequence are no more than all rows, and the stride of one row may be anything."""
    plans, plan = [], ops._forward_plan
    monkeypatch.setattr(ops, "_forward_plan", lambda *call: plans.append(call[1].shape[0]) or plan(*call))
    with emulate("sm_80"):
        for rows in [(8, 8, 8), (3, 0, 1), (1, 3, 1), (1, 0, 0), (0, 1, 0)]:
            results(of_rows(rows))
    assert plans == [24, 4, 5, 1]


def test_one_row_has_any_stride(monkeypatch):
    monkeypatch.setenv("FFPA_BACKEND", "hopper")
    given, memory = of_rows((1, 1, 1)) | {"max_seqlen_q": 1}, torch.zeros(1000, dtype=BF16)
    with emulate("sm_90a"):
        results(given | {"q": memory.as_strided((1, 4, 64), (257, 64, 1))})
        with pytest.raises(ValueError, match="`q` has strides"):
            results(given | {"q": memory.as_strided((3, 4, 64), (257, 64, 1))})


@pytest.mark.parametrize("of_out", [23, 25])
def test_a_result_has_as_many_rows(of_out):
    with emulate("sm_80"):
        for rows in [(8, 8, 8), (8, 8, 7)]:
            given = of_rows(rows)
            results(given | {"out": torch.empty_like(given["q"])})
        given = of_rows((8, 8, 8))
        given["q"] = torch.cat([given["q"], given["q"][:2]])  # 26 rows
        with pytest.raises(ValueError, match="`out` has shape"):
            results(given | {"out": torch.empty(of_out, 4, 64, dtype=BF16)})


def problem(rows: int, batch: int, n_q: int, n_k: int, d: int, see: Visibility, group: int, cache=None) -> Problem:
    heads, held = (2 * group, 2), (rows, batch * n_k)
    return Problem(
        "forward", "cuda", "sm_90", "bf16", batch, *heads, n_q, n_k, d, d, held, see, 1.0, 0.0, None, False, None, "f32", None,
        pages=(64, -(-n_k // 64)), cache=cache,
    )  # fmt: skip


@pytest.mark.parametrize("n_q, n_k", [(1, 4096), (48, 1000), (300, 4096)])
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("batch", [1, 9])
def test_parts_are_those_of_the_exact_number_of_rows(batch, group, n_q, n_k, monkeypatch):
    """What is remembered for as many row tiles is what would be worked out for each number of rows."""
    flags, see = env.run_flags(), Visibility(-1 if batch > 1 else 511, 0, False)
    for rows in range(max(n_q, batch), n_q * batch + 40, 7):
        for plan, d, cache in (
            (fused.plan, 128, None),
            (two_phase_plan, 640, None),
            (levels.plan, 256, "e4m3"),
            (levels.plan, 256, None),
        ):
            p = problem(rows, batch, n_q, n_k, d, see, group, cache)
            found = plan(p, flags)
            with monkeypatch.context() as patch:
                patch.setattr(row_tiles, "_fastest_parts", row_tiles._fastest_parts.__wrapped__)
                patch.setattr(levels, "_splits", levels._splits.__wrapped__)
                patch.setattr(row_tiles, "of_whole_tiles", lambda p, *_: p)
                assert plan(p, flags) == found


def two_phase_plan(p, flags):
    return two_phase.plan(p, "hopper", flags)
