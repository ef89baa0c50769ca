"""A kernel that is ready is known to be so, at the next choice."""

from ffpa_attn.building import toolchain
from ffpa_attn.launching import native
from ffpa_attn.specs.spec import ForwardMerge

SPEC = ForwardMerge("f16")


def test_a_kernel_that_is_ready_is_not_asked_about(monkeypatch):
    asked = []
    monkeypatch.setattr(native, "_ready", set())
    monkeypatch.setattr(native, "_unready", {})
    monkeypatch.setattr(native, "record", lambda: {"kernels": {}})
    monkeypatch.setattr(toolchain, "why_no_build", lambda: asked.append(1))
    monkeypatch.setattr(native, "kernel", lambda spec, gpu: spec.name)
    assert native.why_not(SPEC, "sm_90") is None and asked
    assert native.make_ready(SPEC, "sm_90")
    asked.clear()
    assert native.why_not(SPEC, "sm_90") is None and not asked
    native.why_not(SPEC, "sm_80"), native.why_not(ForwardMerge("bf16"), "sm_90")
    assert len(asked) == 2

    def broken(spec, gpu):
        raise RuntimeError("ffpa_attn: out of luck")

    monkeypatch.setattr(native, "kernel", broken)
    assert not native.make_ready(SPEC, "sm_90")
    assert "out of luck" in native.why_not(SPEC, "sm_90")
