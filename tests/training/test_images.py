"""Pictures: out of files, and into mini-batches."""

from __future__ import annotations

import gzip
import io
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from image_files import (
    LAYOUTS,
    encode,
    hub_shards,
    hub_whole,
    idx,
    pictures,
    torchvision_cifar10,
    torchvision_mnist,
    torchvision_mnist_packed,
    write_parquet,
    write_pickle,
)
from PIL import Image
from torch import Tensor
from training_tools import CPU, make_task, same_bits, seeded

from gruppetto.errors import InvalidSetting, TaskError
from gruppetto.training.images import (
    CIFAR10,
    MNIST,
    ImageDataset,
    channel_statistics,
    pixel_mean,
    read_images,
    to_grey,
)
from gruppetto.training.mini_batches import MiniBatches
from gruppetto.training.randomness import Stream, stream_seed

KINDS = {"cifar10": CIFAR10, "mnist": MNIST}

# -------------------------------------------------------------------------- reading


@pytest.mark.parametrize(("name", "write", "inner"), LAYOUTS)
def test_every_layout_gives_the_same_pictures(
    tmp_path: Path, name: str, write: Callable[[Path, str], Path], inner: list[str]
) -> None:
    folder = write(tmp_path, name)
    for place in [folder, str(folder), *(folder / i for i in inner)]:
        for split in ("train", "test"):
            images, labels = read_images(place, KINDS[name], split)  # type: ignore[arg-type]
            pixels, classes = pictures(name, split)
            assert same_bits(images, torch.from_numpy(pixels))
            assert same_bits(labels, torch.from_numpy(classes))


def test_jpeg_pictures_are_decoded(tmp_path: Path) -> None:
    pixels, _ = pictures("cifar10", n=3)
    encoded = [encode(p, "JPEG") for p in pixels]
    write_parquet(tmp_path / "train.parquet", "img", encoded, [0, 1, 9])
    images, labels = read_images(tmp_path, CIFAR10, "train")
    for image, data in zip(images, encoded, strict=True):
        expected = np.asarray(Image.open(io.BytesIO(data)))
        assert np.array_equal(image.permute(1, 2, 0).numpy(), expected)
    assert labels.tolist() == [0, 1, 9]


def test_reading_does_not_depend_on_the_number_of_threads(tmp_path: Path) -> None:
    hub_shards(tmp_path, "cifar10")
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        pa.set_cpu_count(threads)
        images, labels = read_images(tmp_path, CIFAR10, "train")
        found.append([images, labels, *channel_statistics(images), pixel_mean(images)])
    assert all(same_bits(a, b) for a, b in zip(*found, strict=True))


def test_pickles_of_python_2_and_of_every_protocol(tmp_path: Path) -> None:
    """The files that are published were written by Python 2: text is bytes, numpy is old."""
    pixels, _ = pictures("cifar10", n=2)
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01K\x02"
        b"M\x00\x0c\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xff"
        b"J\xff\xff\xff\xffK\x00tb\x89T" + (2 * 3072).to_bytes(4, "little") + pixels.tobytes()
    )
    content = b"\x80\x02}(U\x04data" + array + b"tbU\x06labels](K\x03K\x09eu."
    (tmp_path / "test_batch").write_bytes(content)
    images, labels = read_images(tmp_path, CIFAR10, "test")
    assert np.array_equal(images.numpy(), pixels)
    assert labels.tolist() == [3, 9]
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        folder = torchvision_cifar10(tmp_path / str(protocol), protocol=protocol)
        images, _ = read_images(folder, CIFAR10, "train")
        assert np.array_equal(images.numpy(), pictures("cifar10")[0])


def test_text_keys_are_read_as_well(tmp_path: Path) -> None:
    pixels, labels = pictures("cifar10", "test")
    content = {"data": pixels.reshape(len(pixels), -1), "labels": labels}
    write_pickle(tmp_path / "test_batch", content, 4)
    assert len(read_images(tmp_path, CIFAR10, "test")[1]) == len(labels)


# ------------------------------------------------------------------ files refused


