"""What every in-process engine promises (`tasks.ports.Engine`), bit for bit where it declares to be batch invariant."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pool.settings import ModelSettings
from tasks.ports import CacheMiss, Engine, Member, MemberError, StepLogits, TokenIds
from tests.engine.driving import (
    RandomSchedule,
    decode,
    greedy,
    ids,
    prefill,
    row_of,
    same_bits,
    some_tokens,
)
from workers.engines import load_engine
from workers.engines.gguf_model import read_gguf
from workers.engines.numpy_llama import NumpyLlama

#: Around the grid, and far beyond the first KV allocation.
TINY_LENGTHS = [1, 15, 16, 17, 33, 64, 70, 100, 129, 250, 5, 48]


def prompts_for(engine: Engine, lengths: list[int]) -> list[TokenIds]:
    return [some_tokens(engine, length, seed=length) for length in lengths]


def test_it_says_what_it_can_do(engine: Engine) -> None:
    """The figures that callers plan with are there and make sense."""
    capability = engine.capability()
    assert capability.batch_invariant
    assert capability.snapshot
    assert capability.prefix_share
    assert not capability.recompute_exact
    assert capability.max_positions == engine.context_length
    assert capability.max_sessions >= 16
    assert engine.bytes_per_token > 0
    assert engine.prefill_grid == 16
    assert engine.fingerprint() == engine.fingerprint()


@pytest.mark.parametrize(
    ("engine", "lengths", "count", "room"),
    [
        ("tiny", TINY_LENGTHS, 24, 2),
        ("tiny", TINY_LENGTHS, 24, 8),
        ("tiny", TINY_LENGTHS, 24, 16),
        ("smollm2", [1, 16, 17, 40], 4, 8),
    ],
    indirect=["engine"],
)
def test_streams_are_the_same_bits_in_any_batch(engine: Engine, lengths: list[int], count: int, room: int) -> None:
    """Every row of logits of every session equals, to the last bit, the row the session gets when it runs alone."""
    prompts = prompts_for(engine, lengths)
    together = RandomSchedule(engine, prompts, count, room=room, seed=room).run()
    for prompt, stream in zip(prompts, together, strict=True):
        alone = greedy(engine, "a", prompt, count)
        assert stream.tokens == alone.tokens
        assert same_bits(stream.rows, alone.rows)


@pytest.mark.parametrize(("engine", "count"), [("tiny", 64), ("smollm2", 4)], indirect=["engine"])
def test_streams_are_the_same_at_every_concurrency(engine: Engine, count: int) -> None:
    """Eight prompts, generated 1, 2, 4 and 8 at a time, give the same tokens."""
    prompts = prompts_for(engine, [5, 9, 16, 20, 3, 12, 17, 8])
    levels = [
        [stream.tokens for stream in RandomSchedule(engine, prompts, count, room=room, seed=room, whole=True).run()]
        for room in (1, 2, 4, 8)
    ]
    assert levels[1:] == levels[:1] * 3


@pytest.mark.parametrize(
    ("engine", "length"),
    [*(("tiny", length) for length in (2, 16, 17, 47, 49, 129)), ("smollm2", 33), ("smollm2", 47)],
    indirect=["engine"],
)
def test_the_cut_of_a_prompt_does_not_show(engine: Engine, length: int) -> None:
    """Chunks on the grid, of any size, give the bits of the whole prompt; so does what is generated after it."""
    prompt = some_tokens(engine, length)
    whole = prefill(engine, "a", prompt)
    after = decode(engine, "a", [20, 21], length)
    for chunk in (16, 32):
        assert same_bits([prefill(engine, "b", prompt, chunk=chunk)], [whole])
        assert same_bits(decode(engine, "b", [20, 21], length), after)


def test_a_chunk_does_not_see_its_neighbours(engine: Engine) -> None:
    """Chunks of different sessions and decode rows in one step give the bits they give alone."""
    first, second = some_tokens(engine, 40, seed=1), some_tokens(engine, 21, seed=2)
    alone = [prefill(engine, "a", first), prefill(engine, "b", second), *decode(engine, "b", [30], 21)]
    prefill(engine, "c", second, epoch=1)
    results = engine.step([Member("d", 0, first, 0), Member("c", 1, ids(30), 21), Member("a", 1, second, 0)])
    assert same_bits([row_of(results[0]), row_of(results[2]), row_of(results[1])], alone)


def test_a_takeover_replays_to_the_same_bits(engine: Engine) -> None:
    """The prompt prefilled anew and the logged tokens fed as decode rows continue as if nothing had happened."""
    prompt = some_tokens(engine, 37)
    original = greedy(engine, "a", prompt, 8)
    engine.release("a", 0)
    prefill(engine, "a", prompt, epoch=1, chunk=16)
    members = [Member("a", 1, ids(token), 37 + k, k == 3) for k, token in enumerate(original.tokens[:4])]
    forced = [engine.step([member])[0] for member in members]
    assert [isinstance(result, StepLogits) and result.row is None for result in forced] == [True, True, True, False]
    rest = decode(engine, "a", original.tokens[4:7], 41, epoch=1)
    assert same_bits([row_of(forced[-1]), *rest], original.rows[4:8])


def test_unknown_sessions_are_cache_misses(engine: Engine) -> None:
    """No KV, KV of another epoch, or another length than the caller believes: a miss. The rest of the batch runs."""
    prompt = some_tokens(engine, 16)
    prefill(engine, "a", prompt)
    results = engine.step(
        [
            Member("b", 0, ids(5), 16),
            Member("a", 0, ids(5), 16),
            Member("c", 0, some_tokens(engine, 16), 16),
        ]
    )
    assert [type(result) for result in results] == [CacheMiss, StepLogits, CacheMiss]
    for member in (Member("a", 1, ids(5), 17), Member("a", 0, ids(5), 16), Member("a", 0, ids(5), 18)):
        assert engine.step([member]) == [CacheMiss()]


def test_epochs_do_not_share_anything(engine: Engine) -> None:
    """An old epoch never reads a newer one's KV, and a release touches only its own."""
    old, new = some_tokens(engine, 16, seed=1), some_tokens(engine, 16, seed=2)
    prefill(engine, "a", old, epoch=0)
    prefill(engine, "a", new, epoch=1)
    expected = decode(engine, "a", [9], 16, epoch=0)
    prefill(engine, "b", old)
    assert same_bits(decode(engine, "b", [9], 16), expected)
    engine.release("a", 0)
    engine.release("a", 0)
    assert engine.step([Member("a", 0, ids(9), 17)]) == [CacheMiss()]
    prefill(engine, "c", new)
    assert same_bits(decode(engine, "a", [9], 16, epoch=1), decode(engine, "c", [9], 16))


