"""What a step sends: how many messages, and how many bytes."""

from __future__ import annotations

from collections import Counter

import pytest

from distributed.launching import Launcher

SMALL = 1024
BIG = {"_reduce_scatter_base_", "_allgather_base_", "alltoall_base_"}


@pytest.mark.parametrize(
    ("ranks", "how", "shuffle"),
    [
        (2, False, "every-step"),
        (2, True, "every-step"),
        pytest.param(2, "state", "off", marks=pytest.mark.slow),
        pytest.param(2, True, "off", marks=pytest.mark.slow),
        pytest.param(4, "2x2", "off", marks=pytest.mark.slow),
    ],
)
def test_a_step_sends_tensors_together_and_pickles_nothing(
    launcher: Launcher, ranks: int, how: bool | str, shuffle: str
) -> None:
    """FSDP gathers weights in forward and backward; everything else here is ours."""
    for found in launcher.run(
        "distributed.shards", "collectives_of_a_step", ranks=ranks, how=how, shuffle=shuffle
    ):
        seen = [(name.removeprefix("c10d::"), size) for name, size in found["seen"]]
        large = Counter(name for name, _ in seen if name in BIG)
        reduced = [size for name, size in seen if name == "_reduce_scatter_base_"]
        moved = [size for name, size in seen if name == "alltoall_base_"]
        if not how:
            assert large == {"_reduce_scatter_base_": 1, "_allgather_base_": 1}
            assert found["weights"] <= reduced[0] < found["weights"] + 8 * ranks
        else:
            copied = how == "2x2"
            # Sums of small layers travel together, as large as those of the largest at most.
            sent = large["_reduce_scatter_base_"] - copied
            assert sum(found["layers"]) / max(found["layers"]) <= sent <= len(found["layers"])
            assert max(reduced) < 1.1 * max(*found["layers"], copied * found["rows"])
            assert sum(reduced) < 1.3 * (found["weights"] + copied * found["rows"])
            # Two blocks, each gathered for the forward and again for the backward, and the rest;
            # or all weights once.
            assert large["_allgather_base_"] == (1 if how == "state" else 5 + copied)
            assert found["state"] < 2.1 * found["rows"] < 1.2 * found["weights"]
            # Weights and two moments, in one message.
            assert len(moved) == (shuffle == "every-step")
            assert all(found["rows"] < size <= 3 * found["rows"] for size in moved)
        # Buffers of rank 0 are sent in one message, and so are weights that several ranks have.
        assert len(found["sent first"]) == (2 if how in (False, "2x2") else 1)
        small = [size for name, size in seen if name not in BIG]
        assert len(small) <= 9
        assert max(small) <= SMALL
