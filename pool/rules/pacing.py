"""How many prompt tokens a step takes on, so that generations in mid-stream do not wait long for their next token.

Pure: the scheduler shows what steps took and who waits, and gets a number of tokens. It decides how long a step takes,
never what comes out of it.
"""

from __future__ import annotations

from dataclasses import dataclass

#: How much the latest step counts.
SMOOTHING = 0.5
#: A step with prefill may always take so many times as long as one that only decodes: where decoding alone fills the
#: target, prompts still get three quarters of the time.
LEAST_STEPS = 4
#: A step may take so many times the target where nobody is in mid-stream.
BURST_TARGETS = 12


@dataclass(frozen=True, slots=True)
class Pace:
    """What steps took lately, smoothed. `decode_s`: of one that only decodes; `token_s`: of one with prefill, by token
    computed. 0: none was seen yet.

    A decode row counts as one prompt token, though it takes longer. So a token seems dearer than it is beside few
    others; but the number of tokens that follows from it is a larger one, step by step, until steps take what they may.
    """

    decode_s: float = 0.0
    token_s: float = 0.0

    def after(self, took_s: float, *, rows: int, prefill_tokens: int, grid: int = 1) -> Pace:
        """The pace after a step of so many decode rows and prompt tokens. Less than a cell of the grid are ends of
        prompts of which the rest was there: such tokens are as dear as rows, and say nothing of many."""
        if prefill_tokens >= grid:
            return Pace(self.decode_s, _smoothed(self.token_s, took_s / (rows + prefill_tokens)))
        if prefill_tokens:
            return self
        return Pace(_smoothed(self.decode_s, took_s), self.token_s)


def _smoothed(former: float, latest: float) -> float:
    return former + SMOOTHING * (latest - former) if former else latest


def prefill_budget(pace: Pace, *, limit: int, rows: int, settled: bool, target_s: float) -> int:
    """Prompt tokens for the next step, 0 to `limit`; what is at least prefilled is another rule's.

    `rows`: its decode rows; `target_s`: seconds that a step should take, 0: no matter. `settled`: whether anybody who
    decodes has had more than a first token. Nobody has where several prompts came together: then the first of them wait
    for the others, once, so that all go on in full batches.
    """
    if not target_s or (not settled and not pace.token_s):
        return limit
    if not pace.token_s:
        return 0
    allowed_s = max(target_s, LEAST_STEPS * pace.decode_s) if settled else BURST_TARGETS * target_s
    return max(0, min(limit, int(allowed_s / pace.token_s) - rows))
