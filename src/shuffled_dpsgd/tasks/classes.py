"""How many classes a data set has: stated, never counted.

The width of the classifier is published with the model. Counted in the records it would tell
whether a record of a class is there that no other record has.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.tasks.data.config import DataConfig
from shuffled_dpsgd.tasks.data.published import PUBLISHED

_NAMES = {
    **{name: facts.classes for name, facts in PUBLISHED.items() if facts.classes},
    "digits": tuple("0123456789"),
}


def stated_classes(data: DataConfig) -> int:
    """The number of classes the configuration states, or that is known of the data set.

    Raises:
        InvalidArgumentError: neither, or both and they differ.
    """
    facts = PUBLISHED.get(data.format)
    known = len(facts.classes) if facts is not None and facts.classes else None
    if data.num_labels is None and known is None:
        raise InvalidArgumentError(
            "data.num_labels",
            expected=f"the number of classes, stated, for data.format {data.format!r}",
            got=None,
            remedy="counted in the private records it would be released without noise: write "
            "`num_labels = …` under [data]",
        )
    chosen = known if data.num_labels is None else data.num_labels
    assert chosen is not None
    if chosen < 2 or known not in (None, chosen):
        expected = "at least 2" if known is None else f"{known}, as {data.format} has"
        raise InvalidArgumentError("data.num_labels", expected=expected, got=chosen)
    return chosen


def name_classes(model: nn.Module, data: DataConfig, num_labels: int) -> None:
    """Write the classes' names into the model's configuration, from where pipelines read them.

    Raises:
        InvalidArgumentError: the names stated are not one for each class.
    """
    names = data.label_names or _NAMES.get(data.format, ())
    if not names:
        return
    if len(names) != num_labels or len(set(names)) != num_labels:
        raise InvalidArgumentError(
            "data.label_names", expected=f"{num_labels} different names", got=list(names)
        )
    config: Any = model.config
    config.id2label = dict(enumerate(names))
    config.label2id = {name: index for index, name in enumerate(names)}
