"""Measures transformers' continuous batching on a GPU: tokens/s of `generate_batch` on ffpa, and by PyTorch's SDPA.

`python bench/continuous_batching.py` gives both the same random Llama-class model and the same requests, in turn, and
prints the medians of whole calls, prefill included; tokens are those that are made. The first call of each, which
captures its CUDA graphs, does not count. Beside them stand how many of their tokens are the same, how often transformers
called each function of ours (a captured graph calls none), and what a layer's call takes on the host: Python between
transformers and ffpa alone, and all of it. It needs transformers 5.12: in older releases a manager that stays serves one
call.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ffpa"))

import torch
import transformers
from ffpa_attn import env
from ffpa_attn.integrations import flash_api
from ffpa_attn.integrations.continuous_batching import NAME
from ffpa_attn.integrations.transformers import register
from overhead import host_us
from transformers.generation.configuration_utils import ContinuousBatchingConfig

FUNCTIONS = ("flash_attn_varlen_func", "flash_attn_with_kvcache")
PAGE = 256


@dataclass(frozen=True)
class Work:
    """One setting: a model's sizes, and requests that all come at once."""

    d: int = 512
    heads: int = 8
    heads_kv: int = 2
    layers: int = 16
    hidden: int = 2048
    vocabulary: int = 32768
    requests: int = 64
    prompt: int = 1024
    output: int = 256
    batch_tokens: int = 4096

    @property
    def pages(self) -> int:
        """Returns how many pages a request fills."""
        return -(-(self.prompt + self.output) // PAGE)


QUICK = Work(layers=2, hidden=64, heads=4, vocabulary=97, requests=3, prompt=20, output=6, batch_tokens=48)


def sdpa_name() -> str:
    """Returns what this release of transformers calls SDPA over its pages."""
    of_pages = "paged|sdpa"
    return of_pages if of_pages in transformers.AttentionInterface() else "sdpa"


def make_model(work: Work, attention: str, device: str, like: torch.nn.Module | None = None) -> torch.nn.Module:
    """Makes a random model, or one that shares the weights of another."""
    config = transformers.LlamaConfig(
        vocab_size=work.vocabulary, hidden_size=work.hidden, intermediate_size=4 * work.hidden, head_dim=work.d,
        num_hidden_layers=work.layers, num_attention_heads=work.heads, num_key_value_heads=work.heads_kv,
        max_position_embeddings=work.prompt + work.output, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("meta" if like else device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, dtype=torch.bfloat16
        )
    if like is None:
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.data.normal_(0, weight.shape[-1] ** -0.5)
    else:
        model.load_state_dict(like.state_dict(), assign=True)
        model.model.rotary_emb = like.model.rotary_emb  # its buffers are in no state
    return model.eval()


def generator(work: Work, model: torch.nn.Module, graphs: bool | None) -> Callable[[], list[list[int]]]:
    """Returns a call that generates for all requests, with a manager that stays."""
    known = set(ContinuousBatchingConfig.__dataclass_fields__)
    settings = {
        "page_size" if "page_size" in known else "block_size": PAGE,
        "num_blocks": work.requests * (work.pages + 1),
        "max_batch_tokens": work.batch_tokens,
        "max_blocks_per_request": work.pages + 1,
        "allow_block_sharing": False,  # otherwise a second call finds the prompts of the first
        "use_cuda_graph": graphs,
        "auto_switch_to_flash": False,
    }
    config = ContinuousBatchingConfig(**{name: x for name, x in settings.items() if name in known})
    rule = transformers.GenerationConfig(
        max_new_tokens=work.output, do_sample=False, eos_token_id=-1, pad_token_id=0, num_return_sequences=1
    )
    random = torch.Generator().manual_seed(1)
    prompts = torch.randint(1, work.vocabulary, (work.requests, work.prompt), generator=random).tolist()

    def generate() -> list[list[int]]:
        results = model.generate_batch(
            inputs=prompts, generation_config=rule, continuous_batching_config=config, progress_bar=False,
            persistent_manager=True,
        )  # fmt: skip
        errors = {x.error for x in results.values() if x.error}
        if errors or len(results) != len(prompts):
            raise RuntimeError(f"{len(results)} of {len(prompts)} requests were served: {errors}")
        return [x.generated_tokens for x in results.values()]

    return generate


def counting(counts: Counter, name: str) -> Callable:
    function = getattr(flash_api, name)

    @functools.wraps(function)
    def counted(*args, **options):
        counts[name] += 1
        return function(*args, **options)

    return counted


def measure(work: Work, device: str, iters: int, graphs: bool | None = None) -> dict:
    """Returns the seconds of each attention's calls, and what else is printed."""
    register()
    counts: Counter = Counter()
    with mock.patch.multiple(flash_api, **{name: counting(counts, name) for name in FUNCTIONS}):
        models = {NAME: make_model(work, NAME, device)}
        models["sdpa"] = make_model(work, sdpa_name(), device, like=models[NAME])
        seconds, tokens = {name: [] for name in models}, {}
        calls = {name: generator(work, model, graphs) for name, model in models.items()}
        for round in range(iters + 1):
            for name, call in calls.items():
                start = time.perf_counter()
                tokens[name] = call()
                if round:
                    seconds[name].append(time.perf_counter() - start)
    for model in models.values():
        model.destroy_cached_continuous_batching_manager()
    pairs = [(a, b) for both in zip(*tokens.values(), strict=True) for a, b in zip(*both, strict=True)]
    return {
        "work": asdict(work),
        "seconds": seconds,
        "tokens_per_s": {name: work.requests * work.output / median(of) for name, of in seconds.items()},
        "same_tokens": sum(a == b for a, b in pairs) / len(pairs),
        "calls": dict(counts),
    }


def calls_of_a_layer(work: Work, device: str) -> dict[str, Callable[[], torch.Tensor]]:
    """Returns our functions as transformers calls them for a layer: of pages where those of all layers and of K and V
    take turns, and of packed rows.
    """
    pages, turns, batch = work.requests * work.pages, 4, work.requests
    pool = torch.zeros(pages * turns, PAGE, work.heads_kv, work.d, dtype=torch.bfloat16, device=device)
    k_cache, v_cache = pool[:-1], pool[1:]
    table = torch.arange(pages, dtype=torch.int32, device=device).view(batch, -1) * turns
    lengths = torch.full((batch,), work.prompt, dtype=torch.int32, device=device)
    q, k, v = (
        torch.randn(batch, 1, heads, work.d, dtype=torch.bfloat16, device=device)
        for heads in (work.heads, work.heads_kv, work.heads_kv)
    )
    offsets = torch.arange(batch + 1, dtype=torch.int32, device=device)
    rule = {"causal": True, "softmax_scale": work.d**-0.5}
    where = {"block_table": table, "cache_seqlens": lengths, "max_seqlen_q": 1}
    packed = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 1, "max_seqlen_k": 1}
    return {
        FUNCTIONS[0]: lambda: flash_api.flash_attn_varlen_func(q[:, 0], k[:, 0], v[:, 0], **packed, **rule),
        FUNCTIONS[1]: lambda: flash_api.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **where, **rule),
    }


