"""What every in-process engine promises of its KV: room, what sessions begin with, what is kept, KV as bytes."""

from __future__ import annotations

import numpy as np
import pytest

from tasks.ports import CacheMiss, Engine, Member, MemberError, StepLogits
from tests.engine.conftest import Workload
from tests.engine.driving import (
    begin,
    decode,
    feed,
    ids,
    needs,
    new_scope,
    prefill,
    pressure,
    same_bits,
    some_tokens,
)

# -- room ------------------------------------------------------------------------------------------------------------


def test_a_session_without_room_does_not_begin(engine: Engine) -> None:
    """It is refused, nothing has happened to anybody, and it can begin when others have gone."""
    prompt = some_tokens(engine, 21)
    prefill(engine, "a", prompt)
    with pressure(engine):
        before = engine.kv_usage()
        assert before.held <= before.total
        assert engine.begin("b", 0, prompt, 30) is None
        assert engine.begin("b", 0, prompt, engine.capability().max_positions) is None
        assert engine.kv_usage() == before
        assert engine.step([Member("b", 0, prompt, 0)]) == [CacheMiss()]
        engine.check_integrity()
        rows = decode(engine, "a", [30], 21)
    prefill(engine, "b", prompt)
    assert same_bits(decode(engine, "b", [30], 21), rows)


def test_nobody_begins_twice(engine: Engine) -> None:
    """A session that has begun is a mistake of the caller's, and stays as it was."""
    prompt = some_tokens(engine, 21)
    prefill(engine, "a", prompt)
    before = engine.kv_usage()
    with pytest.raises(ValueError, match="begun"):
        engine.begin("a", 0, prompt, 30)
    assert engine.kv_usage() == before
    assert isinstance(engine.step([Member("a", 0, ids(30), 21)])[0], StepLogits)


def test_positions_beyond_a_sessions_room_are_its_error(engine: Engine) -> None:
    """A step beyond what a session was given fails alone, and changes nothing; with more room it goes on."""
    prompt = some_tokens(engine, 21)
    expected = [prefill(engine, "a", prompt), *decode(engine, "a", [30, 31, 32], 21)]
    rows = [prefill(engine, "b", prompt, room=1), *decode(engine, "b", [30], 21)]
    assert isinstance(engine.step([Member("b", 0, ids(31), 22)])[0], MemberError)
    assert engine.extend("b", 0, 23)
    rows += decode(engine, "b", [31], 22)
    assert isinstance(engine.step([Member("b", 0, ids(32), 23)])[0], MemberError)
    begin(engine, "c", prompt, room=-1)
    assert isinstance(engine.step([Member("c", 0, prompt, 0)])[0], MemberError)
    assert engine.extend("b", 0, 300 if engine.capability().max_positions >= 300 else 24)
    assert same_bits([*rows, *decode(engine, "b", [32], 23)], expected)


def test_room_is_not_made_up(engine: Engine) -> None:
    """When there is no more, a session is not extended, and nothing has happened; one that is not here never is. To ask
    for less than it has changes nothing. An engine may give every session all that one can have."""
    prompt = some_tokens(engine, 21)
    prefill(engine, "a", prompt)
    has_all = engine.kv_usage().held >= engine.capability().max_positions
    assert not engine.extend("b", 0, 30)
    assert not engine.extend("a", 1, 30)
    with pressure(engine):
        before = engine.kv_usage()
        assert engine.extend("a", 0, engine.capability().max_positions) == has_all
        assert engine.extend("a", 0, 10)
        assert engine.kv_usage() == before
        decode(engine, "a", [30], 21)
    assert engine.extend("a", 0, engine.capability().max_positions)


def test_usage_tells_what_is_held(engine: Engine) -> None:
    """A session's room counts from its beginning to its end."""
    empty = engine.kv_usage()
    begin(engine, "a", some_tokens(engine, 30), room=100)
    used = engine.kv_usage()
    assert used.held - empty.held >= 130
    assert (used.total, used.pinned) == (empty.total, 0)
    engine.release("a", 0)
    assert engine.kv_usage().held == empty.held


# -- what sessions begin with ----------------------------------------------------------------------------------------


