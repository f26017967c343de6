"""A plan as text: memory, time and wires of every step, then the tick."""

from rich.console import Console
from rich.table import Table

from s3ac_jax.algos.selection import Accepting
from s3ac_jax.config.run import RunConfig
from s3ac_jax.train.plan.app import Plan
from s3ac_jax.train.plan.arguments import device_bytes
from s3ac_jax.train.plan.compiling import Compiled
from s3ac_jax.train.plan.hardware import GIB
from s3ac_jax.train.plan.steps import Step
from s3ac_jax.train.plan.tick import chip_hours, tick_of

_SHORT = {
    "all-gather": "gather", "all-reduce": "reduce", "reduce-scatter": "scatter",
    "all-to-all": "to-all", "collective-permute": "permute", "collective-broadcast": "broadcast",
}  # fmt: skip


def gib(size: float | None) -> str:
    """Bytes as GiB. Source: ours."""
    if size is None:
        return "?"
    return f"{size / GIB:.2f}" if size >= GIB / 10 or not size else f"{size / GIB:.2g}"


def seconds(time: float) -> str:
    """A time in the unit that suits it. Source: ours."""
    for limit, factor, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms"), (600.0, 1.0, "s")):
        if time < limit:
            return f"{time * factor:.3g} {unit}"
    return f"{time / 60:.3g} min" if time < 36000 else f"{time / 3600:.3g} h"


def memory_table(plan: Plan) -> Table:
    """Memory of each step on one device, in GiB. Source: ours."""
    chip = plan.target.chip
    table = Table(
        title=f"memory of one device, GiB (limit {gib(chip.memory)})", title_justify="left"
    )
    table.add_column("step")
    for name in ("arguments", "results", "temporary", "beside it", "in all", "of limit"):
        table.add_column(name, justify="right")
    table.add_column("")
    for one in plan.steps:
        kept, total = one.made.memory, one.fit.total
        share = "" if total is None else f"{100 * total / chip.memory:.0f} %"
        cells = ["?"] * 3
        if kept is not None:
            fresh = max(0.0, kept.outputs - kept.given_up)
            cells = [gib(kept.arguments), gib(fresh), gib(kept.temporaries + kept.code)]
        remark = "" if one.fit.fits else "DOES NOT FIT"
        table.add_row(one.step.name, *cells, gib(one.fit.beside), gib(total), share, remark)
    return table


def time_table(plan: Plan) -> Table:
    """Time of a call of each step at least, and what bounds it. Source: ours."""
    table = Table(title="time of one call, at least; per device", title_justify="left")
    table.add_column("step")
    for name in ("calls", "Tflop", "compute", "memory", "wires", "MFU <=", "bound by"):
        table.add_column(name, justify="right")
    table.add_column("sent, GiB")
    for one in plan.steps:
        found, step = one.bound, one.step
        if one.made.memory is None:
            continue
        sent = sorted(found.sent.items(), key=lambda pair: -pair[1])
        table.add_row(
            step.name, f"{step.times:.0f}", f"{step.flops.done / step.mesh.size / 1e12:.3g}",
            seconds(found.compute), seconds(found.memory), seconds(found.wires),
            f"{100 * found.mfu:.0f} %" if step.flops.model else "", found.by,
            ", ".join(f"{_SHORT[kind]} {size / GIB:.2g}" for kind, size in sent),
        )  # fmt: skip
    return table


def state_line(plan: Plan) -> str:
    """The state of the run on one device. Source: ours."""
    sizes = [f"{name} {gib(device_bytes(tree))}" for name, tree in plan.pieces.items()]
    return f"state of the run on one device, GiB: {', '.join(sizes)}"


def host_line(plan: Plan) -> str | None:
    """What the hosts' memory has to hold, None without anything there. Source: ours."""
    most = max(plan.steps, key=lambda one: one.fit.host)
    if not most.fit.host:
        return None
    count = plan.target.per_host
    return (
        f"in the hosts' memory at {most.step.name}, GiB: {gib(most.fit.host)} for a device, "
        f"{gib(count * most.fit.host)} for the {count} of a host"
    )


