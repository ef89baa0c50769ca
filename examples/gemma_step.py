"""Runs training steps of a Gemma-4-style model from its config, on ffpa and on SDPA: tokens a second, and peak memory.

`python examples/gemma_step.py` takes a toy size, on a CPU in seconds. On a GPU, for example:
`python examples/gemma_step.py --tokens 16384 --layers 6 --hidden 2560 --heads 8 --heads-kv 1 --head-dim 256`.
One line makes the difference: `register()`, then `attn_implementation="ffpa"`.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ffpa"))

import torch
from ffpa_attn.integrations.transformers import register
from transformers import AutoModelForCausalLM, Gemma4TextConfig


def config_of(args: argparse.Namespace) -> Gemma4TextConfig:
    """Every other layer sees all keys, with head dim 512, as Gemma 4's global layers do; the others see a window."""
    return Gemma4TextConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers,
        layer_types=["sliding_attention", "full_attention"] * (args.layers // 2),
        sliding_window=args.window,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads_kv,
        head_dim=args.head_dim,
        global_head_dim=args.global_dim,
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=0,
        max_position_embeddings=args.tokens,
        pad_token_id=0,
    )


def train(attention: str, args: argparse.Namespace, device: str) -> tuple[list[float], float, float]:
    """Returns losses, tokens a second after the first step, and peak memory of a GPU in GiB."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(args), attn_implementation=attention, dtype=torch.bfloat16)
    model.to(device).train()
    if args.checkpointing:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(1, args.vocabulary, (1, args.tokens), device=device)
    # Several texts share one row of tokens: their positions say where one ends, and no token sees another text.
    positions = torch.arange(args.tokens, device=device)[None] % (args.tokens // args.texts)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses = []
    for step in range(args.steps + 1):
        if step == 1:
            start = _now(device)
        loss = model(ids, position_ids=positions, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    seconds = _now(device) - start
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    return losses, args.steps * args.tokens / seconds, peak


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    sizes = {"tokens": 128, "texts": 2, "layers": 2, "hidden": 64, "heads": 4, "heads_kv": 1, "head_dim": 64}
    sizes |= {"global_dim": 512, "window": 32, "vocabulary": 256, "steps": 3}
    for name, default in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--attention", default="ffpa,sdpa")
    parser.add_argument("--checkpointing", action="store_true", help="recompute each layer in the backward")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    register()
    print(
        f"{args.tokens} tokens in {args.texts} texts, {args.layers} layers, D = {args.head_dim} and {args.global_dim}, {device}"
    )
    for attention in args.attention.split(","):
        try:
            losses, speed, peak = train(attention, args, device)
        except torch.OutOfMemoryError:
            print(f"{attention:5s} out of memory")
            torch.cuda.empty_cache()
            continue
        memory = f"peak {peak:.1f} GiB, " if peak else ""
        print(f"{attention:5s} {speed:9.0f} tokens/s, {memory}losses {' '.join(f'{x:.4f}' for x in losses)}")


if __name__ == "__main__":
    main()
