"""A small file that claims to be large takes little memory, whatever reads it, and is an error of shardkit.

Every reader and command reads every case in a process of its own, whose peak resident size is compared with its size
after the imports.
"""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import shardkit
from shardkit.format import parquet
from shardkit.format.tar import END_OF_ARCHIVE, member_header, padding
from tests.support.forge import edit_manifest, manifest_of, rewrite_index

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
GOLDEN = ROOT / "tests" / "data" / "format-1" / "photos" / "train"
MOST = 500 << 20

READ = """
import contextlib, io, json, sys
import shardkit, torch, pyarrow.parquet, pyarrow.acero, pyarrow.compute, PIL.Image, typer
from shardkit.cli.app import main
from shardkit.errors import ShardkitError

folders = sys.argv[1:]


def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))


def command(*words):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as told:
        sys.argv = ["shardkit", *words]
        try:
            main()
        except SystemExit as exit:
            if exit.code not in (0, None):
                raise ShardkitError(told.getvalue())


def verify():
    report = shardkit.verify(folder)
    if not report.ok:
        raise ShardkitError(report.to_json())


options = {"decode": False}
cls = {"fields": ["cls"], **options}
READERS = {
    "stream": lambda: sum(1 for _ in shardkit.ShardStream(folder, **options)),
    "dataset": lambda: [shardkit.ShardDataset(folder, **options)[i] for i in range(3)],
    "columns": lambda: shardkit.ShardDataset(folder, columns=["x"], **options)[0],
    "where": lambda: len(shardkit.ShardDataset(folder, where=[("x", "==", "y")])),
    "where key": lambda: len(shardkit.ShardDataset(folder, where=[("__key__", "==", "y")])),
    "by key": lambda: shardkit.ShardDataset(folder, **options).by_key("y"),
    "loader": lambda: [0 for _ in shardkit.ShardLoader(shardkit.ShardDataset(folder, **cls), 4, memory="64MB")],
    "verify": verify,
    "source": lambda: sum(1 for _ in shardkit.ShardSource(folder)),
    "pack": lambda: shardkit.pack(shardkit.ShardSource(folder), out, progress=False),
    "report": lambda: shardkit.shuffle_report(folder, 4),
    "ls": lambda: command("ls", folder),
    "stats": lambda: command("stats", folder),
    "cat": lambda: command("cat", folder, "y", "jpg"),
    "index": lambda: shardkit.index_shards(folder),
}
ends = {}
for folder in folders:
    out = folder + "-out"
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak is what is resident now
    before = peak()
    for name, read in READERS.items():
        try:
            read()
            end = ""
        except (ShardkitError, KeyError) as error:
            end = f"{type(error).__name__}: {error}"
        ends[f"{folder.rpartition('/')[2]}, {name}"] = end, peak() - before
print(json.dumps(ends))
"""


def old_index(folder):
    """Return the path of the first index of a dataset of format 1, and its table with the facts in its footer."""
    path = folder / "train-000000.parquet"
    path.chmod(0o644)
    return path, pq.read_table(path)


def with_column(folder, column, **options):
    path, table = old_index(folder)
    metadata, table = table.schema.metadata, table.append_column("x", column(len(table))).replace_schema_metadata()
    with pq.ParquetWriter(path, table.schema, compression="zstd", **options) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(metadata)
    edit_manifest(folder, lambda data: data["columns"].update(x="string"))


def repeated_value(folder, **options):
    """One value of 30 MB in a dictionary, which every sample refers to."""
    large = pa.array(["\0" * 30_000_000])
    with_column(folder, lambda count: pa.DictionaryArray.from_arrays([0] * count, large), **options)


def repeated_text(folder):
    """The same in a column of text: the schema does not say that it was a dictionary."""
    repeated_value(folder, store_schema=False)


def zeros(folder):
    """Five values of 30 MB of zeros, which compress to nothing."""
    with_column(folder, lambda count: pa.array(["\0" * 30_000_000 if i < 5 else "" for i in range(count)]))


def many_columns(folder):
    path, table = old_index(folder)
    one = pa.nulls(len(table), pa.int64())
    wide = pa.table(
        {**{name: table.column(name) for name in table.column_names}, **{f"c{i}": one for i in range(20_000)}}
    )
    pq.write_table(pa.table(wide).replace_schema_metadata(table.schema.metadata), path)


def long_footer(folder):
    path, _ = old_index(folder)
    data = path.read_bytes()
    path.write_bytes(data[:-8] + (0xFFFFFFF0).to_bytes(4, "little") + data[-4:])


def with_facts(folder, **changes):
    path, table = old_index(folder)
    facts = json.loads(table.schema.metadata[b"shardkit"]) | changes
    pq.write_table(table.replace_schema_metadata({"shardkit": json.dumps(facts).encode()}), path)


def many_facts(folder):
    with_facts(folder, blocks=[[]] * 2_500_000)


def large_footer(folder):
    with_facts(folder, blocks=[[]] * 5_000_000)


