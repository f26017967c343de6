"""What launch/plan.py does: the plan made, with a line for each step, and shown."""

import math
import time

from rich.console import Console

from s3ac_jax.config.run import RunConfig
from s3ac_jax.core.errors import RunError
from s3ac_jax.parallel.mesh import MeshSpec
from s3ac_jax.train.plan import tables, watching
from s3ac_jax.train.plan.app import effort, make_plan
from s3ac_jax.train.plan.compiling import Compiled
from s3ac_jax.train.plan.search import search as search_largest
from s3ac_jax.train.plan.steps import Step
from s3ac_jax.train.plan.target import PlanError, make_target

# Wide enough for the tables where nobody watches.
_WIDTH = 140


class DoesNotFit(RunError):
    """A step needs more memory than a device has. Source: ours."""


def plan(
    config: RunConfig, topology: str, *, full: bool = False, search: bool = False,
    ticks: int | None = None, usd_per_chip_hour: float | None = None,
) -> None:  # fmt: skip
    """Prints the plan of this config on this machine.

    Raises DoesNotFit, once all is printed, when a step does not fit; PlanError when there can be
    no plan.
    Source: ours.
    """
    ticks = config.train.num_ticks if ticks is None else ticks
    if ticks < 1:
        raise PlanError(f"--ticks must be at least 1, got {ticks}")
    if usd_per_chip_hour is not None and not 0 <= usd_per_chip_hour < math.inf:
        raise PlanError(f"--usd_per_chip_hour must be a number from 0 on, got {usd_per_chip_hour}")
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    start = time.perf_counter()
    target = make_target(topology)
    mesh = _told(config.mesh)
    if config.rollout.apart:
        mesh += f", apart from it to sample {_told(config.decode_mesh)}"
    console.print(
        f"{config.name} on {topology}: {target.chips} chips, {len(target.devices)} devices; "
        f"mesh {mesh}; {'default' if full else 'low'} compiler effort",
        highlight=False,
    )
    with console.status("") as status:

        def told(step: Step, made: Compiled | None) -> None:
            if made is None:
                watching.note(step.name)
                status.update(f"compiling {step.name}")
            else:
                console.print(tables.progress_line(step, made), highlight=False)

        made = make_plan(config, target, full=full, told=told)
    tables.show(made, console, ticks=ticks, usd_per_chip_hour=usd_per_chip_hour)
    if search:
        console.print("looking for the largest rows and micro-batches that fit", highlight=False)

        def tried(changes: dict[str, int], fits: bool) -> None:
            what = ", ".join(f"train.{name}={value}" for name, value in changes.items())
            console.print(f"{what}: {'fits' if fits else 'does not fit'}", highlight=False)

        with effort(full):
            found = search_largest(config, target, made.pieces, tried)
        for name, value in found.items():
            told_value = "none fits" if value is None else f"the largest tried that fits is {value}"
            console.print(f"{name}: {told_value} (now {_now(config, name)})", highlight=False)
    console.print(f"planned in {time.perf_counter() - start:.0f} s", highlight=False)
    if not made.fits:
        names = ", ".join(one.step.name for one in made.steps if not one.fit.fits)
        raise DoesNotFit(f"{config.name} does not fit {topology}: {names}; see the lines above")


def _told(mesh: MeshSpec) -> str:
    sizes = [f"{axis} {size}" for axis, size in vars(mesh).items() if size > 1]
    return ", ".join(sizes) or "of one device"


def _now(config: RunConfig, name: str) -> int:
    return getattr(config.train, name.removeprefix("train."))
