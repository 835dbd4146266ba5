"""Lightning knows `strategy="bucketddp"` without an import, and importing the package breaks nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.programs import REPOSITORY, run_code, run_code_after_torch

# Prints our names in a registry, with the options of each, and whether the strategy is of its root.
REGISTERED = """
def show(registry, strategy):
    for name in registry.available_strategies():
        if name.startswith("bucketddp"):
            print(name, sorted(registry[name]["init_params"].items()), isinstance(registry.get(name), strategy))

for trainer in TRAINERS:
    show(trainer.strategies.StrategyRegistry, trainer.strategies.Strategy)
for fabric in FABRICS:
    show(fabric.strategies.STRATEGY_REGISTRY, fabric.strategies.Strategy)
"""


def show_registered(trainer: str, fabric: str) -> str:
    return REGISTERED.replace("TRAINERS", f"[{trainer}]").replace("FABRICS", f"[{fabric}]")


def registered(*, num_roots: int) -> list[str]:
    """Return what is printed if all names are registered with this number of roots."""
    lines = []
    for name, start_method in {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}.items():
        lines.append(f"bucketddp{name} [('start_method', '{start_method}')] True")
        for value in (False, True):
            options = f"[('find_unused_parameters', {value}), ('start_method', '{start_method}')]"
            lines.append(f"bucketddp{name}_find_unused_parameters_{str(value).lower()} {options} True")
    return lines * num_roots


def test_importing_lightning_registers_every_name_with_a_strategy_of_that_root() -> None:
    # Lightning imports torch, which loads our entry point, so a root is partly imported then.
    code = f"import lightning, lightning.fabric\n{show_registered('lightning.pytorch', 'lightning.fabric')}"
    *names, file = run_code(f"{code}\nimport lightning_bucketddp; print(lightning_bucketddp.__file__)").splitlines()
    assert names == registered(num_roots=2)
    assert REPOSITORY in Path(file).parents  # it is installed as editable where tests run


def test_importing_torch_imports_one_of_our_files_that_needs_nothing_else() -> None:
    # Torch loads entry points late: after them it imports only some of its own modules.
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
    code = """
import inspect, sys, lightning, lightning.pytorch.strategies as strategies
loaded = lambda: sorted(name for name in sys.modules if name.startswith("lightning_bucketddp."))
print(loaded())
strategies.StrategyRegistry.get("bucketddp")
print("lightning_bucketddp.bindings.trainer_lightning" in loaded())
print([name for name in loaded() if name.split(".")[1] in ("callbacks", "commands", "recording")])
print([name for name in loaded() if "fabric" in name or "pytorch_lightning" in name])
# Modules whose import is hooked keep their loader.
print(type(strategies.__loader__).__name__, type(strategies.__spec__.loader).__name__)
print("StrategyRegistry" in inspect.getsource(strategies))
"""
    assert run_code_after_torch(code).splitlines() == [
        "['lightning_bucketddp.bindings', 'lightning_bucketddp.bindings.registration']",
        "True",
        "[]",
        "[]",
        "SourceFileLoader SourceFileLoader",
        "True",
    ]


def test_bucketddp_autoload_0_leaves_registration_to_an_import_of_the_package(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    strategy = "{class_path: lightning_bucketddp.BucketDDPStrategy}"
    config.write_text(f"trainer: {{accelerator: cpu, devices: 2, logger: false, strategy: {strategy}}}")
    printed = run_code_after_torch(
        f"""
        import os, sys, lightning_bucketddp_autoload
        # As when torch is imported with this variable, and calls the entry point.
        finders = [finder for finder in sys.meta_path if type(finder).__module__ == "lightning_bucketddp_autoload"]
        assert len(finders) == 1
        sys.meta_path.remove(finders[0])
        os.environ["BUCKETDDP_AUTOLOAD"] = "0"
        lightning_bucketddp_autoload.autoload()
        import lightning
        from lightning.pytorch.cli import LightningCLI
        from lightning.pytorch.demos.boring_classes import BoringModel
        print("bucketddp" in lightning.pytorch.strategies.StrategyRegistry)
        # Which needs none, and imports the package.
        cli = LightningCLI(BoringModel, run=False, save_config_callback=None, args=["--config", {str(config)!r}])
        print(type(cli.trainer.strategy).__module__)
        print("bucketddp" in lightning.pytorch.strategies.StrategyRegistry)
        print("bucketddp" in lightning.fabric.strategies.STRATEGY_REGISTRY)
        """
    )
    assert printed.splitlines() == ["False", "lightning_bucketddp.bindings.trainer_lightning", "True", "True"]


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
def test_one_root_is_enough_where_torch_loads_no_entry_points() -> None:
    printed = run_code(
        """
        import sys
        # Importing these raises, finding them finds nothing.
        sys.modules.update(dict.fromkeys(["lightning"]))
        import lightning_bucketddp
        import pytorch_lightning as root, lightning_fabric as fabric
        print("bucketddp" in root.strategies.StrategyRegistry, "bucketddp" in fabric.strategies.STRATEGY_REGISTRY)
        strategy = lightning_bucketddp.BucketDDPStrategy
        print(strategy.__module__, issubclass(strategy, root.strategies.Strategy))
        """,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert printed == "True True\nlightning_bucketddp.bindings.trainer_pytorch_lightning True"


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
    code = """
import pytorch_lightning, lightning_fabric
import lightning_bucketddp
print(lightning_bucketddp.BucketDDPStrategy.__module__)
import lightning
print(lightning_bucketddp.BucketDDPStrategy.__module__)
print("BucketDDPStrategy" in dir(lightning_bucketddp), hasattr(lightning_bucketddp, "no_such_name"))
"""
    printed = run_code_after_torch(code + show_registered("pytorch_lightning", "lightning_fabric"))
    assert printed.splitlines() == [
        "lightning_bucketddp.bindings.trainer_pytorch_lightning",
        "lightning_bucketddp.bindings.trainer_lightning",
        "True False",
        *registered(num_roots=2),
    ]
