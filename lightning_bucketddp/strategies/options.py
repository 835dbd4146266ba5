"""The keywords of `BucketDDPStrategy`: torch DDP's and Lightning's, so that a project ports by one word."""

from __future__ import annotations

import difflib
import inspect
import logging
import sys
from typing import Any, ClassVar, Literal

from lightning_utilities.core.rank_zero import rank_zero_info

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]

log = logging.getLogger(__name__)

_WHY_WITHOUT_EFFECT = {
    "find_unused_parameters": "unused parameters are always handled; only a step that leaves some out takes longer",
    "static_graph": "how often each parameter is used is learned from the first backward",
    "gradient_as_bucket_view": "gradients always live in their buckets",
    "batched_grad_copy": "gradients are always copied by one call per bucket",
    "skip_all_reduce_unused_params": "unused parameters need no mode of their own",
}


class RejectsUnknownOptions:
    """Answers a misspelt keyword with the nearest right one."""

    __signature__: ClassVar[inspect.Signature]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Python 3.10 would show the signature of `__new__` below to whoever inspects the class.
        of_init = inspect.signature(cls.__init__)
        cls.__signature__ = of_init.replace(parameters=list(of_init.parameters.values())[1:])

    def __new__(cls, *_args: Any, **options: Any) -> Any:
        parameters = inspect.signature(cls.__init__).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        unknown = [] if takes_any else [name for name in options if name not in parameters]
        if unknown:
            nearest = difflib.get_close_matches(unknown[0], parameters, n=1)
            hint = f" Did you mean `{nearest[0]}`?" if nearest else f" It takes: {', '.join(list(parameters)[1:])}."
            raise TypeError(f"`{cls.__name__}` has no option `{unknown[0]}`.{hint}")
        return super().__new__(cls)


def explain_without_effect(**options: bool | None) -> None:
    """Say in one line which of the options that were given (not None) no longer mean anything, and why."""
    reasons = [f"`{name}` ({_WHY_WITHOUT_EFFECT[name]})" for name, value in options.items() if value is not None]
    if reasons:
        rank_zero_info(f"bucketddp: no effect, and no need to set: {', '.join(reasons)}.")


def resolve_start_method(start_method: StartMethod) -> StartMethod:
    """Choose fork in a notebook or interactive interpreter, where there is no script to run again."""
    if start_method == "popen" and hasattr(sys, "ps1"):
        rank_zero_info("bucketddp: starting processes by fork, because this is an interactive session.")
        return "fork"
    return start_method


def check_stall_warning(seconds: float) -> float:
    """`seconds`, if they are some."""
    if not seconds > 0:
        raise ValueError(f"`stall_warning_s` must be a positive number of seconds, got {seconds!r}.")
    return float(seconds)
