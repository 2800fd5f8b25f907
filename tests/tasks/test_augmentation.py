"""Views of images: what they are, that they are one record, and where their randomness is from."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from shuffled_dpsgd.clipping.reference import clipped_sum_reference
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.tasks import build_task, digits, parse_config, start_private
from shuffled_dpsgd.tasks.config import RunConfig
from shuffled_dpsgd.tasks.images import ImageViews
from shuffled_dpsgd.training.loop import LoopSettings, Progress, train


def config(views: int, **privacy: Any) -> RunConfig:
    raw = digits.default_config().to_json()
    raw["privacy"] = {"method": "certified", "epsilon": 3.0, "delta": 1e-4, "clip_norm": 1.0}
    raw["privacy"] |= privacy
    raw["training"] = {
        "expected_batch_size": 40,
        "num_steps": 2,
        "physical_batch_size": 30,
        "device": "cpu",
        "augmentation_multiplicity": views,
    }
    return parse_config(raw)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("flips", [False, True])
def test_every_view_is_a_shifted_and_perhaps_mirrored_image(flips: bool) -> None:
    images, labels = torch.randn(3, 2, 16, 8), torch.arange(3)
    views, same = ImageViews(40, flips=flips)((images, labels), generator())
    assert same is labels
    assert views.shape == (3, 40, 2, 16, 8)
    padded = torch.nn.functional.pad(images, (1, 1, 2, 2), mode="reflect")
    known = [padded[:, :, y : y + 16, x : x + 8] for y in range(5) for x in range(3)]
    known += [each.flip(-1) for each in known] if flips else []
    matches = torch.stack([(each[:, None] == views).flatten(2).all(2) for each in known])
    assert matches.any(0).all()
    assert matches.any(2).any(1).sum() > 0.8 * len(known)  # Nearly all of them occur.
    again, _ = ImageViews(40, flips=flips)((images, labels), generator())
    other, _ = ImageViews(40, flips=flips)((images, labels), generator(1))
    assert torch.equal(views, again)
    assert not torch.equal(views, other)


@pytest.mark.parametrize("views", [1, 2, 4])
def test_a_record_of_several_views_is_clipped_once(views: int) -> None:
    pytest.importorskip("sklearn")
    task = build_task(config(views))
    assert task.augment is not None
    model = task.model.double()
    samples = [task.train_data[i] for i in range(6)]
    images = torch.stack([image for image, _ in samples]).double()
    batch = task.augment((images, torch.stack([label for _, label in samples])), generator())
    private = start_private(config(views), model, dataset_size=len(task.train_data))
    with private.engine as engine:
        engine.backward(task.losses(model, batch))
        found = {name: value.clone() for name, value in engine.clipped_sum().items()}
        norms = engine.sample_norms.clone()
    expected = clipped_sum_reference(
        model,
        lambda m, one: task.losses(m, (one[0][None], one[1][None]))[0],
        list(zip(*batch, strict=True)),
        clip_norm=1.0,
    )
    torch.testing.assert_close(norms, expected.sample_norms, rtol=1e-9, atol=0)
    torch.testing.assert_close(found, expected.clipped_sum, rtol=1e-9, atol=1e-12)
    private.close()


def trained(
    views: int, folder: Path | None = None, *, fails_at: int | None = None, resume: bool = False
) -> tuple[dict[str, torch.Tensor], list[int], float]:
    """Weights, the sizes of the batches drawn, and the certified ε of a short run."""
    chosen = config(views)
    task, sizes = build_task(chosen), []
    ledger = None if folder is None else folder / "ledger.jsonl"
    private = start_private(
        chosen, task.model, dataset_size=len(task.train_data), ledger_path=ledger
    )

    def note(progress: Progress) -> None:
        sizes.append(progress.metrics.batch_size)
        if progress.metrics.step == fails_at:
            raise KeyboardInterrupt

    settings = LoopSettings(
        collate=task.collate, augment=task.augment, checkpoint_dir=folder, checkpoint_every=1
    )
    try:
        train(
            private,
            task.train_data,
            task.losses,
            settings=settings,
            callbacks=[note],
            resume=resume,
        )
    finally:
        private.close()
    claim = private.plan.certified()
    assert claim is not None
    return copy.deepcopy(task.model.state_dict()), sizes, claim.epsilon


@pytest.mark.slow
def test_views_follow_the_seed_and_leave_sampling_and_accounting_alone() -> None:
    pytest.importorskip("sklearn")
    (plain, sizes, epsilon), (once, *rest), (again, *_) = trained(0), trained(2), trained(2)
    assert rest == [sizes, epsilon]
    assert all(torch.equal(value, again[name]) for name, value in once.items())
    assert not all(torch.equal(value, plain[name]) for name, value in once.items())


@pytest.mark.slow
def test_a_resumed_run_sees_the_same_views(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    with pytest.raises(KeyboardInterrupt):
        trained(2, tmp_path, fails_at=1)
    resumed, sizes, _ = trained(2, tmp_path, resume=True)
    whole, all_sizes, _ = trained(2)
    assert sizes == all_sizes[1:]
    assert all(torch.equal(value, whole[name]) for name, value in resumed.items())


def test_views_are_of_images_and_clipped_by_our_engine() -> None:
    with pytest.raises(InvalidArgumentError, match="'opacus'"):
        config(2, method="opacus")
    with pytest.raises(InvalidArgumentError, match="augmentation_multiplicity"):
        config(-1)
