"""Computes attention over a sequence that lies on several ranks, checks it against one process, and times it.

torchrun --nproc-per-node 8 examples/ring_attention.py --rows 131072 --scaling   # GPUs, over NCCL; a table of 1 to 8
python examples/ring_attention.py   # a rank for each GPU, or two on the CPU, over gloo, at toy size
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ffpa"))

import torch
import torch.distributed as dist
from ffpa_attn import distributed, ffpa

GPUS = torch.cuda.device_count()
NAMES = ("out", "lse", "dq", "dk", "dv")
WORST = 0.03  # largest error allowed, relative to the largest element: a few roundings to 16 bits


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--attention", choices=("ring", "ulysses"), default="ring")
    add("--layout", choices=("zigzag", "contiguous"), default="zigzag")
    add("--all-keys", action="store_true", help="not causal")
    add("--rows", type=int, default=32768 if GPUS else 512, help="of the whole sequence")
    add("--heads", type=int, default=8 if GPUS else 4)
    add("--heads-kv", type=int, help="as many as --heads unless set")
    add("--d", type=int, default=512 if GPUS else 64)
    add("--calls", type=int, default=5)
    add("--no-check", action="store_true", help="not against one process, which needs memory for the whole sequence")
    add("--scaling", action="store_true", help="print the speed of 1, 2, 4, ... ranks beside as many times that of one")
    add("--ranks", type=int, default=GPUS or 2, help="to start without torchrun")
    return parser.parse_args()


def inputs(args, device) -> list[torch.Tensor]:
    """Returns q, k, v and the gradient of out: the whole sequence, the same on every rank."""
    generator = torch.Generator(device).manual_seed(0)
    heads_kv = args.heads_kv or args.heads
    shapes = [(1, heads, args.rows, args.d) for heads in (args.heads, heads_kv, heads_kv, args.heads)]
    return [torch.randn(s, generator=generator, device=device, dtype=torch.bfloat16) for s in shapes]


def forward_and_backward(attention, q, k, v, grad):
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out, lse = attention(q, k, v)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), grad)


def forward(attention, q, k, v, grad):
    with torch.no_grad():
        return attention(q, k, v)


def seconds(call, device, calls: int, group=None) -> float:
    """Returns the median over calls, each as long as the slowest rank takes."""
    taken = []
    for _ in range(calls + 1):
        dist.barrier(group)
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(torch.tensor(time.perf_counter() - started, device=device))
        dist.all_reduce(taken[-1], dist.ReduceOp.MAX, group)
    return median(x.item() for x in taken[1:])


def largest(x: torch.Tensor) -> float:
    """Returns the largest size of an element on any rank."""
    x = x.abs().amax().float()
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return x.item()


def operations(args) -> float:
    """Returns the operations of a forward, which has two products of each visible pair. The backward has five."""
    pairs = args.rows**2 if args.all_keys else args.rows * (args.rows + 1) / 2
    return 4 * args.d * args.heads * pairs


def run(args, device, say) -> bool:
    world = dist.get_world_size()
    chosen = {"ring": distributed.ring_attention, "ulysses": distributed.ulysses_attention}[args.attention]
    on_one = partial(ffpa, causal=not args.all_keys, return_lse=True)
    on_ranks = partial(chosen, causal=not args.all_keys, layout=args.layout, return_lse=True)

    say(
        f"{chosen.__name__} on {world} ranks, {args.layout}, {dist.get_backend()}: H={args.heads}/{args.heads_kv or args.heads}, "
    )
    say(f"N={args.rows}, D={args.d}, bf16, {'all keys' if args.all_keys else 'causal'}\n")
    whole = inputs(args, device)
    mine = [distributed.shard_sequence(x, layout=args.layout).clone() for x in whole]
    right = True
    if not args.no_check:
        say("max error against one process:")
        results = zip(NAMES, forward_and_backward(on_ranks, *mine), forward_and_backward(on_one, *whole), strict=True)
        for name, got, want in results:
            error = largest(got.float() - distributed.shard_sequence(want, layout=args.layout).float())
            right &= error <= WORST * largest(want)
            say(f" {name} {error:.2g}")
        say("\n" if right else " WRONG\n")
    if args.scaling:
        del mine
        scaling(args, device, on_one, on_ranks, whole, say)
    else:
        del whole
        taken = seconds(lambda: forward_and_backward(on_ranks, *mine), device, args.calls)
        tflops = 3.5e-12 * operations(args) / world / taken
        say(f"forward and backward: {taken * 1e3:.3g} ms, {tflops:.3g} TFLOPS a rank\n")
    return right


def scaling(args, device, on_one, on_ranks, whole, say) -> None:
    """Times the first 1, 2, 4, ... ranks at one sequence; says how much of their number times one they reach."""
    world = dist.get_world_size()
    say("| ranks | forward, ms | TFLOPS a rank | efficiency | and backward, ms | TFLOPS a rank | efficiency |\n")
    say("|---|---|---|---|---|---|---|\n")
    alone = {}
    # The number of ranks must divide `shared`.
    shared = args.rows // 2 if args.attention == "ring" else math.gcd(args.rows // 2, args.heads)
    fit = [1 << i for i in range(world.bit_length()) if shared % (1 << i) == 0 and 1 << i <= world]
    for size in sorted({*fit, world}):
        group = dist.new_group(range(size))
        if dist.get_rank() < size:
            mine = [distributed.shard_sequence(x, group, layout=args.layout).clone() for x in whole]
            attention = on_one if size == 1 else partial(on_ranks, group=group)
            row = [str(size)]
            for work, products in ((forward, 1), (forward_and_backward, 3.5)):
                taken = seconds(partial(work, attention, *mine), device, args.calls, group)
                reached = alone.setdefault(work, taken) / size / taken
                row += (
                    f"{taken * 1e3:.4g}",
                    f"{products * operations(args) / size / taken * 1e-12:.3g}",
                    f"{reached:.0%}",
                )
            say(f"| {' | '.join(row)} |\n")
            dist.destroy_process_group(group)
            del group, attention  # this frees the memory that the group keeps
        dist.barrier()


def main(rank: int | None, args, meeting: str | None = None) -> None:
    """Processes that this program starts are given their rank and meeting; torchrun tells its own."""
    place = {"init_method": f"file://{meeting}", "rank": rank, "world_size": args.ranks} if meeting else {}
    if GPUS:
        device = torch.device("cuda", dist.get_node_local_rank(fallback_rank=rank))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, **place)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
        dist.init_process_group("gloo", **place)
    first = dist.get_rank() == 0
    right = run(args, device, lambda text: print(text, end="", flush=True) if first else None)
    dist.destroy_process_group()
    if not right:
        sys.exit(f"an error is above {WORST} of the largest element")


if __name__ == "__main__":
    if dist.is_torchelastic_launched():
        main(None, arguments())
    else:
        with tempfile.TemporaryDirectory() as folder:
            given = arguments()
            torch.multiprocessing.spawn(main, (given, f"{folder}/meeting"), nprocs=given.ranks)
