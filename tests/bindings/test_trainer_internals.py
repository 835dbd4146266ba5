"""Each function with a private name of Lightning is called in fits of two batches: a changed Lightning fails here."""

from __future__ import annotations

import ast
import inspect
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from tqdm import tqdm  # type: ignore[import-untyped]

from lightning_bucketddp import trainer_internals as internals
from lightning_bucketddp.part import RunPart
from lightning_bucketddp.strategies.fit_state import LoaderPreparation

TRAINING, OTHER = list(torch.ones(4, 2)), list(torch.zeros(4, 2))


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def root(request: pytest.FixtureRequest) -> Any:
    return import_module(request.param)


@pytest.fixture(autouse=True)
def without_monitor_of_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show the progress of a search without a thread, which would stay."""
    monkeypatch.setattr(tqdm, "monitor_interval", 0)


def loader_of(samples: list[torch.Tensor], batch_size: int = 2) -> Any:
    return DataLoader(samples, batch_size=batch_size)  # type: ignore[arg-type]


def model_of(root: Any, **members: Any) -> Any:
    """Return a module with two batches of everything; `members` replace its own."""

    class Model(root.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)
            self.batch_size = 2
            self.lr = 0.1

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.layer(batch).sum()
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.layer(batch).sum())

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return batch_idx

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

        def train_dataloader(self) -> Any:
            return loader_of(TRAINING, self.batch_size)

        def val_dataloader(self) -> Any:
            return loader_of(OTHER)

        predict_dataloader = val_dataloader

    return type("Model", (Model,), members)()


def trainer_with(root: Any, *, callbacks: Any = (), **options: Any) -> Any:
    quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    limits = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "log_every_n_steps": 2}
    return root.Trainer(**{**quiet, **limits, **options}, callbacks=list(callbacks))


def calling(root: Any, **hooks: Callable[[Any], None]) -> Any:
    """Return a callback whose `hooks` are called with the Trainer."""
    members = {name: lambda self, trainer, *_, hook=hook, **__: hook(trainer) for name, hook in hooks.items()}
    return type("Calling", (root.Callback,), members)()


def fit(root: Any, after_batch: Callable[[Any], None] = lambda trainer: None, **options: Any) -> Any:
    trainer = trainer_with(root, callbacks=[calling(root, on_train_batch_end=after_batch)], **options)
    trainer.fit(model_of(root))
    return trainer


def test_every_function_is_called_here() -> None:
    public = {
        name
        for name, value in vars(internals).items()
        if getattr(value, "__module__", None) == internals.__name__ and not name.startswith("_")
    }
    nodes = ast.walk(ast.parse(Path(__file__).read_text()))
    called = {node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "internals"}
    # Made by `saved_progress` and `replace_closures`.
    returned = {"SavedProgress", "ClosureParts"}
    assert public - called == returned


def test_a_lightning_that_has_changed_is_named_with_what_is_missing(root: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class LoopOfUser(type(root.Trainer().fit_loop)):  # type: ignore[misc]
        pass

    trainer = trainer_with(root)
    trainer.fit_loop = LoopOfUser(trainer, max_epochs=1)
    del trainer.fit_loop._combined_loader
    monkeypatch.setattr(import_module(root.__name__.partition(".")[0]), "__version__", "2.7.0")
    name = root.__name__.partition(".")[0]
    message = (
        rf"^lightning-bucketddp \S+ does not know {name} 2\.7\.0: `LoopOfUser` has no `_combined_loader`\. Upgrade"
        rf" lightning-bucketddp, or install `{name}<2\.7`\.$"
    )
    with pytest.raises(RuntimeError, match=message):
        internals.combined_loader(trainer.fit_loop)
    with pytest.raises(RuntimeError, match=rf"`{root.__name__}.loops` has no `gone`"):
        internals.known(import_module(f"{root.__name__}.loops"), "gone")
    with pytest.raises(RuntimeError, match="`Trainer` has no `gone`"):
        internals.replace_method(trainer, "gone", lambda: None)


class NotesData(RunPart):
    """Notes the data of dataloaders, by whether it is for training."""

    def __init__(self) -> None:
        self.data: dict[bool, list[Any]] = {True: [], False: []}

    def prepare_loader(self, loader: Any, *, is_training: bool) -> Any:
        self.data[is_training].append(loader.dataset)
        return loader


@pytest.mark.parametrize(
    ("searches", "options"),
    [
        ({}, {"reload_dataloaders_every_n_epochs": 1}),
        ({"BatchSizeFinder": {"max_trials": 2, "steps_per_trial": 1}}, {}),
        ({"LearningRateFinder": {"num_training_steps": 4}}, {}),
    ],
    ids=["reloaded", "batch_size", "learning_rate"],
)
def test_training_data_is_distinguished_from_other_data(
    root: Any, searches: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    callbacks = [getattr(root.callbacks, name)(**arguments) for name, arguments in searches.items()]
    trainer = trainer_with(root, callbacks=callbacks, max_epochs=2, default_root_dir=tmp_path, **options)
    loaders, part = LoaderPreparation(), NotesData()
    loaders.watch(trainer)
    internals.replace_method(trainer.strategy, "process_dataloader", lambda loader: loaders.prepare(loader, [part]))
    trainer.fit(model_of(root))
    assert len(part.data[True]) >= (1 if "LearningRateFinder" in searches else 2)
    assert all(data is TRAINING for data in part.data[True])
    assert part.data[False]
    assert all(data is OTHER for data in part.data[False])
    loaders.close()
    assert "setup_data" not in vars(trainer.fit_loop)


def test_samplers_are_prepared_by_stage(root: Any) -> None:
    trainer, modes = trainer_with(root), []

    def prepare(original: Any, loader: Any, shuffle: bool, mode: Any) -> Any:
        modes.append((mode, loader.dataset is TRAINING))
        return original(loader, shuffle, mode)

    undo = internals.replace_preparation(trainer, prepare)
    trainer.fit(model_of(root))
    assert sorted(set(modes)) == [("train", True), ("validate", False)]
    undo()
    modes.clear()
    trainer.validate(model_of(root))
    assert modes == []


def test_the_user_is_asked_for_dataloaders(root: Any) -> None:
    trainer, data = trainer_with(root), []

    def request(ask: Any) -> Any:
        data.append((loader := ask()).dataset)
        return loader

    undo = internals.wrap_requests(trainer, request)
    trainer.fit(model_of(root))
    undo()
    trainer.fit(model_of(root))
    assert {id(it) for it in data} == {id(TRAINING), id(OTHER)}
    assert len(data) == 2


def test_dataloaders_of_a_loop(root: Any) -> None:
    seen = []

    def observe(trainer: Any) -> None:
        combined = internals.combined_loader(trainer.fit_loop)
        seen.append((len(combined.flattened), combined.limits, internals.mode_of(combined), combined._dataset_length()))
        internals.set_num_samples(combined, lambda: 3 - len(seen))
        seen.append(combined._dataset_length())

    fit(root, observe)
    assert seen == [(1, [2], "max_size_cycle", 4), 2, (1, [2], "max_size_cycle", 2), 2]


def test_samplers_inside_of_lightnings(root: Any) -> None:
    kinds = []

    def observe(trainer: Any) -> None:
        (loader,) = internals.combined_loader(trainer.predict_loop).flattened
        kinds.append((type(loader.batch_sampler), type(internals.batch_sampler_within(loader.batch_sampler))))

    trainer_with(root, callbacks=[calling(root, on_predict_start=observe)]).predict(model_of(root))
    ((outer, inner),) = kinds
    assert outer is not BatchSampler
    assert inner is BatchSampler
    wrapper = import_module(f"{root.__name__}.trainer.connectors.data_connector").DistributedSamplerWrapper
    own = RandomSampler(TRAINING)
    assert internals.sampler_within(wrapper(own, num_replicas=2, rank=0)) is own
    assert internals.sampler_within(own) is own
    sequential = SequentialSampler(TRAINING)
    batches = BatchSampler(sequential, 2, drop_last=False)
    assert internals.batch_sampler_within(batches) is batches


def test_counts_of_a_fit_and_of_its_checkpoint_and_that_a_resumed_one_has_begun(root: Any, tmp_path: Path) -> None:
    counts, marks = [], []

    def observe(trainer: Any) -> None:
        progress = trainer.fit_loop.epoch_loop.batch_progress, trainer.fit_loop.epoch_progress
        counts.append((progress[0].current.ready, progress[1].current.started))
        trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

    def mark(trainer: Any) -> None:
        before = trainer.fit_loop.restarting
        internals.mark_as_begun(trainer, lacks_metrics=False)
        marks.append((before, trainer.fit_loop.restarting))

    fit(root, observe)
    assert counts == [(1, 1), (2, 1)]
    saved = internals.saved_progress(torch.load(tmp_path / "2.ckpt", weights_only=False))
    assert saved is not None
    assert saved.epochs["current"] == {"ready": 1, "started": 1, "processed": 0, "completed": 0}
    assert (saved.batches["current"]["ready"], saved.batches["is_last_batch"]) == (2, True)
    assert saved.optimizer_steps["total"]["completed"] == 2
    assert internals.saved_progress({}) is None
    trainer = trainer_with(root, callbacks=[calling(root, on_train_start=mark)])
    trainer.fit(model_of(root), ckpt_path=tmp_path / "1.ckpt")
    assert marks == [(True, False)]
    progress = trainer.fit_loop.epoch_loop.batch_progress
    internals.set_batches(trainer, 5)
    assert (progress.current.processed, progress.current.completed, progress.total.ready) == (5, 5, 5)


def test_what_was_logged(root: Any) -> None:
    steps, results = [], set()

    logged: list[Any] = []

    class Logger(import_module(f"{root.__name__}.loggers.logger").DummyLogger):  # type: ignore[misc]
        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            logged.append(metrics)

    def observe(trainer: Any) -> None:
        steps.append(internals.is_log_step(trainer))
        results.update(internals.logged_results(trainer))
        internals.log_at_once(trainer, {"ours": 1.0})

    trainer = fit(root, observe, logger=Logger())
    assert internals.logged_steps(trainer) == 2
    internals.set_logged_steps(trainer, 7)
    assert internals.logged_steps(trainer) == 7
    assert sorted(steps) == [False, True]
    assert results == {"training_step.loss"}
    assert [entry["ours"] for entry in logged if "ours" in entry] == [1.0, 1.0]
    assert set(internals.known_metrics(trainer)) == {"loss", "val_loss"}
    internals.known_metrics(trainer)["restored"] = torch.tensor(1.0)
    assert "restored" in trainer.callback_metrics


def test_loggers_go_on(root: Any, tmp_path: Path) -> None:
    for cls in (root.loggers.CSVLogger, root.loggers.TensorBoardLogger):
        logger = cls(tmp_path)
        assert internals.continue_logger(logger, 7)
        assert logger.version == 7
        named = cls(tmp_path, version="mine")
        assert internals.continue_logger(named, 7)
        assert named.version == "mine"
    logger = root.loggers.CSVLogger(tmp_path)
    logger.log_metrics({"loss": 1.0})
    assert not internals.continue_logger(logger, 7)
    # These need packages and servers of their own.
    for name, module in {"_run_id": "mlflow", "_id": "wandb", "_wandb_init": "wandb"}.items():
        assert f"self.{name}" in inspect.getsource(import_module(f"{root.__name__}.loggers.{module}"))


def test_a_fetch_is_seen_before_it_begins(root: Any) -> None:
    trainer, order = trainer_with(root), []

    class Seen(list[torch.Tensor]):
        def __getitem__(self, index: Any) -> Any:
            order.append("data")
            return super().__getitem__(index)

    undo = internals.call_before_fetch(trainer, lambda: order.append("call"))
    data = loader_of(Seen(TRAINING))
    trainer.fit(model_of(root), data)
    # One batch is fetched ahead.
    assert order[0] == "call"
    assert order.count("call") == 2
    undo()
    trainer.fit(model_of(root), data)
    assert order.count("call") == 2


def test_closures_are_run_by_another(root: Any) -> None:
    trainer, seen = trainer_with(root), []

    class Logging(model_of(root).__class__):  # type: ignore[misc]
        def training_step(self, batch: Any, *args: Any) -> Any:
            assert self.trainer is not trainer
            return super().training_step(batch, *args)

    model = Logging()

    def run(closure: Any) -> Any:
        seen.append(sorted(closure.arguments))
        assert closure.has_backward
        assert callable(closure.zero_grad)
        assert closure.result_of(torch.ones(())).loss == 1
        with internals.trainer_replaced(model, internals.AsIfAlone(trainer)):
            result = closure.run()
        with internals.logging_in(model, "training_step"):
            model.log("repeated", result.loss)
        return result

    undo = internals.replace_closures(trainer, run)
    trainer.fit(model, loader_of(TRAINING))
    assert len(seen) == 2
    assert "batch" in seen[0]
    assert "repeated" in trainer.callback_metrics
    undo()


def test_another_class_reads_what_a_training_step_returns(root: Any) -> None:
    trainer, outputs = trainer_with(root), []

    def derive(result_class: Any) -> Any:
        class Result(result_class):
            @classmethod
            def from_training_step_output(cls, output: Any, *args: Any) -> Any:
                outputs.append(output)
                return super().from_training_step_output(output, *args)

        return Result

    internals.replace_result_class(trainer, derive)
    trainer.fit(model_of(root))
    assert len(outputs) == 2
    internals.replace_result_class(trainer, lambda result_class: outputs.append(result_class.__name__))
    assert outputs[-1] != "Result"


@pytest.mark.parametrize("strategy", ["ddp", "bucketddp"])
def test_the_plugin_for_layers(root: Any, strategy: str) -> None:
    for is_on in (False, True):
        trainer = trainer_with(root, strategy=strategy, sync_batchnorm=is_on)
        assert (internals.layer_sync_of(trainer.strategy) is not None) == is_on


def test_a_step_runs_with_the_hooks_of_the_module(root: Any) -> None:
    seen: list[Any] = []

    def step(trainer: Any) -> None:
        trainer.lightning_module.register_forward_pre_hook(lambda module, args: seen.append(args[1]))
        output = internals.call_for_step(trainer.strategy, "training_step", torch.ones(1, 2), 5)
        assert output.shape == ()

    trainer_with(root, callbacks=[calling(root, on_train_start=step)]).fit(model_of(root))
    assert seen == [5]


def test_averages_that_callbacks_keep(root: Any) -> None:
    if not hasattr(root.callbacks, "WeightAveraging"):
        pytest.skip("Lightning before 2.6 has none")
    found, swaps = [], []

    def observe(trainer: Any) -> None:
        found.extend(internals.averaged_models(trainer.callbacks))

    callbacks = [root.callbacks.WeightAveraging(), calling(root, on_train_end=observe)]
    undo = internals.call_after_swaps(callbacks, lambda: swaps.append(1))
    trainer_with(root, callbacks=callbacks, num_sanity_val_steps=0).fit(model_of(root))
    assert [type(model) for model in found] == [AveragedModel]
    assert len(swaps) == 2  # before and after a validation
    undo()
    assert "_swap_models" not in vars(callbacks[0])


def test_steps_of_an_evaluation(root: Any) -> None:
    trainer, indices = trainer_with(root, num_sanity_val_steps=0), []

    def step(original: Any, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
        indices.append((batch_idx, dataloader_idx, dataloader_iter))
        original(batch, batch_idx, dataloader_idx, dataloader_iter)

    undos = [internals.replace_step(trainer.fit_loop.epoch_loop.val_loop, step)]
    trainer.fit(model_of(root))
    assert indices == [(0, 0, None), (1, 0, None)]
    assert "val_loss" in trainer.callback_metrics
    undos += [internals.replace_step(loop, step) for loop in (trainer.validate_loop, trainer.test_loop)]
    trainer.validate(model_of(root))
    assert len(indices) == 4
    for undo in undos:
        undo()
    trainer.validate(model_of(root))
    assert len(indices) == 4


def test_steps_of_a_prediction(root: Any) -> None:
    ran = []

    def predict_step(_: Any, batch: Any, batch_idx: int) -> int:
        ran.append(batch_idx)
        return batch_idx

    def step(original: Any, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
        if batch_idx == 0:
            original(batch, batch_idx, dataloader_idx, dataloader_iter)
        else:
            internals.predict_unseen(trainer, batch, batch_idx, dataloader_idx)

    trainer = trainer_with(root, callbacks=[calling(root, on_predict_start=internals.return_predictions)])
    undo = internals.replace_step(trainer.predict_loop, step)
    model = model_of(root, predict_step=predict_step)
    assert trainer.predict(model, return_predictions=False) == [0]
    assert ran == [0, 1]
    undo()
    assert trainer.predict(model) == [0, 1]


def test_a_fit_begins_with_another_checkpoint(root: Any, tmp_path: Path) -> None:
    fit(root).save_checkpoint(tmp_path / "saved.ckpt")
    first_steps: list[int] = []
    callbacks = [calling(root, on_train_start=lambda trainer: first_steps.append(trainer.global_step))]
    trainer = trainer_with(root, callbacks=callbacks, max_epochs=2)
    internals.load_at_start(trainer, str(tmp_path / "saved.ckpt"))
    trainer.fit(model_of(root))
    # Only once.
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model_of(root))
    assert first_steps == [2, 4]
    assert not internals.has_ckpt_path(trainer)
    trainer.ckpt_path = str(tmp_path / "saved.ckpt")
    assert internals.has_ckpt_path(trainer)
    other = trainer_with(root, callbacks=callbacks)
    internals.load_at_start(other, str(tmp_path / "saved.ckpt"))
    internals.load_as_given(other)
    other.fit(model_of(root))
    assert first_steps == [2, 4, 0]


def test_callbacks_that_search(root: Any, tmp_path: Path) -> None:
    found: list[bool | None] = []

    def observe(trainer: Any) -> None:
        found.extend(internals.ends_by_search(callback) for callback in trainer.callbacks)

    callback = calling(root, setup=observe)
    trainer = trainer_with(root, callbacks=[callback], default_root_dir=tmp_path)
    tuner = import_module(f"{root.__name__}.tuner").Tuner(trainer)
    tuner.lr_find(model_of(root), num_training=2)
    tuner.scale_batch_size(model_of(root), max_trials=1, steps_per_trial=1)
    assert found.count(True) == 2
    assert found.count(None) == 2
    assert internals.ends_by_search(root.callbacks.BatchSizeFinder()) is False


def test_a_write_that_has_failed_in_the_background_is_forgotten(root: Any, tmp_path: Path) -> None:
    plugin = root.plugins.io.AsyncCheckpointIO(root.plugins.io.TorchCheckpointIO())
    with suppress(ValueError):  # where it is fast
        plugin.save_checkpoint({}, tmp_path / "missing" / "\0")
    for _ in range(2):
        with pytest.raises(ValueError, match="null"):
            plugin.teardown()
    internals.forget_write_error(plugin)
    plugin.teardown()
    internals.forget_write_error(root.plugins.io.TorchCheckpointIO())


@pytest.mark.parametrize("name", ["lightning.fabric", "lightning_fabric"])
def test_what_fabric_needs(name: str) -> None:
    fabric, model = import_module(name).Fabric(accelerator="cpu", devices=1), nn.Linear(1, 1)
    assert type(fabric.setup(model)).__name__ == internals.WRAPPER_OF_FABRIC
    state = internals.convert_to_state(fabric.strategy, {"model": model, "step": 3}, filter={})
    assert state == {"model": model.state_dict(), "step": 3}
    environment = import_module(f"{name}.plugins.environments").LightningEnvironment()
    internals.set_main_port(environment, 12345)
    assert environment.main_port == 12345


def test_signals_come_to_other_handlers(root: Any) -> None:
    received: list[Any] = []

    def signal_and_stop(trainer: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        internals.stop_after_batch(trainer)

    trainer = trainer_with(root, callbacks=[calling(root, on_train_batch_end=signal_and_stop)])
    connector, loop = trainer._signal_connector, trainer.fit_loop.epoch_loop
    requeue = internals.slurm_requeue_of(trainer)
    undo = internals.replace_signal_handlers(
        trainer,
        on_sigterm=lambda number, frame: received.append(number),
        on_requeue=lambda number, frame: received.append("requeue"),
        on_registered=lambda: received.append("registered"),
    )
    assert internals.slurm_requeue_of(trainer) != requeue
    # Lightning has both since 2.6.
    assert ("_broadcast_sigterm_tensor" in vars(loop)) == hasattr(root.callbacks, "WeightAveraging")
    with pytest.raises(import_module(f"{root.__name__}.utilities.exceptions").SIGTERMException):
        trainer.fit(model_of(root))
    assert received == ["registered", signal.SIGTERM]
    undo()
    assert internals.slurm_requeue_of(trainer) == requeue
    replaced = {"_sigterm_notifier_fn", "_slurm_sigusr_handler_fn", "register_signal_handlers"}
    assert not replaced & vars(connector).keys()
    assert "_broadcast_sigterm_tensor" not in vars(loop)


def test_a_finder_takes_several_ranks_for_one(root: Any) -> None:
    trainer = trainer_with(root, strategy="ddp", devices=2)
    tuner = import_module(f"{root.__name__}.tuner").Tuner(trainer)
    exception = import_module(f"{root.__name__}.utilities.exceptions").MisconfigurationException
    finder, model = root.callbacks.BatchSizeFinder(), model_of(root)
    with pytest.raises(exception, match="distributed"):
        finder.setup(trainer, model)
    # What it asks next.
    with pytest.raises(exception, match="passed directly"):
        finder.setup(internals.AsIfAlone(trainer), model)
    with internals.tuning_as_if_alone(tuner):
        alone = internals.trainer_of(tuner)
        assert alone.world_size == 2
        assert alone._accelerator_connector.is_distributed is False
        alone.should_stop = True
    assert trainer.should_stop
    assert internals.trainer_of(tuner) is trainer


def test_what_replaces_a_method_is_taken_away_again_or_what_was_there_before() -> None:
    owner = SimpleNamespace(method=lambda: "user's")
    undo = internals.replace_method(owner, "method", lambda: "ours")
    assert owner.method() == "ours"
    undo()
    assert owner.method() == "user's"


def test_a_fit_that_has_failed_can_begin_again_from_nothing(root: Any) -> None:
    reported: list[BaseException] = []
    failure = ValueError("once")

    def fail_once(trainer: Any) -> None:
        if not reported and trainer.global_step == 1:
            raise failure

    reports = calling(root, on_train_batch_start=fail_once)
    type(reports).on_exception = lambda self, trainer, module, error: reported.append(error)
    trainer = trainer_with(root, callbacks=[reports])
    module = model_of(root)
    interrupt = import_module(f"{root.__name__}.trainer.call")._interrupt

    class Launcher:
        is_interactive_compatible = True

        def launch(self, function: Callable[..., Any], *args: Any, trainer: Any, **kwargs: Any) -> Any:
            try:
                function(*args, **kwargs)
            except ValueError as error:
                internals.end_failed_fit(trainer, error, interrupt=interrupt)
            assert reported == [failure]
            assert trainer.global_step == 1
            internals.begin_fit(trainer)
            assert (trainer.global_step, trainer.max_epochs, trainer.callback_metrics) == (0, 1, {})
            return function(*args, **kwargs)

    trainer.strategy._launcher = Launcher()
    trainer.fit(module)
    assert trainer.global_step == 2
    assert trainer.state.finished


def test_processes_are_started_by_what_is_put_in_the_place_of_torch(root: Any) -> None:
    launcher_class = import_module(f"{root.__name__}.strategies.launchers")._MultiProcessingLauncher
    module = import_module(launcher_class.__module__)
    launcher = type("Launcher", (launcher_class,), {})(root.strategies.DDPStrategy(), start_method="fork")
    before = module.mp

    with internals.processes_started_by(lambda nprocs: nprocs, launcher):
        assert module.mp.get_context("fork") is before.get_context("fork")
        assert module.mp.start_processes(2) == 2
    assert module.mp is before
