"""Workers that run the numpy engine with far too little KV are killed again and again, and nobody can tell.

KILLS says how many (`make kills`: 30), SEED repeats a run's choices.
"""

from __future__ import annotations

import os

import pytest

from tests.faults.conftest import StartSystem
from tests.faults.killing import DECODE, END, LOAD, PREEMPTED, PREFILL, REPLAY, assert_survived
from tests.faults.steady_load import CHAT, COMPLETIONS, RESPONSES, Ask
from tests.system import TINY
from workers.engines.paged_kv import position_bytes
from workers.engines.tiny import TINY as TINY_SHAPE

KILLS = int(os.environ.get("KILLS", "2"))
SHORT = KILLS <= 5
CLIENTS = 6 if SHORT else 8
TOKENS = 200 if SHORT else 500
#: Two of the largest jobs fill it; there are slots for eight.
KV_TOKENS = 3 * TOKENS
PHASES = (PREEMPTED, DECODE, LOAD, REPLAY, PREFILL, END, PREEMPTED)
#: Every prompt begins with it.
SYSTEM = "You are under the great old mountain, where every little word that is said comes back three times. " * 3


def asks() -> list[Ask]:
    """Greedy, seeded, with log-probabilities, penalties, two choices, stop strings; all but one share their beginning,
    and a prompt is long."""
    greedy, seeded = {"temperature": 0}, {"temperature": 0.9, "top_p": 0.95, "seed": 11}
    logprobs = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}

    def turns(text: str) -> list[dict[str, str]]:
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]

    return [
        Ask.of("greedy", RESPONSES, TINY, TOKENS, instructions=SYSTEM, input="Who came?", **greedy, **logprobs),
        Ask.of("seeded", RESPONSES, TINY, TOKENS, instructions=SYSTEM, input="What then?", **seeded),
        Ask.of("long", RESPONSES, TINY, 40, instructions=SYSTEM * 2, input="Where?", **seeded),
        Ask.of(
            "choices", CHAT, TINY, TOKENS // 2, messages=turns("Why?"), n=2, logprobs=True, top_logprobs=3, **seeded
        ),
        Ask.of("stops", CHAT, TINY, TOKENS, messages=turns("How?"), stop=["qz", "!?"], logprobs=True, **seeded),
        Ask.of("penalties", COMPLETIONS, TINY, TOKENS, prompt="Once", logprobs=2, frequency_penalty=0.3, **seeded),
    ]


@pytest.mark.timeout(120 + 30 * KILLS)
def test_preempted_generations_outlive_killed_workers(start_system: StartSystem) -> None:
    """Two workers whose KV holds two or three of their eight generations, so that others are preempted, saved as bytes
    and restored, while prompts begin with what is there of the one before. Killed in any phase, also while a preempted
    generation waits: everything equals what the request gives alone."""
    model = {
        "threads": 1,
        "kv_budget_bytes": KV_TOKENS * position_bytes(TINY_SHAPE),
        "kv_overcommit": 16,
        "target_inflight": 8,
        "max_batch_size": 6,
        "max_prefill_tokens_per_tick": 64,
    }
    load, killer = assert_survived(start_system, TINY, model, asks(), PHASES, kills=KILLS, clients=CLIENTS, of_all=0.3)
    assert killer.preempted, "nothing was preempted"
    assert load.reused, "nothing was reused"
