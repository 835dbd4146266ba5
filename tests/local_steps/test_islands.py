"""Which ranks make an island, worked out by hand; and the outer step: SGD on the mean of what islands have changed."""

from __future__ import annotations

import re
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.config import IslandsOption, LocalSteps
from lightning_bucketddp.local_steps import islands as local_steps_islands
from lightning_bucketddp.local_steps.islands import OuterStep, divide, make_islands
from lightning_bucketddp.reducer.reduction import MeanReduction
from tests.support.cases import for_each
from tests.support.ranks import device, on_ranks


@for_each(
    ("option", "members"),
    [
        ("host", [[0, 1], [2, 3]]),
        ("rank", [[0], [1], [2], [3]]),
        (1, [[0, 1, 2, 3]]),
        (2, [[0, 1], [2, 3]]),
        (4, [[0], [1], [2], [3]]),
    ],
)
def test_islands_are_of_equal_size_and_of_ranks_that_follow_each_other(
    option: IslandsOption, members: list[list[int]]
) -> None:
    assert divide(option, hosts=["a", "a", "b", "b"]) == members


@for_each(
    ("option", "hosts", "text"),
    [
        (3, "aabb", "=3` cannot divide 4 ranks into islands of equal size. Pass a number that divides 4: 2, 4;"),
        ("host", "aaab", "='host'` needs as many ranks on each host, but there are ranks 0, 1, 2 on host 0; rank"),
        ("host", "abab", "='host'` needs the ranks of each host to follow each other, but there are ranks 0, 2"),
    ],
)
def test_what_cannot_be_divided_is_refused(option: IslandsOption, hosts: str, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"`islands{text}")):
        divide(option, hosts=list(hosts))


SHAPES = {"a": (3, 5), "b": (7,), "c": (2, 3, 2, 2), "d": ()}


def _parameters() -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    parameters = {name: nn.Parameter(torch.randn(shape, device=device())) for name, shape in SHAPES.items()}
    parameters["c"].data = parameters["c"].data.contiguous(memory_format=torch.channels_last)
    return parameters


def _change(parameters: dict[str, nn.Parameter], *, island: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + island)
    return {name: torch.randn(param.shape, generator=generator).to(device()) for name, param in parameters.items()}


@pytest.mark.parametrize(("world_size", "counted"), [(4, [0, 1]), (4, [1])])
@for_each("chunk_numbers", [8, 10**6])
@on_ranks()
@torch.no_grad()
def test_an_outer_step_is_one_of_sgd_with_nesterov_momentum(
    world_size: int, counted: list[int], chunk_numbers: int
) -> None:
    """Three outer steps, the last one after a resume."""
    islands = make_islands(Collectives(device()), 2, host="")
    assert islands is not None
    ours, reference = _parameters(), _parameters()
    sgd = torch.optim.SGD(reference.values(), lr=0.7, momentum=0.9, nesterov=True)
    with patch.object(local_steps_islands, "_CHUNK_NUMBERS", chunk_numbers):
        outer = OuterStep(ours, islands, MeanReduction(islands.peers), LocalSteps(1))
        for step in range(3):
            if step == 2:
                momentum = outer.gather_momentum()
                outer = OuterStep(ours, islands, MeanReduction(islands.peers), LocalSteps(1))
                outer.set_momentum(momentum)
            mine = _change(ours, island=islands.index, step=step)
            for name, param in ours.items():
                param.sub_(mine[name] if islands.index in counted else torch.nan * mine[name])
            outer.step(share=2 / len(counted) if islands.index in counted else 0.0)
            changes = [_change(ours, island=island, step=step) for island in counted]
            for name, param in reference.items():
                param.grad = sum(change[name] for change in changes) / len(counted)  # type: ignore[assignment]
            sgd.step()
            for name, param in ours.items():
                assert (param - reference[name]).abs().max() < 2e-6, (name, step)


@on_ranks(4)
def test_a_weight_with_gaps_in_memory_is_refused_by_name() -> None:
    islands = make_islands(Collectives(device()), "rank", host="")
    assert islands is not None
    gappy = torch.zeros(4, 6, device=device())[:, :3]
    expected = r"^`w` does not lie in one piece of memory \(its strides are \(6, 1\)\), which"
    with pytest.raises(ValueError, match=expected):
        OuterStep({"w": gappy}, islands, MeanReduction(islands.peers), LocalSteps(1))