def counted_lines(config: RunConfig) -> list[str]:
    """What a tick may have more of than is counted, or what is not counted at all. Source: ours."""
    lines = []
    rounds, select = config.recipe.keep.max_rounds, config.recipe.select
    walks = select.reads_values and isinstance(select, Accepting)
    passes = config.scheduler.max_rounds if walks else 1
    if rounds > 1 or passes > 1:
        more = [f"up to {rounds} rounds (recipe.keep)"] * (rounds > 1)
        more += [f"up to {passes} passes of the critic each (scheduler.max_rounds)"] * (passes > 1)
        lines.append(
            f"of selection and rollouts one round is counted; a tick may take {', '.join(more)}"
        )
    if config.rollout.backend != "local":
        lines.append(
            f"rollouts are made by servers (rollout.backend={config.rollout.backend}): their time, "
            "their memory and the way of the weights to them are not counted"
        )
    if config.rollout.apart:
        lines.append(
            "the copy of the weights to the sampler's devices (rollout.apart) is not counted"
        )
    return lines


def tick_lines(plan: Plan, ticks: int, usd_per_chip_hour: float | None) -> list[str]:
    """The tick in words. Source: ours."""
    config, target = plan.config, plan.target
    tick = tick_of(config, target, [(one.step, one.bound) for one in plan.steps])
    phases = ", ".join(
        f"{name} {seconds(time)} ({100 * time / tick.seconds:.0f} %)"
        for name, time in tick.phases.items() if time
    )  # fmt: skip
    hours = chip_hours(tick, target, ticks)
    cost = "" if usd_per_chip_hour is None else f", {hours * usd_per_chip_hour:,.0f} USD"
    lines = [
        f"a tick takes at least {seconds(tick.seconds)} if every one of its "
        f"{config.batch_responses} responses is as long as it may be: {phases}",
        f"critic's share of it {100 * tick.critic:.0f} %; {tick.tokens_per_second:,.0f} tokens/s "
        f"on {target.chips} chips, {tick.tokens_per_second / target.chips:,.0f} each; "
        f"MFU <= {100 * tick.mfu:.0f} %",
        f"{ticks} ticks: at least {_hours(hours)} chip-hours{cost}",
    ]
    if tick.overlaps:
        lines[0] += "; selection and rollouts are the next tick's, beside the rest"
    if tick.pretraining:
        first = chip_hours(tick, target, 0)
        lines[2] += (
            f", {_hours(first)} chip-hours ({seconds(tick.pretraining)}) of it for the value "
            "pretraining"
        )
    return lines + counted_lines(config)


def _hours(hours: float) -> str:
    return f"{hours:,.1f}" if hours >= 10 else f"{hours:.2g}"


def complaints(plan: Plan) -> list[str]:
    """A line for each step that does not fit, or that lays arrays out anew. Source: ours."""
    lines = []
    for one in plan.steps:
        if not one.fit.fits:
            lines.append(f"{one.step.name} does not fit: {one.fit.advice}")
        if one.made.regathered:
            lines.append(
                f"{one.step.name}: XLA gathers {one.made.regathered} arrays whole to lay them out "
                "anew (involuntary full rematerialization)"
            )
    return lines


def progress_line(step: Step, made: Compiled) -> str:
    """What is told of a step when it is compiled. Source: ours."""
    if made.memory is None:
        return f"{step.name}: too large to compile ({made.seconds:.0f} s)"
    return f"{step.name}: {gib(made.memory.total)} GiB (compiled in {made.seconds:.0f} s)"


def show(plan: Plan, console: Console, *, ticks: int, usd_per_chip_hour: float | None) -> None:
    """Prints all of it. Source: ours."""
    console.print()
    console.print(memory_table(plan))
    console.print(state_line(plan), highlight=False)
    if (line := host_line(plan)) is not None:
        console.print(line, highlight=False)
    console.print()
    console.print(time_table(plan))
    for line in tick_lines(plan, ticks, usd_per_chip_hour) + complaints(plan):
        console.print(line, highlight=False)
