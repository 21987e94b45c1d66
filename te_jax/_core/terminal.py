"""Plain text for the terminal: tables, and why something failed in one line."""

from collections.abc import Sequence


def aligned(headings: Sequence[str], rows: Sequence[Sequence[str]], *, indent: int = 2) -> str:
    """Rows under headings, without a final newline. Columns whose cells look like figures are set flush right."""
    columns = list(zip(headings, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    pads = [str.rjust if all(map(_looks_numeric, column[1:])) else str.ljust for column in columns]
    lines = [headings, ["-" * width for width in widths], *rows]
    return "\n".join(
        (
            " " * indent + "  ".join(pad(cell, width) for pad, cell, width in zip(pads, line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def key_values(pairs: Sequence[tuple[str, str]], *, indent: int = 2) -> str:
    """`name  value` lines whose values start in one column."""
    width = max((len(name) for name, _ in pairs), default=0)
    return "\n".join(f"{' ' * indent}{name.ljust(width)}  {value}".rstrip() for name, value in pairs)


def reason_of(error: BaseException) -> str:
    """The type of an error and the first 200 characters of its first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _looks_numeric(cell: str) -> bool:
    return cell == "" or cell[0].isdigit() or cell[0] in "+-–"
