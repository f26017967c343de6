"""Chains of last-digit arithmetic, 1 to 8 steps: a difficulty ladder with chain of thought.

A prompt `7+4-9*3=` is worked from left to right and only the last digit is kept; the careful
response writes each step, `+4=1-9=2*3=6#6`, so a problem of n steps needs 4n + 2 characters.
Multipliers are 3, 7 and 9 and starts are uniform, so every operation permutes the ten digits
and the answer is uniform: a blind guess pays exactly 10 %. (At a small modulus a policy learns
to guess early; with even multipliers 0 is right far too often.)
"""

import dataclasses

import numpy as np

from s3ac_jax.data.splits import held_out_by_hash
from s3ac_jax.data.tokenizer import CharTokenizer

OPERATORS = "+-*"
TOKENIZER = CharTokenizer("0123456789" + OPERATORS + "=#")
_OPERANDS = np.array([(op, n) for op in (0, 1) for n in range(1, 10)] + [(2, n) for n in (3, 7, 9)])
_DIGIT, _OPERATOR = TOKENIZER.encode("0")[0], TOKENIZER.encode("+")[0]
_EQUALS, _ANSWER, _STOP = *TOKENIZER.encode("=#"), TOKENIZER.stop_ids[0]
HELD_OUT_SHARE = 0.1


@dataclasses.dataclass(frozen=True)
class Problems:
    """P chains. num_steps [P]; start [P]; moves [P, N], rows of the 21 (operator, operand) pairs.

    Source: ours.
    """

    num_steps: np.ndarray
    start: np.ndarray
    moves: np.ndarray

    def __len__(self) -> int:
        return len(self.num_steps)

    def take(self, rows: np.ndarray) -> "Problems":
        """The given rows. Source: ours."""
        return Problems(self.num_steps[rows], self.start[rows], self.moves[rows])

    def running(self) -> np.ndarray:
        """Value after each step, [P, N + 1]; entry 0 is the start. Source: ours."""
        values = [self.start]
        for step in range(self.moves.shape[1]):
            operator, operand = _OPERANDS[self.moves[:, step]].T
            last = values[-1]
            results = np.stack([last + operand, last - operand, last * operand])
            values.append(results[operator, np.arange(len(self))] % 10)
        return np.stack(values, axis=1)

    def answers(self) -> np.ndarray:
        """The right digit of each problem, [P]. Source: ours."""
        return self.running()[np.arange(len(self)), self.num_steps]

    def codes(self) -> np.ndarray:
        """A number that no two different problems share, whatever `max_steps`, [P] uint64.

        Source: ours: digits of base 22, none of them 0; 12 steps fit into 64 bits.
        """
        code = self.start.astype(np.uint64) + np.uint64(1)
        for step in range(self.moves.shape[1]):
            digit = (self.moves[:, step] + 1).astype(np.uint64)
            longer = code * np.uint64(len(_OPERANDS) + 1) + digit
            code = np.where(step < self.num_steps, longer, code)
        return code

    def held_out(self) -> np.ndarray:
        """True for the tenth of all problems that no training set may hold, [P]. Source: ours."""
        return held_out_by_hash(self.codes(), HELD_OUT_SHARE)


def _draw(rng: np.random.Generator, num_steps: np.ndarray, max_steps: int) -> Problems:
    shape = (len(num_steps), max_steps)
    moves = np.where(
        np.arange(max_steps) < num_steps[:, None], rng.integers(len(_OPERANDS), size=shape), 0
    )
    return Problems(num_steps, rng.integers(10, size=len(num_steps)), moves)


def make_problems(seed: int, num_problems: int, *, max_steps: int, held_out: bool) -> Problems:
    """Distinct problems of one split, the rungs 1..max_steps as even as their sizes allow.

    There are only 210 problems of one step; what that rung lacks goes to the longer ones.
    Raises ValueError when the split has fewer problems than asked for. Source: ours.
    """
    rng = np.random.default_rng([seed, int(held_out)])
    rungs, left = [], num_problems
    for steps in range(1, max_steps + 1):
        want = left // (max_steps + 1 - steps)
        if steps <= 3:  # small enough to list, so that "distinct" needs no luck
            grid = np.indices((10,) + (len(_OPERANDS),) * steps).reshape(steps + 1, -1)
            moves = np.zeros((grid.shape[1], max_steps), np.int64)
            moves[:, :steps] = grid[1:].T
            pool = Problems(np.full(grid.shape[1], steps), grid[0], moves)
            pool = pool.take(rng.permutation(len(pool)))
        else:
            share = HELD_OUT_SHARE if held_out else 1 - HELD_OUT_SHARE
            size = int(1.2 * want / share) + 64
            pool = _draw(rng, np.full(size, steps), max_steps)
            pool = pool.take(np.sort(np.unique(pool.codes(), return_index=True)[1]))
        pool = pool.take(np.flatnonzero(pool.held_out() == held_out)[:want])
        rungs.append(pool)
        left -= len(pool)
    if left:
        raise ValueError(
            f"asked for {num_problems} problems of up to {max_steps} steps, but this split has "
            f"{num_problems - left} to give; ask for fewer or raise task.max_steps"
        )
    merged = (
        np.concatenate(columns) for columns in zip(*map(dataclasses.astuple, rungs), strict=True)
    )
    return Problems(*merged)


