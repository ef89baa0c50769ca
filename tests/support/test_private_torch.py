"""A PyTorch may lack a private name, or be newer than what was tried: what works goes on, and the rest says why not."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ffpa_attn.support import private_torch

PACKAGE = Path(private_torch.__file__).resolve().parents[1]

START = """
import importlib, sys, warnings
import torch
importlib.import_module("torch._functorch.utils")
{before}
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    import ffpa_attn
said = [str(warning.message) for warning in said]

def attempt(call):
    try:
        return str(call())
    except NotImplementedError as error:
        return str(error)

x = torch.randn(1, 2, 40, 64)
half, leaf = x.half(), x.half().requires_grad_()

def override():
    with ffpa_attn.sdpa():
        return torch.nn.functional.scaled_dot_product_attention(half, half, half).shape

def autocast():
    with torch.autocast("cpu", torch.bfloat16):
        return ffpa_attn.ffpa(x, x, x).dtype

@ffpa_attn.sdpa() if "sdpa" not in "".join(said) else (lambda function: function)
def decorated():
    return 1

off = ffpa_attn.ffpa(half, half, half).float() - torch.softmax(x @ x.mT / 8, -1) @ x
assert off.abs().max() < 1e-2 and decorated() == 1
found = {{
    "gradients": attempt(lambda: torch.autograd.grad(ffpa_attn.ffpa(leaf, leaf, leaf).sum(), leaf)[0].shape),
    "torch.func": attempt(lambda: torch.func.vjp(lambda q: ffpa_attn.ffpa(q, half, half), half)[1](half)[0].shape),
    "sdpa": attempt(override),
    "autocast": attempt(autocast),
}}
print((said, found))
"""
WHOLE = {"gradients": "torch.Size", "torch.func": "torch.Size", "sdpa": "torch.Size", "autocast": "torch.bfloat16"}


def program(before: str) -> tuple[list[str], dict[str, str]]:
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    run = subprocess.run(
        [sys.executable, "-c", START.format(before=before)], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return eval(run.stdout)


@pytest.mark.parametrize(
    "gone, off",
    [
        ("torch._C._len_torch_dispatch_stack", []),
        ("torch.autograd.profiler._is_profiler_enabled", []),
        ("torch._C._any_requires_grad", []),
        ("torch._C._after_autograd_keyset", []),
        ("torch.autograd.forward_ad._current_level", ["sdpa"]),
        ("torch._C._AutoDispatchBelowAutograd", ["gradients", "torch.func"]),
        ("torch._functorch.utils.enable_single_level_autograd_function", ["torch.func"]),
        ("torch._C._functorch.peek_interpreter_stack", ["sdpa"]),
        ("torch._fused_sdp_choice", []),
    ],
)
def test_without_a_name(gone, off):
    said, found = program(f"del {gone}")
    assert said and all(f"has no {gone}" in text and "; it was tried with " in text for text in said)
    for what, whole in WHOLE.items():
        assert (f"has no {gone}" in found[what]) if what in off else found[what].startswith(whole), found


@pytest.mark.parametrize(
    "gone",
    [
        "torch._C._ExcludeDispatchKeyGuard",
        "torch._C._functions.DelayedError",
        "torch._C._functorch.is_functorch_wrapped_tensor",
    ],
)
def test_names_that_something_public_replaces(gone):
    said, found = program(f"del {gone}")
    assert not said and all(found[what].startswith(whole) for what, whole in WHOLE.items())


def test_a_second_derivative_is_refused_without_pytorchs_error():
    program(
        "del torch._C._functions.DelayedError\n"
        "import ffpa_attn\n"
        "x = torch.randn(1, 1, 8, 64).half().requires_grad_()\n"
        "grad, = torch.autograd.grad(ffpa_attn.ffpa(x, x, x).sum(), x, create_graph=True)\n"
        "try:\n    grad.sum().backward()\n    sys.exit('nothing was said')\n"
        "except RuntimeError as error:\n    assert 'cannot be differentiated again' in str(error)\n"
    )


def test_a_release_that_nobody_tried():
    said, found = program('torch.__version__ = "2.99.1+cu999"')
    (text,) = said
    assert text == (
        "ffpa_attn: PyTorch 2.99.1+cu999 is newer than what this release of ffpa-cuda was tried with: "
        f"{private_torch.tried()}"
    )
    assert all(found[what].startswith(whole) for what, whole in WHOLE.items())


WITHOUT_GRADIENTS = """
import torch
kept = torch._C._AutoDispatchBelowAutograd
del torch._C._AutoDispatchBelowAutograd
import ffpa_attn
torch._C._AutoDispatchBelowAutograd = kept  # PyTorch itself has it
x = torch.randn(1, 1, 8, 64).half()
leaf = x.clone().requires_grad_()
calls = [
    lambda: torch.ops.ffpa_attn.forward(leaf, leaf, leaf),
    lambda: torch.func.jvp(lambda q: ffpa_attn.ffpa(q, q, q), (x,), (x,)),
    lambda: torch.compile(lambda q: torch.func.grad(lambda q: ffpa_attn.ffpa(q, q, q).float().sum())(q), backend="aot_eager")(x),
]
for call in calls:
    try:
        call()
        raise SystemExit("silently wrong")
    except Exception as error:
        assert "gradients, torch.func and torch.compile: off" in str(error), error
assert torch.equal(torch.ops.ffpa_attn.forward(x, x, x, return_lse=False)[0], ffpa_attn.ffpa(x, x, x))
"""


WITHOUT_THE_OVERRIDE = """
import torch
del torch._C._functorch.CInterpreter
import ffpa_attn
x = torch.randn(1, 2, 16, 64).half()
assert ffpa_attn.ffpa_attn_func(x, x, x).shape == x.shape
"""


@pytest.mark.parametrize("code", [WITHOUT_GRADIENTS, WITHOUT_THE_OVERRIDE], ids=["gradients", "override"])
def test_what_is_off_is_never_wrong_elsewhere(code):
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), "PYTHONWARNINGS": "ignore"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_releases():
    last = private_torch.TRIED[-1]
    assert private_torch.newer_than_tried(f"{last}.7+cu130") is None
    assert private_torch.newer_than_tried("2.10.0a0+git1234") is None
    assert private_torch.newer_than_tried("2.13rc1") is private_torch.newer_than_tried("local") is None
    assert "3.0.0" in private_torch.newer_than_tried("3.0.0")


# These names are what any class, function or operator may have to do with PyTorch.
PROTOCOLS = {"_dynamo_marked_constant", "_make_wrapper_subclass", "_torchdynamo_disable", "_schema"}
LATE = ("agreement", "sharding")  # these say so themselves when they are first used


def test_every_private_name_has_been_looked_for():
    """What is called by its full name is among what `private_torch` looks for, or else is found by its means."""
    looked_for = (PACKAGE / "support" / "private_torch.py").read_text()
    unknown = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = re.sub(r"\"torch\.[^\"]+\"|#.*", "", path.read_text())
        for name in re.findall(r"(?<![\w.])((?:torch|_C|forward_ad|autograd|dist)(?:\.\w+)*\._\w+(?:\.\w+)*)", text):
            full = {"_C": "torch._C", "forward_ad": "torch.autograd.forward_ad", "autograd": "torch.autograd"}
            first, rest = name.split(".", 1)
            name = f"{full.get(first, first)}.{rest}"
            known = f'"{name}' in looked_for or not PROTOCOLS.isdisjoint(name.split(".")) or "__" in name
            if not known and path.stem not in ("private_torch", *LATE):
                unknown.append(f"{path.name}: {name}")
    assert not unknown, "\n".join(unknown)
