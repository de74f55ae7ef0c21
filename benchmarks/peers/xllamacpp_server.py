"""llama.cpp's server from the prebuilt package xllamacpp, started like the one that is built here: same weights, slots,
context and threads, everything else as it is by default.

    python xllamacpp_server.py PORT WEIGHTS THREADS SLOTS CONTEXT
"""

from __future__ import annotations

import signal
import sys

import xllamacpp


def main() -> None:
    """Serve until a signal comes."""
    port, weights, threads, slots, context = sys.argv[1:]
    params = xllamacpp.CommonParams()
    params.model.path = weights
    params.port = int(port)
    params.n_parallel = int(slots)
    params.n_ctx = int(context)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(threads)
    params.verbosity = 1
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    main()
