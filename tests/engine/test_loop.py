"""The batching loop over the tiny model, driven tick by tick from the test's own thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from pool.errors import InvalidRequest
from pool.rules.admission import Reason
from tasks.payloads import Sampling
from tasks.ports import Engine, Event, Failed, Finished, Member, StepResult, Tokens
from tests.engine.looping import GREEDY, SEEDED, finished, generation, looped, run, text_of, tokens_of
from tests.scripted.blocks import BlockEngine
from workers.engines.numpy_llama import NumpyLlama
from workers.engines.paged_kv import position_bytes
from workers.engines.tiny import tiny_llama
from workers.loop import BatchingLoop, _Submitted


def make_loop(engine: Engine | None = None, *, limit: int = 8, pages: int = 256, **budgets: Any) -> BatchingLoop:
    """A loop with an engine of its own, whose KV has so many pages of 64 positions."""
    return looped(engine or numpy_engine(pages), limit=limit, **budgets)


def numpy_engine(pages: int = 256) -> NumpyLlama:
    """The tiny model."""
    weights, vocabulary = tiny_llama(7)
    return NumpyLlama(weights, vocabulary, kv_bytes=pages * 64 * position_bytes(weights.config))


class FaultyEngine(NumpyLlama):
    """The numpy engine, raising whenever one of the sessions in `culprits` is in the batch."""

    culprits: frozenset[str] = frozenset()
    calls = 0

    def step(self, batch: Sequence[Member]) -> list[StepResult]:
        self.calls += 1
        if any(member.session in self.culprits for member in batch):
            raise OSError("the prompt must not appear in any message")
        return super().step(batch)


def test_a_job_runs_to_its_limit_and_tells_all() -> None:
    """Its tokens arrive one event a step, the texts join to the result, and nothing is left behind."""
    loop = make_loop()
    loop.submit(generation())
    events = run(loop)
    end = finished(events)
    assert len(tokens_of(events)) == 8
    assert (end.outputs[0].finish_reason, end.outputs[0].tokens, end.prompt_tokens) == ("length", 8, 20)
    assert text_of(events) == end.outputs[0].text
    assert loop.telemetry()["kv_total_bytes"] == 0
    assert loop.capacity().in_flight == 0


def test_eight_sessions_take_as_many_decode_batches_as_one() -> None:
    """Batching is real: N tokens for 8 sessions cost N - 1 decode batches (one comes with the prefill), not 8 N."""
    loop = make_loop(max_prefill_tokens_per_tick=1000)
    for index in range(8):
        loop.submit(generation(f"job-{index}"))
    run(loop)
    assert loop.figures.decode_batches == 7
    assert loop.figures.decode_tokens == 56
    assert loop.telemetry()["batch_occupancy_avg"] == 8.0


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_streams_do_not_depend_on_company(sampling: Sampling) -> None:
    """Alone, with seven others, with fewer rows than sessions and with small prefill budgets: the same tokens."""
    alone = make_loop()
    alone.submit(generation(sampling=sampling, max_tokens=30))
    expected = tokens_of(run(alone))
    for budgets in ({}, {"max_batch_size": 3}, {"max_prefill_tokens_per_tick": 16}):
        loop = make_loop(**budgets)
        for index in range(7):
            loop.submit(
                generation(f"other-{index}", range(40 + index, 90 + 3 * index), sampling=sampling, max_tokens=20)
            )
        loop.submit(generation(sampling=sampling, max_tokens=30))
        assert tokens_of(run(loop)) == expected


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("logged", [1, 7, 23, 39, 40])
def test_a_takeover_continues_the_very_same_stream(sampling: Sampling, logged: int) -> None:
    """Logged tokens are forced, never drawn or told again; what follows is what would have followed, to the end of the
    text, also when the log already holds the last token."""
    whole = make_loop()
    whole.submit(generation(sampling=sampling, max_tokens=40))
    events = run(whole)
    tokens, text = tokens_of(events), finished(events).outputs[0].text
    heir = make_loop()
    heir.submit(generation(sampling=sampling, max_tokens=40, attempt=2, replay=(tuple(tokens[:logged]),)))
    after = run(heir)
    assert tokens_of(after) == tokens[logged:]
    assert finished(after).outputs[0].text == text
    assert finished(after).outputs[0].tokens == 40


def test_logits_after_a_takeover_are_bitwise_those_before() -> None:
    """Prefilling the prompt and feeding logged tokens one row at a time gives the same bits as having drawn them."""
    rows: dict[int, list[bytes]] = {1: [], 2: []}

    class Recording(NumpyLlama):
        """Keeps the bits of every row that was asked for."""

        def step(self, batch: Sequence[Member]) -> list[StepResult]:
            results = super().step(batch)
            for member, result in zip(batch, results, strict=True):
                row = getattr(result, "row", None)
                if row is not None:
                    rows[member.epoch].append(row.tobytes())
            return results

    loop = make_loop(Recording(*tiny_llama(7)))
    loop.submit(generation(max_tokens=24))
    tokens = tokens_of(run(loop))
    heir = make_loop(Recording(*tiny_llama(7)))
    heir.submit(generation(max_tokens=24, attempt=2, replay=(tuple(tokens[:10]),)))
    heir.submit(generation("company", range(70, 120), attempt=3, max_tokens=24))
    rows[3] = []
    run(heir)
    assert rows[2] == rows[1][10:]
    assert len(rows[2]) == 14


def test_a_cancel_stops_before_the_next_step() -> None:
    """No event follows it, the slot and the reservation are free, and it is true only once."""
    loop = make_loop(limit=1)
    loop.submit(generation("a", max_tokens=500))
    loop.submit(generation("b"))
    for _ in range(5):
        loop.tick()
    assert loop.cancel("a", 1)
    events = run(loop)
    assert [event for event in events if event.job == "a"] == []
    assert len(tokens_of(events, "b")) == 8
    assert not loop.cancel("a", 1)
    assert not loop.cancel("b", 1)
    assert loop.telemetry()["cancelled_sessions"] == 1
    assert loop.telemetry()["completed_sessions"] == 1


def test_a_waiting_job_can_be_cancelled() -> None:
    """One that has no slot yet leaves the queue."""
    loop = make_loop(limit=1)
    loop.submit(generation("a"))
    loop.submit(generation("b"))
    loop.tick()
    assert loop.cancel("b", 1)
    events = run(loop)
    assert {event.job for event in events} == {"a"}
    assert loop.capacity().in_flight == 0


@pytest.mark.parametrize("replay", [((7,) * 8,), ((7,) * 8, (7,))], ids=["whole job", "one choice"])
def test_a_job_whose_log_held_an_end_can_be_cancelled(replay: tuple[tuple[int, ...], ...]) -> None:
    """The cancel comes before the loop has looked at the choice that its log had already ended: nothing is left, and
    the loop goes on."""
    loop = make_loop()
    loop.submit(generation(n=len(replay), attempt=2, replay=replay))
    assert loop.cancel("a", 2)
    assert run(loop) == []
    assert loop.capacity().in_flight == 0
    assert loop.telemetry()["queue_depth"] == 0
    loop.submit(generation("b"))
    assert len(tokens_of(run(loop), "b")) == 8


def test_a_cancel_never_overtakes_its_job() -> None:
    """Another thread cancels a job in the very moment in which it is put into the mailbox: it does not run."""
    loop = make_loop()

    class Mailbox(deque[Any]):
        """Has the cancel come just before the job lies in it, if that can be."""

        def append(self, item: Any) -> None:
            if isinstance(item, _Submitted):
                canceller.start()
                canceller.join(0.2)
            super().append(item)

    def cancel() -> None:
        while not loop.cancel("a", 1):
            pass

    canceller = threading.Thread(target=cancel)
    loop._inbox = Mailbox()
    loop.submit(generation())
    canceller.join()
    assert run(loop) == []
    assert loop.capacity().in_flight == 0


def test_newcomers_do_not_pass_the_queue() -> None:
    """A slot freed by a cancel goes to whoever waited first."""
    loop = make_loop(limit=1)
    for job in ("a", "b", "c"):
        loop.submit(generation(job, max_tokens=3))
    loop.tick()
    loop.cancel("a", 1)
    ends = [event.job for event in run(loop) if isinstance(event, Finished)]
    assert ends == ["b", "c"]


def test_sessions_share_the_kv_budget_without_overrunning_it() -> None:
    """Together they never hold more than there is; the ones that do not fit wait and still end."""
    loop = make_loop(pages=2)
    for index in range(5):
        loop.submit(generation(f"job-{index}"))
    active = []
    events: list[Event] = []
    while loop.capacity().in_flight:
        events += loop.tick().events
        active.append(loop.telemetry()["active_sessions"])
        assert loop.telemetry()["kv_pressure"] <= 1
    assert max(active) == 2
    assert sum(isinstance(event, Finished) for event in events) == 5


def test_what_can_never_fit_is_refused_by_name() -> None:
    """A job larger than the whole budget is no queue's business."""
    loop = make_loop(pages=1)
    with pytest.raises(InvalidRequest, match=r"67 tokens.*holds 64") as refusal:
        loop.submit(generation(max_tokens=48))
    assert refusal.value.code == "kv_budget_exceeded"
    assert loop.capacity().in_flight == 0
    assert loop.telemetry()["rejected_by_reason"] == {"rejected-kv-budget": 1}
    loop.submit(generation(max_tokens=45))
    assert len(tokens_of(run(loop))) == 45


