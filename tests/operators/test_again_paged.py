"""A kind of call of keys in pages that was seen before takes one lookup, and gives what its first call gave."""

import numpy as np
import pages
import pytest
import torch
from ffpa_attn import ffpa_varlen, ffpa_with_kvcache
from ffpa_attn.checks import page_checks
from ffpa_attn.operators import again, again_paged, ops
from test_again import no_planning

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
ROWS, LENGTHS = (3, 1), (40, 21)


@pytest.fixture(autouse=True)
def on_the_device(monkeypatch):
    """Nothing is known, and tables and lengths are not read, as on a GPU."""
    pages.forget_and_read_nothing(monkeypatch)


def a_pool(device, dtype=BF16, layout="NHD", seed=0, **options):
    pool = pages.make(LENGTHS, more=4, layout=layout, seed=seed, device=device, **options)
    k, v = (x.nan_to_num().to(dtype) for x in pool[:2])
    return pool._replace(k=k, v=k[..., : v.shape[-1]] if layout == "latent" else v)


def of_varlen(pool, q, cu, **options) -> dict:
    return dict(
        q=q, k=pool.k, v=pool.v, cu_seqlens_q=cu, cu_seqlens_k=None, max_seqlen_q=4, max_seqlen_k=60, block_table=pool.table,
        seqused_k=pool.used, causal=True, **options,
    )  # fmt: skip


def varlen(device, seed=0, dtype=BF16, **options):
    q, cu = pages.queries(ROWS, seed=seed, device=device)
    return ffpa_varlen, of_varlen(a_pool(device, dtype, seed=seed), q, cu, **options)


def eight_bits(device, seed=0, **options):
    scales = torch.tensor([0.5, 2.0], device=device) + seed, torch.tensor([1.5], device=device)
    return varlen(device, seed, E4M3, k_scale=scales[0], v_scale=scales[1], **options)


def latent(device, seed=0):
    pool, (q, cu) = a_pool(device, layout="latent", seed=seed, heads=1, d_v=48), pages.queries(ROWS, device=device)
    return ffpa_varlen, of_varlen(pool, q, cu)


def cache(device, seed=0, dtype=BF16, **options):
    pool = a_pool(device, dtype, seed=seed)
    q = torch.randn(2, 1, 4, 64, generator=torch.Generator().manual_seed(seed)).to(device, BF16)
    given = {"q": q, "k_cache": pool.k, "v_cache": pool.v, "cache_seqlens": pool.used, "block_table": pool.table}
    return ffpa_with_kvcache, given | options


def appended(device, seed=0, dtype=BF16, **options):
    function, given = cache(device, seed, dtype, **options)
    k, v = torch.randn(2, 2, 3, 2, 64, generator=torch.Generator().manual_seed(seed)).to(device, BF16).unbind(0)
    return function, given | {"k": k, "v": v}


def appended_packed(device, seed=0):
    function, given = appended(device, seed)
    rows = {name: given[name].flatten(0, 1)[:4] for name in ("k", "v")}
    offsets = torch.tensor([0, 3, 4] if seed else [0, 1, 4], dtype=torch.int32, device=device)
    return function, given | rows | {"cu_seqlens_k_new": offsets}


def appended_without_pages(device, seed=0):
    function, given = appended(device, seed)
    caches = {name: given[name][:2].repeat(1, 4, 1, 1) for name in ("k_cache", "v_cache")}
    left = torch.tensor([seed, 3], dtype=torch.int32, device=device)
    return function, given | caches | {"block_table": None, "cache_leftpad": left}


def appended_latents(device, seed=0):
    function, given = appended(device, seed)
    return function, given | {"v_cache": given["k_cache"][..., :48], "v": given["k"][..., :48]}


def appended_eight_bits(device, seed=0):
    return appended(device, seed, E4M3, k_scale=0.5 + seed, v_scale=torch.tensor([0.5, 2.0], device=device))


def with_sinks(device, seed=0):
    return varlen(device, seed, sinks=torch.tensor([0.5, -1.0, 3.0, float(seed)], device=device), return_lse=True)


