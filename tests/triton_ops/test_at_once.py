"""Tests that calls of a known kind launch what Triton compiled as Triton would, all kernels by one call of C."""

import contextlib
import ctypes
import importlib
import struct
from types import SimpleNamespace

import ffpa_attn
import pytest
import torch
from cases import Case, make_mask
from ffpa_attn import env
from ffpa_attn.backends import dequantised, triton_attention, triton_fp8, triton_merge
from ffpa_attn.backends.reference import Rule
from ffpa_attn.launching import native, structs
from ffpa_attn.launching.attention_call import Pages
from ffpa_attn.operators import again, ops
from ffpa_attn.specs.problem import Problem, Visibility
from ffpa_attn.triton_ops import launch as triton_launch
from ffpa_attn.triton_ops import parameters

triton = pytest.importorskip("triton", reason="Triton is an extra")

TESTS_IN_A_ROW = 64  # they share kernels that Triton compiles

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
of_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, nothing stands for it")
_MAP = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "fp4_padded": False}


# ---- without a GPU: what Triton is given, and what C is given ----


def _kind_of(x):
    """Returns the type that Triton gives to an argument."""
    if isinstance(x, tuple):
        return tuple(map(_kind_of, x))
    if isinstance(x, torch.Tensor):
        return f"*{x.dtype}"
    if hasattr(x, "block_shape"):
        return f"tensordesc<{x.base.dtype}[{','.join(map(str, x.block_shape))}]>"
    if isinstance(x, float):
        return "fp32"
    return "constexpr" if x == 1 else "i32" if x < 2**31 else "i64"


def _handed_over(kind, x):
    """Yields what Triton's own launcher makes of an argument."""
    if isinstance(kind, tuple):
        for one_kind, one in zip(kind, x, strict=True):
            yield from _handed_over(one_kind, one)
    elif kind.startswith("*"):
        yield struct.pack("<Q", x.data_ptr())
    elif kind.startswith("tensordesc"):
        steps = [2 * stride for stride in reversed(x.strides[:-1])]
        yield x.base.data_ptr(), 9, 3, x.shape[::-1], steps, x.block_shape[::-1]
        yield from (struct.pack("<i", n) for n in x.shape)
        yield from (struct.pack("<q", n) for n in x.strides)
    elif kind != "constexpr":
        yield struct.pack({"i32": "<i", "i64": "<q", "fp32": "<f"}[kind], x)


class Kernel:
    """Stands for one of Triton's, on a GPU."""

    def __init__(self, kernel, heard: list, **metadata):
        self.__name__, self.arg_names, self.heard = kernel.__name__, kernel.arg_names, heard
        self.more = metadata

    def __getitem__(self, grid):
        def run(*args, **constants):
            constants = {name: value for name, value in constants.items() if name in self.arg_names}
            given = [*args, *constants.values()]
            kinds = [*map(_kind_of, args), *["constexpr"] * len(constants)]
            maps = [_MAP | {"block_size": x.block_shape} for x in args if hasattr(x, "block_shape")]
            made = SimpleNamespace(
                metadata=SimpleNamespace(
                    name=self.__name__, target=SimpleNamespace(backend="cuda"), shared=1 << 12, num_warps=4,
                    tensordesc_meta=maps, **parameters._USUAL | self.more,
                ),
                src=SimpleNamespace(signature=dict(zip(self.arg_names, kinds, strict=True))),
                function=len(self.heard) + 1,
            )  # fmt: skip
            compiled = Compiled(self.__name__, kinds, self.heard, made)
            compiled[grid](*given)
            return compiled

        return run


class Compiled:
    def __init__(self, name, kinds, heard, made):
        self.name, self.kinds, self.heard = name, kinds, heard
        vars(self).update(vars(made))

    def __getitem__(self, grid):
        def run(*args):
            values = [x for kind, one in zip(self.kinds, args, strict=True) for x in _handed_over(kind, one)]
            self.heard.append((self.name, self.function, grid[0], 128, 1 << 12, [*values, bytes(8), bytes(8)]))

        return run


