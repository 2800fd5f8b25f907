"""The cost rule: which route it takes for which shape."""

from __future__ import annotations

from shuffled_dpsgd.clipping.contributions import cost

STRATEGIES = ("bookkeeping", "ghost", "mixed", "instantiate")
CLIPS = ("flat", "automatic", "per-layer", "none")


def test_cost_rule_takes_the_cheaper_route() -> None:
    assert cost.cheapest(1, 4, 4, "cuda") is cost.NormRoute.GRAM
    assert cost.cheapest(64, 8, 2000, "cuda") is cost.NormRoute.TILES
    assert cost.cheapest(4096, 768, 768, "cuda") is cost.NormRoute.TILES
    assert cost.cheapest(8192, 768, 768, "cuda") is cost.NormRoute.INSTANTIATE
    assert cost.cheapest(1024, 768, 3072, "cuda") is cost.NormRoute.GRAM
    assert cost.cheapest(1024, 50257, 768, "cuda") is cost.NormRoute.GRAM
    assert cost.cheapest(1440, 50257, 768, "cuda") is cost.NormRoute.TILES
    assert cost.cheapest(1024, 768, 3072, "hopper") is cost.NormRoute.TILES
    assert cost.cheapest(512, 768, 3072, "hopper") is cost.NormRoute.GRAM
    assert cost.cheapest(1024, 50257, 768, "hopper") is cost.NormRoute.GRAM
    assert cost.cheapest(1024, 50257, 768, "hopper", tied=True) is cost.NormRoute.INSTANTIATE
    assert cost.cheapest(512, 50257, 768, "hopper", tied=True) is cost.NormRoute.GRAM
    # Eight times the room of what it is made from.
    assert cost.cheapest(1024, 128256, 8192, "hopper", tied=True) is not cost.NormRoute.INSTANTIATE


def test_float32_on_tensor_cores_has_no_tiles_and_stores_where_samples_are_long() -> None:
    assert cost.cheapest(128, 768, 3072, "split") is cost.NormRoute.GRAM
    assert cost.cheapest(2048, 768, 768, "split") is cost.NormRoute.GRAM
    assert cost.cheapest(8192, 768, 768, "split") is cost.NormRoute.INSTANTIATE
    assert cost.cheapest(8192, 64, 64, "split") is cost.NormRoute.INSTANTIATE
    assert cost.cheapest(1440, 50257, 768, "split") is cost.NormRoute.GRAM


def test_cost_rule_stores_more_on_a_cpu_but_not_without_bound() -> None:
    assert cost.cheapest(64, 256, 256, "cpu") is cost.NormRoute.GRAM
    assert cost.cheapest(128, 256, 256, "cuda") is cost.NormRoute.GRAM
    assert cost.cheapest(128, 256, 256, "cpu") is cost.NormRoute.INSTANTIATE
    assert cost.cheapest(512, 256, 1024, "cuda") is cost.NormRoute.TILES
    assert cost.cheapest(512, 256, 1024, "cpu") is cost.NormRoute.INSTANTIATE
    assert cost.cheapest(64, 768, 50257, "cpu") is cost.NormRoute.GRAM
    for T, R, C in [(16, 64, 64), (64, 768, 768), (200, 768, 3072), (512, 768, 50257)]:
        if cost.cheapest(T, R, C, "cpu") is cost.NormRoute.INSTANTIATE:
            assert R * C <= 2 * T * (R + C)
