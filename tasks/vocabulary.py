"""Text to token ids and back: one model's tokenizer, special tokens and chat template.

A vocabulary is plain data (`VocabularyData`). A worker that has the model's files publishes it as a blob, and an API
node without any model file loads that blob and tokenizes exactly as the worker would.

Special tokens. `encode(text, special=True)` turns the text of a special token into its id, as llama.cpp's `/tokenize`
does with `parse_special`; that is right for a raw text prompt, whose author writes the model's own format. In a chat
only the template may write special tokens: what stands in a message's content is text, so `<|im_end|>` typed by a user
becomes the ordinary tokens of those ten characters. `encode_prompt` reaches that by breaking every special token's text
inside a content with a marker character before rendering and dropping the markers after the split at special tokens.
Contents without such text are rendered and tokenized exactly as llama.cpp's `/apply-template` and `/tokenize` do it.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Literal, NoReturn

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import ValidationError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pool.errors import ConfigurationError, ContextTooLong, InvalidRequest
from tasks.payloads import ChatPrompt, Message, Prompt, Strict, TextPrompt

#: Inflated blobs above this are refused: a published vocabulary is a few megabytes.
MAX_BLOB_BYTES = 256 * 2**20

#: GGUF token types (ggml's `llama_token_type`).
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4

#: Characters that Unicode reserves for internal use and never assigns.
_MARKERS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))

#: Characters tokenized at once when a prompt may be far too long.
SLICE_CHARS = 32_768


class VocabularyData(Strict):
    """Everything a vocabulary is made of.

    `kind`: tokenizer model and pre-tokenizer, e.g. `gpt2-bpe/smollm`; `tokens`: texts by id, byte-level encoded;
    `merges`: BPE merges ("left right"), best first; `token_types`: GGUF type by id; `chat_template`: jinja2, empty when
    the model has none; `eos_ids`: tokens that end a generation; `bos_id`: put first when `add_bos`.
    """

    version: Literal[1] = 1
    kind: str
    tokens: tuple[str, ...]
    merges: tuple[str, ...]
    token_types: tuple[int, ...]
    chat_template: str
    eos_ids: tuple[int, ...]
    bos_id: int | None
    add_bos: bool


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


_PRE_TOKENIZERS = {"gpt2-bpe/smollm": _smollm}


class Vocabulary:
    """Tokenizer, special tokens and chat template of one model. Immutable; safe to use from several threads.

    Raises ConfigurationError, naming the field, when the data are inconsistent or of a kind not supported.
    """

    def __init__(self, data: VocabularyData) -> None:
        _check(data)
        self._data = data
        self._bpe = _byte_level_bpe(data)
        self._control = frozenset(i for i, kind in enumerate(data.token_types) if kind in (UNKNOWN, CONTROL))
        user_defined = [i for i, kind in enumerate(data.token_types) if kind == USER_DEFINED]
        self._user_defined = frozenset(user_defined)
        self._user_ids = {data.tokens[i]: i for i in user_defined}
        self._special_ids = self._user_ids | {data.tokens[i]: i for i in sorted(self._control)}
        self._user_pattern = _any_of(self._user_ids)
        self._special_pattern = _any_of(self._special_ids)
        self._special_start = _start_of_any(self._special_ids)
        self._template = _compile_template(data.chat_template) if data.chat_template else None

    @property
    def data(self) -> VocabularyData:
        return self._data

    @property
    def size(self) -> int:
        """Number of token ids; valid ids are 0 .. size - 1."""
        return len(self._data.tokens)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a generation, ascending."""
        return self._data.eos_ids

    @property
    def bos_id(self) -> int | None:
        return self._data.bos_id

    def is_control(self, token_id: int) -> bool:
        """Whether the token steers the model and has no text of its own."""
        return token_id in self._control

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids of `text`, without a beginning-of-sequence token.

        `special=True` parses the text of control tokens; `special=False` treats it as plain text. User-defined tokens
        (a GGUF type apart from control tokens) are parsed either way, as llama.cpp does.
        """
        ids: list[int] = []
        for piece in self._split(text, special=special):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids.extend(self._plain_ids(piece))
        return ids

    def render_chat(self, messages: Sequence[Message]) -> str:
        """The conversation in the model's own format, the assistant's turn opened.

        Raises InvalidRequest when the model has no chat template or its template refuses these messages.
        """
        return self._render([message.content for message in messages], messages)

    def check_length(self, prompt: Prompt, limit_tokens: int) -> None:
        """Refuse a text that is certainly too long after reading only as much of it as shows that.

        Slices are tokenized one by one; each cut may add one token, which is not counted. Raises ContextTooLong.
        """
        texts = [message.content for message in prompt.messages] if isinstance(prompt, ChatPrompt) else []
        texts += [prompt.text] if isinstance(prompt, TextPrompt) else []
        if sum(map(len, texts)) <= SLICE_CHARS:
            return
        tokens = 0
        for text in texts:
            for start in range(0, len(text), SLICE_CHARS):
                tokens += max(len(self._plain_ids(text[start : start + SLICE_CHARS])) - 1, 0)
                if tokens > limit_tokens:
                    raise ContextTooLong(
                        prompt_tokens=tokens, max_tokens=1, context_length=limit_tokens, param="prompt"
                    )

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Token ids of any prompt; bos is added in front of text and chats when the model asks for it.

        Raises InvalidRequest for ids outside the vocabulary, naming the first such id and the limit.
        """
        if isinstance(prompt, ChatPrompt):
            return self._with_bos(self._encode_chat(prompt.messages))
        if isinstance(prompt, TextPrompt):
            return self._with_bos(self.encode(prompt.text, special=True))
        for token_id in prompt.token_ids:
            if token_id >= self.size:
                raise InvalidRequest(
                    f"Token id {token_id} is outside this model's vocabulary: ids go from 0 to {self.size - 1}.",
                    param="prompt",
                )
        return list(prompt.token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for: parts of UTF-8 characters are possible; empty for control tokens."""
        if token_id in self._control:
            return b""
        token = self._data.tokens[token_id]
        if token_id in self._user_defined:
            return token.encode()
        return bytes(map(_BYTE_OF.__getitem__, token))

    def name(self, token_id: int) -> str:
        """What the vocabulary calls the token: for a control token the text that stands for it in a prompt."""
        return self._data.tokens[token_id]

    @cached_property
    def _json(self) -> bytes:
        return self._data.model_dump_json().encode()

    @cached_property
    def _digest(self) -> str:
        return hashlib.sha256(self._json).hexdigest()

    def fingerprint(self) -> str:
        """SHA-256 (hex) over everything that decides ids and texts."""
        return self._digest

    def to_blob(self) -> bytes:
        """The whole vocabulary as zlib-compressed JSON."""
        return zlib.compress(self._json, level=6)

    @classmethod
    def from_blob(cls, blob: bytes) -> Vocabulary:
        """Inverse of `to_blob`. Raises ConfigurationError for anything else."""
        return cls(_parse_blob(blob))

    def _plain_ids(self, text: str) -> list[int]:
        """Token ids of a text without special tokens. As a batch of one, because only batches let other threads run
        meanwhile: a long prompt takes a second a megabyte."""
        ids: list[int] = self._bpe.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def _split(self, text: str, *, special: bool) -> Iterator[str | int]:
        """Cut at special tokens: their ids, and the non-empty texts between them."""
        pattern, ids = (self._special_pattern, self._special_ids) if special else (self._user_pattern, self._user_ids)
        start = 0
        for match in pattern.finditer(text) if pattern else ():
            if match.start() > start:
                yield text[start : match.start()]
            yield ids[match[0]]
            start = match.end()
        if start < len(text):
            yield text[start:]

    def _encode_chat(self, messages: Sequence[Message]) -> list[int]:
        marker = _unused_marker(messages)
        contents = [self._break_specials(message.content, marker) for message in messages]
        rendered = self._render(contents, messages)
        ids: list[int] = []
        for piece in self._split(rendered, special=True):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids.extend(self._plain_ids(piece.replace(marker, "")))
        if not ids:
            raise InvalidRequest("The chat renders to an empty prompt.", param="messages")
        return ids

    def _break_specials(self, content: str, marker: str) -> str:
        """Put the marker after the first character of every special token, also of one that only begins at the end."""
        if self._special_start is None:
            return content
        return self._special_start.sub(lambda match: match[0] + marker, content)

    def _render(self, contents: Sequence[str], messages: Sequence[Message]) -> str:
        if self._template is None:
            raise InvalidRequest("This model has no chat template; send plain text instead.", param="messages")
        turns = [
            {"role": "system" if message.role == "developer" else message.role, "content": content}
            for message, content in zip(messages, contents, strict=True)
        ]
        try:
            return self._template.render(
                messages=turns,
                add_generation_prompt=True,
                bos_token=self._text_of(self._data.bos_id),
                eos_token=self._text_of(self._data.eos_ids[0] if self._data.eos_ids else None),
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError):
            raise InvalidRequest("The model's chat template refuses these messages.", param="messages") from None

    def _text_of(self, token_id: int | None) -> str:
        return "" if token_id is None else self._data.tokens[token_id]

    def _with_bos(self, ids: list[int]) -> list[int]:
        bos_id = self._data.bos_id
        if not self._data.add_bos or bos_id is None or ids[:1] == [bos_id]:
            return ids
        return [bos_id, *ids]


def byte_alphabet() -> list[str]:
    """The printable character that byte-level BPE writes for each byte 0 .. 255.

    Bytes that print in Latin-1 stand for themselves; the rest, in order, take the code points from 256 on
    (GPT-2, Radford et al. 2019).
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in visible else next(spare)) for byte in range(256)]


