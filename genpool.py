"""The command line: `genpool up | api | worker | generate | submit | status | cancel | tail | queues | programs |
dead-letters | check | doctor | sweep | calibrate | config | models | keys`.

Each command checks the settings, then hands over to the layer that does the work. Deliberate errors end as one line on
stderr and exit code 1, wrong usage as exit code 2.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click

from pool.errors import GenpoolError
from pool.rules.fairness import LANES, NORMAL, Lane
from pool.settings import ModelSettings
from pool.store.connection import connect
from tasks import dead_letters, job_commands, launch, model_commands, model_rows
from tasks.api_keys import KeyRing, check_exposed
from tasks.client import Client
from tasks.config import CONFIG_VARIABLE, Settings, load_configuration, load_settings, state_url
from tasks.config_docs import markdown
from tasks.doctor import examine, failures
from tasks.following import Following
from tasks.key_commands import keys
from tasks.lane_commands import lane as lane_command
from tasks.lane_commands import lanes
from tasks.own_runtime import require_state_server, state_server_hint
from tasks.payloads import MAX_SEED, MAX_TOKENS_LIMIT
from tasks.program_commands import programs
from tasks.queues import HEAD, Queue, Queues
from tasks.queues import as_json as queues_as_json
from tasks.rerun import audit_texts
from tasks.supervisor import Supervisor
from tasks.tables import print_table
from tasks.urls import masked
from workers.engine_commands import calibrate, sweep
from workers.weights import SOURCES, cached_path, ensure_models, known_source, weights_fault


class _Group(click.Group):
    """Shows deliberate errors as one line."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except GenpoolError as error:
            raise click.ClickException(masked(error.message)) from error


_MODEL = click.option("--model", help="Model to run. Default: the first enabled one.")
_MAX_TOKENS = click.option(
    "--max-tokens", type=click.IntRange(1, MAX_TOKENS_LIMIT), help="Most tokens to generate. Default: as many as fit."
)
_TEMPERATURE = click.option("--temperature", type=click.FloatRange(0, 2), help="0 is greedy. Default: 1.")
_SEED = click.option(
    "--seed", type=click.IntRange(0, MAX_SEED), help="Makes the result repeatable. Default: a random one."
)
_OPTION = click.option(
    "-o",
    "--option",
    multiple=True,
    metavar="NAME=VALUE",
    help="Any other sampling option, e.g. top_p=0.9. Repeatable. Default: none.",
)
_ALL = click.option("--all", "everything", is_flag=True, help="All dead letters instead of single ones.")


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="Configuration file (TOML).")
@click.version_option(package_name="genpool")
def cli(config_file: Path | None) -> None:
    """A durable job queue for language-model generation."""
    if config_file is not None:
        os.environ[CONFIG_VARIABLE] = str(config_file.absolute())  # the processes started from here read it too


@cli.command()
@click.option("--port", type=click.IntRange(0, 65535), help="Port of the API. 0: a free one. Default: server.port.")
@click.option("--flower", is_flag=True, help="Also run Flower, Celery's monitor.")
@click.option("--flower-port", type=click.IntRange(1, 65535), default=5555, show_default=True)
def up(port: int | None, flower: bool, flower_port: int) -> None:
    """Run everything: state server, one worker per enabled model, the API."""
    settings = load_settings()
    host = settings.server.host
    check_exposed(host, keyed=KeyRing(settings).required)
    port = launch.claim_port(host, settings.server.port if port is None else port)
    ensure_models(settings, launch.enabled_models(settings))
    server = launch.embedded_server(settings)
    if server is None:
        require_state_server(settings)
    try:
        plan = launch.stages(settings, server=server, port=port, flower_port=flower_port if flower else None)
        launch.remove_metrics(settings, port)
        supervisor = Supervisor(plan)
        following = Following(settings, supervisor, events=flower)
        url = launch.base_url(host, port)
        beside = f"; Flower is at {launch.base_url(launch.FLOWER_HOST, flower_port)}" if flower else ""

        def is_ready() -> None:
            supervisor.output.line(launch.ready_line(settings, url) + beside)
            following.start()

        try:
            code = supervisor.run(is_ready, each_turn=following.turn)
        finally:
            following.stop()
        launch.remove_metrics(settings, port)
    finally:
        if server is not None:
            server.release()
    sys.exit(code)


