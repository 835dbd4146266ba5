"""`bucketddp plan`: the plan is the reducer's, predictions are the simulator's, and numbers say where they are from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from textwrap import indent
from typing import Any
from xml.etree import ElementTree

import pytest
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI

from lightning_bucketddp.cli import main
from lightning_bucketddp.config import MIB, ReducerConfig
from lightning_bucketddp.planning.cost import AllReduceCost, Network, Profile, simulate
from lightning_bucketddp.planning.optimal_plan import NETWORKS, optimal_plan, predict
from lightning_bucketddp.planning.plan import ParameterSpec, plan_buckets
from lightning_bucketddp.recording import schema
from tests.support.cases import for_each
from tests.support.jobs import configured
from tests.support.jobs.planned import plan_of_reducer, plan_of_sharded_reducer
from tests.support.ranks import run_on_ranks

Capture = pytest.CaptureFixture[str]
MODULES = "tests.support.jobs.planned"
CONFIGURED = f"{configured.__name__}:Configured"
ASSEMBLED = f"{configured.__name__}:Assembled"
POWERS = [2**n for n in range(11)]
SVG = "{http://www.w3.org/2000/svg}"


def plan(capsys: Capture, name: str, *arguments: object) -> dict[str, Any]:
    assert main(["plan", _full(name), "--device", "cpu", "--json", *map(str, arguments)]) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


def text_of(capsys: Capture, name: str, *arguments: object) -> str:
    assert main(["plan", _full(name), *map(str, arguments)]) == 0
    return capsys.readouterr().out


def _full(name: str) -> str:
    return name if ":" in name or name.endswith(".yaml") else f"{MODULES}:{name}"


def refusal(capsys: Capture, *arguments: object) -> str:
    """The one line that is said to wrong use."""
    assert main(["plan", *map(str, arguments)]) == 2
    printed, error = capsys.readouterr()
    assert (printed, len(error.splitlines())) == ("", 1)
    return error


def names(planned: dict[str, Any]) -> list[list[str]]:
    return [bucket["parameters"] for bucket in planned["buckets"]]


def recorded_profile() -> Profile:
    """Of `Layers(depth=3)`, which arrives in an order that is not that of registration."""
    order = ["large.weight", "large.bias", "last.weight", "last.bias"]
    order += [f"layers.{i}.{part}" for i in (2, 1, 0) for part in ("bias", "weight")] + ["words.weight"]
    sizes = {"large.weight": 8 * MIB, "large.bias": 64 * 1024, "words.weight": 5120}
    specs = [
        ParameterSpec(
            name,
            sizes.get(name, 65536 if name.endswith("weight") else 512),
            "torch.float32 cpu",
            sparse=name == "words.weight",
            alone=name == "large.weight",
        )
        for name in [*order, "unused.bias", "unused.weight"]
    ]
    ready_s = [0.001 * (i + 1) for i in range(len(order))]
    return Profile(specs, ready_s, 0.012, AllReduceCost(20e-6, 1e-9), 4, forward_s=0.005, optimizer_s=0.002)


def layers_of_1_mib(folder: Path, *, device: str = "cuda") -> tuple[Profile, list[object]]:
    """A profile of eight layers whose gradients come 1 ms apart, and the arguments that name it and its module.

    For a CPU the command measures here what it takes to encode gradients.
    """
    order = [f"layers.{i}.{part}" for i in reversed(range(8)) for part in ("bias", "weight")]
    specs = [ParameterSpec(name, MIB if "weight" in name else 16, f"torch.float32 {device}") for name in order]
    ready_s = [0.001 * (i // 2 + 1) for i in range(len(order))]
    profile = Profile(specs, ready_s, 0.01, AllReduceCost(20e-6, 1e-9), 4, forward_s=0.005, optimizer_s=0.002)
    path = folder / "layers.json"
    path.write_text(profile.to_json())
    return profile, ["--args", "width=65536", "name=abcd", "depth=8", "--profile", path]


@pytest.fixture
def profile_file(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    path.write_text(recorded_profile().to_json())
    return path


# --- The plan


@pytest.mark.parametrize("cap", ["0.1", "0.01,0.2"])
def test_the_plan_is_what_the_reducer_makes_in_a_real_run(cap: str, capsys: Capture) -> None:
    caps = [float(number) for number in cap.split(",")]
    options: dict[str, Any] = {"bucket_cap_mb": caps if len(caps) > 1 else caps[0]}
    [buckets, _] = run_on_ranks(plan_of_reducer, name="Layers", **options)
    planned = plan(capsys, "Layers", "--bucket-cap-mb", cap)
    assert names(planned) == buckets
    assert not any("frozen" in name for bucket in buckets for name in bucket)
    assert planned["times"]["origin"].startswith("measured here, on cpu, with `example_input_array` of shape (2,)")
    assert planned["times"]["forward_s"] > 0


def test_a_sharded_plan_is_what_the_reducer_makes_in_a_real_run(capsys: Capture) -> None:
    ranks = run_on_ranks(plan_of_sharded_reducer, name="Layers", bucket_cap_mb=0.1)
    planned = plan(capsys, "Layers", "--bucket-cap-mb", 0.1, "--shard-optimizer", "--ranks", 2)
    assert [names(planned)] * 2 == [buckets for buckets, _ in ranks]
    rows_bytes = 10 * 128 * 4
    assert planned["state"] == {
        "tensors_per_parameter": 2,
        "bytes_per_rank": 2 * (max(own for _, own in ranks) + rows_bytes),
        "bytes_without_sharding": 2 * planned["gradient_bytes"],
        "undivided_bytes": 2 * rows_bytes,
        "undivided": ["words.weight"],
    }


def test_a_sharded_step_is_the_simulators(tmp_path: Path, capsys: Capture) -> None:
    profile, arguments = layers_of_1_mib(tmp_path)
    arguments += ["--network", "eth-10g", "--ranks", 8, "--shard-optimizer"]
    planned = plan(capsys, "NeedsArguments", *arguments, "--state-tensors", 1)
    [network] = planned["networks"]
    for row in network["by_ranks"][1:]:
        cost, num_ranks = NETWORKS["eth-10g"].all_reduce(row["ranks"]), row["ranks"]
        expected = predict(profile, ReducerConfig(), cost, num_shards=num_ranks)
        assert (row["exposed_s"], row["weights_s"]) == (expected.exposed_s, expected.weights_s)
        assert row["exposed_s"] > row["weights_s"] > 0
    assert network["by_ranks"][0]["exposed_s"] == 0
    # Eight layers of 1 MiB, and their biases.
    assert planned["state"]["bytes_per_rank"] == pytest.approx(MIB, rel=1e-3)
    printed = text_of(capsys, "NeedsArguments", *arguments, "--device", "cpu")
    state = "Optimizer state (2 tensors like each parameter): 2.00 MiB at most on each of 8 ranks, 16.00 MiB without"
    assert f"{state} --shard-optimizer." in " ".join(printed.split())
    row = network["by_ranks"][3]
    for_reductions, for_weights = 1e3 * (row["exposed_s"] - row["weights_s"]), 1e3 * row["weights_s"]
    assert f"waits {for_reductions:.2f} ms for reductions and {for_weights:.2f} ms for weights" in printed
    assert "state MiB" in printed


def test_without_times_there_is_a_plan_and_no_prediction(capsys: Capture) -> None:
    planned = plan(capsys, "NeedsArguments", "--args", "width=4", "name=ab", "depth=2")
    assert names(planned) == [["layers.1.bias", "layers.1.weight", "layers.0.bias", "layers.0.weight"]]
    assert planned["networks"] == []
    printed = text_of(capsys, "NeedsArguments", "--args", '{"width": 4, "name": "ab"}')
    assert "Times: not known; gradients are expected in reverse order of registration. So nothing is" in printed
    assert "ranks" not in printed


def test_modules_are_made_as_they_can_be(capsys: Capture) -> None:
    """By `configure_model`, with values or, where there are too many, without memory."""
    assert names(plan(capsys, CONFIGURED)) == names(plan(capsys, "NeedsValues")) == [["layer.bias", "layer.weight"]]
    assert plan(capsys, "Huge")["gradient_bytes"] == 4 * (2**40 + 2**20) * 4


def test_a_factory_makes_the_module(capsys: Capture) -> None:
    """A function, with arguments of its own and such that it passes on, or a method of a class."""
    planned = plan(capsys, "make_layers", "--args", "width=4", "bias=false", "depth=3")
    assert planned["module"] == "make_layers"
    assert names(planned) == [["2.weight", "1.weight", "0.weight"]]
    assert planned["num_parameter_tensors"] == 3
    planned = plan(capsys, f"{ASSEMBLED}.small")
    assert names(planned) == [["head.bias", "head.weight", "body.bias", "body.weight"]]


HEAD = {"class_path": "torch.nn.Linear", "init_args": {"in_features": 5, "out_features": 2, "bias": False}}


def printed_config(capsys: Capture, model: Any, *arguments: str) -> str:
    """What a LightningCLI prints for `--print_config`, and saves beside its checkpoints."""
    kinds: dict[str, Any] = {"subclass_mode_model": True} if model is LightningModule else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["train.py"])
        with pytest.raises(SystemExit):
            LightningCLI(model, args=["fit", "--trainer.logger=false", *arguments, "--print_config"], **kinds)
    return capsys.readouterr().out


@pytest.mark.parametrize("way", ["of fit", "named beside the config"])
def test_a_config_of_a_lightning_cli_makes_the_module(way: str, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "config.yaml"
    arguments = ["--model.head", json.dumps(HEAD), "--model.width", "5"]
    if way == "named beside the config":
        path.write_text(printed_config(capsys, configured.Assembled, *arguments))
        planned = plan(capsys, ASSEMBLED, "--config", path)
    else:
        arguments = ["--model", ASSEMBLED.replace(":", "."), *arguments]
        path.write_text(f"fit:\n{indent(printed_config(capsys, LightningModule, *arguments), '  ')}")
        planned = plan(capsys, str(path))
    assert planned["module"] == "Assembled"
    assert names(planned) == [["head.weight", "body.bias", "body.weight"]]
    assert planned["gradient_bytes"] == 4 * (5 * 2 + 5 * 5 + 5)


def test_a_config_can_be_completed(tmp_path: Path, capsys: Capture) -> None:
    """By what a LightningCLI links, say. What its class passes on is in the config, too; functions are as good."""
    path = tmp_path / "config.yaml"
    model = {"class_path": ASSEMBLED.replace(":", "."), "init_args": {"head": HEAD}, "dict_kwargs": {"bias": False}}
    path.write_text(json.dumps({"model": model}))
    planned = plan(capsys, str(path), "--args", "width=7")
    assert names(planned) == [["head.weight", "body.weight"]]
    assert planned["gradient_bytes"] == 4 * (5 * 2 + 7 * 7)
    path.write_text(f"model: {{class_path: {MODULES}.make_layers, init_args: {{width: 2, depth: 1}}}}")
    assert names(plan(capsys, str(path))) == [["0.bias", "0.weight"]]


@for_each(
    ("config", "name", "message"),
    [
        ("model: {width: 3}", "", "has no `model.class_path`, as that of a LightningCLI which has one model class."),
        ("model: {class_path: __main__.Net}", "", "names the class '__main__.Net', which only the script that wrote"),
        ("model: {class_path: no_such.Net}", "", "There is no module 'no_such'."),
        (f"model: {{class_path: {configured.__name__}.Net}}", "", ".configured has no 'Net'. It has Configured,"),
        ("model: 3", "", "is no config of a LightningCLI: it says nothing of a `model`."),
        ("a: [", "", "is no YAML: while parsing"),
        (None, "", "cannot be read: No such file or directory."),
        ("model: {width: abc}", "make_layers", "does not fit make_layers: "),
    ],
)
def test_a_config_that_does_not_name_a_module_is_refused(
    config: str | None, name: str, message: str, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / ("missing.yaml" if config is None else "config.yaml")
    if config is not None:
        path.write_text(config)
    assert message in refusal(capsys, *([_full(name), "--config"] if name else []), path)


# --- Predictions


@pytest.mark.parametrize("cap", ["auto", "2.5"])
def test_predictions_are_the_simulators(cap: str, tmp_path: Path, capsys: Capture) -> None:
    profile, arguments = layers_of_1_mib(tmp_path)
    networks = ["--network", "eth-10g", "--network", "measured", "--network", "25,10"]
    planned = plan(capsys, "NeedsArguments", *arguments, *networks, "--bucket-cap-mb", cap, "--ranks", 6)
    assert profile.cost is not None
    expected_networks = [
        NETWORKS["eth-10g"],
        Network.measured(profile.cost, num_ranks=4),
        Network("25 Gbit", 25e9 / 8, 10e-6),
    ]
    for network, predicted in zip(expected_networks, planned["networks"], strict=True):
        assert [row["ranks"] for row in predicted["by_ranks"]] == sorted({*POWERS, 6})
        for row in predicted["by_ranks"]:
            cost = network.all_reduce(row["ranks"])
            caps = ReducerConfig(bucket_cap_mb=2.5).caps
            fixed = plan_buckets(profile.specs, arrived=profile.arrived, missing=profile.missing, caps=caps)
            expected = simulate(profile, optimal_plan(profile, cost=cost) if cap == "auto" else fixed, cost)
            assert row["exposed_s"] == expected.exposed_s
            assert row["step_s"] == expected.step_s == pytest.approx(0.017 + expected.exposed_s)
            assert row["efficiency"] == pytest.approx(0.017 / expected.step_s)
            assert row["overlap"] == expected.overlap
            assert row["communication_s"] == pytest.approx(expected.communication_s)
    assert planned["times"]["origin"] == f"recorded in {tmp_path / 'layers.json'}, by a run of 4 ranks"


@for_each(("ranks", "latency_us", "num_buckets"), [(1024, 1000, 1), (2, 1, 7)])
def test_the_plan_of_the_first_network_and_the_ranks_asked_for_is_shown(
    ranks: int, latency_us: int, num_buckets: int, tmp_path: Path, capsys: Capture
) -> None:
    profile, arguments = layers_of_1_mib(tmp_path)
    networks = ["--network", f"10,{latency_us}", "--network", "1,1"]
    planned = plan(capsys, "NeedsArguments", *arguments, *networks, "--ranks", ranks)
    buckets = optimal_plan(profile, cost=Network("", 1.25e9, latency_us * 1e-6).all_reduce(ranks))
    assert len(buckets) == num_buckets
    assert names(planned) == [[profile.specs[i].name for i in bucket.members] for bucket in buckets]
    assert planned["plan"].startswith(f"bucket_cap_mb=auto, computed for {ranks:,} ranks on 10 Gbit")


@pytest.mark.parametrize(
    ("network", "taken", "advice"),
    [
        ("eth-100m", "local_steps=100", "but trains differently, see docs/slow-networks.md"),
        ("nvlink", "gradients as they are", "longer: do not set it"),
    ],
)
def test_options_are_compared_and_one_is_advised(
    network: str, taken: str, advice: str, tmp_path: Path, capsys: Capture
) -> None:
    _, arguments = layers_of_1_mib(tmp_path)
    planned = plan(capsys, "NeedsArguments", *arguments, "--network", network, "--ranks", 2)
    [found] = planned["networks"]
    names = ["gradients as they are", 'reduce_dtype="bf16"', 'reduce_dtype="int8"']
    names += [f"local_steps={steps}" for steps in (10, 30, 100)]
    assert [option["option"] for option in found["options"]] == names
    sent = [option["sent_bytes"] / planned["gradient_bytes"] for option in found["options"]]
    assert sent == pytest.approx([1, 1 / 2, 260 / 1024, 1 / 10, 1 / 30, 1 / 100])
    # Of two ranks, as in the other table.
    assert found["options"][0]["step_s"] == found["by_ranks"][1]["step_s"]
    assert found["take"] == taken
    assert advice in found["advice"]
    printed = text_of(capsys, "NeedsArguments", *arguments, "--network", network, "--ranks", 2)
    assert "option                   MiB sent    waits ms    step ms    speed-up" in printed
    assert " ".join(found["advice"].split()[:5]) in printed
    alone = text_of(capsys, "NeedsArguments", *arguments, "--network", network, "--ranks", 1)
    assert "MiB sent" not in alone


def test_on_cpus_only_what_ranks_have_measured_together_is_judged(tmp_path: Path, capsys: Capture) -> None:
    """As `bucketddp doctor` judges them: one process alone encodes faster than ranks that share the cores."""
    _, arguments = layers_of_1_mib(tmp_path, device="cpu")
    [alone] = plan(capsys, "NeedsArguments", *arguments, "--network", "eth-1g", "--ranks", 2)["networks"]
    assert alone["take"] is None
    assert "run `bucketddp doctor --json > FILE.json` and pass `--network FILE.json`" in alone["advice"]
    wires = {name: {"latency_s": 0.0, "s_per_byte": 1e-9 * ns} for name, ns in (("fp32", 1), ("bf16", 5), ("int8", 9))}
    measured = {"link_bytes_per_s": 1e9, "hop_seconds": 0.0}
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"ranks": [0, 1], "all_reduce": measured, "wires": wires}))
    [together] = plan(capsys, "NeedsArguments", *arguments, "--network", path, "--ranks", 2)["networks"]
    assert together["take"] == "gradients as they are"


def test_a_network_that_was_measured_with_fewer_bits_is_not_faster(tmp_path: Path, capsys: Capture) -> None:
    """What is recorded of a run with `reduce_dtype` is the time of what has travelled, and of encoding it."""
    profile, arguments = layers_of_1_mib(tmp_path)
    speeds = []
    for reduce_dtype in (None, "bf16", "int8"):
        # So slow that to encode takes no time beside it.
        slow = replace(profile, cost=AllReduceCost(20e-6, 1e-4), reduce_dtype=reduce_dtype)
        (tmp_path / "layers.json").write_text(slow.to_json())
        speeds.append(plan(capsys, "NeedsArguments", *arguments)["networks"][0]["bytes_per_s"])
    assert speeds[1:] == pytest.approx([speeds[0] / 2, speeds[0] * 260 / 1024], rel=0.05)


def test_an_estimate_is_spread_by_size_and_says_so(capsys: Capture) -> None:
    """Two buckets, the first complete after half of backward; on an endless network nobody waits."""
    arguments = ["--args", "width=1023", "name=abcd", "depth=2", "--backward-ms", 8, "--bucket-cap-mb", "0.016"]
    lines = text_of(capsys, "NeedsArguments", *arguments, "--network", "0.032768,0", "--ranks", 2)
    printed = " ".join(lines.split())  # wherever they are broken
    # 16 KiB at 4 MiB/s take 4 ms: the first bucket is hidden behind the second half, the second is not.
    assert "On 2 ranks a step takes 12.00 ms, and 4.00 ms of it are spent waiting" in printed
    assert "backward 8.00 ms; an estimate from --backward-ms: gradients in reverse order of registration" in printed
    assert "Not known, and counted as nothing: forward and optimizer." in printed
    assert "0.004096 GB/s from each rank, 0 us per hop (as you gave it)" in printed
    assert "All of it is simulated" in printed


def test_times_of_a_cpu_are_said_to_tell_nothing_about_gpus(
    profile_file: Path, tmp_path: Path, capsys: Capture
) -> None:
    """Of a backward that was measured here, or recorded; not of one that a person has put in."""
    said = "These are times of a CPU. The efficiency below holds for training on such CPUs and says nothing about GPUs"
    svg = tmp_path / "x.svg"
    recorded = ["--args", "depth=3", "--profile", profile_file]
    for arguments in (["--args", "depth=1"], recorded):
        printed = " ".join(text_of(capsys, "Layers", "--device", "cpu", "--svg", svg, *arguments).split())
        assert printed.index(said) < printed.index("efficiency", printed.index(said) + len(said)) < len(printed)
        assert "times of a CPU, not of a GPU" in svg.read_text()
    profile_file.write_text(profile_file.read_text().replace("float32 cpu", "float32 cuda"))
    for arguments in (recorded, ["--backward-ms", 5]):
        assert "nothing about GPUs" not in text_of(capsys, "Layers", *arguments)


def test_the_profile_is_found_in_a_record_and_its_steps_are_as_good(tmp_path: Path, capsys: Capture) -> None:
    """Two buckets: complete after 4 and 10 ms of a backward that was recorded without measuring each gradient."""
    path = schema.path_of(tmp_path, 0)
    with path.open("w") as file:
        schema.write(schema.Run(0, 4, "host", "cpu", "gloo", 13, 10), file)
        schema.write(recorded_profile(), file)
    planned = plan(capsys, "Layers", "--args", "depth=3", "--profile", path)
    assert planned["times"]["backward_s"] == 0.012
    assert [network["name"] for network in planned["networks"]] == ["measured"]
    names_and_sizes = [(["layers.1.bias", "layers.1.weight"], [8, 32]), (["layers.0.bias", "layers.0.weight"], [8, 32])]
    spans = [("forward", 0.0, 0.005), ("backward", 0.005, 0.015), ("exposed", 0.015, 0.018), ("optimizer", 0.018, 0.02)]
    times = [schema.BucketTimes(0.009, 0.009, 0.012), schema.BucketTimes(0.015, 0.015, 0.018)]
    with path.open("w") as file:
        schema.write(schema.Run(0, 4, "host", "cpu", "gloo", 4, 80), file)
        schema.write(schema.RecordedPlan(1, [schema.RecordedBucket(*bucket) for bucket in names_and_sizes]), file)
        schema.write(schema.Step(3, 1, [schema.Span(*span) for span in spans], times), file)
    arguments = ["--args", "width=4", "name=ab", "depth=2", "--profile", path, "--bucket-cap-mb", 40 / MIB]
    planned = plan(capsys, "NeedsArguments", *arguments, "--ranks", 4, "--reduce-dtype", "bf16")
    assert names(planned) == [names for names, _ in names_and_sizes]
    assert planned["device"] == "cpu"
    expected = {"forward_s": 0.005, "backward_s": 0.01, "optimizer_s": 0.002}
    assert {name: planned["times"][name] for name in expected} == pytest.approx(expected)
    # Buckets of one size do not tell what those of another size cost.
    assert "differ by less than a factor of 4" in planned["times"]["origin"]
    assert [network["name"] for network in planned["networks"]] == ["100 Gbit"]
    error = refusal(capsys, _full("NeedsArguments"), *arguments, "--network", "measured")
    assert "needs a --profile that tells what an all-reduce costs: the sizes of its buckets differ" in error


# --- Pictures


def test_the_table_has_bars_and_the_plot_is_valid(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "scaling.svg"
    networks = ["--network", "nvlink", "--network", "eth-1g"]
    printed = text_of(capsys, CONFIGURED, "--backward-ms", 1, *networks, "--svg", path)
    assert "\x1b" not in printed
    assert len([line for line in printed.splitlines() if "█" in line]) == 2 * len(POWERS)
    chart = ElementTree.fromstring(path.read_text())
    lines = list(chart.iter(f"{SVG}polyline"))
    assert [len(line.get("points", "").split()) for line in lines] == [len(POWERS)] * 2
    texts = {text.text for text in chart.iter(f"{SVG}text")}
    assert {"Configured: predicted scaling efficiency, from estimated times", "1,024", "NVLink", "1 Gbit"} <= texts


# --- Errors


@for_each(
    ("arguments", "message"),
    [
        ("planned", "'planned' names no class. Write MODULE:CLASS, for example my_project.models:LitNet, or"),
        ("no_such:Net", "There is no module 'no_such'. Run the command in the folder of your project, or set"),
        ("broken_project:Net", "Importing broken_project failed: ModuleNotFoundError: No module named 'no_such_"),
        (":NoSuch", f"{MODULES} has no 'NoSuch'. It has Layers, Huge,"),
        (":Shards", f"{MODULES}:Shards is no LightningModule and no torch.nn.Module, but "),
        (":make_nothing", "make_nothing makes no torch.nn.Module, but None."),
        (":NeedsArguments", "needs arguments: width, name. Pass `--args width=... name=...`."),
        (":NeedsArguments --args width=1 name=a x=1", "takes no argument x. It takes: width,"),
        (":NeedsArguments --args width", "--args width is neither a JSON object nor key=value."),
        (":NeedsArguments --args width=4 name=ab --state-tensors 0", "--state-tensors must be at least 1, got 0."),
        (":WithoutForward", "WithoutForward cannot be trained on its `example_input_array`: RuntimeError:"),
        (":Lazy", "`Lazy` has parameters without a shape yet: "),
        (":Frozen", "Frozen has no parameters that train."),
        (":Huge --network token-ring", "--network 'token-ring' is not known: pass eth-100m, eth-1g, eth-10g,"),
        (":Huge --network /x.json", "/x.json holds no all-reduce that `bucketddp doctor --json` has measured: "),
        (":Huge --bucket-cap-mb 0", "--bucket-cap-mb must be auto or positive numbers of MiB, got 0"),
        (":Huge --ranks 0", "--ranks must be at least 1, got 0."),
        (":Huge --backward-ms nan", "--backward-ms must be a positive number, got nan."),
        (":Huge --svg x.svg", "--svg needs times: pass --profile or --backward-ms."),
        (":Huge --profile /no/such/file", "/no/such/file holds no profile of bucketddp: "),
        (":Huge --backward-ms 1 --svg /no/x.svg", "/no/x.svg cannot be written: No such file or directory."),
    ],
)
def test_errors_are_one_line_that_says_what_to_do(
    arguments: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    (tmp_path / "broken_project.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    error = refusal(capsys, *(f"{MODULES}{arguments}" if arguments.startswith(":") else arguments).split())
    assert error.startswith("bucketddp plan: ")
    assert message in error


def test_a_profile_that_does_not_fit_is_refused(profile_file: Path, tmp_path: Path, capsys: Capture) -> None:
    """Of another module, without a step, or of gradients that cannot travel so."""
    expected = "is of another module: `layers.3.weight` has 0 bytes there, and 65,536 in Layers."
    assert expected in refusal(capsys, f"{MODULES}:Layers", "--profile", profile_file)
    empty = schema.path_of(tmp_path, 0)
    empty.write_text("")
    expected = "holds no step of several ranks that says when its buckets were complete."
    assert expected in refusal(capsys, f"{MODULES}:Layers", "--profile", empty)
    profile_file.write_text(profile_file.read_text().replace('"reduce_dtype": null', '"reduce_dtype": ["int4"]'))
    error = refusal(capsys, f"{MODULES}:Layers", "--args", "depth=3", "--profile", profile_file)
    assert error.endswith("holds no profile of bucketddp: gradients cannot travel as ['int4']\n")
