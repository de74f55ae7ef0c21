"""Runs services of the compose file without an engine: each in its image's folder, with the compose file's command,
user, configs, secrets and read-only root, without capabilities, in one network of their own that is loopback alone."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.images.building import entered
from tests.images.dockerfiles import Stage

HOSTS = "127.0.0.1 localhost valkey api\n"


@dataclass(frozen=True)
class Service:
    """A service of the compose file, with its image's folder. `settled`: as `docker compose config` prints it."""

    name: str
    root: Path
    image: Stage
    settled: Mapping[str, Any]

    @property
    def argv(self) -> list[str]:
        """Entry point and command, the compose file's before the image's."""
        entry = self.settled.get("entrypoint") or self.image.entrypoint
        command = self.settled.get("command")
        own = () if self.settled.get("entrypoint") else self.image.command
        return [word.replace("$$", "$") for word in (*entry, *(own if command is None else command))]

    @property
    def health(self) -> list[str]:
        """What asks it whether it is well."""
        given = self.settled.get("healthcheck", {}).get("test")
        if not given:
            return list(self.image.health)
        kind, *words = (word.replace("$$", "$") for word in given)
        return words if kind == "CMD" else ["/bin/sh", "-c", *words]

    @property
    def user(self) -> tuple[str, str]:
        """Its user and group, as numbers."""
        user, _, group = (self.settled.get("user") or self.image.user).partition(":")
        return user, group

    @property
    def grace_s(self) -> float:
        """How long it may take to stop."""
        return float(str(self.settled.get("stop_grace_period", "10s")).removesuffix("s"))


def settled(compose: str, files: Sequence[Path]) -> dict[str, Any]:
    """The compose files with everything filled in, by `docker-compose` itself. Raises CalledProcessError."""
    named = [word for file in files for word in ("-f", str(file))]
    printed = subprocess.run(
        [compose, *named, "config", "--format", "json"], check=True, capture_output=True, text=True
    ).stdout
    found: dict[str, Any] = json.loads(printed)
    return found


class Containers:
    """Services that run. What is mounted, and the network, end with their processes."""

    def __init__(self, folder: Path, project: Mapping[str, Any]) -> None:
        self._folder = folder
        self._project = project
        self._running: dict[str, tuple[Service, subprocess.Popen[bytes]]] = {}
        # Its namespace is the network of all of them.
        self._holder = subprocess.Popen(["unshare", "--net", "sh", "-c", "ip link set lo up; exec sleep 86400"])

    @property
    def net(self) -> list[str]:
        """What runs a command in their network."""
        return ["nsenter", f"--net=/proc/{self._holder.pid}/ns/net"]

    def start(self, service: Service) -> None:
        """Start it; its output goes to NAME.log."""
        if not service.settled["read_only"]:
            raise ValueError(f"{service.name} has no read-only root")
        (service.root / "etc/hosts").write_text(HOSTS)
        with self.log(service.name).open("wb") as log:
            process = subprocess.Popen(
                self._command(service, service.argv),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._running[service.name] = (service, process)

    def healthy(self, name: str) -> bool:
        """What its health check says. Raises RuntimeError when it has ended."""
        service, process = self._running[name]
        if process.poll() is not None:
            raise RuntimeError(f"{name} ended ({process.returncode}): {self.log(name).read_text()[-2000:]}")
        checked = subprocess.run(
            self._command(service, service.health), check=False, capture_output=True, stdin=subprocess.DEVNULL
        )
        return checked.returncode == 0

    def stop(self, name: str) -> int:
        """SIGTERM, as a stop of the container; its exit code. Raises TimeoutExpired after its grace."""
        service, process = self._running[name]
        process.send_signal(signal.SIGTERM)
        return process.wait(service.grace_s)

    def log(self, name: str) -> Path:
        """What it printed."""
        return self._folder / f"{name}.log"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _, process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._holder.kill()
        self._holder.wait()

    def _command(self, service: Service, argv: Sequence[str]) -> list[str]:
        user, group = service.user
        env = {**service.image.env, **(service.settled.get("environment") or {})}
        words = [f"{name}={value}" for name, value in env.items()]
        bare = ["--clear-groups", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]
        inside = ["/usr/bin/env", "-i", "-C", str(service.image.folder), *words]
        inside += ["/usr/bin/setpriv", f"--reuid={user}", f"--regid={group}", *bare, *argv]
        return entered(service.root, inside, before=self._mounts(service), net=self.net)

    def _mounts(self, service: Service) -> str:
        """Shell lines that mount what the compose file says onto "$0", and make the rest read-only."""
        lines = ['mount --bind "$0" "$0"']
        for kind, folder in (("configs", ""), ("secrets", "/run/secrets/")):
            for each in service.settled.get(kind) or ():
                target = each.get("target") or folder + each["source"]
                lines.append(self._bound(service, Path(self._project[kind][each["source"]]["file"]), target))
        for each in service.settled.get("volumes") or ():
            if each["type"] == "volume":
                volume = self._folder / f"volume-{each['source']}"
                volume.mkdir(exist_ok=True)
                os.chown(volume, *map(int, service.user))
                lines.append(self._bound(service, volume, each["target"]))
        for each in service.settled.get("tmpfs") or ():
            target, _, options = each.partition(":")
            lines.append(f'mount -t tmpfs -o {shlex.quote(options)} tmpfs "$0"{shlex.quote(target)}')
        return "; ".join([*lines, 'mount -o remount,bind,ro "$0"', ""])

    def _bound(self, service: Service, source: Path, target: str) -> str:
        """A line that mounts a file or folder; the place for it is made, as an engine does."""
        place = service.root / target.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            place.mkdir(parents=True, exist_ok=True)
        elif not place.exists():
            place.touch()
        return f'mount --bind {shlex.quote(str(source))} "$0"{shlex.quote(target)}'


def with_environment(service: Service, env: Mapping[str, str]) -> Service:
    """The service with these variables besides."""
    return replace(
        service, settled={**service.settled, "environment": {**(service.settled.get("environment") or {}), **env}}
    )
