"""`strategy="bucketddp"` is known to Lightning without an import, and to import us never hurts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.interpreter import run_code, run_code_after_torch

REGISTRY_OF = {
    "lightning.pytorch": "StrategyRegistry",
    "pytorch_lightning": "StrategyRegistry",
    "lightning.fabric": "STRATEGY_REGISTRY",
    "lightning_fabric": "STRATEGY_REGISTRY",
}


# Lightning imports torch, which calls us, so a root is half imported then, unless a program has imported torch before.
@pytest.mark.parametrize(
    ("run", "imported", "roots"),
    [
        (run_code, "lightning", ["lightning.pytorch", "lightning.fabric"]),
        (run_code, "pytorch_lightning", ["pytorch_lightning", "lightning_fabric"]),
        *(pytest.param(run_code_after_torch, root, [root], marks=pytest.mark.long) for root in REGISTRY_OF),
    ],
    ids=["lightning", "pytorch_lightning", *(f"torch, {root}" for root in REGISTRY_OF)],
)
@pytest.mark.sampled(1)
def test_importing_lightning_registers_every_name_with_a_strategy_of_that_root(
    run: Callable[[str], str], imported: str, roots: list[str]
) -> None:
    registries = "".join(f"({root}.strategies.{REGISTRY_OF[root]}, {root}.strategies.Strategy)," for root in roots)
    printed = run(f"""
        import {imported}, {", ".join(roots)}
        for registry, strategy in ({registries}):
            for name in registry.available_strategies():
                if name.startswith("bucketddp"):
                    accepted = isinstance(registry.get(name), strategy)
                    print(name, sorted(registry[name]["init_params"].items()), accepted)
    """)
    expected = []
    for name, start_method in {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}.items():
        expected.append(f"bucketddp{name} [('start_method', '{start_method}')] True")
        for value in (False, True):
            options = f"[('find_unused_parameters', {value}), ('start_method', '{start_method}')]"
            expected.append(f"bucketddp{name}_find_unused_parameters_{str(value).lower()} {options} True")
    assert printed.splitlines() == expected * len(roots)


def test_importing_torch_imports_of_us_one_file_that_needs_nothing_else() -> None:
    # Entry points are among the last things that torch loads: behind them it imports only some of its own modules.
    printed = run_code("""
        import sys
        class Recorder:
            def find_spec(self, name, path, target=None):
                if name == "lightning_bucketddp_autoload":
                    self.before = set(sys.modules)
        recorder = Recorder()
        sys.meta_path.insert(0, recorder)
        import torch
        later = set(sys.modules) - recorder.before
        print(sorted(name for name in later if not name.startswith(("torch.", "torchgen"))))
    """)
    assert printed == "['lightning_bucketddp_autoload']"


def test_importing_lightning_loads_no_strategy_until_one_is_asked_for_and_then_only_what_training_needs() -> None:
    printed = run_code_after_torch("""
        import sys, lightning
        loaded = lambda: sorted(name for name in sys.modules if name.startswith("lightning_bucketddp."))
        print(loaded())
        lightning.pytorch.strategies.StrategyRegistry.get("bucketddp")
        print("lightning_bucketddp.bindings.trainer_lightning" in loaded())
        print([name for name in loaded() if name.split(".")[1] in ("callbacks", "commands", "recording")])
        print([name for name in loaded() if "fabric" in name or "pytorch_lightning" in name])
    """)
    assert printed.splitlines() == [
        "['lightning_bucketddp.bindings', 'lightning_bucketddp.bindings.registration']",
        "True",
        "[]",
        "[]",
    ]


def test_registry_modules_keep_their_own_loader() -> None:
    printed = run_code_after_torch("""
        import inspect, lightning.pytorch.strategies as strategies
        print(type(strategies.__loader__).__name__, type(strategies.__spec__.loader).__name__)
        print("StrategyRegistry" in inspect.getsource(strategies))
    """)
    assert printed == "SourceFileLoader SourceFileLoader\nTrue"


def test_bucketddp_autoload_0_leaves_registration_to_an_import_of_the_package() -> None:
    printed = run_code(
        """
        import lightning
        print("bucketddp" in lightning.pytorch.strategies.StrategyRegistry)
        import lightning_bucketddp
        print("bucketddp" in lightning.pytorch.strategies.StrategyRegistry)
        print("bucketddp" in lightning.fabric.strategies.STRATEGY_REGISTRY)
        """,
        BUCKETDDP_AUTOLOAD="0",
    )
    assert printed == "False\nTrue\nTrue"


@pytest.mark.long
def test_importing_the_package_first_registers_where_torch_loads_no_entry_points() -> None:
    printed = run_code(
        """
        import lightning_bucketddp
        import pytorch_lightning
        print("bucketddp" in pytorch_lightning.strategies.StrategyRegistry)
        """,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert printed == "True"


@pytest.mark.long
def test_a_strategy_module_may_be_the_first_import() -> None:
    """As when a spawned process unpickles a strategy."""
    printed = run_code("""
        import warnings
        with warnings.catch_warnings(record=True) as caught:
            import lightning_bucketddp.bindings.trainer_lightning
        import lightning
        print([str(w.message) for w in caught if "bucketddp" in str(w.message)])
        print(type(lightning.pytorch.strategies.StrategyRegistry.get("bucketddp")).__module__)
    """)
    assert printed == "[]\nlightning_bucketddp.bindings.trainer_lightning"


def test_a_broken_package_is_a_warning_and_lightning_works(tmp_path: Path) -> None:
    broken = tmp_path / "lightning_bucketddp"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise OSError('half removed')")
    printed = run_code_after_torch(
        """
        import warnings
        with warnings.catch_warnings(record=True) as caught:
            import torch, lightning
        print(*(w.message for w in caught if w.category is RuntimeWarning), sep="\\n")
        print("ddp" in lightning.pytorch.strategies.StrategyRegistry)
        """,
        PYTHONPATH=str(tmp_path),
    )
    *warned, works = printed.splitlines()
    assert warned == [
        f'`{root}` will not know strategy="bucketddp": registering it raised OSError: half removed.'
        " Reinstall lightning-bucketddp, or set BUCKETDDP_AUTOLOAD=0 to leave it out."
        for root in ("lightning.fabric", "lightning.pytorch")
    ]
    assert works == "True"


@pytest.mark.long
@pytest.mark.parametrize(
    ("missing", "root", "fabric_root", "module"),
    [
        (["lightning"], "pytorch_lightning", "lightning_fabric", "trainer_pytorch_lightning"),
        (["pytorch_lightning", "lightning_fabric"], "lightning.pytorch", "lightning.fabric", "trainer_lightning"),
    ],
)
def test_one_root_is_enough(missing: list[str], root: str, fabric_root: str, module: str) -> None:
    printed = run_code(f"""
        import sys
        sys.modules.update(dict.fromkeys({missing}))  # importing these raises, finding them finds nothing
        from lightning_bucketddp import BucketDDPStrategy
        import {root}, {fabric_root}
        print(BucketDDPStrategy.__module__, issubclass(BucketDDPStrategy, {root}.strategies.Strategy))
        print("bucketddp" in {root}.strategies.StrategyRegistry)
        print("bucketddp" in {fabric_root}.strategies.STRATEGY_REGISTRY)
    """)
    assert printed == f"lightning_bucketddp.bindings.{module} True\nTrue\nTrue"


def test_without_lightning_the_strategy_says_what_to_install() -> None:
    printed = run_code_after_torch("""
        import sys
        sys.modules.update(dict.fromkeys(["lightning", "pytorch_lightning"]))
        try:
            from lightning_bucketddp import BucketDDPStrategy
        except ImportError as error:
            print(error)
    """)
    assert printed == (
        "BucketDDPStrategy needs Lightning, but neither `lightning` nor `pytorch_lightning` is installed."
        " Run `pip install lightning`."
    )


def test_the_exported_strategy_belongs_to_the_imported_root() -> None:
    printed = run_code_after_torch("""
        import pytorch_lightning
        import lightning_bucketddp
        print(lightning_bucketddp.BucketDDPStrategy.__module__)
        import lightning
        print(lightning_bucketddp.BucketDDPStrategy.__module__)
        print("BucketDDPStrategy" in dir(lightning_bucketddp), hasattr(lightning_bucketddp, "no_such_name"))
    """)
    assert printed.splitlines() == [
        "lightning_bucketddp.bindings.trainer_pytorch_lightning",
        "lightning_bucketddp.bindings.trainer_lightning",
        "True False",
    ]


@pytest.mark.long
def test_a_lightning_cli_config_with_the_class_path_needs_no_registration(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    strategy = "{class_path: lightning_bucketddp.BucketDDPStrategy}"
    config.write_text(f"trainer: {{accelerator: cpu, devices: 2, logger: false, strategy: {strategy}}}")
    printed = run_code(
        f"""
        from lightning.pytorch.cli import LightningCLI
        from lightning.pytorch.demos.boring_classes import BoringModel
        cli = LightningCLI(BoringModel, run=False, save_config_callback=None, args=["--config", {str(config)!r}])
        print(type(cli.trainer.strategy).__module__)
        """,
        BUCKETDDP_AUTOLOAD="0",
    )
    assert printed == "lightning_bucketddp.bindings.trainer_lightning"
