"""Times prefills and decode steps of a batching loop, visit by visit (`workers/calibration/plan.py`).

It is the worker's own loop with the model's own budgets, without threads, state server or readers. Of what a point
shows in several rounds the fastest counts: whatever else runs on the machine only ever makes it slower.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

import numpy as np

from pool.errors import GenerationFailed, InvalidRequest
from tasks.payloads import Sampling
from tasks.ports import Failed, Finished, Generation, TokenIds, Tokens
from workers.calibration.fit import DecodePoint, MixedPoint, PrefillPoint
from workers.calibration.plan import (
    PROMPT_SHARE,
    SHORTEST_TOKENS,
    TIMED_STEPS,
    UNTIMED_STEPS,
    Cell,
    Plan,
    Room,
    Visit,
    longest_prompt,
    output_tokens,
    plan,
)
from workers.loop import BatchingLoop
from workers.scheduler import Tick

#: Every point is measured this often at least, however long it takes.
LEAST_ROUNDS = 2
#: And no more often than this.
MOST_ROUNDS = 50

Clock = Callable[[], float]
Progress = Callable[[str], None]


@dataclass(slots=True)
class Joining:
    """A prompt that joined others: seconds to its first token, and in how many steps of that time the others
    decoded."""

    seconds: float
    steps: int


@dataclass(slots=True)
class Samples:
    """What was measured, by point: a sample a round. Seconds; `decode`: (context tokens in sum, seconds of a step)."""

    prefill: dict[int, list[float]] = field(default_factory=dict)
    decode: dict[Cell, list[tuple[float, float]]] = field(default_factory=dict)
    mixed: dict[Cell, list[Joining]] = field(default_factory=dict)

    def prefill_point(self, length: int) -> PrefillPoint:
        """The fastest of that length."""
        return PrefillPoint(length, min(self.prefill[length]))

    def decode_point(self, cell: Cell) -> DecodePoint:
        """The fastest of that cell."""
        context, step = min(self.decode[cell], key=lambda sample: sample[1])
        return DecodePoint(cell[1], context, step)

    def mixed_point(self, cell: Cell) -> MixedPoint:
        """The fastest of that cell."""
        fastest = min(self.mixed[cell], key=lambda joining: joining.seconds)
        decode_seconds = fastest.steps * self.decode_point(cell).step_seconds
        return MixedPoint(cell[1], cell[0], fastest.seconds, decode_seconds)

    def disturbance(self) -> float:
        """How much slower than the fastest sample of a point their average is, as a part, in the median of points: near
        0 on a quiet machine."""
        groups = [*self.prefill.values(), *([step for _, step in cell] for cell in self.decode.values())]
        return median(fmean(group) / min(group) - 1 for group in groups)


@dataclass(frozen=True, slots=True)
class Measurement:
    """`rounds`: whole ones; `longest_tokens`: of a prompt; `cut`: whether longer ones would have fitted the context but
    not the time."""

    plan: Plan
    samples: Samples
    rounds: int
    longest_tokens: int
    cut: bool


class Bench:
    """Drives one loop from this thread. `vocabulary`: token ids that prompts may be made of."""

    def __init__(self, loop: BatchingLoop, ordinary: TokenIds, *, seed: int, clock: Clock = time.perf_counter) -> None:
        self._loop = loop
        self._ordinary = ordinary
        self._draw = np.random.default_rng(seed)
        self._clock = clock
        self._jobs = 0
        #: Positions of each live session.
        self._held: dict[str, int] = {}

    def prefill(self, length: int) -> float:
        """Seconds of a cold prompt of this length, alone."""
        seconds = self._join(length, output=2).seconds
        self._clear()
        return seconds

    def visit(self, visit: Visit, samples: Samples, *, output: int) -> None:
        """Make a visit; `output`: tokens that each session may decode."""
        length = visit.prompt_tokens
        samples.prefill.setdefault(length, []).append(self._join(length, output=output).seconds)
        for batch in visit.batches:
            while len(self._held) < batch:
                before = len(self._held)
                joining = self._join(length, output=output)
                # Where the batch before was timed, and nobody else has joined since.
                if before in visit.mixed and (length, before) in samples.decode:
                    samples.mixed.setdefault((length, before), []).append(joining)
            samples.decode.setdefault((length, batch), []).append(self._steps(batch))
        self._clear()

    def _join(self, length: int, *, output: int) -> Joining:
        """A new session, up to its first token."""
        self._jobs += 1
        job = f"calibration-{self._jobs}"
        generation = Generation(
            job=job,
            attempt=1,
            prompt=self._draw.choice(self._ordinary, length),
            sampling=Sampling(temperature=1.0, ignore_eos=True),
            max_tokens=output,
            seed=self._jobs,
        )
        others, steps = len(self._held), 0
        started = self._clock()
        decision = self._loop.admit(generation)
        if not decision.accepted:
            raise InvalidRequest(f"A prompt of {length} tokens was refused: {decision.detail}.", param="prompts")
        self._held[job] = length
        while True:
            report = self._tick()
            steps += report.occupancy == others > 0
            if any(isinstance(event, Tokens) and event.job == job for event in report.events):
                return Joining(self._clock() - started, steps)

    def _steps(self, batch: int) -> tuple[float, float]:
        """The context in sum and the seconds of a decode step of all sessions, in the median of some."""
        timed: list[tuple[float, float]] = []
        for number in range(UNTIMED_STEPS + TIMED_STEPS):
            context = float(sum(self._held.values()))
            started = self._clock()
            report = self._tick()
            seconds = self._clock() - started
            if report.occupancy != batch:
                raise GenerationFailed(f"{report.occupancy} of {batch} sessions decoded.", code="engine_error")
            if number >= UNTIMED_STEPS:
                timed.append((context, seconds))
        return median(context for context, _ in timed), median(seconds for _, seconds in timed)

    def _tick(self) -> Tick:
        report = self._loop.tick()
        for event in report.events:
            if isinstance(event, Failed):
                raise GenerationFailed(f"A prompt failed: {event.message}", code=event.code)
            if isinstance(event, Finished):  # its output was measured for all that is timed
                raise GenerationFailed("A prompt found no room beside the others.", code="engine_error")
            if isinstance(event, Tokens):
                self._held[event.job] += len(event.token_ids)
        return report

    def _clear(self) -> None:
        """End all sessions."""
        for job in self._held:
            self._loop.cancel(job, 1)
        self._held.clear()
        self._loop.tick()


def measure(
    bench: Bench, room: Room, *, seconds: float, seed: int, progress: Progress, clock: Clock = time.perf_counter
) -> Measurement:
    """Measure for about `seconds`, and LEAST_ROUNDS rounds at least. Raises InvalidRequest where there is too little
    room, GenerationFailed where the engine fails."""
    started = clock()
    fitting = longest_prompt(room)
    longest, prompt_s = _affordable(bench, room, fitting, seconds)
    chosen = plan(room, longest=longest, seconds_per_token=prompt_s / longest, seconds=seconds)
    most = max(max(visit.batches, default=1) for visit in chosen.visits)
    progress(f"prompts of {SHORTEST_TOKENS} to {longest} tokens, batches of up to {most}, for about {seconds:g} s")
    samples, order = Samples(), random.Random(seed)
    rounds = 0
    while rounds < MOST_ROUNDS and (rounds < LEAST_ROUNDS or clock() - started < seconds):
        for visit in order.sample(chosen.visits, len(chosen.visits)):
            if rounds >= LEAST_ROUNDS and clock() - started >= seconds:
                return Measurement(chosen, samples, rounds, longest, longest < fitting)
            output = output_tokens(visit.prompt_tokens, room.sessions, room.chunk_tokens)
            bench.visit(visit, samples, output=output)
        rounds += 1
        progress(f"round {rounds} done after {clock() - started:.0f} s")
    return Measurement(chosen, samples, rounds, longest, longest < fitting)


def _affordable(bench: Bench, room: Room, fitting: int, seconds: float) -> tuple[int, float]:
    """The longest prompt that the time allows for, at most `fitting`, and what it takes; warms the engine up, too."""
    length = max(SHORTEST_TOKENS // room.grid, 1) * room.grid
    bench.prefill(length)
    while True:
        taken_s = bench.prefill(length)
        if length == fitting or (2 * taken_s > seconds * PROMPT_SHARE and length >= 16 * SHORTEST_TOKENS):
            return length, taken_s
        length = min(2 * length, fitting)


def ordinary_tokens(token_bytes: Sequence[bytes]) -> TokenIds:
    """Ids of the tokens that have text."""
    return np.array([token for token, text in enumerate(token_bytes) if text], np.int32)
