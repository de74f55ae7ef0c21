"""What a server over HTTP may do to a request, and what nobody notices of it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.checkpoint import write_tokenizer
from pool.errors import ConfigurationError, GenerationFailed, Refused
from tasks.payloads import Sampling
from tasks.ports import Failed, Finished, GivenBack
from tests.backends.playing import IMPATIENT, PROMPT, Player, playing, settings_of
from tests.backends.upstream import CONTEXT, Fault, Upstream, output_of, text_of
from tests.engine.small_model import write_small_model
from tests.waiting import wait_until
from workers.backends.tokenizers_of import vocabulary_of

TOKENS = 12
EXPECTED = output_of(PROMPT, TOKENS)
#: What a server may do in the middle of an answer.
BREAKS = ("drop", "end", "garbage", "nonsense", "error", "foreign")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file with the server's tokenizer."""
    return str(write_small_model(tmp_path_factory.mktemp("model") / "small.gguf"))


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    upstream = Upstream()
    yield upstream
    upstream.close()


@pytest.fixture
def player(upstream: Upstream, small: str) -> Iterator[Player]:
    """Of the server that takes token ids."""
    with playing(settings_of(upstream.url, tokenizer=small)) as player:
        yield player


@pytest.fixture
def reader(upstream: Upstream) -> Iterator[Player]:
    """Of the server that takes text."""
    with playing(settings_of(upstream.url, kind="openai")) as player:
        yield player


def assert_whole(player: Player, job: str = "job") -> None:
    """All tokens came, each once, and the text is theirs."""
    ended = player.end(job)
    assert isinstance(ended, Finished), ended
    assert player.tokens(job) == EXPECTED
    assert player.text(job) == text_of(EXPECTED) == ended.outputs[0].text
    assert (ended.outputs[0].tokens, ended.outputs[0].finish_reason) == (TOKENS, "length")


def test_a_generation_is_what_the_server_makes(upstream: Upstream, player: Player) -> None:
    """Token ids as they come, text and usage made of them, in one request."""
    player.submit()
    assert_whole(player)
    ended = player.end()
    assert isinstance(ended, Finished)
    assert (ended.prompt_tokens, ended.cached_tokens) == (len(PROMPT), 1)
    assert [asked.body["prompt"] for asked in upstream.asked] == [PROMPT]
    assert player.runner.capacity().in_flight == 0


def test_never_one_more_in_flight_than_the_target(upstream: Upstream, player: Player) -> None:
    """Counted at the server, which notices late that somebody hung up: four, never five, whatever is cancelled."""
    upstream.late_s = 0.03
    rng = random.Random(5)
    jobs = [f"job-{number}" for number in range(40)]
    for number, job in enumerate(jobs):
        player.submit(job, 60, n=1 + number % 3)
    cancelled = rng.sample(jobs, 25)
    for job in cancelled:
        wait_until(lambda: upstream.in_flight >= 2, description="work at the server")
        player.runner.cancel(job, 1)
    for job in set(jobs) - set(cancelled):
        assert isinstance(player.end(job), Finished)
    wait_until(lambda: upstream.in_flight == 0, description="nothing in flight at the server")
    assert upstream.most_in_flight == 4
    assert player.runner.capacity().in_flight == 0
    assert player.runner.telemetry()["queue_depth"] >= 0


@pytest.mark.parametrize("kind", BREAKS)
@pytest.mark.parametrize("after", [0, 5])
def test_a_broken_answer_is_asked_for_again(upstream: Upstream, player: Player, kind: str, after: int) -> None:
    """Before the first token and behind shown ones, twice each: the next request goes on behind what was told, and
    draws other numbers."""
    upstream.faults += [Fault(kind, after), Fault(kind, after)]
    player.submit()
    assert_whole(player)
    shown = [len(asked.body["prompt"]) - len(PROMPT) for asked in upstream.asked]
    assert shown == [0, after, 2 * after]
    assert len({asked.body["seed"] for asked in upstream.asked}) == len(set(shown))
    assert all(asked.body["n_predict"] == TOKENS - known for asked, known in zip(upstream.asked, shown, strict=True))


@pytest.mark.parametrize("after", [0, 5])
def test_a_silent_server_is_asked_again(upstream: Upstream, small: str, after: int) -> None:
    """It is hung up on, and the next request goes on behind what was told."""
    upstream.faults.append(Fault("hang", after))
    with playing(settings_of(upstream.url, tokenizer=small, **IMPATIENT | {"retries": 50})) as player:
        player.submit()
        assert_whole(player)
    assert upstream.asked[0].left
    assert len(upstream.asked[1].body["prompt"]) == len(PROMPT) + after


