"""Whether ranks can listen where the others look for them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any

from lightning_bucketddp.commands.doctor.finding import Finding, Observation, Theme, on, one_per_host

_THEME = Theme("Ports")


def observe(*, checks_main_port: bool) -> dict[str, Any]:
    """Try to listen. At the main port only where nobody does yet: ranks that were launched have met there."""
    chosen = os.environ.get("MASTER_PORT") if checks_main_port else None
    return {
        "free_port": _try("0"),
        "main_port": chosen,
        "at_main_port": None if chosen is None else _try(chosen),
    }


def judge(ranks: Sequence[Observation]) -> Iterator[Finding]:
    """On each host."""
    for observed in one_per_host(ranks):
        seen, where = observed["ports"], on(observed, ranks)
        if seen["free_port"] is None:
            yield _THEME.ok(f"Processes can listen at ports that the system chooses{where}.")
        else:
            yield _THEME.error(
                f"Processes cannot listen at any port{where}: {seen['free_port']}.",
                "Look at the rules of the container or sandbox.",
            )
        if seen["main_port"] is None:
            continue
        if seen["at_main_port"] is None:
            yield _THEME.ok(f"MASTER_PORT={seen['main_port']}{where} is free.")
        else:
            yield _THEME.error(
                f"Rank 0 cannot listen at MASTER_PORT={seen['main_port']}{where}: {seen['at_main_port']}.",
                "Set it to a free port, the same for all ranks; for a run on this host alone leave it unset.",
            )


def _try(port: str) -> str | None:
    """Why it is impossible to listen at `port`."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        socket.create_server(("", int(port)), family=family, dualstack_ipv6=both).close()
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)
    except (ValueError, OverflowError):
        return "that is no port"
    return None
