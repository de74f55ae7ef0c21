"""What engines without a model have in common; `tests.scripted` and `benchmarks.noop_engine` have one each."""

from __future__ import annotations

from tasks.ports import Capability, KVUsage, TokenIds

MAX_SESSIONS = 4096


class Modelless:
    """The parts of a tasks.ports.Engine that computes nothing: any number of sessions, and nothing to share or save."""

    context_length: int
    bytes_per_token = 1

    def capability(self) -> Capability:
        """All that needs no computing."""
        return Capability(
            max_sessions=MAX_SESSIONS,
            max_positions=self.context_length,
            batch_invariant=True,
            recompute_exact=True,
            snapshot=False,
            prefix_share=False,
            logprobs=False,
            seed=True,
        )

    def begin(self, session: str, epoch: int, prompt: TokenIds, positions: int, scope: str = "") -> int | None:  # noqa: ARG002 - the port's signature
        """There is always room, and nothing to begin with."""
        return 0

    def extend(self, session: str, epoch: int, positions: int) -> bool:  # noqa: ARG002 - the port's signature
        """There is always more."""
        return True

    def resident(self, prompt: TokenIds, scope: str = "") -> int:  # noqa: ARG002 - the port's signature
        """Nothing ever is."""
        return 0

    def release(
        self,
        session: str,
        epoch: int,
        *,
        tokens: TokenIds | None = None,
        scope: str = "",
        holder: str = "",
    ) -> None:
        """Nothing is held."""

    def unpin(self, holder: str) -> None:
        """Nothing is pinned."""

    def kv_usage(self) -> KVUsage:
        """No KV."""
        return KVUsage(total=2**40, held=0, pinned=0, cached=0, evictions=0)

    def check_integrity(self) -> None:
        """Without books, nothing can contradict itself."""

    def snapshot(self, session: str, epoch: int) -> bytes | None:  # noqa: ARG002 - the port's signature
        """Unsupported."""
        return None

    def restore(self, session: str, epoch: int, blob: bytes, prompt: TokenIds, positions: int, scope: str = "") -> bool:  # noqa: ARG002 - the port's signature
        """Unsupported."""
        return False