def refused(folder: Path, name: str, sentence: str, split: Any = "train") -> None:
    with pytest.raises(TaskError, match=sentence) as error:
        read_images(folder, KINDS[name], split)
    assert "\n" not in str(error.value)


def test_a_missing_folder(tmp_path: Path) -> None:
    refused(tmp_path / "no", "cifar10", r"no does not exist; expected a folder with train\.parq")
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", "mnist", r"file is a file; expected a folder .*, or MNIST/raw/")


def test_a_folder_without_a_known_layout(tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("x")
    for split, batch in (("train", "data_batch_1"), ("test", "test_batch")):
        refused(
            tmp_path, "cifar10", rf"holds no {split} pictures; looked for {split}\.parquet or "
            rf"{split}-\*\.parquet, there and in data/, plain_text/, cifar10/, and for "
            f"cifar-10-batches-py/{batch}", split,
        )  # fmt: skip
    refused(tmp_path, "mnist", r"and for MNIST/raw/t10k-images-idx3-ubyte \(or \.gz\)", "test")


def test_half_a_data_set(tmp_path: Path) -> None:
    cifar = torchvision_cifar10(tmp_path / "a") / "cifar-10-batches-py"
    (cifar / "data_batch_3").unlink()
    refused(tmp_path / "a", "cifar10", "cifar-10-batches-py lacks data_batch_3; fetch the data se")
    mnist = torchvision_mnist(tmp_path / "b") / "MNIST" / "raw"
    (mnist / "train-labels-idx1-ubyte").unlink()
    refused(tmp_path / "b", "mnist", "raw lacks train-labels-idx1-ubyte .or train-labels-idx1-uby")
    shards = hub_shards(tmp_path / "c", "mnist") / "data"
    (shards / "train-00001-of-00003.parquet").unlink()
    refused(tmp_path / "c", "mnist", r"expected 3 files like train-00000-of-00003\.parquet, found")


def test_files_that_are_cut_off(tmp_path: Path) -> None:
    for name, folder, path in (
        ("cifar10", hub_whole(tmp_path / "a", "cifar10"), "train.parquet"),
        ("cifar10", torchvision_cifar10(tmp_path / "b"), "cifar-10-batches-py/data_batch_2"),
        ("mnist", torchvision_mnist(tmp_path / "c"), "MNIST/raw/train-images-idx3-ubyte"),
        ("mnist", torchvision_mnist(tmp_path / "d"), "MNIST/raw/train-labels-idx1-ubyte"),
        ("mnist", torchvision_mnist_packed(tmp_path / "e"), "MNIST/raw/train-images-idx3-ubyte.gz"),
    ):
        file = folder / path
        whole = file.read_bytes()
        for size in (len(whole) - 10, len(whole) // 2, 6):
            file.write_bytes(whole[:size])
            refused(folder, name, rf"{file.name} is cut off.*fetch it again")


def test_damage_inside_a_parquet_file(tmp_path: Path) -> None:
    file = hub_whole(tmp_path, "mnist") / "train.parquet"
    content = bytearray(file.read_bytes())
    content[4:200] = bytes(196)
    file.write_bytes(content)
    refused(tmp_path, "mnist", r"train\.parquet is cut off or damaged; fetch it again|no readable")


def test_a_packed_file_that_is_damaged(tmp_path: Path) -> None:
    folder = torchvision_mnist_packed(tmp_path)
    (folder / "MNIST/raw/train-images-idx3-ubyte.gz").write_bytes(b"not packed at all")
    refused(folder, "mnist", "train-images-idx3-ubyte.gz cannot be read: Not a gzipped file")


class Command:
    """A pickle of it would run a command."""

    def __reduce__(self) -> Any:
        return print, ("run",)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"not a pickle", "is not a CIFAR-10 batch"),
        (pickle.dumps([1]), "not a CIFAR-10 batch: expected a dict with data and labels, got list"),
        (pickle.dumps({b"data": Command()}), "it names builtins.print, arrays were expected"),
        (
            pickle.dumps({b"data": 1, b"fine_labels": 2}),
            "expected the keys data and labels, found data, fine_labels",
        ),
        (pickle.dumps({b"data": 1, b"labels": []}), "expected data to be uint8 .N, 3072., got <cl"),
        (pickle.dumps({b"data": np.zeros((1, 3072)), b"labels": [1]}), "got float64 .1, 3072."),
        (
            pickle.dumps({b"data": np.zeros((1, 784), np.uint8), b"labels": [1]}),
            "expected pictures of 3072 values .3x32x32., got 784",
        ),
        (
            pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]}),
            "expected as many labels as pictures, 2, got 1",
        ),
        (
            pickle.dumps({b"data": np.zeros((1, 3072), np.uint8), b"labels": ["cat"]}),
            "expected labels to be a list of whole numbers",
        ),
        (
            pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1, 10]}),
            "expected class labels 0 to 9, got 10 for picture 1",
        ),
    ],
)
def test_foreign_pickles(
    tmp_path: Path, content: bytes, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_batch").write_bytes(content)
    refused(tmp_path, "cifar10", rf"test_batch.*{sentence}", "test")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("images", "labels", "sentence"),
    [
        (b"nothing of the kind", idx([1]), "images-idx3-ubyte is not an idx file of 3 dimensions"),
        (idx(np.zeros((1, 28, 28))), b"", "labels-idx1-ubyte.gz is not an idx file .* got nothing"),
        (idx([1]), idx([1]), "expected it to begin with 00 00 08 03, got 00 00 08 01"),
        (idx(np.zeros((1, 28, 28)), kind=9), idx([1]), "got 00 00 09 03"),
        (idx(np.zeros((1, 28, 28))) + b"x", idx([1]), "expected 800 bytes, got 801; fetch"),
        (idx(np.zeros((1, 32, 28))), idx([1]), "expected pictures of 28x28 pixels, got 28x32"),
        (
            idx(np.zeros((2, 28, 28))),
            idx([1]),
            "expected as many labels as pictures, 2, got 1 in train-labels-idx1-ubyte",
        ),
        (idx(np.zeros((2, 28, 28))), idx([0, 10]), "labels 0 to 9, got 10 for picture 1"),
        (idx(np.zeros((0, 28, 28))), idx([]), "the train files in .* hold no pictures"),
    ],
)
def test_foreign_idx_files(tmp_path: Path, images: bytes, labels: bytes, sentence: str) -> None:
    (tmp_path / "train-images-idx3-ubyte").write_bytes(images)
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    refused(tmp_path, "mnist", sentence)


