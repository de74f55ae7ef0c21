"""The compose file and the images' locks, by their text: what `make docker-check` need not be run for."""

from __future__ import annotations

import re
import stat
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from tasks.api_keys import METRICS, USER, digest_of, parse_keys
from tasks.config import load_configuration

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
PROJECT: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = PROJECT["services"]
OURS = ("api", "worker", "flower")
PINNED = re.compile(r":v?\d+\.\d+\.\d+[\w.-]*$")


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_restrained(name: str) -> None:
    """No root user, no writable root, no capability, nothing published beyond this machine, a pinned image, a health
    check."""
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    if name in OURS:
        dockerfile = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
        stage = dockerfile.partition(f" AS {name}\n")[2].partition("\nFROM ")[0]
        assert "\nUSER 10001:10001\n" in stage
        assert "\nHEALTHCHECK " in stage
    else:
        assert PINNED.search(service["image"])
        assert not service["user"].startswith(("0", "root"))
        assert service["healthcheck"]["test"]


def test_base_images_are_pinned() -> None:
    """To a patch release."""
    arguments = re.findall(
        r"^ARG (?:PYTHON_IMAGE|CUDA_TAG)=(\S+)$",
        "\n".join(path.read_text(encoding="utf-8") for path in DOCKER.glob("*Dockerfile")),
        re.MULTILINE,
    )
    assert len(arguments) == 2
    assert all(re.search(r"\d+\.\d+\.\d+", value) for value in arguments)


def test_every_mounted_file_is_there() -> None:
    """Configs and folders that compose would mount; an engine makes empty folders of what is missing."""
    files = [config["file"] for config in PROJECT["configs"].values()]
    files += [
        mount["source"]
        for service in SERVICES.values()
        for mount in service.get("volumes", ())
        if isinstance(mount, dict)
    ]
    assert files
    assert not [name for name in files if not (DOCKER / name).exists()]


def test_secrets_are_made_once_and_fit(tmp_path: Path) -> None:
    """secrets.sh makes what the compose file names, closed to others of this machine; the keys are API keys, and a
    second run changes nothing."""
    folder = tmp_path / "secrets"
    printed = made(folder)
    assert {path.name for path in folder.iterdir()} == set(PROJECT["secrets"])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    contents = {path.name: path.read_text() for path in folder.iterdir()}
    first, scraper = parse_keys(contents["api_keys"], "api_keys")
    assert (first.kind, first.digest) == (USER, digest_of(printed.rpartition(" ")[2].strip()))
    assert (scraper.kind, scraper.digest) == (METRICS, digest_of(contents["metrics_key"].strip()))
    assert all(len(text) > 60 for text in contents.values())
    assert made(folder) == ""
    assert {path.name: path.read_text() for path in folder.iterdir()} == contents


def made(folder: Path) -> str:
    """What secrets.sh prints."""
    command = [DOCKER / "secrets.sh", folder]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL
    ).stdout


def test_the_mounted_settings_are_settings() -> None:
    """Every field is known, and the secrets' paths are those of the compose file."""
    settings = load_configuration(DOCKER / "genpool.toml", {}).settings
    named = {Path(settings.server.keys_file), Path(settings.state.password_file)}
    assert {path.parent for path in named} == {Path("/run/secrets")}
    assert {path.name for path in named} <= set(SERVICES["api"]["secrets"])
    grace = settings.worker.drain_grace_seconds
    assert float(SERVICES["worker"]["stop_grace_period"].removesuffix("s")) > grace + 10


@pytest.mark.parametrize(("lock", "extra"), [("api", ""), ("flower", "flower"), ("worker", ""), ("llama", "llama")])
def test_locks_satisfy_what_the_project_asks_for(lock: str, extra: str) -> None:
    """Else an image would hold other versions than were tested; `make docker-lock` renews them. All have hashes."""
    text = (DOCKER / "requirements" / f"{lock}.txt").read_text(encoding="utf-8")
    pinned = dict(re.findall(r"^([a-z0-9.-]+)==([^ ;\\]+)", text, re.MULTILINE))
    assert text.count("==") >= len(pinned) and all(
        "--hash=sha256:" in block for block in re.split(r"^(?=[a-z])", text, flags=re.MULTILINE)[1:]
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [] if lock == "llama" else project["dependencies"]
    for requirement in map(Requirement, [*asked, *(project["optional-dependencies"][extra] if extra else ())]):
        assert requirement.specifier.contains(pinned[requirement.name]), requirement
