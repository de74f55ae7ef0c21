"""What a prompt's known beginning saves: agents that share a system prompt, and the next turn of one of them.

    make bench-prefix
    python benchmarks/prefix.py --only llama_cpp

The whole product over HTTP, as shipped: a state server, one API process, a worker for each engine. A round of one:

1. An agent asks, behind a system prompt that nobody has sent before.
2. A second one asks something else behind the same system prompt.
3. The first one asks again, with its conversation so far.
4. Two tenants whose keys are their own send the prompts of 2 and 3: to them nothing is known, so this is what the same
   prompts cost from the start. Their texts must be the agents' texts.
5. A short prompt, of about as many tokens as 2 and 3 had to compute: what is left when nothing has to be reused.

Timed is the first token, from before the request is written to the first piece of text at the client.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # Run as a file, its folder would come first on the path, where `queue.py` hides the standard library's module.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import importlib.util
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import httpx

from benchmarks import report
from benchmarks.processes import START_S, Worker, free_port, module, state_server, wait_for
from benchmarks.waiting_client import HOST
from tasks.api_keys import new_key
from tasks.config import SHIPPED_MODELS, load_configuration
from tasks.services import open_services
from tasks.vocabulary import Vocabulary
from workers.weights import ensure_weights

#: Engine -> the shipped model that it runs.
MODELS = {"numpy": "smollm2-135m-instruct", "llama_cpp": "smollm2-135m-q4"}
#: In a round: that of both agents, and those to whom the second agent's prompt and the next turn are new.
ROLES = ("agents", "new-to-agent", "new-to-turn")
TIMEOUT_S = 180.0
#: Output tokens of an answer; the first agent's is part of its next prompt.
ANSWER_TOKENS = 24

QUESTIONS = (
    "I have a list of forty towns with the rainfall of each month. Which of the rules above tell you how to show it?",
    "My neighbour keeps bees and wants to sell honey at the market. What should the first page of her notebook say?",
    "Thank you. Now put that into one short sentence.",
)

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's answer; `first_token_ms` at the client."""

    text: str
    first_token_ms: float
    prompt_tokens: int
    cached_tokens: int


