"""The intake: the thread that reads jobs for a rank, only as many as fit its free slots, and hands them on."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

import numpy as np
from pydantic import ValidationError

from pool.errors import GenpoolError
from pool.store.delivery import Delivery
from pool.store.handouts import Entry, Handout
from pool.store.ranks import Card
from tasks.payloads import PROMPT, GenerationOptions
from tasks.ports import Failed, Generation, Runner, TokenIds
from tasks.submission import fit, tokenize
from tasks.vocabulary import Vocabulary
from workers.outlet import STATE_ERRORS, Outlet

log = logging.getLogger("genpool.intake")

#: How long a blocked read may last: an upper bound for noticing a stop whose unblock got lost.
BLOCK_MS = 1000
#: How long to wait for a free slot before looking again.
ROOM_WAIT_S = 0.5
RETRY_S = 0.3
#: How often a job that runs alone is looked at: it gets company once it has shown a token.
ALONE_WAIT_S = 0.05

#: Called in the intake's thread for each job it begins.
OnBegun = Callable[[Handout], None]


class Intake:
    """Reads from a Delivery into a Runner."""

    def __init__(
        self,
        delivery: Delivery,
        runner: Runner,
        outlet: Outlet,
        *,
        card: Card,
        vocabulary: Vocabulary,
        on_begun: OnBegun,
    ) -> None:
        self._delivery = delivery
        self._runner = runner
        self._outlet = outlet
        self._card = card
        self._vocabulary = vocabulary
        self._on_begun = on_begun
        self._room = threading.Event()
        self._stopping = False
        self._alone: deque[Entry] = deque()
        self._thread = threading.Thread(target=self._run, name="genpool-intake", daemon=True)

    def start(self) -> None:
        """Begin to run in a thread of its own."""
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
        try:
            self._delivery.unblock()
        except STATE_ERRORS as error:
            log.info("unblock: %s", type(error).__name__)
        self._thread.join()

    def _run(self) -> None:
        failures = 0
        while not self._stopping:
            self._room.clear()
            capacity = self._runner.capacity()
            if capacity.in_flight >= capacity.effective or self._outlet.congested():
                self._room.wait(ROOM_WAIT_S)
                self._heal()
                continue
            try:
                if self._alone:
                    self._begin_alone(capacity.in_flight)
                else:
                    self._begin(self._delivery.read(capacity.effective - capacity.in_flight, BLOCK_MS))
                failures = 0
            except STATE_ERRORS as error:
                failures += 1
                if failures == 1:
                    log.warning("state server: %s; reading again as soon as it answers", type(error).__name__)
                self._room.wait(RETRY_S)

    def _heal(self) -> None:
        """A full rank reads nothing, so it looks now and then whether its stream's group is still there."""
        try:
            self._delivery.heal()
        except STATE_ERRORS as error:
            log.info("looking after the group: %s", type(error).__name__)

    def _begin_alone(self, in_flight: int) -> None:
        """An entry waits to run alone: read nothing until this rank is empty, then run it and nothing beside it."""
        if in_flight:
            self._room.wait(ROOM_WAIT_S)
            return
        handout = self._delivery.begin_alone(self._alone.popleft())
        if handout is None:
            return
        self._submit(handout)
        while not self._stopping and self._outlet.is_unproven(handout):
            self._room.wait(ALONE_WAIT_S)

    def _begin(self, entries: list[Entry]) -> None:
        for found in self._delivery.begin(entries):
            if isinstance(found, Handout):
                self._submit(found)
            else:
                self._alone.append(found)

    def _submit(self, handout: Handout) -> None:
        self._outlet.open(handout)
        self._on_begun(handout)
        token, attempt = handout.lease.token, handout.lease.attempt
        try:
            self._runner.submit(self._generation(handout))
        except ValidationError as error:
            # A record of another version: its text stays out of the log.
            log.error("job %s: %d invalid fields in its stored request", token, error.error_count())
            self._fail(token, attempt, "invalid_request", "The stored request cannot be read by this worker.")
        except GenpoolError as error:
            self._fail(token, attempt, error.code, error.message)

    def _fail(self, token: str, attempt: int, code: str, message: str) -> None:
        self._outlet.deliver([Failed(token, attempt, code, message)])

    def _generation(self, handout: Handout) -> Generation:
        """The job as the runner sees it. A job accepted before any worker had published the vocabulary is measured
        here, with the same rule and the same error as at the door."""
        options = GenerationOptions.model_validate_json(handout.options)
        ids = np.frombuffer(handout.prompt, dtype="<i4") if handout.prompt else self._tokenized(handout)
        return Generation(
            job=handout.lease.token,
            attempt=handout.lease.attempt,
            prompt=ids,
            sampling=options.sampling,
            max_tokens=fit(options, self._card, len(ids)),
            seed=handout.seed,
            n=handout.n,
            replay=handout.replay,
        )

    def _tokenized(self, handout: Handout) -> TokenIds:
        prompt = PROMPT.validate_json(handout.input)
        return np.array(tokenize(prompt, self._card, self._vocabulary), dtype=np.int32)
