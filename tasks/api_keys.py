"""API keys: how they are made, stored and found. Whoever holds the hash cannot make the key from it.

A key is 256 random bits, so its SHA-256 needs neither salt nor stretching. One line a key, in `server.keys_file` or,
separated by `;`, in GENPOOL_API_KEYS:

    NAME KIND sha256:HEX [pending=N] [weight=N] [inflight=N] [highest_lane=LANE] [fairness_keys=1]
        [max_priority=N] [min_deadline_seconds=S] [max_programs=N]

KIND is `user`, `admin` (also what is the operator's) or `metrics` (/metrics alone). NAME is the tenant: jobs belong to
it, and several keys may share it, so that one can replace another. `pending`, `weight` and `inflight` replace
`limits.pending_per_key`, `weight_per_key` and `inflight_per_key`; `highest_lane`: the first lane that its requests may
wait in; `fairness_keys=1`: they may name fairness keys, each of which has NAME's weight, as a gateway does for its own
users. The others bound what requests of Programs may ask for, and how many Programs of a model NAME may have.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pool.errors import ConfigurationError, InvalidRequest
from pool.rules.fairness import LANES, MOST_WEIGHT
from pool.rules.programs.identity import MAX_PRIORITY
from pool.rules.programs.metadata import MAX_DURATION_SECONDS
from tasks.config import API_KEYS_VARIABLE, Settings

log = logging.getLogger("genpool.keys")

USER, ADMIN, METRICS = KINDS = ("user", "admin", "metrics")
#: How often the file is looked at, at most.
LOOK_S = 1.0
MOST_PENDING = 10_000
#: What `genpool keys new` prints before the line to store.
LABEL = "line"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LINE = re.compile(
    rf"(?P<name>{_NAME.pattern})\s+(?P<kind>{'|'.join(KINDS)})\s+sha256:(?P<digest>[0-9a-f]{{64}})"
    r"(?P<limits>(?:\s+[a-z_]+=[a-z0-9.]+)*)"
)
_WHOLE = re.compile(r"0|[1-9][0-9]{0,9}")
_SECONDS = re.compile(r"(?:0|[1-9][0-9]{0,8})(?:\.[0-9]{1,6})?")
HIGHEST_LANE = "highest_lane"
#: What a line may limit by a number, with the least and the most of it.
LIMITS: Mapping[str, tuple[float, float]] = {
    "pending": (1, MOST_PENDING),
    "weight": (1, MOST_WEIGHT),
    "inflight": (1, MOST_PENDING),
    "fairness_keys": (0, 1),
    "max_priority": (0, MAX_PRIORITY),
    "min_deadline_seconds": (0, MAX_DURATION_SECONDS),
    "max_programs": (1, 1_000_000),
}


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What a key may. `pending`: generations of a model at once, `weight`: its share beside others, `inflight`: choices
    in flight while others wait; None for what the settings say. `highest_lane`: the first that it may use, None for
    any; `fairness_keys`: 1 where its requests may name some. The others are about Programs: the highest priority, the
    shortest deadline, and how many Programs of a model; None for any."""

    pending: int | None = None
    weight: int | None = None
    inflight: int | None = None
    highest_lane: str | None = None
    fairness_keys: int | None = None
    max_priority: int | None = None
    min_deadline_seconds: float | None = None
    max_programs: int | None = None

    def words(self) -> list[str]:
        """As they stand in a line."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        return [f"{name}={value if isinstance(value, str) else _number(value)}" for name, value in given.items()]


def _number(value: float) -> str:
    return f"{value:.6f}".rstrip("0").rstrip(".")


#: No limits of its own.
ANY = KeyLimits()


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A stored key. `digest`: SHA-256 of the key."""

    name: str
    kind: str
    digest: bytes
    limits: KeyLimits = ANY

    def __repr__(self) -> str:
        """Without the hash: this may end up in a log."""
        return f"ApiKey({self.name}, {self.kind})"


def new_key(name: str, kind: str = USER, limits: KeyLimits = ANY) -> tuple[str, str]:
    """A fresh key, which nothing but its owner keeps, and the line to store. Raises InvalidRequest."""
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            "A key's name is 1 to 64 of letters, digits, '.', '_', '-', the first a letter or digit.", param="name"
        )
    key = f"gp-{secrets.token_urlsafe(32)}"
    return key, " ".join([name, kind, f"sha256:{digest_of(key).hex()}", *limits.words()])


