"""What is done to the processes: a deck of (kind, victim) cards, shuffled by the run's seed and dealt at a steady pace.

    kill        kill -9, started again after a while
    stop        SIGSTOP for longer than a lease, then SIGCONT
    terminate   SIGTERM, started again once it has ended
    restart     twice within three seconds: SIGQUIT for a worker, SIGTERM for the others
    hold        its link to the state server is silent for a while, and nothing is lost in it (state: all links)
    cut         its link's connections are closed and refused for a while (state: all links)

and, for the state server alone: `script flush`, `client kill`, `lost group`, `lost stream`.
"""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import redis

from tests.chaos.links import Links
from tests.system import Part, System

KINDS = ("kill", "stop", "terminate", "restart", "hold", "cut")
STATE_KINDS = ("script flush", "client kill", "lost group", "lost stream")
#: Seconds between two faults, drawn evenly, unless a run has a pace of its own.
PACE_S = (4.0, 8.0)
SUPERVISE_S = 0.2


@dataclass(frozen=True, slots=True)
class Card:
    """One fault to do."""

    kind: str
    victim: str


class Injector:
    """Deals cards until stopped, and plays the supervisor: what ended without being held down is started again."""

    def __init__(
        self, system: System, links: Links, seed: int, say: Callable[[str], None], pace_s: tuple[float, float]
    ) -> None:
        self._system = system
        self._links = links
        self._rng = random.Random(seed)
        self._pace_s = pace_s
        self._say = say
        self._parts = {part.name: part for part in system.parts}
        self._busy: set[str] = set()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._running: list[threading.Thread] = []
        self._threads = [
            threading.Thread(target=self._deal, name="dealer"),
            threading.Thread(target=self._supervise, name="supervisor"),
        ]
        self.done: Counter[Card] = Counter()
        self.restarted: Counter[str] = Counter()
        self.problems: list[str] = []
        self._lease_s = system.settings.worker.lease_seconds

    @property
    def parts(self) -> list[Part]:
        """All victims."""
        return list(self._parts.values())

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def stop_faults(self) -> None:
        """No more faults; those under way are undone. The supervisor goes on."""
        self._stopping.set()
        self._threads[0].join()
        for thread in self._running:
            thread.join()

    def close(self) -> None:
        """End the supervisor too."""
        self._lease_s = 0
        self._threads[1].join()

    def _deck(self) -> list[Card]:
        deck = [Card(kind, victim) for kind in KINDS for victim in self._parts]
        deck += [Card(kind, "state") for kind in STATE_KINDS]
        self._rng.shuffle(deck)
        return deck

    def _deal(self) -> None:
        deck: list[Card] = []
        while not self._stopping.wait(self._rng.uniform(*self._pace_s)):
            deck = deck or self._deck()
            card = deck.pop()
            if not self._claim(card.victim):
                deck.insert(0, card)
                continue
            thread = threading.Thread(target=self._do, args=(card, self._rng.random()), name=f"{card}")
            self._running.append(thread)
            thread.start()

    def _claim(self, victim: str) -> bool:
        with self._lock:
            if victim in self._busy:
                return False
            self._busy.add(victim)
            return True

    def _do(self, card: Card, chance: float) -> None:
        try:
            self._say(f"{card.kind} {card.victim}")
            part = self._parts[card.victim]
            if card.kind in STATE_KINDS:
                self._to_state(card.kind)
            else:
                getattr(self, f"_{card.kind}")(part, chance)
            self.done[card] += 1
        except Exception as error:  # noqa: BLE001 - a fault that cannot be done is a finding of the run
            self.problems.append(f"{card.kind} {card.victim}: {type(error).__name__}: {error}")
        finally:
            with self._lock:
                self._busy.discard(card.victim)

    # --- kinds

    def _kill(self, part: Part, chance: float) -> None:
        part.kill()
        time.sleep(0.2 + 2 * chance)
        part.start()

    def _stop(self, part: Part, chance: float) -> None:
        part.pause()
        time.sleep(self._lease_s + 1 + 3 * chance)
        part.resume()

    def _terminate(self, part: Part, chance: float) -> None:
        self._ended(part, signal.SIGTERM)
        time.sleep(chance)
        part.start()

    def _restart(self, part: Part, chance: float) -> None:
        number = signal.SIGQUIT if part.name.startswith("worker") else signal.SIGTERM
        for _ in range(2):
            self._ended(part, number)
            part.start()
            time.sleep(1 + chance / 2)

    @staticmethod
    def _ended(part: Part, number: signal.Signals) -> None:
        part.signal(number)
        try:
            part.wait(30)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{part.name} did not end within 30 s of {number.name}") from None

    def _hold(self, part: Part, chance: float) -> None:
        self._partition(part, "hold", 1 + (self._lease_s + 2) * chance)

    def _cut(self, part: Part, chance: float) -> None:
        self._partition(part, "cut", 1 + (self._lease_s + 2) * chance)

    def _partition(self, part: Part, mode: str, seconds: float) -> None:
        names = [part.name] if part is not self._system.state else [name for name in self._parts if name != "state"]
        for name in names:
            self._links.set(name, mode)
        time.sleep(seconds)
        for name in names:
            self._links.set(name, "pass")

    def _to_state(self, kind: str) -> None:
        with contextlib.suppress(redis.RedisError), self._system.client() as client:
            queues: Sequence[str] = [self._system.keys(model).queue for model in self._system.settings.models]
            if kind == "script flush":
                client.script_flush()
            elif kind == "client kill":
                for type_ in ("pubsub", "normal"):
                    client.execute_command("CLIENT", "KILL", "TYPE", type_, "SKIPME", "yes")
            elif kind == "lost group":
                for queue in queues:
                    client.xgroup_destroy(queue, "workers")
            else:
                client.delete(*queues)

    # --- the supervisor

    def _supervise(self) -> None:
        while self._lease_s:
            time.sleep(SUPERVISE_S)
            for part in self._parts.values():
                if not part.alive and self._claim(part.name):
                    self.restarted[part.name] += 1
                    part.start()
                    with self._lock:
                        self._busy.discard(part.name)
