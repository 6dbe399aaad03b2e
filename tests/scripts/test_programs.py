"""The small benchmarks run to their end, so that they do not rot. No test here is about speed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = {
    "bench_compression.py --megabytes 1 --rounds 1": "zst",
    "bench_manifest.py 20": "20 shards, 80,057 samples",
    "bench_order.py": "a position",
    "bench_packing.py --rounds 1 --files 12": "GNU tar",
    "bench_packing.py --memory --bytes 2000000": "MB resident",
    "bench_streaming.py --rounds 1 --megabytes 1": "webdataset",
}


@pytest.mark.parametrize("command", SMALL)
def test_a_benchmark_runs_to_its_end(command, tmp_path):
    program, *arguments = command.split()
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "bench" / program, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert SMALL[command] in done.stdout
