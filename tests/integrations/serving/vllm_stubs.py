"""Has vLLM imported without its compiled parts, on a machine that it takes for one with an H100."""

import sys
import types

import torch


class _Stub(types.ModuleType):
    """Stands in for an extension that is not there."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def function(*args, **named):
            raise RuntimeError(f"{self.__name__}.{name} is compiled code, which is not here")

        return function


for _name in ("_C", "_C_stable_libtorch", "_moe_C", "vllm_flash_attn", "vllm_flash_attn.flash_attn_interface"):
    sys.modules[f"vllm.{_name}"] = _Stub(f"vllm.{_name}")
sys.modules["vllm.vllm_flash_attn.flash_attn_interface"].is_fa_version_supported = lambda *args: True

import vllm.platforms as platforms  # noqa: E402
from vllm.platforms.cuda import NonNvmlCudaPlatform  # noqa: E402
from vllm.platforms.interface import DeviceCapability  # noqa: E402


class Hopper(NonNvmlCudaPlatform):
    capability = DeviceCapability(9, 0)

    @classmethod
    def get_device_capability(cls, device_id=0):
        return cls.capability

    @classmethod
    def get_device_name(cls, device_id=0):
        return "NVIDIA H100"

    @classmethod
    def get_device_total_memory(cls, device_id=0):
        return 80 << 30


platforms._current_platform = Hopper()

_library = torch.library.Library("_C_cache_ops", "FRAGMENT")
_library.define(
    "reshape_and_cache_flash(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    "Tensor slot_mapping, str kv_cache_dtype, Tensor k_scale, Tensor v_scale) -> ()"
)


def _write(key, value, k_pages, v_pages, slots, cache_dtype, k_scale, v_scale):
    """Writes rows where slots say, as vLLM's compiled function does: 8 bits are numbers divided by the scale."""
    size = k_pages.shape[1]
    for rows, cache, scale in ((key, k_pages, k_scale), (value, v_pages, v_scale)):
        if cache_dtype.startswith("fp8"):
            assert cache.dtype == torch.uint8
            cache, rows = cache.view(torch.float8_e4m3fn), (rows / scale).to(torch.float8_e4m3fn)
        for row, slot in zip(rows, slots.tolist(), strict=False):
            if slot >= 0:
                cache[slot // size, slot % size] = row


_library.impl("reshape_and_cache_flash", _write, "CPU")
