"""The configuration of a run: the built-in default, a file or a preset, changed by flags."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shuffled_dpsgd.errors import InvalidArgumentError, require
from shuffled_dpsgd.options.methods import OPEN

if TYPE_CHECKING:
    from shuffled_dpsgd.tasks import RunConfig

Task = Annotated[str | None, typer.Argument(help="[bold]digits[/bold]: the embedded default.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="A TOML file with the run.")]


def stated_run(
    task: str | None,
    config: Path | None,
    *,
    preset: str | None = None,
    model: str | None = None,
    data: str | None = None,
) -> dict[str, Any]:
    """The run as plain data, before flags are applied; a preset lacks ε, which a flag gives."""
    if preset is not None:
        from shuffled_dpsgd.cli.experiments import find_preset

        for name, value in (("TASK", task), ("--config", config)):
            require(value is None, name, "nothing beside --preset", str(value))
        return find_preset(preset).to_run(model=model, data=data)
    for name, value in (("--model", model), ("--data", data)):
        require(value is None, name, "--preset beside it", value)
    if config is not None:
        from shuffled_dpsgd.tasks.config_files import read_config

        require(task is None, "TASK", "nothing beside --config", task)
        return read_config(config)
    if task != "digits":
        raise InvalidArgumentError(
            "TASK",
            expected="digits, or --config FILE, or --preset NAME, or --resume DIR",
            got=task,
            remedy="other tasks need data: name it in a TOML file",
        )
    from shuffled_dpsgd.tasks import digits

    return digits.default_config().to_json()


def with_overrides(
    raw: dict[str, Any], overrides: dict[str, dict[str, Any]], *, seed: int | None, secure: bool
) -> RunConfig:
    """The configuration with the values of flags, checked like a file's."""
    from shuffled_dpsgd.tasks import parse_config

    if secure and seed is not None:
        raise InvalidArgumentError("--seed", expected="nothing beside --secure", got=seed)
    if not all(isinstance(raw.setdefault(section, {}), dict) for section in overrides):
        parse_config(raw)  # Refuses what is no table, by its name.
    privacy, given = raw["privacy"], overrides["privacy"]
    if given["method"] is not None:
        # A method given as a flag overrides what the file says under these keys.
        dropped = [*OPEN, *["batch_clip_norm"] * (given["method"] != "shuffled")]
        if given["method"] == "non-private":
            dropped += ["epsilon", "noise_multiplier", "clip_norm"]
        for name in dropped:
            privacy.pop(name, None)
    for section, values in overrides.items():
        raw[section].update({key: value for key, value in values.items() if value is not None})
    if given["epsilon"] is not None:
        privacy.pop("noise_multiplier", None)
    if overrides["training"]["epochs"] is not None:
        raw["training"].pop("num_steps", None)
    default = "paper" if privacy.get("method") == "shuffled" else "certified"
    by_paper = privacy.get("accounting", default) == "paper"
    if raw.get("task") == "digits" and by_paper and "clip_norm" in privacy:
        # c' = c, as the paper's text implies; it is printed at the start.
        privacy.setdefault("batch_clip_norm", privacy["clip_norm"])
    try:
        parsed = parse_config(raw)
    except InvalidArgumentError as error:
        if error.argument != "privacy.epsilon" or "epsilon" in privacy:
            raise
        raise InvalidArgumentError(
            "--epsilon",
            expected="a privacy budget, by this flag or as epsilon under [privacy]",
            got=None,
            remedy="for example 3; the paper's tables have 0.1, 0.5 and 1",
        ) from error
    return parsed if seed is None and not secure else replace(parsed, seed=seed)
