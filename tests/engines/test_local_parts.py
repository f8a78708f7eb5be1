"""The pieces of the local engine, one at a time: messages, blocks of memory, reading ahead."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import threading
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from local_processes import descendants, wait_until
from torch import Tensor
from torch.utils.data import TensorDataset

import gruppetto as gp
from gruppetto.engines.local.engine import LocalEngine
from gruppetto.engines.local.loader import LoaderProcess, ReadingFailed
from gruppetto.engines.local.memory import Blocks, MemoryPlan, share
from gruppetto.engines.local.reader import open_reader
from gruppetto.engines.local.versions import Versions
from gruppetto.engines.local.wire import (
    Answer,
    Cancelled,
    Kind,
    Order,
    Spent,
    is_readable,
    pack_answer,
    pack_cancel,
    pack_order,
    pair,
    readable,
    receive,
    receive_json,
    send_json,
    unpack_answer,
    unpack_order,
)
from gruppetto.errors import GruppettoError
from gruppetto.protocols.messages import GradientPushed
from gruppetto.training.learner import Gradient
from gruppetto.training.mini_batches import MiniBatches
from gruppetto.training.packing import Packing
from gruppetto.training.parameters import Flat

CPU = torch.device("cpu")

# --------------------------------------------------------------------- messages

numbers = st.integers(-(2**63), 2**63 - 1)
blocks = st.integers(-(2**31), 2**31 - 1)
seconds = st.floats(allow_nan=False)
orders = st.builds(Order, numbers, numbers, numbers, numbers, blocks, blocks, seconds, seconds)
spent = st.builds(Spent, seconds, seconds, seconds, seconds)


@given(orders)
def test_an_order_arrives_as_sent(order: Order) -> None:
    assert unpack_order(pack_order(order)) == order


@given(numbers, seconds)
def test_a_cancel_arrives_as_sent(lease: int, since: float) -> None:
    assert unpack_order(pack_cancel(lease, since)) == Cancelled(lease, since)


@pytest.mark.parametrize("message", [b"", bytes([Kind.STOP])])
def test_stop_and_a_server_that_is_gone_mean_the_same(message: bytes) -> None:
    assert unpack_order(message) is None


@given(st.sampled_from([Kind.PUSHED, Kind.CANCELLED]), numbers, numbers, seconds, numbers, spent)
def test_an_answer_arrives_as_sent(
    kind: Kind, lease: int, version: int, loss: float, num_samples: int, spent: Spent
) -> None:
    answer = Answer(kind, lease, version, loss, num_samples, spent)
    assert unpack_answer(pack_answer(answer)) == answer


@given(st.text(), st.text())
def test_the_texts_of_a_failure_arrive(reason: str, traceback: str) -> None:
    """A reason has no zero character, and what no encoding knows becomes a question mark."""
    answer = Answer(Kind.FAILED, 1, 2, 0.0, 0, Spent(0.0, 0.0, 0.0, 0.0), reason, traceback)
    got = unpack_answer(pack_answer(answer))
    assert got.reason == _encodable(reason).replace("\0", " ")
    assert got.traceback == _encodable(traceback)


def _encodable(text: str) -> str:
    return text.encode(errors="replace").decode()


def test_long_texts_fit_into_one_message_and_the_end_of_the_traceback_is_kept() -> None:
    ours, theirs = pair()
    with ours, theirs:
        spent = Spent(0.0, 0.0, 0.0, 0.0)
        long = Answer(Kind.FAILED, 1, 2, 0.0, 0, spent, "é" * 100_000, "é" * 100_000 + "the end")
        ours.send(pack_answer(long))
        got = unpack_answer(receive(theirs))
    assert got.reason.startswith("ééé")
    assert got.traceback.endswith("éééthe end")


def test_messages_keep_their_borders_and_a_gone_end_gives_nothing() -> None:
    ours, theirs = pair()
    with theirs:
        ours.send(b"one")
        ours.send(b"two")
        assert is_readable(theirs, 0.0)
        assert (receive(theirs), receive(theirs)) == (b"one", b"two")
        assert not is_readable(theirs, 0.0)
        ours.send(b"last words")
        theirs.send(b"never read, and so the other end is reset, not closed")
        ours.close()
        assert is_readable(theirs, 10.0)
        assert receive(theirs) == b"last words"
        assert receive(theirs) == b""
        assert receive_json(theirs) == (None, [])


def test_descriptors_of_any_number_can_be_waited_for() -> None:
    """A data set of many open files leaves no small ones."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    ours, theirs = pair()
    with ours, theirs:
        high = fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD_CLOEXEC, 1500)
        assert readable([high], 0.0) == set()
        ours.send(b"x")
        assert readable([high, ours.fileno()], 10.0) == {high}
        os.close(high)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_json_carries_open_files() -> None:
    ours, theirs = pair()
    read_end, writable = os.pipe()
    with ours, theirs:
        send_json(ours, {"a": 1}, [read_end])
        message, descriptors = receive_json(theirs)
    assert message == {"a": 1}
    os.write(writable, b"x")
    assert os.read(descriptors[0], 1) == b"x"
    for descriptor in (read_end, writable, *descriptors):
        os.close(descriptor)