@cli.command()
def api() -> None:
    """Run the API alone, at server.host and server.port: for service managers and containers, beside workers and a
    state server that run elsewhere."""
    settings = load_settings()
    check_exposed(settings.server.host, keyed=KeyRing(settings).required)
    state_url(settings)  # a password's file that cannot be read is said here, in one line
    launch.exec_api()


@cli.command()
@click.argument("model")
@click.option(
    "-c",
    "--concurrency",
    type=click.IntRange(1, 1024),
    help="Generations in flight at most. Default: the model's target_inflight.",
)
@click.option("-n", "--name", help="Celery node name, e.g. second@%h. Default: MODEL@HOST.")
@click.option(
    "--device", metavar="DEVICES", help="What it sees as CUDA_VISIBLE_DEVICES, e.g. 0 or 0,1. Default: the model's."
)
def worker(model: str, concurrency: int | None, name: str | None, device: str | None) -> None:
    """Run a Celery worker that serves MODEL. A second one of the same host registers as MODEL@HOST-2 by itself; for
    `celery inspect` and `control -d` to tell the two apart, give one a name with -n."""
    settings = load_settings()
    launch.require_model(settings, model)
    device = launch.checked_device(settings.models[model].device_of(0) if device is None else device)
    ensure_models(settings, [model])
    hint = state_server_hint(settings)
    if hint:
        click.echo(f"genpool: {hint}", err=True)  # Celery keeps trying: the server may be on its way
    launch.exec_worker(model, concurrency=concurrency, name=name, device=device)


@cli.command()
@click.argument("prompt")
@_MODEL
@_MAX_TOKENS
@_TEMPERATURE
@_SEED
@_OPTION
def generate(prompt: str, **options: Any) -> None:
    """Generate an answer to PROMPT and print it as it comes."""
    settings = load_settings()
    request = job_commands.build_request(settings, prompt, **options)
    ensure_models(settings, [request.model])
    with _exit_on_signals():
        job_commands.generate(settings, request, sys.stdout)


@cli.command()
@click.argument("prompt")
@_MODEL
@_MAX_TOKENS
@_TEMPERATURE
@_SEED
@_OPTION
@click.option("--lane", type=click.Choice(LANES), default=NORMAL, help="Lane in which it waits. Default: normal.")
def submit(prompt: str, lane: Lane, **options: Any) -> None:
    """Queue PROMPT and print the job's id."""
    settings = load_settings()
    request = job_commands.build_request(settings, prompt, **options).model_copy(update={"lane": lane})
    with _client(settings) as client:
        click.echo(client.submit(request))


@cli.command()
@click.argument("job")
def status(job: str) -> None:
    """Print a job's record as JSON."""
    with _client(load_settings()) as client:
        click.echo(job_commands.status(client.view(job)))


@cli.command()
@click.argument("job")
def cancel(job: str) -> None:
    """Cancel a job and print its record as JSON."""
    with _client(load_settings()) as client:
        client.cancel(job)
        click.echo(job_commands.status(client.view(job)))


@cli.command()
@click.argument("job")
def tail(job: str) -> None:
    """Print a job's text so far and follow it to the end."""
    with _client(load_settings()) as client:
        job_commands.tail(client, job, sys.stdout)


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.option("--markdown", "as_markdown", is_flag=True, help="The documentation of all settings.")
def config(as_json: bool, as_markdown: bool) -> None:
    """Print every setting in force and where it comes from."""
    if as_json and as_markdown:
        raise click.UsageError("--json and --markdown exclude each other.")
    if as_markdown:
        click.echo(markdown(), nl=False)
        return
    effective = load_configuration().effective()
    if as_json:
        click.echo(json.dumps([{"field": e.field, "value": e.value, "origin": e.origin} for e in effective], indent=2))
        return
    for entry in effective:
        click.echo(f"{entry.field} = {json.dumps(entry.value, ensure_ascii=False)}  # {entry.origin}")


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.option("--rerun", type=click.IntRange(min=0), default=0, metavar="N",
              help="Also run up to N ended jobs of each model again and compare their texts (I2).")  # fmt: skip
