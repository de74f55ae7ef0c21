"""The engine of random operations on the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tasks.ports import Member, StepResult, TokenIds
from tests.scripted.blocks import BlockEngine


class Watched(BlockEngine):
    """Raises while a culprit is in the batch, and remembers the last step and what sessions began with. Has a clock of
    its own: steps take longer the more there is in them, though not always as long."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.now_s = 0.0
        self.culprits: set[str] = set()
        self.batch: list[Member] = []
        #: By session: whether most of its prompt was here when it began last.
        self.was_resident: dict[str, bool] = {}

    def begin(self, session: str, epoch: int, prompt: TokenIds, positions: int, scope: str = "") -> int | None:
        found = super().begin(session, epoch, prompt, positions, scope)
        if found is not None:
            self.was_resident[session] = 2 * found >= len(prompt)
        return found

    def step(self, batch: Sequence[Member]) -> list[StepResult]:
        self.batch = list(batch)
        tokens = sum(len(member.tokens) for member in batch)
        self.now_s += 0.001 * (tokens + tokens * len(batch) % 7)
        if any(member.session in self.culprits for member in batch):
            raise RuntimeError("a culprit is in the batch")
        return super().step(batch)
