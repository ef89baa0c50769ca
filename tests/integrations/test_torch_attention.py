"""PyTorch's own names run on ffpa once "FFPA" is activated: varlen_attn at any head dim, and the dense function however it
is called. (That the dense one means what PyTorch means, test_sdpa.py shows for all ways to it.)
"""

import inspect
import warnings
from contextlib import contextmanager
from functools import partial

import compare
import ffpa_attn
import oracle
import pages
import pytest
import torch
import torch.nn.functional as F
from ffpa_attn.backends import sdpa as sdpa_backend
from ffpa_attn.integrations import sdpa_dispatch, torch_attention
from ffpa_attn.testing import emulate
from torch._dynamo.backends.common import aot_autograd
from torch.nn import attention
from torch.nn.attention import varlen

NEEDED = ("register_flash_attention_impl", "activate_flash_attention_impl", "restore_flash_attention_impl")
if not all(hasattr(attention, name) for name in NEEDED):
    pytest.skip("PyTorch 2.11 is the first release that turns such implementations off again", allow_module_level=True)

BF16 = torch.bfloat16
HELD = partial(F.scaled_dot_product_attention)  # a partial, which no replaced name changes
OF_DENSE = F.scaled_dot_product_attention  # held as it is, as a module would that was imported before
FROM_2_12 = "seqused_k" in inspect.signature(varlen.varlen_attn).parameters
since_2_12 = pytest.mark.skipif(not FROM_2_12, reason="PyTorch 2.12 is the first release whose varlen_attn takes it")
LENGTHS = (9, 0, 24, 5), (9, 7, 33, 2)  # of queries and of keys


@contextmanager
def active(device, name="FFPA", **options):
    torch_attention.register(name, device=device.upper(), **options)
    attention.activate_flash_attention_impl(name)
    try:
        yield
    finally:
        attention.restore_flash_attention_impl()


@pytest.fixture
def ffpa_is_on(device):
    with active(device):
        yield


def t(*shape, dtype=BF16, device="cpu", seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(device, dtype)


def offsets(lengths, device):
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32).to(device)


def packed(device, d=64, heads_kv=2, dtype=BF16):
    """Returns (q, k, v), and what says where their sequences are."""
    rows, keys = map(sum, LENGTHS)
    shapes = (rows, 4, d), *[(keys, heads_kv, d)] * 2
    tensors = tuple(t(*shape, dtype=dtype, device=device, seed=i) for i, shape in enumerate(shapes))
    return tensors, (*(offsets(x, device) for x in LENGTHS), *map(max, LENGTHS))


def attend(*args, **options):
    """Calls varlen_attn, which has asked for grouped heads by a keyword since 2.12."""
    return varlen.varlen_attn(*args, **({"enable_gqa": True} if FROM_2_12 else {}), **options)


def with_lse(*args, **options):
    return attend(*args, return_aux=varlen.AuxRequest(lse=True), **options)


