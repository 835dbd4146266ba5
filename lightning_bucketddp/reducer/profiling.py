"""What torch's profiler shows of us."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]
from torch.autograd.profiler import record_function

NOTHING = nullcontext()


def phase(name: str) -> AbstractContextManager[Any]:
    """What happens inside is shown as `name`. Costs nothing while no profiler runs."""
    return record_function(name) if _profiler_enabled() else NOTHING
