"""All that the targets for a GPU need, in one command and in a given time, which decides how often all is repeated.

    python -m benchmarks.gpu_suite --out DIRECTORY
    python -m benchmarks.gpu_suite --out DIRECTORY --seconds 90 --parts hooks memory
    python -m benchmarks.gpu_suite --markdown DIRECTORY/gpu_suite.json

The most important comes first, and each table is printed and written when it is ready, so that a run that is cut short
is worth something. Two ranks share the GPU: start NVIDIA's MPS first. `--device cpu` is a rehearsal, to see that all of
it runs: small models, two rounds at most and one at least of each part.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import memory, overlap, sharding
from benchmarks.comm_hooks import HOOKS
from benchmarks.command import turns_of
from benchmarks.fits import OpenFits
from benchmarks.limits import Limits
from benchmarks.loop import Loop, LoopSettings
from benchmarks.own_processes import OwnProcesses, without_failed
from benchmarks.peaks import Peaks
from benchmarks.ranks import Bench, Place, Ranks
from benchmarks.report import SPEED_UP, Table, about, is_ddp, table_of
from benchmarks.turns import take_turns
from benchmarks.variants import (
    ALONE,
    Variant,
    captured_variant,
    compiled,
    ddp_variants,
    our_variants,
    settling_in,
    with_hook,
    with_unused,
)
from lightning_bucketddp.comm.connections import SETTINGS

SMALL = {"resnet50": "resnet50_shapes", "gpt2": "gpt2_shapes"}
# Ranks whose process group `bucketddp` makes, with NCCL's sockets as it sets them. The others have torch's defaults.
BY_US = "two ranks, set up by bucketddp"
# How variants are compared through the Trainer, at the end of a title.
EQUAL = "equal settings"
EQUAL_TO_OURS = "equal settings, those of bucketddp"
AS_USERS_GET_IT = "as users get it"
NAMES = {"resnet50": "ResNet-50", "gpt2": "GPT-2 124M", "tiny_layers": "500 tiny parameters"}


class Stage:
    """Groups of ranks that wait for their parts. All are started at once: it takes long, and they need not wait."""

    def __init__(self, device: str, directory: Path) -> None:
        self.device = device
        self.directory = directory
        self.is_rehearsal = device == "cpu"
        self.most_rounds = 2 if self.is_rehearsal else 50
        self._places = {
            "two ranks": Place(device, 2),
            BY_US: Place(device, 2, have_group=False),
            "one rank": Place(device, 1),
        }
        self._groups: dict[str, Ranks] = {}

    def start(self) -> None:
        """Start all groups."""
        nothing = LoopSettings("tiny_layers", ())
        self._groups = {name: Ranks(Loop, nothing, place) for name, place in self._places.items()}

    def end(self, *names: str) -> None:
        """End these groups, or all of them. One that is asked for later is started again."""
        for name in names or list(self._groups):
            if name in self._groups:
                self._groups.pop(name).__exit__(None, None, None)

    def make_room(self) -> None:
        """End groups and free memory. One rank stays: MPS takes no clients while it ends for want of any."""
        self.end("two ranks", BY_US)
        if "one rank" in self._groups:
            self._groups["one rank"].build(Loop, LoopSettings("tiny_layers", ()))

    def ranks(self, name: str, bench: Bench, settings: LoopSettings) -> Ranks:
        """The group of this name, with another bench than before."""
        settings = self.rehearsed(settings)
        if name not in self._groups:
            self._groups[name] = Ranks(bench, settings, self._places[name])
        else:
            self._groups[name].build(bench, settings)
        return self._groups[name]

    def rehearsed(self, settings: LoopSettings) -> LoopSettings:
        """As little of `settings` as shows that all of it runs, if this is a rehearsal."""
        if not self.is_rehearsal:
            return settings
        model, variants = SMALL.get(settings.model, settings.model), tuple(settling_in(3, settings.variants))
        return replace(settings, model=model, variants=variants, steps=1, samples=None)


@dataclass(frozen=True)
class Part:
    """Something to measure; `share` is its share of the time, `name` what `--parts` calls it and others like it."""

    name: str
    title: str
    share: float
    measure: Callable[[Stage, str, float], Iterable[Table]]


def hidden(stage: Stage, title: str, seconds: float, *, model: str) -> list[Table]:
    """Steps with fp32 on the wire against their limits."""
    ours = [*our_variants(), *our_variants(caps=[25.0])]
    settings = LoopSettings(model, (ALONE, *ours, *ddp_variants()), steps=3)
    ranks = stage.ranks("two ranks", Limits, settings)
    samples = overlap.measure(ranks, settings, repetitions=stage.most_rounds, seconds=seconds)
    [(plan, profile), *_] = ranks.call("plan", ours[0].name)
    print(f"{ours[0].name}: {plan}")
    if profile is not None:
        # For `benchmarks.simulated_networks`; the reducer does not see the rest of a step.
        others = {f"{phase}_s": statistics.median(samples["phases"][phase]) for phase in ("forward", "optimizer")}
        (stage.directory / f"profile_{model}.json").write_text(json.dumps({**json.loads(profile), **others}, indent=1))
    return [overlap.table_of_limits(title, samples)]


def steps(stage: Stage, title: str, seconds: float, *, settings: LoopSettings, on: str = "two ranks") -> list[Table]:
    """Steps in a bare loop."""
    turns = turns_of(stage.ranks(on, Loop, settings), settings.variants)
    return [table_of(title, take_turns(turns, repetitions=stage.most_rounds, seconds=seconds), unit="ms", scale=1000)]


def fits(stage: Stage, title: str, seconds: float, *, settings: LoopSettings) -> list[Table]:
    """Steps through the Trainer, of processes with and without settings for the network, which take turns."""
    turns: dict[tuple[str, str], Callable[[], float]] = {}
    for on, variants in (("two ranks", settings.variants), (BY_US, settings.variants[1:])):
        # Ours is the first there: it makes the process group, and sets what it sets by itself.
        ranks = stage.ranks(on, OpenFits, replace(settings, variants=variants))
        turns |= {(on, name): turn for name, turn in turns_of(ranks, variants).items()}
    samples = take_turns(turns, repetitions=stage.most_rounds, seconds=seconds)
    alone, ours, *theirs = (variant.name for variant in settings.variants)
    [made, *_] = ranks.call("environment", list(SETTINGS))
    ours_are = f"; bucketddp sets {' '.join(f'{name}={value}' for name, value in made.items()) or 'nothing here'}"

    def table(how: str, groups: Mapping[str, str]) -> Table:
        found = {name: samples[on, name] for name, on in groups.items()}
        return table_of(f"{title}, {how}", found, unit="ms", scale=1000)

    here = {alone: "two ranks"}
    return [
        table(EQUAL, here | dict.fromkeys((ours, *theirs), "two ranks")),
        table(EQUAL_TO_OURS + ours_are, here | dict.fromkeys((ours, *theirs), BY_US)),
        table(AS_USERS_GET_IT + ours_are, here | {ours: BY_US, theirs[0]: "two ranks"}),
    ]


def fits_on(stage: Stage, title: str, seconds: float, *, settings: LoopSettings, on: str = "one rank") -> list[Table]:
    """Steps through the Trainer, on one rank, or on ranks with the same settings for the network."""
    turns = turns_of(stage.ranks(on, OpenFits, settings), settings.variants)
    return [table_of(title, take_turns(turns, repetitions=stage.most_rounds, seconds=seconds), unit="ms", scale=1000)]


def peaks(stage: Stage, title: str, seconds: float, *, model: str) -> list[Table]:
    """Peak memory."""
    settings = LoopSettings(model, (ALONE, *our_variants(), *ddp_variants()))
    stage.end("two ranks")  # what other parts have left is freed at any time
    return [memory.measure(stage.ranks("two ranks", Peaks, settings), settings, title=title)]


def bf16(model: str) -> LoopSettings:
    variants = (ALONE, *our_variants(wire="bf16"), *ddp_variants(wire="bf16"))
    return LoopSettings(model, variants, steps=3)


def hooked(model: str, hook: str) -> LoopSettings:
    return LoopSettings(model, (ALONE, *with_hook(hook, [*our_variants(), *ddp_variants()])), steps=3)


def all_flags(model: str, *, steps: int) -> LoopSettings:
    return LoopSettings(model, (ALONE, *our_variants(), *ddp_variants()), steps=steps)


def captured(model: str, *, steps: int) -> LoopSettings:
    # Ours comes first: it makes the process group, and sets what it sets by itself.
    return LoopSettings(model, (*our_variants(), captured_variant(), *ddp_variants(), ALONE), steps=steps)


def batch_sizes(
    stage: Stage, title: str, seconds: float, *, settings: LoopSettings, samples: Sequence[int], on: str
) -> Iterator[Table]:
    """Steps through the Trainer with and without CUDA graphs, by the number of samples in a batch."""
    rows = {}
    for number in samples:
        ranks = stage.ranks(on, OpenFits, replace(settings, samples=number))
        turns = turns_of(ranks, settings.variants)
        found = take_turns(turns, repetitions=stage.most_rounds, seconds=seconds / len(samples))
        eager, graphs, ddp = (1000 * statistics.median(found[variant.name]) for variant in settings.variants)
        rows[str(number)] = [ddp, eager, graphs, ddp / graphs, eager / graphs, len(found[settings.variants[0].name])]
        names = [f"{name} ms" for name in ("ddp", "bucketddp", "captured")]
        yield Table(title, [*names, "captured, x ddp", "captured, x bucketddp", "rounds"], dict(rows), plot="lines")


def compiled_fits(stage: Stage, title: str, seconds: float, *, settings: LoopSettings) -> Iterator[Table]:
    """Steps of compiled models through the Trainer, on one rank, and on two with our settings for the network."""
    began = time.monotonic()
    stage.make_room()
    settings = stage.rehearsed(settings)
    places = {
        "1 rank": Place(stage.device, 1, COMPILE_ALONE),
        "2 ranks": Place(stage.device, 2, SETTINGS | COMPILE_ALONE),
    }
    with OwnProcesses(settings, places) as fits:
        ready = fits.first_steps()
        for left, at in zip((2, 1), places, strict=True):
            time_left = (began + seconds - time.monotonic()) / left
            rounds = take_turns(fits.turns(at), repetitions=stage.most_rounds, seconds=max(time_left, 12.0))
            samples = {name: [1000 * turn.seconds for turn in turns] for name, turns in without_failed(rounds).items()}
            medians = {name: statistics.median(values) for name, values in samples.items()}
            modes = {variant.name: variant.compiled for variant in settings.variants}
            ddp = {modes[name]: median for name, median in medians.items() if is_ddp(name)}
            nan = float("nan")
            rows = {
                name: [
                    median,
                    min(samples[name]),
                    max(samples[name]),
                    ddp.get(None, nan) / median,
                    ddp.get(modes[name], nan) / median,
                    ready[at, name],
                ]
                for name, median in medians.items()
            }
            columns = ["median ms", "min", "max", "x ddp", "x ddp in this mode", "ready after s"]
            yield Table(f"{title}, {at}", columns, rows, samples=samples)


def strategies(stage: Stage, title: str, seconds: float) -> Iterator[Table]:
    """Steps through the Trainer and peak memory, with `shard_optimizer`, FSDP and FSDP2."""
    stage.make_room()
    settings = stage.rehearsed(LoopSettings("gpt2", sharding.strategies(stage.device), steps=3, optimizer="adamw"))
    place = Place(stage.device, 2, SETTINGS)
    # The processes need about half of the time to start.
    yield from sharding.compare(settings, place, repetitions=stage.most_rounds, seconds=seconds / 2, title=title)


def compiled_models(model: str, *, steps: int) -> LoopSettings:
    [ours], best = our_variants(), ddp_variants()[-1]
    both = [compiled(variant, mode) for mode in ("default", "reduce-overhead") for variant in (best, ours)]
    both_ways = compiled(captured_variant(), "default")
    return LoopSettings(model, (best, captured_variant(), *both, both_ways), steps=steps)


def unused(stage: Stage, title: str, seconds: float, *, model: str) -> list[Table]:
    """Steps with all layers, with the same ones unused in each step, and with others."""
    best = ddp_variants()[-2]  # without a static graph, which allows no others
    every = [ALONE, *our_variants(), best]
    groups: dict[str, list[Variant]] = {"all layers used": every}
    for which in ("same", "changing"):
        left_out = [found for variant in every if (found := with_unused(variant, which)) is not None]
        groups[f"unused: {which}"] = [replace(found, name=f"{found.name}, {which}") for found in left_out]
    settings = LoopSettings(model, tuple(itertools.chain(*groups.values())), steps=5)
    turns = turns_of(stage.ranks("two ranks", Loop, settings), settings.variants)
    samples = take_turns(turns, repetitions=stage.most_rounds, seconds=seconds)
    tables = []
    for how, group in groups.items():
        found = {used.name: samples[variant.name] for used, variant in zip(every, group, strict=True)}
        table = table_of(f"{title}, {how}", found, unit="ms", scale=1000)
        rows = {name: [*row, row[0] / statistics.median(samples[name]) / 1000] for name, row in table.rows.items()}
        tables.append(replace(table, columns=[*table.columns, "x all layers used"], rows=rows))
    return tables


# Compilers of their own for each of many processes would need more memory than there is.
COMPILE_ALONE = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}

# The shares are the seconds that five rounds or more take on an H200.
PARTS = [
    *(
        Part(
            "trainer",
            f"{model}, 2 ranks, through the Trainer",
            share,
            partial(fits, settings=all_flags(model, steps=steps)),
        )
        for model, steps, share in (("gpt2", 4, 55), ("resnet50", 8, 28), ("tiny_layers", 20, 18))
    ),
    *(
        Part(
            "trainer",
            f"{model}, 1 rank, through the Trainer",
            share,
            partial(fits_on, settings=all_flags(model, steps=steps)),
        )
        for model, steps, share in (("resnet50", 8, 14), ("tiny_layers", 20, 10))
    ),
    *(
        Part(
            "captured",
            f"{model}, {ranks}, through the Trainer, with CUDA graphs",
            share,
            partial(fits_on, settings=captured(model, steps=steps), on=on),
        )
        for model, steps, share in (("tiny_layers", 20, 16), ("gpt2", 4, 14), ("resnet50", 8, 12))
        for ranks, on in (("1 rank", "one rank"), ("2 ranks", BY_US))
    ),
    *(
        Part(
            "batches",
            f"{model}, {ranks}, through the Trainer, by samples in a batch",
            share,
            partial(
                batch_sizes,
                settings=LoopSettings(model, (*our_variants(), captured_variant(), ddp_variants()[-1]), steps=steps),
                samples=samples,
                on=on,
            ),
        )
        for model, ranks, on, samples, steps, share in (
            ("gpt2", "1 rank", "one rank", (1, 4, 16), 5, 26),
            ("resnet50", "1 rank", "one rank", (1, 4, 16, 64), 8, 16),
            ("resnet50", "2 ranks", BY_US, (1, 16, 64), 8, 20),
            ("gpt2", "2 ranks", BY_US, (1, 8), 4, 24),
        )
    ),
    Part("strategies", "gpt2, AdamW, 2 ranks, through the Trainer, sharded", 60, strategies),
    *(
        Part(
            "compiled",
            f"{model}, through the Trainer, compiled",
            share,
            partial(compiled_fits, settings=compiled_models(model, steps=steps)),
        )
        for model, steps, share in (("gpt2", 5, 85), ("tiny_layers", 20, 90))
    ),
    Part("loop", "gpt2, 2 ranks, fp32 wire", 50, partial(hidden, model="gpt2")),
    Part("loop", "resnet50, 2 ranks, fp32 wire", 22, partial(hidden, model="resnet50")),
    Part("loop", "resnet50, 1 rank", 10, partial(steps, settings=all_flags("resnet50", steps=10), on="one rank")),
    Part("unused", "resnet50, 2 ranks, unused layers", 16, partial(unused, model="resnet50")),
    Part("memory", "gpt2, 2 ranks, peak memory", 35, partial(peaks, model="gpt2")),
    Part("memory", "resnet50, 2 ranks, peak memory", 15, partial(peaks, model="resnet50")),
    *(
        Part("hooks", f"{model}, 2 ranks, {hook} hook", share, partial(steps, settings=hooked(model, hook)))
        for model, share in (("resnet50", 12), ("gpt2", 20))
        for hook in HOOKS
        # It reshapes gradients, which those that are channels_last refuse.
        if (model, hook) != ("resnet50", "PowerSGD")
    ),
    Part("bf16", "gpt2, 2 ranks, bf16 wire", 20, partial(steps, settings=bf16("gpt2"))),
    Part("bf16", "resnet50, 2 ranks, bf16 wire", 10, partial(steps, settings=bf16("resnet50"))),
]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(dict.fromkeys(part.name for part in PARTS))
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, metavar="DIRECTORY", help="for gpu_suite.json and .txt")
    what.add_argument("--markdown", type=Path, metavar="FILE", help="only print a short table of this gpu_suite.json")
    what.add_argument("--list", action="store_true", help="only say what the parts are")
    parser.add_argument("--parts", nargs="+", choices=names, default=names, metavar="NAME", help="(default: all)")
    parser.add_argument("--seconds", type=float, default=420, help="for all parts together (default: 420)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal (default: cuda)")
    args = parser.parse_args(arguments)
    if args.markdown is not None:
        print(markdown(json.loads(args.markdown.read_text())["tables"]))
        return 0
    parts = [part for part in PARTS if part.name in args.parts]
    if args.list:
        print(*(f"{part.name:<10}{part.title}" for part in parts), sep="\n")
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    results = Results(args.out, about("MPS" if args.device == "cuda" else "a rehearsal"))
    measure(parts, Stage(args.device, args.out), results, deadline=time.monotonic() + args.seconds)
    return int(bool(results.missing))


def measure(parts: Sequence[Part], stage: Stage, results: Results, *, deadline: float) -> None:
    """Measure each of `parts`, which share the time until `deadline`."""
    stage.start()
    try:
        for index, part in enumerate(parts):
            left = deadline - time.monotonic()
            if left <= 0 and not stage.is_rehearsal:
                results.miss(part, "no time was left")
                continue
            try:
                share = left * part.share / sum(later.share for later in parts[index:])
                for table in part.measure(stage, part.title, share):
                    results.add(table)
            except Exception:
                # Ranks that failed cannot go on; the other parts can.
                results.miss(part, traceback.format_exc())
                stage.end()
    finally:
        stage.end()


def markdown(tables: Sequence[Mapping[str, Any]]) -> str:
    """A row for each comparison: how many times faster than the best torch DDP, and both medians with their ranges."""
    rows: dict[str, dict[str, str]] = {}
    for table in tables:
        if SPEED_UP not in table["columns"]:
            continue
        what, _, how = table["title"].split(";")[0].partition(" Trainer, ")
        model, _, rest = (f"{what} Trainer" if how else what).partition(",")
        rows.setdefault(NAMES[model] + "," + rest, {})[how or EQUAL] = _cell(table)
    columns = (EQUAL, EQUAL_TO_OURS, AS_USERS_GET_IT)
    lines = [
        ["", *columns],
        ["---"] * 4,
        *([what, *(cells.get(how, "") for how in columns)] for what, cells in rows.items()),
    ]
    return "\n".join("|" + "".join(f" {cell} |" if cell else " |" for cell in line) for line in lines)


def _cell(table: Mapping[str, Any]) -> str:
    rows: Mapping[str, Sequence[float]] = table["rows"]
    ours = rows["bucketddp"]
    best = min((row for name, row in rows.items() if is_ddp(name)), key=lambda row: row[0])
    own, theirs = (f"{median:.3g} ms ({least:.3g} to {most:.3g})" for median, least, most, *_ in (ours, best))
    return f"**{ours[table['columns'].index(SPEED_UP)]:.2f}x**: {own} against {theirs}"


class Results:
    """What there is so far, on the terminal and in files."""

    def __init__(self, directory: Path, about: str) -> None:
        self._directory = directory
        self._about = about
        self._tables: dict[str, Table] = {}
        self.missing: dict[str, str] = {}
        self._began = time.monotonic()
        self._text = ""
        self._say(f"{about}\n")

    def add(self, table: Table) -> None:
        self._tables[table.title] = table  # one that grows replaces what there was of it
        self._say(f"{table}after {time.monotonic() - self._began:.0f} s, {_rounds(table)} rounds\n")

    def miss(self, part: Part, why: str) -> None:
        self.missing[part.title] = why
        self._say(f"{part.title}: not measured: {why}\n")

    def _say(self, text: str) -> None:
        print(text, flush=True)
        self._text += f"{text}\n"
        (self._directory / "gpu_suite.txt").write_text(self._text)
        found = {"about": self._about, "tables": [asdict(table) for table in self._tables.values()]}
        found["missing"] = self.missing
        (self._directory / "gpu_suite.json").write_text(json.dumps(found, indent=1))


def _rounds(table: Table) -> int:
    return max((len(values) for values in table.samples.values()), default=1)


if __name__ == "__main__":
    raise SystemExit(main())
