"""Launchers of kernels that are loaded under one name by several threads stay what they are."""

from __future__ import annotations

import threading
from types import ModuleType, SimpleNamespace

import pytest

from shuffled_dpsgd.runtime import launchers, rehearsals

PAIRS = 200


def fake_build() -> ModuleType:
    """A loader as Python's is for a name that was loaded before: one object, written anew."""
    build, shared = ModuleType("build"), ModuleType("launcher")
    build.waits = threading.Event()  # type: ignore[attr-defined]

    def load(name: str, path: str) -> ModuleType:
        shared.launch = path  # type: ignore[attr-defined]
        build.waits.wait(0.0005)  # type: ignore[attr-defined]
        return shared

    build._load_module_from_path = load  # type: ignore[attr-defined]
    return build


def found_by_threads(build: ModuleType) -> list[tuple[str, str]]:
    """What two threads that load at the same time asked for, and got."""
    found: list[tuple[str, str]] = []

    def ask(path: str) -> None:
        for _ in range(PAIRS):
            module = build._load_module_from_path("launcher", path)
            build.waits.wait(0.0001)
            found.append((path, module.launch))

    threads = [threading.Thread(target=ask, args=(path,)) for path in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_a_plain_loader_mixes_launchers_up() -> None:
    assert any(asked != got for asked, got in found_by_threads(fake_build()))


def test_launchers_are_kept_apart() -> None:
    build = fake_build()
    assert launchers.keep_apart(build)
    found = found_by_threads(build)
    assert len(found) == 2 * PAIRS
    assert all(asked == got for asked, got in found)


def test_it_is_done_once() -> None:
    build = fake_build()
    launchers.keep_apart(build)
    loader = build._load_module_from_path
    assert launchers.keep_apart(build)
    assert build._load_module_from_path is loader


def test_a_release_without_that_loader_is_not_understood() -> None:
    assert not launchers.keep_apart(ModuleType("build"))


def test_nothing_is_rehearsed_where_launchers_may_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(type="cuda")
    monkeypatch.delenv(rehearsals.SWITCH, raising=False)
    for safe in (True, False):
        monkeypatch.setattr(launchers, "make_safe_for_threads", lambda safe=safe: safe)
        assert rehearsals.may_rehearse(gpu) is safe  # type: ignore[arg-type]


def test_the_triton_at_hand_is_understood() -> None:
    pytest.importorskip("triton")
    assert launchers.make_safe_for_threads()


@pytest.mark.parametrize("understood", [True, False])
def test_a_release_with_many_launchers_is_made_safe_or_said(
    monkeypatch: pytest.MonkeyPatch, understood: bool
) -> None:
    build = fake_build() if understood else ModuleType("build")
    modules = {"triton.runtime.build": build, "triton.backends.nvidia.driver": ModuleType("old")}
    modules["triton.backends.nvidia.driver"].make_launcher = print  # type: ignore[attr-defined]

    def load(name: str) -> ModuleType:
        if name not in modules:
            raise ImportError(name)
        return modules[name]

    said: list[str] = []
    monkeypatch.setattr(launchers, "importlib", SimpleNamespace(import_module=load))
    monkeypatch.setattr(launchers, "triton_available", lambda: True)
    monkeypatch.setattr(launchers, "say_once", said.append)
    assert launchers.make_safe_for_threads.__wrapped__() is understood
    assert len(said) == (not understood)
