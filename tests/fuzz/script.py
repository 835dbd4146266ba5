"""Prints a drawn program as a script of its own: a user's program that starts two ranks and shows what is wrong."""

from __future__ import annotations

import inspect
import re
from typing import Any

from tests.fuzz import events as events_module
from tests.fuzz.events import EVENTS
from tests.fuzz.models import MODELS
from tests.fuzz.program import BEFORE_SETUP, NUM_EPOCHS, Program
from tests.fuzz.training import LEARNING_RATES

_HEAD = '''\
"""{description}

{verdict}

`python` and the name of this file starts two ranks; with `ddp` behind it they use torch DDP.
"""

from __future__ import annotations

import copy
import os
import sys
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_bucketddp import BucketDDPStrategy

OPTIONS: dict[str, Any] = {options}
# The sums of the right weights; where a rank fails: of those that it may have then.
RIGHT: list[list[dict[str, float]]] = [
    {right},
]


def strategy() -> Any:
    return "{ddp}" if "ddp" in sys.argv else BucketDDPStrategy(**OPTIONS)
'''

_RUN = '''
class Run:
    """A rank: what the events above see."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = {model}()
        self.rank = 0
        self.batch = -1
        self.ema: nn.Module | None = None
        self.handles: list[Any] = []
{setup}

    def begin_batch(self, rank: int, batch: int) -> None:
        self.rank, self.batch = rank, batch
        self.x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * rank + batch))
        in_epoch = batch % {num_batches} + 1
        self.closes_window = in_epoch % {accumulate} == 0 or in_epoch == {num_batches}
        self.leaves_out_step = False
{start}

    def again(self, net: Any = None) -> Tensor:
        turn = self.batch{turn}
        return (net or self.net)(self.x, turn).float().square().mean()

    def loss(self, net: Any) -> Tensor:
        loss = self.again(net)
{loss}
        return loss

    def optimizers(self) -> list[Any]:
        params = list(self.net.parameters())
        half = len(params) // 2
        return [{optimizer} for part in {parts}]

    def report(self) -> None:
        sums = {{name: float(param.detach().double().sum()) for name, param in self.net.named_parameters()}}
        is_right = any(all(abs(sums[name] - right[name]) <= 1e-9 for name in sums) for right in RIGHT[self.rank])
        lines = [f"rank {{self.rank}} has {{'right' if is_right else 'WRONG'}} weights after batch {{self.batch}}"]
        lines += [f"  {{name}}: {{sums[name]:.9g}}, right {{RIGHT[self.rank][0][name]:.9g}}" for name in sums]
        print("\\n".join(lines), flush=True)

'''

_MODULE = """
class Module(LightningModule):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.net, self.run = run.net, run
        self.automatic_optimization = {is_automatic}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.run.begin_batch(self.global_rank, self.current_epoch * {num_batches} + batch_idx)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        run = self.run
        loss = run.loss(self.net)
{training_step}

{hooks}    def configure_optimizers(self) -> Any:
        optimizers = self.run.optimizers()
{schedulers}


def main() -> None:
    run = Run()
    trainer_options: dict[str, Any] = {trainer_options}
    data = DataLoader([torch.zeros(4)] * {num_batches}, batch_size=None)  # type: ignore[arg-type]
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy(), max_epochs={max_epochs}, **trainer_options)
    try:
        trainer.fit(Module(run), data)
{resume}
    finally:
        run.report()


if __name__ == "__main__":
    main()
"""

_FABRIC = """
def main() -> None:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy(), precision="{precision}")
    fabric.launch()
    run = Run()
    net, *optimizers = fabric.setup(run.net, *run.optimizers())
    schedulers = [torch.optim.lr_scheduler.StepLR(o.optimizer, 1, gamma=0.5) for o in optimizers if {has_scheduler}]
    try:
        for batch in range({num_all_batches}):
            run.begin_batch(fabric.global_rank, batch)
            with fabric.no_backward_sync(net, enabled=not ({exchanges})):
                loss = run.loss(net)
                fabric.backward(loss)
{after_backward}
            if run.closes_window and not run.leaves_out_step:
                for optimizer in optimizers:
{clip}
{before_step}
                    optimizer.step()
                    optimizer.zero_grad()
                for scheduler in schedulers:
                    scheduler.step()
{end}
    finally:
        run.report()


if __name__ == "__main__":
    main()
"""


