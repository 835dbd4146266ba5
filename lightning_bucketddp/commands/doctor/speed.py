"""How long all-reduces take between these ranks, and how long they should."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.commands.doctor.finding import Finding, Observation, Theme, one_per_host
from lightning_bucketddp.config import MIB
from lightning_bucketddp.planning.all_reduce_cost import AllReduceCost, Network, share_of_a_link
from lightning_bucketddp.reducer.clock import Clock, clock_of

_THEME = Theme("All-reduce")
_NUM_REPETITIONS = 7
# The next size takes about this many times as long; it is left out if that would take longer than this in all.
_GROWTH = 4
_ENOUGH_S = 12.0
LONGEST_S = 3 * _ENOUGH_S
_SIZES = [1024 * _GROWTH**n for n in range(9)]  # 1 KiB to 64 MiB
_COPIED_BYTES = 64 * MIB
# Below this share of what the hardware should give something is wrong. Sockets and protocols take their part of a
# network; what goes from process to process is copied several times, by cores that also compute sums.
_POOR_SHARE_OF_LINK = 1 / 3
_POOR_SHARE_OF_MEMORY = 1 / 50


def measure(collectives: Collectives, *, progress: Callable[[str], None]) -> dict[str, Any]:
    """All ranks measure together; the medians of this rank, by size."""
    clock = clock_of(collectives.device)
    seconds: dict[int, list[float]] = {}
    started = time.perf_counter()
    for num_bytes in _SIZES:
        progress(f"all-reduce of {_size(num_bytes)} ...")
        seconds[num_bytes] = _times(collectives, clock, num_bytes)
        next_s = _GROWTH * (1 + _NUM_REPETITIONS) * statistics.median(seconds[num_bytes])
        if not collectives.broadcast_json(time.perf_counter() - started + next_s < _ENOUGH_S):
            break
    network = Network.measured(AllReduceCost.fit(seconds), num_ranks=collectives.world_size)
    return {
        "by_size": [
            {
                "bytes": num_bytes,
                "seconds": statistics.median(times),
                "link_bytes_per_s": share_of_a_link(collectives.world_size) * num_bytes / statistics.median(times),
            }
            for num_bytes, times in seconds.items()
        ],
        "hop_seconds": network.hop_s,
        "link_bytes_per_s": network.bytes_per_s,
        "memory_bytes_per_s": _memory_speed(collectives) if collectives.device.type == "cpu" else None,
    }


def judge(ranks: Sequence[Observation], measured: Observation, *, backend: str) -> Iterator[Finding]:
    """What was measured, beside what is known of the hardware."""
    smallest, largest = measured["by_size"][0], measured["by_size"][-1]
    # Small ones may fit into what a network takes at once.
    large = [size for size in measured["by_size"] if size["bytes"] >= MIB] or [largest]
    best = max(size["link_bytes_per_s"] for size in large)
    yield _THEME.ok(
        f"{len(ranks)} ranks, {backend}: {_size(smallest['bytes'])} takes {smallest['seconds'] * 1e6:,.0f} us,"
        f" {_size(largest['bytes'])} takes {largest['seconds'] * 1e3:,.1f} ms; a rank sends up to"
        f" {best / 1e9:.2f} GB/s."
    )
    expected = expectation(ranks, measured, backend=backend)
    if expected["bytes_per_s"] is None:
        yield _THEME.note(f"What it should give is not known: {expected['origin']}.")
        return
    share = best / expected["bytes_per_s"]
    text = f"That is {share:.0%} of {expected['bytes_per_s'] / 1e9:.2f} GB/s: {expected['origin']}."
    if share < expected["poor_share"]:
        yield _THEME.warning(text, expected["remedy"])
    else:
        yield _THEME.ok(text)


def judge_absence() -> Finding:
    """What there is to say if there is one rank."""
    return _THEME.note("One rank alone exchanges nothing.", "Pass `--processes 2` to measure it all the same.")


def expectation(ranks: Sequence[Observation], measured: Observation, *, backend: str) -> dict[str, Any]:
    """What a rank could send at most in each direction, and from where that is known."""
    hosts = one_per_host(ranks)
    if len(hosts) > 1:
        return _of_network(hosts, backend=backend)
    if backend == "NCCL":
        link = ranks[0]["gpus"]["link_bytes_per_s"]
        remedy = "Look at `nvidia-smi topo -m` and at `NCCL_P2P_DISABLE`; `NCCL_DEBUG=INFO` tells which way NCCL goes."
        known = link or {"value": None, "origin": "the driver does not tell what links the GPUs"}
        return _expect(known["value"], known["origin"], _POOR_SHARE_OF_LINK, remedy)
    origin = "what copying within memory gives here, measured with all ranks at once"
    remedy = "See what else computes on this host, and whether each rank has a core of its own."
    return _expect(measured["memory_bytes_per_s"], origin, _POOR_SHARE_OF_MEMORY, remedy)


def _of_network(hosts: Sequence[Observation], *, backend: str) -> dict[str, Any]:
    if backend == "NCCL" and all(observed["network"]["infiniband_gbit"] for observed in hosts):
        gbit = [observed["network"]["infiniband_gbit"] for observed in hosts]
        origin = "the slowest InfiniBand port, says /sys/class/infiniband"
    else:
        names = [
            observed["network"]["settings"].get(f"{backend.upper()}_SOCKET_IFNAME")
            or observed["network"]["towards_main_address"]
            for observed in hosts
        ]
        interfaces = [observed["network"]["interfaces"].get(n) for observed, n in zip(hosts, names, strict=True)]
        gbit = [interface["gbit"] if interface else None for interface in interfaces]
        origin = f"the slowest of {', '.join(sorted({str(n) for n in names}))}, says /sys/class/net"
    if not all(gbit):
        return _expect(None, "the system does not tell the speed of the network that connects the hosts", 0.0, "")
    remedy = "Look at the switch and the cables (`ethtool`), at who else uses the network, and at docs/tuning.md."
    return _expect(min(gbit) * 1e9 / 8, origin, _POOR_SHARE_OF_LINK, remedy)


def _expect(bytes_per_s: float | None, origin: str, poor_share: float, remedy: str) -> dict[str, Any]:
    return {"bytes_per_s": bytes_per_s, "origin": origin, "poor_share": poor_share, "remedy": remedy}


def _times(collectives: Collectives, clock: Clock, num_bytes: int) -> list[float]:
    tensor = torch.zeros(num_bytes // 4, device=collectives.device)
    marks = []
    for _ in range(1 + _NUM_REPETITIONS):
        start = clock.mark()
        collectives.sum(tensor)
        marks.append((start, clock.mark()))
    # The first one waits until all ranks are here.
    return [clock.seconds(start, stop) for start, stop in marks[1:]]


def _memory_speed(collectives: Collectives) -> float:
    source, target = torch.zeros(_COPIED_BYTES // 4), torch.empty(_COPIED_BYTES // 4)
    target.copy_(source)  # the memory is there from now on
    collectives.sum(torch.zeros(1))
    times = []
    for _ in range(_NUM_REPETITIONS):
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    return _COPIED_BYTES / min(times)  # what is possible


def _size(num_bytes: int) -> str:
    return f"{num_bytes // MIB} MiB" if num_bytes >= MIB else f"{num_bytes // 1024} KiB"
