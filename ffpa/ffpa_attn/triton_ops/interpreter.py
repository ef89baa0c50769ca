"""This module makes Triton's interpreter treat types narrower than float32 as numbers, as a GPU does.

Triton 3.6's own interpreter cuts bfloat16 off instead of rounding, carries wrongly when it rounds to fp8, and
multiplies the bits of bfloat16 as if they were integers. In `exact()` PyTorch converts, and products are of float32.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

_one_at_a_time = threading.RLock()  # what is mended belongs to the whole process


@contextlib.contextmanager
def exact() -> Iterator[None]:
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    types = {
        tl.float64: torch.float64,
        tl.float32: torch.float32,
        tl.float16: torch.float16,
        tl.bfloat16: torch.bfloat16,
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float8e5: torch.float8_e5m2,
    }
    bits = {1: torch.uint8, 2: torch.uint16, 4: torch.int32, 8: torch.int64}

    def converted(data, given, wanted, rounding=None):
        there = np.ascontiguousarray(data).reshape(data.shape)  # ascontiguousarray turns a scalar into a row
        x = torch.from_numpy(there.view(f"u{there.itemsize}" if there.itemsize < 4 else f"i{there.itemsize}"))
        x = x.view(types[given]).to(types[wanted])
        return x.view(bits[x.itemsize]).numpy()

    def product(builder, a, b, d, precision, imprecise):
        a, b = (
            converted(x.data, x.dtype.scalar, tl.float32).view(np.float32) if x.dtype.scalar in types else x.data
            for x in (a, b)
        )
        return interpreter.TensorHandle(np.matmul(a, b, dtype=d.data.dtype) + d.data, d.dtype.scalar)

    patched = set()  # modules whose functions have the language patched

    def patch_once(kernel):
        """Triton patches its language for a launch, and again at each call of a helper, which takes longest."""
        module = id(kernel.__globals__)
        if module in patched:
            return None
        scope, outermost = patch(kernel), not patched
        patched.add(module)
        if outermost:
            undo = scope.restore
            scope.restore = lambda: (patched.clear(), undo())
        return scope

    mended = (
        (interpreter, "_convert_float", converted),
        (interpreter, "_patch_lang", patch_once),
        (interpreter.InterpreterBuilder, "create_dot", product),
    )
    with _one_at_a_time:
        patch = interpreter._patch_lang  # Triton's own, not one that a waiting thread has patched
        found = [getattr(where, name) for where, name, _ in mended]
        try:
            for where, name, ours in mended:
                setattr(where, name, ours)
            yield
        finally:
            for (where, name, _), theirs in zip(mended, found, strict=True):
                setattr(where, name, theirs)
