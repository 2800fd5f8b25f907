"""Models that `fully_shard` has spread over ranks."""

from __future__ import annotations

from distributed.launching import Launcher

HERE = "distributed.shards"


def test_what_cannot_be_sharded_is_refused_by_name(launcher: Launcher) -> None:
    one, two = launcher.run(HERE, "refusals")
    assert one == two
    assert "got a DTensor, as fully_shard and tensor parallelism leave them" in one["sharded"]
