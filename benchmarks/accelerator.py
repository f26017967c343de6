"""Speed of a run's steps on the devices that are here: MFU of the updates, tokens/s of sampling.

  python benchmarks/accelerator.py

Two models: `tiny`, that of configs/tiny.py, and `half`, the shape of Qwen2.5-0.5B in bfloat16 with
weights at random. The programs are those of a run, on all devices (mesh.fsdp): rows are full of the
longest responses, and sampling begins with slots that are half full. Printed for each step: the
median time of some calls once it is compiled, tokens per second, and MFU, the model's arithmetic
(what is recomputed left out) by the peak of all devices. Chips are known by
s3ac_jax/train/plan/hardware.py; say --peak_tflops for another.
"""

import dataclasses
import statistics
import time

import jax
import numpy as np
from absl import app, flags
from ml_collections import config_flags
from rows import packed

from s3ac_jax.config.boundary import from_config_dict
from s3ac_jax.models.spec import DecoderSpec
from s3ac_jax.parallel.mesh import MeshSpec, make_mesh
from s3ac_jax.rollout.backend import MAX_STOP_IDS, Sampling
from s3ac_jax.rollout.engine import Engine
from s3ac_jax.rollout.local import sender
from s3ac_jax.train.learner import params_of
from s3ac_jax.train.plan import flops
from s3ac_jax.train.plan.hardware import chip_of
from s3ac_jax.train.programs import fresh_learner, make_programs

CONFIG = config_flags.DEFINE_config_file("config", "configs/tiny.py:ppo", "What is not said here.")
MODELS = flags.DEFINE_multi_enum("model", ["tiny", "half"], ["tiny", "half"], "Which.")
CALLS = flags.DEFINE_integer("calls", 5, "Calls that are timed.", lower_bound=1)
PEAK = flags.DEFINE_float("peak_tflops", None, "Of one device, bfloat16.", lower_bound=0.0)


@dataclasses.dataclass(frozen=True)
class Size:
    """A model and how much of it is done at a time, for each device.

    prompt, response: tokens. rows: of as many tokens as `row`, in micro-batches of micro_rows.
    slots: sampled at a time, `steps` tokens of each in a call; `insert` of them are prefilled
    together.
    """

    model: DecoderSpec
    prompt: int
    response: int
    row: int
    rows: int
    micro_rows: int
    slots: int
    insert: int
    steps: int


def sizes(run):
    half = DecoderSpec(
        vocab_size=151_936, hidden_size=896, num_layers=24, num_heads=14, num_kv_heads=2,
        head_dim=64, intermediate_size=4864, dtype="bfloat16", remat=True,
    )  # fmt: skip
    return {
        "tiny": Size(run.model, 24, 40, 64, 32, 8, 128, 32, 8),
        "half": Size(half, 512, 1536, 4096, 32, 8, 256, 64, 64),
    }


def timed(run):
    """(Seconds of the first call, median seconds of the next ones)."""
    found = []
    for _ in range(1 + CALLS.value):
        start = time.perf_counter()
        jax.block_until_ready(run())
        found.append(time.perf_counter() - start)
    return found[0], statistics.median(found[1:])


def told(name, seconds, tokens, work):
    """A line of the table. work: operations of a call, None for none worth telling."""
    first, each = seconds
    chip, devices = chip_of(jax.devices()[0].device_kind), jax.device_count()
    peak = PEAK.value * 1e12 if PEAK.value else chip and chip.flops
    mfu = f"{work / each / devices / peak:7.1%}" if peak and work else "      -"
    rate = f"{work / each / 1e12:10.3f}" if work else "         -"
    print(f"{name:>9}  {each * 1e3:10.2f} ms  {tokens / each:12,.0f}  {rate}  {mfu}"
          f"  ({first:.1f} s)", flush=True)  # fmt: skip


