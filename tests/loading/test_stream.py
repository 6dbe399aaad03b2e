"""Every sample comes exactly once per epoch, in an order that differs every epoch and is reproducible."""

import copy
import itertools
import logging
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from shardkit.codecs.registry import Decoder, encode
from shardkit.errors import ArgumentError, CodecError, DatasetError, SampleError, ShardError, TooManySkippedError
from shardkit.loading import stream as stream_module
from shardkit.loading.epochs import SharedEpochs
from shardkit.loading.stream import ShardStream, Skipped, StreamWarning
from shardkit.sample import KEY, URL
from shardkit.storage.local import LocalStorage
from tests.reading.test_forward import samples_of, tar, tar_of, write_dataset
from tests.support.shared import examples

pytestmark = [
    pytest.mark.filterwarnings("ignore::shardkit.loading.stream.StreamWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # more workers than this machine has cores
]

multiprocess = pytest.mark.multiprocess


def bare_shards(folder, sizes):
    """Write shards with given numbers of samples, numbered consecutively, and return their names."""
    numbers = itertools.count()
    names = []
    for shard, size in enumerate(sizes):
        names.append(str(folder / f"a-{shard:03d}.tar"))
        (folder / f"a-{shard:03d}.tar").write_bytes(tar_of(samples_of(itertools.islice(numbers, size))))
    return names


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return bare_shards(tmp_path_factory.mktemp("shards"), [5, 3, 4, 6, 2])


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dataset")
    write_dataset(folder, [samples_of(range(i, i + 5)) for i in range(0, 20, 5)])
    return folder


def keys(samples):
    return [sample[KEY] for sample in samples]


def names(count):
    return [f"{i:04d}" for i in range(count)]


@contextmanager
def worker(number, of, seed):
    """Make this process look like a worker of a loader."""
    info = SimpleNamespace(id=number, num_workers=of, seed=seed + number)
    with mock.patch.object(stream_module, "get_worker_info", return_value=info):
        yield


def order_of_workers(stream, epoch, count):
    """Return the keys as a loader yields them: from each worker in turn."""
    stream = copy.deepcopy(stream)
    stream.set_epoch(epoch)
    orders = []
    for number in range(count):
        with worker(number, count, seed=epoch):
            orders.append(keys(copy.copy(stream)))
    return [key for turn in itertools.zip_longest(*orders) for key in turn if key is not None]


def test_samples_are_decoded_and_keep_key_and_url(shards):
    (sample,) = [sample for sample in ShardStream(shards) if sample[KEY] == "0006"]

    assert sample == {KEY: "0006", URL: shards[1], "txt": "text 6" * 3, "cls": 6}


def test_undecoded_samples_are_bytes(shards):
    assert next(iter(ShardStream(shards, decode=False, shuffle=False)))["cls"] == b"0"


def test_without_shuffling_the_order_is_that_of_the_shards(shards):
    stream = ShardStream(shards, shuffle=False)

    assert keys(stream) == names(20)
    assert keys(stream) == names(20)


@examples(0.6)
@given(
    world_size=st.integers(1, 7),
    num_workers=st.integers(1, 4),
    seed=st.integers(-(2**70), 2**70),
    epoch=st.integers(0, 2**62),
    buffer_size=st.integers(0, 30),
    open_shards=st.integers(1, 9),
    shuffle=st.booleans(),
)
def test_every_sample_comes_exactly_once_over_ranks_and_workers(
    shards, world_size, num_workers, seed, epoch, buffer_size, open_shards, shuffle
):
    options = {"seed": seed, "buffer_size": buffer_size, "open_shards": open_shards, "shuffle": shuffle}
    seen = []
    for rank in range(world_size):
        stream = ShardStream(shards, rank=rank, world_size=world_size, **options)
        stream.set_epoch(epoch)
        for number in range(num_workers):
            with worker(number, num_workers, seed=1000 + rank):
                seen += keys(copy.copy(stream))  # each worker has its own copy, with a shared epoch

    assert Counter(seen) == Counter(names(20))


@given(seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 9))
def test_without_a_buffer_only_the_order_of_shards_changes(shards, seed, epoch):
    stream = ShardStream(shards, seed=seed, buffer_size=0, open_shards=1)
    stream.set_epoch(epoch)
    as_given = {shard: keys(ShardStream(shard, shuffle=False)) for shard in shards}
    found = keys(stream)

    assert sorted(found) == sorted(itertools.chain(*as_given.values()))
    while found:  # whole shards, one after the other, each in its stored order
        [part] = [part for part in as_given.values() if part == found[: len(part)]]
        del found[: len(part)]


