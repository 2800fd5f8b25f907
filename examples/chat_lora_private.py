"""Fine-tune a chat model with LoRA, privately: an ordinary TRL script with four lines changed.

The changed lines carry the comment `# private`. Data are JSON lines, each with the `messages` of
one conversation:

    python examples/chat_lora_private.py --model Qwen/Qwen3-0.6B --data chats.jsonl --output out
"""

from __future__ import annotations

import argparse

from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig

from shuffled_dpsgd.integrations import DPSFTTrainer, PrivacyArguments  # private


def main() -> None:
    """Parse, load, train, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="Hub name or local folder.")
    parser.add_argument("--data", required=True, help="JSON lines with messages.")
    parser.add_argument("--output", required=True, help="Folder of the adapter and its card.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--accumulate", type=int, default=64, help="Batches of 8 in a step.")
    parser.add_argument("--cpu", action="store_true", help="Without a GPU.")
    given = parser.parse_args()
    trainer = DPSFTTrainer(  # private
        privacy=PrivacyArguments(epsilon=8, delta=1e-5, shuffle="off"),  # private
        model=given.model,
        args=SFTConfig(
            output_dir=given.output,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=given.accumulate,
            max_steps=given.steps,
            learning_rate=5e-4,
            assistant_only_loss=True,
            use_cpu=given.cpu,
            bf16=not given.cpu,
            report_to="none",
        ),
        train_dataset=load_dataset("json", data_files=given.data, split="train"),
        peft_config=LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()
    trainer.save_model()
    print(trainer.card())  # private


if __name__ == "__main__":
    main()