def into_out(device, seed=0):
    return eight_bits(device, seed, out=torch.empty(sum(ROWS), 4, 64, dtype=BF16, device=device), return_lse=True)


CALLS = [
    varlen, eight_bits, latent, with_sinks, into_out, cache, appended, appended_packed, appended_without_pages,
    appended_latents, appended_eight_bits,
]  # fmt: skip


def written(given) -> list[torch.Tensor]:
    return [given[name] for name in ("k_cache", "v_cache", "out") if given.get(name) is not None]


def assert_equal(found, wanted) -> None:
    found, wanted = (x if isinstance(x, (tuple, list)) else (x,) for x in (found, wanted))
    assert all(torch.equal(x.float(), y.float()) for x, y in zip(found, wanted, strict=True))


@pytest.mark.parametrize("make", CALLS, ids=lambda make: make.__name__)
def test_a_second_call_plans_nothing(make, device, monkeypatch):
    """It reads no tensor on the host either, and writes what it should."""
    wanted = []
    for seed in range(2):
        function, given = make(device, seed)
        again._known.clear()
        wanted.append((function(**given), written(given)))
    calls = [make(device, seed)[1] for seed in range(2)]
    with monkeypatch.context() as patch:
        no_planning(patch)
        for name in ("varlen", "of_cache", "paged", "changed", "appended"):
            patch.setattr(page_checks, name, None)
        for name in ("tolist", "item", "cpu", "__bool__", "__int__", "__index__"):
            patch.setattr(torch.Tensor, name, None)
        found = [function(**given) for given in calls]
    for given, result, (want, changed) in zip(calls, found, wanted, strict=True):
        assert_equal(result, want)
        assert_equal(written(given), changed)
        assert "out" not in given or result[0] is given["out"]


TENSORS = [
    *((eight_bits, name) for name in ("q", "k", "v", "cu_seqlens_q", "block_table", "seqused_k", "k_scale", "v_scale")),
    *((with_sinks, "sinks"), (into_out, "out"), (appended_packed, "k"), (appended_packed, "v")),
    *((appended_packed, "cu_seqlens_k_new"), (appended_without_pages, "cache_leftpad")),
]


def as_a_call(given) -> again_paged.Call:
    names = {"k_pages": "k_cache", "v_pages": "v_cache", "seqused_k": "cache_seqlens", "leftpad_k": "cache_leftpad"}
    if "seqused_k" in given:
        names = {"k_pages": "k", "v_pages": "v", "k": None, "v": None}
    return again_paged.Call(*(given.get(names.get(name, name)) for name in again_paged.Call._fields))


ARGS = (True, "bottom_right", None, (-1, -1), 0.0, None, None, "f32", False, 4, 60)


