"""Tables as pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import Table, is_ddp


def draw(tables: Sequence[Table], file: Path, *, about: str) -> None:
    """A plot below the other for each table."""
    from matplotlib.figure import Figure  # only here: nothing else needs it

    heights = [1.2 + 0.5 * len(table.rows) if table.plot == "bars" else 4.0 for table in tables]
    figure = Figure(figsize=(10, sum(heights) + 0.5), layout="constrained")
    figure.suptitle(about, fontsize="small")
    plots = figure.subplots(len(tables), 1, squeeze=False, height_ratios=heights)[:, 0]
    for plot, table in zip(plots, tables, strict=True):
        plot.set_title(table.title.replace("; ", "\n"), fontsize="small", loc="left")
        (_draw_bars if table.plot == "bars" else _draw_lines)(plot, table)
    figure.savefig(file, format="png", dpi=120)


def _draw_bars(plot: Any, table: Table) -> None:
    colours = ["tab:gray" if is_ddp(name) else "tab:blue" for name in table.rows]
    names = [name.replace("+", "\n+") for name in table.rows]
    bars = plot.barh(names, [row[0] for row in table.rows.values()], color=colours)
    plot.bar_label(bars, fmt="%.3g", padding=3, fontsize="small")
    plot.tick_params(labelsize="small")
    plot.margins(x=0.1)
    plot.invert_yaxis()  # the first row on top
    plot.set_xlabel(table.columns[0])


def _draw_lines(plot: Any, table: Table) -> None:
    at = [float(name) for name in table.rows]
    for index, column in enumerate(table.columns):
        plot.plot(at, [row[index] for row in table.rows.values()], marker="o", label=column)
    plot.set_xscale("log")
    plot.set_yscale("log")
    plot.grid(visible=True, which="both", alpha=0.3)
    plot.legend(fontsize="small")
