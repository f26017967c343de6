"""Trains one run, or goes on with it: warm start, value pretraining, then S3AC tick by tick.

  python launch/train.py --config=configs/tiny.py:s3ac_single --workdir=runs/tiny

Any number of the config can be set beside it: --config.critic.lr=1e-3

On several hosts the same command on each, with a workdir that all of them see and --distributed
(Cloud TPU, GKE, SLURM and MPI tell the rest), or where nothing tells it:

  --coordinator=HOST_0:8476 --num_processes=2 --process_id=0      # and 1 on the other
"""

from absl import flags

from s3ac_jax.config.boundary import from_config_dict
from s3ac_jax.config.flags import run_app

FLAGS = flags.FLAGS
_PROFILE = flags.DEFINE_bool("profile", False, "Trace one tick into WORKDIR/profile.")
_DUMP = flags.DEFINE_integer(
    "dump_trajectories", None, "Responses of each tick kept in WORKDIR/trajectories.jsonl.", 0
)
_DISTRIBUTED = flags.DEFINE_bool("distributed", False, "Join the cluster that this host is in.")
_COORDINATOR = flags.DEFINE_string("coordinator", None, "Where process 0 listens, HOST:PORT.")
_PROCESSES = flags.DEFINE_integer("num_processes", None, "With --coordinator: how many.")
_PROCESS = flags.DEFINE_integer("process_id", None, "With --coordinator: which, from 0.")
_HEARTBEAT = flags.DEFINE_integer(
    "heartbeat_s", 60, "A process not heard of for so long is lost, and all end.", 5
)
_JOIN = flags.DEFINE_integer("join_s", 300, "How long all processes may take to join.", 5)


def main(_: list[str]) -> None:
    if _DUMP.value is not None:
        FLAGS.config.watch.trajectories = _DUMP.value
    config = from_config_dict(FLAGS.config)
    # Not above: a typo in the config is told before flax and orbax are loaded.
    from s3ac_jax.train.hosts import Wanted, run_on_hosts

    wanted = Wanted(
        _DISTRIBUTED.value, _COORDINATOR.value, _PROCESSES.value, _PROCESS.value,
        _HEARTBEAT.value, _JOIN.value,
    )  # fmt: skip

    def train() -> None:
        from s3ac_jax.train.run import run

        run(config, FLAGS.workdir, profile=_PROFILE.value)

    run_on_hosts(wanted, FLAGS.workdir, train)


if __name__ == "__main__":
    run_app(main)
