"""The rules of lanes and fairness, by counts: no clock runs here."""

from __future__ import annotations

from collections import Counter, deque

import pytest

from pool.rules.fairness import (
    BATCH,
    FIRST_GUESS_MS,
    INTERACTIVE,
    LANES,
    NORMAL,
    Lane,
    Lanes,
    Moved,
    Waiting,
    next_guess,
)


class Fleet:
    """So many slots, filled from the lanes; a job holds its slot for its key's `length_ms`."""

    def __init__(self, slots: int, length_ms: dict[str, int]) -> None:
        self.lanes = Lanes()
        self.slots = slots
        self.length_ms = length_ms
        self.now_ms = 0
        self.running: deque[tuple[int, Moved]] = deque()
        self.had_ms: Counter[str] = Counter()
        self.order: list[str] = []

    def submit(self, key: str, *, lane: Lane = NORMAL, weight: int = 1, cap: int = 0, count: int = 1) -> None:
        """Jobs that wait."""
        for _ in range(count):
            self.lanes.join((LANES.index(lane), key), Waiting(key, weight=weight, cap=cap))

    def step(self) -> None:
        """Fill the slots; then the job that is done first ends."""
        for moved in self.lanes.feed(self.slots - len(self.running)):
            self.order.append(moved.job.name)
            self.running.append((self.now_ms + self.length_ms[moved.job.name], moved))
        self.running = deque(sorted(self.running, key=lambda each: each[0]))
        self.now_ms, done = self.running.popleft()
        used_ms = self.length_ms[done.job.name]
        self.had_ms[done.job.name] += used_ms
        self.lanes.end(done, used_ms)


def test_shares_of_slot_time_follow_weights() -> None:
    """Weights 3:2:1, all backlogged, the lightest with jobs ten times as long: shares within a tenth, at any length of
    time beyond the first few jobs."""
    weights, fleet = {"a": 3, "b": 2, "c": 1}, Fleet(4, {"a": 100, "b": 100, "c": 1000})
    for key, weight in weights.items():
        fleet.submit(key, weight=weight, count=3000)
    for _ in range(2000):
        fleet.step()
    whole = sum(fleet.had_ms.values())
    for key, weight in weights.items():
        assert fleet.had_ms[key] / whole == pytest.approx(weight / 6, rel=0.1)


def test_service_never_strays_by_more_than_what_can_be_under_way() -> None:
    """Of two backlogged keys, for weight 1: at most all slots with the longest job of either, and what was guessed."""
    lengths = {"a": 50, "b": 700}
    fleet = Fleet(4, lengths)
    for key in lengths:
        fleet.submit(key, count=3000)
    for _ in range(1000):
        fleet.step()
        assert abs(fleet.had_ms["a"] - fleet.had_ms["b"]) <= 2 * fleet.slots * max(*lengths.values(), FIRST_GUESS_MS)


def test_a_light_key_is_next_beside_a_flood() -> None:
    """Whoever had least goes first: the flood's thousand jobs do not stand before one of somebody else's."""
    fleet = Fleet(2, {"flood": 100, "light": 100})
    fleet.submit("flood", count=1000)
    for _ in range(50):
        fleet.step()
    before = len(fleet.order)
    fleet.submit("light")
    for _ in range(3):
        fleet.step()
    assert "light" in fleet.order[before : before + 2]


def test_a_key_that_comes_back_has_saved_nothing() -> None:
    """After a long rest it begins where the others are, not with all that it did not take."""
    fleet = Fleet(1, {"a": 100, "b": 100})
    fleet.submit("b")
    fleet.submit("a", count=2000)
    for _ in range(500):
        fleet.step()
    fleet.submit("b", count=100)
    before = len(fleet.order)
    for _ in range(40):
        fleet.step()
    assert Counter(fleet.order[before:])["b"] == pytest.approx(20, abs=2)


def test_a_key_that_had_much_does_not_come_back_as_new() -> None:
    """What it had while it was alone with another still counts when it rests for a moment."""
    lanes = Lanes()
    for key in ("a", "b"):
        lanes.join((1, key), Waiting(key))
    moved = {each.job.name: each for each in lanes.feed(2)}
    lanes.end(moved["a"], 10_000)
    lanes.end(moved["b"], 10)
    for key in ("a", "b"):
        for _ in range(3):
            lanes.join((1, key), Waiting(key))
    assert [each.job.name for each in lanes.feed(3)] == ["b", "b", "b"]


