"""The one place that makes a task: splits, stop ids, demonstrations."""

import dataclasses

import numpy as np
import pytest

from s3ac_jax.config.run import StartConfig
from s3ac_jax.config.tasks import Ladder, Sums
from s3ac_jax.data import arithmetic
from s3ac_jax.train import sft
from s3ac_jax.train.build import build
from s3ac_jax.train.tasks import make_task
from tests.helpers import run_config, tiny_spec
from tests.unit.data.hf_folder import IM_END, folder


def test_the_ladder():
    config = run_config()
    task = make_task(config)
    assert isinstance(config.task, Ladder)
    assert task.tokenizer is arithmetic.TOKENIZER
    for split, number, held_out in ((task.train, 32, False), (task.held_out, 8, True)):
        problems = arithmetic.make_problems(0, number, max_steps=2, held_out=held_out)
        tokens, lengths = arithmetic.prompt_tokens(problems)
        np.testing.assert_array_equal(split.prompts.tokens, tokens)
        np.testing.assert_array_equal(split.prompts.num_tokens, lengths)
        np.testing.assert_array_equal(split.verifier.problems.moves, problems.moves)
    called = task.train.prompts.called
    assert (called.heading, called.scale) == ("steps", True)
    assert dict(called.names) == {1: "steps_1", 2: "steps_2"}


def test_demonstrations_are_right_unless_hasty():
    task = make_task(run_config())
    read = task.tokenizer.decode
    for most, shares in ((0.0, (1.0, 1.0)), (1.0, (0.0, 0.7))):
        made = task.demonstrate(np.random.default_rng(0), 64, slope=1.0, most=most).rollout
        right = 0
        for row in range(64):
            prompt = read(made.prompt.tokens[row, : made.prompt.num_tokens[row]])
            response = read(made.tokens[row, : made.num_tokens[row]])
            value = int(prompt[0])
            for operator, operand in zip(prompt[1:-1:2], prompt[2:-1:2], strict=True):
                operand = int(operand)
                value = {"+": value + operand, "-": value - operand, "*": value * operand}[operator]
            right += response[-2:] == f"#{value % 10}"
        assert shares[0] <= right / 64 <= shares[1]


def sums_config(path, **model):
    config = run_config(model=tiny_spec(num_layers=2, **{"vocab_size": 312} | model))
    shares = dataclasses.replace(config.value_pretraining, early_prompts=0, middle_prompts=0)
    return dataclasses.replace(
        config,
        task=Sums(max_prompt_tokens=23, num_train=32, num_held_out=8, digits=(1,)),
        start=StartConfig(str(path)),
        value_pretraining=shares,
    )


@pytest.fixture
def path(tmp_path):
    pytest.importorskip("jinja2", reason="needs the extra hf")
    pytest.importorskip("tokenizers", reason="needs the extra hf")
    made = folder(tmp_path / "hf")
    (made / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    return made


def test_sums_have_the_folders_tokenizer(path):
    task = make_task(sums_config(path))
    assert task.tokenizer.stop_ids == (IM_END,)
    assert (len(task.train.prompts), len(task.held_out.prompts)) == (32, 8)
    assert task.train.prompts.tokens.shape == (32, 23)
    asked = {task.tokenizer.decode(row).split("?")[0] for row in task.train.prompts.tokens}
    assert not asked & {
        task.tokenizer.decode(x).split("?")[0] for x in task.held_out.prompts.tokens
    }
    assert task.demonstrate is None


def test_a_task_without_demonstrations_has_no_warm_start(path):
    parts = build(sums_config(path))
    assert parts.rollout.engine.stop_ids == (IM_END,)
    with pytest.raises(ValueError, match="no demonstrations"):
        sft.train_policies(parts, lambda done, metrics: None)


def test_a_model_with_too_few_tokens_is_refused(path):
    with pytest.raises(ValueError, match=r"model\.vocab_size must be at least 312, .* got 311"):
        make_task(sums_config(path, vocab_size=311))


def test_a_build_takes_the_task_over(path):
    first = build(sums_config(path))
    assert build(dataclasses.replace(first.config, seed=5), like=first).task is first.task
    other = dataclasses.replace(first.config, task=dataclasses.replace(first.config.task, seed=1))
    assert build(other, like=first).task is not first.task
