"""Kernels in the Triton language, one module a family, and what proves them without a GPU.

Imported only where a tensor is on a GPU: the rest of the package works without the language.
"""