def check(as_json: bool, rerun: int) -> None:
    """Audit the live state: every job reachable, every log whole, nothing leaked. Exit code 1 with violations."""
    settings = load_settings()
    require_state_server(settings)
    found = job_commands.audit(settings)
    if rerun:
        again = audit_texts(settings, rerun)
        found += again.differing
        click.echo(f"{again.compared} texts compared, {again.not_run} jobs could not be run again.", err=True)
    if as_json:
        click.echo(json.dumps([asdict(violation) for violation in found], indent=2))
    else:
        for violation in found:
            click.echo(f"{violation.invariant}  {violation.subject}  {violation.detail}")
        click.echo(f"{len(found)} violations." if found else "No violation.")
    sys.exit(1 if found else 0)


@cli.command()
@click.option("--port", type=click.IntRange(1, 65535), help="Port of the API to look at. Default: server.port.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def doctor(port: int | None, as_json: bool) -> None:
    """Check versions, state server, models, memory, port, folders and clock. Exit code 1 when something is wrong."""
    settings = load_settings()
    if port is not None:
        settings = settings.model_copy(update={"server": settings.server.model_copy(update={"port": port})})
    found = list(examine(settings, weights_fault))
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in found], indent=2))
    else:
        print_table(("CHECK", "STATUS", "FOUND"), [(each.check, each.status, masked(each.detail)) for each in found])
        for each in found:
            if each.remedy:
                click.echo(f"{each.check}: {each.remedy}")
    sys.exit(1 if failures(found) else 0)


cli.add_command(sweep)
cli.add_command(calibrate)


@cli.command()
@click.option("--watch", type=click.FloatRange(min=0.1), metavar="SECONDS", help="Look again every so often.")
@click.option("--json", "as_json", is_flag=True, help="As JSON, one line a look.")
def queues(watch: float | None, as_json: bool) -> None:
    """Show each model's queue: depth, age of the oldest job, slots, and rates since the look before.

    Without --watch, rates are those of one second.
    """
    settings = load_settings()
    require_state_server(settings)
    client = connect(state_url(settings), max_connections=1)
    look = Queues(settings, client).look
    with closing(client), suppress(KeyboardInterrupt):
        if watch is None:
            look()
            time.sleep(1)
            _show_queues(look(), as_json)
            return
        while True:
            found = look()
            if not as_json:
                click.clear()  # only of a terminal
            _show_queues(found, as_json)
            time.sleep(watch)


def _show_queues(found: list[Queue], as_json: bool) -> None:
    if as_json:
        click.echo(queues_as_json(found))
    else:
        print_table(HEAD, [queue.row() for queue in found])


@cli.group("dead-letters")
def dead_letters_group() -> None:
    """Jobs that were given up because they kept losing their workers."""


