"""The summary of a fit: what is said, and what is suggested, with answers worked out by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from lightning_bucketddp.config import MIB
from lightning_bucketddp.planning.cost import NO_CODECS, AllReduceCost, Codec, Codecs, Profile, measured_between
from lightning_bucketddp.planning.plan import ParameterSpec
from lightning_bucketddp.recording.schema import (
    RecordedBucket,
    RecordedPlan,
    Run,
    Span,
)
from lightning_bucketddp.recording.summary import Summary, print_summary, suggestions
from lightning_bucketddp.recording.typical_step import RankNumbers, TypicalStep, plan_in
from lightning_bucketddp.reducer.observer import OuterStepStats
from tests.recording.test_schema import STEP
from tests.support.cases import for_each

MS = 1e-3
RUN = Run(0, 2, "a", "cpu", "gloo", num_parameters=4, gradient_bytes=16)
OPTIONS = {
    "bucket_cap_mb": 25,
    "overlap": True,
    "reduce_dtype": None,
    "ddp_comm_hook": None,
    "gradient_dtype": "torch.float32",
    "accumulate_grad_batches": 1,
    "num_workers": 0,
}
# Gradients of 10 MiB after 1 and 2 ms; each takes 2 ms on the wire. The step's other phases take 20 ms.
PROFILE = Profile(
    [ParameterSpec(name, 10 * MIB, "torch.float32 cpu") for name in ("b", "a")],
    [1 * MS, 2 * MS],
    backward_s=2 * MS,
    cost=AllReduceCost(0.0, 0.2 * MS / MIB),
    num_ranks=2,
)
TWO_BUCKETS = RecordedPlan(1, [RecordedBucket([name], [10 * MIB]) for name in ("b", "a")])
ONE_BUCKET = RecordedPlan(1, [RecordedBucket(["b", "a"], [10 * MIB] * 2)])


def numbers(
    rank: int = 0, *, exposed: float = 3, data: float = 0, forward: float = 17, error: float = 0
) -> RankNumbers:
    phases = {"data": data, "forward": forward, "backward": 2.0, "exposed": exposed, "optimizer": 1.0}
    return RankNumbers(
        rank=rank,
        host=f"host{rank}",
        num_steps=30,
        phases={name: MS * ms for name, ms in phases.items()},
        own_error_s=MS * error,
        communication_s=4 * MS,
        bytes_on_wire=20 * MIB,
        memory_bytes=(rank + 1) * 100 * MIB,
        waits=(0.2, 0.7),
    )


def about(value: float) -> Any:
    """`pytest.approx`, in the place of a number."""
    return pytest.approx(value)


def typical(*ranks: RankNumbers, plan: RecordedPlan | None = TWO_BUCKETS) -> TypicalStep:
    return TypicalStep.of(ranks, replace(RUN, world_size=len(ranks)), plan)


def suggested(
    ranks: list[RankNumbers], plan: RecordedPlan | None = TWO_BUCKETS, *, codecs: Codecs = NO_CODECS, **options: Any
) -> list[str]:
    run = replace(RUN, world_size=len(ranks), options={**OPTIONS, **options}, codecs=codecs)
    return suggestions(TypicalStep.of(ranks, run, plan, PROFILE))


def test_half_the_bytes_hide_what_the_simulation_says() -> None:
    # 1 to 3 and 3 to 5 ms, of which 3 are exposed; with half the bytes 1 to 2 and 2 to 3 ms.
    assert suggested([numbers(0), numbers(1)]) == [
        '`reduce_dtype="bf16"` would hide 2.00 of the 3.00 ms exposed (9% of the step).',
        "`accumulate_grad_batches=2`, with twice the global batch, would halve the 3.00 ms exposed (7% of the step).",
    ]

    # Scaled to what was measured, reductions of 4 ms: 1 to 5 and 5 to 9 ms, 7 exposed. Halved they are those above.
    [bf16, *_] = suggested([numbers(0, exposed=7), numbers(1, exposed=7)])
    assert bf16 == '`reduce_dtype="bf16"` would hide 4.00 of the 7.00 ms exposed (15% of the step).'


@for_each(
    ("options", "suggestion"),
    [
        ({"automatic_optimization": False}, ""),
        ({"global_batch_size": 96, "accumulate_grad_batches": 3}, "`global_batch_size=192`, with twice the"),
    ],
)
def test_no_accumulation_is_suggested_that_is_refused(options: dict[str, Any], suggestion: str) -> None:
    texts = suggested([numbers(0), numbers(1)], reduce_dtype="bf16", **options)
    assert [text for text in texts if not text.startswith(suggestion or "`bucket")] == []
    assert bool(texts) == bool(suggestion)


def test_8_bits_are_suggested_where_16_are_not_enough() -> None:
    # Reductions of 4 ms; with bf16 1 to 3 and 3 to 5 ms, with int8 1 to 2.02 and 2.02 to 3.03.
    codecs = {"int8": Codec()}
    texts = suggested([numbers(0, exposed=7), numbers(1, exposed=7)], codecs=codecs)
    assert texts[:2] == [
        '`reduce_dtype="int8"`, with 8 bits for each gradient, would hide 5.97 of the 7.00 ms exposed (22% of the'
        " step).",
        '`reduce_dtype="bf16"` would hide 4.00 of the 7.00 ms exposed (15% of the step).',
    ]
    # With 3 ms exposed it gains 0.49 more than bf16, of 23; and nothing is known of a device without measurements.
    assert not any("int8" in text for text in suggested([numbers(0), numbers(1)], codecs=codecs))
    assert not any("int8" in text for text in suggested([numbers(0, exposed=7), numbers(1, exposed=7)]))
    # Encoding both, 2 ms, and decoding them is more than that.
    slow = {"int8": Codec(1 * MS / (10 * MIB), 1 * MS / (10 * MIB))}
    assert not any("int8" in text for text in suggested([numbers(0, exposed=7), numbers(1, exposed=7)], codecs=slow))


@for_each(
    ("codec_ms", "effect"),
    [
        # Of the 2 ms of a reduction 0.1 are spent on the wire: 0.39 ms as fp32, for which bf16 saves too little.
        (1.9, "takes 2.61 ms longer"),
        # 1.03 ms are: 4.06 ms as fp32, 2.03 as bf16: 1 to 3.03 and 3.03 to 5.06 ms.
        (0.97, "saves 0.06 ms only"),
        # All are: 3.94 ms as bf16, and twice that are exposed but for 1 ms.
        (0, None),
    ],
)
def test_8_bits_that_gain_little_are_advised_against(codec_ms: float, effect: str | None) -> None:
    codecs = {"int8": Codec(inline_s_per_byte=codec_ms * MS / (10 * MIB))}
    texts = suggested([numbers(0), numbers(1)], codecs=codecs, reduce_dtype="int8")
    instead = '`reduce_dtype="bf16"`' if codec_ms < 1 else "no `reduce_dtype`"
    advice = f'{instead} instead of "int8", which {effect} here and costs precision.'
    assert [text for text in texts if "int8" in text] == ([] if effect is None else [advice])
    assert texts[-1].startswith("`accumulate_grad_batches=2`")


def test_16_bits_that_take_longer_between_ranks_are_not_suggested_but_advised_against() -> None:
    # fp32 takes 2 ms for 10 MiB. bf16 should take half, and does take 10 ms.
    measured = {name: AllReduceCost(0.0, ms * MS / (10 * MIB)) for name, ms in {"fp32": 2, "bf16": 10}.items()}
    codecs = measured_between(measured, {"bf16": Codec()})
    assert codecs["bf16"].inline_s_per_byte == pytest.approx(9 * MS / (10 * MIB))
    ranks = [numbers(0, exposed=7), numbers(1, exposed=7)]
    assert not any("bf16" in text for text in suggested(ranks, codecs=codecs))
    [advice, *_] = suggested([numbers(0, exposed=19), numbers(1, exposed=19)], codecs=codecs, reduce_dtype="bf16")
    assert re.fullmatch(
        r'no `reduce_dtype` instead of "bf16", which takes .* ms longer here and costs precision.', advice
    )


# One bucket of 4 ms from 2 to 6 ms; two of them end at 5 ms.
WAITING = [numbers(0, exposed=4), numbers(1, exposed=4)]


@for_each(
    ("options", "expected"),
    [
        ({}, ['`bucket_cap_mb="auto"`']),
        ({"overlap": False}, []),
        ({"bucket_cap_mb": "auto"}, []),  # it has measured and decided
        # Nothing may be measured.
        ({"deterministic": True}, ["`bucket_cap_mb=1`"]),
        ({"deterministic": True, "bucket_cap_mb": "auto"}, ["`bucket_cap_mb=1`"]),
        ({"shard_optimizer": True, "bucket_cap_mb": "auto"}, ["`bucket_cap_mb=1`"]),
    ],
)
def test_other_buckets_are_suggested_where_they_can_be_better(options: dict[str, Any], expected: list[str]) -> None:
    effect = "(2 instead of 1 buckets) would hide 1.00 of the 4.00 ms exposed (4% of the step)."
    texts = [text for text in suggested(WAITING, ONE_BUCKET, **options) if "bucket_cap_mb" in text]
    assert texts == [f"{option} {effect}" for option in expected]


def test_waiting_for_weights_is_waiting_and_explains_no_reduction() -> None:
    ranks = [
        replace(rank, phases={**rank.phases, "weights": 4 * MS}, exchange_s=6 * MS) for rank in (numbers(0), numbers(1))
    ]
    step = typical(*ranks)
    assert (step.exposed_s, step.unhindered.exposed_s) == (about(7 * MS), about(7 * MS))
    assert (ranks[0].own_s, step.straggler) == (about(20 * MS), None)
    plan = plan_in(PROFILE, TWO_BUCKETS)
    assert plan is not None
    assert step.fitted_cost(PROFILE, plan) == typical(numbers(0)).fitted_cost(PROFILE, plan)
    assert step.late_bucket == (1, about(0.7 * 3 * MS))
    outer_steps = [OuterStepStats(30, 200 * MS, 4 * MIB), OuterStepStats(60, 400 * MS, 4 * MIB)]
    lines = Summary.of(step, suggestions=[], state_bytes=(MIB, 2 * MIB), outer_steps=outer_steps).lines
    assert "Weights: their exchange ends a step and takes 6.00 ms of that; the step waits 4.00 ms for it." in lines
    assert (
        "Outer steps between islands: 2, the last after step 60; each takes 300.00 ms and 4.00 MiB of each rank."
        in lines
    )
    assert "Optimizer state: 1.00 MiB on rank 0, 2.00 MiB without `shard_optimizer`." in lines


def test_a_rank_that_others_wait_for_is_the_suggestion_and_not_the_network() -> None:
    # Rank 0 waits 8 ms more than rank 1, which waits for the network alone.
    ranks = [numbers(0, exposed=11), numbers(1, exposed=3, forward=25)]
    assert typical(*ranks).straggler == (ranks[1], about(8 * MS))
    texts = suggested(ranks)
    assert texts[0] == (
        "rank 1 on host1 makes the others wait 8.00 ms, most of it in forward (8.00 ms): see what else runs there, and"
        " whether its batches are larger (26% of the step)."
    )
    assert texts[1] == (
        '`reduce_dtype="bf16"` would hide 2.00 of the 3.00 ms that rank 1, the slowest, waits (6% of the step).'
    )


@for_each(("more", "error", "is_late"), [(0.5, 0, False), (0.7, 0, True), (0.7, 0.24, False), (0.7, 0.2, True)])
def test_a_straggler_is_late_by_more_than_a_little_and_more_than_by_chance(
    more: float, error: float, is_late: bool
) -> None:
    # 3% of what the others take for themselves are 0.6 ms.
    step = typical(numbers(0, error=error), numbers(1, error=error / 2), numbers(2, forward=17 + more), plan=None)
    assert (step.straggler is not None) == is_late
    assert step.unhindered.exposed_s == pytest.approx(3 * MS)
    [line] = [line for line in Summary.of(step, suggestions=[]).lines if line.startswith("Slowest rank: ")]
    assert (line == "Slowest rank: none; all take about the same time.") != is_late
    assert any("rank 2" in text for text in suggestions(step)) == is_late


@pytest.mark.parametrize(("data", "is_much"), [(2, False), (3, True)])
def test_waiting_for_data_is_named_from_a_tenth_of_the_step(data: float, is_much: bool) -> None:
    texts = suggested([numbers(0, data=data, exposed=0)])
    expected = "a larger `num_workers` of the `DataLoader`, which is 0 now, would save up to 3.00 ms (13% of the step)."
    assert texts == ([expected] if is_much else [])


@pytest.mark.parametrize(("lags_ms", "is_host_bound"), [((0.1, 0.9), True), ((0.1, 1.0), False), ((None, None), None)])
def test_graphs_are_suggested_where_no_device_is_behind_the_host(
    lags_ms: tuple[float | None, float | None], is_host_bound: bool | None
) -> None:
    lags = [None if lag is None else MS * lag for lag in lags_ms]
    ranks = [replace(numbers(rank, exposed=0), lag_s=lag) for rank, lag in enumerate(lags)]
    assert typical(*ranks).is_host_bound is is_host_bound
    told = Summary.of(typical(*ranks), suggestions=[]).lines
    assert ("Bound by the host: the GPU waits for Python in forward and backward." in told) == bool(is_host_bound)
    expected = "`cuda_graphs=True` would save a part of the 19.00 ms of forward and backward (95% of the step)."
    automatic: dict[str, Any] = {"automatic_optimization": True, "cuda_graphs": False}
    assert suggested(ranks, **automatic) == ([expected] if is_host_bound else [])
    assert suggested(ranks, **{**automatic, "cuda_graphs": True}) == []
    assert suggested(ranks, **{**automatic, "automatic_optimization": False}) == []


def test_there_are_three_at_most_the_best_come_first_and_what_gains_little_is_left_out() -> None:
    # 3 ms exposed of 203: bf16 would gain 2, which is one hundredth.
    assert suggested([numbers(0, forward=197), numbers(1, forward=197)]) == []
    ranks = [numbers(0, exposed=12, data=6), numbers(1, exposed=4, data=6, forward=25)]
    texts = suggested(ranks, ONE_BUCKET)
    assert [text.split(" ")[0] for text in texts] == ["rank", "a", '`reduce_dtype="bf16"`']


def test_the_lag_is_that_of_the_last_steps_that_were_not_replayed() -> None:
    steps = [replace(STEP, lag_s=lag) for lag in (9.0, 8.0, None, 1.0, 3.0, 2.0)]
    replayed = replace(STEP, lag_s=0.0, num_replayed=1)
    assert RankNumbers.of(RUN, [*steps, replayed]).lag_s == 2.0
    assert RankNumbers.of(RUN, [STEP]).lag_s is None


def test_phases_add_up_to_the_steps_whatever_varies() -> None:
    # Steps of 9 seconds, of which the same phase is never twice the longest: each phase's median is that of the others.
    spans: list[tuple[Any, ...]] = [("forward", 7, 1, 1), ("backward", 1, 7, 1), ("optimizer", 1, 1, 7)]
    steps = []
    for n in range(3):
        ends = [sum(span[1 + n] for span in spans[:i]) for i in range(4)]
        steps.append(replace(STEP, spans=[Span(spans[i][0], ends[i], ends[i + 1]) for i in range(3)]))
    assert RankNumbers.of(RUN, steps * 4).step_s == pytest.approx(9)


def test_the_late_bucket_takes_its_part_of_what_is_exposed() -> None:
    names = ["d", "c", "b", "a"]
    plan = RecordedPlan(1, [RecordedBucket(["e"], [MIB]), RecordedBucket(names, [MIB] * 4)])
    step = typical(numbers(0, exposed=11), numbers(1, exposed=3, forward=25), plan=plan)
    assert Summary.of(step, suggestions=["do this."]).lines == [
        "Communication: 4.00 ms, of which 0% is hidden; 20.00 MiB in 2 buckets at 41.94 Gbit/s.",
        "Late bucket: 1 of 2, 4.00 MiB (`d`, `c` and 2 more): 4.90 of the 7.00 ms exposed are spent on it.",
        "Slowest rank: 1 on host1, 8.00 ms (26% of the step) slower than the others. It waits 3.00 ms, for the network"
        " alone.",
        "Memory: 200 MiB at most, on rank 1.",
        "Suggestion 1: do this.",
    ]
    assert Summary.of(typical(numbers(), plan=None), suggestions=[]).lines == ["Memory: 100 MiB at most, on rank 0."]


def test_the_table_is_plain_where_it_is_piped(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(Summary.of(typical(numbers(0), numbers(1), plan=None), suggestions=["[b]do[/b] `this`."]))
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    title, *_ = printed.splitlines()
    assert title == "bucketddp: 30 recorded steps on 2 ranks"
    assert "│ exposed communication │  3.00 │  13.0 │" in printed
    assert "│ all                   │ 23.00 │ 100.0 │" in printed
    assert printed.endswith("\nSuggestion 1: [b]do[/b] `this`.\n")
