"""`make docker-check`: everything about docker/ that can be checked without an engine, the install steps and starts
included. Needs root, Debian's package tools, and `unshare`; what it could not check it says at the end."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from pool.store.server_binary import find_binary
from tests.debian_programs import unpack
from tests.images.building import BARE, PYTHON, ROOT, Builder, base
from tests.images.containers import Containers, Service, settled, with_environment
from tests.images.dockerfiles import Stage, stages
from tests.waiting import wait_until

DOCKER = ROOT / "docker"
DOCKERFILES = (DOCKER / "Dockerfile", DOCKER / "cuda.Dockerfile")
COMPOSE = (DOCKER / "compose.yaml", DOCKER / "compose.cuda.yaml")
TOOLS = Path(sys.executable).parent
#: The network of the check has no way to fetch weights.
SMALL = {"GENPOOL_MODELS__TINY__SOURCE": "random:1", "GENPOOL_MODELS__SMOLLM2_135M_INSTRUCT__ENABLED": "false"}
NOT_CHECKED = (
    "No image was pulled: the base images' own content and tags are not checked. Debian bookworm with its Python 3.11 "
    "stands for python:3.11-slim-bookworm, and, bare, for nvidia/cuda (which is Ubuntu).",
    "llama.cpp was not compiled with CUDA: that line of cuda.Dockerfile was not run, and nothing ran on a GPU.",
    "Prometheus and Grafana were not started (tests/images/test_dashboard.py runs Debian's Prometheus).",
    "The engine's own parts: networks, published ports, restarts, limits, logging.",
)


def say(line: str) -> None:
    """What happens, with the time since the start."""
    print(f"[{time.monotonic() - STARTED_S:6.0f} s] {' '.join(line.split())}", flush=True)


STARTED_S = time.monotonic()


def main() -> None:
    """Exit code 0 when everything passed."""
    options = argparse.ArgumentParser(prog="make docker-check", description=__doc__)
    options.add_argument("--llama-wheel", type=Path, help="take this wheel of llama.cpp instead of compiling it")
    options.add_argument("--no-install", action="store_true", help="only parse and lint")
    chosen = options.parse_args()
    project = lint()
    if chosen.no_install:
        return
    if os.geteuid() != 0:
        sys.exit(
            "The install steps run in folders that stand for images (chroot): that needs root. Nothing was installed."
        )
    with tempfile.TemporaryDirectory(prefix="genpool-images-") as name:
        folder = Path(name)
        roots, images = install(folder, chosen.llama_wheel)
        run(folder, roots, images, project)
    print("\nNot checked:", *NOT_CHECKED, sep="\n  * ")
    if chosen.llama_wheel:
        print("  * llama.cpp was not compiled at all: --llama-wheel")
    print("\ndocker-check passed")


def lint() -> dict[str, object]:
    """Compose files by compose's own parser, Dockerfiles by hadolint, Prometheus' configuration by promtool, scripts by
    the shell. The compose file, filled in."""
    say(subprocess.run([TOOLS / "docker-compose", "version"], check=True, capture_output=True, text=True).stdout)
    project = settled(str(TOOLS / "docker-compose"), COMPOSE[:1])
    settled(str(TOOLS / "docker-compose"), COMPOSE)
    say("compose.yaml, and with compose.cuda.yaml: parsed")
    say(subprocess.run([TOOLS / "hadolint", "--version"], check=True, capture_output=True, text=True).stdout)
    subprocess.run([TOOLS / "hadolint", *DOCKERFILES], check=True)
    say(
        "Dockerfiles: no finding of any of hadolint's rules, but for those that a line ignores by name (DL3008, DL3059)"
    )
    promtool = unpack("prometheus", ("prometheus",), "usr/bin/prometheus").parent / "usr/bin/promtool"
    configuration = DOCKER / "prometheus/prometheus.yml"
    subprocess.run([promtool, "check", "config", "--syntax-only", configuration], check=True)
    for script in DOCKER.glob("*.sh"):
        subprocess.run(["sh", "-n", script], check=True)
    return project


def install(folder: Path, wheel: Path | None) -> tuple[dict[str, Path], dict[str, Stage]]:
    """Run every RUN line; the stages' folders, and the stages, of Dockerfile."""

    def instead_of_compiling(wheel: Path, only: str, command: str, workdir: Path) -> bool:
        if "requirements/llama.txt" not in command or only not in command:
            return False
        say(f"  not run: {wheel.name} is taken instead")
        (workdir / "wheels").mkdir(exist_ok=True)
        shutil.copy(wheel, workdir / "wheels")
        return True

    images = stages(DOCKERFILES[0])
    bases = {"python:3.11": partial(base, "python", PYTHON), "nvidia/cuda": partial(base, "bare", BARE)}
    builder = partial(Builder, bases=bases, say=say)
    (folder / "cpu").mkdir()
    skip = partial(instead_of_compiling, wheel, "") if wheel else (lambda _command, _workdir: False)
    roots = builder(folder / "cpu", instead=skip).build(images)
    (built,) = (roots["llama"] / "build/wheels").glob("llama_cpp_python-*.whl")
    (folder / "cuda").mkdir()
    on_gpu = stages(DOCKERFILES[1])
    builder(folder / "cuda", instead=partial(instead_of_compiling, built, "CMAKE_CUDA_ARCHITECTURES")).build(on_gpu)
    return roots, images


