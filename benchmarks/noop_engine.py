"""An engine that computes nothing: whatever it is asked, its model ends at once. What is left is the queue."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tasks.ports import Capability, Member, StepLogits, StepResult
from tasks.vocabulary import Vocabulary
from workers.engines.tiny import tiny_vocabulary

CONTEXT_LENGTH = 2**20


class NoopEngine:
    """An Engine whose every row of logits says: end of text."""

    def __init__(self) -> None:
        self._vocabulary = tiny_vocabulary()
        self._row = np.zeros(self._vocabulary.size, dtype=np.float32)  # (V,)
        self._row[self._vocabulary.eos_ids[0]] = 1.0

    @property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary of the tiny models."""
        return self._vocabulary

    @property
    def context_length(self) -> int:
        """No prompt is too long."""
        return CONTEXT_LENGTH

    @property
    def bytes_per_token(self) -> int:
        """It holds no KV; one byte makes the arithmetic of budgets work."""
        return 1

    @property
    def prefill_grid(self) -> int:
        """Any cut will do."""
        return 1

    def fingerprint(self) -> str:
        """Always the same."""
        return "noop"

    def capability(self) -> Capability:
        """All that needs no computing."""
        return Capability(
            max_sessions=1024,
            max_positions=CONTEXT_LENGTH,
            batch_invariant=True,
            recompute_exact=True,
            snapshot=False,
            prefix_share=False,
            logprobs=False,
            seed=True,
        )

    def step(self, batch: Sequence[Member]) -> list[StepResult]:
        """The same row for everyone."""
        return [
            StepLogits(self._row if member.wants_logits else None, member.start + len(member.tokens))
            for member in batch
        ]

    def release(self, session: str, epoch: int) -> None:
        """Nothing is held."""

    def share_prefix(self, source: tuple[str, int], target: tuple[str, int], positions: int) -> bool:  # noqa: ARG002 - the port has it
        """Unsupported."""
        return False

    def snapshot(self, session: str, epoch: int) -> bytes | None:  # noqa: ARG002 - the port has it
        """Unsupported."""
        return None

    def restore(self, session: str, epoch: int, blob: bytes) -> bool:  # noqa: ARG002 - the port has it
        """Unsupported."""
        return False

    def close(self) -> None:
        """Nothing to free."""
