"""The arithmetic ladder, judged by its text: parsed and worked in plain python."""

import re

import numpy as np
import pytest

from s3ac_jax.data import arithmetic
from s3ac_jax.data.prompts import arithmetic_prompts

DECODE = arithmetic.TOKENIZER.decode
STEP = re.compile(r"([+\-*])(\d)")


def worked(text):
    """`7+4-9=` -> the value after each step, left to right, last digit only."""
    assert re.fullmatch(r"\d([+\-*]\d)+=", text), text
    values = [int(text[0])]
    for operator, operand in STEP.findall(text):
        results = {
            "+": values[-1] + int(operand),
            "-": values[-1] - int(operand),
            "*": values[-1] * int(operand),
        }
        values.append(results[operator] % 10)
    return values


def texts(problems):
    tokens, lengths = arithmetic.prompt_tokens(problems)
    assert tokens.dtype == lengths.dtype == np.int32
    for row, length in zip(tokens, lengths, strict=True):
        assert (row[:length] >= 2).all()
        assert (row[length:] == arithmetic.TOKENIZER.pad_id).all()
    return [DECODE(row[:length]) for row, length in zip(tokens, lengths, strict=True)]


@pytest.fixture(scope="module")
def problems():
    return arithmetic.make_problems(0, 2000, max_steps=5, held_out=False)


def test_answers_and_running_values_are_those_of_the_text(problems):
    running, answers = problems.running(), problems.answers()
    for n, text in enumerate(texts(problems)):
        values = worked(text)
        assert len(values) == problems.num_steps[n] + 1
        assert running[n, : len(values)].tolist() == values, text
        assert answers[n] == values[-1], text


def test_every_step_permutes_the_digits_and_answers_are_uniform(problems):
    moves = {step for text in texts(problems) for step in STEP.findall(text)}
    assert len(moves) == 21
    for operator, operand in moves:
        ends = {worked(f"{start}{operator}{operand}=")[1] for start in range(10)}
        assert ends == set(range(10)), (operator, operand)
    many = arithmetic.make_problems(1, 20000, max_steps=5, held_out=False)
    share = np.bincount(many.answers(), minlength=10) / len(many)
    # 20,000 draws: one std of a share is 0.0021.
    np.testing.assert_allclose(share, 0.1, atol=0.009)


def test_problems_are_distinct_and_the_rungs_even(problems):
    seen = texts(problems)
    assert len(set(seen)) == len(seen) == 2000
    counts = np.bincount(problems.num_steps)
    # The first rung has 210 problems, 9 in 10 of them for training; the others share the rest.
    assert counts[0] == 0
    assert 160 < counts[1] < 210
    assert counts[2:].min() >= (2000 - counts[1]) // 4
    assert counts[2:].max() <= (2000 - counts[1]) // 4 + 1


@pytest.mark.parametrize("seeds", [(0, 0), (0, 1), (5, 2)])
def test_held_out_problems_are_in_no_training_set(seeds):
    train = arithmetic.make_problems(seeds[0], 3000, max_steps=3, held_out=False)
    held_out = arithmetic.make_problems(seeds[1], 400, max_steps=3, held_out=True)
    assert not set(texts(train)) & set(texts(held_out))
    rng = np.random.default_rng(seeds[0])
    drawn = arithmetic.draw_training_problems(rng, 5000, max_steps=3)
    assert len(drawn) == 5000
    assert not set(texts(drawn)) & set(texts(held_out))
    share = np.bincount(drawn.num_steps, minlength=4)[1:] / 5000
    np.testing.assert_allclose(share, 1 / 3, atol=0.03)


def test_a_tenth_is_held_out_and_every_problem_is_on_one_side():
    one = [
        arithmetic.make_problems(seed, count, max_steps=2, held_out=held_out)
        for seed, count, held_out in ((0, 4000, False), (1, 400, True))
    ]
    every = arithmetic.draw_training_problems(np.random.default_rng(0), 1, max_steps=2)
    grid = np.indices((10, 21, 21)).reshape(3, -1)
    every = arithmetic.Problems(np.full(4410, 2), grid[0], grid[1:].T)
    np.testing.assert_allclose(every.held_out().mean(), 0.1, atol=0.015)
    assert not one[0].held_out().any()
    assert one[1].held_out().all()
    assert len(set(every.codes().tolist())) == 4410


