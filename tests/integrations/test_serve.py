"""Runs the example that serves requests, at its toy size, and shows that its check would notice a cache gone wrong."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.append(str(EXAMPLES))

import serve  # noqa: E402


@pytest.mark.long(seconds=15)
def test_its_tokens_are_those_without_a_cache():
    command = [sys.executable, EXAMPLES / "serve.py", "--device", "cpu", "--requests", "4"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    same, total = map(int, re.search(r"without a cache (\d+) of (\d+) tokens are the same", run.stdout).groups())
    assert total > 20 and same > 0.9 * total
    assert re.search(r"prefill .* tokens/s", run.stdout) and re.search(r"decoding .* tokens/s", run.stdout)


@pytest.mark.parametrize("name", ["layers", "prompt", "output", "requests", "places", "chunk", "page"])
def test_numbers_that_serve_nothing_are_refused(monkeypatch, capsys, name):
    monkeypatch.setattr(sys, "argv", ["serve.py", f"--{name}", "0"])
    with pytest.raises(SystemExit):
        serve.main()
    assert f"--{name} is 0; it must be 1 or more" in capsys.readouterr().err


@pytest.mark.long(seconds=5)
def test_least_numbers(monkeypatch, capsys):
    least = {"device": "cpu", "layers": 1, "prompt": 1, "output": 1, "requests": 1, "places": 1, "chunk": 1, "page": 16}
    monkeypatch.setattr(sys, "argv", ["serve.py", *(x for name, n in least.items() for x in (f"--{name}", str(n)))])
    threads = torch.get_num_threads()
    serve.main()
    torch.set_num_threads(threads)
    assert "1 of 1 tokens are the same" in capsys.readouterr().out


def serve_two(share: float = 1.0) -> tuple[serve.Server, list[bool]]:
    """Serves two requests and returns for each whether its tokens are right."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    config = serve.Config(prompt=40, output=10, window=16, chunk=16, places=2, share=share)
    model = serve.Decoder(config).to(serve.DTYPE).requires_grad_(False)
    requests = [serve.Request(torch.randint(config.vocabulary, (n,)), 10) for n in (40, 30)]
    server = serve.Server(model, config, "cpu")
    server.serve(requests)
    torch.set_num_threads(threads)
    return server, [serve.without_cache(model, config, request)[1] for request in requests]


@pytest.mark.parametrize("share", [0.75, 1.0], ids=["one waits", "room for both"])
def test_pages_come_back(share):
    server, right = serve_two(share)
    assert right == [True, True] and sorted(server.caches.free) == list(range(1, len(server.caches.free) + 1))
    assert not server.caches.lengths.any() and not server.caches.tables[serve.REMEMBERING].any()


@pytest.mark.parametrize("kind", [serve.FORGETTING, serve.REMEMBERING])
def test_requests_that_share_a_page_are_noticed(monkeypatch, kind):
    begin = serve.Caches.begin

    def wrong(self, place, request):
        done = begin(self, place, request)
        self.tables[kind][:, 0] = self.tables[kind][0, 0]
        if kind == serve.FORGETTING:
            self.tables[kind][:] = self.tables[kind][:1]
        return done

    monkeypatch.setattr(serve.Caches, "begin", wrong)
    assert serve_two()[1] != [True, True]
