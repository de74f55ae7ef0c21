"""The state server's password from a file."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import pytest
from kombu.utils.url import parse_url
from redis.connection import parse_url as redis_parse_url

from pool.errors import ConfigurationError
from tasks.config import broker_url, load_configuration, result_backend, state_url
from tasks.passwords import with_password

SECRET = "p:@/?#%é ss"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with a password that needs escapes."""
    path = tmp_path / "password"
    path.write_text(f"{SECRET}\nnot this line\n", encoding="utf-8")
    return path


def test_every_client_reads_the_password_that_is_in_the_file(file: Path) -> None:
    """redis-py and kombu, whatever characters it has; broker and result backend are the same server."""
    settings = load_configuration(
        None, {"GENPOOL_STATE__URL": "valkey://host:6380/3", "GENPOOL_STATE__PASSWORD_FILE": str(file)}
    ).settings
    assert state_url(settings).startswith("redis://:p%3A")
    found = redis_parse_url(state_url(settings))
    assert (found["password"], found["host"], found["port"], found["db"]) == (SECRET, "host", 6380, 3)
    for url in (broker_url(settings), result_backend(settings)):
        assert parse_url(url)["password"] == SECRET


def test_a_user_stays(file: Path) -> None:
    """An account's name in the URL is kept."""
    found = redis_parse_url(with_password("redis://worker@host", str(file)))
    assert (found["username"], found["password"]) == ("worker", SECRET)


def test_a_cluster_has_one_password(file: Path) -> None:
    """The nodes of a cluster share it."""
    url = with_password("redis+cluster://one:7000,two:7000/?health_check_interval=5", str(file))
    assert url == f"redis+cluster://:{quote(SECRET, safe='')}@one:7000,two:7000/?health_check_interval=5"


@pytest.mark.parametrize("url", ["redis://:other@host", "unix:///run/valkey.sock", "redis:///0"])
def test_a_password_that_goes_nowhere_is_refused(url: str, file: Path) -> None:
    """Beside another password, or without a host; the message shows neither."""
    with pytest.raises(ConfigurationError, match="names a host, and no password") as caught:
        with_password(url, str(file))
    assert caught.value.param == "state.password_file"
    assert "other" not in caught.value.message


@pytest.mark.parametrize(
    ("content", "why"), [(None, "No such file"), (b"\n", "empty line"), (b"\xff\xfe", "not UTF-8")]
)
def test_a_file_without_a_password_is_refused(content: bytes | None, why: str, tmp_path: Path) -> None:
    """One that is not there, is empty, or is no text."""
    path = tmp_path / "password"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=why) as caught:
        with_password("redis://host", str(path))
    assert caught.value.param == "state.password_file"
