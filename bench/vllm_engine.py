"""Measures vLLM's engine on a GPU: tokens/s with the attention backend FFPA and with vLLM's own in Triton, of one random model.

`python bench/vllm_engine.py` makes a small model in the shape of Gemma 3, whose layers have windows and none in turn, and
has each backend, in a process of its own, serve the same requests three times; the last time counts. It prints how many
tokens a second are made, in a time that includes the prompts, and how many of them both backends choose alike. Random
weights make near ties, after which answers part. `--model gemma4` has layers of 256 columns with windows, and of `--d` columns without. It
needs vLLM and this package in one environment; `--eager` leaves out the compiler and CUDA graphs, `--graphs-only` the
compiler, and `--kv-cache-dtype fp8` has 8-bit pages.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from itertools import takewhile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ffpa"))

import torch
from ffpa_attn import env

BACKENDS = ("TRITON_ATTN", "FFPA")
LENGTHS = (3, 17, 100, 300, 700, 1200)  # tokens of prompts
VOCABULARY = 2048
NARROW = 256  # columns of a head of Gemma 4 in layers with windows
OF_CHILDREN = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # One process talks to itself, also where there is no network.
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}


def save_model(folder: Path, kind: str, d: int, layers: int):
    """Writes a random model and its configuration, and returns it."""
    import transformers

    torch.manual_seed(0)
    shape = {
        "vocab_size": VOCABULARY, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": layers,
        "num_attention_heads": 8, "num_key_value_heads": 2, "sliding_window": 128, "max_position_embeddings": 4096,
        "layer_types": [("sliding_attention", "full_attention")[i % 2] for i in range(layers)],
        "tie_word_embeddings": False,
    }  # fmt: skip
    if kind == "gemma4":
        layer_inputs = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": VOCABULARY}
        config = transformers.Gemma4TextConfig(**shape, **layer_inputs, head_dim=NARROW, global_head_dim=d)
        model = transformers.Gemma4ForCausalLM(config)
    else:
        config = transformers.Gemma3TextConfig(**shape, head_dim=d, query_pre_attn_scalar=d)
        model = transformers.Gemma3ForCausalLM(config)
    for name, weight in model.named_parameters():
        if weight.dim() > 1:  # smaller weights would leave little to attention, and more logits close to one another
            weight.data.normal_(0, weight.shape[-1] ** -0.5)
        elif kind == "gemma4" and name.endswith("q_norm.weight"):  # Gemma 4 does not scale its scores
            weight.data.fill_(weight.numel() ** -0.5)
    model.to(torch.bfloat16).save_pretrained(folder)
    if kind == "gemma4":
        file = folder / "config.json"
        saved = json.loads(file.read_text(encoding="utf-8"))
        saved.pop("per_layer_config", None)
        file.write_text(json.dumps({**saved, "head_dim": NARROW, "global_head_dim": d}), encoding="utf-8")
    return model


def make_prompts(rounds: int) -> list[list[int]]:
    random = torch.Generator().manual_seed(1)
    return [torch.randint(5, VOCABULARY, (n,), generator=random).tolist() for n in LENGTHS * rounds]


@torch.inference_mode()
def first_tokens(model, prompts: list[list[int]]) -> list[int]:
    """Returns the first token of each answer by transformers, in float32."""
    model = model.float().cuda()
    return [model(torch.tensor([prompt], device="cuda")).logits[0, -1].argmax().item() for prompt in prompts]


def have_plain_configuration() -> None:
    """Has Gemma 4's configuration read as it stands in the file.

    transformers 5.17 keeps the columns of a head by layer and raises if asked for one number; vLLM 0.24 asks for it.
    """
    import transformers

    class Plain(transformers.PreTrainedConfig):
        model_type = "gemma4_text"

    transformers.AutoConfig.register("gemma4_text", Plain, exist_ok=True)


def serve(folder: Path, backend: str, args) -> dict:
    """Returns the tokens of all answers, the seconds that they took, and the seconds until the engine had started."""
    start = time.perf_counter()
    from vllm import LLM, SamplingParams

    if args.model == "gemma4":
        have_plain_configuration()
    graphs_only = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    engine = LLM(
        str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=2048, gpu_memory_utilization=0.3, seed=0,
        attention_backend=backend, enforce_eager=args.eager, max_num_seqs=64, kv_cache_dtype=args.kv_cache_dtype,
        enable_prefix_caching=False, **({"compilation_config": graphs_only} if args.graphs_only else {}),
    )  # fmt: skip
    started = time.perf_counter() - start
    prompts = [{"prompt_token_ids": tokens} for tokens in make_prompts(args.rounds)]
    rule = SamplingParams(temperature=0.0, max_tokens=args.output, ignore_eos=True, detokenize=False)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        answers = engine.generate(prompts, rule, use_tqdm=False)
        times.append(time.perf_counter() - start)
    if args.profile:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            engine.generate(prompts, rule, use_tqdm=False)
        print(profile.key_averages().table(sort_by="cuda_time_total", row_limit=25, max_name_column_width=90))
    tokens = [list(answer.outputs[0].token_ids) for answer in answers]
    return {"tokens": tokens, "seconds": times[-1], "times": times, "started": started}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("gemma3", "gemma4"), default="gemma3")
    parser.add_argument("--d", type=int, default=512, help="columns of a head")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=8, help=f"requests of each of {LENGTHS} tokens")
    parser.add_argument("--output", type=int, default=64, help="tokens of each answer")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--eager", action="store_true", help="no compiler, no CUDA graphs")
    mode.add_argument("--graphs-only", action="store_true", help="CUDA graphs of decoding, no compiler")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--backends", nargs="+", default=BACKENDS)
    parser.add_argument("--profile", action="store_true", help="print which kernels take the longest")
    parser.add_argument("--child", nargs=3, metavar=("FOLDER", "BACKEND", "FILE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    env.let_stdout_write_anything()
    if args.child:
        folder, backend, file = args.child
        Path(file).write_text(json.dumps(serve(Path(folder), backend, args)), encoding="utf-8")
        return
    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU to measure")
    found, failed = {}, []
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(Path(folder), args.model, args.d, args.layers)
        first = first_tokens(model, make_prompts(args.rounds))
        del model
        torch.cuda.empty_cache()
        for backend in args.backends:
            file = Path(folder) / f"{backend}.json"
            command = [sys.executable, __file__, *sys.argv[1:], "--child", folder, backend, str(file)]
            if subprocess.run(command, env=env.child_environment(**OF_CHILDREN)).returncode:
                failed.append(backend)
            else:
                found[backend] = json.loads(file.read_text(encoding="utf-8"))
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {args.model}, D={args.d}, pages {args.kv_cache_dtype}\n"
    )
    for backend, of in found.items():
        speed = sum(map(len, of["tokens"])) / of["seconds"]
        times = " ".join(f"{seconds:.2f}" for seconds in of["times"])
        right = sum(answer[0] == token for answer, token in zip(of["tokens"], first, strict=True))
        print(
            f"{backend:12} {speed:8.0f} tokens/s ({times} s), started in {of['started']:.0f} s; "
            f"{right} of {len(first)} first tokens are those of transformers in float32"
        )
    if len(found) == 2:
        answers = list(zip(*(of["tokens"] for of in found.values()), strict=True))
        pairs = [list(zip(*both, strict=True)) for both in answers]
        same = sum(a == b for both in pairs for a, b in both)
        alike = [len(list(takewhile(lambda pair: pair[0] == pair[1], both))) for both in pairs]
        print(f"{same} of {sum(map(len, pairs))} tokens are the same; answers part after {sum(alike) / len(alike):.1f}")
        print(
            f"of {len(pairs)} answers {sum(n == args.output for n in alike)} are the same, {sum(n > 0 for n in alike)} begin alike"
        )
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
