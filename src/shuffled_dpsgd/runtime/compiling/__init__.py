"""Compiles this package's Triton kernels in processes of their own.

Threads that compile share one interpreter, with each other and with the main thread, and Triton's
compiler is largely Python. So `workers` starts processes early, `triton_hook` hands them whatever
Triton is about to compile, and Triton then finds the binary in its cache on disk. The key under
which it looks is its own, computed in this process from this process's sources and settings: a
worker that does something else is of no use, but does no harm.
"""
