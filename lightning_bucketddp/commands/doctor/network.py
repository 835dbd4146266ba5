"""Checks between ranks: interfaces and their settings, ports, clocks, and the time of all-reduces."""

from __future__ import annotations

import os
import socket
import statistics
import time
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.connections import SETTINGS, interface_towards, nccl_settings, uses_sockets_untuned
from lightning_bucketddp.commands.doctor.finding import (
    Finding,
    Observation,
    differences,
    error,
    note,
    ok,
    one_per_host,
    warning,
)
from lightning_bucketddp.config import MIB
from lightning_bucketddp.planning.cost import AllReduceCost, Network, share_of_a_link
from lightning_bucketddp.planning.optimal_plan import best_dtype
from lightning_bucketddp.reducer.observer import clock_of

_DEVICES = Path("/sys/class")
# By name: the value that costs speed, and its effect.
_SLOW_SETTINGS = {
    "NCCL_P2P_DISABLE": ("1", "GPUs of one host do not exchange directly"),
    "NCCL_SHM_DISABLE": ("1", "ranks of one host talk through the network"),
    "NCCL_IB_DISABLE": ("1", "InfiniBand is not used"),
    "NCCL_DEBUG": ("TRACE", "NCCL writes down each call"),
}

_NUM_REPETITIONS = 7
# Each size takes up to this many times as long as the one before; a size that would exceed the time limit is left out.
_GROWTH = 4
_ENOUGH_S = 12.0
LONGEST_S = 3 * _ENOUGH_S
_SIZES = [1024 * _GROWTH**n for n in range(9)]  # 1 KiB to 64 MiB
LARGEST_BYTES = _SIZES[-1]


def observe_network(*, main_address: str) -> dict[str, Any]:
    settings = nccl_settings(os.environ)
    others = {name: value for name, value in os.environ.items() if name.startswith(("GLOO_", "TORCH_NCCL_"))}
    rates = []
    for port in (_DEVICES / "infiniband").glob("*/ports/*"):
        with suppress(OSError, ValueError):
            if "ACTIVE" in (port / "state").read_text():
                rates.append(float((port / "rate").read_text().split()[0]))
    return {
        "interfaces": {path.name: _describe_interface(path) for path in sorted((_DEVICES / "net").glob("*"))},
        "infiniband_gbit": min(rates, default=None),  # of the slowest active port
        "towards_main_address": interface_towards(main_address),
        "settings": settings | others,
        "uses_sockets_untuned": uses_sockets_untuned(settings),
    }


def judge_network(ranks: Sequence[Observation]) -> Iterator[Finding]:
    hosts = one_per_host(ranks)
    for observed in hosts:
        yield from _judge_host(observed, is_alone=len(hosts) == 1)
    settings = {observed["rank"]: observed["network"]["settings"] for observed in ranks}
    for name, what in sorted(differences(settings, absent="unset").items()):
        if not name.endswith(("_IFNAME", "_HOSTID")):  # these belong to a host
            yield warning(f"{name} differs: {what}.", "Set it in the same way on every host.")
    names = sorted({name for of_rank in settings.values() for name in of_rank})
    if names:
        mine = ranks[0]["network"]["settings"]
        described = ", ".join(f"{name}={mine.get(name, '(not on rank 0)')}" for name in names)
        yield note(f"Settings in the environment: {described}.")
    is_untuned = all(observed["network"]["uses_sockets_untuned"] for observed in ranks)
    if len(hosts) > 1 and is_untuned and all(observed["gpus"]["devices"] for observed in hosts):
        tuned = " ".join(f"{name}={value}" for name, value in SETTINGS.items())
        yield note(f"NCCL goes through sockets here, so `bucketddp` sets {tuned} in training and did so now.")