def test_a_session_alone_must_fit_its_share() -> None:
    """Where the KV of several sessions would be enough, but no session can have it: refused, not let in for ever."""
    loop = looped(BlockEngine(context_length=64))
    decision = loop.admit(generation(max_tokens=46))
    assert (decision.reason, loop.capacity().in_flight) == (Reason.KV_BUDGET, 0)
    assert loop.admit(generation(max_tokens=45)).reason is Reason.ADMITTED


def test_a_log_of_another_model_fails_its_job() -> None:
    """A token that this vocabulary does not have: the loop goes on, and nothing is left of the job."""
    loop = looped(BlockEngine())
    loop.submit(generation("good"))
    loop.submit(generation("bad", replay=((30, 1_000_000), ()), n=2))
    events = run(loop)
    (failure,) = [event for event in events if isinstance(event, Failed)]
    assert (failure.job, failure.message) == ("bad", "Its log cannot be read: IndexError.")
    assert len(tokens_of(events, "good")) == 8
    assert (loop.capacity().in_flight, loop.telemetry()["failed_sessions"]) == (0, 2)
    assert not loop.cancel("bad", 1)


def test_a_long_prompt_in_small_pieces_is_no_endless_run() -> None:
    """The bound of a run to completion counts them."""
    loop = looped(BlockEngine(), max_prefill_tokens_per_tick=1)
    loop.submit(generation(prompt=[30] * 1000, max_tokens=1))
    assert finished(loop.run_to_completion()).prompt_tokens == 1000


