"""CIFAR-10: 50,000 and 10,000 colour pictures of 32x32 pixels in ten classes, from files."""

from __future__ import annotations

from gruppetto.training.images import CIFAR10
from gruppetto.training.task import Task
from gruppetto.training.tasks.image_classification import Augmentation, find_model, image_task

__all__ = ["cifar10"]

#: As in He et al. (2016), section 4.2.
_AUGMENTATION = Augmentation(padding=4, flip=True)


def cifar10(
    data: str | None = None,
    model: str = "resnet20",
    augment: bool | None = None,
    grey: bool = False,
) -> Task:
    """Ten classes of 32x32 colour pictures, from files: the hub's or torchvision's.

    Args:
        data: folder with the files; required.
        model: a name in ``MODELS``.
        augment: crop and mirror training pictures at random; by default the ResNets do.
        grey: turn colours to grey, one channel.

    Raises:
        InvalidSetting: no folder, or a model that does not fit.
        TaskError: the folder's files cannot be read.
    """
    if augment is None:
        augment = find_model(model, CIFAR10.name).augment
    return image_task(CIFAR10, _AUGMENTATION, data=data, model=model, augment=augment, grey=grey)
