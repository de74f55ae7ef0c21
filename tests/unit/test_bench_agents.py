"""The work that agents of a benchmark replay, what is counted of it, and the policies that ours is compared with."""

from __future__ import annotations

import dataclasses
import gzip
import json
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks import program_cells
from benchmarks.agent_load import Seen, seen_of
from benchmarks.agent_traces import FIRST_TOKEN, LAST_TOKEN, REGIMES, Regime, Request, Task, load, tasks
from benchmarks.policies import FIXED_TTL_S, FULL, TICKS, keeping, plan_tick, weight_tokens
from benchmarks.program_cells import all_cells, load_cells, run_all, targets_of_all
from benchmarks.program_system import Cell, figures
from benchmarks.random_model import kv_bytes, write_model
from benchmarks.streaming_client import Answer
from benchmarks.trace_extract import claude_code
from pool.program_settings import ProgramSettings
from pool.rules.programs.facts import Means, Program, Rank, State, Status, Waiting
from pool.settings import ModelSettings
from workers.engines import load_engine
from workers.engines.llama_weights import LlamaConfig
from workers.engines.tiny import TINY

CELL = Cell(FULL, agents=2, seconds=10)


def common(left: list[int], right: list[int]) -> int:
    """Tokens that both begin with."""
    return next((at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


# -- traces -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("regime", REGIMES.values(), ids=str)
def test_every_task_fits_and_shares_what_all_share(regime: Regime) -> None:
    """Prompts are ordinary tokens; two tasks share tools and system prompt and next to nothing else."""
    found = tasks(regime, length=8, longest_tokens=7500, seed=1)
    assert len({task.name for task in found}) == len(found) >= 10
    for task in found[:5]:
        assert task.longest_tokens <= 7500
        for request in task.requests:
            prompt = request.prompt(task.name)
            assert len(prompt) == request.prompt_tokens
            assert min(prompt) >= FIRST_TOKEN and max(prompt) <= LAST_TOKEN
    for one, other in pairwise(found[:8]):
        first, second = one.requests[0], other.requests[0]
        shared = min(first.shared_tokens, second.shared_tokens, first.prompt_tokens, second.prompt_tokens)
        assert shared <= common(first.prompt(one.name), second.prompt(other.name)) < shared + 8


def test_prompts_of_a_task_share_what_the_recorded_ones_shared() -> None:
    """Block numbers say it: a history that grew is found again whole, one that was compacted is not."""
    grown, compacted = Request((1, 40), 1, 10, 5, 0.0), Request((1, 20, 90, 5), 1, 10, 5, 0.0)
    before = Request((1, 30), 1, 10, 5, 0.0).prompt("a")
    assert common(before, grown.prompt("a")) == 30
    assert common(before, compacted.prompt("a")) == 20
    assert common(before, grown.prompt("b")) < 20


def test_gaps_are_as_the_regime_says() -> None:
    """Capped at a second, divided as lengths are, or as recorded."""
    recorded_ms = 6400
    assert [Regime("x", 64, gaps).gap_s(recorded_ms) for gaps in ("capped", "divided", "recorded")] == [1.0, 0.1, 6.4]
    assert all(task.requests[0].gap_s == 0 for task in tasks(REGIMES["swe"], length=4, longest_tokens=7500, seed=1))


def test_work_is_the_same_for_everybody() -> None:
    """The seed alone decides it."""
    first, again, other = (tasks(REGIMES["divided"], length=8, longest_tokens=7500, seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    assert sorted(task.name for task in first) == sorted(task.name for task in other)


def test_extracts_have_their_licences() -> None:
    """Each names its own."""
    folder = Path(program_cells.__file__).parent / "data"
    told = (folder / "README.md").read_text()
    for extract in folder.glob("*.jsonl"):
        licence = folder / f"LICENSE-{extract.stem}"
        assert licence.exists() and licence.name in told and load(extract.stem)
        assert extract.stat().st_size < 2**20


def test_an_extract_keeps_lengths_times_and_blocks(tmp_path: Path) -> None:
    """A gap begins with the end of the request before; where that is not told, after what most take."""

    def request(t: float, tokens: int, **fields: float) -> dict[str, object]:
        return {"t": t, "in": tokens, "out": 7, "hash_rle": [1, tokens // 64], "input_types": ["text"]} | fields

    requests = [request(0, 640, api_time=2.5), request(10, 1280), request(12, 1920)] + [
        request(20 + number, 1920) for number in range(14)
    ]
    trace = {
        "id": "t",
        "tool_tokens": 3,
        "system_tokens": 4,
        "requests": [*requests[:2], {"type": "subagent"}, *requests[2:]],
    }
    with gzip.open(tmp_path / "traces.gz", "wt") as file:
        file.write(json.dumps(trace) + "\n")
    (session,) = claude_code(tmp_path / "traces.gz")
    assert session["shared"] == 7
    assert session["requests"][:4] == [
        [640, 7, 0, [1, 10]],
        [1280, 7, 7500, [1, 20]],
        [1920, 7, 0, [1, 30]],
        [1920, 7, 3000, [1, 30]],
    ]


# -- what is counted ----------------------------------------------------------------------------------------------


def seen(agent: int, asked_s: float, **fields: float) -> Seen:
    return Seen(**({"agent": agent, "asked_s": asked_s, "first_s": 1.0, "took_s": 2.0, "prompt_tokens": 100,
                    "cached_tokens": 50, "output_tokens": 4} | fields))  # type: ignore[arg-type]  # fmt: skip


def test_what_ends_in_the_measured_time_counts() -> None:
    """Neither the warm-up nor what is still open, nor abandoned Programs."""
    all_seen = [
        seen(0, -5),
        seen(0, 1),
        seen(1, 2, cached_tokens=100, first_s=3.0, task_s=9.0),
        seen(-1, 3),
        seen(1, 9),
    ]
    found = figures(all_seen, CELL)
    assert found["requests/s"] == 0.2
    assert found["hit %"] == 75
    assert (found["first p50 s"], found["first p99 s"]) == (1.0, 3.0)
    assert (found["tasks"], found["task mean s"]) == (1, 9.0)
    assert found["fewest / mean requests of an agent"] == 1
    with pytest.raises(RuntimeError, match="no request"):
        figures([seen(0, -5)], CELL)


@pytest.mark.parametrize(("prompt_tokens", "is_right"), [(100, True), (99, False)])
def test_an_answer_to_another_request_is_an_error(prompt_tokens: int, is_right: bool) -> None:
    """Tokens are what was asked for, or the policies do not do the same work."""
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 64}}
    chunks = [
        {"choices": [{"text": ""}]},
        {"choices": [{"text": "x", "finish_reason": None}]},
        {"choices": [], "usage": usage},
    ]
    parts = [f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks]
    body = [f"{len(part):x}\r\n".encode() + part + b"\r\n" for part in parts]
    answer = object.__new__(Answer)
    answer.asked_ns = 0
    answer.pieces = [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", *body, b"0\r\n\r\n"]
    answer.times_ns = [int(at * 1e9) for at in range(len(answer.pieces))]
    request = Request((1, 100), 1, 10, 2, 0.0)
    if is_right:
        found = seen_of(3, answer, 7.0, request)
        assert (found.first_s, found.took_s, found.cached_tokens) == (2.0, 4.0, 64)
    else:
        with pytest.raises(ValueError, match="not the answer"):
            seen_of(3, answer, 7.0, request)


def test_a_run_of_all_cells_goes_on_where_it_ended(tmp_path: Path) -> None:
    """A line that was cut off is measured again; then all cells are there once a round."""
    path = tmp_path / "cells.jsonl"
    measured: list[Cell] = []

    def measure(cell: Cell) -> dict[str, float]:
        measured.append(cell)
        if len(measured) == 5:
            raise KeyboardInterrupt
        return {"requests/s": 1.0, "hit %": 50.0, "first p99 s": 1.0}

    with pytest.raises(KeyboardInterrupt):
        run_all(2, CELL, path, measure)
    with path.open("a") as file:
        file.write('{"cell": {"policy"\n')
    samples = run_all(2, CELL, path, measure)
    wanted = list(all_cells(2, CELL))
    assert len(measured) == len(wanted) + 1
    assert sorted(map(repr, (cell for cell, _ in load_cells(path)))) == sorted(map(repr, wanted))
    assert all(len(rounds) == 2 for rounds in samples.values())
    assert sum("full / the best" in target.name for target in targets_of_all(samples)) == 36


# -- policies -----------------------------------------------------------------------------------------------------


def program(
    name: str, tokens: int, *, acting_s: float | None = None, waits: bool = False, new: bool = False
) -> Program:
    """Running; or idle for so long; or waiting, for the first time where it is `new`. It is 100 s past."""
    status = Status.ACTING if acting_s is not None else Status.REASONING
    return Program(
        id=name,
        state=State.PAUSED if waits else State.ACTIVE,
        status=status,
        rank="a",
        context_tokens=tokens,
        was_active=not new,
        last_finish_ms=100_000 - round((acting_s or 0) * 1000),
        waiting=Waiting(queued_ms=0, force_ms=10**9) if waits else None,
    )


def tick(*programs: Program, capacity: int = 1000, is_tick: bool = True) -> tuple[tuple[str, ...], ...]:
    """What a tick makes of them: pauses, marks, admissions."""
    active = tuple(each for each in programs if each.waiting is None)
    rank = Rank("a", capacity, programs=active, waiting=tuple(each for each in programs if each.waiting is not None))
    return dataclasses.astuple(plan_tick(rank, 100_000, 0, is_tick=is_tick))


def test_who_acts_counts_for_less_with_each_second() -> None:
    """Half after one, a quarter after two; who runs counts in full."""
    acting = [weight_tokens(program("x", 800, acting_s=seconds), 100_000, 0) for seconds in (0, 1, 2, 10_000)]
    assert acting[:3] == [800, 400, 200] and acting[3] < 1e-9
    assert weight_tokens(program("x", 800), 100_000, 100) == 900


def test_a_tick_pauses_the_smallest_first() -> None:
    """Those first whose tools run; running ones are marked; until the rest fits."""
    running, small, large = program("run", 700), program("small", 200, acting_s=0), program("large", 400, acting_s=0)
    assert tick(running, small, large) == (("small", "large"), (), ())
    assert tick(program("a", 700), program("b", 600), small) == (("small",), ("b",), ())
    assert tick(running, program("old", 400, acting_s=3)) == ((), (), ())
    assert tick(running, small, large, is_tick=False) == ((), (), ())


def test_a_tick_resumes_the_largest_that_fits() -> None:
    """As long as one does; between ticks only those that are new."""
    waiting = [program(name, tokens, waits=True) for name, tokens in (("a", 900), ("b", 500), ("c", 450), ("d", 40))]
    assert tick(program("run", 450), *waiting) == ((), (), ("b", "d"))
    assert tick(program("run", 450), *waiting, is_tick=False) == ((), (), ())
    newcomer = program("new", 300, waits=True, new=True)
    assert tick(program("run", 450), *waiting, newcomer, is_tick=False) == ((), (), ("new",))
    assert tick(program("huge", 5000, waits=True)) == ((), (), ("huge",))


def test_fixed_policies_keep_places_for_fixed_times() -> None:
    """Whatever the statistics and hints say; ours goes by them."""
    settings = ProgramSettings(enabled=True)
    for policy, seconds in FIXED_TTL_S.items():
        kept = keeping(policy)(settings, Means(), 5.0, 100.0)
        assert (kept.ttl_s, kept.automatic_s) == (seconds, seconds)
    assert keeping(FULL)(settings, Means(), 5.0, None).ttl_s == 0
    assert TICKS in FIXED_TTL_S


def test_both_engines_may_run_the_random_model(tmp_path: Path) -> None:
    """Its file says what was asked for, and it generates."""
    config = LlamaConfig(**(dataclasses.asdict(TINY) | {"layers": 2, "context_length": 512}))
    path = tmp_path / "model.gguf"
    write_model(path, config)
    engine = load_engine("x", ModelSettings(source=str(path), kv_budget_bytes=kv_bytes(512, config)), weights=path)
    try:
        assert (engine.context_length, engine.kv_usage().total) == (512, 512)
    finally:
        engine.close()


def test_a_task_grows_to_its_longest_request() -> None:
    """Prompt and output."""
    requests = (Request((1, 10), 2, 0, 5, 0.0), Request((1, 3), 2, 0, 50, 0.0))
    assert Task("x", requests).longest_tokens == 56
