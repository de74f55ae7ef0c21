"""The engines part of the batch benchmark: the worker's own loop over an engine, without a queue around it.

All prompts are prefilled in one tick, untimed; then the clock runs from the first decode step to the last draw. So
sessions of N tokens take N engine steps, one of them the prefill, however many sessions there are. That is counted in
every run, and anything else is an error.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from benchmarks import report
from pool.rules.admission import Budgets
from pool.settings import ModelSettings
from tasks.payloads import Sampling
from tasks.ports import Engine, Event, Failed, Generation, TokenIds, Tokens
from workers.engines import load_engine
from workers.engines.llama_cpp_engine import LlamaCpp
from workers.loop import BatchingLoop
from workers.weights import ensure_weights

NUMPY = "smollm2-135m-instruct"
LLAMA_CPP = "smollm2-135m-instruct:q4_0"
#: Engine settings that are compared, by name.
SETTINGS = {
    "numpy exact": ModelSettings(source=NUMPY),
    "numpy fast": ModelSettings(source=NUMPY, exact=False),
    "llama.cpp exact": ModelSettings(backend="llama_cpp", source=LLAMA_CPP),
    "llama.cpp fast": ModelSettings(backend="llama_cpp", source=LLAMA_CPP, flash_attention=True),
}
#: Those that promise the same tokens in every batch.
EXACT = ("numpy exact", "llama.cpp exact")
LEVELS = (1, 2, 4, 8, 16)
#: The fast setting of the numpy engine is looked at where it may differ.
FAST_NUMPY_LEVELS = (1, 8)
MOST = max(LEVELS)
_KV_BYTES = 2**30
_GREEDY = Sampling(temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Size:
    """Tokens of each prompt and of each output, concurrencies, threads of an engine."""

    prompt_tokens: int
    tokens: int
    levels: tuple[int, ...]
    threads: int


class Contestant:
    """One engine with one group of settings."""

    def __init__(self, name: str, size: Size) -> None:
        room = {"target_inflight": MOST, "kept_prefixes": 0, "kv_budget_bytes": _KV_BYTES}
        settings = SETTINGS[name].model_copy(update={"threads": size.threads, **room})
        self.name = name
        self._size = size
        self._engine: Engine = load_engine(name, settings, weights=Path(ensure_weights(settings.source)))
        self._prompts = prompts(size.prompt_tokens, self._engine.vocabulary.size)
        self._reference: list[list[int]] = []
        self._runs = 0
        #: Streams that had other tokens than alone, and streams compared.
        self.differing = self.compared = 0

    @property
    def invariant(self) -> bool:
        """Whether the engine promises the same bits in every batch."""
        return self._engine.capability().batch_invariant

    def warm_up(self) -> None:
        """Where the same tokens are promised, every session alone: what all later runs are compared with. Else one."""
        alone = range(MOST if self.name in EXACT else 1)
        self._reference = [self._run([session])[2][0] for session in alone]

    def measure(self, level: int) -> report.Sample:
        """A round at one concurrency. The sessions change from round to round."""
        first = self._runs * level % MOST
        sessions = [(first + number) % MOST for number in range(level)]
        rate, steps, outputs = self._run(sessions)
        if self.name in EXACT:
            self.compared += level
            self.differing += sum(
                output != self._reference[session] for session, output in zip(sessions, outputs, strict=True)
            )
        return {"tokens/s": rate, "ms/step": level / rate * 1000, "steps/N": steps / self._size.tokens}

    def close(self) -> None:
        """Free the engine."""
        self._engine.close()

    def _run(self, sessions: Sequence[int]) -> tuple[float, int, list[list[int]]]:
        """Decode tokens a second of all sessions together, engine steps from beginning to end, and their tokens."""
        self._runs += 1
        level, tokens = len(sessions), self._size.tokens
        budgets = Budgets(
            max_active_sessions=level,
            max_batch_size=level,
            max_prefill_tokens_per_tick=level * self._size.prompt_tokens,
        )
        loop = BatchingLoop(self._engine, budgets, level, reuse="off")
        for session in sessions:
            request = Generation(str(session), self._runs, self._prompts[session], _GREEDY, tokens, seed=0)
            if not loop.admit(request).accepted:
                raise RuntimeError(f"{self.name} has no room for {level} sessions")
        events = loop.tick().events
        calls = self._calls()
        started_s = time.perf_counter()
        while loop.capacity().in_flight:
            events += loop.tick().events
        took_s = time.perf_counter() - started_s
        self._check_steps(loop, self._calls() - calls)
        return level * (tokens - 1) / took_s, loop.figures.ticks, _outputs(events, sessions, tokens)

    def _calls(self) -> int:
        """Calls of the library that computes batches; 0 where there is none below the engine's own step."""
        return self._engine.decodes if isinstance(self._engine, LlamaCpp) else 0

    def _check_steps(self, loop: BatchingLoop, calls: int) -> None:
        """N tokens take N steps, however many sessions have as many: one prefills all prompts, N - 1 decode. Raises
        RuntimeError otherwise."""
        tokens, figures = self._size.tokens, loop.figures
        wanted_calls = tokens - 1 if isinstance(self._engine, LlamaCpp) else 0
        if (figures.ticks, figures.decode_batches, calls) != (tokens, tokens - 1, wanted_calls):
            raise RuntimeError(
                f"{self.name}: sessions of {tokens} tokens took {figures.ticks} steps, {figures.decode_batches} with "
                f"decode rows and {calls} calls of the library for them"
            )