def _array(address: int, kind, count: int) -> list:
    return list((kind * count).from_address(address))


def _as_c_does(kernel, tensors: tuple[int, ...]) -> tuple:
    """Returns what the C function would launch."""
    image = bytearray(_array(kernel.image, ctypes.c_uint8, kernel.image_bytes))
    maps = {}
    for x in _array(kernel.address, structs.struct("AddressParameter"), kernel.addresses):
        struct.pack_into("<Q", image, x.place, tensors[x.tensor] + x.offset)
    for x in _array(kernel.map, structs.struct("MapParameter"), kernel.maps):
        lists = (
            (x.size, ctypes.c_uint64, x.rank),
            (x.stride_bytes, ctypes.c_uint64, x.rank - 1),
            (x.box, ctypes.c_uint32, x.rank),
        )
        assert x.base.place % 128 == 0
        maps[x.base.place] = (
            tensors[x.base.tensor] + x.base.offset,
            x.type,
            x.swizzle,
            *(_array(*one) for one in lists),
        )
    places, sizes = (_array(x, ctypes.c_int, kernel.parameters) for x in (kernel.place, kernel.bytes))
    values = [maps.get(place, bytes(image[place : place + size])) for place, size in zip(places, sizes, strict=True)]
    assert all(
        place % size == 0 and (size == 128) == (place in maps) for place, size in zip(places, sizes, strict=True)
    )
    name = ctypes.string_at(kernel.name).decode()
    return name, kernel.function, kernel.programs, kernel.threads, kernel.smem_bytes, values


@pytest.fixture
def heard(monkeypatch):
    """Gives the launches of kernels, which nobody runs: (by Triton, by C, of each call of C how many)."""
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")  # Triton reads it when it defines the kernels
    by_triton, by_c, calls, scratch = [], [], [], {}
    for work in ("backward", "forward", "fp8", "merge", "page", "persistent"):
        module = importlib.import_module(f"ffpa_attn.triton_ops.{work}_kernels")
        for name, kernel in list(vars(module).items()):
            if name.endswith("_kernel"):
                monkeypatch.setattr(module, name, Kernel(kernel, by_triton))

    def compiled_launcher(kernels, device):
        def enqueue(addresses: bytes) -> None:
            calls.append(len(kernels))
            by_c.extend(_as_c_does(kernel, struct.unpack(f"{len(addresses) // 8}Q", addresses)) for kernel in kernels)

        return enqueue

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **how: scratch.setdefault(shape, empty(*shape, **how)))
    monkeypatch.setattr(native, "record", lambda: {"of": "a test"})
    monkeypatch.setattr(native, "compiled_launcher", compiled_launcher)
    return SimpleNamespace(by_triton=by_triton, by_c=by_c, calls=calls, scratch=scratch)


@contextlib.contextmanager
def a_profiler():
    hook = lambda metadata: None  # noqa: E731
    triton.knobs.runtime.launch_exit_hook.add(hook)
    try:
        yield
    finally:
        triton.knobs.runtime.launch_exit_hook.remove(hook)


def check(heard, call, first: list, second: list, kernels: int) -> None:
    """Makes a call of a new kind, and then another of the kind twice: as Triton does, since somebody hears it, and by C."""
    call(*first)
    assert len(heard.by_triton) == kernels and not heard.by_c
    heard.by_triton.clear(), heard.scratch.clear()
    with a_profiler():
        call(*second)
    assert len(heard.by_triton) == kernels and not heard.by_c
    call(*second)
    assert heard.by_c == heard.by_triton and heard.calls == [kernels]


def plan_of(direction: str, case: Case, packed=None, mask=None):
    see = Visibility(-1, 0 if case.rule.get("causal") else -1, False)
    scale, cap = 0.1, case.rule.get("softcap", 0.0)
    problem = Problem(
        direction, "cuda", "sm_90", "bf16", case.batch, case.heads_q, case.heads_kv, case.n_q, case.n_k, case.d, case.d, packed,
        see, scale, cap, mask, True, None, "f32", None,
    )  # fmt: skip
    return triton_attention.plan(problem, env.run_flags()), Rule(scale, cap, see)


