"""How long it takes to make gradients into what travels and back, without sending them: measured with the real code."""

from __future__ import annotations

import statistics
import timeit
from collections.abc import Callable

import torch

from lightning_bucketddp.config import MIB
from lightning_bucketddp.planning.wire_cost import Codec, Codecs
from lightning_bucketddp.reducer.quantization import Blocks

# Of an H200, for a plan that is made where there is no GPU: benchmarks/results/wires_h200_202611.md.
GPU_CODECS: Codecs = {
    "bf16": Codec(6.7e-13, 8.8e-13),
    "fp16": Codec(6.7e-13, 8.8e-13),
    "int8": Codec(6.2e-12, 0.0, 1.3e-11),
}
_NUMEL = {"cpu": MIB, "cuda": 4 * MIB}
_NUM_IN_A_ROW, _NUM_MEASURED = 3, 5
# How many rows are added up makes no difference: together they have as many numbers as a bucket.
_NUM_RANKS = 2


def measure_codecs(device: torch.device) -> Codecs:
    """Return what each `reduce_dtype` takes to encode and to decode fp32 gradients on this device."""
    numbers = torch.ones(_NUMEL.get(device.type, MIB), device=device)
    halves = torch.empty_like(numbers, dtype=torch.bfloat16)
    numel, row_numel = len(numbers), len(numbers) // _NUM_RANKS
    sent, received = (Blocks(numel, num_rows=_NUM_RANKS, row_numel=row_numel, device=device) for _ in range(2))

    def s_per_byte(action: Callable[[], object]) -> float:
        return _seconds(action, device) / numbers.nbytes

    cast = Codec(s_per_byte(lambda: halves.copy_(numbers)), s_per_byte(lambda: numbers.copy_(halves)))
    encode = s_per_byte(lambda: sent.encode(numbers))
    mean = s_per_byte(lambda: sent.encode_mean(received, row=0))
    decode = s_per_byte(lambda: sent.decode(numbers))
    # On a GPU the rest is in a stream of its own, in which one bucket comes after the other. On a host the mean is
    # computed by a thread while the next bucket travels.
    is_gpu = device.type == "cuda"
    int8 = Codec(encode, 0.0, mean + decode) if is_gpu else Codec(encode, mean + decode)
    return {"bf16": cast, "fp16": cast, "int8": int8}


def _seconds(action: Callable[[], object], device: torch.device) -> float:
    """Return the time of one `action`, of several in a row, so that waiting for the device hardly counts."""

    def act() -> None:
        for _ in range(_NUM_IN_A_ROW):
            action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return statistics.median(timeit.repeat(act, number=1, repeat=1 + _NUM_MEASURED)[1:]) / _NUM_IN_A_ROW
