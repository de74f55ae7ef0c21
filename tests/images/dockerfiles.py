"""Dockerfiles as stages and steps, with their variables filled in: what `docker build` would run, in its order."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any

from dockerfile_parse import DockerfileParser
from dockerfile_parse.util import WordSplitter, extract_key_values

ROOT = PurePosixPath("/")
#: What every base image has.
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Run:
    """`RUN command`, in this folder of the image, with these variables."""

    command: str
    folder: PurePosixPath
    env: Mapping[str, str]


@dataclass(frozen=True)
class Copy:
    """`COPY`: of the build context, or of another stage (`origin`)."""

    sources: tuple[str, ...]
    target: PurePosixPath
    is_folder: bool
    origin: str


@dataclass(frozen=True)
class Stage:
    """One `FROM` to the next. `parent`: an earlier stage's name, or an image's."""

    name: str
    parent: str
    steps: tuple[Run | Copy, ...] = ()
    env: Mapping[str, str] = field(default_factory=lambda: {"PATH": PATH})
    arguments: Mapping[str, str] = field(default_factory=dict)
    folder: PurePosixPath = ROOT
    user: str = ""
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    health: tuple[str, ...] = ()

    @property
    def argv(self) -> list[str]:
        """What a container of it runs."""
        return [*self.entrypoint, *self.command]


def stages(path: Path) -> dict[str, Stage]:
    """The stages of a Dockerfile by name, in order. Raises ValueError for an instruction that is not known here."""
    found: dict[str, Stage] = {}
    outer: dict[str, str] = {}
    current: Stage | None = None
    for line in DockerfileParser(fileobj=BytesIO(path.read_bytes())).structure:
        kind, text = line["instruction"], line["value"]
        if kind == "COMMENT":
            continue
        if kind == "FROM":
            parent, _, name = _filled(text, outer).partition(" AS ")
            earlier = found.get(parent)
            current = replace(earlier, name=name, parent=parent, steps=()) if earlier else Stage(name, parent)
        elif current is None:
            outer |= dict(extract_key_values(True, {}, outer, text))
        else:
            current = _with(current, kind, text)
        if current is not None:
            found[current.name] = current
    return found


def _with(stage: Stage, kind: str, text: str) -> Stage:
    variables = {**stage.arguments, **stage.env}
    simple: dict[str, Any] = {}
    match kind:
        case "ENV":
            simple = {"env": {**stage.env, **dict(extract_key_values(True, stage.arguments, stage.env, text))}}
        case "ARG":
            simple = {"arguments": {**stage.arguments, **dict(extract_key_values(True, variables, {}, text))}}
        case "WORKDIR":
            simple = {"folder": stage.folder / _filled(text, variables)}
        case "USER":
            simple = {"user": text}
        case "RUN":
            simple = {"steps": (*stage.steps, Run(text, stage.folder, variables))}
        case "COPY":
            simple = {"steps": (*stage.steps, _copy(stage, _filled(text, variables)))}
        case "ENTRYPOINT":
            simple = {"entrypoint": tuple(json.loads(text)), "command": ()}
        case "CMD":
            simple = {"command": tuple(json.loads(text))}
        case "HEALTHCHECK":
            simple = {"health": tuple(json.loads(text[text.index("CMD ") + 4 :]))}
        case "EXPOSE" | "VOLUME":
            pass
        case _:
            raise ValueError(f"{kind} is not known here")
    return replace(stage, **simple)


def _copy(stage: Stage, text: str) -> Copy:
    words = text.split()
    origin = ""
    if option := re.fullmatch(r"--from=(\S+)", words[0]):
        origin = option[1]
        words.pop(0)
    *sources, target = words
    return Copy(tuple(sources), stage.folder / target, target.endswith("/"), origin)


def _filled(text: str, variables: Mapping[str, str]) -> str:
    """`text` with `$NAME` and `${NAME}` replaced, as the builder does outside of RUN."""
    filled: str = WordSplitter(text, args={}, envs=dict(variables)).dequote()
    return filled