def test_start_zero_begins_anew(engine: Engine) -> None:
    """A member at position 0 drops what the session held before, also when it is shorter."""
    prefill(engine, "a", some_tokens(engine, 40, seed=1))
    prompt = some_tokens(engine, 18, seed=2)
    again = [prefill(engine, "a", prompt), *decode(engine, "a", [30], 18)]
    fresh = [prefill(engine, "b", prompt), *decode(engine, "b", [30], 18)]
    assert same_bits(again, fresh)


def test_bad_members_fail_alone(engine: Engine) -> None:
    """Each kind of bad member is its own error that names no token, and the good one gets the bits it gets alone."""
    prompt = some_tokens(engine, 20)
    good = prefill(engine, "a", prompt)
    size = engine.vocabulary.size
    prefill(engine, "b", prompt)
    results = engine.step(
        [
            Member("c", 0, ids(size), 0),
            Member("d", 0, ids(5, -1), 0),
            Member("e", 0, ids(), 0),
            Member("f", 0, ids(5), engine.context_length),
            Member("g", 0, ids(5), -1),
            Member("b", 0, ids(5, 6), 20),
            Member("a", 1, prompt, 0),
            Member("a", 1, prompt, 0),
            Member("h", 0, ids(5, 6).reshape(1, 2), 0),
            Member("a", 0, ids(5), 20),
        ]
    )
    assert [isinstance(result, MemberError) for result in results] == [True] * 6 + [False, True, True, False]
    assert same_bits([row_of(results[6])], [good])
    messages = [result.message for result in results if isinstance(result, MemberError)]
    assert not any(str(size) in message for message in messages)
    assert isinstance(engine.step([Member("b", 0, ids(5), 20)])[0], StepLogits)


