"""Islands of ranks that average gradients in each step, and the outer step, which averages their weights.

The change of an island's weights since the last outer step is averaged over the islands, and is the gradient of an SGD
with Nesterov momentum that steps the global weights, from which all islands go on (DiLoCo, arXiv 2311.08105). Each rank
keeps one shard of the global weights and of the momentum: it exchanges that shard with its peers, the ranks of the same
position in other islands, and gathers the others from its island. Weights travel in chunks, so that there is never
another copy of all weights; while one chunk travels, the one before is stepped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed
from torch import Tensor, nn

from lightning_bucketddp.comm.collectives import Collectives, chunks_of_one_dtype
from lightning_bucketddp.config import IslandsOption, LocalSteps
from lightning_bucketddp.processes import rank_zero_warn
from lightning_bucketddp.reducer.bucket import BufferedBucket, BufferLayout
from lightning_bucketddp.reducer.reduction import PendingReduction, Reduction
from lightning_bucketddp.wording import list_ranks, pluralize


@dataclass(frozen=True, slots=True)
class Islands:
    """The ranks of a run, divided into islands."""

    world: Collectives
    members: list[list[int]]  # the ranks of each island
    own: Collectives  # the island that this rank is in
    # The ranks with the same position in each island, by island. They exchange the same shard of the weights, so that
    # every number goes through the slow network once per island.
    peers: Collectives

    @property
    def index(self) -> int:
        """Which island this rank is in."""
        return self.peers.rank

    @property
    def number(self) -> int:
        return len(self.members)


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
    members = [[rank for rank, other in enumerate(hosts) if other == host] for host in dict.fromkeys(hosts)]
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
    """Divide the ranks into islands, or return the `known` ones of an earlier fit; None: there is only one.

    All ranks must call this. `host` is the name of this host; `syncs_layers`: layers exchange statistics in an island.
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
    """Raise if a layer of `model` exchanges statistics with other islands in each step."""
    members = set(islands.own.global_ranks)
    for name, layer in model.named_modules():
        if isinstance(layer, nn.SyncBatchNorm) and getattr(layer, "_sync_original", None) is None:
            group = layer.process_group or torch.distributed.group.WORLD
            if not members.issuperset(torch.distributed.get_process_group_ranks(group)):
                raise ValueError(
                    f"`{name}` (SyncBatchNorm) talks to ranks of other islands in each step, which `local_steps` is to"
                    " avoid. Use BatchNorm layers and `Trainer(sync_batchnorm=True)`, which stays inside of an island."
                )


# The numbers in a chunk, of all ranks of an island together.
_CHUNK_NUMBERS = 16 * 2**20


class _Row:
    """Tensors of one dtype as one row of numbers, each in the order that it has in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)
        self._ends = list(accumulate(in_memory_order(name, tensor).numel() for name, tensor in tensors.items()))
        self.numel = self._ends[-1]

    def slices(self, start: int, stop: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors in a range of the row, as views, which are made anew: `param.data` may be replaced."""
        begin = 0
        for (name, tensor), end in zip(self.tensors.items(), self._ends, strict=True):
            if start < end and begin < stop and begin < end:
                yield name, in_memory_order(name, tensor)[max(start - begin, 0) : stop - begin]
            begin = end

    def read(self, start: int, into: Tensor) -> Tensor:
        """Return `into`, overwritten with the range that begins at `start`; zeros after the end of the row."""
        offset = 0
        for _, view in self.slices(start, start + into.numel()):
            into[offset : offset + view.numel()].copy_(view)
            offset += view.numel()
        into[offset:].zero_()
        return into

    def write(self, start: int, values: Tensor) -> None:
        """Overwrite the range that begins at `start`, up to the end of the row."""
        for _, view in self.slices(start, start + values.numel()):
            view.copy_(values[: view.numel()])
            values = values[view.numel() :]


def in_memory_order(name: str, tensor: Tensor) -> Tensor:
    """Return the numbers of `tensor`, whose name is `name`, as a view with one dimension."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    try:
        return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True)).view(-1)
    except RuntimeError:
        raise ValueError(
            f"`{name}` does not lie in one piece of memory (its strides are {tuple(tensor.stride())}), which"
            " `local_steps` needs. Replace it by its `.contiguous()`."
        ) from None


@dataclass(slots=True)
class _Chunk:
    """A range of a row, with the global weights and the momentum of this rank's shard, and buffers to exchange them."""

    row: _Row
    start: int
    weights: Tensor
    momentum: Tensor | None
    wires: tuple[BufferedBucket, ...]