@dead_letters_group.command("list")
@click.option("--model", help="Of this model only.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def list_dead_letters(model: str | None, as_json: bool) -> None:
    """List them, oldest first. RECORD says whether the job itself can still be read."""
    settings = load_settings()
    require_state_server(settings)
    letters = dead_letters.listed(settings, model)
    if as_json:
        click.echo(dead_letters.as_json(letters))
        return
    rows = [
        (
            letter.ref.model,
            str(letter.ref),
            letter.code,
            str(letter.losses),
            letter.rank or "-",
            datetime.fromtimestamp(letter.at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%SZ"),
            "kept" if letter.record_exists else "expired",
        )
        for letter in letters
    ]
    print_table(("MODEL", "JOB", "CODE", "LOSSES", "LAST RANK", "WHEN", "RECORD"), rows)


@dead_letters_group.command("retry")
@click.argument("jobs", nargs=-1, metavar="[ID]...")
@_ALL
@click.option("--model", help="With --all: the model whose jobs are submitted again.")
def retry_dead_letters(jobs: tuple[str, ...], everything: bool, model: str | None) -> None:
    """Submit these jobs again, as new ones with the same input, options and seed, and print `OLD -> NEW`.

    Exit code 1 when one of them could not be submitted; its dead letter stays.
    """
    _check_choice(jobs, everything, model)
    if everything and model is None:
        raise click.UsageError("--all needs --model.")
    settings = load_settings()
    require_state_server(settings)
    _report(dead_letters.retry(settings, jobs, model), "{} -> {}")


@dead_letters_group.command("drop")
@click.argument("jobs", nargs=-1, metavar="[ID]...")
@_ALL
@click.option("--model", help="With --all: of this model only.")
def drop_dead_letters(jobs: tuple[str, ...], everything: bool, model: str | None) -> None:
    """Remove dead letters; the jobs' records stay as long as any. Exit code 1 when an id has none."""
    _check_choice(jobs, everything, model)
    settings = load_settings()
    require_state_server(settings)
    _report(dead_letters.drop(settings, jobs, model), "dropped {}")


def _check_choice(jobs: tuple[str, ...], everything: bool, model: str | None) -> None:
    if bool(jobs) == everything:
        raise click.UsageError("Give either ids or --all.")
    if jobs and model is not None:
        raise click.UsageError("--model goes with --all; an id says its model.")


def _report(outcomes: Iterable[dead_letters.Outcome], form: str) -> None:
    """One line an outcome, failures on stderr; exit code 1 when there are any."""
    failed = False
    for job, outcome in outcomes:
        if isinstance(outcome, GenpoolError):
            failed = True
            click.echo(f"{job}: {outcome.message}", err=True)
        else:
            click.echo(form.format(job, outcome))
    sys.exit(1 if failed else 0)


@cli.group()
def models() -> None:
    """Models and their weights."""


@models.command("list")
@click.option("--ranks", is_flag=True, help="A line a replica instead.")
@click.option("--json", "as_json", is_flag=True, help="How they stand as JSON, as GET /v1/admin/models has it.")
def list_models(ranks: bool, as_json: bool) -> None:
    """List the catalogue, and how each model stands where the state server answers."""
    settings = load_settings()
    if ranks or as_json:
        require_state_server(settings)
    answers = ranks or as_json or state_server_hint(settings) is None
    found = {row.id: row for row in model_rows.looked_at(settings)} if answers else {}
    if as_json:
        click.echo(model_rows.as_json(found.values(), ranks=ranks))
    elif ranks:
        print_table(model_rows.RANK_HEAD, [cells for row in found.values() for cells in row.rank_cells()])
    else:
        lines = [
            (*_weights(name, model), *(found[name].cells() if name in found else model_rows.UNKNOWN))
            for name, model in settings.models.items()
        ]
        print_table(("NAME", "SOURCE", "CACHED", "SIZE", "LICENCE", "ENABLED", *model_rows.LIVE_HEAD), lines)


def _weights(name: str, model: ModelSettings) -> tuple[str, ...]:
    """Name, source, whether that is cached, its size and licence, whether the model is enabled."""
    source = model.gguf_source or ""
    known = known_source(source)
    path = cached_path(source) if source else None
    published = SOURCES.get(source)
    size_bytes = published.size_bytes if published else path.stat().st_size if path else None
    return (
        name,
        model.shown_source,
        "-" if not source else "yes" if path else "no",
        f"{size_bytes / 2**20:.0f} MiB" if size_bytes is not None else "-",
        known.licence if known else "-",
        "yes" if model.enabled else "no",
    )


@models.command()
@click.argument("names", nargs=-1)
def pull(names: tuple[str, ...]) -> None:
    """Fetch the weights of NAMES (default: all enabled models) into the model cache."""
    settings = load_settings()
    for name in names:
        launch.require_model(settings, name)
    for name, path in ensure_models(settings, names or launch.enabled_models(settings)).items():
        click.echo(f"{name}: {path}")


for command in (model_commands.load, model_commands.unload, model_commands.reload_models):
    models.add_command(command)
cli.add_command(keys)
cli.add_command(programs)
cli.add_command(lanes)
cli.add_command(lane_command)


def _client(settings: Settings) -> closing[Client]:
    require_state_server(settings)
    return closing(Client(settings))


@contextmanager
def _exit_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP leave the block through its `with` blocks, which stop what was started. Afterwards no signal
    changes anything: the process is at its end, and Python's own shutdown would show such an exit as a traceback."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        signal.signal(number, _exit_on_signal)
    try:
        yield
    finally:
        for number in (*numbers, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)


def _exit_on_signal(number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def main() -> None:
    """The `genpool` command."""
    cli(prog_name="genpool")


if __name__ == "__main__":
    main()
