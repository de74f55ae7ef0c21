"""Where the llama.cpp engine cuts prompts: what a session may begin with, what is computed as a piece, and what as a
single token.

Attention adds up in another order for one token of a sequence than for several. So where bits are promised, a position
is computed as a single token or as one of several by where it is in the prompt, whatever chunks the prompt came in and
whatever it began with: the last one is a single token when it alone is beyond the grid, all others are not. Where
nothing is promised, none of that costs anybody a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Literal

from tasks.ports import Member
from workers.engines.llama_cpp_context import Row
from workers.engines.members import Key

PREFILL_GRID = 16


@dataclass(frozen=True, slots=True)
class Cuts:
    """`singles_apart`: single tokens have other bits than tokens of pieces. `unit`: a session begins with a multiple of
    so many positions: 16, or 2, so that a piece from there to the grid has two tokens at least."""

    singles_apart: bool
    unit: Literal[2, 16]

    def begins_with(self, common: int, prompt_tokens: int) -> int:
        """How many of `common` positions a session of so long a prompt may begin with, always less than all."""
        if common >= prompt_tokens - 1 and (not self.singles_apart or _is_lone(prompt_tokens)):
            return prompt_tokens - 1  # its last token is a single one
        held = min(common, prompt_tokens - 1) // self.unit * self.unit
        return held if prompt_tokens - held > 1 else held - self.unit

    def piece_end(self, start: int, end: int) -> int:
        """Where the piece ends that a chunk [start, end) begins with: at its end, or before a single token."""
        return end - 1 if end - start == 1 or (self.singles_apart and _is_lone(end)) else end


def _is_lone(end: int) -> bool:
    return end % PREFILL_GRID == 1


@dataclass(slots=True)
class Part:
    """A member that passed its checks: positions [start, cut) are a piece of a prompt, [cut, end) a single token."""

    index: int
    key: Key
    tokens: list[int]
    start: int
    cut: int
    wanted: bool

    @classmethod
    def of(cls, index: int, member: Member, tokens: list[int], cuts: Cuts) -> Part:
        """The batch's member of that index."""
        cut = cuts.piece_end(member.start, member.start + len(tokens))
        return cls(index, (member.session, member.epoch), tokens, member.start, cut, member.wants_logits)

    @property
    def end(self) -> int:
        """Behind its last position."""
        return self.start + len(self.tokens)

    def single(self, slot: int) -> Row:
        """Its single token."""
        return Row(slot, self.tokens[-1], self.end - 1, self.wanted)


@dataclass(frozen=True, slots=True)
class Piece:
    """Positions [start, stop) of a part's piece, in its slot."""

    part: Part
    slot: int
    start: int
    stop: int

    @classmethod
    def of(cls, part: Part, slot: int) -> Piece:
        """All of the part's."""
        return cls(part, slot, part.start, part.cut)

    def __len__(self) -> int:
        return self.stop - self.start

    def first(self, count: int) -> Piece:
        """Its first positions."""
        return replace(self, stop=self.start + count)

    def behind(self, count: int) -> Piece:
        """The others."""
        return replace(self, start=self.start + count)

    def rows(self) -> list[Row]:
        """The last one's logits show whether all of them are numbers."""
        tokens = self.part.tokens[self.start - self.part.start : self.stop - self.part.start]
        return [Row(self.slot, token, at, at == self.stop - 1) for at, token in enumerate(tokens, self.start)]

    def most(self, rows: int) -> int:
        """How many of its first positions fit into a batch of so many rows: all, or as far as the grid."""
        return min(len(self), rows // PREFILL_GRID * PREFILL_GRID - self.start % PREFILL_GRID)


def packed(pieces: Sequence[Piece], rows: int, *, together: bool) -> list[list[Piece]]:
    """All of the pieces, in batches of at most `rows` rows, in order. `together`: several in a batch.

    A batch takes equally many rows of each, at least two, of slots that follow each other, for just that is what
    llama.cpp computes at once. Whatever is longer than the shortest comes in further batches.
    """
    batches: list[list[Piece]] = []
    waiting = [sorted(pieces, key=attrgetter("slot"))] if pieces else []
    while waiting:
        group, others = _group(waiting.pop(), rows, together=together)
        count = min(piece.most(rows) for piece in group)
        batches.append([piece.first(count) for piece in group])
        rests = [piece.behind(count) for piece in group if len(piece) > count]
        waiting += [each for each in (others, rests) if each]
    return batches


def _group(pieces: Sequence[Piece], rows: int, *, together: bool) -> tuple[list[Piece], list[Piece]]:
    """As many of the first pieces as go into a batch, and the others."""
    group = [pieces[0]]
    for piece in pieces[1:]:
        wider = [*group, piece]
        count = min(each.most(rows) for each in wider)
        fits = count * len(wider) <= rows and all(len(each) - count != 1 for each in wider)
        if not (together and fits and piece.slot == group[-1].slot + 1):
            break
        group = wider
    return group, list(pieces[len(group) :])
