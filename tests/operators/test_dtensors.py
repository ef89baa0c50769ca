"""Tests DTensors sharded by batch or heads, which ffpa takes as they are, and FSDP2, on test_distributed.py's ranks."""

import sys

import pytest
import torch
import torch.distributed as dist
from ffpa_attn import distributed, ffpa, ffpa_varlen
from test_distributed import NAMES, inputs, main, start, with_gradients


@pytest.mark.parametrize("world", [2, 4])
def test_dtensors(world, tmp_path):
    start(__file__, "dtensors", "cpu", world, tmp_path)


# ---- what the processes run ----


def silently(call):
    """Runs a call, and sees that nothing is sent."""
    from torch.distributed.tensor.debug import CommDebugMode

    with CommDebugMode() as sent:
        result = call()
    assert not sent.get_total_counts(), sent.get_comm_counts()
    return result


def placed(tensors, mesh, placements):
    from torch.distributed.tensor import distribute_tensor

    return [distribute_tensor(x, mesh, placements) for x in tensors]


def full(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def meshes():
    """Returns a mesh of this world, and placements that cut batch and heads alone; `heads` is the heads' dim."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    if dist.get_world_size() == 2:
        mesh = init_device_mesh("cpu", (2,))
        return mesh, lambda heads: [[Shard(0)], [Shard(heads)], [Replicate()]]
    mesh = init_device_mesh("cpu", (2, 2))
    return mesh, lambda heads: [[Shard(0), Shard(heads)], [Shard(heads), Replicate()], [Replicate(), Shard(0)]]


def dtensors_by_batch_and_heads():
    mesh, ways = meshes()
    of_shapes = inputs(6), inputs(4, heads=(4, 4))  # the latter's shapes are the same in both layouts
    for layout, heads, whole in (
        (*how, whole) for whole in of_shapes for how in (("BHND", 1), ("BNHD", 2), ("BHND", 1))
    ):
        turned = [x if layout == "BHND" else x.transpose(1, 2).contiguous() for x in whole[:4]]
        want = with_gradients(ffpa, *turned, whole[4], causal=True, layout=layout, return_lse=True)
        for way in ways(heads):
            *qkv, grad_out = placed(turned, mesh, way)
            (grad_lse,) = placed(whole[4:], mesh, [type(p)(1) if p.is_shard(heads) else p for p in way])
            rule = {"causal": True, "layout": layout, "return_lse": True}
            got = silently(lambda args=(*qkv, grad_out, grad_lse), rule=rule: with_gradients(ffpa, *args, **rule))
            for name, x, y in zip(NAMES, got, want, strict=True):
                assert x.placements == (grad_lse if name == "lse" else grad_out).placements, (layout, way, name)
                torch.testing.assert_close(full(x), y, msg=f"{layout} {way} {name}")
            with torch.no_grad():
                assert torch.equal(full(ffpa(*qkv, causal=True, layout=layout)), full(got[0]))


def dtensors_with_masks():
    from torch.distributed.tensor import Replicate

    mesh, ways = meshes()
    q, k, v, grad, _ = inputs(6)
    for shape in ((6, 6), (4, 1, 6), (2, 1, 6, 6), (1, 4, 6, 1), (2, 4, 6, 6)):
        mask = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
        whole = [x.clone().requires_grad_() for x in (q, k, v, mask)]
        want = ffpa(*whole[:3], mask=whole[3])
        want_grads = torch.autograd.grad(want, whole, grad)
        for way in ways(1):
            parts = [x.requires_grad_() for x in placed((q, k, v), mesh, way)]
            dims = [len(shape) - 4 + (0 if p.is_shard(0) else 1) for p in way]
            cut = [p.is_shard() and dim >= 0 and shape[dim] > 1 for p, dim in zip(way, dims, strict=True)]
            places = [type(p)(d) if c else Replicate() for p, d, c in zip(way, dims, cut, strict=True)]
            (part,) = placed([mask], mesh, places)
            (g,) = placed([grad], mesh, way)
            part.requires_grad_()
            out, grads = silently(
                lambda p=parts, m=part, g=g: (o := ffpa(*p, mask=m), torch.autograd.grad(o, [*p, m], g))
            )
            torch.testing.assert_close(full(out), want)
            sums = [p.is_shard() and not c for p, c in zip(way, cut, strict=True)]
            assert [p.is_partial() for p in grads[3].placements] == sums, (shape, way)
            for x, y in zip(grads, want_grads, strict=True):
                torch.testing.assert_close(full(x), y, atol=4e-2, rtol=2e-2)


def dtensors_of_packed_sequences():
    from torch.distributed.tensor import Replicate, Shard

    mesh, _ = meshes()
    q, k, v, grad, _ = (x.transpose(1, 2).flatten(0, 1).contiguous() for x in inputs(6)[:4] + inputs(6)[3:4])
    offsets = torch.tensor([0, 5, 12], dtype=torch.int32)
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    want = ffpa_varlen(*whole, offsets, offsets, 7, 7, causal=True)
    by_heads = [Shard(1), Replicate()][: mesh.ndim]
    parts = [x.requires_grad_() for x in placed((q, k, v), mesh, by_heads)]
    (everywhere,) = placed([offsets], mesh, [Replicate()] * mesh.ndim)
    (g,) = placed([grad], mesh, by_heads)

    def call():
        out = ffpa_varlen(*parts, everywhere, everywhere, 7, 7, causal=True)
        return out, *torch.autograd.grad(out, parts, g)

    for x, y in zip(silently(call), (want, *torch.autograd.grad(want, whole, grad)), strict=True):
        assert x.placements == tuple(by_heads)
        torch.testing.assert_close(full(x), y)


def dtensors_with_sinks():
    """Sinks are cut where heads are; where the batch is cut their gradient is a sum of the ranks'."""
    from torch.distributed.tensor import Replicate, Shard

    mesh, ways = meshes()
    q, k, v, grad, _ = inputs(6)
    for layout, heads in (("BHND", 1), ("BNHD", 2)):
        turned = [x if layout == "BHND" else x.transpose(1, 2).contiguous() for x in (q, k, v, grad)]
        rule = {"causal": True, "layout": layout, "return_max_logits": True}
        whole = [x.clone().requires_grad_() for x in (*turned[:3], torch.arange(4.0))]
        want, want_largest = ffpa(*whole[:3], sinks=whole[3], **rule)
        want_grads = torch.autograd.grad(want, whole, turned[3])
        for way in ways(heads):
            *parts, grad_out = placed(turned, mesh, way)
            (sinks,) = placed([torch.arange(4.0)], mesh, [Shard(0) if p.is_shard(heads) else Replicate() for p in way])
            parts = [x.requires_grad_() for x in (*parts, sinks)]

            def call(parts=parts, grad_out=grad_out, rule=rule):
                out, largest = ffpa(*parts[:3], sinks=parts[3], **rule)
                return out, largest, *torch.autograd.grad(out, parts, grad_out)

            out, largest, *grads = silently(call)
            assert [p.is_partial() for p in grads[3].placements] == [p.is_shard(0) for p in way], (layout, way)
            assert largest.placements == tuple(Shard(1) if p.is_shard(heads) else p for p in way), (layout, way)
            for x, y in zip((out, largest, *grads), (want, want_largest, *want_grads), strict=True):
                torch.testing.assert_close(full(x), y, atol=2e-2, rtol=2e-2)
            with torch.no_grad():
                place = torch.empty_like(out)
                silently(
                    lambda parts=parts, place=place, rule=rule: ffpa(*parts[:3], sinks=parts[3], out=place, **rule)
                )
                torch.testing.assert_close(full(place), want)


def dtensors_of_packed_sequences_with_sinks():
    from torch.distributed.tensor import Replicate, Shard

    mesh, _ = meshes()
    q, k, v, grad = (x.transpose(1, 2).flatten(0, 1).contiguous() for x in inputs(6)[:4])
    offsets = torch.tensor([0, 5, 12], dtype=torch.int32)
    rule = {"causal": True, "return_max_logits": True}
    whole = [x.clone().requires_grad_() for x in (q, k, v, torch.arange(4.0))]
    want, want_largest = ffpa_varlen(*whole[:3], offsets, offsets, 7, 7, sinks=whole[3], **rule)
    by_heads = [Shard(1), Replicate()][: mesh.ndim]
    parts = placed((q, k, v), mesh, by_heads) + placed([torch.arange(4.0)], mesh, [Shard(0), Replicate()][: mesh.ndim])
    parts = [x.requires_grad_() for x in parts]
    (everywhere,) = placed([offsets], mesh, [Replicate()] * mesh.ndim)
    (g,) = placed([grad], mesh, by_heads)

    def call():
        out, largest = ffpa_varlen(*parts[:3], everywhere, everywhere, 7, 7, sinks=parts[3], **rule)
        return out, largest, *torch.autograd.grad(out, parts, g)

    for x, y in zip(silently(call), (want, want_largest, *torch.autograd.grad(want, whole, grad)), strict=True):
        torch.testing.assert_close(full(x), y)


def dtensors_with_one_head_of_keys():
    """All ranks use the one head, where it is whole; its gradient is the sum of theirs."""
    from torch.distributed.tensor import Replicate, Shard

    mesh, _ = meshes()
    whole = inputs(6, heads=(4, 1))
    want = with_gradients(ffpa, *whole, causal=True, return_lse=True)
    by_heads, everywhere = [Shard(1)] * mesh.ndim, [Replicate()] * mesh.ndim
    (q, grad_out, grad_lse), (k, v) = (
        placed(whole[::3] + whole[4:], mesh, by_heads),
        placed(whole[1:3], mesh, everywhere),
    )
    got = silently(lambda: with_gradients(ffpa, q, k, v, grad_out, grad_lse, causal=True, return_lse=True))
    for name, x, y in zip(NAMES, got, want, strict=True):
        assert all(p.is_partial() if name in ("dk", "dv") else p.is_shard(1) for p in x.placements), name
        torch.testing.assert_close(full(x), y, atol=2e-2, rtol=2e-2, msg=name)


def dtensors_are_no_parts_of_a_ring():
    mesh, _ = meshes()
    parts = placed(inputs(8)[:3], mesh, meshes()[1](1)[0])
    for attention in (distributed.ring_attention, distributed.ulysses_attention):
        with pytest.raises(TypeError, match=r"`q` is a DTensor; pass .* q.to_local\(\), and mesh.get_group\(\)"):
            attention(*parts)


def dtensors_to_an_output():
    from torch.distributed.tensor import Shard

    mesh, ways = meshes()
    q, k, v, out, _ = inputs(6)
    want = ffpa(q, k, v)
    for way in ways(1):
        *parts, result = placed((q, k, v, out), mesh, way)
        silently(lambda parts=parts, result=result: ffpa(*parts, out=result))
        assert torch.equal(full(result), want)
    (by_rows,) = placed([out], mesh, [Shard(2)] * mesh.ndim)
    with pytest.raises(RuntimeError, match="`out` is a DTensor placed.*leave `out` away"):
        ffpa(*parts, out=by_rows)


def dtensors_that_must_move():
    """Heads that do not divide are right all the same, and so are sharded rows, where heads were a call before."""
    from torch.distributed.tensor import Shard

    mesh, _ = meshes()
    for heads, dim, layout in (((6, 3), 1, "BHND"), ((4, 2), 2, "BHND"), ((4, 2), 3, "BHND"), ((8, 8), 1, "BNHD")):
        q, k, v, *_ = inputs(8, heads=heads)
        parts = placed((q, k, v), mesh, [Shard(dim)] * mesh.ndim)
        if layout == "BNHD":  # the shapes are the same in both layouts
            assert torch.equal(full(silently(lambda parts=parts: ffpa(*parts))), ffpa(q, k, v))
        want = ffpa(q, k, v, causal=True, layout=layout)
        assert torch.equal(full(ffpa(*parts, causal=True, layout=layout)), want), (heads, dim)
        with pytest.raises(AssertionError):
            silently(lambda parts=parts, layout=layout: ffpa(*parts, causal=True, layout=layout))


# ---- FSDP2 ----


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(32, 3 * 64)
        self.last = torch.nn.Linear(64, 32)

    def forward(self, x):
        q, k, v = self.qkv(x).bfloat16().unflatten(-1, (3, 2, 32)).unbind(2)
        return self.last(ffpa(q, k, v, causal=True, layout="BNHD").flatten(2).float())


def one_step(model, x) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(x).square().mean().backward()
    optimizer.step()


def dtensors_of_fsdp_train_as_one_process_does():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    whole, sharded = Block(), Block()
    sharded.load_state_dict(whole.state_dict())
    fully_shard(sharded, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    x = torch.randn(dist.get_world_size(), 10, 32)
    before = [p.detach().clone() for p in whole.parameters()]
    one_step(whole, x)
    one_step(sharded, x[dist.get_rank() :][:1])
    for old, p, part in zip(before, whole.parameters(), sharded.parameters(), strict=True):
        assert type(part.data).__name__ == "DTensor"
        torch.testing.assert_close(part.full_tensor() - old, p - old, atol=1e-5, rtol=1e-2)


if __name__ == "__main__":
    main(globals(), *sys.argv[1:])