@torch.no_grad()
def host_us_of_a_layer(work: Work, device: str, rounds: int, calls: int) -> dict[str, tuple[float, float]]:
    """Returns for each function of ours the µs on the host of its own Python, and of the whole call, with its work if
    that is on the CPU.
    """
    subjects = calls_of_a_layer(work, device)

    def nothing(q, *args, **options) -> torch.Tensor:
        return q

    whole = host_us(list(subjects.values()), device, rounds, calls)
    with mock.patch.multiple(flash_api, ffpa_varlen=nothing, ffpa_with_kvcache=nothing):
        own = host_us(list(subjects.values()), device, rounds, calls)
    return dict(zip(subjects, zip(own, whole, strict=True), strict=True))


def report(found: dict) -> str:
    speeds, work = found["tokens_per_s"], found["work"]
    lines = [
        f"Llama-class, D={work['d']}, H={work['heads']}/{work['heads_kv']}, {work['layers']} layers of {work['hidden']}; "
        f"{work['requests']} requests of {work['prompt']} tokens, {work['output']} more each\n",
        "| attention | tokens/s | seconds |",
        "|---|---|---|",
        *(f"| {name} | {speed:.0f} | {median(found['seconds'][name]):.2f} |" for name, speed in speeds.items()),
        f"\n{NAME} makes {speeds[NAME] / speeds['sdpa']:.2f} times the tokens/s of sdpa; "
        f"{found['same_tokens']:.0%} of their tokens are the same",
        f"calls outside of graphs' replays: {', '.join(f'{n} of {name}' for name, n in found['calls'].items())}",
    ]
    for name, (own, whole) in found["host_us"].items():
        lines.append(f"{name} on the host: {own:.1f} µs of its own, {whole:.1f} µs in all")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model, on a CPU where there is no GPU: shows that it works"
    )
    parser.add_argument("--iters", type=int, default=5, help="calls of each that count")
    parser.add_argument("--no-graphs", action="store_true", help="no CUDA graphs; otherwise what transformers chooses")
    parser.add_argument("--write", type=Path, metavar="FILE.json")
    for name, default in asdict(Work()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=f"{default}")
    args = parser.parse_args()
    env.let_stdout_write_anything()
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not args.quick:
        raise SystemExit("there is no GPU to measure")
    if not on_gpu:
        torch.set_num_threads(1)  # the tensors of the tiny model are too small to be shared
    given = {name: x for name in asdict(QUICK) if (x := getattr(args, name)) is not None}
    work, device = replace(QUICK if args.quick else Work(), **given), "cuda" if on_gpu else "cpu"
    found = measure(work, device, 1 if args.quick else args.iters, False if args.no_graphs else None)
    found["host_us"] = host_us_of_a_layer(work, device, *((1, 10) if args.quick else (9, 300)))
    where = torch.cuda.get_device_name() if on_gpu else "a CPU"
    print(f"{where}, torch {torch.__version__}, transformers {transformers.__version__}, bf16\n")
    print(report(found))
    if args.write:
        about = {"where": where, "torch": torch.__version__, "transformers": transformers.__version__}
        args.write.write_text(json.dumps({**about, **found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
