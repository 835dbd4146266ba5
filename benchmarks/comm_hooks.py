"""Communication hooks that are measured: an 8-bit one as users write them, and torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

Hook = Callable[[Any, Any], Any]
_BYTES_OF_SCALE = 4


# Without annotations: torch DDP takes types only, not their names.
def mean_in_8_bits(state, bucket):  # type: ignore[no-untyped-def]
    """Quantise to int8, send each rank its share of all, sum up, and quantise again for all ranks."""
    buffer = bucket.buffer()
    num_ranks = dist.get_world_size(state)
    share = -(-buffer.numel() // num_ranks)
    sent = _quantised(F.pad(buffer, (0, share * num_ranks - buffer.numel())).view(num_ranks, share))
    received = torch.empty_like(sent)
    future = dist.all_to_all_single(received, sent, group=state, async_op=True).get_future()

    def gather(future):  # type: ignore[no-untyped-def]
        mean = _quantised(_dequantised(received).mean(dim=0, keepdim=True))
        means = torch.empty_like(received)
        dist.all_gather_into_tensor(means, mean, group=state, async_op=True).get_future().wait()
        return buffer.copy_(_dequantised(means).view(-1)[: buffer.numel()])

    if buffer.device.type == "cpu":
        # Else gloo's threads would begin the second half, in an order that differs between ranks.
        future.wait()
    return future.then(gather)


def compress(state, bucket):  # type: ignore[no-untyped-def]
    """torch's `bf16_compress_hook`, under a name that torch DDP does not refuse without NCCL."""
    return bf16_compress_hook(state, bucket)


def _power_sgd() -> tuple[Hook, object]:
    # From the third step on, so that all that are measured are compressed.
    return powerSGD_hook, PowerSGDState(process_group=None, start_powerSGD_iter=2, orthogonalization_epsilon=1e-8)


# By name, what makes a hook and its state. Each model that is trained has a state of its own.
HOOKS: dict[str, Callable[[], tuple[Hook, object]]] = {
    "8-bit": lambda: (mean_in_8_bits, None),
    "bf16_compress_hook": lambda: (compress, None),
    "PowerSGD": _power_sgd,
}


def _quantised(rows: Tensor) -> Tensor:
    """Rows of int8, each with the bytes of its scale at its end."""
    scales = rows.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / 127
    return torch.cat([(rows / scales).round_().to(torch.int8), scales.view(torch.int8)], dim=1)


def _dequantised(rows: Tensor) -> Tensor:
    scales = rows[:, -_BYTES_OF_SCALE:].contiguous().view(torch.float32)
    return rows[:, :-_BYTES_OF_SCALE] * scales
