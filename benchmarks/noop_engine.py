"""An engine that computes nothing: whatever it is asked, its model ends at once. What is left is the queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tasks.ports import Capability, Kept, KVRefused, KVUsage, Member, SessionKey, StepLogits, StepResult, TokenIds
from workers.engines.tiny import tiny_vocabulary


class NoopEngine:
    """An Engine whose every row of logits says: end of text. No prompt is too long for it, any cut will do, and
    it holds nothing."""

    bytes_per_token = 1

    context_length = 2**20
    prefill_grid = 1

    def __init__(self) -> None:
        self.vocabulary = tiny_vocabulary()
        self._row = np.zeros(self.vocabulary.size, dtype=np.float32)  # (V,)
        self._row[self.vocabulary.eos_ids[0]] = 1.0

    def fingerprint(self) -> str:
        """Always the same."""
        return "noop"

    def capability(self) -> Capability:
        """All that needs no computing."""
        return Capability(
            max_sessions=4096,
            max_positions=self.context_length,
            batch_invariant=True,
            recompute_exact=True,
            snapshot=False,
            prefix_share=False,
            logprobs=False,
            seed=True,
            offload=False,
        )

    def step(self, batch: Sequence[Member]) -> list[StepResult]:
        """The same row for everyone."""
        return [
            StepLogits(self._row if member.wants_logits else None, member.start + len(member.tokens))
            for member in batch
        ]

    def begin(self, session: str, epoch: int, prompt: TokenIds, positions: int, scope: str = "") -> int | None:  # noqa: ARG002 - the port's signature
        """There is always room, and nothing to begin with."""
        return 0

    def extend(self, session: str, epoch: int, positions: int) -> bool:  # noqa: ARG002 - the port's signature
        """There is always more."""
        return True

    def resident(self, prompt: TokenIds, scope: str = "") -> int:  # noqa: ARG002 - the port's signature
        """Nothing ever is."""
        return 0

    def release(
        self,
        session: str,
        epoch: int,
        *,
        tokens: TokenIds | None = None,
        holder: str = "",
    ) -> None:
        """Nothing is held."""

    def unpin(self, holder: str) -> None:
        """Nothing is pinned."""

    def kv_usage(self) -> KVUsage:
        """No KV."""
        return KVUsage(total=2**40, held=0, pinned=0, cached=0, evictions=0)

    def check_integrity(self) -> None:
        """Without books, nothing can contradict itself."""

    def snapshot(self, session: str, epoch: int) -> bytes | None:  # noqa: ARG002 - the port's signature
        """Unsupported."""
        return None

    def restore(self, session: str, epoch: int, blob: bytes, prompt: TokenIds, positions: int, scope: str = "") -> bool:  # noqa: ARG002 - the port's signature
        """Unsupported."""
        return False

    def kept_for(self, holder: str) -> int:  # noqa: ARG002 - the port's signature
        """Nothing is."""
        return 0

    def export(self, holder: str) -> Kept | None:  # noqa: ARG002 - the port's signature
        """Unsupported."""
        return None

    def begin_from(
        self,
        kept: Kept,  # noqa: ARG002 - the port's signature
        session: str,  # noqa: ARG002
        epoch: int,  # noqa: ARG002
        prompt: TokenIds,  # noqa: ARG002
        positions: int,  # noqa: ARG002
        scope: str = "",  # noqa: ARG002
    ) -> int | None:
        """Unsupported."""
        raise KVRefused("this engine takes none")

    def held_by(self, owners: Mapping[str, Sequence[SessionKey]]) -> dict[str, int]:  # noqa: ARG002 - the port's signature
        """Nobody has anything."""
        return {}

    def sole(self, sessions: Sequence[SessionKey]) -> int:  # noqa: ARG002 - the port's signature
        """Nothing is held."""
        return 0

    def close(self) -> None:
        """Nothing to free."""
