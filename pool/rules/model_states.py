"""What a model does as a whole, from what is wanted of it and what its ranks do."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

ModelState = Literal["loading", "loaded", "unloading", "unloaded", "failed"]
RankState = Literal["loading", "loaded", "draining", "waiting", "unloaded", "failed", "stopped"]
LOADING, LOADED, UNLOADING, UNLOADED, FAILED = STATES = ("loading", "loaded", "unloading", "unloaded", "failed")
#: What else a rank may do: finish what it has begun, before it leaves or frees the model; wait until there are fewer
#: replicas than there may be.
DRAINING, STOPPED, WAITING = "draining", "stopped", "waiting"
RANK_STATES = (LOADING, LOADED, DRAINING, WAITING, UNLOADED, FAILED)
#: Of a rank: it does not hold the model, nor will it serve before it has loaded it.
NOT_SERVING = frozenset({LOADING, WAITING, UNLOADED, FAILED})


def state_of(*, unloads: bool, is_unloaded: bool, is_asked: bool, has_failed: bool, ranks: Collection[str]) -> str:
    """The state of a model. `unloads`: an admin wants it unloaded, and `is_unloaded`: that is done; `is_asked`: an
    admin wants it loaded, and no rank has done so since; `has_failed`: all of them have failed to; `ranks`: what each
    live rank does. A model that is wanted and has no rank is unloaded, too, but takes jobs, which wait for one."""
    if unloads:
        return UNLOADED if is_unloaded else UNLOADING
    if LOADED in ranks:
        return LOADED
    if has_failed:
        return FAILED
    if not ranks:
        return UNLOADED
    # Those that failed at a former try, or are unloaded, have not yet heard of this one.
    return LOADING if is_asked or set(ranks) != {FAILED} else FAILED
