"""Ranks that call differently are told so: at each new kind of call, before anything moves, and none waits afterwards.

The tests run as those of tests/distributed/test_distributed.py do, whose stand-in for GPUs' copies they use.
"""

import gc
import sys
from contextlib import contextmanager
from unittest import mock

import pytest
import test_distributed as ranks
import torch
import torch.distributed as dist
from ffpa_attn import distributed, ffpa
from ffpa_attn.distributed import agreement, ring, ulysses

FUNCTIONS = (distributed.ring_attention, distributed.ulysses_attention)


@pytest.mark.long(seconds=40)
@pytest.mark.parametrize("device, world", [("cpu", 2), ("cpu", 4)] + [("cuda", 2)] * torch.cuda.is_available())
def test_family(device, world, tmp_path):
    ranks.start(__file__, "kinds", device, world, tmp_path)


# ---- what the processes run ----


@contextmanager
def as_on_gpus():
    """Exchanges by copies, and compares kinds of calls only where they are new."""
    with ranks.of_known_kinds():
        if ranks.DEVICE == "cuda":
            yield
        else:
            with ranks.copying():
                yield


@contextmanager
def computing_nothing():
    """Computes nothing, as for a GPU's host, which goes on while what it asked for waits for another rank."""
    nothing = mock.Mock(side_effect=lambda q, k, v, *rest: (q, None))
    with (
        mock.patch.object(ring._RingAttention, "apply", nothing),
        mock.patch.object(ulysses._UlyssesAttention, "apply", nothing),
    ):
        yield nothing


@contextmanager
def counted_comparisons():
    compared = agreement.Agreement._told_by_all
    with mock.patch.object(agreement.Agreement, "_told_by_all", autospec=True, side_effect=compared) as spy:
        yield spy


def whole_and_own(rows):
    whole = ranks.inputs(rows * dist.get_world_size())[:3]
    return whole, [distributed.shard_sequence(x) for x in whole]


def assert_right(attention, rows, group):
    whole, mine = whole_and_own(rows)
    want = distributed.shard_sequence(ffpa(*whole, causal=True))
    torch.testing.assert_close(attention(*mine, group), want, atol=2e-2, rtol=2e-2)


def shape(rows):
    return rf"torch.Size\(\[2, 4, {rows}, 64\]\)"


def kinds_that_differ():
    """All ranks raise, none of them has anything longer than before, and they go on."""
    last = dist.get_world_size() - 1
    odd_one = dist.get_rank() == last
    on_last, on_first = f"on rank {last} of the group, but", "on rank 0"
    with as_on_gpus():
        for attention in FUNCTIONS:
            group = dist.new_group()
            assert_right(attention, 16, group)
            q, k, v = whole_and_own(8)[1]
            other = FUNCTIONS[1] if attention is FUNCTIONS[0] else FUNCTIONS[0]
            for message, args, keywords, function in (
                (f"`q` is {shape(4)} {on_last} {shape(8)} {on_first}", [x[:, :, :4] for x in (q, k, v)], {}, attention),
                (f"`q` is {shape(5)} {on_last} {shape(8)} {on_first}", [torch.cat([x[:, :, :4], x[:, :, :1]], 2) for x in (q, k, v)], {}, attention),
                (f"`k` is {shape(4).replace('4', '2', 1)}", (q, k[:, :, :4], v), {}, attention),
                (f"`v.dtype` is torch.float32 {on_last} torch.bfloat16 {on_first}", (q, k, v.float()), {}, attention),
                (f"`k` is .*2, 1, 8, 64.* {on_last} .*2, 2, 8, 64.* {on_first}", (q, k[:, :1], v[:, :1]), {}, attention),
                (f"`v` is .*8, 64.* {on_last} .*8, 72.* {on_first}", (q, k, v[..., :64]), {}, attention),
                (f"`q.dtype` is torch.float16 {on_last} torch.bfloat16 {on_first}", [x.half() for x in (q, k, v)], {}, attention),
                (f"`causal` is False {on_last} True {on_first}", (q, k, v), {"causal": False}, attention),
                (f"`scale` is 0.5 {on_last} None {on_first}", (q, k, v), {"scale": 0.5}, attention),
                (f"`softcap` is 2.0 {on_last} 0.0 {on_first}", (q, k, v), {"softcap": 2.0}, attention),
                (f"`layout` is contiguous {on_last} zigzag {on_first}", (q, k, v), {"layout": "contiguous"}, attention),
                (f"`requires_grad of q, k or v` is True {on_last} False {on_first}", (q.clone().requires_grad_(), k, v), {}, attention),
                (f"`function` is {other.__name__} {on_last} {attention.__name__} {on_first}", (q, k, v), {}, other),
            ):  # fmt: skip
                print(message)
                with computing_nothing() as computing, pytest.raises(ValueError, match=message):
                    (function if odd_one else attention)(*(args if odd_one else (q, k, v)), group=group, **(keywords if odd_one else {}))  # fmt: skip
                assert not computing.called
            for rows in (8, 16):
                assert_right(attention, rows, group)


def kinds_are_compared_once():
    with as_on_gpus(), counted_comparisons() as compared:
        for attention in FUNCTIONS:
            group = dist.new_group()
            for rows in (8, 4, 8, 8, 4):
                assert_right(attention, rows, group)
            assert compared.call_count == 2
            compared.reset_mock()


def kinds_of_a_whole_group_of_calls():
    """Ranks call in more kinds than are kept, and compare at every call under FFPA_CHECK."""
    with as_on_gpus(), counted_comparisons() as compared, mock.patch.object(agreement, "_MOST_KINDS", 2):
        group = dist.new_group()
        for rows in (2, 4, 6, 2, 6, 4, 4):
            assert_right(distributed.ring_attention, rows, group)
        assert compared.call_count == 5


