"""A replica of the model `tiny` that a test drives: it reads, shares, and begins what it keeps."""

from __future__ import annotations

from pool.store.connection import Client
from pool.store.delivery import Delivery
from pool.store.handouts import Entry, Handout, Write
from pool.store.ranks import RankRegistry
from pool.store.sharing import Sharing
from tests.builders import completed, delivery


class Replica:
    """One of several."""

    def __init__(self, url: str, client: Client, rank: str, slots: int) -> None:
        self.delivery: Delivery = delivery(url, rank)
        self.slots = slots
        self.held: list[Handout] = []
        self.sharing = Sharing("tiny", rank, has_others=lambda: True)
        self._client = client
        self.registry = RankRegistry(client, "tiny")
        assert self.registry.beat(rank, "life", lease_ms=60_000, facts={})
        self.tell()

    @property
    def occupancy(self) -> float:
        """In flight for its slots."""
        return len(self.held) / self.slots

    def tell(self) -> None:
        """As before each read, and after each end."""
        self.sharing.tell(self._client, len(self.held), self.slots)

    def keeps(self, entries: list[Entry]) -> list[Entry]:
        """What of these it does not give back."""
        return self.sharing.kept(self._client, entries, len(self.held), self.slots)

    def turn(self) -> int:
        """As the intake's: how many it has begun."""
        self.tell()
        room = self.slots - len(self.held)
        entries = self.keeps(self.delivery.read(room, 1)) if room else []
        self.held += [found for found in self.delivery.begin(entries) if isinstance(found, Handout)]
        self.tell()
        return len(entries)

    def end(self, count: int) -> None:
        """Some of what it runs ends."""
        for handout in self.held[:count]:
            assert self.delivery.write([Write(handout.lease, 0, (), completed("x"))])[0].code == "ok"
        self.held = self.held[count:]
        self.tell()
