"""Tests the way from a spec to an object: names, generated text, the compiler, the gate, what the library holds."""

import ctypes
import errno
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from ffpa_attn import env
from ffpa_attn.building import build, cache, generation, toolchain
from ffpa_attn.building.toolchain import BuildError
from ffpa_attn.specs import archs
from ffpa_attn.specs.spec import ForwardMerge, KernelSpec, aot_specs
from wheel_support import ROOT, Variant, needs_nvcc


@dataclass(frozen=True)
class Example(KernelSpec):
    family = "example_kernel"
    arch = "sm_90a"

    dtype: str
    acc: str
    tile_q: int
    persistent: bool


# ---- specs and their text ----


def test_a_name_says_every_field():
    assert Example("bf16", "f32", 64, True).name == "example_kernel_bf16_f32_tile_q64_persistent"
    assert Example("f16", "f16", 128, False).name == "example_kernel_f16_f16_tile_q128"


def test_names_of_the_wheels_kernels_are_identifiers_and_differ():
    names = [spec.name for spec in aot_specs(env.all_flags())]
    assert names and len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", name) for name in names)


def test_generated_text():
    text = generation.instance_source(Example("bf16", "f32", 64, True))
    for line in (
        '#include "attention/example/kernel.cuh"',
        "using Dtype = ffpa::BFloat16;",
        "using Acc = float;",
        "static constexpr int kTileQ = 64;",
        "static constexpr bool kPersistent = true;",
        "struct example_kernel_bf16_f32_tile_q64_persistent "
        ": ffpa::ExampleKernelConfig<example_kernel_bf16_f32_tile_q64_persistent_fields> {};",
    ):
        assert line in text
    assert "torch" not in text


# ---- what the wheel holds ----


def test_the_whole_set_compiles_and_is_recorded(native):
    record = native.record()
    requests = archs.requested(env.all_flags())
    assert record["sources"] == build.sources_hash()
    for spec in aot_specs(env.all_flags()):
        if not archs.targets(spec.arch, requests):  # a kernel for Hopper alone, in a wheel for other GPUs
            assert spec.name not in record["kernels"]
            continue
        kernel = record["kernels"][spec.name]
        assert tuple(kernel["targets"]) == archs.targets(spec.arch, requests)
        for target in kernel["targets"]:
            if target.startswith("sm_"):
                used = kernel["resources"][target]
                assert 0 < used["registers"] <= 255
                if record["nvcc"].startswith(f"{toolchain.MEASURED_NVCC}."):
                    assert used["spill_bytes"] <= spec.allowed_spill_bytes


@needs_nvcc
def test_a_library_of_one_kernel_needs_no_torch(tmp_path):
    spec = Variant("f16", 2)
    library, resources = build.compile_library({spec: ("sm_90",)}, tmp_path)
    assert ctypes.CDLL(str(library))[generation.instance_symbol(spec)]
    assert resources[spec.name]["sm_90"].registers > 0
    deps = [toolchain.find_ninja(), "-C", tmp_path, "-t", "deps", f"{spec.name}.o"]
    headers = subprocess.run(deps, capture_output=True, text=True, check=True).stdout
    assert "launch/launcher.cuh" in headers and "/torch/" not in headers


def test_no_kernel_for_what_is_asked(monkeypatch):
    monkeypatch.setenv("FFPA_CUDA_ARCHS", "7.5")
    with pytest.raises(BuildError, match=r"ask for 7\.5, and no kernel runs there; set FFPA_CUDA_ARCHS"):
        build.wheel_kernels()


# ---- the gate ----

PTXAS = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1aILi1EE' for 'sm_80'
ptxas info    : Function properties for _Z1aILi1EE
    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 1024 bytes smem, 400 bytes cmem[0]
