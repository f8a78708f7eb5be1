"""Linear least squares with a known optimum: the place to compare with theory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from gruppetto.errors import InvalidSetting
from gruppetto.training.task import Task

__all__ = ["least_squares"]


def least_squares(n: int = 1000, d: int = 20, noise: float = 0.1, seed: int = 0) -> Task:
    """Half the mean squared error of a linear model, in float64, optimum known.

    Features are standard normal, targets x·w* + noise·normal. ``evaluate`` gives ``loss`` on the
    training data, ``excess_loss`` above the optimum's, and ``distance`` of the weights to it.

    Args:
        n: samples.
        d: features.
        noise: standard deviation of the targets' noise.
        seed: of the data, apart from the run's.
    """
    if n < 1 or d < 1:
        raise InvalidSetting(f"least-squares: expected n >= 1 and d >= 1, got n={n} and d={d}")
    if noise < 0:
        raise InvalidSetting(f"least-squares: expected noise >= 0, got {noise}")
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(n, d, dtype=torch.float64, generator=generator)
    truth = torch.randn(d, 1, dtype=torch.float64, generator=generator)
    targets = features @ truth
    targets += noise * torch.randn(n, 1, dtype=torch.float64, generator=generator)
    # The minimum-norm solution, by SVD: also right when n < d.
    optimum = torch.linalg.lstsq(features, targets, driver="gelsd").solution
    least = float(0.5 * (features @ optimum - targets).square().mean())

    def model() -> nn.Module:
        linear = nn.Linear(d, 1, bias=False, dtype=torch.float64)
        nn.init.zeros_(linear.weight)
        return linear

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        return 0.5 * nn.functional.mse_loss(outputs, batch[-1])

    def evaluate(model: nn.Module, test: Any) -> Mapping[str, float]:
        weights = next(model.parameters())
        device = weights.device
        value = float(0.5 * (model(features.to(device)) - targets.to(device)).square().mean())
        return {
            "loss": value,
            "excess_loss": value - least,
            "distance": float(torch.linalg.vector_norm(weights.cpu().T - optimum)),
        }

    data = TensorDataset(features, targets)
    return Task(
        model=model,
        train=data,
        test=data,
        loss=loss,
        evaluate=evaluate,
        optimizer="sgd:lr=0.05",
        batch_size=10,
        epochs=5,
        name="least-squares",
    )
