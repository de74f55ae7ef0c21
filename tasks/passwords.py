"""The state server's password from a file, as containers and service managers hand secrets over."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote, urlsplit

from pool.errors import ConfigurationError

FIELD = "state.password_file"


def with_password(url: str, file: str) -> str:
    """`url` (`redis://HOST`, `redis://USER@HOST`) with the password that the file's first line holds.

    Raises ConfigurationError, which shows nothing of the password, when the file cannot be read, or the URL names no
    host or has a password already.
    """
    parts = urlsplit(url)
    if not parts.hostname or parts.password is not None:
        raise ConfigurationError(f"{FIELD} needs a state.url that names a host, and no password.", param=FIELD)
    user, _, host = parts.netloc.rpartition("@")
    # Everything that is not plain is escaped: both redis-py and kombu take the escapes away again.
    return parts._replace(netloc=f"{user}:{quote(_first_line(file), safe='')}@{host}").geturl()


def _first_line(file: str) -> str:
    try:
        line = Path(file).expanduser().read_text(encoding="utf-8").partition("\n")[0].strip()
    except OSError as error:
        raise ConfigurationError(f"{FIELD} = {file} cannot be read: {error.strerror}.", param=FIELD) from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"{FIELD} = {file} is not UTF-8.", param=FIELD) from None
    if not line:
        raise ConfigurationError(f"{FIELD} = {file} begins with an empty line.", param=FIELD)
    return line
