"""Large inputs: stored once a tenant, held while somebody needs them, gone with the last."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pool.errors import GenerationFailed, QueueFull
from pool.rules import jobs
from pool.store.audit import Audit
from pool.store.connection import Client
from pool.store.delivery import Delivery
from pool.store.handouts import Handout, Write, failed
from pool.store.inputs import BLOCK_BYTES, INLINE_BYTES, blocks_of, read_input
from pool.store.jobs import JobStore
from pool.store.keys import ModelKeys
from pool.store.log import pack_ids
from pool.store.nodes import node_of
from pool.store.records import NewJob
from pool.store.scripts import Command
from tests.builders import LINGER_MS, RESULT_TTL_MS, completed, entry, job_store, new_job, sweeper, swept_steadily

KEYS = ModelKeys("tiny:0")
#: About 400 KB each, as text and as token ids.
HISTORY = "".join(random.Random(1).choices("abcdefghijklmnop qrst", k=400_000))
IDS = random.Random(2).choices(range(49_152), k=100_000)


def long_job(more: str = "", *, chars: int = 60_000, ids: int = 5_000, **fields: Any) -> NewJob:
    """A job whose input does not fit its record; `more` comes after the common beginning."""
    prompt = pack_ids([*IDS[:ids], *more.encode()])
    return new_job(**({"input": f'["{HISTORY[:chars]}{more}"]', "prompt": prompt} | fields))


def blocks(client: Client) -> set[str]:
    """All that are stored."""
    return {key.decode().rpartition(":")[2] for key in client.scan_iter(match=KEYS.input("*"), count=1000)}


def ids_of(tenant: str, content: bytes) -> set[str]:
    """The blocks of some content."""
    return {block.id for block in blocks_of(tenant, content)}


def holders(client: Client, block: str) -> set[str]:
    """The jobs that hold a block."""
    return {field.decode() for field in client.hkeys(KEYS.input(block))} - {"data", "until_ms", "kept"}


def memory(client: Client) -> int:
    """Bytes of all of the model's keys."""
    return sum(client.memory_usage(key, samples=0) for key in client.scan_iter(match="gp:*", count=1000))


def begin(rank: Delivery) -> Handout:
    """Take the only job there is."""
    (handout,) = rank.take(1, 100).handouts
    return handout


def complete(rank: Delivery, handout: Handout) -> None:
    """End a job well."""
    assert rank.write([Write(handout.lease, handout.logged, (), completed("x"))])[0].code == "ok"


# -- cutting ---------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(size=st.integers(0, 3_000_000), more=st.integers(1, 300_000))
def test_a_longer_text_shares_all_blocks_but_the_last(size: int, more: int) -> None:
    """Cuts depend on the beginning alone, so appending changes only the block that was not full."""
    text = random.Random(size).randbytes(size + more)
    before, after = blocks_of("t", text[:size]), blocks_of("t", text)
    assert before[:-1] == after[: max(len(before) - 1, 0)]
    assert b"".join(block.content for block in after) == text


def test_the_largest_body_needs_few_blocks() -> None:
    """No script touches more than 100 items: 8 MiB of input and a context of 128k tokens are fewer blocks."""
    body, context = blocks_of("t", bytes(8 * 2**20)), blocks_of("t", bytes(4 * 128 * 1024))
    assert len(body) <= 56
    assert len(body) + len(context) < 100
    assert len(body[0].content) == BLOCK_BYTES


def test_an_id_depends_on_tenant_and_content() -> None:
    """And where one ends and the other begins."""
    ids = [blocks_of(tenant, text)[0].id for tenant, text in (("a", b"bc"), ("ab", b"c"), ("a", b"c"), ("1:a", b"bc"))]
    assert len(set(ids)) == 4
    assert all(len(block) == 32 for block in ids)


# -- storing ---------------------------------------------------------------------------------------------------------


def test_a_small_input_stays_in_its_record(store: JobStore, rank_a: Delivery, client: Client) -> None:
    """Up to the limit, to the byte; one byte more makes blocks."""
    small = new_job(input="i" * (INLINE_BYTES - 12), prompt=pack_ids([1, 2, 3]))
    store.submit(small)
    assert blocks(client) == set()
    handout = begin(rank_a)
    assert (handout.prompt, handout.lease.blocks) == (small.prompt, ())
    complete(rank_a, handout)
    assert read_input(client, small.ref) == small.input
    store.submit(new_job(input="i" * (INLINE_BYTES - 11), prompt=pack_ids([1, 2, 3])))
    assert len(blocks(client)) == 2
    complete(rank_a, begin(rank_a))


