"""If little of a block is wanted, little of it is fetched, and the values are the same."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardkit
from shardkit import ShardDataset, ShardLoader
from shardkit.errors import DatasetError, ShardError
from shardkit.format.tar import member_header
from shardkit.reading.extents import REQUEST_BYTES, Parts
from shardkit.reading.lru import SharedWork
from tests.support.servers.programs import Nginx
from tests.support.shared import assert_same_batch, misplace

COUNT = 40
TEXTS = {f"{i:03d}": f"text {i} ".encode() * (50 + i % 9) for i in range(COUNT)}

pieces = st.lists(st.tuples(st.integers(0, 900), st.integers(0, 99)), max_size=20)


@given(pieces, st.integers(0, 200))
def test_parts_have_every_piece_and_no_gap_that_is_too_wide(pieces, gap):
    data = np.random.default_rng(0).integers(0, 256, 1000, dtype=np.uint8).tobytes()
    begins, sizes = np.array(pieces, dtype=np.int64).reshape(-1, 2).T
    parts = Parts(begins, begins + sizes, gap=gap)
    starts, stops = parts.starts.tolist(), parts.stops.tolist()
    fetched = b"".join(data[start:stop] for start, stop in zip(starts, stops, strict=True))
    found = [fetched[at : at + size] for at, size in zip(parts.places(begins).tolist(), sizes.tolist(), strict=True)]

    assert found == [data[begin : begin + size] for begin, size in pieces]
    assert parts.nbytes == len(fetched)
    assert all(start < stop for start, stop in zip(starts, stops, strict=True))
    assert all(start - stop > gap for stop, start in zip(stops, starts[1:], strict=False))
    wanted = {at for begin, size in pieces for at in range(begin, begin + size)}
    for start, stop in zip(starts, stops, strict=True):
        unwanted = [at for at in range(start, stop) if at not in wanted]
        assert {start, stop - 1} <= wanted
        assert all(unwanted[i + gap] - unwanted[i] > gap for i in range(len(unwanted) - gap))


@pytest.mark.parametrize(
    ("samples", "sample_bytes", "wanted", "pays"),
    [
        (1, 1_000_000, 1000, True),
        (2, 500_000, 1000, True),
        (3, 350_000, 1000, True),  # three requests of 30 ms, instead of one of 135 ms
        (4, 250_000, 1000, False),  # they would be one request of 0.75 MB
        (16, 61_000, 1000, False),
        (1, 2_000_000, 1_600_000, True),
        (1, 2_000_000, 1_800_000, False),
    ],
)
def test_parts_pay_where_they_save_what_their_requests_cost(samples, sample_bytes, wanted, pays):
    ends = sample_bytes * np.arange(1, samples + 1)
    parts = Parts(ends - wanted, ends, gap=REQUEST_BYTES)

    assert parts.pay(samples * sample_bytes) is pays


def pack_wide(folder, *, raw_bytes=400_000, **options):
    """Make a dataset of small texts and numbers beside large values."""
    samples = (
        {"__key__": key, "cls": i % 10, "raw": bytes([i]) * (raw_bytes + i), "txt": text}
        for i, (key, text) in enumerate(TEXTS.items())
    )
    options = {"shard_samples": 10, "block_bytes": "2MB", "compression": "none", "progress": False} | options
    shardkit.pack(samples, folder, columns={"digit": "cls"}, **options)
    return folder


@pytest.fixture(scope="module")
def web(processes, tmp_path_factory, authority):
    """Provide a web server with wide datasets."""
    with Nginx(processes, tmp_path_factory.mktemp("parts"), authority) as server:
        pack_wide(server.folder / "wide")
        pack_wide(server.folder / "zst", compression="zst")
        pack_wide(server.folder / "narrow", raw_bytes=60_000)
        yield server


def asked(web, work):
    """Return the requests for shards that some work makes, and the result of the work."""
    before = len(web.requests())
    result = work()
    return [request for request in web.requests()[before:] if ".tar" in request.path], result


def epoch(url, fields, **options):
    """Return the values of a field in an epoch, by key."""
    loader = ShardLoader(ShardDataset(url, fields=fields, decode=False, **options), batch_size=8, shuffle=False)
    return {key: bytes(text) for batch in loader for key, text in zip(batch["__key__"], batch["txt"], strict=True)}


def test_of_large_samples_only_the_fields_that_are_wanted_are_fetched(web):
    requests, found = asked(web, lambda: epoch(f"{web.url}/wide", ("txt",)))
    everything, same = asked(web, lambda: epoch(f"{web.url}/wide", ("txt", "raw")))

    assert found == same == TEXTS
    assert sum(request.sent for request in requests) == sum(map(len, TEXTS.values()))
    assert sum(request.sent for request in everything) > COUNT * 400_000
    assert len(requests) == COUNT


def test_neighbours_are_fetched_together(web):
    requests, found = asked(web, lambda: epoch(f"{web.url}/wide", ("txt", "cls")))

    assert found == TEXTS  # cls is before raw and txt after it, next to the following sample's cls
    dataset = ShardDataset(f"{web.url}/wide")
    assert len(requests) == COUNT + sum(shard.blocks for shard in dataset.manifest.shards)
    requests, sample = asked(web, lambda: ShardDataset(f"{web.url}/narrow", decode=False)[3])
    assert [len(requests), sample["txt"]] == [1, TEXTS[sample["__key__"]]]


@pytest.mark.parametrize("name", ["narrow", "zst"])
def test_blocks_come_whole_where_parts_would_cost_more_or_cannot_be_had(web, name):
    requests, found = asked(web, lambda: epoch(f"{web.url}/{name}", ("txt",)))

    assert found == TEXTS
    assert len(requests) == sum(shard.blocks for shard in ShardDataset(f"{web.url}/{name}").manifest.shards)


def test_a_cache_has_whole_blocks_for_whoever_wants_other_fields(web, tmp_path):
    options = {"cache": tmp_path, "cache_bytes": "1GB"}
    requests, found = asked(web, lambda: epoch(f"{web.url}/wide", ("txt",), **options))

    assert found == TEXTS
    assert sum(request.sent for request in requests) > COUNT * 400_000
    assert asked(web, lambda: epoch(f"{web.url}/wide", ("txt", "raw"), **options)) == ([], TEXTS)


FIELDS = [("cls",), ("txt", "cls"), {"text": "none;txt", "label": "cls", "other": "none?"}, {"label": "cls"}]


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Return the folder of a wide dataset."""
    return pack_wide(tmp_path_factory.mktemp("wide") / "wide")


