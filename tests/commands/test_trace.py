"""The trace has what Perfetto needs: bars on named lanes, and arrows that begin and end on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_bucketddp.commands.report import make_trace
from lightning_bucketddp.recording.schema import read_run
from tests.support.recordings import BACKWARD_S, DATA_S, FORWARD_S, STAGGER_S, Recording, with_weights

RECORDING = Recording(num_ranks=3, num_buckets=4, slowness={2: 1.5}, clock_s={1: 1e4})


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    trace = json.loads(make_trace(read_run(RECORDING.write(tmp_path_factory.mktemp("run")))))
    events: list[dict[str, Any]] = trace["traceEvents"]
    return events


def bars(events: list[dict[str, Any]], *, rank: int, lane: int, step: int) -> list[dict[str, Any]]:
    found = [event for event in events if event["ph"] == "X" and (event["pid"], event["tid"]) == (rank, lane)]
    return [event for event in found if event["args"]["step"] == step]


def test_a_step_has_its_spans_and_reductions_in_microseconds_on_named_lanes(events: list[dict[str, Any]]) -> None:
    names = {(event["pid"], event.get("tid"), event["args"].get("name")) for event in events if event["ph"] == "M"}
    for rank, slow in enumerate([1.0, 1.0, 1.5]):
        assert {(rank, None, f"rank {rank} (node0)"), (rank, 1, "compute"), (rank, 2, "communication")} <= names
        # Steps begin 0.1 s apart, times their numbers.
        begin = 2e6 + 1e6 * STAGGER_S * rank
        spans = bars(events, rank=rank, lane=1, step=20)
        assert [span["name"] for span in spans] == ["data", "forward", "backward", "exposed", "optimizer"]
        assert spans[0]["ts"] == pytest.approx(begin, abs=0.01)
        assert spans[1]["ts"] == pytest.approx(begin + 1e6 * DATA_S, abs=0.01)
        assert spans[2]["ts"] == pytest.approx(begin + 1e6 * (DATA_S + slow * FORWARD_S), abs=0.01)
        assert spans[2]["dur"] == pytest.approx(1e6 * slow * BACKWARD_S, abs=0.01)
        reductions = bars(events, rank=rank, lane=2, step=20)
        assert [reduction["name"] for reduction in reductions] == [f"bucket {i}" for i in range(4)]
        end = spans[3]["ts"] + spans[3]["dur"]
        assert reductions[-1]["ts"] + reductions[-1]["dur"] == pytest.approx(end, abs=0.01)
        assert reductions[1]["args"]["bytes"] == 6 * 2**20
        parameters = "layers.1.norm.weight, layers.1.linear.bias, layers.1.linear.weight"
        assert reductions[1]["args"]["parameters"] == parameters


def test_an_arrow_leads_from_backward_to_each_reduction(events: list[dict[str, Any]]) -> None:
    tails = {event["id"]: event for event in events if event["ph"] == "s"}
    heads = {event["id"]: event for event in events if event["ph"] == "f"}
    assert len(tails) == 3 * 4 * len(RECORDING.steps)
    assert tails.keys() == heads.keys()
    (backward,) = [span for span in bars(events, rank=2, lane=1, step=20) if span["name"] == "backward"]
    reduction = bars(events, rank=2, lane=2, step=20)[3]
    tail, head = tails["20.2.3"], heads["20.2.3"]
    assert (tail["pid"], tail["tid"], head["pid"], head["tid"]) == (2, 1, 2, 2)
    assert tail["ts"] == pytest.approx(backward["ts"] + backward["dur"], abs=0.01)
    assert (head["ts"], head["bp"]) == (reduction["ts"], "e")


def test_weights_travel_on_the_lane_of_communication(tmp_path: Path) -> None:
    record = read_run(RECORDING.write(tmp_path))
    for ours in record.ranks.values():
        ours.steps.update({number: with_weights(step) for number, step in ours.steps.items()})
    events = json.loads(make_trace(record))["traceEvents"]
    for rank in range(3):
        weights = bars(events, rank=rank, lane=1, step=20)[-1]
        assert (weights["name"], weights["dur"]) == ("weights", pytest.approx(2000, abs=0.01))
        first, second = [bar for bar in bars(events, rank=rank, lane=2, step=20) if bar["name"].startswith("weights")]
        assert (first["name"], second["name"]) == ("weights 0", "weights 3")
        assert second["dur"] == pytest.approx(1000, abs=0.01)
        assert first["ts"] == pytest.approx(weights["ts"], abs=0.01)
        assert second["ts"] + second["dur"] == pytest.approx(weights["ts"] + weights["dur"], abs=0.01)
    assert min(event["ts"] for event in events if event["ph"] == "X") == 0


def test_a_step_that_the_first_rank_has_not_recorded_has_no_place(tmp_path: Path) -> None:
    record = read_run(RECORDING.write(tmp_path))
    del record.ranks[0].steps[40]
    events = json.loads(make_trace(record))["traceEvents"]
    assert {event["args"]["step"] for event in events if event["ph"] == "X"} == {0, 10, 20, 30}
