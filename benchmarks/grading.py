"""What a verdict costs: exact numbers in the trainer, and a batch with bombs in worker processes.

  python benchmarks/grading.py

Microseconds per answer for 10,000 answers in the manner of GSM8K and AIME, right and wrong, each
behind 2,000 characters of reasoning, all different; then seconds for 800 answers of which 20 are
made to hang a grader and half of the rest need algebra, with two workers that start cold.
"""

import random
import time

from s3ac_jax.rewards.math_answers import decide
from s3ac_jax.rewards.pool import GraderPool

GOLD = r"8\sqrt{6}"
BOMBS = [
    r"10^{10^{10}}", r"9^{9^{9^9}}", r"(10^9)!", r"9999999!", r"\sum_{k=1}^{10^9} k", "7" * 200_000,
    r"(x+y+z+w)^{200}-(x+y+z+w+1)^{200}", r"\log(\log(10^{10^{10}}))", "(" * 3000 + ")" * 3000,
    "__import__('os')", "{" * 500_000, "\0", "\ud800", r"8\sqrt{6}+(x-x)(x+1)^{300}",
    r"\frac{8\sqrt{6}\cdot 2000!}{2000!}", r"(8\sqrt{6}+\sqrt{2}-\sqrt{2})^{3000}",
    r"8\sqrt{6}\cdot\frac{(\sqrt{2}+\sqrt{3})^{150}}{(\sqrt{3}+\sqrt{2})^{150}}",
    r"8\sqrt{6}\cdot\frac{(\sqrt{5}+\sqrt{3}+1)^{15}}{(\sqrt{3}+1+\sqrt{5})^{15}}",
    r"8\sqrt{6}+(\sqrt{7}+\sqrt{5}+\sqrt{3}+1)^8-(1+\sqrt{7}+\sqrt{5}+\sqrt{3})^8",
    r"\frac{384}{\sqrt{384}}+\sqrt[7]{3}-\sqrt[14]{9}",
]  # fmt: skip
SPELLED = ("{}", "{:,}", "{}.0", r"\${:,}", r"{} \text{{ apples}}", "x = {}", r"\frac{{{}}}{{7}}")


def numbers(count: int) -> list[tuple[str, str]]:
    rng = random.Random(0)
    reasoning = "We add the parts: $3 \\cdot 4 = 12$ and then the rest. " * 37
    items = []
    for place in range(count):
        gold = rng.randrange(100_000)
        said = gold if rng.random() < 0.5 else rng.randrange(100_000)
        spelled = SPELLED[place % len(SPELLED)].format(said)
        wanted = f"{gold}/7" if spelled.startswith("\\frac") else str(gold)
        items.append((f"{reasoning}So the answer is $\\boxed{{{spelled}}}$.", wanted))
    return items


def main() -> None:
    items = numbers(10_000)
    started = time.process_time()
    verdicts = [decide(*item) for item in items]
    seconds = time.process_time() - started
    assert all(verdict is not None for verdict in verdicts)
    print(f"exact numbers  {1e6 * seconds / len(items):.0f} us per answer")

    batch = [(f"\\boxed{{{bomb}}}", GOLD, "math") for bomb in BOMBS]
    batch += [(response, gold, "math") for response, gold in numbers(390)]
    batch += [(rf"\boxed{{(x+{n})^2}}", rf"x^2+{2 * n}x+{n * n}", "math") for n in range(195)]
    batch += [(rf"\boxed{{(x-{n})^2}}", rf"x^2+{2 * n}x+{n * n}", "math") for n in range(1, 196)]
    started = time.monotonic()
    with GraderPool(2) as pool:
        verdicts = pool.grade(batch)
        seconds = time.monotonic() - started
    print(f"{len(batch)} answers    {seconds:.1f} s with 20 bombs, 2 workers")
    print(f"reasons        {dict(pool.counts)}")


if __name__ == "__main__":
    main()
