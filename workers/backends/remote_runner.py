"""The runner over HTTP: each choice of a job is a request to a server, so many at once and never one more.

One thread, with an event loop of its own. Others hand it jobs and cancels, and read what it has published.

| what happens to a request | what follows |
|---|---|
| the server is away, or not serving | all wait until it is found back; after `patience_seconds` jobs are given back |
| it is busy (429; 503 with Retry-After) | all wait as long as it says; the same |
| it refuses the request (4xx) | the job fails by name |
| it breaks it: 5xx, nonsense, silence, a lost connection | asked again, `retries` times without a new token |
| ... after tokens whose ids are known | the next request goes on behind them: nothing is generated twice |
| ... after text whose tokens nobody knows | the job fails as `upstream_lost`, and keeps what was shown |
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from pool.backend_settings import UpstreamSettings
from pool.errors import GenerationFailed, Refused
from tasks.ports import (
    UNTOLD,
    Event,
    EventSink,
    Failed,
    Generation,
    GivenBack,
    RunnerCapacity,
    Stopped,
    Tokens,
)
from tasks.vocabulary import Vocabulary
from workers.backends.dialect import Dialect, News
from workers.backends.endpoint import Endpoint, Slot, Slots
from workers.backends.exchange import CLOSE_S, Exchange
from workers.backends.failures import Away, Broken, Busy, UpstreamFailure
from workers.backends.gate import Gate, backoff_s
from workers.backends.outputs import LENGTH, outputs_of
from workers.backends.remote_figures import RemoteFigures
from workers.backends.remote_jobs import Choice, Job, Key, finished_of

log = logging.getLogger("genpool.remote")

TICK_S = 0.05
IDLE_S = 0.5
CONGESTED_WAIT_S = 0.005
#: How long a server that has nothing more to tell may take to say so.
LAST_WORDS_S = 2.0
#: Ended jobs that are remembered, so that none of them runs again under the same attempt.
REMEMBERED = 4096


class RemoteRunner:
    """A Runner over a server. `limit`: requests in flight at most, of what it was told; `most`: of what the server can
    honestly do; `look`: called when the server was found away; whoever finds it back calls `back`."""

    def __init__(
        self,
        endpoint: Endpoint,
        dialect: Dialect,
        vocabulary: Vocabulary | None,
        upstream: UpstreamSettings,
        *,
        limit: int,
        most: int,
        look: Callable[[float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._endpoint = endpoint
        self._dialect = dialect
        self._vocabulary = vocabulary
        self._upstream = upstream
        self._limit = limit
        self._most = most
        self._look = look
        #: Called once it runs.
        self.on_start: Callable[[], None] = lambda: None
        self._clock = clock
        self.figures = RemoteFigures(clock)
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started = threading.Event()
        self._stopping = False
        self._progress = 0
        self._waiting = 0
        #: Guards what callers look at.
        self._lock = threading.Lock()
        self._jobs: dict[Key, Job] = {}
        self._ended: OrderedDict[Key, None] = OrderedDict()
        self._in_flight = 0

    # -- what other threads call -------------------------------------------------------------------------------------

    def start(self, sink: EventSink) -> None:
        """Begin to run in a thread of its own."""
        self._sink = sink
        self._thread = threading.Thread(target=self._run, name="genpool-upstream", daemon=True)
        self._thread.start()
        self._started.wait()
        self.on_start()

    def submit(self, generation: Generation) -> None:
        """Take a job. Raises Refused (`duplicate`) where this attempt is or was here, GenerationFailed
        (`upstream_lost`) where it cannot go on from what it has logged."""
        if self._vocabulary is None and any(generation.replay):
            raise GenerationFailed(
                "What was generated cannot be continued: the upstream server tells no token ids.", code="upstream_lost"
            )
        if any(UNTOLD in known for known in generation.replay):
            raise GenerationFailed("What was generated cannot be continued.", code="upstream_lost")
        job = Job(generation)
        job.choices = [Choice(job, output) for output in outputs_of(generation, self._vocabulary)]
        for choice in job.choices:
            choice.whole = generation.sampling.logprobs
        with self._lock:
            if self._stopping or job.key in self._jobs or job.key in self._ended:
                raise Refused("This attempt has run here.", code="duplicate")
            self._jobs[job.key] = job
            self._in_flight += generation.n
        self._call(self._begin, job)

    def cancel(self, job: str, attempt: int, *, how: Stopped = "cancelled") -> bool:
        """Hang up on all requests of a job, without any event; `how` it counts. False: it is not here (any more)."""
        with self._lock:
            found = self._jobs.get((job, attempt))
        if found is not None:
            self._call(self._cancel, found, how)
        return found is not None

    def capacity(self) -> RunnerCapacity:
        """Nothing is taken while the server takes nothing."""
        return RunnerCapacity(effective=self.effective_limit() if self._serves() else 0, in_flight=self._in_flight)

    def effective_limit(self) -> int:
        """What it was told, clamped by what the server can honestly do."""
        return max(1, min(self._limit, self._most))

    def set_limit(self, limit: int) -> None:
        """Requests in flight at most from now on; those in flight go on."""
        self._limit = max(1, limit)
        self._call(self._resize)

    def waiting(self) -> int:
        """Choices that have no request in flight."""
        return self._waiting

    def running(self) -> int:
        """Choices that have one."""
        return max(self._in_flight - self._waiting, 0)

    def is_alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def progress(self) -> int:
        """Rises with every turn. A server that is silent is no stall of this process."""
        return self._progress

    def telemetry(self) -> dict[str, Any]:
        """JSON-safe figures without session content."""
        in_flight, waiting = self._in_flight, self._waiting
        reason = self._gate.reason if self._loop is not None else None
        facts = {
            **self.figures.data(),
            "active_sessions": self.running(),
            "queue_depth": waiting,
            "effective_target_inflight": self.capacity().effective,
            "runtime_inflight": in_flight,
            "upstream_up": int(reason is None),
        }
        return facts if reason is None else facts | {"last_error": f"{reason.code}: {reason.message}"}

    def ended(self, message: str) -> None:
        """The server's process has ended; whoever says so starts it again."""
        self._call(self._restarts, Away(message))

    def back(self) -> None:
        """The server is there (again)."""
        self._call(self._reopen)

    def stop(self) -> list[Generation]:
        """Hang up on everything, end the thread, and return the jobs that had not ended."""
        with self._lock:
            self._stopping = True
        self._call(self._stir)
        if self._thread is not None:
            self._thread.join()
        left = [job.generation for job in self._jobs.values()]
        self._jobs.clear()
        return left

    def _serves(self) -> bool:
        return self._loop is not None and self._gate.is_open

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed():
            try:
                loop.call_soon_threadsafe(function, *arguments)
            except RuntimeError:
                log.debug("the runner's loop has just ended")

    # -- the runner's thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        self._gate = Gate(self._look, self._clock)
        self._slots = Slots(self._endpoint, self.effective_limit())
        self._stirred = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._started.set()
        while not self._stopping:
            self._progress += 1
            self._turn()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stirred.wait(), TICK_S if self._jobs else IDLE_S)
            self._stirred.clear()
        await self._hang_up_all()

    async def _hang_up_all(self) -> None:
        tasks = [choice.task for job in self._jobs.values() for choice in job.choices if choice.task is not None]
        for job in list(self._jobs.values()):
            self._silence(job)
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=CLOSE_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await self._slots.close()

    def _turn(self) -> None:
        """Look at the time: of servers that are silent, of jobs that have waited enough."""
        now_s = self._clock()
        self._gate.check()
        upstream, waiting = self._upstream, 0
        for job in list(self._jobs.values()):
            for choice in job.choices:
                exchange = choice.exchange
                if exchange is None:
                    waiting += not choice.done
                    continue
                exchange.check(now_s, first_s=upstream.first_token_seconds, stall_s=upstream.stall_seconds)
                if choice.output.ended and now_s - exchange.heard_s > LAST_WORDS_S:
                    exchange.hang_up()
                    self.end(choice)
            since_s = [each.waits_s for each in job.choices if each.waits_s is not None and each.exchange is None]
            if since_s and now_s - min(since_s) > upstream.patience_seconds:
                self._give_back(job)
        self._waiting = waiting

    def _stir(self) -> None:
        self._stirred.set()

    def _resize(self) -> None:
        self._slots.resize(self.effective_limit())

    def _restarts(self, failure: Away) -> None:
        self.figures.restarts += 1
        self._gate.shut(failure)

    def _reopen(self) -> None:
        self._gate.open()

    def _begin(self, job: Job) -> None:
        if job.over:
            return
        self._stir()
        self.figures.prompt_tokens += len(job.generation.prompt)
        for choice in job.choices:
            choice.done = choice.output.ended
            if not choice.done:
                choice.task = asyncio.create_task(self._serve(choice))
        self._finish_if_whole(job)

    # -- one choice --------------------------------------------------------------------------------------------------

    async def _serve(self, choice: Choice) -> None:
        """Ask, and ask again, until the choice has ended."""
        try:
            while not (choice.job.over or choice.output.ended):
                await self._ask(choice)
        except UpstreamFailure as error:
            self._fail(choice.job, error.code, error.message)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is about this job alone
            # The place, never the values: messages of libraries may quote their input.
            place = "".join(traceback.format_tb(error.__traceback__))
            log.error("job %s: %s\n%s", choice.job.generation.job, type(error).__name__, place)
            self._fail(choice.job, "upstream_error", "The upstream server's answer could not be handled.")

    async def _ask(self, choice: Choice) -> None:
        """One slot, and the requests that it is used for. Raises UpstreamFailure where that is the choice's end."""
        slot = await self._slots.acquire()
        try:
            await self._wait_for_gate(choice)
            while not (choice.job.over or choice.output.ended):
                await self._exchange(choice, slot)
        except (Away, Busy) as failure:
            self._gate.shut(failure)
            await self._drop(slot)
            self._go_on_or_fail(choice)
        except Broken as failure:
            await self._drop(slot)
            self._go_on_or_fail(choice)
            choice.failures += 1
            if choice.failures > self._upstream.retries:
                raise
            self.figures.retries += 1
            log.info("job %s: %s; asking again", choice.job.generation.job, failure.code)
            await asyncio.sleep(backoff_s(choice.failures))
        except BaseException:
            await self._drop(slot)
            raise
        else:
            self._slots.release(slot)

    async def _drop(self, slot: Slot) -> None:
        """Give back a slot whose connection is of no use any more."""
        try:
            await slot.close()
        finally:
            self._slots.release(slot)

    async def _wait_for_gate(self, choice: Choice) -> None:
        if not self._gate.is_open and choice.waits_s is None:
            choice.waits_s = self._clock()
        await self._gate.wait()

    @staticmethod
    def _go_on_or_fail(choice: Choice) -> None:
        if not choice.output.can_go_on:
            raise Broken(
                "The upstream server was lost after part of the output was shown, and cannot continue it.",
                code="upstream_lost",
            )

    async def _exchange(self, choice: Choice, slot: Slot) -> None:
        """One request. Raises UpstreamFailure where it brought no end."""
        job, output = choice.job, choice.output
        exchange = choice.exchange = Exchange(self._endpoint, self._dialect, slot)
        reader = _Reader(self, choice, exchange)
        self.figures.requests += 1
        try:
            ask = self._dialect.ask(job.generation, job.choices.index(choice), output.known, whole=choice.whole)
            await exchange.run(ask, reader.take)
        except UpstreamFailure:
            # What happens after the server has said why the output ended is of no matter.
            if not (output.ended or reader.finish):
                raise
        finally:
            choice.exchange = None
        if exchange.hung_up or job.over:
            return
        self.conclude(choice, reader.finish, has_more=choice.whole and reader.made_some)
        if not (output.ended or reader.finish):
            raise Broken("The upstream server's answer has no end.", code="upstream_lost")

    def conclude(self, choice: Choice, finish: str, *, has_more: bool) -> None:
        """The server has said all; `has_more`: where it stopped at the length that it was asked for."""
        if finish and not choice.output.ended and not (has_more and finish == LENGTH):
            self._tell(choice, choice.output.close(finish))
        if choice.output.ended:
            self.end(choice)

    def served(self, choice: Choice) -> None:
        """The server has answered this choice."""
        self._gate.served()
        choice.waits_s = None

    async def breathe(self) -> None:
        """Wait while so much output is not stored yet."""
        while self._sink.congested() and not self._stopping:
            await asyncio.sleep(CONGESTED_WAIT_S)

    def tell(self, choice: Choice, news: News) -> None:
        """What an event brings is told; a choice that ended by that is done."""
        output, now_s = choice.output, self._clock()
        tokens = output.take(news, now_s)
        if news.cached_tokens is not None and output.cached_tokens is None and not any(choice.job.generation.replay):
            output.cached_tokens = news.cached_tokens
            self.figures.cached_tokens += news.cached_tokens
        if tokens is not None:
            gap_s = None if choice.told_s is None else now_s - choice.told_s
            self.figures.told(len(tokens.token_ids), gap_s)
            choice.told_s, choice.failures = now_s, 0
        self._tell(choice, tokens)

    def _tell(self, choice: Choice, tokens: Tokens | None) -> None:
        if tokens is not None and not choice.job.over:
            self._sink.deliver([tokens])

    # -- ends --------------------------------------------------------------------------------------------------------

    def end(self, choice: Choice) -> None:
        """The choice has ended by itself."""
        if not choice.done:
            choice.done = True
            self._finish_if_whole(choice.job)

    def _finish_if_whole(self, job: Job) -> None:
        if job.over or not all(choice.done for choice in job.choices):
            return
        self.figures.completed += len(job.choices)
        self._leave(job, finished_of(job))

    def _fail(self, job: Job, code: str, message: str) -> None:
        if not job.over:
            self.figures.failed += len(job.choices)
            self._leave(job, Failed(*job.key, code, message))
            self._silence(job)

    def _give_back(self, job: Job) -> None:
        if not job.over:
            self.figures.given_back += len(job.choices)
            self._leave(job, GivenBack(*job.key))
            self._silence(job)

    def _cancel(self, job: Job, how: Stopped) -> None:
        if job.over:
            return
        if how == "cancelled":
            self.figures.cancelled += len(job.choices)
        else:
            self.figures.failed += len(job.choices)
        self._leave(job, None)
        self._silence(job)

    def _leave(self, job: Job, event: Event | None) -> None:
        """The job is over here."""
        job.over = True
        if event is not None:
            self._sink.deliver([event])
        with self._lock:
            self._jobs.pop(job.key, None)
            self._ended[job.key] = None
            while len(self._ended) > REMEMBERED:
                self._ended.popitem(last=False)
            self._in_flight -= len(job.choices)

    def _silence(self, job: Job) -> None:
        """Hang up on its requests; those that wait for anything are dropped."""
        job.over = True
        for choice in job.choices:
            if choice.exchange is not None:
                choice.exchange.hang_up()
            elif choice.task is not None and choice.task is not asyncio.current_task():
                choice.task.cancel()


