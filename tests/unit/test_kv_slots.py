"""The books of KV in slots, one behaviour after another."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pool.rules.kv_blocks import IntegrityError
from pool.rules.kv_slots import SlotPool
from pool.rules.slot_contents import (
    WORTH_SHARE,
    WORTH_TOKENS,
    Key,
    Placement,
    SlotUsage,
    Swap,
    TokenIds,
    all_but_last,
)

SLOT_TOKENS = 1000


def tokens(*parts: tuple[int, int]) -> TokenIds:
    """So many times each number."""
    return np.concatenate([np.full(count, number, np.int32) for number, count in parts])


def run(pool: SlotPool, name: str, prompt: TokenIds, *, scope: str = "", room: int = 10) -> Placement | None:
    """Begin a session and compute its prompt."""
    placement = pool.begin((name, 0), prompt, len(prompt) + room, scope)
    if placement is not None:
        pool.written((name, 0), len(prompt))
    pool.check_integrity()
    return placement


def end(pool: SlotPool, name: str, holder: str = "") -> tuple[int, int] | None:
    ended = pool.release((name, 0), holder)
    pool.check_integrity()
    return ended


def test_sessions_take_the_lowest_slots() -> None:
    """Live slots follow each other from 0 on; a gap is filled first."""
    pool = SlotPool(4, SLOT_TOKENS)
    assert [run(pool, name, tokens((k, 8))) for k, name in enumerate("abc")] == [Placement(k, 0) for k in range(3)]
    end(pool, "b")
    assert run(pool, "d", tokens((9, 8))) == Placement(1, 0)


def test_gaps_are_closed() -> None:
    """The highest sessions move into them, and what is kept there changes places with them."""
    pool = SlotPool(5, SLOT_TOKENS)
    for k, name in enumerate("abcd"):
        run(pool, name, tokens((k, 40)))
    end(pool, "a")
    end(pool, "c")
    assert pool.condense() == [Swap(0, 3)]
    assert [pool.slot((name, 0)) for name in "bd"] == [1, 0]
    assert pool.kept() == {3: 40, 2: 40}
    assert pool.condense() == []


def test_a_session_takes_over_what_is_kept_in_its_slot() -> None:
    """Nothing is copied when nobody needs the original."""
    pool = SlotPool(2, SLOT_TOKENS)
    run(pool, "a", tokens((1, 50), (2, 10)))
    assert end(pool, "a") == (0, 60)
    assert pool.resident(tokens((1, 50), (3, 5)), "") == 50
    assert run(pool, "b", tokens((1, 50), (3, 5))) == Placement(0, 50)
    assert pool.usage() == SlotUsage(total=2, live=1, pinned=0, kept=0, cached_tokens=0)


def test_what_a_session_would_cut_off_is_kept_elsewhere() -> None:
    """In a free slot, or in place of what was unused longest, so that the next turn of each conversation finds it."""
    pool = SlotPool(3, SLOT_TOKENS)
    system, anna, bert = (1, 50), (2, 40), (3, 30)
    run(pool, "a", tokens(system, anna))
    end(pool, "a")
    assert run(pool, "b", tokens(system, bert)) == Placement(0, 50, spare=2)
    end(pool, "b")
    assert pool.kept() == {0: 80, 2: 90}
    assert run(pool, "a2", tokens(system, anna, (4, 60))) == Placement(0, 90, (Swap(0, 1),), source=2)
    end(pool, "a2")
    assert run(pool, "b2", tokens(system, bert, (5, 60))) == Placement(0, 80, (Swap(0, 2),), source=1)
    end(pool, "b2")
    assert pool.evictions == 1
    assert [pool.resident(tokens(system, own, (9, 5)), "") for own in (anna, bert)] == [90, 80]


@pytest.mark.parametrize(("total", "beyond"), [(1, 500), (2, WORTH_TOKENS - 1), (2, 500 // WORTH_SHARE)])
def test_what_is_not_worth_keeping_is_cut_off(total: int, beyond: int) -> None:
    """There is no other slot, or what is beyond is little, or little of what would be copied."""
    pool = SlotPool(total, SLOT_TOKENS)
    run(pool, "a", tokens((1, 500 if beyond >= WORTH_TOKENS else 50), (2, beyond)), room=0)
    end(pool, "a")
    placement = run(pool, "b", tokens((1, 500), (3, 5)))
    assert placement is not None
    assert (placement.slot, placement.spare) == (0, None)
    assert pool.kept() == {}


def test_what_is_promised_makes_no_way_for_what_is_cut_off() -> None:
    """The only other slot is a holder's."""
    pool = SlotPool(2, SLOT_TOKENS)
    run(pool, "h", tokens((7, 50)))
    run(pool, "a", tokens((1, 50), (2, 40)))
    end(pool, "h", holder="h")
    end(pool, "a")
    placement = run(pool, "b", tokens((1, 50), (3, 30)))
    assert placement is not None
    assert (placement.held, placement.spare) == (50, None)
    assert pool.resident(tokens((7, 60)), "") == 50


