"""A scene of Programs with the planners of several processes, which plan when they are told to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from pool.settings import ModelSettings
from pool.store.handouts import Handout
from pool.store.program_upkeep import Look
from pool.store.ranks import RankRegistry
from tasks.config import Settings
from tasks.programs import Programs
from tests.builders import swept_steadily
from tests.program_scene import Scene, pid

MODEL = "tiny"
#: How a request ends whose place the statistics keep.
HELD = {"ttl_ms": 60_000, "automatic_ms": 60_000}


@dataclass
class Site:
    """A scene with planners. `lives`: the process of each rank that is registered."""

    scene: Scene
    programs: list[Programs] = field(default_factory=list)

    def process(self) -> Programs:
        """One more process that plans when it is told to."""
        scene = self.scene
        configured = Settings(programs=scene.settings, models={MODEL: ModelSettings(source="random:tiny")})
        made = Programs(scene.client, scene.jobs, configured, terms=scene.terms)
        self.programs.append(made)
        return made

    def join(self, rank: str, incarnation: str) -> None:
        """A process takes a rank and is registered."""
        RankRegistry(self.scene.client, MODEL).beat(rank, incarnation, lease_ms=60_000, facts={})
        self.scene.join(rank, incarnation)

    def die(self, rank: str) -> None:
        """The registration of a rank runs out, and no gap in the sweeps excuses it."""
        self.scene.client.delete(self.scene.keys.rank(rank))
        swept_steadily(self.scene.client)

    def tick(self, process: Programs | None = None) -> None:
        """A tick of one process, by default the first."""
        self.scene.store.unclaim("")
        (process or self.programs[0]).turn([MODEL])

    def woken(self) -> None:
        """A turn of the first process because something has changed."""
        self.programs[0].turn([], [MODEL])

    def observe(self, rank: str, tokens: int, **fields: Any) -> None:
        """The engine of a rank is looked at."""
        seen = self.scene.store.snapshot(rank)
        look = Look(seen.now_ms, seen.rank_set, seen.moved_tokens, tokens, **fields)
        assert self.scene.upkeep.observe(rank, seen.incarnation, look)

    def seconds_pass(self, name: str, *fields: str, seconds: float) -> None:
        """Times of a record lie further back."""
        self.scene.shift(pid(name), -round(seconds * 1000), *fields)


def with_settings(**fields: Any) -> pytest.MarkDecorator:
    """The settings of the site of a test."""
    return pytest.mark.parametrize("site", [fields], indirect=True)


def tokens_of(handouts: list[Handout]) -> set[str]:
    """Which jobs these are."""
    return {handout.lease.token for handout in handouts}
