"""What a caller gets wrong about keys in pages and caches raises a sentence that names the argument, and nothing is written."""

import re

import ffpa_attn
import pages
import pytest
import torch
from ffpa_attn import ffpa_varlen, ffpa_with_kvcache, flash_attn_with_kvcache

BF16, F16, F32, I64 = torch.bfloat16, torch.float16, torch.float32, torch.int64


def t(*shape, dtype=BF16):
    return torch.randn(shape).to(dtype)


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def table(*rows):
    return torch.tensor(rows, dtype=torch.int32)


def varlen(**changes):
    """Calls ffpa_varlen with two sequences of 20 and 32 keys in pages of 16 rows; arguments may be others."""
    given = {
        "q": t(7, 4, 64), "k": t(5, 16, 2, 64), "v": t(5, 16, 2, 64), "cu_seqlens_q": i32(0, 3, 7), "cu_seqlens_k": None,
        "max_seqlen_q": 4, "max_seqlen_k": 32, "block_table": table([0, 1], [2, 3]), "seqused_k": i32(20, 32),
    }  # fmt: skip
    return ffpa_varlen(**given | changes)


def cached(**changes):
    """Calls ffpa_with_kvcache with new rows for two sequences in pages."""
    given = {
        "q": t(2, 3, 4, 64), "k_cache": t(5, 16, 2, 64), "v_cache": t(5, 16, 2, 64), "k": t(2, 3, 2, 64), "v": t(2, 3, 2, 64),
        "cache_seqlens": i32(17, 29), "block_table": table([0, 1], [2, 3]),
    }  # fmt: skip
    return ffpa_with_kvcache(**given | changes)


def contiguous(**changes):
    """Calls ffpa_with_kvcache with a cache without pages."""
    return cached(**{"block_table": None, "k_cache": t(3, 40, 2, 64), "v_cache": t(3, 40, 2, 64), **changes})


def packed(**changes):
    """Calls it with packed queries and new rows."""
    rows = {"q": t(5, 4, 64), "k": t(5, 2, 64), "v": t(5, 2, 64), "max_seqlen_q": 3}
    return cached(**rows | {"cu_seqlens_q": i32(0, 2, 5), "cu_seqlens_k_new": i32(0, 2, 5)} | changes)


def flash(**changes):
    given = {"q": t(2, 3, 4, 64), "k_cache": t(2, 40, 2, 64), "v_cache": t(2, 40, 2, 64)}
    return flash_attn_with_kvcache(**given | changes)


def in_one(d=64):
    """Returns caches that overlap, and are not of one beginning."""
    whole = t(6, 16, 2, d)
    return {"k_cache": whole[:5], "v_cache": whole[1:]}


def over(name):
    """Returns a cache that is its own new rows, or the place of results."""
    cache = t(5, 16, 2, 64)
    return {"k_cache": cache, name: cache[:2, :3]}


def expanded(*shape):
    return t(1, *shape[1:]).expand(*shape)


