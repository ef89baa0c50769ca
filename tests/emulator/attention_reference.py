"""Computes attention in float64 for the split-D test kernels, and makes their inputs."""

import numpy as np
import scalar


def random_tensor(shape, element, seed):
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return (scalar.half_bits(values) if element == "f16" else scalar.bfloat16_bits(values)).reshape(shape)


def decode(bits, element):
    return (bits.view(np.float16) if element == "f16" else scalar.bfloat16_values(bits)).astype(np.float64)


def attention(q, k, v, scale):
    scores = scale * q @ k.swapaxes(-1, -2)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights @ v / weights.sum(-1, keepdims=True)


class SplitD:
    """Runs a split-D test kernel on random data and compares it with float64."""

    def __init__(self, emulator, kernel, element="f16", head_dim=64):
        self.emulator, self.kernel, self.element, self.head_dim = emulator, kernel, element, head_dim

    def run(self, nq, nk, heads=1, bug=0, **options):
        shapes = [(heads, nq, self.head_dim), (heads, nk, self.head_dim), (heads, nk, self.head_dim)]
        inputs = [random_tensor(shape, self.element, seed) for seed, shape in enumerate(shapes)]
        output = np.full(shapes[0], 0x7FFF, np.uint16)
        scale = self.head_dim**-0.5
        run = self.emulator.run(self.kernel, inputs, [output], [heads, nq, nk, bug], [scale], **options)
        run.error = np.abs(
            decode(output, self.element) - attention(*(decode(x, self.element) for x in inputs), scale)
        ).max()
        return run
