"""Islands: which ranks average gradients in each step, and which exchange weights between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.config import IslandsOption, LocalSteps
from lightning_bucketddp.wording import list_ranks, pluralize


@dataclass(frozen=True, slots=True)
class Islands:
    """The ranks of a run, divided into islands."""

    world: Collectives
    members: list[list[int]]  # the ranks of each island
    own: Collectives  # the island that this rank is in
    # The ranks with the same position in each island, by island: each has the same part of the weights to exchange, so
    # that every number goes through the slow network once per island.
    peers: Collectives

    @property
    def index(self) -> int:
        """Which island this rank is in."""
        return self.peers.rank

    @property
    def number(self) -> int:
        return len(self.members)

    def describe(self) -> str:
        return f"{self.number} islands of {pluralize(len(self.members[0]), 'rank')}"


def make_islands(world: Collectives, option: IslandsOption, *, host: str) -> Islands | None:
    """Divide all ranks as `option` says; None if all of them are in one island. All ranks must call this."""
    members = divide(option, hosts=world.gather_json(host))
    if len(members) == 1:
        return None
    positions = [list(peers) for peers in zip(*members, strict=True)]
    return Islands(world, members, own=world.split(members), peers=world.split(positions))


def divide(option: IslandsOption, *, hosts: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each island; `hosts` names the host of each rank."""
    num_ranks = len(hosts)
    if option == "host":
        return _by_host(hosts)
    number = num_ranks if option == "rank" else option
    if num_ranks % number:
        raise ValueError(
            f"`islands={number}` cannot divide {pluralize(num_ranks, 'rank')} into islands of equal size. Pass a number"
            f" that divides {num_ranks}: {', '.join(str(n) for n in range(2, num_ranks + 1) if num_ranks % n == 0)}; or"
            " 'host' or 'rank'."
        )
    size = num_ranks // number
    return [list(range(first, first + size)) for first in range(0, num_ranks, size)]


def _by_host(hosts: Sequence[str]) -> list[list[int]]:
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    members = list(by_host.values())
    listed = "; ".join(f"{list_ranks(ranks)} on host {index}" for index, ranks in enumerate(members))
    if len({len(ranks) for ranks in members}) > 1:
        raise ValueError(
            f"`islands='host'` needs as many ranks on each host, but there are {listed}. Start as many on"
            " each, or pass `islands='rank'`, or a number of islands."
        )
    if [rank for ranks in members for rank in ranks] != list(range(len(hosts))):
        raise ValueError(
            f"`islands='host'` needs the ranks of each host to follow each other, but there are {listed}."
            " Have your launcher fill one host after the other, or pass `islands='rank'`."
        )
    return members


def find_islands(
    world: Collectives, option: LocalSteps, *, known: Islands | None, host: str, syncs_layers: bool
) -> Islands | None:
    """Divide the ranks into islands, or return the `known` ones of an earlier fit; None: there is one only.

    All ranks must call this. `host` names that of this rank; `syncs_layers`: layers of an island talk to each other.
    """
    islands = known
    if islands is None or islands.world is not world:
        islands = make_islands(world, option.islands, host=host)
    if islands is None:
        rank_zero_warn(
            f"bucketddp: `local_steps={option.steps}` has no effect, because all ranks are in one island"
            f" (`islands={option.islands!r}`): gradients are averaged in each step."
        )
    elif syncs_layers and islands.own.world_size == 1:
        raise ValueError(
            "`sync_batchnorm=True` needs other ranks in each step, but with `local_steps` each rank is alone in its"
            " island. Pass `islands='host'` or a smaller number of islands to `LocalSteps`, or leave `sync_batchnorm`"
            " out."
        )
    return islands


def refuse_layers_between_islands(model: nn.Module, islands: Islands) -> None:
    """Raise if a layer of `model` talks to ranks of other islands in each step."""
    members = set(islands.own.global_ranks)
    for name, layer in model.named_modules():
        if isinstance(layer, nn.SyncBatchNorm) and getattr(layer, "_sync_original", None) is None:
            group = layer.process_group or torch.distributed.group.WORLD
            if not members.issuperset(torch.distributed.get_process_group_ranks(group)):
                raise ValueError(
                    f"`{name}` (SyncBatchNorm) talks to ranks of other islands in each step, which `local_steps` is to"
                    " avoid. Use BatchNorm layers and `Trainer(sync_batchnorm=True)`, which stays inside of an island."
                )
