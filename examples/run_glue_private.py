"""Fine-tune a sequence classifier, privately: a `run_glue`-style script with seven lines changed.

The changed lines carry the comment `# private`; without them this is an ordinary script around
the Hugging Face Trainer. Data are a GLUE task from the hub, or two files of your own (CSV or JSON
lines with text columns and a `label`):

    python examples/run_glue_private.py --model_name_or_path bert-base-uncased --task_name sst2 \
        --output_dir out --num_train_epochs 3 --per_device_train_batch_size 64 \
        --gradient_accumulation_steps 16 --learning_rate 5e-4 --epsilon 3 --delta 5e-6 \
        --clip_norm 0.1
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    HfArgumentParser,
    TrainingArguments,
)

from shuffled_dpsgd.integrations import PrivacyArguments, ShuffledDPTrainer  # private

TASK_COLUMNS = {
    "cola": ("sentence",),
    "mnli": ("premise", "hypothesis"),
    "mrpc": ("sentence1", "sentence2"),
    "qnli": ("question", "sentence"),
    "qqp": ("question1", "question2"),
    "rte": ("sentence1", "sentence2"),
    "sst2": ("sentence",),
}


@dataclass
class ScriptArguments:
    """Model and data."""

    model_name_or_path: str = field(metadata={"help": "Hub name or local folder."})
    task_name: str | None = field(default=None, metadata={"help": f"{sorted(TASK_COLUMNS)}"})
    train_file: str | None = field(default=None, metadata={"help": "CSV or JSON lines."})
    validation_file: str | None = field(default=None, metadata={"help": "CSV or JSON lines."})
    max_seq_length: int = field(default=128, metadata={"help": "Longer texts are cut."})


def load_data(script: ScriptArguments):
    """The splits, and the names of their text columns."""
    if script.task_name is not None:
        splits = load_dataset("nyu-mll/glue", script.task_name)
        heldout = "validation_matched" if script.task_name == "mnli" else "validation"
        return splits["train"], splits[heldout], TASK_COLUMNS[script.task_name]
    if script.train_file is None or script.validation_file is None:
        raise SystemExit("give --task_name, or --train_file and --validation_file")
    kind = "csv" if script.train_file.endswith(".csv") else "json"
    files = {"train": script.train_file, "validation": script.validation_file}
    splits = load_dataset(kind, data_files=files)
    columns = tuple(name for name in splits["train"].column_names if name not in ("label", "idx"))
    return splits["train"], splits["validation"], columns[:2]


def accuracy(prediction) -> dict[str, float]:
    """Share of right classes."""
    logits, labels = prediction
    return {"accuracy": float((np.argmax(logits, axis=-1) == labels).mean())}


def main() -> dict[str, float]:
    """Parse, load, train, evaluate, save."""
    parser = HfArgumentParser((ScriptArguments, TrainingArguments, PrivacyArguments))  # private
    script, training, privacy = parser.parse_args_into_dataclasses()  # private
    training.max_grad_norm = 0.0  # private: samples are clipped one by one instead

    train, heldout, columns = load_data(script)
    num_labels = 1 + max(max(train["label"]), max(heldout["label"]))
    tokenizer = AutoTokenizer.from_pretrained(script.model_name_or_path)
    model = AutoModelForSequenceClassification.from_pretrained(
        script.model_name_or_path, num_labels=num_labels
    )

    def tokenize(rows):
        texts = [rows[column] for column in columns]
        return tokenizer(*texts, truncation=True, max_length=script.max_seq_length)

    trainer = ShuffledDPTrainer(  # private
        model=model,
        args=training,
        train_dataset=train.map(tokenize, batched=True),
        eval_dataset=heldout.map(tokenize, batched=True),
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=accuracy,
        privacy=privacy,  # private
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    metrics = trainer.evaluate()
    trainer.save_metrics("eval", metrics)
    trainer.save_model()
    trainer.create_model_card(tasks="text-classification")
    print(trainer.card())  # private
    return metrics


if __name__ == "__main__":
    main()
