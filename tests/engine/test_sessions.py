"""A choice of a job, from row to token: which ends count, what the sampler gets to see, and what is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tasks.payloads import Sampling
from tasks.ports import Generation, Logits
from workers.engines.tiny import tiny_vocabulary
from workers.sampling import logprobs_of
from workers.sessions import Job, Session

VOCABULARY = tiny_vocabulary()
EOS = 2


def byte(value: int) -> int:
    """The token of one byte."""
    return 3 + value


A, B = byte(ord("a")), byte(ord("b"))


def session(
    replay: tuple[int, ...] = (), prompt: Sequence[int] = (50, 51), max_tokens: int = 9, **sampling: Any
) -> Session:
    """A greedy session unless told otherwise."""
    generation = Generation(
        job="job",
        attempt=1,
        prompt=np.array(prompt, np.int32),
        sampling=Sampling(**{"temperature": 0.0, **sampling}),
        max_tokens=max_tokens,
        seed=5,
        replay=(replay,),
    )
    (made,) = Job.of(generation, VOCABULARY, frozenset(VOCABULARY.eos_ids), arrival=0).sessions
    return made


def row_of(logits: dict[int, float]) -> Logits:
    """These logits, and -9 for all others."""
    row = np.full(VOCABULARY.size, -9.0, np.float32)
    row[list(logits)] = list(logits.values())
    return row


def test_a_stop_token_ends_the_choice_and_has_no_text() -> None:
    """Whether the model's own end is ignored or not; text that waited is shown."""
    for ignore_eos in (False, True):
        made = session(stop=("ax",), stop_token_ids=(B,), ignore_eos=ignore_eos)
        assert made.draw(row_of({A: 1})).text == ""
        last = made.draw(row_of({B: 1}))
        assert (last.token_ids, last.text, made.finish_reason) == ((B,), "a", "stop")
        assert (made.result().text, made.result().tokens) == ("a", 2)


def test_no_end_comes_before_min_tokens() -> None:
    """Neither the model's nor the request's."""
    made = session(stop_token_ids=(B,), min_tokens=2)
    drawn = [made.draw(row_of({EOS: 3, B: 2, A: 1})).token_ids[0] for _ in range(3)]
    assert drawn == [A, A, EOS]
    assert made.finish_reason == "stop"


def test_no_stop_string_ends_a_choice_before_min_tokens() -> None:
    """Nor does it hide what came before; the next one ends it."""
    made = session(stop=("ab",), min_tokens=2)
    assert [made.draw(row_of({token: 1})).text for token in (A, B, A, B)] == ["", "ab", "", ""]
    assert (made.finish_reason, made.result().text) == ("stop", "ab")


@pytest.mark.parametrize(("ignored", "text"), [(False, ""), (True, "a")])
def test_the_models_own_end_has_no_text_when_it_ends(ignored: bool, text: str) -> None:
    """Also where its vocabulary does not call it a control token."""
    made = session(ignore_eos=ignored)
    made.eos_ids = frozenset({A})
    assert made.draw(row_of({A: 1})).text == text
    assert made.finish_reason == ("" if ignored else "stop")


def test_a_logged_stop_token_is_an_end_at_once() -> None:
    """A takeover of a log that already holds it."""
    assert session(replay=(A, B), stop_token_ids=(B,)).finish_reason == "stop"


@pytest.mark.parametrize(
    "options", [{"repetition_penalty": 2.0}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0}], ids=str
)
def test_the_sampler_sees_what_was_said(options: dict[str, float]) -> None:
    """Drawn here, or logged by an attempt before: the same next token. The prompt counts where it should."""
    row = row_of({A: 2.0, B: 1.5})
    here, elsewhere = session(**options), session(replay=(A,), **options)
    assert [here.draw(row).token_ids[0] for _ in range(2)] == [A, B]
    assert elsewhere.draw(row).token_ids[0] == B
    prompted = session(prompt=(A, 50), **options).draw(row).token_ids[0]
    assert prompted == (B if "repetition_penalty" in options else A)


def test_logprobs_are_told_when_asked_for() -> None:
    """The model's own, whatever was done to the row to draw from it; of nobody else."""
    row = row_of({A: 2.0, B: 1.5})
    assert session(logit_bias={B: 100}).draw(row).logprobs == ()
    made = session(logit_bias={B: 100}, logprobs=True, top_logprobs=2).draw(row)
    assert made.token_ids == (B,)
    assert made.logprobs == (logprobs_of(row, B, 2),)
    assert [token for token, _ in made.logprobs[0].top] == [A, B]
    assert made.logprobs[0].logprob == made.logprobs[0].top[1][1]
