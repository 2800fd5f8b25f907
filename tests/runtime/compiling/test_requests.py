"""A request is the same on both sides, and what another process could not find is not sent."""

from __future__ import annotations

import os
import pickle
from typing import Any

import pytest

from shuffled_dpsgd.runtime.compiling import requests
from shuffled_dpsgd.runtime.compiling.requests import CompileRequest, NotNamedError, decode, encode

jit = pytest.importorskip("triton.runtime.jit")


class Source:
    def __init__(self, *parts: Any) -> None:
        self.parts = parts


class Callable(jit.JITCallable):  # type: ignore[misc]
    """A function as Triton wraps it, without its compiler."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn


def _kernel() -> None: ...


kernel = _kernel
kernel.__qualname__ = "wrapped"
wrapped = Callable(kernel)


def request_for(function: Any) -> CompileRequest:
    return CompileRequest(
        kind=Source, function=function, signature={"x": "*fp32", "N": "constexpr"},
        constants={(1,): 4}, attributes={(0,): [["tt.divisibility", 16]]}, target="a chip",
        options={"num_warps": 4}, environment={"TRITON_CACHE_DIR": "there"},
    )  # fmt: skip


def test_a_request_arrives_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "function_named", found)
    request = request_for(wrapped)
    arrived = decode(encode(request))
    assert arrived == request
    assert arrived.source.parts == (
        wrapped, request.signature, request.constants, request.attributes
    )  # fmt: skip


def found(module: str, name: str) -> Any:
    assert (module, name) == (__name__, "wrapped")
    return wrapped


def test_a_function_that_has_no_name_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "function_named", lambda *names: None)
    with pytest.raises(NotNamedError, match="wrapped"):
        encode(request_for(wrapped))


def test_nothing_that_cannot_be_pickled_is_sent() -> None:
    with pytest.raises((pickle.PicklingError, AttributeError)):
        encode(request_for(lambda: None))


def test_settings_of_triton_are_those_of_the_asker(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in requests.settings():
        monkeypatch.delenv(name)
    monkeypatch.setenv("TRITON_OLD", "1")
    monkeypatch.setenv("TRITON_CACHE_DIR", "here")
    requests.adopt({"TRITON_CACHE_DIR": "there"})
    assert requests.settings() == {"TRITON_CACHE_DIR": "there"}
    assert "PATH" in os.environ
