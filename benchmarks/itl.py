"""The longest gap between two tokens of running generations while a long prompt arrives among them.

    make bench-itl
    python benchmarks/itl.py --only llama_cpp --plots .

Eight generations run; a prompt of 4,096 tokens arrives. Once it is prefilled in chunks, as shipped: of as many tokens
as fit `target_step_seconds`, and the others go on between them; once in chunks of 512 tokens, however long they take;
once as a whole, because a tick may prefill as many tokens as it has. The loop and the engine are those of a worker, in
this process and without a queue: a gap is the time of one tick, and whoever carries tokens further adds about the same
few milliseconds to each (`make bench-loop` has that).

The numpy engine runs a random model of about 6 million weights, llama.cpp the shipped weights in Q4_0, both with a
context of 8,192. All runs of an engine must draw the same tokens.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # Run as a file, its folder would come first on the path, where `queue.py` hides the standard library's module.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import datetime
import importlib.util
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import numpy as np
from threadpoolctl import threadpool_limits

from benchmarks import gap_plot, report
from benchmarks.processes import wait_for
from benchmarks.random_model import SIX_MILLION, kv_bytes
from pool.rules.admission import Budgets
from pool.settings import ModelSettings
from tasks.payloads import Sampling
from tasks.ports import Engine, Event, Failed, Finished, Generation, TokenIds, Tokens
from workers.engines import load_engine
from workers.engines.numpy_llama import NumpyLlama
from workers.engines.tiny import tiny_llama
from workers.loop import BatchingLoop
from workers.weights import ensure_weights

STREAMS = 8
NEWCOMER = "newcomer"
CONTEXT = SIX_MILLION.context_length
LLAMA_SOURCE = "smollm2-135m-instruct:q4_0"
#: Of SmolLM2's KV: 30 layers, 3 KV heads of 64 dimensions, keys and values in float16.
LLAMA_BYTES_PER_TOKEN = 30 * 3 * 64 * 2 * 2
#: Tokens that each stream has before the prompt arrives, and makes after the newcomer's end.
AROUND_TOKENS = 24
#: More than any stream makes.
STREAM_TOKENS = 1024
STREAM_PROMPT_TOKENS = 16
NEWCOMER_TOKENS = 8
#: What chunks of an eighth of the prompt would reach on a machine where their length is all that bounds them: the last
#: one costs more than the average.
TARGET_RATIO = 0.25
WAIT_S = 240.0

CHUNKED, FIXED, WHOLE = "chunked", "in fixed chunks", "whole"


@dataclass
class Sink:
    """What the loop delivers: token ids and the times at which each came, by job."""

    tokens: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    times_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    ended: set[str] = field(default_factory=set)
    failure: str = ""

    def deliver(self, events: Sequence[Event]) -> None:
        """Called by the engine's thread."""
        now_s = time.perf_counter()
        for event in events:
            if isinstance(event, Tokens):
                self.tokens[event.job] += event.token_ids
                self.times_s[event.job] += [now_s] * len(event.token_ids)
            elif isinstance(event, Finished):
                self.ended.add(event.job)
            elif isinstance(event, Failed):
                self.failure = event.message

    def congested(self) -> bool:
        """Never."""
        return False

    def await_tokens(self, jobs: Sequence[str], count: int) -> None:
        """Until each of the jobs has so many."""
        self.wait(lambda: all(len(self.times_s.get(job, ())) >= count for job in jobs), f"{count} tokens of each")

    def wait(self, predicate: Callable[[], bool], what: str) -> None:
        """Until it holds. Raises RuntimeError when a generation fails, TimeoutError when nothing comes of it."""

        def holds() -> bool:
            if self.failure:
                raise RuntimeError(self.failure)
            return predicate()

        # Seldom: this thread must not take the interpreter from the engine's.
        wait_for(holds, what=what, timeout_s=WAIT_S, every_s=0.02)


@dataclass(frozen=True, slots=True)
class Run:
    """One arrival. `gaps`: (seconds since the arrival, gap in ms before that token) of all streams; `until_s`: when the
    newcomer's first token came; `tokens` by job."""

    gaps: list[gap_plot.Point]
    until_s: float
    tokens: Mapping[str, list[int]]

    @property
    def longest_ms(self) -> float:
        """Of the gaps that lie, in part at least, between the arrival and the newcomer's first token."""
        return max(gap_ms for at_s, gap_ms in self.gaps if at_s > 0 and at_s - gap_ms / 1000 < self.until_s)

    def sample(self) -> report.Sample:
        """Its figures."""
        before = [gap_ms for at_s, gap_ms in self.gaps if at_s <= 0]
        return {
            "longest gap ms": self.longest_ms,
            "p50 gap before ms": statistics.median(before),
            "newcomer's first token ms": self.until_s * 1000,
        }


