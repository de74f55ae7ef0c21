"""What every in-process engine promises (`tasks.ports.Engine`), bit for bit where it declares to be batch invariant.

What it promises of its KV is in `test_contract_kv`.
"""

from __future__ import annotations

import numpy as np
import pytest

from tasks.ports import CacheMiss, Engine, Member, MemberError, StepLogits, TokenIds
from tests.engine.conftest import Workload
from tests.engine.driving import (
    RandomSchedule,
    alone,
    begin,
    decode,
    ids,
    needs,
    prefill,
    row_of,
    same_bits,
    some_tokens,
)


def prompts_for(engine: Engine, lengths: tuple[int, ...]) -> list[TokenIds]:
    return [some_tokens(engine, length, seed=length) for length in lengths]


@pytest.fixture(params=range(3))
def room(request: pytest.FixtureRequest, workload: Workload) -> int:
    """Each of the workload's numbers of sessions at once."""
    if request.param >= len(workload.rooms):
        pytest.skip("fewer levels for this engine")
    return workload.rooms[request.param]


def test_it_says_what_it_can_do(engine: Engine) -> None:
    """The figures that callers plan with are there and make sense."""
    capability = engine.capability()
    assert capability.batch_invariant
    assert 0 < capability.max_positions <= engine.context_length
    assert capability.max_positions <= engine.kv_usage().total
    assert capability.max_sessions >= 8
    assert engine.bytes_per_token > 0
    assert engine.prefill_grid >= 1
    assert engine.fingerprint() == engine.fingerprint()


def test_streams_are_the_same_bits_in_any_batch(engine: Engine, workload: Workload, room: int) -> None:
    """Every row of logits of every session equals, to the last bit, the row the session gets when it runs alone."""
    prompts = prompts_for(engine, workload.lengths)
    together = RandomSchedule(engine, prompts, workload.tokens, room=room, seed=room).run()
    for prompt, stream in zip(prompts, together, strict=True):
        expected = alone(engine, prompt, workload.tokens)
        assert stream.tokens == expected.tokens
        assert same_bits(stream.rows, expected.rows)


def test_exported_and_shared_streams_are_the_same_bits(engine: Engine, workload: Workload) -> None:
    """So it does when sessions begin with each other's prompts, and are exported and restored in the middle."""
    needs(engine, "snapshot")
    common = some_tokens(engine, workload.shared, seed=99)
    prompts = [np.concatenate((common, prompt)) for prompt in prompts_for(engine, workload.lengths)]
    together = RandomSchedule(engine, prompts, workload.tokens, room=2, seed=1, preempted=True).run()
    assert any(stream.cached for stream in together) == engine.capability().prefix_share
    for prompt, stream in zip(prompts, together, strict=True):
        assert same_bits(stream.rows, alone(engine, prompt, workload.tokens).rows)


def test_streams_are_the_same_at_every_concurrency(engine: Engine, workload: Workload) -> None:
    """Eight prompts, generated 1, 2, 4 and 8 at a time, give the same tokens."""
    prompts = prompts_for(engine, (5, 9, 16, 20, 3, 12, 17, 8))
    levels = [
        [
            stream.tokens
            for stream in RandomSchedule(engine, prompts, workload.tokens, room=room, seed=room, whole=True).run()
        ]
        for room in (1, 2, 4, 8)
    ]
    assert levels[1:] == levels[:1] * 3


@pytest.mark.parametrize("length", [2, 16, 17, 47, 49, 65, 129])
def test_the_cut_of_a_prompt_does_not_show(engine: Engine, length: int) -> None:
    """Chunks on the grid, of any size, give the bits of the whole prompt; so does what is generated after it."""
    prompt = some_tokens(engine, length)
    whole = prefill(engine, "a", prompt)
    after = decode(engine, "a", [20, 21], length)
    for epoch, grids in enumerate((1, 2, 3)):
        assert same_bits([prefill(engine, "b", prompt, epoch=epoch, chunk=grids * engine.prefill_grid)], [whole])
        assert same_bits(decode(engine, "b", [20, 21], length, epoch=epoch), after)


def test_a_chunk_does_not_see_its_neighbours(engine: Engine) -> None:
    """Chunks of different sessions and decode rows in one step give the bits they give alone."""
    first, second = some_tokens(engine, 40, seed=1), some_tokens(engine, 21, seed=2)
    expected = [prefill(engine, "a", first), prefill(engine, "b", second), *decode(engine, "b", [30], 21)]
    prefill(engine, "c", second, epoch=1)
    begin(engine, "d", first)
    begin(engine, "a", second, epoch=1)
    results = engine.step([Member("d", 0, first, 0), Member("c", 1, ids(30), 21), Member("a", 1, second, 0)])
    assert same_bits([row_of(results[0]), row_of(results[2]), row_of(results[1])], expected)


