"""The parts of scripts/bench_loading.py: input, environments, loaders, measuring, plots."""
