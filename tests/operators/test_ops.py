"""Tests operators as PyTorch sees them: frozen schemas, fakes, autograd, autocast, compile, checkpointing, graphs."""

import re

import compare
import ffpa_attn
import oracle
import pytest
import torch
from cases import Case, PackedCase, make_inputs, make_packed_inputs
from ffpa_attn.operators import dispatch_keys, ops
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

OPS = torch.ops.ffpa_attn

# These are as first published. Ring attention, context parallelism, checkpointing and exported programs call them by
# name: they grow at their ends alone, or get new operators beside them.
FROZEN = {
    "forward": "ffpa_attn::forward(Tensor q, Tensor k, Tensor v, Tensor? mask=None, *, float? scale=None, bool causal=False, "
    'str align="bottom_right", int window_left=-1, int window_right=-1, float softcap=0., str layout="BHND", '
    'bool return_lse=True, int? level=None, str acc="f32", int? num_stages=None) -> (Tensor out, Tensor lse)',
    "forward_out": "ffpa_attn::forward_out(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor? mask=None, *, float? scale=None, "
    'bool causal=False, str align="bottom_right", int window_left=-1, int window_right=-1, float softcap=0., str layout="BHND", '
    'bool return_lse=True, int? level=None, str acc="f32", int? num_stages=None) -> Tensor lse',
    "varlen_forward": "ffpa_attn::varlen_forward(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    'SymInt max_seqlen_q, SymInt max_seqlen_k, *, float? scale=None, bool causal=False, str align="bottom_right", '
    "int window_left=-1, int window_right=-1, float softcap=0., bool return_lse=True, int? level=None, "
    'str acc="f32", int? num_stages=None) -> (Tensor out, Tensor lse)',
    "varlen_forward_out": "ffpa_attn::varlen_forward_out(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor cu_seqlens_q, "
    "Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, *, float? scale=None, bool causal=False, "
    'str align="bottom_right", int window_left=-1, int window_right=-1, float softcap=0., bool return_lse=True, '
    'int? level=None, str acc="f32", int? num_stages=None) -> Tensor lse',
    "backward": "ffpa_attn::backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    'Tensor? mask=None, *, float? scale=None, bool causal=False, str align="bottom_right", int window_left=-1, '
    'int window_right=-1, float softcap=0., str layout="BHND", bool mask_grad=False, bool fp32_grads=False) '
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dmask)",
    "varlen_backward": "ffpa_attn::varlen_backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, "
    "Tensor lse, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, *, float? scale=None, "
    'bool causal=False, str align="bottom_right", int window_left=-1, int window_right=-1, float softcap=0., '
    "bool fp32_grads=False) -> (Tensor dq, Tensor dk, Tensor dv)",
    "fp8_forward": "ffpa_attn::fp8_forward(Tensor q, Tensor k, Tensor v, Tensor? q_scale=None, Tensor? k_scale=None, "
    'Tensor? v_scale=None, *, float? scale=None, bool causal=False, str align="bottom_right", int window_left=-1, '
    "int window_right=-1, float softcap=0., ScalarType out_dtype, bool v_transposed=False, bool return_lse=True) "
    "-> (Tensor out, Tensor lse)",
}


def with_sinks(name: str) -> str:
    return FROZEN[name].replace(" *,", " Tensor? sinks=None, *,", 1)


def with_max_logits(name: str) -> str:
    old, new = (
        ("-> Tensor lse", "-> (Tensor lse, Tensor max_logits)")
        if "_out" in name
        else ("lse)", "lse, Tensor max_logits)")
    )
    head, _, _ = with_sinks(name).replace(f"{name}(", f"{name}_max_logits(").rpartition(old)
    return head + new


# These came later, and grow no otherwise.
FORWARDS = ("forward", "forward_out", "varlen_forward", "varlen_forward_out", "fp8_forward")
LATER = {name: with_sinks(name) for name in FORWARDS} | {
    f"{name}_max_logits": with_max_logits(name) for name in FORWARDS
}
LATER |= {name: FROZEN[name].replace(" *,", " Tensor? delta=None, *,", 1) for name in ("backward", "varlen_backward")}
LATER["sink_gradient"] = (
    "ffpa_attn::sink_gradient(Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor lse, Tensor sinks, *, "
    'str layout="BHND") -> Tensor dsinks'
)
LATER["sink_gradient_delta"] = (
    LATER["sink_gradient"]
    .replace("gradient(", "gradient_delta(")
    .replace("Tensor dsinks", "(Tensor dsinks, Tensor delta)")
)

