"""MNIST's handwritten digits: 60,000 and 10,000 grey pictures of 28x28 pixels, from files."""

from __future__ import annotations

from gruppetto.training.images import MNIST
from gruppetto.training.task import Task
from gruppetto.training.tasks.image_classification import Augmentation, image_task

__all__ = ["mnist"]

#: Moved a little; a mirrored digit is not a digit.
_AUGMENTATION = Augmentation(padding=2)


def mnist(data: str | None = None, model: str = "cnn", augment: bool | None = None) -> Task:
    """Handwritten digits, 28x28 grey pixels, from files: the hub's or torchvision's.

    Args:
        data: folder with the files; required.
        model: a name in ``MODELS``; all but rudra.
        augment: move training pictures by up to 2 pixels; by default not.

    Raises:
        InvalidSetting: no folder, or a model that does not fit.
        TaskError: the folder's files cannot be read.
    """
    return image_task(MNIST, _AUGMENTATION, data=data, model=model, augment=augment is True)
