"""What each client's suite runs in: an environment of its own, with pinned versions, outside of genpool's."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

SUITES = Path(__file__).with_name("suites")
PYTEST = "pytest==9.2.0"


@dataclass(frozen=True)
class Suite:
    """`file` in `suites/`; `pins` for pip, or, for one in JavaScript, for npm."""

    name: str
    file: str
    pins: tuple[str, ...]

    @property
    def is_node(self) -> bool:
        """Whether it runs in Node."""
        return self.file.endswith(".mjs")


ALL = (
    Suite("openai", "openai_python.py", ("openai==3.57.0",)),
    Suite("openai-node", "openai_node.mjs", ("openai@6.49.0",)),
    Suite("openai-agents", "openai_agents.py", ("openai-agents==0.24.0",)),
    Suite("langchain-openai", "langchain_chat.py", ("langchain-openai==1.7.4",)),
    Suite("litellm", "litellm_calls.py", ("litellm==1.110.2",)),
    Suite("aiperf", "load_aiperf.py", ("aiperf==0.13.0",)),
    Suite("guidellm", "load_guidellm.py", ("guidellm==0.8.1",)),
)


#: Programs that other tests run, each in an environment of its own.
PROGRAMS = {"schemathesis": Suite("schemathesis", "", ("schemathesis==4.32.5",))}


def program(name: str) -> Path:
    """The path of a program of PROGRAMS; installs it on first use. Raises CalledProcessError."""
    return _installed(PROGRAMS[name]) / "bin" / name


def command(suite: Suite) -> list[str]:
    """What runs the suite; installs its environment on first use. Raises CalledProcessError, and FileNotFoundError
    when there is no npm for one that needs it."""
    folder = _installed(suite)
    if suite.is_node:
        # Node looks for packages beside the file that imports them.
        shutil.copy(SUITES / suite.file, folder / suite.file)
        return ["node", "--test", "--test-reporter=spec", str(folder / suite.file)]
    options = [
        "-q",
        "--tb=short",
        "-W",
        "ignore",
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
        "--rootdir",
        str(SUITES),
        "--confcutdir",
        str(SUITES),
    ]
    return [str(folder / "bin" / "python"), "-m", "pytest", *options, str(SUITES / suite.file)]


def _installed(suite: Suite) -> Path:
    pins = suite.pins if suite.is_node else (*suite.pins, PYTEST)
    digest = hashlib.sha256("\n".join([sys.version, *pins]).encode()).hexdigest()[:12]
    folder = _cache() / f"{suite.name}-{digest}"
    if not (folder / ".complete").exists():
        print(f"installing {', '.join(pins)}", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        if suite.is_node:
            folder.mkdir(parents=True)
            subprocess.run(["npm", "install", "--silent", "--no-audit", "--no-fund", *pins], cwd=folder, check=True)
        else:
            venv.create(folder, with_pip=True)
            pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
            subprocess.run([*pip, *pins], check=True)
        (folder / ".complete").touch()
    return folder


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "genpool" / "test-clients"
