"""The books of KV in blocks, one behaviour after another. Blocks are of 4 positions, prompts are words of letters."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pool.rules.kv_blocks import BlockPool, BlockUsage, IntegrityError, TokenIds


def tokens(text: str) -> TokenIds:
    return np.array([ord(letter) for letter in text], np.int32)


def pool_of(total: int) -> BlockPool:
    return BlockPool(total, 4)


def run(pool: BlockPool, key: str, text: str, *, positions: int | None = None, scope: str = "") -> int | None:
    """Begin a session and compute its prompt; what `begin` answered."""
    held = pool.begin(key, tokens(text), len(text) if positions is None else positions, scope)
    if held is not None:
        pool.written(key, len(text))
    pool.check_integrity()
    return held


def finish(pool: BlockPool, key: str) -> None:
    pool.release(key)
    pool.check_integrity()


def resident(pool: BlockPool, text: str, scope: str = "") -> int:
    return pool.resident(tokens(text), scope)


def fill(pool: BlockPool, blocks: int) -> None:
    """Give somebody so many blocks for a moment: what is cached goes as far as it must."""
    assert pool.begin("filler", tokens("."), blocks * pool.block_tokens) == 0
    finish(pool, "filler")


# -- what is shared --------------------------------------------------------------------------------------------------


def test_a_session_begins_with_the_blocks_of_one_that_runs() -> None:
    """The same beginning is the same blocks, and room is taken for the rest only."""
    pool = pool_of(8)
    assert run(pool, "a", "aaaabbbbcc") == 0
    assert run(pool, "b", "aaaabbbbdd") == 8
    assert pool._tables["b"].findable == 2, "as good as computed"
    assert pool.table("a")[:2] == pool.table("b")[:2]
    assert pool.table("a")[2] != pool.table("b")[2]
    assert pool.usage() == BlockUsage(total=8, free=4, cached=0, held=4, pinned=0)


def test_a_session_begins_with_the_blocks_of_one_that_has_ended() -> None:
    """What can be found stays cached; what cannot is free."""
    pool = pool_of(8)
    run(pool, "a", "aaaabbbbcc")
    finish(pool, "a")
    assert pool.usage() == BlockUsage(total=8, free=6, cached=2, held=0, pinned=0)
    assert resident(pool, "aaaabbbbzz") == 8
    assert run(pool, "b", "aaaabbbbzz") == 8
    assert pool.usage() == BlockUsage(total=8, free=5, cached=0, held=3, pinned=0)


def test_only_what_is_computed_can_be_found() -> None:
    """Blocks that are not full yet, or wait to be computed, are nobody else's."""
    pool = pool_of(8)
    assert pool.begin("a", tokens("aaaabbbbcccc"), 12) == 0
    for written, found in ((0, 0), (3, 0), (4, 4), (7, 4), (11, 8)):
        pool.written("a", written)
        assert resident(pool, "aaaabbbbccccdddd") == found
    finish(pool, "a")
    assert resident(pool, "aaaabbbbccccdddd") == 8


def test_written_never_takes_back() -> None:
    """To be told less than before changes nothing; to be told more than there is room or prompt for is no more."""
    pool = pool_of(8)
    pool.begin("a", tokens("aaaabbbbcccc"), 6)
    pool.written("a", 100)
    pool.written("a", 1)
    assert resident(pool, "aaaabbbbccccdddd") == 8
    pool.check_integrity()


@pytest.mark.parametrize(("text", "found"), [("aaaa", 0), ("aaaab", 4), ("aaaabbbb", 4), ("aaaabbbbc", 8), ("", 0)])
def test_the_whole_prompt_is_never_matched(text: str, found: int) -> None:
    """At least the last token is computed."""
    pool = pool_of(8)
    run(pool, "a", "aaaabbbbcccc")
    assert resident(pool, text) == found
    assert run(pool, "b", text) == found


def test_a_block_is_matched_with_all_that_is_before_it() -> None:
    """The same tokens behind others are other content."""
    pool = pool_of(8)
    run(pool, "a", "aaaabbbb.")
    assert resident(pool, "ccccbbbb.") == 0
    assert resident(pool, "bbbbaaaa.") == 0
    assert resident(pool, "aaaacccc.") == 4
    assert resident(pool, "aaabbbbb.") == 0


