"""What a rank serves: a runner, and what its model is. Each backend makes one (`workers.backends.open_backend`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pool.store.ranks import Card
from tasks.ports import Runner
from tasks.vocabulary import Vocabulary
from workers.outlet import Held
from workers.program_residence import OnPause, Residence

#: Makes what a seat asks about Programs: of the jobs that the rank holds, and of what becomes of paused ones' KV.
ResidenceOf = Callable[[Callable[[], Sequence[Held]], OnPause], Residence]


@dataclass(frozen=True, slots=True)
class Served:
    """`vocabulary`: None where prompts are tokenized elsewhere; `same_bytes`: whether the same request gives the same
    output whatever else runs; `close`: frees everything, after the runner was stopped."""

    runner: Runner
    card: Card
    vocabulary: Vocabulary | None
    same_bytes: bool
    residence: ResidenceOf
    close: Callable[[], None]
