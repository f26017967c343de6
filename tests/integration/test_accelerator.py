"""The benchmark of an accelerator, on what is here: steps run, and figures fit together."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from s3ac_jax.data.arithmetic import TOKENIZER

ROOT = Path(__file__).resolve().parents[2]
DEVICES = 4  # of tests/conftest.py
LINE = re.compile(r" *(\w+) +([\d.]+) ms +([\d,]+) +([\d.]+|-) +([\d.]+%|-) ")


def test_its_figures():
    done = subprocess.run(
        [sys.executable, "benchmarks/accelerator.py", "--model=tiny", "--calls=1",
         "--peak_tflops=0.5"],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=500, check=True,
    )  # fmt: skip
    assert f"{DEVICES} x cpu" in done.stdout
    lines = {found[1]: found for found in map(LINE.match, done.stdout.splitlines()) if found}
    assert list(lines) == ["score", "critic", "actor", "prefill", "generate"]
    assert lines["generate"][4] == lines["generate"][5] == "-"
    for name in ("score", "critic", "actor", "prefill"):
        rate, share = float(lines[name][4]), float(lines[name][5].rstrip("%")) / 100
        assert share == pytest.approx(rate / DEVICES / 0.5, abs=0.002)
    # Six operations per weight of a matrix and token; attention over 64 tokens adds a little.
    attention, mlp, head = 64 * (64 + 32 + 32 + 64), 3 * 64 * 192, 64 * TOKENIZER.vocab_size
    tokens, seconds = DEVICES * 32 * 64, float(lines["actor"][2]) / 1e3
    assert int(lines["actor"][3].replace(",", "")) == pytest.approx(tokens / seconds, rel=0.01)
    work = float(lines["actor"][4]) * 1e12 * seconds
    assert work == pytest.approx(6 * (2 * (attention + mlp) + head) * tokens, rel=0.15)
