"""Processing whole blocks gives the same batches and errors as row by row, whatever the blocks are like."""

import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardkit
from shardkit import ShardDataset, ShardLoader
from shardkit.codecs.registry import Decoder, encode
from shardkit.errors import ShardkitError
from shardkit.format.tar import member_header, padding
from shardkit.loading.columnar import Arena, ColumnReader, Values, parse_digits, regular_spans
from shardkit.reading.block import Block
from shardkit.reading.memory import Buffers
from shardkit.sample import FieldSelection
from tests.support.shared import assert_same_batch, examples, tar_of

EVERYTHING = FieldSelection.parse(None)
SMALL = {"shard_bytes": 400_000, "block_bytes": 40_000, "compression": "none", "progress": False}


def as_they_are(sample):
    """Return the sample unchanged: a transform makes the loader create samples one by one."""
    return sample


def passes(folder, **options):
    """Return the batches of an epoch and the error that ended it, both by whole blocks and row by row."""
    results = []
    for transform in (None, as_they_are):
        loader = ShardLoader(ShardDataset(folder, **options), 16, num_workers=2, transform=transform, on_error="raise")
        batches, error = [], None
        try:
            batches.extend(loader)
        except ShardkitError as raised:
            error = raised
        results.append((batches, error, loader._make_arena is not None))
    return results


shapes = st.sampled_from([(), (3,), (4, 2), (0,), (300,)])
values = {
    "npy": st.builds(
        lambda shape, dtype, seed: np.random.default_rng(seed).integers(0, 100, shape).astype(dtype),
        shapes,
        st.sampled_from(["u1", "<i8", "<f4", ">i4", "?", "U3"]),
        st.integers(0, 99),
    ),
    "cls": st.one_of(
        st.integers(0, 9), st.integers(-(2**70), 2**70), st.sampled_from(["7", " 8 ", "+9", "007", "1_0"])
    ),
    "txt": st.one_of(st.text(max_size=9), st.binary(max_size=4)),
    "bin": st.binary(max_size=700),
    "a.deep.cls": st.integers(0, 1),
}
keys = st.one_of(st.integers(0, 99_999).map("{:05d}".format), st.text("ab/_é", min_size=1, max_size=120))


@st.composite
def datasets(draw):
    """Return samples that are mostly alike, as in a real dataset, and sometimes different."""
    fields = draw(st.lists(st.sampled_from(sorted(values)), min_size=1, max_size=3, unique=True))
    template = {field: draw(values[field]) for field in fields}
    names = draw(st.one_of(st.just([f"{i:04d}" for i in range(60)]), st.lists(keys, min_size=1, max_size=30)))
    samples = [{"__key__": name, **template} for name in names]
    for _ in range(draw(st.integers(0, 3))):
        sample, field = draw(st.sampled_from(samples)), draw(st.sampled_from(fields))
        sample[field] = draw(values[field])
    if draw(st.booleans()):
        draw(st.sampled_from(samples)).pop(draw(st.sampled_from(fields)))
    return samples


@examples(3)
@given(samples=datasets())
def test_a_dataset_gives_the_same_by_whole_blocks_and_row_by_row(tmp_path_factory, samples):
    folder = tmp_path_factory.mktemp("columnar") / "train"
    with shardkit.ShardWriter(folder, shard_bytes="1MB", block_bytes="8kB") as writer:
        for sample in samples:
            try:
                writer.write(sample)
            except ShardkitError:  # a name that a tar cannot have, which is not tested here
                continue
    if not len(ShardDataset(folder)):
        return

    (ours, our_error, is_columnar), (theirs, their_error, _) = passes(folder)

    assert is_columnar
    assert str(our_error) == str(their_error)
    assert len(ours) == len(theirs)
    for batch, expected in zip(ours, theirs, strict=True):
        assert_same_batch(batch, expected)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("columnar") / "train"
    samples = (
        {"__key__": f"{i:05d}", "npy": np.full((4, 5), i, dtype=np.int32), "cls": i, "txt": f"Text {i}"}
        for i in range(500)
    )
    shardkit.pack(samples, folder, shuffle=False, **SMALL)
    return folder


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"decode": False},
        {"fields": {"x": "npy", "y": "cls;count"}},
        {"fields": ["npy", "json?"]},
        {"fields": ["cls"]},
    ],
)
def test_a_choice_of_fields_gives_the_same(folder, options):
    (ours, _, is_columnar), (theirs, _, is_row_by_row) = passes(folder, **options)

    assert (is_columnar, is_row_by_row) == (True, False)
    assert len(ours) == 32
    for batch, expected in zip(ours, theirs, strict=True):
        assert_same_batch(batch, expected)


