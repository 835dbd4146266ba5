"""Jobs that follow the layers themselves through conversion, copies, pickles and revert."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.replicas.sync_batchnorm import convert_sync_batchnorm, revert_sync_batchnorm
from tests.support.jobs.sync_batchnorm import (
    NUM_CHANNELS,
    TwiceNormalized,
    assert_same_training,
    convert_and_copy,
    random_rows,
)
from tests.support.ranks import device


def class_names_after_conversion(*, model: nn.Module) -> list[str]:
    """The classes of a model's modules, in the order of `modules()`."""
    convert_sync_batchnorm(model.to(device()), Collectives(device()))
    return [type(module).__name__ for module in model.modules()]


def convert_train_and_revert() -> None:
    """Keep every object of a model, and what training did to it."""
    model = TwiceNormalized().to(device())
    layer, weight, running_var = model.norm, model.norm.weight, model.norm.running_var
    assert running_var is not None
    noted: Any = layer
    noted.note = "mine"
    called: list[nn.Module] = []
    layer.register_forward_hook(lambda module, *_: called.append(module))
    keys = list(model.state_dict())

    convert_sync_batchnorm(model, Collectives(device()))
    assert type(layer).__name__ == "SyncedBatchNorm2d"
    assert type(layer).__module__ == nn.BatchNorm2d.__module__
    assert isinstance(layer, nn.BatchNorm2d)
    model(random_rows())
    trained_var = running_var.clone()
    revert_sync_batchnorm(model)

    assert type(layer) is nn.BatchNorm2d
    block: Any = model.block
    assert model.norm is block[1][0] is layer
    assert layer.weight is weight
    assert layer.running_var is running_var
    assert torch.equal(running_var, trained_var)
    assert not torch.equal(running_var, torch.ones_like(running_var))
    assert int(layer.num_batches_tracked) == len(called) == 2
    assert layer.note == "mine"
    assert list(model.state_dict()) == keys
    _assert_trains_alone(layer)


def convert_twice_and_revert_once() -> None:
    """Convert a layer that is converted already."""
    layer, one_process = _layer_and_copy()
    convert_sync_batchnorm(layer, Collectives(device()))
    assert_same_training(layer, one_process)
    revert_sync_batchnorm(layer)
    assert type(layer) is nn.BatchNorm2d


def train_torch_sync_batchnorm() -> None:
    """Train the layer of a user who has converted the model with torch's own function."""
    layer = nn.SyncBatchNorm(NUM_CHANNELS).to(device(), torch.float64)
    one_process = nn.BatchNorm2d(NUM_CHANNELS).to(device(), torch.float64)
    convert_sync_batchnorm(layer, Collectives(device()))
    assert_same_training(layer, one_process)
    revert_sync_batchnorm(layer)
    assert type(layer) is nn.SyncBatchNorm


def train_deep_copy() -> None:
    """Train a copy of a converted layer; after the layer's revert use it alone, then convert it as well."""
    layer, one_process = _layer_and_copy()
    referring: Any = layer
    referring.references = [layer]
    copied = copy.deepcopy(layer)
    assert copied.references == [copied]
    assert_same_training(copied, one_process)
    assert layer.num_batches_tracked is not None
    assert int(layer.num_batches_tracked) == 0

    revert_sync_batchnorm(layer)
    _assert_trains_alone(copy.deepcopy(copied))
    convert_sync_batchnorm(copied, Collectives(device()))
    assert_same_training(copied, one_process)


def pickle_trained_layer(*, protocol: int) -> tuple[bytes, Tensor]:
    """A converted layer that has been trained, and its running mean."""
    layer = nn.BatchNorm2d(NUM_CHANNELS).to(device())
    convert_sync_batchnorm(layer, Collectives(device()))
    layer(random_rows())
    pickled = pickle.dumps(layer.cpu(), protocol=protocol)
    assert layer.running_mean is not None
    return pickled, layer.running_mean


def convert_lazy_layers() -> tuple[str, list[str]]:
    """Try to convert lazy layers, one of them without parameters; return the error and the classes after it."""
    model = nn.Sequential(nn.BatchNorm2d(2), nn.ModuleDict({"norm": nn.LazyBatchNorm2d()}))
    model.append(nn.LazyBatchNorm1d(affine=False, track_running_stats=False))
    try:
        convert_sync_batchnorm(model, Collectives(device()))
    except ValueError as error:
        return str(error), [type(module).__name__ for module in model.modules()]
    return "", []


def train_lazy_layer_after_a_batch() -> None:
    """Do what the refusal advises."""
    layer = nn.LazyBatchNorm2d().to(device(), torch.float64)
    layer(random_rows().double())
    one_process = convert_and_copy(layer)
    assert_same_training(layer, one_process)


def train_after_the_group_is_gone() -> None:
    """Destroys the process group: for a pool of its own."""
    layer, ordinary = _layer_and_copy()
    inputs = torch.randn(4 + dist.get_rank(), NUM_CHANNELS, 2, 2, dtype=torch.float64)
    dist.destroy_process_group()
    torch.testing.assert_close(layer(inputs), ordinary(inputs))


def _layer_and_copy() -> tuple[nn.BatchNorm2d, nn.Module]:
    layer = nn.BatchNorm2d(NUM_CHANNELS).to(device(), torch.float64)
    return layer, convert_and_copy(layer)


def _assert_trains_alone(layer: Any) -> None:
    """Train on one rank only, which ends in time only if it asks no other."""
    inputs = random_rows().to(layer.weight.dtype)
    if dist.get_rank() > 0:
        return
    mean = inputs.mean((0, 2, 3), keepdim=True)
    var = inputs.var((0, 2, 3), keepdim=True, correction=0)
    weight, bias = (parameter.view(-1, 1, 1) for parameter in (layer.weight, layer.bias))
    torch.testing.assert_close(layer(inputs), (inputs - mean) / (var + layer.eps).sqrt() * weight + bias)
