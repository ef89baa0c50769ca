"""What a retry may change is remembered by nothing; what it cannot change is, and for that kind of call alone."""

import errno
import signal
import subprocess
import sys

import ffpa_attn
import pytest
import torch
from ffpa_attn import env
from ffpa_attn.backends import triton_attention
from ffpa_attn.building import toolchain
from ffpa_attn.launching import native
from ffpa_attn.operators import again, ops
from ffpa_attn.specs.spec import ForwardMerge
from ffpa_attn.triton_ops import launch as triton_launch
from ffpa_attn.triton_ops.launch import Launch, Tiles, Unable, launch

errors = pytest.importorskip("triton.runtime.errors", reason="Triton is an extra")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def chained(error, cause):
    error.__cause__ = cause
    return error


TRANSIENT = {
    "memory of the GPU": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    "memory of the GPU, the driver's": lambda: RuntimeError("Triton Error [CUDA]: out of memory"),
    "somebody else's fault": lambda: torch.AcceleratorError("an illegal memory access was encountered"),
    "somebody else's fault, as Triton finds it": lambda: RuntimeError("Triton Error [CUDA]: device-side assert triggered"),
    "a capture": lambda: RuntimeError("Triton Error [CUDA]: operation not permitted when stream is capturing"),
    "PyTorch's driver calls": lambda: RuntimeError("CUDA driver error: out of memory"),
    "memory of the host": MemoryError,
    "a full disk": lambda: OSError(errno.ENOSPC, "No space left on device"),
    "a file that another process moved": lambda: FileNotFoundError(errno.ENOENT, "No such file or directory"),
    "a full disk, wrapped": lambda: chained(RuntimeError("cannot be written"), OSError(errno.ENOSPC, "full")),
    "a full disk, as nvcc finds it": lambda: toolchain.BuildError("`ninja` failed: error: No space left on device"),
    "a full disk, as ld finds it": lambda: toolchain.BuildError("collect2: ld terminated with signal 7 [Bus error]"),
    "a quota": lambda: toolchain.BuildError("ptxas fatal: Disk quota exceeded"),
    "a pipe that broke": lambda: BrokenPipeError(errno.EPIPE, "Broken pipe"),
    "memory, as gcc finds it": lambda: toolchain.BuildError("cc1plus: out of memory allocating 65536 bytes"),
    "a compiler that was killed, as the shell says it": lambda: toolchain.BuildError("`ninja` failed: Killed"),
    "ninja that was killed": lambda: chained(
        toolchain.BuildError("`ninja` failed: "), subprocess.CalledProcessError(-9, "ninja")
    ),
    "ninja that was interrupted": lambda: toolchain.BuildError("ninja: build stopped: interrupted by user."),
    "a limit of the size of files": lambda: toolchain.BuildError("File size limit exceeded (core dumped)"),
    "a file too large": lambda: OSError(errno.EFBIG, "File too large"),
    "a limit of time": lambda: toolchain.BuildError("g++: CPU time limit exceeded signal terminated program cc1plus"),
    "a compiler that was killed": lambda: toolchain.BuildError("nvcc error : 'cicc' died due to signal 9 (Kill signal)"),
    "an assembler that was killed": lambda: chained(
        errors.PTXASError("`ptxas` failed"), subprocess.CalledProcessError(-9, "ptxas")
    ),
}  # fmt: skip
LASTING = {
    "shared memory": lambda: errors.OutOfResources(300000, 232448, "shared memory"),
    "Triton's compiler": lambda: RuntimeError("PassManager::run failed"),
    "ptxas": lambda: chained(errors.PTXASError("no"), subprocess.CalledProcessError(255, "ptxas")),
    "no C compiler": lambda: RuntimeError("Failed to find C compiler. Please specify via CC environment variable"),
    "no assembler": lambda: chained(RuntimeError("Cannot find ptxas"), FileNotFoundError(errno.ENOENT, "ptxas")),
    "the C compiler": lambda: subprocess.CalledProcessError(1, "gcc"),
    "an image for other GPUs": lambda: RuntimeError("Triton Error [CUDA]: device kernel image is invalid"),
    "registers": lambda: RuntimeError("Triton Error [CUDA]: too many resources requested for launch"),
    "a cache that belongs to others": lambda: PermissionError(errno.EACCES, "Permission denied"),
    "nvcc": lambda: toolchain.BuildError("`ninja` failed: error: expected a ;"),
    "a header that is not there": lambda: toolchain.BuildError("fatal error: a.h: No such file or directory"),
    "a read-only disk": lambda: OSError(errno.EROFS, "Read-only file system"),
    "another Triton": lambda: TypeError("run() got an unexpected keyword argument 'maxnreg'"),
}
transient = pytest.mark.parametrize("error", TRANSIENT.values(), ids=TRANSIENT)
lasting = pytest.mark.parametrize("error", LASTING.values(), ids=LASTING)


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch):
    monkeypatch.setattr(triton_launch, "_unable", {})
    monkeypatch.setattr(triton_attention, "_gave_up", [])
    monkeypatch.setattr(native, "_unready", {})
    monkeypatch.setattr(ops, "_plans", {})
    monkeypatch.setattr(ops, "_warned", set())


