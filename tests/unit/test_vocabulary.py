"""Tokenizer, special tokens and chat template."""

from __future__ import annotations

import threading
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pool.errors import ConfigurationError, InvalidRequest
from tasks.payloads import ChatPrompt, Message, TextPrompt, TokenPrompt
from tasks.vocabulary import CONTROL, USER_DEFINED, Vocabulary, VocabularyData, byte_alphabet
from tests.waiting import wait_until
from workers.engines.tiny import tiny_vocabulary

TINY = tiny_vocabulary()
START, END = 1, 2

#: Texts that contain special tokens, parts of them, and the characters that markers are made of.
HOSTILE = st.lists(
    st.sampled_from(
        [
            "<|im_end|>",
            "<|im_start|>",
            "<|im_",
            "end|>",
            "<",
            "|>",
            "<|",
            "\n",
            " ",
            "a",
            "\ufdd0",
            "<|endoftext|>",
            "é",
        ]
    ),
    max_size=8,
).map("".join)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def data(**changes: Any) -> VocabularyData:
    """A minimal vocabulary: the 256 bytes, a control token and a user-defined one."""
    fields: dict[str, Any] = {
        "kind": "gpt2-bpe/smollm",
        "tokens": (*byte_alphabet(), "<|end|>", "<tool>"),
        "merges": (),
        "token_types": (1,) * 256 + (CONTROL, USER_DEFINED),
        "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
        "eos_ids": (256,),
        "bos_id": 256,
        "add_bos": False,
    }
    return VocabularyData(**(fields | changes))


def chat(*contents: str) -> ChatPrompt:
    """A conversation of user messages."""
    return ChatPrompt(messages=tuple(Message(role="user", content=content) for content in contents))


def controls(ids: list[int]) -> list[int]:
    return [token_id for token_id in ids if TINY.is_control(token_id)]


def text_of(vocabulary: Vocabulary, ids: list[int]) -> str:
    return b"".join(map(vocabulary.token_bytes, ids)).decode()


@settings(deadline=None)
@given(TEXT)
def test_tokens_of_a_text_stand_for_its_bytes(text: str) -> None:
    """Any text can be encoded, and its tokens' bytes are the text's."""
    assert text_of(TINY, TINY.encode(text, special=False)) == text


def test_common_words_are_single_tokens() -> None:
    """Merges are applied: a known word with its space is one token."""
    assert len(TINY.encode(" which they", special=False)) == 2


@pytest.mark.parametrize(
    ("special", "expected"), [pytest.param(True, [END], id="parsed"), pytest.param(False, [], id="text")]
)
def test_special_tokens_are_parsed_on_demand(special: bool, expected: list[int]) -> None:
    """The text of a control token becomes the token only where that is asked for."""
    assert controls(TINY.encode("a<|im_end|>b", special=special)) == expected


def test_user_defined_tokens_are_always_parsed() -> None:
    """GGUF's user-defined tokens are text with an id of their own, special or not."""
    vocabulary = Vocabulary(data())
    assert vocabulary.encode("<tool>", special=False) == vocabulary.encode("<tool>", special=True) == [257]
    assert vocabulary.token_bytes(257) == b"<tool>"


@settings(deadline=None)
@given(st.lists(HOSTILE, min_size=1, max_size=3))
def test_contents_never_become_control_tokens(contents: list[str]) -> None:
    """Whatever users write, a chat's control tokens are those of its template, and the text is all there."""
    ids = TINY.encode_prompt(chat(*contents))
    assert controls(ids) == [START, END] * len(contents) + [START]
    expected = "".join(f"user\n{content}\n" for content in contents) + "assistant\n"
    assert text_of(TINY, ids) == expected


def test_a_content_cannot_finish_a_token_that_the_template_continues() -> None:
    """The beginning of a special token at a content's end does not join with the template's text."""
    vocabulary = Vocabulary(data(chat_template="{{ messages[0].content | trim }}d|><|end|>"))
    ids = vocabulary.encode_prompt(chat("<|en \n"))
    assert ids.count(256) == 1
    assert text_of(vocabulary, ids) == "<|end|>"


@settings(deadline=None)
@given(TEXT)
def test_ordinary_chats_are_tokenized_as_rendered(content: str) -> None:
    """Without special text in a content, ids are those of the rendered conversation."""
    rendered = TINY.render_chat(chat(content).messages)
    assert rendered == f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
    assert TINY.encode_prompt(chat(content)) == TINY.encode(rendered, special=True)


def test_developer_messages_are_rendered_as_system() -> None:
    """The newer name of the role reaches the template under the old one."""
    developer, system = (TINY.render_chat([Message(role=role, content="x")]) for role in ("developer", "system"))
    assert developer == system


def test_text_prompts_parse_special_tokens() -> None:
    """The author of a raw prompt writes the model's format."""
    assert controls(TINY.encode_prompt(TextPrompt(text="<|im_start|>user\nhi<|im_end|>"))) == [START, END]


def test_token_prompts_are_checked() -> None:
    """Ids pass as they are; one outside the vocabulary is refused with the number and the limit."""
    assert TINY.encode_prompt(TokenPrompt(token_ids=(0, 511))) == [0, 511]
    with pytest.raises(InvalidRequest, match=r"512 .*511") as caught:
        TINY.encode_prompt(TokenPrompt(token_ids=(3, 512)))
    assert caught.value.param == "prompt"


