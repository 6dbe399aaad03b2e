"""Other programs read shardkit's shards, compression by compression, and shardkit reads theirs.

Each reader has a row in the README's table. Each cell of the table is tested here, also each "no", with its error.
"""

import importlib
import io
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import webdataset as wds
import wids

from shardkit.codecs.registry import encode
from shardkit.loading.stream import ShardStream
from shardkit.packing.indexing import index_shards
from shardkit.packing.job import pack
from shardkit.reading.forward import find_shards, read_shard
from shardkit.sample import KEY, fields_of

pytestmark = [
    # A stream warns that shards have no index.
    pytest.mark.filterwarnings("ignore::shardkit.loading.stream.StreamWarning"),
    # webdataset, wids and HF datasets leave shards open.
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
]

README = Path(__file__).parents[2] / "README.md"
COMPRESSIONS = ("none", "zst", "gz")
NEW_PYTHON = sys.version_info >= (3, 14)  # its tarfile supports zst

# The README's table: the readers and the compressions that each one reads.
READS = {
    "shardkit": ("yes", "yes", "yes"),
    "webdataset": ("yes", "no", "yes"),
    "HF datasets": ("yes", "no", "yes"),
    "wids": ("yes", "no", "no"),
    "GNU tar": ("yes", "yes", "yes"),
    "Python's tarfile": ("yes", "Python 3.14", "yes"),
}
# The error of each "no". From Python 3.14 on, streams that Python's tarfile reads end after the first zst frame.
REFUSALS = {
    ("webdataset", "zst"): ((tarfile.ReadError, EOFError), "invalid header|end of"),
    ("HF datasets", "zst"): ((tarfile.ReadError, EOFError), "invalid header|end of"),
    ("wids", "zst"): (UnicodeDecodeError, "utf-8"),
    ("wids", "gz"): (UnicodeDecodeError, "utf-8"),
    ("Python's tarfile", "zst"): (tarfile.ReadError, "could not be opened"),
}


def samples():
    """Return samples by key; the noise does not shrink, so that a shard has several blocks and is not tiny."""
    rng = np.random.default_rng(0)
    return {
        f"{'abc'[i % 3]}/{i:04d}": {
            "txt": f"text {i}, ünïcode",
            "cls": i % 3,
            "json": {"number": i},
            "noise": rng.bytes(3000),
            "png": rng.integers(0, 256, (5, 4, 3), dtype=np.uint8),
        }
        for i in range(60)
    }


SAMPLES = samples()
BYTES = {key: {field: encode(field, value) for field, value in fields.items()} for key, fields in SAMPLES.items()}


def pack_samples(folder, compression):
    source = [{KEY: key, **fields} for key, fields in SAMPLES.items()]
    pack(source, str(folder), shard_bytes="120KB", block_bytes="20KB", compression=compression, progress=False)
    return folder


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """The same samples, packed with each compression."""
    folder = tmp_path_factory.mktemp("packed")
    return {compression: pack_samples(folder / compression, compression) for compression in COMPRESSIONS}


def shards_of(folder):
    shards = sorted(str(path) for path in Path(folder).glob("*.tar*"))
    assert len(shards) >= 3
    return shards


def from_files(files):
    """Return samples by key from (name, bytes) of files."""
    found = {}
    for name, data in files:
        key, _, field = name.partition(".")
        found.setdefault(key, {})[field] = data
    return found


def by_key(found):
    return {sample[KEY]: {field: sample[field] for field in fields_of(sample)} for sample in found}


# --- readers: a packed dataset's folder -> the bytes of its samples


def read_by_shardkit(folder, _):
    return by_key(ShardStream(folder, decode=False))


def read_by_webdataset(folder, _):
    dataset = wds.WebDataset(shards_of(folder), shardshuffle=False)
    return by_key({k: v for k, v in sample.items() if k != "__local_path__"} for sample in dataset)


