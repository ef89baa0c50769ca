"""Tests which path a call takes: pure choice, explain, warnings, FFPA_STRICT, FFPA_BACKEND, level."""

import contextlib
import warnings

import ffpa_attn
import pytest
import torch
from ffpa_attn import env, explain, ffpa
from ffpa_attn.backends import choice, sdpa, triton_attention
from ffpa_attn.backends.choice import CANDIDATES, choose
from ffpa_attn.backends.reference import Rule
from ffpa_attn.building import toolchain
from ffpa_attn.launching import native
from ffpa_attn.operators import ops
from ffpa_attn.specs import archs
from ffpa_attn.specs.problem import Problem, Visibility
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

WHY_NOT_TRITON = triton_attention.why_not.__wrapped__  # the function, without its memory of what it has said before
ALL_KEYS = Visibility(-1, -1, False)
PROBLEM = Problem(
    "forward", "cuda", "sm_90", "bf16", 1, 32, 32, 8192, 8192, 512, 512, None, ALL_KEYS, 0.04, 0.0, None, False, None, "f32", None
)  # fmt: skip


def flags(**values):
    return {**env.run_flags(), **values}


@pytest.fixture(autouse=True)
def fresh_plans(monkeypatch):
    """Clears plans, and leaves no kernel in the installation: tests/backends/test_mma.py tests what is there."""
    monkeypatch.setattr(native, "record", lambda: {"kernels": {}})
    monkeypatch.setattr(native, "why_not", lambda spec, gpu: f"{spec.name} is left out of this installation")
    monkeypatch.setattr(ops, "_plans", {})
    monkeypatch.setattr(ops, "_warned", set())


def q(*shape, device="cpu"):
    return torch.randn(shape or (1, 2, 16, 64), device=device).to(torch.bfloat16)


class TestSdpaMeansTheSame:
    def test_plain(self):
        assert choose(PROBLEM, flags()).backend == "sdpa"

    @pytest.mark.parametrize(
        "changes, word",
        [
            ({"needs_lse": True}, "LSE"),
            ({"direction": "backward"}, "LSE"),
            ({"packed": (8192, 8192)}, "packed"),
            ({"mask": "bool"}, "without keys"),
            ({"softcap": 5.0}, "softcap"),
            ({"visibility": Visibility(9, -1, False)}, "window"),
            ({"visibility": Visibility(-1, 4, True)}, "window"),
            ({"visibility": Visibility(-1, 0, False), "n_q": 100}, "top-left"),
            ({"d_v": 256}, "D_v"),
            ({"n_k": 0}, "without keys"),
            ({"scale": 0.0}, "scale"),
            ({"scale": -1.0}, "scale"),
            ({"heads_q": 70000, "heads_kv": 70000, "n_q": 8}, "heads"),
            ({"n_q": 2**20}, "workspace"),
        ],
        ids=str,
    )
    def test_not_where_it_differs(self, changes, word):
        choice = choose(PROBLEM._replace(**changes), flags())
        assert choice.backend == "reference"
        assert word in dict(choice.rejected)["sdpa"]

    @pytest.mark.parametrize(
        "changes",
        [{"visibility": Visibility(-1, 0, False)}, {"visibility": Visibility(-1, 0, True), "n_q": 100}],
        ids=str,
    )
    def test_causal_where_the_diagonals_agree(self, changes):
        assert choose(PROBLEM._replace(**changes), flags()).backend == "sdpa"

    def test_its_unfused_backend_is_never_called(self, device, monkeypatch):
        monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *args, **keywords: 0)
        monkeypatch.setattr(sdpa, "torch_sdpa", None)
        x = q(device=device)
        assert ffpa(x, x, x).shape == x.shape

    def test_grouped_heads(self, device):
        x, shared = q(1, 4, 512, 64, device=device), q(1, 1, 512, 64, device=device)
        assert explain(x, shared, shared).backend == "sdpa"
        got, (expected, _) = ffpa(x, shared, shared), ffpa(x, shared, shared, return_lse=True)
        assert torch.allclose(got, expected, atol=2e-2)

    @pytest.mark.filterwarnings("ignore")  # PyTorch's reasons
    def test_switches_that_leave_pytorch_no_kernel(self, device, monkeypatch):
        x, shared = q(1, 4, 16, 64, device=device), q(device=device)
        expected = ffpa(x, shared, shared)
        monkeypatch.setattr(sdpa, "torch_sdpa", None)
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            assert torch.allclose(ffpa(x, shared, shared), expected, atol=2e-2)

    def test_the_memory_efficient_kernel_has_no_grouped_heads(self, monkeypatch):
        monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *args, **keywords: SDPBackend.EFFICIENT_ATTENTION.value)
        asked, torch_sdpa = [], sdpa.torch_sdpa
        monkeypatch.setattr(
            sdpa, "torch_sdpa", lambda *args, **options: (asked.append(options), torch_sdpa(*args, **options))[1]
        )
        for heads in (2, 4):
            ffpa(q(1, heads, 16, 64), q(), q())
        assert len(asked) == 1 and not asked[0]["enable_gqa"]


