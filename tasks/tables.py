"""Tables on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

import click


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, err: bool = False) -> None:
    """Print columns as wide as their widest cell; `err`: to stderr."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        cells = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        click.echo(cells.rstrip(), err=err)
