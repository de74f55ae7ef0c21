"""Official clients and frameworks against a live genpool: `python -m tests.clients [NAME ...]`.

Two API nodes, a third that cannot reach its state server, one worker with the scripted and the tiny engine. Each suite
knows nothing of genpool but addresses, model names and keys, from CLIENT_ variables.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

from tasks.api_keys import USER, new_key
from tests.clients.environments import ALL, Suite, command
from tests.processes import free_port
from tests.system import SCRIPTED, TINY, System

PENDING_PER_MODEL = 30


def main() -> int:
    """Run the suites that were asked for; 0 when all pass."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__.splitlines()[0])  # type: ignore[union-attr] # it is there
    parser.add_argument("name", nargs="*", help=f"of {', '.join(suite.name for suite in ALL)}; default: all")
    names = parser.parse_args().name
    unknown = set(names) - {suite.name for suite in ALL}
    if unknown:
        parser.error(f"no suite is named {', '.join(sorted(unknown))}")
    chosen = [suite for suite in ALL if not names or suite.name in names]
    with tempfile.TemporaryDirectory(prefix="genpool-clients-") as folder:
        results = _run(chosen, Path(folder))
    for name, passed in results.items():
        print(f"{'passed' if passed else 'FAILED'}  {name}")
    return 0 if all(results.values()) else 1


def _run(suites: list[Suite], folder: Path) -> dict[str, bool]:
    key, line = new_key("client", USER)
    keys_file = folder / "keys"
    keys_file.write_text(f"{line}\n")
    sections = {"limits": {"pending_per_model": PENDING_PER_MODEL}, "server": {"keys_file": str(keys_file)}}
    serves = f"{SCRIPTED},{TINY}"
    with System(folder, apis=2, workers=1, key=key, sections=sections, serves=serves, delay_ms=10) as system:
        stranded = system.api_part(9, f"redis://127.0.0.1:{free_port()}/0")
        system.apis.append(stranded)
        system.start()
        environment = os.environ | {
            "CLIENT_URL": f"{system.api_url(system.apis[0])}/v1",
            "CLIENT_OTHER_URL": f"{system.api_url(system.apis[1])}/v1",
            "CLIENT_STRANDED_URL": f"{system.api_url(stranded)}/v1",
            "CLIENT_MODEL": TINY,
            "CLIENT_SCRIPTED": SCRIPTED,
            "CLIENT_PENDING": str(PENDING_PER_MODEL),
            "CLIENT_KEY": key,
            # Clients that would otherwise ask elsewhere on the network.
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
            "CLIENT_TOKENIZER": str(_byte_tokenizer(folder / "tokenizer")),
        }
        results = {}
        for suite in suites:
            print(f"=== {suite.name}", flush=True)
            results[suite.name] = subprocess.run(command(suite), env=environment, check=False).returncode == 0
            system.assert_at_rest()
        return results


def _byte_tokenizer(folder: Path) -> Path:
    """A tokenizer of single bytes for load generators: they insist on one, and would ask the network for it."""
    folder.mkdir()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


if __name__ == "__main__":
    sys.exit(main())
