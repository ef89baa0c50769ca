"""Every function of csrc/ptx and csrc/tile agrees in the emulator with its scalar definition."""

import re
from pathlib import Path

import numpy as np
import pytest
import scalar

ROOT = Path(__file__).resolve().parents[2]


def random_words(kind, count, seed=1):
    rng = np.random.default_rng(seed)
    if kind == "bits":
        return rng.integers(0, 2**32, count, dtype=np.uint32)
    if kind == "halves":
        sign, fraction = rng.integers(0, 2, 2 * count) << 15, rng.integers(0, 1024, 2 * count)
        exponent = rng.integers(11, 17, 2 * count) << 10
        return (sign | exponent | fraction).astype(np.uint16).view(np.uint32)
    if kind == "bytes":
        return (
            (rng.integers(0, 256, 4 * count) & 0x87 | rng.integers(2, 14, 4 * count) << 3)
            .astype(np.uint8)
            .view(np.uint32)
        )
    if kind == "floats":
        return rng.uniform(-8, 8, count).astype(np.float32).view(np.uint32)
    assert kind == "positive_floats"
    return (2 ** rng.uniform(-20, 20, count)).astype(np.float32).view(np.uint32)


def run(emulator, name, **options):
    case = next(case for case in emulator.module.cases() if case["name"] == name)
    words = random_words(case["input"], case["input_words"])
    output, result = emulator.run_case(name, words, case["output_words"], arch=case["arch"], **options)
    assert not result.errors, result.status
    return words, output, result


@pytest.mark.parametrize("name", sorted(scalar.EXACT))
@pytest.mark.parametrize("seed", [0, 1, 2, 5])
def test_exact(emulator, name, seed):
    words, output, _ = run(emulator, name, seed=seed)
    expected = scalar.EXACT[name](words)
    # A case may leave lanes without a result.
    np.testing.assert_array_equal(output[: expected.size], expected)


MMA = {
    "mma_m16n8k16_f32/f16": ("f16", False),
    "mma_m16n8k16_f32/bf16": ("bf16", False),
    "mma_m16n8k16_f16": ("f16", True),
}


@pytest.mark.parametrize("name", sorted(MMA))
def test_mma_plain(emulator, name):
    element, half_accumulators = MMA[name]
    words, output, result = run(emulator, name)
    assert result.counters["mma"] == 64
    values = (scalar.halves(output) if half_accumulators else output.view(np.float32)).astype(np.float64)
    for (a, b, c), d in zip(
        scalar.mma_operands(words, element, half_accumulators), values.reshape(64, 32, 4), strict=True
    ):
        exact = a @ b + c
        magnitude = np.abs(a) @ np.abs(b) + np.abs(c)
        ulp = 2.0**-11 if half_accumulators else 2.0**-23 * 16
        assert (np.abs(scalar.c_matrix(d) - exact) <= ulp * magnitude).all()


@pytest.mark.parametrize("model", ["ampere", "hopper"])
@pytest.mark.parametrize("name", sorted(MMA))
def test_mma_bit_exact_models(emulator, name, model):
    element, half_accumulators = MMA[name]
    words, output, _ = run(emulator, name, accumulation=model)
    products = 12  # exact rational arithmetic is slow
    expected = scalar.mma_exact(words.reshape(64, -1)[:products].ravel(), element, half_accumulators, model)
    np.testing.assert_array_equal(output[: expected.size], expected)


def test_mma_models_differ(emulator):
    outputs = [run(emulator, "mma_m16n8k16_f32/f16", accumulation=model)[1] for model in ("plain", "ampere", "hopper")]
    assert not np.array_equal(outputs[0], outputs[1])
    assert not np.array_equal(outputs[1], outputs[2])


