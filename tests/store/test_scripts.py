"""The Lua verbs as files: headers, sizes, and the loader that turns declarations into locals."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pool.store import scripts
from pool.store.connection import Client
from pool.store.scripts import Script, all_scripts, run, script

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


@pytest.mark.parametrize("verb", all_scripts(), ids=lambda verb: verb.name)
def test_the_server_accepts_the_verb(verb: Script, client: Client) -> None:
    """Each expanded source compiles, and hashes as the loader says."""
    assert client.script_load(verb.source) == verb.sha


def test_a_missing_or_unknown_argument_is_a_type_error() -> None:
    """A caller cannot send too few or too many values."""
    with pytest.raises(TypeError, match="needs 'node'"):
        script("watch")(job="j")
    with pytest.raises(TypeError, match=r"takes no \['colour'\]"):
        script("watch")(job="j", node="n", colour="red")


def test_lists_travel_with_their_length(client: Client) -> None:
    """A list between other arguments arrives whole, an empty one included."""
    keys = {"leases": "gp:{x:0}:leases", "queue": "gp:{x:0}:queue", "jobs": ["gp:{x:0}:job:a", "gp:{x:0}:job:b"]}
    command = script("renew")(**keys, rank="r", lease=1, tokens=["a", "b"], attempts=[1, 1], nonces=["n", "n"])
    assert run(client, command) == [[b"gone"], [b"gone"]]
    assert (
        run(client, script("renew")(**keys | {"jobs": []}, rank="r", lease=1, tokens=[], attempts=[], nonces=[])) == []
    )


def test_a_flushed_script_cache_is_refilled(client: Client) -> None:
    """A verb works again after SCRIPT FLUSH, as after a restart of the server."""
    command = script("watch")(job="gp:{x:0}:job:a", node="n")
    assert run(client, command) == [b"gone"]
    client.script_flush()
    assert run(client, command) == [b"gone"]


def test_a_key_of_another_slot_is_refused(client: Client) -> None:
    """The shebang lets the server refuse what a script has not declared: proof that these tests can catch it."""
    source = "#!lua\nreturn redis.call('SET', 'elsewhere', 1)"
    with pytest.raises(Exception, match=r"non local key|slot"):
        client.eval(source, 1, "gp:{x:0}:job:a")