class OuterStep:
    """Steps the global weights.

    Args:
        parameters: The trained parameters, by name, with the same values on all ranks now.
        reduction: Takes means over the peers.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], islands: Islands, reduction: Reduction, option: LocalSteps
    ) -> None:
        self.names = list(parameters)
        self.is_partial = False  # an exception has left some weights as the island's own, and some as the global ones
        self._islands = islands
        self._size = islands.own.world_size
        self._reduction = reduction
        self._lr, self._momentum = option.outer_lr, option.outer_momentum
        by_dtype: dict[torch.dtype, dict[str, Tensor]] = {}
        for name, param in parameters.items():
            by_dtype.setdefault(param.dtype.to_real(), {})[name] = param
        self._rows = [_Row(tensors) for tensors in by_dtype.values()]
        self._chunks = [chunk for row in self._rows for chunk in self._divide(row)]

    def _divide(self, row: _Row) -> Iterator[_Chunk]:
        num_chunks = -(-row.numel // _CHUNK_NUMBERS)
        shard = -(-row.numel // (num_chunks * self._size))
        first = next(iter(row.tensors.values()))
        dtype = torch.promote_types(first.dtype.to_real(), torch.float32)
        layout, like = BufferLayout([0], shard), torch.empty(shard, dtype=dtype, device="meta")
        wires = [
            BufferedBucket([like], num_flags=0, device=first.device, layout=layout) for _ in range(min(num_chunks, 2))
        ]
        for index in range(num_chunks):
            start = index * shard * self._size
            own = torch.empty(shard, dtype=first.dtype.to_real(), device=first.device)
            yield _Chunk(
                row,
                start,
                weights=row.read(start + self._islands.own.rank * shard, own),
                momentum=torch.zeros_like(own, dtype=dtype) if self._momentum else None,
                wires=(wires[0], wires[-1]),
            )

    @torch.no_grad()
    def take_weights(self) -> None:
        """Make the current weights the global ones, after they were changed in the same way on all ranks."""
        for chunk in self._chunks:
            chunk.row.read(self._own_start(chunk), chunk.weights)

    def nonfinite(self) -> list[str]:
        """Return the names of parameters that are not finite in this rank's shard."""
        slices = [
            one
            for chunk in self._chunks
            for one in chunk.row.slices(self._own_start(chunk), self._own_start(chunk) + chunk.weights.numel())
        ]
        if not slices:
            return []
        largest = torch.stack([torch.linalg.vector_norm(view, torch.inf).float() for _, view in slices])
        is_finite = largest.isfinite().tolist()
        return [name for (name, _), finite in zip(slices, is_finite, strict=True) if not finite]

    @torch.no_grad()
    def step(self, *, share: float) -> int:
        """Step the global weights and go on from them. All ranks must call this. Return the bytes that were sent.

        In the mean over the islands, this one has the weight `share`; 0: it does not count.
        """
        self.is_partial = True
        bytes_sent = 0
        in_flight: list[tuple[_Chunk, BufferedBucket, PendingReduction]] = []
        for index, chunk in enumerate(self._chunks):
            wire = chunk.wires[index % 2]
            in_flight.append((chunk, wire, self._start(chunk, wire, index=index, share=share)))
            if len(in_flight) > 1:
                bytes_sent += self._finish(*in_flight.pop(0))
        for last in in_flight:
            bytes_sent += self._finish(*last)
        # An abort would interrupt what is still in flight on the device, without an error.
        device = self._islands.world.device
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        self.is_partial = False
        return bytes_sent

    @torch.no_grad()
    def restore_global_weights(self) -> None:
        """Return to the global weights. All ranks of the island must call this."""
        for chunk in self._chunks:
            self._give_to_island(chunk)

    def _start(self, chunk: _Chunk, wire: BufferedBucket, *, index: int, share: float) -> PendingReduction:
        change = chunk.row.read(self._own_start(chunk), wire.wire)
        torch.sub(chunk.weights, change, out=change)
        if share == 0:
            change.zero_()  # it may be non-finite
        elif share != 1:
            change.mul_(share)
        return self._reduction.start(wire, index=index, is_last=index == len(self._chunks) - 1)

    def _finish(self, chunk: _Chunk, wire: BufferedBucket, pending: PendingReduction) -> int:
        pending.wait()
        gradient = wire.wire
        if chunk.momentum is not None:
            chunk.momentum.mul_(self._momentum).add_(gradient)
            gradient = gradient.add_(chunk.momentum, alpha=self._momentum)
        chunk.weights.copy_(gradient.mul_(-self._lr).add_(chunk.weights))
        self._give_to_island(chunk)
        return pending.bytes_sent

    def _give_to_island(self, chunk: _Chunk) -> None:
        chunk.row.write(chunk.start, self._gather(chunk.weights))

    def _gather(self, own: Tensor) -> Tensor:
        """Return the shards of all ranks of the island, concatenated."""
        if self._size == 1:
            return own
        shards = own.new_empty(own.numel() * self._size)
        shards.view(self._size, -1)[self._islands.own.rank].copy_(own)
        self._islands.own.start_gather_of_shards(shards, owner=None).wait()
        return shards

    def _own_start(self, chunk: _Chunk) -> int:
        return chunk.start + self._islands.own.rank * chunk.weights.numel()

    def free_device(self) -> None:
        """Free everything but the momentum, and move that to host memory: there will be no further step."""
        for chunk in self._chunks:
            chunk.momentum = None if chunk.momentum is None else chunk.momentum.cpu()
            chunk.weights = chunk.weights[:0]
            chunk.wires = ()

    def gather_momentum(self) -> dict[str, Tensor]:
        """Return the momentum of each parameter, in host memory. All ranks of an island must call this."""
        gathered: dict[str, Tensor] = {}
        for row in self._rows:
            of_row = _Row({name: _momentum_like(param) for name, param in row.tensors.items()})
            for chunk in self._chunks:
                if chunk.row is row and chunk.momentum is not None:
                    of_row.write(chunk.start, self._gather(chunk.momentum.to(self._islands.world.device)).cpu())
                    gathered.update(of_row.tensors)
        return gathered

    def set_momentum(self, momentum: Mapping[str, Tensor]) -> None:
        """Restore the momentum that `gather_momentum` has returned; that of other parameters becomes zero."""
        for row in self._rows:
            of_row = _Row({name: _momentum_like(param, momentum.get(name)) for name, param in row.tensors.items()})
            for chunk in self._chunks:
                if chunk.row is row and chunk.momentum is not None:
                    of_row.read(self._own_start(chunk), chunk.momentum)