def test_a_takeover_replays_to_the_same_bits(engine: Engine) -> None:
    """The prompt prefilled anew and the logged tokens fed as decode rows continue as if nothing had happened."""
    prompt = some_tokens(engine, 37)
    original = alone(engine, prompt, 8)
    prefill(engine, "a", prompt, epoch=1, chunk=engine.prefill_grid)
    members = [Member("a", 1, ids(token), 37 + k, k == 3) for k, token in enumerate(original.tokens[:4])]
    forced = [engine.step([member])[0] for member in members]
    assert [isinstance(result, StepLogits) and result.row is None for result in forced] == [True, True, True, False]
    rows = [row_of(forced[-1]), *decode(engine, "a", original.tokens[4:7], 41, epoch=1)]
    assert same_bits(rows, original.rows[4:8])


def test_unknown_sessions_are_cache_misses(engine: Engine) -> None:
    """One that has not begun, or KV of another epoch, or another length than the caller believes: a miss. The rest of
    the batch runs."""
    prompt = some_tokens(engine, 16)
    prefill(engine, "a", prompt)
    results = engine.step([Member("b", 0, prompt, 0), Member("a", 0, ids(5), 16), Member("c", 0, ids(5), 16)])
    assert [type(result) for result in results] == [CacheMiss, StepLogits, CacheMiss]
    for member in (Member("a", 1, ids(5), 17), Member("a", 0, ids(5), 16), Member("a", 0, ids(5), 18)):
        assert engine.step([member]) == [CacheMiss()]
    assert engine.step([Member("a", 0, prompt, 0)]) == [CacheMiss()]


def test_epochs_do_not_share_anything(engine: Engine) -> None:
    """An old epoch never reads a newer one's KV, and a release touches only its own, however often it is said."""
    old, new = some_tokens(engine, 16, seed=1), some_tokens(engine, 16, seed=2)
    prefill(engine, "a", old, epoch=0)
    prefill(engine, "a", new, epoch=1)
    expected = decode(engine, "a", [9], 16, epoch=0)
    prefill(engine, "b", old)
    assert same_bits(decode(engine, "b", [9], 16), expected)
    engine.release("a", 0)
    usage = engine.kv_usage()
    engine.release("a", 0)
    engine.release("a", 0, tokens=old, holder="h")
    assert engine.kv_usage() == usage
    assert engine.step([Member("a", 0, ids(9), 17)]) == [CacheMiss()]
    prefill(engine, "c", new)
    assert same_bits(decode(engine, "a", [9], 16, epoch=1), decode(engine, "c", [9], 16))


def test_bad_members_fail_alone(engine: Engine) -> None:
    """Each kind of bad member is its own error that names no token, and the good one gets the bits it gets alone."""
    prompt = some_tokens(engine, 20)
    good = prefill(engine, "a", prompt)
    size, limit = engine.vocabulary.size, engine.capability().max_positions
    prefill(engine, "b", prompt)
    begin(engine, "a", prompt, epoch=1)
    for session in ("c", "d"):
        begin(engine, session, ids(5), room=10)
    begin(engine, "d", ids(), epoch=1)
    results = engine.step(
        [
            Member("c", 0, ids(size), 0),
            Member("d", 0, ids(5, -1), 0),
            Member("d", 1, ids(), 0),
            Member("d", 2, ids(5), max(limit, engine.context_length)),
            Member("c", 1, ids(5), -1),
            Member("b", 0, ids(5, 6), 20),
            Member("a", 1, prompt, 0),
            Member("a", 1, prompt, 0),
            Member("b", 1, ids(5, 6).reshape(1, 2), 0),
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


def test_the_last_position_works(engine: Engine, workload: Workload) -> None:
    """The last position that the engine says it has works; one more is that member's error."""
    last = engine.capability().max_positions - 1
    if last > 1.1 * workload.long[1]:
        pytest.skip("too long a prompt for this engine's tests")
    prefill(engine, "a", some_tokens(engine, last))
    (result,) = engine.step([Member("a", 0, ids(5), last)])
    assert isinstance(result, StepLogits)
    assert result.length == last + 1
    assert isinstance(engine.step([Member("a", 0, ids(5), last + 1)])[0], MemberError)


def test_long_contexts_are_the_same_bits_too(engine: Engine, workload: Workload) -> None:
    """Up to thousands of positions, beyond every length at which kernels change, cut and batched differently."""
    prompts = prompts_for(engine, workload.long)
    together = RandomSchedule(engine, prompts, 2 * workload.tokens, room=2, seed=1).run()
    for prompt, stream in zip(prompts, together, strict=True):
        assert same_bits(stream.rows, alone(engine, prompt, 2 * workload.tokens).rows)
