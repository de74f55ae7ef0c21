"""What is special about the llama.cpp engine: its self-test, and its slots."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from tasks.ports import Logits, Member, MemberError, StepLogits
from tests.engine.conftest import load_llama, load_small
from tests.engine.driving import begin, decode, feed, ids, new_scope, prefill, row_of, same_bits, some_tokens
from tests.engine.small_model import BYTES_PER_TOKEN, VOCABULARY, write_small_model
from workers.engines.llama_cpp_context import ContextOptions, LlamaContext, Row
from workers.engines.llama_cpp_engine import LlamaCpp
from workers.engines.llama_cpp_selftest import FINE_PIECES, PROMPT_TOKENS, SelfTest, _SelfTest

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
    """With the recipe (quantised, no flash attention, a partitioned KV), this build's batches do not show, nor where a
    prompt is cut."""
    assert small.tested.batch_invariant
    assert small.tested.fine_cuts
    assert small.tested.packs
    assert small.tested.threads_invariant


@pytest.mark.parametrize(("shows", "begun", "calls"), [((), 40, 1), (("packed",), 40, 3), (("packed", "fine"), 32, 3)])
def test_what_shows_in_the_bits_is_not_done(
    small_path: Path, monkeypatch: pytest.MonkeyPatch, shows: tuple[str, ...], begun: int, calls: int
) -> None:
    """On a machine where pieces beside others have other bits, each is a call of its own; where fine pieces have,
    sessions begin on the grid, too."""
    if "packed" in shows:
        monkeypatch.setattr(_SelfTest, "_packed", lambda _self, _sizes: "other bits")
    if "fine" in shows:
        prefilled = _SelfTest._prefilled
        monkeypatch.setattr(
            _SelfTest, "_prefilled", lambda self, sizes: prefilled(self, sizes) + "!" * (sizes == FINE_PIECES)
        )
    engine = load_small(small_path)
    assert engine.tested.batch_invariant
    assert (engine.tested.fine_cuts, engine.tested.packs) == ("fine" not in shows, "packed" not in shows)
    common, scope = some_tokens(engine, 41, seed=9), new_scope()
    prompts = [np.append(common, some_tokens(engine, 31, seed=seed)) for seed in range(3)]
    prefill(engine, "first", common, scope=scope)
    held = [begin(engine, f"s{number}", prompt, scope=scope) for number, prompt in enumerate(prompts)]
    assert held == [begun] * 3
    before = engine.decodes
    engine.step([Member(f"s{number}", 0, prompt[begun:], begun) for number, prompt in enumerate(prompts)])
    assert engine.decodes - before == calls
    engine.close()


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


@pytest.mark.parametrize("flash_attention", [False, True])
def test_prompts_that_come_together_are_one_batch(small_path: Path, flash_attention: bool) -> None:
    """Equally long pieces of neighbours are computed at once, also behind what they began with, beside a session that
    decodes; to the bits of each alone, where that is promised."""
    engine = load_small(small_path, flash_attention=flash_attention)
    common, scope = some_tokens(engine, 30, seed=9), new_scope()
    prompts = [np.append(common, some_tokens(engine, 34, seed=seed)) for seed in range(3)]
    expected = []
    for prompt in prompts:
        expected.append(prefill(engine, "alone", prompt))
        engine.release("alone", 0)
    prefill(engine, "first", common, scope=scope)
    assert [begin(engine, f"s{number}", prompt, scope=scope) for number, prompt in enumerate(prompts)] == [30] * 3
    before = engine.decodes
    pieces = [Member(f"s{number}", 0, prompt[30:], 30) for number, prompt in enumerate(prompts)]
    results = engine.step([*pieces, Member("first", 0, ids(30), 30)])
    assert engine.decodes - before == 2
    rows = [row_of(result) for result in results[:3]]
    if flash_attention:
        assert max(np.abs(row - alone).max() for row, alone in zip(rows, expected, strict=True)) < 0.5
    else:
        assert same_bits(rows, expected)
    assert isinstance(results[3], StepLogits)
    engine.close()


@pytest.mark.parametrize(("flash_attention", "calls"), [(False, 2), (True, 1)])
def test_only_exact_bits_cost_a_call_for_a_last_token(small_path: Path, flash_attention: bool, calls: int) -> None:
    """A prompt whose length is one beyond the grid is one piece where nothing is promised, and all of it is found."""
    engine = load_small(small_path, flash_attention=flash_attention)
    prompt, scope = some_tokens(engine, 65), new_scope()
    before = engine.decodes
    prefill(engine, "a", prompt, scope=scope)
    assert engine.decodes - before == calls
    assert engine.resident(np.append(prompt, ids(20)), scope) == (65 if flash_attention else 64)
    engine.close()


@pytest.mark.parametrize(("flash_attention", "found"), [(False, 64), (True, 65)])
def test_a_single_token_of_a_prompt_is_found_where_nothing_is_promised(
    small_path: Path, flash_attention: bool, found: int
) -> None:
    """There it is as good as one of a piece."""
    engine = load_small(small_path, flash_attention=flash_attention)
    prompt, scope = some_tokens(engine, 65), new_scope()
    prefill(engine, "a", prompt[:64], scope=scope)
    engine.release("a", 0)
    assert begin(engine, "b", prompt, scope=scope) == 64
    feed(engine, "b", prompt, 64)
    assert engine.resident(np.append(prompt, ids(20)), scope) == found
    engine.close()


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
        assert held == (len(prompts[number]) - 2) // 2 * 2  # its last piece has two tokens at least
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
