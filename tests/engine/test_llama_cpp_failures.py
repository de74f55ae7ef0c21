"""What becomes of sessions of the llama.cpp engine when it, or its caller, fails."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks.ports import CacheMiss, Failed, Member, MemberError, StepLogits, StepResult
from tests.engine.conftest import load_llama, load_small
from tests.engine.driving import begin, decode, feed, ids, new_scope, prefill, row_of, same_bits, some_tokens
from tests.engine.gguf_writing import write_gguf
from tests.engine.looping import generation, looped, run, tokens_of, undisturbed
from tests.engine.small_model import BYTES_PER_TOKEN, METADATA, VOCABULARY, small_tensors
from workers.engines.llama_cpp_context import ContextOptions, LlamaContext, Row
from workers.engines.llama_cpp_engine import LlamaCpp
from workers.engines.llama_cpp_library import library


@contextmanager
def aborted(engine: LlamaCpp, when: Callable[[], bool]) -> Iterator[None]:
    """llama.cpp gives up its computations while `when` says so."""
    lib, context = library(), engine._context._context
    callback = lib.ggml_abort_callback(lambda _data: when())
    lib.llama_set_abort_callback(context, callback, ctypes.c_void_p(0))
    yield
    lib.llama_set_abort_callback(context, lib.ggml_abort_callback(), ctypes.c_void_p(0))


def test_a_failed_batch_is_computed_one_by_one(small: LlamaCpp) -> None:
    """When a batch fails, its members run alone, and nobody notices but the log."""
    prompts = [some_tokens(small, 40, seed=seed) for seed in range(3)]
    expected = []
    for prompt in prompts:
        prefill(small, "alone", prompt)
        expected += decode(small, "alone", [30], 40)
        small.release("alone", 0)
        prefill(small, f"s{len(expected)}", prompt)
    members = [Member(f"s{number}", 0, ids(30), 40) for number in (1, 2, 3)]
    failing = small.decodes + 1
    with aborted(small, lambda: small.decodes == failing):
        results = small.step(members)
    assert small.decodes == failing + 3
    assert same_bits([row_of(result) for result in results], expected)


def test_a_batch_of_prompts_that_fails_is_computed_one_by_one(small: LlamaCpp) -> None:
    """When pieces of several prompts fail together, each runs alone, and nobody notices but the log."""
    prompts = [some_tokens(small, 40, seed=seed) for seed in range(3)]
    expected = []
    for prompt in prompts:
        expected.append(prefill(small, "alone", prompt))
        small.release("alone", 0)
    for number, prompt in enumerate(prompts):
        begin(small, f"s{number}", prompt)
    failing = small.decodes + 1
    with aborted(small, lambda: small.decodes == failing):
        results = small.step([Member(f"s{number}", 0, prompt, 0) for number, prompt in enumerate(prompts)])
    assert small.decodes == failing + 3
    assert same_bits([row_of(result) for result in results], expected)


def test_what_cannot_be_computed_is_its_members_error(small: LlamaCpp) -> None:
    """Sessions are then as they were before, prompts too, and go on when the engine can again."""
    prompt = some_tokens(small, 40)
    expected = [prefill(small, "a", prompt), *decode(small, "a", [30, 31], 40)]
    prefill(small, "b", prompt)
    begin(small, "c", prompt)
    with aborted(small, lambda: True):
        results = small.step([Member("b", 0, ids(30), 40), Member("c", 0, prompt, 0), Member("d", 0, ids(1), 0)])
    assert [type(result) for result in results] == [MemberError, MemberError, CacheMiss]
    small.check_integrity()
    assert same_bits(decode(small, "b", [30, 31], 40), expected[1:])
    assert same_bits([feed(small, "c", prompt, 0), *decode(small, "c", [30, 31], 40)], expected)


def test_a_prompt_that_fails_in_its_middle_leaves_nothing(small_path: Path) -> None:
    """What its first batches computed is taken back."""
    engine = load_llama(small_path, slots=4, slot_tokens=1536, bytes_per_token=BYTES_PER_TOKEN)
    prompt = some_tokens(engine, 1300)
    expected = prefill(engine, "a", prompt)
    begin(engine, "b", prompt)
    failing = engine.decodes + 2
    with aborted(engine, lambda: engine.decodes == failing):
        assert isinstance(engine.step([Member("b", 0, prompt, 0)])[0], MemberError)
    engine.check_integrity()
    assert same_bits([feed(engine, "b", prompt, 0)], [expected])
    engine.close()


@pytest.mark.parametrize(("fails", "result"), [("swap", CacheMiss), ("memory", StepLogits)])
def test_a_slot_that_cannot_be_moved_is_a_cache_miss(
    small: LlamaCpp, monkeypatch: pytest.MonkeyPatch, fails: str, result: type[StepResult]
) -> None:
    """What was kept in the new session's way is lost. Where the session's slot is lost with it, it begins again."""
    prompt, other, scope = some_tokens(small, 40, seed=1), some_tokens(small, 40, seed=2), new_scope()
    expected = prefill(small, "b", prompt)
    small.release("b", 0)
    prefill(small, "a", other, scope=scope)
    small.release("a", 0)
    with monkeypatch.context() as failing:
        if fails == "swap":
            failing.setattr(small._context, "swap", lambda *slots: tuple(not small._context.cut(s, 0) for s in slots))
        else:
            failing.setattr(small._context, "_bytes", np.empty(0, np.uint8))
            failing.setattr("workers.engines.llama_cpp_context.np", _WithoutMemory())
        assert begin(small, "b", prompt) == 0
    assert isinstance(small.step([Member("b", 0, prompt, 0)])[0], result)
    assert small.resident(other, scope) == 0
    small.check_integrity()
    small.release("b", 0)
    assert same_bits([prefill(small, "b", prompt)], [expected])


class _WithoutMemory:
    """numpy where there is no memory left."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def empty(self, *_args: Any) -> Any:
        raise MemoryError


