"""Softmax regression and a small convolutional network."""

from __future__ import annotations

from torch import nn

__all__ = ["cnn", "softmax"]


def softmax(channels: int, size: int, classes: int) -> nn.Module:
    """Softmax regression, convex: one linear layer over the pixels, starting from zero."""
    linear = nn.Linear(channels * size * size, classes)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return nn.Sequential(nn.Flatten(), linear)


def cnn(channels: int, size: int, classes: int) -> nn.Module:
    """Two convolutions with pooling and two linear layers; 80,602 parameters for MNIST."""
    side = size // 4
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * side * side, 48),
        nn.ReLU(),
        nn.Linear(48, classes),
    )
