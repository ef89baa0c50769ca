"""Runs what vLLM gets of ffpa without vLLM: its entry point, and the attention of its backend on plain tensors."""

import enum
import importlib
import itertools
import logging
import os
import pickle
import re
import subprocess
import sys
import types
from pathlib import Path

import oracle
import pages
import pytest
import torch
from ffpa_attn import env
from ffpa_attn.integrations import vllm
from ffpa_attn.integrations.vllm import attention, images, releases
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).parents[2]


def test_importing_it_needs_no_vllm():
    code = (
        "import sys, ffpa_attn.integrations.vllm.images; print(*[x for x in sys.modules if x.split('.')[0] == 'vllm'])"
    )
    environment = env.child_environment(PYTHONPATH=os.pathsep.join(sys.path))
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout == "\n"


def test_the_entry_point_is_there():
    declared = re.search(
        r'entry-points."vllm.general_plugins"\]\n(\w+) = "([\w.]+):(\w+)"', (ROOT / "pyproject.toml").read_text()
    )
    assert declared[1] == "ffpa"
    assert getattr(importlib.import_module(declared[2]), declared[3]) is vllm.register


@pytest.fixture
def registry(monkeypatch):
    """Puts a module with an enumeration where vLLM has it."""

    class AttentionBackendEnum(enum.Enum):
        TRITON_ATTN = "vllm.Triton"
        CUSTOM = None

    name = "vllm.v1.attention.backends.registry"
    for parent in itertools.accumulate(name.split("."), "{}.{}".format):
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    sys.modules[name].AttentionBackendEnum = AttentionBackendEnum
    return AttentionBackendEnum


def test_backends_are_registered_once(registry):
    vllm.register()
    vllm.register()
    assert [x.name for x in registry] == ["TRITON_ATTN", "CUSTOM", *vllm.BACKENDS]
    for name, path in vllm.BACKENDS.items():
        assert registry[name].value == path and registry(path) is registry[name] is getattr(registry, name)
        assert (Path(vllm.__file__).parent / f"{path.split('.')[-2]}.py").exists()


def test_a_process_that_has_loaded_no_plugin_reads_the_name(registry):
    vllm.register()
    message = pickle.dumps(registry.FFPA)
    for names in (registry._member_map_, registry._value2member_map_):  # as in that process
        names.pop("FFPA", None)
    registry._member_names_.remove("FFPA")
    delattr(registry, "FFPA")
    assert pickle.loads(message) is registry["FFPA"]