def script_of(program: Program, *, verdict: str, right: list[list[dict[str, Any]]]) -> str:
    """Return `program` as Python; `right` are the weights that each rank may have at the end."""
    parts = [*_models(program), *_events(program), _run(program)]
    parts.append(_fabric(program) if program.loop == "fabric" else _trainer(program))
    body = "\n".join(parts)
    head = _HEAD.format(
        description=repr(program),
        verdict=verdict,
        options=program.all_options,
        ddp="ddp_find_unused_parameters_true" if program.has_unused else "ddp",
        right=",\n    ".join(str(_without_repetition([_sums(weights) for weights in rank])) for rank in right),
    )
    body = re.sub(r"(?<=[^\n])\n\n(?=    {2,}\S)", "\n", body)  # where nothing happens
    body = re.sub(r"\n\n\n(?=    )", "\n\n", body)
    return re.sub(r"\n{4,}", "\n\n\n", "\n\n".join([_without_unused_imports(head, body), body]))


def _without_unused_imports(head: str, body: str) -> str:
    """Leave out the lines of `head` that import what neither it nor `body` uses."""
    lines = head.splitlines()
    rest = body + "".join(line for line in lines if "import" not in line)
    imports = re.compile(r"(?:from (?!__future__)\S+ )?import (.*)")
    kept = []
    for line in lines:
        names = (
            [name.split(" as ")[-1].split(".")[0] for name in found[1].split(", ")]
            if (found := imports.fullmatch(line))
            else []
        )
        if not names or any(re.search(rf"\b{name}\b", rest) for name in names):
            kept.append(line)
    return "\n".join(kept)


def _sums(weights: dict[str, Any]) -> dict[str, float]:
    return {name.removeprefix("weight "): _sum(value) for name, value in weights.items()}


def _without_repetition(values: list[Any]) -> list[Any]:
    return [value for index, value in enumerate(values) if value not in values[:index]]


def _sum(value: Any) -> float:
    return float(sum(map(_sum, value))) if isinstance(value, list) else float(value)


def _models(program: Program) -> list[str]:
    kind = MODELS[program.model]
    kinds = [base for base in reversed(kind.__mro__) if base.__module__ == kind.__module__]
    return ["\n" + inspect.getsource(base) for base in kinds]


def _events(program: Program) -> list[str]:
    sources = [inspect.getsource(EVENTS[name].act) for name in dict.fromkeys(event.what for event in program.events)]
    if any("_scaled" in source for source in sources):
        sources.append(inspect.getsource(events_module._scaled))
    if any("Accident(" in source for source in sources):
        sources.insert(0, inspect.getsource(events_module.Accident))
    return ["\n" + re.sub(r"^@event\(.*?\)\n(?=def )", "", source, flags=re.DOTALL) for source in sources]


def _happening(program: Program, *places: str, run: str = "run", indent: int, before_setup: bool = False) -> str:
    """Return the lines that have events happen at these places."""
    lines = []
    for place, event in [(place, event) for place in places for event in program.events]:
        if EVENTS[event.what].place != place or (event.at == BEFORE_SETUP) != before_setup:
            continue
        when = [f"{run}.batch == {event.at}"] if not before_setup else []
        when += [] if event.rank is None else [f"{run}.rank == {event.rank}"]
        call = f"loss = {event.what}({run}, loss)" if place == "loss" else f"{event.what}({run}, None)"
        lines += [f"if {' and '.join(when)}:", f"    {call}"] if when else [call]
    return "\n".join(" " * indent + line for line in lines)


