"""The first response of a large Program among ever new small ones, over the whole product: it would never fit beside
them if nobody kept room for it."""

from __future__ import annotations

import asyncio
import itertools
import time
from contextlib import suppress

from benchmarks import report
from benchmarks.agent_load import Agents, Load
from benchmarks.agent_traces import Request
from benchmarks.policies import FULL
from benchmarks.program_system import MODEL, Bench

CAPACITY_TOKENS = 1024
LARGE_TOKENS, SMALL_TOKENS = 800, 50
#: Small Programs at once: together they need more than there is.
SMALL = 24
FORCE_S = 8.0
#: Before the large one comes, the flood runs so long.
BEFORE_S = 3.0


class Flood(Agents):
    """Small Programs of one request each, and then a large one."""

    async def first_response_s(self) -> tuple[float, int]:
        """Seconds until the large one's first token, and how many small ones ended meanwhile."""
        names = itertools.count()
        ended: list[float] = []

        async def agent(number: int) -> None:
            while True:
                await self._ask(number, f"small-{next(names)}", of_length(SMALL_TOKENS, 8), is_last=True)
                ended.append(time.monotonic())

        small = [asyncio.create_task(agent(number)) for number in range(SMALL)]
        try:
            await asyncio.sleep(BEFORE_S)
            began_s = time.monotonic()
            seen = await self._ask(-1, "large", of_length(LARGE_TOKENS, 4), is_last=True)
        finally:
            for each in small:
                each.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*small, return_exceptions=True)
        return seen.first_s, sum(began_s <= each <= began_s + seen.first_s for each in ended)


def of_length(prompt_tokens: int, output_tokens: int) -> Request:
    """A request of its Program's own tokens."""
    return Request((1, prompt_tokens), 1, 0, output_tokens, 0.0)


def flood(bench: Bench) -> report.Sample:
    """One run."""
    programs = f"force_resume_timeout_seconds = {FORCE_S}\n"
    with bench.system(FULL, "numpy", CAPACITY_TOKENS, programs) as (port, _):
        load = Load(port, MODEL, "capped", SMALL, 1, LARGE_TOKENS, 1, 1.0)
        first_s, small = asyncio.run(Flood(load).first_response_s())
    return {"first response s": first_s, "force wait s": FORCE_S, "small ones meanwhile": float(small)}
