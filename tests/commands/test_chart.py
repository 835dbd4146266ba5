"""Charts are valid SVG that shows every point where it belongs."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from lightning_bucketddp.commands.plan.scaling import draw_chart

_SVG = "{http://www.w3.org/2000/svg}"


def _draw(title: str = "t", **lines: Mapping[int, float]) -> ElementTree.Element:
    return ElementTree.fromstring(draw_chart(title, list(lines.items())))


def _marks(chart: ElementTree.Element) -> list[tuple[float, float]]:
    return [(float(mark.get("cx", "")), float(mark.get("cy", ""))) for mark in chart.iter(f"{_SVG}circle")]


def _texts(chart: ElementTree.Element) -> list[str]:
    return ["".join(text.itertext()) for text in chart.iter(f"{_SVG}text")]


def test_powers_of_two_are_equally_far_apart_and_ticks_do_not_crowd() -> None:
    chart = _draw(a={2**n: 1.0 for n in range(11)})
    places = [right for right, _ in _marks(chart)]
    gaps = [b - a for a, b in pairwise(places)]
    assert max(gaps) - min(gaps) <= 0.2  # places are written with one digit
    assert {"1", "64", "1,024"} <= set(_texts(chart))
    texts = set(_texts(_draw(a={1: 1.0, 20_000: 0.5})))
    assert {"1", "4", "4,096", "16,384"} <= texts
    assert not {"2", "8,192"} & texts


def test_higher_efficiencies_are_higher_and_zero_is_on_the_axis() -> None:
    chart = _draw(a={1: 0.0, 2: 0.3, 4: 0.6})
    low, middle, high = (down for _, down in _marks(chart))
    assert low - middle == pytest.approx(middle - high, abs=0.2)
    assert {"0", "20", "100"} <= set(_texts(chart))
    axis = next(text for text in chart.iter(f"{_SVG}text") if text.text == "0")
    assert low == float(axis.get("y", ""))


def test_every_line_is_in_the_legend_with_its_own_colour() -> None:
    names = ["one", "two <&>", "three"]
    chart = _draw('a "b" <c>', **{name: {1: 1.0, 2: n / 3} for n, name in enumerate(names)})
    assert set(names) <= set(_texts(chart))
    assert len({line.get("stroke") for line in chart.iter(f"{_SVG}polyline")}) == 3
    assert chart.get("aria-label") == 'a "b" <c>'