PAGED = (
    "Tensor? cu_seqlens_q, Tensor seqused_k, Tensor? block_table, Tensor? leftpad_k, Tensor? cu_seqlens_k_new, SymInt more_k, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, Tensor? sinks=None, Tensor? k_scale=None, Tensor? v_scale=None, *, Scalar? scale=None, "
    'bool causal=False, str align="bottom_right", SymInt window_left=-1, SymInt window_right=-1, Scalar softcap=0., bool return_lse=True, '
    'int? level=None, str acc="f32", int? num_stages=None)'
)
POOLS = "Tensor q, Tensor k_pages, Tensor v_pages"
for _more, _result in (("", ""), ("_max_logits", ", Tensor max_logits")):
    _lse = f"(Tensor lse{_result})" if _result else "Tensor lse"
    LATER |= {
        f"paged_forward{_more}": f"ffpa_attn::paged_forward{_more}({POOLS}, {PAGED} -> (Tensor out, Tensor lse{_result})",
        f"paged_forward_out{_more}": f"ffpa_attn::paged_forward_out{_more}({POOLS}, Tensor(a!) out, {PAGED} -> {_lse}",
    }
LATER["append_to_cache"] = (
    "ffpa_attn::append_to_cache(Tensor k, Tensor v, Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor cache_seqlens, "
    "Tensor? block_table, Tensor? cu_seqlens_k_new, Tensor? k_scale=None, Tensor? v_scale=None) -> ()"
)


WIDER = {"int": ("int", "SymInt"), "float": ("float", "Scalar"), "float?": ("float?", "Scalar?")}


def broken_by(new, old) -> str | None:
    """Says what a caller of the old schema would miss. New ones may have further arguments with defaults behind the old
    ones, by place or by name, and take more than the old ones did: a symbol or any number for an int or a float.
    """
    if [str(x.type) for x in new.returns] != [str(x.type) for x in old.returns]:
        return "returns"
    for by_name in (False, True):
        of_new, of_old = ([x for x in schema.arguments if x.kwarg_only == by_name] for schema in (new, old))
        for was in of_old:
            now = of_new.pop(0) if of_new else None
            if now is None or (now.name, now.default_value) != (was.name, was.default_value):
                return was.name
            of_now, of_was = written_type(new, was.name), written_type(old, was.name)
            if of_now not in WIDER.get(of_was, (of_was,)):
                return was.name
        if any(not x.has_default_value() for x in of_new):
            return of_new[0].name
    return None


def written_type(schema, name: str) -> str:
    """Returns the type in the schema's text: PyTorch's objects call a SymInt an int."""
    return re.search(rf"([\w?()!]+) {name}\b", str(schema).partition("(")[2])[1]


@pytest.mark.parametrize("schema", [*FROZEN.values(), *LATER.values()], ids=lambda x: x.partition("(")[0])
def test_schemas_grow_at_the_end(schema):
    old = torch._C.parse_schema(schema)
    assert broken_by(getattr(OPS, old.name.partition("::")[2]).default._schema, old) is None


@pytest.mark.parametrize(
    "new, breaks",
    [
        ("Tensor q, int n=1, *, float scale=1., bool causal=False", None),
        ("Tensor q, int n=1, Tensor? sinks=None, *, float scale=1., bool causal=False, int pages=0", None),
        ("Tensor q, SymInt n=1, *, Scalar scale=1., bool causal=False", None),
        ("Tensor q, *, float scale=1., bool causal=False", "n"),
        ("Tensor q, int n=2, *, float scale=1., bool causal=False", "n"),
        ("Tensor k, Tensor q, int n=1, *, float scale=1., bool causal=False", "q"),
        ("Tensor q, int rows=1, *, float scale=1., bool causal=False", "n"),
        ("Tensor q, int n=1, *, bool causal=False, float scale=1.", "scale"),
        ("Tensor q, bool n=1, *, float scale=1., bool causal=False", "n"),
        ("Tensor? q, int n=1, *, float scale=1., bool causal=False", "q"),
        ("Tensor q, int n=1, *, int scale=1, bool causal=False", "scale"),
        ("Tensor q, int n=1, *, float scale=1., bool causal=False, int pages", "pages"),
        ("Tensor(a!) q, int n=1, *, float scale=1., bool causal=False", "q"),
    ],
)
def test_what_breaks_a_schema(new, breaks):
    schemas = (
        f"x::f({arguments}) -> Tensor" for arguments in (new, "Tensor q, int n=1, *, float scale=1., bool causal=False")
    )
    assert broken_by(*map(torch._C.parse_schema, schemas)) == breaks
    other = torch._C.parse_schema("x::f(Tensor q) -> (Tensor, Tensor)")
    assert broken_by(other, torch._C.parse_schema("x::f(Tensor q) -> Tensor")) == "returns"


