"""Every strategy computes the same sums, under every clip function."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from clipping.compare import assert_exact, assert_same_sums, oracle, run, split, total_norm
from clipping.tiny_models import CASES, Inputs, bert_classifier, gpt2
from shuffled_dpsgd.clipping import ClippingEngine
from shuffled_dpsgd.clipping.contributions import cost
from shuffled_dpsgd.errors import InvalidArgumentError

STRATEGIES = ("bookkeeping", "ghost", "mixed", "instantiate")
CLIPS = ("flat", "automatic", "per-layer", "none")


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("name", ["gpt2", "vit"])
def test_strategies_agree_pairwise(name: str, clip: str) -> None:
    torch.manual_seed(0)
    case = CASES[name]().to(torch.float64)
    found = {}
    for strategy in STRATEGIES:
        engine = ClippingEngine(case.model, clip_norm=0.5, clip=clip, strategy=strategy)
        found[strategy] = (run(engine, case.losses, case.inputs), engine.sample_norms)
    for one, other in itertools.combinations(STRATEGIES, 2):
        assert_same_sums(found[one][0], found[other][0], 1e-10)
        torch.testing.assert_close(found[one][1], found[other][1], rtol=1e-10, atol=0)


@pytest.mark.parametrize("clip", ["flat", "automatic", "none"])
def test_clip_functions_equal_the_oracle(clip: str) -> None:
    torch.manual_seed(1)
    case = bert_classifier().to(torch.float64)
    assert_exact(case.model, case.losses, case.inputs, clip=clip, clip_norm=0.7)


def test_per_layer_clipping_bounds_every_layer_and_the_whole() -> None:
    torch.manual_seed(2)
    case = gpt2().to(torch.float64)
    engine = ClippingEngine(case.model, clip_norm=0.5, clip="per-layer")
    groups = [row.parameters for row in engine.plan()]
    got = run(engine, case.losses, case.inputs)
    wanted = oracle(case.model, case.losses, case.inputs, 0.5, clip="per-layer", groups=groups)
    assert_same_sums(got, wanted.clipped_sum, 1e-9)
    for example in split(case.inputs):
        engine.reset()
        alone = run(engine, case.losses, example)
        for names in groups:
            part = total_norm({name: alone[name] for name in names})
            assert part <= 0.5 / len(groups) ** 0.5 * (1 + 1e-6)


def test_mean_losses_are_declared() -> None:
    torch.manual_seed(3)
    case = gpt2().to(torch.float64)
    wanted = oracle(case.model, case.losses, case.inputs, 2.0)
    engine = ClippingEngine(case.model, clip_norm=2.0, loss_reduction="mean")
    with engine:
        case.losses(case.model, case.inputs).mean().backward()
    torch.testing.assert_close(engine.sample_norms, wanted.sample_norms, rtol=1e-10, atol=0)
    assert_same_sums(engine.clipped_sum(), wanted.clipped_sum, 1e-9)


def test_loss_scale_is_divided_out_again() -> None:
    torch.manual_seed(4)
    case = gpt2().to(torch.float64)
    plain = run(ClippingEngine(case.model), case.losses, case.inputs)
    engine = ClippingEngine(case.model)
    with engine:
        engine.backward(case.losses(case.model, case.inputs), loss_scale=1024.0)
    assert_same_sums(engine.clipped_sum(), plain, 1e-10)


def test_plan_names_a_backend_for_every_parameter_and_follows_the_length() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    engine = ClippingEngine(model, strategy="mixed")

    def losses(model: nn.Module, inputs: Inputs) -> torch.Tensor:
        return model(inputs["x"]).square().sum((1, 2))

    backends = []
    for length in (4, 16):
        run(engine, losses, {"x": torch.randn(2, length, 8)})
        plan = engine.plan()
        assert {name for row in plan for name in row.parameters} == set(
            dict(model.named_parameters())
        )
        backends.append(plan[0].backend)
    assert backends == ["gram", "instantiate"]
    assert "instantiate" in str(engine.plan())


@pytest.mark.parametrize(
    ("argument", "value"),
    [("clip", "soft"), ("strategy", "fast"), ("loss_reduction", "none"), ("clip_norm", 0.0)],
)
def test_bad_options_are_refused_by_name(argument: str, value: object) -> None:
    with pytest.raises(InvalidArgumentError, match=argument):
        ClippingEngine(nn.Linear(2, 2), **{argument: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("clip", ["flat", "per-layer"])
def test_the_backend_of_a_call_is_chosen_once(clip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[tuple[object, ...]] = []

    def choose(*shape: object) -> cost.NormMethod:
        chosen.append(shape)
        return cost.NormMethod.TILES

    monkeypatch.setitem(cost.STRATEGIES, "bookkeeping", choose)
    conv = nn.Conv1d(5, 5, 3, padding=1)
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), conv, nn.Linear(6, 3))
    engine = ClippingEngine(model, clip=clip)
    for _ in range(3):
        with engine:
            engine.backward(model(torch.randn(2, 5, 4)).square().sum((1, 2)))
    # A linear map asks again only when the shape changes.
    assert [shape[:3] for shape in chosen] == [
        (5, 3, 6),
        (6, 5, 15),
        (5, 6, 4),
        (6, 5, 15),
        (6, 5, 15),
    ]


def test_plan_names_the_kernels_that_ran() -> None:
    engine = ClippingEngine(nn.Linear(8, 8))
    run(
        engine,
        lambda model, inputs: model(inputs["x"]).square().sum((1, 2)),
        {"x": torch.randn(2, 4, 8)},
    )
    plan = engine.plan()
    assert "plain" in plan.kernels["weighted sums"]
    assert "weighted sums: " in str(plan)
