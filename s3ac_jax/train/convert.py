"""Weights from one format to the other: Hugging Face folders, orbax, the checkpoints of a run."""

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from s3ac_jax.config.flags import CommandLineError
from s3ac_jax.core.errors import RunError
from s3ac_jax.core.types import PyTree
from s3ac_jax.io.hf_weights import (
    Origin,
    load_params,
    read_origin,
    read_spec,
    save_params,
    stored_dtype,
)
from s3ac_jax.io.orbax_weights import load_orbax, load_role, save_orbax, spec_from_dict
from s3ac_jax.models.lora import merge_lora
from s3ac_jax.models.spec import DecoderSpec
from s3ac_jax.report.live import Progress, make_progress

ORIGIN = "origin.json"
_SECONDS_PER_LINE = 10.0


class ConvertError(RunError):
    """A conversion that can't be done; the message is one line for the user. Source: ours."""


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What to convert: one of hf, workdir and orbax, to one of to_hf and to_orbax.

    role, step: of a run's checkpoint, the latest step when None. base: a Hugging Face folder for
    what weights alone don't hold: the tokenizer's files, vision tensors, and the layout where the
    weights don't remember theirs.

    Raises CommandLineError on any other combination. Source: ours.
    """

    hf: str | None = None
    workdir: str | None = None
    orbax: str | None = None
    to_hf: str | None = None
    to_orbax: str | None = None
    role: str | None = None
    step: int | None = None
    base: str | None = None

    def __post_init__(self):
        sources = [name for name in ("hf", "workdir", "orbax") if getattr(self, name)]
        targets = [name for name in ("to_hf", "to_orbax") if getattr(self, name)]
        if len(sources) != 1 or len(targets) != 1:
            raise CommandLineError(
                "give one source (--hf, --workdir or --orbax) and one target (--to_hf or "
                "--to_orbax)"
            )
        for name in ("role", "step"):
            if getattr(self, name) is not None and not self.workdir:
                raise CommandLineError(
                    f"--{name} chooses from a run's checkpoints, so with --workdir"
                )
        if self.base and not self.to_hf:
            raise CommandLineError(
                "--base is for --to_hf, whose folder has a tokenizer's files too"
            )


def run(wanted: Wanted) -> None:
    """Reads the weights and writes them, with their progress on stdout.

    Raises RunError, in one line, for anything that can't be read or written. Source: ours.
    """
    target = Path(wanted.to_orbax or wanted.to_hf or "")
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        # Before an hour of reading, not after it.
        raise ConvertError(f"{target} isn't an empty folder; name a new one, or delete it first")
    with make_progress(["read", "write"]) as progress:
        progress.stage("read", 0)
        params, spec, origin, source = _read(wanted, progress)
        progress.stage("write", 0)
        if wanted.to_orbax:
            save_orbax(params, spec, origin, target)
        else:
            _write_hf(wanted, target, params, spec, origin, progress)
        progress.finish(f"{source} is in {target}")


def _read(wanted: Wanted, progress: Progress) -> tuple[PyTree, DecoderSpec, Origin | None, str]:
    if wanted.hf:
        spec, origin = read_spec(wanted.hf), read_origin(wanted.hf)
        told = _told("read", progress)
        dtype = stored_dtype(wanted.hf)
        params = load_params(wanted.hf, spec, dtype=dtype, note=progress.note, progress=told)
        return params, spec, origin, wanted.hf
    if wanted.orbax:
        return *load_orbax(wanted.orbax), wanted.orbax
    workdir, role = Path(wanted.workdir or ""), wanted.role or "actor"
    config = _config(workdir)
    spec = spec_from_dict(config["model"], str(workdir / "config.json"))
    params, step = load_role(workdir / "checkpoints", role, wanted.step)
    return params, spec, _origin(workdir, config), f"the {role} of {workdir} at step {step}"


def _write_hf(
    wanted: Wanted,
    target: Path,
    params: PyTree,
    spec: DecoderSpec,
    origin: Origin | None,
    progress: Progress,
) -> None:
    carry = None
    params, spec = merge_lora(params, spec)
    if wanted.base:
        if name := read_spec(wanted.base).first_difference(spec):
            raise ConvertError(
                f"--base {wanted.base} is another model than these weights: its {name} differs"
            )
        of_base = read_origin(wanted.base)
        origin = origin or of_base
        if of_base.skipped and "backbone" not in params:
            carry = wanted.base
    save_params(
        params, spec, origin, target, base=wanted.base, carry_from=carry,
        note=progress.note, progress=_told("written", progress),
    )  # fmt: skip


def _told(what: str, progress: Progress) -> Callable[[int, int], None]:
    """Says now and then how far it is."""
    last = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > _SECONDS_PER_LINE:
            last = time.monotonic()
            progress.note(f"{what}: {100 * done / total:.0f} %")

    return tell


def _config(workdir: Path) -> dict[str, Any]:
    path = workdir / "config.json"
    try:
        config = json.loads(path.read_bytes())
        if isinstance(config["model"], dict):
            return config
    except FileNotFoundError as error:
        raise ConvertError(f"{path} isn't there, so {workdir} is no run") from error
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConvertError(f"{path} can't be read ({error}); restore that file") from error
    raise ConvertError(f"{path} describes no model")


def _origin(workdir: Path, config: dict[str, Any]) -> Origin | None:
    """Of the model that the run started from: kept beside its config, or in its own folder."""
    path = workdir / ORIGIN
    try:
        return Origin.from_json(path.read_text())
    except FileNotFoundError:
        start = (config.get("start") or {}).get("hf")
        return read_origin(start) if start and Path(start).is_dir() else None
    except (OSError, UnicodeDecodeError) as error:
        raise ConvertError(f"{path} can't be read: {error}") from error