def _momentum_like(param: Tensor, momentum: Tensor | None = None) -> Tensor:
    """Return `momentum`, or zeros, in host memory and in the memory order of `param`."""
    dtype = torch.promote_types(param.dtype, torch.float32)
    like = torch.zeros_like(param, dtype=dtype, device="cpu", requires_grad=False)
    return like if momentum is None or momentum.shape != param.shape else like.copy_(momentum)


@torch.no_grad()
def average(tensors: Sequence[Tensor], islands: Islands, *, share: float) -> None:
    """Replace `tensors` by their mean over the islands, or by those of the first island if they are not floats.

    All ranks must call this. In an island the tensors of its first rank count; `share` is that of `OuterStep.step`.
    """
    device = islands.world.device
    if on_device := [tensor.detach() for tensor in tensors if tensor.device == device]:
        _average(on_device, islands.peers, islands.own, share=share)
    if on_host := [tensor.detach() for tensor in tensors if tensor.device != device]:
        _average(on_host, islands.peers.host_group(), islands.own.host_group(), share=share)


def _average(tensors: Sequence[Tensor], peers: Collectives, own: Collectives, *, share: float) -> None:
    if own.rank == 0:
        for chunk in chunks_of_one_dtype([tensor for tensor in tensors if tensor.is_floating_point()]):
            mean = torch.cat([tensor.reshape(-1) for tensor in chunk])
            peers.start_mean(mean.mul_(share) if share else mean.zero_()).wait()
            for tensor, values in zip(chunk, torch.split(mean, [tensor.numel() for tensor in chunk]), strict=True):
                tensor.copy_(values.view_as(tensor))
        peers.broadcast_tensors([tensor for tensor in tensors if not tensor.is_floating_point()])
    own.broadcast_tensors(tensors)
