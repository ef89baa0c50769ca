"""Trains a small language model from one start on ffpa, on PyTorch's own attention, and on plain matrix products.

`python bench/train.py` runs 200 steps on packed sequences of this repository's own text: grouped query heads, head dim
512, causal, bf16. It plots the losses, and compares the distance between those of ffpa and SDPA with that between
products and SDPA: what rounding alone does to a training run. (SDPA computes such a call in float32 on a GPU; products
round scores and P to bf16.)
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ffpa"))

import torch
import torch.nn.functional as F
from ffpa_attn import ffpa_varlen
from torch import nn

ROOT = Path(__file__).resolve().parents[1]


def block_mask(cu: torch.Tensor, tokens: int) -> torch.Tensor:
    """Returns [tokens, tokens]: true where the key is of the same sequence, and not later."""
    position = torch.arange(tokens, device=cu.device)
    sequence = torch.searchsorted(cu[1:], position.int(), right=True)
    return (sequence[:, None] == sequence) & (position[:, None] >= position)


def by_ffpa(q, k, v, cu, longest):
    return ffpa_varlen(q, k, v, cu, cu, longest, longest, causal=True)


def by_sdpa(q, k, v, cu, longest):
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=block_mask(cu, q.shape[2]), enable_gqa=True)
    return out[0].transpose(0, 1)


def by_products(q, k, v, cu, longest):
    q, k, v = (x.transpose(0, 1).unflatten(0, (k.shape[1], -1)) for x in (q, k, v))  # [Hkv, group or 1, T, D]
    scores = q @ k.mT * q.shape[-1] ** -0.5
    p = scores.masked_fill(~block_mask(cu, q.shape[2]), -torch.inf).softmax(-1).to(q.dtype)
    return (p @ v).flatten(0, 1).transpose(0, 1)


ATTENTIONS = {"ffpa": by_ffpa, "SDPA": by_sdpa, "products": by_products}


class Layer(nn.Module):
    def __init__(self, width: int, heads_q: int, heads_kv: int, d: int):
        super().__init__()
        self.heads_q, self.heads_kv, self.d = heads_q, heads_kv, d
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, (heads_q + 2 * heads_kv) * d, bias=False)
        self.out = nn.Linear(heads_q * d, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, attention, cu, longest):
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (-1, self.d))
        q, k, v = heads.split((self.heads_q, self.heads_kv, self.heads_kv), 1)
        x = x + self.out(attention(q, k, v, cu, longest).flatten(1))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    def __init__(self, layers: int, width: int, heads_q: int, heads_kv: int, d: int, longest: int):
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Embedding(longest, width)
        self.layers = nn.ModuleList(Layer(width, heads_q, heads_kv, d) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens, positions, attention, cu, longest):
        x = self.tokens(tokens) + self.positions(positions)
        for layer in self.layers:
            x = layer(x, attention, cu, longest)
        return self.norm(x) @ self.tokens.weight.T


def text() -> torch.Tensor:
    files = sorted((*ROOT.glob("*.md"), *ROOT.glob("ffpa/**/*.py"), *ROOT.glob("csrc/**/*.cuh")))
    return torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


def train(attention, args, device: str) -> list[float]:
    """Returns the loss of every step. Data, start and order are the same for every attention."""
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    data = text()
    model = Model(args.layers, args.width, args.heads_q, args.heads_kv, args.d, args.tokens).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(args.steps):
        cuts = torch.randperm(args.tokens - 1, generator=generator)[: args.sequences - 1].sort().values + 1
        bounds = torch.cat([torch.tensor([0]), cuts, torch.tensor([args.tokens])])
        lengths = bounds.diff()
        starts = torch.randint(len(data) - args.tokens - 1, (args.sequences,), generator=generator)
        within = torch.arange(args.tokens) - bounds[:-1].repeat_interleave(lengths)
        at = starts.repeat_interleave(lengths) + within
        tokens, following, positions, cu = (
            x.to(device) for x in (data[at], data[at + 1], within, bounds.to(torch.int32))
        )
        with torch.autocast(device, torch.bfloat16):
            logits = model(tokens, positions, attention, cu, int(lengths.max()))
        loss = F.cross_entropy(logits.float(), following)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def distance(a: list[float], b: list[float]) -> float:
    """Returns the root mean square of their difference."""
    return (torch.tensor(a) - torch.tensor(b)).square().mean().sqrt().item()


def plot(losses: dict[str, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for (name, values), style in zip(losses.items(), ("-", "--", ":"), strict=True):
        axes.plot(values, style, label=name, linewidth=1.2)
    axes.set(xlabel="step", ylabel="loss (nats a byte)", title="Training on packed sequences, D = 512")
    axes.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("steps", 200), ("layers", 2), ("width", 512), ("heads-q", 8), ("heads-kv", 2), ("d", 512), ("tokens", 4096),
        ("sequences", 6), ("seed", 0),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--plot", type=Path, default=None, help="where the picture goes")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> dict[str, list[float]]:
    args = parse(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    losses = {name: train(attention, args, device) for name, attention in ATTENTIONS.items()}
    for name, values in losses.items():
        print(f"{name:8} first {values[0]:.4f}, last ten {sum(values[-10:]) / len(values[-10:]):.4f}")
    ours, noise = (distance(losses["SDPA"], losses[name]) for name in ("ffpa", "products"))
    print(f"distance from SDPA: ffpa {ours:.2e}, products {noise:.2e}")
    if args.plot:
        plot(losses, args.plot)
    return losses


if __name__ == "__main__":
    main()