def test_hits_and_misses_give_the_same_bits(engine: Engine, workload: Workload) -> None:
    """A session that begins with what another prefilled gets the bits of computing it all, and both go their ways."""
    common, tail = some_tokens(engine, workload.shared, seed=1), some_tokens(engine, 20, seed=2)
    prompt, scope = np.concatenate((common, tail)), new_scope()
    expected = [prefill(engine, "a", prompt), *decode(engine, "a", [30, 31], len(prompt))]
    prefill(engine, "b", common, scope=scope)
    engine.release("b", 0)
    resident = engine.resident(prompt, scope)
    held = begin(engine, "c", prompt, scope=scope)
    assert held == resident
    assert (held > 0) == engine.capability().prefix_share
    assert held <= len(common)
    rows = [feed(engine, "c", prompt, held, chunk=engine.prefill_grid), *decode(engine, "c", [30, 31], len(prompt))]
    assert same_bits(rows, expected)
    # Another beside it, which says something else: neither sees the other's words.
    begin(engine, "d", common, scope=scope)
    other = feed(engine, "d", common, engine.resident(common, scope))
    assert same_bits([other], [prefill(engine, "b", common)])
    assert same_bits(decode(engine, "c", [32], len(prompt) + 2), decode(engine, "a", [32], len(prompt) + 2))


def test_a_whole_prompt_is_never_found(engine: Engine) -> None:
    """The last token is always computed, because its logits are wanted."""
    prompt, scope = some_tokens(engine, 128), new_scope()
    expected = prefill(engine, "a", prompt, scope=scope)
    engine.release("a", 0)
    for length in (128, 65, 64, 1):
        assert engine.resident(prompt[:length], scope) < length
    assert same_bits([prefill(engine, "b", prompt, scope=scope)], [expected])


def test_half_a_prompt_can_be_found(engine: Engine, workload: Workload) -> None:
    """What was prefilled of a session that left early is as good as any."""
    prompt, scope = some_tokens(engine, workload.shared), new_scope()
    expected = prefill(engine, "a", prompt)
    begin(engine, "b", prompt, scope=scope)
    engine.step([Member("b", 0, prompt[:96], 0, wants_logits=False)])
    engine.release("b", 0)
    assert engine.resident(prompt, scope) <= 96
    assert same_bits([prefill(engine, "c", prompt, scope=scope)], [expected])


def test_nothing_is_shared_between_scopes(engine: Engine, workload: Workload) -> None:
    """Who is in another scope finds nothing, also after others of his own scope have been here."""
    prompt, scope, other = some_tokens(engine, workload.shared), new_scope(), new_scope()
    prefill(engine, "a", prompt, scope=scope)
    engine.release("a", 0, tokens=prompt)
    assert engine.resident(prompt, other) == 0
    assert begin(engine, "b", prompt, scope=other) == 0
    assert engine.resident(prompt, "") == 0


def test_what_is_generated_is_found_where_the_release_says_it(engine: Engine, workload: Workload) -> None:
    """Without the tokens, an engine that cannot recompute exactly keeps the prompt's part alone."""
    needs(engine, "prefix_share")
    prompt = some_tokens(engine, workload.shared)
    output = some_tokens(engine, 50, seed=3)
    turn = np.concatenate((prompt, output, ids(20)))
    found = []
    for said in (False, True):
        scope = new_scope()
        prefill(engine, "a", prompt, scope=scope, room=len(output))
        for start in range(len(output) - 1):
            engine.step([Member("a", 0, output[start : start + 1], len(prompt) + start, wants_logits=False)])
        engine.release("a", 0, tokens=turn[: len(prompt) + len(output) - 1] if said else None)
        found.append(engine.resident(turn, scope))
    assert 0 < found[0] <= len(prompt)
    assert len(prompt) < found[1] < len(prompt) + len(output)


def test_pinned_kv_survives_pressure(engine: Engine, workload: Workload) -> None:
    """What is kept for a holder stays through a time without room, until it is let go or replaced."""
    needs(engine, "prefix_share")
    prompt, other, scope = some_tokens(engine, workload.shared, seed=1), some_tokens(engine, 100, seed=2), new_scope()
    expected = prefill(engine, "a", prompt, scope=scope)
    engine.release("a", 0, holder="h")
    kept = engine.resident(prompt, scope)
    usage = engine.kv_usage()
    assert kept > 0
    assert usage.held >= usage.pinned >= kept
    with pressure(engine):
        engine.check_integrity()
        assert engine.kv_usage().cached == 0
    assert engine.resident(prompt, scope) == kept
    assert same_bits([prefill(engine, "b", prompt, scope=scope)], [expected])
    prefill(engine, "c", other, scope=scope)
    engine.release("b", 0)
    engine.release("c", 0, holder="h")
    with pressure(engine):
        pass
    assert engine.resident(prompt, scope) == 0
    assert engine.resident(other, scope) > 0
    engine.unpin("h")
    engine.unpin("h")
    assert engine.kv_usage().pinned == 0
    with pressure(engine):
        pass
    assert engine.resident(other, scope) == 0
    assert engine.kv_usage().evictions > 0


