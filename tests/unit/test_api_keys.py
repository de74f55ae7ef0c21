"""Keys: made once, stored as hashes, found again, and told apart."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from pool.errors import ConfigurationError, InvalidRequest
from pool.settings import ServerSettings
from tasks.api_keys import ADMIN, USER, KeyLimits, KeyRing, check_exposed, new_key, parse_keys
from tasks.config import Settings


def ring(file: Path | None = None, variable: str = "", now_s: list[float] | None = None) -> KeyRing:
    """A ring over a file and a variable, with a clock that the test sets."""
    settings = Settings(server=ServerSettings(keys_file=str(file) if file else ""))
    return KeyRing(settings, {"GENPOOL_API_KEYS": variable}, clock=lambda: now_s[0] if now_s else 0.0)


def test_a_new_key_is_found_by_itself_alone() -> None:
    """256 bits, no two alike; the line holds no part of it."""
    made = [new_key("alice", kind) for kind in (USER, ADMIN)]
    assert len({key for key, _ in made}) == 2 and all(len(key) == 46 for key, _ in made)
    keys = ring(variable=";".join(line for _, line in made))
    for (key, line), kind in zip(made, (USER, ADMIN), strict=True):
        found = keys.find(key)
        assert found is not None and (found.name, found.kind) == ("alice", kind)
        assert key not in line and key[3:] not in line
        assert found.digest.hex() not in repr(found)
        for wrong in (key[:-1], key + "x", line, line.split(":")[1], "", "\ud800", key.upper()):
            assert keys.find(wrong) is None


@pytest.mark.parametrize("name", ["", "a b", "a:b", "-a", "x" * 65, "ä", "a\n"])
def test_names_are_plain(name: str) -> None:
    """They are part of keys in the state, and of the file's lines."""
    with pytest.raises(InvalidRequest):
        new_key(name)


DIGEST = "ab" * 32
BROKEN = [
    "alice",
    f"alice sha256:{DIGEST}",
    f"alice boss sha256:{DIGEST}",
    f"alice user {DIGEST}",
    f"alice user sha256:{DIGEST[:-1]}",
    f"alice user sha256:{DIGEST.upper()}",
    f"alice user sha256:{DIGEST} pending=0",
    f"alice user sha256:{DIGEST} pending=10001",
    f"alice user sha256:{DIGEST} limit=5",
    f"alice user sha256:{DIGEST} weight=0",
    f"alice user sha256:{DIGEST} weight=101",
    f"alice user sha256:{DIGEST} fairness_keys=2",
    f"alice user sha256:{DIGEST} highest_lane=first",
    f"alice user sha256:{DIGEST} highest_lane=batch highest_lane=batch",
    f"alice user sha256:{DIGEST} max_programs=0",
    f"alice user sha256:{DIGEST} max_programs=1.5",
    f"alice user sha256:{DIGEST} max_priority=2147483648",
    f"alice user sha256:{DIGEST} max_priority=-1",
    f"alice user sha256:{DIGEST} min_deadline_seconds=31536001",
    f"alice user sha256:{DIGEST} min_deadline_seconds=1e3",
    f"alice user sha256:{DIGEST} pending=5 pending=5",
    f"a:b user sha256:{DIGEST}",
    f"alice user sha256:{DIGEST}\nbob user sha256:{DIGEST}",
]


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_line_is_named_by_its_number(text: str) -> None:
    """And never quoted: it may hold a key that somebody took for the line."""
    with pytest.raises(ConfigurationError) as broken:
        parse_keys(f"# first\n\n{text}", "FILE")
    assert f"FILE, line {3 + text.count(chr(10))}: " in broken.value.message
    assert DIGEST[:8] not in broken.value.message.lower()


def test_a_line_with_its_label_is_told_so() -> None:
    """`genpool keys new` prints the word before the line; a key of that name is one all the same."""
    with pytest.raises(ConfigurationError, match="FILE, line 1: begins with the word `line`"):
        parse_keys(f"line  alice user sha256:{DIGEST}", "FILE")
    assert parse_keys(f"line user sha256:{DIGEST}", "FILE")[0].name == "line"


def test_a_line_says_whose_what_and_how_much() -> None:
    """Blanks, comments and line ends of other systems do not matter."""
    text = f"# keys\r\n\r\n  alice   user\tsha256:{DIGEST}  pending=7 \r\nbob metrics sha256:{'cd' * 32}"
    alice, bob = parse_keys(text, "FILE")
    assert (alice.name, alice.kind, alice.limits) == ("alice", "user", KeyLimits(pending=7))
    assert (bob.name, bob.kind, bob.limits) == ("bob", "metrics", KeyLimits())


def test_a_new_keys_limits_are_read_as_they_were_made() -> None:
    """Whatever is given of them, in the order of the line or another."""
    for limits in (
        KeyLimits(pending=3, max_priority=0, min_deadline_seconds=0.5, max_programs=1_000_000),
        KeyLimits(min_deadline_seconds=31_536_000.0),
        KeyLimits(min_deadline_seconds=123456789.0 / 1000),
    ):
        _, line = new_key("alice", USER, limits)
        assert parse_keys(line, "FILE")[0].limits == limits
        whose, kind, digest, *words = line.split()
        assert parse_keys(" ".join([whose, kind, digest, *reversed(words)]), "FILE")[0].limits == limits


def test_a_changed_file_counts_after_a_second(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not sooner: it is looked at once a second at most. What cannot be used changes nothing, and is said once."""
    file, now_s = tmp_path / "keys", [0.0]
    (old, old_line), (new, new_line) = new_key("a"), new_key("b")
    file.write_text(old_line)
    keys = ring(file, now_s=now_s)
    file.write_text(f"{new_line}\n")
    assert keys.find(old) and not keys.find(new)
    now_s[0] = 1.5
    assert keys.find(new) and not keys.find(old)
    for broken in ("nonsense", None):
        file.write_text(broken) if broken else file.unlink()
        caplog.clear()
        with caplog.at_level(logging.ERROR):
            for _ in range(3):
                now_s[0] += 1.5
                assert keys.find(new)
        assert len(caplog.records) == 1 and "nonsense" not in caplog.text
    file.write_text("")
    now_s[0] += 1.5
    assert keys.required and not keys.find(new)


def test_no_keys_are_no_keys_only_where_none_are_configured(tmp_path: Path) -> None:
    """A file without any, or that is not there, is a mistake, and not an open door."""
    assert not ring().required
    for file in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigurationError, match="cannot be read"):
            ring(file)
    (tmp_path / "empty").write_text("# none\n")
    with pytest.raises(ConfigurationError, match="holds no API key"):
        ring(tmp_path / "empty")
    assert ring(tmp_path / "empty", variable=new_key("a")[1]).required


def test_an_address_that_others_reach_needs_keys() -> None:
    """By what it is, not by how it looks."""
    for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"):
        check_exposed(host, keyed=False)
    for host in ("0.0.0.0", "::", "192.0.2.1", "", "example.com", "127.0.0.1.example.com", "::ffff:192.0.2.1"):
        check_exposed(host, keyed=True)
        with pytest.raises(ConfigurationError, match="no API keys are configured"):
            check_exposed(host, keyed=False)


def test_a_line_says_how_jobs_wait() -> None:
    """Weight, cap, lanes and fairness keys come back as they were given."""
    limits = KeyLimits(weight=3, inflight=2, highest_lane="normal", fairness_keys=1)
    _, line = new_key("alice", limits=limits)
    assert line.endswith(" weight=3 inflight=2 highest_lane=normal fairness_keys=1")
    (key,) = parse_keys(line, "test")
    assert key.limits == limits