def test_one_failing_member_fails_alone() -> None:
    """The engine raises while a culprit is in the batch: it fails by name, its mates' streams are untouched, and no
    message repeats what the engine said."""
    alone = make_loop()
    alone.submit(generation("mate", max_tokens=12))
    expected = tokens_of(run(alone), "mate")
    engine = FaultyEngine(*tiny_llama(7), kv_bytes=2**22)
    loop = make_loop(engine)
    loop.submit(generation("mate", max_tokens=12))
    loop.submit(generation("bad", max_tokens=12))
    events = [*loop.tick().events, *loop.tick().events]
    engine.culprits = frozenset({"bad/0"})
    events += run(loop)
    (failure,) = [event for event in events if isinstance(event, Failed)]
    assert (failure.job, failure.code) == ("bad", "engine_error")
    assert "prompt" not in failure.message
    assert tokens_of(events, "mate") == expected
    assert loop.capacity().in_flight == 0
    assert loop.telemetry()["kv_total_bytes"] == 0


def test_kv_that_vanished_is_prefilled_again_unseen() -> None:
    """A cache miss costs time, not tokens."""
    loop = make_loop()
    loop.submit(generation(max_tokens=20))
    expected = tokens_of(run(loop))
    other = make_loop()
    other.submit(generation(max_tokens=20))
    events: list[Event] = []
    for _ in range(9):
        events += other.tick().events
    other.engine.release("a/0", 1)
    events += run(other)
    assert tokens_of(events) == expected
    assert other.telemetry()["cache_misses_total"] == 1


