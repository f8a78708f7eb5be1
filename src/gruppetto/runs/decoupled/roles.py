"""What the processes of a decoupled run do: prepare once, then train one module each.

The template loads the task, builds the network and makes the channels between the modules. The
others are forks of it and find everything ready, without copying any.
"""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass
from typing import Any, Final

import torch

from gruppetto.decoupled.module import Module
from gruppetto.decoupled.schedule import ModuleProgram
from gruppetto.engines.decoupled.batches import BatchPacking
from gruppetto.engines.decoupled.channels import Channels
from gruppetto.engines.decoupled.journal import ModuleJournal
from gruppetto.engines.decoupled.line import Line, read_snapshot
from gruppetto.engines.decoupled.local import ModuleEngine
from gruppetto.engines.decoupled.peak import PeakMemory
from gruppetto.engines.decoupled.rings import span_bytes
from gruppetto.engines.decoupled.samples import Samples
from gruppetto.engines.local.process import name_process
from gruppetto.engines.local.reader import Reader, open_reader
from gruppetto.runs.decoupled.parts import DecoupledParts, build_decoupled_parts
from gruppetto.runs.decoupled.settings import DecoupledSettings
from gruppetto.runs.local.roles import unpack
from gruppetto.runs.parts import Ingredients
from gruppetto.training.randomness import one_thread

__all__ = ["PREPARE", "TRAIN", "prepare", "train"]

#: Names of the roles, for the template.
PREPARE: Final = f"{__name__}:prepare"
TRAIN: Final = f"{__name__}:train"


@dataclass(frozen=True)
class Prepared:
    """What a template's children find."""

    settings: DecoupledSettings
    ingredients: Ingredients
    channels: Channels
    #: How batches travel; None in a network of one module.
    packing: BatchPacking | None
    #: None where a device must not be touched before forking.
    parts: DecoupledParts | None

    def build(self, module: int) -> DecoupledParts:
        """The parts of the run, for the process of module k."""
        if self.parts is not None:
            return self.parts
        device = self.settings.device
        if device == "cuda":  # all there are take turns
            device = f"cuda:{(module - 1) % torch.cuda.device_count()}"
        return _build(self.settings, self.ingredients, device)


def prepare(payload: bytes) -> Prepared:
    """Role of the template: see :func:`gruppetto.runs.local.roles.pack`."""
    name_process("template")
    # One thread: a pool of them would not survive the forks to come.
    torch.set_num_threads(1)
    settings, ingredients = unpack(payload, DecoupledSettings)
    # Even for a run on another device: what is shared lies in the CPU's memory.
    parts = _build(settings, ingredients, "cpu")
    packing, num_bytes = None, 0
    if parts.method.modules > 1:
        with one_thread():
            batch, _ = parts.mini_batches.fetch(0, torch.device("cpu"))
        packing = BatchPacking(batch)
        tensors, rest = packing.pack(batch)
        num_bytes = span_bytes(tensors) + len(rest)
    channels = Channels(parts.schedule, parts.network.probe.cuts, num_bytes)
    is_ready = settings.device == "cpu"
    return Prepared(settings, ingredients, channels, packing, parts if is_ready else None)


def _build(settings: DecoupledSettings, ingredients: Ingredients, device: str) -> DecoupledParts:
    with one_thread():
        there = settings.model_copy(update={"device": device})
        return build_decoupled_parts(there, ingredients, is_checked=True)


def train(prepared: Prepared, descriptors: list[int], number: int, pin: bool) -> None:
    """Role of a module's process: run its column.

    Args:
        prepared: by the template.
        descriptors: a socket to the caller and, where a run is resumed, a file with the module's
            snapshot.
        number: k.
        pin: keep to one core of those that the run may use.
    """
    name_process(f"module {number}")
    if pin:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[(number - 1) % len(cores)]})
    parts = prepared.build(number)
    with one_thread():
        module = parts.network.module(number)
    torch.set_num_threads(prepared.settings.threads)
    with contextlib.ExitStack() as stack:
        line = Line(stack.enter_context(socket.socket(fileno=descriptors[0])))
        reader = None
        if number == 1:
            reader = stack.enter_context(contextlib.closing(open_reader(parts.mini_batches)))
        samples = _samples(parts, prepared.packing, reader)
        ends = prepared.channels.ends(number)
        max_time = prepared.settings.max_time
        engine = ModuleEngine(module, parts.schedule, ends, line, samples, max_time)
        if len(descriptors) > 1:
            _restore(module, engine, samples, descriptors[1])
        predicted = module.process_bytes
        if parts.device.type == "cpu":
            predicted += ends.num_bytes
        else:
            ends.receive_on(parts.device)
        peak = PeakMemory(parts.device)
        journal = ModuleJournal(engine, module, line, parts.marks, peak, predicted)
        program = ModuleProgram(parts.schedule, number, module.version)
        journal.end(engine.run(program, journal))


def _samples(parts: DecoupledParts, packing: BatchPacking | None, reader: Reader | None) -> Samples:
    is_kept = parts.method.delay(1) > 0
    total = parts.schedule.num_mini_batches
    return Samples(parts.device, packing, reader, is_kept, total)


def _restore(module: Module, engine: ModuleEngine, samples: Samples, descriptor: int) -> None:
    def fetch(mini_batch: int) -> tuple[Any, int]:
        batch, num_samples = samples.fetch(mini_batch)
        return samples.on_device(batch), num_samples

    engine.resume(module.restore(read_snapshot(descriptor), fetch))