def test_mma_with_infinities_and_nan(emulator):
    words = random_words("halves", 64 * 32 * 10)
    product = words.reshape(64, 32, 10)[0]
    product[0, 0] = 0x3C007C00  # row 0, k 0: infinity
    product[4, 0] = 0x3C007E00  # row 1, k 0: NaN
    for model in ("plain", "ampere", "hopper"):
        output, _ = emulator.run_case("mma_m16n8k16_f32/f16", words, 64 * 32 * 4, accumulation=model)
        d = scalar.c_matrix(output[:128].view(np.float32).reshape(32, 4))
        assert np.isinf(d[0]).all() and np.isnan(d[1]).all() and np.isfinite(d[2:]).all()


def test_mma_that_overflows_a_half_at_once(emulator):
    """Ampere adds eight products at a time: those after an infinity leave it."""
    words = np.zeros(64 * 32 * 10, np.uint32)
    product = words.reshape(64, 32, 10)[0]
    product[:, :6] = 0x58005800  # all of A and B are 128: the first eight products make 131072
    product[:4, [0, 2]] |= np.uint32(0x80008000)  # row 0 of A is negative
    for model in ("ampere", "hopper"):
        output, _ = emulator.run_case("mma_m16n8k16_f16", words, 64 * 32 * 2, accumulation=model)
        d = scalar.c_matrix(scalar.halves(output[:64]).astype(np.float32))
        assert np.isneginf(d[0]).all() and np.isposinf(d[1:]).all(), model


MATH = {
    "ex2": (np.exp2, 2.0),
    "lg2": (np.log2, 2.0),
    "rcp": (np.reciprocal, 1.0),
}


@pytest.mark.parametrize("name", sorted(MATH))
def test_math(emulator, name):
    function, ulps = MATH[name]
    words, output, _ = run(emulator, name)
    exact = function(words.view(np.float32).astype(np.float64))
    error = np.abs(output.view(np.float32) - exact)
    assert (error <= ulps * np.spacing(np.abs(exact).astype(np.float32))).all()


@pytest.mark.parametrize("name", ["nt_swizzled", "nn_swizzled", "tt_swizzled", "tn_padded"])
def test_tile_product(emulator, name):
    words, output, result = run(emulator, f"tile/product_{name}")
    a, b = scalar.halves(words).astype(np.float64).reshape(2, 16 * 64)
    a = a.reshape(64, 16).T if name[0] == "t" else a.reshape(16, 64)
    b = b.reshape(64, 16) if name[1] == "n" else b.reshape(16, 64).T
    np.testing.assert_allclose(output.view(np.float32).reshape(16, 16), a @ b, rtol=1e-5, atol=1e-4)
    assert result.counters["mma"] == 8
    loads = result.conflicts_of("ldmatrix")
    assert sum(entry["executions"] for entry in loads) == 8 and all(
        entry["wavefronts"] == entry["ideal_wavefronts"] for entry in loads
    )


@pytest.mark.parametrize("name", [name for name in sorted(scalar.EXACT) if "layout" in name])
def test_layouts_have_no_bank_conflicts(emulator, name):
    """Padded rows are for ldmatrix: copies of several short rows at a time may meet in a bank."""
    _, _, result = run(emulator, name)
    accesses = result.conflicts_of("ldmatrix") + ([] if "padded" in name else result.conflicts_of("cp.async"))
    assert accesses and all(entry["wavefronts"] == entry["ideal_wavefronts"] for entry in accesses)


def test_tile_product_of_transposed_a_and_column_major_b_names():
    """The four product cases cover both stored orders of both operands."""
    names = {"nt", "nn", "tt", "tn"}
    source = (ROOT / "tests/emulator/cases/tile.cuh").read_text()
    assert {match[:2] for match in re.findall(r"tile/product_(\w+)", source)} == names


WGMMA = re.findall(r'"(wgmma_\w\w/\w+)"', (ROOT / "tests/emulator/cases/wgmma.cuh").read_text())


