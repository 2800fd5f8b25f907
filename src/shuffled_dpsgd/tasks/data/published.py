"""The data sets that have a name: their classes, splits, files and columns, here and on the hub.

Nothing here is downloaded; docs/data.md has licences and numbers of records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shuffled_dpsgd.errors import InvalidArgumentError

Columns = tuple[str, ...]
_PARQUET = "refs/convert/parquet"
HUB_SPLITS = {
    "train": "train",
    "dev": "validation",
    "test": "test",
    "matched": "validation_matched",
    "mismatched": "validation_mismatched",
}
"""What the hub calls the splits of these sets."""


@dataclass(frozen=True)
class HubPlace:
    """Where the hub has a data set: its name, columns and configuration.

    `revision` is the branch of Parquet files that the hub makes of sets whose own branch holds
    code: code from the hub is never run.
    """

    name: str
    columns: Columns = ()
    subset: str | None = None
    revision: str | None = None


@dataclass(frozen=True, kw_only=True)
class PublishedSet:
    """One named data set.

    `folders` are the names its folder may have, and `what` says what to fetch, and where. The files
    of a split are called by one of its `stems` and end in one of `kinds`. They have one of the sets
    of `columns`, in which the class or the target comes last. Records whose class is `unlabelled`
    are left out, as their publisher says; `broken_share` is the share of lines that the published
    file itself has broken. `heldout` are the splits that are scored unless others are asked for,
    `sources` the collections a set is made of, as its records name them.
    """

    title: str
    task: str
    what: str
    stems: Mapping[str, tuple[str, ...]]
    hub: HubPlace | None = None
    folders: tuple[str, ...] = ()
    columns: tuple[Columns, ...] = ()
    kinds: tuple[str, ...] = ("tsv",)
    unlabelled: str | None = None
    broken_share: float = 0.0
    classes: tuple[str, ...] = ()
    heldout: tuple[str, ...] = ("dev",)
    sources: tuple[str, ...] = ()

    @property
    def splits(self) -> tuple[str, ...]:
        """The held-out splits there are."""
        return tuple(split for split in self.stems if split != "train")

    def files(self, split: str) -> list[str]:
        """The names a split's file may have, the likeliest first."""
        return [f"{stem}.{kind}" for kind in self.kinds for stem in self.stems[split]]

    def missing_file(self, folder: Path, file: str) -> InvalidArgumentError:
        """The error about a file that is not there: what to put where."""
        packed = "" if file.endswith(".bin") else f" or {file}.xz"
        there = "" if folder.is_dir() else ", which is not there"
        hub = "" if self.hub is None else 'or write `source = "hub"`; '
        return InvalidArgumentError(
            "data.path",
            expected=f"a folder with {file}{packed}, for {self.title}",
            got=f"{folder}{there}",
            remedy=f"put there {self.what}, {hub}a path in a file is relative to that file",
        )


def _glue(
    title: str,
    subset: str,
    what: str,
    stems: Mapping[str, tuple[str, ...]] | None = None,
    **facts: Any,
) -> PublishedSet:
    """A set of GLUE, in whose last set of columns the hub has it."""
    found = {
        split: (split, f"{split}_partial", f"{subset}_{split}", f"{subset}_{split}_subset")
        for split in ("train", "dev")
    }
    for split, more in (stems or {}).items():
        found[split] = (*found.get(split, ()), *more)
    return PublishedSet(
        title=title,
        task="text-classification",
        folders=(subset, title, "multinli_1.0"),
        what=f"{what} (https://gluebenchmark.com/tasks)",
        stems=found,
        hub=HubPlace("nyu-mll/glue", facts["columns"][-1], subset),
        **facts,
    )


_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
_CIFAR10_CLASSES = "airplane automobile bird cat deer dog frog horse ship truck"
_CIFAR100_CLASSES = (
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus "
    "butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch "
    "crab crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo "
    "keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain mouse "
    "mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy "
    "porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper "
    "snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television "
    "tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm"
)


