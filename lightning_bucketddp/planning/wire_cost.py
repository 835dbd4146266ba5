"""What a reduction costs if gradients travel as another dtype. Pure.

Note: cost of a wire format
    bf16 and fp16 travel in an all-reduce, and the bytes are fewer in proportion. int8 travels in blocks of 256 values
    with a scale in fp32: first by an all-to-all, so that each rank can add up its share, then by an all-gather. These
    carry what the halves of an all-reduce do (Note: halves), but each is launched and waited for by itself: the latency
    counts twice. Two ranks make one exchange of all of it, which is taken to cost as much. To encode and to decode
    takes passes over memory, at a speed that has to be measured on the device (`reducer/quantization`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from lightning_bucketddp.config import BLOCK_NUMEL
from lightning_bucketddp.planning.all_reduce_cost import AllReduceCost
from lightning_bucketddp.planning.plan import ParameterSpec

BYTES_PER_VALUE = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "int8": 1 + 4 / BLOCK_NUMEL}
_NUM_COLLECTIVES = {"int8": 2}


@dataclass(frozen=True, slots=True)
class Codec:
    """Seconds for a byte of gradients, in which something else than the network is busy."""

    encode_s_per_byte: float = 0.0  # where backward runs, when a bucket leaves
    decode_s_per_byte: float = 0.0  # the same after backward, when it has come back
    inline_s_per_byte: float = 0.0  # between the exchanges of a bucket, while all others wait

    @property
    def s_per_byte(self) -> float:
        return self.encode_s_per_byte + self.decode_s_per_byte + self.inline_s_per_byte


NO_CODEC = Codec()
# By `reduce_dtype`, for fp32 gradients. What is not in it counts as nothing.
Codecs = Mapping[str, Codec]
NO_CODECS: Codecs = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Wire:
    """What gradients travel as (Note: cost of a wire format); by default as what they are."""

    share: float = 1.0  # bytes that travel for each byte of gradients
    num_collectives: int = 1
    codec: Codec = NO_CODEC

    @classmethod
    def of(cls, reduce_dtype: str | None, specs: Sequence[ParameterSpec], codecs: Codecs = NO_CODECS) -> Wire:
        """Return what `reduce_dtype` makes of the gradients in `specs`."""
        own_bytes = sum(spec.num_bytes for spec in specs)
        if reduce_dtype is None or not own_bytes:
            return cls()
        num_values = sum(spec.num_bytes / _itemsize(spec) for spec in specs)
        share = num_values * BYTES_PER_VALUE[reduce_dtype] / own_bytes
        if share == 1:
            return cls()
        return cls(share, _NUM_COLLECTIVES.get(reduce_dtype, 1), codecs.get(reduce_dtype, NO_CODEC))

    def cost(self, own: AllReduceCost) -> AllReduceCost:
        """Return the cost per byte of gradients, if in their own dtype it is `own`."""
        s_per_byte = own.s_per_byte * self.share + self.codec.inline_s_per_byte
        return AllReduceCost(own.latency_s * self.num_collectives, s_per_byte)

    def own_cost(self, measured: AllReduceCost) -> AllReduceCost:
        """Return the cost in their own dtype, if on this wire, with all of the codec, it has been `measured`."""
        s_per_byte = max(measured.s_per_byte - self.codec.s_per_byte, 0.0) / self.share
        return AllReduceCost(measured.latency_s / self.num_collectives, s_per_byte)


def _itemsize(spec: ParameterSpec) -> int:
    dtype = getattr(torch, spec.kind.partition(" ")[0].removeprefix("torch."), None)
    # What was made of recorded buckets does not know kinds.
    return (dtype if isinstance(dtype, torch.dtype) else torch.float32).itemsize
