"""What may be in a checkpoint: data and harmless types are loaded, and nothing in the file is run."""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import decimal
import enum
import fractions
import functools
import http
import io
import os
import pathlib
import pickle
import re
import threading
import types
import uuid
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fsspec  # type: ignore[import-untyped]
import numpy as np
import pytest
import torch
from lightning.pytorch.trainer.states import RunningStage
from omegaconf import DictConfig, OmegaConf

from lightning_bucketddp.bindings.trainer_lightning import BucketDDPCheckpointIO
from lightning_bucketddp.checkpoint.checkpoint_io import UnsafeCheckpointError
from tests.support.cases import for_each

HARMLESS = {
    "path": pathlib.Path("logs") / "run 1",
    "pure_path": pathlib.PureWindowsPath("C:/logs"),
    "namespace": argparse.Namespace(lr=0.1, nested=argparse.Namespace(layers=[1, 2])),
    "simple_namespace": types.SimpleNamespace(lr=0.1),
    "timedelta": datetime.timedelta(days=3, microseconds=7),
    "datetime": datetime.datetime(2026, 11, 3, 4, 12, tzinfo=datetime.timezone.utc),
    "date": datetime.date(2026, 11, 3),
    "time": datetime.time(4, 12),
    "ordered_dict": collections.OrderedDict(b=1, a=2),
    "counter": collections.Counter("aab"),
    "empty_defaultdict": collections.defaultdict(dict),
    "decimal": decimal.Decimal("0.1"),
    "fraction": fractions.Fraction(1, 3),
    "uuid": uuid.UUID(int=5),
    "set": {1, 2},
    "frozenset": frozenset([1, 2]),
    "range": range(3),
    "slice": slice(1, 2),
    "complex": 1 + 2j,
    "bytes": b"\x00\xff",
    "big_int": 2**70,
    "type": float,
    "enum_of_the_standard_library": http.HTTPStatus.NOT_FOUND,
    "flag_of_the_standard_library": re.RegexFlag.IGNORECASE,
    "enum_of_lightning": RunningStage.TRAINING,
    "device": torch.device("cpu"),
    "dtype": torch.bfloat16,
    "size": torch.Size([2, 3]),
    "numpy_float": np.float32(0.1),
    "numpy_int": np.int64(7),
    "numpy_bool": np.bool_(True),
    "numpy_text": np.str_("text"),
    "numpy_dtype": np.dtype("float16"),
    "numpy_time": np.datetime64("2026-11-03"),
    "config": OmegaConf.create({"lr": 0.1, "layers": [1, None, "x"], "twice": "${lr}", "flag": True}),
    "config_type": DictConfig,
}


def save(value: Any, path: Path | str, *, as_archive: bool = True) -> None:
    content = io.BytesIO()
    torch.save(value, content, _use_new_zipfile_serialization=as_archive)
    with fsspec.open(str(path), "wb") as file:
        file.write(content.getvalue())


def load(path: Path | str, **options: Any) -> Any:
    return BucketDDPCheckpointIO().load_checkpoint(path, **options)


@for_each("name", HARMLESS)
@for_each("as_archive", [True, False])
def test_a_harmless_type_is_loaded(name: str, as_archive: bool, tmp_path: Path) -> None:
    save({"hyper_parameters": {name: HARMLESS[name]}}, tmp_path / "model.ckpt", as_archive=as_archive)
    found = load(tmp_path / "model.ckpt")["hyper_parameters"][name]
    assert type(found) is type(HARMLESS[name])
    assert found == HARMLESS[name]


def test_numpy_arrays_are_loaded(tmp_path: Path) -> None:
    arrays = [np.arange(6.0).reshape(2, 3), np.array(["a", "bc"]), np.zeros(2, dtype=[("a", "i4"), ("b", "f8")])]
    save({"arrays": arrays}, tmp_path / "model.ckpt")
    for found, expected in zip(load(tmp_path / "model.ckpt")["arrays"], arrays, strict=True):
        assert found.dtype == expected.dtype
        assert found.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("written_as", "read_as"), [("numpy._core.multiarray", "numpy.core.multiarray"), ("pathlib", "pathlib._local")]
)
def test_types_are_known_by_the_names_that_other_versions_give_them(
    written_as: str, read_as: str, tmp_path: Path
) -> None:
    values = {"float": np.float64(0.5), "array": np.arange(3), "path": Path("a") / "b"}
    torch.save(values, tmp_path / "model.ckpt", pickle_module=_pickle_with_renamed(written_as, read_as))
    found = load(tmp_path / "model.ckpt")
    assert (found["float"], found["array"].tolist(), found["path"]) == (0.5, [0, 1, 2], Path("a/b"))


