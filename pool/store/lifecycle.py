"""Whether a model is wanted, as an admin says it, and how that goes: one HASH a model.

| field | meaning |
|---|---|
| `wanted` | loaded or unloaded; absent: nobody has ever said, which means loaded |
| `phase` | unloading or unloaded, while it is not wanted |
| `next` | loaded: it is to be loaded again once it is unloaded |
| `change` | rises with each change of what is wanted, and with each further try to load it |
| `done` | the last change to loaded that a rank has carried out |
| `since_ms`, `until_ms` | when the change was asked for, or an unload was over; until when what runs may end |
| `failed` | 1: the load that was asked for has failed on all ranks |
| `last_error`, `error_rank`, `error_ms` | of the last load that failed, until one succeeds or the model is unloaded |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pool.errors import StateUnavailable
from pool.rules.model_states import state_of
from pool.store.connection import Client, state_errors
from pool.store.keys import ModelKeys, model_channel
from pool.store.ranks import Rank, RankRegistry
from pool.store.running import run
from pool.store.scripts import Command, script

#: How often a verb is run again because ranks came or went meanwhile.
TRIES = 20


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an admin wants of a model, as stored."""

    unloads: bool = False
    is_unloaded: bool = False
    loads_next: bool = False
    change: int = 0
    is_asked: bool = False
    has_failed: bool = False
    last_error: str = ""

    @property
    def takes_jobs(self) -> bool:
        """Whether jobs are accepted now."""
        return not (self.unloads or self.has_failed)

    def state(self, ranks: Sequence[Rank]) -> str:
        """The model's state with these live ranks."""
        return state_of(
            unloads=self.unloads,
            is_unloaded=self.is_unloaded,
            is_asked=self.is_asked,
            has_failed=self.has_failed,
            ranks=[rank.state for rank in ranks],
        )


@dataclass(frozen=True, slots=True)
class Changed:
    """What became of a wish. `code`: ok, same (it was so already) or later (once the unload is over); `change`: the
    number of the change that carries it out, for `later` the one before it."""

    code: str
    change: int


class Lifecycle:
    """One model's. All methods raise StateUnavailable."""

    def __init__(self, client: Client, model: str, shard: int = 0) -> None:
        self.client = client
        self.model = model
        self.keys = ModelKeys(f"{model}:{shard}")
        self._registry = RankRegistry(client, model, shard)

    def read(self) -> Wanted:
        """What is wanted now."""
        with state_errors():
            stored = self.client.hgetall(self.keys.model)
        return wanted_of(stored)

    def look(self) -> tuple[Wanted, list[Rank]]:
        """What is wanted now, and all live ranks, in whichever state."""
        return self.read(), self._registry.present()

    def load(self) -> Changed:
        """Have it loaded by every rank that has not; where one has failed to, that one tries again."""
        wanted, ranks = self.look()
        again = int("failed" in {rank.state for rank in ranks})
        return self._change(script("load")(model=self.keys.model, again=again and int(not wanted.unloads)))

    def unload(self, drain_ms: int) -> Changed:
        """Refuse jobs from now on, and have it unloaded; what runs may end within `drain_ms`."""
        return self._change(script("unload")(model=self.keys.model, drain=drain_ms))

    def _change(self, command: Command) -> Changed:
        with state_errors():
            code, change, *_ = run(self.client, command)
            # A repeated call is a reason to look again, too: a drain may end earlier.
            self.client.publish(model_channel(self.model), "change")
        return Changed(code.decode(), int(change))

    def load_failed(self, change: int, rank: str, error: str) -> bool:
        """A rank could not load it at this change; whether the model takes no jobs any more."""

        def build(ids: list[str]) -> Command:
            return script("load_failed")(
                model=self.keys.model,
                ranks=self.keys.ranks,
                records=[self.keys.rank(each) for each in ids],
                change=str(change),
                rank=rank,
                error=error,
                ids=ids,
            )

        return bool(self.with_ranks(build)[0] == b"failed")

    def loaded(self) -> None:
        """A rank has loaded it: no error is left."""
        with state_errors():
            self.client.hdel(self.keys.model, "last_error", "error_rank", "error_ms")

    def with_ranks(self, build: Callable[[list[str]], Command]) -> list[Any]:
        """Run a verb that declares all live ranks; its reply."""
        with state_errors():
            for _ in range(TRIES):
                ids = [rank.decode() for rank in self.client.zrange(self.keys.ranks, 0, -1)]
                reply: list[Any] = run(self.client, build(ids))
                if reply[0] != b"ranks":
                    return reply
        raise StateUnavailable("Ranks come and go too often at the moment.")


def wanted_of(stored: Mapping[bytes, bytes]) -> Wanted:
    """From the fields of the hash."""
    return Wanted(
        unloads=stored.get(b"wanted") == b"unloaded",
        is_unloaded=stored.get(b"phase") == b"unloaded",
        loads_next=b"next" in stored,
        change=int(stored.get(b"change", 0)),
        is_asked=stored.get(b"wanted") == b"loaded" and stored.get(b"done") != stored.get(b"change"),
        has_failed=b"failed" in stored,
        last_error=stored.get(b"last_error", b"").decode("utf-8", "replace"),
    )
