"""The one way to change a dataloader, and what can be asked of any."""

from __future__ import annotations

import copy
import math
from typing import Any

from torch.utils.data import DistributedSampler


def changed_loader(loader: Any, members: dict[str, Any] | None = None, **attributes: Any) -> Any:
    """Return a copy of `loader` with other `attributes`; `members` replace those of its class."""
    changed = copy.copy(loader)
    if attributes:
        # `DataLoader` forbids to set these. Workers that it has know the old ones.
        vars(changed).update(attributes, _iterator=None)
    if members is not None:
        original: Any = type(loader)
        # Still an instance of its own class: users and Lightning ask for it, and set attributes of it.
        changed.__class__ = type(original.__name__, (original,), {"__module__": original.__module__, **members})
    return changed


def is_even(loader: Any) -> bool:
    """Return whether a sampler gives every rank the same number of samples."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = [getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    return any(isinstance(sampler, DistributedSampler) for sampler in samplers)


def length_of(sized: Any) -> float:
    """Return the length; infinite: it has none."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return math.inf
