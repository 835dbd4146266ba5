"""The page in a real browser: what it shows, where it shows it, and what it does when it is used."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import ActionChains, Chrome, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

from lightning_bucketddp import BucketDDPMonitor
from lightning_bucketddp.commands.report import make_page
from lightning_bucketddp.recording.schema import RecordedBucket, RecordedPlan, RecordedRun, find_folder, read_run
from tests.support.browser import browser, prefer_colour_scheme
from tests.support.ranks import run_on_ranks
from tests.support.recordings import (
    BACKWARD_S,
    DATA_S,
    FORWARD_S,
    OPTIMIZER_S,
    STAGGER_S,
    TUNING,
    Recording,
    with_weights,
)
from tests.support.scripts.monitored import fit

RECORDING = Recording(num_ranks=3, num_buckets=4, slowness={2: 1.5}, clock_s={1: 1e4, 2: -55.0})
# The same by one clock.
TRUE = replace(RECORDING, clock_s={}).step(40)
START_S, END_S = TRUE[0].start_s, TRUE[2].end_s

# Where the bars of a rank are, as shares of its lane.
_BARS = """
const tracks = document.querySelectorAll(".rank")[arguments[0]].querySelector(".tracks");
const lane = tracks.getBoundingClientRect();
return [...tracks.querySelectorAll(arguments[1])].map((bar) => {
  const box = bar.getBoundingClientRect();
  return [(box.left - lane.left) / lane.width, (box.right - lane.left) / lane.width];
});
"""


@pytest.fixture(scope="module")
def driver() -> Iterator[Chrome]:
    with browser() as driver:
        yield driver


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    return read_run(RECORDING.write(tmp_path_factory.mktemp("run")))


@pytest.fixture
def page(driver: Chrome, record: RecordedRun, tmp_path: Path) -> Iterator[Chrome]:
    """The page of `RECORDING`, newly opened from the disk."""
    show(driver, record, tmp_path)
    yield driver
    assert driver.get_log("browser") == []


def show(driver: Chrome, record: RecordedRun, folder: Path) -> None:
    path = folder / "report.html"
    path.write_text(make_page(record), encoding="utf-8")
    driver.get(path.as_uri())
    # Lanes are drawn when the browser has found out which can be seen.
    wait_for_frames(driver)


def wait_for_frames(driver: Chrome) -> None:
    driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")


def text(driver: Chrome, selector: str) -> str:
    return driver.find_element(By.CSS_SELECTOR, selector).text


def tip(driver: Chrome) -> str:
    """The tip that is shown; empty if none is."""
    return text(driver, "#tip")


def with_plan(record: RecordedRun, *buckets: RecordedBucket, **changes: Any) -> RecordedRun:
    """The record with this plan, and other changes to what rank 0 has written."""
    first = replace(record.first, plans={1: RecordedPlan(1, buckets)}, **changes)
    return replace(record, ranks={**record.ranks, 0: first})


def all_of(driver: Chrome, selector: str) -> list[WebElement]:
    return driver.find_elements(By.CSS_SELECTOR, selector)


def bars(driver: Chrome, rank: int, selector: str) -> list[list[float]]:
    found: list[list[float]] = driver.execute_script(_BARS, rank, selector)
    return found


def share(seconds: float) -> float:
    """Where a moment is in the whole step."""
    return (seconds - START_S) / (END_S - START_S)


def hover(driver: Chrome, target: WebElement) -> None:
    ActionChains(driver, duration=0).move_to_element(target).perform()


def press(driver: Chrome, *keys: str) -> None:
    ActionChains(driver, duration=0).send_keys(*keys).perform()


# --- What it shows


def test_the_head_says_what_run_it_was(page: Chrome) -> None:
    about = text(page, "#about")
    for fact in ("3 ranks", "1 host", "NVIDIA H200", "nccl", "24.0 MiB", "12 elements", "5 steps recorded, 0 to 40"):
        assert fact in about
    assert text(page, "#options") == "bucket_cap_mb=auto"  # the others are not set
    numbers = text(page, "#numbers")
    assert "rank 2 +15.0 ms" in numbers
    assert "3.0 GiB" in numbers


def test_the_suggestions_are_those_of_the_summary(driver: Chrome, record: RecordedRun, tmp_path: Path) -> None:
    show(driver, record, tmp_path)
    items = [item.text for item in all_of(driver, "#suggestions li")]
    slow, accumulate = items
    assert slow.startswith("rank 2 on node0 makes the others wait 15.00 ms, most of it in backward (10.00 ms): ")
    assert accumulate.startswith("accumulate_grad_batches=2, with twice the global batch, would halve the 6.49 ms that")
    assert text(driver, "#suggestions code") == "accumulate_grad_batches=2"
    alike = {rank: replace(record.ranks[0], run=ours.run) for rank, ours in record.ranks.items()}
    for ours in alike.values():
        ours.steps = {
            n: replace(s, spans=[span for span in s.spans if span.name != "exposed"]) for n, s in ours.steps.items()
        }
    show(driver, replace(record, ranks=alike), tmp_path)
    assert not driver.find_element(By.ID, "advice").is_displayed()
    assert "none all alike" in " ".join(text(driver, "#numbers").split())
    assert driver.get_log("browser") == []


def test_the_split_is_as_wide_as_the_phases_are_long(page: Chrome) -> None:
    widths = {bar.get_attribute("class"): bar.rect["width"] for bar in all_of(page, "#split > div")}
    assert list(widths) == ["data", "forward", "backward", "exposed", "optimizer"]
    assert widths["backward"] / widths["forward"] == pytest.approx(BACKWARD_S / FORWARD_S, rel=0.02)
    # The mean over the ranks, of which one takes half as long again.
    assert widths["forward"] / widths["optimizer"] == pytest.approx(3.5 / 3 * FORWARD_S / OPTIMIZER_S, rel=0.05)
    assert "backward 23.3 ms" in text(page, "#split-legend")
    # They add up to the step.
    shown = [float(ms) for ms in re.findall(r"([\d.]+) ms", text(page, "#split-legend"))]
    assert len(shown) == 5
    assert f"Step\n{sum(shown):.1f} ms" in text(page, "#numbers")


def test_every_rank_has_its_bars_where_its_times_are(page: Chrome) -> None:
    assert [row.text.split("\n")[0] for row in all_of(page, ".rank h3")] == ["rank 0", "rank 1", "rank 2"]
    for rank, step in enumerate(TRUE):
        spans = bars(page, rank, ".track.compute > div")
        assert spans == [pytest.approx([share(s.start_s), share(s.end_s)], abs=2e-3) for s in step.spans]
        reductions = bars(page, rank, ".reduction")
        assert reductions == [pytest.approx([share(r.start_s), share(r.end_s)], abs=2e-3) for r in step.reductions()]
        marks = [(left + right) / 2 for left, right in bars(page, rank, ".ready")]
        assert marks == [pytest.approx(share(bucket.ready_s), abs=2e-3) for bucket in step.buckets]
        # What the step waited for ends with its wait.
        waited = bars(page, rank, ".waited")
        assert waited[0][0] == pytest.approx(share(step.spans[3].start_s), abs=2e-3)
        assert waited[-1][1] == pytest.approx(share(step.spans[3].end_s), abs=2e-3)
    # The others have launched a bucket long before the slow one joins them.
    start, end = bars(page, 0, ".meeting")[0]
    paler = page.find_element(By.CSS_SELECTOR, ".track .meeting").value_of_css_property("background-size")
    joined = start + float(paler.partition("%")[0]) / 100 * (end - start)
    assert joined == pytest.approx(share(TRUE[2].buckets[0].launched_s), abs=2e-3)
    assert bars(page, 2, ".meeting") == []
    # The axis counts milliseconds.
    labels = {span.text: span.rect["x"] for span in all_of(page, "#axis span")}
    tracks = all_of(page, ".tracks")[0].rect
    at_40_ms = tracks["x"] + 0.04 / (END_S - START_S) * tracks["width"]
    assert (labels["0 ms"], labels["40"]) == (pytest.approx(tracks["x"], abs=1), pytest.approx(at_40_ms, abs=1.5))


# By how many pixels labels reach beyond what holds them, and the page beyond the window, at most.
_CUT = """
const beyond = (label, holder) => {
  const [inner, outer] = [label.getBoundingClientRect(), holder.getBoundingClientRect()];
  return Math.max(inner.right - outer.right, outer.left - inner.left);
};
const axis = [...document.querySelectorAll("#axis span")].map((label) => beyond(label, label.parentElement));
const plots = [...document.querySelectorAll(".plot text")].map((label) => beyond(label, label.closest("svg")));
const page = document.documentElement;
return Math.max(...axis, ...plots, page.scrollWidth - page.clientWidth);
"""


def test_it_fits_the_window_and_no_label_of_an_axis_is_cut_off(driver: Chrome, tmp_path: Path) -> None:
    """At all widths: in some, the last mark is where the axis ends."""
    many_steps = Recording(steps=range(0, 3 * 10**6, 10**6))
    show(driver, read_run(many_steps.write(tmp_path / "run")), tmp_path)
    cut = []
    for width in range(500, 1700, 100):
        driver.set_window_size(width, 1000)
        wait_for_frames(driver)
        cut.append(driver.execute_script(_CUT))
    driver.set_window_size(1400, 1000)
    assert max(cut) <= 0.5


def test_what_comes_after_the_wait_is_not_a_backward(driver: Chrome, record: RecordedRun, tmp_path: Path) -> None:
    """It counts as one, and would be a blue line without a name. A backward that goes on to launch buckets is one."""
    steps = dict(record.first.steps)
    data, forward, backward, exposed, optimizer = steps[40].spans
    middle = exposed.start_s + exposed.seconds / 2
    rest = [replace(exposed, end_s=middle), replace(backward, start_s=middle, end_s=exposed.end_s)]
    steps[40] = replace(steps[40], spans=[data, forward, backward, *rest, optimizer])
    cut_s = steps[30].buckets[2].launched_s
    backward = steps[30].spans[2]
    hooked = [replace(backward, end_s=cut_s - 0.002), replace(backward, name="exposed", start_s=cut_s - 0.002)]
    hooked = [hooked[0], replace(hooked[1], end_s=cut_s - 0.001), replace(backward, start_s=cut_s - 0.001)]
    steps[30] = replace(steps[30], spans=[*steps[30].spans[:2], *hooked, *steps[30].spans[3:]])
    show(driver, replace(record, ranks={**record.ranks, 0: replace(record.first, steps=steps)}), tmp_path)
    assert len(bars(driver, 0, ".backward")) == len(bars(driver, 0, ".finish")) == 1
    assert "after the wait: buffers, checks" in text(driver, "#legend")
    hover(driver, driver.find_element(By.CSS_SELECTOR, ".track .finish"))
    assert tip(driver).startswith("after the wait: buffers, checks, rank 0")
    assert "counts as\nbackward" in tip(driver)
    driver.find_element(By.ID, "step").send_keys(Keys.ARROW_LEFT)
    assert len(bars(driver, 0, ".backward")) == 2
    assert bars(driver, 0, ".finish") == []


def test_weights_that_travel_have_bars_and_what_waits_for_them_is_shown(
    driver: Chrome, record: RecordedRun, tmp_path: Path
) -> None:
    ranks = {
        rank: replace(ours, steps={number: with_weights(step) for number, step in ours.steps.items()})
        for rank, ours in record.ranks.items()
    }
    show(driver, replace(record, ranks=ranks), tmp_path)
    for rank in range(3):
        end_s = TRUE[rank].end_s
        expected = [share(s) for s in (end_s - 0.002, end_s - 0.001, end_s - 0.001, end_s)]
        assert [at for bar in bars(driver, rank, ".gather") for at in bar] == pytest.approx(expected, abs=0.002)
        [waiting] = bars(driver, rank, ".compute .weights")
        assert waiting == pytest.approx([share(end_s - 0.002), share(end_s)], abs=0.002)
    hover(driver, all_of(driver, ".rank .gather")[1])
    assert tip(driver).startswith("weights of bucket 3, rank 0")
    assert "the step waited\n1.00 ms" in tip(driver)
    assert "waiting for weights" in text(driver, "#legend")
    assert "exchange of a bucket's weights" in text(driver, "#legend")
    numbers = text(driver, "#numbers").split("\n")
    exchange = numbers[numbers.index("Exchange of weights") + 1]
    assert exchange == "2.00 ms 2.00 ms waited for"
    assert driver.get_log("browser") == []


def test_every_rank_has_a_colour_of_its_own(driver: Chrome, tmp_path: Path) -> None:
    many = read_run(Recording(num_ranks=12, slowness={5: 1.2}).write(tmp_path / "run"))
    show(driver, many, tmp_path)
    for scheme in ("dark", "light"):
        prefer_colour_scheme(driver, scheme)
        strokes = [line.value_of_css_property("stroke") for line in all_of(driver, "#own-plot .curve")]
        assert len(set(strokes)) == 12
    curves = all_of(driver, "#own-plot .curve")
    by_rank = {line.get_attribute("data-rank"): line.value_of_css_property("stroke") for line in curves}
    entries = all_of(driver, "#history-legend li")
    assert [entry.text for entry in entries] == [f"rank {rank}" for rank in range(12)]
    for rows in (entries, all_of(driver, "#ranks tr")[1:]):
        keys = [row.find_element(By.CSS_SELECTOR, ".key").value_of_css_property("background-color") for row in rows]
        assert [rgb(colour) for colour in keys] == [rgb(by_rank[str(rank)]) for rank in range(12)]


def rgb(colour: str) -> list[str]:
    return re.findall(r"\d+", colour)[:3]


def test_lanes_have_labels_where_there_is_little_room(page: Chrome) -> None:
    page.set_window_size(500, 1000)
    wait_for_frames(page)
    assert [row.text.split("\n") for row in all_of(page, ".rank h3")] == [
        ["rank 0", "node0"],
        ["rank 1", "node0"],
        ["rank 2", "slowest"],
    ]
    labels = [
        {bar.get_attribute("class"): bar.text for bar in rank.find_elements(By.CSS_SELECTOR, ".compute > div")}
        for rank in all_of(page, ".rank")
    ]
    buckets = [bar.text for bar in all_of(page, ".rank .reduction")]
    page.set_window_size(1400, 1000)
    for of_rank in labels:
        assert of_rank["data"] == of_rank["optimizer"] == ""  # as wide as a letter or two
        wide = {name: of_rank[name].split(" ")[0] for name in ("forward", "backward", "exposed")}
        assert wide == {"forward": "forward", "backward": "backward", "exposed": "wait"}
    assert [label.split(" ")[0] for label in buckets] == ["0", "1", "2", "3"] * 3


def test_the_slow_rank_stands_out(page: Chrome) -> None:
    assert [row.text.split("\n")[1] for row in all_of(page, ".rank h3")] == ["node0", "node0", "slowest"]
    assert "Rank 2 took 15.0 ms longer than the others." in text(page, "#step-text")
    assert "Rank 2 usually takes 15.0 ms longer" in text(page, "#history-text")
    (late,) = all_of(page, "#own-plot .late")
    others = all_of(page, "#own-plot .curve:not(.late)")
    assert late.get_attribute("data-rank") == "2"
    assert all(late.rect["y"] < other.rect["y"] - 50 for other in others)
    page.find_element(By.CSS_SELECTOR, "summary").click()
    assert text(page, "#ranks tr:last-child") == f"2 node0 50.0 ms {1e3 * (END_S - TRUE[2].start_s):.1f} ms slowest"


def test_the_plan_is_drawn_to_scale(driver: Chrome, record: RecordedRun, tmp_path: Path) -> None:
    buckets = [RecordedBucket(["big.weight", "big.bias"], [3 * 2**20, 2**20]), RecordedBucket(["small"], [2**20])]
    show(driver, with_plan(record, *buckets), tmp_path)
    big, small = (box.rect["width"] for box in all_of(driver, ".bucket"))
    assert big / small == pytest.approx(4, rel=0.01)
    weight, bias, _ = (strip.rect["width"] for strip in all_of(driver, ".strip"))
    assert weight / bias == pytest.approx(3, rel=0.02)
    hover(driver, all_of(driver, ".strip")[1])
    assert tip(driver).startswith("big.bias")
    assert "1.0 MiB" in tip(driver)


def plan_of(driver: Chrome, record: RecordedRun, folder: Path, sizes: list[int]) -> list[WebElement]:
    """The boxes of a plan whose buckets have these sizes."""
    buckets = [RecordedBucket([f"{index}.weight"], [size]) for index, size in enumerate(sizes)]
    show(driver, with_plan(record, *buckets), folder)
    return all_of(driver, ".bucket")


def test_a_plan_that_fits_one_row_is_in_one_row_and_a_small_bucket_has_its_number(
    driver: Chrome, record: RecordedRun, tmp_path: Path
) -> None:
    boxes = plan_of(driver, record, tmp_path, [2**20 * (1 + n % 4) for n in range(20)])
    assert len({box.rect["y"] for box in boxes}) == 1
    first, last, plan = boxes[0].rect, boxes[-1].rect, driver.find_element(By.ID, "plan").rect
    assert last["x"] + last["width"] - first["x"] == pytest.approx(plan["width"], abs=3)
    assert "A box is as wide as its bytes. A strip" in text(driver, "#plan-text")
    boxes = plan_of(driver, record, tmp_path, [2**20] * 100)
    assert len({box.rect["y"] for box in boxes}) > 1
    assert all(box.text for box in boxes)
    boxes = plan_of(driver, record, tmp_path, [2**10, *[25 * 2**20] * 11])
    numbers = [box.text.split()[0].removeprefix("bucket") or box.text.split()[1] for box in boxes]
    assert numbers == [str(n) for n in range(12)]
    assert "small ones are drawn wider, to be seen" in text(driver, "#plan-text")
    plan_of(driver, record, tmp_path, [2**20])
    one = "1 bucket, 1.0 MiB. It leaves when all its gradients are there. A strip"
    assert text(driver, "#plan-text").startswith(one)


def test_other_sizes_are_plotted_with_the_plan_in_use_and_the_optimum(page: Chrome) -> None:
    # From 0.25 MiB to all 24 in one, two for each doubling.
    assert len(all_of(page, "#sizes-plot .dot")) == 15
    current = page.find_element(By.CSS_SELECTOR, "#sizes-plot .current")
    hover(page, current)
    assert tip(page).startswith("the plan in use")
    assert "6.00 MiB" in tip(page)
    by_x = {dot.get_attribute("aria-label"): dot.rect["x"] for dot in all_of(page, "#sizes-plot .dot")}
    assert by_x["bucket_cap_mb=4"] < current.rect["x"] < by_x["bucket_cap_mb=8"]
    optimum = page.find_element(By.CSS_SELECTOR, "#sizes-plot .optimum").rect["y"]
    assert all(optimum >= dot.rect["y"] - 1 for dot in all_of(page, "#sizes-plot .dot"))
    assert "computed optimum" in text(page, "#sizes-legend")
    waited = 1e3 * TRUE[2].exposed_s
    assert f"compare it with rank 2, which waits for no other: {waited:.2f} ms" in text(page, "#sizes-text")
    assert f"what was measured has decided: {TUNING}." in text(page, "#sizes-text")


def test_without_a_profile_the_sizes_are_predicted_from_the_buckets(
    driver: Chrome, record: RecordedRun, tmp_path: Path
) -> None:
    different = [replace(RECORDING.plan.buckets[0], sizes=[2**18, 1, 1]), *RECORDING.plan.buckets[1:]]
    for buckets, is_known in ((different, True), (RECORDING.plan.buckets, False)):
        show(driver, with_plan(record, *buckets, profile=None), tmp_path)
        assert driver.get_log("browser") == []
        assert len(all_of(driver, "#sizes-plot .current")) == is_known
        assert driver.find_element(By.ID, "sizes-plot").is_displayed() == is_known
        # The run has "auto" already.
        assert "Train with" not in text(driver, "#sizes-text")
        assert ("cannot be told from this run" in text(driver, "#sizes-text")) != is_known


# --- What it does


def test_steps_differ_as_they_were_recorded(driver: Chrome, record: RecordedRun, tmp_path: Path) -> None:
    step = record.ranks[1].steps[10]
    longer = replace(step.spans[-1], end_s=step.end_s + 0.1)
    ranks = {**record.ranks, 1: replace(record.ranks[1], steps=dict(record.ranks[1].steps))}
    ranks[1].steps[10] = replace(step, spans=[*step.spans[:-1], longer])
    del ranks[1].steps[40]
    show(driver, replace(record, ranks=ranks), tmp_path)
    assert "This rank has not recorded the step." in all_of(driver, ".rank")[1].text
    driver.find_element(By.ID, "slowest-step").click()
    assert text(driver, "#step-number") == "10 (2 of 5)"
    assert bars(driver, 1, ".optimizer")[0][1] == pytest.approx(1, abs=1e-3)
    # A click in a plot leads to the step there.
    ActionChains(driver, duration=0).move_to_element(driver.find_element(By.ID, "step-plot")).click().perform()
    assert text(driver, "#step-number") == "20 (3 of 5)"


def test_pointing_at_a_bucket_shows_its_parameters(page: Chrome) -> None:
    hover(page, all_of(page, ".rank")[1].find_elements(By.CSS_SELECTOR, ".reduction")[2])
    told = tip(page)
    assert told.startswith("bucket 2, rank 1")
    assert "6.0 MiB" in told
    assert f"at {1e3 * (STAGGER_S + DATA_S + FORWARD_S + 0.75 * BACKWARD_S):.1f} ms" in told
    assert "until rank 2 joined" in told
    assert "parameter tensors\n3" in told
    for name in ("layers.2.norm.weight", "layers.2.linear.bias", "layers.2.linear.weight"):
        assert name in told
    # The same bucket is marked on all ranks, and in the plan.
    lit = all_of(page, ".reduction.lit, .bucket.lit")
    assert [found.get_attribute("data-bucket") for found in lit] == ["2"] * 4
    hover(page, page.find_element(By.TAG_NAME, "h1"))
    assert tip(page) == ""


def test_bars_can_be_read_with_the_keyboard(page: Chrome) -> None:
    track = page.find_element(By.CSS_SELECTOR, '[aria-label="rank 0, 4 reductions"]')
    page.execute_script("arguments[0].focus()", track)
    press(page, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert tip(page).startswith("bucket 1, rank 0")
    press(page, Keys.ARROW_LEFT)
    assert tip(page).startswith("bucket 0, rank 0")
    press(page, Keys.ESCAPE)
    assert tip(page) == ""
    # From the slider, which changes the step, Tab leads over the buttons to the lanes.
    assert text(page, "#step-number") == "40 (5 of 5)"
    slider = page.find_element(By.ID, "step")
    slider.send_keys(Keys.ARROW_LEFT)
    assert text(page, "#step-number") == "30 (4 of 5)"
    slider.send_keys(Keys.HOME)
    assert text(page, "#step-number") == "0 (1 of 5)"
    assert slider.get_attribute("aria-valuetext") == "step 0"
    slider.send_keys(Keys.TAB, Keys.TAB)
    assert page.switch_to.active_element.get_attribute("id") == "slowest-rank"


def test_zooming_in_and_out(page: Chrome) -> None:
    whole = bars(page, 0, ".backward")[0]
    page.find_element(By.ID, "zoom-wait").click()
    (wait,) = bars(page, 0, ".exposed")
    assert wait[1] - wait[0] > 0.6
    page.find_element(By.ID, "zoom-all").click()
    assert bars(page, 0, ".backward")[0] == whole
    # Drag over the right half.
    tracks = all_of(page, ".tracks")[0]
    half = tracks.rect["width"] / 2
    drag = ActionChains(page, duration=0).move_to_element(tracks).click_and_hold()
    drag.move_by_offset(half - 1, 0).release().perform()
    assert page.find_element(By.ID, "zoom-all").is_enabled()
    (wait,) = bars(page, 0, ".exposed")
    exposed = TRUE[0].spans[3]
    assert wait == pytest.approx([2 * (share(exposed.start_s) - 0.5), 2 * (share(exposed.end_s) - 0.5)], abs=0.01)
    ActionChains(page, duration=0).double_click(tracks).perform()
    assert bars(page, 0, ".backward")[0] == whole


# --- Where it lives


def test_nothing_is_loaded_from_anywhere(page: Chrome, tmp_path: Path) -> None:
    assert page.execute_script("return performance.getEntriesByType('resource').length") == 0
    source = (tmp_path / "report.html").read_text()
    assert not re.search(r"https?:|@import|\burl\(|\bsrc=|\bhref=|\bfetch\(|XMLHttpRequest", source)
    fetch = "fetch('data:,x').then(() => arguments[0](false), () => arguments[0](true))"
    assert page.execute_async_script(fetch)
    assert len(page.get_log("browser")) > 0  # the browser's word about it


def test_names_from_peoples_code_are_text(driver: Chrome, record: RecordedRun, tmp_path: Path) -> None:
    name = '</script><img src=x onerror="document.title=1">/* scripts */'
    run = replace(record.first.run, host=name)
    show(driver, with_plan(record, RecordedBucket([name], [4]), run=run), tmp_path)
    assert all_of(driver, "img") == []
    hover(driver, all_of(driver, ".strip")[0])
    assert tip(driver).startswith(name)
    assert driver.get_log("browser") == []


def test_it_is_dark_where_people_like_it_dark_and_what_is_written_on_bars_can_be_read(page: Chrome) -> None:
    for scheme in ("dark", "light"):
        prefer_colour_scheme(page, scheme)
        background = page.execute_script("return getComputedStyle(document.body).backgroundColor")
        brightness = sum(map(int, re.findall(r"\d+", background)))
        assert brightness < 150 if scheme == "dark" else brightness > 600
        for name in ("data", "forward", "backward", "optimizer", "reduction"):
            bar = page.find_element(By.CSS_SELECTOR, f".track .{name}")
            back, front = (luminance(bar.value_of_css_property(p)) for p in ("background-color", "color"))
            assert (max(back, front) + 0.05) / (min(back, front) + 0.05) >= 4.5, (scheme, name)


def luminance(colour: str) -> float:
    """As the rules for accessible pages define it."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_one_rank_alone_has_a_page_and_problems_are_shown(driver: Chrome, tmp_path: Path) -> None:
    alone = Recording(num_ranks=1, num_buckets=0, steps=range(1), with_profile=False).write(tmp_path / "run")
    show(driver, replace(read_run(alone), problems=["Of 4 ranks, these are missing: 3."]), tmp_path)
    assert driver.get_log("browser") == []
    assert text(driver, "#problems") == "Of 4 ranks, these are missing: 3."
    assert len(bars(driver, 0, ".track.compute > div")) == 5
    assert not driver.find_element(By.ID, "sizes").is_displayed()
    assert "nothing was reduced" in text(driver, "#plan-text")


