"""A tiny Llama with random weights, generated in code: fast, deterministic, for tests and demonstrations of the queue.

The same seed gives the same model everywhere. Its text means nothing, but its streams wander through the vocabulary,
end of their own accord now and then, and depend on every token of the prompt, so mixed-up sessions are seen at once.
"""

from __future__ import annotations

import numpy as np

from tasks.vocabulary import CONTROL, Vocabulary, VocabularyData, byte_alphabet
from workers.engines.llama_weights import Floats, LlamaConfig, LlamaWeights, StoredLayer, in_panels, lay_out

VOCABULARY_SIZE = 512

_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

#: Words that get tokens of their own (their beginnings do too), until the vocabulary is full.
_WORDS = """ the of and to in a is that for it as was with be by on not he his but at are this have from or had an they
which one you were all her she there would their we him been has when who will no more if out so up said what its about
than into them can only other time new some could these two may first then do any like my now over such our man me even
most made after also did many off before must well back through years where much your way down should because long each
just state those people too mister how little good world make very year still see own work men day get here old life
both between being under three never know same last another while us might great go come since against right came take
"""


TINY = LlamaConfig(
    layers=5,
    width=64,
    heads=8,
    kv_heads=4,
    head_dim=8,
    ffn_width=172,
    vocabulary_size=VOCABULARY_SIZE,
    context_length=2048,
    rope_base=10000.0,
    norm_epsilon=1e-5,
)


def tiny_llama(seed: int, config: LlamaConfig = TINY) -> tuple[LlamaWeights, Vocabulary]:
    """The model of `seed` (>= 0): about 0.3 million weights, unless `config` says otherwise."""
    rng = np.random.default_rng(seed)
    layers = tuple(lay_out(config, _random_layer(config, rng)) for _ in range(config.layers))
    embedding = _normal(rng, VOCABULARY_SIZE, config.width, deviation=1.0)
    head = _normal(rng, VOCABULARY_SIZE, config.width, deviation=2.5 * config.width**-0.5)
    weights = LlamaWeights(
        config=config,
        layers=layers,
        final_norm=np.ones(config.width, np.float32),
        head=in_panels(head),
        embedding=embedding,
        digest=f"random:{seed}",
    )
    return weights, tiny_vocabulary()


def tiny_vocabulary() -> Vocabulary:
    """The tokenizer of `tiny_vocabulary_data`."""
    return Vocabulary(tiny_vocabulary_data())


def tiny_vocabulary_data() -> VocabularyData:
    """512 tokens: three control tokens, the 256 bytes, and beginnings of common words."""
    alphabet = byte_alphabet()
    pieces = _word_pieces(VOCABULARY_SIZE - len(_SPECIALS) - len(alphabet), space=alphabet[ord(" ")])
    tokens = (*_SPECIALS, *alphabet, *(left + right for left, right in pieces))
    return VocabularyData(
        kind="gpt2-bpe/smollm",
        tokens=tokens,
        merges=tuple(f"{left} {right}" for left, right in pieces),
        token_types=(CONTROL,) * len(_SPECIALS) + (1,) * (len(tokens) - len(_SPECIALS)),
        chat_template=_CHAT_TEMPLATE,
        eos_ids=(0, 2),
        bos_id=None,
        add_bos=False,
    )


def _word_pieces(count: int, *, space: str) -> list[tuple[str, str]]:
    """The first `count` merges that build the words, each with its leading space, character by character."""
    merges: dict[tuple[str, str], None] = {}
    for word in _WORDS.split():
        spaced = space + word
        for end in range(1, len(spaced)):
            merges.setdefault((spaced[:end], spaced[end]))
    return list(merges)[:count]


def _random_layer(config: LlamaConfig, rng: np.random.Generator) -> StoredLayer:
    """Maps of unit gain, with sharp attention, so that every token of the context moves the output."""
    width, ffn, q, kv = config.width, config.ffn_width, config.query_width, config.kv_width
    ones = np.ones(width, np.float32)
    return StoredLayer(
        attention_norm=ones,
        query=_normal(rng, q, width, deviation=2.0 * width**-0.5),
        key=_normal(rng, kv, width, deviation=2.0 * width**-0.5),
        value=_normal(rng, kv, width, deviation=2.0 * width**-0.5),
        output=_normal(rng, width, q, deviation=q**-0.5),
        ffn_norm=ones,
        gate=_normal(rng, ffn, width, deviation=2.0 * width**-0.5),
        up=_normal(rng, ffn, width, deviation=2.0 * width**-0.5),
        down=_normal(rng, width, ffn, deviation=ffn**-0.5),
    )


def _normal(rng: np.random.Generator, *shape: int, deviation: float) -> Floats:
    return rng.standard_normal(shape, dtype=np.float32) * np.float32(deviation)
