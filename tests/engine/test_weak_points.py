"""The weak points that batching loops usually have, one test each. Each was seen to fail on the naive design.

1 the oldest always decode; 2 newcomers pass the queue; 3 finished sessions are kept; 4 a finished id runs again;
5 one exception wedges the batch; 6 a lock is held over a step; 7 admission looks at each session alone; 8 no end but
the limit; 9 the loop waits for the network, or runs ahead of it.
"""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from pool.errors import Refused
from pool.rules.admission import Reason
from tasks.payloads import Sampling
from tasks.ports import Event, Failed, Finished, Member, StepResult, Tokens
from tasks.vocabulary import Vocabulary
from tests.engine.looping import finished, generation, looped, run, tokens_of, undisturbed
from tests.scripted.blocks import BlockEngine
from tests.waiting import wait_until
from workers.engines.tiny import tiny_vocabulary_data
from workers.loop import REMEMBERED
from workers.sessions import Session


def test_1_no_session_starves_behind_the_oldest() -> None:
    """Six sessions and two rows: each decodes in every third tick, the youngest as often as the oldest."""
    loop = looped(BlockEngine(), max_batch_size=2, max_prefill_tokens_per_tick=512)
    for index in range(6):
        loop.submit(generation(f"job-{index}", max_tokens=30))
    loop.tick()
    for _ in range(8):
        decoded = Counter(name for _ in range(3) for name in loop.tick().decoded)
        assert decoded == Counter({f"job-{index}/0": 1 for index in range(6)})


def test_2_a_newcomer_does_not_take_the_slot_that_a_cancel_freed() -> None:
    """It comes in the very moment of the cancel, and stands behind those who wait."""
    loop = looped(BlockEngine(), limit=1)
    for job in ("runs", "waits"):
        loop.submit(generation(job, max_tokens=40))
    loop.tick()
    loop.cancel("runs", 1)
    assert loop.admit(generation("comes", max_tokens=40)).reason is Reason.QUEUED
    assert loop.tick().promoted == ["waits/0"]


def sessions_alive() -> int:
    """Session objects in this process."""
    gc.collect()
    return sum(type(each) is Session for each in gc.get_objects())


def test_3_what_has_ended_is_forgotten() -> None:
    """After more jobs than are remembered by name, no session is left, and no more names than that."""
    others = sessions_alive()
    loop = looped(BlockEngine(blocks=16), max_queue_depth=REMEMBERED)
    for index in range(REMEMBERED + 500):
        loop.submit(generation(f"job-{index}", max_tokens=1, prompt=range(20, 24)))
        if index % 8 == 7:
            loop.tick()
    run(loop)
    assert sessions_alive() <= others
    assert (len(loop._ended), len(loop._known)) == (REMEMBERED, 0)


def test_4_an_attempt_runs_once() -> None:
    """Submitted again while it runs or after it has ended: refused, and its one result stands. The next attempt of the
    job is another."""
    loop = looped(BlockEngine())
    loop.submit(generation())
    with pytest.raises(Refused) as while_live:
        loop.submit(generation())
    events = run(loop)
    with pytest.raises(Refused) as after_its_end:
        loop.submit(generation(prompt=range(50, 90)))
    assert while_live.value.code == after_its_end.value.code == "duplicate"
    assert run(loop) == []
    assert len(tokens_of(events)) == 8
    assert loop.telemetry()["rejected_by_reason"] == {"rejected-duplicate": 2}
    loop.submit(generation(attempt=2))
    assert finished(run(loop)).attempt == 2


class Culprits(BlockEngine):
    """Raises while any of these sessions is in the batch."""

    culprits = frozenset({"bad/0"})

    def step(self, batch: Sequence[Member]) -> list[StepResult]:
        if any(member.session in self.culprits for member in batch):
            raise ValueError("it may hold a prompt")
        return super().step(batch)


def test_5_one_exception_ends_one_session() -> None:
    """The culprit fails by name; its mates' tokens are those that they would be alone, and the loop goes on."""
    loop = looped(Culprits())
    for job in ("a", "bad", "b"):
        loop.submit(generation(job, max_tokens=20))
    events = run(loop)
    (failure,) = [event for event in events if isinstance(event, Failed)]
    assert (failure.job, failure.code, failure.message) == ("bad", "engine_error", "The engine failed: ValueError.")
    alone = undisturbed(BlockEngine(), generation("a", max_tokens=20))[0]
    assert tokens_of(events, "a") == tokens_of(events, "b") == alone
    loop.submit(generation("later"))
    assert len(tokens_of(run(loop), "later")) == 8


class Slow(BlockEngine):
    """A step lasts until the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.stepping, self.go_on = threading.Event(), threading.Event()

    def step(self, batch: Sequence[Member]) -> list[StepResult]:
        self.stepping.set()
        assert self.go_on.wait(60)
        return super().step(batch)


class Sink:
    """Takes all events; congested when the test says so."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.full = False

    def deliver(self, events: Sequence[Event]) -> None:
        self.events += events

    def congested(self) -> bool:
        return self.full


