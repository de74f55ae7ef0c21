"""The command line without any process behind it: what it prints, and how it refuses."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from genpool import cli
from pool.errors import InvalidRequest, UnknownModel
from pool.settings import ModelSettings
from pool.store.connection import connect
from pool.store.lifecycle import Lifecycle
from pool.store.server import StateServer
from tasks import launch
from tasks.api_keys import KeyRing
from tasks.config import SHIPPED_MODELS, Settings, load_configuration
from tasks.config_docs import markdown
from tasks.job_commands import build_request
from tasks.payloads import Sampling
from workers.weights import SOURCES

SHIPPED = "smollm2-135m-instruct"


@pytest.fixture(autouse=True)
def private_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file, variable or folder of the user's takes part."""
    for name in os.environ:
        if name.startswith("GENPOOL_") and name != "GENPOOL_VALKEY_SERVER":
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> Result:
    """Run the command; an unexpected exception fails the test."""
    result = CliRunner().invoke(cli, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def settings_of(toml: str = "") -> Settings:
    """Settings of a file with this content."""
    Path("genpool.toml").write_text(toml)
    return load_configuration(environ={}).settings


def test_config_prints_every_value_with_its_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line a field; secrets are masked."""
    monkeypatch.setenv("GENPOOL_SERVER__PORT", "9000")
    monkeypatch.setenv("GENPOOL_STATE__URL", "redis://:secret@h")
    lines = run("config").stdout.splitlines()
    assert "server.port = 9000  # GENPOOL_SERVER__PORT" in lines
    assert 'state.url = "redis://***@h"  # GENPOOL_STATE__URL' in lines
    assert "server.threads = 256  # default" in lines
    assert len(lines) == len(load_configuration().effective())


def test_a_key_is_printed_once_and_its_line_is_what_is_stored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both are in no other output, wherever the line is kept."""
    made = run("keys", "new", "alice", "--admin").stdout.split()
    key, line = made[1], " ".join(made[3:])
    assert line.startswith("alice admin sha256:")
    (tmp_path / "keys").write_text(line)
    monkeypatch.setenv("GENPOOL_SERVER__KEYS_FILE", str(tmp_path / "keys"))
    monkeypatch.setenv("GENPOOL_API_KEYS", line)
    found = KeyRing(load_configuration().settings).find(key)
    assert found is not None and found.name == "alice"
    for shown in (run("config"), run("config", "--json"), run("config", "--markdown")):
        assert shown.exit_code == 0
        assert "sha256:" not in shown.output.replace("sha256:HEX", "") and key not in shown.output
    assert run("keys", "new", "a b").exit_code == 1


def test_up_refuses_an_address_that_others_reach_without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything starts, with what to do."""
    monkeypatch.setenv("GENPOOL_SERVER__HOST", "0.0.0.0")
    refused = run("up")
    assert refused.exit_code == 1
    assert "Refusing to listen on 0.0.0.0" in refused.output and "genpool keys new" in refused.output


def test_config_as_json() -> None:
    """The same for programs."""
    entries = json.loads(run("config", "--json").stdout)
    assert {"field": "server.port", "value": 8000, "origin": "default"} in entries


def test_config_as_markdown_is_the_documentation() -> None:
    """It does not depend on what is configured here."""
    assert run("config", "--markdown").stdout == markdown()


def test_the_config_option_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It wins over ./genpool.toml, and processes started from here see the same file."""
    monkeypatch.setenv("GENPOOL_CONFIG", "")
    (tmp_path / "genpool.toml").write_text("[server]\nport = 1")
    (tmp_path / "other.toml").write_text("[server]\nport = 2")
    assert f"server.port = 2  # {tmp_path / 'other.toml'}" in run("--config", "other.toml", "config").stdout
    assert os.environ["GENPOOL_CONFIG"] == str(tmp_path / "other.toml")


@pytest.mark.parametrize("command", ["submit", "generate"])
def test_help_tells_what_holds_without_an_option(command: str) -> None:
    """Of each of a generation's options."""
    options = [option for option in cli.commands[command].params if isinstance(option, click.Option)]
    assert len(options) == {"generate": 5, "submit": 6}[command]
    assert all(" Default: " in str(option.help) for option in options)


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["up", "--port", "x"],
        ["submit"],
        ["config", "--json", "--markdown"],
        ["status"],
        ["dead-letters", "retry"],
        ["dead-letters", "retry", "--all"],
        ["dead-letters", "retry", "x", "--model", SHIPPED],
        ["dead-letters", "drop"],
        ["dead-letters", "drop", "x", "--all"],
    ],
)
def test_wrong_usage_ends_with_2(arguments: list[str]) -> None:
    """As everywhere on the command line."""
    assert run(*arguments).exit_code == 2