class TestSmallHeadDims:
    """Every kernel is there."""

    SMALL = PROBLEM._replace(d_qk=128, d_v=128, scale=0.1)

    @pytest.fixture(autouse=True)
    def everything(self, monkeypatch):
        monkeypatch.setattr(native, "why_not", lambda spec, gpu: archs.why_not_on(spec.arch, gpu))
        monkeypatch.setattr(triton_attention, "why_not", lambda: None)
        monkeypatch.setattr(triton_attention, "_lacks_compiler", lambda: False)

    @pytest.mark.parametrize(
        "changes, backend",
        [
            ({}, "sdpa"),
            ({"visibility": Visibility(-1, 0, False)}, "hopper"),
            ({"visibility": Visibility(-1, 0, False), "n_q": 512, "n_k": 512}, "sdpa"),  # 128 row tiles
            ({"visibility": Visibility(-1, 0, False), "n_q": 640, "n_k": 640}, "hopper"),  # 160
            ({"visibility": Visibility(-1, 0, False), "n_q": 512, "n_k": 512, "needs_lse": True}, "hopper"),
            ({"d_qk": 136}, "hopper"),
            ({"d_qk": 256, "d_v": 256}, "sdpa"),
            (
                {"d_qk": 256, "d_v": 256, "heads_q": 1, "heads_kv": 1, "n_q": 4096, "n_k": 4096},
                "hopper",
            ),  # cuts its keys
            ({"d_qk": 256, "d_v": 256, "heads_kv": 8, "batch": 8, "n_q": 1}, "hopper"),
            ({"d_qk": 64, "d_v": 64, "packed": (8192, 8192)}, "hopper"),
            ({"needs_lse": True}, "hopper"),
            ({"heads_kv": 4}, "sdpa"),
            ({"heads_kv": 4, "needs_lse": True}, "hopper"),
            ({"heads_kv": 4, "visibility": Visibility(-1, 0, False)}, "hopper"),
            ({"heads_kv": 4, "copied": True}, "hopper"),  # into `out`, or rows first
            ({"d_v": 64}, "hopper"),
            ({"d_qk": 192}, "sdpa"),
            ({"d_qk": 192, "visibility": Visibility(-1, 0, False)}, "hopper"),
            ({"d_qk": 192, "heads_q": 2, "heads_kv": 1, "n_q": 4096, "n_k": 4096}, "hopper"),  # cut keys
            (
                {
                    "d_qk": 192,
                    "heads_q": 16,
                    "heads_kv": 16,
                    "n_q": 1024,
                    "n_k": 1024,
                    "visibility": Visibility(-1, 0, False),
                },
                "sdpa",
            ),
            ({"d_qk": 256, "d_v": 256, "heads_q": 2, "heads_kv": 1, "n_q": 4096, "n_k": 4096}, "hopper"),
            ({"heads_kv": 4, "n_q": 500, "n_k": 500, "visibility": Visibility(-1, 0, False)}, "hopper"),  # a prompt
            (
                {"heads_kv": 4, "n_q": 500, "n_k": 500, "d_qk": 64, "d_v": 64, "visibility": Visibility(-1, 0, False)},
                "triton",
            ),
            ({"heads_kv": 4, "batch": 8, "n_q": 16, "n_k": 200}, "hopper"),  # half of a tile
            ({"d_qk": 192, "d_v": 192}, "hopper"),
            ({"packed": (8192, 8192)}, "hopper"),
            ({"packed": (32768, 32768), "batch": 256, "heads_q": 1, "heads_kv": 1}, "hopper"),
            ({"d_qk": 264, "packed": (256, 256)}, "hopper"),  # few row tiles, whose keys it cuts
            ({"mask": "bool"}, "hopper"),
            ({"mask": "bool", "d_qk": 256}, "hopper"),
            ({"d_qk": 64, "d_v": 64, "visibility": Visibility(-1, 0, False)}, "sdpa"),
            ({"d_qk": 64, "d_v": 64, "needs_lse": True}, "triton"),
            ({"heads_q": 1, "heads_kv": 1, "n_q": 4096, "n_k": 4096}, "hopper"),  # a quarter of a GPU without parts
            ({"heads_q": 1, "heads_kv": 1, "n_q": 4096, "n_k": 4096, "d_qk": 64, "d_v": 64}, "hopper"),
            ({"heads_q": 3, "heads_kv": 3, "n_q": 4096, "n_k": 4096}, "sdpa"),
            ({"heads_q": 2, "heads_kv": 1, "n_q": 1024, "n_k": 1024}, "sdpa"),  # too few keys for parts
            ({"heads_q": 1, "heads_kv": 1, "n_q": 4096, "n_k": 4096, "needs_lse": True}, "hopper"),  # cuts its keys
            ({"heads_kv": 4, "n_q": 8, "n_k": 32768}, "mma"),  # heads share tiles of 64 rows, which memory bounds
            ({"heads_kv": 4, "n_q": 32, "n_k": 32768}, "hopper"),  # heads share tiles of 128
            ({"heads_kv": 4, "n_q": 300, "n_k": 512}, "sdpa"),
            ({"heads_kv": 4, "n_q": 300, "n_k": 512, "needs_lse": True}, "hopper"),
            ({"n_q": 256, "n_k": 256}, "sdpa"),  # few row tiles, but as few keys
            ({"n_q": 300, "n_k": 1300}, "hopper"),  # few row tiles, and many keys
            ({"heads_q": 8, "heads_kv": 8, "n_q": 1200, "n_k": 16384}, "sdpa"),  # more than half of the GPU is busy
            ({"n_q": 256, "n_k": 1024, "d_qk": 64, "d_v": 64, "needs_lse": True}, "hopper"),
            ({"n_q": 256, "n_k": 1023, "d_qk": 64, "d_v": 64, "needs_lse": True}, "triton"),
            ({"heads_kv": 8, "n_q": 512, "n_k": 32768, "d_qk": 64, "d_v": 64, "needs_lse": True}, "hopper"),  # one wave
            (
                {"heads_kv": 8, "n_q": 512, "n_k": 1024, "d_qk": 64, "d_v": 64, "visibility": Visibility(-1, 0, False)},
                "triton",
            ),
            ({"heads_kv": 8, "n_q": 1, "n_k": 1024, "needs_lse": True}, "hopper"),
            ({"heads_kv": 8, "n_q": 1, "n_k": 8192, "needs_lse": True}, "mma"),
            ({"heads_kv": 8, "n_q": 1, "n_k": 8192, "d_qk": 64, "d_v": 64, "needs_lse": True}, "mma"),
            ({"heads_kv": 8, "n_q": 1, "n_k": 32768, "d_qk": 64, "d_v": 64, "needs_lse": True}, "hopper"),
            ({"n_q": 1, "n_k": 32768}, "mma"),
            ({"n_q": 1, "n_k": 4096}, "mma"),  # cuDNN would plan for every length
            ({"heads_kv": 8, "n_q": 1, "n_k": 1024, "d_qk": 256, "d_v": 256, "needs_lse": True}, "hopper"),
            ({"batch": 16, "heads_kv": 4, "n_q": 1}, "mma"),
            ({"batch": 16, "heads_kv": 4, "n_q": 1, "needs_lse": True}, "mma"),  # packs its heads
            ({"num_stages": 2}, "mma"),
            ({"dtype": "f16", "acc": "f16"}, "mma"),
            ({"d_qk": 264}, "hopper"),
            ({"d_qk": 264, "n_q": 129, "n_k": 1}, "mma"),  # all keys are in one tile
            ({"mask": "bool", "n_q": 8}, "mma"),  # few rows
            ({"mask": "bool", "n_q": 300, "n_k": 300, "batch": 1, "heads_q": 4, "heads_kv": 4}, "triton"),
            ({"mask": "bool", "n_q": 1024, "n_k": 1024}, "hopper"),
            ({"mask": "bool", "n_q": 1024, "n_k": 1024, "d_qk": 64, "d_v": 64}, "triton"),
            ({"mask": "16-bit additive", "n_q": 1024, "n_k": 1024}, "hopper"),
            ({"mask": "additive", "n_q": 1024, "n_k": 1024}, "triton"),
            ({"d_qk": 264, "n_q": 256}, "hopper"),  # few row tiles
            ({"d_qk": 264, "n_q": 1, "batch": 16, "heads_kv": 4}, "mma"),  # its tiles would have few rows
            ({"d_qk": 264, "arch": "sm_80"}, "mma"),
            ({"arch": "sm_80"}, "mma"),
            ({"arch": "sm_80", "heads_kv": 4}, "mma"),
            ({"arch": "sm_80", "d_qk": 256, "d_v": 256}, "sdpa"),
            ({"arch": "sm_80", "d_qk": 256, "d_v": 256, "heads_kv": 4}, "sdpa"),
            ({"direction": "backward"}, "triton"),
            ({"direction": "backward", "d_qk": 136}, "hopper"),
            ({"direction": "backward", "mask": "bool", "n_k": 1024}, "hopper"),
            ({"direction": "backward", "softcap": 30.0, "n_k": 1024}, "hopper"),
            ({"direction": "backward", "softcap": 30.0, "n_k": 1023}, "triton"),
            ({"direction": "backward", "softcap": 30.0, "n_k": 1024, "packed": (2000, 2000)}, "triton"),
            ({"direction": "backward", "mask": "16-bit additive", "n_k": 1024}, "hopper"),
            ({"direction": "backward", "mask": "16-bit additive", "softcap": 30.0, "n_k": 1024}, "triton"),
            ({"direction": "backward", "mask": "bool", "softcap": 30.0, "n_k": 1024}, "hopper"),
            ({"direction": "backward", "mask": "additive", "n_k": 1024}, "triton"),
            ({"direction": "backward", "mask": "bool", "n_k": 1024, "arch": "sm_80"}, "triton"),
            ({"direction": "backward", "n_k": 128, "n_q": 128}, "mma"),  # one launch
            ({"direction": "backward", "n_k": 128, "n_q": 128, "d_qk": 512}, "mma"),
            ({"direction": "backward", "n_k": 129, "n_q": 128, "d_qk": 512}, "hopper"),
            ({"direction": "backward", "n_k": 64, "n_q": 129}, "triton"),  # three row tiles
            ({"direction": "backward", "d_qk": 264}, "hopper"),
            ({"direction": "backward", "arch": "sm_80"}, "triton"),
            ({"direction": "backward", "arch": "sm_80", "d_qk": 136}, "mma"),
            ({"direction": "backward", "arch": "sm_120", "d_v": 264}, "mma"),
        ],
        ids=str,
    )
    def test_the_fastest_measured(self, changes, backend):
        assert choose(self.SMALL._replace(**changes), flags()).backend == backend

    @pytest.mark.parametrize("name, takes", [("CUDNN", True), ("FLASH", False), ("EFFICIENT", False), ("MATH", False)])
    @pytest.mark.parametrize("changes, other", [({}, "hopper"), ({"d_qk": 64, "d_v": 64}, "triton")], ids=str)
    def test_where_pytorch_takes_no_kernel_that_is_as_fast(self, name, takes, changes, other, monkeypatch):
        """What would be chosen if there were no SDPA then runs, and its kernels are ready."""
        choice = choose(self.SMALL._replace(**changes, heads_kv=4), flags())
        without = CANDIDATES[other](choice.problem, flags())
        assert choice.backend == "sdpa" and choice.plan.otherwise == without and choice.plan.specs == without.specs
        assert f"or on {without.kernel}, where PyTorch" in str(choice)
        number = getattr(SDPBackend, name if name == "MATH" else f"{name}_ATTENTION").value
        ran, x, rule = [], q(1, 4, 16, 64), Rule(0.1, 0.0, ALL_KEYS)
        monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *args, **keywords: number)
        monkeypatch.setattr(type(without), "forward", lambda plan, *args, **more: ran.append(plan))
        memo, out = {}, torch.empty_like(x)
        fresh = choice.plan.fresh(x, q(), q(), rule, 1 << 20, memo)
        choice.plan.forward(x, q(), q(), out, x.new_empty(0), None, None, rule, 1 << 20, memo)
        assert (fresh is not None) == takes and ran == ([] if takes else [without])

    def test_flash_attention_serves_older_gpus(self):
        choice = choose(self.SMALL._replace(arch="sm_80", d_qk=256, d_v=256), flags())
        assert SDPBackend.FLASH_ATTENTION.value in choice.plan.takes and "mma" in choice.plan.otherwise.kernel
        assert SDPBackend.EFFICIENT_ATTENTION.value not in choice.plan.takes

    def test_what_lies_where_the_caller_says_is_copied(self):
        x = torch.empty(1, 32, 8192, 128, dtype=torch.bfloat16, device="meta")
        rows_first = x.transpose(1, 2).contiguous()
        assert explain(x, x, x, arch="sm_90").backend == "sdpa"
        for given, options in (
            (x, {"out": x}),
            (rows_first, {"layout": "BNHD"}),
            (rows_first.transpose(1, 2), {}),
        ):
            said = explain(given, given, given, **options, arch="sm_90")
            assert said.backend == "hopper" and said.problem.copied

    def test_triton_fails_behind_sdpa(self, monkeypatch):
        choice = choose(self.SMALL._replace(d_qk=64, d_v=64), flags())
        monkeypatch.setattr(triton_attention, "_gave_up", [])
        monkeypatch.setattr(ops, "_plans", {"key": None})
        ops._without_triton(RuntimeError("no memory"), "key", ops.Plan(choice, None, (), (), 0, {}, True))
        again = choose(choice.problem, flags())
        assert again.backend == "sdpa" and "wgmma" in again.plan.otherwise.kernel

    def test_cores_ask_for_triton(self):
        choice = choose(self.SMALL, flags(FFPA_TRITON_CORES=24))
        assert choice.kernel.startswith("triton_persistent_forward") and "FFPA_TRITON_CORES=24 asks" in choice.why
        with pytest.raises(NotImplementedError, match="FFPA_TRITON_CORES=24 cannot run .*takes no mask"):
            choose(self.SMALL._replace(mask="bool"), flags(FFPA_TRITON_CORES=24))
        assert choose(self.SMALL._replace(direction="backward"), flags(FFPA_TRITON_CORES=24)).backend == "triton"

    def test_without_triton(self, monkeypatch):
        monkeypatch.setattr(triton_attention, "why_not", lambda: "Triton is not installed")
        assert choose(self.SMALL._replace(d_qk=64, d_v=64, needs_lse=True), flags()).backend == "hopper"
        backward = choose(self.SMALL._replace(direction="backward", arch="sm_80"), flags())
        assert backward.backend == "mma" and ("triton", "Triton is not installed") in backward.rejected
        assert backward.fallback is None

    def test_the_five_products_where_one_launch_cannot_be_had(self, monkeypatch):
        problem = self.SMALL._replace(direction="backward", arch="sm_80", d_qk=136, n_q=64, n_k=64)
        assert choose(problem, flags()).kernel == "backward_mma_short_bf16_tile64_columns128"
        left_out = lambda spec, gpu: "it is left out" if "short" in spec.name else archs.why_not_on(spec.arch, gpu)  # noqa: E731
        monkeypatch.setattr(native, "why_not", left_out)
        assert choose(problem, flags()).kernel == "backward_mma_scores_bf16"
        with pytest.raises(NotImplementedError, match="left out"):
            monkeypatch.setattr(native, "why_not", lambda spec, gpu: "it is left out")
            choose(problem, flags(FFPA_BACKEND="mma"))

    def test_triton_without_a_compiler(self, monkeypatch):
        monkeypatch.setattr(triton_attention, "_lacks_compiler", lambda: True)
        choice = choose(self.SMALL._replace(d_qk=64, d_v=64, needs_lse=True), flags())
        assert choice.backend == "hopper" and "install gcc and python3-dev" in dict(choice.rejected)["triton"]

    @pytest.mark.parametrize("release, reason", [((3, 5), "3.6 or newer is needed"), ((3, 6), None), ((3, 10), None)])
    def test_releases_of_triton(self, release, reason, monkeypatch):
        monkeypatch.setattr(triton_attention, "_release", lambda: release)
        said = WHY_NOT_TRITON()
        assert said is None if reason is None else reason in said

    def test_experiments_are_of_the_mma_family(self):
        assert choose(self.SMALL, flags(ENABLE_FFPA_PERSIST_Q_G2S=True)).backend == "mma"


