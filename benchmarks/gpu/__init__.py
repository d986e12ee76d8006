"""What is checked and measured on a GPU: `scripts/gpu-check` and `scripts/tune-kernels`."""
