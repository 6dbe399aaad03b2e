"""Whichever system call fails: an error of shardkit that names a file, or the same result as without the failure."""

import errno
import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import settings

import shardkit
from tests.promises.test_refusals import READERS, indexed, limited, repacked, reported
from tests.support.folders import contents_of

SAMPLES = [{"__key__": f"k/{i:04d}", "txt": f"sample {i} " * 20, "cls": i % 5} for i in range(40)]
PACK = {"shard_samples": 10, "block_bytes": "2kB", "compression": "none", "num_workers": 1, "progress": False}
CALLS = [
    "open",
    "pread",
    "preadv",
    "stat",
    "lstat",
    "fstat",
    "listdir",
    "scandir",
    "mkdir",
    "link",
    "replace",
    "rename",
]
CALLS += ["unlink", "fsync", "read", "pwrite", "ftruncate", "utime"]
ERRORS = [errno.EIO, errno.EACCES, errno.ENOSPC, errno.EMFILE, errno.ENOENT, errno.ESTALE]
EXAMPLES = settings().max_examples // 2  # the most calls that fail for each reader and writer


@contextmanager
def failing(folder, number, code, calls=CALLS):
    """Let the n-th call that is about a path in a folder fail; provide the names of all such calls."""
    called = []

    def is_there(what):
        try:
            path = str(Path(f"/proc/self/fd/{what}").readlink()) if isinstance(what, int) else os.fspath(what)
        except (OSError, TypeError):
            return False
        return isinstance(path, str) and path.startswith(str(folder))

    def wrapped(name, real):
        def call(*args, **options):
            if args and is_there(args[0]):
                called.append(name)
                if len(called) - 1 == number:
                    raise OSError(code, os.strerror(code), *(args[:1] if isinstance(args[0], str) else ()))
            return real(*args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in calls:
            patch.setattr(os, name, wrapped(name, getattr(os, name)))
        yield called


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "train"
    shardkit.pack(SAMPLES, folder, columns={"label": "cls"}, shuffle=False, **PACK)
    return folder


def failures(folder, act, expected, *, look=lambda found: found, clean=lambda: None, calls=CALLS):
    """Return the faults found when calls failed, one after the other, and the number of refusals."""
    with failing(folder, -1, 0, calls) as called:
        act()
    clean()
    wrong, refused = [], 0
    for turn, number in enumerate(range(0, len(called), max(1, len(called) // EXAMPLES))):
        code = ERRORS[turn % len(ERRORS)]
        try:
            with failing(folder, number, code, calls) as before, limited(folder):
                found = act()
        except shardkit.ShardkitError as error:
            refused += 1
            if str(folder) not in str(error) or "; " not in str(error):
                wrong.append((before[number], errno.errorcode[code], str(error)))
        except BaseException as error:  # noqa: BLE001 - it is what is looked for
            wrong.append((before[number], errno.errorcode[code], repr(error)))
        else:
            if look(found) != expected:
                wrong.append((before[number], errno.errorcode[code], "something else came"))
        clean()
    return wrong, refused


@pytest.mark.parametrize("read", [read for read in READERS if read not in (repacked, indexed, reported)])
def test_a_call_that_fails_while_a_dataset_is_read(read, whole):
    wrong, refused = failures(whole, lambda: read(whole), read(whole))

    assert wrong == []
    assert refused


def verified(folder):
    """Return whether verification finds no problem; problems may only be in these files."""
    report = shardkit.verify(folder)
    for problem in [*report.problems, *(problem for shard in report.damaged for problem in shard.problems)]:
        assert str(folder) in problem.url
    return report.ok


def test_a_call_that_fails_while_a_dataset_is_verified_is_reported(whole):
    reports = []

    def verify():
        reports.append(verified(whole))
        return reports[-1]

    wrong, _ = failures(whole, verify, expected=False)

    assert [call for call, _, message in wrong if message != "something else came"] == []
    assert reports[0]
    assert reports.count(False) > len(reports) / 2


def written(out):
    """Return the content of a folder, without unfinished files."""
    return {name: data for name, data in contents_of(out).items() if ".shardkit-" not in name}


def by_pack(out):
    shardkit.pack(SAMPLES, out, **PACK)


def by_files(out):
    shardkit.pack(shardkit.FileFolder(out.parent.with_name("files")), out, transform=unchanged, **PACK)


def unchanged(sample):
    return sample


def by_splits(out):
    shardkit.pack(SAMPLES, out, splits={"train": 0.5, "val": 0.5}, **PACK)


def by_writer(out):
    with shardkit.ShardWriter(out, shard_samples=10) as writer:
        for sample in SAMPLES:
            writer.write(sample)


@pytest.mark.parametrize("write", [by_pack, by_files, by_splits, by_writer])
def test_a_call_that_fails_while_a_dataset_is_written(write, tmp_path):
    folder = tmp_path / "folder"
    out = folder / "out"
    for path in (folder, tmp_path / "files"):
        path.mkdir()
    for sample in SAMPLES:
        (tmp_path / "files" / f"{sample['__key__'][2:]}.txt").write_text(sample["txt"])

    write(out)
    expected = written(out)
    shutil.rmtree(out)

    def clean():
        if (out / "manifest.json").exists() and not (out / "unfinished.json").exists():
            assert written(out) == expected
        shutil.rmtree(out, ignore_errors=True)

    wrong, refused = failures(
        folder,
        lambda: write(out),
        expected,
        look=lambda _: written(out),
        clean=clean,
        calls=[call for call in CALLS if call != "fstat"],  # shutil.rmtree relies on fstat
    )

    assert wrong == []
    assert refused


def test_a_call_that_fails_while_a_cache_is_filled_costs_nothing_but_the_cache(whole, tmp_path):
    def act():
        dataset = shardkit.ShardDataset(whole, cache=tmp_path / "cache", cache_bytes="1MB")
        return [sample["txt"] for sample in dataset]

    (tmp_path / "cache").mkdir()
    wrong, _ = failures(
        tmp_path / "cache", act, [sample["txt"] for sample in SAMPLES], clean=lambda: shutil.rmtree(tmp_path / "cache")
    )

    assert wrong == []