def tensors_of(case: Case, seed: int, dtype=torch.bfloat16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(case.batch, case.heads_q, case.n_q, case.d), *[(case.batch, case.heads_kv, case.n_k, case.d)] * 2]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


KINDS = {
    "dense": ({}, None),
    "one key head to a row head": ({"heads_kv": 4, "batch": 1, "n_k": 1}, None),
    "causal": ({"rule": {"causal": True}}, None),
    "capped": ({"rule": {"softcap": 3.0}}, None),
    "bool": ({}, "bool"),
    "additive": ({}, "additive"),
}  # fmt: skip


@of_cpu
@pytest.mark.parametrize("tma", [True, False], ids=["tma", "pointers"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("direction", ["forward", "backward", "backward with dLSE"])
def test_dense_calls(direction, kind, tma, heard, monkeypatch):
    options, mask_kind = KINDS[kind]
    case = Case(**{"batch": 2, "heads_q": 4, "heads_kv": 2, "n_q": 70, "n_k": 90, "d": 64} | options)
    if not tma:
        monkeypatch.setattr(triton_attention, "has_descriptor", lambda x: False)
    generator = torch.Generator().manual_seed(1)
    plan, rule = plan_of(direction.split()[0], case, mask=mask_kind)
    memo = {}

    def tensors(seed: int) -> list:
        q, k, v = tensors_of(case, seed)
        if seed == 0 and q.shape == k.shape:
            k = v = q  # what one call is given twice, another is not
        lse = torch.randn(q.shape[:3])
        mask = make_mask(mask_kind, case, "cpu", generator) if mask_kind else None
        if direction == "forward":
            return [q, k, v, torch.empty_like(q), lse, mask]
        grad_lse = torch.randn(q.shape[:3]) if "dLSE" in direction else None
        grads = [torch.empty_like(x) for x in (q, k, v)]
        return [[torch.randn_like(q), grad_lse, q, k, v, torch.randn_like(q), lse, None], grads, None, mask]

    def call(*given):
        getattr(plan, direction.split()[0])(*given, None, rule, 0, memo)

    far = rule.softcap == 0 and mask_kind is None
    check(heard, call, tensors(0), tensors(1), 1 if direction == "forward" else 4 + far)


@of_cpu
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_packed_calls(direction, heard):
    case = Case(batch=1, heads_q=4, heads_kv=2, n_q=70, n_k=90, d=64)
    plan, rule = plan_of(direction, case, packed=(case.n_q, case.n_k))
    memo = {}

    def tensors(seed: int) -> list:
        q, k, v = (x[0] for x in tensors_of(case, seed))
        lse = torch.randn(q.shape[:2])
        offsets = *(torch.tensor([0, 20, n], dtype=torch.int32) for n in (case.n_q, case.n_k)), 50, 70
        if direction == "forward":
            return [q, k, v, torch.empty_like(q), lse, None, offsets]
        grads = [torch.empty_like(x) for x in (q, k, v)]
        return [[torch.randn_like(q), None, q, k, v, torch.randn_like(q), lse, None], grads, None, None, offsets]

    def call(*given):
        getattr(plan, direction)(*given, rule, 0, memo)

    check(heard, call, tensors(0), tensors(1), 1 if direction == "forward" else 5)


@of_cpu
def test_other_kernels(heard):
    """The persistent forward, what adds results to others, and what dequantises pages."""
    case = Case(batch=1, heads_q=2, heads_kv=2, n_q=70, n_k=90, d=64)
    plan, rule = plan_of("forward", case)
    plan = plan._replace(cores=3, slice_rows=32, descriptors=False)
    memo = {}

    def persistent(q, k, v):
        plan.forward(q, k, v, heard.scratch.setdefault("out", q.clone()), lse, None, None, rule, 0, memo)

    lse = torch.randn(1, 2, 70)
    check(heard, persistent, tensors_of(case, 0), tensors_of(case, 1), 1)
    heard.by_triton.clear(), heard.by_c.clear(), heard.calls.clear()

    def merged(seed):
        return [
            torch.randn(shape) for shape in ((1, 2, 70, 64), (1, 2, 70), (1, 2, 70), (3, 1, 2, 70, 64), (3, 1, 2, 70))
        ]

    triton_launch.memo_of.cache_clear()
    check(heard, lambda *given: triton_merge._by_triton(*given, False), merged(0), merged(1), 1)
    heard.by_triton.clear(), heard.by_c.clear(), heard.calls.clear()

    def dequantise(pool, used, table, scale):
        pages = Pages(used, table, 40, added=used)
        dequantised._by_triton(pool.transpose(1, 2), pages, slice(1, 3), scale, torch.float16)

    def paged(seed):
        table = torch.full((3, 4), seed, dtype=torch.int32)
        return [torch.zeros(5, 16, 2, 72).to(torch.float8_e4m3fn), table[0], table, torch.ones(2)]

    check(heard, dequantise, paged(0), paged(1), 1)


@of_cpu
@pytest.mark.parametrize("arranged", [True, False])
def test_8_bits(arranged, heard, monkeypatch):
    monkeypatch.setitem(_MAP, "elem_size", 1)
    monkeypatch.setattr(f"{__name__}._handed_over", _of_8_bits)
    case = Case(batch=2, heads_q=4, heads_kv=2, n_q=70, n_k=128, d=64)
    tiles = triton_attention.tiles_of("fp8", PROBLEM_8, (64, 64))
    plan = triton_fp8.TritonFp8Plan("fp8", (64, 64), tiles, None, True)
    memo, rule = {}, Rule(0.1, 0.0, Visibility(-1, -1, False))

    def tensors(seed: int) -> list:
        q, k, v = tensors_of(case, seed, torch.float8_e4m3fn)
        v = v if arranged else v.mT.contiguous().mT
        scales = [None, torch.rand(2, 2, 1), torch.rand(2, 2, 1)]
        return [q, k, v, scales, torch.empty(q.shape, dtype=torch.bfloat16).clone(), torch.randn(q.shape[:3])]

    check(heard, lambda *given: plan.forward_fp8(*given, rule, 0, memo), tensors(0), tensors(1), 1 + arranged)


PROBLEM_8 = Problem(
    "forward", "cuda", "sm_90", "e4m3", 2, 4, 2, 70, 128, 64, 64, None, Visibility(-1, -1, False), 0.1, 0.0, None, True, None, "f32", None,
)  # fmt: skip
_of_16_bits = _handed_over


def _of_8_bits(kind, x):
    for one in _of_16_bits(kind, x):
        yield (*one[:4], [step // 2 for step in one[4]], one[5]) if isinstance(one, tuple) else one


@of_cpu
@pytest.mark.parametrize("wanted", ["sinks", "largest", "both"])
@pytest.mark.parametrize("kind", ["dense", "persistent", "8 bits"])
def test_sinks_and_the_largest_score(kind, wanted, heard, monkeypatch):
    case = Case(batch=2, heads_q=4, heads_kv=2, n_q=70, n_k=128, d=64)
    plan, rule = plan_of("forward", case)
    if kind == "persistent":
        plan = plan._replace(cores=3, slice_rows=32, descriptors=False)
    elif kind == "8 bits":
        monkeypatch.setitem(_MAP, "elem_size", 1)
        monkeypatch.setattr(f"{__name__}._handed_over", _of_8_bits)
        plan = triton_fp8.TritonFp8Plan(
            "fp8", (64, 64), triton_attention.tiles_of("fp8", PROBLEM_8, (64, 64)), None, True
        )
    memo = {}

    def tensors(seed: int) -> list:
        q, k, v = tensors_of(case, seed, torch.float8_e4m3fn if kind == "8 bits" else torch.bfloat16)
        shapes = {"sinks": (4,), "largest": (2, 4)}
        more = [torch.randn(shape) if wanted in (name, "both") else None for name, shape in shapes.items()]
        return [q, k, v, q.bfloat16() + 0, torch.randn(q.shape[:3]), *more]

    def call(q, k, v, out, lse, *more):
        if kind == "8 bits":
            plan.forward_fp8(q, k, v, (None, None, None), out, lse, rule, 0, memo, *more)
        else:
            plan.forward(q, k, v, out, lse, None, None, rule, 0, memo, *more)

    check(heard, call, tensors(0), tensors(1), 2 if kind == "8 bits" else 1)


UNUSUAL = {
    "clusters": {"num_ctas": 2},
    "memory beside": {"global_scratch_size": 128},
    "memory of a profiler": {"profile_scratch_size": 1},
    "programmatic launches": {"launch_pdl": True},
    "cooperative launches": {"launch_cooperative_grid": True},
    "a sanitizer": {"instrumentation_mode": "gsan"},
}


@of_cpu
@pytest.mark.parametrize("unusual", UNUSUAL)
def test_what_is_not_usual_is_left_to_triton(unusual, heard, monkeypatch, capsys):
    from ffpa_attn.triton_ops import forward_kernels

    monkeypatch.setenv("FFPA_LOG", "1")
    monkeypatch.setattr(forward_kernels.forward_kernel, "more", UNUSUAL[unusual])
    case = Case(batch=1, heads_q=2, heads_kv=2, n_q=70, n_k=90, d=64)
    plan, rule = plan_of("forward", case)
    memo, (q, k, v) = {}, tensors_of(case, 0)
    for calls in (1, 2, 3):
        plan.forward(q, k, v, torch.empty_like(q), torch.randn(1, 2, 70), None, None, rule, 0, memo)
        assert len(heard.by_triton) == calls and not heard.by_c
    assert next(iter(UNUSUAL[unusual])) in memo["at once"].why_not
    (said,) = capsys.readouterr().err.splitlines()
    assert said == f"ffpa_attn: Triton itself launches forward_kernel, slowly: {memo['at once'].why_not}"


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.src.signature.update(x="u1"),
        lambda x: x.src.signature.update(x=("i32", "i32")),
        lambda x: x.src.signature.clear(),
        lambda x: vars(x).pop("src"),
        lambda x: vars(x.metadata).pop("num_ctas"),
        lambda x: vars(x).update(function=None),
        lambda x: x.metadata.tensordesc_meta.clear(),
        lambda x: x.metadata.tensordesc_meta[0].update(fp4_padded=True),
        lambda x: x.metadata.tensordesc_meta[0].update(multicast=True),
        lambda x: x.metadata.tensordesc_meta[0].update(block_size=[16]),
        lambda x: vars(x.metadata).update(shared=1 << 18),
        lambda x: vars(x.metadata.target).update(backend="hip"),
    ],
)
def test_another_triton_is_left_to_itself(change):
    metadata = SimpleNamespace(
        name="k", target=SimpleNamespace(backend="cuda"), shared=0, num_warps=4, **parameters._USUAL,
        tensordesc_meta=[_MAP | {"block_size": [1, 16], "is_im2col": False}],
    )  # fmt: skip
    signature = {"d": "tensordesc<bf16[1,16]>", "x": "i32", "one": "constexpr"}
    made = SimpleNamespace(metadata=metadata, src=SimpleNamespace(signature=signature), function=5)
    arguments = SimpleNamespace(shape=[3, 16], strides=[16, 1], padding="zero"), 7, 1

    def read():
        return parameters.read(made, ["d", "x", "one"], 9, arguments)

    assert [len(x) for x in read().parameters if isinstance(x, bytes)] == [4, 4, 8, 8, 4, 8, 8]
    change(made)
    assert isinstance(read(), str)


# ---- on a GPU ----


def _gradients(q, k, v, **rule):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = ffpa_attn.ffpa(*leaves, return_lse=True, **rule)
    grads = torch.ones_like(out).mul_(q[..., : out.shape[-1]]), torch.ones_like(lse)
    return out, lse, *torch.autograd.grad((out, lse), leaves, grads)


def _packed(q, k, v, **rule):
    leaves = [x[0].transpose(0, 1).contiguous().requires_grad_() for x in (q, k, v)]
    ends = torch.tensor([0, 33, 33, q.shape[2]], dtype=torch.int32, device="cuda")
    out = ffpa_attn.ffpa_varlen(*leaves, ends, ends, q.shape[2], q.shape[2], **rule)
    return out, *torch.autograd.grad(out, leaves, out.detach().sin())


def _in_8_bits(q, k, v, **rule):
    (q, q_scale), (k, k_scale), (v, v_scale) = (ffpa_attn.quantize_fp8(x, per="block") for x in (q, k, v))
    return (ffpa_attn.ffpa_fp8(q, k, v, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, **rule),)


def _in_8_bits_transposed(q, k, v):
    (q, q_scale), (k, k_scale), (v, v_scale) = (ffpa_attn.quantize_fp8(x[:, :, :192]) for x in (q, k, v))
    v = v.mT.contiguous()
    return (ffpa_attn.ffpa_fp8(q, k, v, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, v_transposed=True),)


CALLS = {
    "dense": (_gradients, {}),
    "causal": (_gradients, {"causal": True}),
    "capped": (_gradients, {"softcap": 3.0}),
    "a window": (_gradients, {"window": (20, 3)}),
    "bool": (_gradients, {"mask": "bool"}),
    "additive": (_gradients, {"mask": "additive"}),
    "packed": (_packed, {"causal": True}),
    "8 bits": (_in_8_bits, {}),
    "8 bits, causal": (_in_8_bits, {"causal": True}),
    "8 bits, transposed": (_in_8_bits_transposed, {}),
}


@pytest.fixture
def of_triton(monkeypatch):
    """Counts the launches that Triton makes."""
    from triton.backends.nvidia.driver import CudaLauncher

    monkeypatch.setenv("FFPA_BACKEND", "triton")
    if native.record() is None:
        pytest.skip("this installation holds no native library")
    ops._plans.clear(), again._known.clear(), triton_launch.memo_of.cache_clear()
    made, run = [], CudaLauncher.__call__
    monkeypatch.setattr(CudaLauncher, "__call__", lambda self, *args: (made.append(args[0]), run(self, *args))[1])
    return made


def _inputs(d: int, seed: int = 0, n: int = 200):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, heads, n, d, generator=generator).to("cuda", torch.bfloat16) for heads in (4, 2, 2)]


