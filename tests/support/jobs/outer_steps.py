"""Outer steps without a Trainer, beside what torch's SGD makes of the same changes."""

from __future__ import annotations

from unittest.mock import patch

import torch
from torch import Tensor, nn

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.config import LocalSteps
from lightning_bucketddp.local_steps import islands as local_steps_islands
from lightning_bucketddp.local_steps.islands import OuterStep, make_islands
from lightning_bucketddp.reducer.reduction import MeanReduction
from tests.support.ranks import device

SHAPES = {"a": (3, 5), "b": (7,), "c": (2, 3, 2, 2), "d": ()}


def _parameters() -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    parameters = {name: nn.Parameter(torch.randn(shape, device=device())) for name, shape in SHAPES.items()}
    parameters["c"].data = parameters["c"].data.contiguous(memory_format=torch.channels_last)
    return parameters


def _change(parameters: dict[str, nn.Parameter], *, island: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + island)
    return {name: torch.randn(param.shape, generator=generator).to(device()) for name, param in parameters.items()}


@torch.no_grad()
def step_beside_sgd(*, num_islands: int, counted: list[int], chunk_numbers: int) -> list[float]:
    """The largest differences from torch's SGD after three outer steps, which must be small; the last resumes."""
    islands = make_islands(Collectives(device()), num_islands, host="")
    assert islands is not None
    ours, reference = _parameters(), _parameters()
    sgd = torch.optim.SGD(reference.values(), lr=0.7, momentum=0.9, nesterov=True)
    option = LocalSteps(1)
    with patch.object(local_steps_islands, "_CHUNK_NUMBERS", chunk_numbers):
        outer = OuterStep(ours, islands, MeanReduction(islands.peers), option)
        differences = []
        for step in range(3):
            if step == 2:
                momentum = outer.gather_momentum()
                outer = OuterStep(ours, islands, MeanReduction(islands.peers), option)
                outer.set_momentum(momentum)
            mine = _change(ours, island=islands.index, step=step)
            for name, param in ours.items():
                param.sub_(mine[name] if islands.index in counted else torch.nan * mine[name])
            outer.step(share=num_islands / len(counted) if islands.index in counted else 0.0)
            changes = [_change(ours, island=island, step=step) for island in counted]
            for name, param in reference.items():
                param.grad = sum(change[name] for change in changes) / len(counted)  # type: ignore[assignment]
            sgd.step()
            differences.append(max(float((ours[name] - reference[name]).abs().max()) for name in ours))
    assert max(differences) < 2e-6
    return differences


def refuse_gaps() -> str:
    islands = make_islands(Collectives(device()), "rank", host="")
    assert islands is not None
    gappy = torch.zeros(4, 6, device=device())[:, :3]
    try:
        OuterStep({"w": gappy}, islands, MeanReduction(islands.peers), LocalSteps(1))
    except ValueError as error:
        return str(error)
    return ""