class Kernel:
    """Stands for Triton's: what it compiled is kept, even where loading it failed."""

    __name__ = "kernel"
    arg_names = ("x", "WIDTH", "ROWS", "KEYS")

    def __init__(self):
        self.failing, self.calls, self.device_caches = None, 0, {}

    def __getitem__(self, grid):
        def run(*args, **options):
            self.calls += 1
            self.device_caches["compiled"] = True
            if self.failing:
                raise self.failing
            return self

        return run

    def launched(self, width=64, warps=4, dtype=torch.float16):
        x = torch.empty(8, dtype=dtype, device="meta")  # no interpreter is used for these
        launch({}, self, (x,), lambda: Launch(1, (), {"WIDTH": width}, Tiles(64, 64, warps, 1)))


@pytest.mark.parametrize("error", [*TRANSIENT.values(), KeyboardInterrupt], ids=[*TRANSIENT, "an interrupt"])
def test_a_launch_that_may_go_better(error):
    kernel = Kernel()
    kernel.failing = error = error()
    for calls in (1, 2):
        with pytest.raises(type(error)) as caught:
            kernel.launched()
        assert caught.value is error and kernel.calls == calls and not kernel.device_caches
    kernel.failing = None
    kernel.launched()
    assert kernel.calls == 3 and kernel.device_caches


class Late(RuntimeError):
    pass


@pytest.mark.parametrize("error", [Late, TimeoutError])
def test_a_time_limit_of_the_program(error, monkeypatch):
    """The limit interrupts whatever it finds, and says nothing of that."""

    def late(*how):
        raise error

    def interrupted(*how, **more):
        signal.raise_signal(signal.SIGALRM)

    kernel = Kernel()
    monkeypatch.setattr(Kernel, "__getitem__", lambda self, grid: interrupted)
    monkeypatch.setattr(native, "kernel", interrupted)
    before = signal.signal(signal.SIGALRM, late)
    try:
        for _ in range(2):
            with pytest.raises(error):
                kernel.launched()
            with pytest.raises(error):
                native.make_ready(ForwardMerge("f16"), "sm_90")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not native._unready and not triton_launch._unable


@lasting
def test_a_launch_that_will_not(error):
    """The launch is not made again; launches of other kinds are."""
    kernel = Kernel()
    kernel.failing = error()
    for _ in range(3):
        with pytest.raises(Unable, match="Triton failed here, at kernel: "):
            kernel.launched()
        assert kernel.calls == 1
    kernel.failing = None
    kernel.launched(width=128)
    kernel.launched(warps=8)
    kernel.launched(dtype=torch.bfloat16)
    assert kernel.calls == 4
    with pytest.raises(Unable):
        kernel.launched()


def test_what_a_caller_is_handling_is_no_cause(monkeypatch):
    """The caller tries again after it ran out of memory, and meets what no retry changes."""
    kernel = Kernel()
    kernel.failing = next(iter(LASTING.values()))()
    try:
        raise torch.OutOfMemoryError("of the call before")
    except torch.OutOfMemoryError:
        with pytest.raises(Unable):
            kernel.launched()

        def failing(spec, gpu):
            raise RuntimeError("ffpa_attn: ptxas does not like it")

        monkeypatch.setattr(native, "kernel", failing)
        assert not native.make_ready(ForwardMerge("f16"), "sm_90")