@pytest.mark.parametrize("status", [500, 502, 503, 408, 401, 404])
def test_a_status_that_is_not_the_requests_fault_is_waited_out(upstream: Upstream, player: Player, status: int) -> None:
    """The server failed, or was not serving."""
    upstream.faults += [Fault("status", status=status), Fault("status", status=status)]
    player.submit()
    assert_whole(player)
    assert len(upstream.asked) == 3


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (Fault("status", status=500), "upstream_error"),
        (Fault("drop"), "upstream_lost"),
        (Fault("garbage", 3), "upstream_invalid_answer"),
        (Fault("hang"), "upstream_stalled"),
    ],
)
def test_tries_are_bounded(upstream: Upstream, small: str, fault: Fault, code: str) -> None:
    """Without a new token: then the generation fails by name, and what was shown stays."""
    later = Fault(fault.kind, 0, fault.status)
    upstream.faults += [fault, *[later] * 10]
    limits = IMPATIENT if fault.kind == "hang" else {}
    with playing(settings_of(upstream.url, tokenizer=small, retries=2, **limits)) as player:
        player.submit()
        ended = player.end()
        assert isinstance(ended, Failed) and ended.code == code
        assert len(upstream.asked) == 3
        assert player.tokens() == EXPECTED[: fault.after]


def test_a_busy_server_is_left_alone_as_long_as_it_says(upstream: Upstream, player: Player) -> None:
    """429 with Retry-After: nobody's request comes before that."""
    upstream.faults.append(Fault("status", status=429, headers={"Retry-After": "1"}))
    player.submit("first")
    wait_until(lambda: upstream.asked, description="the first request")
    wait_until(lambda: player.runner.capacity().effective == 0, description="nothing taken meanwhile")
    player.submit("second")
    assert_whole(player, "first")
    assert_whole(player, "second")
    first, *others = [asked.at_s for asked in upstream.asked]
    assert len(others) == 2 and all(at_s >= first + 0.95 for at_s in others)
    assert player.runner.capacity().effective == 4


@pytest.mark.parametrize(
    ("status", "body", "code"),
    [
        (400, b'{"error": {"type": "exceed_context_size_error", "message": "SECRET"}}', "context_length_exceeded"),
        (400, b'{"error": {"code": "invalid_value", "param": "top_p", "message": "SECRET"}}', "upstream_rejected"),
        (422, b"SECRET", "upstream_rejected"),
    ],
)
def test_a_refused_request_fails_by_name(
    upstream: Upstream, player: Player, status: int, body: bytes, code: str
) -> None:
    """Once, and nothing that the server wrote gets out: it may repeat a prompt."""
    upstream.faults.append(Fault("status", status=status, body=body))
    player.submit()
    ended = player.end()
    assert isinstance(ended, Failed) and ended.code == code
    assert "SECRET" not in ended.message and len(upstream.asked) == 1
    assert ("top_p" in ended.message) == (b"top_p" in body)


def test_a_redirect_is_not_followed(upstream: Upstream, player: Player) -> None:
    """It would carry the key and the prompt to somebody else."""
    with_other = Upstream()
    try:
        headers = {"Location": f"http://127.0.0.1:{with_other.port}/completion"}
        upstream.faults.append(Fault("status", status=307, headers=headers))
        player.submit()
        assert_whole(player)
        assert with_other.asked == []
    finally:
        with_other.close()


def test_a_cancel_hangs_up(upstream: Upstream, player: Player) -> None:
    """The server sees it, nothing more is told, and the place is free."""
    upstream.delay_s = 0.01
    player.submit(tokens=400)
    wait_until(player.tokens, description="a token")
    assert player.runner.cancel("job", 1) is True
    wait_until(lambda: upstream.asked[0].left, description="the server to see it")
    assert player.runner.cancel("job", 1) is False
    assert player.runner.capacity().in_flight == 0
    with pytest.raises(Refused):
        player.submit()
    player.submit("next")
    assert_whole(player, "next")
    assert not any(isinstance(event, Finished | Failed) for event in player.sink.of("job"))


