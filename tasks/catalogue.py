"""The models of a process as they are now: `[models.*]` of its configuration file, which may be read again meanwhile.

An admin has one process read its file and publish what is in there, by a version and a hash. Every other process sees
the version rise, reads its own file, and goes on with it where it is the same. Where it is not, or cannot be used, the
process keeps the models that it had, says so, and looks again. What a model is loaded with stays until it is loaded
again; what the file says beside models counts from the next start.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pool.errors import ConfigurationError
from pool.settings import ModelSettings
from pool.store.catalogues import publish, published, remember
from pool.store.connection import Client
from tasks.config import SHIPPED_MODELS, Configuration, Settings, load_configuration

log = logging.getLogger("genpool.catalogue")

#: How often a process asks for the version, and how often it looks at its file again after that was not as published.
LOOK_S = 1.0
AGAIN_S = 5.0
#: Why a process has not taken over a catalogue.
INVALID, DIFFERS = "catalogue_invalid", "catalogue_differs"

#: What is known of a model that was removed before this process began: nobody loads it.
REMOVED = ModelSettings(enabled=False, source="random:removed")

Tables = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Changes:
    """What reading the file again has changed: ids of models, the changed fields of those that were updated, and other
    settings of the file that count from the next start."""

    version: int
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    updated: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()
    changed_fields: Mapping[str, list[str]] = field(default_factory=dict)
    needs_restart: tuple[str, ...] = ()


class Catalogue:
    """Thread-safe: what it gives are whole values. `load`: reads the configuration."""

    def __init__(
        self, settings: Settings, client: Client, load: Callable[[], Configuration] = load_configuration
    ) -> None:
        self._settings = settings
        self._client = client
        self._load = load
        #: The models now. Replaced, never changed.
        self.models: Mapping[str, ModelSettings] = dict(settings.models)
        #: Every model there has been: what a removed one holds must end, too. It only grows.
        self.known = list(settings.models)
        self._last: dict[str, ModelSettings] = dict(settings.models)
        #: The published version that these are of, as far as is known; and why a later one was not taken over, "" or
        #: INVALID or DIFFERS.
        self.version = 0
        self.error = ""
        self.on_change: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        #: Version and hash that this process has taken over, or began with; None before it has looked.
        self._seen: tuple[int, str] | None = None
        self._next_s = 0.0

    def last(self, model: str) -> ModelSettings:
        """A known model's settings as they are now; as they were last, of one that was removed."""
        return self._last[model]

    def reload(self) -> Changes:
        """Read the file again, go on with it, and have all other processes do so.

        Raises ConfigurationError, which names the field, where it cannot be used, and StateUnavailable: nothing has
        changed then.
        """
        with self._lock:
            found = self._load()
            self._remember(found.settings.models)
            version, former = self._publish(found.file_models)
            changes = self._changes(version, former, found)
            self._take(found, version, digest_of(found.file_models))
        log.warning("catalogue %d: %d models", version, len(self.models))
        return changes

    def follow(self) -> None:
        """A maintenance chore: see whether there is another catalogue, and take it over. Raises StateUnavailable."""
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + LOOK_S
        seen = published(self._client)
        if self._seen is None or seen is None:
            self._begin()
        elif seen != self._seen:
            with self._lock:
                self._follow(*seen)

    def _begin(self) -> None:
        """What a process starts with is its own file, whatever was published before; so it is with a state server that
        came back empty. Where the file was read again since this process has, before it first looked, it follows."""
        try:
            found = self._load()
        except ConfigurationError:
            # It was changed since the start: what it holds is published when an admin says so.
            found = None
        tables = {} if found is None else found.file_models
        self.version, _ = self._publish(tables, first=True)
        self._remember(self.models)
        with self._lock:
            self._seen = published(self._client)
            if found is None or self._seen is None or found.settings.models == self.models:
                return
            version, digest = self._seen
            if digest == digest_of(tables):
                self._take(found, version, digest)

    def _follow(self, version: int, digest: str) -> None:
        try:
            found = self._load()
        except ConfigurationError as error:
            self._stay(version, INVALID, error.message)
            return
        if digest_of(found.file_models) != digest:
            self._stay(version, DIFFERS, "this process's file has other models than the one that was read again")
            return
        self._remember(found.settings.models)
        self._take(found, version, digest)
        log.warning("catalogue %d: %d models", version, len(self.models))

    def _remember(self, models: Mapping[str, ModelSettings]) -> None:
        """Know those, too, that were removed before this process began, and still hold something."""
        lost = [name for name in remember(self._client, list(models)) if name not in self.known]
        if lost:
            self._last = dict.fromkeys(lost, REMOVED) | self._last
            self.known.extend(lost)
            self.on_change()

    def _stay(self, version: int, error: str, why: str) -> None:
        if self.error != error:
            log.error("catalogue %d: %s: %s; the models stay as they were", version, error, why)
        self.error = error
        self._next_s = time.monotonic() + AGAIN_S

    def _take(self, found: Configuration, version: int, digest: str) -> None:
        models = found.settings.models
        self._last = self._last | models
        for name in models:
            if name not in self.known:
                self.known.append(name)
        self.models, self.version, self.error = dict(models), version, ""
        self._seen = version, digest
        self.on_change()

    def _publish(self, tables: Tables, *, first: bool = False) -> tuple[int, str]:
        return publish(self._client, canonical(tables), digest_of(tables), first=first)

    def _changes(self, version: int, former: str, found: Configuration) -> Changes:
        """Against the models of this process; of one that has only just started, whose are the file's, against what was
        published before."""
        before = {name: model.model_dump() for name, model in self.models.items()}
        if self._seen is None and former:
            tables = merged(json.loads(former))
            before = {name: ModelSettings.model_validate(table).model_dump() for name, table in tables.items()}
        after = {name: model.model_dump() for name, model in found.settings.models.items()}
        fields = {
            name: sorted(key for key in after[name] if after[name][key] != before[name].get(key))
            for name in after
            if name in before
        }
        updated = {name: names for name, names in fields.items() if names}
        return Changes(
            version,
            added=tuple(name for name in after if name not in before),
            removed=tuple(name for name in before if name not in after),
            updated=tuple(updated),
            unchanged=tuple(name for name in fields if name not in updated),
            changed_fields=updated,
            needs_restart=tuple(_differing(_others(self._settings), _others(found.settings))),
        )


def merged(tables: Tables) -> dict[str, dict[str, Any]]:
    """The file's tables over those that are shipped."""
    names = dict.fromkeys([*SHIPPED_MODELS, *tables])
    return {name: {**SHIPPED_MODELS.get(name, {}), **tables.get(name, {})} for name in names}


def canonical(tables: Tables) -> str:
    """The same text for the same tables."""
    return json.dumps(tables, sort_keys=True, separators=(",", ":"), default=str)


def digest_of(tables: Tables) -> str:
    """What two processes compare."""
    return hashlib.sha256(canonical(tables).encode()).hexdigest()


def _others(settings: Settings) -> dict[str, Any]:
    return settings.model_dump(exclude={"models"})


def _differing(before: Mapping[str, Any], after: Mapping[str, Any], path: str = "") -> list[str]:
    """Dotted names of what is not the same."""
    found: list[str] = []
    for name in dict.fromkeys([*before, *after]):
        one, other = before.get(name), after.get(name)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            found += _differing(one, other, f"{path}{name}.")
        elif one != other:
            found.append(f"{path}{name}")
    return found