@pytest.mark.long
def test_many_ranks_and_buckets_stay_usable(driver: Chrome, tmp_path: Path) -> None:
    many = Recording(num_ranks=64, num_buckets=200, bucket_bytes=2**18, steps=range(2), slowness={40: 1.2})
    show(driver, read_run(many.write(tmp_path / "run")), tmp_path)
    assert driver.get_log("browser") == []
    loaded_ms = "const [page] = performance.getEntriesByType('navigation'); return page.loadEventEnd - page.startTime"
    assert driver.execute_script(loaded_ms) < 20_000
    assert len(all_of(driver, ".rank")) == 64
    # Only what can be seen is drawn.
    assert len(bars(driver, 0, ".reduction")) == 200
    assert bars(driver, 63, ".reduction") == []
    driver.find_element(By.ID, "slowest-rank").click()
    wait_for_frames(driver)
    assert len(bars(driver, 40, ".reduction")) == 200
    hover(driver, all_of(driver, ".rank")[40].find_elements(By.CSS_SELECTOR, ".reduction")[100])
    assert tip(driver).startswith("bucket 1")


@pytest.mark.parametrize("model", ["slow_rank", "two_players", "skipping"])
def test_what_the_monitor_records_can_be_seen(driver: Chrome, model: str, tmp_path: Path) -> None:
    run_on_ranks(fit, directory=tmp_path, model=model, monitor={"every_n_steps": 1})
    record = read_run(find_folder(tmp_path))
    show(driver, record, tmp_path)
    assert driver.get_log("browser") == []
    assert text(driver, "#step-number").endswith(f"of {len(record.step_numbers)})")
    for rank in (0, 1):
        assert len(bars(driver, rank, ".reduction")) == len(record.last_plan.buckets if record.last_plan else [])
        assert all(0 <= start <= end <= 1.001 for start, end in bars(driver, rank, ".track.compute > div"))
    assert driver.find_element(By.ID, "sizes").is_displayed()
    if model == "slow_rank":
        assert "Rank 1 usually takes" in text(driver, "#history-text")


# --- In a notebook


def test_a_notebook_shows_the_page_in_a_frame_that_cannot_reach_it(
    driver: Chrome, record: RecordedRun, tmp_path: Path
) -> None:
    monitor = BucketDDPMonitor()
    with pytest.raises(RuntimeError, match="there was none that was recorded"):
        monitor.show()
    monitor.recorded_in = record.folder
    path = tmp_path / "notebook.html"
    path.write_text(f"<!doctype html><h1>cells</h1>{monitor.show(height=700)._repr_html_()}", encoding="utf-8")
    driver.get(path.as_uri())
    [frame] = driver.find_elements(By.TAG_NAME, "iframe")
    assert (frame.size["height"], frame.size["width"] > 1200) == (700, True)
    # Its scripts run, and belong to no origin: they could not even look at the notebook.
    assert driver.execute_script("return arguments[0].contentDocument", frame) is None
    driver.switch_to.frame(frame)
    WebDriverWait(driver, 10).until(lambda driver: driver.find_elements(By.CSS_SELECTOR, ".reduction"))
    assert len(driver.find_elements(By.CSS_SELECTOR, ".rank")) == RECORDING.num_ranks
    driver.switch_to.default_content()
    assert driver.get_log("browser") == []