def test_a_stop_string_hangs_up(upstream: Upstream, player: Player) -> None:
    """The server knows nothing of it, and would go on."""
    upstream.delay_s = 0.01
    text = text_of(output_of(PROMPT, 400))
    stop = text[10:14]
    player.submit(tokens=400, sampling=Sampling(temperature=0.0, ignore_eos=True, stop=(stop,)))
    ended = player.end()
    assert isinstance(ended, Finished)
    assert (ended.outputs[0].text, ended.outputs[0].finish_reason) == (text[: text.index(stop)], "stop")
    wait_until(lambda: upstream.asked[0].left, description="the server to see it")


def test_a_server_without_last_words_is_not_waited_for(upstream: Upstream, player: Player) -> None:
    """All tokens were told, and the end was not."""
    upstream.endless = True
    player.submit()
    assert_whole(player)
    wait_until(lambda: upstream.asked[0].left, description="the server to see that nobody waits")


def test_untold_tokens_are_asked_for_in_one_piece(upstream: Upstream, player: Player) -> None:
    """llama.cpp's server leaves out ids of tokens that end within a character."""
    upstream.faults.append(Fault("untold", 4))
    player.submit()
    assert_whole(player)
    assert [asked.body["stream"] for asked in upstream.asked] == [True, False]
    assert upstream.asked[1].body["prompt"] == [*PROMPT, *EXPECTED[:4]]


def test_log_probabilities_come_in_pieces(upstream: Upstream, player: Player) -> None:
    """Sixteen tokens at a time, each with its own."""
    sampling = Sampling(temperature=0.0, ignore_eos=True, logprobs=True)
    player.submit(tokens=40, sampling=sampling)
    ended = player.end()
    assert isinstance(ended, Finished) and ended.outputs[0].tokens == 40
    assert player.tokens() == output_of(PROMPT, 40)
    assert [asked.body["n_predict"] for asked in upstream.asked] == [16, 16, 8]
    told = [event.logprobs for event in player.sink.of("job") if not isinstance(event, Finished)]  # type: ignore[union-attr]
    assert [len(logprobs) for logprobs in told] == [16, 16, 8]


def test_a_takeover_goes_on_behind_the_log(upstream: Upstream, player: Player) -> None:
    """Of each choice; one whose log holds its end is done."""
    player.submit(n=2, replay=(tuple(EXPECTED[:5]), tuple(EXPECTED)))
    ended = player.end()
    assert isinstance(ended, Finished)
    assert [output.text for output in ended.outputs] == [text_of(EXPECTED)] * 2
    assert player.tokens() == EXPECTED[5:] and player.tokens(choice=1) == []
    assert [asked.body["prompt"] for asked in upstream.asked] == [[*PROMPT, *EXPECTED[:5]]]
    assert ended.cached_tokens is None


def test_jobs_outlast_a_server_that_was_away(small: str) -> None:
    """It dies under them: they wait, nothing more is taken, and they go on behind what was told when it is back."""
    upstream = Upstream(delay_s=0.01)
    with playing(settings_of(upstream.url, tokenizer=small)) as player:
        for number in range(3):
            player.submit(f"job-{number}")
        wait_until(lambda: player.tokens("job-2"), description="tokens")
        upstream.close()
        wait_until(lambda: player.runner.capacity().effective == 0, description="nothing taken meanwhile")
        assert player.runner.telemetry()["upstream_up"] == 0
        assert "upstream_away" in player.runner.telemetry()["last_error"]
        again = Upstream(port=upstream.port)
        try:
            for number in range(3):
                assert_whole(player, f"job-{number}")
            assert player.runner.capacity().effective == 4
            assert "last_error" not in player.runner.telemetry()
        finally:
            again.close()


def test_jobs_go_back_to_the_queue_after_patience(small: str) -> None:
    """Somebody else may have a server; with what they have told."""
    upstream = Upstream(delay_s=0.01)
    with playing(settings_of(upstream.url, tokenizer=small, patience_seconds=0.3)) as player:
        player.submit(tokens=100)
        wait_until(player.tokens, description="tokens")
        upstream.close()
        assert isinstance(player.end(), GivenBack)
        assert player.runner.capacity().in_flight == 0


def test_a_full_log_stops_the_reading(upstream: Upstream, player: Player) -> None:
    """While the state server does not keep up, the server is not read: then its own buffers fill."""
    upstream.delay_s = 0.005
    player.sink.full = True
    player.submit(tokens=60)
    wait_until(player.tokens, description="the first token")
    assert len(player.tokens()) == 1
    player.sink.full = False
    ended = player.end()
    assert isinstance(ended, Finished) and player.tokens() == output_of(PROMPT, 60)


