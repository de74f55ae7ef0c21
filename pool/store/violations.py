"""What an audit finds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Violation:
    """`subject` is a job token, a key or a stream entry's id; `detail` holds no prompt and no text."""

    invariant: str
    subject: str
    detail: str