def _run(program: Program) -> str:
    lr = LEARNING_RATES[program.optimizer]
    momentum = ", momentum=0.9" if program.optimizer == "momentum" else ""
    adam, sgd = f"torch.optim.Adam(part, lr={lr})", f"torch.optim.SGD(part, lr={lr}{momentum})"
    return _RUN.format(
        model=MODELS[program.model].__name__,
        setup=_happening(program, "setup", run="self", indent=8, before_setup=True),
        num_batches=program.num_batches,
        accumulate=program.accumulate,
        start=_happening(program, "setup", "start", run="self", indent=8),
        turn=" + self.rank" if program.model == "branches_by_rank" else "",
        loss=_happening(program, "loss", run="self", indent=8),
        optimizer=adam if program.optimizer == "adam" else sgd,
        parts="[params]" if program.num_optimizers == 1 else "[params[:half], params[half:]]",
    )


def _trainer(program: Program) -> str:
    is_automatic = program.loop == "automatic"
    trainer_options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "precision": program.precision}
    trainer_options |= {"use_distributed_sampler": False, "enable_progress_bar": False}
    if is_automatic:
        trainer_options["accumulate_grad_batches"] = program.accumulate
        if program.clip is not None:
            trainer_options |= {"gradient_clip_val": 0.05, "gradient_clip_algorithm": program.clip}
    resume = """        trainer.save_checkpoint("fuzz.ckpt")
        run = Run()
        trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy(), max_epochs=2, **trainer_options)
        trainer.fit(Module(run), data, ckpt_path="fuzz.ckpt")"""
    scheduled = """        schedulers = [torch.optim.lr_scheduler.StepLR(one, 1, gamma=0.5) for one in optimizers]
        return optimizers, [{"scheduler": scheduler, "interval": "step"} for scheduler in schedulers]"""
    return _MODULE.format(
        is_automatic=is_automatic,
        num_batches=program.num_batches,
        training_step="        return None if run.leaves_out_step else loss" if is_automatic else _manual(program),
        hooks="".join(_hook(program, *hook) for hook in _HOOKS.items()),
        schedulers=scheduled if program.has_scheduler else "        return optimizers",
        trainer_options=trainer_options,
        max_epochs=1 if program.resumes else NUM_EPOCHS,
        resume=resume if program.resumes else "",
    )


_HOOKS = {
    "backward": "on_after_backward(self)",
    "step": "on_before_optimizer_step(self, optimizer: Any)",
    "end": "on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int)",
}


def _hook(program: Program, place: str, signature: str) -> str:
    lines = _happening(program, place, run="self.run", indent=8)
    return f"    def {signature} -> None:\n{lines}\n\n" if lines else ""


def _manual(program: Program) -> str:
    lines = [
        f"with nullcontext() if {_exchanges(program)} else self.trainer.strategy.block_backward_sync():",
        "    self.manual_backward(loss)",
        "if run.closes_window and not run.leaves_out_step:",
        f"    for optimizer in {'[self.optimizers()]' if program.num_optimizers == 1 else 'self.optimizers()'}:",
    ]
    if program.clip is not None:
        clip = f"gradient_clip_val=0.05, gradient_clip_algorithm={program.clip!r}"
        lines.append(f"        self.clip_gradients(optimizer, {clip})")
    lines += ["        optimizer.step()", "        optimizer.zero_grad()"]
    if program.has_scheduler:
        lines += ["    for config in self.trainer.lr_scheduler_configs:", "        config.scheduler.step()"]
    return "\n".join(" " * 8 + line for line in lines)


def _fabric(program: Program) -> str:
    how = {"norm": "max_norm=0.05", "value": "clip_val=0.05", None: ""}[program.clip]
    return _FABRIC.format(
        precision=program.precision,
        has_scheduler=program.has_scheduler,
        num_all_batches=NUM_EPOCHS * program.num_batches,
        exchanges=_exchanges(program),
        after_backward=_happening(program, "backward", indent=12),
        clip=f"{' ' * 20}fabric.clip_gradients(net, optimizer, {how})" if how else "",
        before_step=_happening(program, "step", indent=20),
        end=_happening(program, "end", indent=12),
    )


def _exchanges(program: Program) -> str:
    return "run.closes_window" if program.blocks_sync else "True"
