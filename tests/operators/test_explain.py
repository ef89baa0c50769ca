"""Tests that what explain says of packed sequences, keys in pages and caches is what calls with them run."""

import contextlib
import itertools

import pages
import pytest
import torch
from ffpa_attn import env, explain, ffpa_varlen, ffpa_with_kvcache
from ffpa_attn.backends.choice import choose
from ffpa_attn.operators import again, ops
from ffpa_attn.testing import emulate
from test_eight_bit_caches import eight_bits
from torch._subclasses.fake_tensor import FakeTensorMode

BF16, F16 = torch.bfloat16, torch.float16
# Each has the kernels that run in the emulator, if that is asked for, and FFPA_BACKEND.
WHERE = [
    (None, "auto"), (None, "mma"), ("sm_80", "auto"), ("sm_86", "mma"), ("sm_90a", "hopper"), ("sm_80", "hopper"),
]  # fmt: skip
RULES = [
    {},
    {"causal": True, "return_lse": True},
    {"window": (9, 2), "softcap": 4.0, "return_max_logits": True},
    {"causal": "top_left", "scale": -0.3},
    {"acc": "f16", "num_stages": 2},
    {"level": 2},
]


@pytest.fixture(params=WHERE, ids=str)
def somewhere(request, monkeypatch, device):
    """Gives the device of tensors, in every place and with every backend that a call may be forced to."""
    emulated, backend = request.param
    if emulated and device != "cpu":
        pytest.skip("the emulator takes tensors of the CPU")
    monkeypatch.setenv("FFPA_BACKEND", backend)
    with emulate(emulated) if emulated else contextlib.nullcontext():
        yield device


@pytest.fixture
def is_what_runs(monkeypatch):
    """Gives a function which finds that a call chooses what explain says of it, or that both are refused in the same
    words; nothing is computed. `asked` is what explain is given where the call has other names for it.
    """
    ran = []
    monkeypatch.setattr(ops, "run", lambda plan, *args, **more: ran.append(plan.choice))
    monkeypatch.setattr(ops, "_plans", {})

    def outcome(function, *tensors, **given):
        try:
            return function(*tensors, **given)
        except (NotImplementedError, ValueError) as error:  # a level beside FFPA_BACKEND is a ValueError
            return f"{type(error).__name__}: {error}"

    def compare(function, *tensors, asked=None, **given):
        again.forget_all()
        said, ran[:] = outcome(explain, *tensors, **(given if asked is None else asked)), []
        done = outcome(function, *tensors, **given)
        if isinstance(done, str):
            assert said == done
            return None
        assert said == ran[-1] and str(said) == str(ran[-1])
        return said

    return compare


def t(*shape, dtype=BF16, device="cpu"):
    return torch.randn(shape).to(device, dtype)


