"""How models and their ranks stand: the rows of `GET /v1/admin/models` and `genpool models list`.

A model's row adds up over its replicas. It counts jobs, as of this instant: `runtime_inflight` those that a replica has
begun, handed to its loop, so that they are past the point up to which a cancel costs nothing; `queue_depth` all others,
also those that a replica has read and not begun. A rank's row counts generations (each choice of a job is one), as of
its last heartbeat. `/openapi.json` describes the rows by these types, and there are no others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal, cast

from pydantic import ConfigDict

from pool.rules.model_states import LOADED, LOADING, ModelState, RankState
from pool.settings import ModelSettings
from pool.store.connection import Client, connect
from pool.store.executors import Executor, executors
from pool.store.ranks import Rank
from tasks.config import Settings, state_url
from tasks.queues import duration

LIVE_HEAD = ("STATE", "REPLICAS", "INFLIGHT", "EFFECTIVE", "CONFIGURED", "QUEUED", "LAST ERROR")
RANK_HEAD = ("MODEL", "RANK", "STATE", "INFLIGHT", "EFFECTIVE", "CONFIGURED", "DEVICE", "LAST ERROR")
UNKNOWN = ("-",) * len(LIVE_HEAD)
#: What a table shows of an error.
ERROR_CHARS = 60
#: Of a schema: a row has no other fields.
COMPLETE = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True)
class RankRow:
    """A replica as of its last heartbeat: one loaded copy, or one that is being loaded or could not be. Counts are of
    generations, each choice of a job one."""

    __pydantic_config__: ClassVar[ConfigDict] = COMPLETE

    rank: str
    host: str
    pid: int
    state: RankState
    queue_depth: int
    runtime_inflight: int
    configured_target_inflight: int
    effective_target_inflight: int
    device: str
    last_error: str | None


@dataclass(frozen=True, slots=True)
class ModelRow:
    """A model of the catalogue. Counts are of jobs. The first two targets are sums over the `loaded_replicas`;
    `target_inflight` is what each is configured with, `replicas` what `genpool up` starts, `replica_max` how many there
    may be (0: any number). `ranks`: only where they are asked for."""

    __pydantic_config__: ClassVar[ConfigDict] = COMPLETE

    id: str
    object: Literal["model"]
    backend: str
    enabled: bool
    state: ModelState
    accepting_new_requests: bool
    queue_depth: int
    oldest_queued_seconds: float
    runtime_inflight: int
    configured_target_inflight: int
    effective_target_inflight: int
    loaded_replicas: int
    loading_replicas: int
    target_inflight: int
    replicas: int
    replica_max: int
    device: str
    last_error: str | None
    ranks: Sequence[RankRow] = field(default_factory=tuple)

    def data(self, *, ranks: bool) -> dict[str, Any]:
        """JSON-safe; with the rows of its ranks, if they are asked for."""
        fields = asdict(self)
        rows = fields.pop("ranks")
        return {**fields, "ranks": list(rows)} if ranks else fields

    def cells(self) -> tuple[str, ...]:
        """Under LIVE_HEAD."""
        return (
            self.state,
            str(self.loaded_replicas),
            str(self.runtime_inflight),
            str(self.effective_target_inflight),
            str(self.configured_target_inflight),
            f"{self.queue_depth} ({duration(self.oldest_queued_seconds)})" if self.queue_depth else "0",
            _short(self.last_error),
        )

    def rank_cells(self) -> Iterable[tuple[str, ...]]:
        """Under RANK_HEAD, a line a rank."""
        for row in self.ranks:
            counts = (row.runtime_inflight, row.effective_target_inflight, row.configured_target_inflight)
            yield (self.id, row.rank, row.state, *map(str, counts), row.device or "-", _short(row.last_error))


def model_rows(client: Client, models: Mapping[str, ModelSettings]) -> list[ModelRow]:
    """A row a model of the catalogue, in its order; one round trip. Raises StateUnavailable."""
    found = executors(client, list(models))
    return [model_row(model, of_model, found[model]) for model, of_model in models.items()]


def looked_at(settings: Settings) -> list[ModelRow]:
    """As `model_rows`, over a connection of its own."""
    client = connect(state_url(settings), max_connections=1)
    with closing(client):
        return model_rows(client, settings.models)


def model_row(model: str, settings: ModelSettings, executor: Executor) -> ModelRow:
    """The row of one model."""
    ranks = [_rank_row(rank) for rank in executor.ranks]
    loaded = [rank for rank in ranks if rank.state == LOADED]
    wanted = executor.wanted
    return ModelRow(
        id=model,
        object="model",
        backend=settings.backend,
        enabled=settings.enabled,
        state=cast(ModelState, wanted.state(executor.ranks)),
        accepting_new_requests=settings.enabled and wanted.takes_jobs,
        queue_depth=executor.survey.queued,
        oldest_queued_seconds=executor.survey.oldest_ms / 1000,
        runtime_inflight=executor.survey.running,
        configured_target_inflight=sum(rank.configured_target_inflight for rank in loaded),
        effective_target_inflight=sum(rank.effective_target_inflight for rank in loaded),
        loaded_replicas=len(loaded),
        loading_replicas=sum(rank.state == LOADING for rank in ranks),
        target_inflight=settings.target_inflight,
        replicas=settings.replicas,
        replica_max=settings.replica_max,
        device=settings.device,
        last_error=wanted.last_error or next((rank.last_error for rank in ranks if rank.last_error), None),
        ranks=ranks,
    )


def _rank_row(rank: Rank) -> RankRow:
    facts = rank.facts

    def count(name: str) -> int:
        return int(facts.get(name, 0))

    return RankRow(
        rank=rank.id,
        host=rank.host,
        pid=rank.pid,
        state=cast(RankState, rank.state),
        queue_depth=count("queue_depth"),
        runtime_inflight=count("runtime_inflight"),
        configured_target_inflight=count("configured_target_inflight"),
        effective_target_inflight=count("effective_target_inflight"),
        device=str(facts.get("device", "")),
        last_error=str(facts.get("last_error", "")) or None,
    )


def as_json(rows: Iterable[ModelRow], *, ranks: bool) -> str:
    """One line."""
    return json.dumps([row.data(ranks=ranks) for row in rows])


def _short(error: str | None) -> str:
    line = " ".join((error or "").split())
    return (line if len(line) <= ERROR_CHARS else f"{line[: ERROR_CHARS - 3]}...") or "-"
