"""What every in-process engine promises of KV that leaves it and comes back, and of who holds how much."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tasks.ports import CacheMiss, Engine, Kept, KVRefused, Member, TokenIds
from tests.engine.conftest import WORKLOADS, Workload
from tests.engine.driving import begin, decode, feed, ids, new_scope, prefill, pressure, same_bits, some_tokens
from tests.scripted.blocks import BlockEngine


@pytest.fixture(params=[*WORKLOADS, "blocks"])
def engine_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def workload(engine_name: str) -> Workload:
    return WORKLOADS.get(engine_name, WORKLOADS["tiny"])


@pytest.fixture(scope="module")
def blocks() -> Engine:
    """What the scripted engine is made of."""
    return BlockEngine(recompute_exact=False)


def kept_of(engine: Engine, prompt: TokenIds, scope: str) -> Kept:
    """Exported for the holder `h`, and gone from the engine."""
    prefill(engine, "a", prompt, scope=scope)
    engine.release("a", 0, holder="h")
    kept = engine.export("h")
    assert kept is not None
    engine.unpin("h")
    with pressure(engine):
        pass
    assert engine.resident(prompt, scope) == 0
    return kept


def begin_from(engine: Engine, kept: Kept, session: str, prompt: TokenIds, scope: str) -> int | None:
    """With room for some more."""
    return engine.begin_from(kept, session, 0, prompt, len(prompt) + 10, scope)


def test_engines_say_that_they_can(engine: Engine) -> None:
    """All that are here."""
    assert engine.capability().offload


def test_what_comes_back_continues_to_the_same_bits(engine: Engine, workload: Workload) -> None:
    """The next turn of a holder whose KV was outside is, to the bit, what computing all of it gives; and what came
    back can be found by others like any."""
    prompt, scope = some_tokens(engine, workload.shared), new_scope()
    turn = np.concatenate((prompt, some_tokens(engine, 20, seed=5)))
    expected = [prefill(engine, "b", turn), *decode(engine, "b", [30, 31], len(turn))]
    engine.release("b", 0)
    kept = kept_of(engine, prompt, scope)
    assert 0 < len(kept.tokens) <= len(prompt)
    assert kept.tokens.tolist() == prompt[: len(kept.tokens)].tolist()
    held = begin_from(engine, kept, "c", turn, scope)
    assert held
    assert len(kept.tokens) - engine.prefill_grid < held <= len(kept.tokens)
    rows = [feed(engine, "c", turn, held, chunk=engine.prefill_grid), *decode(engine, "c", [30, 31], len(turn))]
    assert same_bits(rows, expected)
    assert engine.resident(turn, scope) >= held
    engine.check_integrity()


def test_exporting_changes_nothing(engine: Engine, workload: Workload) -> None:
    """What is kept stays kept until it is let go; of nobody there is nothing."""
    prompt, scope = some_tokens(engine, workload.shared), new_scope()
    assert engine.export("h") is None
    assert engine.kept_for("h") == 0
    prefill(engine, "a", prompt, scope=scope)
    engine.release("a", 0, holder="h")
    before = engine.kv_usage()
    kept = engine.export("h")
    assert kept is not None
    assert engine.kept_for("h") == len(kept.tokens)
    assert kept.scope == scope
    assert engine.kv_usage() == before
    assert len(kept.blob) >= len(kept.tokens) * engine.bytes_per_token
    engine.unpin("h")
    assert (engine.export("h"), engine.kept_for("h")) == (None, 0)


def test_only_what_is_the_same_comes_back(engine: Engine, workload: Workload) -> None:
    """Of another prompt its common beginning, never all of a prompt, and nothing less than what is there."""
    prompt, scope = some_tokens(engine, workload.shared), new_scope()
    kept = kept_of(engine, prompt, scope)
    other = prompt.copy()
    other[100] = 17 + (other[100] + 1) % 100
    expected = prefill(engine, "b", other)
    held = begin_from(engine, kept, "c", other, scope)
    assert held is not None
    assert 0 < held <= 100
    assert same_bits([feed(engine, "c", other, held)], [expected])
    engine.release("c", 0)
    whole = begin_from(engine, kept, "c", kept.tokens, scope)
    assert whole is not None
    assert whole < len(kept.tokens)
    stranger = some_tokens(engine, 90, seed=9)
    assert begin_from(engine, kept, "d", stranger, scope) == 0
    assert same_bits([feed(engine, "d", stranger, 0)], [prefill(engine, "a", stranger)])


def test_what_is_foreign_or_damaged_is_refused_by_name(engine: Engine, workload: Workload) -> None:
    """The session has not begun, and can begin without it."""
    prompt, scope = some_tokens(engine, workload.shared), new_scope()
    kept = kept_of(engine, prompt, scope)
    turned = bytearray(kept.blob)
    turned[-9] ^= 1
    other = some_tokens(engine, len(kept.tokens), seed=8)
    prefill(engine, "a", prompt)
    session = engine.snapshot("a", 0)
    engine.release("a", 0)
    assert session is not None
    bad = [b"", b"nonsense", kept.blob[:-1], kept.blob + b"x", session]
    bad += [bytes(turned)] if not isinstance(engine, BlockEngine) else []
    refused = [replace(kept, blob=blob) for blob in bad] + [replace(kept, tokens=other)]
    for each in refused:
        with pytest.raises(KVRefused, match=r"^(it is|its header)"):
            begin_from(engine, each, "b", prompt, scope)
    for stranger in (new_scope(), ""):
        with pytest.raises(KVRefused, match="scope"):
            begin_from(engine, kept, "b", prompt, stranger)
        with pytest.raises(KVRefused, match="it is of"):
            begin_from(engine, replace(kept, scope=stranger), "b", prompt, stranger)
    assert engine.step([Member("b", 0, prompt, 0)]) == [CacheMiss()]
    engine.check_integrity()
    assert engine.kv_usage().held == 0
    assert begin_from(engine, kept, "b", prompt, scope)


def test_another_engines_kv_is_refused(tiny: Engine, wide: Engine) -> None:
    """Also where prompt and scope are the same."""
    prompt = some_tokens(tiny, 100)
    kept = kept_of(tiny, prompt, "both")
    with pytest.raises(KVRefused, match="another engine"):
        wide.begin_from(kept, "a", 0, prompt, 110, "both")


def test_without_room_nothing_comes_back(engine: Engine, workload: Workload) -> None:
    """Nothing has happened, and it does when others have gone."""
    prompt, scope = some_tokens(engine, workload.shared), new_scope()
    kept = kept_of(engine, prompt, scope)
    with pressure(engine):
        before = engine.kv_usage()
        assert begin_from(engine, kept, "b", prompt, scope) is None
        assert engine.kv_usage() == before
    assert begin_from(engine, kept, "b", prompt, scope)
    with pytest.raises(ValueError, match="begun"):
        begin_from(engine, kept, "b", prompt, scope)


def test_a_lack_of_room_is_told_from_a_snapshot_that_is_none(engine: Engine) -> None:
    """A session that was saved waits for room, and is computed again where waiting would not help."""
    prompt = some_tokens(engine, 40)
    prefill(engine, "a", prompt)
    blob = engine.snapshot("a", 0)
    assert blob is not None
    with pressure(engine):
        assert engine.restore("b", 0, blob, prompt, 100) is None
        assert engine.restore("b", 0, blob[:-1], prompt, 100) is False
    assert engine.restore("b", 0, blob, some_tokens(engine, 40, seed=3), 100) is False


# -- who holds how much ----------------------------------------------------------------------------------------------


def test_every_position_counts_once_for_the_first_who_has_it(engine: Engine, workload: Workload) -> None:
    """What is kept, and what sessions have; in sum what is held. Who has nothing is left out."""
    prompt, other, scope = some_tokens(engine, workload.shared), some_tokens(engine, 70, seed=4), new_scope()
    prefill(engine, "a", prompt, scope=scope)
    engine.release("a", 0, holder="h")
    kept = engine.held_by({"h": ()})["h"]
    assert kept == engine.kv_usage().pinned > 0
    begin(engine, "b", prompt, scope=scope)
    begin(engine, "c", other, scope=scope)
    held = engine.kv_usage().held
    found = engine.held_by({"h": [("b", 0)], "p": [("c", 0)], "q": [("a", 0), ("c", 1)]})
    assert found.keys() == {"h", "p"}
    assert sum(found.values()) == held
    assert found["h"] >= kept
    swapped = engine.held_by({"p": [("b", 0)], "h": [("c", 0)]})
    assert sum(swapped.values()) == held
    assert swapped["p"] == engine.held_by({"p": [("b", 0)]})["p"]


def test_what_sessions_share_is_nobodys_alone(engine: Engine, workload: Workload) -> None:
    """Releasing both gives more to others than releasing each."""
    prompt, scope = some_tokens(engine, workload.shared), new_scope()
    prefill(engine, "a", prompt, scope=scope)
    begin(engine, "b", prompt, scope=scope)
    before = engine.kv_usage()
    alone, both = engine.sole([("a", 0)]), engine.sole([("a", 0), ("b", 0), ("c", 0)])
    assert both == before.held
    assert 0 < alone <= both - engine.sole([("b", 0)])
    engine.release("a", 0)
    assert before.held - engine.kv_usage().held == alone
    assert engine.sole([("a", 0)]) == 0
    assert engine.step([Member("b", 0, ids(5), 300)]) == [CacheMiss()]
