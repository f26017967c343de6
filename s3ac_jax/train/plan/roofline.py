"""A bound on the time of a step: arithmetic, memory or wires, whichever takes longest alone."""

import dataclasses
from collections.abc import Sequence

from s3ac_jax.train.plan.hardware import Chip
from s3ac_jax.train.plan.hlo import Collective
from s3ac_jax.train.plan.steps import Step


@dataclasses.dataclass(frozen=True)
class Bound:
    """Seconds of one call that each resource needs, at its peak. mfu: of the longest's time.

    sent: bytes that a device sends, by kind of collective. Source: ours.
    """

    compute: float
    memory: float
    wires: float
    mfu: float
    sent: dict[str, float]

    @property
    def seconds(self) -> float:
        """The longest of the three: nothing is faster. Source: Roofline (Williams 2009)."""
        return max(self.compute, self.memory, self.wires)

    @property
    def by(self) -> str:
        """Which of the three holds. Source: Roofline (Williams 2009)."""
        named = {"compute": self.compute, "memory": self.memory, "wires": self.wires}
        return max(named, key=lambda name: named[name])


def bound(step: Step, found: Sequence[Collective], chip: Chip, islands: Sequence[int]) -> Bound:
    """Of one call. islands: of each device, in the order that the program numbers them.

    Work is taken to be shared out evenly. A collective between islands is as fast as the network.
    Source: Roofline: an insightful visual performance model (Williams, Waterman & Patterson 2009).
    """
    devices = step.mesh.size
    sent: dict[str, float] = {}
    wires = 0.0
    for one in found:
        sent[one.kind] = sent.get(one.kind, 0.0) + one.sent
        between = any(len({islands[place] for place in group}) > 1 for group in one.groups)
        wires += one.sent / (chip.network if between else chip.link)
    compute = step.flops.done / devices / chip.flops
    memory = step.moved / chip.bandwidth
    seconds = max(compute, memory, wires)
    mfu = step.flops.model / devices / chip.flops / seconds if seconds else 0.0
    return Bound(compute, memory, wires, mfu, sent)
