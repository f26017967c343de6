"""Time per token of each phase of a tick, by the length of a row and the number of devices.

  python benchmarks/scaling.py

Trains and samples with a decoder of 2 M parameters (2 layers of width 256) on virtual CPU devices,
a process for each number of them. A row of T tokens is one response ("whole"), or responses of 512
tokens ("packed"). Devices share out a row's tokens while training (mesh.context) and the rows while
sampling. Prints microseconds of CPU time per token (of all threads: virtual devices share the cores
of one machine, and other programs on it hardly matter), the least of some runs once it is compiled,
and by which power of the length a phase's time per token grows from 2,048 tokens on.

  prefill   a prompt of T tokens for each device, read 512 at a time
  decode    16 tokens in each of 4 slots that hold T tokens
  score     log-probs and values of a row
  actor     the actor's step on it
  critic    the critic's step on it
  prepare   GAE twice, for advantages and returns, and all else between score and steps
"""

import dataclasses
import json
import os
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from ml_collections import config_flags
from rows import packed

from s3ac_jax.config.boundary import from_config_dict
from s3ac_jax.parallel.mesh import MeshSpec, make_mesh
from s3ac_jax.rollout.backend import MAX_STOP_IDS, Sampling
from s3ac_jax.rollout.engine import Engine
from s3ac_jax.rollout.local import sender
from s3ac_jax.train.learner import params_of
from s3ac_jax.train.programs import fresh_learner, make_programs

CONFIG = config_flags.DEFINE_config_file("config", "configs/tiny.py:ppo", "What is not said here.")
DEVICES = flags.DEFINE_list("devices", ["1", "2", "4"], "Numbers of virtual devices.")
LONGEST = flags.DEFINE_integer("longest", 16384, "Tokens of the longest row.")
MEASURE = flags.DEFINE_integer("measure", 0, "With so many devices, as JSON: for the parent.")

SHORTEST, SEGMENT, GROWS_FROM = 512, 512, 2048
# Where the share of `prepare` is looked at: of a row so long, full of short responses.
LONG = 32768
SLOTS, STEPS, PREFILL_CHUNK = 4, 16, 512
# Calls that are timed, more of them while they have taken less than so many seconds.
FEWEST, MOST, ENOUGH = 2, 10, 1.0
PROMPT = 32
TRAINING = ("score", "actor", "critic", "prepare")
PHASES = ("prefill", "decode", *TRAINING)


def lengths():
    """Row lengths, doubling. Source: ours."""
    found = [SHORTEST]
    while found[-1] < LONGEST.value:
        found.append(2 * found[-1])
    return found


def config_of(tokens, segment, devices):
    """A run with rows of `tokens`, full of responses of `segment` tokens. Source: ours."""
    run = from_config_dict(CONFIG.value)
    model = dataclasses.replace(
        run.model, vocab_size=1024, hidden_size=256, num_heads=4, num_kv_heads=4, head_dim=64,
        intermediate_size=768, init_std=0.02, onehot_embedding=False,
    )  # fmt: skip
    return dataclasses.replace(
        run,
        model=model,
        recipe=dataclasses.replace(run.recipe, responses_per_prompt=1),
        rollout=dataclasses.replace(
            run.rollout, max_response_tokens=segment - run.task.max_prompt_tokens
        ),
        train=dataclasses.replace(
            run.train, batch_prompts=tokens // segment, pack_tokens=tokens, micro_rows=1,
            minibatches=1,
        ),
        mesh=MeshSpec(context=devices),
    )  # fmt: skip


def least(run):
    """CPU seconds of the call that took least, the first one left out. Source: ours."""
    jax.block_until_ready(run())
    found = []
    while len(found) < FEWEST or (sum(found) < ENOUGH and len(found) < MOST):
        start = time.process_time()
        jax.block_until_ready(run())
        found.append(time.process_time() - start)
    return min(found)


def training(tokens, segment, devices):
    """Seconds of each training phase for one row. Source: ours."""
    config = config_of(tokens, segment, devices)
    programs, mesh = make_programs(config), make_mesh(config.mesh)
    key, seconds = jax.random.key(0), {}
    with jax.set_mesh(mesh):
        row = packed(config, mesh, 1, segment, PROMPT)
        actor = fresh_learner(programs.actor, mesh, key)
        critic = fresh_learner(programs.critic, mesh, key)
        weights = params_of(actor), params_of(critic)
        scores = programs.score(*weights, row)
        seconds["score"] = least(lambda: programs.score(*weights, row))
        count = config.batch_responses
        given = [row], [scores], jnp.zeros(count, bool), jnp.zeros(count), jnp.zeros(2)
        prepared = programs.prepare(*given)
        seconds["prepare"] = least(lambda: programs.prepare(*given))
        learners = {"actor": actor, "critic": critic}

        def step(name, program, batch):
            learners[name], *rest = program(learners[name], batch)
            return rest

        for name, batches in (("actor", prepared.actor), ("critic", prepared.critic)):
            program = getattr(programs, f"{name}_step")
            seconds[name] = least(lambda: step(name, program, batches[0]))  # noqa: B023
    return seconds