def graded(function, *tensors):
    """Returns (result, its gradients)."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = function(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, t(*out.shape, dtype=out.dtype, device=out.device))


def by_sequence(function, q, k, v, keys=LENGTHS[1], **rule):
    """Returns ([T, H, D], LSE [H, T]) of a function of one [1, N, H, D] after the other, which sees the first `keys`."""
    parts = zip(*(x.split(list(n)) for x, n in zip((q, k, v), (*LENGTHS, LENGTHS[1]), strict=True)), keys, strict=True)
    results = [function(q[None], k[None, :n], v[None, :n], layout="BNHD", **rule) for q, k, v, n in parts]
    return torch.cat([out[0] for out, _ in results]), torch.cat([lse[0] for _, lse in results], 1)


def assert_means(function, tensors, **rule):
    """Checks that results and gradients are those of the oracle."""
    got = graded(function, *tensors)
    want, base = (
        graded(lambda *x, one=one: by_sequence(one, *x, **rule)[0], *tensors)
        for one in (oracle.attention, compare.baseline)
    )
    for name, ours, exact, theirs in zip(("out", "dq", "dk", "dv"), got, want, base, strict=True):
        compare.assert_close(name, ours, exact, theirs)


# ---- varlen_attn ----

# PyTorch's windows beside ours: causality is one of them.
WINDOWS = {
    "all": ((-1, -1), {}),
    "causal": ((-1, 0), {"causal": True}),
    "causal window": ((6, 0), {"window": (6, 0)}),
    "window": ((6, 3), {"window": (6, 3)}),
}


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("d", [64, 320, 512])
def test_packed(device, ffpa_is_on, d, window):
    tensors, where = packed(device, d)
    asked, rule = WINDOWS[window]
    assert_means(lambda *x: attend(*x, *where, window_size=asked), tensors, **rule)


@pytest.mark.parametrize("heads_kv", [4, 2, 1])
def test_heads_scale_and_lse(device, ffpa_is_on, heads_kv):
    tensors, where = packed(device, 512, heads_kv)
    assert_means(lambda *x: attend(*x, *where, scale=0.1), tensors, scale=0.1)
    out, lse = with_lse(*tensors, *where, scale=0.1)
    _, want = by_sequence(oracle.attention, *tensors, scale=0.1)
    compare.assert_lse_close("lse", lse, want, *tensors[:2], 0.1)
    assert torch.equal(out, attend(*tensors, *where, scale=0.1))


def test_rows_apart_in_memory(device, ffpa_is_on):
    """Heads come before rows in memory, or q, k and v beside one another."""
    tensors, where = packed(device, heads_kv=4)
    rows = where[0], where[0], where[2], where[2]
    want = graded(lambda *x: attend(*x, *where), *tensors)
    heads_first = [x.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for x in tensors]
    out = attend(*heads_first, *where)
    grads = torch.autograd.grad(out, heads_first, t(*out.shape, device=device))
    assert all(torch.equal(x, y) for x, y in zip((out, *grads), want, strict=True))
    assert [x.stride() for x in (out, *grads)] == [torch.empty_like(x).stride() for x in (heads_first[0], *heads_first)]
    q, k, v = torch.stack([tensors[0]] * 3, 1).unbind(1)
    assert torch.equal(attend(q, k, v, *rows), attend(*[tensors[0]] * 3, *rows))


def test_values_narrower_than_keys(device, ffpa_is_on):
    (q, k, v), where = packed(device, 192)
    q = q.transpose(0, 1).contiguous().transpose(0, 1)
    assert_means(lambda *x: attend(*x, *where, window_size=(-1, 0)), (q, k, v[..., :128]), causal=True)


@since_2_12
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("d", [64, 320, 512])
def test_pages(device, ffpa_is_on, d, window):
    lengths, rows = (37, 0, 16, 5), (3, 1, 0, 5)
    asked, rule = WINDOWS[window]
    pool, (q, cu) = pages.make(lengths, d=d, device=device), pages.queries(rows, d=d, device=device)
    where = cu, None, max(rows), 48
    used = {"block_table": pool.table, "seqused_k": pool.used, "window_size": asked}
    out, lse = with_lse(q, pool.k, pool.v, *where, **used)
    into = torch.empty_like(out)
    aux = {"return_aux": varlen.AuxRequest(lse=True), "enable_gqa": True}
    same, same_lse = varlen.varlen_attn_out(into, q, pool.k, pool.v, *where, **used, **aux)
    assert same is into and torch.equal(into, out) and torch.equal(same_lse, lse)
    beside = offsets(lengths, device)  # pages need none; flash-attn's own function wants them all the same
    assert torch.equal(attend(q, pool.k, pool.v, cu, beside, max(rows), 48, **used), out)
    parts = zip(q.split(list(rows)), pool.sequences(), out.split(list(rows)), lse.split(list(rows), 1), strict=True)
    for of_q, keys, of_out, of_lse in parts:
        pages.assert_attends(of_q, keys, of_out, of_lse, **rule)


@since_2_12
@pytest.mark.parametrize("window", WINDOWS)
def test_used_keys_of_packed_sequences(device, ffpa_is_on, window):
    tensors, where = packed(device)
    asked, rule = WINDOWS[window]
    used = (4, 7, 33, 0)
    seqused_k = torch.tensor(used, dtype=torch.int32, device=device)
    out, lse = with_lse(*tensors, *where, window_size=asked, seqused_k=seqused_k)
    want, want_lse = by_sequence(oracle.attention, *tensors, keys=used, **rule)
    compare.assert_close("out", out, want, by_sequence(compare.baseline, *tensors, keys=used, **rule)[0])
    compare.assert_lse_close("lse", lse, want_lse, *tensors[:2], None)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("d", [64, 512])
def test_compiled(device, ffpa_is_on, d, dynamic):
    tensors, where = packed(device, d)
    call = lambda q, k, v: attend(q, k, v, *where, window_size=(-1, 0)) * 2  # noqa: E731
    want = graded(call, *tensors)
    got = graded(torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=dynamic), *tensors)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


@since_2_12
def test_pages_compiled(device, ffpa_is_on):
    pool, (q, cu) = pages.make((37, 16), d=512, device=device), pages.queries((3, 5), d=512, device=device)
    call = lambda q, k, v, **used: attend(q, k, v, cu, None, 5, 48, **used)  # noqa: E731
    used = {"block_table": pool.table, "seqused_k": pool.used}
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, pool.k, pool.v, **used), call(q, pool.k, pool.v, **used))


def test_in_the_emulator():
    tensors, where = packed("cpu")
    with active("cpu"), emulate("sm_80", seed=3):
        out = attend(*tensors, *where, window_size=(-1, 0))
    want = by_sequence(oracle.attention, *tensors, causal=True)[0]
    compare.assert_close("out", out, want, by_sequence(compare.baseline, *tensors, causal=True)[0])


@since_2_12
def test_pages_in_the_emulator():
    pool, (q, cu) = pages.make((37, 16), d=64), pages.queries((3, 5), d=64)
    with active("cpu"), emulate("sm_80", seed=3):
        out = attend(q, pool.k, pool.v, cu, None, 5, 48, block_table=pool.table, seqused_k=pool.used)
    for of_q, keys, of_out in zip(q.split([3, 5]), pool.sequences(), out.split([3, 5]), strict=True):
        pages.assert_attends(of_q, keys, of_out)


# ---- what ffpa lacks ----


def refused(error, words, *args, **options):
    with pytest.raises(error, match=words):
        attend(*args, **options)


@since_2_12
def test_bad_calls(ffpa_is_on, device):
    (q, k, v), where = packed(device)
    lengths = torch.tensor([4, 7, 33, 0], dtype=torch.int32, device=device)
    refused(TypeError, "`query` has dtype torch.float32", q.float(), k.float(), v.float(), *where)
    refused(ValueError, "`key` has head dim 72 but `query` has 64", q, *[torch.cat([k, k[..., :8]], -1)] * 2, *where)
    refused(TypeError, "`seqused_k` has dtype torch.int64.*seqused_k.to", q, k, v, *where, seqused_k=lengths.long())
    refused(TypeError, "`cu_seq_k`", q, k, v, where[0], None, *where[2:], seqused_k=lengths)
    pool = pages.make((37, 16), device=device)
    q, cu = pages.queries((3, 5), device=device)
    table = {"block_table": pool.table}
    refused(ValueError, "`block_table` is given without `seqused_k`", q, pool.k, pool.v, cu, None, 5, 48, **table)
    narrow = pool.k[:, :8], pool.v[:, :8]
    refused(ValueError, "multiples of 16", q, *narrow, cu, None, 5, 48, **table, seqused_k=pool.used)


def operator(tensors=None, d=64, **options):
    """Calls the operator itself, as varlen_attn never does; returns the result first."""
    others, where = packed("cpu", d)
    tensors = tensors or others
    given = {"dropout_p": 0.0, "is_causal": False, "return_debug_mask": False}
    names = [x.name for x in torch.ops.aten._flash_attention_forward.default._schema.arguments]
    given |= {name: options.pop(name) for name in list(options) if name in names[:10]}
    first = dict(zip(names, (*tensors, *where), strict=False)) | given
    return torch.ops.aten._flash_attention_forward(*[first[name] for name in names[:10]], **options)


def test_causal_without_a_window():
    """varlen_attn says both at once."""
    with active("cpu"):
        assert_means(lambda *x: operator(x, is_causal=True)[0], packed("cpu")[0], causal=True)


LACKING = {
    "cum_seq_q": {"cum_seq_q": None},
    "dropout_p": {"dropout_p": 0.5},
    "return_debug_mask": {"return_debug_mask": True},
    "alibi_slopes": {"alibi_slopes": torch.ones(4)},
    "num_splits": {"num_splits": 1},
}


@pytest.mark.parametrize("name", LACKING)
def test_what_is_lacking_is_left_to_pytorch_or_refused(name):
    if name == "num_splits" and not FROM_2_12:
        pytest.skip("PyTorch 2.12 is the first release that has num_splits")
    calls = []
    theirs = torch.library.Library("aten", "IMPL")
    with active("cpu"), pytest.raises(NotImplementedError, match=f"`{name}` is .*: "):
        operator(**LACKING[name])
    results = torch.ones(1), torch.ones(1), torch.ones(1), torch.ones(1), torch.ones(1)
    theirs.impl("_flash_attention_forward", lambda *args, **options: (calls.append(options), results)[1], "CPU")
    with active("cpu"):
        out, *_ = operator(**LACKING[name])
        assert len(calls) == 1 and out.shape == (1,)
        with pytest.raises(NotImplementedError, match=f"`{name}` is "):
            operator(d=512, **LACKING[name])
        assert operator()[0].shape == (38, 4, 64) and len(calls) == 1
    assert operator()[0].shape == (1,)


def test_dropout_of_a_backward_is_left_to_pytorch_or_refused():
    (q, k, v), where = packed("cpu")
    lse, none = torch.zeros(4, 38), torch.zeros(0)
    args = q, q, k, v, q, lse, *where, 0.5, False, none, none
    with active("cpu"), pytest.raises(NotImplementedError, match="`dropout_p` is 0.5"):
        torch.ops.aten._flash_attention_backward(*args)
    theirs, grads = torch.library.Library("aten", "IMPL"), (torch.ones(1), torch.ones(1), torch.ones(1))
    theirs.impl("_flash_attention_backward", lambda *args, **options: grads, "CPU")
    with active("cpu"):
        assert torch.ops.aten._flash_attention_backward(*args, scale=0.2)[0].shape == (1,)


# ---- on and off ----


def test_registering_changes_nothing(device):
    torch_attention.register(device=device.upper())
    torch_attention.register(device=device.upper())
    torch_attention.register("another", device=device.upper())
    assert {"FFPA", "another"} <= set(attention.list_flash_attention_impls())
    assert attention.current_flash_attention_impl() is None
    assert raised(device)


def raised(device) -> bool:
    """Says whether PyTorch's own kernels are there: none takes this call."""
    tensors, where = packed(device, 512)
    try:
        attend(*tensors, *where)
    except RuntimeError:
        return True
    return False


