"""The Lua verbs as files: sizes, headers, and nothing counted by hand."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from pool.store import scripts
from pool.store.keys import ModelKeys
from pool.store.scripts import Script, all_scripts

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
    for name in (*verb.keys, *verb.args, *filter(None, [verb.key_list])):
        assert re.search(rf"\b{name}\b", body), f"{name} is declared and not used"
    assert "KEYS[" not in body
    assert "ARGV" not in body
    assert "-- RETURN " in text


def calls(verb: str) -> list[set[str]]:
    """The keyword names of each `script("VERB")(...)` in the store."""
    found = []
    ending = set(ModelKeys("x:0").ending("t"))
    for path in Path(scripts.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Call(func=ast.Name("script"), args=[ast.Constant(name)])) if name == verb:
                    named = {keyword.arg for keyword in node.keywords if keyword.arg}
                    # The one mapping that is ever spread into a call holds the keys of every ending.
                    spread = any(keyword.arg is None for keyword in node.keywords)
                    found.append(named | ending if spread else named)
    return found


@pytest.mark.parametrize("verb", all_scripts(), ids=lambda verb: verb.name)
def test_a_call_names_what_the_header_declares(verb: Script) -> None:
    """Each verb is called somewhere in the store, with exactly the declared names."""
    assert calls(verb.name), "nobody calls it"
    declared = {*verb.keys, *verb.args, *filter(None, [verb.key_list])}
    assert all(names == declared for names in calls(verb.name))
