"""A dataset class of your own that draws random numbers, and a metric of your own.

python examples/own_dataset.py
"""

import random

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset

import gruppetto as gp


class ShiftedDigits(Dataset):
    """Digits of 8x8 pixels, moved by up to one pixel each time they are looked at."""

    def __init__(self, rows: slice, augment: bool) -> None:
        digits = load_digits()
        self.images, self.labels = digits.images[rows], digits.target[rows]
        self.augment = augment

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, object]:
        image = torch.tensor(self.images[index], dtype=torch.float32) / 16
        if self.augment:
            # Any of random, numpy and torch: all are seeded for each mini-batch.
            shifts = random.randint(-1, 1), random.randint(-1, 1)
            image = image.roll(shifts, dims=(0, 1))
        return {"image": image.unsqueeze(0), "label": int(self.labels[index])}


def collate(samples: list[dict[str, object]]) -> dict[str, Tensor]:
    return {
        "image": torch.stack([s["image"] for s in samples]),
        "label": torch.tensor([s["label"] for s in samples]),
    }


class SmallNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.classes = nn.Linear(16 * 4 * 4, 10)

    def forward(self, image: Tensor) -> Tensor:
        features = nn.functional.max_pool2d(self.norm(self.convolution(image)).relu(), 2)
        return self.classes(features.flatten(1))


def evaluate(model: nn.Module, test: ShiftedDigits) -> dict[str, float]:
    batch = collate([test[i] for i in range(len(test))])
    outputs, labels = model(batch["image"]), batch["label"]
    right = outputs.argmax(1) == labels
    return {
        "loss": float(nn.functional.cross_entropy(outputs, labels)),
        "accuracy": float(right.float().mean()),
        "worst_digit": min(float(right[labels == digit].float().mean()) for digit in range(10)),
    }


task = gp.Task(
    model=SmallNetwork,
    train=ShiftedDigits(slice(0, 1400), augment=True),
    test=ShiftedDigits(slice(1400, None), augment=False),
    collate_fn=collate,
    inputs=lambda batch: {"image": batch["image"]},
    loss=lambda outputs, batch: nn.functional.cross_entropy(outputs, batch["label"]),
    evaluate=evaluate,
    optimizer="sgd:lr=0.02,momentum=0.9",
    batch_size=32,
    epochs=15,
    name="shifted-digits",
)

# Not run when `gruppetto train examples/own_dataset.py` loads the task from this file.
if __name__ == "__main__":
    run = gp.train(task, protocol="k-batch-async:k=2", learners=2)
    for row in run.history:
        print(
            f"epoch {row['epoch']:4.1f}  accuracy {row['test_accuracy']:.3f}  "
            f"worst digit {row['test_worst_digit']:.3f}"
        )
    print("accuracy", round(run.result["test_accuracy"], 3))