def test_a_grown_history_is_stored_once(store: JobStore, rank_a: Delivery, client: Client) -> None:
    """Ten turns of a conversation of 400 KB take little more than its last one alone, and each is handed out whole."""
    turns = [long_job("and then? " * turn, chars=400_000, ids=100_000) for turn in range(10)]
    store.submit(turns[-1])
    one = memory(client)
    for job in turns[:-1]:
        store.submit(job)
    assert memory(client) < 2 * one
    assert len(blocks(client)) < 3 * len(ids_of("default", turns[-1].prompt))
    taken = rank_a.take(10, 100).handouts
    by_token = {handout.lease.token: handout.prompt for handout in taken}
    assert by_token == {job.ref.token: job.prompt for job in turns}
    for handout in taken:
        complete(rank_a, handout)
    assert all(read_input(client, job.ref) == job.input for job in turns)
    assert Audit(client, "tiny").run() == []


def test_a_history_sent_again_is_not_transmitted_again(store: JobStore, rank_a: Delivery, client: Client) -> None:
    """What the server has is named, not sent."""
    store.submit(long_job(chars=400_000))
    before = node_of(client, KEYS.queue).info("stats")["total_net_input_bytes"]
    store.submit(long_job("more", chars=400_000))
    sent = node_of(client, KEYS.queue).info("stats")["total_net_input_bytes"] - before
    assert sent < 60_000
    for handout in rank_a.take(2, 100).handouts:
        complete(rank_a, handout)


def test_tenants_share_nothing(store: JobStore, rank_a: Delivery, client: Client) -> None:
    """The same text of another tenant lies in other blocks."""
    store.submit(long_job(tenant="one"))
    of_one = blocks(client)
    store.submit(long_job(tenant="two"))
    assert len(blocks(client)) == 2 * len(of_one)
    for handout in rank_a.take(2, 100).handouts:
        complete(rank_a, handout)


def test_a_resend_changes_nothing(store: JobStore, rank_a: Delivery, client: Client) -> None:
    """Neither while the job is queued nor after it has ended: blocks that went do not come back."""
    job = long_job(store=False)
    for _ in range(2):
        store.submit(job)
        assert {tuple(holders(client, block)) for block in blocks(client)} == {(job.ref.token,)}
    complete(rank_a, begin(rank_a))
    store.submit(job)
    assert blocks(client) == set()


def test_a_refused_job_leaves_no_block(client: Client, rank_a: Delivery) -> None:
    """A full queue stores nothing of it."""
    narrow = job_store(client, cap=1)
    narrow.submit(new_job())
    with pytest.raises(QueueFull):
        narrow.submit(long_job())
    assert blocks(client) == set()
    complete(rank_a, begin(rank_a))


class RacingStore(JobStore):
    """Of the blocks that a submit found, the first goes before the job can hold it."""

    def _run(self, command: Command) -> list[Any]:
        reply = super()._run(command)
        if reply[0] == b"missing":
            self._client.delete(KEYS.input(blocks_of("default", long_job().input.encode())[0].id))
        return reply


def test_a_block_that_goes_while_a_job_is_submitted_is_sent_after_all(client: Client, rank_a: Delivery) -> None:
    """The job is stored whole."""
    shared, grown = long_job(), long_job("x" * 40_000)
    job_store(client).submit(shared)
    complete(rank_a, begin(rank_a))
    RacingStore(client, result_ttl_ms=RESULT_TTL_MS, pending_per_model=10).submit(grown)
    assert blocks(client) >= ids_of("default", grown.prompt) | ids_of("default", grown.input.encode())
    handout = begin(rank_a)
    assert handout.prompt == grown.prompt
    complete(rank_a, handout)


# -- ending ----------------------------------------------------------------------------------------------------------


def _cancel_queued(job: NewJob, client: Client, _rank: Delivery) -> None:
    job_store(client).cancel(job.ref)


def _cancel_running(job: NewJob, client: Client, rank: Delivery) -> None:
    begin(rank)
    job_store(client).cancel(job.ref)


def _complete(_job: NewJob, _client: Client, rank: Delivery) -> None:
    complete(rank, begin(rank))


def _fail(_job: NewJob, _client: Client, rank: Delivery) -> None:
    assert rank.write([Write(begin(rank).lease, 0, (), failed("context_length_exceeded", "no"))])[0].code == "ok"


def _expire(job: NewJob, client: Client, _rank: Delivery) -> None:
    client.zadd(KEYS.timers, {f"queue:{job.ref.token}": 1})
    swept_steadily(client)
    assert sweeper(client).sweep("tiny").expired == 1


def _poison(job: NewJob, client: Client, rank: Delivery) -> None:
    begin(rank)
    client.zadd(KEYS.leases, {job.ref.token: 1})
    swept_steadily(client)
    assert sweeper(client, max_deliveries=1).sweep("tiny").poisoned == 1
    client.expire(KEYS.dead, 60)