def test_scopes_share_nothing() -> None:
    """Not even where one's name and another's prompt could be read alike."""
    pool = pool_of(12)
    run(pool, "a", "aaaabbbb.", scope="one")
    for scope in ("two", "", "on", "onea", "ONE"):
        assert resident(pool, "aaaabbbb.", scope) == 0
    assert run(pool, "b", "aaaabbbb.", scope="two") == 0
    assert set(pool.table("a")).isdisjoint(pool.table("b"))
    assert resident(pool, "aaaabbbb.", "one") == resident(pool, "aaaabbbb.", "two") == 8


def test_sharing_can_be_bounded() -> None:
    """A session begins with so many positions of others at most, and no more than it has room for."""
    pool = pool_of(12)
    run(pool, "a", "aaaabbbbcccc.")
    for share, found in ((0, 0), (3, 0), (4, 4), (11, 8), (100, 12)):
        assert pool.begin("b", tokens("aaaabbbbcccc."), 13, share=share) == found
        finish(pool, "b")
    assert pool.begin("b", tokens("aaaabbbbcccc."), 8) == 8
    assert len(pool.table("b")) == 2
    finish(pool, "b")


def test_two_that_compute_the_same_share_afterwards() -> None:
    """Of two blocks of the same content one is found; the other is free when its session ends."""
    pool = pool_of(8)
    for key in ("a", "b"):
        assert pool.begin(key, tokens("aaaabb"), 6) == 0
    for key in ("a", "b"):
        pool.written(key, 6)
        pool.check_integrity()
    run(pool, "c", "aaaacc")
    assert pool.table("c")[0] == pool.table("a")[0]
    finish(pool, "b")
    assert pool.usage() == BlockUsage(total=8, free=5, cached=0, held=3, pinned=0)


@pytest.mark.parametrize("pinned", [False, True])
def test_a_duplicate_takes_the_place_of_one_that_was_given_up(pinned: bool) -> None:
    """The content is found again through whoever still has it."""
    pool = pool_of(5)
    for key in ("a", "b"):
        pool.begin(key, tokens("aaaab"), 5)
    for key in ("a", "b"):
        pool.written(key, 5)
    finish(pool, "a")
    assert pool.usage().cached == 1
    fill(pool, 3)
    assert resident(pool, "aaaab") == 0
    if pinned:
        pool.pin("h", "b")
        assert pool.usage().pinned == 1
    finish(pool, "b")
    assert resident(pool, "aaaab") == 4


def test_what_was_said_can_be_found_when_it_is_told() -> None:
    """Without `learn` only the prompt's blocks; with it, the full blocks of prompt and output."""
    pool = pool_of(8)
    run(pool, "a", "aaaabb", positions=14)
    assert resident(pool, "aaaabbBBCCCCDD") == 4
    pool.learn("a", tokens("aaaabbBBCCCCD"))
    pool.check_integrity()
    assert resident(pool, "aaaabbBBCCCCDD") == 12
    finish(pool, "a")
    assert resident(pool, "aaaabbBBCCCCDD") == 12


def test_nothing_is_learned_against_what_is_known() -> None:
    """Tokens that contradict what others may have found already are the caller's mistake, and change nothing."""
    pool = pool_of(8)
    run(pool, "a", "aaaabb", positions=14, scope="one")
    for wrong in ("ccccbbbbb", "aaa"):
        with pytest.raises(ValueError, match="other tokens"):
            pool.learn("a", tokens(wrong))
    pool.learn("a", tokens("aaaabbbbb"))
    assert resident(pool, "aaaabbbbbb", "one") == 8
    assert resident(pool, "aaaabbbbbb") == 0


# -- room ------------------------------------------------------------------------------------------------------------


def test_a_session_gets_all_the_room_it_may_need() -> None:
    """Whole blocks for its positions, from the beginning."""
    pool = pool_of(8)
    assert [pool.blocks_for(positions) for positions in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]
    run(pool, "a", "aa", positions=13)
    assert len(pool.table("a")) == 4


