"""The parts of scripts/bench/bench_remote.py: servers, ways of reading, measurements and tables."""
