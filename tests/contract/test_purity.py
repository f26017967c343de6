"""The maths imports without the rest: other JAX projects take the losses alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {
    "absl",
    "flax",
    "grain",
    "jetstream",
    "matplotlib",
    "ml_collections",
    "optax",
    "orbax",
    "qwix",
    "rich",
    "safetensors",
    "tensorboardX",
    "tensorflow",
    "tokenizers",
    "transformers",
}
BASE = ("jax", "numpy", "jaxtyping")
ROOMS = ("core", "algos")
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for room in ROOMS
    for path in (ROOT / "s3ac_jax" / room).rglob("*.py")
)


def loaded_by(*modules: str) -> set[str]:
    """Returns the top-level names that a fresh interpreter holds after importing `modules`."""
    lines = [f"import {module}" for module in modules]
    lines += ["import json, sys", "names = {name.split('.')[0] for name in sys.modules}"]
    lines += ["print(json.dumps(sorted(names)))"]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


@pytest.fixture(scope="module")
def base() -> set[str]:
    """Names that jax, numpy and jaxtyping bring by themselves in this environment."""
    return loaded_by(*BASE)


def test_the_package_imports_nothing():
    bare = loaded_by()
    assert loaded_by("s3ac_jax") - bare == {"s3ac_jax"}


@pytest.mark.parametrize("module", MODULES)
def test_maths_loads_only_its_base(module, base):
    loaded = loaded_by(module)
    assert not loaded & HEAVY
    assert loaded - base - set(sys.stdlib_module_names) <= {"s3ac_jax"}


def test_the_rooms_of_the_maths_are_found():
    assert {"s3ac_jax.core.types", "s3ac_jax.algos.advantages"} <= set(MODULES)