BAD = [
    (varlen, {"block_table": None}, ValueError, "`seqused_k` is given without `block_table`.*leave it away"),
    (varlen, {"seqused_k": None}, ValueError, r"`block_table` is given without `seqused_k`.*cu_seqlens_k.diff\(\)"),
    (varlen, {"cu_seqlens_k": i32(0, 20, 52)}, ValueError, "`cu_seqlens_k` and `block_table` are both given.*=None"),
    (varlen, {"cu_seqlens_q": None}, TypeError, "`cu_seqlens_q` is None .NoneType.; pass a torch.Tensor"),
    (varlen, {"block_table": [[0, 1], [2, 3]]}, TypeError, "`block_table` is list; pass a torch.Tensor"),
    (varlen, {"seqused_k": 20}, TypeError, "`seqused_k` is 20 .int.; pass a torch.Tensor"),
    (varlen, {"block_table": table([0, 1], [2, 3]).to(I64)}, TypeError, r"`block_table` has dtype torch.int64.*block_table.to\("),
    (varlen, {"block_table": i32(0, 1)}, ValueError, r"`block_table` has 1 dims.*\[B, entries\]"),
    (varlen, {"block_table": table([0, 1])}, ValueError, "`block_table` has 1 sequences but `cu_seqlens_q` has 2"),
    (varlen, {"block_table": table([0, 2], [1, 3]).T}, ValueError, r"`block_table` has stride 2 in its last dim.*contiguous\(\)"),
    (varlen, {"block_table": table([0, 1], [2, 3]).to("meta")}, ValueError, "`block_table` is on meta but `q` is on cpu"),
    (varlen, {"seqused_k": i32(20, 32).to(I64)}, TypeError, "`seqused_k` has dtype torch.int64; it must be torch.int32"),
    (varlen, {"seqused_k": i32(20, 32, 1)}, ValueError, "`seqused_k` has 3 sequences but `cu_seqlens_q` has 2"),
    (varlen, {"seqused_k": i32(20, 32)[None]}, ValueError, r"`seqused_k` has 2 dims.*\[B\]"),
    (varlen, {"seqused_k": i32(20, 0, 32, 0)[::2]}, ValueError, "`seqused_k` is not contiguous"),
    (varlen, {"k": t(5, 24, 2, 64), "v": t(5, 24, 2, 64)}, ValueError, "`k` has pages of 24 rows; allowed: multiples of 16.*32"),
    (varlen, {"k": t(80, 2, 64), "v": t(80, 2, 64)}, ValueError, r"`k` has 3 dims.*\[pages, rows, H, D\]"),
    (varlen, {"q": t(2, 4, 4, 64)}, ValueError, r"`q` has 4 dims.*\[T, H, D\]"),
    (varlen, {"v": t(5, 16, 2, 64, dtype=F16)}, TypeError, "`v` has dtype torch.float16 but `q` has torch.bfloat16"),
    (varlen, {"v": t(4, 16, 2, 64)}, ValueError, "`v` has 4 pages but `k` has 5"),
    (varlen, {"v": t(5, 32, 2, 64)}, ValueError, "`v` has 32 rows but `k` has 16"),
    (varlen, {"v": t(5, 16, 1, 64)}, ValueError, "`v` has 1 heads but `k` has 2"),
    (varlen, {"q": t(7, 3, 64)}, ValueError, "`q` has 3 heads but `k` has 2"),
    (varlen, {"k": t(5, 16, 2, 72)}, ValueError, "`k` has head dim 72 but `q` has 64"),
    (varlen, {"k": t(5, 16, 64, 2).mT}, ValueError, r"`k` has stride 2 in its last dim.*k.contiguous\(\)"),
    (varlen, {"max_seqlen_k": -1}, ValueError, "`max_seqlen_k` is -1"),
    (varlen, {"max_seqlen_q": i32(4)}, TypeError, "`max_seqlen_q` is a tensor"),
    (varlen, {"sinks": t(3)}, ValueError, r"`sinks` has shape \(3,\)"),
    (varlen, {"out": t(7, 4, 72)}, ValueError, r"`out` has shape \(7, 4, 72\)"),
    (varlen, {"window": (-3, 0)}, ValueError, "`window` is"),
    (varlen, {"rotary_cos": None}, TypeError, "'rotary_cos'; there is no rotary embedding"),
    (varlen, {"page_table": None}, TypeError, "'page_table'; pass it as block_table="),
    (varlen, {"cache_seqlens": None}, TypeError, "'cache_seqlens'; a cache of keys goes to ffpa_with_kvcache"),
    (varlen, {"seqused_k": i32(20, 33)}, ValueError, "`seqused_k`: sequence 1 has 33 keys, and there is room for 32"),
    (varlen, {"seqused_k": i32(-1, 32)}, ValueError, "`seqused_k` is -1 for sequence 0"),
    (varlen, {"max_seqlen_k": 31}, ValueError, "`max_seqlen_k` is 31 but sequence 1 has 32 keys"),
    (varlen, {"max_seqlen_q": 3}, ValueError, "`max_seqlen_q` is 3 but sequence 1 has 4 rows"),
    (varlen, {"block_table": table([0, 5], [2, 3])}, ValueError, "`block_table` holds 5 in entry 1 of sequence 0.*pages 0 to 4"),
    (varlen, {"block_table": table([-1, 1], [2, 3])}, ValueError, "`block_table` holds -1 in entry 0 of sequence 0"),
    (cached, {"q": None}, TypeError, "`q` is None .NoneType.; pass a torch.Tensor"),
    (cached, {"k_cache": None}, TypeError, "`k_cache` is None"),
    (cached, {"v": None}, ValueError, "`k` is given without `v`"),
    (cached, {"k": None}, ValueError, "`v` is given without `k`"),
    (cached, {"cache_batch_idx": i32(0, 1)}, ValueError, "`cache_batch_idx` and `block_table` are both given"),
    (cached, {"cache_leftpad": i32(0, 1)}, ValueError, "`cache_leftpad` and `block_table` are both given.*leave"),
    (cached, {"cache_seqlens": None}, TypeError, "`cache_seqlens` is None .NoneType.; pass an int32 tensor"),
    (cached, {"cache_seqlens": True}, TypeError, "`cache_seqlens` is True"),
    (cached, {"cache_seqlens": i32(17, 29).to(I64)}, TypeError, "`cache_seqlens` has dtype torch.int64"),
    (cached, {"cache_seqlens": i32(17)}, ValueError, "`cache_seqlens` has 1 sequences but `q` has 2"),
    (cached, {"max_seqlen_q": 3}, ValueError, "`max_seqlen_q` is given without `cu_seqlens_q`"),
    (cached, {"k_cache": t(5, 16, 2, 64, dtype=F16)}, TypeError, "`k_cache` has dtype torch.float16 but `q`"),
    (cached, {"k_cache": t(5, 32, 64), "v_cache": t(5, 32, 64)}, ValueError, "`k_cache` has 3 dims"),
    (cached, {"v_cache": t(5, 16, 4, 64)}, ValueError, "`v_cache` has 4 heads but `k_cache` has 2"),
    (cached, {"k_cache": t(5, 8, 2, 64), "v_cache": t(5, 8, 2, 64)}, ValueError, "`k_cache` has pages of 8 rows.*multiples of 16"),
    (cached, {"k": t(2, 3, 2, 64, dtype=F16)}, TypeError, "`k` has dtype torch.float16 but `k_cache`"),
    (cached, {"v": t(2, 3, 2, 64, dtype=F32)}, TypeError, "`v` has dtype torch.float32; allowed"),
    (cached, {"k": t(2, 3, 4, 64)}, ValueError, r"`k` has \(4, 64\) heads and columns but `k_cache` has \(2, 64\)"),
    (cached, {"v": t(2, 4, 2, 64)}, ValueError, r"`v` has rows \(2, 4\) but `k` has \(2, 3\)"),
    (cached, {"k": t(3, 3, 2, 64), "v": t(3, 3, 2, 64)}, ValueError, "`cache_seqlens` has 2 sequences but `k` has 3"),
    (cached, {"k": t(6, 2, 64), "v": t(6, 2, 64)}, ValueError, r"`k` has 3 dims.*\[B, N, H, D\]"),
    (cached, {"cache_seqlens": i32(17, 30)}, ValueError, "sequence 1 has 30 keys and 3 new rows, and there is room for 32"),
    (cached, {"cache_seqlens": i32(-1, 2)}, ValueError, "`cache_seqlens` is -1 for sequence 0"),
    (cached, {"max_seqlen_k": 31}, ValueError, "`max_seqlen_k` is 31 but sequence 1 has 32 keys"),
    (cached, {"block_table": table([0, 1], [2, 9]), "window": (0, 0), "q": t(2, 1, 4, 64)}, ValueError, "`block_table` holds 9"),
    (cached, in_one(), ValueError, "`v_cache` overlaps the memory of `k_cache`"),
    (cached, over("k"), ValueError, r"`k` overlaps the memory of `k_cache`.*k.clone\(\)"),
    (cached, {"v_cache": expanded(5, 16, 2, 64)}, ValueError, r"`v_cache` is expanded.*v_cache.clone\(\)"),
    (cached, {"sinks": t(3)}, ValueError, "`sinks` has shape"),
    (cached, {"out": t(2, 3, 4, 72)}, ValueError, "`out` has shape"),
    (cached, {"softcap": -1.0}, ValueError, "`softcap` is -1.0"),
    (cached, {"return_lse": 1}, TypeError, "`return_lse` is 1"),
    (cached, {"level": 1}, TypeError, "unexpected keyword argument 'level'"),
    (contiguous, {"cache_batch_idx": i32(0, 3)}, ValueError, "`cache_batch_idx` holds 3 in entry 0 of sequence 1.*pages 0 to 2"),
    (contiguous, {"cache_batch_idx": torch.tensor([0, 1])}, TypeError, "`cache_batch_idx` has dtype torch.int64"),
    (contiguous, {"cache_batch_idx": table([0, 1])}, ValueError, "`cache_batch_idx` has 2 dims"),
    (contiguous, {"cache_batch_idx": i32(0)}, ValueError, "`cache_batch_idx` has 1 sequences but `q` has 2"),
    (contiguous, {"k_cache": t(1, 40, 2, 64), "v_cache": t(1, 40, 2, 64)}, ValueError, "`k_cache` has 1 sequences but `q` has 2"),
    (contiguous, {"cache_leftpad": i32(3, 33)}, ValueError, "`cache_leftpad` is 33 for sequence 1, which has 32 rows"),
    (contiguous, {"cache_leftpad": i32(3)}, ValueError, "`cache_leftpad` has 1 sequences but `q` has 2"),
    (contiguous, {"cache_seqlens": 38}, ValueError, "sequence 0 has 38 keys and 3 new rows, and there is room for 40"),
    (packed, {"max_seqlen_q": None}, ValueError, "`max_seqlen_q` is None but `cu_seqlens_q` is given"),
    (packed, {"k": None, "v": None}, ValueError, "`cu_seqlens_k_new` is given without `k`"),
    (packed, {"cu_seqlens_k_new": i32(0, 5)}, ValueError, "`cu_seqlens_k_new` has 1 sequences but `cu_seqlens_q` has 2"),
    (packed, {"cu_seqlens_k_new": i32(0, 4, 2)}, ValueError, "`cu_seqlens_k_new` falls"),
    (packed, {"cu_seqlens_k_new": i32(0, 2, 6), "cache_seqlens": i32(17, 20)}, ValueError, "`cu_seqlens_k_new` spans 0..6"),
    (packed, {"cu_seqlens_k_new": torch.tensor([0, 2, 5])}, TypeError, "`cu_seqlens_k_new` has dtype torch.int64"),
    (packed, {"cu_seqlens_k_new": None}, ValueError, r"`k` has 3 dims.*\[B, N, H, D\]"),
    (flash, {"rotary_cos": t(40, 16), "rotary_sin": t(40, 16)}, NotImplementedError, "`rotary_cos` is given.*to q and k before"),
    (flash, {"rotary_seqlens": i32(1, 2)}, NotImplementedError, "`rotary_seqlens` is given"),
    (flash, {"alibi_slopes": torch.ones(4)}, NotImplementedError, "`alibi_slopes` is given"),
    (flash, {"k_descale": torch.ones(2, 2)}, NotImplementedError, "`k_descale` is given"),
    (flash, {"attention_chunk": 64}, NotImplementedError, "`attention_chunk` is given"),
    (flash, {"block_table": table([0]), "page_table": table([0])}, ValueError, "`block_table` and `page_table` are both given"),
    (flash, {"k": t(2, 1, 2, 64), "v": t(2, 1, 2, 64)}, ValueError, "`cache_seqlens` is None but `k` is given"),
    (flash, {"s_aux": torch.ones(4), "learnable_sink": torch.ones(4)}, ValueError, "`s_aux` and `learnable_sink` are both"),
    (flash, {"sinks": None}, TypeError, "pass it as s_aux="),
    (flash, {"k_cache": t(40)}, ValueError, "`k_cache` has 1 dims"),
]  # fmt: skip


