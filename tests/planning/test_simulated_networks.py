"""The simulations' commands, on a recorded profile."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import simulated_networks
from lightning_bucketddp.planning.cost import AllReduceCost, Profile
from lightning_bucketddp.planning.optimal_plan import NETWORKS
from lightning_bucketddp.planning.plan import ParameterSpec


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["simulated_networks", *map(str, arguments)])
    simulated_networks.main()


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    specs = [ParameterSpec(f"layers.{i}.weight", 2**22, "torch.float32 cpu") for i in range(30)]
    ready_s = [0.002 * i for i in range(30)]
    cost = AllReduceCost(50e-6, 1e-10)
    path = tmp_path / "thirty_layers.json"
    path.write_text(Profile(specs, ready_s, 0.06, cost, 2, forward_s=0.03, optimizer_s=0.01).to_json())
    return path


def test_each_network_and_number_of_ranks_has_a_row(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, recorded, "--ranks", 2, 1024, "--json", tmp_path / "rows.json")
    rows = json.loads((tmp_path / "rows.json").read_text())
    networks = ["measured", *(network.name for network in NETWORKS.values())]
    assert [(row["network"], row["num_ranks"]) for row in rows] == [(n, r) for n in networks for r in (2, 1024)]
    for row in rows:
        assert row["model"] == "thirty_layers"
        assert row["exposed_auto_ms"] <= row["exposed_25_mb_ms"]
        assert row["step_auto_ms"] == pytest.approx(100 + row["exposed_auto_ms"])
        assert row["scaling_efficiency"] <= row["overlap_efficiency"] <= 1
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(rows)
