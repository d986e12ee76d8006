"""Octavo beside the other engines that serve on a CPU; run `python -m benchmarks.peers`."""
