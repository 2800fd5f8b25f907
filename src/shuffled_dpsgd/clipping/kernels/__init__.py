"""The numeric primitives of per-sample clipping, each picked for the tensors it is given.

`plain` defines them all in ordinary torch operations and runs anywhere. The modules in `triton` and
`gluon` are faster on a GPU. `linear_maps` and `norm_layers` choose among them by `choices`.
"""
