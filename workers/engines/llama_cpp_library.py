"""The llama.cpp library: loaded when it is first needed, silent, and asked for files to be requantised.

It writes to stderr by itself; here its lines become debug lines of a logger. They are about files, sizes and devices,
never about what is generated.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
from collections import deque
from functools import cache
from pathlib import Path
from typing import Any

from pool.errors import ConfigurationError

log = logging.getLogger("genpool.llama_cpp")

_ERROR = 4  # ggml_log_level
#: What the library complained about last, for messages of our own.
_complaints: deque[str] = deque(maxlen=3)
#: The callbacks given to the library, which must live as long as it does.
_callbacks: list[Any] = []


@cache
def library() -> Any:
    """The low-level module of llama-cpp-python. Raises ConfigurationError when it is not installed."""
    try:
        module = importlib.import_module("llama_cpp.llama_cpp")
    except ImportError as error:
        raise ConfigurationError(
            f"The backend llama_cpp needs llama.cpp, which is not installed here ({error}). In a checkout, type: "
            'make llama. Elsewhere: pip install "genpool[llama]"; both build it, which needs a C++ compiler.',
            param="backend",
        ) from None
    except (OSError, RuntimeError) as error:
        raise ConfigurationError(f"llama.cpp is installed, but does not load: {error}", param="backend") from None
    callback = module.llama_log_callback(_on_line)
    _callbacks.append(callback)
    module.llama_log_set(callback, ctypes.c_void_p(0))
    module.llama_backend_init()
    return module


def version() -> str:
    """Version of the package and what the library was compiled for."""
    package = importlib.import_module("llama_cpp").__version__
    return f"{package} {library().llama_print_system_info().decode().strip()}"


def complaint() -> str:
    """What the library last complained about, as the end of a sentence; empty when it did not."""
    return f": {_complaints[-1]}" if _complaints else ""


def forget_complaints() -> None:
    """Before a call whose complaints are to be told."""
    _complaints.clear()


def requantise(source: Path, target: Path, file_type: int) -> None:
    """Write the model `source`, in the quantisation `file_type` (a `llama_ftype`), to `target`. Raises
    ConfigurationError when it cannot be."""
    lib = library()
    params = lib.llama_model_quantize_default_params()
    params.ftype = file_type
    params.allow_requantize = True
    forget_complaints()
    if lib.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params)) != 0:
        raise ConfigurationError(f"{source.name} cannot be requantised{complaint()}.", param="source")


def _on_line(level: int, text: bytes, _data: Any) -> None:
    """Called by the library, from any of its threads."""
    if level != _ERROR and not log.isEnabledFor(logging.DEBUG):
        return
    line = text.decode(errors="replace").strip()
    if level == _ERROR and line:
        _complaints.append(line)
    if line:
        log.debug("%s", line)