def many_samples(folder, **claims):
    """More samples than any memory holds, in a manifest that is consistent."""
    manifest = manifest_of(folder)
    first = replace(manifest.shards[0], samples=1 << 50, blocks=(1 << 50) // manifest.block_samples)
    manifest = replace(manifest, shards=(first, *manifest.shards[1:]))

    def lie(data):
        data["shardlist"][0] |= {"nsamples": first.samples, "blocks": first.blocks, **claims}
        data |= {"samples": manifest.num_samples, "digest": manifest.digest}

    edit_manifest(folder, lie)


def large_shard(folder):
    """The same, in a shard of a matching size."""
    many_samples(folder, tarsize=1 << 60)


def many_rows(folder):
    """The same, and the index says so too."""
    with_facts(folder, samples=1 << 50)
    many_samples(folder)


def many_values(folder):
    (folder / "manifest.json").write_text('{"wids_version": 1, "x": [' + "[]," * 20_000_000 + "[]]}")


def long_manifest(folder):
    with (folder / "manifest.json").open("wb") as file:
        file.truncate(20 << 30)


# The reason for which readers that reach the fault refuse each case.
LARGE_COLUMN = r"column 'x' takes 1[58]\d MB and more for a group of rows"
OLD = {
    repeated_value: "column 'x' has values in a dictionary",
    repeated_text: LARGE_COLUMN,
    zeros: LARGE_COLUMN,
    many_columns: "it has 20,017 columns, expected at most 10,000",
    long_footer: "its footer has 4,294,967,288 bytes, expected at most 32,000,000",
    large_footer: r"its footer has 4\d,\d{3},\d{3} bytes, expected at most 32,000,000",
    many_facts: r"says 1\d,\d{3},\d{3} bytes about its shard, expected at most 8,000,000",
    many_samples: "is the index of another shard",
    large_shard: "is the index of another shard",
    many_rows: r"it has \d rows in 1 groups, expected 1,125,899,906,842,624",
    many_values: "it has 40,000,004 values, far more than its shards need",
    long_manifest: "has 21.5 GB, expected at most 256 MB",
}


def large_column(folder):
    """A column of 150 MB with all checksums right."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet, "MAX_ROWS_BYTES", 1 << 40)
        patch.setattr(parquet, "_GROUP_BYTES", 1 << 40)
        texts = ["\0" * 30_000_000 if i < 5 else "" for i in range(21)]
        rewrite_index(folder, rows=lambda table: table.append_column("x", pa.array(texts[: len(table)])))
    edit_manifest(folder, lambda data: data["columns"].update(x="string"))


def many_blocks(folder):
    def lie(data):
        data["shardlist"][0]["blocks"] = 1 << 40

    edit_manifest(folder, lie)


def long_side_file(folder):
    with next(folder.glob("__index__/blocks.*")).open("r+b") as file:
        file.truncate(1 << 30)

    def lie(data):
        data["block_file"]["size"] = 1 << 30

    edit_manifest(folder, lie)


NEW = {
    large_column: LARGE_COLUMN,
    many_blocks: "says that train-000000.tar has 1,099,511,627,776 blocks",
    many_samples: "is the index of another shard",
    large_shard: "is the index of another shard",
    long_side_file: r"blocks\.\w+\.npy: is damaged \(its part of shard",
}


def check(folders, refusals):
    command = [sys.executable, "-W", "ignore", "-c", READ, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=170)
    assert done.returncode == 0, done.stderr
    ends = json.loads(done.stdout)

    assert {name: most >> 20 for name, (_, most) in ends.items() if most > MOST} == {}
    for folder, refusal in zip(folders, refusals, strict=True):
        found = [end for name, (end, _) in ends.items() if name.startswith(f"{folder.name}, ")]
        assert any(re.search(refusal, end) for end in found), (folder.name, found)


def test_claims_of_format_1_take_little_memory(tmp_path):
    folders = [Path(shutil.copytree(GOLDEN, tmp_path / lie.__name__)) for lie in OLD]
    for lie, folder in zip(OLD, folders, strict=True):
        (folder / "manifest.json").chmod(0o644)
        lie(folder)

    check(folders, OLD.values())


def test_claims_of_format_2_take_little_memory(tmp_path):
    folders = [Path(shutil.copytree(GOLDEN, tmp_path / lie.__name__)) for lie in NEW]
    for lie, folder in zip(NEW, folders, strict=True):
        for path in folder.iterdir():
            path.chmod(0o644)
        shardkit.index_shards(folder)
        lie(folder)

    check(folders, NEW.values())


def test_a_large_member_is_indexed_and_verified_in_little_memory(tmp_path):
    size = (1 << 28) + 100
    with (tmp_path / "a.tar").open("wb") as file:
        file.write(member_header("a.bin", size))
        file.seek(size, 1)
        file.write(bytes(padding(size)) + END_OF_ARCHIVE)
    code = "import shardkit, sys, pyarrow.parquet, resource\n"
    code += "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10\nbefore = peak()\n"
    code += "print(shardkit.index_shards(sys.argv[1]).num_samples, shardkit.verify(sys.argv[1]).ok, peak() - before)"
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=170)
    samples, is_ok, most = done.stdout.split()

    assert (samples, is_ok) == ("1", "True")
    assert int(most) < 150 << 20
