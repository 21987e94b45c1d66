"""The table of docs/installation.md: the implementation that operations take, by recipe and compute capability."""

import pathlib

_PAGE = pathlib.Path(__file__).parents[1] / "docs" / "installation.md"


def documented():
    """{(operations, recipe): {compute capability: implementation}}, where "the same" means the operations above."""
    lines = _PAGE.read_text().split("## Which GPUs")[1].split("\n## ")[0].splitlines()
    heading, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines if line[:1] == "|")
    found, operations = {}, ""
    for first, recipes, *cells in rows:
        operations = operations if first == "the same" else first
        for recipe in recipes.split(", "):
            found[operations, recipe] = {
                capability: cell
                for capabilities, cell in zip(heading[2:], cells, strict=True)
                for capability in capabilities.split(", ")
            }
    return found