ENDINGS: list[Callable[[NewJob, Client, Delivery], None]] = [
    _complete, _fail, _cancel_queued, _cancel_running, _expire, _poison,
]  # fmt: skip


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("kept", [True, False])
def test_every_ending_lets_go(
    store: JobStore, rank_a: Delivery, client: Client, ending: Callable[..., None], kept: bool
) -> None:
    """The prompt goes at once; the input stays a minute longer than the record, or goes too with `store: false`."""
    job = long_job(store=kept)
    store.submit(job)
    assert all(client.ttl(KEYS.input(block)) == -1 for block in blocks(client))
    ending(job, client, rank_a)
    assert jobs.is_terminal(store.read(job.ref).state)
    assert blocks(client) == (ids_of("default", job.input.encode()) if kept else set())
    assert read_input(client, job.ref) == (job.input if kept else None)
    record_ms = client.pexpiretime(KEYS.job(job.ref.token))
    until_ms = record_ms + LINGER_MS
    assert {client.pexpiretime(KEYS.input(block)) for block in blocks(client)} == ({until_ms} if kept else set())
    assert Audit(client, "tiny").run() == []


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_small_input_that_is_not_stored_goes_too(
    store: JobStore, rank_a: Delivery, client: Client, ending: Callable[..., None]
) -> None:
    """The record stays, without prompt and input."""
    job = new_job(store=False)
    store.submit(job)
    ending(job, client, rank_a)
    assert not store.read(job.ref).store
    assert client.hmget(KEYS.job(job.ref.token), "input", "prompt") == [None, None]
    assert read_input(client, job.ref) is None


def test_an_input_nobody_may_see_is_not_stored_beside_its_prompt(store: JobStore, client: Client) -> None:
    """`store: false` and tokenized: the worker needs the prompt alone. Not tokenized: it needs the input."""
    tokenized, plain = long_job(store=False), long_job("other", store=False, prompt=b"")
    store.submit(tokenized)
    assert blocks(client) == ids_of("default", tokenized.prompt)
    store.submit(plain)
    assert blocks(client) == ids_of("default", tokenized.prompt) | ids_of("default", plain.input.encode())
    for job in (tokenized, plain):
        store.cancel(job.ref)


@pytest.mark.parametrize("ttls_ms", [(60_000, 900_000, 60_000), (900_000, 60_000, 60_000), (60_000, 60_000, 900_000)])
def test_a_block_stays_for_the_last_record_that_keeps_it(
    store: JobStore, rank_a: Delivery, client: Client, ttls_ms: tuple[int, ...]
) -> None:
    """Whatever the order of the ends; while one of them is unended it has no TTL; one that keeps nothing shortens
    nothing."""
    for _ in ttls_ms:
        store.submit(long_job())
    store.submit(long_job(store=False, prompt=b""))
    *keeping, last = rank_a.take(4, 100).handouts
    expected = ids_of("default", long_job().input.encode())
    for handout, ttl_ms in zip(keeping, ttls_ms, strict=True):
        rank_a.result_ttl_ms = ttl_ms
        complete(rank_a, handout)
        assert {client.ttl(KEYS.input(block)) for block in expected} == {-1}
    complete(rank_a, last)
    assert blocks(client) == expected
    longest_ms = max(client.pexpiretime(KEYS.job(handout.lease.token)) for handout in keeping)
    assert {client.pexpiretime(KEYS.input(block)) for block in expected} == {longest_ms + LINGER_MS}


def test_a_new_job_keeps_a_block_that_was_about_to_go(store: JobStore, rank_a: Delivery, client: Client) -> None:
    """While the job runs it has no TTL; then it goes when it would have gone."""
    first, second = long_job(), long_job(store=False, prompt=b"")
    store.submit(first)
    complete(rank_a, begin(rank_a))
    promised = {client.pexpiretime(KEYS.input(block)) for block in blocks(client)}
    store.submit(second)
    assert {client.ttl(KEYS.input(block)) for block in blocks(client)} == {-1}
    complete(rank_a, begin(rank_a))
    assert {client.pexpiretime(KEYS.input(block)) for block in blocks(client)} == promised
    assert read_input(client, first.ref) == first.input


# -- handing out -----------------------------------------------------------------------------------------------------


def test_an_input_that_was_not_tokenized_is_handed_out_whole(store: JobStore, rank_a: Delivery) -> None:
    """The worker tokenizes it."""
    job = long_job("Äpfel", prompt=b"")
    store.submit(job)
    handout = begin(rank_a)
    assert (handout.prompt, handout.input) == (b"", job.input.encode())
    complete(rank_a, handout)


def test_a_repeated_piece_is_one_block(store: JobStore, rank_a: Delivery, client: Client) -> None:
    """A text that repeats itself lists a block twice and lets it go at once."""
    job = new_job(input="a" * 3 * BLOCK_BYTES, prompt=b"")
    store.submit(job)
    assert len(blocks(client)) == 1
    handout = begin(rank_a)
    assert handout.input == job.input.encode()
    complete(rank_a, handout)
    assert read_input(client, job.ref) == job.input


