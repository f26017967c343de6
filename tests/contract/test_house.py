"""House rules that no linter knows: sizes, names, docstrings with provenance, no local paths."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from s3ac_jax.algos.recipe import RECIPES

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "s3ac_jax"
MATHS = ("core", "algos")
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_APP_LINES = 400, 100, 60
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
# Spelled in pieces: this file is searched too.
LOCAL_PATH = re.compile(r"(?<![\w.])/(?:" + "|".join(("work", "root", "home", "opt")) + r")/")
TEXT = {"", ".ipynb", ".json", ".md", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml"}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def sources(*rooms: str) -> list[Path]:
    folders = [PACKAGE / room for room in rooms] or [PACKAGE]
    # What protoc writes follows protoc's rules.
    return sorted(
        path
        for folder in folders
        for path in folder.rglob("*.py")
        if not path.name.endswith("_pb2.py")
    )


def tracked() -> list[Path]:
    """Returns the files of the repository: those git knows or would add."""
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        pytest.skip("not a git checkout")
    return sorted(path for line in done.stdout.splitlines() if (path := ROOT / line).is_file())


def public(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Yields the public functions and classes that a module defines at its top level."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (*FUNCTION, ast.ClassDef)) and not node.name.startswith("_"):
            yield node


def test_files_and_functions_are_short():
    long = []
    for path in sources():
        text = path.read_text()
        if (lines := len(text.splitlines())) > MAX_FILE_LINES:
            long.append(f"{name(path)}: {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, FUNCTION):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    long.append(f"{name(path)}:{node.lineno} {node.name}: {lines} lines")
    assert not long


def test_apps_are_short():
    lines = {name(p): len(p.read_text().splitlines()) for p in (ROOT / "launch").rglob("*.py")}
    assert {app: n for app, n in lines.items() if n > MAX_APP_LINES} == {}


def test_no_file_is_called_utils():
    assert [name(path) for path in sources() if path.stem in {"util", "utils"}] == []


def names_asked(path: Path) -> list[str]:
    """Places of a module where a recipe is told by its name, or RECIPES is looked up."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Attribute(value=ast.Name(id="recipe" | "RECIPES"), attr="name"):
                found.append(node)
            case ast.Attribute(value=ast.Attribute(attr="recipe"), attr="name"):
                found.append(node)
            case ast.Subscript(value=ast.Name(id="RECIPES") | ast.Attribute(attr="RECIPES")):
                found.append(node)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="RECIPES"), attr="get")):
                found.append(node)
            case ast.Compare(left=ast.Name(id="recipe" | "preset"), comparators=[ast.Constant()]):
                found.append(node)
    return [f"{path.name}:{node.lineno}" for node in found]


def test_no_code_asks_for_a_recipes_name():
    """A method is a value: what differs stands in its columns, and nobody asks how it is called."""
    named, spelled = [], []
    known = {name for name in RECIPES if len(name) > 3}  # ppo and sao may be parts of words
    for path in sources():
        place = name(path)
        # A config file has names, and the boundary turns them into values.
        if not place.startswith("s3ac_jax/config/") and place != "s3ac_jax/algos/recipe.py":
            named += names_asked(path)
        if place != "s3ac_jax/algos/recipe.py":
            strings = (
                n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)
            )
            spelled += [f"{place}:{node.lineno}" for node in strings if node.value in known]
    assert (named, spelled) == ([], [])


@pytest.mark.parametrize(
    "line",
    ["if recipe.name == 'x': pass", "config.recipe.name", "RECIPES['grpo']", "RECIPES.get('grpo')",
     "recipe == 'grpo'", "recipes.RECIPES[name]"],
)  # fmt: skip
def test_the_search_for_names_can_tell(tmp_path, line):
    file = tmp_path / "planted.py"
    file.write_text(f"import jax\n{line}\n")
    assert names_asked(file) == ["planted.py:2"]


def test_rooms_say_what_lives_there():
    rooms = [path for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"]
    assert rooms
    silent = [room.name for room in rooms if not (room / "__init__.py").exists()]
    silent += [
        name(path)
        for path in PACKAGE.rglob("__init__.py")
        if not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []


def test_maths_says_what_and_whence():
    silent, unsourced = [], []
    for path in sources(*MATHS):
        for node in public(path):
            where, doc = f"{name(path)}:{node.lineno} {node.name}", ast.get_docstring(node)
            if not doc:
                silent.append(where)
            elif isinstance(node, FUNCTION):
                # The provenance may wrap: it opens the last paragraph or stands on the last line.
                last = doc.strip().split("\n\n")[-1]
                if not re.search(r"^(?:Source:|.*\bours:)", last, re.MULTILINE):
                    unsourced.append(where)
    assert (silent, unsourced) == ([], [])


def test_no_local_path_is_tracked():
    found = []
    for path in tracked():
        if path.suffix in TEXT:
            for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
                if LOCAL_PATH.search(line):
                    found.append(f"{name(path)}:{number}")
    assert found == []
