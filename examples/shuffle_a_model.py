"""Shuffle a model's weights without changing what it computes, and take the shuffle back.

    python examples/shuffle_a_model.py --scope full

A small random GPT-2 is trained for a few steps. Its weights, gradients and AdamW moments are then
permuted by an element drawn uniformly from the model's own symmetry group.
"""

from __future__ import annotations

import argparse
import copy

import torch
import transformers

from shuffled_dpsgd.permutation import apply, discover, draw, verify


def small_gpt2() -> transformers.GPT2LMHeadModel:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=48,
        n_layer=2,
        n_head=4,
        n_positions=32,
        vocab_size=100,
        bos_token_id=0,
        eos_token_id=0,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(config)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> float:
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scope", choices=("paper", "full"), default="full")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    model = small_gpt2()
    ids = torch.randint(100, (4, 16), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, ids)

    # 1. Which permutations leave the function alone?
    spec = discover(model, scope=options.scope)
    print(f"{len(spec.groups)} groups, 10^{spec.log10_group_order:.0f} possible shuffles")
    print(f"{spec.shuffle_ratio:.1%} of the parameters live in tensors that move")
    for name, reason in list(spec.unmoved.items())[:2]:
        print(f"  stays: {name} ({reason})")

    # 2. Check it on a probe batch: outputs, loss and every gradient.
    checked = verify(model, {"input_ids": ids, "labels": ids, "use_cache": False}, spec)
    print(f"worst relative deviation of outputs and gradients: {checked.worst_deviation:.1e}")

    # 3. Shuffle weights and optimizer state, and go on training as if nothing had happened.
    original = {name: p.detach().clone() for name, p in model.named_parameters()}
    twin, twin_state = copy.deepcopy((model, optimizer.state_dict()))
    permutation = draw(spec, torch.Generator().manual_seed(options.seed))
    apply(permutation, model, optimizer)
    moved = {n: p.detach() - original[n] for n, p in model.named_parameters()}
    distance = sum(float(by.square().sum()) for by in moved.values()) ** 0.5
    print(f"distance between the weights before and after: {distance:.2f}")

    twin_optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-3)
    twin_optimizer.load_state_dict(twin_state)
    shuffled, unshuffled = train(model, optimizer, ids), train(twin, twin_optimizer, ids)
    print(f"loss after three more steps: {shuffled:.6f} shuffled, {unshuffled:.6f} not")

    # 4. The inverse puts every bit back; what training changed since is all that differs.
    apply(permutation.inverse(), model, optimizer)
    gap = max(
        float((p - q).abs().max().detach())
        for p, q in zip(model.parameters(), twin.parameters(), strict=True)
    )
    print(f"largest weight difference to the model that was never shuffled: {gap:.1e}")


if __name__ == "__main__":
    main()
