"""The verifier of sums: the last number decides, whatever stands before it; cut off is wrong."""

import numpy as np
import pytest

from s3ac_jax.core.types import Prompt, Rollout
from s3ac_jax.data.hf_tokenizer import HFTokenizer
from s3ac_jax.data.sums import Sums
from s3ac_jax.rewards.sums import SumsVerifier, last_integer
from tests.unit.data.hf_folder import IM_END, TOKENIZER

pytest.importorskip("tokenizers", reason="needs the extra hf")

ANSWERS = [
    ("7", 7), ("3 + 4 = 7", 7), ("The answer is 7.", 7), ("7!", 7), ("**7**", 7), ("x=7\n", 7),
    ("-5", -5), ("3-8=-5", -5), ("3 - 8 = -5.", -5), ("−5", -5), ("7-12", 12), ("7 - 12", 12),
    ("1,234", 1234), ("12,34", 34), ("3,4,5", 5), ("1,2345", 2345), ("1,234,567.", 1234567),
    ("2.5", None), ("7.0", None), ("7 apples, 3.5 pears", None), ("3.5 pears, 7 apples", 7),
    ("", None), ("seven", None), ("007", 7), ("9" * 30, None), ("-", None), ("7-", 7),
]  # fmt: skip


@pytest.mark.parametrize(("text", "number"), ANSWERS)
def test_last_integer(text, number):
    assert last_integer(text) == number


# 3 + 4, 8 - 3, 12 * 34
PROBLEMS = Sums(
    digits=np.array([1, 1, 2]), operator=np.array([0, 1, 2]), first=np.array([3, 8, 12]),
    second=np.array([4, 3, 34]), wording=np.zeros(3, int),
)  # fmt: skip


def rollout_of(tokenizer, responses, index, stopped):
    ids = [tokenizer.encode(text) for text in responses]
    lengths = np.array([len(one) for one in ids], np.int32)
    tokens = np.full((len(ids), max(lengths) + 2), 16, np.int32)  # "1": what must not be read
    for row, one in enumerate(ids):
        tokens[row, : len(one)] = one
    rows = len(ids)
    prompt = Prompt(
        np.array(index, np.int32), np.zeros((rows, 1), np.int32), np.ones(rows, np.int32)
    )
    logp = np.zeros(tokens.shape, np.float32)
    return Rollout(
        prompt, tokens, lengths, logp, np.array(stopped), np.zeros(tokens.shape, np.int32)
    )


CASES = [
    ("3 + 4 = 7<|im_end|>", 0, True, True),
    ("7<|im_end|>", 0, True, True),
    ("8<|im_end|>", 0, True, False),
    ("7", 0, False, False),  # cut off by the limit
    ("<|im_end|>", 0, True, False),
    ("7<|im_end|>", 1, True, False),
    ("8 - 3 = 5.<|im_end|>", 1, True, True),
    ("5<|endoftext|>", 1, True, True),
    ("12*34=408<|im_end|>", 2, True, True),
    ("408 or 409<|im_end|>", 2, True, False),
]


def test_grades():
    tokenizer = HFTokenizer(TOKENIZER)
    texts, index, stopped, right = zip(*CASES, strict=True)
    verifier = SumsVerifier(PROBLEMS, tokenizer)
    scored = verifier.grade(rollout_of(tokenizer, texts, index, stopped))
    assert scored.success.tolist() == list(right)
    assert scored.reward.tolist() == [1.0 if one else -1.0 for one in right]
    assert scored.reward.dtype == np.float32
    assert scored.valid.all()
    assert verifier.answers(rollout_of(tokenizer, texts, index, stopped)) == [
        "7", "7", "8", None, None, "7", "5", "5", "408", "409"
    ]  # fmt: skip
    assert verifier.shares(scored) == {}
    assert verifier.remark({"accuracy": 1.0}) == ""


def test_nothing_stopped_and_nothing_at_all():
    tokenizer = HFTokenizer(TOKENIZER)
    verifier = SumsVerifier(PROBLEMS, tokenizer)
    scored = verifier.grade(rollout_of(tokenizer, ["7", "5"], [0, 1], [False, False]))
    assert scored.success.tolist() == [False, False]


def test_the_stop_itself_is_no_part_of_the_answer():
    """A stop token may have text: then it must not be read."""

    class Wordy:
        def decode_all(self, rows, *, special=False):
            return [" ".join(map(str, row)) for row in rows]

    tokenizer = HFTokenizer(TOKENIZER)
    rollout = rollout_of(tokenizer, ["7<|im_end|>"], [0], [True])
    tokens = np.array([[7, IM_END, 9]], np.int32)
    scored = SumsVerifier(PROBLEMS, Wordy()).grade(
        Rollout(rollout.prompt, tokens, np.array([2]), rollout.logp, np.array([True]),
                rollout.version)
    )  # fmt: skip
    assert scored.success.tolist() == [True]