def test_on_and_off_again(device):
    for _ in range(2):
        with active(device):
            assert attention.current_flash_attention_impl() == "FFPA" and not raised(device)
            with active(device, "another"):  # PyTorch has one at a time
                assert attention.current_flash_attention_impl() == "another" and not raised(device)
            assert raised(device)
        assert raised(device)


def test_names_that_are_none():
    with pytest.raises(ValueError, match="`device` is 'cuda'"):
        torch_attention.register(device="cuda")
    with pytest.raises(TypeError, match="`sdpa`"):
        torch_attention.register(sdpa="no")


def test_releases_that_are_too_old(monkeypatch):
    monkeypatch.delattr(attention, "restore_flash_attention_impl")
    with pytest.raises(
        NotImplementedError, match=r"needs PyTorch 2.11 or newer: .* has no restore_flash.*; call ffpa_varlen"
    ):
        torch_attention.register()


def test_releases_that_have_dropped_an_operator(monkeypatch):
    monkeypatch.setattr(torch_attention, "_KERNELS", {"_flash_attention_gone": None})
    with pytest.raises(NotImplementedError, match="has no operator _flash_attention_gone.*tried with 2.10"):
        torch_attention.register()


def test_releases_without_results_of_the_callers(monkeypatch, device):
    """PyTorch 2.11 has no operator that writes into a result."""
    kernels = {**torch_attention._KERNELS, "_flash_attention_gone": None}
    kernels.pop(torch_attention._SINCE_2_12)
    monkeypatch.setattr(torch_attention, "_SINCE_2_12", "_flash_attention_gone")
    monkeypatch.setattr(torch_attention, "_KERNELS", kernels)
    with active(device):
        assert not raised(device)


