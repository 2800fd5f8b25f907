"""The floor under permutation, clipping and training: what all three ask of PyTorch and the machine."""
