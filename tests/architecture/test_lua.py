"""The Lua verbs as files: sizes, headers, and nothing counted by hand."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from pool.store import scripts
from pool.store.accepting import accepting
from pool.store.inputs import stored_input
from pool.store.keys import ModelKeys
from pool.store.program_keys import ProgramKeys
from pool.store.scripts import Script, all_scripts
from tests.builders import new_job

LUA = Path(scripts.__file__).parent / "lua"
FILES = sorted(LUA.glob("**/*.lua"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_is_short_and_says_what_it_is_for(path: Path) -> None:
    """Each file has at most 60 lines; a verb's first line is `-- name: purpose`."""
    lines = path.read_text().splitlines()
    assert len(lines) <= 60
    if path.parent == LUA:
        assert re.match(rf"-- {path.stem}: \S", lines[0]), lines[0]


@pytest.mark.parametrize("verb", all_scripts(), ids=lambda verb: verb.name)
def test_a_verb_uses_all_it_declares_and_counts_nothing_by_hand(verb: Script) -> None:
    """Every declared key and argument occurs in the body, KEYS and ARGV do not, and the replies are documented."""
    text = (LUA / f"{verb.name}.lua").read_text()
    body = "\n".join(line for line in text.splitlines() if not line.startswith("--"))
    included = re.findall(r"^-- INCLUDE (.*)$", text, re.MULTILINE)
    library = [(LUA / "lib" / f"{name}.lua").read_text() for line in included for name in line.split()]
    whole = "\n".join(line for part in [*library, body] for line in part.splitlines() if not line.startswith("--"))
    for name in verb.declared():
        assert re.search(rf"\b{name}\b", whole), f"{name} is declared and not used"
    assert "KEYS[" not in body
    assert "ARGV" not in body
    assert "-- RETURN " in text


#: What a mapping that is spread into a call holds, by what gives it.
SPREAD = {
    "ending": set(ModelKeys("x:0").ending("t")),
    "of": set(ProgramKeys("x:0").of("p")),
    "accepted": set(accepting(new_job(), stored_input(new_job()), sent=(), not_after_ms=0, cap=0, claimed=False)),
}


def spread_of(value: ast.expr) -> set[str]:
    """The names that `**value` gives."""
    for node in ast.walk(value):
        match node:
            case ast.Attribute(attr=name) | ast.Name(id=name) if name in SPREAD:
                return SPREAD[name]
    raise AssertionError(f"unknown mapping: {ast.unparse(value)}")


def calls(verb: str) -> list[set[str]]:
    """The keyword names of each `script("VERB")(...)` in the store."""
    found = []
    for path in Path(scripts.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Call(func=ast.Name("script"), args=[ast.Constant(name)])) if name == verb:
                    named = {keyword.arg for keyword in node.keywords if keyword.arg}
                    spread = [spread_of(keyword.value) for keyword in node.keywords if keyword.arg is None]
                    found.append(named.union(*spread))
    return found


@pytest.mark.parametrize("verb", all_scripts(), ids=lambda verb: verb.name)
def test_a_call_names_what_the_header_declares(verb: Script) -> None:
    """Each verb is called somewhere in the store, with exactly the declared names."""
    assert calls(verb.name), "nobody calls it"
    assert all(names == verb.declared() for names in calls(verb.name))


@pytest.mark.parametrize("verb", all_scripts(), ids=lambda verb: verb.name)
def test_groups_of_keys_are_what_the_store_gives(verb: Script) -> None:
    """The members of each group, in every verb that has it."""
    keys = ProgramKeys("x:0")
    given = {"at": keys.place("r"), "to": keys.place("r"), "keys": keys.ended("t", "r"), "lanes": keys.lanes}
    for name, members in verb.groups:
        assert set(members) == set(given[name])