def test_a_foreign_file_with_the_name_of_a_parquet_file(tmp_path: Path) -> None:
    (tmp_path / "train.parquet").write_text("img,label\n")
    refused(tmp_path, "cifar10", r"train\.parquet is not a parquet file")
    (tmp_path / "train.parquet").write_bytes(b"")
    refused(tmp_path, "cifar10", r"train\.parquet is not a parquet file")


GOOD = encode(pictures("cifar10", n=1)[0][0])
GREY = encode(pictures("mnist", n=1)[0][0])


@pytest.mark.parametrize(
    ("column", "encoded", "labels", "sentence"),
    [
        ("picture", [GOOD], [1], "a column img or image and a column label, found picture, label"),
        ("img", [GOOD, GOOD], [1, 10], "expected class labels 0 to 9, got 10 for picture 1"),
        ("img", [GOOD], [-1], "expected class labels 0 to 9, got -1 for picture 0"),
        ("img", [GOOD], ["cat"], "expected whole numbers in the column label, got string"),
        ("img", [GOOD, GOOD], [1, None], "1 rows have no label"),
        ("img", [GOOD, None], [1, 2], "picture 1 has no bytes; expected the pictures to be insid"),
        ("img", [GOOD, b"junk"], [1, 2], "picture 1 is no readable JPEG or PNG"),
        ("img", [GOOD[:-500]], [1], "picture 0 is no readable JPEG or PNG"),
        ("img", [GREY], [1], "picture 0: expected colour of 32x32 pixels, got grey of 28x28"),
        ("img", [], pa.array([], pa.int64()), "hold no pictures"),
    ],
)
def test_foreign_parquet_files(
    tmp_path: Path, column: str, encoded: list[Any], labels: Any, sentence: str
) -> None:
    write_parquet(tmp_path / "train.parquet", column, encoded, labels)
    refused(tmp_path, "cifar10", sentence)


