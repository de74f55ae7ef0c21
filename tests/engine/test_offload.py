"""What the loop does with KV of holders: who has how much, hints and their feedback, KV that leaves and comes back.

Most tests use an engine that keeps tokens for KV in a real BlockPool, so whatever comes back wrongly shows in the
tokens.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pool.errors import ConfigurationError
from pool.rules.admission import Budgets
from tasks.ports import Engine, Event, Generation, Kept
from tests.engine.looping import finished, generation, looped, run, tokens_of, undisturbed
from tests.scripted.blocks import BlockEngine
from tests.waiting import wait_until
from workers.hints import HintAnswer, HintOutcome, HintResult
from workers.loop import BatchingLoop
from workers.offload import OffloadBudget

MEMORY = OffloadBudget(memory_bytes=2**20)
#: Loops of a test that is running.
LOOPS: list[BatchingLoop] = []
#: Seconds of computing so many tokens: nothing is cheaper than putting KV back, or everything.
DEAR: Callable[[float], float] = float
CHEAP: Callable[[float], float] = lambda _: 0.0  # noqa: E731 - two of a kind


def words(count: int, *, seed: int = 0) -> list[int]:
    """Token ids of a prompt."""
    return np.random.default_rng(seed).integers(17, 400, count).tolist()


@pytest.fixture(autouse=True)
def stopped() -> Iterator[None]:
    """Their files are closed after each test."""
    yield
    while LOOPS:
        LOOPS.pop().stop()


class Clock:
    """Stands still unless told."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def keeping(
    engine: Engine | None = None,
    *,
    offload: OffloadBudget = MEMORY,
    prefill_seconds: Callable[[float], float] = DEAR,
    clock: Clock | None = None,
    **options: Any,
) -> BatchingLoop:
    """A loop without a thread, whose engine has 256 positions if none is given."""
    engine = engine or BlockEngine(blocks=16, recompute_exact=False)
    budgets = Budgets(max_prefill_tokens_per_tick=64)
    loop = BatchingLoop(
        engine, budgets, 8, offload=offload, prefill_seconds=prefill_seconds, clock=clock or Clock(), **options
    )
    LOOPS.append(loop)
    return loop


def turn(loop: BatchingLoop, job: str, prompt: list[int], holder: str = "p", **fields: Any) -> list[Event]:
    """A request of a holder, from its beginning to its end."""
    loop.submit(generation(job, prompt, holder=holder, **fields))
    return run(loop)


def flood(loop: BatchingLoop) -> None:
    """Requests of nobody that leave nothing of what is merely cached."""
    for number in range(4):
        loop.submit(generation(f"flood-{loop.progress()}-{number}-{id(object())}", words(200, seed=50 + number)))
        run(loop)


def ended(loop: BatchingLoop) -> list[HintResult]:
    """Tick until a hint has ended."""

    def results() -> list[HintResult]:
        loop.tick()
        return loop.hint_results()

    return wait_until(results, description="a hint to end", every_s=0.001)


def offloaded(loop: BatchingLoop, holder: str = "p") -> HintResult:
    """Offload it, and how that ended."""
    assert loop.hint(holder, "offload") is HintAnswer.ACCEPTED
    (result,) = ended(loop)
    return result


def alone(given: Generation) -> list[int]:
    """Its tokens when nothing else is there."""
    return undisturbed(BlockEngine(recompute_exact=False), given)[0]


# -- who holds how much ----------------------------------------------------------------------------------------------


def test_holdings_are_told_after_every_turn() -> None:
    """Live sessions with the room they were given, and what is kept for them after that; who has nothing is not told.
    What nobody's sessions have is in the sum alone."""
    loop = keeping()
    assert loop.holdings() == {}
    loop.submit(generation("a", words(100), max_tokens=13, holder="p"))
    loop.submit(generation("b", words(20, seed=1), max_tokens=5, holder="q"))
    loop.submit(generation("c", words(30, seed=2), max_tokens=5))
    loop.tick()
    assert loop.holdings() == {"p": 112, "q": 32}
    assert loop.resident_tokens() == 112 + 32 + 48
    run(loop)
    assert loop.holdings() == {"p": 96, "q": 16}
    loop.drop_holder("p")
    loop.tick()
    assert loop.holdings() == {"q": 16}
    loop.drop_holder("q")
    loop.drop_holder("nobody")
    loop.tick()
    assert loop.holdings() == {}
    assert loop.resident_tokens() == 0