def i32(*values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


# (d, d_v, heads of q, heads of k, type, lengths of q, lengths of k)
PACKED = [
    (64, 64, 4, 2, F16, (70, 30, 1), (70, 30, 1)),
    (128, 96, 8, 1, BF16, (1, 1, 1, 2), (300, 5, 0, 40)),
    (512, 512, 4, 4, F16, (70, 130), (200, 130)),
    (1032, 1024, 2, 1, BF16, (64, 3), (20, 90)),
]


def packed(case, device="cpu"):
    """Returns q, k and v, and how they are packed."""
    d, d_v, heads_q, heads_k, dtype, rows, keys = case
    of_q, of_k = (i32(*itertools.accumulate(n, initial=0), device=device) for n in (rows, keys))
    tensors = t(sum(rows), heads_q, d), t(sum(keys), heads_k, d), t(sum(keys), heads_k, d_v)
    how = {"cu_seqlens_q": of_q, "cu_seqlens_k": of_k, "max_seqlen_q": max(rows), "max_seqlen_k": max(keys)}
    return [x.to(device, dtype) for x in tensors], how


@pytest.mark.parametrize("case", PACKED, ids=str)
def test_packed_sequences(case, somewhere, is_what_runs):
    (q, k, v), how = packed(case, somewhere)
    sinks, out = t(q.shape[1], device=somewhere), q.new_empty(*q.shape[:2], v.shape[-1])
    for more in (*RULES, {"sinks": sinks}, {"out": out}, {"max_seqlen_q": 10**6}):
        is_what_runs(ffpa_varlen, q, k, v, **how | more)


def gradients(*tensors, **given):
    ffpa_varlen(*tensors, **given).sum().backward()


@pytest.mark.parametrize("case", PACKED, ids=str)
def test_gradients_of_packed_sequences(case, somewhere, is_what_runs):
    tensors, how = packed(case, somewhere)
    sinks = t(case[2], dtype=torch.float32, device=somewhere)
    for rule in RULES:
        given = {**how, **rule, "sinks": sinks, "return_lse": False, "return_max_logits": False}
        for x in tensors:
            x.requires_grad_()
        if said := is_what_runs(ffpa_varlen, *tensors, **given):
            assert said.problem.needs_lse
            is_what_runs(gradients, *tensors, asked={**given, "direction": "backward"}, **given)
        given["sinks"] = sinks.clone().requires_grad_()
        is_what_runs(ffpa_varlen, *(x.detach() for x in tensors), **given)


# (d, d_v, layout, rows of a page, rows of each sequence, keys, heads of q and of k, 8 bits)
PAGED = [
    (64, 48, "NHD", 16, (1, 1, 1), (150, 200, 40), (8, 2), False),
    (128, 128, "interleaved", 64, (70, 1, 30), (150, 600, 129), (4, 2), False),
    (512, 512, "HND", 16, (200, 300), (200, 400), (4, 4), False),
    (576, 512, "latent", 64, (1, 2), (270, 300), (16, 1), False),
    (576, 512, "latent", 64, (1, 2), (270, 300), (16, 1), True),
    (128, 128, "beside", 48, (1, 1), (700, 40), (8, 1), True),
    (512, 512, "NHD", 16, (130, 90), (300, 200), (4, 2), True),
    (1032, 1024, "NHD", 16, (1, 40), (300, 200), (2, 1), False),
    (72, 40, "HND", 16, (3, 2), (70, 30), (4, 2), True),
]
SCALES = [{}, {"k_scale": 0.5, "v_scale": 0.5}, {"k_scale": 0.5, "v_scale": 0.25}]


def paged(case, device="cpu"):
    """Returns a pool, packed q, and how it is packed and where its keys are."""
    d, d_v, layout, rows_of_page, rows, keys, (heads_q, heads_k), in_8_bits = case
    pool = pages.make(keys, rows_of_page, heads_k, d, d_v, layout, more=4, dtype=BF16 if in_8_bits else F16)
    pool = (eight_bits(pool) if in_8_bits else pool).to(device)
    q, offsets = pages.queries(rows, heads_q, d, dtype=F16, device=device)
    how = {"cu_seqlens_q": offsets, "cu_seqlens_k": None, "max_seqlen_q": max(rows), "max_seqlen_k": max(keys)}
    return pool, q, {**how, "block_table": pool.table, "seqused_k": pool.used}


@pytest.mark.parametrize("case", PAGED, ids=str)
def test_keys_in_pages(case, somewhere, is_what_runs):
    pool, q, how = paged(case, somewhere)
    of_scales = [*SCALES, {"v_scale": torch.ones(1, device=somewhere)}] if case[-1] else SCALES[:1]
    for rule, scales in itertools.product(RULES, of_scales):
        said = is_what_runs(ffpa_varlen, q, pool.k, pool.v, **how | rule | scales)
        assert said is None or (said.problem.pages and bool(said.problem.cache) == case[-1])
    for more in ({"sinks": t(q.shape[1], device=somewhere)}, {"out": q.new_empty(*q.shape[:2], case[1])}):
        is_what_runs(ffpa_varlen, q, pool.k, pool.v, **how | more)


@pytest.mark.parametrize("case", PAGED, ids=str)
def test_caches(case, somewhere, is_what_runs):
    """As ffpa_with_kvcache, explain takes rows of q that are not packed, and lengths that the cache bounds."""
    pool, q, how = paged(case, somewhere)
    batch, of_q = len(pool.used), {name: how[name] for name in ("cu_seqlens_q", "max_seqlen_q")}
    few = t(batch, 3, *q.shape[1:], dtype=F16, device=somewhere)
    k = pool.k.new_zeros(batch + 1, how["max_seqlen_k"] + 5, *pool.k.shape[2:])
    v = k[..., : case[1]] if case[2] == "latent" else k[..., : case[1]].clone()
    used, index = i32(*[9] * batch, device=somewhere), i32(*range(batch), device=somewhere)
    in_table, in_cache = (pool.k, pool.v), (k, v)
    table, sinks = {"block_table": pool.table}, t(q.shape[1], device=somewhere)
    calls = [
        (few, in_table, table, table, {}),
        (few[:, :1], in_table, table, table, {"max_seqlen_k": how["max_seqlen_k"]}),
        (q, in_table, table, table, of_q),
        (few, in_cache, {}, {}, {}),
        (few[:, :1], in_cache, {"cache_batch_idx": index}, {"block_table": index[:, None]}, {"max_seqlen_k": 16}),
        (few, in_cache, {"cache_leftpad": index}, {}, {"sinks": sinks}),
    ]
    for (rows, kept, of_call, of_explain, more), rule in itertools.product(calls, RULES[:4]):
        lengths = pool.used if kept is in_table else used
        given = {"cache_seqlens": lengths, **of_call, **more, **rule}
        asked = {"seqused_k": lengths, **of_explain, **more, **rule}
        is_what_runs(ffpa_with_kvcache, rows, *kept, asked=asked, **given)


@pytest.mark.parametrize("case", PAGED, ids=str)
def test_new_rows_change_nothing(case, device, is_what_runs):
    pool, q, _ = paged(case, device)
    q = t(len(pool.used), 2, *q.shape[1:], dtype=F16, device=device)
    k = t(len(pool.used), 2, *pool.k.shape[2:], dtype=F16, device=device)
    v = k[..., : case[1]] if case[2] == "latent" else k[..., : case[1]].clone()
    of_pages = {"block_table": pool.table, "causal": True}
    asked, given = of_pages | {"seqused_k": pool.used}, of_pages | {"cache_seqlens": pool.used, "k": k, "v": v}
    is_what_runs(ffpa_with_kvcache, q, pool.k, pool.v, asked=asked, **given)


def meta(*tensors):
    """Yields them without memory; V that is in K stays there."""
    made = {}
    for x in tensors:
        of_x = x.untyped_storage()
        empty = torch.empty(of_x.nbytes() // x.element_size(), dtype=x.dtype, device="meta")
        yield made.setdefault(of_x.data_ptr(), empty).as_strided(x.shape, x.stride(), x.storage_offset())


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90"])
def test_of_a_gpu_that_is_not_here(arch, is_what_runs):
    """Tensors without memory ask, of a GPU, about the very calls that run here."""

    def check(*tensors, **given):
        here = is_what_runs(ffpa_varlen, *tensors, **given).problem
        given = {name: next(meta(x)) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
        there = explain(*meta(*tensors), **given, arch=arch)
        problem = here._replace(device="cuda", arch=arch, supposed=there.problem.supposed)
        assert there == choose(problem, env.run_flags()) and f"on {arch}" in str(there)
        return given

    for case in PACKED:
        tensors, how = packed(case)
        given = check(*tensors, **how)
        there = explain(*meta(*tensors), **given, arch=arch, direction="backward")
        assert there == explain(*tensors, **how, arch=arch, direction="backward")
    for case in PAGED:
        pool, q, how = paged(case)
        check(q, pool.k, pool.v, **how, **SCALES[case[-1]])


@pytest.mark.parametrize("inside", [False, True])
def test_fake_tensors(inside):
    """A GPU that is not here needs no memory, for numbers as scales neither."""
    with FakeTensorMode() as mode:
        q = torch.empty(7, 4, 512, dtype=F16, device="cuda")
        k = torch.empty(5, 16, 2, 512, device="cuda").to(torch.float8_e4m3fn)
        table, used, offsets = (torch.empty(n, dtype=torch.int32, device="cuda") for n in ((2, 3), (2,), (3,)))
    of_pages = {"block_table": table, "seqused_k": used, "k_scale": 0.5, "v_scale": 0.5}
    of_k = {"cu_seqlens_k": offsets, "max_seqlen_k": 5}
    with mode if inside else contextlib.nullcontext():
        said = explain(q, k, k, cu_seqlens_q=offsets, max_seqlen_q=4, **of_pages, arch="sm_80").problem
        assert said.cache == "e4m3" and said.values_in_keys and (said.batch, said.n_q, said.n_k) == (2, 4, 48)
        said = explain(q, q, q, cu_seqlens_q=offsets, max_seqlen_q=4, **of_k, arch="sm_90").problem
        assert said.packed == (7, 7) and (said.batch, said.n_q, said.n_k) == (2, 4, 5)


def test_under_autocast(device):
    tensors, of_packed = packed(PACKED[0], device)
    pool, q, how = paged(PAGED[4], device)
    with torch.autocast(device, dtype=F16):
        assert explain(*(x.float() for x in tensors), **of_packed) == explain(*tensors, **of_packed)
        assert explain(q.float(), pool.k, pool.v, **how) == explain(q, pool.k, pool.v, **how)


def test_nothing_is_read():
    """What is no offset, no length and no page is as good as another."""
    tensors, of_packed = packed(PACKED[0])
    pool, q, of_pages = paged(PAGED[4])
    for args, how in ((tensors, of_packed), ((q, pool.k, pool.v), of_pages | {"k_scale": torch.ones(1)})):
        odd = {name: x - 1000 if isinstance(x, torch.Tensor) else x for name, x in how.items()}
        assert explain(*args, **odd) == explain(*args, **how)


# ---- what is refused ----


def of_packed(**changes):
    (q, k, v), how = packed(PACKED[0])
    return explain(**{"q": q, "k": k, "v": v, **how, **changes})


def of_pages(**changes):
    pool, q, how = paged(PAGED[1])
    return explain(**{"q": q, "k": pool.k, "v": pool.v, **how, **changes})


def of_cache(**changes):
    given = {"q": t(2, 3, 4, 64), "k": t(2, 40, 2, 64), "v": t(2, 40, 2, 64), "seqused_k": i32(3, 40)}
    return explain(**given | changes)


def of_dense(**changes):
    return explain(*(t(2, 4, 10, 64) for _ in range(3)), **changes)


MASK = torch.ones(1, 1, dtype=torch.bool)
BAD = [
    (of_packed, {"cu_seqlens_q": None}, TypeError, "`cu_seqlens_q` is None .NoneType.; pass a torch.Tensor"),
    (of_packed, {"cu_seqlens_k": None}, TypeError, "`cu_seqlens_k` is None .NoneType.; pass a torch.Tensor"),
    (of_packed, {"max_seqlen_q": None}, TypeError, "`max_seqlen_q` is None .NoneType.; pass the longest length as an int"),
    (of_packed, {"max_seqlen_k": None}, TypeError, "`max_seqlen_k` is None .NoneType.; pass the longest length as an int"),
    (of_packed, {"max_seqlen_k": -1}, ValueError, "`max_seqlen_k` is -1"),
    (of_packed, {"mask": MASK}, ValueError, "`mask` is given beside `cu_seqlens_q`; call ffpa with it, for one sequence"),
    (of_packed, {"layout": "BNHD"}, ValueError, "`layout` is given beside `cu_seqlens_q`; leave it away"),
    (of_packed, {"layout": "NHD"}, ValueError, "`layout` is 'NHD'; allowed"),
    (of_packed, {"k_scale": 0.5}, ValueError, "`k_scale` is given without `block_table`"),
    (of_packed, {"q": t(1, 101, 4, 64)}, ValueError, "`q` has 4 dims"),
    (of_packed, {"q": t(101, 64, 4, dtype=F16).mT}, ValueError, r"`q` has stride 4.*q.contiguous\(\)"),
    (of_packed, {"direction": "both"}, ValueError, "`direction` is 'both'"),
    (of_packed, {"out": t(101, 4, 72, dtype=F16)}, ValueError, "`out` has shape"),
    (of_dense, {"max_seqlen_k": 10}, TypeError, "`cu_seqlens_q` is None"),
    (of_dense, {"cu_seqlens_k": i32(0, 10)}, TypeError, "`cu_seqlens_q` is None"),
    (of_dense, {"v_scale": 0.5}, ValueError, "`v_scale` is given without `block_table`"),
    (of_dense, {"block_table": i32(0, 1)[None]}, ValueError, r"`block_table` is given without `seqused_k`.*cu_seqlens_k.diff\(\)"),
    (of_pages, {"seqused_k": None}, ValueError, r"`block_table` is given without `seqused_k`.*cu_seqlens_k.diff\(\)"),
    (of_pages, {"seqused_k": 20}, TypeError, "`seqused_k` is 20 .int.; pass a torch.Tensor"),
    (of_pages, {"cu_seqlens_k": i32(0, 1, 2, 3)}, ValueError, "`cu_seqlens_k` and `block_table` are both given.*=None"),
    (of_pages, {"mask": MASK}, ValueError, "`mask` is given beside `seqused_k`; call ffpa with it"),
    (of_pages, {"layout": "BNHD"}, ValueError, "`layout` is given beside `seqused_k`; leave it away"),
    (of_pages, {"direction": "backward"}, NotImplementedError, "`direction` is 'backward', and attention to keys in pages has no"),
    (of_pages, {"q": t(101, 4, 128, dtype=F16).requires_grad_()}, NotImplementedError, "`q` requires grad"),
    (of_pages, {"max_seqlen_q": None}, ValueError, "`max_seqlen_q` is None but `cu_seqlens_q` is given"),
    (of_pages, {"max_seqlen_k": 1.0}, TypeError, r"`max_seqlen_k` is 1.0 \(float\)"),
    (of_pages, {"cu_seqlens_q": None}, ValueError, r"`q` has 3 dims.*or \[T, H, D\] with cu_seqlens_q"),
    (of_pages, {"cu_seqlens_q": [0, 1]}, TypeError, "`cu_seqlens_q` is list; pass a torch.Tensor"),
    (of_pages, {"block_table": [[0, 1], [2, 3]]}, TypeError, "`block_table` is list; pass a torch.Tensor"),
    (of_pages, {"block_table": i32(0, 1)}, ValueError, r"`block_table` has 1 dims.*\[B, entries\]"),
    (of_pages, {"block_table": i32(0, 1)[None]}, ValueError, "`block_table` has 1 sequences but `cu_seqlens_q` has 3"),
    (of_pages, {"k": t(80, 2, 128)}, ValueError, r"`k` has 3 dims.*\[pages, rows, H, D\]"),
    (of_pages, {"v": t(80, 2, 128)}, ValueError, r"`v` has 3 dims.*\[pages, rows, H, D\]"),
    (of_pages, {"k": t(5, 24, 2, 128, dtype=F16), "v": t(5, 24, 2, 128, dtype=F16)}, ValueError, "`k` has pages of 24 rows"),
    (of_pages, {"k_scale": "x"}, TypeError, "`k_scale` is 'x'"),
    (of_pages, {"k_scale": 0.5}, ValueError, "`k_scale` is given but `k` has dtype torch.float16"),
    (of_cache, {"max_seqlen_q": 3}, ValueError, "`max_seqlen_q` is given without `cu_seqlens_q`"),
    (of_cache, {"cu_seqlens_k": i32(0, 1, 2)}, ValueError, "`cu_seqlens_k` and `seqused_k` are both given"),
    (of_cache, {"k": t(1, 40, 2, 64), "v": t(1, 40, 2, 64)}, ValueError, "`k` has 1 sequences but `q` has 2"),
    (of_cache, {"seqused_k": i32(1, 2, 3)}, ValueError, "`seqused_k` has 3 sequences but `q` has 2"),
    (of_cache, {"v": t(2, 40, 64, 2).mT}, ValueError, r"`v` has stride 2.*v.contiguous\(\)"),
    (of_cache, {"q": t(2, 3, 4, 64).to("meta"), "arch": "sm_90"}, ValueError, "`k` is on cpu but `q` is on meta"),
]  # fmt: skip


@pytest.mark.parametrize(
    "of, changes, error, message", BAD, ids=[f"{of.__name__}-{message[:40]}" for of, _, _, message in BAD]
)
def test_bad_input_is_named(of, changes, error, message):
    with pytest.raises(error, match=message) as caught:
        of(**changes)
    assert "_pages`" not in str(caught.value)


@pytest.mark.parametrize("of", [of_packed, of_pages, of_cache, of_dense])
def test_good_input(of):
    assert of().kernel
