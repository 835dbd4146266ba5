"""Formats of 8 bits with a scale for each block of values, as they would travel, and what they do to real gradients.

`int8` and `fp8` (e4m3) cost the same bytes. Both are emulated here: rounded to what would arrive, and sent as fp32.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from benchmarks.quality_tasks import TASKS, schedule
from benchmarks.report import Table
from lightning_bucketddp.config import BLOCK_NUMEL

_LARGEST_INT8, _LARGEST_FP8 = 127.0, 448.0


def _int8(blocks: Tensor) -> Tensor:
    return blocks.round()


def _fp8(blocks: Tensor) -> Tensor:
    return blocks.to(torch.float8_e4m3fn).float()


def _by_block(round_: Callable[[Tensor], Tensor], largest: float) -> Callable[[Tensor], Tensor]:
    """Return a function that scales the largest value of each block to `largest`, rounds, and scales back."""

    def there_and_back(values: Tensor) -> Tensor:
        blocks = F.pad(values.flatten(), (0, -values.numel() % BLOCK_NUMEL)).view(-1, BLOCK_NUMEL)
        scales = blocks.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / largest
        return (round_(blocks / scales) * scales).flatten()[: values.numel()].view_as(values)

    return there_and_back


# By name: what arrives of values that are sent so.
FORMATS: dict[str, Callable[[Tensor], Tensor]] = {
    "bf16": lambda values: values.bfloat16().float(),
    "int8": _by_block(_int8, _LARGEST_INT8),
    "fp8": _by_block(_fp8, _LARGEST_FP8),
}


# Without annotations: torch DDP takes types only, not their names.
def mean_in_format(name, bucket):  # type: ignore[no-untyped-def]
    """Average what arrives of each rank's gradients, and send the mean in the same format."""

    def round_gradients():  # type: ignore[no-untyped-def]
        for gradient in bucket.gradients():
            gradient.copy_(FORMATS[name](gradient))

    def round_mean(done):  # type: ignore[no-untyped-def]
        bucket.buffer().div_(dist.get_world_size())
        round_gradients()
        return bucket.buffer()

    round_gradients()
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(round_mean)


def gradients(task: str, *, at: tuple[int, ...], seed: int = 0) -> Iterator[list[Tensor]]:
    """Train in this process, and yield the gradients of half a batch before these steps, by parameter."""
    torch.manual_seed(seed)
    what = TASKS[task]
    data, model = what.data(), what.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=what.lr)
    num_steps = max(at) + 1
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = what.lr * schedule(step, num_steps)
        chosen = torch.randint(len(data.inputs), (what.global_batch,))
        if step in at:
            model.zero_grad()
            half = chosen[: len(chosen) // 2]
            F.cross_entropy(model(data.inputs[half]), data.labels[half]).backward()
            yield [param.grad for param in model.parameters() if param.grad is not None]
        model.zero_grad()
        F.cross_entropy(model(data.inputs[chosen]), data.labels[chosen]).backward()
        optimizer.step()


def error_table(task: str, *, at: tuple[int, ...]) -> Table:
    """Return how far what arrives is from what was sent, by format: means over the steps `at`."""
    found: dict[str, list[list[float]]] = {name: [] for name in FORMATS}
    for by_parameter in gradients(task, at=at):
        sent = _flat(by_parameter)
        for name, there_and_back in FORMATS.items():
            arrived = _flat([there_and_back(gradient) for gradient in by_parameter])
            error = float((arrived - sent).norm() / sent.norm())
            cosine = float(F.cosine_similarity(arrived, sent, dim=0, eps=0.0))
            lost = float(((arrived == 0) & (sent != 0)).sum() / (sent != 0).sum())
            found[name].append([100 * error, 1e6 * (1 - cosine), 100 * lost])
    rows = {name: [statistics.mean(column) for column in zip(*rows, strict=True)] for name, rows in found.items()}
    title = f"{task}: what arrives of gradients, mean over steps {', '.join(map(str, at))}"
    return Table(title, ["relative error, %", "(1 - cosine) x 1e6", "become zero, %"], rows)


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors]).double()
