"""How many classes a data set has: stated, never counted.

The width of the classifier is published with the model. Counted in the records it would tell
whether a record of a class is there that no other record has.
"""

from __future__ import annotations

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.tasks.config import DataConfig

# Facts of the published data sets.
PUBLISHED = {"sst2": 2, "qnli": 2}


def stated_classes(data: DataConfig) -> int:
    """The number of classes the configuration states, or that is known of the data set.

    Raises:
        InvalidArgumentError: neither, or both and they differ.
    """
    known = PUBLISHED.get(data.format)
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
