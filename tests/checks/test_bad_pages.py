"""What a caller gets wrong about keys in pages and caches raises a sentence that names the argument, and nothing is written."""

import re

import ffpa_attn
import numpy as np
import pages
import pytest
import torch
from ffpa_attn import ffpa_varlen, ffpa_with_kvcache, flash_attn_varlen_func, flash_attn_with_kvcache
from ffpa_attn.checks import memory_checks

BF16, F16, F32, I64 = torch.bfloat16, torch.float16, torch.float32, torch.int64
SCALAR = torch.tensor(1, dtype=torch.int32)


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


def columns(first, last):
    """Returns caches that are columns of one: keys are the first 64, and values others."""
    whole = t(5, 16, 2, 192)
    return {"k_cache": whole[..., :64], "v_cache": whole[..., first:last], "v": t(2, 3, 2, last - first)}


def ahead(pages, **changes):
    """Returns caches that are pages of one pool: values are so many pages ahead of keys."""
    rows, first = t(12 * 16, 2, 64), int(pages * 16)
    k, v = (x.unflatten(0, (8, 16)) for x in (rows[:128], rows[first : first + 128]))
    return {"k_cache": k, "v_cache": v, **changes}


def strided(*strides):
    """Returns a cache with such strides."""
    return {"k_cache": t(20000).as_strided((5, 16, 2, 64), strides)}


def among_pages(begin):
    """Returns caches of pages in turn, and a place for results between their rows."""
    whole = t(5, 2, 16, 2, 128)
    out = whole.as_strided((2, 3, 4, 64), (1536, 512, 128, 1), begin)
    return {"k_cache": whole[:, 0, ..., :64], "v_cache": whole[:, 1, ..., :64], "out": out}


