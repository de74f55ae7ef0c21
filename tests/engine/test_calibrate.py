"""`genpool calibrate`: what it times is what it says, and its files are those that are read again."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from click.testing import CliRunner

from genpool import cli
from pool.errors import GenerationFailed, InvalidRequest
from pool.program_settings import DecodeThroughputModel, PrefillCostModel
from pool.rules.admission import Budgets
from pool.rules.programs.ttl import decode_throughput, prefill_seconds
from tasks.config import load_configuration
from tasks.ports import Member, MemberError, StepResult
from tests.scripted.blocks import BlockEngine
from workers.calibration.measuring import LEAST_ROUNDS, Bench, measure
from workers.calibration.plan import Room
from workers.calibration.results import DECODE, MISS, PREFILL, calibrated
from workers.engines import BACKENDS
from workers.loop import BatchingLoop

PREFILL_COSTS = PrefillCostModel(
    intercept_seconds=0.02, linear_seconds_per_1k_tokens=0.5, quadratic_seconds_per_1k_tokens_squared=0.0
)
DECODE_COSTS = DecodeThroughputModel(
    fixed_step_seconds=0.01, batch_step_seconds_per_request=0.002, context_step_seconds_per_token=1e-6
)
ROOM = Room(longest_tokens=2048, kv_positions=8192, sessions=4, grid=16, chunk_tokens=512)


class Timed(BlockEngine):
    """An engine that takes exactly as long as two cost models say, on a clock of its own; `slowed`: and this many times
    as long in three of five seconds."""

    def __init__(self, slowed: float = 1.0) -> None:
        super().__init__(blocks=ROOM.kv_positions // 16, max_sessions=ROOM.sessions)
        self.now_s = 0.0
        self._slowed = slowed

    def step(self, batch: Sequence[Member]) -> list[StepResult]:
        decoding = [member for member in batch if len(member.tokens) == 1 and member.start > 0]
        chunks = [member for member in batch if member not in decoding]
        taken_s = 0.0
        if decoding:
            context = sum(member.start + 1 for member in decoding)
            taken_s += len(decoding) / decode_throughput(DECODE_COSTS, len(decoding), context)
        for member in chunks:
            through, before = member.start + len(member.tokens), member.start
            taken_s += prefill_seconds(PREFILL_COSTS, through) - prefill_seconds(PREFILL_COSTS, before)
        self.now_s += taken_s * (self._slowed if self.now_s % 5 < 3 else 1.0)
        return super().step(batch)

    def clock(self) -> float:
        """Its own time."""
        return self.now_s


def bench_of(engine: BlockEngine, clock: Any, **budgets: Any) -> Bench:
    """On a loop without reuse, as the command makes it."""
    bounds = Budgets(
        max_active_sessions=4,
        max_batch_size=4,
        **{"max_prefill_tokens_per_tick": ROOM.chunk_tokens} | budgets,
    )
    loop = BatchingLoop(engine, bounds, 4, reuse="off")
    return Bench(loop, np.arange(20, 200, dtype=np.int32), seed=1, clock=clock)


def test_a_machine_of_known_costs_is_found_again() -> None:
    """Prefill and decode to rounding; alpha is the part of a mixed prefill's time that decode steps took; all held-out
    points are right."""
    engine = Timed()
    lines: list[str] = []
    found = measure(bench_of(engine, engine.clock), ROOM, seconds=60, seed=3, progress=lines.append, clock=engine.clock)
    result = calibrated(found)
    exact = {"rel": 1e-3, "abs": 1e-8}
    assert result.prefill.coefficients == pytest.approx((0.02, 0.5, 0.0), **exact)
    assert result.decode.coefficients == pytest.approx((0.01, 0.002, 1e-6), **exact)
    assert result.alpha is not None
    # A piece of 512 tokens takes 0.26 s, a step of two sessions beside it 0.015 s.
    assert 0.02 < result.alpha.coefficients[0] < 0.12
    assert {check.kind for check in result.held_out()} == {PREFILL, DECODE, MISS}
    assert not result.missed(0.05)
    assert found.samples.disturbance() == pytest.approx(0, abs=1e-6)
    assert found.rounds >= LEAST_ROUNDS and "batches of up to 4" in lines[0]


def test_a_disturbed_machine_is_told_and_does_not_matter() -> None:
    """Most of the time it is half as fast. Of each point the fastest sample counts."""
    engine = Timed(slowed=2)
    found = measure(
        bench_of(engine, engine.clock), ROOM, seconds=200, seed=3, progress=lambda _: None, clock=engine.clock
    )
    assert found.rounds > LEAST_ROUNDS
    result = calibrated(found)
    assert prefill_seconds(result.prefill_cost_model, 1000) == pytest.approx(0.52, rel=0.05)
    assert decode_throughput(result.decode_throughput_model, 2, 500) == pytest.approx(
        decode_throughput(DECODE_COSTS, 2, 500), rel=0.05
    )
    assert found.samples.disturbance() > 0.2


def test_the_time_bounds_the_length_and_the_rounds() -> None:
    """Two rounds are done in any case, of prompts that the time allows for; that they were cut is known."""
    engine = Timed()
    found = measure(
        bench_of(engine, engine.clock), ROOM, seconds=1, seed=3, progress=lambda _: None, clock=engine.clock
    )
    assert (found.rounds, found.longest_tokens, found.cut) == (LEAST_ROUNDS, 512, True)
    assert all(len(samples) == LEAST_ROUNDS for samples in found.samples.prefill.values())


def test_an_engine_that_fails_or_has_no_room_fails_the_calibration() -> None:
    """By name; nothing is fitted to what is not there."""

    class Failing(BlockEngine):
        def step(self, batch: Sequence[Member]) -> list[StepResult]:
            return [MemberError("the card fell out") for _ in batch]

    def attempt(engine: BlockEngine, room: Room = ROOM) -> None:
        measure(bench_of(engine, iter(range(10**6)).__next__), room, seconds=1, seed=3, progress=lambda _: None)

    with pytest.raises(GenerationFailed, match="the card fell out"):
        attempt(Failing(blocks=512))
    with pytest.raises(InvalidRequest, match="refused"):
        attempt(BlockEngine(blocks=1))
    with pytest.raises(InvalidRequest, match="too few"):
        attempt(BlockEngine(blocks=512), replace(ROOM, kv_positions=90))
    with pytest.raises(GenerationFailed, match="found no room beside"):
        attempt(BlockEngine(blocks=32), replace(ROOM, longest_tokens=500, kv_positions=2000))


# --- the command


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The tiny model, two at once, with Programs on."""
    file = tmp_path / "genpool.toml"
    file.write_text(
        "[programs]\nenabled = true  # mine\n\n"
        '[models.tiny]\nsource = "random:7"\nthreads = 1\ntarget_inflight = 2\nkv_budget_bytes = 4_000_000\n'
    )
    return file