@pytest.mark.parametrize("command", [["config"], ["up"], ["worker", SHIPPED], ["submit", "x"], ["models", "list"]])
def test_a_bad_setting_is_one_line_on_stderr(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command checks the settings first."""
    monkeypatch.setenv("GENPOOL_SERVER__PORT", "70000")
    result = run(*command)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == (
        "Error: server.port = 70000 (from GENPOOL_SERVER__PORT): should be less than or equal to 65535\n"
    )


@pytest.mark.parametrize("command", ["submit x", "status x", "cancel x", "tail x", "dead-letters list",
                                     "dead-letters retry x", "dead-letters drop --all"])  # fmt: skip
def test_job_commands_need_a_state_server(command: str, tmp_path: Path) -> None:
    """Without one they say how to start it."""
    result = run(*command.split())
    assert result.exit_code == 1
    assert result.stderr == f"Error: No state server runs for {tmp_path}/state/genpool. Start one: genpool up\n"


def test_a_named_state_server_that_is_away_is_named_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hint fits the configuration."""
    monkeypatch.setenv("GENPOOL_STATE__URL", "unix://:secret@/nonexistent.sock")
    result = run("submit", "x")
    assert result.exit_code == 1
    assert result.stderr == "Error: No state server answers at unix://***@/nonexistent.sock (state.url).\n"


def test_up_refuses_a_port_that_is_taken() -> None:
    """Before anything starts."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = run("up", "--port", str(taken.getsockname()[1]))
    assert result.exit_code == 1
    assert "cannot be used: Address already in use. Choose another one." in result.stderr


def test_make_run_leaves_the_port_to_the_settings() -> None:
    """Unless it is given."""
    root = Path(__file__).parents[2]
    environ = {name: value for name, value in os.environ.items() if name != "PORT"}
    command = ["make", "-n", "--no-print-directory", "-o", ".venv/.installed", "run"]
    plain, given = (
        subprocess.run([*command, *more], cwd=root, env=environ, capture_output=True, text=True, check=True).stdout
        for more in ([], ["PORT=9000"])
    )
    assert "genpool up" in plain and "--port" not in plain
    assert "genpool up --port 9000" in given


def test_up_refuses_a_port_of_flower_that_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state folder is not touched."""
    monkeypatch.setenv("GENPOOL_MODELS__SMOLLM2_135M_INSTRUCT__ENABLED", "false")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = run("up", "--port", "0", "--flower", "--flower-port", port)
    assert result.exit_code == 1
    assert f"Port {port} of 127.0.0.1 cannot be used" in result.stderr
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    "command", [["worker", "nowhere"], ["models", "pull", "nowhere"], ["submit", "x", "--model", "nowhere"]]
)
def test_an_unknown_model_is_named_with_the_known_ones(command: list[str]) -> None:
    """A typing mistake is seen at once."""
    result = run(*command)
    assert result.exit_code == 1
    assert result.stderr == f"Error: No model is named nowhere. Known: {', '.join(SHIPPED_MODELS)}.\n"