def updates(size, run):
    """Times score, critic step and actor step on full rows."""
    devices = jax.device_count()
    segment = size.prompt + size.response
    config = dataclasses.replace(
        run,
        model=size.model,
        recipe=dataclasses.replace(run.recipe, responses_per_prompt=1),
        rollout=dataclasses.replace(
            run.rollout, max_response_tokens=segment - run.task.max_prompt_tokens
        ),
        train=dataclasses.replace(
            run.train, batch_prompts=devices * size.rows * (size.row // segment),
            pack_tokens=size.row, micro_rows=devices * size.micro_rows, minibatches=1,
        ),
        mesh=MeshSpec(fsdp=devices),
    )  # fmt: skip
    programs, mesh = make_programs(config), make_mesh(config.mesh)
    frozen = config.recipe.critic.freeze_attention
    with jax.set_mesh(mesh):
        rows = packed(config, mesh, devices * size.rows, segment, size.prompt)
        key, tokens, seen = jax.random.key(0), float(rows.tokens.size), (segment + 1) / 2
        actor = fresh_learner(programs.actor, mesh, key)
        critic = fresh_learner(programs.critic, mesh, key)
        weights = params_of(actor), params_of(critic)
        read = sum(
            flops.reading(size.model, tokens, seen, head=head).model for head in (True, False)
        )
        told("score", timed(lambda: programs.score(*weights, rows)), tokens, read)
        count, scores = config.batch_responses, programs.score(*weights, rows)
        given = [rows], [scores], np.zeros(count, bool), np.zeros(count, np.float32), np.zeros(2)
        prepared = programs.prepare(*given)
        del weights
        learners = {"actor": actor, "critic": critic}

        def step(name, program, batch):
            learners[name], *rest = program(learners[name], batch)
            return rest

        for name, batches in (("critic", prepared.critic), ("actor", prepared.actor)):
            program, own = getattr(programs, f"{name}_step"), frozen and name == "critic"
            seconds = timed(lambda: step(name, program, batches[0]))  # noqa: B023
            learnt = flops.learning(
                size.model, tokens, seen, head=name == "actor", mixers_frozen=own
            )
            told(name, seconds, tokens, learnt.model)


def sampling(size, run):
    """Times prefill and generate."""
    devices = jax.device_count()
    config = dataclasses.replace(run, model=size.model, mesh=MeshSpec(data=devices))
    network, mesh = make_programs(config).actor.network, make_mesh(config.mesh)
    slots, insert = devices * size.slots, devices * size.insert
    depth = (size.prompt + size.response) // 2
    calls = 1 + CALLS.value
    engine = Engine(
        network, slots=slots, cache_tokens=depth + max(depth, calls * size.steps),
        steps_per_dispatch=size.steps, stop_ids=(),
    )  # fmt: skip
    weights = sender(network, mesh)(network.init(jax.random.key(0)))
    prompts = np.ones((insert, depth), np.int32), np.full(insert, depth, np.int32)
    each = Sampling(
        np.arange(insert, dtype=np.uint32), np.ones(insert, np.float32),
        np.full(insert, calls * size.steps, np.int32), np.ones(insert, np.float32),
        np.zeros(insert, np.int32), np.full((insert, MAX_STOP_IDS), -1, np.int32),
    )  # fmt: skip
    with jax.set_mesh(mesh):
        weights = engine.load_params(weights)
        work = flops.reading(size.model, float(insert * depth), depth / 2, head=False).model
        seconds = timed(lambda: engine.prefill(weights, *prompts))
        told("prefill", seconds, insert * depth, work)
        prefix = engine.prefill(weights, *prompts)
        states = [jax.jit(engine.init_decode_state)(weights)]
        rows = np.arange(insert, dtype=np.int32)
        for start in range(0, slots, insert):
            states[0] = engine.insert(prefix, states[0], rows, start + rows, each)

        def generate():
            states[0], block = engine.generate(weights, states[0])
            return block

        # Arithmetic is not what bounds it.
        told("generate", timed(generate), slots * size.steps, None)
        made = int(np.asarray(states[0].made).min())
        if made != calls * size.steps:
            raise AssertionError(f"a slot made {made} tokens, not {calls * size.steps}")


def main(_):
    run, device = from_config_dict(CONFIG.value), jax.devices()[0]
    print(f"{jax.device_count()} x {device.device_kind}, JAX {jax.__version__}")
    for name in MODELS.value:
        size = sizes(run)[name]
        weights = sum(
            x.size for x in jax.tree.leaves(make_programs(
                dataclasses.replace(run, model=size.model)
            ).actor.network.abstract)
        )  # fmt: skip
        print(f"\n{name}: {weights / 1e6:,.1f} M weights, {size.model.dtype}; for each device "
              f"{size.rows} rows of {size.row:,} tokens, {size.slots} slots")  # fmt: skip
        print(f"{'step':>9}  {'a call':>13}  {'tokens/s':>12}  {'Tflop/s':>10}      MFU  (first)")
        updates(size, run)
        sampling(size, run)
        jax.clear_caches()
        held = (device.memory_stats() or {}).get("peak_bytes_in_use")
        if held is not None:
            print(f"most memory of a device so far: {held / 2**30:.2f} GiB")


if __name__ == "__main__":
    app.run(main)