@pytest.mark.parametrize("change", ["shape", "strides", "dtype", "alignment", "none"])
@pytest.mark.parametrize("make, name", TENSORS, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_kinds_differ_by_any_tensor(make, name, change):
    given = make("cpu")[1]
    before, x = again_paged.kind(as_a_call(given), ARGS), given[name]
    given[name] = {
        "shape": lambda: x[:0],
        "strides": lambda: x.new_empty(*x.shape[:-1], 2 * x.shape[-1])[..., ::2],
        "dtype": lambda: x.double(),
        "alignment": lambda: x.new_empty(x.numel() + 1)[1:].view(x.shape),
        "none": lambda: None,
    }[change]()
    if change == "none" and name in ("q", "k", "v") and make is eight_bits:
        assert again_paged.kind(as_a_call(given), ARGS) is None
    else:
        assert before is not None and again_paged.kind(as_a_call(given), ARGS) not in (None, before)


@pytest.mark.parametrize("which", range(len(ARGS)))
def test_kinds_differ_by_any_argument(which):
    call, args = as_a_call(varlen("cpu")[1]), list(ARGS)
    before = again_paged.kind(call, tuple(args))
    args[which] = [False, "top_left", 0.5, (3, -1), 2.0, 2, 1, "f16", True, 5, 61][which]
    assert again_paged.kind(call, tuple(args)) not in (None, before)


def test_kinds_differ_by_what_is_one():
    """V in K, and one scale of both, make another kind of call."""
    given = eight_bits("cpu")[1]
    given["v"], given["v_scale"] = given["k"].clone(), given["k_scale"].clone()
    kinds = {again_paged.kind(as_a_call(given), ARGS)}
    kinds.add(again_paged.kind(as_a_call(given | {"v": given["k"]}), ARGS))
    kinds.add(again_paged.kind(as_a_call(given | {"v_scale": given["k_scale"]}), ARGS))
    given = appended("cpu")[1]
    kinds.add(again_paged.kind(as_a_call(given), ARGS))
    kinds.add(again_paged.kind(as_a_call(given | {"v": given["k"]}), ARGS))
    assert len(kinds) == 5 and None not in kinds


def test_calls_that_are_not_plain_have_no_kind(monkeypatch):
    function, given = varlen("cpu")
    others = [
        {"return_max_logits": True}, {"window": [-1, -1]}, {"window": (-1.0, -1)}, {"causal": 1}, {"max_seqlen_k": 60.0},
        {"return_lse": 0}, {"cu_seqlens_k": given["cu_seqlens_q"]}, {"max_seqlen_q": None}, {"seqused_k": [1, 2]}, {"q": None},
        {"k": None}, {"sinks": [0.0]}, {"o": torch.empty(4, 4, 64, dtype=BF16), "out": torch.empty(4, 4, 64, dtype=BF16)},
        {"k_scale": 1.0}, {"k_scale": "one"}, {"block_table": None}, {"seqused_k": None}, {"unknown": 1},
        {"cu_seqlens_q": given["cu_seqlens_q"].long()},
    ]  # fmt: skip

    def answers() -> list:
        found = []
        for change in others:
            try:
                found.append(function(**given | change))
            except (TypeError, ValueError) as error:
                found.append(f"{type(error)} {error}")
        return found

    before = answers()
    assert sum(isinstance(x, str) for x in before) == len(others) - 2
    function(**given)
    known = dict(again._known)
    for first, second in zip(before, answers(), strict=True):
        assert first == second if isinstance(first, str) else all(map(torch.equal, first, second))
    with torch.autocast("cpu", BF16):
        function(**given)
    function(**given | {"q": torch._neg_view(given["q"])})
    with pytest.raises(NotImplementedError, match="`k` requires grad"):
        function(**given | {"k": given["k"].clone().requires_grad_()})
    monkeypatch.setenv("FFPA_CHECK", "1")
    function(**given)
    with pytest.raises(ValueError, match="seqused_k"):
        function(**given | {"seqused_k": given["seqused_k"] + 999})
    assert again._known == known


def test_what_is_never_kept_is_not_made(monkeypatch):
    """A number that may change, or a result among the rows of q, would be looked at in each call in vain."""
    function, given = varlen("cpu")
    both = torch.zeros(4, 2, 4, 64, dtype=BF16)
    both[:, 0] = given["q"]
    monkeypatch.setattr(again_paged, "_runner", None)
    wanted = function(**given | {"scale": np.float64(0.125)})
    assert torch.equal(function(**given | {"softcap": np.float64(0), "scale": 0.125}), wanted)
    for _ in range(2):
        assert torch.equal(function(**given | {"q": both[:, 0], "out": both[:, 1], "scale": 0.125}), wanted)
    assert not again._known


def test_a_cache_is_no_pool_of_ffpa_varlen():
    """A length that may be left away in the one call may not in the other."""
    function, given = varlen("cpu")
    names = {"k": "k_cache", "v": "v_cache", "seqused_k": "cache_seqlens"}
    of_cache = {names.get(name, name): x for name, x in given.items() if name not in ("cu_seqlens_k", "max_seqlen_k")}
    assert torch.equal(ffpa_with_kvcache(**of_cache), function(**given))
    with pytest.raises(TypeError, match="max_seqlen_k"):
        function(**given | {"max_seqlen_k": None})


def test_results_are_new_and_lie_apart():
    function, given = varlen("cpu")
    results = [function(**given) for _ in range(4)]
    assert len({x.data_ptr() for x in results}) == 4
    place = torch.empty_like(results[0])
    assert function(**given, o=place) is place and torch.equal(place, results[0])
    function, given = into_out("cpu")
    wanted = function(**given)[0].clone()
    for name in ("q", "k", "v"):  # the memory of each, once the kind is known
        out = given[name].view(-1).view(BF16)[: wanted.numel()].view(wanted.shape)
        with pytest.raises(ValueError, match=f"`out` overlaps the memory of `{name}`"):
            function(**given | {"out": out})
    assert torch.equal(function(**given)[0], wanted)


@pytest.mark.parametrize("first", ["q", "out"])
def test_a_result_that_overlaps_at_its_end_or_begin(first):
    function, given = into_out("cpu")
    function(**given)
    memory = torch.zeros(given["q"].numel() + 64, dtype=BF16)
    both = {"q": memory[64:], "out": memory[:-64]} if first == "out" else {"q": memory[:-64], "out": memory[64:]}
    with pytest.raises(ValueError, match="`out` overlaps the memory of `q`"):
        function(**given | {name: x.view(given["q"].shape) for name, x in both.items()})


def test_sinks_are_not_overwritten():
    function, given = with_sinks("cpu")
    out = torch.empty(4, 4, 64, dtype=BF16)
    function(**given, out=out)
    with pytest.raises(ValueError, match="`out` overlaps the memory of `sinks`"):
        function(**given | {"sinks": out.view(-1).view(torch.float32)[:4]}, out=out)


@pytest.mark.parametrize("pool", ["k_cache", "v_cache"])
@pytest.mark.parametrize("rows", ["k", "v"])
def test_new_rows_lie_apart_from_pages(rows, pool):
    function, given = appended("cpu")
    function(**given)
    x = given[pool]
    inside = x.view(-1)[: given[rows].numel()].view(given[rows].shape)
    before = [x.clone() for x in written(given)]
    with pytest.raises(ValueError, match=f"`{rows}` overlaps the memory of `{pool}`"):
        function(**given | {rows: inside})
    assert_equal(written(given), before)


def test_pages_of_one_pool_are_as_far_apart_as_those_that_were_checked():
    """Where they are not, they are checked anew; calls of either distance stay right."""
    function, given = appended("cpu")
    n = len(given["k_cache"])
    one = torch.cat([given["k_cache"], given["v_cache"], given["v_cache"]])
    of_one = given | {"k_cache": one[:n], "v_cache": one[n : 2 * n]}
    wanted = function(**given)
    assert_equal(function(**of_one), wanted)
    shifted = one.view(-1)[64:].as_strided(given["v_cache"].shape, given["v_cache"].stride(), 64)
    with pytest.raises(ValueError, match="`v_cache` overlaps the memory of `k_cache`"):
        function(**of_one | {"v_cache": shifted})
    interleaved = torch.stack([given["k_cache"], given["v_cache"]], 1)
    near = given | {"k_cache": interleaved[:, 0], "v_cache": interleaved[:, 1]}
    assert_equal([function(**near), function(**near)], [wanted] * 2)
    far = torch.cat([interleaved, interleaved])
    for first in (0, 1):
        shifted = given | {"k_cache": far[:n, 0], "v_cache": far[first : n + first, 1 - first]}
        if first:
            with pytest.raises(ValueError, match="`v_cache` overlaps"):
                function(
                    **shifted
                    | {"v_cache": far.view(-1)[64:].as_strided(near["v_cache"].shape, near["v_cache"].stride())}
                )
        else:
            assert_equal(function(**shifted), wanted)


def test_kinds_are_bounded(monkeypatch):
    monkeypatch.setattr(again, "_MOST_KINDS", 3)
    function, given = varlen("cpu")
    for longest in range(50, 60):
        function(**given | {"max_seqlen_k": longest})
        assert len(again._known) <= 3


def test_out_of_memory_is_explained(monkeypatch):
    function, given = varlen("cpu")
    function(**given)

    def no_memory(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ops, "empty_like", no_memory)
    with pytest.raises(torch.OutOfMemoryError, match="ffpa_attn"):
        function(**given)


def test_inference_mode_leaves_nothing_behind():
    function, given = varlen("cpu")
    with torch.inference_mode():
        function(**given)
    for _ in range(2):
        assert not function(**given).is_inference()
