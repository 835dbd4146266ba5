"""Steps with the bytes that they send, and what the simulator needs to predict how long they take."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor

from benchmarks.limits import Limits
from benchmarks.loop import bytes_sent_on
from benchmarks.ranks import synchronize
from benchmarks.variants import ALONE
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.commands.doctor.network import measure_all_reduce
from lightning_bucketddp.planning.cost import AllReduceCost, Codecs, Network, Profile
from lightning_bucketddp.reducer.observer import clock_of
from lightning_bucketddp.reducer.plan_cache import spec_of
from lightning_bucketddp.reducer.quantization import measure_codecs


class CountedSteps(Limits):
    """Variants that train in turns; with each turn the bytes are counted that leave this host."""

    interface = "eth0"

    def turn(self, name: str) -> tuple[float, float]:  # type: ignore[override]
        """Seconds and bytes per step; with local steps of as many as there are from one exchange to the next."""
        training = self.training(name)
        steps = training.variant.local_steps or self._settings.steps
        training.step()
        return self._timed(training.step, steps)

    def communicate(self, name: str) -> tuple[float, float]:  # type: ignore[override]
        """The same for the buckets of a step, reduced back to back and with nothing else to do."""
        self._reduce(name)
        return self._timed(partial(self._reduce, name), self._settings.steps)

    def _timed(self, action: Callable[[], None], times: int) -> tuple[float, float]:
        start, before = self._now_on_all_ranks(), bytes_sent_on(self.interface)
        for _ in range(times):
            action()
        synchronize(self._device)
        taken = time.perf_counter() - start
        # Queued bytes of this rank may be left, which the barrier follows.
        self._now_on_all_ranks()
        return taken / times, (bytes_sent_on(self.interface) - before) / times

    def codecs(self) -> Codecs:
        """What encoding takes here, on all ranks at once."""
        self._now_on_all_ranks()
        return measure_codecs(self._device)

    def network(self) -> AllReduceCost:
        """What an all-reduce costs by itself, as `bucketddp doctor` measures it."""
        collectives = Collectives(self._device)
        found = measure_all_reduce(collectives, progress=lambda _: None)
        return Network("", found["link_bytes_per_s"], found["hop_seconds"]).all_reduce(collectives.world_size)

    def profile(self) -> Profile:
        """The step without communication, as `bucketddp plan` sees it."""
        training, clock = self.training(ALONE.name), clock_of(self._device)
        params = dict(training.workload.model.named_parameters())
        marks: dict[str, Any] = {}

        def mark(name: str, _param: Tensor | None = None) -> None:
            marks[name] = clock.mark()

        training.step()
        self._now_on_all_ranks()
        with ExitStack() as hooks:
            for name, param in params.items():
                hooks.enter_context(param.register_post_accumulate_grad_hook(partial(mark, name)))  # type: ignore[no-untyped-call]
            mark("begin")
            training.step(mark)
        ready_s = {name: clock.seconds(marks["forward"], marks[name]) for name in params}
        order = sorted(params, key=lambda name: ready_s[name])
        return Profile(
            [spec_of(name, params[name], device=self._device, sparse=False, may_be_alone=True) for name in order],
            [ready_s[name] for name in order],
            backward_s=clock.seconds(marks["forward"], marks["backward"]),
            cost=None,
            num_ranks=1,
            forward_s=clock.seconds(marks["begin"], marks["forward"]),
            optimizer_s=clock.seconds(marks["backward"], marks["optimizer"]),
        )
