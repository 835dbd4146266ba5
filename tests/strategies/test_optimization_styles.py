"""However a LightningModule optimizes, on two processes `bucketddp` gives the weights that `ddp` gives."""

from __future__ import annotations

import pytest
from lightning.pytorch import LightningModule

from tests.support.cases import for_each
from tests.support.ranks import run_on_ranks
from tests.support.scripts.players import GANS, train_gan, watch_turns
from tests.support.scripts.styles import STYLES, train_in_style

NUM_BATCHES = 10
GENERATOR = [f"layers.generator.{layer}.{kind}" for layer in (0, 2) for kind in ("bias", "weight")]
DISCRIMINATOR = [name.replace("generator", "discriminator") for name in GENERATOR]

# Added after the oldest Lightning that we support.
needs_toggled_optimizer = pytest.mark.skipif(
    not hasattr(LightningModule, "toggled_optimizer"), reason="this Lightning has no `toggled_optimizer`"
)


@pytest.mark.parametrize("style", list(STYLES))
@pytest.mark.sampled(6)
def test_training_equals_ddp(style: str) -> None:
    ours = run_on_ranks(train_in_style, style=style, like_ddp=False)
    ddp = run_on_ranks(train_in_style, style=style, like_ddp=True)
    for rank, expected in zip(ours, ddp, strict=True):
        assert rank["weights"] == ddp[0]["weights"]
        assert rank["norms"] == expected["norms"]
        assert rank["evaluations"] == expected["evaluations"]


@for_each(
    ("style", "per_batch"),
    [("two_losses", 2), ("two_losses_one_reduction", 1), ("same_graph_twice", 2), ("weight_penalty", 1)],
)
def test_each_backward_that_is_not_blocked_synchronises_once(style: str, per_batch: int) -> None:
    for rank in run_on_ranks(train_in_style, style=style, like_ddp=False):
        assert rank["synchronised_backwards"] == per_batch * NUM_BATCHES


def test_a_line_search_evaluates_several_times_per_step() -> None:
    for rank in run_on_ranks(train_in_style, style="line_search", like_ddp=False):
        assert len(rank["evaluations"]) == rank["synchronised_backwards"] > 2 * NUM_BATCHES


@pytest.mark.parametrize(
    "gan",
    [pytest.param(gan, marks=needs_toggled_optimizer if gan == "toggled_optimizer" else ()) for gan in GANS],
)
@pytest.mark.sampled(3)
def test_two_networks_that_take_turns_equal_ddp(gan: str) -> None:
    ours = run_on_ranks(train_gan, gan=gan, strategy="bucketddp")
    ddp = run_on_ranks(train_gan, gan=gan, strategy="ddp_find_unused_parameters_true")
    assert ours == [ddp[0]] * 2


@for_each("switching", ["toggle_optimizer", "toggle_model"])
@for_each("discriminator_every", [1, 2])
def test_a_network_that_is_toggled_off_is_not_communicated(switching: str, discriminator_every: int) -> None:
    expected = [
        members
        for batch in range(NUM_BATCHES)
        for members in ([GENERATOR, DISCRIMINATOR] if batch % discriminator_every == 0 else [GENERATOR])
    ]
    for rank in run_on_ranks(watch_turns, switching=switching, discriminator_every=discriminator_every):
        assert [turn["members"] for turn in rank] == expected
        for turn in rank:
            assert turn["num_collectives"] > 1
            assert turn["bytes"] == turn["bytes_by_stats"]


def test_a_network_that_is_only_left_alone_is_communicated() -> None:
    for rank in run_on_ranks(watch_turns, switching="nothing", discriminator_every=1):
        assert all(turn["members"] == sorted(GENERATOR + DISCRIMINATOR) for turn in rank)