@pytest.fixture
def command(config: Path) -> Any:
    """Runs `genpool calibrate tiny` for a moment. Errors of timing are of no interest here."""

    def run(*options: str, model: str = "tiny", tolerance: str = "100000") -> Any:
        words = ["--config", str(config), "calibrate", model, "--seconds", "0", "--tolerance", tolerance, *options]
        return CliRunner().invoke(cli, words)

    return run


def test_the_command_prints_configuration_and_writes_files(command: Any, tmp_path: Path, config: Path) -> None:
    """The configuration alone on stdout, where it can be appended to the file; all the rest beside it. What
    calibration.json says is the same, and is read again."""
    document, picture = tmp_path / "calibration.json", tmp_path / "calibration.svg"
    result = command("--json", str(document), "--plot", str(picture))
    assert result.exit_code == 0, result.output
    own = tomllib.loads(result.stdout)["programs"]["models"]["tiny"]
    assert own.keys() == {"prefill_cost_model", "decode_throughput_model"}
    assert len(own["prefill_cost_model"]) == 4 and len(own["decode_throughput_model"]) == 3
    config.write_text(config.read_text() + result.stdout)
    assert load_configuration(config, {}).settings.programs.of_model("tiny").prefill_cost_model == PrefillCostModel(
        **own["prefill_cost_model"]
    )
    for told in ("HELD OUT", "STANDARD ERROR", "rounds;", "R²", "decode of 1 request", "prefill of"):
        assert told in result.stderr
    content = json.loads(document.read_text())
    assert content.keys() == {"metadata", "metadata_hash", "calibration"}
    parts = content["calibration"]
    assert parts["prefill"]["coefficients"].keys() == {
        "ttl_prefill_model_intercept_seconds",
        "ttl_prefill_model_linear_seconds_per_1k_tokens",
        "ttl_prefill_model_quadratic_seconds_per_1k_tokens_squared",
    }
    assert parts["decode"]["coefficients"].keys() == {
        "decode_step_fixed_seconds",
        "decode_step_seconds_per_request",
        "decode_step_seconds_per_context_token",
    }
    for part in ("prefill", "decode", "mixed"):
        assert parts[part]["points"] and parts[part]["standard_errors"].keys() == parts[part]["coefficients"].keys()
        assert {point["held_out"] for point in parts[part]["points"]} >= {False}
    again = CliRunner().invoke(cli, ["--config", str(config), "calibrate", "tiny", "--from", str(document)])
    assert again.stdout == result.stdout
    drawn = ElementTree.fromstring(picture.read_text())
    points = sum(len(parts[part]["points"]) for part in ("prefill", "decode", "mixed"))
    assert len(drawn.findall("{http://www.w3.org/2000/svg}circle")) == points


