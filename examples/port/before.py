"""Trains a small network on pictures of handwritten digits."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset


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
torch.manual_seed(0)
model = Network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(train_set, batch_size=32, shuffle=True)

for epoch in range(30):
    model.train()
    for images, labels in loader:
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch + 1}: accuracy {evaluate(model, test_set)['accuracy']:.3f}")

print(f"accuracy {evaluate(model, test_set)['accuracy']:.3f}")
