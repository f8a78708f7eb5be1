"""The smallest engine there can be: all modules in turn, whatever can run runs. And plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from gruppetto.decoupled.methods import METHODS
from gruppetto.decoupled.module import Module
from gruppetto.decoupled.network import Network
from gruppetto.decoupled.schedule import Schedule, Tail
from gruppetto.decoupled.snapshot import Snapshot
from gruppetto.training.building import build_model
from gruppetto.training.mini_batches import MiniBatches
from gruppetto.training.optimizers import parse_optimizer
from gruppetto.training.randomness import Stream, one_thread, seed_everything
from gruppetto.training.server import Updating
from gruppetto.training.task import Task

CPU = torch.device("cpu")


@dataclass
class Ended:
    network: Network
    modules: list[Module]
    snapshots: dict[int, Snapshot]
    losses: list[float] = field(default_factory=list)

    @property
    def weights(self) -> str:
        return self.network.weights_sha256(self.snapshots)

    @property
    def state(self) -> str:
        return self.network.state_sha256(self.snapshots)


@one_thread()
def run(
    task: Task,
    spec: str,
    begins: list[str],
    num: int,
    *,
    optimizer: str = "sgd:lr=0.05,momentum=0.9",
    stop: int | None = None,
    since: Mapping[int, Snapshot] | None = None,
    batch_size: int = 16,
    tail: Tail = "drain",
    **updating: object,
) -> Ended:
    """Run ``num`` mini-batches; stop at a network version, or go on from one."""
    method = METHODS.parse(spec)
    mini_batches = MiniBatches(task, batch_size, 0)
    rules = Updating(parse_optimizer(optimizer), **updating)  # type: ignore[arg-type]
    network = Network(task, method, begins, rules, 0, mini_batches, CPU)
    modules = [network.module(k) for k in range(1, method.modules + 1)]
    schedule = Schedule(method.delays, num, tail)
    ended = Ended(network, modules, {})
    outputs, gradients = {}, {}
    done = {m.number: (0, 0) for m in modules}
    for module in modules if since is not None else ():
        k = module.number
        sent = module.restore(since[k], lambda b: mini_batches.fetch(b, CPU))
        outputs.update({(k, b): payload for b, (payload, _) in sent.items()})
        done[k] = min(module.version + schedule.delay(k), num), module.version
    before = None
    while len(ended.snapshots) < len(modules):
        now = dict(done), len(ended.snapshots)
        assert now != before, f"nobody can go on: {now[0]}"
        before = now
        for module in modules:
            k = module.number
            action = schedule.next_action(k, *done[k])
            if action is None or module.version == stop:
                ended.snapshots.setdefault(k, module.snapshot(with_state=True))
                continue
            b = action.mini_batch
            if action.kind == "F" and (k == 1 or (k - 1, b) in outputs):
                batch, samples = mini_batches.fetch(b, CPU)
                is_end = k in (1, method.modules)
                got = module.forward(
                    b, outputs.pop((k - 1, b), None), batch if is_end else None, samples
                )
                if got.outputs is None:
                    assert got.loss is not None
                    ended.losses.append(got.loss)
                else:
                    outputs[k, b] = got.outputs
                done[k] = b + 1, done[k][1]
            elif action.kind == "B" and (k == method.modules or (k + 1, b) in gradients):
                given = module.backward(b, gradients.pop((k + 1, b), None))
                if given is not None:
                    gradients[k, b] = given
                module.step(b)
                done[k] = done[k][0], b + 1
    return ended


@one_thread()
def plain(task: Task, num: int, optimizer: str) -> tuple[nn.Module, list[float]]:
    """The training loop everybody knows."""
    mini_batches = MiniBatches(task, 16, 0)
    model = build_model(task, 0, CPU, None)
    stepper = parse_optimizer(optimizer)(model.parameters())  # type: ignore[arg-type]
    losses = []
    for b in range(num):
        batch, _ = mini_batches.fetch(b, CPU)
        seed_everything(0, Stream.FORWARD, b, CPU)
        stepper.zero_grad()
        loss = task.compute_loss(task.forward(model, batch), batch)
        loss.backward()  # type: ignore[no-untyped-call]
        stepper.step()
        losses.append(loss.item())
    return model, losses
