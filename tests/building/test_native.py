"""Tests the native library: what it answers without a GPU, and a launch from end to end with one."""

import subprocess
import sys
import threading

import pytest
import torch
from ffpa_attn import doctor, explain, ffpa
from ffpa_attn.building import build, toolchain
from ffpa_attn.doctor import merged_alone
from ffpa_attn.launching import native as native_module
from ffpa_attn.launching import structs
from ffpa_attn.operators import ops
from ffpa_attn.specs import archs
from ffpa_attn.specs.spec import ForwardMerge, KernelSpec
from wheel_support import ROOT, Variant

BUILT, NOT_BUILT = ForwardMerge("f16"), Variant("f16", 2)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


class HopperOnly(KernelSpec):
    family = "hopper_only"
    arch = "sm_90a"


class NewDriver:
    @staticmethod
    def cuda_versions():
        return 13000, 13000


class OldDriver:
    @staticmethod
    def cuda_versions():
        return 13000, 12040


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: None)


# ---- without a GPU ----


def test_what_can_run_where(native, no_compiler):
    targets = native.record()["kernels"][BUILT.name]["targets"]  # all by default, fewer where the environment says so
    for gpu in ("sm_80", "sm_86", "sm_90", "sm_120"):
        built = any(archs.runs(target, gpu) for target in targets)
        assert native.is_built(BUILT, gpu) == built and (native.why_not(BUILT, gpu) is None) == built
    assert targets
    assert "needs sm_80 or newer, and the GPU is sm_75" in native.why_not(BUILT, "sm_75")
    reason = native.why_not(NOT_BUILT, "sm_90")
    assert "is not built for sm_90, and there is no nvcc in CUDA_HOME, on PATH or from PyPI" in reason
    assert "instructions that only sm_90a has, and the GPU is sm_80" in native.why_not(HopperOnly(), "sm_80")
    with pytest.raises(NotImplementedError, match="sm_75"):
        native.kernel(BUILT, "sm_75")


def test_a_gpu_that_the_wheel_was_not_built_for(native, no_compiler, monkeypatch):
    record = {**native.record(), "kernels": {BUILT.name: {"targets": ["sm_80"], "resources": {}}}}
    monkeypatch.setattr(native, "record", lambda: record)
    assert native.why_not(BUILT, "sm_86") is None
    assert "is not built for sm_90" in native.why_not(BUILT, "sm_90")


def test_what_is_not_built_is_compiled(native, fake_nvcc):
    assert native.why_not(NOT_BUILT, "sm_90") is None
    assert not native.is_built(NOT_BUILT, "sm_90")


def test_python_only(native, monkeypatch, tmp_path):
    monkeypatch.setattr(native, "_PACKAGE", tmp_path)
    native.record.cache_clear()
    native.library.cache_clear()
    assert native.record() is None and "holds no CUDA kernels" in native.why_not(BUILT, "sm_90")
    with pytest.raises(RuntimeError, match=r"no CUDA kernels.*no nvcc.*\.dev/install\.sh"):
        native.library()
    assert doctor.main() == 0


def test_a_library_that_does_not_load(native, monkeypatch, tmp_path, capsys):
    (tmp_path / build.RECORD).write_text((native._PACKAGE / build.RECORD).read_text())
    (tmp_path / build.LIBRARY).write_text("no library")
    monkeypatch.setattr(native, "_PACKAGE", tmp_path)
    native.library.cache_clear()
    with pytest.raises(RuntimeError, match=rf"{tmp_path}/{build.LIBRARY} does not load .*install ffpa-cuda again"):
        native.library()
    assert doctor.main() == 1
    assert "BROKEN: RuntimeError" in capsys.readouterr().out


def test_a_library_of_other_structs(native, monkeypatch):
    monkeypatch.setattr(build, "params_hash", lambda: "changed")
    native.library.cache_clear()
    with pytest.raises(RuntimeError, match=r"params changed since .* was built; install ffpa-cuda again"):
        native.library()


def test_drivers(native):
    assert native.driver_problem(13000, 13000) is None
    assert native.driver_problem(13000, 13020) is None
    assert native.driver_problem(12080, 13000) is None
    assert native.driver_problem(13020, 13000) is None  # minor versions are compatible
    assert "supports CUDA 12.4, and these kernels were built with CUDA 13.0; install" in (
        native.driver_problem(13000, 12040)
    )
    assert "there is no NVIDIA driver" in native.driver_problem(13000, 0)


def test_an_old_driver_is_an_error_before_any_launch(native, monkeypatch):
    monkeypatch.setattr(native, "library", lambda: OldDriver)
    with pytest.raises(RuntimeError, match=r"supports CUDA 12\.4"):
        native.kernel(BUILT, "sm_90")