def flash_varlen(**changes):
    """Calls flash-attn's function with the offsets of keys in pages."""
    given = {"cu_seqlens_k": i32(0, 20, 52), "max_seqlen_q": 4, "max_seqlen_k": 32, "cu_seqlens_q": i32(0, 3, 7)}
    given |= {"q": t(7, 4, 64), "k": t(5, 16, 2, 64), "v": t(5, 16, 2, 64), "block_table": table([0, 1], [2, 3])}
    return flash_attn_varlen_func(**given | changes)


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
    (varlen, {"block_table": table([0, 5], [2, 3])}, ValueError, "`block_table` holds 5 for sequence 0 in entry 1.*0 to 4, as `k` has 5"),
    (varlen, {"block_table": table([-1, 1], [2, 3])}, ValueError, "`block_table` holds -1 for sequence 0 in entry 0"),
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
    (cached, {"k": t(6, 2, 64), "v": t(6, 2, 64)}, ValueError, r"`k` has 3 dims.*\[T, H, D\] with cu_seqlens_k_new"),
    (cached, {"cache_seqlens": i32(17, 30)}, ValueError, "sequence 1 has 30 keys and 3 new rows, and there is room for 32"),
    (cached, {"cache_seqlens": i32(-1, 2)}, ValueError, "`cache_seqlens` is -1 for sequence 0"),
    (cached, {"max_seqlen_k": 31}, ValueError, "`max_seqlen_k` is 31 but sequence 1 has 32 keys"),
    (cached, {"block_table": table([0, 1], [2, 9]), "window": (0, 0), "q": t(2, 1, 4, 64)}, ValueError, "`block_table` holds 9"),
    (cached, columns(8, 56), ValueError, "`v_cache` overlaps the memory of `k_cache`"),
    (cached, columns(56, 120), ValueError, "`v_cache` overlaps the memory of `k_cache`"),
    (cached, columns(0, 128), ValueError, "`v_cache` overlaps the memory of `k_cache`"),
    (cached, ahead(1), ValueError, "page 0 of values is page 1 of keys, and the call has both"),
    (cached, ahead(1.5), ValueError, "`v_cache` overlaps the memory of `k_cache`, or interleaves"),
    (cached, ahead(2), ValueError, "page 1 of values is page 3 of keys"),
    (cached, strided(1024, 128, 64, 1), ValueError, "`k_cache` has rows that overlap.*allocate the cache otherwise"),
    (cached, strided(2048, 64, 64, 1), ValueError, "`k_cache` has rows that overlap.*allocate the cache otherwise"),
    (cached, strided(2052, 128, 64, 1), ValueError, "`k_cache` has strides.*multiples of 8.*allocate the cache otherwise"),
    (cached, {"k_cache": t(5, 16, 64, 2).mT}, ValueError, "`k_cache` has stride 2.*allocate the cache otherwise"),
    (cached, among_pages(64), ValueError, "`out` overlaps the memory of `k_cache`, or lies among its rows"),
    (contiguous, ahead(1) | {"cache_seqlens": i32(3, 4)}, ValueError, "page 0 of values is page 1 of keys"),
    (cached, over("k"), ValueError, r"`k` overlaps the memory of `k_cache`.*k.clone\(\)"),
    (cached, {"v_cache": expanded(5, 16, 2, 64)}, ValueError, "`v_cache` is expanded.*allocate the cache otherwise"),
    (cached, {"sinks": t(3)}, ValueError, "`sinks` has shape"),
    (cached, {"out": t(2, 3, 4, 72)}, ValueError, "`out` has shape"),
    (cached, {"softcap": -1.0}, ValueError, "`softcap` is -1.0"),
    (cached, {"return_lse": 1}, TypeError, "`return_lse` is 1"),
    (cached, {"level": 1}, TypeError, "unexpected keyword argument 'level'"),
    (contiguous, {"cache_batch_idx": i32(0, 3)}, ValueError, "`cache_batch_idx` holds 3 for sequence 1, where.*0 to 2, as `k_cache` has 3"),
    (contiguous, {"cache_batch_idx": torch.tensor([0, 1])}, TypeError, "`cache_batch_idx` has dtype torch.int64"),
    (contiguous, {"cache_batch_idx": table([0, 1])}, ValueError, "`cache_batch_idx` has 2 dims"),
    (contiguous, {"cache_batch_idx": i32(0)}, ValueError, "`cache_batch_idx` has 1 sequences but `q` has 2; it must be"),
    (contiguous, {"cache_batch_idx": i32(1, 1)}, ValueError, "`cache_batch_idx` holds 1 for sequences 0 and 1"),
    (contiguous, {"k_cache": t(1, 40, 2, 64), "v_cache": t(1, 40, 2, 64)}, ValueError, "`k_cache` has 1 sequences but `q` has 2"),
    (contiguous, {"cache_leftpad": i32(3, 33)}, ValueError, "`cache_leftpad` is 33 for sequence 1, which has 32 rows"),
    (contiguous, {"cache_leftpad": i32(3)}, ValueError, "`cache_leftpad` has 1 sequences but `q` has 2"),
    (contiguous, {"cache_seqlens": 38}, ValueError, "sequence 0 has 38 keys and 3 new rows, and there is room for 40"),
    (contiguous, {"cache_seqlens": -1}, ValueError, "`cache_seqlens` is -1 for sequence 0"),
    (contiguous, {"cache_seqlens": 2**40}, ValueError, "has 1099511627776 keys and 3 new rows, and there is room for 40"),
    (contiguous, {"k_cache": t(0, 40, 2, 64), "v_cache": t(0, 40, 2, 64), "cache_batch_idx": i32(0, 1)}, ValueError, "; `k_cache` has none"),
    (cached, {"q": t(2, 3, 4, 64).to("meta")}, ValueError, "is on cpu but `q` is on meta"),
    (contiguous, {"q": t(2, 3, 4, 64).to("meta")}, ValueError, r"`k_cache` is on cpu but `q` is on meta; move q"),
    (cached, {"cache_seqlens": i32(17, 29).to("meta")}, ValueError, "`cache_seqlens` is on meta but `q` is on cpu"),
    (cached, {"q": t(2, 3, 4, 64, dtype=F32)}, TypeError, "`k_cache` has dtype torch.bfloat16 but `q` has torch.float32; cast q, k and v"),
    (cached, {"q": t()}, ValueError, "`q` has 0 dims"),
    (cached, {"q": t(64)}, ValueError, "`q` has 1 dims"),
    (cached, {"block_table": SCALAR}, ValueError, r"`block_table` has 0 dims.*\[B, entries\]"),
    (cached, {"alibi_slopes": None}, TypeError, "no bias of keys in a cache: gather them, and call flash_attn_func"),
    (cached, {"qv": None}, TypeError, r"put it beside q.*v_cache is a view, k_cache\["),
    (cached, {"seqused_k": None}, TypeError, "pass it as cache_seqlens="),
    (cached, {"cu_seqlens_k": None}, TypeError, r"cu_seqlens_k.diff\(\)"),
    (cached, {"attention_chunk": None}, TypeError, "call once for each chunk"),
    (varlen, {"k_descale": None}, TypeError, "8-bit floats go to ffpa_fp8"),
    (varlen, {"cu_seqlens_q": SCALAR}, ValueError, "`cu_seqlens_q` has 0 dims"),
    (varlen, {"block_table": SCALAR}, ValueError, "`block_table` has 0 dims"),
    (packed, {"cu_seqlens_q": SCALAR, "cache_seqlens": 3}, ValueError, "`cu_seqlens_q` has 0 dims"),
    (packed, {"cu_seqlens_q": i32(), "cache_seqlens": 3}, ValueError, "`cu_seqlens_q` is empty"),
    (packed, {"cu_seqlens_k_new": i32(0)}, ValueError, "`cu_seqlens_k_new` has 0 sequences but"),
    (packed, {"max_seqlen_q": None}, ValueError, "`max_seqlen_q` is None but `cu_seqlens_q` is given"),
    (packed, {"k": None, "v": None}, ValueError, "`cu_seqlens_k_new` is given without `k`"),
    (packed, {"cu_seqlens_k_new": i32(0, 5)}, ValueError, "`cu_seqlens_k_new` has 1 sequences but `cu_seqlens_q` has 2"),
    (packed, {"cu_seqlens_k_new": i32(0, 4, 2)}, ValueError, "`cu_seqlens_k_new` falls"),
    (packed, {"cu_seqlens_k_new": i32(0, 2, 6), "cache_seqlens": i32(17, 20)}, ValueError, "`cu_seqlens_k_new` spans 0..6"),
    (packed, {"cu_seqlens_k_new": torch.tensor([0, 2, 5])}, TypeError, "`cu_seqlens_k_new` has dtype torch.int64"),
    (packed, {"cu_seqlens_k_new": None}, ValueError, r"`k` has 3 dims.*\[B, N, H, D\]"),
    (flash, {"rotary_cos": t(40, 16), "rotary_sin": t(40, 16)}, NotImplementedError, "`rotary_cos` is given.*to q and k before"),
    (flash, {"rotary_seqlens": i32(1, 2)}, NotImplementedError, "`rotary_seqlens` is given"),
    (flash, {"alibi_slopes": torch.ones(4)}, NotImplementedError, "`alibi_slopes` is given.*gather them"),
    (flash, {"k_descale": torch.ones(2, 2)}, NotImplementedError, "`k_descale` has shape .*each sequence"),
    (flash, {"k_descale": torch.ones(2)}, ValueError, "`k_descale` is given but `k_cache` has dtype"),
    (flash, {"q_descale": torch.ones(2, 2)}, NotImplementedError, "`q_descale` is given.*16 bits"),
    (flash, {"attention_chunk": 64}, NotImplementedError, "`attention_chunk` is given.*call once for each chunk"),
    (flash, {"block_table": table([0]), "page_table": table([0])}, ValueError, "`block_table` and `page_table` are both given"),
    (flash, {"k": t(2, 1, 2, 64), "v": t(2, 1, 2, 64)}, ValueError, "`cache_seqlens` is None but `k` is given"),
    (flash, {"s_aux": torch.ones(4), "learnable_sink": torch.ones(4)}, ValueError, "`s_aux` and `learnable_sink` are both"),
    (flash, {"sinks": None}, TypeError, "pass it as s_aux="),
    (flash, {"max_seqlen_k": 3}, TypeError, "ffpa_with_kvcache takes it"),
    (flash, {"q": t()}, ValueError, "`q` has 0 dims"),
    (flash, {"page_table": SCALAR}, ValueError, "`page_table` has 0 dims"),
    (flash, {"page_table": table([0, 1], [1, 9]), "cache_seqlens": 40}, ValueError, "`k_cache` has pages of 40 rows"),
    (flash, {"page_table": table([0], [9])}, ValueError, "`page_table` holds 9 for sequence 1"),
    (flash, {"window_size": (-1,)}, ValueError, "`window_size` has 1 entries"),
    (flash, {"softmax_scale": float("inf")}, ValueError, "`softmax_scale` is inf"),
    (flash, {"return_softmax_lse": 1}, TypeError, "`return_softmax_lse` is 1"),
    (flash, {"s_aux": torch.ones(3)}, ValueError, "`s_aux` has shape"),
    (flash, {"learnable_sink": torch.ones(3)}, ValueError, "`learnable_sink` has shape"),
    (flash_varlen, {"cu_seqlens_k": SCALAR}, ValueError, "`cu_seqlens_k` has 0 dims"),
    (flash_varlen, {"cu_seqlens_k": i32(0, 20, 52, 60)}, ValueError, "`cu_seqlens_k` has 3 sequences but"),
    (flash_varlen, {"cu_seqlens_k": i32(0, 20, 62)}, ValueError, "`cu_seqlens_k`: sequence 1 has 42 keys"),
    (flash_varlen, {"block_table": SCALAR, "max_seqlen_k": SCALAR}, ValueError, "`block_table` has 0 dims"),
    (flash_varlen, {"k": t(64), "max_seqlen_k": SCALAR}, ValueError, "`k` has 1 dims"),
    (flash_varlen, {"return_attn_probs": 1}, TypeError, "`return_attn_probs` is 1"),
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
    for call in (varlen, cached, contiguous, packed, flash, flash_varlen):
        assert call().isfinite().all()
    assert contiguous(cache_seqlens=np.int64(7)).isfinite().all()
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


