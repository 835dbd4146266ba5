"""A slow network on one machine: runs a command where the loopback interface carries no more than a rate.

    python -m benchmarks.loopback --rate 1gbit python -m benchmarks.wires --device cuda --model gpt2

Two ranks that both send share the interface, so it carries twice the rate: as much as a cable does in both directions.
The command runs in a network namespace of its own and reaches nothing else; that needs no more rights than a user
namespace gives, and `pyroute2` (`pip install 'lightning-bucketddp[bench]'`).
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence

_UNITS = {"mbit": 1e6, "gbit": 1e9}
_INSIDE = "BENCHMARK_LOOPBACK_IS_SLOW"
# A packet of the loopback interface has up to 64 KiB.
_BURST_BYTES = 2**18


def bits_per_s(text: str) -> float:
    """A rate as `tc` takes it."""
    for unit, size in _UNITS.items():
        if text.endswith(unit):
            return float(text.removesuffix(unit)) * size
    raise argparse.ArgumentTypeError(f"not a rate such as 100mbit or 1gbit: {text}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=bits_per_s, required=True, help="of each direction, such as 100mbit or 1gbit")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what runs there")
    args = parser.parse_args(arguments)
    if not args.command:
        parser.error("Nothing to run: give a command.")
    if _INSIDE not in os.environ:
        if shutil.which("unshare") is None:
            parser.error("`unshare` is missing: install util-linux.")
        given = [*(sys.argv[1:] if arguments is None else arguments)]
        again = ["unshare", "--user", "--map-root-user", "--net", sys.executable, "-m", "benchmarks.loopback", *given]
        os.execvpe(again[0], again, {**os.environ, _INSIDE: "1"})
    slow_down(2 * args.rate)
    os.execvp(args.command[0], args.command)


def slow_down(rate: float) -> None:
    """Have the loopback interface of this network namespace carry no more than `rate` bits in a second."""
    from pyroute2 import IPRoute  # only here: nothing else needs it

    with IPRoute() as kernel:
        [index] = kernel.link_lookup(ifname="lo")
        kernel.link("set", index=index, state="up")
        kernel.tc("add", "tbf", index=index, rate=f"{int(rate)}bit", burst=_BURST_BYTES, latency="50ms")


if __name__ == "__main__":
    main()
