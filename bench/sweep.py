"""Measures every tile that the split-D forward on mma.sync can have, and writes the table that the choice reads.

`python bench/sweep.py` measures all widths, levels and accumulators; `--level 1 --D 512,640 --acc f32` some of them;
`--write` puts the result into ffpa/ffpa_attn/specs/tiles.py, in place of the rows measured. Each tile is a kernel
compiled on demand (2 to 10 s of one core). On a machine without a GPU, `--dry` lists the tiles and the registers that
they need.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ffpa"))

from chip import accumulators, resources
from ffpa_attn import env
from ffpa_attn.backends import levels
from ffpa_attn.backends.levels import LevelPlan
from ffpa_attn.building.toolchain import BuildError
from ffpa_attn.specs import archs, tiles
from ffpa_attn.specs.problem import Problem
from ffpa_attn.specs.spec import ACCUMULATORS, COLUMNS, ForwardMmaSplit, Shape, forward_spec
from forced import SHORT, ForcedCalls, compiled, problem_of, square

ACCS = {"f32": ("f32", "f32"), "f16": ("f16", "f16")}  # keyed by what PV accumulates in, as the tables are
STREAMED_HEAD_DIMS = (*COLUMNS, 1152, 2048)
_LIMITS = [archs.shared_memory_bytes(arch) for arch in ("sm_90", "sm_80", "sm_89")]  # 227, 163, 99 KB
_STREAMED_COLUMNS = (128, 192, 256, 320, 384, 448)
_LEAST_SCORES = {1: 64 * 128, 3: 128 * 128}  # scores of a tile, by level: fewer were not tried
_MOST_ACCUMULATORS = 212  # registers of a thread, which has 255
_WITHIN = {0: 0.96, 2: 0.9}  # share of level 3's fastest speed that suffices, by limit, so that few kernels do

Result = dict[Shape, float]  # TFLOPS
Tiles = list[tuple[int, ...]]


def legal_shapes(columns: tuple[int, ...], acc: tuple[str, str], d_qk: int, least_scores: int) -> list[Shape]:
    """Returns the tiles of at least so many scores whose fragments fit registers and of which two stages fit shared
    memory, in steps of 16 to 72 KB.
    """
    found = []
    for c, rows, keys, key_columns, value_rows in itertools.product(
        columns, (32, 64, 128), (64, 128, 256), (32, 64, 96, 128), (16, 32, 64, 128, 256)
    ):
        shape = Shape(c, rows, keys, key_columns, value_rows, 0)
        warps_by_keys = 8 * 32 // rows  # warps along a tile's keys: each has 32 rows of S and a multiple of 16 keys
        key_bytes, value_bytes = keys * key_columns * 2, value_rows * c * 2
        if (
            keys % value_rows
            or keys // warps_by_keys < 16
            or accumulators(forward_spec("bf16", acc, shape)) > _MOST_ACCUMULATORS
            or rows * keys < least_scores
        ):
            continue
        if not (16 << 10) <= max(key_bytes, value_bytes) <= (72 << 10) or not 1 / 3 <= key_bytes / value_bytes <= 3:
            continue
        spec = forward_spec("bf16", acc, shape)
        if levels.smem_bytes(spec, d_qk, 2, False) <= _LIMITS[0]:
            found.append(shape)
    return found


def plan_of(spec: ForwardMmaSplit, problem: Problem, limit: int) -> LevelPlan | None:
    """Returns the plan that the choice would make with so much shared memory, or None if two stages do not fit."""
    fitting = levels.settings(spec, problem, env.run_flags(), limit)
    if fitting is None or fitting[0] == 1:
        return None
    stages, value_stages, q_resident = fitting
    return LevelPlan(spec, problem.level, stages, q_resident, value_stages=value_stages)


def measured(columns: tuple[int, ...], d: int, acc: str, level: int, args) -> list[Result]:
    """Returns TFLOPS of all legal tiles, with the settings of each limit of shared memory where they fit it."""
    dtype = "bf16" if ACCS[acc] in ACCUMULATORS["bf16"] else "fp16"
    w = square(d, dtype, args.H, args.N)
    problem = problem_of(w, level)
    shapes = legal_shapes(columns, ACCS[acc], d, _LEAST_SCORES[level])
    specs = {shape: forward_spec(SHORT[dtype], ACCS[acc], shape, streamed=level == 3) for shape in shapes}
    ready = compiled(list(specs.values()))
    calls = ForcedCalls(w)

    def tflops(limit: int) -> Result:
        plans = {shape: plan_of(spec, problem, limit) for shape, spec in specs.items() if spec in ready}
        return calls.tflops({shape: plan for shape, plan in plans.items() if plan}, args.iters)

    return [tflops(limit) for limit in _LIMITS]


@cache
def ships(shape: Shape, acc: str, streamed: bool) -> bool:
    """Tells whether each kernel that takes this tile passes the build's gate, on sm_80 too."""
    for accumulators_of in (pair for pair in ACCUMULATORS["f16"] if pair[1] == acc):
        for arch in ("sm_80", "sm_90"):
            try:
                resources(forward_spec("f16", accumulators_of, shape, streamed), arch)
            except BuildError:
                return False
    return True


