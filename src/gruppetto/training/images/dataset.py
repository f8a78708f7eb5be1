"""Pictures in memory: gathered, augmented and normalised a whole mini-batch at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from gruppetto.errors import InvalidSetting, TaskError

__all__ = ["ImageDataset", "channel_statistics", "pixel_mean", "to_grey"]

#: Pictures that are summed at a time: 256 squares of a byte are less than 2 ** 24, so that every
#: partial sum is a whole number that float32 holds, whatever the order and the number of threads.
_CHUNK = 256


class ImageDataset(Dataset[tuple[Tensor, int]]):
    """Decoded pictures with class labels; a value x becomes (x - mean) / std.

    Fetching draws from no process-global generator and changes nothing, so that any number of
    threads may do it at once.

    Args:
        images: uint8 [N, C, H, W].
        labels: int64 [N].
        mean: to subtract, in units of pixels (0 to 255); of any shape that broadcasts to [C, H, W].
        std: to divide by afterwards, likewise.
        padding: black pixels at every side before a random crop of [H, W]; 0 for no crop.
        flip: mirror half of the pictures, left to right.

    Raises:
        TaskError: pictures and labels of other types or shapes, or not equally many.
        InvalidSetting: a mean or std that does not fit, a std that is not positive, padding < 0.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        mean: Tensor,
        std: Tensor,
        padding: int = 0,
        flip: bool = False,
    ) -> None:
        _check_data(images, labels)
        shape = images.shape[1:]
        for name, value in (("mean", mean), ("std", std)):
            try:
                value.expand(shape)
            except RuntimeError:
                raise InvalidSetting(
                    f"{name}: expected a shape that broadcasts to {tuple(shape)}, got "
                    f"{tuple(value.shape)}"
                ) from None
        if not bool((std > 0).all()):
            raise InvalidSetting("std: expected positive numbers")
        if padding < 0:
            raise InvalidSetting(f"padding: expected 0 or more pixels, got {padding}")
        self.images = images
        self.labels = labels
        self._mean = mean.to(torch.float32)
        self._std = std.to(torch.float32)
        self._padding = padding
        self._flip = flip

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """A picture, float32 [C, H, W], normalised and never augmented, and its label."""
        return self._normalise(self.images[index]), int(self.labels[index])

    def make_batch(
        self, indices: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """A mini-batch at once.

        Args:
            indices: int64 [B].
            generator: what augmentation draws from; None for no augmentation. The same indices
                and the same state of the generator give the same bits.

        Returns:
            Pictures, float32 [B, C, H, W], and labels, int64 [B].
        """
        images = torch.index_select(self.images, 0, indices)
        if generator is not None:
            if self._padding:
                images = _random_crop(images, self._padding, generator)
            if self._flip:
                images = _random_flip(images, generator)
        return self._normalise(images), torch.index_select(self.labels, 0, indices)

    def _normalise(self, images: Tensor) -> Tensor:
        # Batches in colour have their channels last in memory: convolutions and pooling on a CPU
        # take a fifth to a third less time than with whole planes.
        is_colour = images.dim() == 4 and images.shape[1] > 1
        layout = torch.channels_last if is_colour else torch.contiguous_format
        values = images.to(torch.float32, memory_format=layout)
        # Two correctly rounded operations per element: the same bits in any shape of batch.
        return values.sub_(self._mean).div_(self._std)


def _random_crop(images: Tensor, padding: int, generator: torch.Generator) -> Tensor:
    """Each picture moved by its own offset, -padding to padding in both directions."""
    batch, _, height, width = images.shape
    offsets = torch.randint(2 * padding + 1, (2, batch), generator=generator)
    padded = nn.functional.pad(images, (padding, padding, padding, padding))
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # a view: [B, C, dy, dx, H, W]
    return windows[torch.arange(batch), :, offsets[0], offsets[1]]


def _random_flip(images: Tensor, generator: torch.Generator) -> Tensor:
    mirrored = torch.randint(2, (len(images), 1, 1, 1), generator=generator) == 1
    return torch.where(mirrored, images.flip(3), images)


def channel_statistics(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel over all pictures, in units of pixels.

    Args:
        images: uint8 [N, C, H, W].

    Returns:
        Two float64 tensors [C, 1, 1]; their bits do not depend on the number of threads.

    Raises:
        TaskError: a channel that is the same everywhere.
    """
    values = images[:, 0].numel()
    sums, squares = (power.sum((1, 2)).tolist() for power in _sums_of_powers(images))
    mean = [total / values for total in sums]
    # In whole numbers, which do not cancel.
    deviation = [
        math.sqrt(values * int(q) - int(total) ** 2) / values
        for total, q in zip(sums, squares, strict=True)
    ]
    if min(deviation) == 0:
        same = deviation.index(0.0)
        raise TaskError(
            f"expected pictures that differ, all pixels of channel {same} are {mean[same]:g}"
        )
    return (
        torch.tensor(mean, dtype=torch.float64).reshape(-1, 1, 1),
        torch.tensor(deviation, dtype=torch.float64).reshape(-1, 1, 1),
    )


def pixel_mean(images: Tensor) -> Tensor:
    """Mean of each pixel over all pictures [N, C, H, W]: float64 [C, H, W], 0 to 255."""
    return _sums_of_powers(images)[0] / len(images)


def _sums_of_powers(images: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over all pictures of x and of x squared: whole numbers in float64 [C, H, W]."""
    sums = torch.zeros(images.shape[1:], dtype=torch.float64)
    squares = torch.zeros_like(sums)
    for chunk in torch.split(images, _CHUNK):
        values = chunk.to(torch.float32)
        sums += values.sum(0)
        squares += values.square_().sum(0)
    return sums, squares


def to_grey(images: Tensor) -> Tensor:
    """Luma of colour pictures: uint8 [N, 3, H, W] -> uint8 [N, 1, H, W].

    0.299 R + 0.587 G + 0.114 B (ITU-R BT.601), rounded as in Pillow's ``convert("L")``.
    """
    weights = torch.tensor([19595, 38470, 7471], dtype=torch.int32).reshape(3, 1, 1)  # of 2 ** 16
    grey = [
        ((chunk.to(torch.int32) * weights).sum(1, keepdim=True, dtype=torch.int32) + 0x8000) >> 16
        for chunk in torch.split(images, _CHUNK)
    ]
    return torch.cat([chunk.to(torch.uint8) for chunk in grey])


def _check_data(images: Tensor, labels: Tensor) -> None:
    if images.dtype != torch.uint8 or images.dim() != 4:
        raise TaskError(
            f"images: expected uint8 [N, C, H, W], got {images.dtype} {tuple(images.shape)}"
        )
    if labels.dtype != torch.int64 or labels.dim() != 1:
        raise TaskError(f"labels: expected int64 [N], got {labels.dtype} {tuple(labels.shape)}")
    if len(images) != len(labels):
        raise TaskError(
            f"expected as many labels as images, {len(images)}, got {len(labels)} labels"
        )