# ---- the dense function ----


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 320, 512])
def test_dense(device, ffpa_is_on, taken, d, causal):
    tensors = t(2, 4, 20, d, device=device), *(t(2, 2, 33, d, device=device, seed=i) for i in (1, 2))
    rule = {"causal": causal, "align": "top_left"}
    got = graded(partial(OF_DENSE, is_causal=causal, enable_gqa=True), *tensors)
    want, base = (
        graded(lambda *x, one=one: one(*x, **rule)[0], *tensors) for one in (oracle.attention, compare.baseline)
    )
    assert len(taken) == 1
    for name, ours, exact, theirs in zip(("out", "dq", "dk", "dv"), got, want, base, strict=True):
        compare.assert_close(name, ours, exact, theirs)


def scripted(x):
    return F.scaled_dot_product_attention(x, x, x)


def script(x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(scripted)(x)


def inferred(x):
    with torch.inference_mode():
        return OF_DENSE(x, x, x)


# These are calls that no replaced name reaches.
CALLS = {
    "operator": lambda x: torch.ops.aten.scaled_dot_product_attention(x, x, x),
    "held": lambda x: HELD(x, x, x),
    "scripted": script,
    "inferred": inferred,
}


@pytest.mark.parametrize("name", CALLS)
def test_ways_to_it(device, taken, name):
    x = t(1, 2, 9, 64, device=device)
    with active(device):
        out = CALLS[name](x)
        assert len(taken) == 1
    torch.testing.assert_close(out, OF_DENSE(x, x, x), atol=1e-2, rtol=2e-2)
    assert len(taken) == 1
    with active(device, sdpa=False):
        CALLS[name](x)
    assert len(taken) == 1


def test_what_ends_it_may_be_kept(taken):
    x, end = t(1, 2, 9, 64), sdpa_dispatch.override("CPU")
    OF_DENSE(x, x, x)
    assert len(taken) == 1
    end()
    OF_DENSE(x, x, x)
    assert len(taken) == 1 and end


def test_compiled_dense(device, taken):
    """What the compiler found before ffpa was on, it must forget."""
    x = t(1, 2, 9, 512, device=device)
    call, graphs = lambda x: OF_DENSE(x, x, x), []
    backend = aot_autograd(fw_compiler=lambda graph, _: (graphs.append(graph.print_readable(False)), graph.forward)[1])
    for is_on in (False, True, False):
        torch._dynamo.reset()
        with active(device, sdpa=is_on), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of arguments that are not boxed
            out = graded(torch.compile(call, backend=backend, fullgraph=True), x)[0]
        assert ["ffpa_attn." in graph for graph in graphs] == [is_on, is_on]
        graphs.clear()
        torch.testing.assert_close(out, call(x), atol=1e-2, rtol=2e-2)


def test_what_ffpa_calls_is_pytorchs_own(device, ffpa_is_on, taken):
    x = t(1, 2, 9, 64, device=device)
    sdpa_backend.torch_sdpa(x, x, x)
    assert not taken
    ffpa_attn.ffpa(x, x, x)
    OF_DENSE(x.float(), x.float(), x.float())
    assert not taken


def test_pytorch_chooses_past_its_dispatcher():
    """This is why the function is replaced, and no kernel below it."""
    asked, x = [], t(1, 2, 9, 64)
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is replaced
        library.impl("_fused_sdp_choice", lambda *args, **options: asked.append(args) or 0, "CPU")
    OF_DENSE(x, x, x)
    assert not asked
    assert torch._fused_sdp_choice(x, x, x) == 0 and asked