def draw_training_problems(
    rng: np.random.Generator, num_problems: int, *, max_steps: int
) -> Problems:
    """Problems of the training split, the number of steps uniform, repeats allowed.

    Source: ours: supervised training sees far more problems than a prompt set holds.
    """
    drawn = _draw(rng, rng.integers(1, max_steps + 1, size=2 * num_problems), max_steps)
    kept = np.flatnonzero(~drawn.held_out())[:num_problems]
    # Fewer than half held out among twice as many, by chance: not in the lifetime of a run.
    return drawn.take(np.resize(kept, num_problems))


def prompt_tokens(problems: Problems) -> tuple[np.ndarray, np.ndarray]:
    """Prompts `start (operator operand)* =`, [P, 2N + 2] right-padded, and their lengths [P].

    Source: ours.
    """
    rows, max_steps = problems.moves.shape
    tokens = np.full((rows, 2 * max_steps + 2), TOKENIZER.pad_id, np.int32)
    operator, operand = _OPERANDS[problems.moves].transpose(2, 0, 1)
    tokens[:, 0] = _DIGIT + problems.start
    tokens[:, 1:-1:2] = _OPERATOR + operator
    tokens[:, 2:-1:2] = _DIGIT + operand
    lengths = 2 * problems.num_steps + 2
    tokens[np.arange(rows), lengths - 1] = _EQUALS
    tokens[np.arange(tokens.shape[1]) >= lengths[:, None]] = TOKENIZER.pad_id
    return tokens, lengths.astype(np.int32)


def quit_rates(num_steps: np.ndarray, *, slope: float, most: float) -> np.ndarray:
    """How often a hasty writer gives up after a step, [P]: min(most, slope (n - 1)).

    The longer the problem looks, the sooner he guesses; so difficulty can be read off the prompt
    and V(s_0) has something to find.
    Source: ours: at a constant rate the best possible critic explains 0.44 of the variance of
    the base policy's outcomes, at this one 0.59 (benchmarks/critic_ceiling.py).
    """
    return np.minimum(most, slope * (num_steps - 1))


def demonstrations(
    problems: Problems, rng: np.random.Generator, *, quit_rate: np.ndarray | float
) -> tuple[np.ndarray, np.ndarray]:
    """Responses to learn from, [P, 4N + 3] right-padded, and their lengths [P].

    After each step but the last, the writer quits with probability `quit_rate` (one number or
    [P]) and guesses the answer; 0 is the careful habit, every step written out. So a hasty
    writer completes n steps with probability (1 - quit_rate)^(n - 1).
    Source: ours: the coverage problem of S3AC (2610.35518) in miniature.
    """
    rows, max_steps = problems.moves.shape
    operator, operand = _OPERANDS[problems.moves].transpose(2, 0, 1)
    tokens = np.full((rows, 4 * max_steps + 3), TOKENIZER.pad_id, np.int32)
    tokens[:, 0:-3:4] = _OPERATOR + operator
    tokens[:, 1:-3:4] = _DIGIT + operand
    tokens[:, 2:-3:4] = _EQUALS
    tokens[:, 3:-3:4] = _DIGIT + problems.running()[:, 1:]
    quits = rng.random((rows, max_steps)) < np.reshape(quit_rate, (-1, 1))
    first = np.where(quits.any(axis=1), quits.argmax(axis=1) + 1, max_steps + 1)
    written = np.minimum(first, problems.num_steps)
    guess = rng.integers(10, size=rows)
    answer = np.where(written < problems.num_steps, guess, problems.answers())
    row, end = np.arange(rows), 4 * written
    tokens[row, end], tokens[row, end + 1], tokens[row, end + 2] = _ANSWER, _DIGIT + answer, _STOP
    tokens[np.arange(tokens.shape[1]) >= end[:, None] + 3] = TOKENIZER.pad_id
    return tokens, (end + 3).astype(np.int32)
