"""The one door to JetStream: google-jetstream 0.2.2 as it can be used today.

The published wheel needs three things done for it, all of them here. It imports seqio, and with it
TensorFlow, for two class names; it calls `jax.tree_map`, which jax no longer has, and answers the
error by killing the process; and it sets the root logger to print everything to stdout.
"""

import logging
import sys
import types
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import jax

from s3ac_jax.rollout.backend import RolloutError

# The release whose private names we rely on: the driver's `_*_thread` methods and queues, the
# server's loop and executor. tests/unit/rollout/server/test_jetstream_shim.py holds the list.
VERSION = "0.2.2"
_SEQIO = ("seqio", "seqio.vocabularies")


@contextmanager
def _without_seqio() -> Generator[None]:
    """Two empty classes in seqio's place while JetStream is imported.

    They only serve its own SentencePiece tokenizer, which is not used here. A seqio that somebody
    has imported is left alone, and one imported later is the real one.
    """
    if "seqio" in sys.modules:
        yield
        return
    package, vocabularies = (types.ModuleType(name) for name in _SEQIO)
    vars(package)["vocabularies"] = vocabularies
    for name in ("Vocabulary", "SentencePieceVocabulary"):
        vars(vocabularies)[name] = type(name, (), {})
    sys.modules |= dict(zip(_SEQIO, (package, vocabularies), strict=True))
    try:
        yield
    finally:
        for name in _SEQIO:
            sys.modules.pop(name, None)


@contextmanager
def _same_root_logger() -> Generator[None]:
    """Puts level and handlers of the root logger back as they were."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers


def _delete_arrays(p: Any) -> None:
    for leaf in jax.tree.leaves(p):
        if isinstance(leaf, jax.Array):
            leaf.delete()


try:
    with _same_root_logger(), _without_seqio():
        from jetstream.core import orchestrator, server_lib
        from jetstream.engine import engine_api, token_utils, tokenizer_api, tokenizer_pb2
except ImportError as error:
    raise RolloutError(
        f"the rollout server needs JetStream, and it can't be imported ({error}): "
        "pip install 's3ac-jax[serve]' && "
        f"pip install --no-deps google-jetstream=={VERSION}"
    ) from error

# Called by the driver after every insert; its own version asks jax for a name that is gone.
orchestrator.delete_pytree = _delete_arrays

__all__ = [
    "VERSION", "engine_api", "orchestrator", "server_lib", "token_utils",
    "tokenizer_api", "tokenizer_pb2",
]  # fmt: skip
