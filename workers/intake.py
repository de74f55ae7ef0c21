"""The intake: the thread that reads jobs for a rank, only as many as fit its free slots, and hands them on."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np
import redis
from pydantic import ValidationError

from pool.errors import GenerationFailed, GenpoolError, InvalidRequest, Refused
from pool.store.connection import Client, connect, unable
from pool.store.delivery import Delivery
from pool.store.handouts import Entry, Handout
from pool.store.ranks import Card
from pool.store.sharing import PAUSE_S, Sharing
from pool.store.trials import ALL_ALONE, AMONG_OTHERS, AMONG_PROVEN, survived
from tasks.payloads import PROMPT, GenerationOptions, Prompt, TokenPrompt
from tasks.ports import Failed, Generation, Runner, TokenIds
from tasks.submission import check_sampling, fit, tokenize
from tasks.vocabulary import Vocabulary
from workers.outlet import STATE_ERRORS, Outlet
from workers.trials import TrialGate

log = logging.getLogger("genpool.intake")

#: How long a blocked read may last: an upper bound for noticing a stop whose unblock got lost.
BLOCK_MS = 1000
#: How much longer than that its reply may take: a read that times out on a healthy server loses entries for a lease.
REPLY_S = 5.0
#: How long to wait for a free slot before looking again.
ROOM_WAIT_S = 0.5
RETRY_S = 0.3
#: How often a job on trial is looked at: others may begin once it has shown a token.
ALONE_WAIT_S = 0.01
#: How often entries that wait are claimed anew, in leases.
KEEP_LEASES = 0.25
#: How long a job before its last try waits for an empty process, in leases, while nothing else begins there. Then it
#: begins beside jobs that have shown tokens, as at its second try: they lose a replay at most.
PATIENCE_LEASES = 0.1

_NO_TOKENS: TokenIds = np.empty(0, np.int32)

#: Called in the intake's thread for each job it begins.
OnBegun = Callable[[Handout], None]


def reading_client(url: str) -> Client:
    """A client of one connection for blocking reads, which time out later than they unblock."""
    return connect(url, max_connections=1, read_timeout_s=BLOCK_MS / 1000 + REPLY_S)


class Intake:
    """Reads from a Delivery into a Runner."""

    def __init__(
        self,
        delivery: Delivery,
        runner: Runner,
        outlet: Outlet,
        *,
        card: Card,
        vocabulary: Vocabulary | None,
        gate: TrialGate,
        on_begun: OnBegun,
        sharing: Sharing | None = None,
    ) -> None:
        self._delivery = delivery
        self._sharing = Sharing(delivery.model, delivery.rank) if sharing is None else sharing
        self._runner = runner
        self._outlet = outlet
        self._card = card
        self._vocabulary = vocabulary
        self._gate = gate
        self._on_begun = on_begun
        self._room = threading.Event()
        self._stopping = False
        #: Read, and waiting to begin by itself.
        self._alone: deque[Entry] = deque()
        self._next_keep_s = 0.0
        #: The runner has just refused a job: wait before reading more, or it would come straight back.
        self._crowded = False
        #: The one that waits for an empty process, and since when.
        self._patient = ("", 0.0)
        #: Read, and not known to have begun, by job token.
        self._unanswered: dict[str, Entry] = {}
        self._thread = threading.Thread(target=self._run, name="genpool-intake", daemon=True)

    def start(self) -> None:
        """Begin to run in a thread of its own."""
        self._gate.join(self._outlet, self._runner)
        self._thread.start()

    def room(self) -> None:
        """A slot may have become free."""
        if not self._room.is_set():
            self._room.set()

    def is_alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Stop reading and end the thread; a read that blocks is woken."""
        self._stopping = True
        self._room.set()
        # Each by itself: a replica that could not say that it leaves must not wait for its read to end as well.
        for step in (partial(self._sharing.leave, self._delivery.writer), self._delivery.unblock):
            try:
                step()
            except STATE_ERRORS as error:
                log.info("stopping to read: %s", type(error).__name__)
        self._thread.join()

    def _run(self) -> None:
        failures = 0
        while not self._stopping:
            self._room.clear()
            try:
                self._turn()
                failures = 0
            except STATE_ERRORS as error:
                failures += 1
                if failures == 1:
                    log.warning("state server: %s; reading again as soon as it answers", type(error).__name__)
                self._room.wait(RETRY_S)
        self._gate.leave(self._outlet)
        self.give_back()

    def give_back(self) -> None:
        """Give back what was read and is not known to have begun; what the state server did not take stays here. For
        the intake's thread, and for others once that has ended."""
        try:
            self._give_back([*self._unanswered.values(), *self._alone])
        except STATE_ERRORS as error:
            log.warning("giving back unbegun jobs: %s", type(error).__name__)
            return
        self._unanswered.clear()
        self._alone.clear()

    def _give_back(self, entries: list[Entry]) -> None:
        if entries:
            self._delivery.give_back(entries)
            # The sweep may have been faster.
            survived(self._delivery.reader, self._delivery.keys, entries)

    def _turn(self) -> None:
        if self._unanswered:
            # Before all else: the server may count them as begun here, so nobody else would run them.
            self._settle_unanswered()
            return
        self._keep_waiting()
        capacity = self._runner.capacity()
        full = capacity.in_flight >= capacity.effective or self._outlet.congested() or self._crowded
        self._crowded = False
        self._sharing.tell(self._delivery.reader, capacity.in_flight, capacity.effective)
        if full or not self._alone:
            # What was to go on trial cannot now, or was cancelled.
            self._gate.leave(self._outlet)
        if full:
            self._room.wait(ROOM_WAIT_S)
            # A full rank reads nothing, so it looks now and then whether its stream's group is still there.
            self._delivery.heal()
        elif self._gate.closed_to(self._outlet):
            self._room.wait(ALONE_WAIT_S)
        elif self._alone:
            self._begin_alone()
        else:
            read = self._delivery.read(capacity.effective - capacity.in_flight, BLOCK_MS)
            entries = self._shared(read, capacity.effective)
            with self._gate.beginning(self._outlet) as allowed:
                if allowed:
                    self._begin(entries)
                else:
                    # Another rank of this process has a job to put on trial meanwhile.
                    self._unanswered.clear()
                    self._alone.extend(entries)
            if len(entries) < len(read):
                self._room.wait(PAUSE_S)

    def _shared(self, entries: list[Entry], slots: int) -> list[Entry]:
        """What of these is for this rank to begin, which had so many slots when it asked; the rest is left to emptier
        ones. Without an answer all of them are begun one by one, and those that went are found to be elsewhere."""
        if not entries:
            return entries
        self._unanswered |= {entry.token: entry for entry in entries}
        # It may have waited for them for long.
        capacity = self._runner.capacity()
        if capacity.effective < slots:
            # There are fewer meanwhile; none where what runs the model has gone.
            room = max(capacity.effective - capacity.in_flight, 0)
            self._give_back(entries[room:])
            entries = entries[:room]
            self._unanswered = {entry.token: entry for entry in entries}
            if not entries:
                return []
        kept = self._sharing.kept(self._delivery.reader, entries, capacity.in_flight, capacity.effective)
        self._unanswered = {entry.token: entry for entry in kept}
        return kept

    def _begin_alone(self) -> None:
        """A job on trial waits: read nothing until the process is empty enough for it, then begin it."""
        gate = self._gate
        if not gate.enter(self._outlet) or gate.has_unproven():
            self._room.wait(ALONE_WAIT_S)
            return
        entry = self._alone.popleft()
        self._unanswered[entry.token] = entry
        found = self._delivery.begin_alone(entry, ALL_ALONE if self._may_be_last_try(entry) else AMONG_PROVEN)
        del self._unanswered[entry.token]
        if isinstance(found, Entry):
            self._alone.appendleft(found)
            self._room.wait(ROOM_WAIT_S)
            return
        if found is not None:
            self._submit(found)
        gate.leave(self._outlet)

    def _may_be_last_try(self, entry: Entry) -> bool:
        """Whether nothing else runs in the process, or the entry has waited for that long enough."""
        now_s = time.monotonic()
        if self._patient[0] != entry.id:
            self._patient = (entry.id, now_s)
        waited_ms = (now_s - self._patient[1]) * 1000
        return self._gate.is_empty() or waited_ms >= PATIENCE_LEASES * self._delivery.lease_ms

    def _keep_waiting(self) -> None:
        """Entries that wait have no lease: without this, the sweep would take them for a dead reader's."""
        now_s = time.monotonic()
        if not self._alone or now_s < self._next_keep_s:
            return
        self._alone = deque(self._delivery.keep(self._alone))
        self._next_keep_s = now_s + KEEP_LEASES * self._delivery.lease_ms / 1000

    def _begin(self, entries: list[Entry]) -> None:
        self._unanswered |= {entry.token: entry for entry in entries}
        for found in self._delivery.begin(entries):
            if isinstance(found, Handout):
                self._unanswered.pop(found.lease.token, None)
                self._submit(found)
            else:
                self._unanswered.pop(found.token, None)
                self._alone.append(found)
        for entry in entries:
            self._unanswered.pop(entry.token, None)

    def _settle_unanswered(self) -> None:
        """Begin the first unanswered entry again, by itself: one that the server refuses to begin must not hold up
        others. While another rank's trial forbids that, give them all back."""
        with self._gate.beginning(self._outlet) as allowed:
            if not allowed:
                self._give_back(list(self._unanswered.values()))
                self._unanswered.clear()
                return
            entry = next(iter(self._unanswered.values()))
            try:
                self._begin_again(entry)
            except redis.exceptions.ResponseError as error:
                if not unable(error):
                    del self._unanswered[entry.token]
                raise

    def _begin_again(self, entry: Entry) -> None:
        found = self._delivery.begin_alone(entry, AMONG_OTHERS)
        if found is None:
            # The sweep may have taken it for lost with its worker, which lives.
            survived(self._delivery.reader, self._delivery.keys, [entry])
        del self._unanswered[entry.token]
        if isinstance(found, Handout):
            self._submit(found)
        elif found is not None:
            self._alone.append(found)

    def _submit(self, handout: Handout) -> None:
        if not self._outlet.open(handout):
            return
        if handout.alone:
            self._gate.put_on_trial(self._outlet, handout)
        self._on_begun(handout)
        token, attempt = handout.lease.token, handout.lease.attempt
        try:
            self._runner.submit(self._generation(handout))
        except ValidationError as error:
            # A record of another version: its text stays out of the log.
            log.error("job %s: %d invalid fields in its stored request", token, error.error_count())
            self._fail(token, attempt, "invalid_request", "The stored request cannot be read by this worker.")
        except InvalidRequest as error:
            self._fail(token, attempt, error.code, error.message)
        except Refused as error:
            # No place here, or this attempt has run here: that is not the job's fault, and it goes back.
            log.info("job %s goes back to the queue: %s", token, error.message)
            self._outlet.refuse(handout)
            self._crowded = True
        except GenpoolError as error:
            self._fail(token, attempt, error.code, error.message)
        if not self._outlet.holds(handout):
            # Cancelled or lost meanwhile, when there was nothing yet for the outlet to stop.
            self._runner.cancel(token, attempt)

    def _fail(self, token: str, attempt: int, code: str, message: str) -> None:
        self._outlet.deliver([Failed(token, attempt, code, message)])

    def _generation(self, handout: Handout) -> Generation:
        """The job as the runner sees it. A job accepted before any worker had published the vocabulary is measured
        here, with the same rule and the same error as at the door."""
        if handout.lost:
            raise GenerationFailed("Its stored input is missing or damaged.", code="input_lost")
        options = GenerationOptions.model_validate_json(handout.options)
        check_sampling(self._delivery.model, options.sampling, self._card, self._vocabulary)
        placement = handout.lease.placement
        generation = Generation(
            job=handout.lease.token,
            attempt=handout.lease.attempt,
            prompt=_NO_TOKENS,
            sampling=options.sampling,
            max_tokens=options.max_tokens or 0,
            seed=handout.seed,
            n=handout.n,
            tenant=handout.tenant,
            holder="" if placement is None else placement.program,
            replay=handout.replay,
        )
        if self._vocabulary is None:
            generation.given = _prompt_of(handout)
        else:
            ids = np.frombuffer(handout.prompt, dtype="<i4") if handout.prompt else self._tokenized(handout)
            generation.prompt, generation.max_tokens = ids, fit(options, self._card, len(ids))
        return generation

    def _tokenized(self, handout: Handout) -> TokenIds:
        assert self._vocabulary is not None
        prompt = PROMPT.validate_json(handout.input)
        return np.array(tokenize(prompt, self._card, self._vocabulary), dtype=np.int32)


def _prompt_of(handout: Handout) -> Prompt:
    """The prompt of a job that nobody here tokenizes. One that was tokenized at the door, when the model had another
    backend, goes on as those tokens."""
    if handout.prompt:
        return TokenPrompt(token_ids=tuple(np.frombuffer(handout.prompt, dtype="<i4").tolist()))
    return PROMPT.validate_json(handout.input)
