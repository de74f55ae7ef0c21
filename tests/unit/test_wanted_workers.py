"""What `genpool up` asks of its supervisor when the models are others, without any process."""

from __future__ import annotations

from pathlib import Path

import pytest

from pool.settings import ModelSettings
from tasks.config import Settings
from tasks.following import Following
from tasks.launch import DEVICES_VARIABLE, WORKERS_STAGE, workers
from tasks.supervisor import Child, Supervisor

TINY, OTHER = ModelSettings(source="random:1", replicas=2), ModelSettings(source="random:2", device="0;1", replicas=2)


class Asked(Supervisor):
    """One that starts and stops nothing: children leave when they are told to be `gone`."""

    def __init__(self, children: list[Child]) -> None:
        super().__init__([])
        self.there = {child.name: child for child in children}
        self.leaving: set[str] = set()

    def names(self) -> list[str]:
        return list(self.there)

    def add(self, child: Child, stage: int) -> None:
        assert stage == WORKERS_STAGE and child.name not in self.there
        self.there[child.name] = child

    def retire(self, name: str) -> None:
        self.leaving |= {name} & self.there.keys()

    def gone(self, name: str) -> None:
        """It has ended."""
        self.leaving.remove(name)
        del self.there[name]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Of one model with two workers."""
    return Settings(models={"tiny": TINY}, state={"folder": str(tmp_path)})


def test_those_that_are_wanted_are_there_and_no_others(settings: Settings) -> None:
    """Whoever comes later may fail without ending others; a name is free once whoever has it has left."""
    supervisor = Asked(workers(settings, events=False))
    following = Following(settings, supervisor, events=False)

    def models(**models: ModelSettings) -> None:
        following._catalogue.models = models
        following.turn()

    following.turn()
    first = dict(supervisor.there)
    assert [*first] == ["worker tiny", "worker tiny 2"] and all(child.vital for child in first.values())
    models(tiny=TINY, other=OTHER)
    added = [supervisor.there["worker other"], supervisor.there["worker other 2"]]
    assert [child.vital for child in added] == [False, False]
    assert [child.env[DEVICES_VARIABLE] for child in added] == ["0", "1"]
    models(tiny=TINY.model_copy(update={"replicas": 1}), other=OTHER.model_copy(update={"enabled": False}))
    assert supervisor.leaving == {"worker tiny 2", "worker other", "worker other 2"}
    for name in ("worker other", "worker other 2"):
        supervisor.gone(name)
    models(tiny=TINY)
    assert [*supervisor.there] == ["worker tiny", "worker tiny 2"], "it has not left yet"
    supervisor.gone("worker tiny 2")
    following.turn()
    assert supervisor.there["worker tiny"] is first["worker tiny"]
    assert supervisor.there["worker tiny 2"] is not first["worker tiny 2"]
    following.stop()


def test_a_state_server_that_is_away_is_told_of_once_and_not_while_all_stops(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody runs here. Somebody who stops everything stops that, too."""
    supervisor = Asked([])
    following = Following(settings, supervisor, events=False)

    def look() -> None:
        following._catalogue._next_s = 0.0
        following.look()

    supervisor.request_stop()
    look()
    assert caplog.messages == []
    supervisor._signals = 0
    for _ in range(2):
        look()
    assert caplog.messages == ["the catalogue cannot be asked for: StateUnavailable; it is tried again"]
    following.stop()