def test_columns_of_another_type(tmp_path: Path) -> None:
    for table, sentence in (
        (
            {"img": [b"x"], "label": [1]},
            r"the column img to hold encoded pictures as .* got binary",
        ),
        ({"img": [{"path": "x"}], "label": [1]}, "got struct<path: string>"),
        ({"img": [{"bytes": b"x"}], "fine_label": [1]}, "found img, fine_label"),
        ({"img": [1], "image": [1], "label": [1]}, "a column img or image .*, found img, image, l"),
    ):
        pq.write_table(pa.table(table), tmp_path / "train.parquet")
        refused(tmp_path, "cifar10", sentence)


# -------------------------------------------------------------------- statistics


def colour(n: int = 600) -> tuple[Tensor, Tensor]:
    """More pictures than are summed at a time."""
    pixels, labels = pictures("cifar10", n=n)
    return torch.from_numpy(pixels // np.array([1, 2, 3], np.uint8)[:, None, None]), (
        torch.from_numpy(labels)
    )


def test_channel_statistics_and_pixel_means() -> None:
    images, _ = colour()
    mean, std = channel_statistics(images)
    assert mean.dtype == std.dtype == torch.float64
    exact = images.double()
    torch.testing.assert_close(mean, exact.mean((0, 2, 3)).reshape(3, 1, 1))
    deviation = exact.std((0, 2, 3), correction=0).reshape(3, 1, 1)
    torch.testing.assert_close(std, deviation)
    torch.testing.assert_close(pixel_mean(images), exact.mean(0), rtol=0, atol=1e-12)


def test_statistics_do_not_depend_on_threads() -> None:
    images, _ = colour(1000)
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append([*channel_statistics(images), pixel_mean(images)])
    assert all(same_bits(a, b) for a, b in zip(*found, strict=True))


def test_pictures_that_are_all_the_same_are_refused() -> None:
    images = torch.full((3, 2, 4, 4), 7, dtype=torch.uint8)
    images[0, 0, 0, 0] = 8
    with pytest.raises(TaskError, match="pictures that differ, all pixels of channel 1 are 7"):
        channel_statistics(images)


def test_grey_is_pillows() -> None:
    images, _ = colour(300)
    expected = [
        np.asarray(Image.fromarray(image.permute(1, 2, 0).numpy()).convert("L")) for image in images
    ]
    assert same_bits(to_grey(images), torch.from_numpy(np.stack(expected))[:, None])


# ----------------------------------------------------------------------- dataset


def dataset(n: int = 60, **given: Any) -> ImageDataset:
    images, labels = colour(n)
    return ImageDataset(images, labels, *channel_statistics(images), **given)


def test_pictures_are_normalised_to_mean_0_and_deviation_1() -> None:
    data = dataset(200)
    images, _ = data.make_batch(torch.arange(200), None)
    assert images.dtype == torch.float32
    torch.testing.assert_close(images.mean((0, 2, 3)), torch.zeros(3), rtol=0, atol=1e-4)
    torch.testing.assert_close(images.std((0, 2, 3)), torch.ones(3), rtol=0, atol=1e-4)


def test_one_by_one_and_at_once_give_the_same_bits() -> None:
    data = dataset(padding=4, flip=True)
    assert len(data) == 60
    indices = torch.tensor([5, 59, 0, 5])
    images, labels = data.make_batch(indices, None)
    for row, index in enumerate(indices.tolist()):
        image, label = data[index]
        assert same_bits(image, images[row])
        assert label == labels[row]
    with pytest.raises(IndexError):
        data[60]