def test_lanes_are_strict() -> None:
    """Higher first, whatever keys had."""
    lanes = Lanes()
    for place in (2, 1, 0):
        for _ in range(2):
            lanes.join((place, "a"), Waiting(LANES[place]))
    assert [each.job.name for each in lanes.feed(6)] == [INTERACTIVE, INTERACTIVE, NORMAL, NORMAL, BATCH, BATCH]


def test_a_lower_lane_never_starves() -> None:
    """Behind a flood, batch has about a tenth of what the flood has, in slot time, though its jobs are thirty times as
    long; normal as much again."""
    fleet = Fleet(2, {"flood": 100, "nightly": 3000, "some": 100})
    fleet.submit("flood", lane=INTERACTIVE, count=20_000)
    fleet.submit("nightly", lane=BATCH, count=100)
    fleet.submit("some", lane=NORMAL, count=5000)
    for _ in range(8000):
        fleet.step()
    assert fleet.had_ms["some"] / fleet.had_ms["flood"] == pytest.approx(0.1, rel=0.15)
    # Its tenth is of what both higher lanes are given.
    assert fleet.had_ms["nightly"] / (fleet.had_ms["flood"] + fleet.had_ms["some"]) == pytest.approx(0.1, rel=0.15)


def test_what_is_not_used_is_not_owed_later() -> None:
    """A lane of which nothing waits is owed nothing."""
    fleet = Fleet(1, {"flood": 100, "nightly": 100})
    fleet.submit("flood", lane=INTERACTIVE, count=1000)
    for _ in range(200):
        fleet.step()
    fleet.submit("nightly", lane=BATCH, count=50)
    before = len(fleet.order)
    for _ in range(40):
        fleet.step()
    assert Counter(fleet.order[before:])["nightly"] <= 5


def test_a_lane_that_its_caps_hold_back_is_owed_one_job() -> None:
    """However long that lasts: what comes into the lane then has waited for nothing."""
    lanes = Lanes()
    for _ in range(2):
        lanes.join((2, "a"), Waiting("a", cap=1))
    assert [each.job.name for each in lanes.feed(1)] == ["a"]
    for _ in range(100):
        for _ in range(2):
            lanes.join((0, "b"), Waiting("b"))
        assert [each.job.name for each in lanes.feed(1)] == ["b"]
    for _ in range(9):
        lanes.join((2, "c"), Waiting("c"))
    assert [each.job.name for each in lanes.feed(4)] == ["c", "b", "b", "b"]


def test_a_cap_holds_while_others_wait_and_not_alone() -> None:
    """Also for others in a lower lane."""
    lanes = Lanes()
    for _ in range(6):
        lanes.join((0, "a"), Waiting("a", cap=2))
    lanes.join((2, "b"), Waiting("b"))
    assert [each.job.name for each in lanes.feed(4)] == ["a", "a", "b", "a"]


def test_choices_count() -> None:
    """Room is of choices; a job that does not fit it whole still goes, as the last one."""
    lanes = Lanes()
    for n in (2, 3, 1):
        lanes.join((1, "a"), Waiting(str(n), n=n))
    assert [each.job.name for each in lanes.feed(4)] == ["2", "3"]
    assert not lanes.busy, "counted where there is a cap"


def test_what_never_began_costs_nothing() -> None:
    """The charge at its move is taken back whole."""
    lanes = Lanes()
    lanes.join((1, "a"), Waiting("a", n=3, weight=2, cap=9))
    (moved,) = lanes.feed(1)
    assert lanes.busy["a"] == 3
    assert lanes.vt[1, "a"] == FIRST_GUESS_MS * 3 / 2
    lanes.end(moved, None)
    assert (lanes.vt[1, "a"], lanes.busy["a"]) == (0, 0)


def test_guesses_follow_what_is_seen() -> None:
    """A quarter of each news."""
    assert next_guess(1000, 0) == 750
    assert next_guess(100, 500) == 200
