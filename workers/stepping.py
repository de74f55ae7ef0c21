"""An engine's steps: run so that a failing member fails alone, timed, and bounded by what the last ones took."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from pool.rules.pacing import Pace, prefill_budget
from tasks.ports import Engine, Member, MemberError, StepResult, kept
from workers.telemetry import Telemetry

log = logging.getLogger("genpool.loop")


class Stepping:
    """Called in the engine's thread. `target_step_s`: seconds that a step with prefill should take beside sessions that
    decode; 0: no matter."""

    def __init__(self, engine: Engine, telemetry: Telemetry, target_step_s: float) -> None:
        self._engine = engine
        self._telemetry = telemetry
        self._target_step_s = target_step_s
        self._pace = Pace()

    def prefill_budget(self, rows: int, *, settled: bool) -> int:
        """Prompt tokens for the next step beside so many decode rows; `settled` as in `pool.rules.pacing`."""
        limit = self._telemetry.budgets.max_prefill_tokens_per_tick
        return prefill_budget(self._pace, limit=limit, rows=rows, settled=settled, target_s=self._target_step_s)

    def run(self, members: Sequence[Member], rows: int) -> tuple[list[StepResult], float]:
        """One step of these members, `rows` of which decode: their results, in order, and the clock after it."""
        tokens = sum(len(member.tokens) for member in members)
        began_s = self._telemetry.clock()
        results = self._step(members)
        now_s = self._telemetry.clock()
        self._telemetry.stepped(now_s - began_s)
        grid = self._engine.prefill_grid
        self._pace = self._pace.after(now_s - began_s, rows=rows, prefill_tokens=tokens - rows, grid=grid)
        return results, now_s

    def _step(self, members: Sequence[Member]) -> list[StepResult]:
        """Run the batch; when it raises, run its members alone, so that only the culprit fails."""
        try:
            return self._checked(members)
        except Exception as error:  # noqa: BLE001 - whatever an engine raises must not end the loop
            log.error("engine step of %d members failed: %s", len(members), type(error).__name__)
            if len(members) == 1:
                return [MemberError(f"The engine failed: {type(error).__name__}.")]
            return [kept(result) for member in members for result in self._step([member])]

    def _checked(self, members: Sequence[Member]) -> list[StepResult]:
        results = self._engine.step(members)
        if len(results) != len(members):
            raise RuntimeError(f"the engine answered {len(results)} results for {len(members)} members")
        return results