def test_the_same_generator_gives_the_same_bits_and_touches_nothing_global() -> None:
    data = dataset(padding=4, flip=True)
    indices = torch.arange(60)
    states = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index, union-attr]
    before = data.images.clone()
    images, labels = data.make_batch(indices, seeded(3))
    again, _ = data.make_batch(indices, seeded(3))
    other, _ = data.make_batch(indices, seeded(4))
    assert same_bits(images, again)
    assert not torch.equal(images, other)
    assert same_bits(labels, data.labels)
    assert torch.equal(states[0], torch.get_rng_state())
    assert np.array_equal(states[1], np.random.get_state()[1])  # type: ignore[index]
    assert torch.equal(before, data.images)


def test_threads_do_not_disturb_each_other() -> None:
    data = dataset(padding=4, flip=True)
    indices = torch.arange(60)
    expected = [data.make_batch(indices, seeded(i))[0] for i in range(8)]
    found: dict[int, Tensor] = {}

    def work(number: int) -> None:
        for _ in range(10):
            found[number] = data.make_batch(indices, seeded(number))[0]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(same_bits(found[i], expected[i]) for i in range(8))


def test_every_offset_and_both_directions_happen_about_equally_often() -> None:
    """One picture whose pixels are all different, found again in every crop by hand."""
    padding, draws = 2, 4000
    picture = torch.arange(1, 65, dtype=torch.uint8).reshape(1, 1, 8, 8)
    data = ImageDataset(
        picture, torch.tensor([7]), torch.zeros(()), torch.ones(()), padding=padding, flip=True
    )
    images, labels = data.make_batch(torch.zeros(draws, dtype=torch.int64), seeded(0))
    assert (labels == 7).all()
    padded = np.pad(picture[0, 0].numpy(), padding).astype(np.float32)
    expected = {}
    for y in range(2 * padding + 1):
        for x in range(2 * padding + 1):
            crop = padded[y : y + 8, x : x + 8]
            expected[crop.tobytes()] = (y, x, False)
            expected[crop[:, ::-1].tobytes()] = (y, x, True)
    assert len(expected) == 50
    found = [expected[image.numpy().tobytes()] for image in images]
    counts = {case: found.count(case) for case in expected.values()}
    # 80 each in the mean, deviation 8.9.
    assert all(40 < count < 120 for count in counts.values())


@pytest.mark.parametrize(("padding", "flip"), [(0, True), (4, False), (0, False)])
def test_augmentation_is_only_what_was_asked_for(padding: int, flip: bool) -> None:
    data = dataset(padding=padding, flip=flip)
    plain, _ = data.make_batch(torch.arange(60), None)
    images, _ = data.make_batch(torch.arange(60), seeded(0))
    same = (images == plain).flatten(1).all(1)
    mirrored = (images == plain.flip(3)).flatten(1).all(1)
    if flip:
        assert (same | mirrored).all()
        assert 15 < int(same.sum()) < 45
    elif padding:
        assert not mirrored.any()
        assert int(same.sum()) < 10
    else:
        assert same.all()


def test_datasets_refused() -> None:
    images, labels = colour(4)
    mean, std = torch.zeros(()), torch.ones(())
    for first, second, sentence in (
        (images.float(), labels, "images: expected uint8 .N, C, H, W., got torch.float32"),
        (images[0], labels, r"got torch.uint8 \(3, 32, 32\)"),
        (images, labels.float(), r"labels: expected int64 .N., got torch.float32 \(4,\)"),
        (images, labels[:3], "expected as many labels as images, 4, got 3 labels"),
    ):
        with pytest.raises(TaskError, match=sentence):
            ImageDataset(first, second, mean, std)
    for given, sentence in (
        ({"mean": torch.zeros(4, 1, 1)}, r"mean: expected a shape that broadcasts to \(3, 32, 32"),
        ({"std": torch.ones(1, 3, 32, 32)}, "std: expected a shape that broadcasts to"),
        ({"std": torch.zeros(3, 1, 1)}, "std: expected positive numbers"),
        ({"padding": -1}, "padding: expected 0 or more pixels, got -1"),
    ):
        with pytest.raises(InvalidSetting, match=sentence):
            ImageDataset(images, labels, **{"mean": mean, "std": std, **given})


# ---------------------------------------------------------- mini-batches, evaluation


