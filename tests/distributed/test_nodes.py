"""Two network namespaces of one machine stand for two nodes: their ranks meet over a cable."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.equality import assert_all_same
from distributed.launching import free_port

TESTS = Path(__file__).parents[1]
NODES = tuple(f"node{number}-{os.getpid()}" for number in range(2))
# The name of a network device has 15 characters at most.
DEVICES = tuple(f"cable{number}" for number in range(2))


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def nodes() -> Iterator[tuple[str, ...]]:
    """Two namespaces, 10.77.0.1 and 10.77.0.2, that see each other and nothing else."""
    if shutil.which("ip") is None:
        pytest.skip("needs iproute2")
    try:
        for node in NODES:
            ip("netns", "add", node)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"may not make network namespaces: {error.stderr.decode()}")
    try:
        cable = ("type", "veth", "peer", "name", DEVICES[1], "netns", NODES[1])
        ip("-n", NODES[0], "link", "add", DEVICES[0], *cable)
        for number, (node, device) in enumerate(zip(NODES, DEVICES, strict=True)):
            ip("-n", node, "addr", "add", f"10.77.0.{number + 1}/24", "dev", device)
            ip("-n", node, "link", "set", device, "up")
            ip("-n", node, "link", "set", "lo", "up")
        yield NODES
    finally:
        for node in NODES:
            ip("netns", "del", node)


@pytest.mark.slow
def test_two_nodes_with_a_copy_each_train_what_one_process_trains(
    nodes: tuple[str, ...], alone: dict[str, Any], tmp_path: Path
) -> None:
    port = free_port()
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    started = [
        subprocess.Popen(
            [
                *("ip", "netns", "exec", node, sys.executable, "-m", "torch.distributed.run"),
                *("--nnodes=2", "--nproc-per-node=2", f"--node-rank={number}"),
                *("--master-addr=10.77.0.1", f"--master-port={port}"),
                *(str(TESTS / "distributed" / "node.py"), str(tmp_path)),
            ],
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(paths), "GLOO_SOCKET_IFNAME": DEVICES[number]},
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, node in enumerate(nodes)
    ]
    said = [process.communicate(timeout=300)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    found = [torch.load(tmp_path / f"rank-{rank}.pt", weights_only=False) for rank in range(4)]
    names = ("bert", "bert without noise", "vit")
    assert_all_same(found, {name: alone[name] for name in names})
