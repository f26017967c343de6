"""What the critic costs per actor step, against GRPO-X with the same responses, by phase.

  python benchmarks/critic_cost.py --config=configs/tiny.py:s3ac_group --workdir=/tmp/unused

Prints the median seconds of each phase over the rounds, and each arm's tick as a ratio to GRPO-X's,
round by round. All arms are interleaved in one run, answer the same number of prompts with the same
base policy (the learning rate is next to nothing), and drop no group, so that tokens are equal:

  grpo_x             no critic
  s3ac               the recipe of the config
  s3ac, uniform      without the critic's pass over candidate prompts
  s3ac, 1 epoch      one critic epoch instead of two
  s3ac, V_old apart  V_old of every batch read before the first critic step
  ..., 1 update      the same three with one optimiser batch per rollout batch
"""

import dataclasses
import statistics

import jax
from absl import flags

from s3ac_jax.algos.filtering import KeepAll
from s3ac_jax.algos.recipe import grpo_x
from s3ac_jax.algos.selection import Uniform
from s3ac_jax.config.boundary import from_config_dict
from s3ac_jax.config.flags import run_app
from s3ac_jax.train import policies
from s3ac_jax.train.build import build
from s3ac_jax.train.online import fresh_state
from s3ac_jax.train.tick import run_tick

FLAGS = flags.FLAGS
ROUNDS = 20


def arms(config):
    """Recipes by name; a lambda next to 1 asks for V before the first step, and costs nothing."""
    own = config.recipe
    apart = dataclasses.replace(own.critic, lam=1 - 1e-6)
    plain = dataclasses.replace(
        grpo_x, keep=KeepAll(), responses_per_prompt=own.responses_per_prompt
    )
    found = {
        "grpo_x": plain,
        "s3ac": own,
        "s3ac, uniform": dataclasses.replace(own, select=Uniform()),
        "s3ac, 1 epoch": dataclasses.replace(own, critic=dataclasses.replace(own.critic, epochs=1)),
        "s3ac, V_old apart": dataclasses.replace(own, critic=apart),
    }
    for name in ("grpo_x", "s3ac", "s3ac, V_old apart"):
        found[f"{name}, 1 update"] = dataclasses.replace(found[name], updates=1)
    return found


def main(_: list[str]) -> None:
    own = from_config_dict(FLAGS.config)
    still = dataclasses.replace(
        own,
        actor=dataclasses.replace(own.actor, lr=1e-12),
        critic=dataclasses.replace(own.critic, lr=1e-12),
    )
    parts, states, ticks = {}, {}, {}
    like = None
    for name, recipe in arms(own).items():
        like = parts[name] = build(dataclasses.replace(still, recipe=recipe), like)
        network = like.actor.network
        base = policies.load_policies(policies.embedded_folder(), network, ("late",))["late"]
        critic = None if recipe.critic is None else {"backbone": base}
        states[name], ticks[name] = fresh_state(like, base, critic), []
    key = jax.random.key(own.seed)
    for number in range(ROUNDS + 2):
        for name in parts:
            with parts[name].on_mesh():
                states[name], _, host = run_tick(parts[name], states[name], key)
            if number >= 2:  # the first two compile
                ticks[name].append(host)
    for name, rounds in ticks.items():
        baseline = ticks["grpo_x, 1 update" if name.endswith("1 update") else "grpo_x"]
        ratios = [a["time/tick"] / b["time/tick"] for a, b in zip(rounds, baseline, strict=True)]
        phases = "  ".join(
            f"{phase[5:]} {statistics.median(tick[phase] for tick in rounds):.3f}"
            for phase in rounds[0]
            if phase.startswith("time/")
        )
        low, mid, high = statistics.quantiles(ratios, n=4)
        length = statistics.mean(tick["response_tokens"] for tick in rounds)
        print(f"{name:28s} {phases}  tokens {length:.1f}  ratio {mid:.2f} ({low:.2f}-{high:.2f})")


if __name__ == "__main__":
    run_app(main)
