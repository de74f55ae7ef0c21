"""The vocabulary of a model that a server runs: from a GGUF file, or from a folder as Hugging Face has it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pool.backend_settings import NO_TOKENIZER
from pool.errors import ConfigurationError
from pool.settings import ModelSettings
from tasks.vocabulary import CONTROL, USER_DEFINED, Vocabulary, VocabularyData
from workers.engines.gguf_model import TURN_ENDS, read_vocabulary
from workers.weights import ensure_weights

_NORMAL = 1
_FIELD = "upstream.tokenizer"
#: The pre-tokenizers that `tasks.vocabulary` knows, as such a folder writes them.
_KINDS = {
    ("Digits", "ByteLevel"): "gpt2-bpe/smollm",
}


def vocabulary_of(name: str, model: ModelSettings) -> Vocabulary | None:
    """None where prompts are passed on as they are. Raises ConfigurationError for a tokenizer that is not known, which
    says how to do without."""
    source = model.upstream.tokenizer or ("" if model.backend == "openai_remote" else model.source)
    if source in ("", NO_TOKENIZER):
        return None
    try:
        folder = Path(source).expanduser()
        if folder.is_dir():
            return Vocabulary(_from_folder(folder))
        return read_vocabulary(ensure_weights(source))[0]
    except ConfigurationError as error:
        raise ConfigurationError(
            f'Model {name}: {error.message} With {_FIELD} = "{NO_TOKENIZER}" prompts are passed on as they are.',
            param=_FIELD,
        ) from None


def _from_folder(folder: Path) -> VocabularyData:
    """`tokenizer.json`, and what else says which tokens end a generation and how a chat is written."""
    tokenizer, config = _read(folder / "tokenizer.json"), _read(folder / "tokenizer_config.json", {})
    model, added = tokenizer.get("model") or {}, tokenizer.get("added_tokens") or []
    kind = _kind_of(folder, tokenizer)
    vocabulary = {**model["vocab"], **{token["content"]: token["id"] for token in added}}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    if [vocabulary[token] for token in tokens] != list(range(len(tokens))):
        raise ConfigurationError(f"{folder.name}/tokenizer.json leaves token ids out.")
    types = [_NORMAL] * len(tokens)
    for token in added:
        types[token["id"]] = CONTROL if token.get("special") else USER_DEFINED
    bos = vocabulary.get(_content(config.get("bos_token")))
    return VocabularyData(
        kind=kind,
        tokens=tuple(tokens),
        merges=tuple(merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]),
        token_types=tuple(types),
        chat_template=_template(folder, config),
        eos_ids=_ends(folder, config, vocabulary, types),
        bos_id=bos,
        add_bos=bos is not None and config.get("add_bos_token") is True,
    )


def _kind_of(folder: Path, tokenizer: Mapping[str, Any]) -> str:
    before = tokenizer.get("pre_tokenizer") or {}
    steps = before.get("pretokenizers") or [before]
    kind = _KINDS.get(tuple(step.get("type") for step in steps))
    digits_and_bytes = all(
        step.get("individual_digits", True) and not step.get("add_prefix_space") and step.get("use_regex", True)
        for step in steps
    )
    model = tokenizer.get("model") or {}
    plain = model.get("type") == "BPE" and not model.get("ignore_merges") and tokenizer.get("normalizer") is None
    if kind is None or not digits_and_bytes or not plain or tokenizer.get("post_processor") is not None:
        raise ConfigurationError(f"The tokenizer in {folder.name} is not supported.")
    return kind


def _template(folder: Path, config: Mapping[str, Any]) -> str:
    own = folder / "chat_template.jinja"
    if own.is_file():
        return own.read_text(encoding="utf-8")
    told = config.get("chat_template")
    return told if isinstance(told, str) else ""


def _ends(folder: Path, config: Mapping[str, Any], vocabulary: Mapping[str, int], types: list[int]) -> tuple[int, ...]:
    """As the GGUF reader finds them: what the files name, and the control tokens that end turns everywhere."""
    found = {vocabulary[text] for text in TURN_ENDS if text in vocabulary and types[vocabulary[text]] == CONTROL}
    named = vocabulary.get(_content(config.get("eos_token")))
    found |= set() if named is None else {named}
    for file in ("config.json", "generation_config.json"):
        told = _read(folder / file, {}).get("eos_token_id")
        found |= {each for each in (told if isinstance(told, list) else [told]) if isinstance(each, int)}
    return tuple(sorted(each for each in found if each < len(types)))


def _content(token: Any) -> str:
    """A token's text, which may be written as an object."""
    return str(token.get("content", "")) if isinstance(token, dict) else token if isinstance(token, str) else ""


def _read(path: Path, default: dict[str, Any] | None = None) -> dict[str, Any]:
    if default is not None and not path.is_file():
        return default
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path.parent.name}/{path.name} cannot be read ({type(error).__name__}).") from None
    if not isinstance(found, dict):
        raise ConfigurationError(f"{path.parent.name}/{path.name} is no object.")
    return found
