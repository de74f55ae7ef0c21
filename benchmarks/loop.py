"""What the whole stack costs an engine: the same decode-bound work through genpool and in the engine's bare batch loop.

    make bench-loop
    python benchmarks/loop.py --model random:7

Eight streams at once, submitted to the store, read from it by waiting readers through the API node's own fan-in. The
bare loop runs the same engine, sampler and number of threads in a process of its own; whoever is not measured is
frozen or waits for a line. Both sides must draw the same tokens, else the benchmark fails.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # Run as a file, its folder would come first on the path, where `queue.py` hides the standard library's module.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import json
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from benchmarks import report
from benchmarks.processes import START_S, Dialogue, Worker, module, state_server, wait_for
from benchmarks.workload import FOLLOWING_TOKENS, MODEL, PAUSE_S, SAMPLING, SEED, STREAMS, model_settings, prompts
from pool.store.log import LogEntry
from pool.store.records import NewJob
from tasks.config import Settings, load_configuration
from tasks.payloads import GenerationRequest, TokenPrompt
from tasks.services import open_services
from webapp.waits import Waiter, Waits

WAIT_S = 120.0
SMALL_MODEL = "random:7"


class Stack:
    """The client of a running genpool: submits and reads as an API node does."""

    def __init__(self, settings: Settings) -> None:
        self._services = open_services(settings)
        self._waits = Waits(self._services.store, self._services.client, grace_ms=15_000)
        self._readers = ThreadPoolExecutor(STREAMS)

    def ready(self) -> bool:
        """Whether a worker has published the model."""
        return self._services.cards.get(MODEL) is not None

    def vocabulary_size(self) -> int:
        """Tokens of the model; only once it is ready."""
        known = self._services.cards.get(MODEL)
        assert known is not None and known[1] is not None
        return known[1].size

    def streams(self, wanted: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
        """All at once, each with a reader: seconds from the first submit to the last reader's end, and the tokens."""
        started_s = time.perf_counter()
        waiters = [self._submit(prompt, tokens, watched=True) for prompt in wanted]
        outputs = list(self._readers.map(_read, waiters))
        return time.perf_counter() - started_s, outputs

    def logged(self, wanted: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
        """All at once, nobody reads: seconds from the first submit to the last terminal record, and the tokens."""
        started_s = time.perf_counter()
        waiters = [self._submit(prompt, tokens, watched=False) for prompt in wanted]
        refs = [(waiter.ref, 0) for waiter in waiters]
        store = self._services.store
        for waiter in waiters:
            waiter.close()

        def ended() -> bool:
            return all(store.read(ref).terminal for ref, _ in refs)

        # Looking costs time of the engine's own cores, so it looks seldom; the error is a tenth of a second in twenty.
        wait_for(ended, what="the jobs' end", timeout_s=WAIT_S, every_s=0.2)
        took_s = time.perf_counter() - started_s
        views = [view for view in store.views(refs) if view is not None]
        return took_s, [_tokens(view.entries) for view in views]

    def first_token_ms(self, prompt: list[int]) -> float:
        """One request on the idle system: from before its validation to its first token at a waiting reader."""
        time.sleep(PAUSE_S)
        started_s = time.perf_counter()
        waiter = self._submit(prompt, FOLLOWING_TOKENS, watched=True)
        seen: list[float] = []
        _read(waiter, seen)
        return (seen[0] - started_s) * 1000

    def close(self) -> None:
        """End readers and connections."""
        self._readers.shutdown()
        self._waits.close()
        self._services.close()

    def _submit(self, prompt: list[int], tokens: int, *, watched: bool) -> Waiter:
        request = GenerationRequest(
            model=MODEL,
            prompt=TokenPrompt(token_ids=tuple(prompt)),
            sampling=SAMPLING.model_copy(update={"seed": SEED}),
            max_tokens=tokens,
        )
        watch = self._waits.node_id if watched else ""
        job: NewJob = self._services.submitter.prepare(request, door="responses", watch=watch)
        waiter = self._waits.open(job.ref)
        self._services.store.submit(job)
        waiter.arm()
        return waiter


def _read(waiter: Waiter, seen: list[float] | None = None) -> list[int]:
    """All tokens of a stream, as they come; `seen` gets the time of each piece of news with tokens."""
    output: list[int] = []
    try:
        while True:
            view = waiter.next(WAIT_S)
            if view is None:
                raise TimeoutError(f"no news of a stream for {WAIT_S:g} s")
            if view.entries and seen is not None:
                seen.append(time.perf_counter())
            output += _tokens(view.entries)
            if view.record.terminal:
                return output
    finally:
        waiter.close()


def _tokens(entries: tuple[LogEntry, ...]) -> list[int]:
    return [token for entry in entries for token in entry.token_ids]


class Contest:
    """Both sides, up and warm, and the rounds between them."""

    def __init__(self, stack: Stack, worker: Worker, bare: Dialogue, wanted: list[list[int]], tokens: int) -> None:
        self._stack, self._worker, self._bare = stack, worker, bare
        self._wanted, self._tokens = wanted, tokens
        self._expected: list[list[int]] | None = None

    def warm_up(self) -> None:
        """A short run of each."""
        self._stack.streams(self._wanted, 4)
        self._bare.ask("prefill", 3)

    def through_stack(self, requests: int, *, watched: bool) -> report.Sample:
        """A round of the whole stack."""
        self._worker.check()
        self._stack.first_token_ms(self._wanted[0])  # whatever slept or was frozen is awake now
        run = self._stack.streams if watched else self._stack.logged
        took_s, outputs = run(self._wanted, self._tokens)
        self._compare(outputs)
        sample = {"tokens/s": STREAMS * self._tokens / took_s}
        if watched:
            times_ms = [self._stack.first_token_ms(self._wanted[0]) for _ in range(requests)]
            sample |= _first_token(times_ms)
        return sample

    def bare(self, requests: int) -> report.Sample:
        """A round of the engine alone."""
        self._worker.hold()
        try:
            self._bare.ask("prefill", 1)
            took_s, outputs = self._bare.ask("decode")
            self._compare(outputs)
            times_ms = self._bare.ask("prefill", requests)
        finally:
            self._worker.go()
        return {"tokens/s": STREAMS * self._tokens / took_s, **_first_token(times_ms)}

    def _compare(self, outputs: list[list[int]]) -> None:
        """Raises RuntimeError unless all runs draw the same tokens."""
        self._expected = self._expected or outputs
        if outputs != self._expected or {len(output) for output in outputs} != {self._tokens}:
            raise RuntimeError("the stack and the bare loop drew different tokens: they did not do the same work")


def _first_token(times_ms: list[float]) -> dict[str, float]:
    return {
        "first token p50 ms": report.percentile(times_ms, 50),
        "first token p99 ms": report.percentile(times_ms, 99),
    }


def run(options: argparse.Namespace) -> dict[str, list[report.Sample]]:
    """Bring both sides up, and measure."""
    with tempfile.TemporaryDirectory(prefix="genpool-bench-") as name, state_server(Path(name)) as server:
        folder = Path(name)
        config = folder / "genpool.toml"
        model = model_settings(options.model, options.threads).model_dump(exclude_unset=True)
        lines = [f"{field} = {json.dumps(value)}" for field, value in model.items()]
        config.write_text("\n".join([f'[state]\nurl = "{server.url}"', f"[models.{MODEL}]", *lines, ""]))
        stack = Stack(load_configuration(config, environ={}).settings)
        arguments = ("-A", "tasks", "worker", "-Q", MODEL, "-l", "WARNING", "--without-mingle", "--without-gossip")
        worker = Worker(module("celery", *arguments, variables={"GENPOOL_CONFIG": str(config)}), folder / "worker.log")
        bare: Dialogue | None = None
        try:
            _await_model(stack, worker)
            wanted = prompts(options.prompt_tokens, stack.vocabulary_size())
            bare_arguments = (options.model, str(options.threads), json.dumps(wanted), str(options.tokens))
            bare = Dialogue(module("benchmarks.bare_loop", *bare_arguments), folder / "bare.log")
            contest = Contest(stack, worker, bare, wanted, options.tokens)
            contest.warm_up()
            contestants = {
                "bare loop": partial(contest.bare, options.requests),
                "stack, 8 readers": partial(contest.through_stack, options.requests, watched=True),
                "stack, nobody reads": partial(contest.through_stack, options.requests, watched=False),
            }
            return report.interleaved(contestants, options.rounds)
        finally:
            if bare is not None:
                bare.stop()
            stack.close()
            worker.stop()


def _await_model(stack: Stack, worker: Worker) -> None:
    def loaded() -> bool:
        worker.check()
        return stack.ready()

    wait_for(loaded, what="the worker to load the model", timeout_s=START_S * 5, every_s=0.1)


def targets(medians: dict[str, dict[str, float]]) -> list[report.Target]:
    """Throughput as a ratio, the first token as a difference."""
    bare, stack = medians["bare loop"], medians["stack, 8 readers"]
    added_ms = stack["first token p50 ms"] - bare["first token p50 ms"]
    return [
        report.Target("tokens/s / bare loop", report.ratio(stack["tokens/s"], bare["tokens/s"]), at_least=0.97),
        report.Target("added first token p50 ms", added_ms, at_most=5),
    ]


def main() -> None:
    """Measure and report."""
    parser = report.options(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a model's source (smollm2-135m-instruct)")
    parser.add_argument("--tokens", type=int, default=256, help="output tokens of a stream (256)")
    parser.add_argument("--prompt-tokens", type=int, default=16, help="prompt tokens of a stream (16)")
    parser.add_argument("--requests", type=int, default=30, help="requests of the first-token phase (30)")
    parser.add_argument(
        "--threads", type=int, default=min(4, len(os.sched_getaffinity(0))), help="threads of the engine"
    )
    options = parser.parse_args()
    if options.quick:
        options.model, options.tokens, options.requests, options.rounds = SMALL_MODEL, 64, 5, 1

    samples = run(options)
    parameters = ("model", "tokens", "prompt_tokens", "requests", "threads", "rounds")
    result = report.Report(
        name="loop",
        parameters={name: getattr(options, name) for name in parameters} | {"streams": STREAMS},
        samples=samples,
        targets=targets({name: report.medians(rounds) for name, rounds in samples.items()}),
        machine=report.machine(),
    )
    whole = not options.quick and options.model != SMALL_MODEL and options.rounds >= report.MIN_ROUNDS
    report.publish(result, json_file=options.json, record=whole)


if __name__ == "__main__":
    main()
