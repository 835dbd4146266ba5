"""A strategy made before Lightning is imported fits whichever Trainer gets it."""

from __future__ import annotations

import re

import lightning_bucketddp
from tests.support.programs import REPOSITORY, run_code_after_torch


def test_a_strategy_becomes_the_class_of_the_trainer_that_takes_it() -> None:
    # In the order in which import sorters put them.
    printed = run_code_after_torch(
        """
        from lightning_bucketddp import BucketDDPStrategy
        from pytorch_lightning import Trainer
        from pytorch_lightning.strategies import DDPStrategy
        strategy = BucketDDPStrategy(bucket_cap_mb=3)
        trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy)
        print(trainer.strategy is strategy, type(strategy).__module__, isinstance(strategy, DDPStrategy))
        print(strategy.config.bucket_cap_mb, type(strategy.checkpoint_io).__module__)
        import sys
        not_needed = ("recording", "commands", "callbacks", "reducer.step_recorder")
        print([m for m in sys.modules if m.startswith(tuple(f"lightning_bucketddp.{n}" for n in not_needed))])
        """
    )
    assert printed.splitlines() == [
        "True lightning_bucketddp.bindings.trainer_pytorch_lightning True",
        "3 lightning_bucketddp.bindings.trainer_pytorch_lightning",
        # Only monitors need these, whose import would delay the begin of a fit on all ranks.
        "[]",
    ]


def test_the_public_class_becomes_that_of_the_fabric_that_takes_it() -> None:
    printed = run_code_after_torch(
        """
        from lightning_bucketddp import BucketDDPStrategy
        from lightning.fabric import Fabric
        from lightning.fabric.strategies import DDPStrategy
        strategy = BucketDDPStrategy(bucket_cap_mb=3, timeout=7, static_graph=True, auto_resume=False)
        fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
        print(fabric.strategy is strategy, type(strategy).__module__, isinstance(strategy, DDPStrategy))
        print(strategy.config.bucket_cap_mb, strategy._timeout, *strategy.options.without_effect)
        try:
            Fabric(accelerator="cpu", devices=2, strategy=BucketDDPStrategy(auto_resume=True))
        except TypeError as error:
            print(error)
        """
    )
    assert printed.splitlines() == [
        "True lightning_bucketddp.bindings.fabric_lightning True",
        "3 0:00:07 static_graph",
        "`auto_resume` is an option of `BucketDDPStrategy` for the Trainer, and is not available with Fabric. Leave it"
        " out, or see `lightning_bucketddp.bindings.fabric_lightning.BucketDDPStrategy` for what there is.",
    ]


def test_errors_can_be_imported_from_the_package() -> None:
    documented = re.findall(r"^### (.*Error.*)$", (REPOSITORY / "docs" / "api.md").read_text(), re.MULTILINE)
    names = {name for heading in documented for name in heading.split(", ")}
    raised = {
        name
        for path in (REPOSITORY / "lightning_bucketddp").rglob("*.py")
        for name in re.findall(r"^class (\w+Error)\(", path.read_text(), re.MULTILINE)
    }
    # These are caught in the package: by commands, in writing checkpoints, by the watchdog, and in capturing steps.
    assert names == raised - {"UsageError", "NotPlainError", "StoreSilentError", "NotCapturedError"}
    assert names <= set(lightning_bucketddp.__all__)
    assert all(issubclass(getattr(lightning_bucketddp, name), Exception) for name in names)


def test_a_subclass_for_another_root_is_refused_by_name() -> None:
    printed = run_code_after_torch(
        """
        from lightning_bucketddp.bindings.trainer_lightning import BucketDDPStrategy
        import pytorch_lightning

        class Mine(BucketDDPStrategy):
            pass

        try:
            pytorch_lightning.Trainer(accelerator="cpu", devices=2, strategy=Mine())
        except TypeError as error:
            print(error)
        """
    )
    assert printed == (
        "`Mine` derives from a `BucketDDPStrategy` for another root of Lightning than `pytorch_lightning`, where the"
        " Trainer is from. Derive it from `lightning_bucketddp.bindings.trainer_pytorch_lightning.BucketDDPStrategy`."
    )
