"""Defines in numpy, value by value, what the instructions must compute. Nothing here knows the emulator.

Each function takes a case's input words and returns its output words.
"""

from fractions import Fraction

import numpy as np

LANES = np.arange(32)


def halves(words):
    return np.asarray(words, np.uint32).view(np.uint16).view(np.float16)


def bfloat16_values(bits):
    return (np.asarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)


def bfloat16_bits(values):
    """Rounds to nearest even and turns NaN into 0x7fff."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, np.uint16(0x7FFF), rounded)


def half_bits(values):
    with np.errstate(over="ignore", invalid="ignore"):
        bits = np.asarray(values, np.float32).astype(np.float16).view(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), bits)


def float_from_random(words):
    return ((words >> 8).astype(np.int64) - (1 << 23)).astype(np.float32) / np.float32(1 << 21)


# --- special registers and barriers


def special_registers(_):
    rows = []
    for z in range(2):
        for y in range(2):
            for x in range(3):
                rows += [[t, x, y, z, 3, 2, 2, t % 32, 0] for t in range(64)]
    return np.array(rows, np.uint32).ravel()


def sync_block(words):
    return np.roll(words, -33)


def bar_sync(words):
    return (20 * words.astype(np.uint64) + sum(range(20))).astype(np.uint32)[::-1]


# --- memory


def reversed_lanes(words_per_lane):
    return lambda words: words.reshape(32, words_per_lane)[::-1].ravel()


def ld_global_1(words):
    return words.view(np.uint8).astype(np.uint32)


def ld_global_2(words):
    return words.view(np.uint16)[::-1].copy().view(np.uint32)


def cp_async_16_or_zero(words):
    return np.where((LANES % 2 == 0)[:, None], words.reshape(32, 4), 0).astype(np.uint32).ravel()


# --- matrices


def ldmatrix(transposed):
    def define(words):
        stored = words.view(np.uint16).reshape(4, 8, 8)  # [tile][row][column]
        if transposed:
            stored = stored.transpose(0, 2, 1)
        # Lane l holds row l / 4, columns 2·(l % 4) and the next, of tile t.
        return np.ascontiguousarray(stored.reshape(4, 32, 2).transpose(1, 0, 2)).view(np.uint32).ravel()

    return define


def stmatrix(words):
    return words.reshape(32, 4).T.copy().ravel()


def a_matrix(values):
    """Arranges [32 lanes][4 registers][2 halves] as [16 rows][16 k], by the PTX manual's table for m16n8k16."""
    matrix = np.empty((16, 16), values.dtype)
    for lane in range(32):
        for register in range(4):
            for half in range(2):
                row = lane // 4 + (8 if register in (1, 3) else 0)
                k = lane % 4 * 2 + half + (8 if register >= 2 else 0)
                matrix[row, k] = values[lane, register, half]
    return matrix


