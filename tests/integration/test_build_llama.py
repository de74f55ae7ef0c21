"""The build of llama.cpp (`make llama`): what it needs is said, and what is there is taken. Nothing is built here."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "build_llama.py"
NAME, VERSION = "llama_cpp_python", "0.3.36"


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """Of an environment without llama.cpp, with a cache of its own, in which pip reaches no index."""
    python = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(python)], check=True)
    packages = next((python / "lib").glob("python*")) / "site-packages"
    # pip and packaging are those of this environment; llama.cpp is not.
    for module in ("pip", "packaging"):
        source = Path(next(path for path in sys.path if (Path(path) / module).is_dir())) / module
        (packages / module).symlink_to(source)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "CMAKE_", "CXX"))}
    return variables | {
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_NO_INDEX": "1",
        "PYTHON_OF_TEST": str(python / "bin" / "python"),
    }


def build(env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [env["PYTHON_OF_TEST"], str(TOOL)]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def put_wheel(folder: Path) -> None:
    """A wheel of the right name, version and no content."""
    info = f"{NAME}-{VERSION}.dist-info"
    with zipfile.ZipFile(folder / f"{NAME}-{VERSION}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llama_cpp/__init__.py", "")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: llama-cpp-python\nVersion: {VERSION}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def wheels(env: dict[str, str]) -> Path:
    """The folder that the tool made for this machine."""
    (folder,) = (Path(env["XDG_CACHE_HOME"]) / "genpool" / "wheels").iterdir()
    return folder


def test_a_missing_compiler_is_named(env: dict[str, str]) -> None:
    """With what to type, before anything is downloaded."""
    done = build(env | {"PATH": "/nonexistent"})
    assert done.returncode == 1
    assert "needs a C and C++ compiler" in done.stderr
    assert "apt install g++" in done.stderr


def test_a_failed_build_leaves_nothing(env: dict[str, str]) -> None:
    """pip's own words stand above the error."""
    done = build(env)
    assert done.returncode == 1
    assert "pip could not wheel llama.cpp" in done.stderr
    assert "No matching distribution" in done.stderr
    assert [path.name for path in wheels(env).iterdir()] == [".lock"]


def test_a_wheel_in_the_cache_is_installed_once(env: dict[str, str]) -> None:
    """Without an index or a compiler; and what is installed is left alone."""
    build(env)
    put_wheel(wheels(env))
    offline = env | {"PATH": "/nonexistent"}
    done = build(offline)
    assert done.returncode == 0, done.stderr
    show = [env["PYTHON_OF_TEST"], "-c", "import importlib.metadata as m; print(m.version('llama-cpp-python'))"]
    assert subprocess.run(show, env=env, capture_output=True, text=True, check=True).stdout.strip() == VERSION
    next(wheels(env).glob("*.whl")).unlink()
    assert build(offline).returncode == 0


def test_other_arguments_are_another_wheel(env: dict[str, str]) -> None:
    """One built for a GPU, say, is not taken for one that is not."""
    build(env)
    build(env | {"CMAKE_ARGS": "-DGGML_CUDA=ON"})
    assert len(list((Path(env["XDG_CACHE_HOME"]) / "genpool" / "wheels").iterdir())) == 2
