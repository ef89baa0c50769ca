"""Compiles the Triton kernels for a GPU that need not be there: `python tests/triton_offline.py sm_90` prints one JSON object,
kernel -> [bytes of shared memory, how many wgmma or mma.sync], for the tiles that a plan would take.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ffpa"))

import triton
from ffpa_attn import env, triton_attention, triton_kernels
from ffpa_attn.spec import Problem, Visibility
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

PLAIN = {"PACKED": False, "TOP_LEFT": False, "CAPPED": False, "MASK": "none"}
EVERY_RULE = {"PACKED": True, "TOP_LEFT": True, "CAPPED": True, "MASK": "additive"}
_POINTERS = {"offsets_q": "*i32", "offsets_k": "*i32", "lse": "*fp32", "delta": "*fp32"}
_TENSORS = ("q", "k", "v", "out", "grad", "dq", "dk", "dv", "mask")


def compiled(kernel, tiles: triton_attention.Tiles, arch: str, options: dict):
    constants = {name: value for name, value in options.items() if name in kernel.arg_names}
    constants |= {"ROWS": tiles.rows, "KEYS": tiles.keys}
    constants |= {
        name: value for name, value in {"LSE": True, "grad_column_stride": 1}.items() if name in kernel.arg_names
    }

    def type_of(name: str) -> str:
        if name in constants:
            return "constexpr"
        numbers = {"scale": "fp32", "softcap": "fp32"}
        return _POINTERS.get(name) or ("*bf16" if name in _TENSORS else numbers.get(name, "i32"))

    signature = {name: type_of(name) for name in kernel.arg_names}
    # As a launch finds it: rows begin at 16 bytes.
    aligned = [name in _TENSORS or name.endswith("_stride") for name in kernel.arg_names]
    attributes = {(i,): [["tt.divisibility", 16]] for i, is_aligned in enumerate(aligned) if is_aligned}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    target = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    return triton.compile(source, target=target, options={"num_warps": tiles.warps, "num_stages": tiles.stages})


def main(arch: str) -> dict[str, list[int]]:
    found = {}
    for d, rules in ((64, PLAIN), (128, PLAIN), (256, PLAIN), (72, EVERY_RULE)):
        numbers = (
            "bf16",
            1,
            32,
            32,
            8192,
            8192,
            d,
            d,
            False,
            Visibility(-1, -1, False),
            0.1,
            0.0,
            None,
            True,
            None,
            "f32",
            None,
        )
        forward, backward = (
            triton_attention.plan(Problem(direction, "cuda", arch, *numbers), env.run_flags())
            for direction in ("forward", "backward")
        )
        width = forward.widths[0]
        widths = {"WIDTH_QK": width, "WIDTH_V": width, "PAD_QK": width != d, "PAD_V": width != d}
        for kernel, tiles in (
            (triton_kernels.forward_kernel, forward.over_rows),
            (triton_kernels.rows_gradient_kernel, backward.over_rows),
            (triton_kernels.keys_gradient_kernel, backward.over_keys),
        ):
            result = compiled(kernel, tiles, arch, {**rules, **widths})
            products = sum(result.asm["ptx"].count(name) for name in ("wgmma.mma_async", "mma.sync"))
            found[f"{kernel.__name__} D={d}"] = [result.metadata.shared, products]
    return found


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