CASE = Case(batch=2, heads_q=4, heads_kv=2, n_q=20, n_k=33, d=64, d_v=72)
PACKED = PackedCase((9, 20), (20, 13), heads_q=4, heads_kv=2, d=64)


def dense(device, mask=None, grad=True, **changes):
    q, k, v, mask = make_inputs(CASE.with_(mask=mask, **changes), device)
    return [x.detach().clone().requires_grad_(grad) for x in (q, k, v)] + [mask]


def packed(device, grad=True):
    q, k, v, *offsets = make_packed_inputs(PACKED, device)
    return [x.detach().clone().requires_grad_(grad) for x in (q, k, v)] + offsets


RULES = [{}, {"causal": True, "scale": 0.3, "softcap": 4.0}, {"window_left": 5, "window_right": 2, "align": "top_left"}]


class TestOpcheck:
    @pytest.mark.parametrize("rule", RULES, ids=str)
    def test_forward(self, device, rule):
        torch.library.opcheck(OPS.forward.default, tuple(dense(device, "bool")), rule)

    @pytest.mark.parametrize("more", [{"return_lse": False}, {"layout": "BNHD"}], ids=str)
    def test_forward_options(self, device, more):
        layout = more.get("layout", "BHND")
        torch.library.opcheck(OPS.forward.default, tuple(dense(device, grad=False, layout=layout)[:3]), more)

    def test_forward_with_mask_gradient(self, device):
        q, k, v, mask = dense(device, "additive")
        torch.library.opcheck(OPS.forward.default, (q, k, v, mask.requires_grad_()))

    def test_forward_out(self, device):
        q, k, v, _ = dense(device, grad=False)
        out = torch.empty(*q.shape[:3], v.shape[3], dtype=q.dtype, device=device)
        torch.library.opcheck(OPS.forward_out.default, (q, k, v, out))

    @pytest.mark.parametrize("rule", RULES, ids=str)
    def test_varlen_forward(self, device, rule):
        torch.library.opcheck(OPS.varlen_forward.default, tuple(packed(device)), rule)

    def test_varlen_forward_out(self, device):
        q, k, v, *offsets = packed(device, grad=False)
        torch.library.opcheck(OPS.varlen_forward_out.default, (q, k, v, torch.empty_like(q), *offsets))

    @pytest.mark.parametrize("fp32_grads", [False, True])
    def test_backward(self, device, fp32_grads):
        q, k, v, mask = dense(device, "additive", grad=False)
        out, lse = OPS.forward(q, k, v, mask)
        args = (torch.randn_like(out), torch.randn_like(lse), q, k, v, out, lse, mask)
        torch.library.opcheck(OPS.backward.default, args, {"mask_grad": True, "fp32_grads": fp32_grads})

    def test_varlen_backward(self, device):
        q, k, v, *offsets = packed(device, grad=False)
        out, lse = OPS.varlen_forward(q, k, v, *offsets)
        torch.library.opcheck(OPS.varlen_backward.default, (torch.randn_like(out), None, q, k, v, out, lse, *offsets))


