"""What one process asks another to compile: a variant of a kernel, as bytes.

Functions go by their names: both processes import the same modules.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import os
import pickle
from dataclasses import dataclass
from typing import Any

# Settings of Triton that may have changed since the other process was started.
_SETTINGS = "TRITON_"


@dataclass(frozen=True, kw_only=True)
class CompileRequest:
    """A call of `triton.compile`; `kind` is the class of its source."""

    kind: type
    function: Any
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    target: Any
    options: dict[str, Any]
    environment: dict[str, str]

    @property
    def source(self) -> Any:
        return self.kind(self.function, self.signature, self.constants, self.attributes)


def request_of(
    kernel: Any, signature: Any, device: int, constants: Any, options: Any, attrs: Any, _: bool
) -> CompileRequest:
    """What Triton's own method for compiling is about to do, given its arguments but the key."""
    return CompileRequest(
        kind=kernel.ASTSource,
        function=kernel,
        signature=signature,
        constants=constants,
        attributes=attrs,
        target=kernel.device_caches[device][2],
        options=options.__dict__,
        environment=settings(),
    )


def key_on_disk(request: CompileRequest) -> str:
    """The key under which Triton keeps the variant."""
    compiler = importlib.import_module("triton.compiler.compiler")
    cache = importlib.import_module("triton.runtime.cache")
    native = importlib.import_module("triton._C.libtriton")
    source = request.source
    backend = compiler.make_backend(request.target)
    options = backend.parse_options({**request.options, **source.parse_options()})
    key = cache.get_cache_key(source, backend, options, native.get_cache_invalidating_env_vars())
    return hashlib.sha256(key.encode()).hexdigest()


class NotNamedError(Exception):
    """A function that another process cannot find."""


def settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_SETTINGS)}


def adopt(environment: dict[str, str]) -> None:
    """Have the settings of Triton that another process has."""
    for name in settings().keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)


def encode(request: CompileRequest) -> bytes:
    """The request as bytes.

    Raises:
        NotNamedError, pickle.PicklingError, TypeError, AttributeError: it cannot be sent.
    """
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(request)
    return buffer.getvalue()


def decode(text: bytes) -> CompileRequest:
    request = pickle.loads(text)
    assert isinstance(request, CompileRequest)
    return request


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        from triton.runtime.jit import JITCallable

        if not isinstance(value, JITCallable):
            return NotImplemented
        names = value.fn.__module__, value.fn.__qualname__
        if function_named(*names) is not value:
            raise NotNamedError(".".join(names))
        return function_named, names


def function_named(module: str, name: str) -> Any:
    """A function of a module; None if there is none of that name."""
    return getattr(importlib.import_module(module), name, None)