def test_whole_blocks_of_equal_samples_are_never_made_row_by_row(folder, monkeypatch):
    def fail(_self, row, _selection=None):
        raise AssertionError(f"row {row} was made alone")

    monkeypatch.setattr("shardkit.reading.block.Block.sample", fail)

    assert sum(len(batch["cls"]) for batch in ShardLoader(ShardDataset(folder), 16)) == 500


@pytest.mark.parametrize("option", ["columns", "codecs", "collate_fn", "transform"])
def test_what_wants_samples_gets_them(folder, tmp_path, option):
    dataset, loader = {}, {}
    if option == "columns":
        samples = ({"__key__": f"{i}", "cls": i} for i in range(9))
        folder = tmp_path / "train"
        shardkit.pack(samples, folder, columns={"label": "cls"}, shuffle=False, progress=False)
        dataset["columns"] = ["label"]
    elif option == "codecs":
        dataset["decode"] = Decoder(codecs={"txt": shardkit.codecs.registry.Codec(len, None)})
    elif option == "collate_fn":
        loader["collate_fn"] = len
    else:
        dataset["transform"] = {"cls": lambda number: -number}

    batch = next(iter(ShardLoader(ShardDataset(folder, **dataset), 8, shuffle=False, **loader)))

    expected = {
        "columns": lambda: batch["label"].tolist() == list(range(8)),
        "codecs": lambda: batch["txt"].tolist() == [6] * 8,
        "collate_fn": lambda: batch == 8,
        "transform": lambda: batch["cls"].tolist() == [-i for i in range(8)],
    }
    assert expected[option]()


def test_damage_comes_at_the_same_batch_as_row_by_row(folder, tmp_path):
    damaged = tmp_path / "train"
    shutil.copytree(folder, damaged)
    shard = sorted(damaged.glob("*.tar"))[1]
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)

    (ours, our_error, _), (theirs, their_error, _) = passes(damaged)

    assert our_error is not None
    assert str(our_error) == str(their_error)
    assert len(ours) == len(theirs)


def test_batches_that_are_kept_stay_as_they_are(folder):
    kept = list(ShardLoader(ShardDataset(folder), 16))

    for batch, expected in zip(kept, ShardLoader(ShardDataset(folder), 16, transform=as_they_are), strict=True):
        assert_same_batch(batch, expected)


def test_memory_that_is_full_of_blocks_changes_nothing(folder):
    dataset = ShardDataset(folder)
    lanes = dataset.order(seed=0, epoch=0).lanes
    small = ShardLoader(dataset, 16, memory=int(2 * lanes * dataset.block_bytes + 1))

    for batch, expected in zip(small, ShardLoader(dataset, 16), strict=True):
        assert_same_batch(batch, expected)


def test_text_is_let_go_when_its_block_is_not_needed_any_more():
    arena = Arena(ColumnReader(EVERYTHING, None), Buffers(0), places=1, block_samples=8)
    arena._columns = {"txt": Values(np.array([b"long"] * 8, dtype=object))}

    arena.clear(0)

    assert not arena._columns["txt"].array.any()


# -- the fast way to read a block's headers accepts only headers that it knows