class TestBackwardOp:
    def test_global_out_and_lse(self, device):
        """The backward of each half of the keys has the merged out and LSE: the sum is the whole gradient."""
        q, k, v, _ = dense(device, grad=False, d_v=64)
        whole = [x.clone().requires_grad_() for x in (q, k, v)]
        out = ffpa_attn.ffpa(*whole)
        g = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
        want = torch.autograd.grad(out, whole, g)

        halves = [(k[:, :, :16], v[:, :, :16]), (k[:, :, 16:], v[:, :, 16:])]
        parts = [OPS.forward(q, *half) for half in halves]
        merged, lse = ffpa_attn.merge(*parts[0], *parts[1])
        got = [OPS.backward(g, None, q, *half, merged, lse, fp32_grads=True) for half in halves]
        dq = got[0][0] + got[1][0]
        dk, dv = (torch.cat([got[0][i], got[1][i]], 2) for i in (1, 2))
        for name, x, y in zip(("dq", "dk", "dv"), (dq, dk, dv), want, strict=True):
            assert x.dtype == torch.float32
            torch.testing.assert_close(x, y.float(), atol=2e-2, rtol=2e-2, msg=name)

    def test_bits_repeat(self, device):
        q, k, v, _ = dense(device)
        out = ffpa_attn.ffpa(q, k, v, causal=True)
        g = torch.randn_like(out)
        first = torch.autograd.grad(out, (q, k, v), g, retain_graph=True)
        for _ in range(5):
            again = torch.autograd.grad(out, (q, k, v), g, retain_graph=True)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))

    def test_only_lse_used(self, device):
        q, k, v, _ = dense(device)
        _, lse = ffpa_attn.ffpa(q, k, v, return_lse=True)
        lse.sum().backward()
        q2, k2 = (x.detach().double().requires_grad_() for x in (q, k))
        oracle.attention(q2, k2, v.detach())[1].sum().backward()
        torch.testing.assert_close(q.grad.double(), q2.grad, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(k.grad.double(), k2.grad, atol=2e-2, rtol=2e-2)
        assert not v.grad.any()

    def test_expanded_gradient(self, device):
        """sum().backward() hands over one scalar with strides 0."""
        q, k, v, _ = dense(device)
        ffpa_attn.ffpa(q, k, v).sum().backward()
        assert torch.isfinite(q.grad).all()
        v2 = v.detach().double().requires_grad_()
        oracle.attention(q.detach(), k.detach(), v2)[0].sum().backward()
        torch.testing.assert_close(v.grad.double(), v2.grad, atol=5e-2, rtol=2e-2)

    def test_operators_record_no_graph(self, device):
        """Called directly with inputs that require grad, operators keep no tile alive."""
        q, k, v, _ = dense(device)
        out, lse = (x.detach() for x in OPS.forward(q, k, v))
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda x: x):
            OPS.backward(torch.ones_like(out), None, q, k, v, out, lse)
            OPS.forward_out(q, k, v, out)
        assert not kept

    def test_a_row_without_keys_passes_on_nothing(self, device):
        """Nothing of the row's q, dO and dLSE is passed on, whatever they hold."""
        q, k, v, _ = dense(device, grad=False)
        mask = torch.ones(20, 33, dtype=torch.bool, device=device)
        mask[3:5] = False
        q[:, :, 3] = torch.nan
        q.requires_grad_()
        k.requires_grad_()
        out, lse = ffpa_attn.ffpa(q, k, v, mask=mask, return_lse=True)
        g, g_lse = torch.randn_like(out), torch.randn_like(lse)
        g[:, :, 4], g_lse[:, :, 3], g_lse[:, :, 4] = torch.nan, torch.inf, torch.nan
        dq, dk = torch.autograd.grad([out, lse], [q, k], [g, g_lse])
        assert torch.isfinite(dk).all() and torch.isfinite(dq).all() and not dq[:, :, 3:5].any()

    def test_forward_mode_is_refused(self, device):
        q, k, v, _ = dense(device, grad=False)
        with pytest.raises((RuntimeError, NotImplementedError), match="jvp|forward"):
            torch.func.jvp(lambda q: ffpa_attn.ffpa(q, k, v), (q,), (torch.ones_like(q),))


