"""Responses of which everything is kept, against loops over the packed rows."""

import dataclasses
import json
import math

import numpy as np
import pytest

from s3ac_jax.data import arithmetic
from s3ac_jax.parallel.hosts import to_host
from s3ac_jax.train.trajectories import chosen, read_tokens, rounded, trajectory_lines
from tests.helpers import make_scored
from tests.unit.train.small import PROMPTS, RESPONSES, cells, nine
from tests.unit.train.small_tick import HALVES, prompt_set, tick_of


def outcomes(success, lengths, valid=None):
    scored = make_scored(1, [2] * len(lengths), lengths)
    right = np.array(success, bool)
    every = np.ones(len(lengths), bool) if valid is None else np.array(valid, bool)
    return dataclasses.replace(
        scored, success=right, reward=np.where(right, 1.0, -1.0), valid=every
    )


def test_wrong_and_right_short_and_long_ones_are_chosen():
    #                   0  1  2  3  4  5  6  7
    scored = outcomes([1, 0, 1, 0, 1, 0, 1, 0], [3, 9, 1, 2, 7, 5, 4, 8])
    # Wrong ones by length: 3 5 7 1; right ones: 2 0 6 4.
    assert chosen(scored, 2).tolist() == [3, 4]
    assert chosen(scored, 3).tolist() == [3, 1, 4]
    assert chosen(scored, 8).tolist() == chosen(scored, 99).tolist() == [3, 5, 7, 1, 2, 0, 6, 4]
    assert chosen(scored, 1).tolist() == [3]
    assert chosen(scored, 0).tolist() == []


@pytest.mark.parametrize("count", range(2, 30))
def test_none_is_chosen_twice_and_both_sorts_are_there(count):
    rng = np.random.default_rng(count)
    scored = outcomes(np.arange(25) % 5 == 0, rng.integers(1, 9, size=25))
    found = chosen(scored, count).tolist()
    assert len(set(found)) == len(found) == min(count, 25)
    assert {bool(scored.success[n]) for n in found} == {True, False}


def test_what_was_not_graded_is_not_chosen():
    valid = [1, 0, 1, 0, 0]
    scored = outcomes([1, 1, 0, 0, 0], [1, 2, 3, 4, 5], valid)
    assert chosen(scored, 5).tolist() == [2, 0]
    assert chosen(scored, 1).tolist() == [2]
    assert chosen(dataclasses.replace(scored, valid=scored.valid & False), 3).tolist() == []


def lines_of(numbers, scored=None, *, values=True, tick=3):
    numbers = np.array(numbers)
    read = to_host(read_tokens(*tick_of(values), numbers))
    tokenizer = arithmetic.TOKENIZER
    return trajectory_lines(tick, scored or nine(), numbers, read, prompt_set(), tokenizer)


@pytest.mark.parametrize("values", [True, False])
def test_every_token_has_its_own_numbers(values):
    numbers = [6, 2, 1, 0]  # of both halves, some in a row with others, one of a single token
    parts, scores, actor = tick_of(values)
    lines = lines_of(numbers, values=values)
    assert [line["response"] for line in lines] == numbers
    for n, line in zip(numbers, lines, strict=True):
        half = next(k for k, members in enumerate(HALVES) if n in members)
        row, columns = cells(parts[half], n)
        want = {name: [] for name in ("logp_rollout", "logp_old", "advantage", "weight", "ratio")}
        v = []
        for place, (b, t) in enumerate(zip(row, columns, strict=True)):
            mu, logp = float(nine().rollout.logp[n, place]), float(scores[half][0][b, t])
            want["logp_rollout"].append(mu)
            want["logp_old"].append(logp)
            want["ratio"].append(math.exp(logp - mu))
            want["advantage"].append(float(actor[half].advantages[b, t]))
            want["weight"].append(float(actor[half].weights[b, t]))
            if values:
                v.append(float(scores[half][1][b, t]))
        for name, numbers_of_tokens in want.items():
            assert line[name] == pytest.approx(numbers_of_tokens, rel=6e-5, abs=1e-12), name
            assert len(line[name]) == RESPONSES[n]
        assert line["value"] == (pytest.approx(v, rel=6e-5) if values else None)


def test_a_line_says_what_was_asked_and_answered():
    scored = dataclasses.replace(nine(), reasons=np.array([f"because {n}" for n in range(9)]))
    rollout = scored.rollout
    for line in lines_of([8, 3], scored):
        n = line["response"]
        assert line["tick"] == 3
        assert line["prompt"] == n
        assert line["level"] == f"steps_{PROMPTS[n]}"
        assert line["prompt_tokens"] == rollout.prompt.tokens[n, : PROMPTS[n]].tolist()
        assert line["tokens"] == rollout.tokens[n, : RESPONSES[n]].tolist()
        assert line["stopped"] == bool(rollout.stopped[n])
        assert line["success"] == bool(scored.success[n])
        assert line["reward"] == (1.0 if scored.success[n] else -1.0)
        assert line["reason"] == f"because {n}"
        for ids, texts in (("tokens", "pieces"), ("prompt_tokens", "prompt_pieces")):
            alphabet = arithmetic.TOKENIZER.alphabet
            want = ["", "<stop>", *alphabet]  # padding, end of text, characters
            assert line[texts] == [want[one] for one in line[ids]]
    assert lines_of([8])[0]["reason"] is None


def test_lines_are_json_without_nan():
    parts, scores, actor = tick_of()
    half, n = 1, 6
    at = tuple(x[2] for x in cells(parts[half], n))
    bad = np.array(scores[half][0])
    bad[at] = np.nan
    scores[half] = bad, scores[half][1]
    read = to_host(read_tokens(parts, scores, actor, np.array([n])))
    (line,) = trajectory_lines(0, nine(), np.array([n]), read, prompt_set(), arithmetic.TOKENIZER)
    assert json.loads(json.dumps(line, allow_nan=False)) == line
    assert [place for place, x in enumerate(line["ratio"]) if x is None] == [2]
    assert [place for place, x in enumerate(line["logp_old"]) if x is None] == [2]
    assert None not in line["value"]


def test_a_number_asked_for_twice_is_read_twice():
    """Fewer responses than are kept: the shape stays the same."""
    once, twice = (to_host(read_tokens(*tick_of(), np.array(n))) for n in ([6, 2], [6, 2, 6]))
    for name, rows in once.items():
        np.testing.assert_array_equal(twice[name], rows[[0, 1, 0]])


def test_numbers_have_five_digits():
    x = np.array([1 / 3, -123456.7, 1e-12, 0, np.nan, np.inf, -np.inf], np.float32)
    assert rounded(x) == [0.33333, -123460.0, 1e-12, 0.0, None, None, None]
    assert rounded(np.zeros(0)) == []