def test_what_holders_share_counts_for_the_first() -> None:
    """Once; a holder that shares all it has is told with 0, and with all when the first has gone."""
    loop = keeping()
    turn(loop, "a", words(100))
    turn(loop, "b", words(100), "q")
    assert loop.holdings() == {"p": 96, "q": 0}
    loop.drop_holder("p")
    loop.tick()
    assert loop.holdings() == {"q": 96}


# -- hints -----------------------------------------------------------------------------------------------------------


def test_kv_leaves_and_comes_back_with_the_same_tokens() -> None:
    """Freed when that is told, not before; others use the room; and the next turn begins with all that left."""
    loop = keeping()
    said = tokens_of(turn(loop, "a", words(100)), "a")
    assert loop.hint("p", "offload") is HintAnswer.ACCEPTED
    assert (loop.resident_tokens(), loop.hint_results()) == (96, [])
    loop.tick()
    assert loop.hint_results() == [HintResult("p", "offload", HintOutcome.APPLIED, 96)]
    assert loop.holdings() == {}
    assert loop.telemetry()["kv_offloaded_memory_bytes"] > 96
    flood(loop)
    given = generation("b", [*words(100), *said, *words(9, seed=1)], holder="p")
    loop.submit(given)
    events = run(loop)
    assert finished(events, "b").cached_tokens == 96
    assert tokens_of(events, "b") == alone(given)
    told = loop.telemetry()
    assert (told["kv_offloads_total"], told["kv_restores_total"], told["kv_restored_tokens_total"]) == (1, 1, 96)
    assert told["kv_offloaded_memory_bytes"] == 0
    assert loop.holdings() == {"p": 112}


def test_what_is_still_here_is_not_put_back() -> None:
    """After it has left it is cached until somebody needs the room."""
    loop = keeping()
    turn(loop, "a", words(100))
    offloaded(loop)
    assert finished(turn(loop, "b", words(110)), "b").cached_tokens == 96
    assert loop.telemetry()["kv_restores_total"] == 0
    assert loop.telemetry()["kv_offloaded_memory_bytes"] == 0, "what is kept now is newer"


def test_computing_is_chosen_where_it_is_cheaper() -> None:
    """The same tokens, and nothing is put back."""
    loop = keeping(prefill_seconds=CHEAP)
    turn(loop, "a", words(100))
    offloaded(loop)
    flood(loop)
    given = generation("b", words(120), holder="p")
    loop.submit(given)
    events = run(loop)
    assert finished(events, "b").cached_tokens == 0
    assert tokens_of(events, "b") == alone(given)
    assert loop.telemetry()["kv_restores_total"] == 0


def test_drop_and_retain() -> None:
    """Dropping frees what is kept and what is outside; retaining makes it the last to be given up."""
    loop = keeping()
    for holder in ("p", "q"):
        turn(loop, holder, words(50, seed=ord(holder)), holder)
    assert loop.hint("p", "retain") is HintAnswer.ACCEPTED
    assert ended(loop) == [HintResult("p", "retain", HintOutcome.APPLIED)]
    turn(loop, "large", words(190, seed=3), "", max_tokens=10)
    assert loop.holdings() == {"p": 48}
    offloaded(loop)
    assert loop.hint("p", "drop") is HintAnswer.ACCEPTED
    assert ended(loop) == [HintResult("p", "drop", HintOutcome.APPLIED)]
    assert loop.telemetry()["kv_offloaded_memory_bytes"] == 0
    turn(loop, "again", words(50), "p")
    assert loop.hint("p", "drop") is HintAnswer.ACCEPTED
    assert ended(loop) == [HintResult("p", "drop", HintOutcome.APPLIED, 48)]


