"""Who waits for whom. Pure: events in, commands out; no clock, no input or output, no tensors."""

from gruppetto.protocols.adaptive import AdaSync, adapted_k
from gruppetto.protocols.bounded import OnStale
from gruppetto.protocols.bounded_async import Ringmaster, Ssp, with_bound
from gruppetto.protocols.collect import (
    PROTOCOLS,
    Async,
    Backup,
    BoundedProtocol,
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
from gruppetto.protocols.guard import GUARDS, LossGuard, NoGuard
from gruppetto.protocols.ledger import Lease, Ledger
from gruppetto.protocols.warmup import WARMUPS, HardsyncWarmup, Warmup

__all__ = [
    "GUARDS",
    "PROTOCOLS",
    "WARMUPS",
    "AdaSync",
    "Async",
    "Backup",
    "BoundedProtocol",
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
    "LossGuard",
    "NoGuard",
    "OnStale",
    "Protocol",
    "Rennala",
    "Ringmaster",
    "Softsync",
    "Ssp",
    "Warmup",
    "adapted_k",
    "with_bound",
]