def test_an_empty_batch_is_no_error(engine: Engine) -> None:
    """Nothing in, nothing out."""
    assert engine.step([]) == []


def test_arrays_stay_their_owners(engine: Engine) -> None:
    """The engine leaves the caller's tokens alone, and a returned row is the caller's to change."""
    prompt = some_tokens(engine, 20)
    before = prompt.copy()
    row = prefill(engine, "a", prompt)
    kept = row.copy()
    row[:] = 0
    assert np.array_equal(prompt, before)
    prompt[:] = 18
    follow = decode(engine, "a", [30], 20)
    assert same_bits([prefill(engine, "b", before)], [kept])
    assert same_bits(decode(engine, "b", [30], 20), follow)


def test_a_snapshot_continues_to_the_same_bits(engine: Engine) -> None:
    """KV put back under another session and epoch continues exactly, and the blob stays good for more."""
    prompt = some_tokens(engine, 21)
    prefill(engine, "a", prompt)
    decode(engine, "a", [40], 21)
    blob = engine.snapshot("a", 0)
    assert blob is not None
    expected = decode(engine, "a", [41, 42], 22)
    engine.release("a", 0)
    for session in ("b", "c"):
        assert engine.restore(session, 2, blob)
        assert same_bits(decode(engine, session, [41, 42], 22, epoch=2), expected)