@given(size=st.integers(0, 50), buffer_size=st.integers(1, 20), key=st.integers(0, 2**64 - 1))
def test_a_buffer_gives_back_what_it_was_given(size, buffer_size, key):
    assert sorted(stream_module._mix(iter(range(size)), buffer_size, key)) == list(range(size))


@given(sizes=st.lists(st.integers(0, 5)), at_once=st.integers(1, 6))
def test_interleaved_sources_keep_their_own_orders_and_no_more_are_open(sizes, at_once):
    alive = []

    def source(number, size):
        alive.append(number)
        yield from ((number, i) for i in range(size))
        alive.remove(number)

    items = []
    for item in stream_module._interleave((source(n, size) for n, size in enumerate(sizes)), at_once):
        assert len(alive) <= at_once
        items.append(item)

    assert sorted(items) == [(n, i) for n, size in enumerate(sizes) for i in range(size)]
    for number, size in enumerate(sizes):
        assert [i for n, i in items if n == number] == list(range(size))


def test_the_draws_of_a_buffer_are_spread_evenly_and_keyed():
    draws = list(itertools.islice(stream_module._draws(10, key=7), 50_000))
    counts = np.bincount(draws, minlength=10)

    assert len(counts) == 10
    assert abs(counts - 5000).max() < 300  # four and a half standard deviations
    assert draws[:1000] != list(itertools.islice(stream_module._draws(10, key=8), 1000))
    assert draws[:1000] != draws[1024:2024]


def test_open_shards_come_in_turns(shards):
    stream = ShardStream(shards, buffer_size=1, open_shards=3)
    first = [sample[URL] for sample in itertools.islice(stream, 3)]

    assert len(set(first)) == 3


def test_a_buffer_mixes_more_than_the_turns_of_the_shards(shards):
    orders = {
        size: [keys(ShardStream(shards, buffer_size=size, open_shards=1, seed=seed)) for seed in range(30)]
        for size in (1, 10)
    }
    ascents = {
        size: np.mean([b > a for order in found for a, b in itertools.pairwise(order)])
        for size, found in orders.items()
    }

    assert ascents[1] > 0.8  # within a shard the order is that of the shard
    assert 0.35 < ascents[10] < 0.65


def test_an_epoch_differs_from_the_last_and_repeats_when_asked_again(shards):
    stream = ShardStream(shards, seed=3)
    orders = [keys(stream) for _ in range(3)]
    again = ShardStream(shards, seed=3)
    again.set_epoch(1)

    assert len({tuple(order) for order in orders}) == 3
    assert [keys(again), keys(again)] == orders[1:]
    assert keys(ShardStream(shards, seed=4)) != orders[0]


# The order of five shards with 5, 3, 4, 6 and 2 samples, with seed 3 and epoch 5. Runs that resume with another version
# rely on it.
GOLDEN_ORDER = "0 18 9 1 2 12 11 3 14 13 5 19 6 10 15 4 16 7 17 8"


def test_the_order_of_a_seed_and_an_epoch_never_changes(shards):
    stream = ShardStream(shards, seed=3, buffer_size=8)
    stream.set_epoch(5)

    assert " ".join(str(int(key)) for key in keys(stream)) == GOLDEN_ORDER


CASES = [(method, persistent) for method in ("fork", "spawn") for persistent in (False, True)]


@multiprocess
@pytest.mark.parametrize(("method", "persistent"), CASES)
def test_epochs_advance_and_repeat_in_workers(dataset, method, persistent):
    stream = ShardStream(dataset, buffer_size=5)
    expected = [order_of_workers(stream, epoch, 2) for epoch in range(4)]
    stream.set_epoch(1)
    options = {"num_workers": 2, "multiprocessing_context": method, "persistent_workers": persistent}
    loader = DataLoader(stream, batch_size=None, **options)

    assert keys(loader) == expected[1]
    assert keys(loader) == expected[2]
    assert len({tuple(order) for order in expected}) == 4
    assert all(sorted(order) == names(20) for order in expected)


