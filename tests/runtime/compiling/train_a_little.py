"""Two private steps of a small model from empty caches: run by `test_on_a_gpu`.

Prints, as JSON, where its kernels came from, what its process said, and the weights it ends with.
"""

from __future__ import annotations

import json
import sys
import warnings

import torch
from torch import nn

from shuffled_dpsgd.runtime.compiling import service
from shuffled_dpsgd.training import make_private


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(ids)).mean(1))


def main(device: str) -> None:
    torch.manual_seed(0)
    model = Tagger().to(device)
    ids, labels = torch.randint(0, 100, (256, 40)), torch.randint(0, 2, (256,))
    private = make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        dataset_size=len(ids),
        expected_batch_size=32,
        num_steps=2,
        noise_multiplier=1.0,
        delta=1e-5,
        scope="full",
        seed=0,
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for batch, wanted in private.batches(torch.utils.data.TensorDataset(ids, labels)):
            with torch.autocast(device, torch.bfloat16):
                outputs = private.model(batch)
            losses = nn.functional.cross_entropy(outputs.float(), wanted, reduction="none")
            private.backward(losses)
            private.step()
    norms = [float(parameter.detach().double().norm()) for parameter in model.parameters()]
    ours = [str(w.message) for w in said if "Kernels" in str(w.message)]
    print(json.dumps({"tally": service.tally(), "said": ours, "norms": norms}))


if __name__ == "__main__":
    main(sys.argv[1])
