"""Packing: every response found once, masks from lengths, a bound that always holds."""

import dataclasses

import numpy as np
import pytest

from s3ac_jax.data.packing import pack, worst_case_rows
from tests.helpers import make_scored, sequence_of


def find_all(packed):
    """{response: (row, columns)} by looking at segment ids only."""
    found = {}
    for row, ids in enumerate(np.asarray(packed.segment_ids)):
        for segment in range(1, ids.max() + 1):
            columns = np.flatnonzero(ids == segment)
            assert columns.size, "segment ids of a row are 1, 2, ... without a gap"
            assert (np.diff(columns) == 1).all(), "a segment is one piece"
            numbers = set(packed.response[row, columns].tolist())
            assert len(numbers) == 1
            (number,) = numbers
            assert number not in found, "every response once"
            found[number] = (row, columns)
    return found


@pytest.mark.parametrize("seed", range(6))
def test_every_response_is_laid_out_once(seed):
    rng = np.random.default_rng(seed)
    count = 13
    scored = make_scored(
        seed, rng.integers(1, 7, size=count), rng.integers(1, 12, size=count), vocab=3
    )  # vocabulary of padding, stop and one more: ids say nothing about lengths
    rows = rng.permutation(count)[: rng.integers(5, count + 1)]
    max_rows = worst_case_rows(len(rows), pack_tokens=25, longest=17, multiple=4)
    packed = pack(scored, rows, pack_tokens=25, max_rows=max_rows)
    found = find_all(packed)
    assert sorted(found) == sorted(rows.tolist())
    used = np.zeros((max_rows, 25), bool)
    for number, (row, columns) in found.items():
        used[row, columns] = True
        at = (row, columns)
        prompt = int(scored.rollout.prompt.num_tokens[number])
        length = int(scored.rollout.num_tokens[number])
        assert packed.tokens[at].tolist() == sequence_of(scored, number).tolist()
        assert packed.positions[at].tolist() == list(range(prompt + length))
        assert packed.mask[at].tolist() == [False] * prompt + [True] * length
        assert (packed.num_trainable[at] == length).all()
        want = [0.0] * (prompt + length - 1) + [scored.reward[number]]
        assert packed.reward[at].tolist() == want
        logp = scored.rollout.logp[number, :length]
        np.testing.assert_array_equal(packed.logp_rollout[at], [0.0] * prompt + logp.tolist())
    for name, fill in (
        ("tokens", 0), ("segment_ids", 0), ("positions", 0), ("mask", False), ("response", -1),
        ("num_trainable", 0), ("reward", 0.0), ("logp_rollout", 0.0),
    ):  # fmt: skip
        assert (getattr(packed, name)[~used] == fill).all(), name
    # The rows that hold something come first.
    assert used.any(axis=1).tolist() == [True] * int(packed.rows) + [False] * (
        max_rows - int(packed.rows)
    )
    assert packed.routing is None
    dtypes = {name: str(x.dtype) for name, x in vars(packed).items() if name != "routing"}
    ints = ("tokens", "segment_ids", "positions", "response", "num_trainable", "rows")
    assert dtypes == dict.fromkeys(ints, "int32") | {
        "mask": "bool", "reward": "float32", "logp_rollout": "float32"
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
def test_every_token_takes_its_experts_along(seed):
    rng = np.random.default_rng(seed)
    count, prompt_room, response_room = 9, 6, 11
    prompt = rng.integers(1, prompt_room + 1, size=count)
    prompt[0] = prompt_room
    response = rng.integers(1, response_room + 1, size=count)
    response[0] = response_room
    scored = make_scored(seed, prompt, response)
    # Who and where: response, place in the sequence, layer and rank in one number.
    shape = (count, prompt_room + response_room, 3, 2)
    recorded = np.arange(np.prod(shape), dtype=np.int16).reshape(shape)
    for n in range(count):
        recorded[n, prompt[n] + response[n] - 1 :] = -1  # the last token is never read
    rollout = dataclasses.replace(scored.rollout, routing=recorded)
    rows = rng.permutation(count)[:7]
    packed = pack(dataclasses.replace(scored, rollout=rollout), rows, pack_tokens=20, max_rows=8)
    assert packed.routing.shape == (8, 20, 3, 2)
    assert packed.routing.dtype == np.int16
    for number, (row, columns) in find_all(packed).items():
        want = recorded[number, : len(columns)]
        np.testing.assert_array_equal(packed.routing[row, columns], want)
        assert (want[:-1] >= 0).all()
    np.testing.assert_array_equal(packed.routing[packed.segment_ids == 0], -1)


def test_a_fractional_reward_survives():
    scored = make_scored(0, [2, 2], [3, 3])
    scored.reward[:] = 0.37, -0.5
    packed = pack(scored, np.arange(2), pack_tokens=5, max_rows=2)
    assert sorted(packed.reward[packed.reward != 0].tolist()) == [-0.5, np.float32(0.37)]


def test_longest_first_fills_the_gaps():
    scored = make_scored(1, [1] * 6, [1, 5, 3, 7, 5, 3])  # 2, 6, 4, 8, 6, 4 tokens: 3 rows of 10
    packed = pack(scored, np.arange(6), pack_tokens=10, max_rows=6)
    assert packed.rows == 3


def test_order_of_the_rows_asked_for_is_not_the_order_of_the_response_numbers():
    scored = make_scored(2, [2, 3], [4, 4])
    a = pack(scored, np.array([1, 0]), pack_tokens=7, max_rows=2)
    b = pack(scored, np.array([1]), pack_tokens=7, max_rows=2)
    assert find_all(b).keys() == {1}
    np.testing.assert_array_equal(a.tokens[find_all(a)[1]], b.tokens[find_all(b)[1]])


def lengths_of(kind, rng, count, longest):
    if kind == "random":
        return rng.integers(2, longest + 1, size=count)
    if kind == "all longest":
        return np.full(count, longest)
    if kind == "half and a bit":  # nothing pairs with anything
        return np.full(count, longest // 2 + 1)
    return np.where(np.arange(count) % 2, longest, longest // 2 + 1)


@pytest.mark.parametrize("kind", ["random", "all longest", "half and a bit", "mixed"])
@pytest.mark.parametrize("seed", range(8))
def test_worst_case_rows_are_enough(kind, seed):
    rng = np.random.default_rng(seed)
    count, longest = int(rng.integers(1, 40)), int(rng.integers(4, 20))
    pack_tokens = int(rng.integers(longest, 5 * longest))
    bound = worst_case_rows(count, pack_tokens=pack_tokens, longest=longest, multiple=1)
    total = lengths_of(kind, rng, count, longest)
    prompt = np.minimum(rng.integers(1, 4, size=count), total - 1)
    packed = pack(
        make_scored(seed, prompt, total - prompt), np.arange(count), pack_tokens=pack_tokens,
        max_rows=bound,
    )  # fmt: skip
    assert len(find_all(packed)) == count
    if kind == "all longest":
        assert packed.rows == bound  # and no more than enough


@pytest.mark.parametrize(
    ("count", "pack_tokens", "multiple", "want"),
    [(7, 10, 1, 7), (7, 20, 1, 4), (7, 29, 4, 4), (9, 30, 4, 4), (1, 10, 8, 8)],
)
def test_worst_case_rows_by_hand(count, pack_tokens, multiple, want):
    got = worst_case_rows(count, pack_tokens=pack_tokens, longest=10, multiple=multiple)
    assert got == want


def test_messages():
    with pytest.raises(ValueError, match=r"pack_tokens = 9 .*10 tokens.*raise train.pack_tokens"):
        worst_case_rows(3, pack_tokens=9, longest=10, multiple=1)
    scored = make_scored(3, [5] * 3, [5] * 3)
    with pytest.raises(ValueError, match="3 responses need 3 rows, room is for 2"):
        pack(scored, np.arange(3), pack_tokens=10, max_rows=2)
