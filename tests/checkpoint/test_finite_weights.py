"""Which weights are not finite, and where a checkpoint goes that has such."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_bucketddp.checkpoint.async_writer import (
    FINITE,
    INFINITE,
    NAN,
    FiniteCheckpoints,
    nonfinite_weights,
    severities_of,
)
from tests.support.cases import for_each

BAD = ["weight"]
DTYPES = ["float32", "float64", "float16", "bfloat16", "float8_e5m2", "complex64"]


class Weights(nn.Module):
    """One parameter of each dtype, all of them with the same elements."""

    def __init__(self, *elements: float) -> None:
        super().__init__()
        for name in DTYPES:
            weight = torch.tensor(elements).to(getattr(torch, name))
            self.register_parameter(f"as_{name}", nn.Parameter(weight, requires_grad=False))
        self.register_parameter("empty", nn.Parameter(torch.ones(0)))
        self.register_parameter("int64", nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False))
        self.register_buffer("mask", torch.tensor(elements))
        self.norm = nn.BatchNorm1d(2)


@for_each(
    ("elements", "severity"),
    [
        ((1.0, -2.0), FINITE),
        ((1.0, math.inf), INFINITE),
        ((-math.inf, 1.0), INFINITE),
        ((math.inf, -math.inf), INFINITE),
        ((math.inf, math.nan), NAN),
    ],
)
def test_weights_of_each_dtype_are_looked_at(elements: tuple[float, ...], severity: int) -> None:
    statistics = {"norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"}
    found = severities_of(Weights(*elements))
    assert {name: found.pop(name) for name in statistics} == dict.fromkeys(statistics, FINITE)
    names = [f"as_{name}" for name in DTYPES]
    assert found == dict.fromkeys(names, severity)


def test_large_numbers_are_finite() -> None:
    module = nn.ParameterList([torch.tensor([1e300, -1e300], dtype=torch.float64), torch.tensor([3e38, -3e38])])
    assert set(severities_of(module).values()) == {FINITE}


def test_what_was_no_better_at_the_start_does_not_count() -> None:
    module = nn.ParameterDict({name: torch.zeros(2) for name in ("a", "b", "c")})
    module["b"].data[0] = -math.inf
    at_start = severities_of(module)
    module["c"].data[0] = math.inf
    assert nonfinite_weights(module.state_dict(), module, at_start=at_start) == ["c"]
    module["b"].data[1] = math.nan
    assert nonfinite_weights(module.state_dict(), module, at_start=at_start) == ["b", "c"]
    assert nonfinite_weights({"b": module["b"], "other": module["b"]}, module, at_start=at_start) == ["b"]


def test_only_what_is_not_finite_is_removed_until_a_finite_checkpoint_is_there() -> None:
    checkpoints = FiniteCheckpoints()
    assert checkpoints.place("run/1.ckpt", [], refuses=False) == "run/1.ckpt"
    with pytest.warns(UserWarning, match=r"Resume from `run/1\.ckpt`\.$"):
        assert checkpoints.place("run/2.ckpt", BAD, refuses=False) == "run/nonfinite/2.ckpt"
    assert checkpoints.path_to_remove("run/1.ckpt") is None
    assert checkpoints.place("run/3.ckpt", BAD, refuses=False) == "run/nonfinite/3.ckpt"
    assert checkpoints.path_to_remove("run/2.ckpt") == "run/nonfinite/2.ckpt"
    assert checkpoints.place("run/4.ckpt", [], refuses=False) == "run/4.ckpt"
    assert checkpoints.path_to_remove("run/3.ckpt") == "run/nonfinite/3.ckpt"
    assert checkpoints.path_to_remove("run/1.ckpt") == "run/1.ckpt"
    with pytest.warns(UserWarning, match=r"Resume from `run/4\.ckpt`\.$"):
        checkpoints.place("run/5.ckpt", BAD, refuses=False)


def test_the_checkpoint_to_resume_from_is_one_that_can_be_resumed_from_and_was_written() -> None:
    checkpoints = FiniteCheckpoints()
    with pytest.raises(OSError, match="resume from one of them"):
        checkpoints.place("1.ckpt", BAD, refuses=True)
    with pytest.warns(UserWarning, match=r"(?s)written as\s+`nonfinite/1\.ckpt`.* No\s+finite one is known\.$"):
        checkpoints.place("1.ckpt", BAD, refuses=False)
    checkpoints.place("whole.ckpt", [], refuses=False)
    checkpoints.place("weights.ckpt", [], refuses=False, can_resume=False)
    checkpoints.place("failing.ckpt", [], refuses=False)
    with pytest.raises(ZeroDivisionError), checkpoints.known_unless_failing("failing.ckpt"):
        raise ZeroDivisionError
    with pytest.raises(OSError, match=r"resume from `whole\.ckpt`\.$"):
        checkpoints.place("2.ckpt", BAD, refuses=True)


def test_a_link_leads_to_what_is_there(tmp_path: Path) -> None:
    good, bad, worse = (tmp_path / f"{name}.ckpt" for name in ("good", "bad", "worse"))
    checkpoints = FiniteCheckpoints()
    with pytest.warns(UserWarning, match=r"No\s+finite one is known"):
        checkpoints.place(bad, BAD, refuses=False)
    checkpoints.link(bad)
    assert bad.resolve() == tmp_path / "nonfinite" / "bad.ckpt"
    good.touch()
    checkpoints.place(good, [], refuses=False)
    with pytest.warns(UserWarning, match="Resume from"):
        checkpoints.place(worse, BAD, refuses=False)
    checkpoints.link(worse)
    assert worse.resolve() == good
    assert checkpoints.path_to_remove(worse) == str(tmp_path / "nonfinite" / "worse.ckpt")
    assert not worse.is_symlink()
    # A file that is there stays.
    checkpoints.place(good, BAD, refuses=False)
    checkpoints.link(good)
    assert not good.is_symlink()
