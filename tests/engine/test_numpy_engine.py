"""What the numpy engine promises beyond the contract of all engines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pool.errors import ConfigurationError
from pool.settings import ModelSettings
from tasks.ports import Engine, Member, MemberError
from tests.engine.driving import (
    RandomSchedule,
    alone,
    begin,
    decode,
    ids,
    new_scope,
    prefill,
    row_of,
    same_bits,
    some_tokens,
)
from workers.engines import load_engine
from workers.engines.exact_linear import Crew, decode_rows_padded, measure
from workers.engines.gguf_model import read_gguf
from workers.engines.llama_weights import Floats
from workers.engines.numpy_llama import NumpyLlama
from workers.engines.paged_kv import position_bytes
from workers.engines.tiny import TINY, tiny_llama


def test_the_numpy_engine_says_what_it_can_do(tiny: Engine) -> None:
    """It shares and exports, on a grid of 16; what it generated it cannot recompute to the bit."""
    capability = tiny.capability()
    assert (capability.snapshot, capability.prefix_share, capability.recompute_exact) == (True, True, False)
    assert capability.max_positions == tiny.context_length
    assert tiny.prefill_grid == 16


def test_plain_products_promise_nothing_and_come_close(tiny: Engine) -> None:
    """Without batch invariance the engine says so, is another by its fingerprint, and its logits are nearly the exact
    ones, for prompts and decode rows in steps of any size."""
    settings = ModelSettings(source="random:7", exact=False)
    plain = load_engine("tiny", settings, weights=None)
    assert plain.capability() == replace(tiny.capability(), batch_invariant=False)
    assert plain.fingerprint() == load_engine("tiny", settings, weights=None).fingerprint() != tiny.fingerprint()
    prompts = [some_tokens(tiny, length) for length in (1, 15, 16, 17, 40, 130, 64, 3, 9, 21)]
    streams = [RandomSchedule(engine, prompts, 2, room=10, seed=1).run() for engine in (tiny, plain)]
    exact, close = ([row for stream in of_engine for row in stream.rows] for of_engine in streams)
    np.testing.assert_allclose(close, exact, rtol=0, atol=1e-3)


@pytest.mark.parametrize("rows", range(1, 18))
def test_decode_rows_are_padded_no_more_than_needed(rows: int) -> None:
    """To a short tile that is allowed, where one is enough, else to whole tiles."""
    assert decode_rows_padded(rows, ()) == -(-rows // 8) * 8
    expected = {1: 2, 2: 2, 3: 5, 4: 5, 5: 5}.get(rows, -(-rows // 8) * 8)
    assert decode_rows_padded(rows, (2, 5)) == expected
    assert decode_rows_padded(0, (2, 5)) == 0


def test_only_what_came_out_equal_counts_as_a_short_tile() -> None:
    """Row counts whose tiles give other bits, or one row of them, are left out."""
    panels = np.random.default_rng(1).standard_normal((2, 96, 32), dtype=np.float32)

    class Kernels(Crew):
        def multiply(self, x: Floats, panels: Floats, out: Floats) -> None:
            super().multiply(x, panels, out)
            if x.shape[-2] == 3:
                out += np.float32(1e-3)
            elif x.shape[-2] == 5:
                out[..., 4, :] += np.float32(1e-3)

    honest = measure(panels, Crew(1))
    assert set(measure(panels, Kernels(1)).short) == set(honest.short) - {3, 5}
    assert honest.rows_independent


def test_the_kv_budget_is_kept_in_whole_pages() -> None:
    """A page at least has to fit, and nobody is promised more positions than the pages have."""
    page_bytes = 64 * position_bytes(TINY)
    with pytest.raises(ConfigurationError) as refusal:
        load_engine("tiny", ModelSettings(source="random:1", kv_budget_bytes=page_bytes - 1), weights=None)
    assert refusal.value.param == "kv_budget_bytes"
    engine = load_engine("tiny", ModelSettings(source="random:1", kv_budget_bytes=3 * page_bytes - 1), weights=None)
    assert engine.capability().max_positions == engine.kv_usage().total == 128
    assert engine.begin("a", 0, ids(5), 129) is None
    assert engine.begin("a", 0, ids(5), 128) == 0


def test_a_budget_beyond_the_machine_is_refused_by_name() -> None:
    """It is an error of the settings, not a crash."""
    with pytest.raises(ConfigurationError) as refusal:
        NumpyLlama(*tiny_llama(1), kv_bytes=2**60)
    assert refusal.value.param == "kv_budget_bytes"


def test_a_prompt_is_found_while_it_runs(tiny: Engine) -> None:
    """Pages are there for others as soon as they are full."""
    prompt, scope = some_tokens(tiny, 200), new_scope()
    expected = prefill(tiny, "runs", prompt)
    tiny.release("runs", 0)
    begin(tiny, "runs", prompt, scope=scope)
    for stop, found in ((48, 0), (112, 64), (128, 128), (200, 192)):
        start = {48: 0, 112: 48, 128: 112, 200: 128}[stop]
        tiny.step([Member("runs", 0, prompt[start:stop], start)])
        assert tiny.resident(prompt, scope) == found
    assert same_bits([prefill(tiny, "beside", prompt, scope=scope)], [expected])
    for session in ("runs", "beside"):
        tiny.release(session, 0)


def test_decoded_prompt_tokens_are_not_found(tiny: Engine) -> None:
    """A prompt fed token by token, off the grid's rules, is computed as decode rows, so nobody begins with that."""
    prompt, scope = some_tokens(tiny, 70), new_scope()
    begin(tiny, "single", prompt, scope=scope)
    decode(tiny, "single", prompt.tolist(), 0)
    assert tiny.resident(prompt, scope) == 0
    blob = tiny.snapshot("single", 0)
    assert blob is not None
    tiny.release("single", 0)
    assert tiny.restore("single", 1, blob, prompt, 100, scope)
    tiny.release("single", 1)
    assert tiny.resident(prompt, scope) == 0
    begin(tiny, "single", prompt, scope=scope)
    decode(tiny, "single", prompt[:16].tolist(), 0)
    tiny.step([Member("single", 0, prompt[16:], 16)])
    tiny.release("single", 0)
    assert tiny.resident(prompt, scope) == 0


