"""Sampling beside transformers and Tunix: same weights, batch and cores; tokens per second.

  python benchmarks/rollout.py --torch_python=A/bin/python --tunix_python=B/bin/python

torch with transformers, and google-tunix, must be importable by those two; they are not among our
requirements. A side without a python is left out. Every side is a process of its own that answers
one round at a time; they take turns within one run, so that the machine is the same for all.

Shapes: "tiny" (vocabulary 64, width 64, 2 layers; batch 64, prompt 20, 60 new tokens) and "smollm2"
(SmolLM2-135M's; batch 16, prompt 32, 64 new tokens); random weights, temperature 1, no stop token,
so that every side makes every token. Ours returns log-probs and weight versions with them.

Printed for each side and dtype: the median of the rounds and their range; the ratio of ours to
each peer, both in their better dtype; and how near ours comes to what the cores can do: the time
of the step's matrix products alone, [batch, in] x [in, out] over all layers and the head, measured
in the same process, or of reading the weights once, whichever is longer, by the time of a step.
"""

import argparse
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

SHAPES = {
    "tiny": {
        "batch": 64, "prompt": 20, "new": 60, "rounds_per_answer": 4,
        "model": {
            "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 256,
            "num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": False,
        },
    },
    "smollm2": {
        "batch": 16, "prompt": 32, "new": 64, "rounds_per_answer": 1,
        "model": {
            "vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 30,
            "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3,
            "tie_word_embeddings": True,
        },
    },
}  # fmt: skip