def test_a_vllm_without_a_registry_is_named(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr(releases, "found", lambda: "0.9.2")
    with caplog.at_level(logging.WARNING):
        vllm.register()
    assert (
        "vLLM 0.9.2 (too old) lacks what ffpa_attn needs: " in caplog.text and ", ".join(releases.TRIED) in caplog.text
    )


@pytest.mark.parametrize(
    "version, age",
    [
        ("0.99.0", "too new"), ("0.33.1", "between those that were tried"), ("0.19.2", "too old"),
        ("unknown", "unknown age"), ("dev", "unknown age"), ("0.1.dev1+g12ab34c", "unknown age"),
        ("0.34.1.dev77+g12ab34c.cu130", "unknown age"), ("0.24.0+cu130", "between those that were tried"),
    ],
)  # fmt: skip
def test_releases_are_told_apart(monkeypatch, version, age):
    monkeypatch.setattr(releases, "found", lambda: version)
    assert releases.unfit(ImportError("no name X")).startswith(f"vLLM {version} ({age}) lacks what ffpa_attn needs: no")


@pytest.mark.parametrize("version", ["0.29.0", "0.34.1.dev77", "0.33.1", "0.24.0+cu130", "unknown"])
def test_a_release_that_nobody_tried_is_named(monkeypatch, caplog, version):
    monkeypatch.setattr(releases, "found", lambda: version)
    with caplog.at_level(logging.WARNING):
        releases.say_if_untried()
    untried = version in ("0.29.0", "0.34.1.dev77")
    said = f"vLLM is {version}; FFPA was tried with {', '.join(releases.TRIED)} alone"
    assert caplog.messages == [said] * untried


def test_bounds_are_few_and_near():
    assert [attention.bound(n) for n in (0, 1, 2, 7, 15, 16)] == [0, 1, 2, 7, 15, 16]
    bounds = {n: attention.bound(n) for n in range(1, 70_000)}
    assert all(n <= b <= n * 9 / 8 for n, b in bounds.items())
    assert len(set(bounds.values())) < 120


def test_releases_that_were_tried_are_those_of_the_check():
    check = (Path(__file__).parent / "serving" / "check_vllm.py").read_text()
    assert re.search("^releases: (.*)$", check, re.MULTILINE)[1].split() == list(releases.TRIED)
    assert ", ".join(releases.TRIED[:-1]) in (ROOT / "docs" / "integrations.md").read_text()


def test_a_batch_that_may_warm_up_has_the_bound_of_a_captured_call():
    assert attention.longest_keys(1, 1, 4096) == 4096  # a row for each request, and no key before it
    assert attention.longest_keys(2, 1, 4096) == 2
    assert attention.longest_keys(40, 0, 4096) == 40  # prompts
    assert attention.longest_keys(3, 3, 2) == 3


# ---- the attention ----


def batch_of(rows, pool, **more) -> attention.Batch:
    offsets = torch.tensor([0, *rows], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    longest = attention.bound(max(rows)), attention.bound(int(pool.used.max()))
    slots = torch.empty(0, dtype=torch.int64)
    return attention.Batch(sum(rows), longest[0], offsets, longest[1], pool.used, pool.table, slots, **more)


def as_vllm_has_it(pool) -> torch.Tensor:
    """Returns [pages, heads, rows, 2 D], bytes where the pool has 8 bits; pools "beside" lie so."""
    cache = torch.cat([pool.k, pool.v], 3).transpose(1, 2)
    return cache.view(torch.uint8) if cache.dtype == attention.EIGHT_BITS else cache


def run(pool, rows, rule, d, padding=0, scales=(), **more):
    """Returns q and the result, with rows of padding behind, as a piecewise graph has them."""
    q, _ = pages.queries([*rows, padding], heads=rule.sinks.numel() if rule.sinks is not None else 4, d=d)
    out = torch.full_like(q, torch.nan)
    cache, of_cache = as_vllm_has_it(pool), (d, pool.k.dtype)
    attention.attend(q, cache, batch_of(rows, pool, **more), out, rule, *of_cache, *scales)
    assert not out[len(q) - padding :].any()
    return q, out


def assert_right(pool, rows, rule, q, out, scales=(1.0, 1.0), masks=None):
    ends = list(itertools.accumulate(rows))
    for i, keys in enumerate(pool.sequences()):
        mine = slice(ends[i] - rows[i], ends[i])
        keys = [x.to(q.dtype) * scale for x, scale in zip(keys, scales, strict=True)]
        see = {"causal": True, "window": rule.window} if masks is None else {"mask": masks[i]}
        pages.assert_attends(q[mine], keys, out[mine], scale=rule.scale, softcap=rule.softcap, sinks=rule.sinks, **see)


RULES = {
    "plain": attention.Rule(0.1),
    "window": attention.Rule(0.1, window=(19, -1)),
    "softcap": attention.Rule(0.2, softcap=5.0),
    "sinks": attention.Rule(0.1, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    "all": attention.Rule(0.2, (7, -1), 5.0, torch.tensor([0.5, -1.0, 2.0, 0.0])),
}


@pytest.mark.parametrize("size", [16, 32, 48])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_prompts_and_decoding_in_one_call(rule, size):
    rows, lengths = [40, 1, 1, 5, 3], [40, 33, 1, 5, 70]
    pool = pages.make(lengths, rows=size, d=64)
    assert_right(pool, rows, rule, *run(pool, rows, rule, 64, padding=6))


@pytest.mark.parametrize("d, heads", [(256, 2), (512, 1)])
def test_both_kinds_of_layers_of_a_wide_model(d, heads):
    rows, lengths = [9, 1], [9, 50]
    pool, rule = pages.make(lengths, rows=32, heads=heads, d=d), attention.Rule(1 / 16)
    assert_right(pool, rows, rule, *run(pool, rows, rule, d))


def test_eight_bits():
    rows, lengths, scales = [20, 1, 4], [20, 40, 4], (0.25, 0.5)
    pool = pages.make(lengths, d=64, dtype=attention.EIGHT_BITS)
    rule = RULES["window"]
    tensors = tuple(torch.tensor(x) for x in scales)  # as layers have them, without a dim
    assert_right(pool, rows, rule, *run(pool, rows, rule, 64, scales=tensors), scales)


@pytest.mark.parametrize("dtype", [torch.bfloat16, attention.EIGHT_BITS], ids=["16 bits", "8 bits"])
def test_latent_vectors(dtype):
    rows, lengths = [1, 3, 1], [30, 3, 17]
    pool = pages.make(lengths, heads=1, d=576, d_v=512, layout="latent", dtype=dtype)
    q, _ = pages.queries(rows, heads=16, d=576)
    scale, of_keys = 192**-0.5, (torch.tensor(0.5), 0.5) if dtype == attention.EIGHT_BITS else (None, 1.0)
    rule = attention.Rule(scale)
    out = attention.attend_latent(q, pool.k[:, :, 0], batch_of(rows, pool), rule, 512, of_keys[0])
    assert_right(pool, rows, rule, q, out, (of_keys[1], of_keys[1]))


def test_a_graph_reads_its_buffers_anew():
    """A captured call has room for requests that are not there at a replay: they have the last offset and no keys."""
    pool = pages.make([30, 9, 17, 5], d=64)
    offsets, used = torch.tensor([0, 1, 2, 3, 4], dtype=torch.int32), torch.ones(4, dtype=torch.int32)
    table = torch.zeros_like(pool.table)
    batch = attention.Batch(4, 4, offsets, attention.bound(30), used, table, torch.empty(0, dtype=torch.int64))
    cache = as_vllm_has_it(pool)
    q, _ = pages.queries([4])
    for rows in ([1, 1, 1, 1], [2, 1, 0, 0], [1, 2, 1, 0]):  # of requests in turn, from one batch to the next
        offsets[1:] = torch.tensor(rows).cumsum(0)
        used.copy_(torch.where(torch.tensor(rows) > 0, pool.used, 0))
        table.copy_(pool.table)
        table[torch.tensor(rows) == 0] = 10**6
        out = torch.full_like(q, torch.nan)
        attention.attend(q, cache, batch, out, RULES["window"], 64, pool.k.dtype)
        n = len([x for x in rows if x])
        some = pages.Pool(pool.k, pool.v, pool.table[:n], pool.used[:n])
        assert_right(some, rows[:n], RULES["window"], q, out)
        assert not out[sum(rows) :].any()


def test_a_run_that_measures_memory_sees_the_workspace(monkeypatch):
    taken = []
    monkeypatch.setenv("FFPA_WORKSPACE_MB", "3")
    monkeypatch.setattr(torch, "empty", lambda n, **named: taken.append((n, named["dtype"])))
    attention.reserve(torch.device("cpu"))
    assert taken == [(3 << 20, torch.uint8)]


# ---- images ----


def masks_of(rows, lengths, ranges, window):
    """Returns who sees whom, as vLLM's own backends have it: by the causal rule and the window, or in one image."""
    for i, (n_q, n_k) in enumerate(zip(rows, lengths, strict=True)):
        mask = oracle.visible(n_q, n_k, causal=True, window=window)
        row, key = torch.arange(n_k - n_q, n_k)[:, None], torch.arange(n_k)
        for first, last in ranges.get(i, ()):
            together = (row >= first) & (row <= last) & (key >= first) & (key <= last)
            mask |= together & ((row - key <= window[0]) | (window[0] < 0))
        yield mask[None, None]


RANGES = {0: [(3, 9), (12, 20)], 1: [(0, 5)], 3: [(5, 30)], 9: [(0, 4)]}


@pytest.mark.parametrize("rule", [RULES["plain"], RULES["window"], RULES["all"]], ids=["plain", "window", "all"])
def test_images_see_both_ways(rule):
    """The second request decodes behind its image; the last has its image in two steps, and more than its window."""
    rows, lengths = [25, 1, 4, 12], [25, 8, 4, 24]
    pool = pages.make(lengths, d=64)
    offsets = torch.tensor([0, *rows]).cumsum(0)
    found = images.find(RANGES, offsets, pool.used, pool.table)
    assert torch.equal(found.block_table, pool.table[[0, 0, 3]]) and found.seq_lens.tolist() == [10, 21, 24]
    q, out = run(pool, rows, rule, 64, images=found)
    assert_right(pool, rows, rule, q, out, masks=list(masks_of(rows, lengths, RANGES, rule.window)))


@pytest.mark.parametrize("ranges", [{}, {0: []}, {0: [(7, 7)]}, {0: [(0, 3)], 1: [(50, 60)]}])
def test_steps_without_images(ranges):
    offsets, lengths = torch.tensor([0, 4, 5]), torch.tensor([10, 40])  # rows 6 to 9, and 39
    assert images.find(ranges, offsets, lengths, torch.zeros(2, 4, dtype=torch.int32)) is None


class Copies(TorchDispatchMode):
    """Writes down what is copied to another device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.ops.aten._to_copy.default and kwargs.get("device", args[0].device) != args[0].device:
            self.found.append((args[0].dtype, kwargs.get("non_blocking")))
        return function(*args, **kwargs)

    def __enter__(self):
        self.found = []
        return super().__enter__()


def test_images_reach_a_gpu_by_one_copy_that_nobody_waits_for(monkeypatch):
    empty, pinned = torch.empty, []

    def made(*shape, pin_memory=False, **named):
        pinned.append(pin_memory)
        return empty(*shape, **named)

    monkeypatch.setattr(torch, "empty", made)
    offsets, lengths = torch.tensor([0, 25, 26, 38]), torch.tensor([25, 8, 24])
    with FakeTensorMode(allow_non_fake_inputs=True):
        table = torch.zeros(3, 4, dtype=torch.int32, device="cuda")
        with Copies() as copies:
            found = images.find({0: [(3, 9), (12, 20)], 2: [(14, 23)]}, offsets, lengths, table)
    assert found.block_table.shape == (3, 4) and found.rows.shape == (7 + 9 + 10,)
    assert copies.found == [(torch.int32, True)]
    assert pinned.count(True) == 1  # the others are those of tensors that are none


def test_finding_images_does_not_wait_for_a_gpu(device):
    if device != "cuda":
        pytest.skip("a CPU is not waited for")
    offsets, lengths = torch.tensor([0, 25, 26]), torch.tensor([25, 8])
    table = torch.arange(8, dtype=torch.int32, device=device).view(2, 4)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = images.find({0: [(3, 9), (12, 20)]}, offsets, lengths, table)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert found.rows.tolist() == [*range(3, 10), *range(12, 21)] and found.query_start_loc.tolist() == [0, 7, 16]
    assert found.seq_lens.tolist() == [10, 21] and torch.equal(found.block_table, table[[0, 0]])
