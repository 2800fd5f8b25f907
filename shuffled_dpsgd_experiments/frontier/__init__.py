"""Accuracy over certified ε: DP-SGD against the paper's algorithm, on three workloads."""
