"""Charts are valid SVG that shows every point where it belongs."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from lightning_bucketddp.commands.plan.scaling import draw_chart

_SVG = "{http://www.w3.org/2000/svg}"


def _draw(title: str = "t", **lines: Mapping[int, float]) -> tuple[ElementTree.Element, dict[str, ElementTree.Element]]:
    """A chart, and its elements that are texts."""
    chart = ElementTree.fromstring(draw_chart(title, list(lines.items())))
    return chart, {"".join(text.itertext()): text for text in chart.iter(f"{_SVG}text")}


def test_powers_of_two_are_equally_far_apart_and_ticks_do_not_crowd() -> None:
    chart, texts = _draw(a={2**n: 1.0 for n in range(11)})
    gaps = [b - a for a, b in pairwise(float(mark.get("cx", "")) for mark in chart.iter(f"{_SVG}circle"))]
    assert max(gaps) - min(gaps) <= 0.2  # places are written with one digit
    assert {"1", "64", "1,024"} <= set(texts)
    _, texts = _draw(a={1: 1.0, 20_000: 0.5})
    assert {"1", "4", "4,096", "16,384"} <= set(texts)
    assert not {"2", "8,192"} & set(texts)


def test_higher_efficiencies_are_higher_and_each_line_is_in_the_legend_with_its_own_colour() -> None:
    names = ["one", "two <&>", "three"]
    chart, texts = _draw('a "b" <c>', **{name: {1: 0.0, 2: 0.3, 4: 0.6} for name in names})
    assert {*names, "0", "20", "100"} <= set(texts)
    assert len({line.get("stroke") for line in chart.iter(f"{_SVG}polyline")}) == 3
    assert chart.get("aria-label") == 'a "b" <c>'
    low, middle, high = (float(mark.get("cy", "")) for mark in [*chart.iter(f"{_SVG}circle")][:3])
    assert low - middle == pytest.approx(middle - high, abs=0.2)
    assert low == float(texts["0"].get("y", ""))
