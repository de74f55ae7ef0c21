"""How soon a returning Program has its first token: KV still here, put back from memory or disk, or computed again.

    make bench-offload
    python benchmarks/offload.py --only llama_cpp

A Program of 2,000 tokens has said something and comes back with 50 tokens more. Its KV is still in the engine; or it
was offloaded to memory, or to disk, and others have used the room since; or it was dropped. The loop and the engine are
those of a worker, in this process and without a queue; the engines are numpy with the shipped weights, and llama.cpp
with them in Q4_0.

Whether KV is put back is the loop's own choice, by a cost of prefilling that is measured here first. The first token is
timed from the request's arrival at the loop. All ways must say the same.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # Run as a file, its folder would come first on the path, where `queue.py` hides the standard library's module.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import importlib.util
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from threadpoolctl import threadpool_limits

from benchmarks import report
from pool.rules.admission import Budgets
from pool.settings import ModelSettings
from tasks.payloads import Sampling
from tasks.ports import Engine, Failed, Finished, Generation, TokenIds, Tokens
from workers.engines import load_engine
from workers.hints import HintOutcome
from workers.loop import BatchingLoop
from workers.offload import OffloadBudget
from workers.weights import ensure_weights

#: Engine -> its settings; room for the Program and another one.
SETTINGS = {
    "numpy": ModelSettings(source="smollm2-135m-instruct", kv_budget_bytes=2**29),
    "llama_cpp": ModelSettings(
        backend="llama_cpp",
        source="smollm2-135m-instruct:q4_0",
        target_inflight=2,
        kept_prefixes=1,
        kv_budget_bytes=2**29,
    ),
}
WAYS = ("resident", "memory", "disk", "prefilled")
RESTORED = ("memory", "disk")
HOLDER = "program"
MORE_TOKENS = 50
SAID_TOKENS = 8
WAIT_S = 60.0
_GREEDY = Sampling(temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Answer:
    """One request: its first token's time, its tokens, and how much of its prompt was there or was put back."""

    first_token_ms: float
    tokens: tuple[int, ...]
    cached_tokens: int


class Returning:
    """One engine, and a Program whose turns are the same in all ways."""

    def __init__(self, engine: Engine, prompt_tokens: int, folder: Path) -> None:
        self._engine = engine
        self._folder = folder
        vocabulary, draw = engine.vocabulary, np.random.default_rng(1)
        ordinary = np.array([token for token in range(vocabulary.size) if vocabulary.token_bytes(token)], np.int32)
        self._first: TokenIds = draw.choice(ordinary, prompt_tokens)
        self._more: TokenIds = draw.choice(ordinary, MORE_TOKENS)
        self._runs = 0
        self._said: dict[str, tuple[int, ...]] = {}
        #: Of a cold prefill: measured by the runs themselves, the first being thrown away.
        self._seconds_per_token = 0.0

    def round(self) -> report.Sample:
        """Every way once."""
        if not self._seconds_per_token:
            self.run("prefilled")
        sample: dict[str, float] = {}
        for way in WAYS:
            answer, restores = self.run(way)
            sample[f"{way} ms"] = answer.first_token_ms
            sample[f"{way} cached"] = answer.cached_tokens
            if way in RESTORED:
                sample[f"{way} put back"] = restores
        return sample

    def run(self, way: str) -> tuple[Answer, int]:
        """A Program begins, leaves in this way, and comes back; its second turn, and how often KV was put back."""
        self._runs += 1
        memory, disk = (2**30 if way == "memory" else 0), (2**30 if way == "disk" else 0)
        loop = BatchingLoop(
            self._engine,
            Budgets(max_active_sessions=2),
            2,
            offload=OffloadBudget(memory, disk, self._folder),
            prefill_seconds=lambda tokens: tokens * self._seconds_per_token,
        )
        try:
            said = () if way == "prefilled" and "first" in self._said else self._ask(loop, "first", self._first).tokens
            said = self._same("first", said or self._said["first"])
            if way in RESTORED:
                _offload(loop)
            elif way == "prefilled":
                loop.drop_holder(HOLDER)
                loop.tick()
            if way != "resident":
                _use_all_room(self._engine)
            turn = np.concatenate((self._first, np.array(said, np.int32), self._more))
            answer = self._ask(loop, "turn", turn)
            self._same("turn", answer.tokens)
            if way == "prefilled":
                self._seconds_per_token = answer.first_token_ms / 1000 / len(turn)
            return answer, loop.telemetry()["kv_restores_total"]
        finally:
            loop.stop()

    def _ask(self, loop: BatchingLoop, job: str, prompt: TokenIds) -> Answer:
        tenant = f"tenant-{self._runs}"
        given = Generation(job, 1, prompt, _GREEDY, SAID_TOKENS, seed=0, tenant=tenant, holder=HOLDER)
        began_s, first_s = time.perf_counter(), 0.0
        loop.submit(given)
        tokens: list[int] = []
        while True:
            for event in loop.tick().events:
                if isinstance(event, Failed):
                    raise RuntimeError(f"{job} failed: {event.message}")
                if isinstance(event, Finished):
                    return Answer((first_s - began_s) * 1000, tuple(tokens), event.cached_tokens or 0)
                if isinstance(event, Tokens):
                    first_s = first_s or time.perf_counter()
                    tokens += event.token_ids

    def _same(self, job: str, tokens: tuple[int, ...]) -> tuple[int, ...]:
        if self._said.setdefault(job, tokens) != tokens:
            raise RuntimeError("two ways drew different tokens")
        return tokens


