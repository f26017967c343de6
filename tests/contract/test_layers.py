"""The arrows between rooms point down, and the contracts can tell when one does not."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs the contracts of `folder`'s pyproject.toml on the package beside it."""
    code = "import sys; sys.path.insert(0, ''); from importlinter.cli import lint_imports_command"
    code += "; lint_imports_command()"
    return subprocess.run(
        [sys.executable, "-c", code, "--no-cache", "--no-logo"],
        cwd=folder,
        capture_output=True,
        text=True,
    )


def test_contracts_hold():
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "9 kept, 0 broken" in done.stdout


@pytest.fixture
def planted(tmp_path):
    """Returns a function that runs the contracts on a copy of the package with one more file."""

    def lint(module: str, line: str) -> subprocess.CompletedProcess[str]:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "s3ac_jax", tmp_path / "s3ac_jax", ignore=ignore)
        shutil.copy(ROOT / "pyproject.toml", tmp_path)
        file = tmp_path / "s3ac_jax" / module
        file.parent.mkdir(exist_ok=True)
        file.write_text(line + "\n")
        return lint_imports(tmp_path)

    return lint


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("core/bad.py", "import s3ac_jax.algos"),
        ("algos/bad.py", "import flax"),
        ("core/bad.py", "import optax"),
        ("models/bad.py", "import s3ac_jax.data"),
        ("scheduler/bad.py", "import s3ac_jax.rewards"),
        ("rewards/bad.py", "import flax"),
        ("config/bad.py", "import s3ac_jax.train"),
        ("train/bad.py", "import orbax.checkpoint"),
        ("io/bad.py", "import orbax.checkpoint"),
        ("train/bad.py", "from jetstream.engine import engine_api"),
        ("rollout/bad.py", "import jetstream"),
        ("train/bad.py", "import grain"),
        ("data/bad.py", "import tensorflow_datasets"),
        ("rewards/bad.py", "import math_verify"),
        ("newroom/__init__.py", ""),
    ],
)
def test_contracts_catch(planted, module, line):
    done = planted(module, line)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "BROKEN" in done.stdout


def test_the_doors_are_open(planted):
    done = planted("rollout/jetstream.py", "from jetstream.engine import engine_api")
    assert done.returncode == 0, done.stdout + done.stderr
