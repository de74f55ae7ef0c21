"""An engine whose KV is the tokens themselves, in the blocks of a real BlockPool: for tests of whatever drives engines.

A session's logits are a function of what its blocks hold, so a block that is shared, kept or given up wrongly changes
its tokens. Without `recompute_exact`, a generated token's cell differs from that of the same token prefilled, as KV
does in a real engine.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pool.rules.kv_blocks import BlockPool, common_prefix
from tasks.ports import (
    CacheMiss,
    Capability,
    Kept,
    KVRefused,
    KVUsage,
    Logits,
    Member,
    MemberError,
    StepLogits,
    StepResult,
    TokenIds,
)
from tasks.vocabulary import Vocabulary
from workers.engines.tiny import tiny_vocabulary

Key = tuple[str, int]

#: What a cell holds beside its token when that was decoded.
DECODED = 1 << 24


@dataclass(slots=True)
class _Held:
    """A session: positions it holds, of `room`, and the prompt it began with, in its scope."""

    scope: str
    prompt: TokenIds
    room: int
    length: int


class BlockEngine:
    """A tasks.ports.Engine of `blocks` blocks."""

    prefill_grid = 16
    bytes_per_token = 1
    vocabulary: Vocabulary

    def __init__(
        self,
        *,
        blocks: int = 256,
        block_tokens: int = 16,
        context_length: int = 4096,
        max_sessions: int = 4096,
        recompute_exact: bool = True,
        snapshot: bool = True,
        prefix_share: bool = True,
        offload: bool = True,
    ) -> None:
        self.context_length = context_length
        self.vocabulary = tiny_vocabulary()
        self.books = BlockPool(blocks, block_tokens)
        self._can = Capability(
            max_sessions=max_sessions,
            max_positions=context_length,
            batch_invariant=True,
            recompute_exact=recompute_exact,
            snapshot=snapshot,
            prefix_share=prefix_share,
            logprobs=True,
            seed=True,
            offload=offload and prefix_share,
        )
        self._cells = np.zeros((blocks, block_tokens), np.int64)
        self._held: dict[Key, _Held] = {}
        self._kept: dict[str, tuple[str, TokenIds]] = {}
        self._rows: list[Logits] = []

    def fingerprint(self) -> str:
        """The same for all of a kind."""
        return f"blocks-{self._can.recompute_exact}"

    def capability(self) -> Capability:
        """As it was made."""
        return self._can

    # -- sessions ----------------------------------------------------------------------------------------------------

    def begin(self, session: str, epoch: int, prompt: TokenIds, positions: int, scope: str = "") -> int | None:
        """See `tasks.ports.Engine.begin`."""
        share = None if self._can.prefix_share else 0
        found = self.books.begin((session, epoch), prompt, positions, scope, share=share)
        if found is not None:
            self._held[session, epoch] = _Held(scope, np.array(prompt, np.int32), positions, found)
        return found

    def extend(self, session: str, epoch: int, positions: int) -> bool:
        """See `tasks.ports.Engine.extend`."""
        held = self._held.get((session, epoch))
        if held is None or not self.books.extend((session, epoch), positions):
            return False
        held.room = max(held.room, positions)
        return True

    def resident(self, prompt: TokenIds, scope: str = "") -> int:
        """See `tasks.ports.Engine.resident`."""
        return self.books.resident(prompt, scope) if self._can.prefix_share else 0

    def release(
        self,
        session: str,
        epoch: int,
        *,
        tokens: TokenIds | None = None,
        holder: str = "",
    ) -> None:
        """See `tasks.ports.Engine.release`."""
        held = self._held.pop((session, epoch), None)
        if held is None:
            return
        if tokens is not None:
            assert len(tokens) == held.length, "tokens of all positions, no more and no less"
            self.books.learn((session, epoch), tokens)
        if holder:
            self.books.pin(holder, (session, epoch))
            kept = len(self.books.pinned(holder)) * self.books.block_tokens
            self._kept[holder] = held.scope, np.array((held.prompt if tokens is None else tokens)[:kept], np.int32)
        self.books.release((session, epoch))

    def unpin(self, holder: str) -> None:
        """See `tasks.ports.Engine.unpin`."""
        self.books.unpin(holder)
        self._kept.pop(holder, None)

    def held_by(self, owners: Mapping[str, Sequence[Key]]) -> dict[str, int]:
        """See `tasks.ports.Engine.held_by`."""
        return {owner: blocks * self.books.block_tokens for owner, blocks in self.books.held_by(owners).items()}

    def sole(self, sessions: Sequence[Key]) -> int:
        """See `tasks.ports.Engine.sole`."""
        return self.books.sole(sessions) * self.books.block_tokens

    def kv_usage(self) -> KVUsage:
        """See `tasks.ports.KVUsage`."""
        usage, size = self.books.usage(), self.books.block_tokens
        return KVUsage(usage.total * size, usage.held * size, usage.pinned * size, usage.cached * size,
                       self.books.evictions)  # fmt: skip

    def check_integrity(self) -> None:
        """See `tasks.ports.Engine.check_integrity`."""
        self.books.check_integrity()

    def close(self) -> None:
        """Nothing to free."""

    # -- steps -------------------------------------------------------------------------------------------------------

    def step(self, batch: Sequence[Member]) -> list[StepResult]:
        """See `tasks.ports.Engine.step`. Where it raises, no session has changed. Rows of the last step become none."""
        assert len({(member.session, member.epoch) for member in batch}) == len(batch)
        for row in self._rows:
            row.fill(np.nan)
        results = [self._result(member) for member in batch]
        self._rows = [result.row for result in results if isinstance(result, StepLogits) and result.row is not None]
        for member, result in zip(batch, results, strict=True):
            if isinstance(result, StepLogits):
                held = self._held[member.session, member.epoch]
                held.length = result.length
                self.books.written((member.session, member.epoch), min(held.length, len(held.prompt)))
        return results

    def _result(self, member: Member) -> StepResult:
        held = self._held.get((member.session, member.epoch))
        if held is None or held.length != member.start:
            return CacheMiss()
        stop = member.start + len(member.tokens)
        if stop > held.room:
            return MemberError(f"position {stop - 1} is beyond the session's room")
        known = held.prompt[member.start : stop]
        if not np.array_equal(known, member.tokens[: len(known)]) or 0 < len(known) < len(member.tokens):
            return MemberError("these are not the tokens of the prompt")
        if len(member.tokens) > 1 and (
            member.start % self.prefill_grid or (stop % self.prefill_grid and stop != len(held.prompt))
        ):
            return MemberError("a chunk is off the grid")
        decoded = not len(known) and not self._can.recompute_exact
        where = self._where(member, member.start, stop)
        self._cells[where] = member.tokens + np.int64(DECODED * decoded)
        row = None
        if member.wants_logits:
            row = self._logits(member.session, self._cells[self._where(member, 0, stop)])
        return StepLogits(row, stop)

    def _where(self, member: Member, start: int, stop: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Blocks and places in them of the positions [start, stop)."""
        table = np.array(self.books.table((member.session, member.epoch)), np.int64)
        block, place = np.divmod(np.arange(start, stop), self.books.block_tokens)
        return table[block], place

    def _logits(self, session: str, cells: npt.NDArray[np.int64]) -> Logits:  # noqa: ARG002 - subclasses name it
        """Logits (V,) after what the cells (T,) hold; no control tokens."""
        draw = np.random.default_rng(zlib.crc32(cells.tobytes()))
        row = 3 * draw.standard_normal(self.vocabulary.size, dtype=np.float32)
        row[:17] = -1e9
        return row

    # -- snapshots ---------------------------------------------------------------------------------------------------

    def snapshot(self, session: str, epoch: int) -> bytes | None:
        """See `tasks.ports.Engine.snapshot`."""
        held = self._held.get((session, epoch))
        if held is None or not held.length or not self._can.snapshot:
            return None
        cells = self._cells[self._where(Member(session, epoch, held.prompt, 0), 0, held.length)]
        return json.dumps([self.fingerprint(), held.prompt.tolist(), cells.tolist()]).encode()

    def restore(
        self, session: str, epoch: int, blob: bytes, prompt: TokenIds, positions: int, scope: str = ""
    ) -> bool | None:
        """See `tasks.ports.Engine.restore`."""
        try:
            fingerprint, known, cells = json.loads(blob)
        except ValueError:
            return False
        fits = len(cells) <= positions and self._can.snapshot
        if fingerprint != self.fingerprint() or known != list(map(int, prompt)) or not fits:
            return False
        # It writes all its positions, so it may not begin with anybody's blocks.
        if self.books.begin((session, epoch), prompt, positions, scope, share=0) is None:
            return None
        self._held[session, epoch] = _Held(scope, np.array(prompt, np.int32), positions, len(cells))
        self._cells[self._where(Member(session, epoch, prompt, 0), 0, len(cells))] = cells
        self.books.written((session, epoch), min(len(cells), len(prompt)))
        return True

    def kept_for(self, holder: str) -> int:
        """See `tasks.ports.Engine.kept_for`."""
        return len(self.books.pinned(holder)) * self.books.block_tokens

    def export(self, holder: str) -> Kept | None:
        """See `tasks.ports.Engine.export`."""
        scope, tokens = self._kept.get(holder, ("", np.empty(0, np.int32)))
        if not len(tokens) or not self._can.offload:
            return None
        cells = self._cells[list(self.books.pinned(holder))].reshape(-1)
        return Kept(scope, tokens, json.dumps([self.fingerprint(), scope, tokens.tolist(), cells.tolist()]).encode())

    def begin_from(
        self, kept: Kept, session: str, epoch: int, prompt: TokenIds, positions: int, scope: str = ""
    ) -> int | None:
        """See `tasks.ports.Engine.begin_from`."""
        try:
            fingerprint, of_scope, tokens, cells = json.loads(kept.blob)
        except ValueError:
            raise KVRefused("it is damaged") from None
        if (fingerprint, of_scope, tokens) != (
            self.fingerprint(),
            scope,
            kept.tokens.tolist(),
        ) or not self._can.offload:
            raise KVRefused("it is of another engine, of other tokens or of another scope")
        found = self.begin(session, epoch, prompt, positions, scope)
        if found is None:
            return None
        size = self.books.block_tokens
        usable = min(common_prefix(kept.tokens, prompt), len(prompt) - 1, positions) // size * size
        if usable > found:
            where = self._where(Member(session, epoch, prompt, 0), found, usable)
            self._cells[where] = cells[found:usable]
            self._held[session, epoch].length = usable
            self.books.written((session, epoch), usable)
        return max(found, usable)
