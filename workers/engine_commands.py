"""The commands that load an engine in their own process: `genpool sweep` and `genpool calibrate`.

Engines take long to import, and no other command needs them: so they are imported where they are used.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pool.errors import ConfigurationError
from tasks import launch
from tasks.config import Settings, config_file, load_settings
from tasks.payloads import MAX_TOKENS_LIMIT
from tasks.tables import print_table
from workers.weights import ensure_models

if TYPE_CHECKING:
    from workers.calibration.configuration import Tables

_FILE = click.Path(dir_okay=False, path_type=Path)
_SEED = click.option(
    "--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Of prompts and draws."
)


@click.command()
@click.argument("model")
@click.option("--levels", default="1,2,4,8,16", show_default=True, help="Generations at once, one level after another.")
@click.option("--requests", type=click.IntRange(1, 4096), default=16, show_default=True, help="Requests of each level.")
@click.option("--prompts", default="1-256", show_default=True, metavar="MIN-MAX", help="Lengths of prompts, in tokens.")
@click.option("--max-tokens", type=click.IntRange(1, MAX_TOKENS_LIMIT), default=32, show_default=True,
              help="Tokens of each answer.")  # fmt: skip
@_SEED
@click.option("--kv-tokens", type=click.IntRange(1), help="Positions of KV. Default: enough for all at once.")
@click.option("--overcommit", type=click.FloatRange(1), default=1.0, show_default=True,
              help="More than 1, with few --kv-tokens, makes sessions give way to each other.")  # fmt: skip
@click.option("--prefill-tokens", type=click.IntRange(1), help="Prompt tokens of a tick. Default: the longest prompt.")
@click.option("--cancels", type=click.IntRange(0), default=0, show_default=True,
              help="Requests that are cancelled in the middle of their answers.")  # fmt: skip
@click.option("--json", "json_file", type=_FILE, help="Write the result here.")
@click.option("--plot", type=_FILE, help="Draw it here, as SVG.")
def sweep(model: str, json_file: Path | None, plot: Path | None, **options: Any) -> None:
    """Run the same requests on MODEL at rising concurrency, each level on a fresh engine: what batching gains.

    Half of them are greedy, half draw with seeds. Exit code 1 when a level gave other tokens than the lowest one, which
    for that runs once more without --kv-tokens, --overcommit, --prefill-tokens and --cancels where they are given.
    """
    from workers.sweep_command import SweepOptions, sweep_model, table  # noqa: PLC0415
    from workers.sweep_plot import svg  # noqa: PLC0415

    settings, weights = _loadable(model)
    found = sweep_model(model, settings.models[model], weights, SweepOptions(**options))
    print_table(*table(found))
    click.echo(f"Saturated at {found.saturation_concurrency}.")
    if json_file is not None:
        json_file.write_text(found.as_json(), encoding="utf-8")
    if plot is not None:
        plot.write_text(svg(found), encoding="utf-8")
    if not found.corruption_free:
        raise click.ClickException("The tokens are not the same at every level.")


@click.command()
@click.argument("model")
@click.option("-c", "--concurrency", type=click.IntRange(1, 1024),
              help="Generations at once, at most. Default: the model's target_inflight.")  # fmt: skip
@click.option("--seconds", type=click.FloatRange(min=0, max=86_400), default=180.0, show_default=True,
              help="How long to measure; two rounds are always done.")  # fmt: skip
@click.option("--tolerance", type=click.FloatRange(min=0), default=15.0, show_default=True, metavar="PERCENT",
              help="Largest error of a point that no fit saw.")  # fmt: skip
@_SEED
@click.option("--from", "source", type=_FILE, metavar="FILE",
              help="Measure nothing: take the coefficients of this calibration.json.")  # fmt: skip
@click.option("--write", "merge", is_flag=True, help="Put them into the configuration file instead of printing them.")
@click.option("--json", "json_file", type=_FILE, help="Write calibration.json here.")
@click.option("--plot", type=_FILE, help="Draw measured against predicted here, as SVG.")
def calibrate(model: str, *, source: Path | None, merge: bool, **options: Any) -> None:
    """Measure what prefill and decoding cost on MODEL here, for `[programs.models.MODEL]`.

    The configuration goes to stdout, everything else to stderr. The model is loaded in this process: let no worker of
    this machine be busy meanwhile. Exit code 1 when a point that was held out is predicted worse than --tolerance says;
    then nothing is put into the configuration file.
    """
    settings = load_settings()
    launch.require_model(settings, model)
    if merge and not settings.programs.enabled:
        raise ConfigurationError(
            "programs.enabled is false, so coefficients would have no effect: set it first.", param="programs.enabled"
        )
    if source is not None:
        if options["json_file"] or options["plot"]:
            raise click.UsageError("--from measures nothing that --json or --plot could show.")
        _configure(model, _read(source), merge=merge)
        return
    _calibrate(model, merge=merge, **options)


def _read(source: Path) -> Tables:
    from workers.calibration.configuration import tables as as_tables  # noqa: PLC0415
    from workers.calibration.document import read_coefficients  # noqa: PLC0415

    found = read_coefficients(source)
    return as_tables(found.prefill, found.decode, alpha_given=found.alpha_given)


def _calibrate(
    model: str, *, merge: bool, tolerance: float, json_file: Path | None, plot: Path | None, **options: Any
) -> None:
    from workers.calibration import command  # noqa: PLC0415
    from workers.calibration.configuration import tables as as_tables  # noqa: PLC0415
    from workers.calibration.document import as_json  # noqa: PLC0415
    from workers.calibration.plot import svg  # noqa: PLC0415

    settings, weights = _loadable(model)
    found, deployment = command.calibrate_model(
        model, settings.models[model], weights, progress=lambda line: click.echo(line, err=True), **options
    )
    print_table(*command.coefficients_table(found), err=True)
    print_table(*command.held_out_table(found), err=True)
    for line in command.remarks(found):
        click.echo(line, err=True)
    if json_file is not None:
        json_file.write_text(as_json(model, deployment.as_metadata(), found), encoding="utf-8")
    if plot is not None:
        plot.write_text(svg(model, found), encoding="utf-8")
    missed = found.missed(tolerance / 100)
    if missed:
        named = "; ".join(f"{check.what} {check.error:+.1%}" for check in missed)
        raise click.ClickException(f"Held-out points are predicted worse than {tolerance:g} %: {named}.")
    values = as_tables(found.prefill_cost_model, found.decode_throughput_model, alpha_given=found.alpha is not None)
    _configure(model, values, merge=merge)


def _configure(model: str, values: Tables, *, merge: bool) -> None:
    from workers.calibration.configuration import fragment, write  # noqa: PLC0415

    if not merge:
        click.echo(fragment(model, values), nl=False)
        return
    file = config_file()
    write(file, model, values)
    click.echo(f"Written to {file}; workers and API processes read it when they start.", err=True)


def _loadable(model: str) -> tuple[Settings, Path | None]:
    """The settings, and the model's weights, fetched (None: made in code)."""
    settings = load_settings()
    launch.require_model(settings, model)
    return settings, ensure_models(settings, [model]).get(model)
