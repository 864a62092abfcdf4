"""Measurements: `python -m benchmarks COMMAND --help`."""