def kinds_where_one_rank_calls_a_known_one():
    """The other ranks say so after a while; its own call waits for theirs. None of them goes on in that group."""
    first = dist.get_rank() == 0
    for attention in FUNCTIONS:
        group = dist.new_group()
        with ranks.of_known_kinds(), computing_nothing() as computing:
            for rows in (8, 4, 8):
                attention(*whole_and_own(rows)[1], group)
            computing.reset_mock()
            agreement._agreements[group].patience = 5
            mine = whole_and_own(8)[1]
            if first:
                attention(*mine, group)
                assert computing.called
            else:
                with pytest.raises(
                    RuntimeError, match="within 5 s rank 0 of the group did not come, or came with a call of a kind"
                ):
                    attention(*(x[:, :, :2] for x in mine), group)
                for _ in range(2):
                    with pytest.raises(RuntimeError, match="no longer call alike.*within 5 s rank 0.*new_group"):
                        attention(*mine, group)
                assert not computing.called
        dist.barrier()
        with as_on_gpus():
            assert_right(attention, 8, dist.new_group())


def kinds_where_one_rank_has_gone_on():
    """On GPUs that rank's host goes on. At the next call that it compares, all are told of the one that differed."""
    first = dist.get_rank() == 0
    with ranks.of_known_kinds(), computing_nothing():
        for attention in FUNCTIONS:
            group = dist.new_group()
            for rows in (8, 4):
                attention(*whole_and_own(rows)[1], group)
            mine = whole_and_own(8)[1]
            last = dist.get_world_size() - 1
            if first:
                attention(*mine, group)
            message = f"in a call of {attention.__name__} before this one `q` is {shape(2)} on rank 1 .*, but {shape(8)} on rank 0"
            assert last >= 1
            with pytest.raises(ValueError, match=message):
                attention(*(x[:, :, :2] for x in mine), group)
            with pytest.raises(RuntimeError, match="no longer call alike.*`q` is"):
                attention(*mine, group)


def kinds_that_all_know():
    """Where ranks err among known kinds, they are told at the next comparison, which is not far off."""
    for attention in FUNCTIONS:
        group = dist.new_group()
        with ranks.of_known_kinds(), computing_nothing() as computing, mock.patch.object(agreement, "_MOST_CALLS", 4):
            for _ in range(3):
                for rows in (8, 4):
                    attention(*whole_and_own(rows)[1], group)
            for rows in (8, 4 if dist.get_rank() else 8, 8):  # the first of these is compared
                attention(*whole_and_own(rows)[1], group)
            computing.reset_mock()
            message = f"before this one `q` is {shape(4)} on rank 1 .*what was computed since is wrong"
            with pytest.raises(ValueError, match=message):
                for _ in range(4):
                    attention(*whole_and_own(8)[1], group)
            assert computing.call_count == 2


def kinds_of_gathered_sequences():
    x = torch.zeros(2, 4 if dist.get_rank() else 6, device=ranks.DEVICE)
    with pytest.raises(ValueError, match=r"`x` is torch.Size\(\[2, 4\]\) on rank 1 of the group, but .*2, 6"):
        distributed.gather_sequence(x, dim=1)
    x = torch.zeros(2, 3 if dist.get_rank() else 4, device=ranks.DEVICE)  # some ranks have an odd number of rows
    with pytest.raises(ValueError, match=r"`x` is torch.Size\(\[2, 3\]\) on rank 1 of the group, but .*2, 4"):
        distributed.gather_sequence(x, dim=1)
    with pytest.raises(ValueError, match=r"`x.dtype` is torch.float32 on rank 1 of the group, but torch.float64"):
        distributed.gather_sequence(
            torch.zeros(2, 4).to(ranks.DEVICE, torch.float32 if dist.get_rank() else torch.float64), dim=1
        )


def kinds_of_groups_that_are_made_anew():
    """A group takes the place of another, whose messages its store may yet hold."""
    store = dist.distributed_c10d._get_process_group_store(dist.group.WORLD)
    store = dist.PrefixStore("the same", store)
    q, k, v = whole_and_own(8)[1]
    with (
        mock.patch.object(dist.distributed_c10d, "_get_process_group_store", lambda group: store),
        ranks.of_known_kinds(),
        computing_nothing() as computing,
    ):
        for rows in (4, 6):
            group = dist.new_group()
            distributed.ring_attention(q, k, v, group)
            dist.barrier()
            before = len(agreement._agreements)
            dist.destroy_process_group(group)
            del group
            computing.reset_mock()  # the mock keeps what it was called with
            gc.collect()
            assert len(agreement._agreements) == before - 1
            group = dist.new_group()
            mine = [x[:, :, : rows if dist.get_rank() else 8] for x in (q, k, v)]
            with pytest.raises(ValueError, match="`q` is .* on rank 1 of the group"):
                distributed.ring_attention(*mine, group)
            del group


def kinds_of_a_comparison_that_ends_early():
    """An interrupt, say, ends the comparison: that rank goes on in another group alone."""
    group = dist.new_group()
    mine = whole_and_own(8)[1]
    with computing_nothing():
        if dist.get_rank() == 0:
            with (
                mock.patch.object(agreement.time, "sleep", side_effect=KeyboardInterrupt),
                pytest.raises(KeyboardInterrupt),
            ):
                distributed.ring_attention(*mine, group)
            with pytest.raises(RuntimeError, match="a comparison of what they call ended early on rank 0"):
                distributed.ring_attention(*mine, group)
        dist.barrier()


if __name__ == "__main__":
    ranks.main(globals(), *sys.argv[1:])
