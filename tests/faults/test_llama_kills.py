"""Workers that run llama.cpp are killed again and again under a steady load of streams, and nobody can tell.

KILLS says how many (`make kills`: 30), SEED repeats a run's choices.
"""

from __future__ import annotations

import os

import pytest

from tests.faults.conftest import StartSystem
from tests.faults.killing import DECODE, END, LOAD, PREFILL, REPLAY, WAITING, assert_survived
from tests.faults.steady_load import CHAT, COMPLETIONS, RESPONSES, Ask
from workers.weights import ensure_weights

KILLS = int(os.environ.get("KILLS", "2"))
MODEL = "smollm2-q4"
SOURCE = "smollm2-135m-instruct:q4_0"
#: Of KV, for SmolLM2-135M in float16.
BYTES_PER_TOKEN = 23_040
KEPT, SLOT_TOKENS = 1, 1024
#: A short run, as a part of all tests, has less of everything: starting a worker takes seconds.
SHORT = KILLS <= 5
CLIENTS, SLOTS = (3, 2) if SHORT else (6, 3)
TOKENS = 16 if SHORT else 64
#: Where a slot is as long as the longest session, llama.cpp's sessions are never preempted: waiting comes from `n`.
PHASES = (DECODE, REPLAY, PREFILL, END, WAITING)
CHAPTER = (
    "The lamp of the lighthouse burned every night, whatever the weather, and the keeper wrote down each ship that "
    "passed, its name, its flag and its course. "
)

LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
STORY = "Tell a story about a lighthouse keeper and a whale."


def asks() -> list[Ask]:
    """Greedy, seeded, with log-probabilities, penalties, two choices, stop strings; and a prompt of 500 tokens."""
    greedy, seeded = {"temperature": 0}, {"temperature": 0.9, "top_p": 0.95, "seed": 11}
    turn = [{"role": "user", "content": STORY}]
    short = [
        Ask.of("greedy", RESPONSES, MODEL, TOKENS, input=STORY, **greedy, **LOGPROBS),
        Ask.of("choices", CHAT, MODEL, TOKENS, messages=turn, n=2, logprobs=True, top_logprobs=3, **seeded),
        Ask.of("stops", CHAT, MODEL, 4 * TOKENS, messages=turn, stop=[". He", " great"], logprobs=True, **greedy),
    ]
    longer = [
        Ask.of("seeded", RESPONSES, MODEL, 2 * TOKENS, input=STORY, **seeded),
        Ask.of("long", RESPONSES, MODEL, TOKENS // 2, input=CHAPTER * 14 + STORY, **greedy),
        Ask.of(
            "penalties",
            COMPLETIONS,
            MODEL,
            TOKENS,
            prompt="The keeper of the lighthouse",
            n=2,
            logprobs=2,
            stop=["whale"],
            repetition_penalty=1.2,
            frequency_penalty=0.3,
            **seeded,
        ),
    ]
    return short if SHORT else short + longer


@pytest.mark.timeout(120 + 30 * KILLS)
def test_streams_outlive_killed_workers(start_system: StartSystem) -> None:
    """Two workers, one model, and clients of every kind. Workers are killed while they load, prefill, take over,
    decode, end, or have choices waiting; one or both, so that the other takes over, or the same one when it is back.
    Every answer, stream, stored response and log equals that of an undisturbed run, to the last log-probability."""
    ensure_weights(SOURCE)
    model = {
        "backend": "llama_cpp",
        "source": SOURCE,
        "threads": 1,
        "target_inflight": SLOTS,
        "kept_prefixes": KEPT,
        "max_prefill_tokens_per_tick": 64,
        "kv_budget_bytes": (SLOTS + KEPT) * SLOT_TOKENS * BYTES_PER_TOKEN,
    }
    phases, of_all = (PHASES, 0) if SHORT else ((*PHASES, LOAD), 0.3)
    assert_survived(start_system, MODEL, model, asks(), phases, kills=KILLS, clients=CLIENTS, of_all=of_all)
