"""Models that `fully_shard` has spread over ranks: the result is that of one process."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.equality import NAMES, assert_all_same
from distributed.launching import Launcher
from shuffled_dpsgd.training import GaussianNoise

HERE = "distributed.shards"
SMALL_OR_BERT = pytest.mark.parametrize(
    "name", ["mlp", pytest.param("bert", marks=pytest.mark.slow)]
)


@pytest.mark.parametrize(
    ("ranks", "how", "names"),
    [
        (2, True, ["gpt2"]),
        (2, "state", ["bert without noise"]),
        pytest.param(4, "2x2", ["vit"], marks=pytest.mark.slow),
        pytest.param(2, True, NAMES, marks=pytest.mark.slow),
        pytest.param(4, True, NAMES, marks=pytest.mark.slow),
        pytest.param(4, "2x2", NAMES, marks=pytest.mark.slow),
        pytest.param(4, "state", NAMES, marks=pytest.mark.slow),
    ],
)
def test_shards_change_nothing(
    launcher: Launcher, alone: dict[str, Any], ranks: int, how: bool | str, names: list[str]
) -> None:
    """Empty, uneven and full parts, batch clip, noise, shuffle: float64, to 1e-9."""
    found = launcher.run("distributed.replicas", "several", ranks=ranks, names=names, sharded=how)
    assert found[0].keys() == set(names)
    assert_all_same(found, alone)
    for one in found:
        for name in names:
            assert one[name]["verified"] == alone[name]["verified"], "a check was left out"


@pytest.mark.parametrize("name", ["mlp", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_means_as_losses(launcher: Launcher, name: str) -> None:
    """A rank that runs a record along with others counts it no more than with single losses."""
    (alone,) = launcher.run("distributed.replicas", "means", ranks=1, name=name)
    for one in launcher.run("distributed.replicas", "means", name=name, sharded=True):
        for key, tensor in alone.items():
            # GPT-2 computes its own loss in float32, whatever its weights are.
            room = 1e-9 if name == "mlp" else 1e-7
            assert torch.allclose(one[key], tensor, rtol=room, atol=room)


@pytest.mark.slow
def test_one_rank_with_all_shards_is_one_process(launcher: Launcher, alone: dict[str, Any]) -> None:
    (found,) = launcher.run("distributed.replicas", "trained", ranks=1, name="gpt2", sharded=True)
    for name, tensor in alone["gpt2"]["weights"].items():
        assert torch.equal(found["weights"][name], tensor)


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_draws_the_noise_of_its_rows(launcher: Launcher, ranks: int) -> None:
    """Bit for bit what one process draws; the right spread; nothing in common between ranks."""
    shapes = {"a": [701, 100], "wide": [97, 31], "b": [3], "c": [1001, 600], "one": [1, 7]}
    found = launcher.run(HERE, "rows_of_noise", ranks=ranks, shapes=shapes)
    whole = {
        name: torch.zeros(shape, dtype=torch.float64 if name == "wide" else torch.float32)
        for name, shape in shapes.items()
    }
    GaussianNoise().add_(whole, dict.fromkeys(shapes, 2.0), key=bytes(32))
    for name, expected in whole.items():
        assert torch.equal(torch.cat([one[name] for one in found]), expected)
    rows = [torch.cat([one["a"].flatten(), one["c"].flatten()]) for one in found]
    length = min(map(torch.numel, rows))
    for own in rows:
        assert float(own.std()) == pytest.approx(2.0, rel=0.01)
    between = torch.corrcoef(torch.stack([own[:length] for own in rows])) - torch.eye(ranks)
    assert float(between.abs().max()) < 5 / math.sqrt(length)


@pytest.mark.parametrize(
    "kinds",
    [
        ["checkpointing inside"],
        pytest.param(["float32", "bfloat16", "checkpointing"], marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_checks_hold_a_layer_or_two_at_once(launcher: Launcher, kinds: list[str]) -> None:
    """Of eight blocks: all are checked, and no rank ever has more than two, gradients included."""
    for one in launcher.run(HERE, "unsharded_in_checks", kinds=kinds):
        for kind in kinds:
            found, checkpoints = one[kind], kind.startswith("checkpointing")
            assert found["checked"] > 0
            assert found["verified"] > 0 or checkpoints
            assert found["gradients"] >= 2 * found["checked"]
            assert found["sent"] > 3 * found["whole"], "some check did not run the model"
            # A gradient may be one number that is expanded, alive until it is collected.
            number = 4
            most = found["root"] + 2 * found["block"] + number
            assert found["most"] <= most < found["whole"] / 3
            assert found["kept by graphs"] == 0
            # A checkpoint keeps nothing of a block, and computes it again.
            assert (found["gathered again"] > 0) == (not checkpoints)
            assert found["shards"], "a check left whole weights behind"


@pytest.mark.slow
def test_sums_are_held_a_layer_at_once_and_no_weight_is_gathered_for_them(
    launcher: Launcher,
) -> None:
    """Sums of earlier layers are gone, not only sent, when those of the next are formed."""
    for one in launcher.run(HERE, "sums_held"):
        assert one["settled"] == 2
        assert one["scattered"] >= 16, "not layer by layer"
        # All but the first of each backward are sent while those before them travel.
        assert one["overlapping"] == one["scattered"] - one["settled"]
        assert one["most"] <= one["layer"] < one["whole"] / 8
        assert one["own"] < 0.6 * one["whole"]


def test_ranks_by_themselves_run_as_often_as_they_like(launcher: Launcher) -> None:
    """One not at all, one with an error half way: none waits for another in vain."""
    one, two = launcher.run(HERE, "uneven_runs")
    assert one == {"same": [True] * 4, "refused": "", "shards": True}
    assert two["same"] == [True]
    assert two["refused"].startswith("UnsupportedModuleError: blocks.4")
    assert two["shards"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_a_batch_among_other_records_by_one_rank(launcher: Launcher, name: str) -> None:
    """Gradients are whole there, and stay; a rank that runs nothing answers."""
    one, two = launcher.run(HERE, "beside_other_records", name=name)
    assert (one["same"], two["same"]) == (None, True)
    assert two["gradients"] > 0
    assert one["shards"]
    assert two["shards"]


@pytest.mark.slow
def test_weights_are_gathered_only_where_something_is_checked(launcher: Launcher) -> None:
    """And no rank ever holds sums of more than the largest layer beside its own rows."""
    for one in launcher.run(HERE, "held_in_a_run"):
        assert 0 < one["unsharded"] < 2 * one["batches"]
        assert 0 < one["largest sums"] <= one["largest layer"] < one["all sums"]
        assert one["own sums"] <= one["all sums"] // 2 + one["rows to spare"]
        assert one["same"], "a check or an evaluation between steps changed what is trained"


@pytest.mark.parametrize(("ranks", "how"), [(2, True), (4, "2x2")])
def test_a_sample_without_a_finite_gradient_is_counted_everywhere(
    launcher: Launcher, ranks: int, how: bool | str
) -> None:
    for one in launcher.run("distributed.replicas", "one_bad_sample", ranks=ranks, sharded=how):
        assert one == {"found": [1], "finite": True}


def test_dtensors_send_nothing_by_themselves(launcher: Launcher, tmp_path: Path) -> None:
    """Their own collectives crash where gloo carries CUDA tensors, so ours carry everything."""
    for one in launcher.run(HERE, "collectives_of_dtensors", directory=str(tmp_path)):
        assert one["checked"] > 0
        assert one["verified"] > 0
        assert one["same"]
        assert one["asked for"] == 0 < one["seen if there are any"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit", "gpt2"])
def test_mixed_precision_by_policy(launcher: Launcher, name: str) -> None:
    """Weights are gathered in bfloat16; sums and updates stay float32; the checks still run."""
    for one in launcher.run(HERE, "in_half_precision", name=name):
        half, full = one["bfloat16"], one["float32"]
        assert half["computed in"] == ["torch.bfloat16"]
        assert half["sums"] == full["sums"] == {"torch.float32"}
        assert half["checked"]
        assert half["verified"] > 0
        assert torch.allclose(half["norms"], full["norms"], rtol=0.05)
        assert not torch.equal(half["norms"], full["norms"])
        for key, tensor in full["weights"].items():
            if "exp_avg" not in key:
                assert torch.allclose(half["weights"][key], tensor, atol=5e-3), key


@pytest.mark.slow
@pytest.mark.parametrize(("name", "backend"), [("bert", "inductor"), ("gpt2", "aot_eager")])
def test_compiled_blocks(launcher: Launcher, name: str, backend: str) -> None:
    """`block.compile()`, then `fully_shard`: as one process without a compiler, to 1e-9."""
    for one in launcher.run(HERE, "compiled_blocks", name=name, backend=backend):
        assert one["same"]
        assert one["graphs"] > 0
        assert one["checked"]
        assert "call block.compile() on each block" in one["as a whole"]


@pytest.mark.slow
def test_layers_of_other_kinds(launcher: Launcher) -> None:
    """Also one that its rule runs more often than the model does, sharded as a whole."""
    for one in launcher.run(HERE, "other_layers"):
        assert {"generic", "recurrent", "linear", "layer-norm"} <= set(one["kinds"])
        assert one["same"]


def test_what_cannot_be_sharded_is_refused_by_name(launcher: Launcher) -> None:
    one, two = launcher.run(HERE, "refusals")
    assert one == two
    named = {
        "axis": "got an axis 'pp', as of pipeline parallelism",
        "another mesh": "got an axis 'tp', as of tensor parallelism",
        "no mesh": "mesh: expected a DeviceMesh of PyTorch, got 'fsdp'",
        "two meshes": "give every call of fully_shard, and make_private, the same mesh",
        "not on it": "mesh: expected None for a model that every rank has the whole of",
        "columns": "expected rows spread over the last axis of a mesh, Shard(0)",
        "half": "expected a mesh of all 2 ranks in their order",
        "root": "got a model whose root it was not called on",
        "tensor parallel": "0: expected a linear layer split evenly by its outputs or its inputs",
        "ignored": "got one that fully_shard was told to ignore",
        "precision": "expected a mixed-precision policy of bfloat16, or none",
        "offload": "got CPUOffloadPolicy",
        "list": "expected fully_shard on one module at a time",
        "untied": "expected tied embedding and head in one group of fully_shard",
        "compiled": "expected a sharded model whose blocks are compiled one by one",
        "wrapped by a compiler": "expected blocks that are compiled in place",
        "quantised": "0: expected weights that are not quantised, where ranks share their rows",
        "unaccounted": "sampling: expected 'poisson' for a sharded model",
        "opacus": "method: expected one of ours for a sharded model",
        "inside": "expected fully_shard on this module as a whole, or above it",
        "find": "physical_batch: expected 'as-planned' for a sharded model",
        "frame": "noise_frame: expected 'shuffled' with several ranks",
        "trainer": "model: expected a model that every rank holds whole",
        "size": "rank 1 has another physical batch size than rank 0",
    }
    assert set(one) == set(named)
    for name, words in named.items():
        assert words in one[name], (name, one[name])


@SMALL_OR_BERT
def test_sums_of_shards_are_compared_with_a_stock_backward(launcher: Launcher, name: str) -> None:
    for one in launcher.run(HERE, "refereed", name=name, fault=""):
        assert one["said"] == ""
        assert one["sums"] >= 3
        assert one["not"] == 0
    healthy, faulty = launcher.run(HERE, "refereed", name=name, fault="scaled")
    assert "the sum of clipped gradients is" in faulty["said"]
    assert "another process" in healthy["said"]
    # Nothing but the noise of an empty first batch.
    assert healthy["spent"] == faulty["spent"] <= 1


@SMALL_OR_BERT
@pytest.mark.slow
def test_sums_of_copies_are_compared_too(launcher: Launcher, name: str) -> None:
    """With a stock backward over all ranks, and after the copies have added up their rows."""
    options = {"name": name, "ranks": 4, "how": "2x2"}
    *_, healthy = launcher.run(HERE, "refereed", fault="", **options)
    assert (healthy["said"], healthy["not"]) == ("", 0)
    assert healthy["sums"] >= 3
    for fault, words in {
        "scaled": "the sum of clipped gradients is",
        "copies": "the total over all copies of the model is not the sum of their rows",
    }.items():
        found = launcher.run(HERE, "refereed", fault=fault, **options)
        assert any(words in one["said"] for one in found)
        assert all("nothing was released" in one["said"] for one in found)
        assert {one["spent"] for one in found} <= {0, 1}  # An empty batch has no sums.


def test_copies_share_weights_and_noise(launcher: Launcher) -> None:
    """They start from the weights of the first, draw each coordinate's noise once, and agree."""
    found = launcher.run(HERE, "copies", ranks=4)
    size = sum(one["before"].numel() for one in found[:2])
    for one, other in ((found[0], found[2]), (found[1], found[3])):
        assert torch.equal(one["before"], other["before"])
        assert torch.equal(one["after"], other["after"])
        assert not torch.equal(one["before"], one["after"])
    for drawn in zip(*(one["drawn"] for one in found), strict=True):
        assert sum(drawn) == size
        assert max(drawn) < 0.6 * size


