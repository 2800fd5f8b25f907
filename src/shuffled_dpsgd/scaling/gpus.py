"""GPUs and their links, as their makers state them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

GPUS_PER_NODE = 8


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Peak rates of one GPU in a usual node of eight.

    `flops` is dense bfloat16. `link` is one direction of NVLink, `network` one direction of a
    network adapter per GPU (400 Gb/s beside a Hopper, 200 Gb/s beside an A100). Bytes per second.
    """

    name: str
    memory: float
    flops: float
    bandwidth: float
    link: float
    network: float


GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        "h200": Gpu(
            name="NVIDIA H200",
            memory=141e9,
            flops=989e12,
            bandwidth=4.8e12,
            link=450e9,
            network=50e9,
        ),
        "h100": Gpu(
            name="NVIDIA H100 SXM",
            memory=80e9,
            flops=989e12,
            bandwidth=3.35e12,
            link=450e9,
            network=50e9,
        ),
        "a100": Gpu(
            name="NVIDIA A100 80GB SXM",
            memory=80e9,
            flops=312e12,
            bandwidth=2.04e12,
            link=300e9,
            network=25e9,
        ),
        # A desktop's: linked by PCIe, and no node of eight.
        "rtx4090": Gpu(
            name="NVIDIA RTX 4090",
            memory=24 * 2**30,
            flops=165e12,
            bandwidth=1.01e12,
            link=32e9,
            network=3e9,
        ),
    }
)
