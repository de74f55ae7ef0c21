"""The sweep: same tokens at every concurrency, fuller batches, and where they stop becoming fuller."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from genpool import cli
from pool.errors import GenerationFailed, InvalidRequest
from tasks.ports import Engine, Generation, Logits, Member, StepResult
from tests.engine.looping import SEEDED, generation
from tests.scripted.blocks import BlockEngine
from workers.engines import BACKENDS
from workers.engines.numpy_llama import NumpyLlama
from workers.engines.paged_kv import position_bytes
from workers.engines.tiny import tiny_llama
from workers.sweep import mixed_requests, saturation, some_cancels, sweep
from workers.sweep_plot import svg

LEVELS = (1, 2, 4, 8, 16)


def numpy_engine(kv_positions: int) -> Engine:
    """The tiny model, on two threads."""
    weights, vocabulary = tiny_llama(7)
    return NumpyLlama(weights, vocabulary, threads=2, kv_bytes=kv_positions * position_bytes(weights.config))


def block_engine(kv_positions: int) -> Engine:
    """Tokens for KV."""
    return BlockEngine(blocks=kv_positions // 16)


def mixed(count: int = 16, longest: int = 150, max_tokens: int = 24) -> list[Generation]:
    """Prompts of 1 to `longest` tokens, every other one greedy; one job has three choices."""
    vocabulary = tiny_llama(7)[1]
    requests = mixed_requests(vocabulary, count=count, shortest=1, longest=longest, max_tokens=max_tokens, seed=3)
    requests[1] = replace(requests[1], n=3)
    return requests


# --- saturation


@pytest.mark.parametrize(
    ("averages", "saturated"),
    [
        ([1, 2, 3.5, 3.5], 4),
        ([1, 2, 4, 8], 8),
        ([1, 1, 1, 1], 1),
        ([1, 2, 2 + 1e-10, 2], 2),
        ([1, 2, 1.5, 1.9], 2),
    ],
)
def test_saturation_is_the_last_level_that_still_filled_batches(averages: list[float], saturated: int) -> None:
    """By more than rounding, and above all levels before."""
    assert saturation(list(zip((1, 2, 4, 8), averages, strict=True))) == saturated
    assert saturation([(3, 1.0)]) == 3


# --- the same tokens


def test_every_level_gives_the_same_tokens_and_fuller_batches() -> None:
    """The numpy engine at 1, 2, 4, 8, 16; nothing is given up, and each token is computed once."""
    found = sweep(numpy_engine, mixed(), LEVELS)
    assert found.corruption_free
    assert [result.concurrency for result in found.results] == list(LEVELS)
    assert found.saturation_concurrency == 16
    per_tick = [result.tokens_per_tick for result in found.results]
    assert per_tick == sorted(set(per_tick))
    for result in found.results:
        # The first token of each of 18 choices comes with its prompt.
        assert (result.decode_tokens, result.cache_misses, result.preemptions) == (18 * 23, 0, 0)
        assert (result.rejected_admissions, result.max_batch_occupancy) == (0, result.concurrency)
    assert [len(choices) for choices in found.reference_outputs] == [1, 3, *[1] * 14]
    assert all(len(stream) == 24 for choices in found.reference_outputs for stream in choices)


def test_forced_preemptions_change_no_token() -> None:
    """With room for three of the longest and over-commit, sessions give way to each other; tokens are those of the run
    that has room for all."""
    requests = mixed(max_tokens=60)
    roomy = sweep(numpy_engine, requests, (1,))
    crowded = sweep(
        numpy_engine, requests, LEVELS, kv_positions=576, kv_overcommit=16.0, max_prefill_tokens_per_tick=48
    )
    assert crowded.corruption_free
    assert crowded.reference_outputs == roomy.reference_outputs
    assert [result.preemptions > 0 for result in crowded.results][2:] == [True, True, True]
    assert all(result.peak_kv_bytes <= 576 * numpy_engine(64).bytes_per_token for result in crowded.results)


def test_cancels_change_no_token_of_whoever_stays() -> None:
    """At every level, also where sessions give way to each other, those who are cancelled have had the beginning of
    what they would have got, and the rest all of it."""
    requests = mixed()
    cancels = some_cancels(requests, 5, seed=1)
    assert len(cancels) == 5 and all(0 < after < 24 for after in cancels.values())
    requests = [replace(request, n=1) for request in requests]
    for crowd in ({}, {"kv_positions": 448, "kv_overcommit": 16.0, "max_prefill_tokens_per_tick": 48}):
        found = sweep(numpy_engine, requests, LEVELS, cancels=cancels, **crowd)
        assert found.corruption_free
        assert all(len(stream) == 24 for choices in found.reference_outputs for stream in choices)
        assert [result.cancelled for result in found.results] == [5] * 5
        told = 11 * 24 + sum(cancels.values())
        assert all(result.decode_tokens >= told - 16 for result in found.results)
        assert crowd or all(result.decode_tokens == told - 16 for result in found.results)


def test_only_what_can_be_cancelled_is() -> None:
    """Requests with one choice, between two of their tokens."""
    requests = [generation(n=2), generation("b", max_tokens=1), generation("c")]
    for cancels in ({"a": 1}, {"c": 0}, {"d": 1}):
        with pytest.raises(InvalidRequest, match="Cancels") as refused:
            sweep(block_engine, requests, (1,), cancels=cancels)
        assert refused.value.param == "cancels"
    assert some_cancels(requests[1:], 1, seed=5).keys() == {"c"}
    with pytest.raises(InvalidRequest, match=r"2 of 2 requests are to be cancelled.*; 1 can be"):
        some_cancels(requests[1:], 2, seed=5)


class Leaky(BlockEngine):
    """Its logits depend on how many sessions share the step."""

    crowd = 1

    def step(self, batch: Sequence[Member]) -> list[StepResult]:
        self.crowd = len(batch)
        return super().step(batch)

    def _logits(self, session: str, cells: Any) -> Logits:
        row = super()._logits(session, cells)
        return row[::-1].copy() if self.crowd > 2 else row


def test_an_engine_whose_tokens_depend_on_company_is_found_out() -> None:
    """Not corruption free, and the outputs shown are those of the lowest level."""
    requests = [generation(f"job-{number}") for number in range(4)]
    found = sweep(lambda positions: Leaky(blocks=positions // 16), requests, (1, 2, 4))
    assert not found.corruption_free
    assert found.reference_outputs == sweep(block_engine, requests, (1,)).reference_outputs


def test_a_disturbed_sweep_is_compared_with_an_undisturbed_run() -> None:
    """An engine whose tokens depend on how a prompt was cut gives the same ones at all levels, and is found out."""

    class Cutting(BlockEngine):
        def step(self, batch: Sequence[Member]) -> list[StepResult]:
            self.cut = getattr(self, "cut", set()) | {each.session for each in batch if len(each.tokens) == 16}
            return super().step(batch)

        def _logits(self, session: str, cells: Any) -> Logits:
            row = super()._logits(session, cells)
            return row[::-1].copy() if session in self.cut else row

    def load(positions: int) -> Engine:
        return Cutting(blocks=positions // 16)

    requests = [generation(prompt=range(20, 37)), generation("b", range(50, 68))]
    assert sweep(load, requests, (1, 2)).corruption_free
    assert not sweep(load, requests, (1, 2), max_prefill_tokens_per_tick=16).corruption_free


# --- what is no sweep


@pytest.mark.parametrize("levels", [(), (0, 1), (2, 1), (1, 1), (True, 2), (1.5,), (-1,)])
def test_levels_are_ascending_whole_numbers(levels: tuple[Any, ...]) -> None:
    """Refused by name."""
    with pytest.raises(InvalidRequest, match="Levels") as refused:
        sweep(block_engine, [generation()], levels)
    assert refused.value.param == "levels"


def test_no_requests_and_refused_ones_are_errors() -> None:
    """With the reason and its numbers. An engine with fewer sessions than a level is one, too."""
    with pytest.raises(InvalidRequest, match="needs requests"):
        sweep(block_engine, [], (1,))
    with pytest.raises(InvalidRequest, match=r"a was refused \(rejected-kv-budget\): .* 27 tokens.* 16"):
        sweep(block_engine, [generation()], (1,), kv_positions=16)
    with pytest.raises(InvalidRequest, match=r"b was refused \(rejected-duplicate\)"):
        sweep(block_engine, [generation("b"), generation("b")], (1,))
    with pytest.raises(InvalidRequest, match="2 sessions at once, not 3"):
        sweep(lambda positions: BlockEngine(blocks=positions // 16, max_sessions=2), [generation()], (1, 3))


def test_a_request_that_fails_fails_the_sweep() -> None:
    """A missing stream is no result."""

    class Failing(BlockEngine):
        def step(self, batch: Sequence[Member]) -> list[StepResult]:
            raise OSError(len(batch))

    with pytest.raises(GenerationFailed, match="a failed: The engine failed: OSError"):
        sweep(lambda positions: Failing(blocks=positions // 16), [generation()], (1,))


# --- how it is shown


def test_the_document_has_a_version_and_all_of_it() -> None:
    """Schema version 1."""
    found = sweep(block_engine, [generation(n=2, sampling=SEEDED), generation("b")], (1, 2))
    document = json.loads(found.as_json())
    assert document.keys() == {
        "schema_version",
        "results",
        "saturation_concurrency",
        "corruption_free",
        "reference_outputs",
    }
    assert (document["schema_version"], document["corruption_free"]) == (1, True)
    assert document["results"][1].keys() >= {
        "concurrency", "ticks", "decode_batches", "decode_tokens", "prefill_tokens", "avg_batch_occupancy",
        "max_batch_occupancy", "tokens_per_tick", "peak_kv_bytes", "rejected_admissions", "cache_misses",
    }  # fmt: skip


def test_the_picture_is_svg() -> None:
    """A line for each of the two figures, with a point a level, also for a single level."""
    for levels in ((1, 2, 4), (3,)):
        picture = ElementTree.fromstring(svg(sweep(block_engine, [generation(), generation("b")], levels)))
        name = "{http://www.w3.org/2000/svg}"
        assert picture.tag == f"{name}svg"
        assert len(picture.findall(f"{name}polyline")) == 2
        assert len(picture.findall(f"{name}circle")) == 2 * len(levels)


@pytest.fixture
def command(tmp_path: Path) -> Any:
    """Runs `genpool sweep tiny` with options."""
    config = tmp_path / "genpool.toml"
    config.write_text('[models.tiny]\nsource = "random:7"\nthreads = 1\n')

    def run(*options: str) -> Any:
        words = ["--config", str(config), "sweep", "tiny", "--requests", "4", "--max-tokens", "6", *options]
        return CliRunner().invoke(cli, words)

    return run


def test_the_command_prints_a_table_and_writes_files(command: Any, tmp_path: Path) -> None:
    """One row a level and where it saturated; JSON and SVG where they were asked for."""
    document, picture = tmp_path / "sweep.json", tmp_path / "sweep.svg"
    result = command("--levels", "1,4", "--prompts", "3-40", "--json", str(document), "--plot", str(picture))
    assert result.exit_code == 0, result.output
    head, *rows, last = result.output.splitlines()
    assert head.split()[:2] == ["CONCURRENCY", "TICKS"]
    assert [row.split()[0] for row in rows] == ["1", "4"]
    assert last == "Saturated at 4."
    assert json.loads(document.read_text())["saturation_concurrency"] == 4
    assert picture.read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--levels", "4,1"), "ascending order"),
        (("--levels", "1,x"), "Levels are whole numbers with commas"),
        (("--prompts", "9-3"), "MIN-MAX"),
        (("--prompts", "0-3"), "MIN-MAX"),
        (("--prompts", "100000"), "exceed the context"),
        (("--kv-tokens", "64", "--prompts", "90"), "rejected-kv-budget"),
        (("--cancels", "5"), "5 of 4 requests are to be cancelled"),
    ],
)
def test_wrong_options_are_one_line(command: Any, options: tuple[str, ...], message: str) -> None:
    """That says what is wrong."""
    result = command(*options)
    assert result.exit_code == 1
    assert message in result.output and len(result.output.splitlines()) == 1


def test_the_command_disturbs_and_compares(command: Any) -> None:
    """Little KV, over-commit, pieces of prompts and cancels, all at once; every level gives the tokens of the quiet
    run."""
    result = command(
        "--levels", "1,4", "--prompts", "50-120", "--kv-tokens", "256", "--overcommit", "8", "--max-tokens", "70",
        "--prefill-tokens", "32", "--cancels", "1",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    head, *rows, _ = result.output.splitlines()
    assert head.split()[-2:] == ["PREEMPTIONS", "CANCELLED"]
    assert int(rows[1].split()[-2]) > 0
    assert [row.split()[-1] for row in rows] == ["1", "1"]


def test_other_tokens_at_another_level_are_an_error(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table all the same, one line that says so, and exit code 1."""
    monkeypatch.setitem(BACKENDS, "numpy", lambda name, settings, weights: Leaky(blocks=256))  # noqa: ARG005
    result = command("--levels", "1,4")
    assert result.exit_code == 1
    assert result.output.splitlines()[-1] == "Error: The tokens are not the same at every level."
    assert len(result.output.splitlines()) == 5