def read_by_hf_datasets(folder, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(tmp_path / "home"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        datasets = importlib.import_module("datasets")
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        patch.setattr(datasets.config, "HF_MODULES_CACHE", str(tmp_path / "modules"))
        rows = datasets.load_dataset(
            "webdataset",
            data_files=shards_of(folder),
            split="train",
            streaming=True,
            cache_dir=str(tmp_path / "cache"),
        )
        found = by_key(list(rows))
    # This reader decodes: the pictures are compared as pixels, and the bytes are the pixels encoded again.
    for fields in found.values():
        fields.update(png=np.asarray(fields["png"]))
        fields.update({field: encode(field, value) for field, value in fields.items() if field != "noise"})
    return found


def read_by_wids(folder, tmp_path):
    dataset = wids.ShardListDataset(
        str(folder / "manifest.json"), cache_dir=str(tmp_path / "wids"), keep=True, transformations=[]
    )
    found = [dataset[i] for i in range(len(dataset))]
    dataset.close()
    names = {"__key__", "__dataset__", "__index__", "__shard__", "__shardindex__"}
    return {s[KEY]: {k.removeprefix("."): v.read() for k, v in s.items() if k not in names} for s in found}


def read_by_gnu_tar(folder, tmp_path):
    option = {"none": [], "zst": ["--zstd"], "gz": ["--gzip"]}[folder.name]
    listed = []
    for shard in shards_of(folder):
        by_name = subprocess.run(["tar", *option, "-tf", shard], capture_output=True, text=True, check=True)
        by_content = subprocess.run(["tar", "-tf", shard], capture_output=True, text=True, check=True)
        assert by_name.stdout == by_content.stdout
        assert by_name.stderr == by_content.stderr == ""
        listed += by_name.stdout.splitlines()
        subprocess.run(["tar", *option, "-xf", shard, "-C", tmp_path], capture_output=True, check=True)
    unpacked = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert sorted(listed) == [path.relative_to(tmp_path).as_posix() for path in unpacked]
    return from_files((path.relative_to(tmp_path).as_posix(), path.read_bytes()) for path in unpacked)


def read_by_tarfile(folder, _):
    files = []
    for shard in shards_of(folder):
        with tarfile.open(shard) as tar:
            files += [(member.name, tar.extractfile(member).read()) for member in tar]
    return from_files(files)


READERS = {
    "shardkit": read_by_shardkit,
    "webdataset": read_by_webdataset,
    "HF datasets": read_by_hf_datasets,
    "wids": read_by_wids,
    "GNU tar": read_by_gnu_tar,
    "Python's tarfile": read_by_tarfile,
}


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("reader", READERS)
def test_others_read_what_shardkit_packs_as_the_table_says(packed, tmp_path, reader, compression):
    says = READS[reader][COMPRESSIONS.index(compression)]
    read = READERS[reader]
    if says == "yes" or (says == "Python 3.14" and NEW_PYTHON):
        assert read(packed[compression], tmp_path) == BYTES
    else:
        error, match = REFUSALS[reader, compression]
        with pytest.raises(error, match=match):
            read(packed[compression], tmp_path)


def test_the_readme_has_this_table():
    answers = {cell for cells in READS.values() for cell in cells}
    section = README.read_text().partition("\n## Who reads what\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines()]
    table = {name: tuple(cells) for name, *cells in filter(None, rows) if cells and answers.issuperset(cells)}

    assert table == READS


@pytest.mark.parametrize(("compression", "program"), [("zst", "zstd"), ("gz", "gzip")])
def test_the_programs_of_each_compression_find_its_shards_whole(packed, compression, program):
    for shard in shards_of(packed[compression]):
        subprocess.run([program, "--test", shard], capture_output=True, check=True)


# --- writers: the bytes of samples -> shards in a folder


def write_by_webdataset(folder, *, compression="", **options):
    with wds.ShardWriter(f"{folder}/a-%04d.tar{compression}", maxcount=25, verbose=0, **options) as writer:
        for key, fields in BYTES.items():
            writer.write({KEY: key, **fields, "__note__": "kept"})


def write_by_tarfile(folder, *, form, compression=""):
    with tarfile.open(f"{folder}/a.tar.{compression}".rstrip("."), f"w:{compression}", format=form) as tar:
        for key, fields in BYTES.items():
            for field, data in fields.items():
                member = tarfile.TarInfo(f"{key}.{field}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def write_by_gnu_tar(folder, *options):
    for key, fields in BYTES.items():
        for field, data in fields.items():
            path = folder / "files" / f"{key}.{field}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    subprocess.run(["tar", "--sort=name", "-C", folder / "files", "-cf", folder / "a.tar", *options], check=True)


WRITERS = {
    **{
        f"webdataset{compression}": (write_by_webdataset, {"compression": compression})
        for compression in ("", ".gz", ".bz2", ".xz")
    },
    "webdataset, integer times": (write_by_webdataset, {"mtime": 0}),
    "webdataset, keep_meta": (write_by_webdataset, {"keep_meta": True}),
    **{
        f"Python's tarfile, {name} {compression}": (write_by_tarfile, {"form": form, "compression": compression})
        for name, form in (("ustar", tarfile.USTAR_FORMAT), ("GNU", tarfile.GNU_FORMAT), ("PAX", tarfile.PAX_FORMAT))
        for compression in ("", "gz", "bz2", "xz")
    },
}
GNU_TAR_OPTIONS = [
    *(("--format=v7",), ("--format=oldgnu",), ("--format=gnu",), ("--format=ustar",), ("--format=posix",)),
    *(("--gzip",), ("--bzip2",), ("--xz",), ("--zstd",), ("--format=posix", "--zstd")),
    *(("--blocking-factor=1",), ("--label=photos",), ("--owner=me:5000000", "--numeric-owner")),
]


def check_reading(folder, expected):
    """Check that shards are read without an index, and after they became a dataset, with every byte compared."""
    assert by_key(ShardStream(folder, decode=False)) == expected
    manifest = index_shards(str(folder))
    indexed = [sample for location in find_shards(str(folder)) for sample in read_shard(location)]
    assert manifest.num_samples == len(expected)
    assert by_key(indexed) == expected


@pytest.mark.parametrize("writer", WRITERS)
def test_shardkit_reads_what_programs_in_python_write(tmp_path, writer):
    write, options = WRITERS[writer]
    write(tmp_path, **options)
    note = {"__note__": b"kept"} if options.get("keep_meta") else {}

    check_reading(tmp_path, {key: fields | note for key, fields in BYTES.items()})


@pytest.mark.parametrize("options", GNU_TAR_OPTIONS, ids=" ".join)
def test_shardkit_reads_what_gnu_tar_writes(tmp_path, options):
    write_by_gnu_tar(tmp_path, *options, "a", "b", "c")

    check_reading(tmp_path, BYTES)


def test_the_prefix_of_gnu_tar_is_part_of_the_keys(tmp_path):
    write_by_gnu_tar(tmp_path, ".")

    check_reading(tmp_path, {f"./{key}": fields for key, fields in BYTES.items()})


@pytest.mark.parametrize("form", ["gnu", "posix"])
def test_long_names_of_gnu_tar_are_read(tmp_path, form):
    folder = "/".join(["ä" * 60] * 3)
    (tmp_path / "files" / folder).mkdir(parents=True)
    (tmp_path / "files" / folder / "0.txt").write_bytes(b"long")
    command = ["tar", f"--format={form}", "-C", tmp_path / "files", "-cf", tmp_path / "a.tar", folder]
    subprocess.run(command, check=True)

    check_reading(tmp_path, {f"{folder}/0": {"txt": b"long"}})