@pytest.mark.parametrize(
    "call, changes, error, message", BAD, ids=[f"{case[0].__name__}-{case[3][:40]}" for case in BAD]
)
def test_a_sentence(call, changes, error, message):
    with pytest.raises(error, match=message) as caught:
        call(**changes)
    assert not re.search(r"\b(k_pages|v_pages|leftpad_k|more_k)\b", str(caught.value)), (
        "a name that the caller does not know"
    )


def test_the_good_calls_are_good():
    for call in (varlen, cached, contiguous, packed, flash):
        assert call().isfinite().all()
    assert flash(attention_chunk=0, pack_gqa=True, scheduler_metadata=None, num_splits=2).isfinite().all()


WRITES = [
    case for case in BAD if case[0] in (cached, contiguous, packed) and not {"k_cache", "v_cache"} & case[1].keys()
]


@pytest.mark.parametrize(
    "call, changes, error, message", WRITES, ids=[f"{case[0].__name__}-{case[3][:40]}" for case in WRITES]
)
def test_a_refused_call_writes_nothing(call, changes, error, message):
    shape = (3, 40, 2, 64) if call is contiguous else (5, 16, 2, 64)
    k, v = torch.full(shape, 7.0, dtype=BF16), torch.full(shape, 7.0, dtype=BF16)
    with pytest.raises(error, match=message):
        call(k_cache=k, v_cache=v, **changes)
    assert (k == 7.0).all() and (v == 7.0).all()


