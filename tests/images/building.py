"""Runs a Dockerfile's steps without an engine, as root, in folders that stand for images.

A stage is a folder with a whole Debian in it, made by debootstrap in place of the base image, or a copy of the stage
that it is from. RUN lines run in it as they are written (chroot), with an empty home; COPY takes what `.dockerignore`
lets through.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from docker.utils.build import exclude_paths

from tests.debian_programs import cached, unpack
from tests.images.dockerfiles import Copy, Run, Stage

ROOT = Path(__file__).parents[2]
SUITE = "bookworm"
#: What python:3.11-slim-bookworm has that a bare Debian has not, and what a bare nvidia/cuda has.
PYTHON, BARE = ("ca-certificates", "python3", "python3-venv"), ("ca-certificates",)
#: How this machine reaches its package indexes, as build arguments would say it.
PASSED = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "PIP_INDEX_URL", "PIP_CERT")
CERTIFICATES = Path("etc/ssl/certs/ca-certificates.crt")
#: Mounts that a chroot needs, in a mount namespace that ends with the command.
ENTER = 'mount --rbind /proc "$0/proc"; mount --rbind /dev "$0/dev"; root=$0; exec chroot "$root" "$@"'


def base(name: str, packages: Sequence[str]) -> Path:
    """A Debian with these packages, made once for this machine. Raises CalledProcessError, NotToBeHad."""
    folder = cached(f"{SUITE}-{name}")
    if folder.is_dir():
        return folder
    program = unpack("debootstrap", ("debootstrap",), "usr/sbin/debootstrap")
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    subprocess.run(
        [program, "--variant=minbase", f"--include={','.join(packages)}", SUITE, part, _archive()],
        check=True,
        env={**os.environ, "DEBOOTSTRAP_DIR": str(program.parent / "usr/share/debootstrap")},
        stdin=subprocess.DEVNULL,
    )
    # As on this machine, so that its indexes are reached: the certificates that it trusts, and the archives.
    shutil.copy(Path("/") / CERTIFICATES, part / CERTIFICATES)
    shutil.copytree("/etc/apt/sources.list.d", part / "etc/apt/sources.list.d", dirs_exist_ok=True)
    shutil.copy("/etc/resolv.conf", part / "etc/resolv.conf")
    if (part / "usr/bin/python3").exists() and "python3" in packages:
        (part / "usr/local/bin/python").symlink_to("/usr/bin/python3")
    part.rename(folder)
    return folder


def _archive() -> str:
    """Where this machine has its Debian from."""
    asked = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", f"Codename: {SUITE}"]
    found = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.split()
    if not found:
        raise RuntimeError(f"this machine has no archive of Debian {SUITE}; run it on one, or `apt-get update` first")
    return found[0]


@dataclass(frozen=True)
class Builder:
    """Builds stages in `folder`. `bases`: what stands for an image, by the beginning of its name. `instead` may do
    something else than a RUN line: it gets the line and the stage's folder, and says whether it did."""

    folder: Path
    bases: Mapping[str, Callable[[], Path]]
    say: Callable[[str], None]
    instead: Callable[[str, Path], bool] = lambda _command, _root: False

    def build(self, stages: Mapping[str, Stage]) -> dict[str, Path]:
        """All stages, in order; their folders by name. Raises CalledProcessError."""
        made: dict[str, Path] = {}
        for name, stage in stages.items():
            parent = made.get(stage.parent) or self._base(stage.parent)
            root = made[name] = self.folder / name
            subprocess.run(["cp", "-a", "--reflink=auto", parent, root], check=True)
            for step in stage.steps:
                self._step(step, root, made)
        return made

    def _base(self, image: str) -> Path:
        for beginning, make in self.bases.items():
            if image.startswith(beginning):
                return make()
        raise ValueError(f"nothing stands for the image {image}")

    def _step(self, step: Run | Copy, root: Path, made: Mapping[str, Path]) -> None:
        if isinstance(step, Copy):
            copy(step, root, made[step.origin] if step.origin else None)
            return
        self.say(f"RUN {step.command}")
        (root / step.folder.relative_to("/")).mkdir(parents=True, exist_ok=True)
        if self.instead(step.command, root / step.folder.relative_to("/")):
            return
        passed = {name: os.environ[name] for name in PASSED if name in os.environ}
        home = root / "root"
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(mode=0o700)
        env = {"HOME": "/root", **passed, **step.env}
        words = [f"{name}={value}" for name, value in env.items()]
        shell = ["/usr/bin/env", "-i", "-C", str(step.folder), *words, "/bin/sh", "-c", step.command]
        subprocess.run(entered(root, shell), check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def entered(root: Path, argv: Sequence[str], before: str = "", net: Sequence[str] = ()) -> list[str]:
    """A command that runs `argv` inside `root`. `before`: what to mount besides; `net`: what sets the network."""
    return [*net, "unshare", "--mount", "--propagation", "private", "sh", "-euc", before + ENTER, str(root), *argv]


def copy(step: Copy, root: Path, origin: Path | None) -> None:
    """Do what COPY does: a folder's content, or files into a folder. Raises ValueError for what is kept out."""
    target = root / step.target.relative_to("/")
    for source in step.sources:
        if origin is not None:
            target.mkdir(parents=True, exist_ok=True)
            subprocess.run(["cp", "-a", f"{origin / source.lstrip('/')}/.", target], check=True)
            continue
        top = source.rstrip("/")
        names = [name for name in context() if name == top or name.startswith(f"{top}/")]
        if not names:
            raise ValueError(f"COPY {source}: .dockerignore keeps it out of the build context")
        for name in filter(lambda name: (ROOT / name).is_file(), names):
            inner = Path(name).relative_to(top) if name != top else Path(name).name
            place = target if name == top and not step.is_folder else target / inner
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place)


def context() -> set[str]:
    """The files that the builder would be sent."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    return set(exclude_paths(str(ROOT), [line for line in lines if line and not line.startswith("#")]))