def test_a_takeover_hands_out_prompt_and_log(store: JobStore, rank_a: Delivery, rank_b: Delivery) -> None:
    """The next rank gets the whole prompt and the logged tokens, and may end the job."""
    job = long_job()
    store.submit(job)
    first = begin(rank_a)
    rank_a.write([Write(first.lease, 0, (entry(0, 5, 6),))])
    assert rank_a.hand_back([first.lease]) == 1
    second = begin(rank_b)
    assert (second.prompt, second.replay, second.lost) == (job.prompt, ((5, 6),), False)
    complete(rank_b, second)


def _corrupt(client: Client, key: str) -> None:
    client.hset(key, "data", b"no deflate stream")


def _swap(client: Client, key: str) -> None:
    client.hset(key, "data", blocks_of("default", b"another block's text")[0].packed())


def _retype(client: Client, key: str) -> None:
    client.delete(key)
    client.set(key, "x", ex=60)


@pytest.mark.parametrize("damage", [lambda c, key: c.delete(key), _corrupt, _swap])
def test_a_lost_block_is_told_and_never_a_wrong_prompt(
    store: JobStore, rank_a: Delivery, client: Client, damage: Callable[[Client, str], object]
) -> None:
    """The hand-out says so; other jobs of the same read are whole; the job can end, which cleans up the rest."""
    hurt, whole = long_job(tenant="hurt"), long_job(tenant="whole")
    for job in (hurt, whole):
        store.submit(job)
    damage(client, KEYS.input(blocks_of("hurt", hurt.prompt)[1].id))
    by_token = {handout.lease.token: handout for handout in rank_a.take(2, 100).handouts}
    lost = by_token[hurt.ref.token]
    assert (lost.lost, lost.prompt, lost.input) == (True, b"", b"")
    assert by_token[whole.ref.token].prompt == whole.prompt
    assert rank_a.write([Write(lost.lease, 0, (), failed("input_lost", "lost"))])[0].code == "ok"
    complete(rank_a, by_token[whole.ref.token])
    assert not blocks(client) & ids_of("hurt", hurt.prompt)
    assert Audit(client, "tiny").run() == []


def test_a_kept_input_that_was_lost_is_told(store: JobStore, client: Client) -> None:
    """Reading it raises by name."""
    job = long_job()
    store.submit(job)
    store.cancel(job.ref)
    _retype(client, KEYS.input(blocks_of("default", job.input.encode())[0].id))
    with pytest.raises(GenerationFailed) as raised:
        read_input(client, job.ref)
    assert raised.value.code == "input_lost"


def test_a_worker_that_forgot_the_blocks_does_not_end_the_job(
    store: JobStore, rank_a: Delivery, client: Client
) -> None:
    """It would leave them behind for ever."""
    store.submit(long_job())
    handout = begin(rank_a)
    listed, handout.lease.blocks = handout.lease.blocks, ()
    with pytest.raises(Exception, match="must declare"):
        complete(rank_a, handout)
    handout.lease.blocks = listed
    complete(rank_a, handout)
    assert Audit(client, "tiny").run() == []


# -- auditing --------------------------------------------------------------------------------------------------------

BREAKS: dict[str, Callable[[Client, str, str], object]] = {
    "held by nobody's job": lambda c, key, _: c.hset(key, "f" * 32, ""),
    "forgotten holder": lambda c, key, token: c.hdel(key, token),
    "gone": lambda c, key, _: c.delete(key),
    "without content": lambda c, key, _: c.hdel(key, "data"),
    "about to go": lambda c, key, _: c.expire(key, 60),
}


@pytest.mark.parametrize("name", BREAKS)
def test_the_audit_names_a_broken_block(store: JobStore, rank_a: Delivery, client: Client, name: str) -> None:
    """As a leak of the key, or as the loss of the job's input."""
    job = long_job()
    store.submit(job)
    assert Audit(client, "tiny").run() == []
    key = KEYS.input(blocks_of("default", job.prompt)[0].id)
    BREAKS[name](client, key, job.ref.token)
    found = {(violation.invariant, violation.subject) for violation in Audit(client, "tiny").run()}
    assert found & {("I7", key), ("I7", job.ref.token)}
    complete(rank_a, begin(rank_a))
    client.flushall()


def test_the_audit_names_a_block_that_would_stay_for_ever(store: JobStore, client: Client) -> None:
    """No holder and no TTL."""
    job = long_job()
    store.submit(job)
    store.cancel(job.ref)
    key = KEYS.input(blocks_of("default", job.input.encode())[0].id)
    client.persist(key)
    assert [(violation.invariant, violation.subject) for violation in Audit(client, "tiny").run()] == [("I7", key)]
    client.flushall()
