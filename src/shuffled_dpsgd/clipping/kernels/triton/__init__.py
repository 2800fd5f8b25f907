"""Kernels in plain Triton, for any GPU that Triton serves."""