class Arrivals:
    """An engine and the same work for each of its runs."""

    def __init__(self, engine: Engine, prompt_tokens: int, chunk_tokens: int) -> None:
        self.engine = engine
        self.runs: dict[str, list[Run]] = {CHUNKED: [], FIXED: [], WHOLE: []}
        #: Prompt tokens that a tick may prefill, and how long it should take.
        self._bounds = {
            CHUNKED: (chunk_tokens, ModelSettings(source="-").target_step_seconds),
            FIXED: (chunk_tokens, 0.0),
            WHOLE: (prompt_tokens, 0.0),
        }
        vocabulary, draw = engine.vocabulary, np.random.default_rng(1)
        ordinary = np.array([token for token in range(vocabulary.size) if vocabulary.token_bytes(token)], np.int32)
        self._prompts = {f"stream-{number}": draw.choice(ordinary, STREAM_PROMPT_TOKENS) for number in range(STREAMS)}
        self._long: TokenIds = draw.choice(ordinary, prompt_tokens)

    def run(self, kind: str) -> report.Sample:
        """One arrival, measured."""
        chunk_tokens, target_s = self._bounds[kind]
        budgets = Budgets(
            max_active_sessions=STREAMS + 1,
            max_batch_size=STREAMS + 1,
            max_prefill_tokens_per_tick=chunk_tokens,
        )
        loop, sink = BatchingLoop(self.engine, budgets, STREAMS + 1, target_step_s=target_s), Sink()
        loop.start(sink)
        try:
            arrived_s = self._arrive(loop, sink, tenant=f"{kind}-{len(self.runs[kind])}")
        finally:
            loop.stop()
        run = _run(sink, arrived_s)
        self._compare(run)
        self.runs[kind].append(run)
        return run.sample()

    def _arrive(self, loop: BatchingLoop, sink: Sink, tenant: str) -> float:
        """Runs everything; when the prompt arrived. Each run is a tenant of its own, so none finds another's KV."""
        for job, prompt in self._prompts.items():
            loop.submit(_generation(job, prompt, STREAM_TOKENS, tenant))
        jobs = list(self._prompts)
        sink.await_tokens(jobs, AROUND_TOKENS)
        arrived_s = time.perf_counter()
        loop.submit(_generation(NEWCOMER, self._long, NEWCOMER_TOKENS, tenant))
        sink.wait(lambda: NEWCOMER in sink.ended, "the newcomer's end")
        sink.await_tokens(jobs, max(len(sink.times_s[job]) for job in jobs) + AROUND_TOKENS)
        return arrived_s

    def _compare(self, run: Run) -> None:
        """Raises RuntimeError unless each job's tokens are those of the first run, as far as both go."""
        first = next((runs[0] for runs in self.runs.values() if runs), run)
        for job, tokens in run.tokens.items():
            both = min(len(tokens), len(first.tokens[job]))
            if tokens[:both] != first.tokens[job][:both]:
                raise RuntimeError("two runs drew different tokens: they did not do the same work")

    def picture(self, title: str) -> str:
        """The gaps of each kind's median run, as SVG."""
        runs = {kind: _median_run(each) for kind, each in self.runs.items()}
        return gap_plot.svg(title, {f"prefilled {kind}": run.gaps for kind, run in runs.items()})


def _generation(job: str, prompt: TokenIds, max_tokens: int, tenant: str) -> Generation:
    sampling = Sampling(temperature=0.0, ignore_eos=True)
    return Generation(job, 1, prompt, sampling, max_tokens=max_tokens, seed=0, tenant=tenant)


