"""The backend `vllm_serve`: vLLM as a child of the worker, from an environment of its own if the catalogue says so."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pool.settings import ModelSettings
from workers.backends.endpoint import LOOPBACK
from workers.backends.server_process import ServerProcess

PROGRAM = ("vllm", "serve")
KEY_VARIABLE = "VLLM_API_KEY"
#: Nobody is told what is served here, and programs beside vLLM's in its environment are found.
QUIET = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


def vllm_serve(name: str, model: ModelSettings) -> ServerProcess:
    """The child, not yet started."""
    folder = Path(model.source).expanduser()
    source = str(folder) if folder.is_dir() else model.source
    program = model.upstream.program or PROGRAM

    def command(port: int) -> Sequence[str]:
        # What the catalogue adds comes last, so that it wins.
        return [
            *program,
            source,
            *("--served-model-name", name),
            *("--host", LOOPBACK),
            *("--port", str(port)),
            *("--max-num-seqs", str(model.target_inflight)),
            "--enable-prompt-tokens-details",
            *model.upstream.arguments,
        ]

    return ServerProcess(name, command, KEY_VARIABLE, QUIET)
