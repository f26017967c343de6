"""A compiler that ends the process: the one line that is left of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
SCRIPT = """
import os, signal, sys
sys.path.insert(0, {root!r})
from s3ac_jax.core.errors import RunError
from s3ac_jax.train.plan.logs import stderr_lines
from s3ac_jax.train.plan.watching import note, watched

def main():
    if watched():
        print("the child did it")
        return
    note("actor step")
    with stderr_lines([]):
        {what}

try:
    main()
except RunError as error:
    print(error)
    sys.exit(1)
"""
LOG = "I1130 1 a.cc:1] hm\\nF1130 23:18:02.3 18405 b.cc:89] Check failed: x (1 vs. 2)\\n"
DIES = f"""os.write(2, b"{LOG}")
        os.kill(os.getpid(), signal.SIGABRT)"""


def run(tmp_path, what):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(root=str(ROOT), what=what))
    env = {name: value for name, value in os.environ.items() if not name.startswith("S3AC_JAX_")}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=env, timeout=120
    )
    return done.returncode, done.stdout.strip(), done.stderr


def test_a_check_that_fails_is_told_with_its_step(tmp_path):
    code, out, _ = run(tmp_path, DIES)
    assert code == 1
    assert out == (
        "XLA's compiler ended itself by SIGABRT at actor step (Check failed: x (1 vs. 2)): "
        "a bug of its own; another mesh, or --full, may do"
    )


def test_too_little_memory_is_told(tmp_path):
    code, out, _ = run(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    assert code == 1
    assert "killed at actor step: most likely this machine has too little memory" in out


@pytest.mark.parametrize(("what", "code", "told"), [
    ("pass", 0, "the child did it"), ("sys.exit(3)", 3, ""),
])  # fmt: skip
def test_else_it_ends_as_the_child_does(tmp_path, what, code, told):
    assert run(tmp_path, what)[:2] == (code, told)


def test_what_is_no_log_is_handed_on(tmp_path):
    _, _, err = run(tmp_path, 'os.write(2, b"I1130 1 a.cc:1] hm\\nhello\\n")')
    assert err.strip() == "hello"