@pytest.mark.parametrize("spoilt", ["q", "out"])
def test_what_only_memory_tells_is_found_before_anything_is_written(spoilt):
    k = torch.full((5, 16, 2, 64), 7.0, dtype=BF16)
    odd = torch.zeros(2 * 3 * 4 * 64 + 1, dtype=BF16)[1:].view(2, 3, 4, 64)
    changes = {"q": odd} if spoilt == "q" else {"out": k[:2, :3].view(2, 3, 2, 64).repeat(1, 1, 2, 1)[..., :64]}
    if spoilt == "out":
        changes["out"] = changes["q"] = t(2, 3, 4, 64)
    with pytest.raises(ValueError, match=f"`{spoilt}` (starts|overlaps)"):
        cached(k_cache=k, **changes)
    assert (k == 7.0).all()


def test_level_that_cannot_run_writes_nothing(monkeypatch):
    monkeypatch.setenv("FFPA_STRICT", "1")
    monkeypatch.setenv("FFPA_BACKEND", "mma")
    k = torch.full((5, 16, 2, 64), 7.0, dtype=BF16)
    with pytest.raises(NotImplementedError, match="FFPA"):
        cached(k_cache=k)
    assert (k == 7.0).all()


def test_entries_that_nobody_needs_may_be_anything():
    many = table([0, 1, -1, 2**31 - 1], [2, 3, 77, -(2**31)])
    assert varlen(block_table=many).isfinite().all()
    assert (
        varlen(block_table=table([-5, 1], [99, 3]), causal=True, window=(0, -1), seqused_k=i32(20, 20)).isfinite().all()
    )
    with pytest.raises(ValueError, match="`block_table` holds 99"):
        varlen(block_table=table([0, 1], [99, 3]), causal=True, window=(1, -1), seqused_k=i32(20, 20))


def test_other_functions_point_here():
    x = t(1, 2, 8, 64)
    for word in ("block_table", "page_table"):
        with pytest.raises(TypeError, match="keys in pages go to ffpa_varlen.*ffpa_with_kvcache"):
            ffpa_attn.ffpa(x, x, x, **{word: None})
    with pytest.raises(TypeError, match="go to ffpa_varlen, beside block_table"):
        ffpa_attn.ffpa(x, x, x, seqused_k=None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="values of GPU tensors are read under FFPA_CHECK=1 alone")
def test_values_on_a_gpu_are_checked_when_asked(monkeypatch):
    pool = pages.make((20, 32), device="cuda")
    q, cu = pages.queries((3, 4), device="cuda")
    call = {"block_table": pool.table, "seqused_k": pool.used + 100}
    assert ffpa_varlen(q, pool.k, pool.v, cu, None, 4, 32, **call).shape == (7, 4, 64)
    monkeypatch.setenv("FFPA_CHECK", "1")
    with pytest.raises(ValueError, match="`seqused_k`: sequence 0 has 120 keys"):
        ffpa_varlen(q, pool.k, pool.v, cu, None, 4, 32, **call)