def test_overflowing_numbers_stay_with_their_session() -> None:
    """A token whose embedding is no number fails its member by name, and whoever gets its pages later is well."""
    weights, vocabulary = tiny_llama(5)
    assert weights.embedding is not None
    prompt, sick = (np.random.default_rng(size).integers(17, 512, size).astype(np.int32) for size in (100, 127))
    sick[-2] = 7
    sound = NumpyLlama(weights, vocabulary)
    expected = [prefill(sound, "a", prompt), *decode(sound, "a", [30], 100)]
    weights.embedding[7] = np.inf
    engine = NumpyLlama(weights, vocabulary, kv_bytes=4 * 64 * sound.bytes_per_token)
    begin(engine, "sick", sick, room=1)
    begin(engine, "b", prompt, room=1)
    results = engine.step([Member("sick", 0, sick, 0), Member("b", 0, prompt, 0)])
    assert isinstance(results[0], MemberError)
    assert same_bits([row_of(results[1]), *decode(engine, "b", [30], 100)], expected)
    for session in ("sick", "b"):
        engine.release(session, 0)
    rows = [prefill(engine, "c", prompt, room=100), *decode(engine, "c", [30], 100)]
    assert same_bits(rows, expected)


def test_a_restored_session_writes_nothing_that_others_have(tiny: Engine) -> None:
    """It shares the pages of what it held, and has its own for what it computes, whatever others have of that."""
    prompt, scope = some_tokens(tiny, 150), new_scope()
    begin(tiny, "half", prompt, scope=scope)
    tiny.step([Member("half", 0, prompt[:80], 0, wants_logits=False)])
    blob = tiny.snapshot("half", 0)
    assert blob is not None
    tiny.release("half", 0)
    prefill(tiny, "whole", prompt, scope=scope, room=1)
    assert tiny.restore("half", 1, blob, prompt, 151, scope)
    assert tiny.kv_usage().held == (3 + 2) * 64
    for epoch in (0, 1):
        tiny.release("half", epoch)
        tiny.release("whole", epoch)


def test_models_differ_by_seed_and_agree_by_seed() -> None:
    """The seed is the model: same seed, same fingerprint and bits; another seed, neither. Snapshots do not cross."""
    first, again, other = (
        load_engine("tiny", ModelSettings(source=f"random:{seed}"), weights=None) for seed in (1, 1, 2)
    )
    prompt = some_tokens(first, 20)
    rows = [prefill(engine, "a", prompt) for engine in (first, again, other)]
    assert same_bits(rows[:1], rows[1:2])
    assert not same_bits(rows[:1], rows[2:])
    assert first.fingerprint() == again.fingerprint() != other.fingerprint()
    blob = first.snapshot("a", 0)
    assert blob is not None
    assert again.restore("b", 0, blob, prompt, 30)
    assert same_bits(decode(again, "b", [30], 20), decode(first, "a", [30], 20))
    assert not other.restore("b", 0, blob, prompt, 30)


def test_threads_do_not_show(smollm2_path: Path) -> None:
    """The number of threads changes neither the fingerprint nor a bit of the logits."""
    weights, vocabulary = read_gguf(smollm2_path)
    engines = [NumpyLlama(weights, vocabulary, threads=threads) for threads in (1, 3)]
    one, three = ([prefill(engine, "a", some_tokens(engine, 70)), *decode(engine, "a", [30], 70)] for engine in engines)
    assert same_bits(one, three)
    assert engines[0].fingerprint() == engines[1].fingerprint()
    for engine in engines:
        engine.close()


def test_a_closed_engine_answers_with_errors() -> None:
    """Closing twice is fine; steps after it are errors of their members, and nothing can be restored."""
    engine = load_engine("tiny", ModelSettings(source="random:3"), weights=None)
    prompt = some_tokens(engine, 20)
    prefill(engine, "a", prompt)
    blob = engine.snapshot("a", 0)
    assert blob is not None
    engine.close()
    engine.close()
    assert isinstance(engine.step([Member("a", 0, ids(5), 20)])[0], MemberError)
    assert engine.snapshot("a", 0) is None
    assert not engine.restore("a", 0, blob, prompt, 30)
    assert engine.begin("a", 0, prompt, 30) is None
    engine.check_integrity()


def test_tiny_streams_wander(tiny: Engine) -> None:
    """Greedy streams of the tiny model do not collapse into a few tokens, and differ by prompt."""
    streams = [alone(tiny, some_tokens(tiny, 12, seed=seed), 48).tokens for seed in range(6)]
    assert all(len(set(tokens)) >= 24 for tokens in streams)
    assert len({tuple(tokens) for tokens in streams}) == len(streams)
