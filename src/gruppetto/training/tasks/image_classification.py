"""What the tasks over files of pictures have in common: read, preprocess, put together."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from gruppetto.errors import InvalidSetting
from gruppetto.spec import suggest
from gruppetto.training.images import (
    ImageDataset,
    ImageKind,
    channel_statistics,
    pixel_mean,
    read_images,
    to_grey,
)
from gruppetto.training.images.files import describe_layouts
from gruppetto.training.models import MODELS, ImageModel
from gruppetto.training.task import Task

__all__ = ["Augmentation", "image_task"]


@dataclasses.dataclass(frozen=True)
class Augmentation:
    """What may be done to a training picture without changing its class.

    Args:
        padding: pixels added at every side before a random crop of the old size.
        flip: mirror half of the pictures.
    """

    padding: int = 0
    flip: bool = False


def image_task(
    kind: ImageKind,
    augmentation: Augmentation,
    *,
    data: str | None,
    model: str,
    augment: bool,
    grey: bool = False,
) -> Task:
    """A task that trains a known model on files of pictures.

    Args:
        kind: of the pictures.
        augmentation: done to training pictures if ``augment`` is true.
        data: the folder.
        model: a name in ``MODELS``.
        augment: whether to augment.
        grey: turn colours to grey.

    Raises:
        InvalidSetting: no folder, an unknown model, or one that cannot take these pictures.
        TaskError: the folder's files cannot be read.
    """
    chosen = find_model(model, kind.name)
    channels = 1 if grey else kind.channels
    if chosen.only not in (None, (channels, kind.size)):
        raise InvalidSetting(
            f"{kind.name}: the model {model} takes colour pictures of 32x32 pixels only, got "
            f"{'grey' if channels == 1 else 'colour'} ones of {kind.size}x{kind.size}; choose "
            "another model"
        )
    if not data:
        raise InvalidSetting(
            f"{kind.name} needs the data: --data DIR with {describe_layouts(kind)}"
        )
    images, labels = read_images(data, kind, "train")
    test_images, test_labels = read_images(data, kind, "test")
    if grey:
        images, test_images = to_grey(images), to_grey(test_images)
    mean, std = _statistics(images, chosen)
    crop = augmentation if augment else Augmentation()
    size, classes = kind.size, kind.classes

    def build() -> nn.Module:
        return chosen.build(channels, size, classes)

    return Task(
        model=build,
        train=ImageDataset(images, labels, mean, std, crop.padding, crop.flip),
        test=ImageDataset(test_images, test_labels, mean, std),
        param_groups=chosen.param_groups,
        optimizer=chosen.optimizer,
        batch_size=min(chosen.batch_size, len(labels)),
        epochs=chosen.epochs,
        name=kind.name,
    )


def find_model(name: str, task: str) -> ImageModel:
    """A model by its name.

    Raises:
        InvalidSetting: there is none of that name.
    """
    if name not in MODELS:
        raise InvalidSetting(
            f"{task}: unknown model {name!r}; {suggest(name, list(MODELS))}; or a file.py:name "
            "that builds one"
        )
    return MODELS[name]


def _statistics(images: Tensor, model: ImageModel) -> tuple[Tensor, Tensor]:
    """What to subtract and what to divide by, from the training set."""
    if model.preprocessing == "subtract-mean":
        return pixel_mean(images), torch.ones(())
    return channel_statistics(images)