def digest_of(key: str) -> bytes:
    """What is stored of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def parse_keys(text: str, origin: str) -> tuple[ApiKey, ...]:
    """Keys, a line each. Empty lines and those that begin with # do not count.

    Raises ConfigurationError with the number of the line, never with its content.
    """
    found: dict[bytes, ApiKey] = {}
    for number, line in _lines(text):
        match = _LINE.fullmatch(line)
        if match is None and _LINE.fullmatch(line.removeprefix(LABEL).lstrip()):
            raise ConfigurationError(
                f"{origin}, line {number}: begins with the word `{LABEL}`, which `genpool keys new` prints before the "
                "line to store; remove the word.",
                param="server.keys_file",
            )
        limits = _limits(match["limits"]) if match is not None else None
        if match is None or limits is None:
            bounds = ", ".join(f"{name} from {least:g} to {most:.15g}" for name, (least, most) in LIMITS.items())
            bounds += f", {HIGHEST_LANE} one of {', '.join(LANES)}"
            raise ConfigurationError(
                f"{origin}, line {number}: must be NAME {'|'.join(KINDS)} sha256:HEX [LIMIT=N ...], each limit once "
                f"({bounds}), as `genpool keys new` prints it.",
                param="server.keys_file",
            )
        digest = bytes.fromhex(match["digest"])
        if digest in found:
            raise ConfigurationError(f"{origin}, line {number}: this key is there twice.", param="server.keys_file")
        found[digest] = ApiKey(match["name"], match["kind"], digest, limits)
    return tuple(found.values())


def _limits(text: str) -> KeyLimits | None:
    """The limits behind a line's hash; None for words that are none."""
    found: dict[str, Any] = {}
    for name, _, value in (word.partition("=") for word in text.split()):
        if name == HIGHEST_LANE and name not in found and value in LANES:
            found[name] = value
            continue
        is_time = name.endswith("_seconds")
        if name not in LIMITS or name in found or not (_SECONDS if is_time else _WHOLE).fullmatch(value):
            return None
        found[name] = float(value) if is_time else int(value)
        least, most = LIMITS[name]
        if not least <= found[name] <= most:
            return None
    return KeyLimits(**found)


def _lines(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if (stripped := line.strip()) and not stripped.startswith("#"):
            yield number, stripped


class KeyRing:
    """The keys in force, in one process. Thread-safe.

    The file is read again when it has changed. One that cannot be read or understood changes nothing and is logged:
    whoever is in the middle of writing it shall lock nobody out. One that holds no key locks out everybody.
    """

    def __init__(
        self,
        settings: Settings,
        environ: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ConfigurationError for keys that cannot be read or understood."""
        text = (os.environ if environ is None else environ).get(API_KEYS_VARIABLE, "").replace(";", "\n")
        self._file = Path(settings.server.keys_file).expanduser() if settings.server.keys_file else None
        self._fixed = parse_keys(text, API_KEYS_VARIABLE)
        self._clock = clock
        self._lock = threading.Lock()
        self._next_look_s = clock() + LOOK_S
        self._seen = self._stamp()
        self._keys = self._fixed + self._read()
        #: Whether keys are configured at all. Fixed: emptying the file must not open the door.
        self.required = bool(self._file or self._fixed)
        if self.required and not self._keys:
            raise ConfigurationError(
                f"{self._file} holds no API key. Make one with `genpool keys new NAME`.", param="server.keys_file"
            )

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, key: str) -> ApiKey | None:
        """The stored key for one that a caller sent. Looks at every stored key, however alike."""
        self._look()
        digest = digest_of(key)
        found = None
        for stored in self._keys:
            if hmac.compare_digest(stored.digest, digest):
                found = stored
        return found

    def _look(self) -> None:
        """Read the file again if it is time and it has changed."""
        if self._file is None or self._clock() < self._next_look_s or not self._lock.acquire(blocking=False):
            return
        try:
            self._next_look_s = self._clock() + LOOK_S
            if (stamp := self._stamp()) != self._seen:
                self._seen = stamp
                self._keys = self._fixed + self._read()
                log.warning("API keys were read again: %d are in force", len(self._keys))
        except ConfigurationError as error:
            log.error("API keys stay as they were: %s", error.message)
        finally:
            self._lock.release()

    def _stamp(self) -> tuple[int, int, int] | None:
        """What changes when the file does; None while there is none."""
        try:
            state = self._file.stat() if self._file else None
        except OSError:
            return None
        return (state.st_mtime_ns, state.st_size, state.st_ino) if state else None

    def _read(self) -> tuple[ApiKey, ...]:
        if self._file is None:
            return ()
        try:
            return parse_keys(self._file.read_text(encoding="utf-8"), str(self._file))
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ConfigurationError(
                f"The file of API keys {self._file} cannot be read: {reason}.", param="server.keys_file"
            ) from None


def check_exposed(host: str, *, keyed: bool) -> None:
    """Raises ConfigurationError for an address that other machines can reach while no keys are configured."""
    if keyed or is_loopback(host):
        return
    raise ConfigurationError(
        f"Refusing to listen on {host or 'all addresses'}: other machines reach it, and no API keys are configured. "
        f"Make one with `genpool keys new NAME` and name its file in server.keys_file, or listen on 127.0.0.1.",
        param="server.host",
    )


def is_loopback(host: str) -> bool:
    """Whether an address to listen on is this machine's alone. Other names than localhost are not trusted to be."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
