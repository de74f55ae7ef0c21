"""On which rank a Program begins: what the strategies of `pool/rules/programs/binding.py` are told, from the store.

The ring is made from the members that the store lists, so every node has the same one. What `cache_aware` knows of a
rank's cache is what the store knows: the prefix that a new Program's relatives were seen to share with others counts as
cached where they are active.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pool.rules.programs.admission import decide, standing_of
from pool.rules.programs.binding import Candidate, Ring, choose, home, ring_of
from pool.rules.programs.capacity import usage
from pool.rules.programs.facts import Program, State, Status, Waiting
from pool.store.program_views import Outline
from pool.store.programs import ProgramStore


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A Program to be bound. `key`: what consistent hashing goes by; `prompt_tokens`: of its request; `program`: its id
    as stored, "" where it is certainly new; `relatives`: ids of its parent and root, those that are known."""

    key: str
    prompt_tokens: int
    program: str = ""
    relatives: tuple[str, ...] = ()


class Homes:
    """First ranks of one model's Programs. Thread-safe: what it keeps are whole values."""

    def __init__(self, store: ProgramStore) -> None:
        self._store = store
        self._settings = store.settings
        self._ring: tuple[tuple[str, ...], Ring] = ((), [])

    def home(self, newcomer: Newcomer) -> tuple[str, bool]:
        """The rank for a Program, "" for none, and whether it is up. One that has a rank which is up stays there.
        Two round trips. Raises StateUnavailable."""
        bound, members = self._store.bound(newcomer.program)
        ranks = list(dict.fromkeys([*members, *([bound] if bound else [])]))
        seen = self._store.outlines(ranks)
        up = [outline for outline in seen if outline.incarnation]
        if bound and any(outline.rank.id == bound for outline in up):
            return bound, True
        return self.among(newcomer, members, up)

    def among(self, newcomer: Newcomer, members: Sequence[str], up: Sequence[Outline]) -> tuple[str, bool]:
        """The rank for a Program, whatever it had before: one of `up`. With none up, the ring still says where it
        probably comes back: a restart then moves nobody."""
        ring = self._ring_of(members)
        if not up:
            by_hash = self._settings.binding_strategy == "consistent_hash"
            return (home(ring, newcomer.key) or "") if by_hash else "", False
        candidates = self._candidates(newcomer, up)
        strategy = self._settings.binding_strategy
        turn = self._store.turn() if strategy == "program_round_robin" else 0
        return choose(strategy, candidates, key=newcomer.key, turn=turn, ring=ring) or "", True

    def _ring_of(self, members: Sequence[str]) -> Ring:
        """Made anew only when the members change: it has thousands of points."""
        ids = tuple(sorted(members))
        known, ring = self._ring
        if known != ids:
            ring = ring_of(ids, self._settings.hash_virtual_nodes)
            self._ring = (ids, ring)
        return ring

    def _candidates(self, newcomer: Newcomer, up: Sequence[Outline]) -> list[Candidate]:
        matched = self._matched(newcomer) if self._settings.binding_strategy == "cache_aware" else {}
        return [self._candidate(newcomer, outline, matched) for outline in up]

    def _candidate(self, newcomer: Newcomer, outline: Outline, matched: Mapping[str, int]) -> Candidate:
        rank, settings = outline.rank, self._settings
        if rank.capacity_tokens is None:
            # Without a token capacity its places are what fills up.
            pressure = rank.active / settings.max_active_programs_per_target
        else:
            pressure = usage(rank, settings, outline.now_ms).used_tokens / rank.capacity_tokens
        prompt_tokens = max(newcomer.prompt_tokens, 1)
        return Candidate(
            rank=rank.id,
            programs=rank.active + outline.waiting,
            private_tokens=rank.ledger_tokens,
            capacity_tokens=rank.capacity_tokens,
            kv_pressure=min(pressure, 1.0),
            admissible=not outline.waiting and self._fits(newcomer, outline),
            matched_share=min(matched.get(rank.id, 0), prompt_tokens) / prompt_tokens,
        )

    def _fits(self, newcomer: Newcomer, outline: Outline) -> bool:
        """Whether it could become active there now."""
        rank, now_ms = outline.rank, outline.now_ms
        program = Program(
            id=newcomer.program,
            state=State.PAUSED,
            status=Status.REASONING,
            rank=rank.id,
            context_tokens=newcomer.prompt_tokens,
            waiting=Waiting(queued_ms=now_ms, force_ms=now_ms + 1),
        )
        return decide(program, rank, standing_of(rank, self._settings, now_ms), self._settings, now_ms).admitted

    def _matched(self, newcomer: Newcomer) -> dict[str, int]:
        """Tokens of its prompt that ranks probably have cached: those that its active relatives share with others."""
        matched: dict[str, int] = {}
        for relative in dict.fromkeys(newcomer.relatives):
            stored = self._store.read(relative)
            if stored is not None and stored.text("state") == State.ACTIVE:
                rank = stored.text("rank")
                matched[rank] = max(matched.get(rank, 0), stored.number("shared"))
        return matched