def test_answers_at_once() -> None:
    """What is not held, or is on its way, is rejected; what cannot be done whatever is held is unsupported."""
    loop = keeping()
    assert [loop.hint("p", action) for action in ("retain", "offload", "drop")] == [HintAnswer.REJECTED] * 3  # type: ignore[arg-type]
    turn(loop, "a", words(50))
    assert [loop.hint("p", "retain"), loop.hint("p", "drop")] == [HintAnswer.ACCEPTED, HintAnswer.REJECTED]
    ended(loop)
    assert loop.hint("p", "offload") is HintAnswer.ACCEPTED
    assert loop.hint_results() == []
    loop.stop()
    assert [result.outcome for result in loop.hint_results()] == [HintOutcome.EXPIRED]
    assert loop.hint("p", "drop") is HintAnswer.REJECTED

    without = keeping(offload=OffloadBudget())
    turn(without, "a", words(50))
    assert without.hint("p", "offload") is HintAnswer.UNSUPPORTED
    assert without.hint("p", "drop") is HintAnswer.ACCEPTED
    unable = keeping(BlockEngine(offload=False))
    turn(unable, "a", words(50))
    assert unable.hint("p", "offload") is HintAnswer.UNSUPPORTED
    assert keeping(reuse="off").hint("p", "drop") is HintAnswer.UNSUPPORTED


def test_a_hint_expires() -> None:
    """The engine's thread came to it too late: nothing has happened."""
    clock = Clock()
    loop = keeping(clock=clock)
    turn(loop, "a", words(100))
    assert loop.hint("p", "offload", expires_s=5) is HintAnswer.ACCEPTED
    clock.now_s = 5.1
    (result,) = ended(loop)
    assert (result.outcome, result.freed_tokens) == (HintOutcome.EXPIRED, 0)
    assert loop.holdings() == {"p": 96}
    assert loop.telemetry()["kv_offloaded_memory_bytes"] == 0


@pytest.mark.parametrize("action", ["offload", "drop"])
def test_a_holder_that_is_back_keeps_its_kv(action: Any) -> None:
    """Its request came between the hint and its turn."""
    loop = keeping()
    turn(loop, "a", words(100))
    assert loop.hint("p", action) is HintAnswer.ACCEPTED
    loop.submit(generation("b", words(110), holder="p"))
    loop.tick()
    (result,) = loop.hint_results()
    assert (result.outcome, result.reason) == (HintOutcome.FAILED, "a request of it is here")
    assert finished(run(loop), "b").cached_tokens == 96