def b_matrix(values):
    """Arranges [32 lanes][2 registers][2 halves] as [16 k][8 columns]."""
    matrix = np.empty((16, 8), values.dtype)
    for lane in range(32):
        for register in range(2):
            for half in range(2):
                matrix[lane % 4 * 2 + half + 8 * register, lane // 4] = values[lane, register, half]
    return matrix


def c_matrix(values):
    """Arranges [32 lanes][4 values] as [16 rows][8 columns]."""
    return values.reshape(8, 4, 2, 2).transpose(2, 0, 1, 3).reshape(16, 8)


def c_fragment(matrix):
    return matrix.reshape(2, 8, 4, 2).transpose(1, 2, 0, 3).reshape(32, 4)


def mma_operands(words, element, half_accumulators):
    """Yields (A, B, C) of each product as float64."""
    decode = (
        (lambda w: w.view(np.uint16).view(np.float16))
        if element == "f16"
        else (lambda w: bfloat16_values(w.view(np.uint16)))
    )
    for product in words.reshape(-1, 32, 10):
        a = decode(np.ascontiguousarray(product[:, :4])).astype(np.float64).reshape(32, 4, 2)
        b = decode(np.ascontiguousarray(product[:, 4:6])).astype(np.float64).reshape(32, 2, 2)
        if half_accumulators:
            c = halves(np.ascontiguousarray(product[:, 6:8])).astype(np.float64).reshape(32, 4)
        else:
            c = float_from_random(product[:, 6:10]).astype(np.float64)
        yield a_matrix(a), b_matrix(b), c_matrix(c)


def exponent(value):
    """Returns floor(log2 |value|)."""
    return int(np.frexp(value)[1]) - 1


def round_to_float_toward_zero(exact):
    rounded = np.float32(float(exact))
    if abs(Fraction(float(rounded))) > abs(exact):
        rounded = np.nextafter(rounded, np.float32(0))
    return float(rounded)


def fused_dot_add(a, b, c, bits, half_accumulators):
    """Takes one step of a tensor core exactly: aligns to the largest exponent, truncates, adds, rounds once."""
    terms = [
        (Fraction(float(x)) * Fraction(float(y)), exponent(x) + exponent(y))
        for x, y in zip(a, b, strict=True)
        if x and y
    ]
    if c:
        terms.append((Fraction(float(c)), exponent(c)))
    if not terms:
        return 0.0
    unit = Fraction(2) ** (max(e for _, e in terms) - bits)
    total = sum(int(value / unit) for value, _ in terms) * unit  # int() truncates toward zero
    if half_accumulators:
        return float(np.float16(np.float32(float(total))))
    return round_to_float_toward_zero(total)


def mma_exact(words, element, half_accumulators, model):
    """Returns the bit-exact result of the accumulation models, for as many products as `words` has."""
    out = []
    for a, b, c in mma_operands(words, element, half_accumulators):
        d = np.empty((16, 8))
        for row in range(16):
            for column in range(8):
                x, y, total = a[row], b[:, column], c[row, column]
                if model == "ampere":
                    total = fused_dot_add(x[:8], y[:8], total, 24, half_accumulators)
                    d[row, column] = fused_dot_add(x[8:], y[8:], total, 24, half_accumulators)
                else:
                    d[row, column] = fused_dot_add(x, y, total, 25, half_accumulators)
        fragment = c_fragment(d)
        if half_accumulators:
            out.append(np.ascontiguousarray(fragment.astype(np.float16)).view(np.uint32).ravel())
        else:
            out.append(fragment.astype(np.float32).view(np.uint32).ravel())
    return np.concatenate(out)


# --- warp


def shuffle(source):
    def define(words):
        return np.stack([words[source(LANES, 1 << i)] for i in range(5)], axis=1).ravel()

    return define


def vote_ballot(words):
    odd = words % 2
    ballot = int((odd.astype(np.uint64) << LANES.astype(np.uint64)).sum())
    return np.tile(np.array([ballot, 1, 1, 0], np.uint32), 32)


def bfind(words):
    highest = [[int(x).bit_length() - 1 for x in (word, word >> lane, 0)] for lane, word in enumerate(words)]
    return np.array(highest, np.int32).view(np.uint32).ravel()


# --- conversions


def pack(to_bits):
    def define(words):
        values = words.view(np.float32).reshape(-1, 2)
        return np.ascontiguousarray(to_bits(values)).view(np.uint32).ravel()

    return define


def float8(exponent_bits, fraction_bits, bias, has_infinity):
    """Returns the values of all bit patterns."""
    bits = np.arange(256)
    exponent, fraction = bits >> fraction_bits & (1 << exponent_bits) - 1, bits & (1 << fraction_bits) - 1
    scale = 2.0 ** (np.maximum(exponent, 1) - bias - fraction_bits)
    values = ((exponent > 0) * (1 << fraction_bits) + fraction) * scale
    last = exponent == (1 << exponent_bits) - 1
    if has_infinity:
        values[last] = np.where(fraction[last] == 0, np.inf, np.nan)
    else:
        values[bits & 0x7F == 0x7F] = np.nan
    return np.where(bits < 128, values, -values)


E4M3, E5M2 = float8(4, 3, 7, False), float8(5, 2, 15, True)


def pack4(values):
    """Rounds to the nearest finite value; of two that are equally near, to the one whose last bit is 0."""
    finite = np.flatnonzero(np.isfinite(values[:128]))

    def define(words):
        x = words.view(np.float32).astype(np.float64)
        above = np.clip(np.searchsorted(values[finite], np.abs(x)), 1, finite.size - 1)
        low, high = np.abs(x) - values[above - 1], values[above] - np.abs(x)
        nearest = np.where((high < low) | ((high == low) & (above % 2 == 0)), above, above - 1)
        bits = np.where(np.isnan(x), 0x7F, nearest | np.signbit(x).astype(int) << 7).astype(np.uint8)
        return bits.view(np.uint32)

    return define


def unpack(decode):
    def define(_):
        values = decode(np.arange(65536, dtype=np.uint16)).astype(np.float32)
        return np.where(np.isnan(values), np.uint32(0x7FFFFFFF), values.view(np.uint32))

    return define


def halves_of_e4m3(_):
    first = np.arange(65536)
    pairs = np.stack([first, first ^ 0xFFFF], 1).reshape(-1)
    halves = [E4M3[values].astype(np.float16) for values in (pairs & 0xFF, pairs >> 8)]
    low, high = (np.where(np.isnan(x), 0x7FFF, x.view(np.uint16)).astype(np.uint32) for x in halves)
    return low | high << 16


def permute_bytes(words):
    given = words.view(np.uint8).reshape(-1, 32, 4)
    permuted = given[..., [0, 2, 1, 3]].copy()
    permuted[1::2] = given[1::2][..., [2, 3, 0, 0]]
    return permuted.view(np.uint32).reshape(-1)


def multiply(decode, to_bits):
    def define(words):
        a, b = (decode(np.ascontiguousarray(words.reshape(-1, 2)[:, i]).view(np.uint16)) for i in (0, 1))
        with np.errstate(over="ignore", invalid="ignore"):
            exact = a.astype(np.float64) * b.astype(np.float64)
            # The last of 24 bits says whether there are more, so rounding these equals rounding the exact product.
            fraction, exponent = np.frexp(np.abs(exact))
            kept = np.trunc(fraction * 2.0**24)
            kept += (kept < fraction * 2.0**24) & (kept % 2 == 0)
            sticky = np.copysign(np.where(np.isfinite(exact), np.ldexp(kept, exponent - 24), exact), exact)
            return np.ascontiguousarray(to_bits(sticky)).view(np.uint32).ravel()

    return define


def mul_rn(words):
    x, y, z = np.ascontiguousarray(words.view(np.float32).reshape(-1, 3).T)
    return (x * y + z).view(np.uint32)


def ex2_special(_):
    # The values of x are -inf, 0, -0, inf, -150, 1, -1, -126 (2^-126 is the smallest normal number).
    return np.array([0.0, 1.0, 1.0, np.inf, 0.0, 2.0, 0.5, 2.0**-126], np.float32).view(np.uint32)


# --- tiles


def tile_copy(columns):
    """Copies the window at (3, 8) of 21 rows of 40 columns, stored 48 apart, to 32 rows of `columns`; the rest is 0."""

    def define(words):
        matrix = words.view(np.uint16).reshape(21, 48)
        out = np.zeros((32, columns), np.uint16)
        part = matrix[3:21, 8 : min(8 + columns, 40)]
        out[: part.shape[0], : part.shape[1]] = part
        return out.view(np.uint32).ravel()

    return define


def stage_ring(words):
    """Doubles the words of the opposite one of 96 threads; rings of 1 to 4 slots all give the same."""
    doubled = words.reshape(-1, 96, 4)[:, ::-1] * np.uint32(2)
    return np.tile(doubled.ravel(), 4)


def accumulator(rounded):
    """Returns 4 values per lane as held, then scaled by their rows' factors, then 1: multiply_add is the mma."""

    def define(words):
        values, factors = np.split(words.view(np.float32).reshape(32, 6), [4], axis=1)
        held = rounded(values)
        scaled = rounded(held * np.repeat(factors, 2, axis=1))
        return np.concatenate([held.view(np.uint32), scaled.view(np.uint32), np.ones((32, 1), np.uint32)], 1).ravel()

    return define


# --- sm_90


def mbarrier_wait(words):
    return (10 * words.astype(np.uint64) + sum(range(10))).astype(np.uint32)[::-1]


def tracked_and_awaited(words):
    copied = words[::4]
    return np.concatenate([copied + np.uint32(1), copied[::-1] + np.uint32(2)])


def copy_ring(words, threads, slots):
    """Doubles each step's words of the opposite thread, and adds its words that stay and the round modulo 2."""
    kept, *steps = words.reshape(-1, threads, 4)[:, ::-1]
    rounds = [np.uint32(step // slots % 2) for step in range(len(steps))]
    return np.concatenate([2 * step + kept + n for step, n in zip(steps, rounds, strict=True)]).ravel()


def copy_rings(threads):
    return lambda words: np.concatenate([copy_ring(words, threads, slots) for slots in range(1, 5)])


def swizzle_chunks(rows, row_bytes):
    """Lays rows of a tile out as in shared memory: chunk c of row r goes to c xor (the row's 128-byte line)."""
    chunks = row_bytes // 16
    data = np.ascontiguousarray(rows).view(np.uint8).reshape(-1, chunks, 16)
    out = np.empty_like(data)
    for row in range(len(data)):
        for chunk in range(chunks):
            out[row, chunk ^ (row * row_bytes // 128 % chunks)] = data[row, chunk]
    return out.ravel().view(np.uint32)


def tma_box(sizes, strides, box, start, swizzled):
    """Moves a box. Dimensions are innermost first; strides count elements."""

    def define(words):
        elements = words.view(np.uint16)
        out = np.zeros([*reversed(box)], np.uint16)
        for index in np.ndindex(*out.shape):
            position = [c + i for c, i in zip(start, reversed(index), strict=True)]
            if all(0 <= p < n for p, n in zip(position, sizes, strict=True)):
                out[index] = elements[sum(p * s for p, s in zip(position, strides, strict=True))]
        return swizzle_chunks(out, 2 * box[0]) if swizzled else out.ravel().view(np.uint32)

    return define


def tma(rank, inner, start, swizzled=True):
    if rank == 2:
        return tma_box([40, 21], [1, 48], [inner, 16], start, swizzled)
    if rank == 5:
        return tma_box([40, 2, 5, 1, 2], [1, 48, 96, 480, 480], [inner, 2, 2, 2, 2], start, swizzled)
    return tma_box([40, 7, 1, 2], [1, 48, 7 * 48, 480], [inner, 4, 2, 2], start, swizzled)


def tma_store(rank, inner, start, swizzled=True):
    """Returns the tensor of `tma` after a store of one box, in memory that was 0xcd."""
    sizes, strides, box = {
        2: ([40, 21], [1, 48], [inner, 16]),
        4: ([40, 7, 1, 2], [1, 48, 7 * 48, 480], [inner, 4, 2, 2]),
        5: ([40, 2, 5, 1, 2], [1, 48, 96, 480, 480], [inner, 2, 2, 2, 2]),
    }[rank]

    def define(words):
        out = np.full(21 * 48, 0xCDCD, np.uint16)
        data = swizzle_chunks(words, 2 * inner) if swizzled else words  # the permutation is its own inverse
        data = data.view(np.uint16).reshape([*reversed(box)])
        for index in np.ndindex(*data.shape):
            position = [c + i for c, i in zip(start, reversed(index), strict=True)]
            if all(0 <= p < n for p, n in zip(position, sizes, strict=True)):
                out[sum(p * s for p, s in zip(position, strides, strict=True))] = data[index]
        return out.view(np.uint32)

    return define


def store_ring(words):
    return swizzle_chunks(words, 128)


def workspace(words):
    """Returns what was stored, then boxes of 256 words read by TMA (which swizzles again) and plain loads in turn."""
    stored = swizzle_chunks(words, 128)
    read = np.where(np.arange(words.size) // 256 % 2, stored, words)
    return np.concatenate([stored, read])


def multicast(words):
    """Returns two rounds of 8 rows of 64, the same in both blocks."""
    rounds = [swizzle_chunks(part, 128) for part in words.view(np.uint16).reshape(2, 8, 64)]
    return np.concatenate([rounds[0], rounds[0], rounds[1], rounds[1]])


def swap(words):
    """Swaps in two rounds: each block gets what the other had."""
    return words.reshape(2, 2, 128)[:, ::-1].ravel()


WGMMA_VALUES = {
    "f16": lambda words: words.view(np.float16),
    "bf16": lambda words: bfloat16_values(words.view(np.uint16)),
    "e4m3": lambda words: E4M3[words.view(np.uint8)],
    "e5m2": lambda words: E5M2[words.view(np.uint8)],
}


def wgmma_operands(words, name):
    """Returns (A [64][k], B [N][k]) as float64, from a case's name and input."""
    variant = name.split("/")[1].split("_")
    element, n = variant[0], int(variant[1])
    values = WGMMA_VALUES[element](words).astype(np.float64)
    depth = values.size // (64 + n)
    return values[: 64 * depth].reshape(64, depth), values[64 * depth :].reshape(n, depth)


def wgmma_result(output, n):
    """Arranges [thread][N / 2] as [64][N]."""
    values = output.view(np.float32).reshape(4, 8, 4, n // 8, 2, 2)  # warp, g, t, group of 8 columns, row half, value
    return values.transpose(0, 4, 1, 3, 2, 5).reshape(64, n)


def flag_parts(words):
    return words.reshape(8, 64)


def flag_chain(words):
    """Each block in turn triples what is there and adds its own."""
    total = np.zeros(64, np.uint32)
    for part in flag_parts(words):
        total = total * np.uint32(3) + part
    return total


def red_max_signed(words):
    return np.maximum(words.reshape(4, 8).view(np.int32).max(1), np.int32(0x60000000)).view(np.uint32)


def red_min(words):
    return np.minimum(words.reshape(4, 8).min(1), np.uint32(0x20000000))


def added_in_turn(words):
    total = np.zeros(64, np.float32)
    for part in words.view(np.float32).reshape(8, 64):
        total += part
    return total.view(np.uint32)


def weighted_parts(words):
    return (flag_parts(words) * np.arange(1, 9, dtype=np.uint32)[:, None]).sum(0, dtype=np.uint32)


EXACT = {
    "special_registers": special_registers,
    "wait_for_earlier_kernels": lambda words: words,
    "sync_block": sync_block,
    "bar_sync": bar_sync,
    "ld_global_1": ld_global_1,
    "ld_global_2": ld_global_2,
    "ld_global_4": reversed_lanes(1),
    "prefetch_global": lambda words: words,
    "atom_add_global": lambda words: np.tile(words.reshape(16, 2).sum(1, dtype=np.uint32), 2),
    "red_max_signed_global": red_max_signed,
    "red_min_global": red_min,
    "wait_global_at_least": flag_chain,
    "atom_add_acq_rel_global": weighted_parts,
    "fence_acq_rel_gpu": weighted_parts,
    "red_add_release_global": lambda words: flag_parts(words)[-1],
    "st_release_global_4": lambda words: flag_parts(words)[0],
    "ld_acquire_global_4": lambda words: np.repeat(words[0], 64),
    "ld_global_8": reversed_lanes(2),
    "ld_global_16": reversed_lanes(4),
    "cp_async_16_or_zero": cp_async_16_or_zero,
    "cp_async_wait_group": lambda words: words,
    "ldmatrix_x4": ldmatrix(False),
    "ldmatrix_x4_trans": ldmatrix(True),
    "stmatrix_x4": stmatrix,
    "shfl_xor": shuffle(lambda lane, d: lane ^ d),
    "shfl_idx": shuffle(lambda lane, d: (lane * 7 + d) % 32),
    "vote_ballot": vote_ballot,
    "bfind": bfind,
    "pack4/e4m3": pack4(E4M3),
    "pack4/e4m3_any_magnitude": pack4(E4M3),
    "pack4/e5m2": pack4(E5M2),
    "pack4/e5m2_any_magnitude": pack4(E5M2),
    "pack/f16": pack(half_bits),
    "pack/f16_any_magnitude": pack(half_bits),
    "pack/bf16": pack(bfloat16_bits),
    "pack/bf16_any_magnitude": pack(bfloat16_bits),
    "multiply/f16": multiply(lambda bits: bits.view(np.float16), half_bits),
    "multiply/bf16": multiply(bfloat16_values, bfloat16_bits),
    "halves_of_e4m3": halves_of_e4m3,
    "permute_bytes": permute_bytes,
    "unpack/f16": unpack(lambda bits: bits.view(np.float16)),
    "unpack/bf16": unpack(bfloat16_values),
    "mul_rn": mul_rn,
    "moved_bits": lambda words: words,
    "ex2/special": ex2_special,
    "tile/copy_16_swizzled": tile_copy(16),
    "tile/copy_64_swizzled": tile_copy(64),
    "tile/copy_24_padded": tile_copy(24),
    **{f"tile/layout_{n}_swizzled": lambda words: words for n in (32, 64, 128, 192, 256, 320, 1152)},
    **{f"tile/layout_{n}_padded": lambda words: words for n in (48, 64, 160, 320, 512)},
    "tile/accumulator_f32": accumulator(lambda x: x),
    "tile/accumulator_f16": accumulator(lambda x: x.astype(np.float16).astype(np.float32)),
    "tile/stage_ring": stage_ring,
    "mbarrier_wait": mbarrier_wait,
    "cp_async_mbarrier_arrive/and_wait": tracked_and_awaited,
    "cp_async_mbarrier_arrive/ring_64": copy_rings(64),
    "cp_async_mbarrier_arrive/ring_256": copy_rings(256),
    "elect_one": lambda words: np.ones(32, np.uint32),
    "increase_registers": lambda words: (words.astype(np.uint64) + np.repeat([1, 2], 128).astype(np.uint64)).astype(
        np.uint32
    ),
    "tma_load_2d/inside": tma(2, 24, [8, 2], swizzled=False),
    "tma_load_2d/outside": tma(2, 24, [24, -3], swizzled=False),
    "tma_load_2d/swizzle_32": tma(2, 16, [8, 2]),
    "tma_load_2d/swizzle_64": tma(2, 32, [16, 9]),
    "tma_load_2d/swizzle_128": tma(2, 64, [-8, 1]),
    "tma_load_4d/inside": tma(4, 24, [8, 2, 0, 0], swizzled=False),
    "tma_load_4d/outside": tma(4, 64, [-8, 5, -1, 1]),
    "tma_load_5d/inside": tma(5, 24, [8, 0, 2, 0, 0], swizzled=False),
    "tma_load_5d/outside": tma(5, 64, [-8, 1, -1, 0, 1]),
    "tma_load_4d_multicast": multicast,
    "copy_to_block": swap,
    "tma_store_2d/inside": tma_store(2, 24, [8, 2], swizzled=False),
    "tma_store_2d/outside": tma_store(2, 24, [24, 10], swizzled=False),
    "tma_store_2d/other_columns": tma_store(2, 24, [16, 7], swizzled=False),
    "tma_store_2d/nothing": tma_store(2, 24, [8, 21], swizzled=False),
    "tma_store_2d/swizzle_32": tma_store(2, 16, [8, 2]),
    "tma_store_2d/swizzle_64": tma_store(2, 32, [16, 9]),
    "tma_store_2d/swizzle_128": tma_store(2, 64, [8, 7]),
    "tma_store_4d/inside": tma_store(4, 24, [8, 2, 0, 0], swizzled=False),
    "tma_store_4d/outside": tma_store(4, 64, [8, 5, 0, 1]),
    "tma_store_5d/inside": tma_store(5, 24, [8, 0, 2, 0, 0], swizzled=False),
    "tma_store_5d/outside": tma_store(5, 64, [8, 1, 4, 0, 1]),
    "bulk_reduce_add_f32": added_in_turn,
    "bulk_wait_group_read": store_ring,
    "fence_proxy_async_global": workspace,
}
