"""Several cases in one test, for those that take a moment and need nothing of their own.

    @for_each("size", [0, -1, "many"])
    def test_a_size_that_is_none_is_refused(size: object) -> None: ...

Where cases start processes or take long, take pytest's own `parametrize`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

Test = Callable[..., None]


def for_each(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[[Test], Test]:
    """Call the test with each of `cases`; the first one that fails is told."""
    if isinstance(names, str):
        names, cases = (names,), [(case,) for case in cases]
    named = [dict(zip(names, case, strict=True)) for case in cases]
    assert named

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            for case in named:
                try:
                    test(**case, **fixtures)
                except Exception as error:  # noqa: PERF203  (which case it was)
                    raise AssertionError(f"with {case}") from error

        signature = inspect.signature(test)
        others = [parameter for name, parameter in signature.parameters.items() if name not in names]
        run.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return run

    return decorate
