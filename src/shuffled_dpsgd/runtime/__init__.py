"""The floor under permutation, clipping and training: what they ask of PyTorch and the machine."""
