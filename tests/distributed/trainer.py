"""The Hugging Face Trainer on several ranks; run by `nursery.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from integrations.test_hf_trainer import build, records, tiny_bert, weights
from shuffled_dpsgd.distributed import current_world


def trained(directory: str, batch_size: int = 4, **changes: Any) -> dict[str, Any]:
    """Train to the end of the plan, evaluating and saving on the way."""
    settings = {
        "per_device_train_batch_size": batch_size // current_world().size,
        "optim": "sgd",
        "learning_rate": 0.1,
        "save_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "logging_strategy": "no",
    }
    trainer = build(
        Path(directory),
        model=tiny_bert(dropout=0.0).double(),
        eval_dataset=records(16),
        arguments=settings | changes,
    )
    trainer.train()
    assert trainer.model_wrapped is trainer.model, "something wraps the model"
    return {
        "weights": weights(trainer),
        "steps": trainer.state.global_step,
        "spent": trainer.private.ledger.spent,
        "drawn": [len(trainer.private.sampler.indices(step)) for step in range(6)],
        "expected": trainer.private.plan.expected_batch_size,
        "evaluated": [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log],
    }