def test_a_disabled_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is known, and the reason is given."""
    monkeypatch.setenv("GENPOOL_MODELS__SMOLLM2_135M_INSTRUCT__ENABLED", "false")
    assert "is disabled in the configuration" in run("worker", SHIPPED).stderr
    assert "No model is enabled" in run("submit", "x").stderr


def test_models_are_listed_with_cache_size_and_licence(tmp_path: Path) -> None:
    """One row a model, own files and generated weights included."""
    (tmp_path / "own.gguf").write_bytes(b"x" * 2**20)
    (tmp_path / "genpool.toml").write_text(
        f'[models.own]\nsource = "{tmp_path}/own.gguf"\nenabled = false\n[models.tiny]\nsource = "random:1"'
    )
    rows = {line.split()[0]: line.split()[2:] for line in run("models", "list").stdout.splitlines()}
    assert rows["NAME"][:5] == ["CACHED", "SIZE", "LICENCE", "ENABLED", "STATE"]
    assert rows[SHIPPED][:5] == ["no", "94", "MiB", "Apache-2.0", "yes"]
    assert rows["smollm2-135m-q4"][:4] == ["no", "-", "Apache-2.0", "no"]
    assert rows["own"][:5] == ["yes", "1", "MiB", "-", "no"]
    assert rows["tiny"][:4] == ["-", "-", "-", "yes"]
    # No state server runs: nothing is known of their processes.
    assert {cell for name, cells in rows.items() if name != "NAME" for cell in cells[5:]} == {"-"}


def test_pull_prints_where_the_weights_are(tmp_path: Path) -> None:
    """Weights made in code need none."""
    (tmp_path / "own.gguf").write_bytes(b"x")
    toml = f'[models.own]\nsource = "{tmp_path}/own.gguf"\n[models.tiny]\nsource = "random:1"'
    (tmp_path / "genpool.toml").write_text(toml)
    assert run("models", "pull", "own", "tiny").stdout == f"own: {tmp_path}/own.gguf\n"


def test_pull_of_a_missing_file_fails_by_name(tmp_path: Path) -> None:
    """The known sources are offered."""
    (tmp_path / "genpool.toml").write_text('[models.own]\nsource = "/nonexistent.gguf"')
    result = run("models", "pull", "own")
    assert result.exit_code == 1
    assert (
        result.stderr
        == f"Error: No weights at /nonexistent.gguf: it is neither a file nor one of {', '.join(SOURCES)}.\n"
    )


# --- what is asked for, and what is started


def test_a_prompt_becomes_one_user_turn() -> None:
    """Unset options stay unset; the first enabled model is the default."""
    settings = settings_of()
    request = build_request(settings, "Hello", model=None, max_tokens=None, temperature=None, seed=None)
    assert (request.model, request.max_tokens, request.sampling.seed, request.sampling.temperature) == (
        SHIPPED,
        None,
        None,
        1.0,
    )
    assert request.prompt.model_dump() == {"type": "chat", "messages": ({"role": "user", "content": "Hello"},)}
    request = build_request(settings, "Hello", model=SHIPPED, max_tokens=5, temperature=0.0, seed=7)
    assert (request.max_tokens, request.sampling.temperature, request.sampling.seed) == (5, 0.0, 7)


def test_any_sampling_option_can_be_named() -> None:
    """By the name that the API has for it, in JSON or as plain text; a wrong one is an error that names it."""

    def build(*option: str) -> Sampling:
        fields = {"model": None, "max_tokens": None, "temperature": 0.5, "seed": 7}
        return build_request(settings_of(), "Hello", **fields, option=option).sampling

    found = build("top_p=0.9", 'logit_bias={"5": -100}', "stop=END", "logprobs=true", "stop_token_ids=[3]")
    assert found == Sampling(
        temperature=0.5, seed=7, top_p=0.9, logit_bias={5: -100}, stop=("END",), logprobs=True, stop_token_ids=(3,)
    )
    for wrong, named in (
        ("top_p=2", "top_p"),
        ("top_p", "NAME=VALUE"),
        ("tpo_p=1", r"^Unknown option: tpo_p\.$"),
        ("top_p=x", "top_p"),
    ):
        with pytest.raises(InvalidRequest, match=named):
            build(wrong)


def test_a_prompt_that_is_no_text_is_refused_without_quoting_it() -> None:
    """Prompts stay out of error messages."""
    with pytest.raises(InvalidRequest) as caught:
        build_request(settings_of(), "private \udc80", model=None, max_tokens=None, temperature=None, seed=None)
    assert "private" not in str(caught.value)


def test_without_an_enabled_model_there_is_no_default() -> None:
    """The error says so."""
    with pytest.raises(UnknownModel, match="No model is enabled"):
        build_request(
            settings_of(f"[models.{SHIPPED}]\nenabled = false"),
            "x",
            model=None,
            max_tokens=None,
            temperature=None,
            seed=None,
        )


def test_everything_starts_before_the_api_and_stops_after_it(tmp_path: Path) -> None:
    """State server, Flower, one worker per enabled model, API; a disabled model has no worker."""
    settings = settings_of('[models.tiny]\nsource = "random:1"\n[models.off]\nsource = "random:2"\nenabled = false')
    server = StateServer(tmp_path / "folder")
    try:
        plan = launch.stages(settings, server=server, port=8000, flower_port=5555)
        assert "--task-events" in plan[2][0].argv
        names = [[child.name for child in stage] for stage in plan]
        assert names == [["state"], ["flower"], [f"worker {SHIPPED}", "worker tiny"], ["api"]]
    finally:
        server.release()


def test_a_state_server_elsewhere_is_not_started() -> None:
    """Nor is Flower when nobody asked for it."""
    settings = settings_of('[state]\nurl = "redis://elsewhere"')
    assert launch.embedded_server(settings) is None
    plan = launch.stages(settings, server=None, port=8000, flower_port=None)
    assert [[child.name for child in stage] for stage in plan] == [[f"worker {SHIPPED}"], ["api"]]


def test_a_worker_starts_with_one_blas_thread() -> None:
    """BLAS libraries read their variables once, at import; the engine brings its own threads."""
    assert set(launch.worker_child(settings_of(), SHIPPED).env.values()) == {"1"}


def test_a_model_has_as_many_workers_as_replicas_each_on_its_device() -> None:
    """Names of their own for children and Celery nodes; devices in turn, in the child's environment; none for a model
    that others serve. What the model hands back is told once."""
    toml = '[models.{}]\nreplicas = 3\ndevice = "0,1;GPU-8a"\n[models.far]\nsource = "random:1"\nreplicas = 0'
    plan = launch.stages(settings_of(toml.format(SHIPPED)), server=None, port=8000, flower_port=5555)
    workers = plan[1]
    assert [child.name for child in workers] == [f"worker {SHIPPED}", f"worker {SHIPPED} 2", f"worker {SHIPPED} 3"]
    assert [child.argv[child.argv.index("-n") + 1] for child in workers] == [
        f"{SHIPPED}@%h",
        f"{SHIPPED}-2@%h",
        f"{SHIPPED}-3@%h",
    ]
    assert [child.env[launch.DEVICES_VARIABLE] for child in workers] == ["0,1", "GPU-8a", "0,1"]
    assert [child.parting is not None for child in workers] == [True, False, False]


@pytest.mark.parametrize(
    ("given", "seen"), [([], "0,1"), (["--device", "3"], "3"), (["--device", "MIG-1/2/0"], "MIG-1/2/0")]
)
def test_a_worker_sees_its_device_from_its_first_moment(
    given: list[str], seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The option comes before the catalogue, and both before what the environment said."""
    settings_of('[models.tiny]\nsource = "random:1"\ndevice = "0,1;2"')
    monkeypatch.setenv(launch.DEVICES_VARIABLE, "7")
    started: list[dict[str, str]] = []
    monkeypatch.setattr(os, "execve", lambda _path, _argv, environment: started.append(environment))
    run("worker", "tiny", *given)
    assert started[0][launch.DEVICES_VARIABLE] == seen


