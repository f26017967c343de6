"""Prints the table of recipes, as docs/recipes.md holds it.

python launch/recipes.py
"""

from absl import app

from s3ac_jax.report.recipe_table import recipe_table


def main(_: list[str]) -> None:
    print(recipe_table(), end="")


if __name__ == "__main__":
    app.run(main)