def test_stopping_hands_back_what_has_not_ended(upstream: Upstream, player: Player) -> None:
    """And leaves nothing in flight at the server."""
    upstream.delay_s = 0.01
    player.submit(tokens=400)
    wait_until(player.tokens, description="a token")
    assert [generation.job for generation in player.runner.stop()] == ["job"]
    wait_until(lambda: upstream.in_flight == 0, description="nothing in flight")
    assert not player.runner.is_alive()
    with pytest.raises(Refused):
        player.submit("next")


# -- text


@pytest.mark.parametrize("kind", BREAKS[:-1])
def test_text_is_asked_for_again_before_any_was_shown(upstream: Upstream, reader: Player, kind: str) -> None:
    """Nobody has seen anything, so nothing can be contradicted."""
    upstream.faults.append(Fault(kind))
    reader.submit(tokens=6)
    ended = reader.end()
    assert isinstance(ended, Finished)
    assert reader.text() == ended.outputs[0].text
    assert (ended.outputs[0].tokens, ended.prompt_tokens, ended.cached_tokens) == (6, 5, 2)
    assert len(upstream.asked) == 2


@pytest.mark.parametrize("kind", BREAKS[:-1])
def test_text_that_was_shown_is_never_generated_twice(upstream: Upstream, reader: Player, kind: str) -> None:
    """It cannot be continued: the generation fails by name, and what was shown stays."""
    upstream.faults.append(Fault(kind, 3))
    reader.submit(tokens=6)
    ended = reader.end()
    assert isinstance(ended, Failed) and ended.code == "upstream_lost"
    assert reader.text() and len(upstream.asked) == 1


def test_half_a_character_is_a_mark(upstream: Upstream, reader: Player) -> None:
    """JSON can write it, and nobody could store it."""
    upstream.faults.append(Fault("surrogate", 2))
    reader.submit(tokens=4)
    ended = reader.end()
    assert isinstance(ended, Finished) and ended.outputs[0].text == reader.text()
    assert reader.text().count("\ufffd") == 1


def test_a_takeover_of_shown_text_fails_by_name(reader: Player) -> None:
    """By the worker that gets it."""
    with pytest.raises(GenerationFailed) as failure:
        reader.submit(replay=((2**32 - 1,),))
    assert failure.value.code == "upstream_lost"


# -- opening


def test_another_tokenizer_is_noticed(upstream: Upstream, small: str) -> None:
    """Everything would be wrong."""
    upstream.vocabulary = lambda _: [1, 2, 3]
    with pytest.raises(ConfigurationError) as refused, playing(settings_of(upstream.url, tokenizer=small)):
        pass
    assert refused.value.param == "upstream.tokenizer"


def test_a_wrong_key_and_an_unknown_model_are_named(upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the worker starts, before anything was asked."""
    upstream.key = "sesame"
    with pytest.raises(ConfigurationError, match="refuses our key"), playing(settings_of(upstream.url, kind="openai")):
        pass
    named: dict[str, Any] = {"kind": "openai", "api_key_env": "THE_KEY"}
    with pytest.raises(ConfigurationError, match="THE_KEY is not set"), playing(settings_of(upstream.url, **named)):
        pass
    monkeypatch.setenv("THE_KEY", "sesame")
    other = settings_of(upstream.url, **named, model="other")
    with pytest.raises(ConfigurationError, match="has no model 'other'; it has known"), playing(other):
        pass
    with playing(settings_of(upstream.url, **named)) as player:
        player.submit(tokens=4)
        assert isinstance(player.end(), Finished)


def test_the_servers_slots_bound_the_target(upstream: Upstream, small: str) -> None:
    """What it cannot do at once is not sent at once."""
    with playing(settings_of(upstream.url, tokenizer=small, inflight=100)) as player:
        assert player.runner.effective_limit() == 64
        assert player.served.card.context_length == CONTEXT
        player.runner.set_limit(2)
        assert player.runner.capacity().effective == 2


def test_a_folder_has_the_same_tokenizer(tmp_path: Path, small: str) -> None:
    """As Hugging Face has it, written by the library of that name."""

    vocabulary = vocabulary_of("m", settings_of("http://x/v1", tokenizer=small))
    assert vocabulary is not None
    write_tokenizer(tmp_path, vocabulary.data)
    again = vocabulary_of("m", settings_of("http://x/v1", tokenizer=str(tmp_path)))
    assert again is not None and again.data.tokens == vocabulary.data.tokens
    sample = "The other people of this world, 1234 <|im_end|>"
    assert again.encode(sample, special=True) == vocabulary.encode(sample, special=True)
