"""The backend `llama_server`: llama.cpp's own server as a child of the worker."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from pool.errors import ConfigurationError
from pool.settings import ModelSettings
from workers.backends.endpoint import LOOPBACK
from workers.backends.server_process import ServerProcess
from workers.engines.llama_cpp_model import kv_bytes_per_token, trained_context
from workers.weights import ensure_weights

PROGRAM = "llama-server"
PACKAGE = "xllamacpp"
KEY_VARIABLE = "LLAMA_API_KEY"
#: Positions are allocated in such units.
UNIT = 256


def llama_server(name: str, model: ModelSettings) -> ServerProcess:
    """The child, not yet started. Raises ConfigurationError where program or weights are not there."""
    weights = ensure_weights(model.source)
    program = list(model.upstream.program) or _program()
    context_tokens = _context_tokens(name, model, weights)

    def command(port: int) -> Sequence[str]:
        # What the catalogue adds comes last, so that it wins.
        return [
            *program,
            *("--model", str(weights)),
            *("--alias", name),
            *("--host", LOOPBACK),
            *("--port", str(port)),
            *("--parallel", str(model.target_inflight)),
            *("--ctx-size", str(context_tokens)),
            *(("--threads", str(model.threads)) if model.threads else ()),
            *(("--n-gpu-layers", str(model.gpu_layers)) if model.gpu_layers else ()),
            *("--flash-attn", "on" if model.flash_attention else "off"),
            "--no-kv-unified",
            "--metrics",
            "--no-webui",
            "--offline",
            *model.upstream.arguments,
        ]

    return ServerProcess(name, command, KEY_VARIABLE, {})


def _program() -> list[str]:
    found = shutil.which(PROGRAM)
    if found:
        return [found]
    if importlib.util.find_spec(PACKAGE) is not None:
        return [sys.executable, "-m", "workers.backends.xllamacpp_program"]
    raise ConfigurationError(
        f"No {PROGRAM} is on PATH, and the package {PACKAGE} is not installed; upstream.program can name another.",
        param="upstream.program",
    )


def _context_tokens(name: str, model: ModelSettings, weights: Path) -> int:
    """Positions of all slots together: what the KV budget holds, and no more than each could use."""
    slots = model.target_inflight
    share = model.kv_budget_bytes // kv_bytes_per_token(weights) // slots // UNIT * UNIT
    if share == 0:
        raise ConfigurationError(
            f"Model {name}: kv_budget_bytes is {model.kv_budget_bytes}: not {UNIT} positions for each of {slots} "
            "generations (target_inflight).",
            param="kv_budget_bytes",
        )
    return slots * min(share, -(-trained_context(weights) // UNIT) * UNIT)
