"""The parts of scripts/bench_remote.py: servers, ways of reading, what is measured, tables."""