def test_shards_that_cannot_be_written_leave_nothing(launcher: Launcher, tmp_path: Path) -> None:
    found = launcher.run(HERE, "written_on_a_full_disk", directory=str(tmp_path))
    for one in found:
        assert "the disk is full: 4,096 bytes are free" in one["full"]
        assert "could not be written (unexpected pos 704 vs 598)" in one["other"]
    assert found[0]["left"] == []


@pytest.mark.slow
def test_the_page_about_several_gpus_runs(launcher: Launcher) -> None:
    """Its blocks on sharding and splitting, on ranks, with a tiny model and its records."""
    page = Path(__file__).parents[2] / "docs" / "distributed.md"
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    code, by_mesh = (block for block in blocks if "fully_shard(block" in block)
    options = "dataset_size=40, expected_batch_size=8, num_steps=2, epsilon=9.0, delta=1e-3"
    code = code.replace(", ...)", f", {options})")
    assert launcher.run(HERE, "run_page", code=code) == [(2, True)] * 2
    # Meshes that so many processes have, and the optimizer that the first block made.
    (splits,) = (block for block in blocks if "parallelize_module(block" in block)
    for code, mesh, name, ranks in (
        (by_mesh, ('"cuda", (4, 8)', '"cpu", (2, 2)'), "gpt2", 4),
        (splits, ('"cuda", (8,)', '"cpu", (2,)'), "block", 2),
    ):
        for written, meant in (
            (", ..., mesh=mesh)", f", {options}, mesh=mesh)"),
            ("private =", "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nprivate ="),
            mesh,
        ):
            assert written in code
            code = code.replace(written, meant)
        found = launcher.run(HERE, "run_page", ranks=ranks, code=code, name=name)
        assert found == [(0, True)] * ranks