def block_of(members):
    return tar_of(members)[: -2 * 512]


def test_equal_samples_are_found_at_once():
    data = block_of([(f"{i:03d}.{field}", bytes(i + 1)) for i in range(9) for field in ("cls", "_B_1.Txt")])

    keys, spans = regular_spans(data, 9)

    assert keys == [f"{i:03d}" for i in range(9)]
    assert list(spans) == ["cls", "_b_1.txt"]
    begins, ends = spans["_b_1.txt"]
    assert [data[a:b] for a, b in zip(begins, ends, strict=True)] == [bytes(i + 1) for i in range(9)]


@pytest.mark.parametrize(
    "names",
    [
        [f"{i}.cls" for i in range(5, 14)],  # of different lengths
        [f"a/.{i:02d}.cls" for i in range(9)],  # hidden files in folders are left out
        [f"{i:02d}/__x__.cls" for i in range(9)],
        [f"{i:02d}.a/cls" for i in range(9)],
        [f"{i:02d}.__a.cls" for i in range(9)],
        [f"{i:02d}.a__" for i in range(9)],
        [f"/{i:02d}.cls" for i in range(9)],
        [f"{i:02d}" for i in range(9)],
        ["00.cls"] * 9,  # the same field twice in one sample
        [f"{i:02d}.{field}" for i in range(9) for field in ("cls", "CLS")],
        [f"{i:02d}{field}" for i in range(9) for field in (".cls", "b.txt")],
        [f"{'x' * 97}{i:02d}.cls" for i in range(9)],  # in the prefix, or in a PAX header
    ],
)
def test_other_names_are_left_to_the_general_way(names):
    assert regular_spans(block_of([(name, b"1") for name in names]), 9) is None


def as_block(data, samples):
    return Block(data, url="x.tar", shard=0, number=0, offset=0, samples=samples)


def layout(data, samples):
    """Return the keys and spans that the general way finds, or None if it refuses the block."""
    try:
        block = as_block(bytes(data), samples)
        return block.keys(), block.spans()
    except ShardkitError:
        return None


TEMPLATE = [(f"a{i:02d}.{field}", b"7" * size) for i in range(9) for field, size in (("cls", 1), ("txt", 511))]
HEADERS = range(0, 18 * 1024, 1024)
# Unusual values that the fields of a tar header can have.
EDITS = {
    0: b"./_aA0\0\xc3\xa9",
    3: b".\0x",
    4: b"ctx_./\0",
    7: b"_.\0x",
    124: b"01 \0\x80",
    134: b"0127",
    135: b" \01x",
}
EDITS |= {156: b"0\x005x17L", 345: b"\0a", 100: b"07", 257: b"u\0"}


@examples(30)
@given(
    edits=st.lists(
        st.tuples(st.sampled_from(HEADERS), st.sampled_from(sorted(EDITS)), st.integers(0, 9)), min_size=0, max_size=2
    ),
    scope=st.sampled_from(["header", "sample", "block"]),
)
def test_what_is_found_at_once_is_what_the_general_way_finds(edits, scope):
    data = bytearray(block_of(TEMPLATE))
    for start, position, which in edits:
        sample = start // 2048 * 2048
        for header in {"header": [start], "sample": [sample, sample + 1024], "block": HEADERS}[scope]:
            data[header + position] = EDITS[position][which % len(EDITS[position])]
            data[header + 148 : header + 156] = b" " * 8
            data[header + 148 : header + 156] = b"%06o\0 " % sum(data[header : header + 512])
    found = regular_spans(bytes(data), 9)
    expected = layout(data, 9)

    if not edits:
        assert found is not None
    if found is not None:
        keys, spans = found
        each = {field: (begins.tolist(), ends.tolist()) for field, (begins, ends) in spans.items()}
        assert (keys, each) == expected


ALIKE = [np.arange(6, dtype=np.uint8).reshape(2, 3) + i for i in range(9)]


