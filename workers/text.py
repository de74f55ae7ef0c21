"""From token ids to text that is safe to show: whole characters only, and no beginning of a stop string.

The pieces are a function of the token sequence alone, so a replay after a takeover makes the same ones.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from tasks.vocabulary import Vocabulary


class TextStream:
    """The text of one choice. Texts joined from `push` and `finish` are the choice's complete text.

    A stop string ends the text before it. Text is matched character by character, so it does not matter how tokens cut
    it: the stop string that is complete first wins, and of several complete at once the longest.
    """

    def __init__(self, vocabulary: Vocabulary, stop: Sequence[str]) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._matchers = [_Matcher(text) for text in stop]
        self._withheld = ""
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """A stop string has come: nothing more will be shown."""
        return self._stopped

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """Take one token; the text that became safe to show. Control tokens have none. A stop string that this token
        completes is text like any other unless it `may_stop`."""
        if self._stopped:
            return ""
        return self._take(self._decoder.decode(self._vocabulary.token_bytes(token_id)), may_stop=may_stop)

    def finish(self) -> str:
        """The rest that was withheld; bytes that never became a character are one U+FFFD. Then the stream is empty."""
        if self._stopped:
            return ""
        shown = self._take(self._decoder.decode(b"", final=True))
        if not self._stopped:
            shown += self._withheld
        self._withheld = ""
        return shown

    def _take(self, text: str, *, may_stop: bool = True) -> str:
        if not self._matchers:
            return text
        pending = self._withheld + text
        for index, character in enumerate(text, start=len(self._withheld) + 1):
            matched = max(matcher.advance(character) for matcher in self._matchers)
            if matched and may_stop:
                self._stopped, self._withheld = True, ""
                return pending[: index - matched]
        safe = len(pending) - max(matcher.matched for matcher in self._matchers)
        self._withheld = pending[safe:]
        return pending[:safe]


class _Matcher:
    """Finds one text in a stream of characters (Knuth, Morris & Pratt 1977).

    `matched` characters at the stream's end are the text's beginning: exactly what must be withheld.
    """

    __slots__ = ("_fallback", "_text", "matched")

    def __init__(self, text: str) -> None:
        self._text = text
        self._fallback = _fallbacks(text)
        self.matched = 0

    def advance(self, character: str) -> int:
        """Take one character; the text's length when it is now complete, else 0."""
        while self.matched and self._text[self.matched] != character:
            self.matched = self._fallback[self.matched - 1]
        if self._text[self.matched] == character:
            self.matched += 1
        if self.matched < len(self._text):
            return 0
        self.matched = self._fallback[-1]
        return len(self._text)


def _fallbacks(text: str) -> list[int]:
    """For each prefix, the length of its longest proper beginning that is also its end."""
    table = [0]
    length = 0
    for character in text[1:]:
        while length and text[length] != character:
            length = table[length - 1]
        if text[length] == character:
            length += 1
        table.append(length)
    return table