@pytest.mark.parametrize(
    "caches",
    [columns(64, 192), ahead(4), ahead(1, block_table=table([0, 2], [4, 6])), strided(2048, 64, 1024, 1)],
    ids=["beside", "behind", "every other page", "heads first"],
)
def test_pools_of_one_memory_that_do_not_meet(caches):
    assert cached(**caches).isfinite().all()


@pytest.mark.parametrize("caches", [columns(8, 56), columns(56, 120), ahead(1), strided(1024, 128, 64, 1)])
def test_pools_that_overlap_are_read(caches):
    assert cached(**caches | {"k": None, "v": None}).isfinite().all()


def test_who_meets_whom():
    """The answer is never a wrong no, and where strides are the same it is right."""
    random, counts = np.random.default_rng(0), {(same, meet): 0 for same in (False, True) for meet in (False, True)}
    memory = torch.empty(1 << 16, dtype=torch.int16)
    for _ in range(3000):
        shape, strides, step = [], [], 1
        for _ in range(4):
            shape.insert(0, int(random.integers(1, 4)))
            strides.insert(0, step)
            step = (step * shape[0]) + int(random.integers(0, 6))
        a = memory.as_strided(shape, strides, 1000)
        same = bool(random.integers(2))
        others = strides if same else [*(x + int(random.integers(2)) for x in strides[:3]), 1]
        b = memory.as_strided(
            (*shape[:3], int(random.integers(1, shape[3] + 1))), others, 1000 + int(random.integers(-60, 60))
        )
        assert memory_checks.has_own_places(a)
        if not memory_checks.has_own_places(b):
            continue
        places = [
            {
                int(sum(i * s for i, s in zip(at, x.stride(), strict=True))) + x.storage_offset()
                for at in np.ndindex(*x.shape)
            }
            for x in (a, b)
        ]
        meet = not places[0].isdisjoint(places[1])
        counts[same, meet] += 1
        said = memory_checks.may_meet(a, b)
        assert said == meet if same else said or not meet
    assert min(counts.values()) > 100


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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="on a CPU what is written is read, and shows the same")
def test_pages_of_one_pool_without_a_table():
    given = {name: x.cuda() for name, x in (ahead(1) | {"cache_seqlens": i32(3, 4), "q": t(2, 3, 4, 64)}).items()}
    given |= {name: t(2, 3, 2, 64).cuda() for name in ("k", "v")}
    with pytest.raises(ValueError, match="page 0 of values is page 1 of keys"):
        contiguous(**given)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="values of GPU tensors are read under FFPA_CHECK=1 alone")
def test_values_on_a_gpu_are_checked_when_asked(monkeypatch):
    pool = pages.make((20, 32), device="cuda")
    q, cu = pages.queries((3, 4), device="cuda")
    call = {"block_table": pool.table, "seqused_k": pool.used + 100}
    assert ffpa_varlen(q, pool.k, pool.v, cu, None, 4, 32, **call).shape == (7, 4, 64)
    monkeypatch.setenv("FFPA_CHECK", "1")
    with pytest.raises(ValueError, match="`seqused_k`: sequence 0 has 120 keys"):
        ffpa_varlen(q, pool.k, pool.v, cu, None, 4, 32, **call)
