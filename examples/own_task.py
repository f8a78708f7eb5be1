"""A model and data of your own, trained by four learners that do not wait for each other.

python examples/own_task.py
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import gruppetto as gp

generator = torch.Generator().manual_seed(0)
points = torch.randn(2000, 2, generator=generator)
inside = (points.norm(dim=1) < 1.2).long()


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))


task = gp.Task(
    model=make_model,
    train=TensorDataset(points[:1600], inside[:1600]),
    test=TensorDataset(points[1600:], inside[1600:]),
    name="ring",
)

if __name__ == "__main__":
    run = gp.train(
        task,
        protocol=gp.KBatchAsync(k=2),
        learners=4,
        batch_size=16,
        epochs=10,
        optimizer=gp.optimizer(torch.optim.SGD, lr=0.05, momentum=0.9),
        delay="exponential:mean=0.01",
        # One learner is five times slower than the others.
        delays={3: "exponential:mean=0.05"},
    )
    for row in run.history:
        print(f"time {row['time']:6.2f} s  accuracy {row['test_accuracy']:.3f}")
    print("staleness", run.staleness)
