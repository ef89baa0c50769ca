"""This is the ffpa-attn of PyPI as a peer, once for each of its backends. It has this project's import name, so it lives
in processes of its own.

Both processes make the same inputs from the seed; the parent says when to time one call, so that the rounds of all
providers alternate. Each line is one JSON value: requests to the child's stdin, answers from its stdout.
"""

from __future__ import annotations

import json
import site
import subprocess
import sys
from collections.abc import Collection
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from provider import Provider
from timing import Timer, peak_bytes
from truth import Truth
from workload import Workload, make_inputs

BACKENDS = ("", "cutedsl")  # what it runs on its own, and what it has for Hopper


class PypiPeer:
    def __init__(self, folder: Path, device: str, backend: str):
        from ffpa_attn import env  # our module: the child must not see it

        self.tag = f"(ffpa-pypi{backend and '+' + backend})"
        self.child = subprocess.Popen(
            [sys.executable, __file__, device, str(folder.resolve()), backend],
            env=env.child_environment(PYTHONPATH=str(folder.resolve())),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is the parent's; the child ends with its stdin
        )

    def prepare(self, w: Workload, seed: int, ones: Collection[str], warmup: int) -> dict:
        """Returns kernel, verdict, peak_bytes and some values of the output."""
        return self._ask({"workload": w.as_dict(), "seed": seed, "ones": list(ones), "warmup": warmup})

    def milliseconds(self) -> float:
        return self._ask("once")

    def _ask(self, request):
        self.child.stdin.write(json.dumps(request) + "\n")
        self.child.stdin.flush()
        answer = self.child.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process of {self.tag} ended with status {self.child.wait()}")
        answer = json.loads(answer)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["answer"]


class _Child:
    def __init__(self, device: str, backend: str):
        import ffpa_attn

        self.device, self.timer, self.call = device, Timer(device), None
        self.kernel = f"ffpa-attn {ffpa_attn.__version__} of PyPI{backend and ', ' + backend}"
        self.function = partial(ffpa_attn.ffpa_attn_func, **({"backend": backend} if backend else {}))

    def answer(self, request):
        return self.timer.milliseconds(self.call) if request == "once" else self.prepare(**request)

    def prepare(self, workload: dict, seed: int, ones: list[str], warmup: int) -> dict:
        self.call = None
        w = Workload(**workload)
        if w.packed or (w.causal and w.n_q != w.n_kv):
            raise NotImplementedError("compared on dense tensors; causal only where rows and keys are as many")

        def attention(x):
            return self.function(x.q, x.k, x.v, is_causal=w.causal, enable_gqa=w.heads != w.heads_kv)

        provider = Provider("(ffpa-pypi)", self.kernel, attention)
        verdict = Truth(w, self.device, seed).verdict(lambda x: provider.prepare(w, x)())
        self.call = provider.prepare(w, make_inputs(w, self.device, seed, ones))
        for _ in range(warmup):
            output = self.call()[0].flatten()
        values = [*output[:2].tolist(), *output[-1:].tolist()]
        return {
            "kernel": self.kernel,
            "verdict": verdict,
            "peak_bytes": peak_bytes(self.call, self.device),
            "output": values,
        }


def _serve(device: str, backend: str) -> None:
    answers, child = sys.stdout, None
    for line in sys.stdin:
        try:
            with redirect_stdout(sys.stderr):  # the package's own prints are no answers
                child = child or _Child(device, backend)
                told = {"answer": child.answer(json.loads(line))}
        except Exception as error:
            told = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(told), file=answers, flush=True)


if __name__ == "__main__":
    site.addsitedir(sys.argv[2])  # some of its packages are found through files that end in .pth
    _serve(sys.argv[1], sys.argv[3])