@pytest.mark.parametrize(
    "other",
    [
        np.zeros((3, 2), np.uint8),
        np.zeros((2, 3), np.int8),
        np.zeros((2, 300), np.uint8),
        np.asfortranarray(np.zeros((2, 3), np.uint8)),
    ],
    ids=["shape", "dtype", "size", "order"],
)
@pytest.mark.parametrize("at", [0, 4, 8])
def test_arrays_that_are_not_alike_are_made_one_by_one(other, at):
    def read(arrays):
        data = block_of([(f"{i}.npy", encode("npy", array)) for i, array in enumerate(arrays)])
        return ColumnReader(EVERYTHING, Decoder()).read(as_block(data, 9))

    keys, columns = read(ALIKE)
    assert keys == [f"{i}" for i in range(9)]
    assert np.array_equal(columns["npy"].array, ALIKE)

    assert read([*ALIKE[:at], other, *ALIKE[at + 1 :]]) is None


def test_arrays_in_fortrans_order_and_empty_ones_are_made_one_by_one():
    for array in (np.asfortranarray(ALIKE[0]), np.zeros((0, 3))):
        data = block_of([(f"{i}.npy", encode("npy", array)) for i in range(9)])

        assert ColumnReader(EVERYTHING, Decoder()).read(as_block(data, 9)) is None


@pytest.mark.parametrize("at", [0, 4, 8])
@pytest.mark.parametrize("extra", [-1, 1])
def test_files_that_are_shorter_or_longer_than_their_array_are_left_to_the_codec(at, extra):
    files = [encode("npy", array) for array in ALIKE]
    files[at] = files[at][:extra] if extra < 0 else files[at] + bytes(extra)
    data = block_of([(f"{i}.npy", file) for i, file in enumerate(files)])

    assert ColumnReader(EVERYTHING, Decoder()).read(as_block(data, 9)) is None


def test_arrays_at_changing_distances_are_read_right():
    members = [
        (f"{i}.{f}", d) for i in range(9) for f, d in (("npy", encode("npy", ALIKE[i])), ("bin", bytes(200 * i)))
    ]

    found = ColumnReader(EVERYTHING, Decoder()).read(as_block(block_of(members), 9))

    assert found is None or np.array_equal(found[1]["npy"].array, ALIKE)


def test_an_arena_takes_only_blocks_like_its_first():
    def block(field, value):
        return as_block(block_of([(f"{i}.{field}", encode(field, value)) for i in range(9)]), 9)

    arena = Arena(ColumnReader(EVERYTHING, Decoder()), Buffers(0), places=2, block_samples=9)

    assert arena.put(0, block("npy", ALIKE[0]))
    assert arena.put(1, block("npy", ALIKE[1]))
    assert not arena.put(1, block("npy", ALIKE[0].T))
    assert not arena.put(1, block("npy", ALIKE[0] * 2.5))
    assert not arena.put(1, block("a.npy", ALIKE[0]))
    assert np.array_equal(arena.batch(np.array([0, 9]))["npy"], ALIKE[:2])


@given(numbers=st.lists(st.integers(0, 10**18 - 1), min_size=1))
def test_digits_are_their_number(numbers):
    texts = [str(number).encode() for number in numbers]
    ends = np.cumsum([len(text) for text in texts])

    assert parse_digits(b"".join(texts), ends - [len(text) for text in texts], ends).tolist() == numbers


@pytest.mark.parametrize("text", [b"", b" 7", b"-7", b"7\n", b"1e3", b"1" * 19])
def test_what_is_not_plain_digits_is_left_to_the_codec(text):
    assert parse_digits(b"1" + text, np.array([0, 1]), np.array([1, 1 + len(text)])) is None


def test_a_directory_between_samples_is_left_to_the_general_way():
    header = bytearray(member_header("dir", 0))
    data = block_of([(f"{i:02d}.cls", b"7") for i in range(8)]) + bytes(header) + bytes(padding(0))

    assert regular_spans(data, 9) is None
