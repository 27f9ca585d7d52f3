"""Tables that fit the terminal: columns are left out before a number or a name is cut."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_PADDING = 3
"""Columns of the screen per column of a table, besides its cells: a blank on each side and a line."""


@dataclass(frozen=True)
class DataTable:
    """Rows of text under a title."""

    title: str
    columns: Sequence[str]  # headings; the first column names the row and is always shown
    rows: Sequence[Sequence[str]]  # one text per column
    text_columns: int = 1  # first columns that are text, aligned to the left; the others are aligned to the right
    prose: Sequence[str] = ()  # columns whose cells may be broken between words
    optional: Sequence[str] = ()  # columns that are left out on a narrow terminal, the first of them first

    @classmethod
    def of(
        cls,
        title: str,
        rows: Sequence[Mapping[str, str]],
        optional: Sequence[str] = (),
        columns: Sequence[str] = (),
        **options: Any,
    ) -> Self:
        """From one mapping per row, heading to cell; `-` where a row lacks a cell of `columns` or of other rows."""
        columns = columns or list(dict.fromkeys(column for row in rows for column in row))
        cells = [[row.get(column, "-") for column in columns] for row in rows]
        return cls(title, columns, cells, optional=[x for x in optional if x in columns], **options)

    def markdown(self) -> str:
        """The table in Markdown, without its title."""
        shown = str.maketrans({"|": "\\|", "<": "&lt;", "\n": " "})
        cells = ([cell.translate(shown) for cell in row] for row in (self.columns, *self.rows))
        header, *rows = (f"| {' | '.join(line)} |\n" for line in cells)
        return "".join((header, f"|{'---|' * len(self.columns)}\n", *rows))

    def parts(self, width: int) -> list[Self]:
        """Tables of as many columns as fit a width of the screen, each with the first ones that tell rows apart."""
        split: list[list[str]] = []
        naming = next((x for x in (1, 2, 3, 4) if len({tuple(row[:x]) for row in self.rows}) == len(self.rows)), 1)
        shown = names = list(self.columns[:naming])
        for column in self.columns[naming:]:
            if shown != names and self.least([*shown, column]) > width:
                split, shown = [*split, shown], names
            shown = [*shown, column]
        rows = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        texts = self.columns[: self.text_columns]
        return [
            self.of(title, rows, (), columns, text_columns=sum(x in texts for x in columns), prose=self.prose)
            for title, columns in zip((self.title, *[""] * len(split)), (*split, shown), strict=True)
        ]

    def fitted(self, width: int) -> RenderableType:
        """It within a width of the screen: with fewer columns, else broken words, else in parts or a line per cell."""
        shown = list(self.columns)
        for column in self.optional:
            if self.least(shown) <= width:
                break
            shown.remove(column)
        word = None if self.least(shown) <= width else 24  # of a path or a digest in prose
        if self.least(shown, word) > width:
            parts = self.parts(width)
            if all(part.least(part.columns) <= width for part in parts):
                return Group(*(part.fitted(width) for part in parts))
            lines = [Text(self.title, style="italic")]
            for name, *cells in self.rows:
                lines.append(Text(name, style="bold"))
                lines += [Text(f"  {column}: {cell}") for column, cell in zip(self.columns[1:], cells, strict=True)]
            return Group(*lines)
        table = Table(title=Text(self.title, style="table.title"), title_justify="left", caption_justify="left")
        if omitted := [x for x in self.optional if x not in shown]:
            table.caption = f"left out for lack of width: {', '.join(omitted)}; --json has all"
        widths = {column: self._shortest(column, word) for column in shown}
        for _ in range(width - self.least(shown, word)):  # prose is broken so that its columns are about as long
            broken = [column for column in shown if widths[column] < self._natural(column)]
            if not broken:
                break
            widths[max(broken, key=lambda column: self._natural(column) / widths[column])] += 1
        for column in shown:
            text = self.columns.index(column) < self.text_columns
            table.add_column(Text(column), justify="left" if text else "right", width=widths[column], overflow="fold")
        for row in self.rows:
            table.add_row(*(Text(row[self.columns.index(column)]) for column in shown))
        return table

    def least(self, shown: Sequence[str], word: int | None = None) -> int:
        """The columns of the screen that these columns take, prose broken, its words after `word` characters."""
        return 1 + sum(self._shortest(column, word) + _PADDING for column in shown)

    def _natural(self, column: str) -> int:
        return max(map(cell_len, self._cells(column)))

    def _shortest(self, column: str, word: int | None) -> int:
        """The width below which a cell would be cut: that of its longest word, or its whole width."""
        if column not in self.prose:
            return self._natural(column)
        longest = max(cell_len(x) for cell in self._cells(column) for x in cell.split() or [""])
        return min(longest, word or longest)

    def _cells(self, column: str) -> list[str]:
        return [column, *(row[self.columns.index(column)] for row in self.rows)]
