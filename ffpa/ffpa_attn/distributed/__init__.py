"""Attention over a sequence on several ranks of torch.distributed is here, with the way into and out of such parts.

DTensors sharded by batch or heads need none of this: `ffpa` takes them as they are (`operators/sharding.py`).
"""

from .ring import ring_attention
from .sequence_shards import gather_sequence, shard_sequence
from .ulysses import ulysses_attention

__all__ = ["gather_sequence", "ring_attention", "shard_sequence", "ulysses_attention"]