# ----------------------------------------------------------------------- memory


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 5))
def test_blocks_are_never_given_out_twice(takes: list[bool], count: int) -> None:
    free = Blocks(count, "thing")
    taken: list[int] = []
    for take in takes:
        if take and len(taken) < count:
            block = free.take()
            assert block == min(set(range(count)) - set(taken)), "the lowest that is free"
            taken.append(block)
        elif take:
            with pytest.raises(GruppettoError, match="another thing"):
                free.take()
        elif taken:
            free.give_back(taken.pop(0))


dtypes = st.sampled_from(
    [
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.complex64,
        torch.int8,
        torch.int64,
        torch.bool,
    ]
)
shapes = st.lists(st.integers(0, 4), max_size=3)


@given(st.lists(st.tuples(dtypes, shapes), max_size=6))
def test_packed_tensors_are_aligned_apart_and_shared(specs: list[tuple[Any, list[int]]]) -> None:
    tensors = {str(i): torch.ones(shape).to(dtype) for i, (dtype, shape) in enumerate(specs)}
    packing = Packing(tensors)
    _, block = share(packing.num_bytes)
    written, read = packing.views(block), packing.views(block)
    for i, (name, tensor) in enumerate(tensors.items()):
        written[name].copy_(tensor * (i % 2))
        assert written[name].dtype == tensor.dtype
        assert written[name].data_ptr() % 64 == 0 or not tensor.numel()
    for i, (name, tensor) in enumerate(tensors.items()):
        assert torch.equal(read[name], tensor * (i % 2))


class CountingServer:
    """Publishes numbers."""

    needs_past = False

    def __init__(self) -> None:
        self.version = 0

    def publish_to(self, place: Tensor) -> None:
        place.fill_(self.version)

    def apply(self, contributions: Any, gradients: Any, past: Any = ()) -> None:
        raise NotImplementedError


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=80))
def test_a_version_stays_as_long_as_somebody_reads_it(steps: list[tuple[bool, int]]) -> None:
    """P readers of different versions, the newest, and one being written: P + 2 blocks."""
    readers = 4
    plan = MemoryPlan.for_run(readers, 1)
    memory = [torch.zeros(1) for _ in range(plan.num_versions)]
    versions = Versions(SimpleNamespace(plan=plan, version=memory.__getitem__))  # type: ignore[arg-type]
    server = CountingServer()
    versions.publish(0, server)  # type: ignore[arg-type]
    held: dict[int, tuple[int, int]] = {}
    for publishes, reader in steps:
        if publishes:
            server.version += 1
            versions.publish(server.version, server)  # type: ignore[arg-type]
        elif reader in held:
            block, version = held.pop(reader)
            assert memory[block].item() == version
            versions.release(block)
        else:
            held[reader] = versions.hold(), versions.newest
    assert all(memory[block].item() == version for block, version in held.values())
    assert memory[versions.block].item() == versions.newest == server.version


