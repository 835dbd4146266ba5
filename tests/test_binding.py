"""A strategy made before Lightning is imported fits whichever Trainer gets it."""

from __future__ import annotations

import pytest

from tests.interpreter import run_code


@pytest.mark.parametrize(
    ("root", "module"),
    [("lightning.pytorch", "trainer_lightning"), ("pytorch_lightning", "trainer_pytorch_lightning")],
)
def test_a_strategy_becomes_the_class_of_the_trainer_that_takes_it(root: str, module: str) -> None:
    # In the order in which import sorters put them.
    printed = run_code(
        f"""
        from lightning_bucketddp import BucketDDPStrategy
        from {root} import Trainer
        from {root}.strategies import DDPStrategy
        strategy = BucketDDPStrategy(bucket_cap_mb=3)
        trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy)
        print(trainer.strategy is strategy, type(strategy).__module__, isinstance(strategy, DDPStrategy))
        print(strategy.config.bucket_cap_mb, type(strategy.checkpoint_io).__module__)
        """
    )
    io_module = "lightning_io" if root == "lightning.pytorch" else "lightning_fabric_io"
    assert printed.splitlines() == [
        f"True lightning_bucketddp.strategies.{module} True",
        f"3 lightning_bucketddp.checkpoint.{io_module}",
    ]


def test_a_subclass_for_another_root_is_refused_by_name() -> None:
    printed = run_code(
        """
        from lightning_bucketddp.strategies.trainer_lightning import BucketDDPStrategy
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
        " Trainer is from. Derive it from `lightning_bucketddp.strategies.trainer_pytorch_lightning.BucketDDPStrategy`."
    )
