"""A layer's call of a kind that was seen before makes no views and asks nothing, and gives what its first call gave."""

import dataclasses

import pages
import pytest
import torch
from ffpa_attn.integrations.vllm import attention
from ffpa_attn.operators import again, again_paged, ops, steps
from ffpa_attn.testing import emulate
from test_vllm import as_vllm_has_it, batch_of

BF16, E4M3 = torch.bfloat16, attention.EIGHT_BITS
ROWS, LENGTHS = (3, 1), (40, 21)
SINKS = torch.tensor([0.5, -1.0, 3.0, 0.0])
RULE = attention.Rule(0.125, (17, -1), 5.0, SINKS)


@pytest.fixture(autouse=True)
def on_the_device(monkeypatch):
    """Nothing is known, and tables and lengths are not read, as on a GPU."""
    pages.forget_and_read_nothing(monkeypatch)
    with emulate("sm_80"):
        yield


def a_call(seed=0, rule=RULE, dtype=BF16, scales=False, rows=ROWS) -> dict:
    """Returns arguments of `attend`."""
    pool = pages.make(LENGTHS, seed=seed, dtype=dtype)
    q, _ = pages.queries(rows, seed=seed)
    given = {"q": q, "cache": as_vllm_has_it(pool), "batch": batch_of(rows, pool), "out": torch.full_like(q, torch.nan)}
    given |= {"rule": rule, "columns": 64, "dtype": dtype}
    if scales:
        given |= {"k_scale": torch.tensor([0.5, 2.0]) + seed, "v_scale": torch.tensor(1.5)}
    return given


def eight_bits(seed=0, rows=ROWS) -> dict:
    return a_call(seed, attention.Rule(0.125), E4M3, scales=True, rows=rows)


def result(given) -> torch.Tensor:
    attention.attend(**given)
    return given["out"]


CALLS = {"plain": lambda seed: a_call(seed, attention.Rule(0.125)), "rule": a_call, "8 bits": eight_bits}
CALLS["sinks of 16 bits"] = lambda seed: a_call(seed, attention.Rule(0.125, sinks=SINKS.to(BF16)))


@pytest.mark.parametrize("make", CALLS.values(), ids=CALLS)
def test_the_next_layer_makes_no_views(make, monkeypatch):
    wanted = []
    for seed in range(2):
        again.forget_all()
        wanted.append(result(make(seed)))
    calls = [make(seed) for seed in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(attention, "ffpa_varlen", None)
        for name in ("transpose", "split_with_sizes", "tolist", "item", "cpu"):
            patch.setattr(torch.Tensor, name, None)
        found = [result(given) for given in calls]
    assert all(map(torch.equal, found, wanted)) and not torch.equal(*wanted)


@pytest.mark.parametrize("make", [a_call, eight_bits])
def test_another_number_of_rows_is_no_new_kind_of_call(make, monkeypatch):
    """Its plan follows from the one that is known, and is kept."""
    others = [(3, 2), (1, 3), (2, 3)]
    wanted = [result(make(1, rows=rows)) for rows in [*others, *others]]
    again.forget_all(), ops._plans.clear()
    result(make(0))
    monkeypatch.setattr(attention, "ffpa_varlen", None)
    assert all(map(torch.equal, [result(make(1, rows=rows)) for rows in [*others, *others]], wanted))
    with pytest.raises(TypeError):
        result(make(0, rows=(1, 1)))  # the longest of its sequences has fewer rows


def test_kinds_without_launches_are_not_asked_about_again(monkeypatch):
    monkeypatch.setattr(again_paged, "launches_of", lambda plan: None)
    wanted = result(a_call())
    assert len(again._known) == 2
    monkeypatch.setattr(again_paged, "plan_of", None)
    assert torch.equal(result(a_call()), wanted)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=["16 bits", "8 bits"])
