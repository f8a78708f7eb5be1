"""Trains a small network on pictures of handwritten digits."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset

import gruppetto as gp


class Digits(Dataset):
    def __init__(self, rows):
        digits = load_digits()
        self.images = torch.tensor(digits.data[rows] / 8 - 1, dtype=torch.float32)
        self.labels = torch.tensor(digits.target[rows])

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


class Network(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def evaluate(model, test_set):
    model.eval()
    correct = 0
    with torch.no_grad():
        for images, labels in DataLoader(test_set, batch_size=256):
            correct += (model(images).argmax(1) == labels).sum().item()
    return {"accuracy": correct / len(test_set)}


train_set, test_set = Digits(slice(0, 1400)), Digits(slice(1400, None))
task = gp.Task(model=Network, train=train_set, test=test_set, evaluate=evaluate)
optimizer = gp.optimizer(torch.optim.SGD, lr=0.05, momentum=0.9)
run = gp.train(task, protocol="k-batch-async:k=2", batch_size=32, epochs=30, optimizer=optimizer)
model = run.model

print(f"accuracy {evaluate(model, test_set)['accuracy']:.3f}")
