"""What a run measures, keeps and guards beside the training itself."""

import dataclasses

from s3ac_jax.config.checks import at_least
from s3ac_jax.report.tripwires import Tripwires


@dataclasses.dataclass(frozen=True)
class WatchConfig:
    """What is measured, kept and guarded beside the training itself.

    health: whether more is measured than a run needs in order to go on; False switches off all of
    this. responses: of each tick in responses.jsonl, at most. trajectories: of each tick in
    trajectories.jsonl, with V and the advantage of every token.
    Source: ours.
    """

    health: bool = True
    responses: int = 256
    trajectories: int = 0
    tripwires: Tripwires = dataclasses.field(default_factory=Tripwires)

    def __post_init__(self):
        at_least("watch", self, responses=0, trajectories=0)