def _run(sink: Sink, arrived_s: float) -> Run:
    gaps = []
    for job, times_s in sink.times_s.items():
        if job != NEWCOMER:
            # The first few tokens came while others were still being prefilled.
            steady_s = times_s[AROUND_TOKENS // 3 :]
            gaps += [(at - arrived_s, (at - before) * 1000) for before, at in pairwise(steady_s)]
    return Run(sorted(gaps), sink.times_s[NEWCOMER][0] - arrived_s, dict(sink.tokens))


def _median_run(runs: Sequence[Run]) -> Run:
    return sorted(runs, key=lambda run: run.longest_ms)[len(runs) // 2]


# --- the engines


def load_random(prompt_tokens: int, threads: int) -> Engine:
    """The numpy engine, with room for all sessions."""
    weights, vocabulary = tiny_llama(7, SIX_MILLION)
    positions = STREAMS * (STREAM_PROMPT_TOKENS + STREAM_TOKENS + 64) + prompt_tokens + 2 * 64
    return NumpyLlama(weights, vocabulary, threads=threads, kv_bytes=kv_bytes(positions))


def load_llama_cpp(prompt_tokens: int, threads: int) -> Engine:  # noqa: ARG001 - as the other's
    """llama.cpp, a slot of the whole context for each session."""
    slots = STREAMS + 1
    settings = ModelSettings(
        backend="llama_cpp",
        source=LLAMA_SOURCE,
        threads=threads,
        target_inflight=slots,
        kept_prefixes=0,
        kv_budget_bytes=slots * CONTEXT * LLAMA_BYTES_PER_TOKEN,
    )
    return load_engine("bench", settings, weights=ensure_weights(LLAMA_SOURCE))


ENGINES: Mapping[str, Callable[[int, int], Engine]] = {"numpy": load_random, "llama_cpp": load_llama_cpp}


# --- the whole


def targets(medians: Mapping[str, Mapping[str, float]]) -> list[report.Target]:
    """Chunks against the whole, for each engine."""
    found = []
    for engine in ENGINES:
        gaps = [medians.get(f"{engine}, {kind}", {}).get("longest gap ms") for kind in (CHUNKED, WHOLE)]
        name = f"{engine}: longest gap, {CHUNKED} / {WHOLE}"
        found.append(report.Target(name, report.ratio(*gaps), at_most=TARGET_RATIO))
    return found


def measure(
    engines: Sequence[str], options: argparse.Namespace
) -> tuple[dict[str, list[report.Sample]], dict[str, str]]:
    """Every round of every engine, and a picture of each."""
    chunk = options.prompt_tokens // 8 if options.quick else ModelSettings(source="-").max_prefill_tokens_per_tick
    arrivals: dict[str, Arrivals] = {}
    try:
        for engine in engines:
            loaded = ENGINES[engine](options.prompt_tokens, options.threads)
            arrivals[engine] = Arrivals(loaded, options.prompt_tokens, chunk)
        contestants = {
            f"{engine}, {kind}": partial(each.run, kind) for engine, each in arrivals.items() for kind in each.runs
        }
        samples = report.interleaved(contestants, options.rounds)
        title = f"gaps of {STREAMS} generations, a prompt of {options.prompt_tokens} tokens arriving"
        return samples, {engine: each.picture(f"{engine}: {title}") for engine, each in arrivals.items()}
    finally:
        for each in arrivals.values():
            each.engine.close()


def main() -> None:
    """Measure and report."""
    parser = report.options(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--prompt-tokens", type=int, default=4096, help="of the prompt that arrives (4096)")
    parser.add_argument("--only", default="", choices=("", *ENGINES), help="one engine")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="also write the pictures into FOLDER")
    parser.add_argument(
        "--threads", type=int, default=min(4, len(os.sched_getaffinity(0))), help="threads of each engine"
    )
    options = parser.parse_args()
    if options.quick:
        options.prompt_tokens, options.rounds = min(options.prompt_tokens, 1024), 1

    engines = [engine for engine in ENGINES if options.only in ("", engine)]
    if importlib.util.find_spec("llama_cpp") is None and "llama_cpp" in engines:
        report.note("llama_cpp is left out: it is not installed (make llama)")
        engines.remove("llama_cpp")
    with threadpool_limits(limits=1, user_api="blas"):  # as a rank does: the engine has threads of its own
        samples, pictures = measure(engines, options)
    result = report.Report(
        name="itl",
        parameters={name: getattr(options, name) for name in ("prompt_tokens", "threads", "rounds")},
        samples=samples,
        targets=targets({name: report.medians(rounds) for name, rounds in samples.items()}),
        machine=report.machine(),
    )
    usual = not options.quick and options.prompt_tokens == 4096 and options.rounds >= report.MIN_ROUNDS
    whole = usual and len(engines) == len(ENGINES)
    for folder in ([report.RESULTS] if whole else []) + ([options.plots] if options.plots else []):
        folder.mkdir(parents=True, exist_ok=True)
        for engine, picture in pictures.items():
            (folder / f"itl-{datetime.date.today().isoformat()}-{engine}.svg").write_text(picture, encoding="utf-8")
    report.publish(result, json_file=options.json, record=whole)


if __name__ == "__main__":
    main()
