"""Rows of numbers as a reader wants them: on the terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from tools.evidence import results


def cells(rows: Iterable[Sequence[object]], share: int) -> list[list[str]]:
    """Three digits of a float; column ``share`` in percent; nothing is a dash."""
    return [[_cell(cell, i == share) for i, cell in enumerate(row)] for row in rows]


def _cell(x: object, share: bool) -> str:
    if x == "" or (isinstance(x, float) and x == 0.0):
        return "-"
    if not isinstance(x, float):
        return str(x)
    return f"{100 * x:.3g}%" if share else f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]], share: str) -> str:
    """``share``: the column that is in percent."""
    return results.table(header, cells(rows, header.index(share)))


def show(console: Console, title: str, header: Sequence[str], rows: Iterable[Sequence[object]], share: str) -> None:
    """Prints them; ``share`` as in ``markdown``."""
    table = Table(*header, title=title)
    for row in cells(rows, header.index(share)):
        table.add_row(*row)
    console.print(table)
