"""The small benchmarks run to their end, so that they do not rot. No test here is about speed."""

import pytest

from tests.support.shared import ROOT, run_program

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
    output = run_program(ROOT / "scripts/bench" / program, *arguments, cwd=tmp_path, TMPDIR=str(tmp_path))

    assert SMALL[command] in output