def test_an_engine_that_cannot_export_fails_the_hint_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Its KV stays."""

    class Unable(BlockEngine):
        def export(self, holder: str) -> Kept | None:
            raise OSError(holder)

    loop = keeping(Unable(blocks=16))
    turn(loop, "a", words(100))
    assert offloaded(loop).reason == "the engine failed: OSError"
    assert loop.holdings() == {"p": 96}
    small = keeping(offload=OffloadBudget(memory_bytes=50))
    turn(small, "a", words(100))
    assert offloaded(small) == HintResult("p", "offload", HintOutcome.FAILED, reason="it is larger than the budget")
    assert small.telemetry()["kv_offload_failures_total"] == 1
    assert not caplog.records


# -- memory and disk -------------------------------------------------------------------------------------------------


def size_of(prompt_tokens: int) -> int:
    """Bytes of what is kept of a prompt."""
    engine = BlockEngine(recompute_exact=False)
    loop = looped(engine)
    turn(loop, "a", words(prompt_tokens))
    kept = engine.export("p")
    assert kept is not None
    return len(kept.blob)


def test_memory_keeps_to_its_budget() -> None:
    """Without a disk the one that is unused longest is given up."""
    loop = keeping(offload=OffloadBudget(memory_bytes=int(2.5 * size_of(60))))
    for number, holder in enumerate("pqr"):
        turn(loop, holder, words(60, seed=number), holder)
        assert offloaded(loop, holder).outcome is HintOutcome.APPLIED
    assert loop.telemetry()["kv_offloads_dropped_total"] == 1
    assert loop.telemetry()["kv_offloaded_memory_bytes"] <= 2.5 * size_of(60)
    assert loop.hint("p", "drop") is HintAnswer.REJECTED
    flood(loop)
    assert finished(turn(loop, "next", words(60, seed=2), "r"), "next").cached_tokens == 48


@pytest.mark.parametrize("in_memory", [0, 1])
def test_what_has_no_place_in_memory_goes_to_disk(tmp_path: Path, in_memory: int) -> None:
    """Within its budget, too; it frees nothing before it is written, and comes back with the same tokens. Files have no
    names."""
    size = size_of(60) + 50  # prompts differ in the digits of their tokens
    budget = OffloadBudget(in_memory * size, int(2.5 * size), tmp_path)
    loop = keeping(offload=budget)
    for number, holder in enumerate("pqrs"):
        turn(loop, holder, words(60, seed=number), holder)
        assert offloaded(loop, holder).outcome is HintOutcome.APPLIED
        loop.check_integrity()
    told = loop.telemetry()
    assert (told["kv_offloads_total"], told["kv_offloads_dropped_total"]) == (4, 2 - in_memory)
    assert 0 < told["kv_offloaded_disk_bytes"] <= 2.5 * size
    assert told["kv_offloaded_memory_bytes"] <= size * in_memory
    assert list(tmp_path.iterdir()) == []
    flood(loop)
    given = generation("next", words(80, seed=2)[:60] + words(20, seed=9), holder="r")
    loop.submit(given)
    events = waited(loop)
    assert finished(events, "next").cached_tokens == 48
    assert tokens_of(events, "next") == alone(given)
    loop.stop()
    assert list(tmp_path.iterdir()) == []


def waited(loop: BatchingLoop) -> list[Event]:
    """All events until nothing is left, however long the disk takes."""
    events: list[Event] = []

    def is_over() -> bool:
        events.extend(loop.tick().events)
        return not loop.capacity().in_flight

    wait_until(is_over, description="all requests to end", every_s=0)
    return events


@pytest.mark.parametrize("fault", ["damaged", "foreign", "unreadable"])
def test_bad_files_are_refused_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str) -> None:
    """The prompt is computed again, with the same tokens, and the log says why without showing anything."""
    loop = keeping(offload=OffloadBudget(0, 2**20, tmp_path))
    turn(loop, "a", words(100))
    offloaded(loop)
    flood(loop)
    store = loop._holders._store
    assert store is not None
    entry = store.get("p")
    assert entry is not None
    assert entry.file is not None
    if fault == "unreadable":
        entry.file.close()
    else:
        entry.file.seek(0)
        entry.file.truncate(50 if fault == "damaged" else 0)
        entry.file.write(b"" if fault == "damaged" else b'["another engine", "", [], []]')
        entry.file.flush()
    given = generation("b", words(110), holder="p")
    loop.submit(given)
    with caplog.at_level(logging.WARNING, logger="genpool.loop"):
        events = waited(loop)
    assert finished(events, "b").cached_tokens == 0
    assert tokens_of(events, "b") == alone(given)
    (record,) = caplog.records
    assert record.getMessage().startswith("offloaded KV of p ")
    assert loop.telemetry()["kv_restore_failures_total"] == 1


def test_a_disk_that_takes_nothing_fails_the_hint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What was to leave stays in the engine."""
    loop = keeping(offload=OffloadBudget(0, 2**20, tmp_path / "offload"))
    (tmp_path / "offload").rmdir()
    turn(loop, "a", words(100))
    with caplog.at_level(logging.WARNING, logger="genpool.loop"):
        assert offloaded(loop) == HintResult("p", "offload", HintOutcome.FAILED, reason="it could not be written")
    assert loop.holdings() == {"p": 96}
    assert len(caplog.records) == 1
    loop.check_integrity()


