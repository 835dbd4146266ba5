"""Islands: which ranks average gradients in each step, and the outer step, which makes their weights one set again.

What an island has changed in its weights since the last outer step is averaged over the islands, and taken as the
gradient of an SGD with Nesterov momentum that steps the global weights, from which all islands go on (DiLoCo, arXiv
2311.08105). Each rank keeps the global weights and the momentum of one part only: it exchanges that part with its
peers, the ranks of the same position in other islands, and gives the result to its island. Everything goes in chunks,
so that there is never another copy of all weights; while one chunk travels, the one before is stepped.
"""

from __future__ import annotations

from bisect import bisect_right
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


# Of all ranks of an island together.
_CHUNK_NUMBERS = 16 * 2**20


class _Row:
    """Tensors of one dtype as one row of numbers, each in the order that it has in memory.

    Views are taken anew each time, because `param.data` may have been replaced since.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)
        self.names = list(tensors)
        self._ends = list(accumulate(in_memory_order(name, tensor).numel() for name, tensor in tensors.items()))
        self.numel = self._ends[-1]

    def pieces(self, start: int, stop: int) -> Iterator[tuple[str, Tensor]]:
        """Yield what lies in a range of the row, tensor by tensor, as views."""
        stop = min(stop, self.numel)
        while start < stop:
            index = bisect_right(self._ends, start)
            name, end = self.names[index], self._ends[index]
            row = in_memory_order(name, self.tensors[name])
            offset = start - (end - row.numel())
            yield name, row[offset : offset + min(stop, end) - start]
            start = min(stop, end)

    def read(self, start: int, into: Tensor) -> Tensor:
        """Return `into`, overwritten with the range that begins at `start`; zeros behind the end of the row."""
        offset = 0
        for _, piece in self.pieces(start, start + into.numel()):
            into[offset : offset + piece.numel()].copy_(piece)
            offset += piece.numel()
        into[offset:].zero_()
        return into

    def write(self, start: int, values: Tensor) -> None:
        """Overwrite the range that begins at `start`, up to the end of the row."""
        offset = 0
        for _, piece in self.pieces(start, start + values.numel()):
            piece.copy_(values[offset : offset + piece.numel()])
            offset += piece.numel()


def in_memory_order(name: str, tensor: Tensor) -> Tensor:
    """Return the numbers of `tensor`, which is called `name`, as a view with one dimension."""
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
    """A range of a row, what this rank keeps of its own part (global weights, momentum), and what it exchanges in."""

    row: _Row
    start: int
    weights: Tensor
    momentum: Tensor | None
    wires: tuple[BufferedBucket, ...]


class OuterStep:
    """Steps the global weights.

    Args:
        parameters: those that are trained, by name; the same values on all ranks now.
        reduction: takes means over the peers.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], islands: Islands, reduction: Reduction, option: LocalSteps
    ) -> None:
        self.names = list(parameters)
        self.is_partial = False  # an exception has left some weights as the island's own, and some as those of all
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
        share = -(-row.numel // (num_chunks * self._size))
        first = next(iter(row.tensors.values()))
        dtype = torch.promote_types(first.dtype.to_real(), torch.float32)
        layout, like = BufferLayout([0], share), torch.empty(share, dtype=dtype, device="meta")
        wires = [
            BufferedBucket([like], num_flags=0, device=first.device, layout=layout) for _ in range(min(num_chunks, 2))
        ]
        for index in range(num_chunks):
            start = index * share * self._size
            own = torch.empty(share, dtype=first.dtype.to_real(), device=first.device)
            yield _Chunk(
                row,
                start,
                weights=row.read(start + self._islands.own.rank * share, own),
                momentum=torch.zeros_like(own, dtype=dtype) if self._momentum else None,
                wires=(wires[0], wires[-1]),
            )

    @torch.no_grad()
    def take_weights(self) -> None:
        """Take the weights as they are now as the global ones: somebody has changed them on all ranks alike."""
        for chunk in self._chunks:
            chunk.row.read(self._own_start(chunk), chunk.weights)

    def nonfinite(self) -> list[str]:
        pieces = [
            piece
            for chunk in self._chunks
            for piece in chunk.row.pieces(self._own_start(chunk), self._own_start(chunk) + chunk.weights.numel())
        ]
        if not pieces:
            return []
        largest = torch.stack([torch.linalg.vector_norm(piece, torch.inf).float() for _, piece in pieces])
        is_finite = largest.isfinite().tolist()
        return [name for (name, _), finite in zip(pieces, is_finite, strict=True) if not finite]

    @torch.no_grad()
    def step(self, *, share: float) -> int:
        """Step the global weights and go on from them. All ranks must call this. Return the bytes given to the network.

        This island counts `share` times what it does in a plain mean over all islands; 0: not at all.
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
        # An abort would leave what is under way there half done, and nobody would know.
        device = self._islands.world.device
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        self.is_partial = False
        return bytes_sent

    @torch.no_grad()
    def go_back(self) -> None:
        """Give this island the global weights. All of its ranks must call this."""
        for chunk in self._chunks:
            self._give_to_island(chunk)

    def _start(self, chunk: _Chunk, wire: BufferedBucket, *, index: int, share: float) -> PendingReduction:
        change = chunk.row.read(self._own_start(chunk), wire.wire)
        torch.sub(chunk.weights, change, out=change)
        if share == 0:
            change.zero_()  # it may not be finite
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
        """Return the parts of all ranks of the island, one behind the other."""
        if self._size == 1:
            return own
        parts = own.new_empty(own.numel() * self._size)
        parts.view(self._size, -1)[self._islands.own.rank].copy_(own)
        self._islands.own.start_gather_of_shards(parts, owner=None).wait()
        return parts

    def _own_start(self, chunk: _Chunk) -> int:
        return chunk.start + self._islands.own.rank * chunk.weights.numel()

    def free_device(self) -> None:
        """Keep the momentum in host memory, and nothing else: there will be no further step."""
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
        """Go on with the momentum that `gather_momentum` has returned; a parameter that it does not name has none."""
        for row in self._rows:
            of_row = _Row({name: _momentum_like(param, momentum.get(name)) for name, param in row.tensors.items()})
            for chunk in self._chunks:
                if chunk.row is row and chunk.momentum is not None:
                    of_row.read(self._own_start(chunk), chunk.momentum)


def _momentum_like(param: Tensor, momentum: Tensor | None = None) -> Tensor:
    """Return room for the momentum of `param`, in host memory and in the same order: `momentum`, or zeros."""
    dtype = torch.promote_types(param.dtype, torch.float32)
    like = torch.zeros_like(param, dtype=dtype, device="cpu", requires_grad=False)
    return like if momentum is None or momentum.shape != param.shape else like.copy_(momentum)


@torch.no_grad()
def average(tensors: Sequence[Tensor], islands: Islands, *, share: float) -> None:
    """Replace `tensors` by their mean over the islands, or by those of the first one if they are no real numbers.

    All ranks must call this. In an island the tensors of its first rank count; `share` is that of `OuterStep.step`.
    """
    device = islands.world.device
    on_device = [tensor.detach() for tensor in tensors if tensor.device == device]
    on_host = [tensor.detach() for tensor in tensors if tensor.device != device]
    if on_device:
        _average(on_device, islands.peers, islands.own, share=share)
    if on_host:
        _average(on_host, islands.peers.host_group(), islands.own.host_group(), share=share)


def _average(tensors: Sequence[Tensor], peers: Collectives, own: Collectives, *, share: float) -> None:
    if own.rank == 0:
        for chunk in chunks_of_one_dtype([tensor for tensor in tensors if tensor.is_floating_point()]):
            mean = torch.cat([tensor.reshape(-1) for tensor in chunk])
            peers.start_mean(mean.mul_(share) if share else mean.zero_()).wait()
            for tensor, piece in zip(chunk, torch.split(mean, [tensor.numel() for tensor in chunk]), strict=True):
                tensor.copy_(piece.view_as(tensor))
        peers.broadcast_tensors([tensor for tensor in tensors if not tensor.is_floating_point()])
    own.broadcast_tensors(tensors)
