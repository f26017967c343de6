"""Forward and backward of each family beside transformers: same weights, tokens, cores; a ratio.

  python benchmarks/model_speed.py --torch_python=/path/to/venv/bin/python

A model of about 20 M weights of each family is made by transformers (torch and transformers must be
importable by --torch_python, they are not among our requirements), written as a Hugging Face
folder, and read by both. Each side is a process of its own; they take turns, so that the machine is
the same for both. Printed: seconds of the mean log-prob's gradient (median and range over the
rounds), peak memory, and how far apart the two losses are.
"""

import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time

ROWS, TOKENS = 4, 256
_BASE = {
    "vocab_size": 8192, "hidden_size": 384, "num_attention_heads": 6, "num_key_value_heads": 2,
    "max_position_embeddings": 1024, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
_LINEAR = {
    "num_hidden_layers": 8, "head_dim": 64, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "linear_key_head_dim": 48, "linear_value_head_dim": 48, "linear_conv_kernel_dim": 4,
}  # fmt: skip
_EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 96}
FAMILIES = {
    "qwen2": ("Qwen2", {"num_hidden_layers": 10, "intermediate_size": 1024}),
    "qwen3": ("Qwen3", {"num_hidden_layers": 10, "intermediate_size": 1024, "head_dim": 64}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_hidden_layers": 6, "head_dim": 64, "norm_topk_prob": True, **_EXPERTS},
    ),
    "qwen3_5": ("Qwen3_5", {"intermediate_size": 1024, **_LINEAR}),
    "qwen3_5_moe": ("Qwen3_5Moe", {"shared_expert_intermediate_size": 96, **_LINEAR, **_EXPERTS}),
}


def make_folder(family: str, folder: str) -> None:
    """Random weights of a family, as transformers writes them."""
    import torch
    import transformers

    name, sizes = FAMILIES[family]
    config = f"{name}TextConfig" if "3_5" in name else f"{name}Config"
    torch.manual_seed(0)
    made = getattr(transformers, config)(**_BASE, **sizes, tie_word_embeddings=False)
    model = getattr(transformers, f"{name}ForCausalLM")(made)
    model.save_pretrained(folder)


def tokens() -> list[list[int]]:
    """The same for both sides; no library's generator."""
    state, rows = 1, []
    for _ in range(ROWS):
        row = []
        for _ in range(TOKENS):
            state = (1103515245 * state + 12345) % 2**31
            row.append(state % _BASE["vocab_size"])
        rows.append(row)
    return rows


def torch_side(folder: str):
    """A function that returns the loss after one forward and backward, and the weights."""
    import torch
    import transformers

    torch.set_num_threads(os.cpu_count())
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor(tokens())

    def once() -> float:
        model.zero_grad(set_to_none=True)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return float(loss)

    return once, sum(x.numel() for x in model.parameters())


def jax_side(folder: str):
    """The same, through the log-probs that training reads."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from s3ac_jax.io.hf_weights import load_params, read_spec
    from s3ac_jax.models.network import actor_network
    from s3ac_jax.models.token_logp import before, token_logp

    network = actor_network(read_spec(folder))
    params = load_params(folder, network)
    ids = np.array(tokens(), np.int32)
    places = np.broadcast_to(np.arange(TOKENS, dtype=np.int32), ids.shape)

    @jax.jit
    @jax.value_and_grad
    def gradient(params):
        model = network.bind(params)
        hidden, _ = model(ids, places, jnp.ones(ids.shape, jnp.int32))
        flat = before(hidden).reshape(-1, hidden.shape[-1])
        logp, _ = token_logp(flat, model.head(), ids.reshape(-1))
        return -jnp.mean(logp.reshape(ids.shape)[:, 1:])

    def once() -> float:
        loss, grads = gradient(params)
        jax.block_until_ready(grads)
        return float(loss)

    return once, sum(x.size for x in jax.tree.leaves(params))


def serve(side: str, folder: str) -> None:
    """Answers each line on stdin with one measured round."""
    once, weights = {"torch": torch_side, "jax": jax_side}[side](folder)
    for _ in range(2):
        once()
    print(json.dumps({"weights": weights}), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        loss = once()
        seconds = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(json.dumps({"seconds": seconds, "loss": loss, "peak_gib": peak}), flush=True)


def compare(family: str, torch_python: str, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([torch_python, __file__, "make", family, folder], check=True)
        # Threads that wait by spinning would take the cores from the other side.
        env = dict(os.environ, KMP_BLOCKTIME="0", OMP_WAIT_POLICY="passive", JAX_PLATFORMS="cpu")
        root = str(pathlib.Path(__file__).parents[1])
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (root, env.get("PYTHONPATH"))))
        sides = {
            side: subprocess.Popen(
                [python, __file__, "serve", side, folder], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, text=True, env=env,
            )
            for side, python in (("torch", torch_python), ("jax", sys.executable))
        }  # fmt: skip
        ask = {
            side: lambda one=one: json.loads(one.stdout.readline()) for side, one in sides.items()
        }
        weights = {side: answer()["weights"] for side, answer in ask.items()}
        found: dict[str, list[dict]] = {"torch": [], "jax": []}
        for _ in range(rounds):
            for side, process in sides.items():
                process.stdin.write("go\n")
                process.stdin.flush()
                found[side].append(ask[side]())
        for process in sides.values():
            process.stdin.close()
            process.wait()
    times = {side: [one["seconds"] for one in rounds] for side, rounds in found.items()}
    middle = {side: statistics.median(seconds) for side, seconds in times.items()}
    gap = abs(found["torch"][-1]["loss"] - found["jax"][-1]["loss"])
    shown = "  ".join(
        f"{side} {middle[side]:.2f} s ({min(times[side]):.2f}-{max(times[side]):.2f}), "
        f"{found[side][-1]['peak_gib']:.1f} GiB"
        for side in ("torch", "jax")
    )
    ratio = middle["torch"] / middle["jax"]
    millions = weights["jax"] / 1e6
    print(f"{family:12} {millions:.0f} M  {shown}  ratio {ratio:.2f}  losses {gap:.1e} apart",
          flush=True)  # fmt: skip


def main() -> None:
    if sys.argv[1:2] == ["make"]:
        make_folder(*sys.argv[2:])
    elif sys.argv[1:2] == ["serve"]:
        serve(*sys.argv[2:])
    else:
        import argparse

        parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
        parser.add_argument("--torch_python", default=sys.executable)
        parser.add_argument("--rounds", type=int, default=5)
        parser.add_argument("--family", choices=FAMILIES, action="append")
        flags = parser.parse_args()
        for family in flags.family or FAMILIES:
            compare(family, flags.torch_python, flags.rounds)


if __name__ == "__main__":
    main()