def test_damaged_snapshots_are_not_restored(engine: Engine) -> None:
    """A blob cut short, changed or extended is refused, and leaves the session as it was."""
    prefill(engine, "a", some_tokens(engine, 3))
    blob = engine.snapshot("a", 0)
    assert blob is not None
    damaged = bytearray(blob)
    damaged[len(blob) // 2] ^= 1
    for bad in (b"", b"nonsense", blob[:10], blob[:-1], blob + b"x", bytes(damaged), b"x" + blob):
        assert not engine.restore("b", 0, bad)
    assert engine.step([Member("b", 0, ids(5), 3)]) == [CacheMiss()]


def test_there_is_no_snapshot_of_nothing(engine: Engine) -> None:
    """A session that is not here has none."""
    assert engine.snapshot("a", 0) is None


def test_a_shared_prefix_continues_to_the_same_bits(engine: Engine) -> None:
    """A session that begins with another's prefilled prefix gets the bits of prefilling it, and both go their ways."""
    common, tail = some_tokens(engine, 35, seed=1), some_tokens(engine, 20, seed=2)
    prompt = np.concatenate((common[:32], tail))
    expected = prefill(engine, "a", prompt)
    prefill(engine, "b", common)
    assert engine.share_prefix(("b", 0), ("c", 1), 32)
    (result,) = engine.step([Member("c", 1, tail, 32)])
    assert same_bits([row_of(result)], [expected])
    prefill(engine, "d", common)
    assert same_bits(decode(engine, "b", [30], 35), decode(engine, "d", [30], 35))


@pytest.mark.parametrize(
    ("source", "target", "positions"),
    [
        pytest.param(("a", 0), ("b", 0), 15, id="off the grid"),
        pytest.param(("a", 0), ("b", 0), 32, id="more than it holds"),
        pytest.param(("a", 0), ("b", 0), 0, id="nothing"),
        pytest.param(("a", 0), ("b", 0), -16, id="negative"),
        pytest.param(("a", 1), ("b", 0), 16, id="another epoch"),
        pytest.param(("a", 0), ("a", 0), 16, id="itself"),
    ],
)
def test_what_cannot_be_shared_is_not(
    engine: Engine, source: tuple[str, int], target: tuple[str, int], positions: int
) -> None:
    """Sharing answers False and changes nothing."""
    prefill(engine, "a", some_tokens(engine, 20))
    assert not engine.share_prefix(source, target, positions)
    assert isinstance(engine.step([Member("a", 0, ids(5), 20)])[0], StepLogits)
    assert engine.step([Member("b", 0, ids(5), 16)]) == [CacheMiss()]


def test_the_context_can_be_filled_to_the_last_position(tiny: Engine) -> None:
    """The last position works; one more is that member's error."""
    prompt = some_tokens(tiny, tiny.context_length - 1)
    prefill(tiny, "full", prompt)
    (last,) = tiny.step([Member("full", 0, ids(5), tiny.context_length - 1)])
    assert isinstance(last, StepLogits)
    assert last.length == tiny.context_length
    assert isinstance(tiny.step([Member("full", 0, ids(5), tiny.context_length)])[0], MemberError)
    tiny.release("full", 0)


def test_long_contexts_are_the_same_bits_too(tiny: Engine) -> None:
    """Hundreds of positions, beyond every length at which kernels change, cut and batched differently."""
    prompts = prompts_for(tiny, [520, 700])
    together = RandomSchedule(tiny, prompts, 40, room=2, seed=1).run()
    for prompt, stream in zip(prompts, together, strict=True):
        assert same_bits(stream.rows, greedy(tiny, "alone", prompt, 40).rows)
    tiny.release("alone", 0)


def test_models_differ_by_seed_and_agree_by_seed() -> None:
    """The seed is the model: same seed, same fingerprint and bits; another seed, neither. Snapshots do not cross."""
    first, again, other = (
        load_engine("tiny", ModelSettings(source=f"random:{seed}"), weights=None) for seed in (1, 1, 2)
    )
    prompt = some_tokens(first, 20)
    rows = [prefill(engine, "a", prompt) for engine in (first, again, other)]
    assert same_bits(rows[:1], rows[1:2])
    assert not same_bits(rows[:1], rows[2:])
    assert first.fingerprint() == again.fingerprint() != other.fingerprint()
    blob = first.snapshot("a", 0)
    assert blob is not None
    assert again.restore("b", 0, blob)
    assert not other.restore("b", 0, blob)


def test_threads_do_not_show(smollm2_path: Path) -> None:
    """The number of threads changes neither the fingerprint nor a bit of the logits."""
    weights, vocabulary = read_gguf(smollm2_path)
    engines = [NumpyLlama(weights, vocabulary, threads=threads) for threads in (1, 3)]
    one, three = ([prefill(engine, "a", some_tokens(engine, 70)), *decode(engine, "a", [30], 70)] for engine in engines)
    assert same_bits(one, three)
    assert engines[0].fingerprint() == engines[1].fingerprint()
    for engine in engines:
        engine.close()


def test_a_closed_engine_answers_with_errors() -> None:
    """Closing twice is fine; steps after it are errors of their members, and nothing can be restored."""
    engine = load_engine("tiny", ModelSettings(source="random:3"), weights=None)
    prefill(engine, "a", some_tokens(engine, 20))
    blob = engine.snapshot("a", 0)
    assert blob is not None
    engine.close()
    engine.close()
    assert isinstance(engine.step([Member("a", 0, ids(5), 20)])[0], MemberError)
    assert engine.snapshot("a", 0) is None
    assert not engine.restore("a", 0, blob)


def test_tiny_streams_wander(tiny: Engine) -> None:
    """Greedy streams of the tiny model do not collapse into a few tokens, and differ by prompt."""
    streams = [greedy(tiny, "wander", some_tokens(tiny, 12, seed=seed), 48).tokens for seed in range(6)]
    tiny.release("wander", 0)
    assert all(len(set(tokens)) >= 24 for tokens in streams)
    assert len({tuple(tokens) for tokens in streams}) == len(streams)
