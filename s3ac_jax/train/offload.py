"""What of the learners lies in the host's memory while nobody needs it on the devices."""

from collections.abc import Callable

from s3ac_jax.config.run import Offload
from s3ac_jax.core.types import Learner, PyTree
from s3ac_jax.parallel.mesh import on_device, on_host


class Parking:
    """Brings learners to where a phase of a tick needs them.

    "optimizer": the optimiser's state is on the devices in its own role's updates alone; "idle":
    there a role's weights, too, make room for the other's updates. "none": all stay where they are.
    Source: ZeRO-Offload (2101.06840); ours: by phases, for actor and critic take turns.
    """

    def __init__(self, kind: Offload):
        self.kind = kind

    def readable(self, learner: Learner) -> Learner:
        """Its weights on the devices, to be read alone. Source: ours."""
        if self.kind == "none":
            return learner
        return Learner(
            on_device(learner.trainable), on_device(learner.frozen), on_host(learner.opt_state),
            learner.step,
        )  # fmt: skip

    def asleep(self, learner: Learner) -> Learner:
        """Out of the way of the other role's updates. Source: ours."""
        return _map(on_host, learner) if self.kind == "idle" else self.readable(learner)

    def awake(self, learner: Learner) -> Learner:
        """All on the devices, to be updated. Source: ours."""
        return learner if self.kind == "none" else _map(on_device, learner)


def _map(move: Callable[[PyTree], PyTree], learner: Learner) -> Learner:
    return Learner(
        move(learner.trainable), move(learner.frozen), move(learner.opt_state), learner.step
    )
