"""Train a small BERT privately on a synthetic task, by hand: the loop of the README, complete.

    python examples/train_private.py --epsilon 8 --output runs/example

The task: two topics, each with its half of the vocabulary; three words out of four are on topic.
Needs `pip install -e '.[hf]'` in a clone; nothing is downloaded. About half a minute on one core.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset
from transformers import BertConfig, BertForSequenceClassification

from shuffled_dpsgd.training import make_private, save_checkpoint

VOCABULARY, LENGTH = 40, 9
LEARNING_RATE = 0.5


def sentences(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    topics = torch.randint(2, (count,), generator=generator)
    words = torch.randint(VOCABULARY // 2, (count, LENGTH), generator=generator)
    on_topic = torch.rand(count, LENGTH, generator=generator) < 0.75
    from_upper_half = on_topic == topics.bool()[:, None]
    return TensorDataset(words + from_upper_half * (VOCABULARY // 2), topics)


def small_bert() -> BertForSequenceClassification:
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


@torch.no_grad()
def accuracy(model: BertForSequenceClassification, data: TensorDataset) -> float:
    words, labels = data.tensors
    return float((model(words).logits.argmax(dim=1) == labels).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--records", type=int, default=4000)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--accounting", choices=["certified", "paper"], default="certified")
    parser.add_argument("--batch-clip-norm", type=float, help="needed with --accounting paper")
    parser.add_argument("--shuffle", choices=["every-step", "at-release"], default="every-step")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()

    torch.manual_seed(0)
    data, heldout = sentences(options.records, seed=1), sentences(1000, seed=2)
    model = small_bert()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, 1.0, total_iters=10)

    private = make_private(
        model,
        optimizer,
        dataset_size=len(data),
        expected_batch_size=options.records // 8,
        epochs=options.epochs,
        epsilon=options.epsilon,
        delta=1e-5,
        clip_norm=1.0,
        batch_clip_norm=options.batch_clip_norm,
        accounting=options.accounting,
        shuffle=options.shuffle,
        physical_batch_size=256,
    )
    private.on_update(scheduler.step)
    for batch in private.batches(data):
        losses = F.cross_entropy(model(batch.x).logits, batch.y, reduction="none")
        private.backward(losses)
        if private.step() and private.steps_taken % 16 == 0:
            metrics = private.last_metrics
            print(
                f"step {private.steps_taken:3d}  loss {metrics.loss:.3f}  "
                f"clipped {metrics.clipped_share:.0%}  "
                f"signal/noise {metrics.signal_to_noise:.2f}"
            )
    private.release()
    private.close()

    print(f"\nheld-out accuracy {accuracy(model, heldout):.1%}\n")
    card = private.card()
    print(card)
    if options.output is not None:
        save_checkpoint(private, options.output)
        (options.output / "privacy_card.json").write_text(card.dumps(), encoding="utf-8")


if __name__ == "__main__":
    main()
