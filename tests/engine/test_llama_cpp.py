"""What is special about the llama.cpp engine: its self-test, its slots, its failures."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from tasks.ports import CacheMiss, Failed, Logits, Member, MemberError, StepLogits, StepResult
from tests.engine.conftest import load_llama, load_small
from tests.engine.driving import begin, decode, feed, ids, new_scope, prefill, row_of, same_bits, some_tokens
from tests.engine.gguf_writing import write_gguf
from tests.engine.looping import generation, looped, run, tokens_of, undisturbed
from tests.engine.small_model import BYTES_PER_TOKEN, METADATA, VOCABULARY, small_tensors, write_small_model
from workers.engines.llama_cpp_context import ContextOptions, LlamaContext, Row
from workers.engines.llama_cpp_engine import LlamaCpp
from workers.engines.llama_cpp_library import library
from workers.engines.llama_cpp_selftest import PROMPT_TOKENS, SelfTest, _SelfTest


@pytest.fixture
def small(small_path: Path) -> Iterator[LlamaCpp]:
    """An engine of this test's own: six slots of 512 positions."""
    engine = load_small(small_path)
    yield engine
    engine.check_integrity()
    engine.close()


# -- what shows in the bits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q8_0, GGMLQuantizationType.F32])
def test_the_self_test_tells_the_truth(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    """It says that batches do not show exactly where they do not, whatever this machine's kernels do."""
    engine = load_small(write_small_model(tmp_path / "model.gguf", kind=kind))
    prompts = [some_tokens(engine, 100, seed=seed) for seed in range(4)]
    expected = [[prefill(engine, "alone", prompt), *decode(engine, "alone", [30, 31, 32], 100)]
                for prompt in prompts if not engine.release("alone", 0)]  # fmt: skip
    rows = [[prefill(engine, f"s{number}", prompt)] for number, prompt in enumerate(prompts)]
    for at, token in enumerate((30, 31, 32), start=100):
        results = engine.step([Member(f"s{number}", 0, ids(token), at) for number in range(4)])
        for mine, result in zip(rows, results, strict=True):
            mine.append(row_of(result))
    same = all(same_bits(mine, theirs) for mine, theirs in zip(rows, expected, strict=True))
    assert engine.tested.batch_invariant == same
    assert bool(engine.tested.bits) == same
    assert engine.capability().batch_invariant == same
    engine.close()


def test_recomputing_is_tried_to_the_last_bit(small_path: Path) -> None:
    """Where the test is made, it answers whether tokens prefilled together leave what they leave one by one."""
    context = LlamaContext(small_path, ContextOptions(slots=2, slot_tokens=512, threads=1))
    prompt, more = (np.random.default_rng(seed).integers(0, VOCABULARY.size, 160).tolist() for seed in (1, 2))
    states = []
    for sizes in ([1] * 160, [160]):
        context.cut(0, 0)
        context.decode([Row(0, token, at, at == 159) for at, token in enumerate(prompt)])
        for size in sizes:
            start = context.held(0)
            tokens = more[start - 160 : start - 160 + size]
            context.decode([Row(0, token, start + k, k == size - 1) for k, token in enumerate(tokens)])
        states.append(context.state(0))
    trial = _SelfTest(context, 2, 1)
    trial._prefilled([PROMPT_TOKENS])
    assert trial._recomputed() == (states[0] == states[1])
    context.close()


def test_quantised_weights_are_exact_here(small: LlamaCpp) -> None:
    """With the recipe (quantised, no flash attention, a partitioned KV), this build's batches do not show."""
    assert small.tested.batch_invariant
    assert small.tested.threads_invariant


def test_the_fast_recipe_promises_nothing(small_path: Path) -> None:
    """With flash attention nothing is claimed, another fingerprint tells it apart, and it runs."""
    fast, exact = load_small(small_path, flash_attention=True), load_small(small_path)
    assert fast.tested == SelfTest()
    assert not fast.capability().batch_invariant
    assert fast.fingerprint() != exact.fingerprint()
    prompt = some_tokens(fast, 100)
    assert np.abs(prefill(fast, "a", prompt) - prefill(exact, "a", prompt)).max() < 0.5
    blob = exact.snapshot("a", 0)
    assert blob is not None
    assert not fast.restore("b", 0, blob, prompt, 120)
    for engine in (fast, exact):
        engine.close()


def test_threads_do_not_show(small_path: Path) -> None:
    """Neither in the fingerprint nor in a bit."""
    engines = [load_small(small_path, threads=threads) for threads in (1, 2)]
    one, two = ([prefill(engine, "a", some_tokens(engine, 70)), *decode(engine, "a", [30], 70)] for engine in engines)
    assert same_bits(one, two)
    assert engines[0].fingerprint() == engines[1].fingerprint()
    for engine in engines:
        engine.close()


def test_snapshots_are_of_one_form(small_path: Path) -> None:
    """Another number of slots is another fingerprint, and its snapshots are not taken; the same one's are."""
    engines = [load_small(small_path, slots=slots) for slots in (6, 7, 6)]
    prompt = some_tokens(engines[0], 50)
    expected = [prefill(engines[0], "a", prompt), *decode(engines[0], "a", [30], 50)]
    blob = engines[0].snapshot("a", 0)
    assert blob is not None
    assert not engines[1].restore("b", 0, blob, prompt, 60)
    assert engines[1].kv_usage().held == 0
    assert engines[2].restore("b", 0, blob, prompt, 60)
    assert same_bits(decode(engines[2], "b", [31], 51), decode(engines[0], "a", [31], 51))
    assert same_bits([prefill(engines[1], "a", prompt), *decode(engines[1], "a", [30], 50)], expected)
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def telling_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights in float32: where one row and several have other kernels, as on most machines, bits tell which were
    computed together."""
    path = tmp_path_factory.mktemp("model") / "float32.gguf"
    return write_small_model(path, kind=GGMLQuantizationType.F32)


def test_a_last_token_beyond_the_grid_is_a_single_one(telling_path: Path) -> None:
    """In whatever chunk it comes."""
    engine = load_small(telling_path)
    prompt = some_tokens(engine, 161)
    whole = prefill(engine, "a", prompt)
    assert same_bits([prefill(engine, "b", prompt, chunk=160)], [whole])
    engine.close()


def test_a_chunk_beside_single_tokens_is_computed_as_alone(telling_path: Path) -> None:
    """Its first token does not go with the single ones."""
    engine = load_small(telling_path)
    prompt, other = some_tokens(engine, 96, seed=1), some_tokens(engine, 50, seed=2)
    expected = prefill(engine, "a", prompt, chunk=48)
    prefill(engine, "b", other)
    begin(engine, "c", prompt)
    engine.step([Member("c", 0, prompt[:48], 0, wants_logits=False), Member("b", 0, ids(30), 50)])
    results = engine.step([Member("b", 0, ids(31), 51), Member("c", 0, prompt[48:], 48)])
    assert same_bits([row_of(results[1])], [expected])
    engine.close()


# -- slots -----------------------------------------------------------------------------------------------------------


def test_single_tokens_are_computed_together(telling_path: Path) -> None:
    """In whatever order they come, and though a session between them has left."""
    prompts = [np.random.default_rng(seed).integers(17, 512, 40).astype(np.int32) for seed in range(3)]
    rows: list[list[Logits]] = []
    for order, leaves in (((0, 2), False), ((2, 0), False), ((0, 2), True)):
        engine = load_small(telling_path)
        for number in (0, 1, 2) if leaves else (0, 2):
            prefill(engine, f"s{number}", prompts[number])
        if leaves:
            engine.release("s1", 0)
        results = engine.step([Member(f"s{number}", 0, ids(30), 40) for number in order])
        by_session = dict(zip(order, map(row_of, results), strict=True))
        rows.append([by_session[0], by_session[2]])
        engine.close()
    assert same_bits(rows[1], rows[0])
    assert same_bits(rows[2], rows[0])


def test_a_step_of_many_is_one_batch(small: LlamaCpp) -> None:
    """Six sessions of twenty tokens take twenty batches, wherever sessions have left gaps."""
    for number in range(6):
        prefill(small, f"s{number}", some_tokens(small, 40, seed=number))
    before = small.decodes
    for at in range(40, 60):
        small.step([Member(f"s{number}", 0, ids(30), at) for number in (3, 0, 5, 1, 4, 2)])
    assert small.decodes - before == 20
    for number in (0, 2, 3):
        small.release(f"s{number}", 0)
    results = small.step([Member(f"s{number}", 0, ids(30), 60) for number in (1, 4, 5)])
    assert small.decodes - before == 21
    assert all(isinstance(result, StepLogits) for result in results)
    small.check_integrity()


def test_moving_does_not_show(small: LlamaCpp) -> None:
    """Sessions that others' ends move to other slots go on to the same bits, and what was kept is still found."""
    prompts = [some_tokens(small, 60 + number, seed=number) for number in range(4)]
    expected = []
    for prompt in prompts:
        expected.append([prefill(small, "a", prompt), *decode(small, "a", [30, 31], len(prompt))])
        small.release("a", 0)
    scope = new_scope()
    rows = [[prefill(small, f"s{number}", prompt, scope=scope)] for number, prompt in enumerate(prompts)]
    small.release("s0", 0)
    small.release("s2", 0)
    for number in (3, 1):
        rows[number] += decode(small, f"s{number}", [30, 31], len(prompts[number]))
        assert same_bits(rows[number], expected[number])
    for number in (0, 2):
        held = begin(small, "a", prompts[number], scope=scope)
        assert held == (len(prompts[number]) - 1) // 16 * 16
        row = feed(small, "a", prompts[number], held)
        assert same_bits([row, *decode(small, "a", [30, 31], len(prompts[number]))], expected[number])
        small.release("a", 0)


@pytest.mark.parametrize("copies", [True, False])
def test_what_a_session_cuts_off_in_its_slot_is_found_again(
    small: LlamaCpp, monkeypatch: pytest.MonkeyPatch, copies: bool
) -> None:
    """A session that takes over the beginning of another's KV leaves that one's rest elsewhere, to the last bit. Where
    llama.cpp cannot copy it, it is not promised either, and the session that runs loses nothing."""
    common, scope = some_tokens(small, 64, seed=1), new_scope()
    first, second = (np.append(common, some_tokens(small, 64, seed=seed)) for seed in (2, 3))
    turn = np.append(first, some_tokens(small, 20, seed=4))
    expected = {}
    for name, prompt in (("second", second), ("turn", turn)):
        expected[name] = prefill(small, name, prompt)
        small.release(name, 0)
    prefill(small, "first", first, scope=scope)
    small.release("first", 0)
    with monkeypatch.context() as failing:
        if not copies:
            failing.setattr(small._context, "copy", lambda _source, target: not small._context.cut(target, 0))
        assert begin(small, "second", second, scope=scope) == 64
    assert same_bits([feed(small, "second", second, 64)], [expected["second"]])
    small.check_integrity()
    held = begin(small, "turn", turn, scope=scope)
    assert held == (128 if copies else 64)
    assert same_bits([feed(small, "turn", turn, held)], [expected["turn"]])


def test_prompts_longer_than_a_batch_come_in_several(small_path: Path) -> None:
    """The library would end the process at more rows than it was told to expect."""
    engine = load_llama(small_path, slots=4, slot_tokens=1536, bytes_per_token=BYTES_PER_TOKEN)
    prompt = some_tokens(engine, 1300)
    before = engine.decodes
    whole = prefill(engine, "a", prompt)
    assert engine.decodes - before == 3
    assert same_bits([prefill(engine, "b", prompt, chunk=256)], [whole])
    engine.close()


def test_other_tokens_than_the_prompts_are_refused(small: LlamaCpp) -> None:
    """What others may find must be what the session said it would be."""
    prompt = some_tokens(small, 40)
    begin(small, "a", prompt)
    other = prompt.copy()
    other[20] += 1
    assert isinstance(small.step([Member("a", 0, other, 0)])[0], MemberError)
    assert isinstance(small.step([Member("a", 0, prompt, 0)])[0], StepLogits)


def test_decoded_prompt_tokens_are_not_found(small: LlamaCpp) -> None:
    """A prompt's tokens that were computed one by one may have other bits than prefilled ones."""
    prompt, scope = some_tokens(small, 64), new_scope()
    begin(small, "a", prompt, scope=scope)
    small.step([Member("a", 0, prompt[:32], 0, wants_logits=False)])
    for at in range(32, 64):
        small.step([Member("a", 0, prompt[at : at + 1], at, wants_logits=False)])
    small.release("a", 0)
    assert small.resident(np.append(prompt, ids(20)), scope) == 32


# -- failures --------------------------------------------------------------------------------------------------------


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
    """A token whose values overflow fails its member by name; nothing of it reaches who has its slot afterwards."""
    engine = load_small(overflowing_path, slots=2, kept_prefixes=0, target_inflight=2)
    prompt, sick = some_tokens(engine, 100, seed=1), some_tokens(engine, 80, seed=2)
    expected = prefill(engine, "a", prompt)
    engine.release("a", 0)
    sick[-2] = 7
    begin(engine, "sick", sick)
    begin(engine, "b", prompt)
    results = engine.step([Member("b", 0, prompt, 0), Member("sick", 0, sick, 0)])
    assert same_bits([row_of(results[0])], [expected])
    assert isinstance(results[1], MemberError)
    assert engine.step([Member("b", 0, ids(30), 100)]) == [CacheMiss()]
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
    would have failed in its place."""
    engine = load_small(overflowing_path, slots=2, kept_prefixes=0, target_inflight=2)
    prompt, sick = some_tokens(engine, 40, seed=1), some_tokens(engine, 180, seed=2)
    sick[70] = 7
    expected = prefill(engine, "a", prompt)
    engine.release("a", 0)
    begin(engine, "sick", sick)
    begin(engine, "b", prompt)
    members = [Member("sick", 0, sick[:80], 0, wants_logits=False), Member("b", 0, prompt[:16], 0, wants_logits=False)]
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
