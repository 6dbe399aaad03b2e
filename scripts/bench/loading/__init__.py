"""The parts of scripts/bench/bench_loading.py: input, environments, loaders, measurement and plots."""