def _judge_host(observed: Observation, *, is_alone: bool) -> Iterator[Finding]:
    network, where = observed["network"], observed["where"]
    up = {name: i["gbit"] for name, i in network["interfaces"].items() if i["is_up"] and name != "lo"}
    described = [f"{name} ({f'{gbit:g} Gbit/s' if gbit else 'speed not known'})" for name, gbit in up.items()]
    yield ok(f"Interfaces that are up{where}: {', '.join(described) or 'none but loopback'}.")
    if network["infiniband_gbit"]:
        yield ok(f"InfiniBand or RoCE{where}: {network['infiniband_gbit']:g} Gbit/s.")
    settings, interfaces = network["settings"], network["interfaces"]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        # gloo takes a name; NCCL takes prefixes, or `=` and names, or `^` and exclusions.
        chosen = settings.get(variable, "^")
        if chosen.startswith("^"):
            continue
        exact = variable.startswith("GLOO") or chosen.startswith("=")
        wanted = chosen.lstrip("=").split(",")
        found = [name for name in interfaces if any(name == w if exact else name.startswith(w) for w in wanted)]
        if found:
            yield ok(f"{variable}={chosen}{where}: {', '.join(found)}.")
        else:
            remedy = f"Set it to one of {', '.join(interfaces)}, or unset it."
            yield error(f"{variable}={chosen}{where}, but there is no such interface.", remedy)
    if "GLOO_SOCKET_IFNAME" not in settings:
        towards = network["towards_main_address"]
        if towards is None and not is_alone:
            yield warning(
                f"It cannot be told through which interface{where} the other hosts are reached.",
                "Set `GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME` to its name.",
            )
        way = f"gloo uses {towards}, the way to the main address" if towards else "all ranks talk within this host"
        yield ok(f"Between ranks{where}: {way}.")
    for name, (value, consequence) in _SLOW_SETTINGS.items():
        matters = name != "NCCL_IB_DISABLE" or network["infiniband_gbit"]
        if settings.get(name, "").upper() == value and matters:
            yield warning(f"{name}={settings[name]}{where}: {consequence}.", f"Unset `{name}` for a long run.")


def _describe_interface(interface: Path) -> dict[str, Any]:
    speed = 0
    is_up = interface.name == "lo"
    with suppress(OSError, ValueError):
        is_up = is_up or (interface / "operstate").read_text().strip() == "up"
    with suppress(OSError, ValueError):  # virtual interfaces have no speed
        speed = int((interface / "speed").read_text())
    return {"is_up": is_up, "gbit": speed / 1e3 if speed > 0 else None}


def observe_ports(*, checks_main_port: bool) -> dict[str, Any]:
    """Try to listen at a port; at the main port only if asked, since launched ranks use it already."""
    chosen = os.environ.get("MASTER_PORT") if checks_main_port else None
    return {
        "free_port": _why_not_listen("0"),
        "main_port": chosen,
        "at_main_port": None if chosen is None else _why_not_listen(chosen),
    }


def judge_ports(ranks: Sequence[Observation]) -> Iterator[Finding]:
    for observed in one_per_host(ranks):
        seen, where = observed["ports"], observed["where"]
        if seen["free_port"] is None:
            yield ok(f"Processes can listen at ports that the system chooses{where}.")
        else:
            yield error(
                f"Processes cannot listen at any port{where}: {seen['free_port']}.",
                "Look at the rules of the container or sandbox.",
            )
        if seen["main_port"] is None:
            continue
        if seen["at_main_port"] is None:
            yield ok(f"MASTER_PORT={seen['main_port']}{where} is free.")
        else:
            yield error(
                f"Rank 0 cannot listen at MASTER_PORT={seen['main_port']}{where}: {seen['at_main_port']}.",
                "Set it to a free port, the same for all ranks; for a run on this host alone leave it unset.",
            )