ptxas info    : Compiling entry function '_Z1bv' for 'sm_80'
ptxas info    : Function properties for _Z1bv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers
ptxas info    : Compiling entry function '_Z1bv' for 'sm_90a'
ptxas info    : Function properties for _Z1bv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers
"""
SERIALIZED = """ptxas info    : (C7519) warpgroup.arrive is injected in around line 59 by compiler to allow use of
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to
"""


def test_ptxas_is_read():
    assert build.parse_ptxas(PTXAS) == {
        "sm_80": build.Resources(registers=168, stack_bytes=16, spill_bytes=12, smem_bytes=1024),
        "sm_90a": build.Resources(registers=40),
    }


def test_the_gate_names_the_spec():
    @dataclass(frozen=True)
    class Spills(Example):
        allowed_spill_bytes = 12

    fields = ("f16", "f32", 64, False)
    used, spills = build.gate(Example(*fields), PTXAS)
    assert spills == ["example_kernel_f16_f32_tile_q64 spills 12 bytes on sm_80 (168 registers), allowed are 0"]
    assert build.gate(Spills(*fields), PTXAS) == (used, [])
    with pytest.raises(BuildError, match=r"example_kernel_f16_f32_tile_q64: ptxas had to serialize .*C7510"):
        build.gate(Spills(*fields), PTXAS + SERIALIZED)
    with pytest.raises(BuildError, match="names no kernel"):
        build.gate(Spills(*fields), "")


@pytest.mark.parametrize("release", ["12.8", "13.0", "13.1", "13.5"])
def test_spills_are_an_error_of_the_measured_compiler_alone(release, fake_nvcc, tmp_path, capfd):
    """With another compiler the build says one sentence about them, and the library is there."""
    fake_nvcc.set(release=release, version="37", spills="56")
    kernels = {spec: ("sm_90",) for spec in (ForwardMerge("f16"), ForwardMerge("bf16"))}
    if release == toolchain.MEASURED_NVCC:
        with pytest.raises(
            BuildError, match=r"forward_merge_f16\S* spills 56 bytes.*\n.*forward_merge_bf16\S* spills 56 bytes"
        ):
            build.compile_library(kernels, tmp_path / "build")
    else:
        library, used = build.compile_library(kernels, tmp_path / "build")
        assert library.exists() and len(used) == 2
        (said,) = [line for line in capfd.readouterr().err.splitlines() if "spills" in line]
        assert f"nvcc {release}.37 forward_merge_f16" in said and "(and 1 more)" in said


MUST_SPILL = """
#include "ptx/launch_types.h"
namespace ffpa {
struct MustSpillParams { float* x; };
template <class Fields>
struct MustSpillConfig : Fields {
  using Params = MustSpillParams;
  static LaunchShape launch_shape(const Params&) { return {}; }
};
template <class Config>
__global__ void __launch_bounds__(1024, 2) must_spill(const MustSpillParams params) {  // 32 registers a thread
  float live[Config::kLive];
#pragma unroll
  for (int i = 0; i < Config::kLive; ++i) live[i] = params.x[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < Config::kLive; ++i) params.x[i * 1024 + threadIdx.x] = live[Config::kLive - 1 - i] * live[0];
}
}  // namespace ffpa
"""


@dataclass(frozen=True)
class MustSpill(KernelSpec):
    family = "must_spill"
    arch = "sm_80"

    live: int


@needs_nvcc
def test_a_kernel_that_spills_fails_the_build_again_and_again(tmp_path, monkeypatch):
    (tmp_path / "spill.cuh").write_text(MUST_SPILL)
    monkeypatch.setattr(MustSpill, "header", str(tmp_path / "spill.cuh"))
    for _ in range(2):
        with pytest.raises(
            BuildError, match=r"must_spill_live64 spills \d+ bytes on sm_80.*\n.*must_spill_live96 spills"
        ):
            specs = {MustSpill(live): ("sm_80",) for live in (8, 64, 96)}
            build.compile_library(specs, tmp_path / "build")


MUST_SERIALIZE = """
#include <cstdint>
#include "ptx/launch_types.h"
namespace ffpa {
struct MustSerializeParams { float* x; uint64_t a, b; };
template <class Fields>
struct MustSerializeConfig : Fields {
  using Params = MustSerializeParams;
  static LaunchShape launch_shape(const Params&) { return {}; }
};
template <class Config>
__global__ void must_serialize(const MustSerializeParams params) {
  float sum[4] = {};
  for (int i = 0; i < Config::kSteps; ++i) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : "l"(params.a + i), "l"(params.b));
    sum[0] *= 2;  // while the product may still be writing it
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;");
  for (int i = 0; i < 4; ++i) params.x[threadIdx.x * 4 + i] = sum[i];
}
}  // namespace ffpa
"""


@dataclass(frozen=True)
class MustSerialize(KernelSpec):
    family = "must_serialize"
    arch = "sm_90a"

    steps: int


@needs_nvcc
def test_a_kernel_whose_wgmma_is_serialized_fails_the_build(tmp_path, monkeypatch):
    (tmp_path / "serialize.cuh").write_text(MUST_SERIALIZE)
    monkeypatch.setattr(MustSerialize, "header", str(tmp_path / "serialize.cuh"))
    with pytest.raises(BuildError, match=r"must_serialize_steps4: .*\(C75\d\d\).*are serialized due to"):
        build.compile_library({MustSerialize(4): ("sm_90a",)}, tmp_path / "build")


@needs_nvcc
def test_hopper_kernels_pass_the_gate(tmp_path):
    """Products that ptxas serialises, and sums that it spills, cost more than they gain. A wheel for sm_80 has none."""
    specs = [spec for spec in aot_specs(env.all_flags()) if spec.arch == "sm_90a"]
    specs = [spec for spec in specs if getattr(spec, "dtype", "bf16") in ("bf16", "e4m3")]
    _, resources = build.compile_library({spec: ("sm_90a",) for spec in specs}, tmp_path / "build")
    assert len(resources) == len(specs) >= 3


# ---- the machine ----


def test_the_compiler_is_looked_for_in_order(fake_nvcc, tmp_path, monkeypatch):
    assert toolchain.find_nvcc() == toolchain.Nvcc(fake_nvcc.bin / "nvcc", "CUDA_HOME")
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", str(fake_nvcc.bin))
    assert toolchain.find_nvcc() == toolchain.Nvcc(fake_nvcc.bin / "nvcc", "PATH")
    monkeypatch.setenv("PATH", str(tmp_path))
    packages = tmp_path / "site-packages"
    nvcc = packages / "nvidia" / "cu13" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.touch()
    (packages / "nvidia" / "cu13" / "lib").mkdir()
    (packages / "nvidia" / "cu13" / "lib" / "libcudart_static.a").touch()
    monkeypatch.setattr(sys, "path", [str(packages)])
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    found = toolchain.find_nvcc()
    assert found == toolchain.Nvcc(nvcc, "PyPI's nvidia-cuda-nvcc") and found.library_path == nvcc.parents[1] / "lib"
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert toolchain.find_nvcc() is None
    assert toolchain.GET_NVCC in toolchain.why_no_build()


def test_messages_name_what_the_extra_installs():
    """`pip install` of an extra would fetch the namesake on PyPI, or nothing."""
    extra = re.search(r"^jit = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE)[1]
    named = re.findall(r'"(\S+?)"', extra)
    assert len(named) == 5 and all(name in toolchain.GET_NVCC for name in named)
    sources = [path.read_text() for path in (ROOT / "ffpa").rglob("*.py")]
    assert not [text for text in sources if re.search(r"ffpa[-_](attn|cuda)\[", text)]


def test_a_wrong_cuda_home_is_an_error(monkeypatch):
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    with pytest.raises(BuildError, match=r"CUDA_HOME='/nowhere' holds no bin/nvcc; set it .* or unset it"):
        toolchain.find_nvcc()


def test_nvcc_without_torch_is_an_error(fake_nvcc, tmp_path, monkeypatch):
    monkeypatch.setattr(toolchain, "find_torch", lambda: None)
    with pytest.raises(BuildError, match=r"PyTorch is not.*--no-build-isolation"):
        build.build_wheel_library(tmp_path / "build", tmp_path / build.LIBRARY)
    old = toolchain.Torch(tmp_path, tmp_path, "2.9.1+cu128")
    monkeypatch.setattr(toolchain, "find_torch", lambda: old)
    with pytest.raises(BuildError, match=r"PyTorch is 2\.9\.1\+cu128; .* from 2\.10 on"):
        build.build_wheel_library(tmp_path / "build", tmp_path / build.LIBRARY)


def test_what_a_build_needs(fake_nvcc, monkeypatch):
    assert toolchain.why_no_build() is None
    (fake_nvcc.bin / "nvcc").chmod(0o644)
    toolchain.release_of.cache_clear()
    assert re.search(r"nvcc --version` failed: .*Permission denied.*the way out: pip install", toolchain.why_no_build())
    (fake_nvcc.bin / "nvcc").chmod(0o755)
    fake_nvcc.set(release="11.8")
    toolchain.release_of.cache_clear()
    assert "nvcc 11.8.1, and 12.0 is the oldest" in toolchain.why_no_build()
    fake_nvcc.set(release="13.0")
    toolchain.release_of.cache_clear()
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None if name == "g++" else f"/usr/bin/{name}")
    assert "apt-get install g++" in toolchain.why_no_build()
    monkeypatch.setenv("NVCC_CCBIN", "/opt/clang++")
    assert toolchain.why_no_build() is None
    monkeypatch.setattr(toolchain, "find_ninja", lambda: None)
    assert "pip install ninja" in toolchain.why_no_build()


def test_max_jobs_and_flags_reach_the_tools(fake_nvcc, tmp_path, monkeypatch):
    monkeypatch.setenv("MAX_JOBS", "3")
    seen = []
    real = build.sessions.run
    monkeypatch.setattr(
        build.sessions, "run", lambda command, *how, **more: seen.append(command) or real(command, *how, **more)
    )
    directory = tmp_path / "with space and $"
    build.compile_library({ForwardMerge("f16"): ("sm_90", "compute_90")}, directory)
    assert ["-j", "3"] in [command[-2:] for command in seen]
    assert "-gencode=arch=compute_90,code=sm_90 -gencode=arch=compute_90,code=compute_90" in fake_nvcc.calls[0]


@pytest.mark.parametrize("value", ["auto", ""])
def test_as_many_jobs_as_there_are_cores(fake_nvcc, tmp_path, monkeypatch, value):
    monkeypatch.setenv("MAX_JOBS", value)
    monkeypatch.setattr(build, "cpu_count", lambda: 7)
    seen = []
    monkeypatch.setattr(build.sessions, "run", lambda command, *how, **more: seen.append(command) or 0)
    with cache.locked(tmp_path / "lock", "x") as lock:
        build.run_ninja(tmp_path, lock)
    assert seen[0][-2:] == ["-j", "7"]


def test_a_build_flag_that_is_not_allowed_is_a_reason(fake_nvcc, monkeypatch):
    """Calls that need no compiler go on."""
    monkeypatch.setenv("MAX_JOBS", "many")
    assert "MAX_JOBS='many' is not allowed" in toolchain.why_no_build()


def test_a_compiler_that_fails_is_quoted(fake_nvcc, tmp_path):
    fake_nvcc.set(broken="")
    with pytest.raises(BuildError, match=r"ninja .*failed[\s\S]*forward_merge_f16\.o[\s\S]*out of luck"):
        build.compile_library({ForwardMerge("f16"): ("sm_90",)}, tmp_path / "build")
    assert not (tmp_path / "build" / "library.so").exists()


def test_only_what_changed_is_compiled_again(fake_nvcc, tmp_path):
    kernels = {ForwardMerge("f16"): ("sm_90",), Variant("f16", 8): ("sm_90",)}
    build.compile_library(kernels, tmp_path / "build")
    assert len(fake_nvcc.calls) == 3  # two kernels and the link
    build.compile_library(kernels, tmp_path / "build")
    assert len(fake_nvcc.calls) == 3


def test_a_full_disk_leaves_the_library_that_was_there(fake_nvcc, tmp_path, monkeypatch):
    destination = tmp_path / "out" / build.LIBRARY
    monkeypatch.setenv("ENABLE_FFPA_DEBUG", "1")
    build.build_wheel_library(tmp_path / "build", destination)
    before = destination.stat().st_ino, destination.with_name(build.RECORD).read_text()
    monkeypatch.setenv("FFPA_CUDA_ARCHS", "9.0")
    real = Path.write_text

    def write_text(self, text, **how):
        if self.parent == destination.parent:
            real(self, text[:10], **how)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(self, text, **how)

    monkeypatch.setattr(Path, "write_text", write_text)
    with pytest.raises(OSError, match="No space left"):
        build.build_wheel_library(tmp_path / "build", destination)
    assert (destination.stat().st_ino, destination.with_name(build.RECORD).read_text()) == before


def test_the_root_env_is_the_packages():
    assert (ROOT / "env.py").read_text() == Path(env.__file__).read_text()  # a link here, a copy in an sdist