def _offload(loop: BatchingLoop) -> None:
    """And wait until the engine need not hold it any more."""
    loop.hint(HOLDER, "offload")
    until_s = time.perf_counter() + WAIT_S
    while time.perf_counter() < until_s:
        loop.tick()
        for result in loop.hint_results():
            if result.outcome is not HintOutcome.APPLIED:
                raise RuntimeError(f"offloading {result.outcome}: {result.reason}")
            return
    raise RuntimeError("offloading did not end")


def _use_all_room(engine: Engine) -> None:
    """Others have all that nobody holds, so that nothing is left that is merely cached."""
    begun: list[str] = []
    positions = engine.capability().max_positions
    while positions:
        session = f"other-{len(begun)}"
        if engine.begin(session, 0, np.array([5], np.int32), positions, "others") is None:
            positions //= 2
        else:
            begun.append(session)
    for session in begun:
        engine.release(session, 0)


def targets(samples: Mapping[str, Sequence[report.Sample]]) -> list[report.Target]:
    """Where KV is put back, the first token comes sooner."""
    found = []
    for engine, rounds in samples.items():
        medians = report.medians(rounds)
        for way in RESTORED:
            name = f"{engine}: first token, prefilled / put back from {way}"
            if medians.get(f"{way} put back"):
                ratio = report.ratio(medians.get("prefilled ms"), medians.get(f"{way} ms"))
                found.append(report.Target(name, ratio, at_least=1))
            else:
                report.note(f"{name}: computing it again was chosen")
    return found


def main() -> None:
    """Measure and report."""
    parser = report.options(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--prompt-tokens", type=int, default=2000, help="of the Program (2000)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of an engine (all cores)")
    parser.add_argument("--only", default="", choices=("", *SETTINGS), help="one engine")
    options = parser.parse_args()
    if options.quick:
        options.prompt_tokens, options.rounds = min(options.prompt_tokens, 300), 1

    engines = [name for name in SETTINGS if options.only in ("", name)]
    here = [name for name in engines if name == "numpy" or importlib.util.find_spec(name) is not None]
    with tempfile.TemporaryDirectory(prefix="genpool-bench-") as folder, threadpool_limits(limits=1, user_api="blas"):
        contestants = {}
        for name in here:
            settings = SETTINGS[name].model_copy(update={"threads": options.threads})
            engine = load_engine(name, settings, weights=ensure_weights(settings.source))
            contestants[name] = partial(Returning(engine, options.prompt_tokens, Path(folder)).round)
        samples = report.interleaved(contestants, options.rounds)
    result = report.Report(
        name="offload",
        parameters={"prompt_tokens": options.prompt_tokens, "rounds": options.rounds, "threads": options.threads},
        samples=samples,
        targets=targets(samples),
        machine=report.machine(),
    )
    whole = not options.quick and len(here) == len(SETTINGS) and options.rounds >= report.MIN_ROUNDS
    report.publish(result, json_file=options.json, record=whole and options.prompt_tokens >= 2000)


if __name__ == "__main__":
    main()
