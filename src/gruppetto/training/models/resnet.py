"""The residual networks for CIFAR-10 of He et al., Deep Residual Learning (2016), section 4.2.

6n + 2 layers: a convolution, three stages of n blocks with 16, 32 and 64 channels at full, half
and quarter resolution, average pooling and a linear layer. Shortcuts have no parameters (option A).
"""

from __future__ import annotations

from torch import Tensor, nn

from gruppetto.errors import InvalidSetting

__all__ = ["ResNet", "ResidualBlock"]

_WIDTHS = (16, 32, 64)


class ResNet(nn.Module):
    """A residual network of ``depth`` = 6n + 2 layers.

    ``blocks`` is the whole network in order, for those who split it: stem, 3n residual blocks,
    head; ``forward`` runs them one after the other.

    Args:
        depth: 8, 14, 20, ...
        channels: of the pictures.
        classes: class scores it gives.

    Raises:
        InvalidSetting: another depth.
    """

    def __init__(self, depth: int, channels: int = 3, classes: int = 10) -> None:
        super().__init__()
        if depth < 8 or depth % 6 != 2:
            raise InvalidSetting(
                f"resnet: expected a depth of 6n + 2 (8, 14, 20, ...), got {depth}"
            )
        stem = nn.Sequential(
            nn.Conv2d(channels, _WIDTHS[0], 3, padding=1, bias=False),
            nn.BatchNorm2d(_WIDTHS[0]),
            nn.ReLU(),
        )
        blocks: list[nn.Module] = [stem]
        before = _WIDTHS[0]
        for width in _WIDTHS:
            for _ in range((depth - 2) // 6):
                blocks.append(ResidualBlock(before, width))
                before = width
        blocks.append(
            nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))
        )
        self.blocks = nn.Sequential(*blocks)
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Pictures [N, channels, H, W] -> class scores [N, classes]."""
        scores: Tensor = self.blocks(x)
        return scores


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut; more channels come with half the resolution.

    Args:
        before: channels of the input.
        width: channels of the output; where it differs, the convolutions have stride 2.
    """

    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        self.stride = 1 if before == width else 2
        self.new_channels = width - before
        self.conv1 = nn.Conv2d(before, width, 3, self.stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def shortcut(self, x: Tensor) -> Tensor:
        """Option A: every second pixel, and channels of zeros, half of them on either side."""
        if self.stride == 1:
            return x
        front = self.new_channels // 2
        return nn.functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, front, self.new_channels - front))

    def forward(self, x: Tensor) -> Tensor:
        """[N, before, H, W] -> [N, width, H / stride, W / stride], rounded up."""
        y = nn.functional.relu(self.norm1(self.conv1(x)))
        return nn.functional.relu(self.norm2(self.conv2(y)) + self.shortcut(x))