def test_a_folder_that_cannot_be_used_is_refused_at_start(tmp_path: Path) -> None:
    """By the name of the setting."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="offload_disk_bytes") as refused:
        keeping(offload=OffloadBudget(0, 2**20, tmp_path / "file" / "folder"))
    assert refused.value.param == "offload_disk_bytes"


def test_what_nobody_asks_for_is_forgotten() -> None:
    """After the time that an idle Program is remembered."""
    clock = Clock()
    loop = keeping(offload=OffloadBudget(memory_bytes=2**20, retention_s=100), clock=clock)
    turn(loop, "a", words(60))
    offloaded(loop)
    clock.now_s = 100
    loop.tick()
    assert loop.telemetry()["kv_offloaded_memory_bytes"] > 0
    clock.now_s = 101
    loop.tick()
    assert loop.telemetry()["kv_offloaded_memory_bytes"] == 0
    assert loop.hint("p", "drop") is HintAnswer.REJECTED


def test_another_tenant_finds_nothing_outside_either() -> None:
    """Whatever the holder is called."""
    loop = keeping()
    turn(loop, "a", words(100), tenant="one")
    offloaded(loop)
    flood(loop)
    assert finished(turn(loop, "b", words(110), tenant="two"), "b").cached_tokens == 0
    assert loop.telemetry()["kv_restores_total"] == 0


KILLED = """
import sys
from pathlib import Path
import numpy as np
from tasks.ports import Kept
from workers.offload import OffloadBudget, OffloadStore
store = OffloadStore(OffloadBudget(0, 2**20, Path(sys.argv[1])), clock=lambda: 0.0, wake=lambda: None)
store.put("p", Kept("", np.arange(9, dtype=np.int32), b"KV" * 1000))
while not store.disk_bytes:
    store.poll()
print(store.disk_bytes, flush=True)
sys.stdin.read()
"""


def test_a_killed_process_leaves_no_file_behind(tmp_path: Path) -> None:
    """Nor does one that ended in the middle of making one, after the next start."""
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == "2000\n"
        process.send_signal(signal.SIGKILL)
    assert list(tmp_path.iterdir()) == []
    old, new = tmp_path / "genpool-old.kv", tmp_path / "genpool-new.kv"
    for file in (old, new):
        file.touch()
    os.utime(old, (0, 0))
    keeping(offload=OffloadBudget(0, 2**20, tmp_path))
    assert list(tmp_path.iterdir()) == [new], "which may be another process's"


# -- real engines ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny", "llama_small"])
@pytest.mark.parametrize("place", ["memory", "disk"])
def test_real_engines_say_the_same_after_coming_back(
    request: pytest.FixtureRequest, tmp_path: Path, name: str, place: str
) -> None:
    """Offloaded, its room used by others, put back: byte for byte what computing all of it gives."""
    engine: Engine = request.getfixturevalue(name)
    budget = OffloadBudget(2**26, 0) if place == "memory" else OffloadBudget(0, 2**26, tmp_path)
    prompt, more = words(200), words(30, seed=1)
    turns: list[list[int]] = []
    for offload in (True, False):
        loop = keeping(engine, offload=budget, reuse="exact" if offload else "off")
        said = tokens_of(turn(loop, "a", prompt, tenant=f"{name}-{place}"), "a")
        if offload:
            assert offloaded(loop).freed_tokens > 0
            forget(engine)
        loop.submit(generation("b", [*prompt, *said, *more], holder="p", tenant=f"{name}-{place}", max_tokens=20))
        events = waited(loop)
        turns.append(tokens_of(events, "b"))
        if offload:
            assert finished(events, "b").cached_tokens >= 192
            assert loop.telemetry()["kv_restores_total"] == 1
        loop.stop()
        loop.check_integrity()
    assert turns[0] == turns[1]


def forget(engine: Engine) -> None:
    """Give all that is merely cached to sessions that go again."""
    begun, positions = [], engine.capability().max_positions
    while positions:
        session = f"forget-{len(begun)}"
        if engine.begin(session, 0, np.array([5], np.int32), positions, "elsewhere") is None:
            positions //= 2
        else:
            begun.append(session)
    for session in begun:
        engine.release(session, 0)
