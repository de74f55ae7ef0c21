"""What engines without a model have in common; `tests.scripted` and `benchmarks.noop_engine` have one each."""

from __future__ import annotations

from tasks.ports import Capability

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

    def share_prefix(self, source: tuple[str, int], target: tuple[str, int], positions: int) -> bool:  # noqa: ARG002 - the port's signature
        """Unsupported."""
        return False

    def snapshot(self, session: str, epoch: int) -> bytes | None:  # noqa: ARG002 - the port's signature
        """Unsupported."""
        return None

    def restore(self, session: str, epoch: int, blob: bytes) -> bool:  # noqa: ARG002 - the port's signature
        """Unsupported."""
        return False
