"""What the catalogue says of servers over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pool.errors import ConfigurationError
from tasks.config import load_configuration

HEAD = '[models.far]\nbackend = "openai_remote"\n'
URLS = 'upstream.base_urls = ["http://one:8000/v1/", "https://two/v1"]\n'


def load(folder: Path, text: str, **environ: str) -> Any:
    """The model `far` of a file, with these variables."""
    path = folder / "genpool.toml"
    path.write_text(text)
    return load_configuration(path, environ=environ).settings.models["far"]


def test_a_remote_model_needs_urls_and_no_source(tmp_path: Path) -> None:
    """Others need a source; a worker reads a file for those that are here."""
    model = load(tmp_path, HEAD + URLS)
    assert model.upstream.base_urls == ("http://one:8000/v1", "https://two/v1")
    assert (model.is_remote, model.gguf_source) == (True, None)
    assert model.shown_source == "http://one:8000/v1 https://two/v1"
    child = load(tmp_path, '[models.far]\nbackend = "llama_server"\nsource = "/m.gguf"')
    assert (child.is_remote, child.gguf_source) == (True, "/m.gguf")
    assert load(tmp_path, '[models.far]\nsource = "random:1"').gguf_source is None


def test_lists_come_from_the_file_and_from_variables(tmp_path: Path) -> None:
    """A variable holds words as a shell has them."""
    words = {"GENPOOL_MODELS__FAR__UPSTREAM__ARGUMENTS": "--flag 'two words'"}
    model = load(tmp_path, HEAD + URLS, **words, GENPOOL_MODELS__FAR__UPSTREAM__BASE_URLS="http://three/v1")
    assert model.upstream.arguments == ("--flag", "two words")
    assert model.upstream.base_urls == ("http://three/v1",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEAD, "models.far.upstream.base_urls is required"),
        ('[models.far]\nbackend = "llama_server"', "models.far.source"),
        (HEAD + 'upstream.base_urls = ["ftp://one"]', "each must be http:// or https://"),
        (HEAD + 'upstream.base_urls = ["http://me:secret@one/v1"]', "without a user name"),
        (HEAD + 'upstream.base_urls = ["http://one/v1?key=1"]', "without a user name, a query"),
        (HEAD + 'upstream.base_urls = ["http://one/v1", "http://one/v1"]', "no URL may be there twice"),
        (HEAD + URLS + 'upstream.api_key_env = "not a name"', "models.far.upstream.api_key_env"),
        (HEAD + URLS + 'upstream.options = ["top_q"]', "knows top_k"),
        (HEAD + URLS + "upstream.retrys = 3", "models.far.upstream.retrys"),
        (HEAD + URLS + 'upstream.arguments = "--one string"', "models.far.upstream.arguments"),
        (HEAD + URLS + "upstream.arguments = [1]", "models.far.upstream.arguments.0"),
    ],
)
def test_errors_name_the_field(tmp_path: Path, text: str, message: str) -> None:
    """And the limit; secrets stay out of them."""
    with pytest.raises(ConfigurationError) as refused:
        load(tmp_path, text)
    assert message in str(refused.value) and "secret" not in str(refused.value)
