"""The cost rule: which backend it takes for which shape."""

from __future__ import annotations

from shuffled_dpsgd.clipping.contributions import cost

STRATEGIES = ("bookkeeping", "ghost", "mixed", "instantiate")
CLIPS = ("flat", "automatic", "per-layer", "none")


def test_cost_rule_takes_the_cheaper_route() -> None:
    assert cost.cheapest(1, 4, 4, "cuda") is cost.NormMethod.GRAM
    assert cost.cheapest(64, 8, 2000, "cuda") is cost.NormMethod.TILES
    assert cost.cheapest(4096, 768, 768, "cuda") is cost.NormMethod.TILES
    assert cost.cheapest(8192, 768, 768, "cuda") is cost.NormMethod.INSTANTIATE
    assert cost.cheapest(1024, 768, 3072, "cuda") is cost.NormMethod.GRAM
    assert cost.cheapest(1024, 50257, 768, "cuda") is cost.NormMethod.GRAM
    assert cost.cheapest(1440, 50257, 768, "cuda") is cost.NormMethod.TILES


def test_cost_rule_stores_more_on_a_cpu_but_not_without_bound() -> None:
    assert cost.cheapest(64, 256, 256, "cpu") is cost.NormMethod.GRAM
    assert cost.cheapest(128, 256, 256, "cuda") is cost.NormMethod.GRAM
    assert cost.cheapest(128, 256, 256, "cpu") is cost.NormMethod.INSTANTIATE
    assert cost.cheapest(512, 256, 1024, "cuda") is cost.NormMethod.TILES
    assert cost.cheapest(512, 256, 1024, "cpu") is cost.NormMethod.INSTANTIATE
    assert cost.cheapest(64, 768, 50257, "cpu") is cost.NormMethod.GRAM
    for T, R, C in [(16, 64, 64), (64, 768, 768), (200, 768, 3072), (512, 768, 50257)]:
        if cost.cheapest(T, R, C, "cpu") is cost.NormMethod.INSTANTIATE:
            assert R * C <= 2 * T * (R + C)