@multiprocess
@pytest.mark.parametrize("persistent", [False, True])
def test_an_epoch_repeats_in_workers_when_it_is_set_again(dataset, persistent):
    stream = ShardStream(dataset, buffer_size=5)
    loader = DataLoader(stream, batch_size=None, num_workers=2, persistent_workers=persistent)
    orders = [keys(loader), keys(loader)]
    stream.set_epoch(0)

    assert [keys(loader), keys(loader)] == orders
    assert orders[0] != orders[1]


def begin_all(epochs, identity, workers):
    return [epochs.begin(identity, number).epoch for number in workers]


def test_workers_of_a_pass_agree_however_late_they_start():
    epochs = SharedEpochs()
    early = begin_all(epochs, 101, [0, 2])
    other = begin_all(epochs, 205, [0, 1, 2])
    late = begin_all(epochs, 101, [1])

    assert (early, other, late) == ([0, 0], [1, 1, 1], [0])
    assert epochs.begin().epoch == 2


def test_a_loader_that_is_seeded_the_same_every_epoch_has_other_epochs():
    epochs = SharedEpochs()

    assert [begin_all(epochs, 101, [0, 1]) for _ in range(3)] == [[0, 0], [1, 1], [2, 2]]


def test_a_worker_that_lives_on_does_not_run_ahead_of_one_that_starts_late(shards):
    stream = ShardStream(shards)
    early, late = copy.copy(stream), copy.copy(stream)
    with worker(0, 2, seed=1):
        epochs = [[keys(early)], [keys(early)]]
    with worker(1, 2, seed=1):
        for epoch in epochs:
            epoch.append(keys(late))

    assert [sorted(a + b) for a, b in epochs] == [names(20), names(20)]


@multiprocess
def test_epochs_differ_when_torch_is_seeded_before_each(dataset):
    loader = DataLoader(ShardStream(dataset, buffer_size=5), batch_size=None, num_workers=2)
    orders = []
    for _ in range(2):
        torch.manual_seed(0)
        orders.append(keys(loader))

    assert sorted(orders[0]) == sorted(orders[1]) == names(20)
    assert orders[0] != orders[1]


@multiprocess
def test_loaders_with_other_numbers_of_workers_and_several_alive_take_the_next_epochs(dataset):
    stream = ShardStream(dataset, buffer_size=5)
    two, three = (DataLoader(stream, batch_size=None, num_workers=n, persistent_workers=True) for n in (2, 3))
    pairs = [keys(two)]
    begun = [iter(two), iter(three)]
    pairs += [[sample[KEY] for pair in zip(*begun, strict=True) for sample in pair]]

    assert sorted(pairs[0]) == names(20)
    assert sorted(pairs[1]) == sorted(names(20) * 2)
    stream.set_epoch(3)
    after = keys(stream)
    stream.set_epoch(0)
    begun_at = [stream._epochs.begin().epoch for _ in range(2)]

    assert sorted(after) == names(20)
    assert begun_at == [0, 1]


def test_many_passes_do_not_fill_the_memory():
    epochs = SharedEpochs()

    assert [epochs.begin(2 * i + 1, 0).epoch for i in range(1000)] == list(range(1000))
    assert epochs.begin(1999, 1).epoch == 999


def _epochs_of_a_rank(epochs, queue):
    queue.put([epochs.begin().epoch, epochs.begin().epoch])


@multiprocess
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_ranks_that_inherit_a_stream_count_their_epochs_alone(method):
    epochs, context = SharedEpochs(), multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    ranks = [context.Process(target=_epochs_of_a_rank, args=(epochs, queue)) for _ in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()

    assert [queue.get(), queue.get()] == [[0, 1], [0, 1]]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda stream: pickle.loads(pickle.dumps(stream))])
def test_a_copy_goes_on_by_itself(shards, copied):
    stream = ShardStream(shards)
    keys(stream)
    other = copied(stream)

    assert keys(other) == keys(stream)


def test_the_shared_memory_is_closed_with_its_stream():
    epochs = SharedEpochs()
    descriptor = epochs._descriptor
    del epochs

    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


@pytest.mark.parametrize("rank", range(3))
def test_ranks_are_those_of_torchrun(shards, monkeypatch, rank):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "3")

    assert set(keys(ShardStream(shards))) == set(keys(ShardStream(shards, rank=rank, world_size=3)))