def test_a_session_copies_from_one_that_runs() -> None:
    """What it has prefilled so far can be had."""
    pool = SlotPool(2, SLOT_TOKENS)
    pool.begin(("a", 0), tokens((1, 50)), 60)
    assert pool.resident(tokens((1, 50), (3, 5)), "") == 0
    pool.written(("a", 0), 30)
    assert run(pool, "b", tokens((1, 50), (3, 5))) == Placement(1, 30, source=0)


def test_what_is_kept_makes_way() -> None:
    """It moves to a free slot, so that the new session lies beside the others."""
    pool = SlotPool(3, SLOT_TOKENS)
    run(pool, "a", tokens((1, 50)))
    end(pool, "a")
    assert run(pool, "b", tokens((2, 50))) == Placement(0, 0, (Swap(0, 2),))
    assert pool.kept() == {2: 50}
    assert run(pool, "c", tokens((1, 50), (3, 5))) == Placement(1, 50, source=2)


def test_the_longest_unused_is_given_up() -> None:
    """To be begun with counts as use: of three that have ended, the first to end was asked for again."""
    pool = SlotPool(4, SLOT_TOKENS)
    prompts = {"a": tokens((1, 50)), "b": tokens((2, 60)), "c": tokens((3, 70))}
    for name, prompt in prompts.items():
        run(pool, name, prompt)
    for name in "bac":
        end(pool, name)
    assert run(pool, "again", tokens((2, 60), (9, 5))) == Placement(0, 60, (Swap(0, 3),), source=1)
    assert run(pool, "new", tokens((4, 50))) == Placement(1, 0, (Swap(1, 3),))
    assert pool.evictions == 1
    assert pool.kept() == {3: 60, 2: 70}


def test_the_last_one_kept_is_taken_over_by_changing_places() -> None:
    """With no other room, what stands in the way goes where the prefix was, which the session takes with it."""
    pool = SlotPool(2, SLOT_TOKENS)
    run(pool, "a", tokens((1, 50)))
    run(pool, "b", tokens((2, 50)))
    end(pool, "b")
    end(pool, "a", holder="h")
    assert run(pool, "c", tokens((2, 50), (9, 5))) == Placement(0, 50, (Swap(0, 1),))
    assert pool.kept() == {1: 50}
    assert pool.resident(tokens((1, 50), (9, 5)), "") == 50


def test_promises_are_kept_until_they_are_let_go() -> None:
    """A pinned slot is copied from, moved, and never given up; the next promise to its holder replaces it."""
    pool = SlotPool(3, SLOT_TOKENS)
    run(pool, "a", tokens((1, 50)))
    end(pool, "a", holder="h")
    assert pool.usage().pinned == 1
    assert run(pool, "b", tokens((1, 50), (2, 5))) == Placement(0, 50, (Swap(0, 2),), source=2)
    assert run(pool, "c", tokens((3, 50))) is not None
    assert run(pool, "d", tokens((4, 50))) is None
    end(pool, "b", holder="h")
    assert pool.usage() == SlotUsage(total=3, live=1, pinned=1, kept=1, cached_tokens=50)
    pool.unpin("h")
    pool.unpin("h")
    assert pool.usage().pinned == 0


def test_somebody_can_always_run() -> None:
    """The last slot without a promise is promised to nobody."""
    pool = SlotPool(2, SLOT_TOKENS)
    for k, holder in ((1, "h"), (2, "i")):
        run(pool, f"s{k}", tokens((k, 50)))
        end(pool, f"s{k}", holder=holder)
    assert pool.usage() == SlotUsage(total=2, live=0, pinned=1, kept=1, cached_tokens=50)
    assert run(pool, "a", tokens((3, 50))) is not None


def test_scopes_do_not_share() -> None:
    """Nobody finds what another tenant sent."""
    pool = SlotPool(2, SLOT_TOKENS)
    run(pool, "a", tokens((1, 50)), scope="one")
    end(pool, "a")
    assert pool.resident(tokens((1, 60)), "two") == 0
    placement = run(pool, "b", tokens((1, 60)), scope="two")
    assert placement is not None
    assert placement.held == 0