class TestAutocast:
    def test_float32_becomes_the_autocast_type(self, device):
        q, k, v, _ = dense(device, grad=False)
        q, k, v = (x.float().requires_grad_() for x in (q, k, v))
        with torch.autocast(device, dtype=torch.bfloat16):
            out = ffpa_attn.ffpa(q, k, v, causal=True)
        assert out.dtype == torch.bfloat16
        assert torch.equal(out, ffpa_attn.ffpa(q.bfloat16(), k.bfloat16(), v.bfloat16(), causal=True))
        out.float().square().sum().backward()
        assert q.grad.dtype == torch.float32 and q.grad.any()

    def test_varlen(self, device):
        q, k, v, *offsets = packed(device, grad=False)
        with torch.autocast(device, dtype=torch.float16):
            assert ffpa_attn.ffpa_varlen(q.float(), k.float(), v.float(), *offsets).dtype == torch.float16

    def test_out_and_gradients_are_not_cast(self, device):
        """The body of an operator means what it says inside an autocast region too."""
        q, k, v, _ = dense(device, grad=False, d_v=64)
        wanted = ffpa_attn.ffpa(q, k, v, return_lse=True)
        saved = OPS.backward(*wanted[:1], None, q, k, v, *wanted, fp32_grads=True)
        with torch.autocast(device, dtype=torch.bfloat16):
            out = torch.empty_like(q)
            got = ffpa_attn.ffpa(q.float(), k.float(), v.float(), out=out, return_lse=True)
            again = OPS.backward(*wanted[:1], None, q, k, v, *wanted, fp32_grads=True)
        assert all(torch.equal(a, b) for a, b in zip((*got, *again), (*wanted, *saved), strict=True))

    def test_16_bit_stays(self, device):
        q, k, v, _ = dense(device, grad=False)
        with torch.autocast(device, dtype=torch.float16 if q.dtype == torch.bfloat16 else torch.bfloat16):
            assert ffpa_attn.ffpa(q, k, v).dtype == q.dtype


class TestCompile:
    def compiled(self, function, **options):
        counter = CompileCounterWithBackend("aot_eager")
        return torch.compile(function, backend=counter, fullgraph=True, **options), counter

    @pytest.mark.parametrize(
        "rule", [{}, {"causal": "top_left", "softcap": 3.0}, {"window": (4, 4), "return_lse": True}], ids=str
    )
    def test_same_values_and_gradients(self, device, rule):
        inputs = dense(device)[:3]
        function, _ = self.compiled(lambda q, k, v: ffpa_attn.ffpa(q, k, v, **rule))
        got, want = function(*inputs), ffpa_attn.ffpa(*inputs, **rule)
        for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (got, want)), strict=True):
            assert torch.equal(a, b) and a.stride() == b.stride()
            grads = [
                torch.autograd.grad(x.float().square().sum(), inputs, retain_graph=True, allow_unused=True)
                for x in (a, b)
            ]
            assert all(torch.equal(x, y) for x, y in zip(*grads, strict=True))

    @pytest.mark.long(seconds=50)  # this test is the first for which Inductor compiles
    def test_inductor(self, device):
        inputs = dense(device)[:3]
        function = torch.compile(
            lambda q, k, v: (ffpa_attn.ffpa(q * 2, k, v.transpose(2, 3).contiguous().mT.contiguous()) + 1).sum(),
            fullgraph=True,
        )
        want = (ffpa_attn.ffpa(inputs[0] * 2, *inputs[1:]) + 1).sum()
        torch.testing.assert_close(function(*inputs), want)
        function(*inputs).backward()

    def test_one_graph_for_all_lengths(self, device):
        function, counter = self.compiled(lambda q, k, v: ffpa_attn.ffpa(q, k, v, causal=True), dynamic=True)
        compiled = []
        for n_q, n_k in ((20, 33), (21, 40), (64, 64), (7, 90)):
            inputs = dense(device, n_q=n_q, n_k=n_k)[:3]
            assert torch.equal(function(*inputs), ffpa_attn.ffpa(*inputs, causal=True))
            compiled.append(counter.frame_count)
        assert compiled == compiled[:1] * 4

    def test_one_graph_for_all_packings(self, device):
        function, counter = self.compiled(lambda *args: ffpa_attn.ffpa_varlen(*args, causal=True), dynamic=True)
        compiled = []
        for lengths in ((9, 20), (13, 2, 40), (5, 5, 5, 5)):
            case = PackedCase(lengths, lengths)
            args = make_packed_inputs(case, device)
            assert torch.equal(function(*args), ffpa_attn.ffpa_varlen(*args, causal=True))
            compiled.append(counter.frame_count)
        assert compiled == compiled[:1] * 3

    def test_out(self, device):
        q, k, v, _ = dense(device, grad=False)
        function, _ = self.compiled(lambda q, k, v, out: ffpa_attn.ffpa(q, k, v, out=out))
        out = torch.full((*q.shape[:3], v.shape[3]), torch.nan, dtype=q.dtype, device=device)
        function(q, k, v, out)
        assert torch.equal(out, ffpa_attn.ffpa(q, k, v))

    def test_mask_and_layout(self, device):
        q, k, v, mask = dense(device, "additive")
        q, k, v = (x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v))
        mask.requires_grad_()
        function, _ = self.compiled(lambda q, k, v, mask: ffpa_attn.ffpa(q, k, v, mask=mask, layout="BNHD"))
        got, want = function(q, k, v, mask), ffpa_attn.ffpa(q, k, v, mask=mask, layout="BNHD")
        assert torch.equal(got, want)
        grads = [torch.autograd.grad(x.float().square().sum(), (q, mask)) for x in (got, want)]
        assert all(torch.equal(x, y) for x, y in zip(*grads, strict=True))