def test_blocks_lie_in_a_row_where_they_can() -> None:
    """A table's blocks follow each other, and what it began with, as far as free ones do."""
    pool = pool_of(12)
    for key in ("a", "b", "c"):
        run(pool, key, key, positions=12)
    assert [list(pool.table(key)) for key in ("a", "b", "c")] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    finish(pool, "b")
    run(pool, "d", "d", positions=12)
    assert list(pool.table("d")) == [3, 4, 5]
    finish(pool, "d")
    assert pool.extend("a", 24)
    assert list(pool.table("a")) == [0, 1, 2, 3, 4, 5]
    finish(pool, "a")
    finish(pool, "c")
    run(pool, "e", "e", positions=8)
    run(pool, "f", "f", positions=28)
    finish(pool, "e")
    run(pool, "g", "g", positions=20)
    assert sorted(pool.table("g")) == [0, 1, 9, 10, 11], "in pieces, where no row is long enough"


def test_a_refusal_changes_nothing() -> None:
    """A session without room begins with nothing, takes nothing, and gives nothing up."""
    pool = pool_of(6)
    run(pool, "a", "aaaab")
    finish(pool, "a")
    run(pool, "b", "b", positions=16)
    before = pool.usage()
    assert pool.begin("c", tokens("aaaab"), 13) is None
    assert pool.begin("c", tokens("zz"), 9) is None
    assert not pool.extend("b", 25)
    assert (pool.usage(), pool.evictions) == (before, 0)
    assert resident(pool, "aaaab") == 4
    pool.check_integrity()
    assert pool.begin("c", tokens("aaaab"), 8) == 4, "exactly what is there"


def test_what_a_session_begins_with_is_not_given_up_for_it() -> None:
    """Cached blocks that it will hold are no room for its others."""
    pool = pool_of(3)
    run(pool, "a", "aaaabbbb.")
    finish(pool, "a")
    assert pool.begin("b", tokens("aaaabbbb."), 16) is None
    assert pool.begin("b", tokens("aaaabbbb."), 12) == 8
    assert pool.evictions == 0


def test_the_longest_unused_is_given_up_first() -> None:
    """And only as much as is needed."""
    pool = pool_of(4)
    for key in ("aaaa.", "bbbb.", "cccc."):
        run(pool, key, key)
        finish(pool, key)
    run(pool, "again", "aaaa.")
    finish(pool, "again")
    fill(pool, 2)
    assert [resident(pool, text) for text in ("aaaa.", "bbbb.", "cccc.")] == [4, 0, 4]
    fill(pool, 3)
    assert [resident(pool, text) for text in ("aaaa.", "bbbb.", "cccc.")] == [4, 0, 0]
    assert pool.evictions == 2


def test_of_a_session_the_end_is_given_up_first() -> None:
    """What follows is useless without what is before it."""
    pool = pool_of(4)
    run(pool, "a", "aaaabbbbcccc.")
    finish(pool, "a")
    for blocks, found in ((1, 12), (2, 8), (3, 4), (4, 0)):
        fill(pool, blocks)
        assert resident(pool, "aaaabbbbcccc.") == found


def test_an_end_never_outlives_its_beginning() -> None:
    """Also where the beginning that is found is another session's, which has ended before."""
    pool = pool_of(8)
    for key in ("a", "b"):
        pool.begin(key, tokens("aaaabbbb."), 9)
    pool.written("a", 4)
    pool.written("b", 8)
    finish(pool, "a")
    run(pool, "c", "cccc.")
    finish(pool, "c")
    finish(pool, "b")
    fill(pool, 6)
    assert resident(pool, "cccc.") == 0
    assert resident(pool, "aaaabbbb.") == 8
    fill(pool, 7)
    assert resident(pool, "aaaabbbb.") == 4


def test_a_session_can_have_more() -> None:
    """To ask for less than it has is no change."""
    pool = pool_of(4)
    run(pool, "a", "aaaab")
    assert pool.extend("a", 16)
    assert pool.extend("a", 3)
    assert len(pool.table("a")) == 4
    finish(pool, "a")


def test_nobody_begins_twice() -> None:
    """The session stays as it was."""
    pool = pool_of(4)
    run(pool, "a", "aaaab")
    with pytest.raises(ValueError, match="begun"):
        pool.begin("a", tokens("b"), 1)
    assert len(pool.table("a")) == 2
    pool.check_integrity()


def test_a_release_is_idempotent() -> None:
    """So is one of a session that never was."""
    pool = pool_of(4)
    run(pool, "a", "aaaab")
    for key in ("a", "a", "b"):
        finish(pool, key)
    assert pool.usage() == BlockUsage(total=4, free=3, cached=1, held=0, pinned=0)


# -- pins ------------------------------------------------------------------------------------------------------------