def make_folder(shape: str, folder: str) -> None:
    """Random weights, as transformers writes them."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        **SHAPES[shape]["model"], max_position_embeddings=1024, bos_token_id=None,
        eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)


def prompts(shape: str) -> list[list[int]]:
    """The same for all sides; no library's generator. 0 is Tunix's padding."""
    sizes, state, rows = SHAPES[shape], 1, []
    for _ in range(sizes["batch"]):
        row = []
        for _ in range(sizes["prompt"]):
            state = (1103515245 * state + 12345) % 2**31
            row.append(1 + state % (sizes["model"]["vocab_size"] - 1))
        rows.append(row)
    return rows


def torch_side(shape: str, folder: str, dtype: str):
    import torch
    import transformers

    torch.set_num_threads(os.cpu_count())
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    ids = torch.tensor(prompts(shape))
    new = SHAPES[shape]["new"]

    def once() -> int:
        with torch.inference_mode():
            made = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0,
                top_p=1.0, max_new_tokens=new, min_new_tokens=new,
            )  # fmt: skip
        return made[:, ids.shape[1] :].numel()

    return once, None


def tunix_side(shape: str, folder: str, dtype: str):
    import jax
    import jax.numpy as jnp
    from tunix.generate import sampler as sampling
    from tunix.models.qwen2 import model as qwen2
    from tunix.models.qwen2 import params

    sizes = SHAPES[shape]["model"]
    heads = sizes["num_attention_heads"]
    config = qwen2.ModelConfig(
        num_layers=sizes["num_hidden_layers"], vocab_size=sizes["vocab_size"],
        embed_dim=sizes["hidden_size"], hidden_dim=sizes["intermediate_size"], num_heads=heads,
        head_dim=sizes["hidden_size"] // heads, num_kv_heads=sizes["num_key_value_heads"],
        rope_theta=10_000, norm_eps=1e-6, use_tied_embedding=sizes["tie_word_embeddings"],
        dtype=getattr(jnp, dtype), param_dtype=getattr(jnp, dtype),
    )  # fmt: skip
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=auto)
    with mesh:
        model = params.create_model_from_safe_tensors(
            folder, config, mesh, dtype=getattr(jnp, dtype)
        )

    class Ids:
        """A tokenizer of numbers in text."""

        def encode(self, text: str, **_) -> list[int]:
            return [int(word) for word in text.split()]

        def decode(self, ids: list[int], **_) -> str:
            return str(len(ids))

        def bos_id(self) -> None:
            return None

        def eos_id(self) -> int:
            return -1

        def pad_id(self) -> int:
            return 0

    width, new = SHAPES[shape]["prompt"], SHAPES[shape]["new"]
    cache = sampling.CacheConfig(
        width + new, config.num_layers, config.num_kv_heads, config.head_dim
    )
    sampler = sampling.Sampler(model, Ids(), cache)
    texts = [" ".join(map(str, row)) for row in prompts(shape)]

    def once() -> int:
        out = sampler(
            texts, max_generation_steps=new, max_prompt_length=width, temperature=1.0, top_p=1.0,
            eos_tokens=[-1], seed=0,
        )  # fmt: skip
        return sum(len(tokens) for tokens in out.tokens)

    return once, None


def our_side(shape: str, folder: str, dtype: str, *, scan_layers: bool = False):
    import dataclasses

    import numpy as np

    from s3ac_jax.core.types import Prompt
    from s3ac_jax.io.hf_weights import load_params, read_spec
    from s3ac_jax.models.network import actor_network
    from s3ac_jax.rollout.backend import seeded_sampling
    from s3ac_jax.rollout.engine import Engine
    from s3ac_jax.rollout.local import LocalRollout

    sizes = SHAPES[shape]
    network = actor_network(dataclasses.replace(read_spec(folder), dtype=dtype))
    params = load_params(folder, network)
    engine = Engine(
        network, slots=sizes["batch"], cache_tokens=sizes["prompt"] + sizes["new"],
        steps_per_dispatch=sizes["new"], stop_ids=(), scan_layers=scan_layers,
    )  # fmt: skip
    sampler = LocalRollout(
        engine, insert_batch=sizes["batch"], max_prompt_tokens=sizes["prompt"],
        max_response_tokens=sizes["new"],
    )  # fmt: skip
    sampler.update_weights(params, 0)
    rows = np.arange(sizes["batch"], dtype=np.int32)
    prompt = Prompt(
        rows, np.array(prompts(shape), np.int32), np.full(len(rows), sizes["prompt"], np.int32)
    )
    settings = seeded_sampling(rows, temperature=1.0, max_tokens=sizes["new"], stop_ids=())

    def once() -> int:
        return int(sampler.generate(prompt, settings).num_tokens.sum())

    return once, lambda: least_seconds(network, params, sizes["batch"])


def least_seconds(network, params, rows: int) -> float:
    """Seconds of a step's matrix products alone, the best of several, with nothing around them."""
    import jax
    import jax.numpy as jnp

    weights = network.in_compute_dtype(params)
    layers, width = weights["layers"], network.spec.hidden_size
    stacks = [layers["attn"][name] for name in "qkv"]
    stacks += [layers["mlp"][name] for name in ("gate", "up")]
    matrices = [m.reshape(width, -1) for stack in stacks for m in stack]
    stacks = [layers["attn"]["o"], layers["mlp"]["down"]]
    matrices += [m.reshape(-1, width) for stack in stacks for m in stack]
    head = weights["embed"].T if network.spec.tie_embeddings else weights["lm_head"]
    matrices.append(jnp.array(head))
    inputs = {m.shape[0]: jnp.ones((rows, m.shape[0]), m.dtype) for m in matrices}

    @jax.jit
    def products(inputs, matrices):
        made = (
            jnp.matmul(inputs[m.shape[0]], m, preferred_element_type=jnp.float32) for m in matrices
        )
        return [jnp.sum(y) for y in made]

    seconds = []
    for _ in range(8):
        start = time.perf_counter()
        jax.block_until_ready(products(inputs, matrices))
        seconds.append(time.perf_counter() - start)
    return min(seconds)


SIDES = {
    "ours": our_side,
    "scanned": functools.partial(our_side, scan_layers=True),
    "torch": torch_side,
    "tunix": tunix_side,
}


def serve(side: str, shape: str, folder: str, dtype: str) -> None:
    """Answers each line on stdin with one measured round."""
    once, least = SIDES[side](shape, folder, dtype)
    sizes = SHAPES[shape]
    for _ in range(2):
        once()
    print(json.dumps({"ready": side}), flush=True)
    for line in sys.stdin:
        if line.strip() == "least":
            print(json.dumps({"seconds": least()}), flush=True)
            continue
        start, cpu, tokens = time.perf_counter(), time.process_time(), 0
        for _ in range(sizes["rounds_per_answer"]):
            tokens += once()
        seconds = time.perf_counter() - start
        assert tokens == sizes["batch"] * sizes["new"] * sizes["rounds_per_answer"]
        cpu = time.process_time() - cpu
        answer = {"tokens_per_second": tokens / seconds, "cpu_us_per_token": 1e6 * cpu / tokens}
        print(json.dumps(answer), flush=True)