@needs_gpu
@pytest.mark.parametrize("d", [64, 72, 128, 256])
@pytest.mark.parametrize("kind", CALLS)
def test_the_same_bits_and_no_launch_of_tritons(kind, d, of_triton):
    call, rule = CALLS[kind]
    if "8 bits" in kind and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no 8-bit floats")
    if "mask" in rule:
        case = Case(batch=1, heads_q=4, n_q=200, n_k=200, dtype=torch.bfloat16)
        rule = {"mask": make_mask(rule["mask"], case, "cuda", torch.Generator().manual_seed(2))}
    first, second = _inputs(d, 0), _inputs(d, 1)
    call(*first, **rule)  # Triton compiles
    assert of_triton
    memos = [plan.memo for plan in ops._plans.values() if plan.choice.backend == "triton"]
    assert memos and not [memo["at once"].why_not for memo in memos if memo["at once"].why_not]
    with a_profiler():
        of_triton.clear()
        want = [x.clone() for x in call(*second, **rule)]
        assert of_triton
    of_triton.clear()
    got = [x.clone() for x in call(*second, **rule)]
    assert not of_triton
    assert all(map(torch.equal, got, want))


@needs_gpu
def test_in_a_graph(of_triton):
    q, k, v = _inputs(64)
    _gradients(q, k, v, causal=True)
    want = [x.clone() for x in _gradients(q, k, v, causal=True)]
    torch.cuda.synchronize()
    of_triton.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _gradients(q, k, v, causal=True)
    graph.replay()
    assert not of_triton and all(map(torch.equal, captured, want))


@needs_gpu
def test_on_another_stream(of_triton):
    q, k, v = _inputs(64)
    want = [x.clone() for x in _gradients(q, k, v)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    of_triton.clear()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        q2 = q + 0  # it is there when this stream gets so far
        got = _gradients(q2, k, v)
    stream.synchronize()
    assert all(map(torch.equal, got, want)) and not of_triton
