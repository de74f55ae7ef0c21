"""The catalogue of several processes over one state server, each with a file of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pool.errors import ConfigurationError
from pool.store.connection import Client
from pool.store.keys import ModelKeys
from tasks import catalogue
from tasks.catalogue import Catalogue
from tasks.config import load_configuration
from tests.builders import job_store, new_job

ONE = '[models.a]\nsource = "random:1"\n'
TWO = '[models.a]\nsource = "random:2"\n[models.b]\nsource = "random:1"\n'
BROKEN = "[models.a]\nsource = 3\n"


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes look each time they are asked to."""
    monkeypatch.setattr(catalogue, "LOOK_S", 0.0)
    monkeypatch.setattr(catalogue, "AGAIN_S", 0.0)


@pytest.fixture
def process(client: Client, tmp_path: Path) -> Callable[..., tuple[Catalogue, Path]]:
    """A process that was started with this file."""

    def start(name: str, text: str = ONE, *, begin: bool = True, **environ: str) -> tuple[Catalogue, Path]:
        file = tmp_path / f"{name}.toml"
        file.write_text(text)
        made = Catalogue(
            load_configuration(file, environ).settings, client, load=lambda: load_configuration(file, environ)
        )
        if begin:
            made.follow()
        return made, file

    return start


def own(made: Catalogue) -> set[str]:
    """Its models, but those that are shipped."""
    return {name for name in made.models if len(name) == 1}


def test_a_reload_is_followed(process: Callable[..., tuple[Catalogue, Path]]) -> None:
    """By whoever has the same tables in his file; variables of the environment may differ."""
    (asked, file), (other, others) = process("asked"), process("other", GENPOOL_MODELS__A__THREADS="3")
    changed: list[bool] = []
    other.on_change = lambda: changed.append(True)
    file.write_text(TWO)
    others.write_text(f"# the same\n{TWO}[server]\nport = 8001\n")
    other.follow()
    assert own(other) == {"a"}, "nobody has asked for it"
    changes = asked.reload()
    assert (changes.added, changes.removed, changes.updated) == (("b",), (), ("a",))
    assert changes.changed_fields == {"a": ["source"]} and "smollm2-135m-q4" in changes.unchanged
    assert changes.needs_restart == ()
    other.follow()
    assert (own(other), other.version, other.error, changed) == ({"a", "b"}, changes.version, "", [True])
    assert (other.models["a"].source, other.models["a"].threads) == ("random:2", 3)
    assert asked.reload().version == changes.version, "the same tables are no other version"


def test_a_reload_before_the_first_look_is_followed(
    process: Callable[..., tuple[Catalogue, Path]], client: Client, tmp_path: Path
) -> None:
    """A process that is slow to look has its models from before; one whose file has other tables keeps them."""
    asked, file = process("asked")
    mine = tmp_path / "slow.toml"
    mine.write_text(ONE)
    settings = load_configuration(mine, {}).settings
    for path in (file, mine):
        path.write_text(TWO)
    version = asked.reload().version
    slow, differs = (Catalogue(settings, client, load=lambda: load_configuration(mine, {})) for _ in range(2))
    slow.follow()
    assert (own(slow), slow.version, slow.models["a"].source) == ({"a", "b"}, version, "random:2")
    mine.write_text(f"{TWO}threads = 3\n")
    differs.follow()
    assert (own(differs), differs.error) == ({"a"}, ""), "what a process starts with is its own"


def test_whoever_cannot_follow_keeps_what_it_has(process: Callable[..., tuple[Catalogue, Path]]) -> None:
    """And says why, until its file is as it should be. What was removed is still known: what it holds must end."""
    (asked, file), (differs, one), (broken, other) = process("asked", TWO), process("one", TWO), process("other", TWO)
    file.write_text(ONE)
    other.write_text(BROKEN)
    version = asked.reload().version
    assert own(asked) == {"a"} and asked.known[-1] == "b" and asked.last("b").source == "random:1"
    for _ in range(2):
        differs.follow()
        broken.follow()
        assert (own(differs), differs.error) == ({"a", "b"}, "catalogue_differs")
        assert (own(broken), broken.error) == ({"a", "b"}, "catalogue_invalid")
    for made, path in ((differs, one), (broken, other)):
        path.write_text(ONE)
        made.follow()
        assert (own(made), made.version, made.error) == ({"a"}, version, "")


def test_what_a_removed_model_holds_ends_after_all_have_restarted(
    process: Callable[..., tuple[Catalogue, Path]], client: Client
) -> None:
    """A process that starts without it knows it, as long as it holds something; and nobody is served by it."""
    process("before", TWO)
    store = job_store(client)
    job = new_job(model="b")
    store.submit(job)
    told: list[bool] = []
    made, _ = process("after", begin=False)
    made.on_change = lambda: told.append(True)
    made.follow()
    assert own(made) == {"a"} and made.known[-1] == "b" and not made.last("b").enabled and told == [True]
    store.cancel(job.ref)
    client.delete(ModelKeys("b:0").outbox)
    assert "b" not in process("later")[0].known


def test_a_broken_file_changes_nothing(process: Callable[..., tuple[Catalogue, Path]]) -> None:
    """At the process that was asked: an error that names the field; the others hear nothing."""
    (asked, file), (other, _) = process("asked"), process("other")
    file.write_text(BROKEN)
    with pytest.raises(ConfigurationError, match=r"models\.a\.source"):
        asked.reload()
    other.follow()
    assert own(asked) == own(other) == {"a"} and asked.version == other.version == 0 and not other.error


def test_a_process_starts_with_its_own_file(process: Callable[..., tuple[Catalogue, Path]], client: Client) -> None:
    """Whatever was published before it; also a command that has only just started tells what was changed since. A
    state server that came back empty is no reason to change anything."""
    _, file = process("asked")
    file.write_text(TWO)
    late, _ = process("late", TWO)
    assert (own(late), late.error) == ({"a", "b"}, "")
    fresh = Catalogue(load_configuration(file, {}).settings, client, load=lambda: load_configuration(file, {}))
    changes = fresh.reload()
    assert (changes.added, changes.updated) == (("b",), ("a",))
    late.follow()
    assert (late.version, late.error) == (changes.version, "")
    client.flushall()
    late.follow()
    assert (own(late), late.error) == ({"a", "b"}, "")