def test_mini_batches_are_made_by_the_dataset() -> None:
    data = dataset(padding=4, flip=True)
    mini_batches = MiniBatches(make_task(train=data), 16, 5)
    assert mini_batches.is_global_free
    assert not mini_batches.is_cheap
    state = torch.get_rng_state()
    for number in (0, 3, 9):
        (images, labels), count = mini_batches.fetch(number, CPU)
        generator = seeded(stream_seed(5, Stream.DATA, number))
        expected = data.make_batch(torch.tensor(mini_batches.indices(number)), generator)
        assert count == len(labels) == (12 if number == 3 else 16)
        assert same_bits(images, expected[0])
        assert same_bits(labels, expected[1])
    assert torch.equal(state, torch.get_rng_state())


def test_a_users_own_dataset_may_make_batches() -> None:
    class Noisy:
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> Any:
            raise AssertionError("one by one")

        def make_batch(self, indices: Tensor, generator: torch.Generator | None) -> Any:
            return {"x": indices, "noise": torch.randn(len(indices), generator=generator)}

    mini_batches = MiniBatches(make_task(train=Noisy()), 4, 0)
    batch, count = mini_batches.fetch(2, CPU)
    assert (batch["x"].tolist(), count) == (mini_batches.indices(2), 2)
    assert same_bits(batch["noise"], mini_batches.fetch(2, CPU)[0]["noise"])


def test_a_collate_function_of_ones_own_gets_samples() -> None:
    def collate(samples: list[Any]) -> Any:
        return [torch.stack([x for x, _ in samples]), torch.tensor([y for _, y in samples])]

    data = dataset(padding=4, flip=True)
    task = make_task(train=data, collate_fn=collate)
    mini_batches = MiniBatches(task, 16, 0)
    assert not mini_batches.is_global_free
    assert not mini_batches.is_cheap
    (images, _), _ = mini_batches.fetch(0, CPU)
    indices = torch.tensor(mini_batches.indices(0))
    assert same_bits(images, data.make_batch(indices, None)[0])


def test_what_may_be_fetched_in_a_thread() -> None:
    plain = MiniBatches(make_task(), 10, 0)
    assert (plain.is_global_free, plain.is_cheap) == (True, True)
    rows = MiniBatches(make_task(train=[(torch.zeros(6), 1)] * 10), 10, 0)
    assert (rows.is_global_free, rows.is_cheap) == (False, False)
    for data in (None, dataset(50)):
        given = {} if data is None else {"train": data}
        sampled = MiniBatches(make_task(sampler=lambda epoch: range(50), **given), 10, 0)
        assert not sampled.is_global_free  # the sampler is called under the global generators


def test_evaluation_is_of_whole_batches_without_augmentation() -> None:
    data = dataset(600, padding=4, flip=True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 10))
    task = make_task(lambda: model, train=data, test=data)
    asked = []
    make_batch = data.make_batch

    def spy(indices: Tensor, generator: torch.Generator | None) -> Any:
        asked.append((len(indices), generator))
        return make_batch(indices, generator)

    data.make_batch = spy  # type: ignore[method-assign]
    found = task.measure(model, CPU)
    assert asked == [(512, None), (88, None)]
    rows = [data[i] for i in range(600)]
    assert found == make_task(lambda: model, test=rows).measure(model, CPU)


def test_a_label_without_a_class_score_is_named() -> None:
    task = make_task()
    scores = torch.zeros(3, 10)
    for label in (10, -1):
        with pytest.raises(
            TaskError, match=rf"^label {label} but the model gives 10 class scores \(0 to 9\)$"
        ):
            task.compute_loss(scores, [None, torch.tensor([0, label, -100])])
    with pytest.raises(TaskError, match="label 4 but the model gives 4 class scores"):
        task.compute_loss(torch.zeros(1, 4, 2), [None, torch.tensor([[3, 4]])])
    assert float(task.compute_loss(scores, [None, torch.tensor([0, 9, -100])])) > 0
    with pytest.raises((ValueError, RuntimeError)):  # another mistake keeps its own sentence
        task.compute_loss(scores, [None, torch.tensor([0, 1])])
