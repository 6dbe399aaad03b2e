"""The parts of scripts/bench/bench_loading.py: input, environments, loaders, measuring, plots."""
