"""Jobs that give a strategy options of torch DDP which mean something only among ranks."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lightning_bucketddp import BucketDDPStrategy
from tests.support.scripts.fit import Regression
from tests.support.scripts.trainers import like_torchrun, make_trainer


def pass_groups() -> dict[str, str]:
    """What is said about groups of all ranks, of some of them, and of all in two dimensions."""
    both = BucketDDPStrategy(process_group=dist.group.WORLD, device_mesh=init_device_mesh("cpu", (2,)))
    groups = [dist.new_group([rank]) for rank in range(2)]
    return {
        "all": " ".join(both.options.without_effect),
        "some": _refusal(process_group=groups[dist.get_rank()]),
        "plane": _refusal(device_mesh=init_device_mesh("cpu", (1, 2))),
    }


def _refusal(**options: object) -> str:
    try:
        BucketDDPStrategy(**options)  # type: ignore[arg-type]
    except ValueError as error:
        return str(error)
    return ""


@like_torchrun()
def fit_with_device_ids() -> str:
    """What a fit raises whose strategy names a device that there is not."""
    try:
        make_trainer(BucketDDPStrategy(device_ids=[7]), max_epochs=1).fit(Regression())
    except ValueError as error:
        return str(error)
    return ""
