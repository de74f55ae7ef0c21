"""An engine that computes nothing: whatever it is asked, its model ends at once. What is left is the queue."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tasks.ports import Member, StepLogits, StepResult
from tests.scripted.modelless import Modelless
from workers.engines.tiny import tiny_vocabulary


class NoopEngine(Modelless):
    """An Engine whose every row of logits says: end of text. No prompt is too long for it, and any cut will do."""

    context_length = 2**20
    prefill_grid = 1

    def __init__(self) -> None:
        self.vocabulary = tiny_vocabulary()
        self._row = np.zeros(self.vocabulary.size, dtype=np.float32)  # (V,)
        self._row[self.vocabulary.eos_ids[0]] = 1.0

    def fingerprint(self) -> str:
        """Always the same."""
        return "noop"

    def step(self, batch: Sequence[Member]) -> list[StepResult]:
        """The same row for everyone."""
        return [
            StepLogits(self._row if member.wants_logits else None, member.start + len(member.tokens))
            for member in batch
        ]

    def close(self) -> None:
        """Nothing to free."""
