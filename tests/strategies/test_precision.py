"""Every precision of the Trainer, and gradients that travel in another dtype than their own."""

from __future__ import annotations

import pytest

from tests.support.cases import for_each
from tests.support.ranks import run_on_ranks
from tests.support.scripts.precision import train

# On CPUs Lightning turns 16-mixed into bf16-mixed, unless it is given a GradScaler.
GRADIENTS_OF = {
    "32-true": "torch.float32",
    "64-true": "torch.float64",
    "16-mixed": "torch.float32",
    "bf16-mixed": "torch.float32",
    "bf16-true": "torch.bfloat16",
    "16-true": "torch.float16",
    "scaler": "torch.float32",
    "plugin": "torch.float32",
}


@pytest.mark.parametrize(
    "precision",
    [
        "bf16-true",
        "scaler",
        *(pytest.param(one, marks=pytest.mark.long) for one in ("32-true", "bf16-mixed", "16-true")),
    ],
)
def test_every_precision_trains_with_8_bits_on_the_wire(precision: str) -> None:
    ranks = run_on_ranks(train, precision=precision, like_ddp=False, reduce_dtype="int8")
    exact = run_on_ranks(train, precision=precision, like_ddp=False)
    for rank in ranks:
        assert rank["gradients"] == [GRADIENTS_OF[precision]]
        assert rank["weights"] == ranks[0]["weights"] != exact[0]["weights"]


@pytest.mark.parametrize("precision", GRADIENTS_OF)
@pytest.mark.sampled(4)
def test_training_equals_ddp(precision: str) -> None:
    ours = run_on_ranks(train, precision=precision, like_ddp=False)
    ddp = run_on_ranks(train, precision=precision, like_ddp=True)
    for rank in ours:
        assert rank["weights"] == ddp[0]["weights"]
        assert rank["gradients"] == rank["travelled"] == [GRADIENTS_OF[precision]]


@for_each(
    ("precision", "reduce_dtype", "travels_as"),
    [
        ("bf16-true", "fp32", "torch.float32"),
        ("16-true", "fp32", "torch.float32"),
        ("32-true", "bf16", "torch.bfloat16"),
        ("bf16-mixed", "fp16", "torch.float16"),
    ],
)
def test_gradients_travel_in_the_dtype_asked_for(precision: str, reduce_dtype: str, travels_as: str) -> None:
    ranks = run_on_ranks(train, precision=precision, like_ddp=False, reduce_dtype=reduce_dtype)
    for rank in ranks:
        assert rank["travelled"] == [travels_as]
        assert rank["gradients"] == [GRADIENTS_OF[precision]]
        assert rank["weights"] == ranks[0]["weights"]
