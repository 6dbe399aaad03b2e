"""A killed training process leaves nothing: no process, no memory, no file, no socket."""

import os
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

import pytest

import shardkit
from tests.support.shared import started

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
import shardkit

def same(sample):
    return sample

if __name__ == "__main__":
    dataset = shardkit.ShardDataset(sys.argv[1])
    loader = shardkit.ShardLoader(dataset, 4, transform=same, worker_type=sys.argv[2], num_workers=2)
    while True:
        for batch in loader:
            print("begun", flush=True)
"""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("leftovers") / "train"
    samples = ({"__key__": f"{i:04d}", "cls": i} for i in range(300))
    shardkit.pack(samples, folder, shard_bytes="60kB", block_bytes="9kB", progress=False)
    return folder


def files_below(folder):
    return sorted(path.relative_to(folder) for path in folder.rglob("*"))


def group_of(pid):
    """Return the processes of a process's group."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            group = status.read_text().rpartition(")")[2].split()[2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if group == str(pid):
            found.append(int(status.parent.name))
    return found


def shared_memory_of(pid):
    """Return the files of a process in /dev/shm, which have names and so may be left over."""
    used = Path(f"/proc/{pid}/maps").read_text().splitlines()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            used.append(str(link.readlink()))
    return [text for text in used if "/dev/shm/" in text]


@pytest.mark.multiprocess
@pytest.mark.parametrize("whole_group", [False, True], ids=["the process alone", "its workers too"])
@pytest.mark.parametrize("worker_type", ["thread", "process"])
def test_nothing_is_left_after_kill_9(dataset, tmp_path, worker_type, whole_group):
    script, temporary, work = tmp_path / "script.py", tmp_path / "temporary", tmp_path / "work"
    script.write_text(SCRIPT)
    temporary.mkdir()
    work.mkdir()
    before = files_below(dataset)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(temporary), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, script, dataset, worker_type]
    with started(command, env=environment, cwd=work) as process:
        assert process.stdout.readline() == b"begun\n"
        pids = group_of(process.pid)
        watched = [os.pidfd_open(pid) for pid in pids]
        assert len(pids) >= (3 if worker_type == "process" else 1)
        assert [shared_memory_of(pid) for pid in pids] == [[]] * len(pids)

        (os.killpg if whole_group else os.kill)(process.pid, signal.SIGKILL)
        process.wait()

        for descriptor in watched:  # readable as soon as its process has ended
            assert wait([descriptor], 60)
            os.close(descriptor)
        assert process.stderr.read() == b""
    assert files_below(temporary) == files_below(work) == []  # a socket or a lock would be here
    assert files_below(dataset) == before