def run(folder: Path, roots: dict[str, Path], images: dict[str, Stage], project: dict[str, object]) -> None:
    """Start state server, API, worker and Flower as the compose file does, ask them, and stop them."""
    made = subprocess.run([DOCKER / "secrets.sh", folder / "secrets"], check=True, capture_output=True, text=True)
    key = made.stdout.rpartition(" ")[2].strip()
    for name, secret in project["secrets"].items():  # type: ignore[attr-defined] # compose's own JSON
        secret["file"] = str(folder / "secrets" / name)
    given: dict[str, dict[str, object]] = project["services"]  # type: ignore[assignment] # compose's own JSON
    services = {name: Service(name, roots[name], images[name], given[name]) for name in ("api", "worker", "flower")}
    services = {name: with_environment(service, SMALL) for name, service in services.items()}
    worker = services["worker"]
    services["worker"] = Service(
        worker.name, worker.root, worker.image, {**worker.settled, "command": ["worker", "tiny"]}
    )
    valkey = Service("valkey", valkey_root(folder), Stage("valkey", ""), given["valkey"])
    with Containers(folder, project) as containers:
        for service in (valkey, *services.values()):
            say(f"start {service.name}: {' '.join(service.argv[:6])}")
            containers.start(service)
            wait_until(
                partial(containers.healthy, service.name), description=f"{service.name} to be healthy", timeout_s=300
            )
        secrets = [(folder / "secrets" / name).read_text().strip() for name in ("metrics_key", "flower_user")]
        subprocess.run(
            [*containers.net, sys.executable, "-m", "tests.images.probe", key, *secrets], check=True, cwd=ROOT
        )
        say("healthy, and answering: API with and without keys, metrics, Flower")
        for name in ("flower", "api", "worker", "valkey"):
            say(f"stop {name}: exit code {containers.stop(name)}")
        for name in ("valkey", *services):
            told = containers.log(name).read_text(errors="replace")
            assert not any(secret in told for secret in (key, *secrets)), f"{name} logs a secret"


def valkey_root(folder: Path) -> Path:
    """A folder that stands for Valkey's image: the server from genpool's `embedded` extra, the client from Debian."""
    root = folder / "valkey"
    subprocess.run(["cp", "-a", "--reflink=auto", base("valkey", (*BARE, "redis-tools")), root], check=True)
    shutil.copy(find_binary(), root / "usr/local/bin/valkey-server")
    (root / "usr/local/bin/valkey-cli").symlink_to("/usr/bin/redis-cli")
    return root


if __name__ == "__main__":
    main()
