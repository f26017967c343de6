"""What a model remembers of the Hugging Face folder that it came from, and whether one is whole."""

import collections
import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from s3ac_jax.io.hf_config import HfError, hf_from_spec, spec_from_hf
from s3ac_jax.io.hf_files import CONFIG, Entry, Folder, no_float
from s3ac_jax.io.hf_layout import HEAD, VALUE_HEAD, Experts, Tensor, skipped_group, tensors
from s3ac_jax.models.spec import DecoderSpec

_EMBED = "embed_tokens.weight"
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_SHOWN = 3
_NOTE = "value_head"


@dataclasses.dataclass(frozen=True)
class Origin:
    """Enough to write the folder again, names, layout, dtypes and config.json as they were.

    folder: where the tokenizer's files lie, if it is still there. config: text of config.json.
    dtypes: (pattern, dtype) pairs, "" for what no other names; in a pattern * is any number.
    tied_head: whether lm_head was stored though it is the embedding. skipped: (part, tensors).
    Hashable, because a module holds it as a static attribute.
    Source: ours: a checkpoint goes back to the tools it came from without a difference.
    """

    folder: str
    config: str
    dtypes: tuple[tuple[str, str], ...]
    prefix: str = "model."
    experts: Experts = "each"
    tied_head: bool = False
    skipped: tuple[tuple[str, int], ...] = ()

    def dtype_of(self, name: str) -> str:
        """How the tensor was stored, as safetensors spells it. Source: ours."""
        known = dict(self.dtypes)
        return known.get(name) or known.get(_pattern(name)) or known[""]

    @property
    def skipped_tensors(self) -> str:
        """How many tensors aren't text, and what they are of, for messages. Source: ours."""
        number = sum(number for _, number in self.skipped)
        groups = ", ".join(group for group, _ in self.skipped)
        return f"{number} tensor{'s' * (number != 1)} of {groups}"

    def to_json(self) -> str:
        """One line of JSON. Source: ours: a run keeps it beside its config."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> "Origin":
        """What `to_json` wrote. Raises HfError if it is something else. Source: ours."""
        try:
            fields = json.loads(text)
            for name in ("dtypes", "skipped"):
                fields[name] = tuple(map(tuple, fields[name]))
            return Origin(**fields)
        except (ValueError, TypeError, KeyError) as error:
            raise HfError(f"this is no record of a Hugging Face folder: {error}") from error


def _pattern(name: str) -> str:
    return _NUMBER.sub("*", name)


def _dtypes(entries: Mapping[str, Entry]) -> tuple[tuple[str, str], ...]:
    """The fewest words that say the dtype of every tensor."""
    usual = collections.Counter(entry.dtype for entry in entries.values()).most_common(1)[0][0]
    patterns: dict[str, set[str]] = collections.defaultdict(set)
    for name, entry in entries.items():
        patterns[_pattern(name)].add(entry.dtype)
    found = {"": usual}
    for name, entry in entries.items():
        alike = len(patterns[_pattern(name)]) == 1
        if entry.dtype != usual or not alike:
            found[_pattern(name) if alike else name] = entry.dtype
    return tuple(sorted(found.items()))


def survey(
    folder: Folder, spec: DecoderSpec, *, critic: bool = False
) -> tuple[list[Tensor], Origin]:
    """The folder's tensors in our order and what to keep of it, once it was found to be whole.

    Compares its tensors with those that `spec` has, critic or policy.

    Raises HfError naming the first three that are missing, surplus, of another shape or no floats,
    and a stored LM head that differs from the embedding it is said to be tied to.
    Source: ours: a checkpoint that half fits is told by name.
    """
    groups = {name: skipped_group(name) for name in folder.entries}
    text = {name: folder.entries[name] for name, group in groups.items() if group is None}
    skipped = collections.Counter(filter(None, groups.values()))
    tied_head = spec.tie_embeddings and HEAD in text and not critic
    experts: Experts = (
        "fused" if any(name.endswith(".experts.gate_up_proj") for name in text) else "each"
    )
    prefix = _prefix(folder, text)
    wanted = tensors(spec, prefix=prefix, experts=experts, head=VALUE_HEAD if critic else HEAD)
    compared = {name: entry for name, entry in text.items() if name != HEAD or not tied_head}
    if problems := _problems(folder, wanted, compared):
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise HfError(f"{folder.path}: {'; '.join(problems[:_SHOWN])}{more}")
    if tied_head:
        _compare_head(folder, f"{prefix}{_EMBED}")
    origin = Origin(
        folder=str(folder.path.resolve()),
        config=folder.config_text or "",
        dtypes=_dtypes(text),
        prefix=prefix,
        experts=experts,
        tied_head=tied_head,
        skipped=tuple(sorted(skipped.items())),
    )
    return wanted, origin


def _prefix(folder: Folder, text: Mapping[str, Entry]) -> str:
    found = [name for name in text if name.endswith(_EMBED)]
    if len(found) != 1:
        has = " and ".join(found) or "none"
        raise HfError(f"{folder.path} must hold one tensor called ...{_EMBED}, it has {has}")
    return found[0].removesuffix(_EMBED)


def _problems(folder: Folder, wanted: list[Tensor], text: Mapping[str, Entry]) -> list[str]:
    problems = []
    for tensor in wanted:
        entry = text.get(tensor.name)
        if entry is None:
            hint = {VALUE_HEAD: ", so this is no critic"}.get(tensor.name, "")
            problems.append(f"{tensor.name} {tensor.shape} is missing{hint}")
        elif entry.shape != tensor.shape:
            problems.append(
                f"{tensor.name} in {entry.file.name} is {entry.shape}, by {CONFIG} it must be "
                f"{tensor.shape}"
            )
        elif wrong := no_float(tensor.name, entry):
            problems.append(f"in {entry.file.name} {wrong}")
    known = {tensor.name for tensor in wanted}
    for name, entry in text.items():
        if name not in known:
            hint = {VALUE_HEAD: " (a critic's; load it as one)"}.get(name, "")
            problems.append(
                f"{name} {entry.shape} in {entry.file.name} has no place in this model{hint}"
            )
    return problems


def _compare_head(folder: Folder, embed: str) -> None:
    head, table = folder.entries[HEAD], folder.entries[embed]
    alike = (head.shape, head.dtype) == (table.shape, table.dtype)
    if not alike or not np.array_equal(folder.raw(HEAD), folder.raw(embed)):
        raise HfError(
            f"{head.file}: {HEAD} differs from {embed}, though tie_word_embeddings is true; set it "
            f"to false in {folder.path / CONFIG} if this model has an LM head of its own"
        )


def layout_of(
    spec: DecoderSpec, origin: Origin | None, dtype: str, *, critic: bool
) -> tuple[str, list[Tensor]]:
    """Text of config.json and the tensors that a model is saved as.

    origin: None for a model born here, of weights of `dtype`.

    Raises HfError if the model isn't what its origin's config says, or no class can express it.
    Source: ours: config.json and the tensors beside it always agree.
    """
    head = VALUE_HEAD if critic else HEAD
    if origin is None:
        experts: Experts = "fused" if spec.moe and spec.linear_attention else "each"
        config = hf_from_spec(spec, dtype)
        if critic:
            config = _critic_config(config)
        text = json.dumps(config, indent=2) + "\n"
        return text, tensors(spec, experts=experts, head=head)
    try:
        config = json.loads(origin.config)
    except ValueError as error:
        raise HfError(f"the origin's {CONFIG} is no JSON: {error}") from error
    here, there = (
        tensors(one, prefix=origin.prefix, experts=origin.experts, head=head)
        for one in (spec, spec_from_hf(config, f"the origin's {CONFIG}"))
    )
    shapes = [{tensor.name: tensor.shape for tensor in one} for one in (here, there)]
    for name in {**shapes[0], **shapes[1]}:
        ours, theirs = (one.get(name, "absent") for one in shapes)
        if ours != theirs:
            raise HfError(
                f"{name} is {ours} in this model, but {theirs} by the {CONFIG} that it is to be "
                "saved with"
            )
    if critic and _NOTE not in config:
        return json.dumps(_critic_config(config), indent=2) + "\n", here
    return origin.config, here


def _critic_config(config: dict[str, Any]) -> dict[str, Any]:
    """The backbone's class, so that AutoModel reads it, and a word on the tensor beside it."""
    classes = config.get("architectures") or []
    bare = [re.sub("For(CausalLM|ConditionalGeneration)$", "Model", name) for name in classes]
    note = {"tensor": VALUE_HEAD, "bias": False, "input": "last hidden state, after the final norm"}
    return {**config, "architectures": bare, _NOTE: note}
