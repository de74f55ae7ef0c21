"""How many tokens a Program needs of a rank."""

from __future__ import annotations

from pool.rules.programs.facts import Program


def private_tokens(program: Program, decode_buffer_tokens: int, expected_output_tokens: int | None = None) -> int:
    """Tokens of KV that the Program needs for itself: its context beyond the prefix it shares, and its next output.

    The output is the first that is known of `expected_output_tokens`, the hint of its waiting request, the stored
    reservation of its request in flight, and `decode_buffer_tokens`.
    """
    hints = (
        expected_output_tokens,
        program.waiting.expected_output_tokens if program.waiting is not None else None,
        program.reserved_output_tokens,
        decode_buffer_tokens,
    )
    return max(program.context_tokens - program.shared_prefix_tokens, 0) + next(
        tokens for tokens in hints if tokens is not None
    )
