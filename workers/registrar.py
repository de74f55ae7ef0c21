"""A rank's place in the registry, for as long as this process has it, with or without a loaded model: heartbeats, what
is wanted of the model, and hints about held jobs, in a thread of its own.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from pool.rules.model_states import FAILED, WAITING
from pool.store.connection import connect
from pool.store.keys import KV_LEAVES, model_channel, node_channel
from pool.store.lifecycle import Lifecycle
from pool.store.ranks import Card, RankRegistry, Wish
from tasks.config import Settings, state_url
from workers.outlet import STATE_ERRORS

log = logging.getLogger("genpool.registrar")

#: How long a hint is waited for before the thread looks at the time.
LISTEN_S = 0.5
RETRY_S = 0.5
_TOLD_SOON = ("state", "runtime_inflight", "effective_target_inflight", "configured_target_inflight")


class Registrar:
    """`node`: this process's Celery node name, which its ranks are named after; `facts`: what each heartbeat tells;
    `on_wish`: called in any thread when something else is wanted of the model."""

    def __init__(
        self,
        model: str,
        settings: Settings,
        node: str,
        *,
        facts: Callable[[], dict[str, Any]],
        on_wish: Callable[[Wish], None],
    ) -> None:
        self.id = node
        self.incarnation = secrets.token_hex(8)
        self.wish = Wish()
        #: What a hint about a held job sets going, and the card that the registry must hold: a loaded rank's.
        self.on_hint: Callable[[], None] | None = None
        #: What KV sets going that has to go.
        self.on_kv_leaves: Callable[[], None] | None = None
        self.card: Card | None = None
        self._model = model
        self._node = node
        self._lease_ms = round(settings.worker.lease_seconds * 1000)
        self._renew_s = settings.worker.renew_seconds
        self._facts = facts
        self._on_wish = on_wish
        self._client = connect(state_url(settings), max_connections=4)
        self.registry = RankRegistry(self._client, model)
        self.lifecycle = Lifecycle(self._client, model)
        #: Held over each heartbeat: none of a former life may come behind the beginning of the next.
        self._lock = threading.Lock()
        #: What the last heartbeat told of that which others look at most.
        self._told: tuple[Any, ...] = ()
        self._silent = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="genpool-registrar", daemon=True)

    def start(self) -> None:
        """Begin to run; `claim` comes first."""
        self._thread.start()

    def is_alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    def claim(self) -> None:
        """Register under the node's name, or `name-2`, ... when a living process of that name serves the model."""
        with self._lock:
            self._claim()

    def renew_life(self) -> None:
        """What this rank was is over: it leaves, and comes back as another one. Raises redis's errors: then it is to
        be called again."""
        with self._lock:
            self.registry.retire(self.id, self.incarnation)
            self.incarnation = secrets.token_hex(8)
            self._claim()

    def beat(self) -> bool:
        """Register or renew now; whether the id is still this process's."""
        with self._lock:
            return self._beat()

    def stop(self) -> None:
        """Leave the registry, and end the thread."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        try:
            self.registry.retire(self.id, self.incarnation)
        except STATE_ERRORS as error:
            log.warning("%s: leaving the registry: %s", self._model, type(error).__name__)
        self._client.connection_pool.disconnect()

    def _claim(self) -> None:
        for number in range(1, 1000):
            self.id = self._node if number == 1 else f"{self._node}-{number}"
            if self._beat():
                return
        raise RuntimeError(f"no free rank id for {self._node}")

    def _beat(self) -> bool:
        facts = self._facts()
        wish = self.registry.beat(self.id, self.incarnation, lease_ms=self._lease_ms, facts=facts)
        if wish is None:
            return False
        self._told = _standing(facts)
        is_news = (wish.loaded, wish.change) != (self.wish.loaded, self.wish.change)
        is_news |= facts.get("state") == WAITING and wish.has_place
        # Of a load that no rank has carried out: those that still might have been to may be gone.
        is_news |= facts.get("state") == FAILED and wish.is_asked
        self.wish = wish
        if is_news or not wish.loaded:
            self._on_wish(wish)
        return True

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.is_set():
            pubsub = self._client.pubsub()
            try:
                self._listen(pubsub, self.id)
            except STATE_ERRORS as error:
                if not self._silent:
                    log.warning("%s: heartbeat: %s; it goes on as soon as it can", self._model, type(error).__name__)
                self._silent = True
                self._stopping.wait(RETRY_S)
            finally:
                pubsub.close()

    def _listen(self, pubsub: Any, rank: str) -> None:
        """Until the rank has another id."""
        lifecycle = model_channel(self._model).encode()
        pubsub.subscribe(node_channel(rank), lifecycle)
        next_beat = 0.0
        while not self._stopping.is_set() and rank == self.id:
            if time.monotonic() >= next_beat or _standing(self._facts()) != self._told:
                self.beat()
                self._silent = False
                self._keep_card()
                next_beat = time.monotonic() + self._renew_s
            message = pubsub.get_message(ignore_subscribe_messages=True, timeout=LISTEN_S)
            if message is None:
                continue
            if message["channel"] == lifecycle:
                next_beat = 0.0
            elif message["data"] == KV_LEAVES.encode():
                if (on_kv_leaves := self.on_kv_leaves) is not None:
                    on_kv_leaves()
            elif (on_hint := self.on_hint) is not None:
                # About a held job: a cancel, a new watcher.
                on_hint()

    def _keep_card(self) -> None:
        """A state server that came back empty has lost it."""
        card = self.card
        if card is not None and self.registry.card_fingerprint() != card.fingerprint:
            self.registry.publish(card)


def _standing(facts: Mapping[str, Any]) -> tuple[Any, ...]:
    """What is told at the next look, half a second later at most, without waiting for the time of a heartbeat."""
    return tuple(map(facts.get, _TOLD_SOON))