def test_ranks_are_those_of_torch_distributed_also_in_spawned_workers(shards, monkeypatch):
    monkeypatch.setattr(stream_module.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(stream_module.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(stream_module.distributed, "get_world_size", lambda: 2)
    stream = ShardStream(shards)
    expected = keys(stream)
    carried = pickle.dumps(ShardStream(shards))
    monkeypatch.undo()

    assert len(expected) < 20
    assert keys(pickle.loads(carried)) == expected


def test_a_rank_that_is_half_set_or_out_of_range_is_refused(shards, monkeypatch):
    with pytest.raises(ArgumentError, match="give both or neither"):
        ShardStream(shards, rank=0)
    with pytest.raises(ArgumentError, match=r"rank must be in \[0, 2\), got 2"):
        ShardStream(shards, rank=2, world_size=2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ArgumentError, match="environment variables RANK and WORLD_SIZE: rank is None"):
        ShardStream(shards)
    monkeypatch.setenv("RANK", "x")
    with pytest.raises(ArgumentError, match="expected a number"):
        ShardStream(shards)


def test_several_ranks_are_warned_that_their_batches_differ(dataset):
    with pytest.warns(StreamWarning, match="different numbers of batches") as warned:
        ShardStream(dataset, rank=0, world_size=2)

    assert [w.filename for w in warned] == [__file__]


def test_shards_without_an_index_are_warned_of_and_a_dataset_is_not(shards, dataset):
    with pytest.warns(StreamWarning, match="'shardkit index FOLDER'") as warned:
        assert ShardStream(shards).num_samples is None
    assert [w.filename for w in warned] == [__file__]
    with mock.patch("warnings.warn") as warn:
        assert ShardStream(dataset).num_samples == 20

    assert not warn.called


def test_fields_are_picked_renamed_and_decoded_by_their_own_names(shards):
    stream = ShardStream(shards, fields={"label": "index;cls", "text": "txt", "more": "jpg?"}, shuffle=False)

    assert next(iter(stream)) == {KEY: "0000", URL: shards[0], "label": 0, "text": "text 0" * 3, "more": None}
    raw = ShardStream(shards, fields=("cls",), shuffle=False, decode=False)
    assert next(iter(raw)) == {KEY: "0000", URL: shards[0], "cls": b"0"}


def test_only_the_alternative_that_is_picked_is_decoded(tmp_path):
    (tmp_path / "a.tar").write_bytes(tar([("a.json", b"1"), ("a.cls", b"damaged")]))

    assert next(iter(ShardStream(tmp_path, fields={"x": "json;cls"})))["x"] == 1


def test_a_missing_field_is_an_error_that_names_the_key(shards):
    with pytest.raises(SampleError, match="sample '0000': has no field jpg"):
        next(iter(ShardStream(shards, fields=["jpg"], shuffle=False)))


def test_transforms_take_samples_or_fields(shards):
    whole = ShardStream(shards, transform=lambda sample: (sample["cls"], sample[KEY]), shuffle=False)
    single = ShardStream(shards, fields=("cls", "jpg?"), transform={"cls": lambda v: v + 1, "jpg": len}, shuffle=False)

    assert next(iter(whole)) == (0, "0000")
    assert next(iter(single)) == {KEY: "0000", URL: shards[0], "cls": 1, "jpg": None}
    with pytest.raises(SampleError, match=r"'0000' of shard .*: has no field 'jpg', which transform names"):
        next(iter(ShardStream(shards, transform={"jpg": len}, shuffle=False)))


def test_the_random_numbers_of_a_transform_follow_from_seed_epoch_and_key_alone(dataset):
    def drawn(seed, epoch, **options):
        stream = ShardStream(dataset, seed=seed, transform={"cls": lambda _, rng: rng.bits()}, **options)
        stream.set_epoch(epoch)
        return {sample[KEY]: sample["cls"] for sample in stream}

    first = drawn(0, 0)

    assert drawn(0, 0, shuffle=False) == first
    assert len({*first.values(), *drawn(0, 1).values(), *drawn(1, 0).values()}) == 60


def test_an_error_of_a_transform_is_never_skipped(shards):
    with pytest.raises(ZeroDivisionError):
        list(ShardStream(shards, transform=lambda sample: sample["cls"] / 0, on_error="skip"))
    with pytest.raises(CodecError):
        list(ShardStream(shards, transform={"txt": partial(Decoder().decode, "cls")}, on_error="skip"))


def test_batches_are_torch_tensors_with_lists_of_keys(shards):
    batches = list(ShardStream(shards, batch_size=8, shuffle=False))

    assert [len(batch[KEY]) for batch in batches] == [8, 8, 4]
    assert batches[0][KEY] == names(8)
    assert torch.equal(batches[1]["cls"], torch.arange(8, 16))
    assert batches[0]["txt"][1] == "text 1" * 3
    assert [len(b[KEY]) for b in ShardStream(shards, batch_size=8, drop_last=True)] == [8, 8]


def test_a_batch_of_images_has_its_channels_first_and_keeps_them_last_in_memory(tmp_path):
    pixels = [np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3) + i for i in range(3)]
    shard = tmp_path / "images.tar"
    shard.write_bytes(
        tar((f"{i}.{field}", encode(field, image)) for i, image in enumerate(pixels) for field in ("png", "npy"))
    )

    (batch,) = ShardStream(shard, fields={"image": "jpg;png", "array": "npy"}, batch_size=3, shuffle=False)

    assert batch["image"].shape == (3, 3, 4, 5)
    assert batch["image"].is_contiguous(memory_format=torch.channels_last)
    assert np.array_equal(batch["image"].permute(0, 2, 3, 1).numpy(), np.stack(pixels))
    assert np.array_equal(batch["array"].numpy(), np.stack(pixels))


def test_a_batch_that_cannot_be_made_says_what_to_do(shards):
    stream = ShardStream(shards, fields=("cls", "jpg?"), batch_size=4)

    with pytest.raises(TypeError) as caught:
        next(iter(stream))
    assert "bring them into one shape with transform=" in caught.value.__notes__[0]


def test_a_decoder_of_ones_own_is_used(tmp_path):
    (tmp_path / "a.tar").write_bytes(tar([("a.npy", b"\x93NUMPY" + bytes(100))]))

    with pytest.raises(CodecError, match="field 'npy'"):
        list(ShardStream(tmp_path, decode=Decoder(max_array_bytes=1)))


@pytest.fixture
def damaged(tmp_path):
    """Return shards: the second has two undecodable samples, and the third is cut in its third sample."""
    shards = bare_shards(tmp_path, [4, 4, 4, 4])
    samples = samples_of(range(4, 8))
    samples[1]["cls"] = samples[2]["cls"] = b"?"
    (tmp_path / "a-001.tar").write_bytes(tar_of(samples))
    whole = (tmp_path / "a-002.tar").read_bytes()
    (tmp_path / "a-002.tar").write_bytes(whole[: 2 * 2048 + 700])
    return shards


WHOLE = sorted(set(names(16)) - {"0005", "0006", "0010", "0011"})


def test_damage_and_undecodable_fields_are_errors(damaged):
    with pytest.raises(CodecError, match=r"a-001\.tar, sample '0005', field 'cls'"):
        list(ShardStream(damaged[:2]))
    with pytest.raises(ShardError, match=r"a-002\.tar: ends at"):
        list(ShardStream(damaged[2:]))


@pytest.mark.parametrize("shuffle", [False, True])
def test_what_is_skipped_is_counted_and_logged_once_for_each_shard(damaged, caplog, shuffle):
    stream = ShardStream(damaged, on_error="skip", max_skipped=3, shuffle=shuffle)

    assert stream.skipped == Skipped(0, 0)
    assert sorted(keys(stream)) == WHOLE
    assert stream.skipped == Skipped(samples=2, shards=1)
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert sorted(line.split(";")[0].split(":")[0] for line in lines) == [
        "skipped a sample",
        f"skipped the rest of shard {damaged[2]}",
    ]
    assert sorted(keys(stream)) == WHOLE  # the bound applies to each epoch
    assert stream.skipped == Skipped(samples=2, shards=1)


def test_too_much_skipped_is_an_error(damaged):
    stream = ShardStream(damaged, on_error="skip", max_skipped=2, shuffle=False)
    samples = iter(stream)

    assert keys(itertools.islice(samples, 8)) == WHOLE[:8]
    with pytest.raises(TooManySkippedError, match="2 samples and 1 shards were skipped, expected at most"):
        next(samples)


@multiprocess
def test_what_workers_skip_is_summed_up(damaged):
    stream = ShardStream(damaged, on_error="skip", max_skipped=3)

    assert sorted(keys(DataLoader(stream, batch_size=None, num_workers=2))) == WHOLE
    assert stream.skipped == Skipped(samples=2, shards=1)


def test_what_workers_skip_is_bounded_together(damaged):
    stream = ShardStream(damaged, on_error="skip", max_skipped=2, shuffle=False)
    with worker(0, 2, seed=1):
        assert len(keys(copy.copy(stream))) == 6
    with worker(1, 2, seed=1), pytest.raises(TooManySkippedError):
        keys(copy.copy(stream))


def test_a_missing_shard_is_an_error_even_when_skipping(shards, tmp_path):
    with pytest.raises(FileNotFoundError):
        list(ShardStream([*shards, tmp_path / "none.tar"], on_error="skip"))


def test_changed_data_of_an_indexed_shard_is_skipped_as_damage(tmp_path):
    write_dataset(tmp_path, [samples_of(range(4))])
    data = bytearray((tmp_path / "train-000000.tar").read_bytes())
    data[2 * 2048 + 512] ^= 1
    (tmp_path / "train-000000.tar").write_bytes(data)
    stream = ShardStream(tmp_path, on_error="skip")

    assert sorted(keys(stream)) == names(2)
    assert stream.skipped == Skipped(0, 1)


@pytest.mark.parametrize("end", ["break", "interrupt", "error"])
def test_shards_are_closed_however_a_pass_ends(shards, monkeypatch, end):
    opened = []
    honest = LocalStorage.open
    monkeypatch.setattr(LocalStorage, "open", lambda *a, **k: opened.append(file := honest(*a, **k)) or file)

    def interrupt(sample):
        if end == "interrupt":
            raise KeyboardInterrupt
        if end == "error":
            raise OSError
        return sample

    try:
        for _ in ShardStream(shards, buffer_size=2, transform=interrupt):
            break
    except (KeyboardInterrupt, OSError):
        pass

    assert len(opened) >= 3
    assert all(file._file.closed for file in opened)


def test_an_error_leaves_no_shard_open(damaged, monkeypatch):
    opened = []
    honest = LocalStorage.open
    monkeypatch.setattr(LocalStorage, "open", lambda *a, **k: opened.append(file := honest(*a, **k)) or file)
    with pytest.raises(ShardError) as caught:
        list(ShardStream(damaged, decode=False))

    assert caught.tb is not None  # it holds the frames, and with them all readers
    assert len(opened) == 4
    assert all(file._file.closed for file in opened)


@multiprocess
def test_more_workers_than_shards_end_cleanly(tmp_path):
    stream = ShardStream(bare_shards(tmp_path, [3, 3]), batch_size=2)
    batches = list(DataLoader(stream, batch_size=None, num_workers=3))

    assert sorted(key for batch in batches for key in batch[KEY]) == names(6)
    assert keys(ShardStream(tmp_path, rank=2, world_size=3)) == []


def test_standard_input_is_read_forward():
    program = "import sys, shardkit; print(*[s['__key__'] for s in shardkit.ShardStream('-', shuffle=False)])"
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, input=tar_of(samples_of(range(3))), capture_output=True, check=True)

    assert done.stdout.split() == [b"0000", b"0001", b"0002"]


def test_standard_input_is_read_once():
    program = "import shardkit; stream = shardkit.ShardStream('-'); [*stream]; [*stream]"
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, input=tar_of(samples_of(range(3))), capture_output=True, check=False)

    assert (
        b"ArgumentError: standard input can be read once, and was; for more epochs, write it to a file" in done.stderr
    )


def test_standard_input_is_refused_in_workers():
    stream = ShardStream("-")

    with worker(0, 2, seed=1), pytest.raises(ArgumentError, match="pass num_workers=0"):
        iter(stream)


def test_a_stream_has_no_length(shards):
    with pytest.raises(TypeError):
        len(ShardStream(shards))


@pytest.mark.parametrize(
    "wrong",
    [{"buffer_size": -1}, {"open_shards": 0}, {"batch_size": 0}, {"max_skipped": -1}, {"on_error": "ignore"}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_arguments_out_of_range_are_refused(shards, wrong):
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        ShardStream(shards, **wrong)
    with pytest.raises(ArgumentError, match="epoch must be at least 0"):
        ShardStream(shards).set_epoch(-1)


def test_a_folder_without_shards_is_an_error(tmp_path):
    with pytest.raises(DatasetError, match="has neither"):
        ShardStream(tmp_path)
