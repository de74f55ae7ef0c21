"""The llama.cpp engine: what people run, on CPUs and GPUs, behind the same port as the numpy engine.

A session is a sequence of llama.cpp with its own part of the KV, a *slot* (`pool.rules.kv_slots` keeps the books). A
step makes one call for all its single tokens, and others for pieces of prompts (`llama_cpp_cuts`): in one call they
would not be computed together either, because llama.cpp cuts a batch into parts with equally many rows of each
sequence, so the first token of a piece would go with the single ones. That would show in the last bits: attention adds
up in another order for one token of a sequence than for several.

What else shows in the bits is not believed but tried when the model is loaded (`llama_cpp_selftest`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pool.rules.kv_blocks import IntegrityError, common_prefix
from pool.rules.kv_slots import SlotPool
from pool.rules.slot_contents import Key, Placement, Swap
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
    kept,
)
from tasks.vocabulary import Vocabulary
from workers.engines.llama_cpp_context import ContextOptions, DecodeFailed, LlamaContext
from workers.engines.llama_cpp_cuts import PREFILL_GRID, Cuts, Part, Piece, packed
from workers.engines.llama_cpp_library import version
from workers.engines.llama_cpp_selftest import SelfTest, self_test
from workers.engines.members import Accepted, Limits, accept
from workers.engines.snapshots import Snapshot

log = logging.getLogger("genpool.llama_cpp")

#: Raised whenever a change of code changes bits or what a snapshot holds.
NUMERIC_POLICY = "partitioned;f16;singles-apart;1"

_NOTHING = np.empty(0, np.int32)


@dataclass(slots=True)
class _Session:
    """`prompt` (P,); `room` and `length` in positions; the first `prefilled` were computed as pieces of the prompt, of
    which it `began` with so many."""

    prompt: TokenIds
    room: int
    length: int
    prefilled: int
    began: int


class LlamaCpp:
    """`tasks.ports.Engine` over llama.cpp. Not for several callers at once.

    `digest`: SHA-256 of the weights; `bytes_per_token`: of KV; `context_length`: of the model.
    """

    def __init__(
        self,
        context: LlamaContext,
        options: ContextOptions,
        vocabulary: Vocabulary,
        *,
        digest: str,
        bytes_per_token: int,
        context_length: int,
    ) -> None:
        self._context = context
        self._options = options
        self._vocabulary = vocabulary
        self._bytes_per_token = bytes_per_token
        self._context_length = min(context_length, context.slot_tokens)
        self._tested = _tested(context, options)
        self._cuts = _cuts(options, self._tested)
        self._packs = self._tested.packs or not self._tested.batch_invariant
        self._pool = SlotPool(options.slots, context.slot_tokens, self._cuts.begins_with)
        self._sessions: dict[Key, _Session] = {}
        self._limits = Limits(vocabulary.size, self._context_length, PREFILL_GRID)
        self._fingerprint = _fingerprint(options, vocabulary, digest, self._tested)

    @property
    def vocabulary(self) -> Vocabulary:
        return self._vocabulary

    @property
    def context_length(self) -> int:
        return self._context_length

    @property
    def bytes_per_token(self) -> int:
        return self._bytes_per_token

    @property
    def prefill_grid(self) -> int:
        return PREFILL_GRID

    @property
    def decodes(self) -> int:
        """Batches computed since the start."""
        return self._context.decodes

    @property
    def tested(self) -> SelfTest:
        """What the self-test found."""
        return self._tested

    def fingerprint(self) -> str:
        return self._fingerprint

    def capability(self) -> Capability:
        return Capability(
            max_sessions=self._options.slots,
            max_positions=self._context_length,
            batch_invariant=self._tested.batch_invariant,
            recompute_exact=self._tested.recompute_exact,
            snapshot=True,
            prefix_share=True,
            logprobs=True,
            seed=True,
            offload=True,
        )

    # -- KV ----------------------------------------------------------------------------------------------------------

    def begin(self, session: str, epoch: int, prompt: TokenIds, positions: int, scope: str = "") -> int | None:
        """See `tasks.ports.Engine.begin`. What it begins with is copied, unless nobody else needs it."""
        key = (session, epoch)
        if key in self._sessions:
            raise ValueError("the session has begun already")
        if self._context.closed or positions > self._context_length:
            return None
        placement = self._pool.begin(key, prompt, positions, scope)
        if placement is None:
            return None
        known = self._sessions[key] = _Session(prompt.copy(), positions, 0, 0, 0)
        known.began = known.length = known.prefilled = self._place(key, placement)
        return known.length

    def extend(self, session: str, epoch: int, positions: int) -> bool:
        """See `tasks.ports.Engine.extend`. Every slot has room for the longest session."""
        known = self._sessions.get((session, epoch))
        if known is None or positions > self._context_length:
            return False
        known.room = max(known.room, positions)
        return True

    def resident(self, prompt: TokenIds, scope: str = "") -> int:
        return self._pool.resident(prompt, scope)

    def release(
        self,
        session: str,
        epoch: int,
        *,
        tokens: TokenIds | None = None,
        holder: str = "",
    ) -> None:
        """See `tasks.ports.Engine.release`. The last slot that nobody was promised is promised to nobody."""
        key = (session, epoch)
        known = self._sessions.pop(key, None)
        if known is None:
            return
        if tokens is not None:
            self._pool.learn(key, tokens[: known.length], min(len(tokens), known.length))
        released = self._pool.release(key, holder)
        if released is not None and not self._context.closed:
            self._context.cut(*released)

    def unpin(self, holder: str) -> None:
        self._pool.unpin(holder)

    def snapshot(self, session: str, epoch: int) -> bytes | None:
        known = self._sessions.get((session, epoch))
        if known is None or known.length == 0 or self._context.closed:
            return None
        state = self._context.state(self._pool.slot((session, epoch)))
        if not state:
            return None
        return Snapshot(known.length, known.prefilled, state).to_bytes(self._fingerprint, known.prompt)

    def restore(
        self, session: str, epoch: int, blob: bytes, prompt: TokenIds, positions: int, scope: str = ""
    ) -> bool | None:
        """See `tasks.ports.Engine.restore`. Raises ValueError for a session that has begun."""
        key = (session, epoch)
        if key in self._sessions:
            raise ValueError("the session has begun already")
        saved = Snapshot.from_bytes(blob, self._fingerprint, prompt)
        if saved is None or self._context.closed or not saved.length <= positions <= self._context_length:
            return False
        findable = min(saved.prefilled, saved.length, len(prompt))
        began = findable if findable == saved.length else 0
        return self._begin_as(key, _Session(prompt.copy(), positions, saved.length, findable, began), saved, scope)

    def kept_for(self, holder: str) -> int:
        kept = self._pool.pinned(holder)
        return 0 if kept is None else len(kept[2])

    def export(self, holder: str) -> Kept | None:
        kept = self._pool.pinned(holder)
        if kept is None or self._context.closed:
            return None
        slot, scope, tokens = kept
        state = self._context.state(slot)
        if not state:
            return None
        return Kept(scope, tokens, Snapshot(len(tokens), len(tokens), state).to_bytes(self._fingerprint, tokens, scope))

    def begin_from(
        self, kept: Kept, session: str, epoch: int, prompt: TokenIds, positions: int, scope: str = ""
    ) -> int | None:
        """See `tasks.ports.Engine.begin_from`. Raises ValueError for a session that has begun."""
        key = (session, epoch)
        if self._context.closed:
            raise KVRefused("the engine is closed")
        if key not in self._sessions and (positions > self._context_length or not self._pool.has_room()):
            return None
        # Only now: it looks at every byte, and a session may ask for room again and again.
        saved = Snapshot.of_kept(kept, self._fingerprint, scope)
        usable = self._cuts.begins_with(common_prefix(kept.tokens, prompt), len(prompt))
        if key in self._sessions or usable <= self._pool.resident(prompt, scope):
            return self.begin(session, epoch, prompt, positions, scope)
        begun = self._begin_as(key, _Session(prompt.copy(), positions, usable, usable, usable), saved, scope)
        if begun is False:
            raise KVRefused("llama.cpp does not take it")
        return None if begun is None else usable

    def _begin_as(self, key: Key, session: _Session, saved: Snapshot, scope: str) -> bool | None:
        """Begin a session with what was saved, as far as its length goes. None: there is no room now. False: llama.cpp
        does not take it, and the session has not begun."""
        # Nothing of the prompt is looked for: all of it is in what was saved.
        placement = self._pool.begin(key, session.prompt[:0], session.room, scope)
        if placement is None:
            return None
        self._sessions[key] = session
        self._place(key, placement)
        if key not in self._sessions:
            return False
        slot = self._pool.slot(key)
        taken = self._context.set_state(slot, saved.payload) and self._context.held(slot) == saved.length
        if not taken or not self._context.cut(slot, session.length):
            self._lose(slot)
            self._context.cut(slot, 0)
            return False
        self._pool.learn(key, session.prompt, session.prefilled)
        return True

    def held_by(self, owners: Mapping[str, Sequence[Key]]) -> dict[str, int]:
        """See `tasks.ports.Engine.held_by`: whole slots, as nobody else can use a part of one."""
        return {owner: slots * self._context.slot_tokens for owner, slots in self._pool.held_by(owners).items()}

    def sole(self, sessions: Sequence[Key]) -> int:
        return self._pool.sole(sessions) * self._context.slot_tokens

    def kv_usage(self) -> KVUsage:
        usage, size = self._pool.usage(), self._context.slot_tokens
        return KVUsage(
            total=usage.total * size,
            held=(usage.live + usage.pinned) * size,
            pinned=usage.pinned * size,
            cached=usage.cached_tokens,
            evictions=self._pool.evictions,
        )

    def check_integrity(self) -> None:
        """See `tasks.ports.Engine.check_integrity`; also compares the books with what llama.cpp holds."""
        self._pool.check_integrity()
        if self._context.closed:
            return
        known = self._pool.kept() | {self._pool.slot(key): session.length for key, session in self._sessions.items()}
        if any(self._context.held(slot) != known.get(slot, 0) for slot in range(self._options.slots)):
            raise IntegrityError("KV slots: llama.cpp holds other lengths than the books")

    def close(self) -> None:
        """Free weights and KV; members of later steps are errors."""
        self._context.close()
        self._forget_all()

    def _place(self, key: Key, placement: Placement) -> int:
        """Do what the books decided. Returns how many positions the session begins with: none, where copying failed.
        One whose slot was lost is no session then."""
        for swap in placement.swaps:
            self._swap(swap)
        if key not in self._sessions:
            return 0
        if placement.spare is not None and not self._context.copy(placement.slot, placement.spare):
            self._lose(placement.spare)
        copied = placement.source is None or self._context.copy(placement.source, placement.slot)
        held = placement.held if copied else 0
        if not self._context.cut(placement.slot, held):
            self._context.cut(placement.slot, 0)
            held = 0
        if held != placement.held:
            self._pool.learn(key, _NOTHING, 0)
        return held

    def _swap(self, swap: Swap) -> None:
        whole = self._context.swap(swap.first, swap.second)
        for slot, is_whole in zip((swap.first, swap.second), whole, strict=True):
            if not is_whole:
                log.error("llama.cpp could not move a sequence")
                self._lose(slot)

    def _lose(self, slot: int) -> None:
        """What the slot held is gone: a session there will be a cache miss."""
        key = self._pool.empty(slot)
        if key is not None:
            self._sessions.pop(key, None)

    def _forget_all(self) -> None:
        for slot in range(self._options.slots):
            self._lose(slot)

    # -- a step ------------------------------------------------------------------------------------------------------

    def step(self, batch: Sequence[Member]) -> list[StepResult]:
        """See `tasks.ports.Engine.step`. Rows of logits of single tokens are the library's own: copying one takes as
        long as drawing from it."""
        if self._context.closed:
            return [MemberError("the engine is closed") for _ in batch]
        results: list[StepResult | None] = [None] * len(batch)
        parts: list[Part] = []
        seen: set[Key] = set()
        for index, member in enumerate(batch):
            accepted = accept(member, seen, self._sessions.get, self._limits)
            if isinstance(accepted, Accepted):
                parts.append(Part.of(index, member, accepted.tokens.tolist(), self._cuts))
            else:
                results[index] = accepted
        if parts:
            for swap in self._pool.condense():
                self._swap(swap)
            self._run(parts, results)
        return [result if result is not None else CacheMiss() for result in results]

    def _run(self, parts: Sequence[Part], results: list[StepResult | None]) -> None:
        """Pieces of prompts first, then all single tokens in one batch."""
        pieces = [Piece.of(part, self._slot(part)) for part in parts if part.cut > part.start and self._is_here(part)]
        for batch in packed(pieces, self._context.batch_rows, together=self._packs):
            self._prefill([piece for piece in batch if self._goes_on(piece.part, results)], results)
        # By slot: llama.cpp computes rows together whose slots follow each other.
        singles = [part for part in parts if part.cut < part.end and self._goes_on(part, results)]
        if singles:
            self._decode(sorted(singles, key=self._slot), results)

    def _prefill(self, pieces: Sequence[Piece], results: list[StepResult | None]) -> None:
        """Compute pieces of prompts in one batch; when that fails, each alone."""
        if not pieces:
            return
        try:
            rows = self._context.decode([row for piece in pieces for row in piece.rows()])
        except DecodeFailed as error:
            if len(pieces) == 1:
                self._fail(pieces[0].part, error, results)
                return
            log.error("a batch of %d pieces of prompts failed: %s", len(pieces), error)
            for piece in pieces:
                if self._goes_on(piece.part, results) and self._cut_back(piece.part, piece.start):
                    self._prefill([piece], results)
            return
        sound = [math.isfinite(row.max()) for row in rows]
        for piece, row, is_sound in zip(pieces, rows, sound, strict=True):
            if is_sound and piece.stop == piece.part.end:
                # Copied: other calls of this step come yet.
                self._finish(piece.part, row.copy() if piece.part.wanted else None, results)
        overflowed = [piece.part for piece, is_sound in zip(pieces, sound, strict=True) if not is_sound]
        if overflowed:
            self._wipe(overflowed, results)

    def _decode(self, parts: Sequence[Part], results: list[StepResult | None]) -> None:
        """Compute the parts' single tokens in one batch; when that fails, each alone."""
        try:
            rows = iter(self._context.decode([part.single(self._slot(part)) for part in parts]))
        except DecodeFailed as error:
            if len(parts) == 1:
                self._fail(parts[0], error, results)
                return
            log.error("a batch of %d failed: %s", len(parts), error)
            for part in parts:
                if self._is_here(part) and self._cut_back(part, part.cut):
                    self._decode([part], results)
                    results[part.index] = kept(results[part.index] or CacheMiss())
            return
        for part in parts:
            self._finish(part, next(rows) if part.wanted else None, results)

    def _finish(self, part: Part, row: Logits | None, results: list[StepResult | None]) -> None:
        """The part is computed; `row` (V,): its logits, where wanted."""
        # The sampler looks for the largest as well: what that takes is in the cache then.
        if row is not None and not math.isfinite(row[row.argmax()]):
            self._wipe([part], results)
            return
        session = self._sessions.get(part.key)
        if session is None:  # wiped in this step
            return
        if part.start == session.prefilled:
            session.prefilled = part.cut if self._cuts.singles_apart else part.end
        session.length = part.end
        self._pool.written(part.key, session.prefilled)
        results[part.index] = StepLogits(row, part.end)

    def _wipe(self, parts: Sequence[Part], results: list[StepResult | None]) -> None:
        """The parts' numbers are none, which would show through every mask to whoever has the slot next: they fail, and
        all KV goes."""
        for part in parts:
            results[part.index] = MemberError("the model's numbers overflowed")
        self._forget_all()
        self._context.clear()

    def _fail(self, part: Part, error: DecodeFailed, results: list[StepResult | None]) -> None:
        """The part alone could not be computed; its session is as it was."""
        if self._cut_back(part, part.start):
            results[part.index] = MemberError(str(error))

    def _cut_back(self, part: Part, length: int) -> bool:
        """Take back what was computed of the part from `length` on. False: the session is lost, a cache miss."""
        slot = self._slot(part)
        if self._context.cut(slot, length):
            return True
        self._context.cut(slot, 0)
        self._lose(slot)
        return False

    def _goes_on(self, part: Part, results: list[StepResult | None]) -> bool:
        """Whether the part has not failed. Moving slots may have lost it, and whose numbers overflowed all others."""
        return self._is_here(part) and results[part.index] is None

    def _is_here(self, part: Part) -> bool:
        return part.key in self._sessions

    def _slot(self, part: Part) -> int:
        return self._pool.slot(part.key)