_BYTE_OF = {character: byte for byte, character in enumerate(byte_alphabet())}


def _check(data: VocabularyData) -> None:
    """Refuse what would fail later, naming the field."""
    size = len(data.tokens)
    if data.kind not in _PRE_TOKENIZERS:
        raise ConfigurationError(
            f"Tokenizer kind {data.kind!r} is not supported; supported: {', '.join(_PRE_TOKENIZERS)}.", param="kind"
        )
    if size == 0:
        raise ConfigurationError("The vocabulary has no tokens.", param="tokens")
    if len(data.token_types) != size:
        raise ConfigurationError(f"{len(data.token_types)} token types for {size} tokens.", param="token_types")
    for name, ids in (("eos_ids", data.eos_ids), ("bos_id", () if data.bos_id is None else (data.bos_id,))):
        if not all(0 <= token_id < size for token_id in ids):
            raise ConfigurationError(f"{name} holds an id outside 0..{size - 1}.", param=name)
    for token_id, (token, kind) in enumerate(zip(data.tokens, data.token_types, strict=True)):
        if kind not in (UNKNOWN, CONTROL, USER_DEFINED) and not _BYTE_OF.keys() >= set(token):
            raise ConfigurationError(f"Token {token_id} is not byte-level encoded.", param="tokens")