class TestCheckpointing:
    @pytest.mark.parametrize("saved", [True, False])
    def test_selective_checkpointing_saves_by_name(self, device, saved, monkeypatch):
        q, k, v, _ = dense(device)
        runs, run = [], ops.run

        def counted(plan, direction, *args, **more):
            runs.extend([1] * (direction == "forward"))
            run(plan, direction, *args, **more)

        monkeypatch.setattr(ops, "run", counted)

        def policy(ctx, op, *args, **kwargs):
            keep = saved and op is OPS.forward.default
            return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

        def block(q, k, v):
            return (ffpa_attn.ffpa(q * 1.5, k, v, causal=True) * 2).sum()

        want = torch.autograd.grad(block(q, k, v), (q, k, v))
        runs.clear()
        loss = checkpoint(
            block, q, k, v, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
        )
        got = torch.autograd.grad(loss, (q, k, v))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert len(runs) == (1 if saved else 2)

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_full_checkpointing(self, device, use_reentrant):
        q, k, v, _ = dense(device)
        want = torch.autograd.grad(ffpa_attn.ffpa(q, k, v).float().square().sum(), (q, k, v))
        checkpoint(ffpa_attn.ffpa, q, k, v, use_reentrant=use_reentrant).float().square().sum().backward()
        assert all(torch.equal(x.grad, y) for x, y in zip((q, k, v), want, strict=True))


class Wrapped(torch.Tensor):
    pass