def _cifar(
    number: int, folder: str, label: str, classes: str, train: tuple[str, ...], test: str
) -> PublishedSet:
    """CIFAR's binary version, every file of a split read one after the other."""
    return PublishedSet(
        title=f"CIFAR-{number}",
        task="image-classification",
        folders=(f"cifar{number}", folder),
        what=f"the files of cifar-{number}-binary.tar.gz (the binary version), or one .npz with "
        "train_images, train_labels, test_images, test_labels "
        "(https://www.cs.toronto.edu/~kriz/cifar.html)",
        stems={"train": train, "test": (test,)},
        kinds=("bin",),
        hub=HubPlace(f"uoft-cs/cifar{number}", ("img", label)),
        classes=tuple(classes.split()),
        heldout=("test",),
    )


PUBLISHED: Mapping[str, PublishedSet] = MappingProxyType(
    {
        "sst2": _glue(
            "SST-2",
            "sst2",
            what="train.tsv and dev.tsv of SST-2.zip",
            stems={"test": ("test_labelled_from_SST", "test")},
            columns=(("sentence", "label"),),
            classes=("negative", "positive"),
        ),
        # Questions with a line break in them are broken over two lines in GLUE's file; its own
        # loaders leave those lines out, and that gives the published number of records.
        "qqp": _glue(
            "QQP",
            "qqp",
            what="train.tsv and dev.tsv of QQP.zip, or train.jsonl and dev.jsonl with question1, "
            "question2 and label",
            columns=(
                ("question1", "question2", "is_duplicate"),
                ("question1", "question2", "label"),
            ),
            kinds=("tsv", "jsonl"),
            broken_share=1e-3,
            classes=("not_duplicate", "duplicate"),
        ),
        "mnli": _glue(
            "MNLI",
            "mnli",
            what="train.tsv, dev_matched.tsv and dev_mismatched.tsv of MNLI.zip, or the .jsonl "
            "files of multinli_1.0.zip, or train.jsonl and dev.jsonl with premise, hypothesis and "
            "label",
            stems={
                "train": ("multinli_1.0_train",),
                "matched": ("dev_matched", "multinli_1.0_dev_matched"),
                "mismatched": ("dev_mismatched", "multinli_1.0_dev_mismatched"),
            },
            columns=(("sentence1", "sentence2", "gold_label"), ("premise", "hypothesis", "label")),
            kinds=("tsv", "jsonl"),
            unlabelled="-",
            classes=("entailment", "neutral", "contradiction"),
            heldout=("matched", "mismatched"),
        ),
        "qnli": _glue(
            "QNLI",
            "qnli",
            what="train.tsv and dev.tsv of QNLIv2.zip",
            columns=(("question", "sentence", "label"),),
            classes=("entailment", "not_entailment"),
        ),
        "e2e": PublishedSet(
            title="E2E NLG",
            task="causal-lm",
            folders=("e2e", "e2e-dataset"),
            what="trainset.csv, devset.csv and testset_w_refs.csv of e2e-dataset.zip "
            "(https://github.com/tuetschek/e2e-dataset)",
            stems={"train": ("trainset",), "dev": ("devset",), "test": ("testset_w_refs",)},
            kinds=("csv",),
            columns=(("mr", "ref"),),
            hub=HubPlace(
                "tuetschek/e2e_nlg",
                ("meaning_representation", "human_reference"),
                revision=_PARQUET,
            ),
        ),
        "dart": PublishedSet(
            title="DART",
            task="causal-lm",
            folders=("dart",),
            what="dart-v1.1.1-full-train.json, -dev.json and -test.json, or the same items one a "
            "line in train.jsonl, dev.jsonl and test.jsonl "
            "(https://github.com/Yale-LILY/dart/tree/master/data/v1.1.1)",
            stems={
                split: (split, f"dart-v1.1.1-full-{split}") for split in ("train", "dev", "test")
            },
            kinds=("jsonl", "json"),
            columns=(("tripleset", "annotations"),),
            hub=HubPlace("Yale-LILY/dart", ("tripleset", "annotations"), revision=_PARQUET),
            sources=(
                *("WikiTableQuestions_lily", "WikiTableQuestions_mturk"),
                *("WikiSQL_decl_sents", "WikiSQL_lily", "webnlg", "e2e"),
            ),
        ),
        "cifar10": _cifar(
            10, "cifar-10-batches-bin", "label", _CIFAR10_CLASSES, _BATCHES, "test_batch"
        ),
        "cifar100": _cifar(
            100, "cifar-100-binary", "fine_label", _CIFAR100_CLASSES, ("train",), "test"
        ),
    }
)