def test_6_nobody_waits_for_a_step() -> None:
    """While the engine is in one, others submit, cancel, look and set limits, and all of it counts after the step."""
    engine, sink = Slow(), Sink()
    loop = looped(engine)
    loop.submit(generation("a", max_tokens=500))
    loop.start(sink)
    assert engine.stepping.wait(60)

    def everything() -> None:
        assert loop.cancel("a", 1)
        loop.submit(generation("b", max_tokens=2))
        loop.set_limit(3)
        assert loop.capacity().in_flight == 2
        assert loop.telemetry()["active_sessions"] == 1

    other = threading.Thread(target=everything)
    other.start()
    other.join(20)
    assert not other.is_alive()
    engine.go_on.set()
    wait_until(lambda: any(isinstance(event, Finished) for event in sink.events), description="b to end")
    loop.stop()
    assert loop.telemetry()["cancelled_sessions"] == 1
    # The step that was under way when the cancel came may have given its token.
    assert len(tokens_of(sink.events, "a")) <= 1


def test_7_the_sum_of_all_sessions_keeps_the_budget() -> None:
    """Each would fit alone, and all of them would not: they take turns, and none loses its KV to another."""
    loop = looped(BlockEngine(blocks=10), max_prefill_tokens_per_tick=512)
    given = [generation(f"job-{index}", range(20 + index, 80 + index), max_tokens=20) for index in range(6)]
    for each in given:
        loop.submit(each)
    events: list[Event] = []
    while loop.capacity().in_flight:
        events += loop.tick().events
        assert loop.telemetry()["kv_pressure"] <= 1
        assert loop.telemetry()["active_sessions"] <= 2
    assert loop.telemetry()["cache_misses_total"] == 0
    for each in given:
        assert tokens_of(events, each.job) == undisturbed(BlockEngine(), each)[0]


def test_8_generations_end_by_themselves() -> None:
    """The model's end of text and a stop string each end one before its limit; `ignore_eos` does not."""
    engine = BlockEngine()
    free = generation(max_tokens=60, sampling=Sampling(temperature=0.0, ignore_eos=True))
    stream = undisturbed(engine, free)[0]
    at = next(place for place, token in enumerate(stream) if place > 3 and token not in stream[:place])
    engine.vocabulary = Vocabulary(tiny_vocabulary_data().model_copy(update={"eos_ids": (stream[at],)}))
    outputs = []
    for index, sampling in enumerate(({}, {"ignore_eos": True})):
        loop = looped(engine)
        loop.submit(generation(f"job-{index}", max_tokens=60, sampling=Sampling(temperature=0.0, **sampling)))
        outputs.append(finished(run(loop), f"job-{index}").outputs[0])
    assert [(each.finish_reason, each.tokens) for each in outputs] == [("stop", at + 1), ("length", 60)]
    text = outputs[1].text
    stop = text[len(text) // 2 :][:4]
    loop = looped(engine)
    loop.submit(generation(max_tokens=60, sampling=Sampling(temperature=0.0, ignore_eos=True, stop=(stop,))))
    stopped = finished(run(loop)).outputs[0]
    assert (stopped.text, stopped.finish_reason) == (text[: text.index(stop)], "stop")
    assert stopped.tokens < 60


def test_9_the_loop_pauses_while_its_output_waits_to_be_stored() -> None:
    """It neither waits for the network itself nor runs ahead of it: with a congested sink it makes no step, and its
    thread still shows progress; then it goes on where it was."""
    engine, sink = BlockEngine(), Sink()
    loop = looped(engine)
    sink.full = True
    loop.submit(generation("a", max_tokens=300))
    loop.start(sink)
    turns = loop.progress()
    wait_until(lambda: loop.progress() > turns + 20, description="turns without steps")
    assert (loop.telemetry()["ticks"], sink.events) == (0, [])
    sink.full = False
    wait_until(lambda: len(sink.events) > 5, description="tokens")
    sink.full = True
    turns = loop.progress()
    wait_until(lambda: loop.progress() > turns + 2, description="the loop to have seen it")
    ticks = loop.telemetry()["ticks"]
    turns = loop.progress()
    wait_until(lambda: loop.progress() > turns + 20, description="turns without steps")
    assert loop.telemetry()["ticks"] == ticks
    sink.full = False
    wait_until(lambda: isinstance(sink.events[-1], Finished), description="the end")
    loop.stop()
    ids = np.array([token for event in sink.events if isinstance(event, Tokens) for token in event.token_ids])
    assert ids.tolist() == undisturbed(BlockEngine(), generation("a", max_tokens=300))[0]