def test_stale_library_does_not_take_new_kernels(native, fake_nvcc, monkeypatch):
    monkeypatch.setattr(native, "library", lambda: NewDriver)
    monkeypatch.setattr(build, "sources_hash", lambda: "changed")
    with pytest.raises(RuntimeError, match=r"csrc changed since .*install ffpa-cuda again"):
        native.kernel(NOT_BUILT, "sm_90")


@pytest.fixture
def empty_wheel(monkeypatch, fake_nvcc, cache):
    """CPU tensors get the choice of an sm_90 GPU, with no kernel compiled and a compiler that always fails."""
    fake_nvcc.set(broken="")
    describe = ops.describe
    monkeypatch.setattr(ops, "describe", lambda *call, **_: describe(*call, device="cuda", arch="sm_90"))
    monkeypatch.setattr(ops, "_plans", {})
    monkeypatch.setattr(ops, "_warned", set())
    monkeypatch.setattr(native_module, "_unready", {})
    # The function without its cache does not remember what this process asked before.
    monkeypatch.setattr(native_module, "kernel", native_module.kernel.__wrapped__)
    monkeypatch.setattr(native_module, "record", lambda: {"kernels": {}, "sources": build.sources_hash()})
    monkeypatch.setattr(native_module, "library", lambda: NewDriver)
    return torch.randn(1, 1, 72, 512).half()


def compiled(fake_nvcc) -> list[str]:
    """Names the families that the compiler was asked for, in order."""
    return [call.rpartition(" -o ")[2].partition("_f16_")[0] for call in fake_nvcc.calls]


def test_a_kernel_that_fails_to_compile_leaves_calls_to_the_next_path(empty_wheel, fake_nvcc):
    x, reason = empty_wheel, r"forward_mma_split_f16_\S*columns512_\S* is not ready for sm_90: [\s\S]*out of luck"
    with pytest.warns(UserWarning, match=f"runs on reference, not on a kernel of ours: [\\s\\S]*{reason}") as caught:
        for n in (24, 16, 24):
            out, _ = ffpa(x[:, :, :n], x, x, return_lse=True)
            assert out.shape == (1, 1, n, 512) and out.isfinite().all()
    assert len(caught) == 1 and compiled(fake_nvcc) == ["forward_wgmma_latent", "forward_mma_split"]
    said = explain(x, x, x, return_lse=True, arch="sm_90")
    assert said.backend == "reference"
    assert all("out of luck" in dict(said.rejected)[backend] for backend in ("hopper", "mma"))


@pytest.mark.parametrize("flag, asked", [("FFPA_STRICT", ""), ("FFPA_BACKEND", "mma"), ("", "level=1")])
def test_a_kernel_that_fails_to_compile_raises_where_it_was_asked_for(empty_wheel, fake_nvcc, monkeypatch, flag, asked):
    if flag:
        monkeypatch.setenv(flag, asked or "1")
    x = empty_wheel
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=rf"{flag or asked}[\s\S]*not ready for sm_90[\s\S]*out of luck"):
            ffpa(x, x, x, level=None if flag else 1, return_lse=True)
    assert compiled(fake_nvcc) == ["forward_wgmma_latent"] * (flag == "FFPA_STRICT") + ["forward_mma_split"]


def test_an_old_driver_leaves_calls_to_the_next_path(empty_wheel, monkeypatch):
    monkeypatch.setattr(native_module, "library", lambda: OldDriver)
    x = empty_wheel
    with pytest.warns(UserWarning, match=r"runs on reference.*driver supports CUDA 12\.4.*install a newer driver"):
        ffpa(x, x, x, return_lse=True)


def test_library_reports_versions_and_wrong_files(native, tmp_path):
    runtime, driver = native.library().cuda_versions()
    assert runtime >= 12000 and (driver > 0 or not torch.cuda.is_available())
    with pytest.raises(RuntimeError, match="cannot open shared object file"):
        native.load_kernel(str(tmp_path / "none.so"), "a", "a")
    with pytest.raises(RuntimeError, match="holds no kernel named another"):
        native.load_kernel(str(native._PACKAGE / build.LIBRARY), "another", "a")
    with pytest.raises(RuntimeError, match="no kernel named nobody is loaded"):
        native.launcher(["nobody"], [b""], [], 0)


def test_parameters_of_another_version_are_refused(native):
    launch = native.launcher([BUILT.name], [bytes(8)], [], 0)
    with pytest.raises(RuntimeError, match=f"{BUILT.name} takes .* bytes of parameters, and got 8: .*other sources"):
        launch(b"")


def test_a_model_can_neither_load_a_file_nor_launch_a_kernel(native):
    """Programs that come with a model can call every operator there is."""
    native.library()
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("ffpa_attn_native::")]
    assert names == ["ffpa_attn_native::cuda_versions"]


