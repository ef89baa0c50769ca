"""Serves requests with a small decoder of Gemma 4's shape: prefill in chunks, then continuous batching over pools of pages.

`python examples/serve.py` takes a toy size, on a CPU in seconds. On a GPU `--full` is a model of 5 billion parameters with 64
requests of 8192 tokens, 1024 more of each. Weights are random: what is shown is how the caches are used, and how fast.

Five layers see a window, with head dim 256; each sixth sees all keys, with head dim 512. Each kind of layer has one pool of
pages and one table, which says for each request where its keys are. A page is a number that all layers of the kind share.
- A layer that sees all keys remembers: a request takes pages from the pool when it begins, and gives them back at its end.
- A layer with a window forgets. Each place of the batch has a few pages, whose numbers its row of the table repeats: keys
  that no window reaches any more are overwritten.
Tables and lengths are changed in place, on the device. A step of decoding is captured in a CUDA graph once, and replayed
while requests come and go: nothing of it depends on what these tensors hold.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ffpa"))

import torch
import torch.nn.functional as F
from ffpa_attn import ffpa, ffpa_with_kvcache
from torch import nn

GLOBAL_EACH = 6  # layers, the last of which sees all keys
NOBODYS = 0  # the page that places of the batch without a request write to
FORGETTING, REMEMBERING = 0, 1  # the two kinds of layers
DTYPE = torch.bfloat16


@dataclass
class Config:
    layers: int = 6
    hidden: int = 64
    mlp: int = 128
    heads: int = 4
    heads_kv: tuple[int, int] = (2, 1)  # of layers that forget, and of those that remember
    head_dim: tuple[int, int] = (256, 512)
    window: int = 32
    vocabulary: int = 256
    prompt: int = 96  # tokens of the longest
    output: int = 12  # tokens that the longest request wants
    requests: int = 5
    places: int = 3  # requests that decode at a time
    chunk: int = 32  # tokens that are prefilled at a time
    page: int = 16  # keys of a page
    share: float = 0.75  # pages of the pool, of what the longest requests in all places would take
    ragged: bool = True  # requests are half as long to as long as the longest

    @property
    def longest(self) -> int:
        return self.prompt + self.output

    def kind(self, layer: int) -> int:
        return REMEMBERING if layer % GLOBAL_EACH == GLOBAL_EACH - 1 else FORGETTING

    def rule(self, layer: int) -> dict:
        """Returns what rows of a layer see. The scale is large enough for tokens to hang on single keys."""
        kind = self.kind(layer)
        window = (self.window - 1, 0) if kind == FORGETTING else (-1, -1)
        return {"causal": True, "window": window, "scale": 4 * self.head_dim[kind] ** -0.5}


FULL = Config(
    layers=18, hidden=4096, mlp=16384, heads=32, heads_kv=(8, 4), window=1024, vocabulary=32768, prompt=8192, output=1024,
    requests=64, places=64, chunk=512, page=64, share=1.0, ragged=False,
)  # fmt: skip
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # layer, q, k, v [B, N, H, D] -> out


class Layer(nn.Module):
    def __init__(self, c: Config, kind: int):
        super().__init__()
        self.head_dim, self.heads = c.head_dim[kind], (c.heads, c.heads_kv[kind], c.heads_kv[kind])
        self.qkv = nn.Linear(c.hidden, sum(self.heads) * self.head_dim, bias=False)
        self.out = nn.Linear(c.heads * self.head_dim, c.hidden, bias=False)
        self.up = nn.Linear(c.hidden, 2 * c.mlp, bias=False)
        self.down = nn.Linear(c.mlp, c.hidden, bias=False)

    def forward(self, x, cos, sin, attend: Callable) -> torch.Tensor:
        qkv = self.qkv(F.rms_norm(x, x.shape[-1:])).unflatten(-1, (-1, self.head_dim))
        q_and_k, v = qkv.split((sum(self.heads[:2]), self.heads[2]), dim=2)
        q_and_k = F.rms_norm(q_and_k, (self.head_dim,))
        q_and_k = torch.addcmul(q_and_k * cos, q_and_k.roll(self.head_dim // 2, -1), sin)
        q, k = q_and_k.split(self.heads[:2], dim=2)
        x = x + self.out(attend(q, k, v).flatten(-2))
        gate, up = self.up(F.rms_norm(x, x.shape[-1:])).chunk(2, -1)
        return x + self.down(F.gelu(gate, approximate="tanh") * up)


class Decoder(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.c = c
        self.embedding = nn.Embedding(c.vocabulary, c.hidden)
        self.logits = nn.Linear(c.hidden, c.vocabulary, bias=False)
        self.layers = nn.ModuleList(Layer(c, c.kind(i)) for i in range(c.layers))
        for linear in (x for x in self.modules() if isinstance(x, nn.Linear)):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)  # so that each layer changes what comes next
        for kind, base in ((FORGETTING, 1e4), (REMEMBERING, 1e6)):
            half = c.head_dim[kind] // 2
            angles = torch.arange(c.longest)[:, None] * base ** (-torch.arange(half) / half)
            self.register_buffer(f"cos{kind}", angles.cos().repeat(1, 2))
            self.register_buffer(f"sin{kind}", torch.cat((-angles.sin(), angles.sin()), -1))

    def forward(self, tokens, positions, attend: Attend) -> torch.Tensor:
        """Returns what `logits` takes; tokens and positions are [B, N]."""
        turns = [[getattr(self, f"{x}{kind}")[positions][:, :, None] for x in ("cos", "sin")] for kind in range(2)]
        x = self.embedding(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x, *turns[self.c.kind(i)], lambda *qkv, i=i: attend(i, *qkv))
        return F.rms_norm(x, x.shape[-1:])


@dataclass
class Request:
    prompt: torch.Tensor
    output: int  # tokens that it wants
    pages: list[int] | None = None  # of layers that remember
    left: int = 0  # tokens that it still wants
    tokens: torch.Tensor | None = None  # the prompt and what followed it


class Caches:
    """The keys and values of all layers, and who has which of them."""

    def __init__(self, c: Config, device: str):
        self.c = c
        entries = -(-c.longest // c.page)
        own = -(-(c.window + c.chunk) // c.page) + 1  # pages of a place in layers that forget
        pages = 1 + c.places * own, 1 + max(int(c.share * c.places * entries), entries)
        self.pools = []
        for kind in (FORGETTING, REMEMBERING):
            layers = sum(c.kind(i) == kind for i in range(c.layers))
            shape = layers, pages[kind], 2, c.page, c.heads_kv[kind], c.head_dim[kind]  # K's pages and V's take turns
            self.pools.append(torch.empty(shape, device=device, dtype=DTYPE))
        self.free = deque(range(NOBODYS + 1, pages[REMEMBERING]))
        place, entry = torch.arange(c.places)[:, None], torch.arange(entries)
        self.tables = [1 + place * own + entry % own, torch.full((c.places, entries), NOBODYS)]
        self.tables = [table.int().to(device) for table in self.tables]
        self.lengths = torch.zeros(c.places, dtype=torch.int32, device=device)

    def begin(self, place: int, request: Request) -> bool:
        """Gives a place the pages that its request will need, if so many are free."""
        count = -(-(len(request.prompt) + request.output) // self.c.page)
        if count > len(self.free):
            return False
        request.pages = [self.free.popleft() for _ in range(count)]
        self.tables[REMEMBERING][place, :count] = torch.tensor(request.pages, dtype=torch.int32)
        return True

    def end(self, place: int, request: Request) -> None:
        self.free.extend(request.pages)
        self.tables[REMEMBERING][place] = NOBODYS
        self.lengths[place] = 0

    def attend(self, places: slice) -> Attend:
        """Returns the attention of some places: new keys go to their pages, rows see what they may of all that is there."""

        def attend(layer: int, q, k, v):
            kind = self.c.kind(layer)
            k_pages, v_pages = self.pools[kind][sum(self.c.kind(i) == kind for i in range(layer))].unbind(1)
            return ffpa_with_kvcache(
                q, k_pages, v_pages, k, v,
                cache_seqlens=self.lengths[places],
                block_table=self.tables[kind][places],
                max_seqlen_k=self.c.longest,
                **self.c.rule(layer),
            )  # fmt: skip

        return attend

    def bytes_read(self, lengths: list[int]) -> int:
        """Returns the bytes of keys and values that a step reads."""
        seen = sum(min(n, self.c.window) for n in lengths), sum(lengths)
        of_key = (2 * len(x) * x.shape[-2] * x.shape[-1] * x.itemsize for x in self.pools)
        return sum(n * size for n, size in zip(seen, of_key, strict=True))


class Server:
    def __init__(self, model: Decoder, c: Config, device: str):
        self.model, self.c, self.caches, self.on_gpu = model, c, Caches(c, device), device == "cuda"
        self.tokens = torch.zeros(c.places, c.longest + 1, dtype=torch.long, device=device)
        self.active = torch.zeros(c.places, dtype=torch.int32, device=device)  # 1 where a request decodes
        self.running: dict[int, Request] = {}
        self.seconds = {"prefill": 0.0, "decoding": 0.0, "attention": 0.0}
        self.decoded = self.bytes = 0
        self.step = self._captured(self._step)

    def _step(self) -> None:
        """Makes one more token for each place that has a request; the others write to a page that nobody reads."""
        positions = self.caches.lengths.long()[:, None]
        x = self.model(self.tokens.gather(1, positions), positions, self.caches.attend(slice(None)))
        self.tokens.scatter_(1, positions + 1, self.model.logits(x[:, 0]).argmax(-1, keepdim=True))
        self.caches.lengths.add_(self.active)

    def _captured(self, step: Callable[[], None]) -> Callable[[], None]:
        """Returns the step as a CUDA graph, on a GPU."""
        if not self.on_gpu:
            return step
        step()  # kernels are chosen and loaded before the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph.replay

    def _seconds_of_attention(self) -> float:
        """Returns what all layers' attention takes at present; what it writes behind the keys will be overwritten."""
        attend, calls = self.caches.attend(slice(None)), []
        for i, layer in enumerate(self.model.layers):
            shapes = ((self.c.places, 1, heads, layer.head_dim) for heads in layer.heads)
            calls.append((i, *(torch.randn(shape, dtype=DTYPE, device="cuda") for shape in shapes)))
        replay = self._captured(lambda: [attend(*call) for call in calls])
        start = _now(True)
        for _ in range(10):
            replay()
        return (_now(True) - start) / 10

    def _prefill(self, place: int, request: Request) -> None:
        prompt, lengths = request.prompt, self.caches.lengths[place : place + 1]
        self.tokens[place, : len(prompt)] = prompt
        for first in range(0, len(prompt), self.c.chunk):
            chunk = prompt[None, first : first + self.c.chunk]
            positions = torch.arange(first, first + chunk.shape[1], device=chunk.device)[None]
            x = self.model(chunk, positions, self.caches.attend(slice(place, place + 1)))
            lengths.add_(chunk.shape[1])
        self.tokens[place, len(prompt)] = self.model.logits(x[0, -1]).argmax()
        self.active[place] = 1
        request.left = request.output - 1

    def _end(self, place: int) -> None:
        request = self.running.pop(place)
        request.tokens = self.tokens[place, : len(request.prompt) + request.output].clone()
        self.active[place] = 0
        self.caches.end(place, request)

    def serve(self, requests: list[Request]) -> None:
        waiting = deque(requests)
        while waiting or self.running:
            start = _now(self.on_gpu)
            for place in [i for i in range(self.c.places) if i not in self.running]:
                if not waiting or not self.caches.begin(place, waiting[0]):
                    break  # it waits until others have given back their pages
                self.running[place] = waiting.popleft()
                self._prefill(place, self.running[place])
            self.seconds["prefill"] += _now(self.on_gpu) - start
            self._decode(min(request.left for request in self.running.values()))
            for place in [place for place, request in self.running.items() if not request.left]:
                self._end(place)

    def _decode(self, steps: int) -> None:
        """Makes as many tokens of each request as the one that wants the fewest."""
        lengths = [len(request.prompt) + request.output - request.left for request in self.running.values()]
        attention = self._seconds_of_attention() if self.on_gpu and steps else 0.0
        start = _now(self.on_gpu)
        for _ in range(steps):
            self.step()
        self.seconds["decoding"] += _now(self.on_gpu) - start
        if self.on_gpu and steps:
            attention = (attention + self._seconds_of_attention()) / 2  # of first lengths and of last ones
        self.seconds["attention"] += steps * attention
        self.decoded += steps * len(lengths)
        weights = sum(x.nbytes for x in self.model.parameters()) - self.model.embedding.weight.nbytes
        self.bytes += sum(weights + self.caches.bytes_read([n + i for n in lengths]) for i in range(steps))
        for request in self.running.values():
            request.left -= steps


