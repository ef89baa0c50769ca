"""A thread's first CUDA call may be ours, without a context yet: PyTorch's calls make one, the driver's need one."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import ffpa_attn
import pytest
import torch
from ffpa_attn.distributed import peer_memory
from ffpa_attn.triton_ops import launch as triton_launch

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def in_a_new_thread(call):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


@needs_gpu
@pytest.mark.parametrize("backend", ["auto", "hopper", "mma", "triton"])
@pytest.mark.parametrize("d", [64, 128, 256, 512, 640, 1024])
def test_the_first_call_of_a_thread(backend, d, monkeypatch):
    monkeypatch.setenv("FFPA_BACKEND", backend)
    if backend == "triton" and d > 256:
        pytest.skip("Triton's forward ends at 256 columns")
    q, k, v = torch.randn(3, 1, 4, 384, d, device="cuda", dtype=torch.bfloat16)

    def call():
        return ffpa_attn.ffpa(q, k, v, causal=True, softcap=3.0)

    spare, want = call(), call()
    del spare  # frees memory, which the thread then needs not ask CUDA for
    assert torch.equal(in_a_new_thread(call), want)


@needs_gpu
def test_the_first_call_of_a_thread_in_8_bits():
    q, k, v = torch.randn(3, 1, 4, 384, 512, device="cuda", dtype=torch.bfloat16)
    (q, k, v), scales = zip(*(ffpa_attn.quantize_fp8(x) for x in (q, k, v)), strict=True)

    def call():
        return ffpa_attn.ffpa_fp8(q, k, v, **dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True)))

    spare, want = call(), call()
    del spare
    assert torch.equal(in_a_new_thread(call), want)


LEAVING = """
import sys, threading, time, torch
from ffpa_attn import ffpa
attention = ffpa if sys.argv[1] == "ffpa" else torch.nn.functional.scaled_dot_product_attention
q, k, v = torch.randn(3, 1, 16, 4096, int(sys.argv[2]), device="cuda", dtype=torch.bfloat16)
def endless():
    while True:
        attention(q, k, v)
        called.set()
called = threading.Event()
threading.Thread(target=endless, daemon=True).start()
assert called.wait(60)
time.sleep(0.3)
print("leaving")
"""


@needs_gpu
@pytest.mark.parametrize("d", [64, 512])
def test_a_thread_that_calls_while_the_program_ends(d):
    """Python stops the thread when it next takes the interpreter's lock; PyTorch's own attention may then abort."""
    environment = {**os.environ, "PYTHONPATH": str(Path(ffpa_attn.__file__).parents[1])}
    ended = {}
    for name in ("F.sdpa", "ffpa"):
        runs = [
            subprocess.run(
                [sys.executable, "-c", LEAVING, name, str(d)], env=environment, capture_output=True, text=True
            )
            for _ in range(3)
        ]
        assert all("leaving" in run.stdout and "Error" not in run.stderr for run in runs), runs[0].stderr
        ended[name] = {run.returncode for run in runs}
    assert ended["ffpa"] <= ended["F.sdpa"] | {0}


def test_triton_is_given_a_context_once_in_each_thread(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", asked.append)
    device = torch.device("cuda", 0)

    def describe_twice():
        had = [triton_launch._thread.has_context]
        triton_launch._make_context_current(device)
        return [*had, triton_launch._thread.has_context]

    assert [in_a_new_thread(describe_twice) for _ in range(2)] == [[False, True]] * 2
    assert asked == [device] * 2


def test_a_driver_call_without_a_context_is_made_again(monkeypatch):
    answers, asked = [peer_memory._NO_CONTEXT, 0, peer_memory._NO_CONTEXT, 1], []
    driver = SimpleNamespace(cuSomething=lambda: answers.pop(0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: asked.append(0))
    monkeypatch.setattr(peer_memory, "_driver", lambda: driver)
    peer_memory._call("cuSomething")
    with pytest.raises(RuntimeError, match="error 1"):
        peer_memory._call("cuSomething")
    assert len(asked) == 2
