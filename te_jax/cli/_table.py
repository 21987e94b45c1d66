"""Plain-text tables for the terminal."""

from collections.abc import Sequence


def aligned(headings: Sequence[str], rows: Sequence[Sequence[str]], *, indent: int = 2) -> str:
    """Lay out rows under headings, columns padded to their widest cell and two spaces apart.

    A column whose every non-empty cell starts with a digit, a sign or a dash is set flush right, as figures are read.

    Args:
      headings: one per column.
      rows: cells already formatted; each row has one cell per heading.
      indent: spaces before every line.

    Returns:
      The lines joined by newlines, without trailing spaces or a final newline.
    """
    columns = list(zip(headings, *rows, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]
    flush_right = [all(_looks_numeric(cell) for cell in column[1:]) for column in columns]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, flush_right, strict=True)
        ]
        return (" " * indent + "  ".join(padded)).rstrip()

    rule = ["-" * width for width in widths]
    return "\n".join([line(headings), line(rule), *(line(row) for row in rows)])


def key_values(pairs: Sequence[tuple[str, str]], *, indent: int = 2) -> str:
    """Lay out `name  value` lines with the values starting in one column."""
    width = max((len(name) for name, _ in pairs), default=0)
    return "\n".join(f"{' ' * indent}{name.ljust(width)}  {value}".rstrip() for name, value in pairs)


def _looks_numeric(cell: str) -> bool:
    return cell == "" or cell[0].isdigit() or cell[0] in "+-–"
