"""The networks of a host, which of them ranks will use, and what is set about that."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_bucketddp.comm.gloo_interface import interface_towards
from lightning_bucketddp.comm.nccl_sockets import SETTINGS, nccl_settings, uses_sockets_untuned
from lightning_bucketddp.commands.doctor.finding import Finding, Observation, Theme, on, one_per_host, ranks_by
from lightning_bucketddp.wording import list_some_ranks

_THEME = Theme("Network")
_ROOT = Path("/sys/class")
# Settings that may well differ between hosts.
_OF_A_HOST = ("_IFNAME", "_HOSTID")
_PREFIXES = ("GLOO_", "TORCH_NCCL_")
# By name: the value that costs speed, and what it does.
_SLOW_SETTINGS = {
    "NCCL_P2P_DISABLE": ("1", "GPUs of one host do not exchange directly"),
    "NCCL_SHM_DISABLE": ("1", "ranks of one host talk through the network"),
    "NCCL_IB_DISABLE": ("1", "InfiniBand is not used"),
    "NCCL_DEBUG": ("TRACE", "NCCL writes down each call"),
}


def observe(*, main_address: str) -> dict[str, Any]:
    """The interfaces of this host, and the settings of this rank."""
    settings = nccl_settings(os.environ)
    return {
        "interfaces": {path.name: _describe(path) for path in sorted((_ROOT / "net").glob("*"))},
        "infiniband_gbit": _infiniband_gbit(),
        "towards_main_address": interface_towards(main_address),
        "settings": settings | {name: value for name, value in os.environ.items() if name.startswith(_PREFIXES)},
        "uses_sockets_untuned": uses_sockets_untuned(settings),
    }


def judge(ranks: Sequence[Observation]) -> Iterator[Finding]:
    """What will be used, and whether what is set makes sense."""
    hosts = one_per_host(ranks)
    for observed in hosts:
        yield from _judge_host(observed, where=on(observed, ranks), is_alone=len(hosts) == 1)
    yield from _judge_equality(ranks)
    is_untuned = all(observed["network"]["uses_sockets_untuned"] for observed in ranks)
    if len(hosts) > 1 and is_untuned and all(observed["gpus"]["devices"] for observed in hosts):
        settings = " ".join(f"{name}={value}" for name, value in SETTINGS.items())
        yield _THEME.note(f"NCCL goes through sockets here, so `bucketddp` sets {settings} in training and did so now.")


def _judge_host(observed: Observation, *, where: str, is_alone: bool) -> Iterator[Finding]:
    network = observed["network"]
    up = {name: i for name, i in network["interfaces"].items() if i["is_up"]}
    described = [f"{name} ({_speed(interface)})" for name, interface in up.items() if name != "lo"]
    yield _THEME.ok(f"Interfaces that are up{where}: {', '.join(described) or 'none but loopback'}.")
    if network["infiniband_gbit"]:
        yield _THEME.ok(f"InfiniBand or RoCE{where}: {network['infiniband_gbit']:g} Gbit/s.")
    settings = network["settings"]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        yield from _judge_chosen_interface(variable, settings.get(variable), network["interfaces"], where)
    if "GLOO_SOCKET_IFNAME" not in settings:
        towards = network["towards_main_address"]
        if towards is None and not is_alone:
            yield _THEME.warning(
                f"It cannot be told through which interface{where} the other hosts are reached.",
                "Set `GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME` to its name.",
            )
        way = f"gloo uses {towards}, the way to the main address" if towards else "all ranks talk within this host"
        yield _THEME.ok(f"Between ranks{where}: {way}.")
    for name, (value, consequence) in _SLOW_SETTINGS.items():
        matters = name != "NCCL_IB_DISABLE" or network["infiniband_gbit"]
        if settings.get(name, "").upper() == value and matters:
            yield _THEME.warning(f"{name}={settings[name]}{where}: {consequence}.", f"Unset `{name}` for a long run.")


def _judge_chosen_interface(
    variable: str, chosen: str | None, interfaces: Mapping[str, Any], where: str
) -> Iterator[Finding]:
    """gloo wants one name; NCCL takes a list of beginnings, or `=` and names, or `^` and what to leave out."""
    if chosen is None or chosen.startswith("^"):
        return
    exact = variable.startswith("GLOO") or chosen.startswith("=")
    wanted = chosen.lstrip("=").split(",")
    found = [name for name in interfaces if any(name == w if exact else name.startswith(w) for w in wanted)]
    if found:
        yield _THEME.ok(f"{variable}={chosen}{where}: {', '.join(found)}.")
    else:
        yield _THEME.error(
            f"{variable}={chosen}{where}, but there is no such interface.",
            f"Set it to one of {', '.join(interfaces)}, or unset it.",
        )


def _judge_equality(ranks: Sequence[Observation]) -> Iterator[Finding]:
    names = sorted({name for observed in ranks for name in observed["network"]["settings"]})
    for name in names:
        by_value = ranks_by(ranks, lambda observed: observed["network"]["settings"].get(name))  # noqa: B023
        if len(by_value) > 1 and not name.endswith(_OF_A_HOST):
            what = "; ".join(f"{value or 'unset'} on {list_some_ranks(of)}" for value, of in by_value.items())
            yield _THEME.warning(f"{name} differs: {what}.", "Set it in the same way on every host.")
    if names:
        mine = ranks[0]["network"]["settings"]
        yield _THEME.note(
            "Settings in the environment: "
            + ", ".join(f"{name}={mine.get(name, '(not on rank 0)')}" for name in names)
            + "."
        )


def _describe(interface: Path) -> dict[str, Any]:
    speed = 0
    is_up = interface.name == "lo"
    with suppress(OSError, ValueError):
        is_up = is_up or (interface / "operstate").read_text().strip() == "up"
    with suppress(OSError, ValueError):  # virtual ones do not know
        speed = int((interface / "speed").read_text())
    return {"is_up": is_up, "gbit": speed / 1e3 if speed > 0 else None}


def _speed(interface: Observation) -> str:
    return f"{interface['gbit']:g} Gbit/s" if interface["gbit"] else "speed not known"


def _infiniband_gbit() -> float | None:
    """The slowest port that is active."""
    rates = []
    for port in (_ROOT / "infiniband").glob("*/ports/*"):
        with suppress(OSError, ValueError):
            if "ACTIVE" in (port / "state").read_text():
                rates.append(float((port / "rate").read_text().split()[0]))
    return min(rates, default=None)
