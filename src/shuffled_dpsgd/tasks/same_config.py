"""Do all ranks of a launch run the same configuration? Asked before anything is loaded."""

from __future__ import annotations

from shuffled_dpsgd.distributed import World
from shuffled_dpsgd.distributed.agreement import agree
from shuffled_dpsgd.tasks.config import RunConfig

# May differ from machine to machine. What the folders hold is compared later, when it is loaded.
_OF_A_MACHINE = ("data.path", "model.name", "training.device", "training.num_threads")


def compare_configs(world: World, config: RunConfig) -> None:
    """Refuse a launch whose ranks have different settings, naming the rank and the key.

    The seed is secret, and is compared as part of the plan.

    Raises:
        RankError: they differ.
    """
    facts: dict[str, object] = {}
    for section, value in config.without_seed().items():
        named = value if isinstance(value, dict) else {"": value}
        facts |= {f"{section}.{key}".rstrip("."): setting for key, setting in named.items()}
    compared = {key: facts[key] for key in sorted(facts.keys() - {*_OF_A_MACHINE})}
    agree(world, compared, remedy="start every rank with the same file and the same arguments")
