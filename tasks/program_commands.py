"""`genpool programs`: a table of Programs, live."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict

import click

from pool.store.connection import connect
from pool.store.jobs import JobStore
from pool.store.programs import ProgramStore
from tasks.config import Settings, load_settings, state_url
from tasks.own_runtime import require_state_server
from tasks.program_diagnostics import ModelFacts, ProgramFacts, diagnose
from tasks.queues import duration
from tasks.tables import print_table

HEAD = ("MODEL", "PROGRAM", "STATE", "STATUS", "RANK", "TOKENS", "TTL LEFT", "QUEUED", "REASON")


@click.command()
@click.option("--watch", type=click.FloatRange(min=0.1), metavar="SECONDS", help="Look again every so often.")
@click.option("--json", "as_json", is_flag=True, help="As JSON, with all figures, one line a look.")
@click.option("--limit", type=click.IntRange(0), default=100, show_default=True, help="Programs of each model.")
def programs(watch: float | None, as_json: bool, limit: int) -> None:
    """Show Programs: those that wait, in their order, then active and idle ones.

    PROGRAM is the stored id, a hash; REASON says why one waits, or what was last done with it and why; TTL LEFT is how
    long it keeps its place or, paused, is remembered.
    """
    settings = load_settings()
    require_state_server(settings)
    if not settings.programs.enabled:
        raise click.ClickException("Programs are off: [programs] enabled is false.")
    client = connect(state_url(settings), max_connections=1)
    with closing(client), suppress(KeyboardInterrupt):
        stores = _stores(settings, client)
        while True:
            found = [diagnose(store, model, limit=limit) for model, store in stores.items()]
            if watch is not None and not as_json:
                click.clear()  # only of a terminal
            _show(found, as_json=as_json)
            if watch is None:
                return
            time.sleep(watch)


def _stores(settings: Settings, client: object) -> dict[str, ProgramStore]:
    """Of all models of the catalogue: what a disabled one holds must end, too."""
    jobs = JobStore(
        client,
        result_ttl_ms=settings.state.result_ttl_seconds * 1000,
        pending_per_model=settings.limits.pending_per_model,
    )
    return {model: ProgramStore(client, jobs, model, settings.programs.of_model(model)) for model in settings.models}


def _show(found: Sequence[ModelFacts], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps([asdict(facts) for facts in found]))
        return
    print_table(HEAD, [_row(facts.model, program) for facts in found for program in facts.programs])
    for facts in found:
        hidden = facts.programs_total - len(facts.programs)
        if hidden > 0:
            click.echo(f"{facts.model}: {hidden} more")


def _row(model: str, program: ProgramFacts) -> Sequence[str]:
    """As cells under HEAD."""
    return (
        model,
        program.id,
        program.state,
        program.status,
        program.rank or "-",
        str(program.private_tokens if program.state == "active" else program.context_tokens),
        _time(program.ttl_left_seconds),
        _time(program.queue_age_seconds),
        " ".join(_words(program)),
    )


def _words(program: ProgramFacts) -> Iterable[str]:
    if program.decision is None and program.transition is not None:
        yield f"{program.transition}:"
    yield program.reason or "-"


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else duration(seconds)