def prompts(length: int, vocabulary_size: int) -> list[TokenIds]:
    """`MOST` prompts of `length` ordinary token ids; they differ from the first token on."""
    draw = np.random.default_rng(5)
    low = min(20, vocabulary_size // 4)
    return [draw.integers(low, vocabulary_size, length).astype(np.int32) for _ in range(MOST)]


def _outputs(events: Sequence[Event], sessions: Sequence[int], tokens: int) -> list[list[int]]:
    outputs: dict[str, list[int]] = {str(session): [] for session in sessions}
    for event in events:
        if isinstance(event, Failed):
            raise RuntimeError(f"a generation failed: {event.message}")
        if isinstance(event, Tokens):
            outputs[event.job] += event.token_ids
    if {len(output) for output in outputs.values()} != {tokens}:
        raise RuntimeError("a generation has not as many tokens as it should")
    return list(outputs.values())


def run(size: Size, rounds: int) -> tuple[dict[str, list[report.Sample]], list[report.Target]]:
    """All contestants, all levels, in turn. Samples are named `CONTESTANT, LEVEL`."""
    contestants: list[Contestant] = []
    with threadpool_limits(limits=1, user_api="blas"):  # as a rank does: the engine has threads of its own
        try:
            for name in SETTINGS:
                report.note(f"loading {name}, and running its sessions alone")
                contestants.append(Contestant(name, size))
                contestants[-1].warm_up()
            cells = {
                f"{each.name}, {level}": partial(each.measure, level)
                for each in contestants
                for level in size.levels
                if each.name != "numpy fast" or level in FAST_NUMPY_LEVELS
            }
            samples = report.interleaved(cells, rounds)
            return samples, targets(samples, contestants)
        finally:
            for each in contestants:
                each.close()


def targets(samples: Mapping[str, Sequence[report.Sample]], contestants: Sequence[Contestant]) -> list[report.Target]:
    """Throughput as ratios in one run; the same tokens, counted."""
    medians = {name: report.medians(rounds) for name, rounds in samples.items()}

    def rate(name: str) -> float | None:
        return medians.get(name, {}).get("tokens/s")

    gains = {"numpy exact": 3.0, "llama.cpp exact": 1.7, "llama.cpp fast": 2.1}
    found = [
        report.Target(f"{name}: 8 sessions / 1", report.ratio(rate(f"{name}, 8"), rate(f"{name}, 1")), at_least=bound)
        for name, bound in gains.items()
    ]
    slower = report.ratio(rate("numpy fast, 1"), rate("numpy exact, 1"))
    found.append(report.Target("numpy, 1 session: time exact / fast", slower, at_most=1.3))
    steps = max(
        (sample["steps/N"] for name in samples if name.endswith(", 8") for sample in samples[name]), default=None
    )
    found.append(report.Target("engine steps for 8 sessions of N tokens / N, all rounds", steps, at_most=1))
    for each in contestants:
        if each.name in EXACT:
            differing = each.differing if each.invariant and each.compared else None
            found.append(report.Target(f"{each.name}: streams with other tokens than alone", differing, at_most=0))
    return found