@pytest.fixture
def overflowing_path(tmp_path: Path) -> Path:
    """A model that overflows at token 7."""
    tensors = small_tensors()
    tensors["token_embd.weight"][:, 0] = 0
    tensors["token_embd.weight"][7, 0] = 100
    tensors["blk.0.attn_v.weight"][0, 0] = 1e8
    path = tmp_path / "model.gguf"
    write_gguf(path, metadata=METADATA, tensors=tensors, vocabulary=VOCABULARY)
    return path


def test_overflowing_numbers_end_with_their_session(overflowing_path: Path) -> None:
    """A token whose values overflow fails its member by name. Nothing of it reaches whoever is in its batch, who gets
    the bits of a batch with a healthy neighbour, nor whoever has its slot afterwards."""
    engine = load_small(overflowing_path, slots=2, kept_prefixes=0, target_inflight=2)
    prompt, other = some_tokens(engine, 80, seed=1), some_tokens(engine, 80, seed=2)
    expected = prefill(engine, "a", prompt)
    engine.release("a", 0)
    rows = []
    for token in (8, 7):
        other[-2] = token
        begin(engine, "other", other)
        begin(engine, "b", prompt)
        before = engine.decodes
        beside, mine = engine.step([Member("other", 0, other, 0), Member("b", 0, prompt, 0)])
        assert engine.decodes - before == 1
        assert isinstance(beside, StepLogits if token == 8 else MemberError)
        rows.append(row_of(mine))
        engine.release("other", 0)
        if token == 8:
            engine.release("b", 0)
    assert same_bits(rows[1:], rows[:1])
    assert engine.step([Member("b", 0, ids(30), 80)]) == [CacheMiss()]
    engine.check_integrity()
    for session in ("c", "d"):
        assert same_bits([prefill(engine, session, prompt)], [expected])
    engine.close()


@pytest.mark.parametrize("overflows_at", [3, 178])
def test_overflowing_numbers_end_one_job(overflowing_path: Path, overflows_at: int) -> None:
    """Beside it one decodes and one begins; what was wiped of theirs is computed again, once."""
    engine = load_small(overflowing_path, slots=3, kept_prefixes=0, target_inflight=3)
    prompts = {name: some_tokens(engine, count, seed=count) for name, count in (("a", 40), ("sick", 180), ("b", 100))}
    prompts["sick"][overflows_at] = 7
    given = {name: generation(name, prompt, max_tokens=12) for name, prompt in prompts.items()}
    alone = {name: undisturbed(engine, given[name])[0] for name in ("a", "b")}
    loop = looped(engine)
    loop.submit(given["a"])
    events = [*loop.tick().events, *loop.tick().events]
    loop.submit(given["sick"])
    loop.submit(given["b"])
    events += run(loop)
    (failure,) = [event for event in events if isinstance(event, Failed)]
    assert (failure.job, failure.message) == ("sick", "the model's numbers overflowed")
    assert {name: tokens_of(events, name) for name in alone} == alone
    assert loop.telemetry()["cache_misses_total"] <= 2
    engine.close()


