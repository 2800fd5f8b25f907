"""GPUs and their links, as their makers state them."""

from __future__ import annotations

from dataclasses import dataclass

GPUS_PER_NODE = 8


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Peak rates of one GPU in a usual node of eight.

    `flops` is dense bfloat16. `link` is one direction of NVLink. `network` is one direction of all
    network adapters of a node: eight of 400 Gb/s beside Hoppers, of 200 Gb/s beside A100s. The
    rings of a collective operation leave a node through all of them. Bytes per second.
    """

    name: str
    memory: float
    flops: float
    bandwidth: float
    link: float
    network: float


_HOPPER = {"flops": 989e12, "link": 450e9, "network": 8 * 50e9}
GPUS = {
    "h200": Gpu(name="NVIDIA H200", memory=141e9, bandwidth=4.8e12, **_HOPPER),
    "h100": Gpu(name="NVIDIA H100 SXM", memory=80e9, bandwidth=3.35e12, **_HOPPER),
    "a100": Gpu(
        name="NVIDIA A100 80GB SXM", memory=80e9, flops=312e12, bandwidth=2.04e12, link=300e9,
        network=8 * 25e9,
    ),
    # A desktop's: linked by PCIe, with one adapter of 25 Gb/s.
    "rtx4090": Gpu(
        name="NVIDIA RTX 4090", memory=24 * 2**30, flops=165e12, bandwidth=1.01e12, link=32e9,
        network=3e9,
    ),
}  # fmt: skip
