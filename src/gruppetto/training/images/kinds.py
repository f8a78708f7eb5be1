"""What the pictures of a dataset look like, and what its files are called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

__all__ = ["CIFAR10", "MNIST", "ImageKind", "Split"]

Split: TypeAlias = Literal["train", "test"]


@dataclass(frozen=True)
class ImageKind:
    """A dataset of square pictures of one size.

    Args:
        name: of the dataset and of its task.
        channels: 1 for grey, 3 for red, green and blue.
        size: height and width in pixels.
        classes: labels are 0 to classes - 1.
        hub_folder: where the hub keeps its parquet files.
    """

    name: str
    channels: int
    size: int
    classes: int
    hub_folder: str

    @property
    def mode(self) -> str:
        """Pillow's name for such a picture."""
        return "L" if self.channels == 1 else "RGB"


CIFAR10: Final = ImageKind("cifar10", channels=3, size=32, classes=10, hub_folder="plain_text")
MNIST: Final = ImageKind("mnist", channels=1, size=28, classes=10, hub_folder="mnist")