def _now(on_gpu: bool) -> float:
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter()


def without_cache(model: Decoder, c: Config, request: Request) -> tuple[int, bool]:
    """Runs all of a request's tokens at once, with no cache. Returns how many of those that were made are the likeliest, and
    whether all others are as likely but for roundings: for what comes of one more rounding of each layer's attention.
    """
    tokens = request.tokens[None]
    positions = torch.arange(tokens.shape[1] - 1, device=tokens.device)[None]

    def attend(layer: int, *qkv) -> torch.Tensor:
        return ffpa(*qkv, **c.rule(layer), layout="BNHD")

    def attend_rounded(layer: int, *qkv) -> torch.Tensor:
        out = attend(layer, *qkv)
        return out + out * torch.empty_like(out).uniform_(-1, 1) * torch.finfo(DTYPE).eps

    of_rows = [
        model(tokens[:, :-1], positions, each)[0, len(request.prompt) - 1 :] for each in (attend, attend_rounded)
    ]
    logits, rounded = (model.logits(rows).float() for rows in of_rows)
    made = logits.gather(1, tokens[0, len(request.prompt) :, None])
    best = logits.max(-1, keepdim=True).values
    slack = (logits - rounded).abs().max()
    return int((made == best).sum()), bool((made >= best - slack).all())


