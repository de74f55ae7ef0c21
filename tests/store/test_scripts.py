"""The loader of the Lua verbs, against a server."""

from __future__ import annotations

import pytest

from pool.store.connection import Client
from pool.store.running import run
from pool.store.scripts import Script, all_scripts, script


@pytest.mark.parametrize("verb", all_scripts(), ids=lambda verb: verb.name)
def test_the_server_accepts_the_verb(verb: Script, client: Client) -> None:
    """Each expanded source compiles, and hashes as the loader says."""
    assert client.script_load(verb.source) == verb.sha


def test_a_missing_or_unknown_argument_is_a_type_error() -> None:
    """A caller cannot send too few or too many values."""
    with pytest.raises(TypeError, match="needs 'node'"):
        script("unwatch")(job="j")
    with pytest.raises(TypeError, match=r"takes no \['colour'\]"):
        script("unwatch")(job="j", node="n", colour="red")


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
    command = script("unwatch")(job="gp:{x:0}:job:a", node="n")
    assert run(client, command) == [b"gone"]
    client.script_flush()
    assert run(client, command) == [b"gone"]


def test_a_key_of_another_slot_is_refused(client: Client) -> None:
    """The shebang lets the server refuse what a script has not declared: proof that these tests can catch it."""
    source = "#!lua\nreturn redis.call('SET', 'elsewhere', 1)"
    with pytest.raises(Exception, match=r"non local key|slot"):
        client.eval(source, 1, "gp:{x:0}:job:a")
