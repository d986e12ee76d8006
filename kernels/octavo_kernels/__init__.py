"""Tensor operations of Octavo: for each a plain reference and a fast path for its device."""