def test_a_checkpoint_leaves_out_gradients_that_are_in_no_row() -> None:
    """They are computed again; kept, nothing would ever free them after a resume."""
    ours, theirs = pair()
    with ours, theirs:
        memory = SimpleNamespace(plan=MemoryPlan.for_run(2, 2))
        engine = LocalEngine(CountingServer(), memory, None, theirs, 2)  # type: ignore[arg-type]
        gradient = Gradient(Flat([torch.ones(3)]), frozenset(), {}, 1.0, 8)
        engine._held = {4: (0, gradient), 5: (1, gradient)}
        engine._events.append(GradientPushed(5, 0, 1.0, 8))
        tensors, plain = engine.state()
        engine._poll.close()
    assert set(plain["held"]) == {"4"}
    assert set(tensors) == {"held/4/flat/0"}


# --------------------------------------------------------------- reading ahead


class Source:
    """Stands for a run's mini-batches; the kind of reader follows from its two flags."""

    def __init__(self, make: Callable[[int], Any], kind: str = "process") -> None:
        self.make = make
        self.is_cheap = kind == "on the spot"
        self.is_global_free = kind != "process"

    def fetch(self, mini_batch: int, device: torch.device) -> tuple[Any, int]:
        return self.make(mini_batch), mini_batch + 1


def numbered(mini_batch: int) -> list[Tensor]:
    """Larger for each number: every block has to grow again and again."""
    return [torch.full((1 + 50 * mini_batch,), float(mini_batch)), torch.tensor([mini_batch])]


def check(batch: Any, mini_batch: int) -> None:
    assert torch.equal(batch[0], numbered(mini_batch)[0])
    assert batch[1].item() == mini_batch


@pytest.fixture
def loaders() -> Iterator[list[LoaderProcess]]:
    """Closed at the end, which ends their processes."""
    made: list[LoaderProcess] = []
    before = descendants(os.getpid())
    yield made
    for loader in made:
        loader._channel.close()
    started = descendants(os.getpid()) - before
    for pid in started:
        os.waitpid(pid, 0)


def reading(source: Source, loaders: list[LoaderProcess]) -> Any:
    reader = open_reader(source)  # type: ignore[arg-type]
    if hasattr(reader, "_loader"):
        loaders.append(reader._loader)
    return reader


KINDS = ["on the spot", "thread", "process"]
sequences = st.lists(st.tuples(st.integers(0, 9), st.integers(-1, 9), st.booleans()), max_size=40)


@pytest.mark.parametrize("kind", KINDS)
def test_any_sequence_of_orders_gets_the_right_batches(
    kind: str, loaders: list[LoaderProcess]
) -> None:
    """Fetched or cancelled, foreseen or not; a batch stays whole until the next order comes."""
    reader = reading(Source(numbered, kind), loaders)

    @settings(max_examples=60, deadline=None)
    @given(sequences)
    def orders(sequence: list[tuple[int, int, bool]]) -> None:
        used: tuple[Any, int] | None = None
        for mini_batch, following, is_fetched in sequence:
            if used is not None:
                check(*used)
                used = None
            if following == mini_batch:
                following = -1
            reader.expect(mini_batch, following)
            if is_fetched:
                batch, num_samples = reader.fetch(mini_batch, CPU)
                assert num_samples == mini_batch + 1
                check(batch, mini_batch)
                used = batch, mini_batch

    orders()


