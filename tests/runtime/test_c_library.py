"""A C file is compiled once, kept, and loaded; whatever is missing is said in one line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shuffled_dpsgd.runtime import c_library
from shuffled_dpsgd.runtime.c_library import CannotBuildError, load_library

SOURCE = "int answer(void) { return 6 * 7; }\n"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "cache"
    monkeypatch.setenv("SHUFFLED_DPSGD_CACHE", str(folder))
    monkeypatch.delenv("CC", raising=False)
    load_library.cache_clear()
    yield folder
    load_library.cache_clear()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "answer.c"
    path.write_text(SOURCE)
    return path


def compiler(tmp_path: Path, script: str) -> str:
    path = tmp_path / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_a_library_is_compiled_once(
    cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_library(source).answer() == 42
    (kept,) = cache.iterdir()
    assert kept.name.startswith("answer-")
    load_library.cache_clear()
    monkeypatch.setenv("CC", "/nonexistent")
    assert load_library(source).answer() == 42


def test_another_source_is_another_library(cache: Path, source: Path) -> None:
    load_library(source)
    source.write_text(SOURCE.replace("7", "8"))
    load_library.cache_clear()
    assert load_library(source).answer() == 48
    assert len(list(cache.iterdir())) == 2


def test_a_folder_that_cannot_be_written_keeps_nothing(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHUFFLED_DPSGD_CACHE", str(tmp_path / "file" / "below"))
    assert load_library(source).answer() == 42


def test_a_file_that_is_no_library_is_an_error(cache: Path, source: Path) -> None:
    load_library(source)
    (kept,) = cache.iterdir()
    kept.unlink()  # The library in memory is not to be written over.
    kept.write_text("not a library")
    load_library.cache_clear()
    with pytest.raises(CannotBuildError, match="could not be loaded"):
        load_library(source)


def test_without_a_compiler(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(CannotBuildError, match="no C compiler"):
        load_library(source)


def test_a_compiler_that_fails(source: Path) -> None:
    source.write_text("int answer(void) { return nothing; }\n")
    with pytest.raises(CannotBuildError, match="answer"):
        load_library(source)


def test_a_compiler_without_code_for_several_processors(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = 'case "$*" in *ONE_TARGET*) exec cc "$@";; esac; echo "no clones" >&2; exit 1'
    monkeypatch.setenv("CC", compiler(tmp_path, script))
    assert load_library(source).answer() == 42


def test_a_compiler_that_hangs(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(c_library, "_SECONDS", 0.1)
    monkeypatch.setenv("CC", compiler(tmp_path, "exec sleep 10"))
    with pytest.raises(CannotBuildError, match="did not run"):
        load_library(source)
