"""Records what random calls give, as hashes, so that a change that is to change nothing can be held to it:

    python tests/recorded_calls.py --device emulator --out before.json   # on the commit before
    python tests/recorded_calls.py --device emulator --against before.json

A record has the bits of a call's results and gradients, or how it was refused, and what `explain` says of it. Where
names change, `--renamed OLD=NEW` says so. Exits with 1 where any call differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import sys
import warnings
from pathlib import Path

_HERE = Path(__file__).resolve().parent
for _place in (_HERE.parent / "ffpa", _HERE / "backends", _HERE):
    sys.path.insert(0, str(_place))

from campaign import _set_up  # noqa: E402
from campaign_draw import generate  # noqa: E402
from campaign_problems import DEVICES, FP8, Problem  # noqa: E402


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first call")
    parser.add_argument("--device", choices=DEVICES, default="cuda")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--against", type=Path, default=None)
    parser.add_argument("--renamed", action="append", default=[], metavar="OLD=NEW")
    return parser.parse_args()


def _hash(x) -> str:
    from campaign_check import as_integers

    return hashlib.sha256(as_integers(x.detach()).cpu().numpy().tobytes()).hexdigest()[:16]


def _bits(p: Problem) -> dict[str, str]:
    import campaign_tensors as tensors
    import torch
    from campaign_check import Refused, _device, run

    if p.dtype in FP8:
        from campaign_fp8 import run_fp8

        results, _ = run_fp8(p)
    else:
        with torch.no_grad():
            x = tensors.make(p, _device(p))
        try:
            results, _ = run(p, x)
        except Refused as error:
            return {"refused": str(error)}
    return {name: _hash(x) for name, x in results.items()}


def _explained(p: Problem) -> str:
    import campaign_tensors as tensors
    import ffpa_attn
    import torch
    from campaign_check import _device, running

    if p.packed or p.dtype in FP8:
        return ""
    with torch.no_grad():
        x = tensors.make(p, _device(p))
    how = {**p.rule, "level": p.level, "acc": p.acc, "num_stages": p.num_stages, "return_lse": p.return_lse}
    how |= {"mask": x.mask, "layout": p.layout, "sinks": x.sinks, "return_max_logits": p.max_logits}
    with running(p):
        choice = ffpa_attn.explain(x.q, x.k, x.v, direction="backward" if p.backward else "forward", **how)
    return str(choice)


def recorded(task: tuple[int, str]) -> tuple[str, dict]:
    seed, device = task
    p = generate(seed, device).with_(repeats=1)
    found = {}
    for name, of in (("bits", _bits), ("explain", _explained)):
        try:
            found[name] = of(p)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return str(seed), found


def _quiet(device: str) -> None:
    _set_up(device)
    warnings.simplefilter("ignore")


def main() -> int:
    args = arguments()
    tasks = [(args.first + i, args.device) for i in range(args.calls)]
    with multiprocessing.get_context("spawn").Pool(args.processes, _quiet, (args.device,)) as pool:
        found = dict(pool.imap(recorded, tasks, chunksize=4))
    if args.out:
        args.out.write_text(json.dumps(found, indent=1))
    ran = sum(isinstance(call["bits"], dict) and "refused" not in call["bits"] for call in found.values())
    print(f"{len(found)} calls, {ran} of which ran")
    if not args.against:
        return 0
    text = args.against.read_text()
    for old, new in (names.split("=") for names in args.renamed):
        text = text.replace(old, new)
    before = json.loads(text)
    differ = [seed for seed in found if found[seed] != before.get(seed)]
    for seed in differ[:10]:
        print(f"seed {seed}: {before.get(seed)}\n  now {found[seed]}")
    print(f"{len(differ)} differ")
    return bool(differ or len(before) != len(found))


if __name__ == "__main__":
    sys.exit(main())
