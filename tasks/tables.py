"""Tables on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

import click


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