def sampling(tokens, devices):
    """Seconds per token of prefill and decode at this depth. Source: ours."""
    config = config_of(tokens, tokens, devices)
    programs, mesh = make_programs(config), make_mesh(config.decode_mesh)
    network = programs.actor.network
    engine = Engine(
        network, slots=SLOTS, cache_tokens=tokens + (MOST + 1) * STEPS,
        steps_per_dispatch=STEPS, stop_ids=(), prefill_chunk=PREFILL_CHUNK,
    )  # fmt: skip
    params = sender(network, mesh)(network.init(jax.random.key(0)))
    prompt = np.ones((devices, tokens), np.int32), np.full(devices, tokens, np.int32)
    settings = Sampling(
        np.arange(SLOTS, dtype=np.uint32), np.ones(SLOTS, np.float32),
        np.full(SLOTS, tokens, np.int32), np.ones(SLOTS, np.float32), np.zeros(SLOTS, np.int32),
        np.full((SLOTS, MAX_STOP_IDS), -1, np.int32),
    )  # fmt: skip
    with jax.set_mesh(mesh):
        params = engine.load_params(params)
        prefix = engine.prefill(params, *prompt)
        seconds = least(lambda: engine.prefill(params, *prompt)) / (devices * tokens)
        state = jax.jit(engine.init_decode_state)(params)
        rows, slots = np.zeros(SLOTS, np.int32), np.arange(SLOTS, dtype=np.int32)
        states = [engine.insert(prefix, state, rows, slots, settings)]

        def generate():
            states[0], block = engine.generate(params, states[0])
            return block

        return {"prefill": seconds, "decode": least(generate) / (SLOTS * STEPS)}


def measure(devices):
    """Prints {arm: {length: {phase: seconds per token}}}, "long" with seconds. Source: ours."""
    found = {"whole": {}, "packed": {}, "long": training(LONG, SEGMENT, devices)}
    for tokens in lengths():
        for arm, segment in (("whole", tokens), ("packed", SEGMENT)):
            seconds = training(tokens, segment, devices)
            found[arm][tokens] = {name: value / tokens for name, value in seconds.items()}
            jax.clear_caches()
        found["whole"][tokens] |= sampling(tokens, devices)
        jax.clear_caches()
    print(json.dumps(found))


def growth(by_length):
    """The power of the length that fits best, in logarithms. Source: least squares."""
    far = {tokens: value for tokens, value in by_length.items() if tokens >= GROWS_FROM}
    if len(far) < 2:
        return float("nan")
    return float(np.polyfit(np.log(list(far)), np.log(list(far.values())), 1)[0])


def report(found):
    """A table for each arm and number of devices. Source: ours."""
    for arm, phases in (("whole", PHASES), ("packed", TRAINING)):
        for devices, arms in found.items():
            table = {int(tokens): row for tokens, row in arms[arm].items()}
            print(f"\n{arm} rows, {devices} devices: CPU microseconds per token\n")
            print("|   tokens |" + "".join(f" {name:>8} |" for name in phases))
            print("|---------:|" + "---------:|" * len(phases))
            for tokens, row in table.items():
                cells = "".join(f" {row[name] * 1e6:8.1f} |" for name in phases)
                print(f"| {tokens:8,d} |{cells}")
            powers = [growth({t: row[name] for t, row in table.items()}) for name in phases]
            print("|   growth |" + "".join(f" {power:8.2f} |" for power in powers))
    print(f"\nprepare, of {', '.join(TRAINING)}, for a packed row of {LONG:,} tokens:")
    for devices, arms in found.items():
        share = arms["long"]["prepare"] / sum(arms["long"].values())
        print(f"{arms['long']['prepare'] * 1e3:.1f} ms, {share:.2%} on {devices} devices")


def main(_):
    if MEASURE.value:
        return measure(MEASURE.value)
    found = {}
    for devices in DEVICES.value:
        flag = f"--xla_force_host_platform_device_count={devices}"
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flag}
        command = [sys.executable, __file__, f"--measure={devices}", f"--longest={LONGEST.value}"]
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
        found[devices] = json.loads(done.stdout)
    return report(found)


if __name__ == "__main__":
    app.run(main)
