"""Ring attention as each of W ranks has it, measured on one GPU: NCCL sends to itself what would come from the rank before.

`python bench/ring.py --ranks 8` prints ms of a rank's step and of a W-th of the whole sequence's on this GPU alone: their ratio is
what W GPUs can reach of W times one, as far as messages between them take no longer than those inside one. (Where there are
several GPUs, examples/ring_attention.py --scaling measures them.)
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ffpa"))

import torch
import torch.distributed as dist
from ffpa_attn import distributed, ffpa, sequence_shards
from timing import Timer, measure_in_turn


def steps(attention: Callable, args: argparse.Namespace, rows: int) -> dict[str, Callable[[], object]]:
    heads = (args.heads, args.heads_kv or args.heads, args.heads_kv or args.heads, args.heads)
    q, k, v, grad = (torch.randn(1, h, rows, args.d, device="cuda", dtype=torch.bfloat16) for h in heads)
    for x in (q, k, v):
        x.requires_grad_()

    def forward():
        with torch.no_grad():
            return attention(q, k, v)

    return {"forward": forward, "both": lambda: torch.autograd.grad(attention(q, k, v), (q, k, v), grad)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ranks", type=int, default=8)
    add("--rows", type=int, default=131072, help="of the whole sequence")
    add("--heads", type=int, default=8)
    add("--heads-kv", type=int, help="as many as --heads unless set")
    add("--d", type=int, default=512)
    add("--all-keys", action="store_true", help="not causal")
    add("--calls", type=int, default=9)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU to measure")
    causal, timer, of_nccl = not args.all_keys, Timer("cuda"), dist.P2POp

    def to_itself(op, x, group=None, group_peer=None):
        return of_nccl(op, x, group=group, group_peer=0)

    def as_rank(rank: int, call: Callable[[], object]) -> object:
        of_many = mock.patch.object(sequence_shards, "rank_and_world", lambda group: (rank, args.ranks))
        with of_many, mock.patch.object(dist, "P2POp", to_itself):
            return call()

    alone = steps(lambda q, k, v: ffpa(q, k, v, causal=causal), args, args.rows)
    of_rank = steps(lambda q, k, v: distributed.ring_attention(q, k, v, causal=causal), args, args.rows // args.ranks)
    ranks = sorted({0, args.ranks // 2, args.ranks - 1})
    calls = {("alone", name): call for name, call in alone.items()}
    calls |= {(rank, name): partial(as_rank, rank, call) for rank in ranks for name, call in of_rank.items()}
    times: dict[tuple, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
        subjects = {subject: partial(timer.milliseconds, call) for subject, call in calls.items()}
        measure_in_turn(subjects, args.calls, times, lambda name: None, settle=True)
        dist.destroy_process_group()

    share = {name: median(times["alone", name]) / args.ranks for name in alone}
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, N={args.rows}, D={args.d}, H={args.heads}, bf16")
    print(f"\n| of {args.ranks} | {' | '.join(f'{name}, ms' for name in share)} |\n|---|---|---|")
    print(f"| a share | {' | '.join(f'{ms:.1f}' for ms in share.values())} |")
    for rank in ranks:
        of = {name: median(times[rank, name]) for name in share}
        print(f"| rank {rank} | {' | '.join(f'{ms:.1f} ({share[name] / ms:.0%})' for name, ms in of.items())} |")


if __name__ == "__main__":
    main()
