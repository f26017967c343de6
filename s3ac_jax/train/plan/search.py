"""The longest packed row and the largest micro-batch whose training steps still fit."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from s3ac_jax.config.run import RunConfig
from s3ac_jax.core.types import PyTree
from s3ac_jax.train.plan.app import judged_in_tick, make_machine
from s3ac_jax.train.plan.compiling import compile_program
from s3ac_jax.train.plan.state import tick_pieces
from s3ac_jax.train.plan.steps import training_steps
from s3ac_jax.train.plan.target import Target


def trains(config: RunConfig, target: Target, pieces: dict[str, PyTree]) -> bool:
    """Whether actor and critic step fit beside these pieces. Source: ours."""
    machine = make_machine(config, target)
    # What sampling keeps is as in the config that was planned, rows are not.
    there = pieces | tick_pieces(machine, {})
    for step in training_steps(machine):
        if not step.trains:
            continue
        made = compile_program(step.program, step.arguments, step.mesh, target, turns=step.turns)
        if not judged_in_tick(config, step, made, there, target).fit.fits:
            return False
    return True


def largest(
    start: int, unit: int, most: int, fits: Callable[[int], bool], *, least: int = 1,
    tries: int = 5,
) -> int | None:  # fmt: skip
    """The largest multiple of `unit` from `least` to `most` that fits, or near it.

    None if none does.

    Doubles from `start` on, or halves, then cuts what is left in half; at most `tries` times.
    Source: ours: a compilation takes from seconds to minutes.
    """
    good, bad = None, None
    least = -(-least // unit) * unit
    at = max(least, start // unit * unit)
    for _ in range(tries):
        if fits(at):
            good = at
            if at >= most:
                break
        else:
            bad = at
            if at <= least:
                break
        if bad is None:
            at = min(2 * at, most // unit * unit)
        elif good is None:
            at = max(least, at // 2 // unit * unit)
        else:
            at = (good + bad) // 2 // unit * unit
        if at in (good, bad):
            break
    return good


def search(
    config: RunConfig, target: Target, pieces: dict[str, PyTree],
    told: Callable[[dict[str, int], bool], Any] = lambda changes, fits: None,
) -> dict[str, int | None]:  # fmt: skip
    """The largest train.micro_rows at this pack_tokens, and pack_tokens at the least micro_rows.

    told: called with what was tried and whether it fits. Source: ours.
    """
    shards = config.mesh.row_shards

    def with_train(**changes: Any) -> bool:
        train = dataclasses.replace(config.train, **changes)
        fits = trains(dataclasses.replace(config, train=train), target, pieces)
        told(changes, fits)
        return fits

    rows = config.rows_for(-(-config.batch_responses // config.minibatches))
    least = {"micro_rows": shards}
    return {
        "train.micro_rows": largest(
            config.train.micro_rows, shards, max(shards, rows),
            lambda value: with_train(micro_rows=value),
        ),
        "train.pack_tokens": largest(
            config.train.pack_tokens, row_unit(config), 2**20,
            lambda value: with_train(pack_tokens=value, **least), least=config.longest,
        ),
    }  # fmt: skip


def row_unit(config: RunConfig) -> int:
    """Steps in which rows grow and shrink, of which the config's own row is one.

    What its part of a device has of 1024 is kept, and so kernels take the others where they take
    this one. Source: ours.
    """
    return math.gcd(config.train.pack_tokens // config.mesh.context, 1024) * config.mesh.context
