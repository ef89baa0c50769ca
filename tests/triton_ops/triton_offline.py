"""Compiles the Triton kernels for a GPU that need not be there: `python tests/triton_ops/triton_offline.py sm_90 64` prints one
JSON object, kernel -> [bytes of shared memory, how many wgmma or mma.sync, how many stores that no barrier parts from a
load before them, how the parameters that we would launch it with differ from those it has], for the tiles that a plan
would take at 64 columns (or 256, where a group has one head; at 72, with every rule). `sm_90 odd`
takes rows apart by odd multiples of 16 bytes, narrow values, and one stage: kernel -> [how many copies of 16 bytes,
what products may read that is no tile]. With gfx942, which is not CUDA's, and columns, it takes the persistent kernel
alone, and its mfma.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "ffpa"))

import sass_descriptors
import triton
from ffpa_attn import env
from ffpa_attn.backends import dequantised, triton_attention, triton_fp8, triton_merge
from ffpa_attn.launching.compiled import image
from ffpa_attn.specs.problem import Problem, Visibility
from ffpa_attn.triton_ops import (
    backward_kernels,
    forward_kernels,
    fp8_kernels,
    merge_kernels,
    page_kernels,
    parameters,
    persistent_kernels,
)
from ffpa_attn.triton_ops.launch import Tiles
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

PLAIN = {
    "PACKED": False,
    "TOP_LEFT": False,
    "EDGES": True,
    "RAW": True,
    "CAPPED": False,
    "MASK": "none",
    "BLIND": False,
    "SINKS": False,
    "LARGEST": False,
}
EVERY_RULE = {
    "PACKED": True,
    "TOP_LEFT": True,
    "EDGES": True,
    "RAW": False,
    "CAPPED": True,
    "MASK": "additive",
    "BLIND": True,
    "SINKS": True,
    "LARGEST": True,
}
_POINTERS = {
    **dict.fromkeys(("offsets_q", "offsets_k", "used", "added", "table"), "*i32"),
    **dict.fromkeys(("x_column_stride", "x8_column_stride", "column_stride", "heads", "n", "arranged_n"), "i32"),
    **dict.fromkeys(("more_out_step", "more_lse_step", "parts"), "i32"),
    **dict.fromkeys(("table_step", "scale_step", "pages", "entries", "page_rows", "more"), "i32"),
    **dict.fromkeys(("q_scales", "k_scales", "v_scales", "scale", "maxima"), "*fp32"),
    **dict.fromkeys(("x8", "pool"), "*fp8e4nv"),
    **dict.fromkeys(
        (
            "grad_lse",
            "lse",
            "more_lse",
            "top",
            "total",
            "exponents",
            "naturals",
            "shares",
            "sinks",
            "largest",
            "delta",
            "acc_gmem",
            "max_gmem",
            "sum_gmem",
        ),
        "*fp32",
    ),
}
_STRUCTURES = {
    "mask_strides": forward_kernels.MaskStrides(*["i32"] * 4),
    "sizes": forward_kernels.Sizes(*["i32"] * 6),
    "rule": forward_kernels.Rule("fp32", "fp32", "i32", "i32"),
    "batches": "i32",
}


def compiled(kernel, tiles: Tiles, arch: str, options: dict, odd: bool = False, ungrouped: bool = False):
    """Compiles a kernel; `odd`: rows are apart by odd multiples of 16 bytes. `ungrouped`: Triton makes a constant of 1."""
    constants = options | {"ROWS": tiles.rows, "KEYS": tiles.keys, "LSE": options.get("LSE", True)}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    fp8 = kernel.__name__.endswith(("fp8_forward_kernel", "arrange_values_kernel"))
    element = "fp8e4nv" if fp8 else "bf16"
    blocks = {"q": tiles.rows, "grad": tiles.rows, "k": tiles.keys, "v": tiles.keys} if constants.get("TMA") else {}

    def type_of(name: str):
        if name in constants:
            return "constexpr"
        if name in _STRUCTURES:
            return _STRUCTURES[name]
        if name.endswith("strides"):
            return forward_kernels.Strides("i32", "i32", "i32")
        if name in blocks:
            width = options["WIDTH_V" if name in ("v", "grad") else "WIDTH_QK"]
            block = f"1,1,{blocks[name]},{width}"
            if fp8 and name == "k":
                block = f"{tiles.keys // 16},2,4,2,{width}"
            elif fp8 and name == "v":
                block = f"1,1,{width},{tiles.keys}"
            return f"tensordesc<{element}[{block}]>"
        return _POINTERS.get(name, f"*{element}" if name in ("q", "k", "v", "values", "arranged") else "*bf16")

    signature = {name: type_of(name) for name in kernel.arg_names}
    signature |= {"bool": {"mask": "*u8"}, "additive": {"mask": "*fp32"}}.get(constants.get("MASK"), {})
    attributes = {}
    for i, name in enumerate(kernel.arg_names):  # a launch finds it so: rows begin at 16 bytes
        aligned = [["tt.divisibility", 16]]
        if isinstance(signature[name], forward_kernels.Strides):
            attributes |= {} if odd else {(i, j): aligned for j in range(3)}
        elif signature[name] == "*bf16":
            attributes[(i,)] = aligned
    if ungrouped and "sizes" in signature:
        place = kernel.arg_names.index("sizes"), forward_kernels.Sizes._fields.index("group")
        signature["sizes"] = signature["sizes"]._replace(group="constexpr")
        constants[place] = 1
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    cuda = arch.startswith("sm_")
    target = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32) if cuda else GPUTarget("hip", arch, 64)
    return triton.compile(source, target=target, options=tiles.options)


def difference(result, kernel) -> str:
    """Says how the parameters that we would launch a kernel with differ from those of its machine code."""

    def argument(kind):
        if isinstance(kind, tuple):
            return tuple(map(argument, kind))
        if not kind.startswith("tensordesc"):
            return 3
        rank = kind.count(",") + 1
        return SimpleNamespace(shape=[16] * rank, strides=[16] * (rank - 1) + [1], padding="zero")

    made = SimpleNamespace(metadata=result.metadata, src=result.src, function=1)
    arguments = [argument(result.src.signature[name]) for name in kernel.arg_names]
    read = parameters.read(made, kernel.arg_names, 1, arguments)
    if isinstance(read, str):
        return read
    found = re.findall(r"Ordinal *: (0x\w+)\s+Offset *: 0x\w+\s+Size *: (0x\w+)", dumped(result, "cuobjdump", "-elf"))
    has = [int(size, 16) for _, size in sorted((int(ordinal, 16), size) for ordinal, size in found)]
    gives = image(read.parameters)[2]
    return "" if has == gives and has else f"it has {has}, and is given {gives}"


def hasty_stores(ptx: str) -> int:
    """Counts stores to global memory while other warps may not yet have done the loads that stand before them."""
    order = "".join(name[0] for name in re.findall(r"\b(?:ld\.global|st\.global|bar(?:rier)?\.sync)\b", ptx))
    return sum("l" in between for between in re.findall(r"([lb]*)s", order) if "b" not in between[between.rfind("l") :])


def dumped(result, tool: str, *options: str) -> str:
    """Returns what one of CUDA's tools says of a kernel's machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(result.asm["cubin"])
        cubin.flush()
        command = [getattr(triton.knobs.nvidia, tool).path, *options, cubin.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def of_odd_rows(arch: str) -> dict[str, list]:
    found = {}
    problem = Problem(
        "forward", "cuda", arch, "bf16", 1, 8, 1, 70, 83, 40, 16, None, Visibility(-1, -1, True), 0.05, 0.0, None, True, None,
        "f32", 1,
    )  # fmt: skip
    for direction in ("forward", "backward"):
        plan = triton_attention.plan(problem._replace(direction=direction), env.run_flags())
        options = {"D_QK": 40, "D_V": 16, "WIDTH_QK": plan.widths[0], "WIDTH_V": plan.widths[1], "TMA": False}
        kernels = [(forward_kernels.forward_kernel, plan.over_rows)]
        if direction == "backward":
            kernels = [
                (backward_kernels.rows_gradient_kernel, plan.over_rows),
                (backward_kernels.keys_gradient_kernel, plan.over_keys),
                (backward_kernels.far_gradients_kernel, plan.far),
                (backward_kernels.shares_kernel, plan.far),
            ]
        for kernel, tiles in kernels:
            result = compiled(kernel, tiles, arch, PLAIN | {"PACKED": True} | options, odd=True)
            copies = len(re.findall(r"cp\.async\.c\w\.shared\.global .*, 0x10", result.asm["ptx"]))
            wrong = sass_descriptors.wrong(dumped(result, "nvdisasm", "-c"), result.asm["ptx"], result.metadata.shared)
            found[kernel.__name__] = [copies, wrong]
    return found


def main(arch: str, d: int) -> dict[str, list]:
    cuda = arch.startswith("sm_")
    found = {}
    rules = EVERY_RULE if d == 72 else PLAIN
    problem = Problem(
        "forward", "cuda", arch if cuda else "sm_80", "bf16", 1, 32, 32, 8192, 8192, d, d, None,
        Visibility(-1, -1, False), 0.1, 0.0, None, True, None, "f32", None,
    )  # fmt: skip
    forward, backward = (
        triton_attention.plan(
            problem._replace(direction=direction, mask=None if rules is PLAIN else "additive"), env.run_flags()
        )
        for direction in ("forward", "backward")
    )
    persistent = triton_attention.plan(problem, {**env.run_flags(), "FFPA_TRITON_CORES": 24})
    width = forward.widths[0]
    options = {"D_QK": d, "D_V": d, "WIDTH_QK": width, "WIDTH_V": width, "SLICE": persistent.slice_rows}
    options |= rules | {"TMA": forward.descriptors and not rules["PACKED"]}
    in_8_bits = triton_fp8.plan(problem._replace(dtype="e4m3"), env.run_flags())
    options |= {
        "D": d,
        "MORE": 4,
        "FIRST": False,
        "WIDTH": width,
        "GIVEN": "grad_lse",
        "P_EXPONENT": 8,
        "LARGEST_OUT": float("inf"),
        **dict.fromkeys(("ADDED", "TABLE", "SCALED"), True),
    }
    options |= {"V_AS_IT_IS": options["TMA"], "Q_SCALED": True, "K_SCALE": "block", "V_SCALE": "block"}
    kernels = (
        (forward_kernels.forward_kernel, forward.over_rows),
        (backward_kernels.rows_gradient_kernel, backward.over_rows),
        (backward_kernels.keys_gradient_kernel, backward.over_keys),
        (backward_kernels.far_gradients_kernel, backward.far),
        (backward_kernels.shares_kernel, backward.far),
        (backward_kernels.statistics_kernel, Tiles(64, 0, 4, 1)),
        (fp8_kernels.fp8_forward_kernel, in_8_bits.over_rows),
        (fp8_kernels.arrange_values_kernel, Tiles(128, 128, 4, 1)),
        (fp8_kernels.block_maxima_kernel, triton_fp8.QUANTIZED),
        (fp8_kernels.quantize_kernel, triton_fp8.QUANTIZED),
        (merge_kernels.merge_kernel, triton_merge.TILES),
        (page_kernels.dequantise_kernel, dequantised.TILES),
        (persistent_kernels.persistent_forward_kernel, persistent.over_rows),
    )
    for kernel, tiles in kernels if cuda else kernels[-1:]:
        result = compiled(kernel, tiles, arch, options, ungrouped=d == 256)
        assembly = result.asm["ptx" if cuda else "amdgcn"]
        products = sum(assembly.count(name) for name in ("wgmma.mma_async", "mma.sync", "v_mfma"))
        hasty = hasty_stores(assembly) if cuda else 0
        different = difference(result, kernel) if cuda else ""
        found[f"{kernel.__name__} D={d}"] = [result.metadata.shared, products, hasty, different]
    return found


if __name__ == "__main__":
    arch, which = sys.argv[1:]
    print(json.dumps(of_odd_rows(arch) if which == "odd" else main(arch, int(which))))
