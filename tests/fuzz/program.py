"""A user's program as a description, and how one is drawn: small, so that a failure shrinks to the fewest blocks."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields
from typing import Any

from tests.fuzz.events import ACCIDENTS, EVENTS
from tests.fuzz.models import MODELS, WITH_UNUSED

NUM_RANKS = 2
NUM_EPOCHS = 2
BEFORE_SETUP = -1
# Gradients are counted in the first 20 backwards and only watched from then on, so some programs are longer.
SHORT, LONG = 4, 14
CHANGES_OF_WEIGHTS = ("clamp_weights", "clamp_data_of_weights")
TINY_BUCKETS_MB = 1e-5
SMALL_BUCKETS_MB = 1.5e-4

LOOPS = ("automatic", "manual", "fabric")
# The first value of each is the default of the strategy, or nearly.
OPTIONS: dict[str, tuple[Any, ...]] = {
    "bucket_cap_mb": (SMALL_BUCKETS_MB, TINY_BUCKETS_MB, "auto"),
    "overlap": (True, False),
    "shard_optimizer": (False, True, False, "parameters"),
    "on_nonfinite": ("warn", "raise", "skip", None),
    "replica_checks": (100, 1),
}


@dataclass(frozen=True)
class Event:
    """Something that happens: which of `EVENTS`, at which batch, counted over epochs, on which rank (None: on all)."""

    what: str
    at: int = 0
    rank: int | None = None

    def __str__(self) -> str:
        when = "before set-up" if self.at == BEFORE_SETUP else f"at batch {self.at}"
        return f"{self.what} {when}{'' if self.rank is None else f' on rank {self.rank}'}"


@dataclass(frozen=True)
class Program:
    """A program that trains a small model in two epochs; gradients are exchanged in the last batch of a step alone
    where it `blocks_sync`, and one that `resumes` saves after the first epoch, and goes on as another program.
    """

    model: str = "mlp"
    loop: str = "automatic"
    optimizer: str = "sgd"
    num_optimizers: int = 1
    accumulate: int = 1
    blocks_sync: bool = True
    precision: str = "32-true"
    clip: str | None = None
    has_scheduler: bool = False
    num_batches: int = SHORT
    resumes: bool = False
    events: tuple[Event, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    def __repr__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        given = [
            f"{field.name}={values[field.name]!r}" for field in fields(self) if values[field.name] != field.default
        ]
        return f"Program({', '.join(given)})"

    @property
    def num_all_batches(self) -> int:
        return NUM_EPOCHS * self.num_batches

    @property
    def all_options(self) -> dict[str, Any]:
        return {name: values[0] for name, values in OPTIONS.items()} | dict(self.options)

    @property
    def blocks(self) -> list[str]:
        """What it is made of, in words."""
        own = [f"{field.name} {getattr(self, field.name)}" for field in fields(self)[:-2]]
        options = [f"option {name}={value}" for name, value in self.all_options.items()]
        return [*own, *[f"event {event.what}" for event in self.events], *options]

    def closes_window(self, batch: int) -> bool:
        """Return whether a step follows batch `batch`, counted over epochs, as Lightning accumulates."""
        in_epoch = batch % self.num_batches + 1
        return in_epoch % self.accumulate == 0 or in_epoch == self.num_batches

    def exchanges(self, batch: int) -> bool:
        """Return whether gradients are exchanged in batch `batch`."""
        return self.closes_window(batch) or (self.loop != "automatic" and not self.blocks_sync)

    def happens(self, what: str) -> bool:
        return any(event.what == what for event in self.events)

    @property
    def has_unused(self) -> bool:
        """Whether some step does not give all parameters a gradient."""
        return self.model in WITH_UNUSED or self.happens("freeze") or self.happens("loss_without_graph_of_model")

    @property
    def ddp_can(self) -> bool:
        """Whether torch DDP trains it, and as one process would that has all batches."""
        return (
            all(EVENTS[event.what].ddp_can for event in self.events)
            # It does not exchange what only an earlier batch of a step has given.
            and not (self.has_unused and self.accumulate > 1)
            # Lightning refuses it there, or it would exchange zeros for a step that nobody wants.
            and not ((self.loop == "automatic" or self.has_unused) and self.happens("leave_out_step"))
            and not (self.happens("nan_loss") and self.all_options["on_nonfinite"] in ("raise", "skip"))
        )

    @property
    def reference_can(self) -> bool:
        """Whether `reference` can run it."""
        return all(EVENTS[event.what].reference_can for event in self.events) and not self.resumes


def is_possible(program: Program) -> bool:
    """Return whether it makes sense, and somebody knows what is right."""
    if not (program.ddp_can or program.reference_can):
        return False
    is_automatic, is_fabric = program.loop == "automatic", program.loop == "fabric"
    accidents = [event for event in program.events if event.what in ACCIDENTS]
    # The first ends the program.
    if len(accidents) > 1:
        return False
    # Of what happens behind the last exchange of a program of its own the other rank does not hear.
    if is_fabric and any(event.at == program.num_all_batches - 1 and _is_after_exchange(event) for event in accidents):
        return False
    # As long as nothing is exchanged, the other rank may be any number of batches ahead.
    if accidents and program.accumulate > 1 and any(program.happens(what) for what in CHANGES_OF_WEIGHTS):
        return False
    if is_automatic and (program.num_optimizers > 1 or not program.blocks_sync):
        return False
    # Weights that are not finite are not saved.
    if program.resumes and (
        is_fabric or not program.ddp_can or program.happens("update_ema") or program.happens("nan_loss")
    ):
        return False
    # Attention has no second derivative.
    if program.model == "tied" and program.happens("gradient_penalty"):
        return False
    # Fabric refuses that.
    if is_fabric and program.clip == "norm" and program.happens("nan_loss"):
        return False
    # Lightning would take a step with gradients that were never exchanged, and clip where there are none.
    if is_automatic and program.happens("leave_out_step") and (program.accumulate > 1 or program.clip == "value"):
        return False
    # Lightning calls the hooks of a step also where there is none to take.
    return not (is_automatic and program.happens("leave_out_step") and program.happens("raise_in_step"))


def _is_after_exchange(event: Event) -> bool:
    return EVENTS[event.what].place in ("backward", "step", "end")


def draw(seed: int) -> Program:
    """Return the program of `seed`."""
    chance = random.Random(seed)
    while not is_possible(program := _draw(chance)):
        pass
    return program


def _draw(chance: random.Random) -> Program:
    loop, accumulate = chance.choice(LOOPS), chance.choice([1, 1, 2, 3])
    num_batches = chance.choice([*[SHORT] * 9, LONG])
    kinds = chance.choices([name for name in EVENTS if name not in ACCIDENTS], k=chance.choice([0, 1, 1, 2, 2, 3, 4]))
    # They take seconds each, because ranks wait for each other.
    kinds += [chance.choice(ACCIDENTS)] if chance.random() < 0.12 else []
    drawn = {name: chance.choice(values) for name, values in OPTIONS.items()}
    is_automatic = loop == "automatic"
    return Program(
        model=chance.choice(list(MODELS)),
        loop=loop,
        optimizer=chance.choice(["sgd", "momentum", "adam"]),
        num_optimizers=1 if is_automatic else chance.choice([1, 2]),
        accumulate=accumulate,
        blocks_sync=is_automatic or accumulate == 1 or chance.choice([True, False]),
        precision=chance.choice(["32-true", "32-true", "bf16-mixed"]),
        clip=chance.choice([None, None, "norm", "value"]),
        has_scheduler=chance.choice([False, True]),
        num_batches=num_batches,
        resumes=loop != "fabric" and chance.random() < 0.2,
        events=tuple(_draw_event(chance, what, num_batches) for what in kinds),
        options=tuple((name, value) for name, value in drawn.items() if value != OPTIONS[name][0]),
    )


def _draw_event(chance: random.Random, what: str, num_batches: int) -> Event:
    kind = EVENTS[what]
    # Half of the hooks are there before set-up.
    if kind.place == "setup" and chance.random() < 0.5:
        return Event(what, BEFORE_SETUP)
    return Event(what, chance.randrange(NUM_EPOCHS * num_batches), chance.choice(kind.ranks))
