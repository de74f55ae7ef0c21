"""The keys of Programs, built here and nowhere else; `docs/redis.md` lists them. They carry the tag of their model.

An id from outside never becomes part of a key: `program_id_of` makes 32 hex digits of tenant and id.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

from pool.store.keys import ModelKeys

#: The kinds of windows, as their keys have them.
WINDOWS = ("requests", "continuity", "segments")


def program_id_of(tenant: str, name: str) -> str:
    """The id under which a tenant's Program is stored."""
    text = f"{len(tenant)}:{tenant}:{name}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=16).hexdigest()


@dataclass(frozen=True)
class ProgramKeys(ModelKeys):
    """Keys of a model's Programs, beside those of its jobs. R: a rank's id, "" for no rank; P: a Program's."""

    def record(self, program: str) -> str:
        """HASH: the Program's record (pool/store/program_records.py)."""
        return self._key(f"program:{program}")

    def pool(self, program: str) -> str:
        """LIST of tickets TOKEN:QUEUED_MS:PRIORITY:EXPECTED, the front first: its jobs that wait."""
        return self._key(f"pool:{program}")

    def of(self, program: str) -> dict[str, str]:
        """The keys of one Program, by their declared names."""
        # STRING with TTL: the last generation that was released.
        return {"program": self.record(program), "pool": self.pool(program), "gone": self._key(f"gone:{program}")}

    def place(self, rank: str) -> dict[str, str]:
        """The keys of one rank, and those that all of a model share, by the names of the group in lua/lib/book.lua."""
        return {
            "waiting": self._key(f"waiting:{rank}"),
            "order": self._key(f"order:{rank}"),
            "waiters": self._key(f"waiters:{rank}"),
            "active": self._key(f"active:{rank}"),
            "book": self._key(f"book:{rank}"),
            "leaving": self._key(f"leaving:{rank}"),
            "stream": self._key(f"rank-queue:{rank}"),
            "timers": self.program_timers,
            "dirty": self.dirty,
            "events": self.program_events,
            "placement": self.placement,
            "owners": self.owners,
            "figures": self._key(f"figures:{rank}"),
            **{window: self._key(f"window:{window}:{rank}") for window in WINDOWS},
        }

    def ended(self, token: str, rank: str) -> dict[str, str]:
        """The keys of every verb that can end a Program's job, as one group."""
        ending = self.ending(token)
        return {name: key for name, key in ending.items() if isinstance(key, str)} | {
            "queue": self.place(rank)["stream"]
        }

    def claim(self, rank: str) -> str:
        """STRING with TTL: somebody plans for the rank just now."""
        return self._key(f"claim:{rank}")

    @cached_property
    def program_timers(self) -> str:
        """ZSET `KIND:P` -> due time (ms); kinds ttl and retention."""
        return self._key("program-timers")

    @cached_property
    def dirty(self) -> str:
        """ZSET R -> since when (ms) something has changed there that nobody has planned for."""
        return self._key("dirty")

    @cached_property
    def members(self) -> str:
        """ZSET R -> last seen (ms): the ranks of the ring."""
        return self._key("members")

    @cached_property
    def owners(self) -> str:
        """HASH tenant -> how many Programs it has."""
        return self._key("owners")

    @cached_property
    def coefficients(self) -> str:
        """HASH door -> tokens a byte of a prompt, learnt from those that completed."""
        return self._key("coefficients")

    @cached_property
    def program_events(self) -> str:
        """STREAM, trimmed: one event a transition."""
        return self._key("program-events")

    @cached_property
    def placement(self) -> str:
        """HASH: `epoch`, the last that was given; `ranks`, version of the set of ranks; WHAT:REASON, transitions."""
        return self._key("placement")


@dataclass(frozen=True)
class RankKeys(ProgramKeys):
    """Keys of a model, for whom the queue is the stream of one rank."""

    rank_id: str

    @cached_property
    def queue(self) -> str:
        """STREAM as the model's own, with a field `program` = P: the jobs of Programs that were sent to this rank."""
        return self.place(self.rank_id)["stream"]
