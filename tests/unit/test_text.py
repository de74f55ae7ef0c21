"""From tokens to text that is safe to show."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tasks.vocabulary import CONTROL, Vocabulary, VocabularyData, byte_alphabet
from workers.text import TextStream

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def vocabulary_of(*pieces: bytes) -> Vocabulary:
    """A vocabulary whose id i stands for `pieces[i]`; one more id is a control token."""
    alphabet = byte_alphabet()
    tokens = ("".join(alphabet[byte] for byte in piece) for piece in pieces)
    return Vocabulary(
        VocabularyData(
            kind="gpt2-bpe/smollm",
            tokens=(*tokens, "<|end|>"),
            merges=(),
            token_types=(1,) * len(pieces) + (CONTROL,),
            chat_template="",
            eos_ids=(len(pieces),),
            bos_id=None,
            add_bos=False,
        )
    )


def shown(pieces: list[bytes], stop: list[str]) -> tuple[list[str], bool]:
    """What each of the tokens `pieces`, then the end, makes visible; and whether a stop string came."""
    stream = TextStream(vocabulary_of(*pieces), stop)
    return [*map(stream.push, range(len(pieces))), stream.finish()], stream.stopped


def cut_at_stop(text: str, stop: list[str]) -> tuple[str, bool]:
    """The definition, by trying every end: the first stop string to be complete ends the text before it."""
    for end in range(len(text) + 1):
        complete = [word for word in stop if text[:end].endswith(word)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        pytest.param([b" \xf0\x9f", b"\x98\xb8A"], [" ", "\N{GRINNING CAT FACE WITH SMILING EYES}A", ""], id="emoji"),
        pytest.param([b"\xe2\x82", b"\xac"], ["", "\N{EURO SIGN}", ""], id="three bytes"),
        pytest.param([b"a\xf0\x9f"], ["a", REPLACEMENT], id="unfinished at the end"),
        pytest.param([b"a", b"\xff", b"b"], ["a", REPLACEMENT, "b", ""], id="invalid byte"),
        pytest.param([b"\xf0\x9f", b"A"], ["", REPLACEMENT + "A", ""], id="broken off"),
        pytest.param(
            ["\N{REGIONAL INDICATOR SYMBOL LETTER D}".encode(), "\N{REGIONAL INDICATOR SYMBOL LETTER E}".encode()],
            ["\N{REGIONAL INDICATOR SYMBOL LETTER D}", "\N{REGIONAL INDICATOR SYMBOL LETTER E}", ""],
            id="a flag is two characters",
        ),
    ],
)
def test_only_whole_characters_are_shown(pieces: list[bytes], expected: list[str]) -> None:
    """Bytes wait for their character; what can never become one is a single replacement character."""
    assert shown(pieces, [])[0] == expected


@pytest.mark.parametrize(
    ("stop", "expected", "stopped"),
    [
        pytest.param(["green"], ["red ", "", "", "", ""], True, id="over token edges"),
        pytest.param(["greenhouse"], ["red ", "", "", "green sky", ""], False, id="no match after all"),
        pytest.param(["n s"], ["red ", "gr", "ee", "", ""], True, id="inside a token"),
        pytest.param(["sky"], ["red ", "gr", "ee", "n ", ""], True, id="at the very end"),
        pytest.param(["sky blue"], ["red ", "gr", "ee", "n ", "sky"], False, id="flushed at the end"),
        pytest.param(["een", "reen"], ["red ", "g", "", "", ""], True, id="complete at once: the longest"),
        pytest.param(["green sky", "ee"], ["red ", "", "gr", "", ""], True, id="complete first"),
        pytest.param(["red"], ["", "", "", "", ""], True, id="at the beginning"),
    ],
)
def test_stop_strings_never_leak(stop: list[str], expected: list[str], stopped: bool) -> None:
    """A stop string ends the text before it, its beginnings are withheld, and withheld text is not lost."""
    assert shown([b"red ", b"gr", b"ee", b"n sky"], stop) == (expected, stopped)


def test_a_stop_string_inside_a_split_character() -> None:
    """A stop string whose character comes in two tokens matches when the character is whole."""
    pieces, stopped = shown([b"a\xf0\x9f", b"\x98\xb8", b"b"], ["\N{GRINNING CAT FACE WITH SMILING EYES}"])
    assert ("".join(pieces), stopped) == ("a", True)


def test_an_unfinished_character_can_complete_a_stop_string() -> None:
    """The replacement character of the end is text like any other."""
    pieces, stopped = shown([b"ab\xf0"], ["b" + REPLACEMENT])
    assert ("".join(pieces), stopped) == ("a", True)


def test_a_stop_string_may_come_too_early() -> None:
    """Then it is text like any other, what is withheld of it too, and one that ends later still counts."""
    stream = TextStream(vocabulary_of(b"aba", b"b", b"c"), ["abab"])
    assert [stream.push(0), stream.push(1, may_stop=False)] == ["", "ab"]
    assert [stream.push(2), stream.push(0), stream.push(1), stream.stopped] == ["abc", "", "", True]
    again = TextStream(vocabulary_of(b"aba", b"b"), ["abab"])
    assert [again.push(0), again.push(1, may_stop=False), again.push(0)] == ["", "ab", ""]
    assert again.stopped


def test_control_tokens_have_no_text() -> None:
    """A control token shows nothing, and does not break a character apart."""
    vocabulary = vocabulary_of(b"\xc3", b"\xa9")
    stream = TextStream(vocabulary, [])
    assert [stream.push(0), stream.push(2), stream.push(1), stream.push(2)] == ["", "", "é", ""]


def test_nothing_is_shown_after_a_stop() -> None:
    """Once stopped, further tokens and the end are silent."""
    stream = TextStream(vocabulary_of(b"a", b"X", b"b"), ["X"])
    assert [stream.push(0), stream.push(1), stream.push(2), stream.finish()] == ["a", "", "", ""]
    assert stream.stopped


def test_finish_is_idempotent() -> None:
    """What was flushed once does not come again."""
    stream = TextStream(vocabulary_of(b"ab"), ["bc"])
    assert [stream.push(0), stream.finish(), stream.finish()] == ["a", "b", ""]


@settings(deadline=None)
@given(
    text=st.text("abé\N{EURO SIGN}\N{GRINNING CAT FACE WITH SMILING EYES}", max_size=30),
    stop=st.lists(st.text("abé\N{EURO SIGN}", min_size=1, max_size=4), max_size=4),
    data=st.data(),
)
@example(text="aab", stop=["ab"], data=None)
@example(text="abababb", stop=["ababb"], data=None)
def test_the_text_does_not_depend_on_where_tokens_cut_it(
    text: str, stop: list[str], data: st.DataObject | None
) -> None:
    """Any cut of the bytes into tokens gives the same complete text, and no piece ever shows what must be withheld."""
    content = text.encode()
    inner = range(1, len(content))
    cuts = sorted(data.draw(st.sets(st.sampled_from(inner)))) if data is not None and inner else list(inner)
    edges = [0, *cuts, len(content)]
    pieces = [content[a:b] for a, b in pairwise(edges) if a < b]
    visible, stopped = shown(pieces, stop)
    assert ("".join(visible), stopped) == cut_at_stop(text, stop)


@settings(deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=5), max_size=12))
def test_any_bytes_make_valid_text(pieces: list[bytes]) -> None:
    """The joined pieces are what decoding the whole output with replacement gives."""
    visible, _ = shown(pieces, [])
    assert "".join(visible) == b"".join(pieces).decode(errors="replace")
    assert all(piece.encode() or piece == "" for piece in visible)


def test_a_long_stop_string_costs_little() -> None:
    """A text made of beginnings of a stop string is shown in full, however often it nearly matches."""
    pieces = [b"a"] * 3000
    visible, stopped = shown(pieces, ["a" * 255 + "b"])
    assert ("".join(visible), stopped) == ("a" * 3000, False)
    assert visible[254] == ""
    assert visible[255] == "a"
