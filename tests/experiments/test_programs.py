"""Programs without the command line end as it does."""

from __future__ import annotations

import pytest

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd_experiments.programs import FAILED, errors_on_one_line


def test_an_error_on_purpose_is_one_line_and_any_other_is_not_hidden(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended, errors_on_one_line():
        raise InvalidArgumentError("--data", expected="a folder\nwith files", got="none")
    assert ended.value.code == FAILED
    said = capsys.readouterr().err
    assert said.startswith("error: --data: expected a folder with files")
    assert said.count("\n") == 1
    with pytest.raises(ZeroDivisionError), errors_on_one_line():
        raise ZeroDivisionError
