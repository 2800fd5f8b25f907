"""The data sets that have a name, as facts: classes, splits, files, hub names, licences.

Nothing here is downloaded. `files` is what an error about a missing file asks for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

_GLUE = "https://gluebenchmark.com/tasks"
_TORONTO = "https://www.cs.toronto.edu/~kriz/cifar.html"


@dataclass(frozen=True, kw_only=True)
class HubPlace:
    """Where the hub has a data set: its name, configuration, columns and splits.

    `revision` is the branch of Parquet files that the hub makes of sets whose own branch holds
    code: code from the hub is never run.
    """

    name: str
    columns: tuple[str, ...]
    splits: Mapping[str, str]
    subset: str | None = None
    revision: str | None = None


@dataclass(frozen=True, kw_only=True)
class PublishedSet:
    """One named data set.

    `heldout` are the splits that are scored unless others are asked for.

    `sources` are the collections a set is made of, as its records name them.
    """

    title: str
    task: str
    folders: tuple[str, ...]
    files: str
    source: str
    licence: str
    hub: HubPlace
    train_size: int
    classes: tuple[str, ...] = ()
    heldout: tuple[str, ...] = ("dev",)
    splits: tuple[str, ...] = ("dev", "test")
    sources: tuple[str, ...] = ()


def _glue(subset: str, *columns: str, splits: Mapping[str, str] | None = None) -> HubPlace:
    found = {"train": "train", "dev": "validation"} if splits is None else splits
    return HubPlace(name="nyu-mll/glue", subset=subset, columns=columns, splits=found)


CIFAR10_CLASSES = "airplane automobile bird cat deer dog frog horse ship truck"
CIFAR100_CLASSES = (
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus "
    "butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch "
    "crab crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo "
    "keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain mouse "
    "mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy "
    "porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper "
    "snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television "
    "tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm"
)


def _cifar(number: int, classes: str, binary: str, label: str) -> PublishedSet:
    return PublishedSet(
        title=f"CIFAR-{number}",
        task="image-classification",
        folders=(f"cifar{number}", binary),
        files=f"the files of cifar-{number}-binary.tar.gz (the binary version), or "
        f"cifar{number}.med.xz with labels.npz, or one .npz with train_images, train_labels, "
        "test_images, test_labels",
        source=_TORONTO,
        licence="none stated; the authors ask for citation (Krizhevsky 2009)",
        hub=HubPlace(
            name=f"uoft-cs/cifar{number}",
            columns=("img", label),
            splits={"train": "train", "test": "test"},
        ),
        train_size=50_000,
        classes=tuple(classes.split()),
        heldout=("test",),
        splits=("test",),
    )


PUBLISHED: Mapping[str, PublishedSet] = MappingProxyType(
    {
        "sst2": PublishedSet(
            title="SST-2",
            task="text-classification",
            folders=("sst2", "SST-2"),
            files="train.tsv and dev.tsv of SST-2.zip",
            source=_GLUE,
            licence="none stated (Socher et al. 2013)",
            hub=_glue("sst2", "sentence", "label"),
            train_size=67_349,
            classes=("negative", "positive"),
        ),
        "qqp": PublishedSet(
            title="QQP",
            task="text-classification",
            folders=("qqp", "QQP"),
            files="train.tsv and dev.tsv of QQP.zip, or train.jsonl and dev.jsonl with question1, "
            "question2 and label",
            source=_GLUE,
            licence="Quora's terms, non-commercial",
            hub=_glue("qqp", "question1", "question2", "label"),
            train_size=363_846,
            classes=("not_duplicate", "duplicate"),
            splits=("dev",),
        ),
        "mnli": PublishedSet(
            title="MNLI",
            task="text-classification",
            folders=("mnli", "MNLI", "multinli_1.0"),
            files="train.tsv, dev_matched.tsv and dev_mismatched.tsv of MNLI.zip, or the .jsonl "
            "files of multinli_1.0.zip, or train.jsonl and dev.jsonl with premise, hypothesis and "
            "label",
            source=_GLUE,
            licence="OANC's terms, CC BY and CC BY-SA by genre (Williams et al. 2018)",
            hub=_glue(
                "mnli",
                "premise",
                "hypothesis",
                "label",
                splits={
                    "train": "train",
                    "matched": "validation_matched",
                    "mismatched": "validation_mismatched",
                },
            ),
            train_size=392_702,
            classes=("entailment", "neutral", "contradiction"),
            heldout=("matched", "mismatched"),
            splits=("matched", "mismatched", "dev"),
        ),
        "qnli": PublishedSet(
            title="QNLI",
            task="text-classification",
            folders=("qnli", "QNLI"),
            files="train.tsv and dev.tsv of QNLIv2.zip",
            source=_GLUE,
            licence="CC BY-SA 4.0 (from SQuAD)",
            hub=_glue("qnli", "question", "sentence", "label"),
            train_size=104_743,
            classes=("entailment", "not_entailment"),
            splits=("dev",),
        ),
        "e2e": PublishedSet(
            title="E2E NLG",
            task="causal-lm",
            folders=("e2e", "e2e-dataset"),
            files="trainset.csv, devset.csv and testset_w_refs.csv of e2e-dataset.zip",
            source="https://github.com/tuetschek/e2e-dataset",
            licence="CC BY-SA 4.0",
            hub=HubPlace(
                name="tuetschek/e2e_nlg",
                columns=("meaning_representation", "human_reference"),
                splits={"train": "train", "dev": "validation", "test": "test"},
                revision="refs/convert/parquet",
            ),
            train_size=42_061,
        ),
        "dart": PublishedSet(
            title="DART",
            task="causal-lm",
            folders=("dart",),
            files="dart-v1.1.1-full-train.json, -dev.json and -test.json, or the same items one "
            "a line in train.jsonl, dev.jsonl and test.jsonl",
            source="https://github.com/Yale-LILY/dart/tree/master/data/v1.1.1",
            licence="MIT; holds texts of WebNLG (CC BY-NC-SA 4.0) and E2E (CC BY-SA 4.0)",
            hub=HubPlace(
                name="Yale-LILY/dart",
                columns=("tripleset", "annotations"),
                splits={"train": "train", "dev": "validation", "test": "test"},
                revision="refs/convert/parquet",
            ),
            train_size=62_659,
            sources=(
                "WikiTableQuestions_lily",
                "WikiTableQuestions_mturk",
                "WikiSQL_decl_sents",
                "WikiSQL_lily",
                "webnlg",
                "e2e",
            ),
        ),
        "cifar10": _cifar(10, CIFAR10_CLASSES, "cifar-10-batches-bin", "label"),
        "cifar100": _cifar(100, CIFAR100_CLASSES, "cifar-100-binary", "fine_label"),
    }
)
