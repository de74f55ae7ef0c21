"""The executors: each model's ranks, its queue, and what is wanted of it, all models in one round trip."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pool.store.connection import Client, state_errors
from pool.store.keys import ModelKeys
from pool.store.lifecycle import Wanted, wanted_of
from pool.store.ranks import Rank, present_command, present_of
from pool.store.running import run_many
from pool.store.totals import Survey, survey_command, survey_of


@dataclass(frozen=True, slots=True)
class Executor:
    """One model. `ranks`: those whose lease holds, in whichever state."""

    survey: Survey
    ranks: Sequence[Rank]
    wanted: Wanted


def executors(client: Client, models: Sequence[str], shard: int = 0) -> dict[str, Executor]:
    """Of each model. Costs what its ranks and running jobs are, however many wait. Raises StateUnavailable."""
    keys = [ModelKeys(f"{model}:{shard}") for model in models]
    with state_errors():
        replies = run_many(client, [make(each) for each in keys for make in (survey_command, present_command)])
    found = {}
    for model, survey, present in zip(models, replies[::2], replies[1::2], strict=True):
        stored = present[2]
        wanted = wanted_of(dict(zip(stored[::2], stored[1::2], strict=True)))
        found[model] = Executor(survey_of(survey), present_of(present), wanted)
    return found