def compare(shape: str, pythons: dict[str, str], dtypes: list[str], rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        maker = pythons.get("torch", sys.executable)
        subprocess.run([maker, __file__, "make", shape, folder], check=True)
        # Threads that wait by spinning would take the cores from the other sides.
        env = dict(os.environ, KMP_BLOCKTIME="0", OMP_WAIT_POLICY="passive", JAX_PLATFORMS="cpu")
        root = str(pathlib.Path(__file__).parents[1])
        env["PYTHONPATH"] = root
        sides = {
            (side, dtype): subprocess.Popen(
                [python, __file__, "serve", side, shape, folder, dtype], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env,
            )
            for dtype in dtypes
            for side, python in pythons.items()
        }  # fmt: skip

        def answer(key: tuple[str, str], word: str = "") -> dict:
            process = sides[key]
            if word:
                process.stdin.write(word + "\n")
                process.stdin.flush()
            line = process.stdout.readline()
            if not line:
                sys.exit(f"{key[0]} in {key[1]} ended; run: {' '.join(process.args)}")
            return json.loads(line)

        for key in sides:
            answer(key)
        speeds: dict[tuple[str, str], list[float]] = {key: [] for key in sides}
        cpu: dict[tuple[str, str], list[float]] = {key: [] for key in sides}
        for _ in range(rounds):
            for key in sides:
                found = answer(key, "go")
                speeds[key].append(found["tokens_per_second"])
                cpu[key].append(found["cpu_us_per_token"])
        least = {dtype: answer(("ours", dtype), "least")["seconds"] for dtype in dtypes}
        for process in sides.values():
            process.stdin.close()
            process.wait()
    middle = {key: statistics.median(found) for key, found in speeds.items()}
    for (side, dtype), found in speeds.items():
        print(f"{shape:8} {side:6} {dtype:9} {middle[side, dtype]:9,.0f} tokens/s "
              f"({min(found):,.0f}-{max(found):,.0f}), CPU "
              f"{statistics.median(cpu[side, dtype]):,.1f} us a token", flush=True)  # fmt: skip
    best = {side: max(middle[side, dtype] for dtype in dtypes) for side in pythons}
    for side in pythons:
        if side != "ours":
            print(f"{shape:8} ours / {side}, better dtypes: {best['ours'] / best[side]:.2f}")
    for dtype in dtypes:
        step = SHAPES[shape]["batch"] / middle["ours", dtype]
        alone, share = 1e3 * least[dtype], least[dtype] / step
        print(f"{shape:8} {dtype}: products alone {alone:.2f} ms of {1e3 * step:.2f} ms a step, "
              f"share {share:.2f}", flush=True)  # fmt: skip


def main() -> None:
    if sys.argv[1:2] == ["make"]:
        make_folder(*sys.argv[2:])
    elif sys.argv[1:2] == ["serve"]:
        serve(*sys.argv[2:])
    else:
        parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
        parser.add_argument("--torch_python", required=True, help="python with transformers")
        parser.add_argument("--tunix_python", help="python with google-tunix")
        parser.add_argument("--scanned", action="store_true", help="ours with scan_layers, too")
        parser.add_argument("--rounds", type=int, default=5)
        parser.add_argument("--shape", choices=SHAPES, action="append")
        parser.add_argument("--dtype", choices=["float32", "bfloat16"], action="append")
        flags = parser.parse_args()
        pythons = {"ours": sys.executable, "torch": flags.torch_python}
        if flags.tunix_python:
            pythons["tunix"] = flags.tunix_python
        if flags.scanned:
            pythons["scanned"] = sys.executable
        for shape in flags.shape or SHAPES:
            compare(shape, pythons, flags.dtype or ["float32", "bfloat16"], flags.rounds)


if __name__ == "__main__":
    main()
