"""Datasets of small pictures, read from files into memory once and made into batches as tensors."""

from gruppetto.training.images.dataset import (
    ImageDataset,
    channel_statistics,
    pixel_mean,
    to_grey,
)
from gruppetto.training.images.files import read_images
from gruppetto.training.images.kinds import CIFAR10, MNIST, ImageKind, Split

__all__ = [
    "CIFAR10",
    "MNIST",
    "ImageDataset",
    "ImageKind",
    "Split",
    "channel_statistics",
    "pixel_mean",
    "read_images",
    "to_grey",
]
