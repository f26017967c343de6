"""Checkpoints that are whole or absent: the one door to orbax.

A state is saved as a flat table of arrays named by their place in it ("actor/trainable/mlp/up");
the structure (records, optax tuples, None) comes from the state that the reader asks for. Beside
the arrays lie the caller's note and a table of every array's shape, dtype and CRC-32, because
orbax returns flipped bytes of array data without a word.
"""

import contextlib
import json
import logging
import os
import pathlib
import shutil
import sys
import zlib
from collections.abc import Generator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from s3ac_jax.core.errors import RunError
from s3ac_jax.core.trees import path_name
from s3ac_jax.core.types import PyTree
from s3ac_jax.io import checksums
from s3ac_jax.io.damage import (
    committed_steps,
    damaged_file,
    first_line,
    is_committed,
    is_disk_full,
    write_file_table,
)
from s3ac_jax.parallel import hosts

_TEMPORARY = ".orbax-checkpoint-tmp"
_CHANNEL = "checkpoints"
_OTHER_CONFIG = "use another --workdir or the config it was made with"


class CheckpointError(RunError):
    """A checkpoint that can't be written, read or used; the message is one line for the user.

    Source: ours: a run that stops has to say in one line what to do.
    """


class Checkpoints:
    """The checkpoints of one run, in `folder/<step>`; the newest `keep` are kept.

    Nothing is created or deleted before the first `save`, so a reader can look into the folder
    of a live run. One process at a time may save. Not safe for use from several threads.

    Source: ours: whole or absent, and damage is told.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 2):
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self._folder = pathlib.Path(folder)
        self._keep = keep
        self._manager: ocp.CheckpointManager | None = None

    def steps(self) -> list[int]:
        """Steps that were written to the end, oldest first.

        Source: ours: orbax also lists a bare folder with a number for a name.
        """
        return committed_steps(self._folder)

    def latest(self) -> int | None:
        """The newest step that was written to the end, or None; what process 0 sees.

        Source: ours: a half-written checkpoint is never chosen.
        """
        return hosts.from_first(_CHANNEL, lambda: max(self.steps(), default=None))

    def save(self, step: int, state: PyTree, note: dict[str, Any]) -> None:
        """Writes `state` (arrays at the leaves) and `note` (JSON); returns once both are on disk.

        Blocking, because the next update is given the state's buffers to overwrite.

        Raises CheckpointError if the step exists, a leaf is no plain array, the note is not JSON,
        or the disk refuses (older checkpoints stay as they are, and reading goes on working).
        Source: ours: one record with checksums beside the arrays.
        """
        target = self._folder / str(step)
        if hosts.from_first(_CHANNEL, lambda: step in self.steps()):
            raise CheckpointError(f"{target} exists already; a step is saved once")
        arrays = _named(state)
        record = _record(arrays, note)
        _hush_late_writes()
        try:
            self._remove_unfinished()
            stored = {name: leaf for name, leaf in arrays.items() if leaf.size}
            with _quiet():
                self._open().save(
                    step,
                    args=ocp.args.Composite(
                        state=ocp.args.PyTreeSave(stored), note=ocp.args.JsonSave(record)
                    ),
                    force=True,
                )
                self._open().wait_until_finished()
            write_file_table(target)
        except Exception as error:
            self._forget_manager()
            raise CheckpointError(self._why_not_saved(target, error)) from error

    def restore(self, step: int, like: PyTree) -> tuple[PyTree, dict[str, Any]]:
        """Reads step `step` into the structure of `like`; returns it with the note.

        like: arrays or jax.ShapeDtypeStruct. A leaf with a sharding comes back laid out so, a
        numpy leaf as numpy, any other as an uncommitted jax.Array (as a jitted init returns).

        Raises CheckpointError if the step is absent or damaged, or if a piece is missing,
        surplus, or of another shape or dtype; nothing older is chosen silently.
        Source: ours: names, shapes, dtypes and checksums are compared before anything is used.
        """
        table, note = self._checked_record(step)
        wanted = _named(like)
        _compare(table, wanted, self._folder / str(step))
        arrays = self._arrays(step, table, wanted)
        # Taken out one by one: the host need not hold both copies of all.
        leaves = [_as_wanted(arrays.pop(name), leaf) for name, leaf in wanted.items()]
        return jax.tree.unflatten(jax.tree.structure(like), leaves), note

    def restore_part(
        self, step: int, *prefixes: str
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """The arrays of step `step` whose names begin with one of `prefixes`, and the note.

        The arrays are numpy's, by name: nobody has to know beforehand what there is.

        Raises CheckpointError if the step is absent or damaged, or has no such array.
        Source: ours: weights can be read without the optimiser that they were saved with.
        """
        table, note = self._checked_record(step)
        wanted = {
            name: jax.ShapeDtypeStruct(tuple(one["shape"]), jnp.dtype(one["dtype"]))
            for name, one in table.items()
            if name.startswith(prefixes)
        }
        if not wanted:
            raise CheckpointError(f"{self._folder / str(step)} has no {' or '.join(prefixes)}")
        return self._arrays(step, table, wanted), note

    def _checked_record(self, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """The table of arrays and the note of a step that is whole."""
        target = self._folder / str(step)
        if step not in self.steps():
            has = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(f"{self._folder} has no checkpoint of step {step} (it has {has})")
        if damage := damaged_file(target):
            raise self._damaged(step, damage)
        try:
            with _quiet():
                args = ocp.args.Composite(note=ocp.args.JsonRestore())
                record = self._open().restore(step, args=args)["note"]
            table, note = record["arrays"], record["note"]
            intact = record["crc32"] == _json_crc([table, note])
        except Exception as error:
            raise self._damaged(step, f"its note: {first_line(error)}") from error
        if not intact:
            raise self._damaged(step, "its note has changed since it was written")
        return table, note

    def _arrays(self, step: int, table: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
        """The wanted arrays as orbax returns them, compared with their checksums."""
        stored = {name: leaf for name, leaf in wanted.items() if leaf.size}
        try:
            with _quiet():
                args = ocp.args.PyTreeRestore(
                    item=dict.fromkeys(stored, 0),
                    restore_args={name: _restore_args(leaf) for name, leaf in stored.items()},
                    partial_restore=len(wanted) < len(table),
                )
                arrays = self._open().restore(step, args=ocp.args.Composite(state=args))["state"]
        except Exception as error:
            raise self._damaged(step, first_line(error)) from error
        for name, leaf in wanted.items():
            array = arrays.get(name)
            if array is None:
                array = arrays[name] = np.zeros(leaf.shape, leaf.dtype)
            crc = checksums.crc(array)
            known = checksums.same_parts(array, table[name].get("parts", {}))
            if not known or (crc is not None and table[name]["crc32"] not in (None, crc)):
                raise self._damaged(step, f"{name} has changed since it was written")
        return arrays

    def close(self) -> None:
        """Ends orbax's threads; a later call starts them again.

        Source: ours: orbax keeps worker threads per manager.
        """
        self._forget_manager()

    def _open(self) -> ocp.CheckpointManager:
        if self._manager is None:
            with _quiet():
                self._manager = ocp.CheckpointManager(
                    self._folder.absolute(),
                    item_handlers={
                        "state": ocp.PyTreeCheckpointHandler(),
                        "note": ocp.JsonCheckpointHandler(),
                    },
                    options=ocp.CheckpointManagerOptions(
                        max_to_keep=self._keep, enable_async_checkpointing=False
                    ),
                )
        return self._manager

    def _forget_manager(self) -> None:
        if self._manager is not None:
            with _quiet(), contextlib.suppress(Exception):
                self._manager.close()
            self._manager = None

    def _remove_unfinished(self) -> None:
        # Orbax would count a bare numbered folder as a checkpoint and delete a good one for it.
        def remove() -> bool:
            if not self._folder.is_dir():
                return False
            removed = False
            for path in self._folder.iterdir():
                bare = path.name.isdigit() and not is_committed(path)
                if path.is_dir() and (bare or _TEMPORARY in path.name):
                    shutil.rmtree(path)
                    removed = True
            return removed

        # On all hosts: they make a manager together.
        if hosts.from_first(_CHANNEL, remove):
            self._forget_manager()

    def _why_not_saved(self, target: pathlib.Path, error: BaseException) -> str:
        newest = max(self.steps(), default=None)
        resume = "nothing was saved before" if newest is None else f"step {newest} is intact"
        if is_disk_full(error):
            return (
                f"can't save {target}: the disk is full; free some space and run the same "
                f"command again ({resume})"
            )
        return f"can't save {target}: {first_line(error)} ({resume})"

    def _damaged(self, step: int, what: str) -> CheckpointError:
        older = [s for s in self.steps() if s < step]
        remedy = (
            f"deleting that folder falls back to step {older[-1]}"
            if older
            else "no older one is left, so delete that folder to start from the beginning"
        )
        return CheckpointError(f"{self._folder / str(step)} is damaged ({what}); {remedy}")


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """Keeps orbax's log lines off the terminal; errors still raise."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _hush_late_writes() -> None:
    """Keeps tracebacks off the terminal when several arrays can't be written.

    The first failure is raised and ends orbax's event loop; each later one, at any time until the
    process ends, is a traceback from tensorstore, a report from asyncio and a line from orbax.
    """
    before = sys.unraisablehook
    if getattr(before, "__module__", None) == __name__:
        return

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            before(unraisable)

    sys.unraisablehook = hook
    late = ("async_serialize", "exception was never retrieved", "_SignalingThread.run() raised")
    for name in ("asyncio", "absl"):
        logging.getLogger(name).addFilter(lambda one: not any(x in one.getMessage() for x in late))


