"""What happens to a training program: drawn at random, the same for the same seed."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support.scripts.soaked import SAVE_EVERY_N_STEPS, START_TIMEOUT_S

# Those that start ranks again by themselves: torchrun with `--max-restarts`, on one host and on two.
RESTARTING = ("elastic", "hosts")
LAUNCHERS = ("script", "torchrun", "spawn", "fork", "slurm", *RESTARTING)
MAX_RESTARTS = 3

FLIPS = ("flip-weight", "flip-gradient", "flip-file")
FULL_DISKS = ("full-disk", "full-disk-at-exception")
INSIDE = ("raise", "exit", "out-of-memory", "slow", *FULL_DISKS, "flip-weight", "flip-gradient", "clock")
SIGNALS = {"kill": "SIGKILL", "stop": "SIGSTOP", "sigterm": "SIGTERM", "sigint": "SIGINT", "flip-file": "SIGKILL"}
ON_ONE_HOST = (*INSIDE, *SIGNALS)
BETWEEN_HOSTS = ("lost-agent", "lost-host", "lost-cable")
FAULTS = (*ON_ONE_HOST, "requeue", *BETWEEN_HOSTS)
FAULTS_OF = dict.fromkeys(LAUNCHERS, ON_ONE_HOST) | {
    "slurm": (*ON_ONE_HOST, "requeue"),
    "hosts": ("raise", "out-of-memory", "kill", "stop", *BETWEEN_HOSTS),
}

# Of the group. A stuck rank is waited for so long. Longer than it takes to notice that a host is gone.
TIMEOUT_S = 10.0
TIMEOUT_ON_HOSTS_S = 30.0
# What the watchdogs need to be sure that a host is gone, and torchrun then; with the settings of `running.py`.
LOST_HOST_S = 20.0
_LAST_STEP = 30
_JUMPS_S = (3600, -3600, 86400, -86400)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to one start of the program."""

    what: str
    # A rank (or the host of its number), "all" processes, "ranks" (all, but not what has started them), the "launcher",
    # a process that is no rank, or the "newest" process.
    target: int | str
    step: int | None  # after how many steps; None: while the program starts
    delay_s: float = 0.0  # for what comes from outside: how long after that
    where: str = ""  # for what happens inside: in which function
    details: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def draw(cls, generator: random.Random, launcher: str, what: str, step: int) -> Fault:
        rank = 0 if what == "full-disk" else generator.randrange(2)
        if what in INSIDE:
            places = {
                "raise": ("training", "callback", "validation"),
                **dict.fromkeys(("flip-weight", "clock"), ("training",)),
                "flip-gradient": ("optimizer",),
            }
            where = generator.choice(places.get(what, ("training", "validation")))
            # Of a gradient, one that no rounding hides.
            bit = generator.randrange(20, 31) if what == "flip-gradient" else generator.randrange(31)
            details: dict[str, Any] = {"status": 0 if rank and launcher not in RESTARTING else 3, "bit": bit}
            target: int | str = rank
            if what == "clock":
                details = {"jump_s": generator.choice(_JUMPS_S), "dies": generator.choice([None, rank])}
                either: list[int | str] = [rank, "all"]
                target = generator.choice(either)
            return cls(what=what, target=target, step=step, where=where, details=details)
        delay_s = generator.uniform(0, 0.1)
        if what == "flip-file":
            details = {"place": generator.random(), "bit": generator.randrange(8)}
            step = max(step, 2 * SAVE_EVERY_N_STEPS)  # so that there is a file
            return cls(what=what, target=rank, step=step, delay_s=delay_s, details=details)
        if what in ("kill", "sigterm", "sigint") and launcher != "hosts":
            others = {"script": ["all"], "slurm": ["all"], "elastic": ["ranks", "launcher"]}
            choices: list[int | str] = [rank, rank, *others.get(launcher, ["all", "launcher"])]
            if launcher not in ("slurm", "elastic") and generator.random() < 0.2:
                late = generator.uniform(0.2, 8)
                return cls(what=what, target=generator.choice(["launcher", "newest"]), step=None, delay_s=late)
            return cls(what=what, target=generator.choice(choices), step=step, delay_s=delay_s)
        if what == "requeue":
            targets: list[int | str] = [rank, "ranks"]
            return cls(what=what, target=generator.choice(targets), step=step, delay_s=delay_s)
        return cls(what=what, target=rank, step=step, delay_s=delay_s)

    @property
    def signal(self) -> str:
        """Return the signal that is sent from outside; "" if none is."""
        return {**SIGNALS, "requeue": "SIGUSR1"}.get(self.what, "")

    @property
    def goes_on(self) -> bool:
        """Return whether the run shall go on as without a fault."""
        return self.what == "slow" or (self.what == "clock" and self.details["dies"] is None)

    @property
    def ends_launcher(self) -> bool:
        """Return whether the process is lost that would start the ranks again: torchrun's agent with the store."""
        return self.target in ("launcher", "all") or (self.what in ("lost-agent", "lost-host") and self.target == 0)

    @property
    def patience_s(self) -> float:
        """Return how long the ranks may wait for each other before they have to end."""
        if self.step is None:
            return START_TIMEOUT_S
        if self.what in BETWEEN_HOSTS:
            return LOST_HOST_S
        return TIMEOUT_S if self.what == "stop" else 0.0

    @property
    def max_lost_steps(self) -> int:
        """Return how many steps may be lost: 1 where any rank learns of the end with good weights and can save."""
        none_left = self.signal == "SIGKILL" and self.target in ("all", "ranks")
        if self.step is None or none_left or self.what in FLIPS + FULL_DISKS:
            return SAVE_EVERY_N_STEPS + 1
        return 1

    def says(self, launcher: str) -> str | None:
        """Return what the output of the run must match: which rank it was, in our words or in its launcher's."""
        rank = self.details.get("dies", self.target)
        if self.step is None:
            return None
        if self.target == "launcher" and self.signal == "SIGKILL":
            # Where torch starts the ranks, the kernel sends them this when their parent dies.
            return r"the process that has started rank \d is gone|rank \d received SIGINT"
        if not isinstance(rank, int):
            return None
        of_torchrun = rf"|rank +: {rank} \(local_rank"
        by_launcher = {
            **dict.fromkeys(("torchrun", *RESTARTING), of_torchrun),
            # When it starts the ranks again, which may come before another rank could say something.
            "elastic": rf"{of_torchrun}|failed \(exitcode: \S+ local_rank: {rank} \(pid",
            **dict.fromkeys(("spawn", "fork"), rf"|(?i:process) {rank} terminated with"),
        }.get(launcher, "")
        died = rf"Rank {rank} \(process \d+ on .*\) (died|can no longer be reached){by_launcher}"
        return {
            "raise": rf"Rank {rank} \(process \d+ on .*\) failed in .*: ValueError: an accident{by_launcher}",
            **dict.fromkeys(("exit", "kill", "out-of-memory", "clock"), died),
            "stop": rf"Rank {rank} .*its process is stopped|Rank {rank} .* on host",
            "sigterm": rf"rank {rank} received SIGTERM",
            "sigint": rf"rank {rank} received SIGINT",
            "full-disk": r"CheckpointWriteError: .*No space left on device",
            "full-disk-at-exception": r"No space left on device",
            "flip-weight": r"ReplicaDivergedError: .*`layers\.0\.weight`",
            "flip-gradient": r"ReplicaDivergedError: .*layers\.0\.weight`",
            "lost-host": rf"Rank {rank} (\(process \d+ on .*\) )?can no longer be reached",
        }.get(self.what)

    def describe(self) -> str:
        who = f"rank {self.target}" if isinstance(self.target, int) else f"the {self.target}"
        who = f"host {self.target}" if self.what in BETWEEN_HOSTS else "all" if self.target == "all" else who
        when = "start" if self.step is None else f"step {self.step}"
        place = f" in {self.where}" if self.where else f" + {self.delay_s:.2f} s"
        more = f", {self.details['jump_s']:+} s, dies: {self.details['dies']}" if self.what == "clock" else ""
        return f"{self.what:<23}{who:<13}{when}{place}{more}"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One round of the soak, drawn from a seed."""

    seed: int
    launcher: str
    faults: tuple[Fault, ...]  # one for each start
    is_restarted: bool = True  # afterwards, if it does not go on by itself

    @classmethod
    def draw(cls, seed: int, *, launchers: Sequence[str] = LAUNCHERS, faults: Sequence[str] = FAULTS) -> Trial:
        generator = random.Random(seed)
        possible = [one for one in launchers if set(FAULTS_OF[one]) & set(faults)]
        # Most often the one that takes several faults in the time of one.
        launcher = generator.choice([*possible, *(["elastic"] * 3 if "elastic" in possible else [])])
        kinds = [one for one in FAULTS_OF[launcher] if one in faults]
        num_faults = generator.randint(1, MAX_RESTARTS) if launcher in RESTARTING else 1
        drawn: list[Fault] = []
        for step in sorted(generator.sample(range(_LAST_STEP), num_faults)):
            drawn.append(Fault.draw(generator, launcher, generator.choice(kinds), step))
            if drawn[-1].goes_on or drawn[-1].ends_launcher or drawn[-1].what in BETWEEN_HOSTS:
                break
        is_restarted = launcher == "slurm" or drawn[-1].what in (*FULL_DISKS, "flip-file", *BETWEEN_HOSTS)
        is_restarted = is_restarted or drawn[-1].what == "clock" or generator.random() < 0.5
        return cls(seed=seed, launcher=launcher, faults=tuple(drawn), is_restarted=is_restarted)

    @property
    def completes(self) -> bool:
        """Return whether the run shall complete without help."""
        if self.launcher in RESTARTING:
            return not any(fault.ends_launcher for fault in self.faults)
        return all(fault.goes_on for fault in self.faults)

    @property
    def timeout_s(self) -> float:
        """Return how long ranks wait for each other."""
        return TIMEOUT_ON_HOSTS_S if self.launcher == "hosts" else TIMEOUT_S

    @property
    def keeps_ranks(self) -> bool:
        """Return whether the run has as many ranks at its end as before."""
        return not any(fault.what in ("lost-host", "lost-cable", "lost-agent") for fault in self.faults)

    @property
    def needs_parents(self) -> bool:
        """Return whether processes must be children of those that have started them, and start as slowly as usual."""
        return any(fault.target in ("launcher", "newest") or fault.what == "lost-agent" for fault in self.faults)

    def not_said_in(self, output: str) -> list[str]:
        wanted = [fault.says(self.launcher) for fault in self.faults]
        return [words for words in wanted if words is not None and re.search(words, output) is None]
