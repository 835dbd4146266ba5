"""What the commands have in common: their arguments, and where their results go."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from benchmarks.plot import draw
from benchmarks.ranks import Place, Ranks
from benchmarks.report import Table, about
from benchmarks.variants import Variant


def parser_of(description: str | None, *, ranks: int, repetitions: int | None = None) -> argparse.ArgumentParser:
    """A parser with the arguments that every benchmark has.

    Args:
        description: the docstring of the command.
        ranks: processes, unless the user says otherwise.
        repetitions: the same for rounds; None for what need not be repeated.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="gloo or NCCL (default: cpu)")
    parser.add_argument("--ranks", type=int, default=ranks, help=f"processes (default: {ranks})")
    if repetitions is not None:
        parser.add_argument("--repetitions", type=int, default=repetitions, help=f"rounds (default: {repetitions})")
        parser.add_argument("--seconds", type=float, help="stop after about so many seconds of rounds")
    parser.add_argument("--settle", type=int, metavar="STEPS", help="before all others (default: as many as needed)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers here")
    parser.add_argument("--png", type=_file_of_plot, metavar="FILE", help="also draw them here (needs matplotlib)")
    return parser


def _file_of_plot(text: str) -> Path:
    if find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("needs matplotlib: pip install 'lightning-bucketddp[bench]'")
    return Path(text)


def cap(text: str) -> float | str:
    """A value for `bucket_cap_mb`: a number, or the name of a way to find one."""
    try:
        return float(text)
    except ValueError:
        return text


def place_of(arguments: argparse.Namespace) -> Place:
    """Where the user wants the ranks to run."""
    return Place(device=arguments.device, num_ranks=arguments.ranks)


def turns_of(ranks: Ranks, variants: Iterable[Variant], method: str = "turn") -> dict[str, Callable[[], float]]:
    """What each of `variants` does when it is its turn, by name."""
    return {variant.name: partial(ranks.slowest, method, variant.name) for variant in variants}


def write(tables: Sequence[Table], arguments: argparse.Namespace, *, place: str) -> None:
    """Write what `--json` and `--png` ask for. The tables have been printed, each when it was ready."""
    if arguments.json is not None:
        settings = {name: value for name, value in vars(arguments).items() if name not in ("json", "png")}
        found = {"about": about(place), "settings": settings, "tables": [asdict(table) for table in tables]}
        arguments.json.write_text(json.dumps(found, indent=1, default=str))
    if arguments.png is not None:
        draw(tables, arguments.png, about=about(place))
