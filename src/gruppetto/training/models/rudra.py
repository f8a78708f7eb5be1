"""The CIFAR-10 network of the Rudra papers (Gupta, Zhang and Wang, 2016): Caffe's cifar10_full.

89,578 parameters. Trained on values 0 to 255 less each pixel's mean, with biases at twice the rate
of the weights, and weight decay 0.004 on convolutions, 1.0 on the last layer, none on biases.
"""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor, nn

__all__ = ["LocalResponseNorm", "Rudra", "rudra_param_groups"]

#: Standard deviations of the initial weights, in order.
_DEVIATIONS: Final = (1e-4, 0.01, 0.01, 0.01)
_CONVOLUTION_DECAY: Final = 0.004
#: cuda-convnet's wc=1; in Caffe the solver's 0.004 times the layer's decay_mult of 250.
_LINEAR_DECAY: Final = 1.0


class LocalResponseNorm(nn.Module):
    """Local response normalisation within a map, Caffe's WITHIN_CHANNEL.

    y = x / (1 + alpha * m) ** beta, where m is the mean of x squared over the size x size
    neighbourhood in the same map. Beyond the borders are zeros, which count in the mean.
    ``torch.nn.LocalResponseNorm`` is another thing: it goes across maps.

    Args:
        size: of the neighbourhood, odd.
        alpha: weight of the mean square.
        beta: exponent.
    """

    def __init__(self, size: int = 3, alpha: float = 5e-5, beta: float = 0.75) -> None:
        super().__init__()
        self.size = size
        self.alpha = alpha
        self.beta = beta

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, H, W] -> the same shape."""
        mean = nn.functional.avg_pool2d(x.square(), self.size, stride=1, padding=self.size // 2)
        return x * (1.0 + self.alpha * mean).pow(-self.beta)

    def extra_repr(self) -> str:
        return f"size={self.size}, alpha={self.alpha}, beta={self.beta}"


class Rudra(nn.Module):
    """The network, for pictures [N, 3, 32, 32]; ``blocks`` is all of it in order.

    Pooling is 3x3 with stride 2 and rounds sizes up, as Caffe does: 32 -> 16 -> 8 -> 4. There is no
    activation between the first convolution and its pooling.

    Args:
        classes: class scores it gives.
    """

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            nn.Sequential(
                nn.Conv2d(3, 32, 5, padding=2),
                nn.MaxPool2d(3, 2, ceil_mode=True),
                nn.ReLU(),
                LocalResponseNorm(),
            ),
            nn.Sequential(
                nn.Conv2d(32, 32, 5, padding=2),
                nn.ReLU(),
                nn.AvgPool2d(3, 2, ceil_mode=True),
                LocalResponseNorm(),
            ),
            nn.Sequential(
                nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.AvgPool2d(3, 2, ceil_mode=True)
            ),
            nn.Sequential(nn.Flatten(), nn.Linear(64 * 4 * 4, classes)),
        )
        layers = [m for m in self.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
        for layer, deviation in zip(layers, _DEVIATIONS, strict=True):
            nn.init.normal_(layer.weight, std=deviation)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Pictures [N, 3, 32, 32] -> class scores [N, classes]."""
        scores: Tensor = self.blocks(x)
        return scores


def rudra_param_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Convolutions, last layer and biases, each with its decay; they win over the optimizer's."""
    convolutions = [m.weight for m in model.modules() if isinstance(m, nn.Conv2d)]
    linear = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    return [
        {"params": convolutions, "weight_decay": _CONVOLUTION_DECAY},
        {"params": linear, "weight_decay": _LINEAR_DECAY},
        {"params": biases, "weight_decay": 0.0, "lr_scale": 2.0},
    ]
