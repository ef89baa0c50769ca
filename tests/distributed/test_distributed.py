"""Attention on several ranks is attention on one: ring and Ulysses.

Each test starts processes of its file, which meet over gloo and run all cases of a family (starting takes longer).
On GPUs they meet over NCCL, where there are enough; ranks that share one GPU exchange by way of the CPU.
"""

import os
import random
import sys
import tempfile
import time
import warnings
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen, TimeoutExpired, run
from unittest import mock

import compare
import oracle
import pytest
import torch
import torch.distributed as dist
from ffpa_attn import distributed, env, ffpa
from ffpa_attn.backends import backward_short
from ffpa_attn.distributed import agreement, exchange, peer_memory, ring, sequence_shards
from ffpa_attn.operators import again, ops

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 300 if torch.cuda.is_available() else 100  # seconds for the processes of one test
DEVICE = "cpu"  # device of a process
BATCH = dist.batch_isend_irecv


def quiet_environment() -> dict:
    """Returns an environment without our flags, with what this process imports from."""
    flags = {flag.name for flag in env.FLAGS if flag.scope == "run" and flag.name != "FFPA_CACHE_DIR"}
    environment = env.child_environment(OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(sys.path))
    return {name: value for name, value in environment.items() if name not in flags}


FAMILIES = [
    *(pytest.param("sequences", "cpu", world, marks=pytest.mark.long(seconds=30)) for world in (2, 4)),
    *(
        pytest.param("copies", "cpu", world, marks=pytest.mark.long(seconds=20)) for world in (2, 5)
    ),  # 5 ranks use places twice in a call
]
if torch.cuda.is_available():  # each rank compiles Triton's kernels
    FAMILIES += [pytest.param("sequences", "cuda", world, marks=pytest.mark.long(seconds=240)) for world in (2, 4)]


@pytest.mark.parametrize("family, device, world", FAMILIES)
def test_family(family, device, world, tmp_path):
    start(__file__, family, device, world, tmp_path)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_messages_on_one_gpu(tmp_path):
    start(__file__, "messages", "cuda", 1, tmp_path)


def start(file, family, device, world, tmp_path):
    command = [sys.executable, file, family, device, str(tmp_path / "meeting"), str(world)]
    ranks = [
        Popen([*command, str(rank)], env=quiet_environment(), stdout=PIPE, stderr=STDOUT, text=True)
        for rank in range(world)
    ]
    said = []
    for rank in ranks:
        try:
            said.append(rank.communicate(timeout=SECONDS)[0])
        except TimeoutExpired:
            rank.kill()
            said.append(rank.communicate()[0] + "\n(too slow)")
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(f"-- rank {i}\n{text}" for i, text in enumerate(said))


def test_example():
    example = ROOT / "examples" / "ring_attention.py"
    command = [sys.executable, example, "--scaling"]
    done = run(command, env=quiet_environment(), capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    ranks = torch.cuda.device_count() or 2
    assert f"{ranks} ranks" in done.stdout and "WRONG" not in done.stdout
    rows = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith(("| 1 ", f"| {ranks} "))]
    assert len(rows) == min(ranks, 2), done.stdout
    for size, *measured in rows:
        forward, forward_tflops, _, both, both_tflops, _ = (float(x.strip(" %")) for x in measured)
        assert 0 < forward and 0 < both and forward_tflops > 0
        assert both_tflops * both == pytest.approx(3.5 * forward_tflops * forward, rel=0.02), size


# ---- what the processes run: all functions whose names begin with their family's ----


def inputs(rows, heads=(4, 2), d=(64, 72), batch=2, dtype=torch.bfloat16, seed=0):
    """Returns q, k, v, and gradients of out and LSE, of the whole sequence: the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(heads[0], d[0]), (heads[1], d[0]), (heads[1], d[1]), (heads[0], d[1])]
    tensors = [torch.randn(batch, h, rows, columns, generator=generator).to(dtype) for h, columns in shapes]
    return tuple(x.to(DEVICE) for x in (*tensors, torch.randn(batch, heads[0], rows, generator=generator)))


def with_gradients(attention, q, k, v, grad_out, grad_lse, **rule):
    """Returns out, LSE, dq, dk, dv."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    out, lse = attention(q, k, v, **rule)
    return out, lse, *torch.autograd.grad([out, lse], [q, k, v], [grad_out, grad_lse])


NAMES = ("out", "lse", "dq", "dk", "dv")


