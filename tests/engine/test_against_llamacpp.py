"""SmolLM2 against llama.cpp: an independent implementation of tokenizer, chat template and model.

`xllamacpp` serves the same weights, dequantised to float32. The two sum in different orders, so logits agree within a
tolerance, and greedy tokens agree wherever the two likeliest tokens are further apart than that.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import xllamacpp

from tasks.payloads import ChatPrompt, Message
from tasks.ports import Engine, Member
from tests.engine.driving import Stream, ids, log_softmax, row_of
from tests.engine.gguf_writing import dequantised_copy

#: Measured: 3e-4.
TOLERANCE = 5e-3
STEPS = 32
#: Prompts that llama.cpp continues at once.
SLOTS = 10
STRINGS: dict[str, list[str]] = json.loads((Path(__file__).parent / "strings.json").read_text(encoding="utf-8"))
PROMPTS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "List three prime numbers.",
    "Who are you?",
    "Explain photosynthesis to a child.",
    "Translate 'good morning' into Spanish.",
    "What is 17 + 25?",
    "Name a famous painter and one of the works.",
    "def fibonacci(n):",
    "Why is the sky blue?",
    "Give me a recipe for pancakes.",
    "Tell me a short story about a lighthouse.",
    "What does HTTP stand for?",
    "Summarise the plot of Hamlet in two sentences.",
    "How many days are in a leap year?",
    "Bonjour, comment allez-vous ?",
    "Translate into English: Сколько будет два плюс два?",
    "Translate into English: 你好!请介绍一下你自己。",
    "Write an email asking for a day off.",
    "Is a tomato a fruit or a vegetable? Answer briefly.",
]


def chat(text: str) -> ChatPrompt:
    return ChatPrompt(messages=(Message(role="user", content=text),))


@pytest.fixture(scope="session")
def float32_path(smollm2_path: Path) -> Path:
    """The dequantised file, written once for this machine, for one version of its source."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "genpool" / "tests"
    path = cache / f"{smollm2_path.stem}-{smollm2_path.stat().st_size}-f32.gguf"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        dequantised_copy(smollm2_path, path)
    return path


@pytest.fixture(scope="module")
def llama(float32_path: Path) -> Iterator[httpx.Client]:
    """A client of llama.cpp's server, on a free loopback port."""
    params = xllamacpp.CommonParams()
    params.model.path = str(float32_path)
    params.n_ctx = SLOTS * 256
    params.n_parallel = SLOTS
    params.port = 0
    params.warmup = False
    params.verbosity = 1
    # More threads spin against whatever else runs on the machine.
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)
    with httpx.Client(base_url=server.listening_address, timeout=60, trust_env=False) as client:
        yield client
    del server


