"""What travels, and what that costs: predictions and advice, worked out by hand."""

from __future__ import annotations

import pytest
import torch

from lightning_bucketddp.config import ReducerConfig
from lightning_bucketddp.planning.cost import AllReduceCost, Codec, Profile, Wire, simulate
from lightning_bucketddp.planning.optimal_plan import WireOptions, predict
from lightning_bucketddp.planning.plan import BucketSpec, ParameterSpec
from lightning_bucketddp.reducer.quantization import Blocks
from tests.support.cases import for_each

MS = 1e-3
# 1,000 blocks of fp32.
SIZE = 1000 * 256 * 4
SPECS = [ParameterSpec(name, SIZE, "torch.float32 cpu", alone=True) for name in ("b", "a")]
# Gradients after 1 and 2 ms of backward; forward and optimizer take 2 ms more.
PROFILE = Profile(SPECS, [1 * MS, 2 * MS], 2 * MS, cost=None, num_ranks=2, forward_s=1 * MS, optimizer_s=1 * MS)
# Each takes 0.1 + 8 ms as it is.
SLOW = AllReduceCost(0.1 * MS, 8 * MS / SIZE)
PLAN = [BucketSpec((0,), alone=True), BucketSpec((1,), alone=True)]


def options(cost: AllReduceCost, *, profile: Profile = PROFILE, int8: Codec | None = None) -> WireOptions:
    codecs = {} if int8 is None else {"int8": int8}
    return WireOptions.predict(profile, ReducerConfig(), cost, num_ranks=2, codecs=codecs)


def test_a_block_of_8_bits_has_260_bytes_and_two_latencies() -> None:
    codec = Codec(1.0, 2.0, 3.0)
    wire = Wire.of("int8", SPECS, {"int8": codec})
    assert wire == Wire(share=260 / 1024, num_collectives=2, codec=codec)
    # Two rows of 125 blocks, as they travel.
    assert (
        Blocks(250 * 256, num_rows=2, row_numel=125 * 256, device=torch.device("cpu")).bytes.nbytes
        == wire.share * SIZE / 4
    )
    assert wire.cost(SLOW).latency_s == 2 * SLOW.latency_s
    assert wire.cost(SLOW).s_per_byte == pytest.approx(SLOW.s_per_byte * 260 / 1024 + 3)


def test_who_computes_backward_encodes_and_decodes() -> None:
    # Encoded from 1 to 1.5 and, late by that, from 2.5 to 3 ms; on the wire until 2.5 and 4; decoded until 4.25.
    cost, codec = AllReduceCost(0.0, 1 * MS / SIZE), Codec(0.5 * MS / SIZE, 0.25 * MS / SIZE)
    step = simulate(PROFILE, PLAN, cost, codec=codec)
    assert [bucket.start_s for bucket in step.buckets] == pytest.approx([1.5 * MS, 3 * MS])
    assert step.end_s == pytest.approx(4.25 * MS)
    assert step.exposed_s == pytest.approx(2.25 * MS)
    # On a network that nothing is waited for, the codec is.
    alone = simulate(PROFILE, PLAN, AllReduceCost(0.0, 0.0), codec=codec)
    assert alone.exposed_s == pytest.approx(1.5 * MS)


def test_steps_by_hand() -> None:
    found = options(SLOW, int8=Codec(inline_s_per_byte=1 * MS / SIZE))
    # From 1 ms on, twice 8.1 ms, and 0.1 for the flags, of which 1 is hidden; twice 4.1; twice 0.2 + 2.03 + 1.
    assert found.own.exposed_s == pytest.approx(15.3 * MS)
    assert found.by_dtype["bf16"].exposed_s == pytest.approx(7.3 * MS)
    assert found.by_dtype["int8"].exposed_s == pytest.approx((2 * (0.2 + 8 * 260 / 1024 + 1) + 0.2 - 1) * MS)
    # All weights at once after so many steps, and nothing hides it: 0.1 + 16 ms.
    assert [option.exposed_s for option in found.local] == pytest.approx([1.61 * MS, 0.161 / 0.3 * MS, 0.161 * MS])
    assert [option.compute_s for option in found.all] == pytest.approx([4 * MS] * 6)
    # Between two ranks each sends all of it once.
    sent = [2 * SIZE, SIZE, 2 * SIZE * 260 / 1024, 2 * SIZE / 10, 2 * SIZE / 30, 2 * SIZE / 100]
    assert [option.sent_bytes for option in found.all] == pytest.approx(sent)


def test_sharded_gradients_travel_small_and_weights_as_they_are() -> None:
    config = ReducerConfig(reduce_dtype="int8", bucket_cap_mb=0.1)
    found = WireOptions.predict(PROFILE, config, SLOW, num_ranks=2, codecs={}, is_sharded=True)
    assert found.by_dtype["int8"].exposed_s == predict(PROFILE, config, SLOW, num_shards=2).exposed_s
    assert found.by_dtype["int8"].exposed_s > predict(PROFILE, config, SLOW).exposed_s
    assert found.by_dtype["int8"].sent_bytes == pytest.approx(SIZE * (1 + 260 / 1024))
    assert found.local == []


@for_each(
    ("ms", "codec_ms", "advice"),
    [
        # Nothing is waited for, but 0.1 ms to encode.
        (0, 0.05, 'Leave gradients as they are on X: a step waits 0.00 ms. `reduce_dtype="int8"` would take 2%'
         " longer: do not set it."),
        # Waits of 0.3, 0.15 and 0.08 ms beside 4.
        (0.3, 0, '`reduce_dtype="bf16"` saves 3% of a step on X. `reduce_dtype="int8"` would save 2% more, which is not'
         " worth its 8 bits."),
        # Waits of 5, 2 and 0.76 ms.
        (3, 0, '`reduce_dtype="int8"` saves 47% of a step on X, and 21% of one with bf16; gradients then have 8 bits,'
         " see docs/slow-networks.md."),
        # Waits of 199, 99 and 49.8 ms; 20 ms with 10 local steps, 6.7 with 30 and 2 with 100.
        (100, 0, '`local_steps=100` saves 97% of a step on X, but trains differently, see docs/slow-networks.md.'
         ' `reduce_dtype="int8"` saves 74%, and a step still waits 49.78 ms for 4.00 ms of computation.'),
    ],
)  # fmt: skip
def test_what_changes_least_is_advised_if_it_is_enough(ms: float, codec_ms: float, advice: str) -> None:
    codec = Codec(codec_ms * MS / SIZE)
    assert options(AllReduceCost(0.0, ms * MS / SIZE), int8=codec).advice("X") == advice
