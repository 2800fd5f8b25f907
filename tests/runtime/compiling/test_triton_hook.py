"""Variants are compiled by workers, once each, and here where workers fail."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from shuffled_dpsgd.runtime.compiling import announcements, triton_hook
from shuffled_dpsgd.runtime.compiling.triton_hook import TritonHook
from shuffled_dpsgd.runtime.compiling.workers import Answer, WorkerError, WorkersHangError


class Kernel:
    """A kernel of Triton's, as far as the hook looks at it."""

    ASTSource = "source"

    def __init__(self, module: str = "shuffled_dpsgd.clipping.kernels.triton.sums") -> None:
        self.fn = SimpleNamespace(__module__=module, __qualname__="sum_kernel")
        self.device_caches: dict[int, Any] = {0: ({}, {}, "target", None, None)}


class FakeAnswer(Answer):
    """Puts what was asked for on disk once it is waited for, or fails."""

    def __init__(self, workers: FakeWorkers, request: str) -> None:
        self._workers, self._request = workers, request

    def wait(self) -> None:
        if self._workers.error is not None:
            raise WorkerError(self._workers.error)
        if self._workers.finds:
            self._workers.disk.add(self._request)


class FakeWorkers:
    """Notes what it is asked for; nobody is there if they have left."""

    def __init__(self, error: str | None = None, have_left: bool = False) -> None:
        self.disk: set[str] = set()
        self.asked: list[str] = []
        self.urgent: list[bool] = []
        self.error = error
        self.have_left = have_left
        self.finds = True

    def ask(self, request: str, *, is_urgent: bool) -> FakeAnswer:
        self.asked.append(request)
        self.urgent.append(is_urgent)
        if self.have_left:
            raise WorkerError("Broken pipe")
        return FakeAnswer(self, request)


class Scene:
    """A hook with fake workers; `here` lists what Triton itself was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, workers: FakeWorkers) -> None:
        self.said: list[str] = []
        self.here: list[str] = []
        monkeypatch.setattr(triton_hook, "encode", lambda request: request.signature)
        monkeypatch.setattr(triton_hook, "is_on_disk", lambda r: r.signature in workers.disk)
        monkeypatch.setattr(triton_hook, "say_once", self.said.append)
        self.hook = TritonHook(self._compile_here, workers, lambda: None)  # type: ignore[arg-type]

    def _compile_here(self, kernel: Kernel, key: str, signature: str, *rest: Any) -> str:
        self.here.append(signature)
        kernel.device_caches[0][0][key] = f"compiled {signature}"
        return f"compiled {signature}"

    def compile(self, kernel: Kernel, variant: str) -> Any:
        return self.hook.compile(
            kernel, variant, variant, 0, {}, SimpleNamespace(num_warps=4), {}, False
        )


def test_a_worker_compiles_what_is_not_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = FakeWorkers()
    workers.disk.add("known")
    scene, kernel = Scene(monkeypatch, workers), Kernel()
    for variant in ("known", "new"):
        assert scene.compile(kernel, variant) == f"compiled {variant}"
    assert workers.asked == ["new"]
    assert scene.here == ["known", "new"]  # Triton reads both from disk.
    assert scene.hook.tally == {"on disk": 1, "a worker": 1}
    assert not scene.said


def test_a_variant_that_two_threads_need_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = FakeWorkers()
    scene, kernel, began = Scene(monkeypatch, workers), Kernel(), threading.Barrier(4, timeout=10)
    found: list[Any] = []

    def need() -> None:
        began.wait()
        found.append(scene.compile(kernel, "new"))

    threads = [threading.Thread(target=need) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["compiled new"] * 4
    assert (workers.asked, scene.here) == (["new"], ["new"])


def test_a_thread_that_has_to_wait_asks_first_for_all_that_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers = FakeWorkers()
    workers.disk.add("known")
    scene, kernel, asked_by_then = Scene(monkeypatch, workers), Kernel(), []
    wait = FakeAnswer.wait
    monkeypatch.setattr(
        FakeAnswer, "wait", lambda a: (asked_by_then.append(list(workers.asked)), wait(a))
    )

    def work() -> None:
        for variant in ("first", "known", "second", "first"):
            assert (scene.compile(kernel, variant) is None) is announcements.is_announcing()

    with announcements.announced_by(work, is_urgent=False):
        work()
    scene.compile(kernel, "third")
    assert asked_by_then[0] == ["first", "second"]
    assert workers.asked == ["first", "second", "third"]
    assert workers.urgent == [False, False, True]
    assert scene.here == ["first", "known", "second", "third"]


def test_kernels_of_others_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = FakeWorkers()
    scene = Scene(monkeypatch, workers)
    scene.compile(Kernel("their.kernels"), "theirs")
    assert (workers.asked, scene.here) == ([], ["theirs"])


@pytest.mark.parametrize(("have_left", "said"), [(False, 2), (True, 0)])
def test_what_no_worker_compiles_is_compiled_here(
    monkeypatch: pytest.MonkeyPatch, have_left: bool, said: int
) -> None:
    """Workers that had nothing to do for a while are neither asked nor missed."""
    workers = FakeWorkers("it has ended", have_left)
    scene, kernel = Scene(monkeypatch, workers), Kernel()
    for variant in ("this", "that"):
        assert scene.compile(kernel, variant) == f"compiled {variant}"
    assert scene.hook.tally == {"this process": 2}
    assert len(workers.asked) == (0 if have_left else 2)
    assert len(scene.said) == said
    assert all("it has ended" in text for text in scene.said)


def test_workers_that_hang_are_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = FakeWorkers()
    scene, kernel = Scene(monkeypatch, workers), Kernel()

    def hang(_: FakeAnswer) -> None:
        raise WorkersHangError("no answer in 120 s")

    monkeypatch.setattr(FakeAnswer, "wait", hang)
    for variant in ("this", "that"):
        assert scene.compile(kernel, variant) == f"compiled {variant}"
    assert workers.asked == ["this"]
    assert ["no answer" in text for text in scene.said] == [True]


def test_workers_whose_results_are_not_found_are_not_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers = FakeWorkers()
    workers.finds = False
    scene, kernel = Scene(monkeypatch, workers), Kernel()
    for variant in ("this", "that"):
        scene.compile(kernel, variant)
    assert workers.asked == ["this"]
    assert scene.here == ["this", "that"]
    assert ["not found" in text for text in scene.said] == [True]


def test_an_error_of_the_compiler_is_raised_here(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = FakeWorkers("CompilationError")
    scene = Scene(monkeypatch, workers)

    def fail(*_: Any) -> None:
        raise ValueError("no such layout")

    scene.hook._compile_here = fail
    with pytest.raises(ValueError, match="layout"):
        scene.compile(Kernel(), "new")
    assert not scene.said


def test_a_release_with_another_method_is_not_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(self: Any, key: str, everything_else: Any) -> None: ...

    jit = SimpleNamespace(_do_compile=other)
    module = SimpleNamespace(import_module=lambda _: SimpleNamespace(JITFunction=jit))
    monkeypatch.setattr(triton_hook, "importlib", module)
    assert triton_hook.install(FakeWorkers(), lambda: None) is None  # type: ignore[arg-type]
    assert jit._do_compile is other


def test_the_triton_at_hand_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    jit = pytest.importorskip("triton.runtime.jit").JITFunction
    monkeypatch.setattr(jit, "_do_compile", jit._do_compile)
    assert triton_hook.install(FakeWorkers(), lambda: None) is not None  # type: ignore[arg-type]
