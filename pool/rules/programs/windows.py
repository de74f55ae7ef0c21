"""Windows of samples, and what they say."""

from __future__ import annotations

import math

from pool.rules.programs.facts import Means


def target_rounds(means: Means, max_segment_rounds: int) -> int:
    """Rounds of growth that a place is reserved for: twice the mean segment, since half of all segments are longer than
    about the mean; 0 while the window is not full."""
    if not means.full or means.segment_rounds is None:
        return 0
    return min(max(math.ceil(2 * means.segment_rounds), 1), max_segment_rounds)
