"""Measures ring attention as each of W ranks has it, on fewer GPUs.

The GPUs have neighbouring ranks, and send round among themselves. `python bench/ring.py --ranks 8` prints ms of a step
of the first, middle and last ranks, and a W-th of the ms that one GPU takes for the whole sequence: their ratio is what
W GPUs can reach of W times one. On a single GPU NCCL sends to itself what would come from another; W GPUs have the real
thing, which examples/ring_attention.py --scaling measures for 1, 2, 4, ... of them.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Callable
from functools import partial, partialmethod
from pathlib import Path
from statistics import median
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ffpa"))

import torch
import torch.distributed as dist
from ffpa_attn import distributed, ffpa
from ffpa_attn.distributed import exchange, sequence_shards
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


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ranks", type=int, default=8)
    add("--gpus", type=int, default=torch.cuda.device_count())
    add("--rows", type=int, default=131072, help="of the whole sequence")
    add("--heads", type=int, default=8)
    add("--heads-kv", type=int, help="as many as --heads unless set")
    add("--d", type=int, default=512)
    add("--all-keys", action="store_true", help="not causal")
    add("--calls", type=int, default=9)
    return parser.parse_args()


def main(gpu: int, args: argparse.Namespace, meeting: str) -> None:
    torch.cuda.set_device(gpu)
    random.seed(0)  # the GPUs take their turns in the same order
    causal, timer, post = not args.all_keys, Timer("cuda"), exchange.Exchange.post

    def among_gpus(self, first: int, tensors, to, source, rows):
        """Posts to the GPU as far on as the target rank is, or to the next one, if any, where that is this GPU."""
        ranks_on = (to - first - gpu) % args.ranks
        on = ranks_on % args.gpus or min(1, args.gpus - 1)
        # Gradients arrive for those rows that the sender saw.
        if tensors[0].dtype == torch.float32 and causal:
            sender = first + (gpu - on) % args.gpus
            earlier = (sender + ranks_on) % args.ranks < sender
            rows = args.rows // args.ranks // (2 if earlier else 1)
        return post(self, tensors, (gpu + on) % args.gpus, (gpu - on) % args.gpus, rows)

    def from_rank(first: int, call: Callable[[], object]) -> object:
        of_many = mock.patch.object(sequence_shards, "rank_and_world", lambda group: (first + gpu, args.ranks))
        with of_many, mock.patch.object(exchange.Exchange, "post", partialmethod(among_gpus, first)):
            return call()

    def slowest(call: Callable[[], object]) -> float:
        dist.barrier()
        taken = torch.tensor(timer.milliseconds(call), device="cuda")
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return taken.item()

    alone = steps(lambda q, k, v: ffpa(q, k, v, causal=causal), args, args.rows)
    of_rank = steps(lambda q, k, v: distributed.ring_attention(q, k, v, causal=causal), args, args.rows // args.ranks)
    last = args.ranks - args.gpus
    firsts = sorted({0, last // 2, last})
    calls = {("alone", name): call for name, call in alone.items()}
    calls |= {(first, name): partial(from_rank, first, call) for first in firsts for name, call in of_rank.items()}
    times: dict[tuple, list[float]] = {}
    dist.init_process_group(
        "nccl", init_method=f"file://{meeting}", rank=gpu, world_size=args.gpus, device_id=torch.device("cuda", gpu)
    )
    subjects = {subject: partial(slowest, call) for subject, call in calls.items()}
    measure_in_turn(subjects, args.calls, times, lambda name: None, settle=True)
    dist.destroy_process_group()
    if gpu:
        return

    share = {name: median(times["alone", name]) / args.ranks for name in alone}
    print(
        f"{args.gpus} x {torch.cuda.get_device_name()}, torch {torch.__version__}, N={args.rows}, D={args.d}, ", end=""
    )
    print(f"H={args.heads}/{args.heads_kv or args.heads}, {'causal, ' if causal else ''}bf16")
    print(f"\n| of {args.ranks} | {' | '.join(f'{name}, ms' for name in share)} |\n|---|---|---|")
    print(f"| a share | {' | '.join(f'{ms:.1f}' for ms in share.values())} |")
    for first in firsts:
        of = {name: median(times[first, name]) for name in share}
        ranks = f"ranks {first} to {first + args.gpus - 1}" if args.gpus > 1 else f"rank {first}"
        print(f"| {ranks} | {' | '.join(f'{ms:.1f} ({share[name] / ms:.0%})' for name, ms in of.items())} |")


if __name__ == "__main__":
    given = parsed()
    if given.ranks % max(1, given.gpus) or not 0 < given.gpus <= min(given.ranks, torch.cuda.device_count()):
        raise SystemExit(f"--gpus {given.gpus} of {torch.cuda.device_count()}: pass what divides --ranks {given.ranks}")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(main, (given, f"{folder}/meeting"), nprocs=given.gpus)
