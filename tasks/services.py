"""Everything a process needs to talk to the store, built once from its settings."""

from __future__ import annotations

from dataclasses import dataclass

from pool.store.connection import COMMAND_TIMEOUT_S, Client, connect
from pool.store.jobs import JobStore
from pool.store.sweeping import Sweeper
from tasks.catalogue import Catalogue
from tasks.config import Settings, state_url
from tasks.programs import Programs
from tasks.submission import Cards, Submitter


@dataclass(frozen=True, slots=True)
class Services:
    """The store's clients of one process; thread-safe. `settings`: as the process was started with; `catalogue`: the
    models as they are now; `programs`: None where `[programs]` is off."""

    settings: Settings
    catalogue: Catalogue
    client: Client
    store: JobStore
    cards: Cards
    submitter: Submitter
    sweeper: Sweeper
    programs: Programs | None = None

    def close(self) -> None:
        """Close all connections."""
        self.client.close()
        self.client.connection_pool.disconnect()


def open_services(settings: Settings, *, max_connections: int = 8, timeout_s: float = COMMAND_TIMEOUT_S) -> Services:
    """Build the services; connects on first use. `timeout_s`: how long each step of a command may take."""
    client = connect(state_url(settings), max_connections=max_connections, timeout_s=timeout_s)
    result_ttl_ms = settings.state.result_ttl_seconds * 1000
    store = JobStore(client, result_ttl_ms=result_ttl_ms, pending_per_model=settings.limits.pending_per_model)
    cards = Cards(client)
    catalogue = Catalogue(settings, client)
    sweeper = Sweeper(
        client,
        store,
        lease_ms=round(settings.worker.lease_seconds * 1000),
        max_deliveries=settings.worker.max_deliveries,
        result_ttl_ms=result_ttl_ms,
    )
    programs = Programs(client, store, settings, terms=sweeper.terms) if settings.programs.enabled else None
    if programs is not None:
        catalogue.on_change = lambda: programs.add(catalogue.known)
    submitter = Submitter(store, cards, settings, lambda: catalogue.models)
    return Services(settings, catalogue, client, store, cards, submitter, sweeper, programs)