def test_same_seed_same_problems():
    make = arithmetic.make_problems
    first, again = (make(3, 500, max_steps=4, held_out=False) for _ in range(2))
    assert texts(first) == texts(again)
    assert texts(first) != texts(make(4, 500, max_steps=4, held_out=False))


@pytest.mark.parametrize(("count", "steps", "held_out"), [(211, 1, False), (60, 1, True)])
def test_more_problems_than_there_are(count, steps, held_out):
    with pytest.raises(ValueError, match=rf"asked for {count} problems.*raise task.max_steps"):
        arithmetic.make_problems(0, count, max_steps=steps, held_out=held_out)


def test_take(problems):
    rows = np.array([7, 7, 1900])
    every = texts(problems)
    assert texts(problems.take(rows)) == [every[7], every[7], every[1900]]


def demonstrated(problems, rng, quit_rate):
    tokens, lengths = arithmetic.demonstrations(problems, rng, quit_rate=quit_rate)
    stop = arithmetic.TOKENIZER.stop_ids[0]
    responses = []
    for row, length in zip(tokens, lengths, strict=True):
        assert row[length - 1] == stop
        assert (row[: length - 1] >= 2).all()
        assert (row[length:] == arithmetic.TOKENIZER.pad_id).all()
        responses.append(DECODE(row[:length]))
    return responses


def test_careful_demonstrations_write_every_step_and_are_right(problems):
    responses = demonstrated(problems, np.random.default_rng(0), 0.0)
    for prompt, response in zip(texts(problems), responses, strict=True):
        values = worked(prompt)
        steps = zip(STEP.findall(prompt), values[1:], strict=True)
        want = "".join(f"{op}{operand}={value}" for (op, operand), value in steps)
        assert response == f"{want}#{values[-1]}"
        assert len(response) == 4 * (len(values) - 1) + 2


@pytest.mark.parametrize("quit_rate", [0.3, 0.7])
def test_hasty_demonstrations_quit_and_guess(quit_rate):
    rng = np.random.default_rng(1)
    problems = arithmetic.draw_training_problems(rng, 20000, max_steps=4)
    responses = demonstrated(problems, rng, quit_rate)
    careful = demonstrated(problems, rng, 0.0)
    written = np.array([response.index("#") // 4 for response in responses])
    right = np.array([int(r[-1]) for r in responses]) == problems.answers()
    for response, want, n in zip(responses, careful, written, strict=True):
        assert response[: 4 * n] == want[: 4 * n]
        assert response[4 * n] == "#"
        assert len(response) == 4 * n + 2
    for steps in (1, 2, 3, 4):
        mine = problems.num_steps == steps
        # Standard deviation of each frequency: at most 0.5 / sqrt(5000) = 0.007.
        for n in range(1, steps + 1):
            want = (1 - quit_rate) ** (n - 1) * (quit_rate if n < steps else 1.0)
            np.testing.assert_allclose((written[mine] == n).mean(), want, atol=0.025)
        assert right[mine & (written == steps)].all()
    # A guess is any of the ten digits, and right one time in ten.
    guessed = written < problems.num_steps
    np.testing.assert_allclose(right[guessed].mean(), 0.1, atol=0.015)
    guesses = np.array([int(response[-1]) for response in responses])[guessed]
    share = np.bincount(guesses, minlength=10) / len(guesses)
    np.testing.assert_allclose(share, 0.1, atol=0.015)


def test_quit_rate_per_problem():
    rates = arithmetic.quit_rates(np.array([1, 2, 3, 4, 8]), slope=0.25, most=0.6)
    np.testing.assert_allclose(rates, [0.0, 0.25, 0.5, 0.6, 0.6])
    rng = np.random.default_rng(2)
    problems = arithmetic.make_problems(0, 400, max_steps=4, held_out=False)
    rate = np.where(np.arange(400) % 2, 1.0, 0.0)
    for n, response in enumerate(demonstrated(problems, rng, rate)):
        steps = response.index("#") // 4
        assert steps == (1 if n % 2 else problems.num_steps[n])


def test_prompt_set(problems):
    prompts = arithmetic_prompts(problems)
    assert len(prompts) == 2000
    index = np.array([5, 1999, 5])
    taken = prompts.take(index)
    assert taken.index.tolist() == index.tolist()
    every = texts(problems)
    for row, length, n in zip(taken.tokens, taken.num_tokens, index, strict=True):
        assert DECODE(row[:length]) == every[n]
        assert prompts.levels[n] == len(STEP.findall(every[n]))
