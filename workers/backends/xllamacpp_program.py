"""llama.cpp's server from the prebuilt package xllamacpp, as a program of its own that takes some of llama-server's
arguments: `python -m workers.backends.xllamacpp_program --model FILE --port PORT ...`.
"""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any


def main() -> None:
    """Serve until a signal comes."""
    # Before any thread of the server is made, which would take the signals.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    import xllamacpp  # noqa: PLC0415 - optional

    options = _options()
    server = xllamacpp.Server(_parameters(xllamacpp, options))
    print(f"listening at {server.listening_address}", flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    # Destroying the server may wait for its clients; nobody needs what it would save.
    os._exit(0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="xllamacpp")
    parser.add_argument("--model", required=True)
    parser.add_argument("--alias", default="")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--ctx-size", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--n-gpu-layers", type=int, default=-1)
    parser.add_argument("--flash-attn", choices=("on", "off", "auto"), default="auto")
    for flag in ("--no-kv-unified", "--metrics", "--no-webui", "--offline"):
        parser.add_argument(flag, action="store_true")
    return parser.parse_args()


def _parameters(xllamacpp: Any, options: argparse.Namespace) -> Any:
    params = xllamacpp.CommonParams()
    params.model.path = options.model
    if options.alias:
        params.model_alias = {options.alias}
    params.hostnames = [options.host]
    params.port = options.port
    params.n_parallel = options.parallel
    params.n_ctx = options.ctx_size
    if options.threads:
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
    params.n_gpu_layers = options.n_gpu_layers
    kinds = xllamacpp.llama_flash_attn_type
    params.flash_attn_type = {
        "on": kinds.LLAMA_FLASH_ATTN_TYPE_ENABLED,
        "off": kinds.LLAMA_FLASH_ATTN_TYPE_DISABLED,
        "auto": kinds.LLAMA_FLASH_ATTN_TYPE_AUTO,
    }[options.flash_attn]
    params.kv_unified = not options.no_kv_unified
    params.endpoint_metrics = options.metrics
    params.ui = not options.no_webui
    params.offline = options.offline
    params.verbosity = 1
    key = os.environ.get("LLAMA_API_KEY", "")
    if key:
        params.api_keys = [key]
    return params


if __name__ == "__main__":
    main()