@transient
def test_a_kernel_that_may_get_ready(error, monkeypatch):
    error, spec = error(), ForwardMerge("f16")

    def kernel(spec, gpu):
        raise error

    monkeypatch.setattr(native, "kernel", kernel)
    with pytest.raises(type(error)) as caught:
        native.make_ready(spec, "sm_90")
    assert caught.value is error and not native._unready


@lasting
def test_a_kernel_that_does_not_get_ready(error, monkeypatch):
    error, spec = error(), ForwardMerge("f16")

    def kernel(spec, gpu):
        raise error

    monkeypatch.setattr(native, "kernel", kernel)
    if not isinstance(error, RuntimeError):  # an error that is none of ours reaches the caller
        with pytest.raises(type(error)) as caught:
            native.make_ready(spec, "sm_90")
        assert caught.value is error and not native._unready
        return
    assert not native.make_ready(spec, "sm_90")
    assert str(error) in native._unready[spec, "sm_90"]


# ---- whole calls ----


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Gives CPU tensors the choice of an sm_90 GPU without CUDA kernels; Triton interprets, or meets `failing`."""
    if torch.cuda.is_available():
        pytest.skip("nothing is interpreted where there is a GPU")
    describe, real = ops.describe, triton_launch.launch
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(ops, "describe", lambda *call, **_: describe(*call, device="cuda", arch="sm_90"))
    monkeypatch.setattr(native, "why_not", lambda spec, gpu: "no kernels here")
    launched, failing = [], {}

    def launch(memo, kernel, *args):
        launched.append(kernel.__name__)
        if kernel.__name__ in failing:
            raise failing[kernel.__name__]
        real(memo, kernel, *args)

    monkeypatch.setattr(triton_launch, "launch", launch)
    return launched, failing


def inputs(rows=40):
    return [torch.randn(1, 2, rows, 64).half().requires_grad_() for _ in range(3)]


def test_another_kind_of_call_stays_with_triton(as_on_a_gpu):
    launched, failing = as_on_a_gpu
    q, k, v = (x.detach() for x in inputs())
    want = ffpa_attn.ffpa(q, k, v, softcap=3.0, window=(7, 7))
    assert launched == ["forward_kernel"]
    failing["forward_kernel"] = Unable("Triton failed here, at forward_kernel: out of resource")
    with pytest.warns(UserWarning, match="runs on reference, .*out of resource"):
        got = ffpa_attn.ffpa(q, k, v, causal=True, softcap=5.0)
    torch.testing.assert_close(got, ffpa_attn.ffpa(q, k, v, causal=True, softcap=5.0), atol=0, rtol=0)
    longer = (x.detach() for x in inputs(1200))  # so long that ours are not the first choice
    said = ffpa_attn.explain(*longer, causal=True, softcap=5.0, arch="sm_90")
    assert "out of resource" in dict(said.rejected)["triton"]
    failing.clear()
    launched.clear()
    ffpa_attn.ffpa(q[:, :, :9], k, v, causal=True, softcap=5.0)  # a call of that kind, whatever its lengths
    assert not launched and triton_attention.why_not() is None
    assert torch.equal(ffpa_attn.ffpa(q, k, v, softcap=3.0, window=(7, 7)), want)  # no plan of other calls is given up
    ffpa_attn.ffpa(q, k, v, softcap=2.0, window=(5, 5))
    assert launched == ["forward_kernel"] * 2


def test_a_backward_that_triton_leaves_half_way(as_on_a_gpu):
    _, failing = as_on_a_gpu
    x = inputs()
    want = torch.autograd.grad(ffpa_attn.ffpa(*x).float().square().sum(), x)
    ops._plans.clear()
    failing["rows_gradient_kernel"] = Unable("Triton failed here, at rows_gradient_kernel: no")
    with pytest.warns(UserWarning, match="runs on reference, .*rows_gradient_kernel: no"):
        got = torch.autograd.grad(ffpa_attn.ffpa(*x).float().square().sum(), x)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)
    assert len(triton_attention._gave_up) == 1  # the backward gave up, and not the forward


def test_out_of_memory_reaches_the_caller(as_on_a_gpu):
    _, failing = as_on_a_gpu
    q, k, v = (x.detach() for x in inputs())
    want = ffpa_attn.ffpa(q, k, v, causal=True, softcap=5.0)
    failing["forward_kernel"] = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        ffpa_attn.ffpa(q, k, v, causal=True, softcap=5.0)
    failing.clear()
    assert not triton_attention._gave_up and torch.equal(ffpa_attn.ffpa(q, k, v, causal=True, softcap=5.0), want)


def test_fp8_goes_on_to_the_next(as_on_a_gpu):
    _, failing = as_on_a_gpu
    failing["fp8_forward_kernel"] = Unable("Triton failed here, at fp8_forward_kernel: no")
    q = torch.randn(1, 1, 16, 64).to(torch.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match="not triton: .*fp8_forward_kernel: no; nor hopper: "):
        ffpa_attn.ffpa_fp8(q, q, q, v_transposed=False)


# ---- on a GPU ----


def small(**options):
    return torch.randn(1, 4, 200, 64, device="cuda", dtype=torch.bfloat16, **options)


@needs_gpu
def test_a_kernel_that_could_not_be_loaded_is_loaded_later(monkeypatch):
    """The kernel's first launch meets a GPU without memory, while Triton loads what it compiled."""
    from triton.runtime import JITFunction, driver

    monkeypatch.setenv("FFPA_BACKEND", "triton")
    q, k, v = (small() for _ in range(3))
    want = ffpa_attn.ffpa(q, k, v, causal=True, softcap=7.0)
    ops._plans.clear()
    again._known.clear()
    for kernel in vars(sys.modules["ffpa_attn.triton_ops.forward_kernels"]).values():
        if isinstance(kernel, JITFunction):
            kernel.device_caches.clear()

    def out_of_memory(*args):
        raise RuntimeError("Triton Error [CUDA]: out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(driver.active.utils, "load_binary", out_of_memory)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="out of memory"):
                ffpa_attn.ffpa(q, k, v, causal=True, softcap=7.0)
    assert torch.equal(ffpa_attn.ffpa(q, k, v, causal=True, softcap=7.0), want)


IN_A_FRESH_PROCESS = """
import torch
from ffpa_attn import ffpa
from ffpa_attn.backends import triton_attention
from ffpa_attn.launching import native
from ffpa_attn.operators import again, ops
from ffpa_attn.triton_ops import launch as triton_launch
torch.manual_seed(0)
q, k, v = (torch.randn(1, 2, 1100, {d}, device="cuda", dtype=torch.bfloat16) for _ in range(3))
graph, error = torch.cuda.CUDAGraph(), None
torch.cuda.synchronize()
try:
    with torch.cuda.graph(graph):
        ffpa(q, k, v, causal=True, softcap=5.0)
except Exception as caught:
    error = caught
del graph
print(type(error).__name__, str(error)[:200])
assert not (native._unready or triton_attention._gave_up or triton_launch._unable)
out = ffpa(q, k, v, causal=True, softcap=5.0)
torch.cuda.synchronize()
want = ffpa(*(x.cpu() for x in (q, k, v)), causal=True, softcap=5.0)
torch.testing.assert_close(out.cpu(), want, atol=2e-2, rtol=2e-2)
assert ops._plans
print(*(plan.choice.backend for plan in ops._plans.values()))
"""


@needs_gpu
@pytest.mark.parametrize("d, backend", [(64, "triton"), (512, "hopper or mma")])
def test_a_first_call_under_capture_poisons_nothing(d, backend, tmp_path):
    """The call may fail where a kernel is still to be compiled or loaded; the next one runs on the same kernel."""
    environment = env.child_environment(
        PYTHONPATH=":".join(sys.path), TRITON_CACHE_DIR=str(tmp_path / "triton"), PYTHONWARNINGS="error:ffpa_attn"
    )
    run = subprocess.run(
        [sys.executable, "-c", IN_A_FRESH_PROCESS.format(d=d)], capture_output=True, text=True, env=environment
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.split()[-2] in backend
