"""The golden tokens: greedy output that must not change, on any machine.

Tokens are portable between BLAS kernels as long as the likeliest two are not nearly tied; logits are not, so none are
kept. After a change that is meant to alter output: `python -m tests.engine.golden`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pool.settings import ModelSettings
from tasks.payloads import ChatPrompt, Message
from tasks.ports import Engine
from tests.engine.driving import RandomSchedule, ids
from workers.engines import load_engine
from workers.weights import ensure_weights

PATH = Path(__file__).parent / "golden.json"
TOKENS = 32
SOURCES = ("random:7", "smollm2-135m-instruct")
PROMPTS = ("What is the capital of France?", "Count from one to ten.", "Почему небо голубое?", "def add(a, b):")


def load() -> dict[str, list[dict[str, Any]]]:
    """By source: for each prompt its token ids and the greedy output's."""
    loaded: dict[str, list[dict[str, Any]]] = json.loads(PATH.read_text(encoding="utf-8"))
    return loaded


def generate(engine: Engine) -> list[dict[str, Any]]:
    chats = [ChatPrompt(messages=(Message(role="user", content=text),)) for text in PROMPTS]
    prompts = [ids(*engine.vocabulary.encode_prompt(chat)) for chat in chats]
    streams = RandomSchedule(engine, prompts, TOKENS, room=len(prompts), seed=0, whole=True).run()
    return [
        {"text": text, "prompt": stream.prompt.tolist(), "tokens": stream.tokens}
        for text, stream in zip(PROMPTS, streams, strict=True)
    ]


def main() -> None:
    golden = {}
    for source in SOURCES:
        weights = None if source.startswith("random:") else ensure_weights(source)
        golden[source] = generate(load_engine(source, ModelSettings(source=source), weights=weights))
    PATH.write_text(json.dumps(golden, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