@pytest.mark.parametrize("kind", KINDS)
def test_orders_that_are_always_cancelled_stop_nobody(
    kind: str, loaders: list[LoaderProcess]
) -> None:
    """A learner that never makes it still has to be told from a learner that hangs."""
    reader = reading(Source(numbered, kind), loaders)
    for i in range(2000):
        reader.expect(i % 7, i % 7 + 1)
    batch, _ = reader.fetch(1999 % 7, CPU)
    check(batch, 1999 % 7)


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_what_was_foreseen_and_is_not_wanted_is_not_read(
    kind: str, tmp_path: Path, loaders: list[LoaderProcess]
) -> None:
    """Behind a slow mini-batch wait the wanted ones alone, not all that were ever foreseen."""
    go, log = tmp_path / "go", tmp_path / "log"

    def make(mini_batch: int) -> Tensor:
        with log.open("a") as file:
            file.write(f"{mini_batch}\n")
        if mini_batch == 0:
            wait_until(go.exists)
        return torch.tensor([mini_batch])

    reader = reading(Source(make, kind), loaders)
    reader.expect(0, -1)
    wait_until(log.exists)
    for i in range(1, 30):
        reader.expect(i, i + 1)
    go.touch()
    assert reader.fetch(29, CPU)[0].item() == 29
    reader.expect(30, -1)
    assert reader.fetch(30, CPU)[0].item() == 30
    assert [int(n) for n in log.read_text().split()] == [0, 29, 30]


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_the_next_mini_batch_is_read_while_this_one_is_used(
    kind: str, tmp_path: Path, loaders: list[LoaderProcess]
) -> None:
    def make(mini_batch: int) -> Tensor:
        (tmp_path / str(mini_batch)).touch()
        return torch.tensor([mini_batch])

    reader = reading(Source(make, kind), loaders)
    reader.expect(0, 1)
    reader.fetch(0, CPU)
    wait_until((tmp_path / "1").exists)


Pair = namedtuple("Pair", "features labels")


