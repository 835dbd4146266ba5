"""Charts are valid SVG that shows every point where it belongs."""

from __future__ import annotations

from itertools import pairwise
from xml.etree import ElementTree

import pytest

from lightning_bucketddp.commands.plan.scaling import Axis, Series, draw

_SVG = "{http://www.w3.org/2000/svg}"


def _draw(*series: Series, x: Axis | None = None, y: Axis | None = None, title: str = "t") -> ElementTree.Element:
    svg = draw(series, title=title, x=x or Axis(label="x"), y=y or Axis(label="y"))
    return ElementTree.fromstring(svg)


def _marks(chart: ElementTree.Element) -> list[tuple[float, float]]:
    return [(float(mark.get("cx", "")), float(mark.get("cy", ""))) for mark in chart.iter(f"{_SVG}circle")]


def _texts(chart: ElementTree.Element) -> list[str]:
    return ["".join(text.itertext()) for text in chart.iter(f"{_SVG}text")]


def test_powers_are_equally_far_apart_on_a_logarithmic_axis() -> None:
    ranks = [2**n for n in range(11)]
    chart = _draw(Series("a", [(n, 1.0) for n in ranks]), x=Axis(label="ranks", log_base=2))
    places = [right for right, _ in _marks(chart)]
    gaps = [b - a for a, b in pairwise(places)]
    assert max(gaps) - min(gaps) <= 0.2  # places are written with one digit
    assert {"1", "64", "1,024"} <= set(_texts(chart))


def test_higher_values_are_higher_and_zero_is_on_the_axis() -> None:
    chart = _draw(Series("a", [(0, 0.0), (1, 30.0), (2, 60.0)]), y=Axis(label="%", low=0, high=100))
    low, middle, high = (down for _, down in _marks(chart))
    assert low - middle == pytest.approx(middle - high, abs=0.2)
    assert {"0", "20", "100"} <= set(_texts(chart))


def test_every_series_is_in_the_legend_with_its_own_colour() -> None:
    names = ["one", "two <&>", "three"]
    chart = _draw(*(Series(name, [(0, n), (1, n + 1)]) for n, name in enumerate(names)), title='a "b" <c>')
    assert set(names) <= set(_texts(chart))
    assert len({line.get("stroke") for line in chart.iter(f"{_SVG}polyline")}) == 3
    assert chart.get("aria-label") == 'a "b" <c>'


def test_a_single_point_and_equal_values_can_be_drawn() -> None:
    chart = _draw(Series("line", [(1, 5.0), (2, 5.0)]), Series("mark", [(1, 5.0)]))
    assert len(list(chart.iter(f"{_SVG}polyline"))) == 1
    assert len(_marks(chart)) == 3


def test_what_is_not_finite_is_left_out() -> None:
    assert len(_marks(_draw(Series("a", [(1, 1.0), (2, float("nan")), (3, float("inf"))])))) == 1
    with pytest.raises(ValueError, match="has no points"):
        _draw(Series("a", []))
    with pytest.raises(ValueError, match="'size' is logarithmic and cannot show 0"):
        _draw(Series("a", [(0, 1.0)]), x=Axis(label="size", log_base=2))