class TestForced:
    @pytest.mark.parametrize("level", [1, 2, 3])
    def test_level_never_falls_back_on_a_gpu(self, level):
        with pytest.raises(
            NotImplementedError,
            match=rf"level={level} cannot run forward bf16 .* D=512/512 .*: \S+ is left out",
        ):
            choose(PROBLEM._replace(level=level), flags())

    @pytest.mark.parametrize("backend", [name for name in env.BACKENDS if name not in ("auto", "sdpa", "reference")])
    def test_backend_never_falls_back_on_a_gpu(self, backend):
        reason = {
            "hopper": "forward_wgmma_pair_bf16_columns512 is left out",
            "mma": r"forward_mma_split_bf16_\S+ is left out",
            "triton": "the Triton kernels",
        }[backend]
        with pytest.raises(
            NotImplementedError, match=f"FFPA_BACKEND={backend} cannot run .*: {reason}.*drop FFPA_BACKEND={backend}"
        ):
            choose(PROBLEM, flags(FFPA_BACKEND=backend))

    def test_sdpa_where_it_means_something_else(self):
        with pytest.raises(NotImplementedError, match="FFPA_BACKEND=sdpa cannot run .*softcap"):
            choose(PROBLEM._replace(softcap=3.0), flags(FFPA_BACKEND="sdpa"))

    @pytest.mark.parametrize("backend", ["sdpa", "reference"])
    def test_what_can_run_runs(self, backend):
        choice = choose(PROBLEM, flags(FFPA_BACKEND=backend))
        assert choice.backend == backend and choice.fallback is None

    def test_sdpa_that_pytorch_does_not_fuse(self, monkeypatch):
        plan = choose(PROBLEM, flags(FFPA_BACKEND="sdpa")).plan
        monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *args, **keywords: 0)
        rule = Rule(0.1, 0.0, ALL_KEYS)
        with pytest.raises(NotImplementedError, match="FFPA_BACKEND=sdpa cannot run this call.*drop FFPA_BACKEND=sdpa"):
            plan.forward(q(), q(), q(), q(), torch.empty(0), None, None, rule, 1 << 20, {})

    def test_level_means_the_forward(self):
        assert choose(PROBLEM._replace(level=1, direction="backward"), flags()).backend == "reference"

    def test_emulation_is_refused_rather_than_replaced(self, monkeypatch):
        monkeypatch.setenv("FFPA_EMULATE", "1")
        with pytest.raises(
            NotImplementedError, match="FFPA_EMULATE=sm_80 cannot run .*accumulate products of bf16 in f32 only"
        ):
            ffpa(q(), q(), q(), acc="f16")
        wide = q(1, 1, 8, 1152)
        with pytest.raises(NotImplementedError, match="level=1 cannot run .*level 1 keeps O in registers"):
            ffpa(wide, wide, wide, level=1)

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    def test_level_on_a_gpu(self):
        x = q(device="cuda")
        with pytest.raises(NotImplementedError, match="level=1 cannot run"):
            ffpa(x, x, x, level=1)


