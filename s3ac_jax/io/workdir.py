"""The folder of a run: which config made it, which stages are done, one run at a time."""

import fcntl
import importlib.metadata
import json
import os
import pathlib
import platform
import secrets
import subprocess
import time
from collections.abc import Callable
from typing import IO, Any

import jax

from s3ac_jax.core.errors import RunError
from s3ac_jax.parallel import hosts

_PACKAGES = (
    "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy",
    # They decide prompts, their order and their answers' verdicts.
    "tokenizers", "grain", "math-verify", "sympy",
)  # fmt: skip
_ABSENT = "absent"
_CHANNEL = "workdir"
# A network file system may show another host's file a little later.
_SHOWN_WITHIN_SECONDS = 30.0


class WorkdirError(RunError):
    """A folder that can't hold this run; the message is one line for the user.

    Source: ours: a run that can't start has to say in one line what to do.
    """


class Workdir:
    """The folder `path` of one run; made if absent, and locked until `close` or exit.

    In a run of several processes it is a folder that all of them see. Process 0 alone writes and
    reads here and tells the others, so all of them have to make the same calls.

    Raises WorkdirError if the path is a file, can't be written, another run holds it, or it is
    not the same folder on all hosts.
    Source: ours: two runs in one folder would overwrite each other's checkpoints.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = pathlib.Path(path)
        self._lock: IO[str] | None = None
        if hosts.count() == 1:
            self._take()
            return
        token = hosts.from_first(_CHANNEL, self._take_and_sign)
        _wait_for(self.path / ".lock", token)

    def _take_and_sign(self) -> str:
        self._take()
        token = secrets.token_hex(8)
        if self._lock is not None:
            self._lock.truncate(0)
            self._lock.write(token)
            self._lock.flush()
            os.fsync(self._lock.fileno())
        return token

    def _take(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / ".lock").open("a")
        except (FileExistsError, NotADirectoryError) as error:
            raise WorkdirError(f"--workdir {self.path} is or lies below a file") from error
        except OSError as error:
            raise WorkdirError(f"can't write to --workdir {self.path}: {error.strerror}") from error
        try:
            # The kernel drops a flock when its process ends, so kill -9 leaves nothing stale.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise WorkdirError(
                f"{self.path} is in use by another run; wait for it or use another --workdir"
            ) from error

    def claim(
        self,
        config: dict[str, Any],
        free: set[str],
        complete: Callable[[dict[str, Any]], dict[str, Any]] = dict,
        *,
        anew: bool = False,
    ) -> None:
        """Writes config.json and versions.json, or compares `config` with the one on disk.

        config: nested, JSON. free: dotted names that may differ from the run that made the
        folder (a new tick count, say); a name covers what lies below it. complete: gives what an
        earlier version wrote the fields that came since. anew: nothing was made here yet, so that
        the config of a start with the same sections and no stage is replaced. Else the file keeps
        the first run's config.

        Raises WorkdirError naming the first difference, or if config.json can't be read.
        Source: ours: a resumed run must be the same run.
        """
        hosts.from_first(_CHANNEL, lambda: self._claim(config, free, complete, anew))

    def _claim(
        self,
        config: dict[str, Any],
        free: set[str],
        complete: Callable[[dict[str, Any]], dict[str, Any]],
        anew: bool,
    ) -> None:
        path = self.path / "config.json"
        left = sorted([*self.path.glob("stage_*.json"), *self.path.glob("checkpoints")])
        there = path.exists()
        if there and anew and not left and self._read("config.json").keys() == config.keys():
            there = False
        if not there:
            if left:
                raise WorkdirError(
                    f"{self.path} has no config.json but holds {left[0].name} of an earlier run; "
                    "restore config.json or use another --workdir"
                )
            self._write("versions.json", versions())
            self._write("config.json", config)
            return
        old = flatten(json.loads(json.dumps(complete(self._read("config.json")))))
        new = flatten(json.loads(json.dumps(config)))
        differing = [
            name
            for name in sorted(old.keys() | new.keys())
            if old.get(name, _ABSENT) != new.get(name, _ABSENT) and not _covered(name, free)
        ]
        if differing:
            name = differing[0]
            more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
            raise WorkdirError(
                f"{self.path} was made with another config: {name} was "
                f"{_shown(old, name)}, now {_shown(new, name)}{more}; "
                "use another --workdir or the same config"
            )

    def stage_done(self, name: str) -> bool:
        """True once `mark_stage(name, ...)` was called, in this process or an earlier one.

        Source: ours: a resumed run skips what is done.
        """
        return hosts.from_first(_CHANNEL, (self.path / f"stage_{name}.json").exists)

    def mark_stage(self, name: str, facts: dict[str, Any]) -> None:
        """Records that stage `name` is done, with what it found (JSON).

        Raises WorkdirError if the marker can't be written.
        Source: ours: tmp, fsync, rename: whole or absent.
        """
        hosts.from_first(_CHANNEL, lambda: self._write(f"stage_{name}.json", facts))

    def stage_facts(self, name: str, *needed: str) -> dict[str, Any]:
        """What `mark_stage` recorded for stage `name`; `needed`: keys that must be there.

        Raises WorkdirError if the stage isn't done or its marker can't be used.
        Source: ours: stages hand facts on through the folder, so that resume sees the same.
        """
        return hosts.from_first(_CHANNEL, lambda: self._facts(name, needed))

    def _facts(self, name: str, needed: tuple[str, ...]) -> dict[str, Any]:
        path = self.path / f"stage_{name}.json"
        if not path.exists():
            raise WorkdirError(f"stage {name} isn't done in {self.path}")
        try:
            facts = self._read(path.name)
            missing = next((key for key in needed if key not in facts), None)
        except WorkdirError as error:
            raise WorkdirError(
                f"{path} can't be read; delete it to run that stage again"
            ) from error
        if missing is not None:
            raise WorkdirError(f"{path} lacks {missing!r}; delete it to run that stage again")
        return facts

    def close(self) -> None:
        """Lets the next run have the folder.

        Source: ours: several runs in one process, as in tests and studies.
        """
        if self._lock is not None:
            self._lock.close()

    def _read(self, name: str) -> dict[str, Any]:
        path = self.path / name
        try:
            value = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise WorkdirError(
                f"{path} can't be read ({error}); use another --workdir or restore that file"
            ) from error
        if not isinstance(value, dict):
            raise WorkdirError(f"{path} holds no JSON object; use another --workdir")
        return value

    def _write(self, name: str, value: dict[str, Any]) -> None:
        temporary = self.path / f"{name}.tmp"
        text = json.dumps(value, indent=2, sort_keys=True) + "\n"
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path / name)
            folder = os.open(self.path, os.O_RDONLY)
            os.fsync(folder)  # the rename itself
            os.close(folder)
        except OSError as error:
            raise WorkdirError(f"can't write {self.path / name}: {error.strerror}") from error


def _wait_for(path: pathlib.Path, token: str) -> None:
    """Waits until the file says `token`; WorkdirError when it does not."""
    end = time.monotonic() + _SHOWN_WITHIN_SECONDS
    while time.monotonic() < end:
        try:
            if path.read_text() == token:
                return
        except OSError:
            pass  # not there yet
        time.sleep(0.1)
    raise WorkdirError(
        f"--workdir {path.parent} of process {hosts.index()} is not the folder that process 0 "
        "writes to; give all hosts a folder that they share, NFS or a mounted bucket"
    )


def versions() -> dict[str, Any]:
    """Versions of python and packages, device kind, and the git commit of this code.

    git: "unknown" outside a checkout; dirty: tracked files differ from the commit, or None.
    Source: ours: what someone needs to run it again.
    """
    device = jax.devices()[0]
    commit = _git("rev-parse", "HEAD")
    changes = _git("status", "--porcelain", "--untracked-files=no") if commit else None
    return {
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
        "platform": device.platform,
        "device_kind": device.device_kind,
        "num_devices": jax.device_count(),
        "git": {"commit": commit or "unknown", "dirty": None if changes is None else bool(changes)},
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return _ABSENT


def _git(*arguments: str) -> str | None:
    here = pathlib.Path(__file__).resolve()
    # Installed into a virtual environment inside someone's checkout, the commit is not ours.
    if "site-packages" in here.parts:
        return None
    command = ["git", "-C", str(here.parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, by dotted name. Source: ours: how people name a field of a config."""
    if not isinstance(node, dict) or not node:
        return {prefix.rstrip("."): node}
    flat: dict[str, Any] = {}
    for key, value in node.items():
        flat |= flatten(value, f"{prefix}{key}.")
    return flat


def _covered(name: str, free: set[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[: n + 1]) in free for n in range(len(parts)))


def _shown(flat: dict[str, Any], name: str) -> str:
    return json.dumps(flat[name])[:80] if name in flat else _ABSENT