def _byte_level_bpe(data: VocabularyData) -> Tokenizer:
    """The BPE alone, without special tokens: those are split off before."""
    merges = []
    for merge in data.merges:
        left, separator, right = merge.partition(" ")
        if not (left and separator and right):
            raise ConfigurationError("A merge is not two tokens with a space between.", param="merges")
        merges.append((left, right))
    try:
        bpe = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(data.tokens)}, merges=merges))
    except Exception as error:  # noqa: BLE001  (the Rust binding raises bare Exception)
        raise ConfigurationError(f"The merges do not fit the tokens: {error}.", param="merges") from None
    bpe.pre_tokenizer = _PRE_TOKENIZERS[data.kind]()
    bpe.decoder = decoders.ByteLevel()
    return bpe


def _any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern for any of the texts, the longest first; None without texts."""
    known = [text for text in texts if text]
    return re.compile(_alternatives(known)) if known else None


def _alternatives(texts: Iterable[str]) -> str:
    return "|".join(map(re.escape, sorted(texts, key=lambda text: (-len(text), text))))


def _start_of_any(texts: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern for the first character of each of the texts, where the text, or the string's end, follows.

    The end counts, with or without white space before it (templates may trim), so that a content and the template's
    next characters cannot form a special token together.
    """
    whole: dict[str, set[str]] = {}
    cut: dict[str, set[str]] = {}
    for text in filter(None, texts):
        whole.setdefault(text[0], set()).add(text[1:])
        cut.setdefault(text[0], set()).update(text[1:end] for end in range(1, len(text)))
    starts = [
        rf"{re.escape(first)}(?={_alternatives(whole[first])}|(?:{_alternatives(cut[first])})\s*\Z)" for first in whole
    ]
    return re.compile("|".join(starts)) if starts else None


def _unused_marker(messages: Sequence[Message]) -> str:
    """A character that occurs in no content."""
    used = set().union(*(message.content for message in messages))
    for marker in _MARKERS:
        if marker not in used:
            return marker
    raise InvalidRequest("The messages use all of U+FDD0..U+FDEF, which are not characters.", param="messages")


def _refuse_conversation(message: str) -> NoReturn:
    """What a template calls when it cannot render a conversation."""
    raise TemplateError(message)


def _compile_template(source: str) -> Template:
    """A chat template with the options and the functions that Hugging Face's templates are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols"],
    )
    environment.globals["raise_exception"] = _refuse_conversation
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ConfigurationError(f"The chat template is not valid jinja2: {error}.", param="chat_template") from None


def _parse_blob(blob: bytes) -> VocabularyData:
    inflater = zlib.decompressobj()
    try:
        document = inflater.decompress(blob, MAX_BLOB_BYTES)
        if inflater.eof:
            return VocabularyData.model_validate_json(document)
    except (zlib.error, ValidationError):
        pass
    raise ConfigurationError("The vocabulary blob is damaged, too large or of another version.", param="vocabulary")