@pytest.mark.parametrize("name", WGMMA)
def test_wgmma(emulator, name):
    words, output, result = run(emulator, name)
    a, b = scalar.wgmma_operands(words, name)
    n, depth = b.shape
    error = np.abs(scalar.wgmma_result(output, n) - a @ b.T)
    assert (error <= 2.0**-22 * depth * (np.abs(a) @ np.abs(b.T))).all()
    products = depth // (32 if "/e" in name else 16)
    assert result.counters["wgmma"] == 4 * products
    assert result.counters["mma"] == 4 * products * n // 8


def test_wgmma_bit_exact_model(emulator):
    words, output, _ = run(emulator, "wgmma_ss/f16_64_swizzle64", accumulation="hopper")
    a, b = scalar.wgmma_operands(words, "wgmma_ss/f16_64_swizzle64")
    result = scalar.wgmma_result(output, 64)
    for row in (0, 17, 63):
        for column in range(0, 64, 7):
            first = scalar.fused_dot_add(a[row, :16], b[column, :16], 0.0, 25, False)
            assert result[row, column] == scalar.fused_dot_add(a[row, 16:], b[column, 16:], first, 25, False)


def test_wgmma_of_8_bits_in_few_bits(emulator):
    """Hopper keeps 13 bits behind the point of the largest among 32 products and the sum before."""
    words, output, _ = run(emulator, "wgmma_ss/e4m3_64_swizzle64", accumulation="hopper")
    a, b = scalar.wgmma_operands(words, "wgmma_ss/e4m3_64_swizzle64")
    result = scalar.wgmma_result(output, 64)

    def kept(value):
        return np.float32(value).view(np.uint32) & np.uint32(2**32 - 2**10)

    for row in (0, 17, 63):
        for column in range(0, 64, 7):
            first = kept(scalar.fused_dot_add(a[row, :32], b[column, :32], 0.0, 13, False)).view(np.float32)
            second = kept(scalar.fused_dot_add(a[row, 32:], b[column, 32:], float(first), 13, False))
            assert result[row, column].view(np.uint32) == second


def test_every_case_has_a_definition(emulator):
    names = {case["name"] for case in emulator.module.cases()}
    others = {name for name in names if name.startswith(("tile/product_", "wgmma_"))}
    assert names == set(scalar.EXACT) | set(MMA) | set(MATH) | others


def functions_of(directory):
    """Returns the functions that a side has in namespace ptx: one defines them, the other may declare them."""
    text = "".join(path.read_text() for path in sorted((ROOT / "csrc/ptx" / directory).glob("*.cuh")))
    text = "".join(re.findall(r"^namespace ffpa::ptx \{$(.*?)^\}  // namespace ffpa::ptx$", text, re.M | re.S))
    helpers = {"flush_subnormal", "status_of", "find_tensor_map_encoder", "launch_grid"}
    found = re.findall(r"^(?:(?:FFPA_DEVICE|inline) )?(?!struct)[\w:<>]+[\w:<> ]*[ &*](\w+)\(", text, re.M)
    return set(found) - helpers


def test_both_sides_have_the_same_functions():
    assert functions_of("native") == functions_of("emulated")


def test_every_function_is_used_by_a_case():
    text = "".join(path.read_text() for path in (ROOT / "tests/emulator/cases").glob("*.cuh"))
    missing = [name for name in sorted(functions_of("native")) if not re.search(rf"\b{name}\b[<(]", text)]
    assert not missing


def test_conform_list_is_the_case_table(emulator):
    """tests/conform must compare what is tested here, and nobody may forget to list a case."""
    counts = {}
    for case in emulator.module.cases():
        function = case["name"].split("/")[0]
        counts[function] = (case["arch"], counts.get(function, (0, 0))[1] + 1)
    lines = (ROOT / "tests/conform/functions.txt").read_text().splitlines()
    listed = [line.split() for line in lines if not line.startswith("#")]
    assert {name: (int(arch), int(count)) for name, arch, count in listed} == counts
