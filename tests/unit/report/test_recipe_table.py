"""The table of recipes: what it says, and that the docs hold the one the code prints."""

import pathlib

from s3ac_jax.algos.recipe import RECIPES, SOURCES
from s3ac_jax.report.recipe_table import recipe_table

DOCS = pathlib.Path(__file__).resolve().parents[3] / "docs" / "recipes.md"


def rows():
    split = [[cell.strip() for cell in line.strip("|").split("|")]
             for line in recipe_table().splitlines()]  # fmt: skip
    return {cells[0].strip("`"): dict(zip(split[0], cells, strict=True)) for cells in split[2:]}


def test_the_docs_hold_this_table():
    assert recipe_table() in DOCS.read_text()


def test_every_recipe_has_a_row_and_a_source():
    assert list(rows()) == list(RECIPES) == list(SOURCES)


def test_cells():
    table = rows()
    assert table["s3ac_single"]["select"] == "Daps(n_c=4.0, a_min=0.1, decay=0.99)"
    assert table["sao"]["surrogate"] == "Band(imitation=0.0, low=0.7, high=6.0)"
    assert (table["grpo"]["critic"], table["grpo"]["average"]) == ("-", "ResponseMean")
    assert table["flash_reinforce"]["updates per batch"] == "1"
    assert table["dapo"]["updates per batch"] == "as the run"
    assert table["dapo"]["per prompt"] == "16"
