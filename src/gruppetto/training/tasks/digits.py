"""Handwritten digits, 8x8 pixels, ten classes: the 1,797 pictures that scikit-learn ships."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from gruppetto.errors import InvalidSetting
from gruppetto.training.task import Task

__all__ = ["digits"]

_TRAIN = 1437


def digits(
    hidden: int = 64, batchnorm: bool = False, dropout: float = 0.0, standardise: bool = True
) -> Task:
    """8x8 handwritten digits, a network with one hidden layer.

    Permuted with seed 0; the first 1,437 train, the other 360 test.

    Args:
        hidden: units of the hidden layer.
        batchnorm: normalise the hidden layer by batch statistics.
        dropout: share of hidden units left out, in [0, 1).
        standardise: pixels with the training set's mean 0 and deviation 1; else 0 to 1.
    """
    if hidden < 1:
        raise InvalidSetting(f"digits: expected hidden >= 1, got {hidden}")
    if not 0 <= dropout < 1:
        raise InvalidSetting(f"digits: expected dropout in [0, 1), got {dropout}")
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    pixels = torch.tensor(data.data, dtype=torch.float32)[order] / 16.0
    if standardise:
        train = pixels[:_TRAIN]
        pixels = (pixels - train.mean()) / train.std()
    labels = torch.tensor(data.target, dtype=torch.int64)[order]

    def model() -> nn.Module:
        layers: list[nn.Module] = [nn.Linear(64, hidden)]
        if batchnorm:
            layers.append(nn.BatchNorm1d(hidden))
        layers.append(nn.ReLU())
        if dropout:
            layers.append(nn.Dropout(dropout))
        return nn.Sequential(*layers, nn.Linear(hidden, 10))

    return Task(
        model=model,
        train=TensorDataset(pixels[:_TRAIN], labels[:_TRAIN]),
        test=TensorDataset(pixels[_TRAIN:], labels[_TRAIN:]),
        optimizer="sgd:lr=0.1,momentum=0.9",
        batch_size=16,
        epochs=10,
        name="digits",
    )