def test_choices_differ_and_repeat() -> None:
    """n = 3 gives three streams with one seed, the same three the next time, and one Finished for all."""
    streams = []
    for _ in range(2):
        loop = make_loop()
        loop.submit(generation(n=3, sampling=SEEDED, max_tokens=16))
        events = run(loop)
        assert len(finished(events).outputs) == 3
        streams.append([tokens_of(events, choice=choice) for choice in range(3)])
    assert streams[0] == streams[1]
    assert len({tuple(stream) for stream in streams[0]}) == 3


def test_end_of_text_and_stop_strings_end_a_choice() -> None:
    """Whatever text a free run gives, a stop string inside it cuts the next run right before it."""
    loop = make_loop()
    loop.submit(generation(max_tokens=40))
    text = finished(run(loop)).outputs[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    assert stop.strip("\ufffd"), "the tiny model's text is good for this test"
    again = make_loop()
    again.submit(generation(max_tokens=40, sampling=replace_stop(stop)))
    events = run(again)
    end = finished(events).outputs[0]
    assert end.finish_reason == "stop"
    assert end.text == text[: text.index(stop)] == text_of(events)


def replace_stop(stop: str) -> Sampling:
    """The greedy sampling with a stop string."""
    return GREEDY.model_copy(update={"stop": (stop,)})


def test_stopping_returns_what_had_not_ended() -> None:
    """The host hands these back; all KV is free, also what was kept for somebody."""
    loop = make_loop(limit=1)
    given = [generation("a", range(20, 150), holder="program"), generation("b")]
    for each in given:
        loop.submit(each)
    loop.tick()
    loop.tick()
    assert loop.stop() == given
    assert loop.telemetry()["kv_total_bytes"] == 0
    assert loop.capacity().in_flight == 0


def test_the_limit_can_change_while_running() -> None:
    """`pool_grow` and `pool_shrink` act on the next tick; running sessions finish."""
    loop = make_loop(limit=1)
    for index in range(4):
        loop.submit(generation(f"job-{index}", max_tokens=50))
    loop.tick()
    assert loop.telemetry()["active_sessions"] == 1
    loop.set_limit(3)
    loop.tick()
    assert loop.telemetry()["active_sessions"] == 3
    loop.set_limit(0)
    assert loop.effective_limit() == 1
    run(loop)
    assert loop.telemetry()["completed_sessions"] == 4


def test_an_old_attempt_is_another_job() -> None:
    """The same job under a new attempt while the old one is still here: both run, neither sees the other's KV."""
    loop = make_loop()
    first = generation(max_tokens=10)
    loop.submit(first)
    loop.tick()
    loop.submit(replace(first, attempt=2))
    events = run(loop)
    by_attempt: dict[int, list[int]] = {1: [], 2: []}
    for event in events:
        if isinstance(event, Tokens):
            by_attempt[event.attempt] += event.token_ids
    assert by_attempt[1][-9:] == by_attempt[2][1:]
    assert len(by_attempt[2]) == 10
