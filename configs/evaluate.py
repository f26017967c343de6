"""Suites for launch/evaluate.py: GSM8K, MATH-500, AIME, HMMT, GPQA-Diamond, IMO-AnswerBench.

What: each preset is one suite or a few: `:held_out` (a run's own held-out problems), `:gsm8k`,
`:imo`, `:math500`, `:aime` (2024, 2025 and 2026), `:hmmt`, `:gpqa`, `:mine` (a file of yours),
`:reasoning` (all but held_out, gsm8k and mine).
Source: DeepSeek-R1 (2501.12948) for temperature 0.6 and top-p 0.95; S3AC (2610.35518) for the
choice of benchmarks; numbers of samples: as many as make the noise of sampling small beside that of
the problems, more for sets of thirty.
Expected: held_out on the run of configs/tiny.py:s3ac_single (seed 0): avg@4 98.1 %, pass@4 99.8 %,
maj@4 99.7 % (the answer is the digit behind "#"), in seconds on two CPU cores.
Command:

  python launch/evaluate.py --config=configs/evaluate.py:held_out --checkpoint=runs/quickstart

GSM8K and IMO-AnswerBench come with the package. The others are files that you fetch, into
runs/data or wherever --config.suites.NAME.source.path says; docs/evaluation.md has where each comes
from, its licence and its fields.
"""

from ml_collections import config_dict

from s3ac_jax.config.boundary import ConfigError, to_config_dict
from s3ac_jax.config.evaluate import EvaluateConfig
from s3ac_jax.config.evaluation import SuiteConfig
from s3ac_jax.config.sources import FileSource

BOX = "Put your final answer within \\boxed{}."
INTEGER = BOX + " The answer is an integer between 0 and 999 inclusive."
LETTER = "Put the letter of the right option, and nothing else, within \\boxed{}."


def _sampled(
    source: FileSource, samples: int, *, tokens: int = 32768, ask: str = BOX
) -> SuiteConfig:
    """A suite at temperature 0.6 and top-p 0.95; sets of thirty need many samples."""
    some = (8,) if samples > 8 else ()
    return SuiteConfig(
        source, samples=samples, pass_at=some, maj_at=some, temperature=0.6, top_p=0.95,
        max_response_tokens=tokens, instruction=ask,
    )  # fmt: skip


def _problems(name: str, id: str = "id") -> FileSource:
    return FileSource(f"runs/data/{name}", question="problem", id=id)


SUITES = {
    "held_out": SuiteConfig(samples=4, max_response_tokens=0),
    "gsm8k": _sampled(FileSource("gsm8k_test"), 4, tokens=2048),
    "imo": _sampled(FileSource("imo_answerbench_v2"), 8),
    "math500": _sampled(_problems("math500.jsonl", id="unique_id"), 4),
    "aime24": _sampled(_problems("aime2024.jsonl"), 32, ask=INTEGER),
    "aime25": _sampled(_problems("aime2025.jsonl"), 32, ask=INTEGER),
    "aime26": _sampled(_problems("aime2026.jsonl"), 32, ask=INTEGER),
    "hmmt": _sampled(_problems("hmmt.jsonl"), 32),
    "gpqa": _sampled(
        FileSource(
            "runs/data/gpqa_diamond.csv", question="Question", answer="Correct Answer",
            id="Record ID", options="Incorrect Answer 1,Incorrect Answer 2,Incorrect Answer 3",
            grade="choice",
        ),
        8, ask=LETTER,
    ),
    "mine": _sampled(FileSource(""), 4),
}  # fmt: skip
PRESETS = {name: (name,) for name in SUITES if not name.startswith("aime")} | {
    "aime": ("aime24", "aime25", "aime26"),
    "reasoning": ("imo", "math500", "aime24", "aime25", "aime26", "hmmt", "gpqa"),
}


def get_config(arg: str) -> config_dict.ConfigDict:
    if arg not in PRESETS:
        known = ", ".join(PRESETS)
        raise ConfigError(f"configs/evaluate.py has no preset {arg!r}; known: {known}")
    config = EvaluateConfig(suites={name: SUITES[name] for name in PRESETS[arg]})
    return to_config_dict(config)
