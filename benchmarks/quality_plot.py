"""Pictures of what trainings have come to, for the documents."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from benchmarks.quality_results import Result, by_seed
from benchmarks.quality_tasks import TASKS
from benchmarks.quality_training import LOCAL_STEPS, PLAIN, WIRES, local

# Okabe and Ito's colours, which everybody can tell apart; lines and markers differ, too.
_BLACK, _ORANGE, _BLUE, _GREEN, _RED = "#000000", "#E69F00", "#0072B2", "#009E73", "#D55E00"
_STYLES: dict[str, dict[str, Any]] = {
    PLAIN: {"color": _BLACK, "linestyle": "-", "marker": "o"},
    "bf16": {"color": _ORANGE, "linestyle": "--", "marker": "s"},
    "int8": {"color": _BLUE, "linestyle": ":", "marker": "^"},
    local(10): {"color": _GREEN, "linestyle": "--", "marker": "s"},
    local(30): {"color": _BLUE, "linestyle": "-.", "marker": "^"},
    local(100): {"color": _RED, "linestyle": ":", "marker": "D"},
}
_RANK_STYLES: dict[int, dict[str, Any]] = {
    2: {"color": _BLUE, "linestyle": "-", "marker": "o"},
    4: {"color": _ORANGE, "linestyle": "--", "marker": "s"},
    8: {"color": _GREEN, "linestyle": ":", "marker": "^"},
}
_TITLES = {"digits": "digits, small CNN", "chars": "characters, small GPT", "images": "images, small ResNet"}
# Shown 700 pixels wide, and sharp on screens that have twice as many.
_WIDTH_INCHES, _DPI = 7.0, 200
_LABELS = {PLAIN: "exchange in every step", **{local(number): f"every {number} steps" for number in LOCAL_STEPS}}


def draw(results: Sequence[Result], folder: Path) -> None:
    """Draw wires, curves by local steps, and final scores by local steps, each in a file of `folder`."""
    _save(_wires(results), folder / "quality-wires.png")
    _save(_local_curves(results), folder / "quality-local-steps-curves.png")
    _save(_local_scores(results), folder / "quality-local-steps.png")


def _figure(height: float, num_rows: int) -> tuple[Figure, Any]:
    figure = Figure(figsize=(_WIDTH_INCHES, height), layout="constrained")
    plots = figure.subplots(num_rows, len(TASKS), squeeze=False)
    for row in plots:
        for plot in row:
            plot.tick_params(labelsize=7)
            plot.grid(visible=True, alpha=0.3, linewidth=0.5)
            plot.spines[["top", "right"]].set_visible(False)
    for plot, task in zip(plots[0], TASKS, strict=True):
        plot.set_title(_TITLES[task], fontsize=9)
    return figure, plots


def _save(figure: Figure, file: Path) -> None:
    # Without a date and versions: the same results make the same file.
    figure.savefig(file, format="png", dpi=_DPI, metadata={"Software": None})


def _wires(results: Sequence[Result]) -> Figure:
    figure, plots = _figure(4.2, 2)
    for column, task in enumerate(TASKS):
        _draw_curves(plots[0][column], results, task, WIRES, num_ranks=2)
        below = plots[1][column]
        for position, wire in enumerate(WIRES):
            _draw_seeds(below, position, [result.score for result in by_seed(results, task, wire, 2)], _STYLES[wire])
        below.set_xticks(range(len(WIRES)), WIRES, fontsize=8)
        below.set_xlim(-0.5, len(WIRES) - 0.5)
        below.set_ylabel(_score_label(task), fontsize=8)
        below.yaxis.set_major_locator(MaxNLocator(5))
    _legend(figure, plots[0][0], str)
    return figure


def _local_curves(results: Sequence[Result]) -> Figure:
    counts = sorted(_RANK_STYLES)
    figure, plots = _figure(5.6, len(counts))
    variants = [PLAIN, *map(local, LOCAL_STEPS)]
    for row, num_ranks in enumerate(counts):
        for column, task in enumerate(TASKS):
            _draw_curves(plots[row][column], results, task, variants, num_ranks=num_ranks)
            if row < len(counts) - 1:
                plots[row][column].set_xlabel("")
            plots[row][column].set_ylabel(f"{num_ranks} ranks\ntraining loss" if column == 0 else "", fontsize=8)
    _legend(figure, plots[0][0], _LABELS.__getitem__)
    return figure


def _local_scores(results: Sequence[Result]) -> Figure:
    figure, plots = _figure(2.6, 1)
    steps = [1, *LOCAL_STEPS]
    for column, task in enumerate(TASKS):
        plot = plots[0][column]
        for index, (num_ranks, style) in enumerate(_RANK_STYLES.items()):
            found = [by_seed(results, task, PLAIN if step == 1 else local(step), num_ranks) for step in steps]
            scores = {step: [result.score for result in some] for step, some in zip(steps, found, strict=True) if some}
            if not scores:
                continue
            # Beside each other, so that ranges can be told apart.
            at = [step * 1.12 ** (index - 1) for step in scores]
            means = [statistics.mean(some) for some in scores.values()]
            below = [mean - min(some) for mean, some in zip(means, scores.values(), strict=True)]
            above = [max(some) - mean for mean, some in zip(means, scores.values(), strict=True)]
            label = f"{num_ranks} ranks"
            plot.errorbar(at, means, [below, above], **style, label=label, markersize=4, linewidth=1.2, capsize=2)
        plot.set_xscale("log")
        plot.set_xticks(steps, [str(step) for step in steps])
        plot.xaxis.set_minor_locator(NullLocator())
        plot.set_xlabel("steps between two exchanges", fontsize=8)
        plot.set_ylabel(_score_label(task), fontsize=8)
    _legend(figure, plots[0][0], str)
    return figure


def _draw_curves(plot: Axes, results: Sequence[Result], task: str, variants: Sequence[str], *, num_ranks: int) -> None:
    for variant in variants:
        found = by_seed(results, task, variant, num_ranks)
        if not found:
            continue
        points = list(zip(*(result.curve for result in found), strict=True))
        style = {name: value for name, value in _STYLES[variant].items() if name != "marker"}
        samples = found[0].samples
        plot.fill_between(
            samples, [min(p) for p in points], [max(p) for p in points], color=style["color"], alpha=0.12, linewidth=0
        )
        plot.plot(samples, [statistics.mean(p) for p in points], **style, label=variant, linewidth=1.4)
    plot.set_yscale("log")
    plot.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 2.5, 3, 4, 5, 7)))
    plot.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    plot.yaxis.set_minor_locator(NullLocator())
    plot.xaxis.set_major_locator(MaxNLocator(4))
    plot.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1000:g}"))
    plot.set_xlabel("thousand samples", fontsize=8)
    plot.set_ylabel("training loss", fontsize=8)


def _draw_seeds(plot: Axes, position: int, scores: Sequence[float], style: dict[str, Any]) -> None:
    """Draw a marker for each seed and a line at their mean."""
    if scores:
        beside = [position + 0.06 * (index - (len(scores) - 1) / 2) for index in range(len(scores))]
        plot.scatter(beside, scores, color=style["color"], marker=style["marker"], s=14, alpha=0.8)
        plot.hlines(statistics.mean(scores), position - 0.3, position + 0.3, color=style["color"], linewidth=1.6)


def _score_label(task: str) -> str:
    return "test accuracy, %" if TASKS[task].tells_accuracy else "test loss"


def _legend(figure: Figure, plot: Axes, name: Callable[[str], str]) -> None:
    """Put one legend for all plots below them."""
    handles, labels = plot.get_legend_handles_labels()
    texts = [name(label) for label in labels]
    figure.legend(handles, texts, loc="outside lower center", ncols=len(labels), fontsize=8, frameon=False)