def whole_cells(common: int, prompt_tokens: int) -> int:
    return min(common, prompt_tokens - 1) // 16 * 16


@pytest.mark.parametrize(("begins_with", "found"), [(all_but_last, 49), (whole_cells, 48)])
def test_the_last_token_is_never_found(begins_with: Callable[[int, int], int], found: int) -> None:
    """And what is found ends where the engine says."""
    pool = SlotPool(2, SLOT_TOKENS, begins_with)
    run(pool, "a", tokens((1, 50)))
    end(pool, "a")
    assert pool.resident(tokens((1, 50)), "") == found
    assert pool.resident(tokens((1, 1)), "") == 0


def test_what_is_not_worth_a_copy_is_computed() -> None:
    """Too short a prefix, or too small a part of what would be copied."""
    pool = SlotPool(3, SLOT_TOKENS)
    run(pool, "a", tokens((1, WORTH_TOKENS), (2, WORTH_TOKENS * WORTH_SHARE)))
    assert pool.resident(tokens((1, WORTH_TOKENS), (3, 5)), "") == 0
    run(pool, "b", tokens((4, WORTH_TOKENS), (5, 100)))
    assert pool.resident(tokens((4, WORTH_TOKENS), (6, 5)), "") == WORTH_TOKENS
    assert pool.resident(tokens((4, WORTH_TOKENS - 1), (6, 5)), "") == 0


def test_short_prompts_are_not_kept() -> None:
    """They would take the place of longer ones."""
    pool = SlotPool(2, SLOT_TOKENS)
    run(pool, "a", tokens((1, WORTH_TOKENS - 1)))
    assert end(pool, "a", holder="h") == (0, 0)
    assert pool.usage() == SlotUsage(total=2, live=0, pinned=0, kept=0, cached_tokens=0)


def test_output_is_found_where_it_was_learnt() -> None:
    """Only what is computed and known stays."""
    pool = SlotPool(2, SLOT_TOKENS)
    run(pool, "a", tokens((1, 50)))
    pool.learn(("a", 0), tokens((1, 50), (2, 20)), 70)
    assert end(pool, "a") == (0, 70)
    assert pool.resident(tokens((1, 50), (2, 20), (3, 1)), "") == 70


def test_a_slot_is_all_the_room_there_is() -> None:
    """A longer session does not begin."""
    pool = SlotPool(2, 100)
    assert pool.begin(("a", 0), tokens((1, 50)), 101) is None
    run(pool, "a", tokens((1, 50)))
    with pytest.raises(IntegrityError, match="begun"):
        pool.begin(("a", 0), tokens((1, 50)), 60)


def test_what_is_lost_is_forgotten() -> None:
    """The session that ran there is named; promises about it end."""
    pool = SlotPool(3, SLOT_TOKENS)
    run(pool, "a", tokens((1, 50)))
    run(pool, "b", tokens((2, 50)))
    end(pool, "b", holder="h")
    assert pool.empty(0) == ("a", 0)
    assert pool.empty(1) is None
    assert pool.empty(2) is None
    pool.check_integrity()
    assert pool.usage() == SlotUsage(total=3, live=0, pinned=0, kept=0, cached_tokens=0)
    assert end(pool, "a") is None


def _forget_a_session(pool: SlotPool) -> None:
    del pool._slots["a", 0]


def _lengthen(pool: SlotPool) -> None:
    pool._contents[0].findable = 51


def _pin_a_live_slot(pool: SlotPool) -> None:
    pool._pins["h"] = 0


def _promise_everything(pool: SlotPool) -> None:
    pool._slots.clear()
    pool._contents = dict.fromkeys(range(3), pool._contents[1])
    pool._pins = {str(slot): slot for slot in range(3)}


@pytest.mark.parametrize("damage", [_forget_a_session, _lengthen, _pin_a_live_slot, _promise_everything])
def test_contradictions_are_seen(damage: Callable[[SlotPool], None]) -> None:
    """Each kind of wrong book is noticed."""
    pool = SlotPool(3, SLOT_TOKENS)
    run(pool, "a", tokens((1, 50)))
    run(pool, "b", tokens((2, 50)))
    end(pool, "b")
    damage(pool)
    with pytest.raises(IntegrityError, match="KV slots"):
        pool.check_integrity()


def test_keys_are_sessions_of_one_epoch() -> None:
    """The same id in another epoch is another session."""
    pool = SlotPool(2, SLOT_TOKENS)
    keys: list[Key] = [("a", 0), ("a", 1)]
    assert [pool.begin(key, tokens((1, 5)), 10) for key in keys] == [Placement(0, 0), Placement(1, 0)]