def _named(tree: PyTree) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = path_name(path)
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise CheckpointError(f"{name}: a checkpoint holds arrays, not {type(leaf).__name__}")
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise CheckpointError(f"{name}: a typed key; save jax.random.key_data(key) instead")
        if name in named:
            raise CheckpointError(f"{name}: two pieces of the state have this name")
        named[name] = leaf
    return named


def _record(arrays: dict[str, Any], note: dict[str, Any]) -> dict[str, Any]:
    table: dict[str, dict[str, Any]] = {
        name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype), "crc32": checksums.crc(leaf)}
        for name, leaf in arrays.items()
    }
    for name, parts in checksums.parts(arrays).items():
        table[name]["parts"] = parts
    try:
        note = json.loads(json.dumps(note))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the note of a checkpoint must be JSON: {error}") from error
    return {"arrays": table, "note": note, "crc32": _json_crc([table, note])}


def _json_crc(value: Any) -> int:
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def _describe(shape: Any, dtype: Any) -> str:
    return f"{tuple(shape)} {dtype}"


def _compare(table: dict[str, Any], wanted: dict[str, Any], target: pathlib.Path) -> None:
    differences = []
    for name in [*wanted, *(n for n in table if n not in wanted)]:
        has = _describe(table[name]["shape"], table[name]["dtype"]) if name in table else None
        needs = _describe(wanted[name].shape, wanted[name].dtype) if name in wanted else None
        if has == needs:
            continue
        if has is None:
            differences.append(f"{name}: missing in the checkpoint, this run needs {needs}")
        elif needs is None:
            differences.append(f"{name}: checkpoint has {has}, this run has no such piece")
        else:
            differences.append(f"{name}: checkpoint has {has}, this run needs {needs}")
    if differences:
        more = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
        raise CheckpointError(f"{differences[0]}{more}, in {target}; {_OTHER_CONFIG}")


def _sharding(leaf: Any) -> jax.sharding.Sharding | None:
    if isinstance(leaf, jax.Array) and not leaf.committed:
        return None
    return getattr(leaf, "sharding", None)


def _restore_args(leaf: Any) -> ocp.RestoreArgs:
    sharding = _sharding(leaf)
    if sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=sharding, global_shape=leaf.shape, dtype=leaf.dtype)


def _as_wanted(array: Any, leaf: Any) -> Any:
    if isinstance(array, jax.Array) or isinstance(leaf, np.ndarray | np.generic):
        return array
    sharding = _sharding(leaf)
    # A copy: jnp.asarray may alias numpy's memory, which a donated buffer must not.
    return jnp.array(array) if sharding is None else jax.device_put(array, sharding)