@pytest.mark.parametrize("device", ["0;1", "0,", " ", "$(x)"])
def test_a_device_that_is_none_is_refused(device: str) -> None:
    """Named, before anything starts."""
    settings_of('[models.tiny]\nsource = "random:1"')
    assert "names no device" in run("worker", "tiny", "--device", device).output


def test_a_worker_may_drain_before_it_is_killed() -> None:
    """The supervisor's patience is longer than the drain grace."""
    settings = settings_of("[worker]\ndrain_grace_seconds = 100")
    assert launch.worker_child(settings, SHIPPED).stop_grace_s > 100


def test_a_worker_consumes_its_models_queue_under_a_name_of_its_own() -> None:
    """-Q and -n follow the model; options are passed on."""
    argv = launch.worker_argv(SHIPPED, concurrency=4, name="second@here")
    assert argv[argv.index("-Q") + 1] == SHIPPED
    assert argv[argv.index("-n") + 1] == "second@here"
    assert argv[argv.index("--concurrency") + 1] == "4"
    assert f"{SHIPPED}@%h" in launch.worker_argv(SHIPPED)


def test_the_ready_line_serves_no_model_that_is_unloaded(tmp_path: Path) -> None:
    """What an admin wants outlives everything; it is named apart, with the way back."""
    models = {"a": ModelSettings(source="random:1"), "b": ModelSettings(source="random:1")}
    settings = Settings(models=models, state={"folder": str(tmp_path / "state")})
    assert "serves a, b; examples" in launch.ready_line(settings, "http://here")
    with StateServer(tmp_path / "state") as server:
        client = connect(server.url, max_connections=1)
        Lifecycle(client, "a").unload(0)
        line = launch.ready_line(settings, "http://here")
        assert "/v1 serves b; unloaded by an admin: a (genpool models load NAME); examples are at" in line
        Lifecycle(client, "b").unload(0)
        assert "serves no model; unloaded by an admin: a, b (" in launch.ready_line(settings, "http://here")
        client.close()


def test_a_url_with_an_ipv6_address_has_brackets() -> None:
    """As URLs want it."""
    assert launch.base_url("::1", 80) == "http://[::1]:80"
    assert launch.base_url("127.0.0.1", 80) == "http://127.0.0.1:80"


def test_port_0_is_replaced_by_a_free_one() -> None:
    """The address printed at the end must be the real one."""
    assert launch.claim_port("127.0.0.1", 0) > 0
