"""What memory this machine has for models, and whether their budgets fit into it. Linux; elsewhere nothing is known."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pool.settings import ModelSettings

#: What a worker of a model takes, by the names of its settings.
FIELDS = ("kv_budget_bytes", "weight_bytes", "scratch_budget_bytes", "offload_memory_bytes")
_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Fit:
    """One worker of a model beside those of the models that need less: `needed_bytes` of `left_bytes`; `field`: the
    setting that asks for most, and `most_bytes` it may be so that it fits (0 or less: no value does)."""

    needed_bytes: int
    left_bytes: int
    field: str
    most_bytes: int

    @property
    def fits(self) -> bool:
        """Whether there is memory for it."""
        return self.needed_bytes <= self.left_bytes


def fit(models: Iterable[tuple[str, ModelSettings]], available_bytes: int) -> dict[str, Fit]:
    """For one worker of each model. Smaller ones have the memory first, so that the greedy ones do not fit."""
    needs = {name: {field: int(getattr(model, field)) for field in FIELDS} for name, model in models}
    found: dict[str, Fit] = {}
    left = available_bytes
    for name in sorted(needs, key=lambda name: sum(needs[name].values())):
        needed, field = sum(needs[name].values()), max(FIELDS, key=needs[name].__getitem__)
        found[name] = Fit(needed, left, field, left - (needed - needs[name][field]))
        left -= needed * found[name].fits
    return {name: found[name] for name in needs}


def available_bytes(pids: Iterable[int] = ()) -> int | None:
    """Memory that processes can have without swapping, and what these of ours have already; not more than the limits
    of this process's control groups. None where the machine does not say."""
    free = _meminfo("MemAvailable")
    if free is None:
        return None
    return min([free + sum(map(_resident_bytes, pids)), *_limits()])


def _meminfo(name: str) -> int | None:
    with suppress(OSError):
        for line in (_PROC / "meminfo").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None


def _resident_bytes(pid: int) -> int:
    """0 for a process that is gone."""
    with suppress(OSError):
        return int((_PROC / str(pid) / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _limits() -> Iterator[int]:
    """Of the group of this process and of all above it (cgroup v2; in a container the mount is its own group)."""
    with suppress(OSError):
        for line in (_PROC / "self" / "cgroup").read_text().splitlines():
            if line.startswith("0::"):
                own = _CGROUPS / line.removeprefix("0::").lstrip("/")
                for group in (own, *(parent for parent in own.parents if parent.is_relative_to(_CGROUPS))):
                    yield from _limit(group)


def _limit(group: Path) -> Iterator[int]:
    with suppress(OSError, ValueError):  # not there, or "max"
        yield int((group / "memory.max").read_text())