def best(results: Result, acc: str, streamed: bool = False) -> Shape:
    fastest_first = sorted(results, key=results.__getitem__, reverse=True)
    return next(shape for shape in fastest_first if ships(shape, acc, streamed))


def show(d: int, acc: str, level: int, results: list[Result]) -> None:
    for shape in sorted(results[0], key=results[0].__getitem__, reverse=True)[:8]:
        columns, rows, keys, key_columns, value_rows, _ = shape
        print(
            f"D={d:<5} L{level} {acc:<6}{columns:>5} columns {rows:>4} x {keys:<4} steps {key_columns:>4} {value_rows:>4}"
            " TFLOPS in 227, 163, 99 KB:" + "".join(f"{result.get(shape, 0):8.1f}" for result in results),
            flush=True,
        )


def register_tiles(columns: int, acc: str, args) -> Tiles:
    """Returns the fastest tile in each limit of shared memory, and the fastest of 32 rows; for f16 sums, which few call
    for, only those of 227 and 99 KB.
    """
    results = measured((columns,), columns, acc, 1, args)
    show(columns, acc, 1, results)
    few_rows = {shape: speed for shape, speed in results[0].items() if shape.rows == 32}
    kept = (*results, few_rows) if acc == "f32" else (results[0], results[-1])
    chosen = [best(x, acc) for x in kept if x]
    return [tuple(shape) for shape in dict.fromkeys(chosen)]


def streamed_tiles(acc: str, head_dims: tuple[int, ...], args) -> dict[int, Tiles]:
    """Returns for each head dim a tile near its fastest, few in all; and one that fits 99 KB."""
    results = {}
    for d in head_dims:
        results[d] = measured(args.columns, d, acc, 3, args)
        show(d, acc, 3, results[d])
    choices = []
    for i, within in _WITHIN.items():
        good = {}
        for d, result in results.items():
            least = within * result[i][best(result[i], acc, True)]
            good[d] = {s for s, speed in result[i].items() if speed >= least and ships(s, acc, True)}
        left, chosen = set(results), {}
        while left:
            covers = {s: {d for d in left if s in good[d]} for d in left for s in good[d]}
            shape = max(covers, key=lambda s: (len(covers[s]), sum(results[d][i][s] for d in covers[s])))
            chosen.update(dict.fromkeys(covers[shape], shape))
            left -= covers[shape]
        choices.append(chosen)
    return {d: [tuple(shape) for shape in dict.fromkeys(chosen[d] for chosen in choices)] for d in head_dims}


