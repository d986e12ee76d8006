"""CPU kernels compiled by numba, imported only where it is installed and no compiler of C++ is."""
