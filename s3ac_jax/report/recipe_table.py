"""The table of recipes for the docs, read off the recipes themselves."""

import dataclasses

from s3ac_jax.algos.recipe import RECIPES, SOURCES, Recipe

_COLUMNS = (
    "select", "keep", "shaping", "advantage", "surrogate", "average", "guard", "critic", "entropy",
    "replay_routing", "responses_per_prompt", "updates",
)  # fmt: skip
_HEADERS = {
    "replay_routing": "R3",
    "responses_per_prompt": "per prompt",
    "updates": "updates per batch",
}


def recipe_table() -> str:
    """Markdown, one row per recipe: the class of each column with its fields.

    Source: ours: a table written by hand would be wrong by the next change.
    """
    headers = ["recipe", *(_HEADERS.get(name, name) for name in _COLUMNS), "source"]
    rows = [
        [f"`{name}`", *(_cell(recipe, column) for column in _COLUMNS), SOURCES[name]]
        for name, recipe in RECIPES.items()
    ]
    lines = [headers, ["---"] * len(headers), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(recipe: Recipe, column: str) -> str:
    part = getattr(recipe, column)
    if part is None:
        return "as the run" if column == "updates" else "-"
    if isinstance(part, bool):
        return "yes" if part else "-"
    if not dataclasses.is_dataclass(part):
        return str(part)
    fields = [f"{field.name}={getattr(part, field.name)!r}" for field in dataclasses.fields(part)]
    name = type(part).__name__
    return f"{name}({', '.join(fields)})" if fields else name
