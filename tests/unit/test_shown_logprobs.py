"""Which tokens' log-probabilities are shown, and when: a rule over the log alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pool.store.log import LogEntry, TokenLogprobs
from tasks.vocabulary import Vocabulary
from webapp.rendering.logprobs import LogprobReader, ShownToken, shown_of
from workers.engines.tiny import tiny_vocabulary
from workers.text import TextStream

VOCABULARY = tiny_vocabulary()
EOS, CONTROL = 2, 1
NONE = TokenLogprobs(-1.0)


def ids_of(*pieces: bytes) -> list[int]:
    """A token for each piece; all of these pieces are tokens, "" is the control token."""
    known = {VOCABULARY.token_bytes(token): token for token in range(VOCABULARY.size)} | {b"": CONTROL}
    return [known[piece] for piece in pieces]


def log_of(tokens: Sequence[int], stop: Sequence[str] = (), cuts: Sequence[int] = ()) -> list[LogEntry]:
    """The log of one choice, as the loop and the outlet write it: entries end at `cuts`, tokens with `stop`."""
    stream, pieces = TextStream(VOCABULARY, stop), []
    for number, token in enumerate(tokens, start=1):
        piece = stream.push(token)
        pieces.append(piece + stream.finish() if number == len(tokens) else piece)
        if stream.stopped:
            break
    bounds = sorted({0, len(pieces), *(cut for cut in cuts if cut < len(pieces))})
    return [
        LogEntry(start, 0, tuple(tokens[start:end]), "".join(pieces[start:end]), (NONE,) * (end - start))
        for start, end in pairwise(bounds)
    ]


def shown_by(entries: Sequence[LogEntry], vocabulary: Vocabulary = VOCABULARY) -> list[tuple[int, int]]:
    """Ids and offsets of what is shown."""
    (found,) = shown_of(entries, 1, lambda: vocabulary)
    assert found is not None
    return [(token.id, token.offset) for token in found.tokens]


def test_half_characters_come_with_the_whole_one() -> None:
    """Both halves, in one place of the text."""
    tokens = ids_of(b"h", b"\xc3", b"\xa9", b"!")
    assert shown_by(log_of(tokens)) == [*zip(tokens, (0, 1, 1, 2), strict=True)]
    reader = LogprobReader(1, lambda: VOCABULARY)
    told = [reader.take(entry) for entry in log_of(tokens, cuts=(1, 2, 3))]
    assert [len(each.tokens) for each in told if each] == [1, 0, 2, 1]


def test_a_stop_strings_tokens_never_come() -> None:
    """But one that it shares with shown text does; what only looked like a stop string comes with its text."""
    tokens = ids_of(b"a", b"x", b"y", b"z")
    assert [token for token, _ in shown_by(log_of(tokens, ["xyz"]))] == tokens[:1]
    assert [token for token, _ in shown_by(log_of(tokens, ["xyq"]))] == tokens
    shared = ids_of(b" th", b"e")
    assert [token for token, _ in shown_by(log_of(shared, ["he"]))] == shared[:1]


def test_the_end_never_comes_and_other_control_tokens_do() -> None:
    """With the text behind them."""
    tokens = [*ids_of(b"a", b"", b"b"), EOS]
    assert shown_by(log_of(tokens)) == [(tokens[0], 0), (CONTROL, 1), (tokens[2], 1)]


def test_a_broken_character_has_a_place_of_its_own() -> None:
    """It shows as one U+FFFD, behind which the next token begins; at the end of the text too."""
    tokens = ids_of(b"\xf0", b"A", b"\xc3")
    assert shown_by(log_of(tokens)) == [(tokens[0], 0), (tokens[1], 1), (tokens[2], 2)]


def test_an_id_that_the_model_has_no_more_is_nameless() -> None:
    """The model was replaced by a smaller one after the job: an answer all the same."""
    (found,) = shown_of([LogEntry(0, 0, (VOCABULARY.size, 3), "a", (NONE, NONE))], 1, lambda: VOCABULARY)
    assert found is not None
    assert [token["token"] for token in found.listed()][:1] == [""]


def test_a_job_that_did_not_ask_needs_no_vocabulary() -> None:
    """It is not even looked for."""

    def absent() -> Vocabulary:
        raise AssertionError("nobody asked")

    assert shown_of([LogEntry(0, 0, (3,), "a"), LogEntry(1, 1, (3,), "a")], 2, absent) == [None, None]


BYTES = st.sampled_from([*b"abst\xc3\xa9\xf0\x9f\x98\xb8\xff"])
TOKENS = st.lists(st.one_of(BYTES.map(lambda byte: 3 + byte), st.just(CONTROL), st.integers(259, 511)), min_size=1)


@given(tokens=TOKENS, stop=st.lists(st.sampled_from(["ab", "st", " th", "é", "bs"]), max_size=2), data=st.data())
def test_streams_and_whole_answers_tell_the_same(tokens: list[int], stop: list[str], data: st.DataObject) -> None:
    """However the outlet cut the log: the same tokens, those that the text begins to show, at ascending offsets; and
    each with the first entry whose text reaches it."""
    cuts = data.draw(st.lists(st.integers(1, len(tokens)), unique=True))
    entries = log_of(tokens, stop, cuts)
    text = "".join(entry.text for entry in entries)
    reader, said, shown_chars = LogprobReader(1, lambda: VOCABULARY), list[ShownToken](), 0
    for entry in entries:
        told = reader.take(entry)
        assert told is not None
        assert all(shown_chars <= token.offset < shown_chars + len(entry.text) for token in told.tokens)
        shown_chars += len(entry.text)
        said += told.tokens
    assert [(token.id, token.offset) for token in said] == shown_by(log_of(tokens, stop))
    assert [token.id for token in said] == tokens[: len(said)]
    assert all(earlier.offset <= later.offset for earlier, later in pairwise(said))
    joined = b"".join(VOCABULARY.token_bytes(token.id) for token in said).decode("utf-8", "replace")
    assert joined.startswith(text) or text.endswith("\ufffd")