def test_pinned_blocks_are_not_given_up() -> None:
    """They count as held, and are cached when the holder lets go."""
    pool = pool_of(4)
    run(pool, "a", "aaaabbbb.")
    pool.pin("h", "a")
    finish(pool, "a")
    assert pool.usage() == BlockUsage(total=4, free=2, cached=0, held=2, pinned=2)
    assert pool.begin("b", tokens("z"), 12) is None
    fill(pool, 2)
    assert resident(pool, "aaaabbbb.") == 8
    pool.unpin("h")
    pool.unpin("h")
    pool.check_integrity()
    assert pool.usage() == BlockUsage(total=4, free=2, cached=2, held=0, pinned=0)
    fill(pool, 4)
    assert resident(pool, "aaaabbbb.") == 0


def test_a_holder_has_what_it_pinned_last() -> None:
    """A pin takes the place of the one before, also where both are of the same blocks, or of none."""
    pool = pool_of(8)
    run(pool, "a", "aaaabbbb.")
    pool.pin("h", "a")
    pool.pin("h", "a")
    finish(pool, "a")
    assert pool.usage().pinned == 2
    run(pool, "b", "aaaacccc.")
    pool.pin("h", "b")
    finish(pool, "b")
    assert pool.usage() == BlockUsage(total=8, free=5, cached=1, held=2, pinned=2)
    run(pool, "c", "c")
    pool.pin("h", "c")
    finish(pool, "c")
    assert pool.usage().pinned == 0
    assert not pool._pins, "a holder of nothing is not remembered"


def test_two_holders_hold_together() -> None:
    """A block is there until both have let go, and counts once."""
    pool = pool_of(4)
    run(pool, "a", "aaaabbbb.")
    for holder in ("h", "i"):
        pool.pin(holder, "a")
    finish(pool, "a")
    assert pool.usage().pinned == 2
    pool.unpin("h")
    assert pool.usage().held == 2
    pool.unpin("i")
    assert pool.usage().held == 0
    pool.check_integrity()


def test_a_duplicate_is_not_pinned() -> None:
    """The holder keeps the block that others find."""
    pool = pool_of(6)
    for key in ("a", "b"):
        pool.begin(key, tokens("aaaab"), 5)
    for key in ("a", "b"):
        pool.written(key, 5)
    pool.pin("h", "b")
    finish(pool, "a")
    finish(pool, "b")
    assert pool.usage() == BlockUsage(total=6, free=5, cached=0, held=1, pinned=1)
    fill(pool, 5)
    assert resident(pool, "aaaab") == 4


# -- integrity -------------------------------------------------------------------------------------------------------


def _lose_a_reference(pool: BlockPool) -> None:
    pool._references[pool.table("a")[0]] += 1


def _lose_a_block(pool: BlockPool) -> None:
    pool._free[pool._free.nonzero()[0][0]] = False
    pool._free_count -= 1


def _miscount(pool: BlockPool) -> None:
    pool._free_count += 1


def _free_a_known_block(pool: BlockPool) -> None:
    block, _ = pool._cached.popitem()
    pool._set_free(block)


def _forget_a_digest(pool: BlockPool) -> None:
    pool._block_of.popitem()


def _cache_the_unknown(pool: BlockPool) -> None:
    block = int(pool._free.nonzero()[0][0])
    pool._free[block] = False
    pool._free_count -= 1
    pool._cached[block] = None


def _give_a_block_twice(pool: BlockPool) -> None:
    block = pool._tables["a"].blocks[0]
    pool._tables["a"].blocks.append(block)
    pool._references[block] += 1


def _offer_what_is_not_there(pool: BlockPool) -> None:
    pool._tables["a"].findable = 9


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (_lose_a_reference, "references"),
        (_lose_a_block, "kinds"),
        (_miscount, "free"),
        (_free_a_known_block, "free"),
        (_forget_a_digest, "digests"),
        (_cache_the_unknown, "cached"),
        (_give_a_block_twice, "tables"),
        (_offer_what_is_not_there, "findable"),
    ],
)
def test_each_broken_book_is_named(harm: Callable[[BlockPool], None], named: str) -> None:
    """The check passes on sound books, and says which one is not."""
    pool = pool_of(8)
    run(pool, "a", "aaaab")
    run(pool, "c", "cccc.")
    finish(pool, "c")
    harm(pool)
    with pytest.raises(IntegrityError, match=rf"\b{named}\b"):
        pool.check_integrity()