class Client:
    """Asks one API process, over connections that are kept."""

    def __init__(self, port: int) -> None:
        self._http = httpx.Client(base_url=f"http://{HOST}:{port}", timeout=TIMEOUT_S)

    def answers(self) -> bool:
        """Whether somebody does."""
        try:
            return self._http.get("/healthz").status_code == 200
        except httpx.TransportError:
            return False

    def ask(self, model: str, key: str, messages: Messages) -> Answer:
        """Stream an answer to its end."""
        body = {
            "model": model,
            "messages": messages,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = {"Authorization": f"Bearer {key}"}
        pieces: list[str] = []
        usage: dict[str, int] = {}
        seen_s = 0.0
        began_s = time.perf_counter()
        with self._http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
            response.raise_for_status()
            for chunk in _chunks(response):
                piece = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
                if piece and not pieces:
                    seen_s = time.perf_counter()
                pieces += [piece] if piece else []
                usage = _usage(chunk) or usage
        if not pieces or not usage:
            raise RuntimeError(f"a stream of {model} ended without text or usage")
        return Answer("".join(pieces), (seen_s - began_s) * 1000, usage["prompt"], usage["cached"])

    def close(self) -> None:
        """End the connections."""
        self._http.close()


def _chunks(response: httpx.Response) -> Iterator[dict[str, list[dict[str, dict[str, str]]]]]:
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def _usage(chunk: Mapping[str, object]) -> dict[str, int]:
    match chunk.get("usage"):
        case {"prompt_tokens": int(prompt), "prompt_tokens_details": {"cached_tokens": int(cached)}}:
            return {"prompt": prompt, "cached": cached}
    return {}


def system_prompt(vocabulary: Vocabulary, tokens: int) -> str:
    """Rules in plain words, of at least so many tokens."""
    subjects = ("a table", "a letter", "a recipe", "a map", "a report", "a list", "a story", "an invoice")
    actions = ("keep the order that the user gave", "name the units", "say what is missing", "write short sentences")
    text, number = "You help with all kinds of papers. These are the rules of the house.", 0
    while len(vocabulary.encode(text, special=False)) < tokens:
        subject, action = subjects[number % len(subjects)], actions[number // 3 % len(actions)]
        number += 1
        text += f"\nRule {number}: when {subject} is asked for, {action}, and never use more than {number} lines."
    return text


def measure(client: Client, model: str, system: str, keys: Iterator[str]) -> report.Sample:
    """One round of one engine."""
    first, second, again = QUESTIONS
    agents, new_to_agent, new_to_turn = (next(keys) for _ in ROLES)
    opening: Messages = [{"role": "system", "content": system}]
    prompt = [*opening, _says("user", first)]
    asked = client.ask(model, agents, prompt)
    others = [*opening, _says("user", second)]
    turn = [*prompt, _says("assistant", asked.text), _says("user", again)]
    shared = client.ask(model, agents, others), client.ask(model, agents, turn)
    alone = client.ask(model, new_to_agent, others), client.ask(model, new_to_turn, turn)
    short = client.ask(model, agents, [_says("user", second)])
    return {
        "first agent ms": asked.first_token_ms,
        "second agent ms": shared[0].first_token_ms,
        "second agent, all new ms": alone[0].first_token_ms,
        "second agent cached": shared[0].cached_tokens,
        "next turn ms": shared[1].first_token_ms,
        "next turn, all new ms": alone[1].first_token_ms,
        "next turn cached": shared[1].cached_tokens,
        "next turn prompt": shared[1].prompt_tokens,
        "short prompt ms": short.first_token_ms,
        "short prompt tokens": short.prompt_tokens - short.cached_tokens,
        "cached for strangers": asked.cached_tokens + sum(answer.cached_tokens for answer in alone),
        "texts changed": sum(left.text != right.text for left, right in zip(shared, alone, strict=True)),
    }


def _says(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@contextmanager
def served(folder: Path, engines: Sequence[str], key_lines: Sequence[str]) -> Iterator[tuple[Client, Vocabulary]]:
    """The product with a worker for each engine, once all of them are ready; and the models' common vocabulary."""
    port = free_port()
    with state_server(folder) as server:
        config = folder / "genpool.toml"
        lines = ["[server]", f"port = {port}", "[state]", f'url = "{server.url}"']
        for engine, model in MODELS.items():
            lines += [f"[models.{model}]", f"enabled = {json.dumps(engine in engines)}"]
        config.write_text("\n".join([*lines, ""]), encoding="utf-8")
        variables = {"GENPOOL_CONFIG": str(config), "GENPOOL_API_KEYS": ";".join(key_lines), "TMPDIR": str(folder)}
        gunicorn = module(
            "gunicorn", "-c", "python:webapp.gunicorn_conf", "webapp.app:create_app()", variables=variables
        )
        celery = ("-A", "tasks", "worker", "-l", "WARNING", "--without-mingle", "--without-gossip", "-Q")
        parts = [Worker(gunicorn, folder / "api.log")]
        client = Client(port)
        try:
            for engine in engines:
                command = module("celery", *celery, MODELS[engine], "-n", f"{engine}@%h", variables=variables)
                parts.append(Worker(command, folder / f"{engine}.log"))
            vocabulary = _await(config, parts, [MODELS[engine] for engine in engines])
            wait_for(client.answers, what="the API", timeout_s=START_S, every_s=0.1)
            yield client, vocabulary
        finally:
            client.close()
            for part in reversed(parts):
                part.stop()


def _await(config: Path, parts: Sequence[Worker], models: Sequence[str]) -> Vocabulary:
    services = open_services(load_configuration(config, environ={}).settings)
    try:

        def ready() -> bool:
            for part in parts:
                part.check()
            return all(services.cards.get(model) is not None for model in models)

        wait_for(ready, what="the workers to load their models", timeout_s=START_S * 5, every_s=0.2)
        known = services.cards.get(models[0])
        assert known is not None and known[1] is not None
        return known[1]
    finally:
        services.close()


def runnable(engines: Sequence[str]) -> list[str]:
    """Those that are installed; their weights are here afterwards."""
    found = [engine for engine in engines if engine == "numpy" or importlib.util.find_spec(engine) is not None]
    for engine in engines:
        if engine in found:
            ensure_weights(SHIPPED_MODELS[MODELS[engine]]["source"])
        else:
            report.note(f"{engine} is left out: it is not installed (make llama)")
    return found


def run(engines: Sequence[str], system_tokens: int, rounds: int) -> dict[str, list[report.Sample]]:
    """Bring everything up, and measure."""
    names = [f"{role}-{number}" for number in range(len(engines) * rounds) for role in ROLES]
    made = [new_key(name) for name in names]
    keys = iter([key for key, _ in made])
    with (
        tempfile.TemporaryDirectory(prefix="genpool-bench-") as name,
        served(Path(name), engines, [line for _, line in made]) as (client, vocabulary),
    ):
        system = system_prompt(vocabulary, system_tokens)
        contestants = {engine: partial(measure, client, MODELS[engine], system, keys) for engine in engines}
        return report.interleaved(contestants, rounds)


def targets(samples: Mapping[str, Sequence[report.Sample]]) -> list[report.Target]:
    """The first token five times sooner, texts unchanged, nothing known to strangers."""
    found = []
    for engine in MODELS:
        rounds = samples.get(engine, ())
        medians = report.medians(rounds)
        for what in ("second agent", "next turn"):
            gain = report.ratio(medians.get(f"{what}, all new ms"), medians.get(f"{what} ms"))
            found.append(report.Target(f"{engine}: {what}, first token, all new / shared", gain, at_least=5))
        for what in ("texts changed", "cached for strangers"):
            worst = sum(sample[what] for sample in rounds) if rounds else None
            found.append(report.Target(f"{engine}: {what}, all rounds", worst, at_most=0))
    return found


def main() -> None:
    """Measure and report."""
    parser = report.options(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--system-tokens", type=int, default=2000, help="of the shared system prompt (2000)")
    parser.add_argument("--only", default="", choices=("", *MODELS), help="one engine")
    options = parser.parse_args()
    if options.quick:
        options.system_tokens, options.rounds = min(options.system_tokens, 300), 1

    engines = runnable([engine for engine in MODELS if options.only in ("", engine)])
    samples = run(engines, options.system_tokens, options.rounds)
    result = report.Report(
        name="prefix",
        parameters={"system_tokens": options.system_tokens, "rounds": options.rounds},
        samples=samples,
        targets=targets(samples),
        machine=report.machine(),
    )
    whole = not options.quick and len(engines) == len(MODELS) and options.rounds >= report.MIN_ROUNDS
    report.publish(result, json_file=options.json, record=whole and options.system_tokens >= 2000)


if __name__ == "__main__":
    main()