def test_one_generation_at_a_time_leaves_alpha_alone(command: Any) -> None:
    """It says so."""
    result = command("--concurrency", "1")
    assert result.exit_code == 0, result.output
    own = tomllib.loads(result.stdout)["programs"]["models"]["tiny"]
    assert "decode_throughput_alpha" not in own["prefill_cost_model"]
    assert own["decode_throughput_model"]["batch_step_seconds_per_request"] == 0
    assert "alpha keeps its default" in result.stderr


def test_write_merges_into_the_configuration(command: Any, config: Path, tmp_path: Path) -> None:
    """Behind what is there, and in place of what was measured before."""
    document = tmp_path / "given.json"
    names = json.loads(
        '{"ttl_prefill_model_intercept_seconds": 0.5, "ttl_prefill_model_linear_seconds_per_1k_tokens": 0.25,'
        '"ttl_prefill_model_quadratic_seconds_per_1k_tokens_squared": 0, "decode_step_fixed_seconds": 0.01,'
        '"decode_step_seconds_per_request": 0.001, "decode_step_seconds_per_context_token": 1e-7}'
    )
    before = config.read_text()
    for intercept in (0.5, 0.75):
        document.write_text(json.dumps(names | {"ttl_prefill_model_intercept_seconds": intercept}))
        result = command("--from", str(document), "--write")
        assert (result.exit_code, result.stdout) == (0, ""), result.output
        assert config.read_text().startswith(before)
        own = load_configuration(config, {}).settings.programs.of_model("tiny")
        assert own.prefill_cost_model.intercept_seconds == intercept
    assert "prefill_cost_model.decode_throughput_alpha" not in config.read_text()


def test_a_miss_of_held_out_points_is_named_and_writes_nothing(command: Any, config: Path, tmp_path: Path) -> None:
    """No timing is exact to nothing: exit code 1, the points, and the configuration as it was; the document is there to
    look at."""
    before, document = config.read_text(), tmp_path / "calibration.json"
    result = command("--write", "--json", str(document), tolerance="0")
    assert result.exit_code == 1
    assert "Held-out points are predicted worse than 0 %: " in result.stderr.splitlines()[-1]
    assert "tokens" in result.stderr.splitlines()[-1]
    assert (config.read_text(), result.stdout) == (before, "")
    assert document.exists()


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--from", "none.json"), 1, "none.json cannot be read"),
        (("--from", "none.json", "--plot", "a.svg"), 2, "--from measures nothing"),
        (("--seconds", "-1"), 2, "--seconds"),
        (("--concurrency", "0"), 2, "--concurrency"),
    ],
)
def test_wrong_options_are_refused(command: Any, options: tuple[str, ...], code: int, message: str) -> None:
    """By name."""
    result = command(*options)
    assert (result.exit_code, message in result.stderr) == (code, True)


def test_models_that_cannot_be_calibrated_are_refused(command: Any, config: Path) -> None:
    """One that is not there; one with too little KV; and, before anything is measured, --write without Programs."""
    assert "No model is named other" in command(model="other").stderr
    config.write_text(config.read_text().replace("4_000_000", "100_000"))
    refused = command()
    assert (refused.exit_code, "which is too few to calibrate" in refused.stderr) == (1, True)
    config.write_text('[models.tiny]\nsource = "random:7"\n')
    refused = command("--write")
    assert (refused.exit_code, len(refused.stderr.splitlines())) == (1, 1)
    assert "programs.enabled is false" in refused.stderr


def test_the_engine_is_closed(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it failed."""
    closed: list[int] = []

    class Failing(BlockEngine):
        def step(self, batch: Sequence[Member]) -> list[StepResult]:
            raise OSError(len(batch))

        def close(self) -> None:
            closed.append(1)
            super().close()

    monkeypatch.setitem(BACKENDS, "numpy", lambda name, settings, weights: Failing(blocks=256))  # noqa: ARG005
    result = command()
    assert (result.exit_code, closed) == (1, [1])
    assert "The engine failed: OSError" in result.stderr
