"""The profile of a backward: which gradient came when, and what it costs to reduce them. Pure; JSON in and out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_bucketddp.config import REDUCE_DTYPES
from lightning_bucketddp.planning.all_reduce_cost import AllReduceCost
from lightning_bucketddp.planning.plan import ParameterSpec
from lightning_bucketddp.wording import load_printable_json


@dataclass(frozen=True, slots=True)
class Profile:
    """A backward on one rank. Times are seconds since it began."""

    specs: Sequence[ParameterSpec]  # in order of arrival, and after them those whose gradients never came
    ready_s: Sequence[float]  # when the gradient of each that arrived was there
    backward_s: float  # when backward had ended, without reductions
    cost: AllReduceCost | None  # beside such a backward; None: it was not measured, or not well enough
    num_ranks: int
    forward_s: float = 0.0  # how long the forward before it took; 0: not known
    optimizer_s: float = 0.0  # how long the optimizer's step after it took; 0: not known
    reduce_dtype: str | None = None  # what gradients travelled as when `cost` was measured; None: as what they are

    def __post_init__(self) -> None:
        if self.reduce_dtype not in (None, *REDUCE_DTYPES):
            raise ValueError(f"gradients cannot travel as {self.reduce_dtype!r}")

    @property
    def arrived(self) -> range:
        return range(len(self.ready_s))

    @property
    def missing(self) -> range:
        return range(len(self.ready_s), len(self.specs))

    @property
    def dense_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.specs if not spec.sparse)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        content: dict[str, Any] = load_printable_json(text)
        specs = [ParameterSpec(**spec) for spec in content.pop("specs")]
        cost = content.pop("cost")
        return cls(specs=specs, cost=None if cost is None else AllReduceCost(**cost), **content)
