"""Octavo: paged, continuously batched LLM serving inside a standard Triton Inference Server."""

__version__ = "0.1.0"
