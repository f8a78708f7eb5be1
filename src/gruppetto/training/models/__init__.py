"""Models that the image tasks know by name.

``MODELS[name].build(channels, size, classes)`` makes one; each is a plain ``nn.Module``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from torch import nn

from gruppetto.training.models.base import ImageModel
from gruppetto.training.models.resnet import ResNet
from gruppetto.training.models.rudra import Rudra, rudra_param_groups
from gruppetto.training.models.small import cnn, softmax

__all__ = ["MODELS", "ImageModel"]


def _resnet(depth: int) -> ImageModel:
    def build(channels: int, size: int, classes: int) -> nn.Module:
        return ResNet(depth, channels, classes)

    return ImageModel(
        build,
        f"Residual network of {depth} layers for CIFAR-10 (He et al. 2016), option-A shortcuts.",
        optimizer="sgd:lr=0.05,momentum=0.9,weight_decay=1e-4",
        batch_size=128,
        epochs=30,
        augment=True,
    )


def _rudra(channels: int, size: int, classes: int) -> nn.Module:
    return Rudra(classes)


def _small(build: Callable[[int, int, int], nn.Module], lr: float, epochs: int) -> ImageModel:
    summary = (build.__doc__ or "").split("\n")[0]
    return ImageModel(build, summary, f"sgd:lr={lr},momentum=0.9", batch_size=64, epochs=epochs)


#: name -> model.
MODELS: Final[dict[str, ImageModel]] = {
    "softmax": _small(softmax, lr=0.001, epochs=10),
    "cnn": _small(cnn, lr=0.02, epochs=3),
    "rudra": ImageModel(
        _rudra,
        "The 89,578-parameter CIFAR-10 network of the Rudra papers, with its own preprocessing.",
        optimizer="sgd:lr=0.001,momentum=0.9",
        batch_size=128,
        epochs=140,
        preprocessing="subtract-mean",
        param_groups=rudra_param_groups,
        only=(3, 32),
    ),
    **{f"resnet{depth}": _resnet(depth) for depth in (8, 20, 56, 110)},
}