# -- bytes -----------------------------------------------------------------------------------------------------------


def test_a_snapshot_continues_to_the_same_bits(engine: Engine, workload: Workload) -> None:
    """KV put back under another session and epoch continues exactly, and the blob stays good for more: where nothing
    is known of the prompt, where it is still held, and beside itself."""
    needs(engine, "snapshot")
    prompt, scope = some_tokens(engine, workload.shared), new_scope()
    size = len(prompt)
    prefill(engine, "a", prompt, scope=scope)
    decode(engine, "a", [40], size)
    blob = engine.snapshot("a", 0)
    assert blob is not None
    expected = decode(engine, "a", [41, 42], size + 1)
    engine.release("a", 0)
    for session, epoch, where in (("b", 2, new_scope()), ("c", 2, scope), ("b", 1, scope)):
        assert engine.restore(session, epoch, blob, prompt, size + 3, where)
        assert engine.step([Member(session, epoch, ids(41), size)]) == [CacheMiss()]
        assert same_bits(decode(engine, session, [41, 42], size + 1, epoch=epoch), expected)
        assert isinstance(engine.step([Member(session, epoch, ids(43), size + 3)])[0], MemberError)
        engine.check_integrity()
    assert not engine.restore("d", 0, blob, prompt, size)


def test_a_snapshot_of_half_a_prompt_continues(engine: Engine, workload: Workload) -> None:
    """Also where others have computed more of it meanwhile: it holds what it held."""
    needs(engine, "snapshot")
    prompt, scope = some_tokens(engine, workload.shared), new_scope()
    begin(engine, "a", prompt, scope=scope)
    engine.step([Member("a", 0, prompt[:80], 0, wants_logits=False)])
    blob = engine.snapshot("a", 0)
    assert blob is not None
    engine.release("a", 0)
    expected = prefill(engine, "b", prompt, scope=scope)
    assert engine.restore("a", 1, blob, prompt, len(prompt) + 1, scope)
    assert same_bits([feed(engine, "a", prompt, 80, epoch=1)], [expected])
    assert same_bits(decode(engine, "a", [30], len(prompt), epoch=1), decode(engine, "b", [30], len(prompt)))


def test_other_tokens_than_the_prompts_are_refused(engine: Engine) -> None:
    """Others may find what is held of a prompt, so nothing else can be put there; nor restored."""
    prompt, other = some_tokens(engine, 70, seed=1), some_tokens(engine, 70, seed=2)
    begin(engine, "liar", prompt)
    (result,) = engine.step([Member("liar", 0, other, 0)])
    assert isinstance(result, MemberError)
    engine.step([Member("liar", 0, prompt, 0)])
    blob = engine.snapshot("liar", 0)
    engine.release("liar", 0)
    needs(engine, "snapshot")
    assert blob is not None
    before = engine.kv_usage()
    assert not engine.restore("liar", 0, blob, other, 100)
    assert engine.kv_usage() == before


def test_damaged_snapshots_are_not_restored(engine: Engine) -> None:
    """A blob cut short, changed or extended is refused, and nothing has happened."""
    needs(engine, "snapshot")
    prompt = some_tokens(engine, 3)
    prefill(engine, "a", prompt)
    blob = engine.snapshot("a", 0)
    assert blob is not None
    damaged = bytearray(blob)
    damaged[len(blob) // 2] ^= 1
    before = engine.kv_usage()
    for bad in (b"", b"nonsense", blob[:10], blob[:-1], blob + b"x", bytes(damaged), b"x" + blob):
        assert not engine.restore("b", 0, bad, prompt, 10)
    assert engine.kv_usage() == before
    assert engine.step([Member("b", 0, ids(5), 3)]) == [CacheMiss()]


def test_a_snapshot_without_room_is_not_restored(engine: Engine) -> None:
    """It is refused, nothing has happened, and it can come back when others have gone."""
    needs(engine, "snapshot")
    prompt = some_tokens(engine, 40)
    prefill(engine, "a", prompt)
    blob = engine.snapshot("a", 0)
    assert blob is not None
    with pressure(engine):
        before = engine.kv_usage()
        assert not engine.restore("b", 0, blob, prompt, 100)
        assert engine.kv_usage() == before
    assert engine.restore("b", 0, blob, prompt, 100, new_scope())
    assert same_bits(decode(engine, "b", [30], 40), decode(engine, "a", [30], 40))


def test_there_is_no_snapshot_of_nothing(engine: Engine) -> None:
    """A session that is not here, or holds nothing, has none."""
    assert engine.snapshot("a", 0) is None
    begin(engine, "a", some_tokens(engine, 20))
    assert engine.snapshot("a", 0) is None
