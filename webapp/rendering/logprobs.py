"""Log-probabilities of shown tokens, read from a job's log and written in the two ways of the API.

Which tokens: those whose text is shown, each with the piece of text that shows its beginning. So tokens that wait (half
a character, what may become a stop string) come with the text that settles it, those of a stop string and the token
that ended a choice do not come at all, and a stream tells the same as the whole answer. A control token that ended
nothing (`ignore_eos`) comes with the text behind it. The rule reads nothing but the log and the vocabulary, so every
node tells the same, whenever it is asked.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pool.store.log import LogEntry, TokenLogprobs
from tasks.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class ShownToken:
    """`offset`: characters of its choice's text before it."""

    id: int
    offset: int
    logprobs: TokenLogprobs


@dataclass(frozen=True, slots=True)
class Shown:
    """Tokens of one choice, in order."""

    vocabulary: Vocabulary
    tokens: list[ShownToken]

    def listed(self) -> list[dict[str, Any]]:
        """As chat completions and responses have them: one object a token. Half a character shows as U+FFFD in
        `token`; `bytes` are exact."""
        return [
            self._named(token.id, token.logprobs.logprob)
            | {"top_logprobs": [self._named(other, logprob) for other, logprob in token.logprobs.top]}
            for token in self.tokens
        ]

    def columns(self) -> dict[str, Any]:
        """As completions have them: one list a property. The likeliest come with the drawn token, keyed by text, where
        bytes that are no text are written as `bytes:\\xe2`; of equal texts the likelier counts."""
        return {
            "tokens": [self._keyed(token.id) for token in self.tokens],
            "token_logprobs": [token.logprobs.logprob for token in self.tokens],
            "top_logprobs": [self._by_text(token) for token in self.tokens],
            "text_offset": [token.offset for token in self.tokens],
        }

    def _named(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, data = self._texts(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(data)}

    def _by_text(self, token: ShownToken) -> dict[str, float]:
        found: dict[str, float] = {}
        for token_id, logprob in (*token.logprobs.top, (token.id, token.logprobs.logprob)):
            found.setdefault(self._keyed(token_id), logprob)
        return found

    def _keyed(self, token_id: int) -> str:
        text, data = self._texts(token_id)
        if data and text.encode() != data:
            return "bytes:" + "".join(map("\\x{:02x}".format, data))
        return text

    def _texts(self, token_id: int) -> tuple[str, bytes]:
        """A token's text, for people, and its bytes. A control token has a name and no bytes; an id that the model has
        no more, because it was replaced, has nothing."""
        if token_id >= self.vocabulary.size:
            return "", b""
        data = self.vocabulary.token_bytes(token_id)
        return self.vocabulary.name(token_id) if not data else data.decode("utf-8", "replace"), data


class _Choice:
    """Places one choice's tokens in its text, and hands them out as that is shown."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoded_chars = 0
        self._shown_chars = 0
        self._waiting: deque[ShownToken] = deque()

    def take(self, entry: LogEntry, vocabulary: Vocabulary) -> list[ShownToken]:
        """The tokens that its text shows the beginning of."""
        for token_id, logprobs in zip(entry.token_ids, entry.logprobs, strict=True):
            data = vocabulary.token_bytes(token_id) if token_id < vocabulary.size else b""
            self._waiting.append(ShownToken(token_id, self._place(data), logprobs))
        self._shown_chars += len(entry.text)
        ready = []
        while self._waiting and self._waiting[0].offset < self._shown_chars:
            ready.append(self._waiting.popleft())
        return ready

    def _place(self, data: bytes) -> int:
        """Where these bytes begin: in the character that is still open, if they go on with it, else behind it."""
        is_open, _ = self._decoder.getstate()
        breaks = bool(is_open and data) and not 0x80 <= data[0] < 0xC0
        offset = self._decoded_chars + breaks
        self._decoded_chars += len(self._decoder.decode(data))
        return offset


class LogprobReader:
    """Reads the entries of a job of `n` choices, in order and without gaps. `vocabulary`: its model's, asked for once,
    when it is needed; what that raises, reading raises."""

    def __init__(self, n: int, vocabulary: Callable[[], Vocabulary]) -> None:
        self._choices = [_Choice() for _ in range(n)]
        self._ask = vocabulary
        self._vocabulary: Vocabulary | None = None

    def take(self, entry: LogEntry) -> Shown | None:
        """What an entry's text shows; None where the job did not ask."""
        if not entry.logprobs:
            return None
        if self._vocabulary is None:
            self._vocabulary = self._ask()
        return Shown(self._vocabulary, self._choices[entry.choice].take(entry, self._vocabulary))


def shown_of(entries: Iterable[LogEntry], n: int, vocabulary: Callable[[], Vocabulary]) -> list[Shown | None]:
    """What a log shows, by choice (n); None where the job did not ask."""
    reader, found = LogprobReader(n, vocabulary), dict[int, Shown]()
    for entry in entries:
        shown = reader.take(entry)
        if shown is not None:
            found.setdefault(entry.choice, Shown(shown.vocabulary, [])).tokens.extend(shown.tokens)
    return [found.get(choice) for choice in range(n)]


def listed(shown: Sequence[Shown | None]) -> list[list[dict[str, Any]]]:
    """By choice, as responses have them: none where the job did not ask."""
    return [each.listed() if each else [] for each in shown]
