"""The GPUs, and what links them."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch

from lightning_bucketddp.commands.doctor.finding import Finding, Observation, Theme, on, one_per_host
from lightning_bucketddp.config import MIB

_THEME = Theme("GPUs")
_PROGRAM = "nvidia-smi"
_TIMEOUT_S = 15
# Somebody else computes on a GPU of which so little is free before training.
_FREE_SHARE = 0.8
# What one lane carries in each direction, by generation of PCI Express, after encoding: from its specifications.
_PCIE_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}


def observe() -> dict[str, Any]:
    """What torch and the driver say of the GPUs of this host."""
    is_usable = torch.cuda.is_available()
    count = torch.cuda.device_count() if is_usable else 0
    return {
        "devices": [_describe(index) for index in range(count)],
        "seen_by_driver": [line for line in _ask("--query-gpu=name", "--format=csv,noheader").splitlines() if line],
        "without_peer_access": [
            [a, b] for a in range(count) for b in range(a) if not torch.cuda.can_device_access_peer(a, b)
        ],
        "topology": _ask("topo", "-m") if count > 1 else "",
        "link_bytes_per_s": _link_speed() if count > 1 else None,
    }


def judge(ranks: Sequence[Observation]) -> Iterator[Finding]:
    """On each host: are they usable, alike, free and linked."""
    for observed in one_per_host(ranks):
        seen, where = observed["gpus"], on(observed, ranks)
        if not seen["devices"]:
            yield _judge_absence(seen, where)
            continue
        names = [device["name"] for device in seen["devices"]]
        counted = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        yield _THEME.ok(f"{counted}{where}.")
        yield from _judge_memory(seen, where)
        yield from _judge_links(seen, where)
    names_by_host = [{d["name"] for d in observed["gpus"]["devices"]} for observed in one_per_host(ranks)]
    if len(set().union(*names_by_host)) > 1:
        yield _THEME.warning("GPUs differ, and every step waits for the slowest.", "Use one kind of GPU for a run.")


def _judge_absence(seen: Observation, where: str) -> Finding:
    if seen["seen_by_driver"]:
        return _THEME.error(
            f"The driver sees {len(seen['seen_by_driver'])} GPUs{where}, but torch cannot use them.",
            "Install a torch that is built for CUDA and for this driver; look at `CUDA_VISIBLE_DEVICES`.",
        )
    return _THEME.note(f"There is no GPU{where}: ranks train on CPUs and talk through gloo.")


def _judge_memory(seen: Observation, where: str) -> Iterator[Finding]:
    for index, device in enumerate(seen["devices"]):
        if device["free_mib"] < _FREE_SHARE * device["total_mib"]:
            yield _THEME.warning(
                f"Of GPU {index}{where} only {device['free_mib'] / 1024:.1f} of {device['total_mib'] / 1024:.1f} GiB"
                " are free.",
                "See in `nvidia-smi` which other process computes there.",
            )


def _judge_links(seen: Observation, where: str) -> Iterator[Finding]:
    if len(seen["devices"]) < 2:
        return
    if seen["without_peer_access"]:
        pairs = ", ".join(f"{b}-{a}" for a, b in seen["without_peer_access"])
        yield _THEME.warning(
            f"GPUs{where} do not reach each other directly (pairs {pairs}): what they exchange goes through the host.",
            "Look at `nvidia-smi topo -m`; in virtual machines and with some BIOS settings (ACS) it is switched off.",
        )
    else:
        yield _THEME.ok(f"All GPUs{where} reach each other directly.")


def _describe(index: int) -> dict[str, Any]:
    free, total = torch.cuda.mem_get_info(index)
    return {"name": torch.cuda.get_device_name(index), "free_mib": free // MIB, "total_mib": total // MIB}


def _link_speed() -> dict[str, Any] | None:
    """What a GPU's link carries in each direction, in bytes per second, and where that is known from."""
    status = _ask("nvlink", "--status", "-i", "0")
    links = [float(speed) for speed in re.findall(r"Link \d+: ([\d.]+) GB/s", status)]
    if links:
        return {
            "value": sum(links) * 1e9,
            "origin": f"{len(links)} NVLinks of GPU 0, says `{_PROGRAM} nvlink --status`",
        }
    fields = _ask("--query-gpu=pcie.link.gen.max,pcie.link.width.max", "--format=csv,noheader", "-i", "0")
    with suppress(ValueError, KeyError):
        generation, width = (int(field) for field in fields.split(","))
        origin = f"PCI Express {generation} x{width} of GPU 0, says `{_PROGRAM}`"
        return {"value": width * _PCIE_LANE_BYTES_PER_S[generation], "origin": origin}
    return None


def _ask(*arguments: str) -> str:
    """What the driver's program answers; nothing, if there is none or it does not answer."""
    if shutil.which(_PROGRAM) is None:
        return ""
    with suppress(OSError, subprocess.TimeoutExpired):
        command = [_PROGRAM, *arguments]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        return answer.stdout if answer.returncode == 0 else ""
    return ""
