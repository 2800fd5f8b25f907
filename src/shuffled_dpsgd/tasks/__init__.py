"""Tasks to train on: the digits default, and image, text and language-model tasks from TOML.

`load_config` reads a file, `prepare` loads its data and model and calibrates the noise, `execute`
trains and writes everything down. `build_task` and `start_private` are the parts for a loop of
one's own.
"""

from __future__ import annotations

from shuffled_dpsgd.tasks.config import RunConfig
from shuffled_dpsgd.tasks.config_files import load_config, parse_config
from shuffled_dpsgd.tasks.digits import build_model as digits_model
from shuffled_dpsgd.tasks.digits import load_digits
from shuffled_dpsgd.tasks.generation import (
    evaluate_generation,
    generate_split,
    score_generated,
)
from shuffled_dpsgd.tasks.run import PreparedRun, RunResult, execute, prepare
from shuffled_dpsgd.tasks.run_folder import finished_summary, is_run_folder, load_run
from shuffled_dpsgd.tasks.start import start_private
from shuffled_dpsgd.tasks.task import Evaluation, Task, build_task

__all__ = [
    "Evaluation",
    "PreparedRun",
    "RunConfig",
    "RunResult",
    "Task",
    "build_task",
    "digits_model",
    "evaluate_generation",
    "execute",
    "finished_summary",
    "generate_split",
    "is_run_folder",
    "load_config",
    "load_digits",
    "load_run",
    "parse_config",
    "prepare",
    "score_generated",
    "start_private",
]