def post(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = client.post(path, json=body).raise_for_status().json()
    assert isinstance(answer, dict)
    return answer


def greedy_tokens(client: httpx.Client, prompt: list[int]) -> list[int]:
    """llama.cpp's greedy output, up to its end or `STEPS` tokens."""
    body = {"prompt": prompt, "n_predict": STEPS, "temperature": 0, "cache_prompt": False, "return_tokens": True}
    tokens: list[int] = post(client, "/completion", body)["tokens"]
    return tokens


def log_probabilities(client: httpx.Client, prompt: list[int], count: int) -> dict[int, float]:
    """llama.cpp's `count` likeliest next tokens."""
    body = {"prompt": prompt, "n_predict": 1, "temperature": 0, "cache_prompt": False, "n_probs": count}
    (first,) = post(client, "/completion", body)["completion_probabilities"]
    return {entry["id"]: entry["logprob"] for entry in first["top_logprobs"]}


@pytest.fixture(scope="module")
def streams(smollm2: Engine) -> list[Stream]:
    """Our output for each prompt, `STEPS` greedy tokens, with its logits."""
    streams = [Stream(ids(*smollm2.vocabulary.encode_prompt(chat(prompt)))) for prompt in PROMPTS]
    for k, stream in enumerate(streams):
        assert smollm2.begin(f"llama-{k}", 0, stream.prompt, len(stream.prompt) + STEPS, scope=f"llama-{k}") == 0
    first = smollm2.step([Member(f"llama-{k}", 0, stream.prompt, 0) for k, stream in enumerate(streams)])
    for stream, result in zip(streams, first, strict=True):
        stream.take(row_of(result))
    for step in range(STEPS - 1):
        members = [
            Member(f"llama-{k}", 0, ids(stream.tokens[-1]), len(stream.prompt) + step)
            for k, stream in enumerate(streams)
        ]
        for stream, result in zip(streams, smollm2.step(members), strict=True):
            stream.take(row_of(result))
    for k in range(len(streams)):
        smollm2.release(f"llama-{k}", 0)
    return streams


@pytest.mark.parametrize("script", STRINGS)
def test_strings_have_the_same_tokens(llama: httpx.Client, smollm2: Engine, script: str) -> None:
    """Both tokenizers give the same ids, whether special tokens are parsed or not."""
    for text in STRINGS[script]:
        for special in (False, True):
            theirs = post(llama, "/tokenize", {"content": text, "add_special": False, "parse_special": special})
            assert smollm2.vocabulary.encode(text, special=special) == theirs["tokens"], text


def test_special_tokens_are_parsed_alike(llama: httpx.Client, smollm2: Engine) -> None:
    """Texts with special tokens agree with and without parsing."""
    vocabulary = smollm2.vocabulary
    for text in (
        "<|im_start|>user\nhi<|im_end|>\n",
        "a<|im_end|><|im_end|>b",
        "<repo_name>x<|endoftext|>",
        "<|im_end|",
    ):
        for special in (False, True):
            theirs = post(llama, "/tokenize", {"content": text, "add_special": True, "parse_special": special})
            assert vocabulary.encode(text, special=special) == theirs["tokens"], text


@pytest.mark.parametrize("script", STRINGS)
def test_chats_are_rendered_alike(llama: httpx.Client, smollm2: Engine, script: str) -> None:
    """The conversation as text, and its tokens, agree; with and without a system message and earlier turns."""
    vocabulary = smollm2.vocabulary
    for text in STRINGS[script]:
        turns = [("system", "Be brief."), ("user", text), ("assistant", "Yes."), ("user", text)]
        for chosen in (turns, turns[1:2]):
            prompt = ChatPrompt(messages=tuple(Message.model_validate({"role": r, "content": c}) for r, c in chosen))
            messages = [{"role": role, "content": content} for role, content in chosen]
            theirs = post(llama, "/apply-template", {"messages": messages})["prompt"]
            assert vocabulary.render_chat(prompt.messages) == theirs
            tokens = post(llama, "/tokenize", {"content": theirs, "add_special": True, "parse_special": True})["tokens"]
            assert vocabulary.encode_prompt(prompt) == tokens


def test_logits_agree(llama: httpx.Client, streams: list[Stream]) -> None:
    """After each prompt, the log-probabilities of the likeliest tokens agree; for one prompt those of all tokens."""
    size = len(streams[0].rows[0])
    for number, (prompt, stream) in enumerate(zip(PROMPTS, streams, strict=True)):
        count = size if number == 0 else 500
        theirs = log_probabilities(llama, stream.prompt.tolist(), count)
        ours = log_softmax(stream.rows[0])
        assert len(theirs) == count
        assert max(abs(ours[token] - value) for token, value in theirs.items()) <= TOLERANCE, prompt


def test_greedy_tokens_agree(llama: httpx.Client, streams: list[Stream]) -> None:
    """Greedy streams are identical until the two likeliest tokens are nearer than the tolerance, or llama.cpp ends."""
    with ThreadPoolExecutor(SLOTS) as pool:
        outputs = list(pool.map(lambda stream: greedy_tokens(llama, stream.prompt.tolist()), streams))
    compared = [_agreeing_steps(stream, output) for stream, output in zip(streams, outputs, strict=True)]
    assert sum(compared) >= 0.8 * sum(map(len, outputs))


def _agreeing_steps(stream: Stream, output: list[int]) -> int:
    """How many tokens agree before a near tie or the end; fails where they differ without a near tie."""
    for step, (token, theirs) in enumerate(zip(stream.tokens, output, strict=False)):
        if token != theirs:
            best, second = np.sort(stream.rows[step])[::-1][:2]
            assert best - second <= TOLERANCE, (step, token, theirs)
            return step
    return min(len(output), len(stream.tokens))
