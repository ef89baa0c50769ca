"""Measures vLLM's engine on a GPU: tokens/s with the attention backend FFPA and with vLLM's own in Triton, of one random model.

`python bench/vllm_engine.py` makes a small model in the shape of Gemma 3, whose layers have windows and none in turn, and
has each backend, in a process of its own, serve the same requests twice; the second time counts. It prints how many
tokens a second are made, prompts included, and how many of them both backends choose alike. Random weights make near
ties, after which answers may part. It needs vLLM and this package in one environment; `--eager` leaves out CUDA graphs,
`--kv-cache-dtype fp8` has 8-bit pages.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ffpa"))

import torch
from ffpa_attn import env

BACKENDS = ("TRITON_ATTN", "FFPA")
LENGTHS = (3, 17, 100, 300, 700, 1200)  # tokens of prompts
VOCABULARY = 2048
OF_CHILDREN = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def save_model(folder: Path, d: int, layers: int) -> None:
    """Writes a random model and its configuration."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY, hidden_size=1024, intermediate_size=2048, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=2, head_dim=d, query_pre_attn_scalar=d, sliding_window=128, max_position_embeddings=4096,
        layer_types=[("sliding_attention", "full_attention")[i % 2] for i in range(layers)],
    )  # fmt: skip
    Gemma3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def serve(folder: Path, backend: str, args) -> dict:
    """Returns the tokens of all answers, and the seconds that they took."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=2048, gpu_memory_utilization=0.3, seed=0,
        attention_backend=backend, enforce_eager=args.eager, max_num_seqs=64, kv_cache_dtype=args.kv_cache_dtype,
    )  # fmt: skip
    random = torch.Generator().manual_seed(1)
    prompts = [
        {"prompt_token_ids": torch.randint(5, VOCABULARY, (n,), generator=random).tolist()}
        for n in LENGTHS * args.rounds
    ]
    rule = SamplingParams(temperature=0.0, max_tokens=args.output, ignore_eos=True, detokenize=False)
    for _ in range(2):
        start = time.perf_counter()
        answers = engine.generate(prompts, rule, use_tqdm=False)
        seconds = time.perf_counter() - start
    return {"tokens": [list(answer.outputs[0].token_ids) for answer in answers], "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--d", type=int, default=512, help="columns of a head")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=8, help=f"requests of each of {LENGTHS} tokens")
    parser.add_argument("--output", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--child", nargs=3, metavar=("FOLDER", "BACKEND", "FILE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    env.let_stdout_write_anything()
    if args.child:
        folder, backend, file = args.child
        Path(file).write_text(json.dumps(serve(Path(folder), backend, args)), encoding="utf-8")
        return
    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU to measure")
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), args.d, args.layers)
        for backend in BACKENDS:
            file = Path(folder) / f"{backend}.json"
            command = [sys.executable, __file__, *sys.argv[1:], "--child", folder, backend, str(file)]
            subprocess.run(command, check=True, env=env.child_environment(**OF_CHILDREN))
            found[backend] = json.loads(file.read_text(encoding="utf-8"))
    first, second = (of["tokens"] for of in found.values())
    pairs = [(a, b) for both in zip(first, second, strict=True) for a, b in zip(*both, strict=True)]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, D={args.d}, {len(first)} requests\n")
    for backend, of in found.items():
        print(f"{backend:12} {sum(map(len, of['tokens'])) / of['seconds']:8.0f} tokens/s")
    print(f"{sum(a == b for a, b in pairs)} of {len(pairs)} tokens are the same")


if __name__ == "__main__":
    main()