def _tested(context: LlamaContext, options: ContextOptions) -> SelfTest:
    """The self-test's answer, where it can have one: flash attention splits long contexts among threads, beyond what is
    tried, and GPUs choose their kernels by sizes that are not."""
    if options.flash_attention or options.gpu_layers:
        return SelfTest()
    return self_test(context, slots=options.slots, threads=options.threads)


def _cuts(options: ContextOptions, tested: SelfTest) -> Cuts:
    """As fine as the self-test allows, where it promises anything."""
    singles_apart = not (options.flash_attention or options.gpu_layers)
    return Cuts(singles_apart, unit=2 if tested.fine_cuts or not tested.batch_invariant else 16)


def _fingerprint(options: ContextOptions, vocabulary: Vocabulary, digest: str, tested: SelfTest) -> str:
    """SHA-256 (hex) of everything that decides an engine's bits and the form of its snapshots. The number of slots is
    part of a snapshot's form; that of threads counts where it shows."""
    document = {
        "weights": digest,
        "vocabulary": vocabulary.fingerprint(),
        "policy": NUMERIC_POLICY,
        "llama.cpp": version(),
        "slots": options.slots,
        "flash_attention": options.flash_attention,
        "gpu_layers": options.gpu_layers,
        "threads": "any" if tested.threads_invariant else options.threads,
        "bits": tested.bits,
    }
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
