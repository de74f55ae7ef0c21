"""Loads the Lua verbs: one file a verb, typed by its own header, called by name.

A header declares what a script touches and takes; the loader turns the declarations into locals, so no script counts
ARGV by hand and no caller counts them either:

    -- KEY  job     hash            a key, in the order of KEYS (type; then free text)
    -- KEYS jobs    hash            the remaining keys, any number, as a list
    -- GROUP at     waiting order   keys that belong together, as one table: at.waiting, at.order; in libraries too
    -- ARG  lease   ms              one value; `str` stays a string, every other word is a unit and makes a number
    -- ARG  entries list            a list of strings (travels as its length followed by its items)
    -- INCLUDE fence                lib/fence.lua is pasted in front of the body
    -- FLAGS allow-oom              flags of the shebang line
    -- RETURN {"ok", attempt} ...   documentation

The shebang makes a server in cluster mode refuse keys outside the declared slot; tests run against such a server.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import cast

_LUA = Path(__file__).parent / "lua"
_DECLARATION = re.compile(r"^-- (KEYS|KEY|GROUP|ARG|INCLUDE|FLAGS|RETURN)\s+(.*)$")
_LIBRARY_GROUP = re.compile(r"^-- GROUP\s+(\S+)\s+(.*)$", re.MULTILINE)

Value = str | bytes | int | float
Command = list[Value]


@dataclass(frozen=True, slots=True)
class Script:
    """One verb: `keys` and `args` are the declared names in order; `lists` those args that are lists; `key_list` names
    the variable tail of KEYS, "" where there is none; `groups`: name and members of each group of keys."""

    name: str
    keys: tuple[str, ...]
    groups: tuple[tuple[str, tuple[str, ...]], ...]
    key_list: str
    args: tuple[str, ...]
    lists: frozenset[str]
    source: str
    sha: str

    def __call__(self, **values: Value | Sequence[Value] | Mapping[str, Value]) -> Command:
        """The EVALSHA command for these keys and arguments. TypeError for a missing or unknown name."""
        command: Command = ["EVALSHA", self.sha, len(self.keys)]
        try:
            command.extend(cast(str, values[name]) for name in self.keys)
            for name, members in self.groups:
                group = cast("Mapping[str, Value]", values[name])
                command.extend(group[member] for member in members)
            if self.key_list:
                command.extend(cast("Sequence[Value]", values[self.key_list]))
            command[2] = len(command) - 3
            for name in self.args:
                value = values[name]
                if name in self.lists:
                    items = cast("Sequence[Value]", value)
                    command.append(len(items))
                    command.extend(items)
                else:
                    command.append(cast(Value, value))
        except KeyError as missing:
            raise TypeError(f"script {self.name} needs {missing}") from None
        if len(values) != len(self.keys) + len(self.groups) + len(self.args) + bool(self.key_list):
            raise TypeError(f"script {self.name} takes no {sorted(set(values) - self.declared())}")
        return command

    def declared(self) -> set[str]:
        """The names of all that a call gives."""
        return {*self.keys, *self.args, *(name for name, _ in self.groups), *filter(None, [self.key_list])}


@cache
def script(name: str) -> Script:
    """Read, expand and hash one verb's file."""
    text = (_LUA / f"{name}.lua").read_text(encoding="utf-8")
    keys: list[str] = []
    key_list = ""
    args: list[tuple[str, str]] = []
    includes: list[str] = []
    flags: list[str] = []
    groups: list[tuple[str, tuple[str, ...]]] = []
    for line in text.splitlines():
        match = _DECLARATION.match(line)
        if match is None:
            continue
        word, rest = match[1], match[2].split()
        if word == "KEY":
            keys.append(rest[0])
        elif word == "KEYS":
            key_list = rest[0]
        elif word == "GROUP":
            groups.append((rest[0], tuple(rest[1:])))
        elif word == "ARG":
            args.append((rest[0], rest[1]))
        elif word == "INCLUDE":
            includes.extend(rest)
        elif word == "FLAGS":
            flags.extend(rest)
    shebang = "#!lua" + (f" flags={','.join(flags)}" if flags else "")
    library = [(_LUA / "lib" / f"{include}.lua").read_text(encoding="utf-8") for include in includes]
    groups += [(group[1], tuple(group[2].split())) for part in library for group in _LIBRARY_GROUP.finditer(part)]
    source = "\n".join([shebang, *_locals(keys, groups, key_list, args), *library, text])
    return Script(
        name=name,
        keys=tuple(keys),
        groups=tuple(groups),
        key_list=key_list,
        args=tuple(arg for arg, _ in args),
        lists=frozenset(arg for arg, unit in args if unit == "list"),
        source=source,
        sha=hashlib.sha1(source.encode("utf-8"), usedforsecurity=False).hexdigest(),
    )


def _locals(
    keys: Sequence[str],
    groups: Sequence[tuple[str, tuple[str, ...]]],
    key_list: str,
    args: Sequence[tuple[str, str]],
) -> Iterable[str]:
    """The generated prelude: `local name = ...` for every declaration."""
    for position, name in enumerate(keys, start=1):
        yield f"local {name} = KEYS[{position}]"
    following = len(keys) + 1
    for name, members in groups:
        fields = (f"{member} = KEYS[{position}]" for position, member in enumerate(members, start=following))
        yield f"local {name} = {{{', '.join(fields)}}}"
        following += len(members)
    if key_list:
        yield f"local {key_list} = {{unpack(KEYS, {following})}}"
    yield "local _at = 0"
    for name, unit in args:
        if unit == "list":
            yield f"local {name} = {{}}"
            yield "_at = _at + 1"
            yield f"for i = 1, tonumber(ARGV[_at]) do {name}[i] = ARGV[_at + i] end"
            yield f"_at = _at + #{name}"
        else:
            read = "ARGV[_at]" if unit == "str" else "tonumber(ARGV[_at])"
            yield "_at = _at + 1"
            yield f"local {name} = {read}"


@cache
def all_scripts() -> tuple[Script, ...]:
    """Every verb in the folder, by name."""
    return tuple(script(path.stem) for path in sorted(_LUA.glob("*.lua")))