def _pickle_with_renamed(module: str, other: str) -> Any:
    in_python: Any = pickle._Pickler

    class Pickler(in_python):
        def save_global(self, value: Any, name: str | None = None) -> None:
            if value.__module__ == module:
                self.write(f"c{other}\n{value.__name__}\n".encode())
            else:
                super().save_global(value, name)

        dispatch = {**in_python.dispatch, type: save_global, types.FunctionType: save_global}  # noqa: RUF012

    return types.SimpleNamespace(Pickler=Pickler, dump=pickle.dump, __name__="renaming")


def test_what_the_user_has_allowed_stays_allowed(tmp_path: Path) -> None:
    save({"when": datetime.timedelta(1), "own": _Own(3)}, tmp_path / "model.ckpt")
    with torch.serialization.safe_globals([datetime.timedelta, _Own]):
        assert load(tmp_path / "model.ckpt")["own"].value == 3
        assert set(torch.serialization.get_safe_globals()) >= {datetime.timedelta, _Own}
    assert not {datetime.timedelta, argparse.Namespace} & set(torch.serialization.get_safe_globals())


class _Own:
    def __init__(self, value: int) -> None:
        self.value = value


class _Touches:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


@contextlib.contextmanager
def served_by_http(directory: Path) -> Iterator[str]:
    """An address under which the files in `directory` are."""

    class Silent(SimpleHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Silent, directory=str(directory))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("as_archive", [True, False], ids=["archive", "old"])
@pytest.mark.parametrize("where", ["path", "file", "memory", "http"])
def test_nothing_in_a_checkpoint_is_run(where: str, as_archive: bool, tmp_path: Path) -> None:
    traced = tmp_path / "was_run"
    with served_by_http(tmp_path) as address, patch.dict(os.environ, {"TORCH_HOME": str(tmp_path)}):
        directory = {"path": tmp_path, "file": f"file://{tmp_path}", "memory": "memory://malicious", "http": address}
        path = f"{directory[where]}/model.ckpt"
        written = str(tmp_path / "model.ckpt") if where == "http" else path
        save({"state_dict": {}, "payload": _Touches(traced)}, written, as_archive=as_archive)
        with pytest.raises(UnsafeCheckpointError) as raised:
            load(path)
        assert not traced.exists()
        text = str(raised.value)
        assert text.startswith(
            f"Checkpoint `{path}` is not loaded, because it holds more than `weights_only=True` accepts"
        )
        assert "posix.system" in text
        assert text.endswith(
            "Nothing in it was run. If you trust the file, pass `weights_only=False` (before Lightning 2.6: set"
            " TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1) or name its types to `torch.serialization.add_safe_globals`."
        )
        # The user may allow it, in two ways.
        with patch.dict(os.environ, {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}):
            load(path)
        assert traced.exists()
        traced.unlink()
        load(path, weights_only=False)
        assert traced.exists()


def test_a_remote_checkpoint_that_changes_is_read_anew_and_damage_is_named(tmp_path: Path) -> None:
    with served_by_http(tmp_path) as address:
        for number in (1, 2):
            save({"number": number}, tmp_path / "model.ckpt")
            assert load(f"{address}/model.ckpt") == {"number": number}
        (tmp_path / "model.ckpt").write_bytes((tmp_path / "model.ckpt").read_bytes()[:-10])
        with pytest.raises(RuntimeError, match=rf"`{address}/model.ckpt`: it is cut short or damaged"):
            load(f"{address}/model.ckpt")


@for_each("value", [functools.partial(print, "run"), getattr, np.load, eval])
def test_functions_are_not_harmless(value: Any, tmp_path: Path) -> None:
    save({"payload": value}, tmp_path / "model.ckpt")
    with pytest.raises(UnsafeCheckpointError, match=rf"^Checkpoint `{tmp_path}/model.ckpt` is not loaded"):
        load(tmp_path / "model.ckpt")


class _Colour(enum.Enum):
    RED = 1


def test_every_type_that_is_not_allowed_is_named(tmp_path: Path) -> None:
    save({"a": _Own(1), "b": _Colour.RED, "c": Path("harmless")}, tmp_path / "model.ckpt")
    with pytest.raises(UnsafeCheckpointError) as raised:
        load(tmp_path / "model.ckpt")
    named = [f"{__name__}.{kind.__name__}" for kind in (_Colour, _Own)]
    if hasattr(torch.serialization, "get_unsafe_globals_in_checkpoint"):
        assert f"accepts: {', '.join(named)}. Nothing" in str(raised.value)
    assert named[1] in str(raised.value)
    assert isinstance(raised.value, pickle.UnpicklingError)  # for programs that expect torch's
