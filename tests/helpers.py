"""What several test files share: small networks, a float64 decoder, batches, a RunConfig."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

from s3ac_jax.algos import recipe as recipes
from s3ac_jax.config import run, tasks
from s3ac_jax.config.rollout import RolloutConfig
from s3ac_jax.core.types import Prompt, Rollout, Scored
from s3ac_jax.data import arithmetic
from s3ac_jax.models.spec import DecoderSpec
from s3ac_jax.parallel.mesh import MeshSpec


def tiny_spec(**changes) -> DecoderSpec:
    """Every size differs from every other, so that swapped axes can't go unnoticed."""
    sizes = {
        "vocab_size": arithmetic.TOKENIZER.vocab_size, "hidden_size": 12, "num_layers": 3,
        "num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "intermediate_size": 20,
    }  # fmt: skip
    return DecoderSpec(**(sizes | changes))


def random_params(network, seed, *, std=0.4):
    """Weights without a zero or a one among them: biases and norms do something too."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(std * rng.normal(size=leaf.shape) + 0.1, jnp.float32),
        network.abstract,
    )


def experts_oracle(w, moe, y, chosen):
    """Output of one token's experts and who they were, likeliest first; chosen: others' choice."""
    logits = y @ w["router"]
    p = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    if chosen is None or min(chosen) < 0:
        chosen = np.argsort(-p, kind="stable")[: moe.per_token]
    gates = p[chosen] / (p[chosen].sum() if moe.renormalise else 1.0)
    out = np.zeros_like(y)
    for share, expert in zip(gates, chosen, strict=True):
        gate, up = y @ w["gate"][expert], y @ w["up"][expert]
        out += share * ((gate / (1 + np.exp(-gate)) * up) @ w["down"][expert])
    return out, np.asarray(chosen)


def decoder_oracle(params, spec, tokens, routing=None):
    """One bare sequence [T] -> outputs of each layer [L, T, D] and final hidden states [T, D].

    float64, one token and one head at a time. routing: a list that takes the experts of each MoE
    layer [T, k]; or [T, layers, k], the experts to use.
    """
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    half, group = spec.head_dim // 2, spec.num_heads // spec.num_kv_heads

    def norm(x, weight):
        return x / math.sqrt(sum(x * x) / len(x) + spec.rms_norm_eps) * weight

    def turn(x, position):
        out = np.empty_like(x)
        for i in range(half):
            angle = position * spec.rope_theta ** (-2 * i / spec.head_dim)
            z = complex(x[i], x[i + half]) * complex(math.cos(angle), math.sin(angle))
            out[i], out[i + half] = z.real, z.imag
        return out

    def of_layer(block, layer):
        place = spec.layers_with(block).index(layer)
        return jax.tree.map(lambda leaf: leaf[place], p["layers"][block])

    x = [p["embed"][token] for token in tokens]
    outputs = []
    for layer, (_, forward) in enumerate(spec.kinds):
        w = {name: p["layers"][name][layer] for name in ("attn_norm", "mlp_norm")}
        w |= {block: of_layer(block, layer) for block in ("attn", forward)}
        attn, keys, values, after, experts = w["attn"], [], [], [], []
        for t, x_t in enumerate(x):
            y = norm(x_t, w["attn_norm"])
            q, k, v = (np.einsum("d,dhe->he", y, attn[name]) for name in "qkv")
            if spec.qkv_bias:
                q, k, v = q + attn["q_bias"], k + attn["k_bias"], v + attn["v_bias"]
            keys.append([turn(head, t) for head in k])
            values.append(v)
            x_t = x_t.copy()
            for h in range(spec.num_heads):
                q_h = turn(q[h], t)
                scores = [q_h @ key[h // group] / math.sqrt(spec.head_dim) for key in keys]
                weights = [math.exp(s - max(scores)) for s in scores]
                mixed = sum(a * v[h // group] for a, v in zip(weights, values, strict=True))
                x_t += mixed / sum(weights) @ attn["o"][h]
            y = norm(x_t, w["mlp_norm"])
            if forward == "moe":
                given = isinstance(routing, np.ndarray)
                chosen = routing[t, spec.layers_with("moe").index(layer)] if given else None
                y, chosen = experts_oracle(w["moe"], spec.moe, y, chosen)
                experts.append(chosen)
                after.append(x_t + y)
                continue
            gate, up = y @ w["mlp"]["gate"], y @ w["mlp"]["up"]
            after.append(x_t + (gate / (1 + np.exp(-gate)) * up) @ w["mlp"]["down"])
        x = after
        if experts and isinstance(routing, list):
            routing.append(np.stack(experts))
        outputs.append(np.stack(x))
    return np.stack(outputs), np.stack([norm(x_t, p["final_norm"]) for x_t in x])


def log_softmax_oracle(logits):
    logits = np.asarray(logits, np.float64)
    top = logits.max(axis=-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))


def logp_oracle(params, spec, tokens, *, temperature=1.0, routing=None):
    """log pi(tokens[t] | tokens[:t]) for t >= 1 [T - 1], from the float64 decoder."""
    head = params["embed"].T if spec.tie_embeddings else params["lm_head"]
    _, hidden = decoder_oracle(params, spec, tokens, routing)
    logp = log_softmax_oracle(hidden[:-1] @ np.asarray(head, np.float64) / temperature)
    return logp[np.arange(len(tokens) - 1), tokens[1:]]


def make_scored(seed, prompt_lengths, response_lengths, *, vocab=17) -> Scored:
    """Random responses. Any token id may occur anywhere, the padding and the stop id included."""
    rng = np.random.default_rng(seed)
    rows = len(prompt_lengths)

    def padded(lengths):
        tokens = rng.integers(vocab, size=(rows, max(lengths)))
        return np.where(np.arange(max(lengths)) < np.reshape(lengths, (-1, 1)), tokens, 0)

    prompt_tokens, tokens = padded(prompt_lengths), padded(response_lengths)
    prompt = Prompt(
        np.arange(rows, dtype=np.int32), prompt_tokens.astype(np.int32),
        np.asarray(prompt_lengths, np.int32),
    )  # fmt: skip
    rollout = Rollout(
        prompt, tokens.astype(np.int32), np.asarray(response_lengths, np.int32),
        rng.uniform(-3, 0, size=tokens.shape).astype(np.float32), rng.random(rows) < 0.7,
        np.zeros(tokens.shape, np.int32),
    )  # fmt: skip
    success = rng.random(rows) < 0.5
    success[:2] = [True, False][:rows]
    reward = np.where(success, 1.0, -1.0).astype(np.float32)
    return Scored(rollout, reward, success, np.ones(rows, bool))


def sequence_of(scored, number):
    """Prompt and response of one row, end to end [T]."""
    prompt, rollout = scored.rollout.prompt, scored.rollout
    return np.concatenate(
        [
            prompt.tokens[number, : prompt.num_tokens[number]],
            rollout.tokens[number, : rollout.num_tokens[number]],
        ]
    )


def gradient_recorder() -> optax.GradientTransformation:
    """An optimiser that moves nothing and keeps the gradient it was given as its state."""
    zeros = jax.tree_util.Partial(jax.tree.map, jnp.zeros_like)
    return optax.GradientTransformation(zeros, lambda grads, _, params=None: (zeros(grads), grads))


def run_config(*, mesh=None, model=None, recipe=None, **train) -> run.RunConfig:
    """Everything as small as it can be and still be several of it."""
    default = dataclasses.replace(recipes.s3ac_group, responses_per_prompt=2)
    sizes = {"num_ticks": 2, "batch_prompts": 4, "pack_tokens": 34, "micro_rows": 4} | train
    return run.RunConfig(
        name="test",
        seed=0,
        task=tasks.Ladder(max_steps=2, num_train=32, num_held_out=8),
        model=model or tiny_spec(num_layers=2),
        recipe=recipe or default,
        rollout=RolloutConfig(
            slots=4, max_response_tokens=11, steps_per_dispatch=4, insert_batch=2
        ),
        sft=run.SftConfig(),
        reference=run.ReferenceConfig(),
        value_pretraining=run.ValuePretrainingConfig(),
        actor=run.OptimizerConfig(lr=1e-2, clip=1.0, weight_decay=0.0),
        critic=run.CriticConfig(lr=5e-2, clip=10.0, weight_decay=0.0),
        train=run.TrainConfig(**sizes),
        scheduler=run.SchedulerConfig(candidates=8, max_rounds=4),
        cadence=run.CadenceConfig(),
        mesh=mesh or MeshSpec(),
    )
