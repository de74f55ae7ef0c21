"""`genpool keys`: API keys and the lines to store of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from pool.rules.fairness import LANES
from tasks.api_keys import ADMIN, LABEL, LIMITS, METRICS, USER, KeyLimits, new_key


def _limit(name: str, text: str) -> Callable[[Any], Any]:
    """The option of a key's limit, within its bounds."""
    least, most = LIMITS[name]
    kind = click.FloatRange(least, most) if name.endswith("_seconds") else click.IntRange(int(least), int(most))
    return click.option(f"--{name.replace('_', '-')}", name, type=kind, help=text)


@click.group()
def keys() -> None:
    """API keys."""


@keys.command("new")
@click.argument("name")
@click.option("--admin", "kind", flag_value=ADMIN, help="For what is the operator's, too.")
@click.option("--metrics", "kind", flag_value=METRICS, help="For /metrics alone: what a scraper needs.")
@_limit("pending", "Generations of a model at once. Default: limits.pending_per_key.")
@_limit("weight", "Share beside other keys. Default: limits.weight_per_key.")
@_limit("inflight", "Generations of a model in flight while others wait. Default: limits.inflight_per_key.")
@click.option("--highest-lane", type=click.Choice(LANES), help="First lane that its requests may use. Default: any.")
@click.option("--fairness-keys", type=click.IntRange(0, 1), help="1: its requests may name fairness keys.")
@_limit("max_priority", "Highest priority of a Program's requests. Default: any.")
@_limit("min_deadline_seconds", "Shortest deadline of a Program's requests. Default: any.")
@_limit("max_programs", "Programs of a model at once. Default: any number.")
def new_api_key(name: str, kind: str | None, **limits: Any) -> None:
    """Make an API key for NAME, to whom its jobs will belong. It is printed once and kept nowhere: what is stored, in
    server.keys_file, is the line."""
    key, line = new_key(name, kind or USER, KeyLimits(**limits))
    click.echo(f"key   {key}")
    click.echo(f"{LABEL}  {line}")
