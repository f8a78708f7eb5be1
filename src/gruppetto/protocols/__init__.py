"""Who waits for whom. Pure: events in, commands out; no clock, no input or output, no tensors."""

from gruppetto.protocols.collect import (
    PROTOCOLS,
    Async,
    Backup,
    Cell,
    Hardsync,
    KAsync,
    KBatchAsync,
    KBatchSync,
    KSync,
    Protocol,
    Rennala,
    Softsync,
)
from gruppetto.protocols.coordinator import Coordinator
from gruppetto.protocols.ledger import Lease, Ledger
from gruppetto.protocols.warmup import WARMUPS, HardsyncWarmup, Warmup

__all__ = [
    "PROTOCOLS",
    "WARMUPS",
    "Async",
    "Backup",
    "Cell",
    "Coordinator",
    "Hardsync",
    "HardsyncWarmup",
    "KAsync",
    "KBatchAsync",
    "KBatchSync",
    "KSync",
    "Lease",
    "Ledger",
    "Protocol",
    "Rennala",
    "Softsync",
    "Warmup",
]