def test_whatever_a_batch_is_made_of_arrives(loaders: list[LoaderProcess]) -> None:
    """Also of a class that only this function knows, as those of a script or a notebook are."""

    class Local:
        def __init__(self, x: Tensor) -> None:
            self.x = x

    x = torch.arange(24.0).reshape(4, 6)
    batch = {
        "texts": ["a", "ü", ""],
        "nested": (Pair(x, [torch.tensor(3), None]), {1: 2.5}),
        "empty": torch.empty(0, 3),
        "odd": [x.to(t) for t in (torch.bool, torch.bfloat16, torch.complex64, torch.int8)],
        "conjugated": x.to(torch.complex64).mul(1j).conj(),
        "sparse": torch.eye(3).to_sparse(),
        "array": np.arange(5),
        "scalar": torch.tensor(7.0),
        "local": Local(x + 1),
        "function": lambda: 11,
    }
    reader = reading(Source(lambda n: batch), loaders)
    reader.expect(0, -1)
    got, _ = reader.fetch(0, CPU)
    assert (got["texts"], got["nested"][1]) == (batch["texts"], {1: 2.5})
    assert type(got["nested"][0]) is Pair
    assert torch.equal(got["nested"][0].features, x)
    assert got["nested"][0].labels[0].shape == ()
    assert (got["empty"].shape, got["empty"].dtype) == ((0, 3), torch.float32)
    for ours, theirs in zip(got["odd"], batch["odd"], strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    assert torch.equal(got["conjugated"], batch["conjugated"])
    assert torch.equal(got["sparse"].to_dense(), torch.eye(3))
    assert got["array"].tolist() == [0, 1, 2, 3, 4]
    assert (got["scalar"].item(), got["function"]()) == (7.0, 11)
    assert torch.equal(got["local"].x, x + 1)


def test_strides_and_alignment_of_tensors_are_kept(loaders: list[LoaderProcess]) -> None:
    """Kernels take other ways, and round differently, by how a tensor lies in memory."""
    wide = torch.arange(6 * 64.0).reshape(6, 64)
    batch = [
        torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        wide.t(),
        wide[:, 1:4],
        wide[1::2],
        torch.rand(3, 1).expand(3, 7),
        wide[2, 5],
    ]
    reader = reading(Source(lambda n: batch), loaders)
    reader.expect(0, -1)
    got, _ = reader.fetch(0, CPU)
    for ours, theirs in zip(got, batch, strict=True):
        assert torch.equal(ours, theirs)
        assert (ours.shape, ours.stride()) == (theirs.shape, theirs.stride())
        assert ours.data_ptr() % 64 == theirs.data_ptr() % 64


def test_a_tensor_that_is_there_twice_is_one_tensor(loaders: list[LoaderProcess]) -> None:
    """As with an autoencoder's batches, whose input is their target."""
    x = torch.rand(3)
    reader = reading(Source(lambda n: (x, x)), loaders)
    reader.expect(0, -1)
    (first, second), _ = reader.fetch(0, CPU)
    assert first is second


def test_a_failure_is_told_with_both_texts_and_the_next_fetch_is_good(
    loaders: list[LoaderProcess],
) -> None:
    def make(mini_batch: int) -> list[Tensor]:
        if mini_batch == 3:
            raise KeyError("no such\0file " + "x" * 500_000)
        return numbered(mini_batch)

    reader = reading(Source(make), loaders)
    reader.expect(3, 4)
    with pytest.raises(ReadingFailed) as caught:
        reader.fetch(3, CPU)
    assert str(caught.value).startswith("KeyError: 'no such")
    assert "xxx" in caught.value.traceback
    reader.expect(4, 3)
    check(reader.fetch(4, CPU)[0], 4)


def test_a_batch_that_cannot_be_pickled_is_a_failure_of_its_own(
    loaders: list[LoaderProcess],
) -> None:
    reader = reading(Source(lambda n: threading.Lock() if n else numbered(n)), loaders)
    reader.expect(1, 0)
    with pytest.raises(ReadingFailed, match="cannot pickle"):
        reader.fetch(1, CPU)
    reader.expect(0, 1)
    check(reader.fetch(0, CPU)[0], 0)


@pytest.mark.parametrize("has_unread", [False, True])
def test_a_reader_whose_process_is_gone_ends_its_own(
    has_unread: bool, tmp_path: Path, loaders: list[LoaderProcess], capfd: Any
) -> None:
    """Whichever way the socket tells it: closed, or reset because requests were not read."""

    def make(mini_batch: int) -> Tensor:
        if mini_batch == 1:
            (tmp_path / "here").touch()
            time.sleep(60)
        return torch.tensor([mini_batch])

    before = descendants(os.getpid())
    reader = reading(Source(make), loaders)
    (pid,) = descendants(os.getpid()) - before
    reader.expect(1, -1)
    wait_until((tmp_path / "here").exists)
    if has_unread:
        reader.expect(2, 3)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(SystemExit) as caught:
        reader.fetch(2 if has_unread else 1, CPU)
    assert caught.value.code == 1
    assert "loads a learner's data" in capfd.readouterr().err


def test_the_kind_of_reader_follows_from_the_data(loaders: list[LoaderProcess]) -> None:
    """Plain tensors are indexed on the spot; any dataset of a user gets a process."""

    def kind(train: Any, **fields: Any) -> str:
        task = gp.Task(model=lambda: torch.nn.Linear(2, 2), train=train, **fields)
        reader = reading(MiniBatches(task, 2, 0), loaders)  # type: ignore[arg-type]
        return type(reader).__name__

    tensors = TensorDataset(torch.rand(8, 2), torch.zeros(8, dtype=torch.int64))
    assert kind(tensors) == "_OnTheSpot"
    assert kind(tensors, collate_fn=lambda samples: samples) == "_InProcess"
    assert kind(list(zip(*tensors.tensors, strict=True))) == "_InProcess"
    assert kind(MakesBatches()) == "_InThread"


class MakesBatches:
    """A training set that makes whole batches."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError

    def make_batch(self, indices: Tensor, generator: torch.Generator | None) -> Any:
        return [torch.rand(len(indices), 2, generator=generator), indices % 2]