def test_import_is_quick_and_loads_nothing():
    """It takes a fifth of what importing torch takes at most, however slow the machine is; a call imports the backends."""
    code = (
        f"import sys, time; sys.path.insert(0, {str(ROOT / 'ffpa')!r}); begin = time.process_time(); import torch;"
        "middle = time.process_time(); import ffpa_attn, ffpa_attn.launching.native; end = time.process_time();"
        "print((end - middle) / (middle - begin), torch.cuda.is_initialized());"
        "print('ffpa_attn.backends.choice' in sys.modules);"
        "print(any('_native' in line for line in open('/proc/self/maps')))"
    )
    command = [sys.executable, "-c", code]
    outs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() for _ in range(3)]
    assert min(float(share) for share, *_ in outs) <= 0.2, outs  # another process may have slowed down one of them
    assert all(out[1:] == ["False"] * 3 for out in outs)


def test_doctor_never_fails(native, monkeypatch, capsys):
    assert doctor.main() == 0
    out = capsys.readouterr().out
    assert BUILT.name in out and "nothing is broken" in out

    def fail():
        raise KeyError("surprise")

    monkeypatch.setattr(doctor, "CHECKS", (fail,))
    assert doctor.main() == 1
    assert "fail       BROKEN: KeyError: 'surprise'" in capsys.readouterr().out


@pytest.mark.parametrize("flag, value, subject", [("MAX_JOBS", "many", "flags"), ("CUDA_HOME", "/nowhere", "compiler")])
def test_doctor_says_a_wrong_flag_once(native, monkeypatch, capsys, flag, value, subject):
    monkeypatch.setenv(flag, value)
    assert doctor.main() == 1
    out = capsys.readouterr().out
    assert out.count(f"{flag}={value!r}") == out.count("BROKEN") == 1 and f"\nbroken: {subject}" in out


# ---- with a GPU ----


def numbers(device="cuda", rows=1001):
    return torch.randn(rows, 64, device=device, dtype=torch.float16)


@needs_gpu
@pytest.mark.parametrize("spec", [BUILT, NOT_BUILT], ids=lambda spec: spec.name)
def test_a_kernel_runs(native, cache, spec):
    if reason := toolchain.why_no_build() if spec is NOT_BUILT else None:
        pytest.skip(reason)
    for rows in (1, 127, 1001):
        x = numbers(rows=rows)
        assert torch.equal(merged_alone(spec, x), x)


@needs_gpu
def test_it_runs_on_the_current_stream(native):
    x = numbers(rows=1 << 14)
    merged_alone(BUILT, x)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        x.fill_(3.0)
        y = merged_alone(BUILT, x)  # nothing in it waits; on another stream the kernel would read what was there before
    side.synchronize()
    assert (y == 3.0).all()


@needs_gpu
def test_it_runs_in_a_graph(native):
    x = numbers()
    merged_alone(BUILT, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = merged_alone(BUILT, x)
    x.fill_(4.0)
    graph.replay()
    assert (y == 4.0).all()


@needs_gpu
def test_many_threads(native):
    wrong = []

    def work(thread):
        for i in range(50):
            x = torch.full((100, 64), float(8 * i + thread), device="cuda", dtype=torch.float16)
            if not torch.equal(merged_alone(BUILT, x), x):
                wrong.append((thread, i))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU or none")
def test_it_runs_on_the_tensors_gpu(native):
    for index in range(torch.cuda.device_count()):
        x = numbers(f"cuda:{index}")
        assert torch.equal(merged_alone(BUILT, x), x)
    assert torch.cuda.current_device() == 0


@needs_gpu
def test_a_failed_launch_says_what_was_launched(native):
    device = torch.device("cuda", 0)
    params = structs.struct("AttentionParams")(batch=1 << 10, heads_q=1 << 10, n_q=1 << 11)  # a grid holds one less
    launch = native.launcher([name := native.kernel(BUILT, native.gpu_of(device))], [bytes(params)], [], 0)
    with pytest.raises(RuntimeError, match=rf"launching {name} failed: invalid .*grid 2147483648 x 1 x 1.*128 threads"):
        launch(b"")
    x = numbers()  # the error does not stick: the next launch works
    assert torch.equal(merged_alone(BUILT, x), x)


@needs_gpu
def test_a_forked_child_may_be_the_first_to_use_the_gpu(native):
    code = f"""
import os, sys
from pathlib import Path
sys.path.insert(0, {str(ROOT / "ffpa")!r})
import torch
from ffpa_attn.doctor import merged_alone
from ffpa_attn.launching import native
from ffpa_attn.specs.spec import ForwardMerge
native._PACKAGE = Path({str(native._PACKAGE)!r})
native.library().cuda_versions()
child = os.fork()
if child == 0:
    x = torch.ones(1000, 64, device="cuda", dtype=torch.float16)
    os._exit(0 if torch.equal(merged_alone(ForwardMerge("f16"), x), x) else 1)
sys.exit(os.waitpid(child, 0)[1])
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