def read_bandwidth() -> float:
    """Returns the bytes that this GPU reads in a second: the best of ten sums over 4 GiB."""
    x, seconds = torch.ones(1 << 30, device="cuda"), []
    for _ in range(11):
        start = _now(True)
        x.sum()
        seconds.append(_now(True) - start)
    return x.nbytes / min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="the size for a GPU of 80 GB")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name in (names := ("layers", "prompt", "output", "requests", "places", "chunk", "page")):
        parser.add_argument(f"--{name}", type=int, help=f"{getattr(Config, name)}, or {getattr(FULL, name)} if full")
    args = parser.parse_args()
    c = replace(FULL if args.full else Config(), **{n: x for n in names if (x := getattr(args, n)) is not None})
    for name in names:
        if getattr(c, name) < 1:
            parser.error(f"--{name} is {getattr(c, name)}; it must be 1 or more")
    if c.page % 16:
        parser.error(f"--page is {c.page}; pages have a multiple of 16 keys")
    on_gpu = args.device == "cuda"

    torch.manual_seed(0)
    with torch.device(args.device):
        model = Decoder(c).to(DTYPE).requires_grad_(False)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    else:
        torch.set_num_threads(1)  # tensors of the toy size are too small to be shared
    half = 2 if c.ragged else 1
    lengths = [
        [int(torch.randint(max(n // half, 1), n + 1, ())) for n in (c.prompt, c.output)] for _ in range(c.requests)
    ]
    requests = [Request(torch.randint(c.vocabulary, (n,)).to(args.device), output) for n, output in lengths]
    server = Server(model, c, args.device)
    server.serve(requests)

    prompts = sum(len(request.prompt) for request in requests)
    weights, pools = (sum(x.nbytes for x in of) / 2**20 for of in (model.parameters(), server.caches.pools))
    (prefill, decoding, attention), peak = server.seconds.values(), torch.cuda.max_memory_allocated() / 2**30
    print(f"{c.layers} layers, {c.requests} requests, {c.places} at a time, {args.device}")
    print(f"prefill   {prompts} tokens, {prompts / prefill:.0f} tokens/s, in chunks of {c.chunk}")
    print(f"decoding  {server.decoded} tokens, {server.decoded / decoding:.0f} tokens/s")
    print(f"memory    {weights:.1f} MiB of weights, {pools:.1f} MiB of pages{f', {peak:.1f} GiB at the peak' * on_gpu}")
    if on_gpu:
        speed, read = server.bytes / decoding / 1e12, read_bandwidth() / 1e12
        print(f"a step    {attention / decoding:.0%} of it is attention")
        print(f"          {speed:.2f} TB/s of weights and keys: {speed / read:.2f} of a read alone, {read:.2f}")
    some = requests[:: max(len(requests) // 8, 1)]
    checked = [without_cache(model, c, request) for request in some]
    made = sum(request.output for request in some)
    print(f"without a cache {sum(n for n, _ in checked)} of {made} tokens are the same")
    if not all(right for _, right in checked):
        sys.exit("the others are not as likely: the cache holds something else")


if __name__ == "__main__":
    main()
