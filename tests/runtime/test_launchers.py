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


def compiled_kernel() -> type:
    """Triton's class: the launcher is there before the kernel is on the GPU."""

    class CompiledKernel:
        def __init__(self) -> None:
            self.function: str | None = None
            self._run: str | None = None
            self.loads = 0

        def _init_handles(self) -> None:
            if self.function is None:
                self._run = "launcher"
                self.loads += 1
                threading.Event().wait(0.05)
                self.function = "on the GPU"

        @property
        def run(self) -> str | None:
            if self._run is None:
                self._init_handles()
            return self._run

    return CompiledKernel


def functions_at_launch(compiled: type) -> tuple[list[str | None], int]:
    """What two threads that launch a kernel for the first time find, and how often it is loaded."""
    kernel, found = compiled(), []
    together = threading.Barrier(2, timeout=10)

    def launch(after: float) -> None:
        together.wait()
        threading.Event().wait(after)
        assert kernel.run == "launcher"
        found.append(kernel.function)

    threads = [threading.Thread(target=launch, args=(after,)) for after in (0.0, 0.02)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found, kernel.loads


def test_triton_hands_out_launchers_of_kernels_that_are_not_loaded() -> None:
    found, _ = functions_at_launch(compiled_kernel())
    assert None in found


def test_launchers_are_handed_out_once_their_kernel_is_loaded() -> None:
    compiled = compiled_kernel()
    assert launchers.wait_for_loading(compiled)
    assert functions_at_launch(compiled) == (["on the GPU"] * 2, 1)


def test_other_compiled_kernels_are_not_understood() -> None:
    assert not launchers.wait_for_loading(SimpleNamespace)


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
    modules["triton.compiler.compiler"] = ModuleType("compiler")
    modules["triton.compiler.compiler"].CompiledKernel = compiled_kernel()  # type: ignore[attr-defined]

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
