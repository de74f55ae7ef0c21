"""`genpool lanes` and `genpool lane`: what waits, in which lane and for whom; a generation's change of lane."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import asdict

import click

from pool.rules.fairness import LANES, Lane
from pool.store.connection import connect
from pool.store.ids import parse_ref
from pool.store.lane_views import Flow, backlog, change_lane
from tasks.config import load_settings, state_url
from tasks.own_runtime import require_state_server
from tasks.queues import duration
from tasks.services import open_services
from tasks.tables import print_table

HEAD = ("MODEL", "LANE", "KEY", "WAITING", "OLDEST", "IN FLIGHT", "WEIGHT", "VIRTUAL", "EXPECTED")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def lanes(as_json: bool) -> None:
    """Show what waits of each model, by lane and fairness key, in the order in which they are served.

    KEY is a hash of whom the work is charged to; VIRTUAL the slot time it was given, for weight 1: less is served
    first; EXPECTED what a choice of it is taken to need.
    """
    settings = load_settings()
    require_state_server(settings)
    client = connect(state_url(settings), max_connections=1)
    with closing(client):
        found = {model: backlog(client, model) for model in settings.models}
    if as_json:
        click.echo(json.dumps([{"model": model, **asdict(each)} for model, each in found.items()]))
        return
    print_table(HEAD, [_row(model, flow) for model, each in found.items() for flow in each.flows])
    for model, each in found.items():
        if each.hidden:
            click.echo(f"{model}: {each.hidden} keys more")


@click.command()
@click.argument("job")
@click.argument("lane", type=click.Choice(LANES))
def lane(job: str, lane: Lane) -> None:
    """Have JOB, which waits, wait in LANE: behind those of its key that were accepted before it."""
    settings = load_settings()
    require_state_server(settings)
    services = open_services(settings, max_connections=1)
    with closing(services):
        change_lane(services.client, services.store, parse_ref(job), lane)
    click.echo(f"{job} waits in lane {lane}.")


def _row(model: str, flow: Flow) -> tuple[str, ...]:
    """As cells under HEAD."""
    return (
        model,
        flow.lane,
        flow.key,
        str(flow.waiting),
        duration(flow.oldest_ms / 1000) if flow.waiting else "-",
        str(flow.in_flight),
        str(flow.weight or "-"),
        duration(flow.virtual_ms / 1000),
        duration(flow.guess_ms / 1000),
    )