class Modes:
    """Lists what may stand between a call and the operator's body."""

    class Dispatch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    class Function(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    autocast = staticmethod(lambda: torch.autocast("cpu", torch.bfloat16))
    profiler = staticmethod(lambda: torch.autograd.profiler.profile())
    dual = staticmethod(torch.autograd.forward_ad.dual_level)


class TestAtOnce:
    """A call goes past the dispatcher where the dispatcher has nothing to add, and nowhere else."""

    @pytest.mark.parametrize("grad", [torch.enable_grad, torch.no_grad, torch.inference_mode])
    def test_plain_tensors(self, grad, device):
        q, k, v, _ = dense(device)
        with torch.no_grad():
            q, k, v = (x.clone() for x in (q, k, v))
        with grad():
            assert dispatch_keys.at_once("forward", q, k, v, None) is ops._BODIES["forward"]

    @pytest.mark.parametrize("mode", ["Dispatch", "Function", "autocast", "profiler", "dual"])
    def test_modes(self, mode):
        q = torch.zeros(1, 1, 2, 8, dtype=torch.bfloat16)
        with getattr(Modes, mode)():
            assert dispatch_keys.at_once("forward", q, q, q) is OPS.forward.default
        assert dispatch_keys.at_once("forward", q, q, q) is not OPS.forward.default

    @pytest.mark.parametrize("which", range(3))
    @pytest.mark.parametrize(
        "kind",
        [
            lambda x: x.as_subclass(Wrapped),
            torch._neg_view,
            lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
            lambda x: x.to_sparse(),
            lambda x: x.to("meta"),
        ],
        ids=["subclass", "negative", "zero", "sparse", "meta"],
    )
    def test_tensors(self, kind, which):
        tensors = [torch.zeros(1, 1, 2, 8, dtype=torch.bfloat16) for _ in range(3)]
        tensors[which] = kind(tensors[which])
        if tensors[which].is_meta and which:
            pytest.skip("the body refuses tensors of several devices, as the operator does")
        assert dispatch_keys.at_once("forward", *tensors) is OPS.forward.default

    def test_parameters(self, device):
        """They are as plain as other tensors: sinks are parameters of models."""
        q, k, v = (x.detach().clone() for x in dense(device)[:3])
        sinks = torch.nn.Parameter(torch.zeros(q.shape[1], device=device))
        assert dispatch_keys.at_once("forward", q, k, v, None, sinks) is dispatch_keys.recorder("forward")
        with torch.no_grad():
            assert dispatch_keys.at_once("forward", q, k, v, None, sinks) is ops._BODIES["forward"]

    @pytest.mark.parametrize("which", range(3))
    def test_gradients_alone(self, which, device):
        """What records the call does what the Autograd key would do."""
        tensors = [x.detach().clone() for x in dense(device)[:3]]
        tensors[which].requires_grad_()
        assert dispatch_keys.at_once("forward_out", *tensors) is OPS.forward_out.default
        recorded, results = dispatch_keys.at_once("forward", *tensors), []
        assert recorded is dispatch_keys.recorder("forward")
        with torch._C._AutoDispatchBelowAutograd():
            assert dispatch_keys.at_once("forward", *tensors) is OPS.forward.default
        with torch.no_grad():
            assert dispatch_keys.at_once("forward", *tensors) is ops._BODIES["forward"]
        for function in (recorded, OPS.forward.default):
            out, lse = function(*tensors, None, causal=True, return_lse=True)
            (grad,) = torch.autograd.grad((out.float().sin().sum() + lse.sum()), tensors[which])
            results.append((out, lse, grad, type(out.grad_fn)))
        for x, y in zip(*results, strict=True):
            assert x is y or torch.equal(x, y)

    def test_transforms_and_traces(self):
        seen, q = [], torch.randn(2, 1, 1, 4, 8)

        def call(q):
            seen.append(dispatch_keys.at_once("forward", q, q, q))
            return q.sum()

        torch.vmap(call)(q)
        torch.func.grad(call)(q)
        torch.jit.trace(call, q, check_trace=False)
        assert len(seen) >= 3 and all(op is OPS.forward.default for op in seen)

    def test_batched_gradients(self, device):
        """The vmap of autograd has tensors of the plain type that only their dispatch keys tell from plain ones."""

        class Backward(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, grad):
                return ffpa_attn.ffpa(grad.contiguous(), k, k)

        with torch.no_grad():
            q, k, _, _ = dense(device)
        q = q.detach().requires_grad_()
        grads = torch.stack([torch.ones_like(q), -torch.ones_like(q)])
        found = torch.autograd.grad(Backward.apply(q), q, grads, is_grads_batched=True)[0]
        with torch.no_grad():
            torch.testing.assert_close(found, torch.stack([ffpa_attn.ffpa(grad, k, k) for grad in grads]))

    def test_a_negative_view_has_the_numbers_of_its_tensor(self, device):
        with torch.no_grad():
            q, k, v, _ = dense(device)
            assert torch.equal(ffpa_attn.ffpa(torch._neg_view(q), k, v), ffpa_attn.ffpa(-q, k, v))

    def test_options_of_another_call_stay_its_own(self, device):
        with torch.no_grad():
            q, k, v, _ = dense(device)
            want = ffpa_attn.ffpa(q, k, v)
            other = ffpa_attn.ffpa(*(x.transpose(1, 2).contiguous() for x in (q, k, v)), layout="BNHD")
            assert torch.equal(ffpa_attn.ffpa(q, k, v), want) and torch.equal(other.transpose(1, 2), want)
            for wrong in ({"causal": 0}, {"window": (-1.0, -1)}, {"softcap": True}, {"window": (-1, True)}):
                with pytest.raises(TypeError):
                    ffpa_attn.ffpa(q, k, v, **wrong)


def test_fake_tensors_need_no_memory():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q = torch.empty(8, 32, 131072, 512, dtype=torch.bfloat16, device="cuda")
        k = torch.empty(8, 4, 131072, 512, dtype=torch.bfloat16, device="cuda")
        out, lse = ffpa_attn.ffpa(q, k, k, causal=True, return_lse=True)
    assert out.shape == q.shape and lse.shape == (8, 32, 131072) and out.device.type == "cuda"


def test_meta_tensors():
    q = torch.empty(2, 4, 100, 512, dtype=torch.float16, device="meta")
    assert ffpa_attn.ffpa(q, q, q).shape == q.shape


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestOnAGpu:
    def test_no_wait_for_the_gpu(self):
        q, k, v, _ = dense("cuda")
        x, y, z, *offsets = packed("cuda")
        torch.cuda.set_sync_debug_mode("error")
        try:
            ffpa_attn.ffpa(q, k, v, causal=True, window=(9, -1)).float().sum().backward()
            ffpa_attn.ffpa_varlen(x, y, z, *offsets, causal=True).float().sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def test_no_wait_beside_sinks(self):
        q, k, v, mask = dense("cuda", mask="additive")
        x, y, z, *offsets = packed("cuda")
        sinks = torch.zeros(q.shape[1], device="cuda", requires_grad=True)
        of_packed, asked = torch.zeros(x.shape[1], device="cuda", requires_grad=True), {"return_max_logits": True}
        torch.cuda.set_sync_debug_mode("error")
        try:
            ffpa_attn.ffpa(q, k, v, causal=True, sinks=sinks, **asked)[0].float().sum().backward()
            ffpa_attn.ffpa(q, k, v, mask=mask, sinks=sinks, **asked)[0].float().sum().backward()
            ffpa_attn.ffpa_varlen(x, y, z, *offsets, sinks=of_packed, **asked)[0].float().sum().backward()
            none = offsets[0], torch.zeros_like(offsets[1]), offsets[2], 0
            ffpa_attn.ffpa_varlen(x, y[:0], z[:0], *none, sinks=of_packed, **asked)[0].float().sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def test_graph_capture(self):
        x, y, z, *offsets = packed("cuda", grad=False)
        want = ffpa_attn.ffpa_varlen(x, y, z, *offsets, causal=True)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            ffpa_attn.ffpa_varlen(x, y, z, *offsets, causal=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            got = ffpa_attn.ffpa_varlen(x, y, z, *offsets, causal=True)
        graph.replay()
        assert torch.equal(got, want)

    @pytest.mark.parametrize("how", ["plain", "checkpointed", "compiled"])
    def test_training_steps_of_a_graph(self, how):
        """Heads are wide, grouped and causal: replayed, the steps give the bits that they give one by one."""

        def attend(q, k, v):
            return ffpa_attn.ffpa(q, k, v, causal=True)

        ways = {
            "plain": attend,
            "checkpointed": lambda *x: checkpoint(attend, *x, use_reentrant=False, preserve_rng_state=False),
            "compiled": torch.compile(attend, backend="aot_eager", fullgraph=True),
        }
        torch.manual_seed(0)
        x = torch.randn(1, 8192, 64, device="cuda", dtype=torch.bfloat16)
        weights = torch.randn(64, 4 * 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        before = weights.detach().clone()

        def step(attend=ways[how]):
            qkv = (x @ weights).unflatten(-1, (4, 512)).transpose(1, 2)
            loss = attend(*qkv.split([2, 1, 1], 1)).float().square().mean()
            (gradient,) = torch.autograd.grad(loss, weights)
            with torch.no_grad():
                weights.sub_(gradient * 1e3)

        for _ in range(3):
            step(attend)
        want = weights.detach().clone()
        assert not torch.equal(want, before)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            step()
        with torch.no_grad():
            weights.copy_(before)
        for _ in range(3):
            graph.replay()
        assert torch.equal(weights, want)

    def test_current_stream(self):
        q, k, v, _ = dense("cuda", grad=False, n_q=500, n_k=500)
        want = ffpa_attn.ffpa(q * 2, k, v)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            doubled = q * 2
            got = ffpa_attn.ffpa(doubled, k, v)
        torch.cuda.current_stream().wait_stream(stream)
        assert torch.equal(got, want)


@pytest.mark.parametrize("layout", ["BHND", "BNHD"])
def test_out_and_gradients_of_strided_chunks(device, layout):
    """q, k and v are chunks of one packed tensor, as image models pass them: no copy, same numbers."""
    x = torch.randn(2, 50, 3, 64, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    q, k, v = (x[:, :, i, None] for i in range(3))  # [B, N, 1, D], row stride 3 D
    if layout == "BHND":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = ffpa_attn.ffpa(q, k, v, layout=layout)
    want, _ = oracle.attention(q, k, v, layout=layout)
    compare.assert_close("out", out, want, compare.baseline(q, k, v, layout=layout)[0])