class TestLessSharedMemory:
    """FFPA_SMEM_KB makes a GPU choose what an A100 or a consumer card would."""

    @pytest.mark.parametrize("kilobytes, arch", [(163, "sm_80"), (99, "sm_86")])
    @pytest.mark.parametrize("changes", [{}, {"n_q": 4, "heads_kv": 4}, {"d_qk": 128, "d_v": 128}], ids=str)
    def test_what_others_would_run(self, kilobytes, arch, changes, monkeypatch):
        monkeypatch.setattr(native, "why_not", lambda spec, gpu: archs.why_not_on(spec.arch, gpu))
        p = PROBLEM._replace(**changes)
        chosen, there = choose(p, flags(FFPA_SMEM_KB=kilobytes)), choose(p._replace(arch=arch), flags())
        assert (chosen.backend, chosen.plan) == (there.backend, there.plan)
        assert f"as on a GPU with {kilobytes} KB of shared memory (FFPA_SMEM_KB)" in str(chosen) and arch in str(chosen)
        assert choose(p, flags()).plan != chosen.plan and "FFPA_SMEM_KB" not in str(choose(p, flags()))

    @pytest.mark.parametrize("kilobytes, arch", [(163, "sm_80"), (163, "sm_89"), (99, "sm_86"), (99, "sm_120")])
    def test_a_gpu_that_has_no_more_is_left_as_it_is(self, kilobytes, arch):
        p = PROBLEM._replace(arch=arch)
        assert str(choose(p, flags(FFPA_SMEM_KB=kilobytes))) == str(choose(p, flags()))

    def test_the_kernels_are_those_of_the_gpu_at_hand(self, monkeypatch):
        asked = set()
        monkeypatch.setattr(native, "why_not", lambda spec, gpu: asked.add(gpu))
        assert choose(PROBLEM, flags(FFPA_SMEM_KB=99)).backend == "mma" and asked == {"sm_90"}
        fp8 = PROBLEM._replace(dtype="e4m3", d_qk=128, d_v=128)
        with pytest.raises(NotImplementedError, match="e4m3"):  # an A100 runs none, whatever it runs as
            choose(fp8._replace(arch="sm_80"), flags(FFPA_SMEM_KB=99))

    def test_it_says_what_was_estimated(self, monkeypatch):
        monkeypatch.setattr(native, "why_not", lambda spec, gpu: archs.why_not_on(spec.arch, gpu))
        for changes, backend in (({"n_q": 256}, "hopper"), ({"n_q": 1, "n_k": 32768, "heads_kv": 4}, "mma")):
            chosen = choose(PROBLEM._replace(**changes), flags())
            assert chosen.backend == backend and chosen.plan.microseconds > 1
            assert f"estimated to take {chosen.plan.microseconds:.3g} µs" in str(chosen)
        assert "is estimated to take" in dict(chosen.rejected)["hopper"]

    def test_on_the_cpu_it_says_nothing(self):
        p = PROBLEM._replace(device="cpu", arch=None)
        assert choose(p, flags(FFPA_SMEM_KB=99)) == choose(p, flags())


