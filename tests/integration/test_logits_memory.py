"""The updates never hold all logits: XLA's own count of their memory, nothing is run."""

import importlib.util
from pathlib import Path

from s3ac_jax.models import token_logp

# By its path: a dependency installs a package of the name `benchmarks`.
PATH = Path(__file__).resolve().parents[2] / "benchmarks" / "logits_memory.py"


def test_the_updates_take_a_tenth_of_what_all_logits_take(monkeypatch):
    spec = importlib.util.spec_from_file_location("logits_memory", PATH)
    logits_memory = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(logits_memory)
    sizes = {role: logits_memory.temporary(role) for role in ("actor", "critic")}
    monkeypatch.setattr(token_logp, "BLOCK_NUMBERS", 1 << 40)
    whole = logits_memory.temporary("actor")
    # The other side does hold them: 4,096 x 151,936 float32, and not just once.
    assert whole > 4096 * 151_936 * 4 / 2**20
    assert sizes["actor"] < whole / 10
    assert sizes["critic"] < whole / 10
