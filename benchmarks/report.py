"""What a benchmark has found."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from benchmarks.variants import ALONE

SPEED_UP = "speed-up over best ddp"


@dataclass(frozen=True)
class Table:
    """Numbers by row and column.

    Attributes:
        title: what was measured, and where.
        columns: names with units.
        rows: values by row, one for each column; nan where there is none.
        plot: `bars`: a bar for each row, of the first column. `lines`: a line for each column, over the rows' names,
            which must be numbers.
        samples: what the first column is the median of, by row.
    """

    title: str
    columns: Sequence[str]
    rows: Mapping[str, Sequence[float]]
    plot: Literal["bars", "lines"] = "bars"
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def __str__(self) -> str:
        first = max(len(name) for name in self.rows) + 2
        widths = [max(len(column) + 2, 9) for column in self.columns]
        header = " " * first + "".join(f"{column:>{width}}" for column, width in zip(self.columns, widths, strict=True))
        lines = [
            f"{name:<{first}}" + "".join(f"{_shown(value):>{width}}" for value, width in zip(row, widths, strict=True))
            for name, row in self.rows.items()
        ]
        return "\n".join([self.title, "", header, *lines, ""])


def table_of(title: str, samples: Mapping[str, Sequence[float]], *, unit: str, scale: float = 1.0) -> Table:
    """Medians and how far samples are apart, against the best torch DDP variant and against no communication."""
    scaled = {name: [value * scale for value in values] for name, values in samples.items()}
    medians = {name: statistics.median(values) for name, values in scaled.items()}
    best, alone = best_ddp(medians), medians.get(ALONE.name, float("nan"))
    rows = {
        name: [median, min(scaled[name]), max(scaled[name]), best / median, median / alone]
        for name, median in medians.items()
    }
    columns = [f"median {unit}", "min", "max", SPEED_UP, "x no communication"]
    return Table(title, columns, rows, samples=scaled)


def best_ddp(values: Mapping[str, float]) -> float:
    """The smallest value of the torch DDP variants; nan if there is none."""
    return min((value for name, value in values.items() if is_ddp(name)), default=float("nan"))


def is_ddp(name: str) -> bool:
    """Whether the variant of this name is torch DDP."""
    return name.split(" ")[0] == "ddp"


def about(place: str) -> str:
    """The versions and the hardware of a run, in one line."""
    hardware = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} cores"
    return f"torch {torch.__version__}, {platform.machine()}, {hardware}, {place}"


def _shown(value: float) -> str:
    return "" if value != value else f"{value:.2f}" if abs(value) < 1000 else f"{value:.0f}"
