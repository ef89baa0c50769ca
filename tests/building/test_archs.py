"""Tests which code is compiled for which request, and which GPU runs it."""

import pytest
from ffpa_attn import env
from ffpa_attn.specs import archs


def flags(**changes):
    return {**{flag.name: flag.default for flag in env.FLAGS}, **changes}


def test_default_request_is_ampere_with_ptx_and_hopper():
    assert archs.requested(flags()) == ((80, True), (90, False))
    assert archs.requested(flags(ENABLE_FFPA_AMPERE=False)) == ((90, False),)
    assert archs.requested(flags(ENABLE_FFPA_HOPPER=False)) == ((80, True),)


@pytest.mark.parametrize("text", ["8.6;9.0a+PTX", "8.6 9.0a+PTX", "8.6, 9.0+PTX;"])
def test_a_list_of_archs_wins(text):
    assert archs.requested(flags(TORCH_CUDA_ARCH_LIST=text)) == ((86, False), (90, True))
    assert archs.requested(flags(FFPA_CUDA_ARCHS=text, TORCH_CUDA_ARCH_LIST="8.0")) == ((86, False), (90, True))


@pytest.mark.parametrize("text", ["hopper", "sm_90", "9", "8.0+ptx", "8.0;x", "Hopper+PTX"])
def test_a_wrong_list_names_flag_value_and_what_is_allowed(text):
    with pytest.raises(
        ValueError, match=r"FFPA_CUDA_ARCHS=.* is no architecture; write numbers such as `8\.0\+PTX;9\.0a`"
    ):
        archs.requested(flags(FFPA_CUDA_ARCHS=text))


def test_pytorchs_names_are_its_numbers():
    assert archs.requested(flags(TORCH_CUDA_ARCH_LIST="Hopper")) == ((90, True),)
    assert archs.requested(flags(TORCH_CUDA_ARCH_LIST="Ampere+Tegra;9.0a Ada")) == (
        (87, False),
        (90, False),
        (89, True),
    )
    extension = pytest.importorskip("torch.utils.cpp_extension")
    for name, numbers in archs._FAMILIES.items():
        assert archs.requested(flags(TORCH_CUDA_ARCH_LIST=name)) == archs.requested(flags(TORCH_CUDA_ARCH_LIST=numbers))
        if name == "Hopper":  # PyTorch refuses here what its own nvcc does not know
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("TORCH_CUDA_ARCH_LIST", name)
                assert "arch=compute_90,code=sm_90" in " ".join(extension._get_cuda_arch_flags())


def test_targets_of_a_kernel_for_every_newer_gpu_and_of_one_for_hopper_alone():
    default = archs.requested(flags())
    assert archs.targets("sm_80", default) == ("sm_80", "sm_90", "compute_80")
    assert archs.targets("sm_90a", default) == ("sm_90a",)
    assert archs.targets("sm_90a", archs.requested(flags(FFPA_CUDA_ARCHS="9.0+PTX;10.0"))) == ("sm_90a", "compute_90a")
    assert archs.targets("sm_80", archs.requested(flags(FFPA_CUDA_ARCHS="7.5;12.0"))) == ("sm_120",)
    assert archs.targets("sm_90a", archs.requested(flags(FFPA_CUDA_ARCHS="8.0"))) == ()


@pytest.mark.parametrize(
    "target, gpu, expected",
    [
        ("sm_80", "sm_80", True),
        ("sm_80", "sm_86", True),
        ("sm_86", "sm_80", False),
        ("sm_80", "sm_90", False),
        ("compute_80", "sm_120", True),
        ("compute_90", "sm_80", False),
        ("sm_90a", "sm_90", True),
        ("sm_90a", "sm_100", False),
        ("compute_90a", "sm_100", False),
        ("sm_100f", "sm_103", True),
        ("sm_100f", "sm_120", False),
    ],
)
def test_which_gpu_runs_a_target(target, gpu, expected):
    assert archs.runs(target, gpu) is expected


def test_why_a_gpu_cannot_run_a_kernel():
    assert archs.why_not_on("sm_80", "sm_120") is None
    assert archs.why_not_on("sm_90a", "sm_90") is None
    assert "needs sm_80 or newer, and the GPU is sm_75" in archs.why_not_on("sm_80", "sm_75")
    assert "only sm_90a has, and the GPU is sm_100" in archs.why_not_on("sm_90a", "sm_100")


def test_exact_target():
    assert archs.exact_target("sm_80", "sm_90") == "sm_90"
    assert archs.exact_target("sm_90a", "sm_90") == "sm_90a"