class _Reader:
    """Takes the events of one exchange for a choice."""

    def __init__(self, runner: RemoteRunner, choice: Choice, exchange: Exchange) -> None:
        self._runner = runner
        self._choice = choice
        self._exchange = exchange
        self._told = 0
        self.finish = ""

    @property
    def made_some(self) -> bool:
        """Whether it has told any token."""
        return self._told > 0

    async def take(self, news: News) -> None:
        """One event. Raises UpstreamFailure for what cannot be."""
        runner, choice, output = self._runner, self._choice, self._choice.output
        runner.served(choice)
        if self._is_missing(news):
            # Their ids are told only where they are asked for in one piece.
            choice.whole = True
            self._exchange.hang_up()
            return
        self.finish = news.finish or self.finish
        self._told += len(news.token_ids)
        runner.tell(choice, news)
        if output.ended and not output.ends_itself:
            self._exchange.hang_up()
            runner.end(choice)
        elif news.over:
            runner.conclude(choice, self.finish, has_more=choice.whole and self.made_some)
        await runner.breathe()
        self._exchange.heard_s = time.monotonic()

    def _is_missing(self, news: News) -> bool:
        """Whether the server has made tokens whose ids it did not tell."""
        if self._choice.whole or news.made is None:
            return False
        return news.made > self._told + len(news.token_ids)