def test_latent_vectors(arch, dtype, monkeypatch):
    rule, scale = attention.Rule(192**-0.5), torch.tensor(0.5) if dtype == E4M3 else None

    def run(seed) -> torch.Tensor:
        pool = pages.make(LENGTHS, heads=1, d=576, d_v=512, layout="latent", dtype=dtype, seed=seed)
        q, _ = pages.queries(ROWS, heads=16, d=576, seed=seed)
        return attention.attend_latent(q, pool.k[:, :, 0], batch_of(ROWS, pool), rule, 512, scale)

    with emulate(arch):
        wanted = [run(0), run(1)]
        monkeypatch.setattr(attention, "ffpa_varlen", None)
        found = [run(seed) for seed in (0, 1, 1)]
    assert all(map(torch.equal, found, [*wanted, wanted[1]])) and found[1].data_ptr() != found[2].data_ptr()


def kind(given) -> tuple | None:
    values, types = given["rule"].kind
    q, cache, out, k_scale, v_scale = (given.get(name) for name in ("q", "cache", "out", "k_scale", "v_scale"))
    call = steps.Call(q, cache, out, given.get("sinks", given["rule"].sinks), k_scale, v_scale)
    return steps.kind(given["batch"].step, call, (values, given["columns"], given["dtype"]), types)


OF_BATCH = ("query_start_loc", "seq_lens", "block_table")


@pytest.mark.parametrize("change", ["shape", "strides", "dtype", "alignment", "none"])
@pytest.mark.parametrize("name", ["q", "cache", "out", "sinks", "k_scale", "v_scale", *OF_BATCH])
def test_kinds_differ_by_any_tensor(name, change):
    given = eight_bits() | {"sinks": SINKS, "v_scale": torch.tensor([1.5, 1.0])}
    before, x = kind(given), getattr(given["batch"], name) if name in OF_BATCH else given[name]
    x = {
        "shape": lambda: x[:0],
        "strides": lambda: x.new_empty(*x.shape[:-1], 2 * x.shape[-1])[..., ::2],
        "dtype": lambda: x.double(),
        "alignment": lambda: x.new_empty(x.numel() + 1)[1:].view(x.shape),
        "none": lambda: None,
    }[change]()
    if name in OF_BATCH:
        setattr(given["batch"], name, x)
    else:
        given[name] = x
    without = change == "none" and name in ("q", "cache", *OF_BATCH)
    assert before is not None and kind(given) != before and (kind(given) is None) == without


@pytest.mark.parametrize(
    "change",
    [
        {"scale": 0.25}, {"window": (16, -1)}, {"softcap": 4.0}, {"softcap": 5}, {"window": (17, -1.0)}, {"columns": 32},
        {"dtype": torch.float16},
    ],
    ids=str,
)  # fmt: skip
def test_kinds_differ_by_any_value(change):
    given, names = a_call(), {field.name for field in dataclasses.fields(RULE)}
    rule = dataclasses.replace(RULE, **{name: x for name, x in change.items() if name in names})
    others = {name: x for name, x in change.items() if name not in names}
    assert None is not kind(given) != kind(given | {"rule": rule} | others) is not None


@pytest.mark.parametrize("name", ["max_query_len", "max_seq_len"])
def test_kinds_differ_by_longest_lengths(name, monkeypatch):
    given = a_call()
    kinds = {kind(given)}
    setattr(given["batch"], name, getattr(given["batch"], name) + 1)
    kinds.add(kind(given))
    monkeypatch.setenv("FFPA_WORKSPACE_MB", "3")
    kinds.add(kind(given))
    assert len(kinds) == 3 and None not in kinds
    setattr(given["batch"], name, torch.tensor(3))
    assert kind(given) is None


def test_one_scale_of_both_is_a_kind():
    given = eight_bits()
    given["k_scale"] = given["v_scale"].clone()
    assert kind(given) != kind(given | {"k_scale": given["v_scale"]})