class TestWarnings:
    def test_level_on_the_cpu_warns_once_and_is_right(self):
        x = q()
        with pytest.warns(UserWarning, match="level=2 is ignored: mma kernels run on CUDA GPUs") as caught:
            got = ffpa(x, x, x, level=2)
            ffpa(x[:, :, :8], x, x, level=2)
        assert len(caught) == 1
        assert torch.equal(got, ffpa(x, x, x))

    def test_first_release_call_on_the_cpu(self):
        x = q()
        o = torch.empty_like(x)
        with pytest.warns(UserWarning, match="level=1 is ignored"):
            assert ffpa(x, x.clone(), x.clone(), o, num_stages=2, level=ffpa_attn.L1, acc=ffpa_attn.FP32) is o
        assert torch.equal(o, ffpa(x, x, x))
        assert torch.equal(o, ffpa_attn.ffpa_acc_f16_L1(x, x, x))
        assert torch.equal(o, ffpa_attn.faster_prefill_attn_func(x, x, x))

    def test_plain_calls_on_the_cpu_are_silent(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ffpa(q(), q(), q(), causal=True)

    def test_a_gpu_without_kernels_warns_with_the_reasons(self):
        choice = choose(PROBLEM._replace(softcap=3.0), flags())
        assert all(
            reason in choice.fallback
            for reason in ("runs on reference", "forward_wgmma_pair_bf16_columns512", "softcap")
        )

    def test_strict_raises_where_it_would_warn(self, monkeypatch):
        monkeypatch.setenv("FFPA_STRICT", "1")
        ffpa(q(), q(), q())
        for _ in range(2):
            with pytest.raises(NotImplementedError, match="FFPA_STRICT=1: .*level=1 is ignored"):
                ffpa(q(), q(), q(), level=1)

    def test_log(self, monkeypatch, capsys):
        monkeypatch.setenv("FFPA_LOG", "1")
        ffpa(q(), q(), q(), softcap=2.0)
        ffpa(q(), q(), q(), softcap=2.0)
        shown = capsys.readouterr().err
        assert shown.count("runs on reference") == 1 and "not sdpa: SDPA has no softcap" in shown


class TestExplain:
    def test_what_explain_says_is_what_runs(self, monkeypatch, device):
        ran, run = [], ops.run

        def noted(plan, *args, **more):
            ran.append(plan.choice.backend)
            return run(plan, *args, **more)

        monkeypatch.setattr(ops, "run", noted)
        x = q(device=device)
        for options in (
            {},
            {"causal": True},
            {"softcap": 2.0},
            {"window": (3, 3)},
            {"return_lse": True},
            {"causal": "top_left"},
        ):
            ffpa(x, x, x, **options)
            assert explain(x, x, x, **options).backend == ran[-1], options
        on_hopper = device == "cuda" and torch.cuda.get_device_capability() == (9, 0)
        assert set(ran) == {"sdpa", "triton" if on_hopper else "reference"}

    def test_without_a_gpu_about_a_gpu(self):
        x = torch.empty(1, 32, 8192, 512, dtype=torch.bfloat16, device="meta")
        said = explain(x, x, x, causal=True, arch="sm_90")
        assert said.problem.arch == "sm_90" and said.problem.device == "cuda"
        assert said.kernel == "sdpa" and "is left out" in str(said) and "D=512/512" in str(said)

    def test_in_a_clone_about_an_installed_wheel(self, monkeypatch):
        """The build says which kernels there are, not this installation; and that it has none is said."""
        x = torch.empty(1, 32, 8192, 512, dtype=torch.bfloat16, device="meta")
        monkeypatch.setattr(native, "record", lambda: None)
        for arch, backend in (("sm_90", "hopper"), ("sm_80", "mma")):
            for direction in ("forward", "backward"):
                said = explain(x, x, x, arch=arch, direction=direction, return_lse=True)
                assert said.backend == backend, direction
                assert "in an installed wheel (this installation holds no CUDA kernels" in said.why
                assert said.why in str(said)
        assert "needs sm_90" not in str(said) and "only sm_90a has" in dict(said.rejected)["hopper"]

        monkeypatch.setattr(native, "record", lambda: {"kernels": {}})
        assert explain(x, x, x, arch="sm_90", return_lse=True).backend == "reference"  # this installation runs it

    def test_a_wheel_without_kernels_for_it(self, monkeypatch):
        monkeypatch.setattr(native, "record", lambda: None)
        monkeypatch.setattr(toolchain, "why_no_build", lambda: "there is no nvcc")
        monkeypatch.setenv("FFPA_CUDA_ARCHS", "9.0a")
        x = torch.empty(1, 32, 8192, 512, dtype=torch.bfloat16, device="meta")
        said = explain(x, x, x, arch="sm_80", return_lse=True)
        assert said.backend == "reference" and "for sm_80, and there is no nvcc" in dict(said.rejected)["mma"]

    @pytest.mark.parametrize("inside", [False, True])
    def test_fake_tensors(self, inside):
        with FakeTensorMode() as mode:
            x = torch.empty(1, 32, 8192, 512, dtype=torch.bfloat16, device="cuda")
        with mode if inside else contextlib.nullcontext():
            assert explain(x, x, x, return_lse=True, arch="sm_90").problem.n_q == 8192
            x = torch.empty(1, 2, 16, 64, dtype=torch.bfloat16, device="cpu")
            assert explain(x, x, x, return_lse=True).backend == "reference"

    @pytest.mark.parametrize("arch", [None, "sm_90"])
    def test_under_autocast(self, device, arch):
        x = torch.empty(1, 2, 16, 64, device=device)
        with pytest.raises(TypeError, match="torch.float32"):
            explain(x, x, x, arch=arch)
        with torch.autocast(device, dtype=torch.float16):
            assert explain(x, x, x, arch=arch).problem.dtype == "f16"
            assert explain(x.requires_grad_(), x, x, arch=arch).problem.needs_lse

    def test_gradients_want_the_lse(self):
        x = q().requires_grad_()
        assert explain(x, x, x).backend == "reference"
        with torch.no_grad():
            assert explain(x, x, x).backend == "sdpa"
        assert explain(x, x, x, direction="backward").problem.direction == "backward"

    def test_runs_nothing(self, monkeypatch):
        monkeypatch.setattr(ops, "run", None)
        explain(q(), q(), q(), mask=torch.ones(16, 16, dtype=torch.bool), layout="BHND", scale=2.0)


def test_each_candidate_is_asked_once(monkeypatch):
    """A candidate that decides about the order of others is asked once, too."""
    asked = []
    every = {
        name: lambda p, flags, name=name, plan=plan: (asked.append(name), plan(p, flags))[1]
        for name, plan in CANDIDATES.items()
    }
    monkeypatch.setattr(choice, "CANDIDATES", every)
    monkeypatch.setattr(native, "why_not", lambda spec, gpu: archs.why_not_on(spec.arch, gpu))
    problem = PROBLEM._replace(heads_q=1, heads_kv=1, n_q=64, d_qk=128, d_v=128, needs_lse=True)
    assert choose(problem, flags()).backend == "hopper"
    assert {"mma", "hopper"} <= set(asked) and len(asked) == len(set(asked))


def test_every_candidate_gives_a_plan_or_a_reason():
    for name, candidate in CANDIDATES.items():
        for problem in (PROBLEM, PROBLEM._replace(device="cpu", arch=None), PROBLEM._replace(packed=(8192, 8192))):
            answer = candidate(problem, flags())
            assert len(answer) > 10 if isinstance(answer, str) else callable(answer.forward), name


def test_plans_are_kept_and_bounded(monkeypatch):
    monkeypatch.setattr(ops, "_MOST_PLANS", 4)
    for n in range(1, 12):
        ffpa(q(1, 1, n, 8), q(1, 1, n, 8), q(1, 1, n, 8))
        assert 1 <= len(ops._plans) <= 4


def test_a_changed_flag_is_another_choice(monkeypatch):
    x = q()
    ffpa(x, x, x, return_lse=True)
    monkeypatch.setenv("FFPA_BACKEND", "sdpa")
    with pytest.raises(NotImplementedError, match="FFPA_BACKEND=sdpa cannot run .*LSE"):
        ffpa(x, x, x, return_lse=True)


def test_a_misaligned_tensor_is_another_kind_of_call():
    block = torch.zeros(8 * 64 + 8, dtype=torch.float16)
    aligned, shifted = (block[start : start + 8 * 64].view(1, 1, 8, 64) for start in (0, 1))
    ffpa(aligned, aligned, aligned)
    with pytest.raises(ValueError, match="not a multiple of 16 bytes"):
        ffpa(aligned, shifted, aligned)
