"""The real weights, through every process: a stream that outlives its worker and its API node."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from pool.store.server import StateServer
from tasks.client import Client
from tasks.payloads import ChatPrompt, GenerationRequest, Message, Sampling
from tests.integration.celery_process import Site, Worker
from tests.waiting import wait_until
from tests.webapp.api_process import ApiProcess
from workers.weights import ensure_weights

MODEL = "smollm2-135m-instruct"
TOKENS = 80
#: Events after which a stream is disturbed.
SEEN = 16
PROMPT = "Write a story about a lighthouse keeper and a whale."

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A state server whose workers serve the real model, each with one thread."""
    ensure_weights(MODEL)
    with StateServer(tmp_path_factory.mktemp("state")) as server:
        site = Site(server.url, tmp_path_factory.mktemp("site"))
        site.env["GENPOOL_MODELS__SMOLLM2_135M_INSTRUCT__THREADS"] = "1"
        yield site
        site.close()


@pytest.fixture(scope="module")
def workers(site: Site) -> list[Worker]:
    """Two of them to begin with; a test that kills one adds another."""
    return [site.worker(model=MODEL), site.worker(model=MODEL)]


@pytest.fixture(scope="module")
def nodes(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ApiProcess]]:
    """Two API nodes on the same state; a test that kills one starts it again."""
    settings = {
        "MODELS__SMOLLM2_135M_INSTRUCT__ENABLED": "true",
        "WORKER__LEASE_SECONDS": "1.5",
        "WORKER__RENEW_SECONDS": "0.4",
    }
    made = [ApiProcess(site.url, tmp_path_factory.mktemp("api"), **settings).start() for _ in range(2)]
    yield made
    for node in made:
        node.stop(signal.SIGKILL)


class Stream:
    """A reader of one response's events, over as many connections as it takes."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def attach(self, response: httpx.Response) -> None:
        """Go on reading from this connection."""
        self._lines = response.iter_lines()

    def read(self, *, until: int = 10_000) -> None:
        """Read events until that many are there, or the connection ends or breaks."""
        try:
            for line in self._lines:
                if line.startswith("data: "):
                    self.events.append(json.loads(line.removeprefix("data: ")))
                    if len(self.events) >= until:
                        return
        except httpx.TransportError:
            return

    @property
    def id(self) -> str:
        """The response's id, from its first event."""
        return str(self.events[0]["response"]["id"])

    @property
    def text(self) -> str:
        """All deltas, joined."""
        return "".join(event["delta"] for event in self.events if event["type"] == "response.output_text.delta")


def generation(sampling: dict[str, Any]) -> GenerationRequest:
    """The same request without HTTP."""
    prompt = ChatPrompt(messages=(Message(role="user", content=PROMPT),))
    return GenerationRequest(
        model=MODEL, prompt=prompt, max_tokens=TOKENS, sampling=Sampling(ignore_eos=True, **sampling)
    )


def body(sampling: dict[str, Any]) -> dict[str, Any]:
    """A background response of exactly so many tokens, streamed."""
    return {
        "model": MODEL,
        "input": PROMPT,
        "max_output_tokens": TOKENS,
        "ignore_eos": True,
        "stream": True,
        "background": True,
        **sampling,
    }


SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.8, "top_p": 0.95, "seed": 7},
}


@pytest.fixture(scope="module")
def undisturbed(site: Site, workers: list[Worker]) -> dict[str, str]:
    """The whole text of each stream when nothing happens to it; both at once, because company changes no text."""
    assert len(workers) == 2
    jobs = Client(site.settings)
    ids = {name: jobs.submit(generation(sampling)) for name, sampling in SAMPLINGS.items()}
    texts = {name: "".join(entry.text for entry in jobs.follow(job)) for name, job in ids.items()}
    jobs.close()
    return texts


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_stream_outlives_its_worker_and_its_node(
    site: Site, workers: list[Worker], nodes: list[ApiProcess], undisturbed: dict[str, str], name: str
) -> None:
    """Its worker is killed, then the API node that streams it; the client resumes at the other node after the last
    number it saw. Numbers have no gap, and the text is byte for byte that of an undisturbed run."""
    stream = Stream()
    jobs = Client(site.settings)
    url = f"{nodes[0].base_url}/v1/responses"
    with httpx.stream("POST", url, json=body(SAMPLINGS[name]), timeout=120) as response:
        stream.attach(response)
        stream.read(until=SEEN)
        record = jobs.get(stream.id)
        (pid,) = [rank["pid"] for rank in site.ranks(MODEL) if rank["id"] == record.rank]
        victim = next(worker for worker in workers if worker.process.pid == pid)
        victim.signal(signal.SIGKILL)
        wait_until(lambda: jobs.get(stream.id).attempt == 2, description="the takeover", timeout_s=60)
        nodes[0].stop(signal.SIGKILL)
        stream.read()
    resumed = f"{nodes[1].base_url}/v1/responses/{stream.id}"
    after = stream.events[-1]["sequence_number"]
    with httpx.stream("GET", resumed, params={"stream": "true", "starting_after": after}, timeout=120) as response:
        stream.attach(response)
        stream.read()

    assert [event["sequence_number"] for event in stream.events] == list(range(len(stream.events)))
    assert stream.text == undisturbed[name]
    assert stream.events[-1]["response"]["usage"]["output_tokens"] == TOKENS
    assert jobs.get(stream.id).outputs[0].text == undisturbed[name]
    jobs.close()
    workers.append(site.worker(model=MODEL))
    nodes[0].start()


def test_an_official_client_gets_an_answer(workers: list[Worker], nodes: list[ApiProcess]) -> None:
    """Sync, through Redis and Celery: the model knows its colours."""
    assert len(workers) >= 2
    answer = (
        nodes[0]
        .openai(timeout=120)
        .responses.create(
            model=MODEL, input="What colour is the sky on a clear day?", max_output_tokens=24, temperature=0
        )
    )
    assert "blue" in answer.output_text.lower()
