"""From a configuration to what the audits take: the glue between tasks and auditing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from shuffled_dpsgd.auditing.checks import CheckReport
    from shuffled_dpsgd.auditing.sensitivity import Records
    from shuffled_dpsgd.tasks import RunConfig

NUM_LABELS = 10


def chosen_config(
    path: Path | None, *, seed: int, privacy: Mapping[str, object], training: Mapping[str, object]
) -> RunConfig:
    """The file's configuration, or the digits default, with the given values that are not None.

    A given ε takes the place of the file's noise multiplier, and the other way round; so do epochs
    and number of steps.
    """
    from shuffled_dpsgd.tasks import digits, load_config, parse_config

    raw: dict[str, Any] = (digits.default_config() if path is None else load_config(path)).to_json()
    instead = (("privacy", {"epsilon", "noise_multiplier"}), ("training", {"epochs", "num_steps"}))
    for (section, either), values in zip(instead, (privacy, training), strict=True):
        given = {key: value for key, value in values.items() if value is not None}
        if given.keys() & either:
            raw[section] = {key: v for key, v in raw[section].items() if key not in either}
        raw[section] |= given
    return replace(parse_config(raw), seed=seed)


def replay_target(
    path: Path | None,
    *,
    model: str | None,
    strategies: tuple[str, ...],
    clip: str,
    clip_norm: float,
    batch_clip_norm: float | None,
    num_records: int,
    double: bool,
) -> list[CheckReport]:
    """One replay report per engine strategy, on real or synthetic records."""
    import torch

    from shuffled_dpsgd.auditing.sensitivity import check_sensitivity, quiet_run
    from shuffled_dpsgd.errors import InvalidArgumentError, require

    require(num_records >= 2, "--records", "at least 2", num_records)
    if path is not None and model is not None:
        raise InvalidArgumentError("--model", expected="nothing beside --config", got=model)
    network, records, device = (
        _task_records(path, num_records) if model is None else _random_records(model, num_records)
    )
    network.to(device, torch.float64 if double else None).eval()
    reports = []
    for strategy in strategies:
        private = quiet_run(
            network,
            clip=clip,  # type: ignore[arg-type]  # checked with all the options
            clip_norm=clip_norm,
            batch_clip_norm=batch_clip_norm,
            strategy=strategy,  # type: ignore[arg-type]  # likewise
            expected_batch_size=num_records,
        )
        reports.append(check_sensitivity(private, records))
        private.close()
    return reports


def _task_records(path: Path | None, count: int) -> tuple[nn.Module, Records, str]:
    """The configured task's model and its first records."""
    from shuffled_dpsgd.auditing.sensitivity import Records
    from shuffled_dpsgd.auditing.target import refuse_budget
    from shuffled_dpsgd.errors import require
    from shuffled_dpsgd.tasks import build_task, digits, load_config
    from shuffled_dpsgd.tasks.start import chosen_device

    config = digits.default_config() if path is None else load_config(path)
    refuse_budget(config.privacy.budget, "replayed sums")
    task = build_task(config)
    expected = f"at most {len(task.train_data)}"
    require(count <= len(task.train_data), "--records", expected, count)
    examples = [task.train_data[i] for i in range(count)]
    records = Records(examples=examples, losses=task.losses, collate=task.collate)
    return task.model, records, str(chosen_device(config.training.device))


def _random_records(name: str, count: int) -> tuple[nn.Module, Records, str]:
    """A model of that name with random weights, and random images or token sequences for it."""
    import torch

    from shuffled_dpsgd.auditing.sensitivity import Records
    from shuffled_dpsgd.errors import InvalidArgumentError
    from shuffled_dpsgd.integrations.per_sample_loss import per_sample_losses
    from shuffled_dpsgd.models import build_model, head_of

    model = build_model(name, device="cpu", settings={"num_labels": NUM_LABELS})
    architecture = type(model).__name__
    head, fills_in = head_of(architecture), architecture.endswith("ForMaskedLM")
    if head is None and not fills_in:
        raise InvalidArgumentError(
            "model", expected="a classifier or a language model", got=architecture
        )
    generator = torch.Generator().manual_seed(0)
    examples: list[tuple[torch.Tensor, torch.Tensor]] = []
    for _ in range(count):
        label = torch.randint(NUM_LABELS, (), generator=generator)
        if head == "image":
            side = model.config.image_size
            shape = (model.config.num_channels, side, side)
            examples.append((torch.randn(shape, generator=generator), label))
        else:
            tokens = torch.randint(model.config.vocab_size, (16,), generator=generator)
            examples.append((tokens, label if head == "sequence" else tokens))

    def losses(network: nn.Module, batch: Any) -> torch.Tensor:
        return per_sample_losses(network, network(batch[0]), batch[1])

    return model, Records(examples=examples, losses=losses), "cpu"
