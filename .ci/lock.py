"""Remakes the requirements files: resolves, installs nothing, and writes sorted pins.

    python3.11 .ci/lock.py python3.12

The pins are names and versions, so a local index or wheel folder cannot leak into them.
"""

import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

OLDEST, NEWEST = sys.executable, sys.argv[1]
EVERYTHING = ".[train,report,hf,serve,int8,grade,data,plan]"
# The tools alone: with the package their pins would fix jax, and they serve every jax.
TOOLS = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]["dev"]

# file, its header, the interpreter, what to resolve; a later file builds on the earlier ones.
LOCKS = [
    (
        "requirements.txt",
        "All run-time extras on Python 3.11; also the constraints of `make quickstart`.",
        OLDEST,
        [EVERYTHING, "jax<0.11"],
    ),
    (
        "requirements-dev.txt",
        "The tools of `make test` and `make check`.",
        OLDEST,
        [*TOOLS, "-c", "requirements.txt"],
    ),
    (
        "requirements-tpu.txt",
        "jax[tpu] beside requirements.txt.",
        OLDEST,
        ["jax[tpu]", "-c", "requirements.txt"],
    ),
    (
        "requirements-cuda.txt",
        "jax[cuda12] beside requirements.txt.",
        OLDEST,
        ["jax[cuda12]", "-c", "requirements.txt"],
    ),
    (
        "requirements-newest.txt",
        "As requirements.txt, on Python 3.12 with JAX 0.12.",
        NEWEST,
        [EVERYTHING, "jax>=0.12", "-c", "requirements-dev.txt"],
    ),
]


def resolve(python: str, wanted: list[str]) -> dict[str, str]:
    """Returns name -> version of all that pip would install into an empty environment."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        options = ["--quiet", "--dry-run", "--ignore-installed", "--report", str(report)]
        subprocess.run([python, "-m", "pip", "install", *options, *wanted], check=True)
        releases = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    return {release["name"]: release["version"] for release in releases}


for file, header, python, wanted in LOCKS:
    print(f"resolving {file}", flush=True)
    pins = resolve(python, wanted)
    pins.pop("s3ac-jax", None)
    lines = [f"# {header} Remade by `make lock`, never by hand."]
    lines += [f"{name}=={pins[name]}" for name in sorted(pins, key=str.lower)]
    Path(file).write_text("\n".join(lines) + "\n")
