"""Where every random number of a run comes from: streams keyed by (seed, stream, number).

The global generators of torch, numpy and ``random`` are seeded before a mini-batch's samples are
fetched and again before its forward pass, so that a mini-batch's augmentation and dropout are the
same whoever computes it, whenever, however often.
"""

from __future__ import annotations

import enum
import hashlib
import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["Stream", "keep_global_randomness", "one_thread", "seed_everything", "stream_seed"]


class Stream(enum.IntEnum):
    """What a stream is for. Delays have their own keyed draws (:mod:`gruppetto.delays.keyed`)."""

    #: Fetching and augmenting the samples of mini-batch n.
    DATA = 0
    #: Forward pass (dropout) of mini-batch n.
    FORWARD = 1
    #: Order of the samples in epoch n.
    ORDER = 2
    #: Initial weights (n = 0).
    MODEL = 3
    #: Evaluating version n.
    EVALUATION = 4
    #: The sample that progress is measured on (n = 0), and fetching it.
    PROGRESS = 5
    #: The sample that γ is measured on (n = 0), and its batches with their forward passes.
    GAMMA = 6
    #: Forward pass of mini-batch b in module k > 1 of a decoupled network (n = b * 2^16 + k); the
    #: first module's is FORWARD, so that one module alone is plain training.
    MODULE = 7


def stream_seed(seed: int, stream: Stream, number: int) -> int:
    """64 bits for one stream; independent of each other for all practical purposes."""
    key = struct.pack("<QqQ", seed % 2**64, stream, number)
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")


def seed_everything(seed: int, stream: Stream, number: int, device: torch.device) -> None:
    """Seed the global generators of torch (CPU and ``device``), numpy and random."""
    value = stream_seed(seed, stream, number)
    # The generator itself, not torch.manual_seed: that one walks all backends, 50 times slower.
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    random.seed(value)


@contextmanager
def keep_global_randomness() -> Iterator[None]:
    """Give the caller's global generators back as they were: training in the caller's process
    must not change what the caller draws next."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        yield
    finally:
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread inside: what is made here has the same bits whatever the number of
    threads of a run, because reductions add up differently when they are shared out."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
