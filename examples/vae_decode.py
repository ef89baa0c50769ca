"""Runs a VAE's decoder with and without ffpa: its middle attention has one head, as wide as the network has channels.

`python examples/vae_decode.py` decodes random latents with a small, randomly initialised AutoencoderKL of diffusers:
seconds on a CPU. Attention as in Stable Diffusion's VAE, of 16384 rows and 512 columns, is
`python examples/vae_decode.py --latent 128 --channels 512` on a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ffpa"))

import ffpa_attn
import torch
from diffusers import AutoencoderKL

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--latent", type=int, default=16, help="height and width of the latents; attention has their product of rows"
    )
    parser.add_argument(
        "--channels", type=int, default=64, help="of the widest layers, a multiple of 64; the head dim of attention"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--calls", type=int, default=3, help="timed after one that is not; the median counts")
    return parser.parse_args()


def make_vae(channels: int) -> AutoencoderKL:
    widths = (channels // 4, channels // 2, channels, channels)
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=widths,
        layers_per_block=1,
        norm_num_groups=channels // 16,
    ).eval()


def decode(vae: AutoencoderKL, latents: torch.Tensor, calls: int) -> tuple[torch.Tensor, float, int]:
    """Returns (image, seconds of a call, peak memory in bytes)."""
    on_gpu = latents.is_cuda
    image, seconds = vae.decode(latents).sample, []
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(calls):
        begin = time.perf_counter()
        image = vae.decode(latents).sample
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return image, statistics.median(seconds), torch.cuda.max_memory_allocated() if on_gpu else 0


def main() -> None:
    args = arguments()
    torch.manual_seed(0)
    dtype = DTYPES[args.dtype]
    vae = make_vae(args.channels).to(args.device, dtype)
    latents = torch.randn(1, 4, args.latent, args.latent).to(args.device, dtype)
    print(f"one head, N = {args.latent**2}, D = {args.channels}, {args.dtype}, {args.device}")
    images = []
    with torch.inference_mode():
        for name, context in (("PyTorch", nullcontext()), ("ffpa", ffpa_attn.sdpa())):
            with context:
                image, seconds, peak = decode(vae, latents, args.calls)
            memory = f", peak memory {peak / 2**20:.0f} MiB" if peak else ""
            print(f"{name:8}{1000 * seconds:10.1f} ms{memory}")
            images.append(image.float())
    difference = (images[0] - images[1]).abs().max()
    print(f"max difference {difference:.3g}, of values up to {images[0].abs().max():.3g}")


if __name__ == "__main__":
    main()
