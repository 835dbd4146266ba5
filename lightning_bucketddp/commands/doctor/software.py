"""Which versions are installed, and whether all ranks have the same."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist

from lightning_bucketddp import __version__
from lightning_bucketddp.commands.doctor.finding import Finding, Observation, Theme, ranks_by
from lightning_bucketddp.wording import list_some_ranks

_THEME = Theme("Software")
# Ranks talk to each other in the formats of these; what else differs may still train.
_MUST_BE_EQUAL = ("torch", "NCCL", "lightning", "pytorch-lightning", "lightning-bucketddp")
_LIGHTNING = ("lightning", "pytorch-lightning")


def observe() -> dict[str, Any]:
    """The versions of what trains here."""
    versions = {"Python": platform.python_version(), "torch": torch.__version__, "lightning-bucketddp": __version__}
    for name in _LIGHTNING:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    has_nccl = dist.is_available() and dist.is_nccl_available()
    if has_nccl and torch.cuda.is_available():
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {
        "versions": versions,
        "cuda": torch.version.cuda,
        "backends": [name for name, there in (("gloo", dist.is_gloo_available()), ("nccl", has_nccl)) if there],
    }


def judge(ranks: Sequence[Observation]) -> Iterator[Finding]:
    """What is there on rank 0, and what others have instead."""
    first = ranks[0]["software"]
    yield _THEME.ok(", ".join(f"{name} {number}" for name, number in first["versions"].items()) + ".")
    yield from _judge_backends(first)
    if not any(name in first["versions"] for name in _LIGHTNING):
        yield _THEME.error("Neither `lightning` nor `pytorch_lightning` is installed.", "Run `pip install lightning`.")
    names = dict.fromkeys(name for observed in ranks for name in observed["software"]["versions"])
    different = [name for name in names if len(_ranks_by_version(ranks, name)) > 1]
    for name in different:
        by_version = _ranks_by_version(ranks, name)
        what = "; ".join(f"{number or 'none'} on {list_some_ranks(of)}" for number, of in by_version.items())
        make = _THEME.error if name in _MUST_BE_EQUAL else _THEME.warning
        yield make(f"Ranks have different versions of {name}: {what}.", "Install the same environment on every host.")
    if len(ranks) > 1 and not different:
        yield _THEME.ok(f"All {len(ranks)} ranks have the same versions.")


def _judge_backends(software: Observation) -> Iterator[Finding]:
    if "gloo" not in software["backends"]:
        yield _THEME.error("This torch has no gloo, which ranks need to start.", "Install torch from pytorch.org.")
        return
    built_for = f"CUDA {software['cuda']}" if software["cuda"] else "CPUs only"
    yield _THEME.ok(f"Backends: {', '.join(software['backends'])}; torch is built for {built_for}.")


def _ranks_by_version(ranks: Sequence[Observation], name: str) -> dict[str | None, list[int]]:
    return ranks_by(ranks, lambda observed: observed["software"]["versions"].get(name))