def test_a_batch_is_settled_once_and_anew_when_it_changes():
    wanted, given = result(a_call()), a_call()
    batch = given["batch"]
    step, lengths = batch.step, batch.seq_lens
    assert batch.step is step and step.kind is not None
    lengths.resize_(1)
    for _ in range(2):  # nobody else has this step's views
        again.forget_all()
        assert batch.step is step and torch.equal(result(given), wanted)
    batch.block_table, batch.seq_lens = batch.block_table.clone(), lengths.resize_(2)
    assert batch.step is not step and batch.step.tensors[2].data_ptr() == batch.block_table.data_ptr()
    assert dataclasses.replace(batch, max_seq_len=7).step.longest[1] == 7 != batch.step.longest[1]


class Subclass(torch.Tensor):
    pass


def test_calls_that_are_not_plain_have_no_kind(monkeypatch):
    given = a_call()
    assert kind(given) is not None
    for change in (
        {"q": torch._neg_view(given["q"])}, {"out": given["out"].as_subclass(Subclass)},
        {"cache": given["cache"].clone().requires_grad_()}, {"q": torch.nn.Parameter(given["q"], False)},
    ):  # fmt: skip
        assert kind(given | change) is None
    with torch.autocast("cpu", BF16):
        assert kind(given) is None
        assert kind(settled := a_call()) is None
    assert kind(settled) is None  # the step was settled while there was work
    given["batch"].seq_lens = given["batch"].seq_lens.as_subclass(Subclass)
    assert kind(given) is None
    monkeypatch.setenv("FFPA_CHECK", "1")
    assert kind(a_call()) is None


@pytest.mark.parametrize("name", ["q", "cache", "sinks"])
@pytest.mark.parametrize("first", ["out", "other"])
def test_results_lie_apart_from_what_is_read(name, first):
    result(a_call())
    given = a_call()
    x, out = SINKS if name == "sinks" else given[name], given["out"]
    memory = torch.zeros(x.nbytes + out.nbytes, dtype=torch.uint8)
    at_x, at_out = (out.nbytes - 16, 0) if first == "out" else (0, x.nbytes - 16)
    given["out"], x = (
        memory[at:].view(like.dtype).as_strided(like.shape, like.stride()) for at, like in ((at_out, out), (at_x, x))
    )
    before = kind(a_call())
    given |= {"rule": dataclasses.replace(RULE, sinks=x)} if name == "sinks" else {name: x}
    assert kind(given) == before
    with pytest.raises(ValueError, match="`out` overlaps the memory of"):
        attention.attend(**given)


def test_what_never_lies_apart_is_not_kept():
    given = a_call()
    both = torch.zeros(4, 2, 4, 64, dtype=BF16)
    both[:, 0] = given["q"]
    wanted, known = result(given), len(again._known)
    for _ in range(2):
        assert torch.equal(result(given | {"q": both[:, 0], "out": both[:, 1]}), wanted)
    assert len(again._known) == known


def test_scales_with_gaps_are_not_kept():
    given = eight_bits()
    wanted, gaps = result(given).clone(), torch.stack([given["k_scale"], given["k_scale"] + 1], 1)[:, 0]
    for _ in range(2):
        assert torch.equal(result(given | {"k_scale": gaps}), wanted)


def no_memory(*args, **options):
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_first_call_without_memory_is_no_kind(monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(ops, "run", no_memory)
        result(a_call())
    wanted = result(a_call())
    monkeypatch.setattr(attention, "ffpa_varlen", None)
    assert torch.equal(result(a_call()), wanted)


def test_out_of_memory_is_explained(monkeypatch):
    result(a_call())
    monkeypatch.setattr(ops, "as_read", no_memory)
    monkeypatch.setattr(attention, "ffpa_varlen", None)
    with pytest.raises(torch.OutOfMemoryError, match="ffpa_attn"):
        attention.attend(**a_call())
