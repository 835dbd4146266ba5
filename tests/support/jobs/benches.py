"""Of benchmarks: one of which a rank fails, the communication hooks that are measured, memory, and trainings."""

from __future__ import annotations

import os
import time
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.loop import LoopSettings
from benchmarks.peaks import Memory, Peaks
from benchmarks.quality_training import Run, Trained, train
from benchmarks.variants import Variant, attach


class Failing:
    """Fails on rank 1 while rank 0 waits for it."""

    def __init__(self, settings: None, device: torch.device) -> None:
        pass

    def fail(self) -> None:
        if dist.get_rank() == 1:
            raise ValueError("this rank failed")
        dist.barrier()

    def die(self) -> None:
        if dist.get_rank() == 1:
            os._exit(3)
        time.sleep(600)  # in a collective it would notice, and be the first to tell


def gradients_with_hook(variants: list[Variant]) -> dict[str, tuple[Tensor, Tensor]]:
    """By variant: the mean of the ranks' gradients, and what a hook has made of them in the third step."""
    means = {}
    for variant in variants:
        torch.manual_seed(dist.get_rank())
        model = nn.Linear(33, 31)
        attached = attach(variant, model, torch.device("cpu"))
        x = torch.randn(8, 33)
        for _ in range(3):
            model.zero_grad()
            with attached.backward():
                attached.model(x).square().mean().backward()
        reduced = _gradient(model)
        with attached.no_sync(), attached.backward():
            model.zero_grad()
            attached.model(x).square().mean().backward()
        exact = _gradient(model)
        dist.all_reduce(exact)
        means[variant.name] = (exact / dist.get_world_size(), reduced)
        if attached.reducer is not None:
            attached.reducer.close()
    return means


def _gradient(model: nn.Module) -> Tensor:
    """All of them, one behind the other."""
    parts = []
    for param in model.parameters():
        assert param.grad is not None
        parts.append(param.grad.flatten())
    return torch.cat(parts)


def memory_of_variants(settings: LoopSettings) -> tuple[list[Memory], int]:
    """What each variant needs for a step with one micro-batch, and the size of the gradients."""
    peaks = Peaks(settings, torch.device("cpu"))
    return [peaks.memory(variant.name, 1) for variant in settings.variants], peaks.gradient_bytes()


def trainings(runs: list[Run]) -> list[Trained]:
    """What this rank has at the end of each of `runs`, each rank a node as in `benchmarks.ranks`."""
    with patch.dict(os.environ, NODE_RANK=str(dist.get_rank()), LOCAL_RANK="0"):
        return [train(run) for run in runs]
