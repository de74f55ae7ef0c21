"""A runner over HTTP that a test drives: jobs in, events out."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from pool.settings import ModelSettings
from tasks.config import Settings
from tasks.payloads import Sampling, TextPrompt
from tasks.ports import Event, Failed, Finished, Generation, GivenBack, Tokens
from tests.waiting import wait_until
from workers.backends import open_backend
from workers.backends.remote_runner import RemoteRunner
from workers.backends.served import Served

PROMPT = [300, 301, 302, 303]
GREEDY = Sampling(temperature=0.0, ignore_eos=True)
#: No answer of a test's server takes so long; a test that waits for a silence has it shorter.
PATIENT: dict[str, Any] = {"first_token_seconds": 30, "stall_seconds": 30, "retries": 3}
IMPATIENT: dict[str, Any] = {"first_token_seconds": 0.5, "stall_seconds": 0.5}


class Sink:
    """Keeps what was delivered."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.full = False
        self._lock = threading.Lock()

    def deliver(self, events: Sequence[Event]) -> None:
        """Keep them."""
        with self._lock:
            self.events += events

    def congested(self) -> bool:
        """As the test says."""
        return self.full

    def of(self, job: str) -> list[Event]:
        """Those of a job."""
        with self._lock:
            return [event for event in self.events if event.job == job]


class Player:
    """`served`: what is driven."""

    def __init__(self, served: Served) -> None:
        self.served = served
        assert isinstance(served.runner, RemoteRunner)
        self.runner: RemoteRunner = served.runner
        self.sink = Sink()
        self.runner.start(self.sink)

    def submit(self, job: str = "job", tokens: int = 12, *, sampling: Sampling = GREEDY, **fields: Any) -> None:
        """A job of so many tokens."""
        generation = Generation(job, 1, np.array(PROMPT, np.int32), sampling, tokens, 7)
        if self.served.vocabulary is None:
            generation.prompt = np.empty(0, np.int32)
            generation.given = TextPrompt(text="Go on")
        for name, value in fields.items():
            setattr(generation, name, value)
        self.runner.submit(generation)

    def end(self, job: str = "job", timeout_s: float = 20) -> Finished | Failed | GivenBack:
        """How the job ended."""

        def ended() -> list[Event]:
            return [event for event in self.sink.of(job) if not isinstance(event, Tokens)]

        wait_until(ended, description=f"{job} to end", timeout_s=timeout_s, every_s=0.005)
        (event,) = ended()
        assert not isinstance(event, Tokens)
        return event

    def tokens(self, job: str = "job", choice: int = 0) -> list[int]:
        """The token ids of one choice that were told."""
        told = [event for event in self.sink.of(job) if isinstance(event, Tokens) and event.choice == choice]
        return [token for event in told for token in event.token_ids]

    def text(self, job: str = "job", choice: int = 0) -> str:
        """What was shown of it."""
        told = [event for event in self.sink.of(job) if isinstance(event, Tokens) and event.choice == choice]
        return "".join(event.text for event in told)


def settings_of(url: str, *, kind: str = "llama_cpp", tokenizer: str = "", inflight: int = 4, **upstream: Any) -> Any:
    """A catalogue entry for the server there."""
    fields = {"base_urls": [url], "kind": kind, "tokenizer": tokenizer, "model": "known", **PATIENT, **upstream}
    return ModelSettings.model_validate({"backend": "openai_remote", "target_inflight": inflight, "upstream": fields})


@contextmanager
def playing(model: ModelSettings) -> Iterator[Player]:
    """A runner of this model; it ends with the block."""
    settings = Settings(models={"remote": model})
    served = open_backend("remote", model, settings, model.target_inflight, 0, lambda: True)
    player = Player(served)
    try:
        yield player
    finally:
        player.runner.stop()
        served.close()