def _why_not_listen(port: str) -> str | None:
    """Return why a process cannot listen at `port`, or None if it can."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        socket.create_server(("", int(port)), family=family, dualstack_ipv6=both).close()
    except OSError as refused:
        return os.strerror(refused.errno) if refused.errno else str(refused)
    except (ValueError, OverflowError):
        return "that is no port"
    return None


def measure_clocks(hosts: Collectives) -> list[float]:
    """Return how many seconds each rank's clock is ahead of rank 0's. Collective."""
    times = []
    for _ in range(5):
        hosts.sum(torch.zeros(1))  # ends at nearly the same moment on all ranks
        times.append(time.time())
    by_rank = hosts.gather_json(times)
    return [statistics.median(t - t0 for t, t0 in zip(own, by_rank[0], strict=True)) for own in by_rank]


def judge_clocks(ranks: Sequence[Observation], ahead_s: Sequence[float]) -> Iterator[Finding]:
    hosts = one_per_host(ranks)
    if len(hosts) == 1:
        return
    worst = max(hosts, key=lambda observed: abs(ahead_s[observed["rank"]]))
    name, difference = worst["hostname"], ahead_s[worst["rank"]]
    if abs(difference) < 1:
        yield ok(f"The clocks of {len(hosts)} hosts are at most {abs(difference) * 1e3:.0f} ms from rank 0's.")
    else:
        way = "ahead of" if difference > 0 else "behind"
        yield warning(
            f"The clock of {name} is {abs(difference):.1f} s {way} rank 0's: logs and files get times that mislead.",
            "Let a time service run on every host (`timedatectl set-ntp true`).",
        )


def measure_all_reduce(collectives: Collectives, *, progress: Callable[[str], None]) -> dict[str, Any]:
    """Return the median time of an all-reduce on this rank, by size. Collective."""
    clock = clock_of(collectives.device)
    seconds: dict[int, list[float]] = {}
    started = time.perf_counter()
    for num_bytes in _SIZES:
        progress(f"all-reduce of {size_in_words(num_bytes)} ...")
        tensor = torch.zeros(num_bytes // 4, device=collectives.device)
        seconds[num_bytes] = clock.times(partial(collectives.sum, tensor), number=_NUM_REPETITIONS)
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


def judge_all_reduce(ranks: Sequence[Observation], measured: Observation | None, *, backend: str) -> Iterator[Finding]:
    """Compare the measured all-reduces, if there are several ranks, with the nominal speed of the hardware."""
    if measured is None:
        yield note("One rank alone exchanges nothing.", "Pass `--processes 2` to measure it all the same.")
        return
    smallest, largest = measured["by_size"][0], measured["by_size"][-1]
    # Small messages may fit into the buffers of a network and look too fast.
    large = [size for size in measured["by_size"] if size["bytes"] >= MIB] or [largest]
    best = max(size["link_bytes_per_s"] for size in large)
    yield ok(
        f"{len(ranks)} ranks, {backend}: {size_in_words(smallest['bytes'])} takes {smallest['seconds'] * 1e6:,.0f} us,"
        f" {size_in_words(largest['bytes'])} takes {largest['seconds'] * 1e3:,.1f} ms; a rank sends up to"
        f" {best / 1e9:.2f} GB/s."
    )
    expected = expect_all_reduce(ranks, measured, backend=backend)
    if expected["bytes_per_s"] is None:
        yield note(f"What it should give is not known: {expected['origin']}.")
        return
    share = best / expected["bytes_per_s"]
    text = f"That is {share:.0%} of {expected['bytes_per_s'] / 1e9:.2f} GB/s: {expected['origin']}."
    if share < expected["poor_share"]:
        yield warning(text, expected["remedy"])
    else:
        yield ok(text)


def expect_all_reduce(ranks: Sequence[Observation], measured: Observation, *, backend: str) -> dict[str, Any]:
    """Return the speed that a rank could reach in each direction, its origin, and the share of it that is too little.

    Sockets and protocols take their share of a network; within a host data is copied several times, by cores that also
    compute the sums.
    """
    hosts = one_per_host(ranks)
    poor_share = 1 / 3
    if len(hosts) > 1:
        speed, origin = _speed_between(hosts, backend=backend)
        remedy = "Look at the switch and the cables (`ethtool`), at who else uses the network, and at docs/faster.md."
    elif backend == "NCCL":
        link = ranks[0]["gpus"]["link_bytes_per_s"]
        known = link or {"value": None, "origin": "the driver does not tell what links the GPUs"}
        speed, origin = known["value"], known["origin"]
        remedy = "Look at `nvidia-smi topo -m` and at `NCCL_P2P_DISABLE`; `NCCL_DEBUG=INFO` tells which way NCCL goes."
    else:
        speed, poor_share = measured["memory_bytes_per_s"], 1 / 50
        origin = "what copying within memory gives here, measured with all ranks at once"
        remedy = "See what else computes on this host, and whether each rank has a core of its own."
    return {"bytes_per_s": speed, "origin": origin, "poor_share": poor_share, "remedy": remedy}


def _speed_between(hosts: Sequence[Observation], *, backend: str) -> tuple[float | None, str]:
    """Return the bytes per second of the slowest link between hosts, None if not known, and who reports them."""
    if backend == "NCCL" and all(observed["network"]["infiniband_gbit"] for observed in hosts):
        gbit = [observed["network"]["infiniband_gbit"] for observed in hosts]
        origin = "the slowest InfiniBand port, says /sys/class/infiniband"
    else:
        names = [
            observed["network"]["settings"].get(f"{backend.upper()}_SOCKET_IFNAME")
            or observed["network"]["towards_main_address"]
            for observed in hosts
        ]
        gbit = [o["network"]["interfaces"].get(name, {}).get("gbit") for o, name in zip(hosts, names, strict=True)]
        origin = f"the slowest of {', '.join(sorted({str(n) for n in names}))}, says /sys/class/net"
    if not all(gbit):
        return None, "the system does not tell the speed of the network that connects the hosts"
    return min(gbit) * 1e9 / 8, origin


def _memory_speed(collectives: Collectives) -> float:
    source, target = torch.zeros(16 * MIB), torch.empty(16 * MIB)
    target.copy_(source)  # so that the memory is mapped
    collectives.sum(torch.zeros(1))
    times = timeit.repeat(lambda: target.copy_(source), number=1, repeat=_NUM_REPETITIONS)
    return source.nbytes / min(times)


def size_in_words(num_bytes: int) -> str:
    return f"{num_bytes // MIB} MiB" if num_bytes >= MIB else f"{num_bytes // 1024} KiB"


def judge_wires(wires: Mapping[str, AllReduceCost]) -> Iterator[Finding]:
    """Advise on the dtype in which gradients should travel between these ranks, whatever the model."""
    num_parameters = 100_000_000
    seconds = {name: cost.seconds(4 * num_parameters) for name, cost in wires.items()}
    ms = {name: f"{1e3 * taken:,.0f} ms" for name, taken in seconds.items()}
    text = (
        f"Gradients of {num_parameters // 10**6} million parameters take {ms['fp32']} as fp32, {ms['bf16']} as bf16 and"
        f" {ms['int8']} as int8; with `local_steps=30` a step's share is {1e3 * seconds['fp32'] / 30:,.0f} ms."
    )
    best = best_dtype(seconds)
    versus = f"takes {seconds['int8'] / seconds[best]:.2g}x as long as {best}"
    if best == "fp32":
        yield note(
            text, f"Do not set `reduce_dtype` here: int8 {versus}, and bf16 {seconds['bf16'] / seconds[best]:.2g}x."
        )
        return
    before = min(("fp32", "bf16") if best == "int8" else ("fp32",), key=lambda name: seconds[name])
    rest = f"If far less than {ms[best]}, set `local_steps`." if best == "int8" else f"Not int8, which {versus}."
    remedy = (
        f"A longer backward hides it. If yours takes less than {ms[before]} for as many parameters, set"
        f' `reduce_dtype="{best}"`. {rest} `bucketddp plan` tells for your model.'
    )
    yield note(text, remedy)