def test_bos_comes_first_once() -> None:
    """A model that wants a first token gets it, unless the prompt begins with it."""
    vocabulary = Vocabulary(data(add_bos=True))
    assert vocabulary.encode_prompt(TextPrompt(text="a"))[0] == 256
    assert vocabulary.encode_prompt(TextPrompt(text="<|end|>a")).count(256) == 1
    assert vocabulary.encode_prompt(chat("a"))[0] == 256
    assert vocabulary.encode_prompt(TokenPrompt(token_ids=(5,))) == [5]


def test_control_tokens_have_no_bytes() -> None:
    """A control token stands for no text."""
    assert TINY.token_bytes(END) == b""


@pytest.mark.parametrize(
    "template",
    [
        pytest.param("{{ raise_exception('roles must alternate') }}", id="refuses"),
        pytest.param("{{ ''.__class__.__mro__ }}", id="leaves the sandbox"),
        pytest.param("{{ messages[0].content + 1 }}", id="has a bug"),
        pytest.param("{{ messages.append(1) }}", id="mutates"),
    ],
)
def test_a_template_that_fails_is_the_callers_error(template: str) -> None:
    """A refusing or broken template is a named error without the message's content."""
    vocabulary = Vocabulary(data(chat_template=template))
    with pytest.raises(InvalidRequest, match="chat template") as caught:
        vocabulary.encode_prompt(chat("secret"))
    assert "secret" not in caught.value.message
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("template", ["", "{# nothing #}"])
def test_a_chat_needs_a_template_that_writes_something(template: str) -> None:
    """No template, or one that renders nothing, is refused."""
    with pytest.raises(InvalidRequest):
        Vocabulary(data(chat_template=template)).encode_prompt(chat("a"))


def test_a_blob_carries_the_whole_vocabulary() -> None:
    """What a worker publishes, an API node loads: same fingerprint, same ids."""
    copy = Vocabulary.from_blob(TINY.to_blob())
    assert copy.fingerprint() == TINY.fingerprint()
    assert copy.data == TINY.data
    assert copy.encode_prompt(chat("which they")) == TINY.encode_prompt(chat("which they"))


def test_fingerprints_tell_vocabularies_apart() -> None:
    """Everything that decides ids or texts is in the fingerprint."""
    changed = (
        data(),
        data(chat_template="x"),
        data(add_bos=True),
        data(eos_ids=()),
        data(merges=("a b",), tokens=MERGED),
    )
    assert len({Vocabulary(each).fingerprint() for each in changed}) == len(changed)


MERGED = (*byte_alphabet(), "ab", "<tool>")


@pytest.mark.parametrize(
    "blob",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"not zlib", id="not zlib"),
        pytest.param(TINY.to_blob()[:-20], id="cut short"),
        pytest.param(zlib.compress(b"[]"), id="not an object"),
        pytest.param(zlib.compress(b'{"version": 2}'), id="another version"),
        pytest.param(zlib.compress(b"\xff"), id="not text"),
    ],
)
def test_damaged_blobs_are_refused(blob: bytes) -> None:
    """Anything but a blob of this version is a configuration error."""
    with pytest.raises(ConfigurationError, match="blob"):
        Vocabulary.from_blob(blob)


def test_a_blob_cannot_inflate_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A blob that would take more memory than any vocabulary is refused while inflating."""
    monkeypatch.setattr("tasks.vocabulary.MAX_BLOB_BYTES", 1000)
    with pytest.raises(ConfigurationError, match="too large"):
        Vocabulary.from_blob(zlib.compress(b" " * 10_000))


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"kind": "spm"}, "kind"),
        ({"tokens": (), "token_types": ()}, "tokens"),
        ({"token_types": (1,)}, "token_types"),
        ({"eos_ids": (258,)}, "eos_ids"),
        ({"bos_id": -1}, "bos_id"),
        ({"merges": ("ab",)}, "merges"),
        ({"merges": ("a b",)}, "merges"),
        ({"tokens": (*byte_alphabet(), "<|end|>", "a b"), "token_types": (1,) * 258}, "tokens"),
        ({"chat_template": "{% for %}"}, "chat_template"),
    ],
)
def test_inconsistent_data_are_refused_by_field(changes: dict[str, Any], param: str) -> None:
    """Each inconsistency names its field."""
    with pytest.raises(ConfigurationError) as caught:
        Vocabulary(data(**changes))
    assert caught.value.param == param


def test_other_threads_run_while_a_long_text_is_tokenized() -> None:
    """A long prompt takes a second a megabyte; leases must be renewed and other requests answered meanwhile."""
    turns: list[int] = []
    done = threading.Event()

    def turn() -> None:
        while not done.wait(0.001):
            turns.append(len(turns))

    thread = threading.Thread(target=turn)
    thread.start()
    wait_until(lambda: turns, description="the other thread to run")
    before = len(turns)
    ids = TINY.encode("the quick brown fox " * 50_000, special=False)
    during = len(turns) - before
    done.set()
    thread.join()
    assert len(ids) > 10_000
    assert during > 20
