"""What happens to a training program: drawn at random, the same for the same seed."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support.scripts.soaked import SAVE_EVERY_N_STEPS, START_TIMEOUT_S

LAUNCHERS = ("script", "torchrun", "spawn", "fork")
SIGNALS = {"kill": "SIGKILL", "stop": "SIGSTOP", "sigterm": "SIGTERM", "sigint": "SIGINT"}
INSIDE = ("raise", "exit", "slow", "full-disk", "flip-weight")
FAULTS = (*INSIDE, *SIGNALS, "flip-file")

# Of the group. A stuck rank is waited for so long.
TIMEOUT_S = 10.0
_LAST_STEP = 45


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One round of the soak.

    Attributes:
        seed: that all of it was drawn from.
        launcher: what starts the ranks.
        fault: what happens.
        target: to whom: a rank, "all" processes, or the "launcher", a process that is no rank.
        step: after how many steps; None: while the program starts.
        delay_s: for what comes from outside: how long after that.
        where: for what happens inside: in which function.
        is_restarted: whether the program is started again afterwards.
        details: what else the fault needs to know.
    """

    seed: int
    launcher: str
    fault: str
    target: int | str
    step: int | None
    delay_s: float = 0.0
    where: str = ""
    is_restarted: bool = True
    details: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def draw(cls, seed: int, *, launchers: Sequence[str] = LAUNCHERS, faults: Sequence[str] = FAULTS) -> Trial:
        generator = random.Random(seed)
        launcher, fault = generator.choice(launchers), generator.choice(faults)
        rank = 0 if fault == "full-disk" else generator.randrange(2)
        trial: dict[str, Any] = {"seed": seed, "launcher": launcher, "fault": fault, "target": rank}
        trial["step"] = generator.randrange(_LAST_STEP)
        trial["is_restarted"] = fault in ("full-disk", "flip-file") or generator.random() < 0.5
        if fault in INSIDE:
            places = {"raise": ("training", "callback", "validation"), "flip-weight": ("training",)}
            trial["where"] = generator.choice(places.get(fault, ("training", "validation")))
            trial["details"] = {"status": 0 if rank else 3, "bit": generator.randrange(31)}
            return cls(**trial)
        trial["delay_s"] = generator.uniform(0, 0.1)
        if fault == "flip-file":
            trial["step"] = generator.randrange(2 * SAVE_EVERY_N_STEPS, _LAST_STEP)  # so that there is a file
            trial["details"] = {"place": generator.random(), "bit": generator.randrange(8)}
        elif fault != "stop":
            can_be_alone = launcher != "script"
            trial["target"] = generator.choice([rank, rank, "all", *(["launcher"] if can_be_alone else [])])
            if generator.random() < 0.2:
                trial.update(
                    step=None, delay_s=generator.uniform(0.2, 8), target=generator.choice(["launcher", "newest"])
                )
        return cls(**trial)

    @property
    def signal(self) -> str | None:
        """What is sent from outside."""
        return SIGNALS.get("kill" if self.fault == "flip-file" else self.fault)

    @property
    def finishes(self) -> bool:
        """Whether the run shall go on as if nothing had happened."""
        return self.fault == "slow"

    @property
    def patience_s(self) -> float:
        """How long the ranks may wait for each other before they have to end."""
        if self.step is None:
            return START_TIMEOUT_S
        return TIMEOUT_S if self.fault == "stop" else 0.0

    @property
    def max_lost_steps(self) -> int:
        """How far the newest checkpoint may be behind: where rank zero sees the end, it saves."""
        is_blind = self.signal in ("SIGKILL", "SIGSTOP") or self.fault == "exit"
        if self.step is None or self.fault in ("full-disk", "flip-weight") or (is_blind and self.target in (0, "all")):
            return SAVE_EVERY_N_STEPS + 1
        return 1

    @property
    def says(self) -> str | None:
        """What the output of the run must match: which rank it was, in our words or in its launcher's."""
        rank = self.target
        if self.step is None:
            return None
        if rank == "launcher" and self.signal == "SIGKILL":
            # Where torch starts the ranks, the kernel sends them this when their parent dies.
            return r"the process that has started rank \d is gone|rank \d received SIGINT"
        if not isinstance(rank, int):
            return None
        by_launcher = {
            "script": "",
            "torchrun": rf"|rank +: {rank} \(local_rank",
            "spawn": rf"|(?i:process) {rank} terminated with",
            "fork": rf"|(?i:process) {rank} terminated with",
        }[self.launcher]
        return {
            "raise": rf"Rank {rank} \(process \d+ on .*\) failed in .*: ValueError: an accident{by_launcher}",
            "exit": rf"Rank {rank} \(process \d+ on .*\) died{by_launcher}",
            "kill": rf"Rank {rank} \(process \d+ on .*\) died{by_launcher}",
            "stop": rf"Rank {rank} .*its process is stopped",
            "sigterm": rf"rank {rank} received SIGTERM",
            "sigint": rf"rank {rank} received SIGINT",
            "full-disk": r"CheckpointWriteError: .*No space left on device",
            "flip-weight": r"ReplicaDivergedError: .*`layers\.0\.weight`",
        }.get(self.fault)

    def is_said_in(self, output: str) -> bool:
        return self.says is None or re.search(self.says, output) is not None

    def describe(self) -> str:
        who = f"rank {self.target}" if isinstance(self.target, int) else f"the {self.target}"
        if self.target == "all":
            who = "all"
        when = "start" if self.step is None else f"step {self.step}"
        place = f" in {self.where}" if self.where else f" + {self.delay_s:.2f} s"
        return f"{self.launcher:<9}{self.fault:<12}{who:<14}{when}{place}"