def test_a_prompt_that_overflows_fails_before_others_meet_it(overflowing_path: Path) -> None:
    """In the very piece, though nobody reads its logits: had it been cancelled after that, whoever had its slot next
    would have failed in its place. What of others was not computed by then begins again."""
    engine = load_small(overflowing_path, slots=2, kept_prefixes=0, target_inflight=2)
    prompt, sick = some_tokens(engine, 100, seed=1), some_tokens(engine, 180, seed=2)
    sick[70] = 7
    expected = prefill(engine, "a", prompt)
    engine.release("a", 0)
    begin(engine, "sick", sick)
    begin(engine, "b", prompt)
    members = [Member("sick", 0, sick[:80], 0, wants_logits=False), Member("b", 0, prompt, 0)]
    assert [type(result) for result in engine.step(members)] == [MemberError, CacheMiss]
    for session in ("sick", "b"):
        engine.release(session, 0)
    for session in ("c", "d"):
        assert same_bits([prefill(engine, session, prompt)], [expected])
    engine.close()


def test_a_closed_engine_answers_with_errors(small_path: Path) -> None:
    """Closing twice is fine; afterwards nothing begins, and steps are errors of their members."""
    engine = load_small(small_path)
    prompt = some_tokens(engine, 20)
    prefill(engine, "a", prompt)
    blob = engine.snapshot("a", 0)
    assert blob is not None
    engine.close()
    engine.close()
    assert isinstance(engine.step([Member("a", 0, ids(5), 20)])[0], MemberError)
    assert engine.begin("b", 0, prompt, 30) is None
    assert engine.snapshot("a", 0) is None
    assert not engine.restore("a", 0, blob, prompt, 30)
    assert not engine.extend("a", 0, 30)
    assert engine.resident(prompt) == 0
    engine.release("a", 0)
    engine.unpin("h")
    engine.check_integrity()


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([], id="none"),
        pytest.param([Row(0, 5, position, False) for position in range(600)], id="more than a batch"),
        pytest.param([Row(0, 5, 1, True)], id="a gap"),
        pytest.param([Row(0, 5, 0, True), Row(0, 5, 0, True)], id="twice"),
        pytest.param([Row(2, 5, 0, True)], id="no such slot"),
        pytest.param([Row(-1, 5, 0, True)], id="a negative slot"),
        pytest.param([Row(0, 512, 0, True)], id="no such token"),
        pytest.param([Row(0, -1, 0, True)], id="a negative token"),
        pytest.param([Row(0, 5, position, True) for position in range(3)], id="too many logits"),
    ],
)
def test_the_library_never_sees_what_would_end_the_process(small_path: Path, rows: list[Row]) -> None:
    """Each is an error before the call, and nothing has happened."""
    context = LlamaContext(small_path, ContextOptions(slots=2, slot_tokens=512, threads=1))
    with pytest.raises(ValueError):
        context.decode(rows)
    for slot in (-1, 2):
        for call in (context.held, context.state, lambda number: context.cut(number, 0)):
            with pytest.raises(ValueError, match="no slot"):
                call(slot)
    assert not context.set_state(0, b"nonsense")
    assert context.decodes == 0
    assert len(context.decode([Row(0, 5, 0, True)])) == 1
    context.close()


def test_a_slot_can_be_filled_to_its_end(small_path: Path) -> None:
    """And not beyond."""
    context = LlamaContext(small_path, ContextOptions(slots=2, slot_tokens=256, threads=1))
    context.decode([Row(1, 5, position, False) for position in range(256)])
    assert context.held(1) == 256
    with pytest.raises(ValueError, match="beyond"):
        context.decode([Row(1, 5, 256, True)])
    assert context.copy(1, 0)
    assert context.held(0) == 256
    assert context.swap(0, 1) == (True, True)
    context.close()