def on_one(*whole, **rule):
    """Returns what ffpa gives for the whole sequence, with a backward that reads out, as those of parts of the keys must."""
    nothing_known()
    with mock.patch.object(backward_short, "plan", lambda p: "it does not read out"):
        results = with_gradients(lambda *x, **rule: ffpa(*x, **rule, return_lse=True), *whole, **rule)
    nothing_known()
    return results


def nothing_known() -> None:
    ops._plans.clear()
    again.forget_all()


def as_on_one(attention, layout, per_rank, rule, group=None, **shapes):
    """The ranks' own parts, of all results, err no more than ffpa on the whole sequence does."""
    whole = inputs(per_rank * dist.get_world_size(group), **shapes)
    want = with_gradients(oracle.attention, *whole[:3], *(x.double() for x in whole[3:]), **rule)
    base = on_one(*whole, **rule)
    mine = [distributed.shard_sequence(x, group, layout=layout) for x in whole]
    mine[:4] = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in mine[:4])  # strides as a projection leaves them
    keywords = {"group": group, "layout": layout, "return_lse": True}
    got = with_gradients(lambda *x, **rule: attention(*x, **rule, **keywords), *mine, **rule)
    for name, x, exact, one in zip(NAMES, got, want, base, strict=True):
        exact, one = (distributed.shard_sequence(y, group, layout=layout) for y in (exact, one))
        assert x.dtype == one.dtype
        if name == "lse":
            torch.testing.assert_close(x, one, atol=1e-5, rtol=1e-5)
        else:
            compare.assert_close(name, x, exact, one)
    repeated = with_gradients(lambda *x, **rule: attention(*x, **rule, **keywords), *mine, **rule)
    assert all(torch.equal(x, y) for x, y in zip(got, repeated, strict=True)), "other bits"


RULES = [
    ("zigzag", 6, {"causal": True}, {}),
    ("zigzag", 10, {"causal": False}, {"heads": (4, 1), "d": (72, 64), "dtype": torch.float16}),
    ("zigzag", 2, {"causal": True, "scale": 0.3, "softcap": 2.0}, {"heads": (4, 4), "dtype": torch.float16}),
    ("contiguous", 5, {"causal": True, "softcap": 3.0}, {"batch": 1}),
    ("contiguous", 7, {"causal": False, "scale": 0.2}, {"heads": (12, 3)}),
    ("contiguous", 1, {"causal": True}, {"d": (512, 512)}),
]


def sequences_need_no_dtensors():
    """Importing DTensors takes seconds."""
    with_gradients(lambda *x: distributed.ring_attention(*x, return_lse=True), *inputs(4))
    assert "torch.distributed.tensor" not in sys.modules and "ffpa_attn.operators.sharding" not in sys.modules


def sequences_on_several_ranks():
    for attention in (distributed.ring_attention, distributed.ulysses_attention):
        for layout, per_rank, rule, shapes in RULES:
            print(attention.__name__, layout, per_rank, rule, shapes)
            as_on_one(attention, layout, per_rank, rule, **shapes)
    if DEVICE == "cuda":
        all_were_copied()


