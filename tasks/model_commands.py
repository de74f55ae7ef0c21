"""`genpool models load | unload | reload`: what an admin may ask of models, straight from the state server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict

import click

from tasks.config import Settings, load_settings
from tasks.lifecycle import ModelAdmin, Standing
from tasks.own_runtime import require_state_server
from tasks.services import Services, open_services

_NO_WAIT = click.option("--no-wait", is_flag=True, help="Do not wait until it is done.")
_TIMEOUT = click.option(
    "--timeout", type=click.FloatRange(0), default=600.0, show_default=True, metavar="SECONDS", help="Longest wait."
)


@click.command()
@click.argument("model")
@_NO_WAIT
@_TIMEOUT
def load(model: str, no_wait: bool, timeout: float) -> None:
    """Have MODEL's workers load it; while it is being unloaded, as soon as that is over."""
    with _admin() as admin:
        _show(admin, admin.load(model), None if no_wait else timeout)


@click.command()
@click.argument("model")
@click.option(
    "--drain-timeout",
    type=click.FloatRange(0, 86_400),
    metavar="SECONDS",
    help="How long what runs may take. Default: the model's drain_timeout_seconds.",
)
@_NO_WAIT
@_TIMEOUT
def unload(model: str, drain_timeout: float | None, no_wait: bool, timeout: float) -> None:
    """Unload MODEL: new requests are refused, those that wait fail, those that run may end, then it is freed."""
    with _admin() as admin:
        _show(admin, admin.unload(model, drain_timeout), None if no_wait else timeout)


@click.command("reload")
def reload_models() -> None:
    """Read the models of the configuration file again, in every API and worker process. Prints as JSON what has
    changed since it was read last; other settings count from each process's next start."""
    with _services_of(load_settings()) as services:
        changes = asdict(services.catalogue.reload())
    # This process began with the file as it is now: of what the others began with beside models it knows nothing.
    del changes["needs_restart"]
    click.echo(json.dumps(changes, indent=2))


@contextmanager
def _admin() -> Iterator[ModelAdmin]:
    with _services_of(load_settings()) as services:
        yield ModelAdmin(services)


def _services_of(settings: Settings) -> closing[Services]:
    require_state_server(settings)
    return closing(open_services(settings, max_connections=1))


def _show(admin: ModelAdmin, standing: Standing, timeout_s: float | None) -> None:
    """Its state, once that is what was asked for; exit code 1 when it is not so in time."""
    if timeout_s is not None:
        standing = admin.settle(standing, timeout_s)
    shown = standing.shown()
    click.echo(f"{standing.model}: {shown['state']}")
    if timeout_s is not None and shown["state"] != shown["wanted"]:
        raise click.ClickException(f"{standing.model} is not {shown['wanted']} after {timeout_s:g} s.")