def rate(registers: dict[int, Tiles], streamed: dict[int, Tiles], d: int, acc: str, args) -> None:
    """Enters the speeds of the chosen tiles of all levels, measured in turn: the choice compares these."""
    dtype = "bf16" if ACCS[acc] in ACCUMULATORS["bf16"] else "fp16"
    w, plans = square(d, dtype, args.H, args.N), {}
    for level, table in ((1, registers), (3, streamed)):
        for i, tile in enumerate(table.get(d, [])):
            spec = forward_spec(SHORT[dtype], ACCS[acc], Shape(*tile), streamed=level == 3)
            plans[level, i] = plan_of(spec, problem_of(w, level), _LIMITS[0])
    compiled([plan.spec for plan in plans.values()])
    for (level, i), speed in ForcedCalls(w).tflops(plans, 3 * args.iters).items():
        tiles_of = (registers if level == 1 else streamed)[d]
        tiles_of[i] = (*tiles_of[i][:5], round(speed))


def table_source(registers: dict, streamed: dict) -> str:
    registers = {acc: {d: [tile[1:] for tile in rows] for d, rows in table.items()} for acc, table in registers.items()}
    lines = [
        '"""These are tiles of the split-D forward on mma.sync: `python bench/sweep.py --write` measures and writes them.',
        "",
        "They are (rows, keys, key_columns, value_rows, TFLOPS); TFLOPS at B=1, H=32, N=8192 on an NVIDIA H200.",
        '"""',
    ]
    for name, comment, table in (
        ("REGISTERS", "By what PV accumulates in and columns of O: levels 1 and 2.", registers),
        (
            "STREAMED",
            "By what PV accumulates in and the head dim, up to the next one that is here: level 3, with columns of O before the rest.",
            streamed,
        ),
    ):
        lines += ["", f"# {comment}", f"{name} = {{"]
        for acc, by_width in table.items():
            lines.append(f'    "{acc}": {{')
            lines += [f"        {width}: {rows}," for width, rows in sorted(by_width.items())]
            lines.append("    },")
        lines.append("}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    integers = lambda text: tuple(int(word) for word in text.split(","))  # noqa: E731
    parser.add_argument("--D", type=integers, help="widths, e.g. 320,512; all without it")
    parser.add_argument(
        "--level",
        type=integers,
        default=(1, 3),
        help="1 (and 2: the same kernels), 3; 0: rate anew what the table holds",
    )
    parser.add_argument("--acc", default="f32", help="of PV: f32 or f16, or both with a comma")
    parser.add_argument("--columns", type=integers, default=_STREAMED_COLUMNS, help="of level 3")
    parser.add_argument("--N", type=int, default=8192)
    parser.add_argument("--H", type=int, default=32)
    parser.add_argument("--iters", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="into ffpa/ffpa_attn/specs/tiles.py")
    parser.add_argument("--dry", action="store_true", help="list the tiles only")
    args = parser.parse_args()

    registers = {
        acc: {d: [(d, *tile) for tile in rows] for d, rows in table.items()} for acc, table in tiles.REGISTERS.items()
    }
    streamed = {acc: dict(table) for acc, table in tiles.STREAMED.items()}
    for acc in args.acc.split(","):
        widths = [d for d in COLUMNS if not args.D or d in args.D]
        head_dims = tuple(d for d in STREAMED_HEAD_DIMS if not args.D or d in args.D)
        if args.dry:
            lists = [(1, (d,)) for d in widths if 1 in args.level] + [(3, _STREAMED_COLUMNS)] * (3 in args.level)
            for level, columns in lists:
                for shape in legal_shapes(columns, ACCS[acc], columns[0], _LEAST_SCORES[level]):
                    print(
                        f"L{level} {acc} {shape[:5]}: {accumulators(forward_spec('bf16', ACCS[acc], shape))} registers for O and S"
                    )
            continue
        if 1 in args.level:
            for d in widths:
                registers[acc][d] = register_tiles(d, acc, args)
        if 3 in args.level:
            streamed[acc].update(streamed_tiles(acc, head_dims, args))
        for d in head_dims:
            rate(registers[acc], streamed[acc], d, acc, args)
    source = table_source(registers, streamed)
    if args.write:
        Path(tiles.__file__).write_text(source)
    elif not args.dry:
        print(source)


if __name__ == "__main__":
    main()
