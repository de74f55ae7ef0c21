"""Rules about the code itself that no other tool holds."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("pool", "tasks", "workers", "webapp")
CODE = tuple(f"{package}/*.py" for package in PACKAGES)
#: Longest file: `pool` holds decisions and must stay the easiest to read.
POOL_LINES, OTHER_LINES = 300, 500


def tracked(*patterns: str) -> list[Path]:
    """The project's files, new ones included, ignored ones not."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def test_files_keep_to_their_length() -> None:
    """300 lines in pool/, 500 elsewhere."""
    long = {
        str(path.relative_to(ROOT)): lines
        for path in tracked("*.py")
        if (lines := len(path.read_text().splitlines()))
        > (POOL_LINES if path.is_relative_to(ROOT / "pool") else OTHER_LINES)
    }
    assert not long


def test_no_file_is_a_dumping_ground() -> None:
    """A module is named after what it does."""
    vague = re.compile(r"(utils?|common|helpers?|misc)(\.py)?$")
    assert not [path for path in tracked() if any(vague.fullmatch(part) for part in path.relative_to(ROOT).parts)]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_says_what_it_is_for(package: str) -> None:
    """A module begins with a docstring; an empty `__init__.py` is fine."""
    silent = [
        str(path.relative_to(ROOT))
        for path in tracked(f"{package}/*.py")
        if (text := path.read_text()).strip() and not text.startswith('"""')
    ]
    assert not silent


def test_every_package_is_listed() -> None:
    """A folder of modules that pyproject.toml does not list would be missing from an installation."""
    listed = (ROOT / "pyproject.toml").read_text()
    packages = {
        ".".join(path.relative_to(ROOT).parent.parts) for path in tracked(*(f"{name}/*.py" for name in PACKAGES))
    }
    missing = {package for package in packages if f'"{package}"' not in listed}
    assert not missing
    for path in tracked("pool/*.lua"):
        assert str(path.relative_to(ROOT / "pool" / "store").parent) in ("lua", "lua/lib")


def test_nothing_is_unpickled() -> None:
    """JSON and our own packed log entries only."""
    using = [path.name for path in tracked(*CODE) if re.search(r"\bpickle\b|\bmarshal\b", path.read_text())]
    assert not using


def test_every_key_is_on_the_page_of_keys() -> None:
    """docs/redis.md lists each key that pool/store/keys.py builds."""
    page = (ROOT / "docs" / "redis.md").read_text()
    source = (ROOT / "pool" / "store" / "keys.py").read_text()
    names = re.findall(r'_key\(f?"([a-z]+)', source)
    assert len(names) > 8
    assert not [name for name in names if f":{name}" not in page]