def read_whole(folder, monkeypatch, **options):
    """Return a dataset that reads whole blocks, after it has read them all."""
    dataset = ShardDataset(folder, **options)
    with monkeypatch.context() as patch:
        patch.setattr("shardkit.reading.index_cache.REQUEST_BYTES", 1 << 40)
        for shard, entry in enumerate(dataset.manifest.shards):
            assert all(dataset.read_block(shard, number).is_whole for number in range(entry.blocks))
    return dataset


@pytest.mark.multiprocess
@pytest.mark.parametrize("worker_type", ["thread", "process"])
@pytest.mark.parametrize("transform", [None, dict], ids=["columns", "rows"])
@pytest.mark.parametrize("fields", FIELDS)
def test_batches_are_the_same_in_parts_and_whole(fields, transform, worker_type, wide, monkeypatch):
    options = {"fields": fields, "columns": ("digit",)}
    whole, in_parts = read_whole(wide, monkeypatch, **options), ShardDataset(wide, **options)
    assert not in_parts.read_block(0, 0).is_whole
    options = {"batch_size": 7, "num_workers": 2, "worker_type": worker_type, "transform": transform}

    for one, other in zip(ShardLoader(in_parts, **options), ShardLoader(whole, **options), strict=True):
        assert_same_batch(one, other)


def test_what_looks_like_a_header_in_a_field_is_data(tmp_path):
    texts = {f"{i:03d}": member_header(f"{i:03d}.txt", 512) + bytes(512) for i in range(130)}
    samples = ({"__key__": key, "raw": bytes(400_000), "txt": text} for key, text in texts.items())
    shardkit.pack(samples, tmp_path / "train", block_bytes="60MB", compression="none", progress=False)

    assert not ShardDataset(tmp_path / "train", fields=("txt",)).read_block(0, 0).is_whole
    assert epoch(tmp_path / "train", ("txt",)) == texts