def sequences_in_groups():
    world, rank = dist.get_world_size(), dist.get_rank()
    for size in (1, 2):
        groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world, size)]
        for attention in (distributed.ring_attention, distributed.ulysses_attention):
            as_on_one(attention, "zigzag", 4, {"causal": True}, group=groups[rank // size])


def sequences_of_more_turns_than_are_merged_at_once():
    with mock.patch.object(ring, "_MERGED_AT_ONCE", 2):
        as_on_one(distributed.ring_attention, "zigzag", 4, {"causal": True})
        as_on_one(distributed.ring_attention, "contiguous", 3, {"causal": False})


def sequences_that_hold_nan():
    """NaN is in a row of q: its results are NaN, and no others."""
    world, rank = dist.get_world_size(), dist.get_rank()
    whole = list(inputs(4 * world)[:3])
    whole[0][1, 2, 5, 7] = torch.nan
    want, want_lse = ffpa(*whole, return_lse=True)
    assert want.isnan().any(-1).sum() == 1
    for attention in (distributed.ring_attention, distributed.ulysses_attention):
        mine = [distributed.shard_sequence(x) for x in whole]
        out, lse = attention(*mine, causal=False, return_lse=True)
        for x, y in ((out, want), (lse, want_lse)):
            assert torch.equal(x.isnan(), distributed.shard_sequence(y).isnan()), (attention.__name__, rank)


def sequences_with_sinks():
    """Sinks count once, in all rows; gradients of them are shares, whose sum over the ranks is the whole."""
    world = dist.get_world_size()
    sinks = torch.tensor([1.0, -torch.inf, 9.0, -3.0], device=DEVICE).requires_grad_()
    for merged_at_once, (layout, per_rank, rule, shapes) in zip((2, 4, 4), (RULES[0], RULES[2], RULES[4]), strict=True):
        q, k, v, *grads = inputs(per_rank * world, **{**shapes, "heads": (4, 2)})
        whole = [x.requires_grad_() for x in (q, k, v)]
        *want, want_largest = ffpa(*whole, sinks=sinks, return_lse=True, return_max_logits=True, **rule)
        want += torch.autograd.grad(want, [*whole, sinks], grads)
        cut = partial(distributed.shard_sequence, layout=layout)
        for attention in (distributed.ring_attention, distributed.ulysses_attention):
            if attention is distributed.ulysses_attention and 4 % world:
                continue
            with mock.patch.object(ring, "_MERGED_AT_ONCE", merged_at_once):
                mine = [cut(x.detach()).requires_grad_() for x in whole]
                asked = {"sinks": sinks, "layout": layout, "return_lse": True, "return_max_logits": True}
                *got, largest = attention(*mine, **rule, **asked)
                got += torch.autograd.grad(got, [*mine, sinks], [cut(x) for x in grads])
            assert not largest.requires_grad
            torch.testing.assert_close(largest, want_largest)
            dist.all_reduce(got[-1])
            for name, x, y in zip((*NAMES, "dsinks"), got, want, strict=True):
                y = y if name == "dsinks" else cut(y)
                torch.testing.assert_close(x, y, atol=2e-2, rtol=2e-2, msg=name)
            assert got[-1][1] == 0
            # Sinks may be all that is trained.
            out = attention(*(x.detach() for x in mine), **rule, layout=layout, sinks=sinks)
            (alone,) = torch.autograd.grad(out, sinks, cut(grads[0]))
            dist.all_reduce(alone)
            out = ffpa(*(x.detach() for x in whole), sinks=sinks, **rule)
            (whole_alone,) = torch.autograd.grad(out, sinks, grads[0])
            torch.testing.assert_close(alone, whole_alone, atol=2e-2, rtol=2e-2)


def sequences_with_sinks_that_differ():
    """Ranks compare what they pass, so that all of them raise."""
    rank, x = dist.get_rank(), inputs(4)[:3]
    for attention in (distributed.ring_attention, distributed.ulysses_attention):
        with pytest.raises(ValueError, match="`sinks` is"):
            attention(*x, sinks=torch.zeros(4, device=DEVICE) if rank else None)
        with pytest.raises(ValueError, match="`return_max_logits` is"):
            attention(*x, return_max_logits=bool(rank))
        with pytest.raises(ValueError, match=r"`sinks` has shape \(3,\)"):
            attention(*x, sinks=torch.zeros(3, device=DEVICE))


def sequences_of_large_equal_scores():
    """float32 has no room beside them for the logarithm of how many there are: each counts once, on every rank."""
    world = dist.get_world_size()
    q, k, v, *_ = inputs(4 * world, dtype=torch.float16)
    want = v.double().mean(2, keepdim=True).repeat_interleave(2, 1).expand(*q.shape[:3], -1)
    for value in (2e4, -2e4):
        q.fill_(2e4)
        k.fill_(value)
        with mock.patch.object(ring, "_MERGED_AT_ONCE", 2):
            for attention in (distributed.ring_attention, distributed.ulysses_attention):
                out = attention(*(distributed.shard_sequence(x) for x in (q, k, v)), causal=False)
                torch.testing.assert_close(out.double(), distributed.shard_sequence(want), atol=2e-3, rtol=2e-3)


def sequences_are_cut_and_joined():
    world, rank = dist.get_world_size(), dist.get_rank()
    x = torch.arange(3 * 4 * world, device=DEVICE).view(3, 4 * world)
    early, late = slice(2 * rank, 2 * rank + 2), slice(4 * world - 2 * rank - 2, 4 * world - 2 * rank)
    zigzag = distributed.shard_sequence(x, dim=-1)
    assert torch.equal(zigzag, torch.cat([x[:, early], x[:, late]], 1))
    assert torch.equal(distributed.gather_sequence(zigzag, dim=-1), x)
    contiguous = distributed.shard_sequence(x, dim=1, layout="contiguous")
    assert torch.equal(contiguous, x[:, 4 * rank : 4 * rank + 4])
    assert torch.equal(distributed.gather_sequence(contiguous, dim=1, layout="contiguous"), x)


@contextmanager
def seen_calls():
    """Records what happens, in turn: messages posted, computed on, awaited."""
    seen = []

    def spy(what, call):
        return lambda *args, **kwargs: (seen.append((what, args, kwargs)), call(*args, **kwargs))[1]

    operators, post = torch.ops.ffpa_attn, exchange.Exchange.post
    with (
        mock.patch.object(operators, "forward_out", spy("forward", operators.forward_out)),
        mock.patch.object(operators, "backward", spy("backward", operators.backward)),
        mock.patch.object(exchange.Exchange, "post", spy("post", lambda *args: spy("wait", post(*args)))),
    ):
        yield seen


def sequences_travel_while_ranks_compute():
    steps = dist.get_world_size() - 1
    whole = inputs(4 * dist.get_world_size())
    mine = [distributed.shard_sequence(x) for x in whole]
    with seen_calls() as seen:
        with_gradients(lambda *x: distributed.ring_attention(*x, return_lse=True), *mine)
    happened = [what for what, _, _ in seen]
    first = happened.index("backward") - 1  # the first message of the backward
    assert happened[:first] == ["post", "forward", "wait"] * steps + ["forward"]
    keys = [step < steps for step in range(steps + 1)]
    grads = [step > 1 for step in range(steps + 1)]  # gradients of the step before
    under_way = list(map(sum, zip(keys, grads, strict=True)))
    expected = [what for n in under_way for what in ["post"] * n + ["backward"] + ["wait"] * n]
    assert happened[first:] == [*expected, "post", "wait"]  # the gradients of the last step


def sequences_are_the_same_work_for_all():
    """No rank computes a pair that causal attention does not have, and all compute as many."""
    world = dist.get_world_size()
    mine = [distributed.shard_sequence(x) for x in inputs(6 * world)]
    with seen_calls() as seen:
        with_gradients(lambda *x: distributed.ring_attention(*x, return_lse=True), *mine)
    pairs = {"forward": 0, "backward": 0}
    for what, args, kwargs in seen:
        if what in pairs:
            q, k = args[:2] if what == "forward" else args[2:4]
            pairs[what] += oracle.visible_pairs(q.shape[2], k.shape[2], causal=kwargs["causal"])
    of_all = [None] * world
    dist.all_gather_object(of_all, pairs)
    assert all(x == of_all[0] for x in of_all), of_all
    rows = 6 * world
    assert all(x * world == rows * (rows + 1) // 2 for x in pairs.values()), pairs


def sequences_of_many_rows():
    """Kernels take long enough here for K and V to arrive too early, in the place of those that are computed on."""
    if DEVICE == "cuda":
        calls = [inputs(2048 * dist.get_world_size(), d=(512, 512), batch=1, seed=seed) for seed in range(2)]
        wants = [with_gradients(lambda *x: ffpa(*x, causal=True, return_lse=True), *whole) for whole in calls]
        for whole, want in zip(3 * calls, 3 * wants, strict=True):
            mine = map(distributed.shard_sequence, whole)
            got = with_gradients(lambda *x: distributed.ring_attention(*x, return_lse=True), *mine)
            for name, x, y in zip(NAMES, got, want, strict=True):
                torch.testing.assert_close(x, distributed.shard_sequence(y), atol=2e-2, rtol=2e-2, msg=name)


def sequences_in_messages():
    """Tensors go in messages, as between hosts."""
    if DEVICE == "cuda":
        with mock.patch.dict(os.environ, FFPA_RING_COPIES="0"):
            for layout, per_rank, rule, shapes in RULES:
                as_on_one(distributed.ring_attention, layout, per_rank, rule, **shapes)
            sequences_of_many_rows()


def sequences_of_no_rows():
    for attention in (distributed.ring_attention, distributed.ulysses_attention):
        q, k, v, *grads = inputs(0)
        results = with_gradients(lambda *x, a=attention: a(*x, return_lse=True), q, k, v, *grads)
        assert all(x.shape[2] == 0 for x in results)


def sequences_under_autocast():
    """Autocast casts inputs of float32 alone."""
    q, k, v, *_ = (x.float() for x in inputs(4))
    for attention in (distributed.ring_attention, distributed.ulysses_attention):
        q.grad = None
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            out = attention(q.requires_grad_(), k, v)
            with pytest.raises(TypeError, match="`v` has dtype torch.float16 but `q` has torch.bfloat16"):
                attention(q, k, v.half())
        out.float().square().sum().backward()
        want = with_gradients(
            attention_with_lse(attention),
            *(x.bfloat16() for x in (q, k, v)),
            2 * out,
            torch.zeros(2, 4, 4, device=DEVICE),
        )
        assert out.dtype == torch.bfloat16 and q.grad.dtype == torch.float32
        torch.testing.assert_close((out, q.grad), (want[0], want[2].float()), atol=1e-2, rtol=1e-2)


def attention_with_lse(attention):
    return lambda *x, **rule: attention(*x, **rule, return_lse=True)


def sequences_by_default():
    """What is cut, computed and gathered by defaults goes together."""
    q, k, v, *_ = inputs(8 * dist.get_world_size())
    for attention in (distributed.ring_attention, distributed.ulysses_attention):
        out = distributed.gather_sequence(attention(*map(distributed.shard_sequence, (q, k, v))))
        torch.testing.assert_close(out, ffpa(q, k, v, causal=True), atol=2e-2, rtol=2e-2)


def sequences_with_gradients_of_one_result():
    """Whatever a rank's loss uses, it takes part in what is sent: rank 0 uses the LSE, the others use out."""
    whole = inputs(4 * dist.get_world_size())[:3]
    leaves = [x.double().requires_grad_() for x in whole]
    out, lse = oracle.attention(*leaves, causal=True)
    first = (
        distributed.shard_sequence(torch.arange(out.shape[2], device=DEVICE), dim=0) if dist.get_rank() == 0 else None
    )
    rows = [first]
    dist.broadcast_object_list(rows, 0)
    of_first = torch.zeros(out.shape[2], dtype=torch.bool, device=DEVICE)
    of_first[rows[0].to(DEVICE)] = True
    want = torch.autograd.grad(lse[..., of_first].sum() + out[:, :, ~of_first].sum(), leaves)
    for attention in (distributed.ring_attention, distributed.ulysses_attention):
        mine = [distributed.shard_sequence(x).requires_grad_() for x in whole]
        out, lse = attention(*mine, return_lse=True)
        grads = torch.autograd.grad((out.float() if dist.get_rank() else lse).sum(), mine)
        for x, y in zip(grads, want, strict=True):
            torch.testing.assert_close(x.double(), distributed.shard_sequence(y), atol=3e-2, rtol=3e-2)


def sequences_are_differentiated_once():
    for attention in (distributed.ring_attention, distributed.ulysses_attention):
        q, k, v = (distributed.shard_sequence(x).requires_grad_() for x in inputs(4 * dist.get_world_size())[:3])
        for x in (q, k, v):
            (dq,) = torch.autograd.grad(attention(q, k, v).sum(), q, create_graph=True)
            with pytest.raises(RuntimeError, match="ffpa's gradients cannot be differentiated again"):
                torch.autograd.grad(dq.float().square().sum(), x)


def sequences_compiled():
    """Messages are no part of a graph: there is one before and one behind them."""
    mine = [
        distributed.shard_sequence(x).requires_grad_(i < 3) for i, x in enumerate(inputs(4 * dist.get_world_size()))
    ]
    for attention in (distributed.ring_attention, distributed.ulysses_attention):

        def loss(q, k, v, attention=attention):
            return attention(2 * q, k, v).float().square().sum()

        want = torch.autograd.grad(loss(*mine[:3]), mine[:3])
        found = torch.autograd.grad(torch.compile(loss, backend="aot_eager")(*mine[:3]), mine[:3])
        assert all(torch.equal(x, y) for x, y in zip(found, want, strict=True))


def sequences_of_ranks_that_disagree():
    """All ranks say so, before anything is computed."""
    first, group = dist.get_rank() == 0, dist.new_group()  # no kind is known in this new group
    q, k, v, *_ = inputs(4)
    for attention in (distributed.ring_attention, distributed.ulysses_attention):
        for message, args, keywords in (
            (
                "`q.dtype` is .*bfloat16.* on rank 1 of the group, but .*float16",
                [x.half() if first else x for x in (q, k, v)],
                {},
            ),
            ("`q` is .*on rank 1", [x[:, :, :2] if first else x for x in (q, k, v)], {}),
            ("`causal` is False on rank 1 of the group, but True on rank 0", (q, k, v), {"causal": first}),
            ("`layout` is", (q, k, v), {"layout": "zigzag" if first else "contiguous"}),
            ("`scale` is", (q, k, v), {"scale": 0.5 if first else None}),
        ):
            with pytest.raises(ValueError, match=message):
                attention(*args, group=group, **keywords)


def sequences_that_do_not_fit():
    world = dist.get_world_size()
    q, k, v, *_ = inputs(5)
    for attention in (distributed.ring_attention, distributed.ulysses_attention):
        for error, message, args, keywords in (
            (ValueError, "`q` has 5 rows.*two chunks", (q, k, v), {"layout": "zigzag"}),
            (ValueError, "`layout` is 'striped'; allowed", (q, k, v), {"layout": "striped"}),
            (ValueError, "`k` has 4 rows but `q` has 5", (q, k[:, :, 1:], v[:, :, 1:]), {}),
            (TypeError, "`q` has dtype torch.float32; allowed", (q.float(), k, v), {}),
            (TypeError, "`causal` is 'top_left'", (q, k, v), {"causal": "top_left"}),
            (TypeError, "`group` is a list; pass", (q, k, v), {"group": [0, 1]}),
        ):
            with pytest.raises(error, match=message):
                attention(*args, **{"layout": "contiguous", **keywords})
    with pytest.raises(ValueError, match=f"`q` has 3 heads.*a multiple of {world}"):
        distributed.ulysses_attention(q[:, :3], k[:, :1], v[:, :1], layout="contiguous")
    with pytest.raises(ValueError, match="`x` has 5 rows in dim 2.*pad the sequence to 8"):
        distributed.shard_sequence(q)
    with pytest.raises(ValueError, match="`dim` is 4; `x` has 4 dims"):
        distributed.gather_sequence(q, dim=4)
    with pytest.raises(ValueError, match="`x` requires grad.*x.detach"):
        distributed.gather_sequence(q.clone().requires_grad_()[:, :, 1:])
    outside = dist.new_group([0])
    if dist.get_rank():
        with pytest.raises(ValueError, match="`group` does not hold this rank"):
            distributed.ring_attention(q, k, v, outside)


def test_without_a_process_group():
    q, k, v, *_ = inputs(4)
    with pytest.raises(ValueError, match="`group` needs torch.distributed.*init_process_group"):
        distributed.ring_attention(q, k, v)


# ---- what GPUs of a host do, on the CPU: memory that all ranks have mapped, and words in it ----


class SharedFile:
    """Stands for peer_memory.Memory, on the CPU."""

    def __init__(self, size, device):
        assert device.type == "cpu"
        self.handle = tempfile.NamedTemporaryFile(dir="/dev/shm").name
        self.size, self.own, self.at = size, self._mapped(self.handle, size), {}
        self.own.zero_()

    def _mapped(self, path, size):
        return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)

    def map(self, handles, rank):
        self.at = {other: self._mapped(path, self.size) for other, path in enumerate(handles)}

    def unmap(self):
        self.at.clear()

    def free(self):
        Path(self.handle).unlink(missing_ok=True)

    __del__ = free

    def tensor(self, offset, like):
        return self.own[offset : offset + like.nbytes].view(like.dtype).view(like.shape)

    def copy(self, x, rank, offset):
        assert x.is_contiguous()
        self.at[rank][offset : offset + x.nbytes].copy_(x.flatten().view(torch.uint8))

    def write(self, rank, word, value):
        self.at[rank].view(torch.int32)[word] = value

    def wait(self, word, value):
        started = time.monotonic()
        while self.own.view(torch.int32)[word].item() - value < 0:
            assert time.monotonic() - started < SECONDS / 4, "nobody came"
            time.sleep(1e-4)


@contextmanager
def copying():
    """Lets tensors go by copies, and not by messages."""
    with (
        mock.patch.object(peer_memory, "Memory", SharedFile),
        mock.patch.object(exchange, "_may_be_copied", lambda tensors: True),
        mock.patch.object(dist, "batch_isend_irecv", lambda messages: pytest.fail("a message")),
    ):
        yield


@contextmanager
def of_known_kinds():
    """Compares kinds where they are new, as on GPUs, and not at every call."""
    check = agreement.Agreement.check
    with mock.patch.object(agreement.Agreement, "check", lambda self, kind, _: check(self, kind, False)):
        yield


def copies_on_several_ranks():
    """Copies have several sizes, also larger ones than at first."""
    with copying():
        for layout, per_rank, rule, shapes in RULES + RULES[::-1]:
            print(layout, per_rank, rule, shapes)
            as_on_one(distributed.ring_attention, layout, per_rank, rule, **shapes)


def copies_in_a_group():
    group = dist.new_group(list(range(1, dist.get_world_size())))
    with copying():
        if dist.get_rank() and dist.get_world_size(group) > 1:
            as_on_one(distributed.ring_attention, "zigzag", 4, {"causal": True}, group=group)


def copies_of_ranks_that_are_late():
    """Ranks are late to compute: others, a call ahead, overwrite nothing that is read, and read nothing old."""
    attention = attention_with_lse(distributed.ring_attention)
    calls = [[factor * distributed.shard_sequence(x) for x in inputs(4 * dist.get_world_size())] for factor in (1, 2)]
    want = [(attention(*mine[:3]), with_gradients(attention, *mine)) for mine in calls]

    def late(operator):
        def call(*args, **keywords):
            time.sleep(random.choice([0, 0, 0, 0.02]))
            return operator(*args, **keywords)

        return call

    random.seed(dist.get_rank())
    operators = torch.ops.ffpa_attn
    with (
        copying(),
        of_known_kinds(),  # no rank waits for another to compare kinds
        mock.patch.object(operators, "forward_out", late(operators.forward_out)),
        mock.patch.object(operators, "backward", late(operators.backward)),
    ):
        for turn in range(24):
            for mine, (outputs, all_of_them) in zip(calls, want, strict=True):
                got, right = (
                    (attention(*mine[:3]), outputs) if turn % 4 else (with_gradients(attention, *mine), all_of_them)
                )
                assert all(torch.equal(x, y) for x, y in zip(got, right, strict=True)), turn


def copies_after_an_error():
    """Ranks may not agree on how many tensors they have exchanged: none that failed goes on as if they did."""
    mine = [distributed.shard_sequence(x) for x in inputs(4 * dist.get_world_size())][:3]
    group = dist.new_group()
    with copying():
        with mock.patch.object(torch.ops.ffpa_attn, "forward_out", side_effect=MemoryError), pytest.raises(MemoryError):
            distributed.ring_attention(*mine, group)
        with pytest.raises(RuntimeError, match="a call in this `group` ended in an error.*new_group"):
            distributed.ring_attention(*mine, group)
        distributed.ring_attention(*mine, dist.new_group())


def copies_of_other_sizes():
    """All ranks need more memory then. What they had is given up for it, and found anew."""
    group, first = dist.new_group(), dist.get_rank() == 0
    with copying(), mock.patch.object(agreement, "check", lambda *args: None):
        distributed.ring_attention(*inputs(2)[:3], group)
        with pytest.raises(ValueError, match="`k` and `v` differ between the ranks"):
            distributed.ring_attention(*inputs(6 if first else 4)[:3], group)
        distributed.ring_attention(*inputs(2)[:3], group)


def copies_where_one_rank_cannot():
    """All ranks send messages then, and keep doing so."""
    last = dist.get_rank() == dist.get_world_size() - 1

    def cannot(*args):
        raise RuntimeError("this rank cannot")

    for what in ("__init__", "map", "elsewhere"):
        group = dist.new_group()
        memory = type("Cannot", (SharedFile,), {what: cannot}) if last else SharedFile
        elsewhere = mock.Mock(read_text=lambda what=what: f"{what} {last}" if what == "elsewhere" else "here")
        with (
            copying(),
            mock.patch.object(peer_memory, "Memory", memory),
            mock.patch.object(peer_memory, "_BOOT", elsewhere),
            mock.patch.object(dist, "batch_isend_irecv", BATCH),
        ):
            as_on_one(distributed.ring_attention, "zigzag", 4, {"causal": True}, group=group)
        assert list(exchange._kept[group].values()) == [None, None], what


# ---- one GPU, which sends to itself ----


def messages_and_copies_on_a_gpu():
    """In a ring of eight, whose ranks have other K and V each, NCCL's messages, and copies between GPUs, leave the bits
    that copies one by one do. Two streams call in turn, with different tensors.
    """
    post, world = exchange.Exchange.post, 8
    streams, calls = [], []
    for factor in (1, 0.5):
        mine, *others = (inputs(1024, d=(512, 512), batch=1, seed=seed) for seed in range(world))
        calls.append((mine, [[factor * x for x in of_rank[1:3]] for of_rank in others]))
        streams.append(torch.cuda.Stream())

    def one_by_one(self, sent, to, received, source, place):
        torch.cuda.synchronize()
        for x, arrived in zip(sent, received, strict=True):
            arrived.copy_(x)
        torch.cuda.synchronize()
        return lambda: None

    def run(rank, mine, others):
        def to_itself(self, tensors, to, source, rows):
            tensors = others[self.posted % (world - 1)] if self.passed.maxlen == 2 else tensors
            return post(self, tensors, 0, 0, tensors[0].shape[2])

        with (
            mock.patch.object(sequence_shards, "rank_and_world", lambda group: (rank, world)),
            mock.patch.object(exchange.Exchange, "post", to_itself),
        ):
            return with_gradients(attention_with_lse(distributed.ring_attention), *mine, causal=True)

    for rank in (0, 3, 7):
        with (
            mock.patch.dict(os.environ, FFPA_RING_COPIES="0"),
            mock.patch.object(exchange.Messages, "_start", one_by_one),
        ):
            want = [run(rank, *call) for call in calls]
        for copies in "01":
            for turn in range(4):
                with mock.patch.dict(os.environ, FFPA_RING_COPIES=copies):
                    got = []
                    for stream, call in zip(streams, calls, strict=True):
                        with torch.cuda.stream(stream):
                            got.append(run(rank, *call))
                for results, right in zip(got, want, strict=True):
                    torch.cuda.synchronize()
                    errors = {n: (x - y).abs().max().item() for n, x, y in zip(NAMES, results, right, strict=True)}
                    assert not any(errors.values()), (rank, copies, turn, errors)
    all_were_copied()


def sequences_where_another_device_is_current():
    if DEVICE == "cuda" and torch.cuda.device_count() > 1 and dist.get_backend() == "nccl":
        here = torch.cuda.current_device()
        whole, group = inputs(4 * dist.get_world_size()), dist.new_group()
        mine = [distributed.shard_sequence(x) for x in whole]
        with torch.cuda.device((here + 1) % torch.cuda.device_count()):
            out = distributed.ring_attention(*mine[:3], group)
        want = distributed.shard_sequence(ffpa(*whole[:3], causal=True))
        torch.testing.assert_close(out, want, atol=2e-2, rtol=2e-2)
        assert all(exchange._kept[group].values())


def all_were_copied():
    """Checks that all was copied, where GPUs were asked to."""
    assert list(map(bool, exchange._kept[dist.group.WORLD].values())) == [True, True], "this GPU, or driver, cannot"


class Landed:
    def __init__(self):
        self.event = torch.cuda.current_stream().record_event()

    def wait(self):
        self.event.wait()


def by_way_of_the_cpu(messages, batch=dist.batch_isend_irecv):
    """Takes NCCL's place where ranks share a GPU: reads what is sent, and writes what comes, on this stream."""
    copies = [x.tensor.cpu() if x.op is dist.isend else torch.empty_like(x.tensor, device="cpu") for x in messages]
    pairs = list(zip(messages, copies, strict=True))
    for work in batch([dist.P2POp(x.op, copy, group=x.group, group_peer=x.group_peer) for x, copy in pairs]):
        work.wait()
    for message, copy in pairs:
        if message.op is dist.irecv:
            message.tensor.copy_(copy)
    return [Landed()]


def meet(device: str, meeting: str, world: int, rank: int) -> None:
    global DEVICE
    DEVICE = device
    backend = "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        if torch.cuda.device_count() >= world:
            backend = "nccl"
        else:
            dist.batch_isend_irecv = by_way_of_the_cpu
    place = {"init_method": f"file://{meeting}", "world_size": world, "rank": rank}
    dist.init_process_group(backend, **place, timeout=timedelta(seconds=SECONDS))  # one may compile for long


def main(cases: dict, family: str, device: str, meeting: str, world: str, rank: str) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="ffpa_attn: ")
    meet(device, meeting, int(world), int(rank))
    for name, case in list(cases.items()):
        if name.startswith(f"{family}_"):
            print(name)
            case()
    dist.destroy_process_group()
    # PyTorch's threads may hold tensors still: one that asks a dying interpreter for its lock ends the process.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(globals(), *sys.argv[1:])
