"""The engine without a queue: the batch loop that one would write first, answering a benchmark's dialogue.

    python -m benchmarks.bare_loop SOURCE THREADS PROMPTS_JSON TOKENS

| line in | what it does | line out |
|---|---|---|
| `decode 0` | prefills all prompts together, then decodes them as one batch to the end | seconds; tokens by prompt |
| `prefill N` | N times, after a pause: the first prompt's prefill and first token alone | list of N times in ms |
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
from threadpoolctl import threadpool_limits

from benchmarks.workload import FOLLOWING_TOKENS, MODEL, PAUSE_S, SAMPLING, SEED, model_settings
from tasks.ports import Engine, Member, StepLogits, TokenIds
from workers.engines import is_random, load_engine
from workers.sampling import draw
from workers.weights import ensure_weights


class BareLoop:
    """Steps and draws, nothing else. Every decode is one of new sessions."""

    def __init__(self, engine: Engine, prompts: list[TokenIds], tokens: int) -> None:
        self._engine = engine
        self._prompts = prompts
        self._tokens = tokens
        self._epoch = 0

    def decode(self) -> tuple[float, list[list[int]]]:
        """Seconds from the first step to the last draw, and the tokens drawn, by prompt."""
        started_s = time.perf_counter()
        outputs = self._generate(self._prompts, self._tokens)
        return time.perf_counter() - started_s, outputs

    def prefill_ms(self) -> float:
        """One prompt alone: from its first step to its first token. A few more tokens follow, untimed."""
        time.sleep(PAUSE_S)
        started_s = time.perf_counter()
        self._generate(self._prompts[:1], 1)
        took_ms = (time.perf_counter() - started_s) * 1000
        self._generate(self._prompts[:1], FOLLOWING_TOKENS)
        return took_ms

    def _generate(self, prompts: list[TokenIds], tokens: int) -> list[list[int]]:
        self._epoch += 1
        outputs: list[list[int]] = [[] for _ in prompts]
        for at, prompt in enumerate(prompts):
            # A scope of its own: nothing is reused of what ran before.
            if self._engine.begin(str(at), self._epoch, prompt, len(prompt) + tokens, str(self._epoch)) != 0:
                raise RuntimeError("the engine has no room for the prompts")
        self._step([Member(str(at), self._epoch, prompt, 0) for at, prompt in enumerate(prompts)], outputs)
        for position in range(tokens - 1):
            rows = [
                Member(str(at), self._epoch, np.array(outputs[at][-1:], np.int32), len(prompt) + position)
                for at, prompt in enumerate(prompts)
            ]
            self._step(rows, outputs)
        for at in range(len(prompts)):
            self._engine.release(str(at), self._epoch)
        return outputs

    def _step(self, batch: list[Member], outputs: list[list[int]]) -> None:
        for result, output in zip(self._engine.step(batch), outputs, strict=True):
            if not isinstance(result, StepLogits) or result.row is None:
                raise RuntimeError(f"the engine answered {result}")
            output.append(draw(result.row, SAMPLING, seed=SEED, choice=0, position=len(output)))


def main() -> None:
    """Load the model, then answer until the input ends."""
    source, threads, prompts, tokens = sys.argv[1:]
    threadpool_limits(limits=1, user_api="blas")  # as a rank does: the engine has threads of its own
    weights = None if is_random(source) else ensure_weights(source)
    engine = load_engine(MODEL, model_settings(source, int(threads)), weights=weights)
    loop = BareLoop(engine, [np.array(ids, np.int32) for ids in json.loads(prompts)], int(tokens))
    for line in sys.stdin:
        word, count = line.split()
        answer = loop.decode() if word == "decode" else [loop.prefill_ms() for _ in range(int(count))]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