def test_a_field_that_few_samples_have_is_fetched_alone(tmp_path):
    samples = ({"__key__": f"{i:03d}", "raw": bytes(5000)} | ({"txt": "x"} if i == 77 else {}) for i in range(200))
    shardkit.pack(samples, tmp_path / "train", block_bytes="600kB", compression="none", progress=False, shuffle=False)
    dataset = ShardDataset(tmp_path / "train", fields=("txt?",))
    blocks = [dataset.read_block(0, number) for number in range(dataset.num_blocks)]

    assert [block.is_whole for block in blocks] == [False] * len(blocks)
    assert [block.nbytes for block in blocks] == [1, 0]
    texts = {
        key: text for batch in ShardLoader(dataset, 9) for key, text in zip(batch["__key__"], batch["txt"], strict=True)
    }
    assert texts == {f"{i:03d}": "x" if i == 77 else None for i in range(200)}


@pytest.mark.parametrize("field", ["txt", "raw"])
def test_every_byte_that_is_fetched_is_checked_and_no_other(field, tmp_path):
    folder = pack_wide(tmp_path / "wide")
    dataset = ShardDataset(folder)
    offset, size, _ = (int(part[7]) for part in dataset._access.indexes.rows(1, 0).members[field])
    shard = folder / "wide-000001.tar"
    whole = shard.read_bytes()
    for at in range(offset, offset + size, size // 10):
        shard.write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
        texts = ShardDataset(folder, fields=("txt",))
        if field == "raw":
            assert not texts.read_block(1, 1).is_whole
            continue
        with pytest.raises(
            ShardError, match=rf"wide-000001\.tar: field 'txt' of sample '\d+' at byte {offset:,} has the"
        ) as error:
            texts.read_block(1, 1)
        assert (error.value.offset, error.value.field, error.value.key) == (offset, "txt", dataset.keys()[17])


@pytest.mark.parametrize(("part", "value"), [(0, 0), (0, 1 << 60), (1, 1 << 60), (1, -1)])
def test_a_field_that_cannot_be_where_its_index_says_is_not_fetched(part, value, wide):
    dataset = ShardDataset(wide, fields=("txt",))
    misplace(dataset, "txt", part, value)

    with pytest.raises(
        DatasetError, match=r"wide-000001\.[0-9a-f]{16}\.parquet: is damaged \(sample '\d+' is not in its block\)"
    ):
        dataset.read_block(1, 1)


def requests_of(faulty, dataset, shard):
    """Return how often the index of a shard was asked for."""
    url = dataset.manifest.shards[shard].index_url
    return [entry["path"] for entry in faulty.log()].count(f"/wide/{url}")


def test_an_index_is_asked_for_once_however_many_want_it(web, proxy):
    faulty = proxy(web.url)
    dataset = ShardDataset(f"{faulty.url}/wide", fields=("txt",), columns=("digit",))
    held = faulty.hold(path="*/wide-0*.parquet")
    with ThreadPoolExecutor(8) as pool:
        reading = [pool.submit(dataset.read_block, 0, number % 2) for number in range(8)]
        held.wait()
        held.release()
        blocks = [one.result() for one in reading]
    found = {
        sample["__key__"]: bytes(sample["txt"]) for block in blocks for sample in map(block.sample, range(len(block)))
    }

    assert len(found) == 10
    assert found == {key: TEXTS[key] for key in found}
    assert requests_of(faulty, dataset, 0) == 1


@pytest.mark.parametrize("columns", [(), ("digit",)])
def test_an_index_is_not_asked_for_again_by_who_comes_late(web, proxy, monkeypatch, columns):
    faulty, do = proxy(web.url), SharedWork.do
    dataset = ShardDataset(f"{faulty.url}/wide", fields=("txt",), columns=columns)
    # A thread finds no index, is then delayed until another thread has read the index, and must not read it again.
    monkeypatch.setattr(SharedWork, "do", lambda self, key, work: [do(self, key, work) for _ in range(2)][1])
    block = dataset.read_block(0, 0)

    assert bytes(block.sample(0)["txt"]) == TEXTS[block.sample(0)["__key__"]]
    assert requests_of(faulty, dataset, 0) == 1
