"""The boundary: a ConfigDict becomes a RunConfig, or one line that says what is wrong with it."""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ml_collections import config_dict
from ml_collections.config_dict import ConfigDict, RequiredValueError

from s3ac_jax.algos.recipe import RECIPES, Recipe
from s3ac_jax.config.run import RunConfig
from s3ac_jax.core.errors import RunError

# What a resumed run may change: how long it goes on, what it looks at, and how the work is shared
# out, which changes numbers by rounding at most; never what it computes.
FREE_KEYS: set[str] = {
    "cadence.evaluate_every",
    "cadence.keep_checkpoints",
    "cadence.save_every",
    "evaluation.bootstrap",
    "evaluation.chunk_rows",
    "evaluation.every",
    "mesh",
    "model.attention",
    "model.remat",
    "model.remat_policy",
    "rollout.addresses",
    "rollout.apart",
    "rollout.insert_batch",
    "rollout.max_in_flight",
    "rollout.mesh",
    "rollout.prefill_chunk",
    "rollout.scan_layers",
    "rollout.server_patience_s",
    "rollout.slots",
    "rollout.steps_per_dispatch",
    "rollout.tls_ca",
    "rollout.token_file",
    "rollout.weights_folder",
    "task.graders",
    "train.micro_rows",
    "train.num_ticks",
    "train.offload",
    "watch",
}
# With rollout.ahead=1 they say before which ticks nothing is made ahead.
_WHEN_SAVED = {"cadence.save_every", "evaluation.every"}

_NAMES = {bool: "a bool", float: "a float", int: "an int", str: "a str"}


class ConfigError(RunError):
    """A config that can't be run; the message is one line for the user.

    Source: ours: a typo costs a second and says where it is.
    """


def from_config_dict(cd: ConfigDict) -> RunConfig:
    """The validated run that `cd` describes. Fields with a default may be left out.

    recipe: {"name": one of RECIPES, column: {"kind": kind, field: value}, ...}; what it leaves
    out is as in the named recipe, or for a column of another class as that class has it.

    Raises ConfigError: unknown or missing key, wrong type, impossible combination.
    Source: ours: behind this line a config is frozen, typed and whole.
    """
    return section(RunConfig, cd)


def to_dict(config: RunConfig) -> dict[str, Any]:
    """Every number of the run as JSON: dicts, lists, text, numbers, None.

    What may be of several classes (the task, the columns of the recipe) carries its "kind": two
    guards may share the names of their fields.

    Source: ours: what config.json keeps and a resumed run is compared with.
    """
    return {**plain(config), "recipe": recipe_dict(config.recipe)}


def to_config_dict(config: Any, *, recipe: str = "") -> ConfigDict:
    """What a config file returns for this RunConfig, or another config without a recipe.

    recipe: the name that config.recipe goes by. Every key is there, and a None can be set on the
    command line where it stands for a number or a text.
    Source: ours: a config file is checked where it is written.
    """

    def absent(hint: Any) -> Any:
        kind = next((one for one in typing.get_args(hint) if one in _NAMES), None)
        return None if kind is None else config_dict.placeholder(kind)

    # A list can't be set on the command line, a tuple can.
    tree = plain(config, absent=absent, several=tuple)
    if recipe:
        columns = recipe_dict(config.recipe, absent=absent, several=tuple)
        tree["recipe"] = {"name": recipe, **columns}
    return ConfigDict(tree)


def kept_run(kept: Mapping[str, Any]) -> RunConfig:
    """The run of which `to_dict` gave this, in this version or an earlier one.

    Fields that came since are as they default. Raises ConfigError when it can't be read.
    Source: ours: a run of before can go on.
    """
    if not isinstance(kept, Mapping):
        raise ConfigError(f"the config must be a section with keys, {_got(kept)}")
    try:
        recipe = _spelled_recipe(kept.get("recipe"), "recipe")
    except TypeError as error:  # a column is missing
        raise ConfigError(f"recipe: {error}") from error
    return section(RunConfig, {**kept, "recipe": recipe})


def free_keys(config: RunConfig) -> set[str]:
    """The dotted names of what may be another in the config of a run that goes on.

    Source: ours: a resumed run must be the same run.
    """
    return FREE_KEYS - _WHEN_SAVED if config.rollout.ahead else FREE_KEYS


def completed(kept: dict[str, Any]) -> dict[str, Any]:
    """What `to_dict` gave in an earlier version, as it would give it now.

    As it is where this version can't read it. Source: ours: a run of before can go on.
    """
    try:
        return to_dict(kept_run(kept))
    except ConfigError:
        return kept


def recipe_dict(recipe: Recipe, **spelled: Any) -> dict[str, Any]:
    """The columns of a recipe as nested dicts, each with its "kind".

    spelled: as for `plain`.
    Source: ours: what a config file says of a recipe, and what config.json keeps of it.
    """
    columns = plain(recipe, **spelled)
    for column, node in columns.items():
        if isinstance(node, dict):
            columns[column] = {"kind": type(getattr(recipe, column)).__name__, **node}
    return columns


def closest(name: object, known: Iterable[object]) -> str:
    """The end of a sentence on an unknown name: a likely spelling, or all that are known.

    Source: ours: one line has to say what to do.
    """
    names = list(map(str, known))
    close = difflib.get_close_matches(str(name), names, 1, 0.6)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(names) or 'none'}"


def section(cls: type, node: Any, where: str = "", base: Any = None) -> Any:
    """A `cls`, by the annotations of its fields, from the keys of `node`.

    where: name of the section, for messages. base: the instance that gives the keys left out.
    Raises ConfigError naming the key. Source: ours.
    """
    if not isinstance(node, ConfigDict | Mapping):
        raise ConfigError(f"{where or 'the config'} must be a section with keys, {_got(node)}")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    if unknown := [key for key in node if key not in fields]:
        name = _join(where, unknown[0])
        raise ConfigError(f"unknown key {name}; {closest(unknown[0], fields)}")
    missing = [
        _join(where, name)
        for name, field in fields.items()
        if name not in node
        and base is None
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"missing from the config file: {', '.join(missing)}")
    hints = typing.get_type_hints(cls)
    values = {name: _field(hints[name], node, name, where) for name in fields if name in node}
    return _made(cls if base is None else base, values, where)


def _made(what: Any, values: dict[str, Any], where: str) -> Any:
    """An instance of the class, or a copy of the instance, `what` with these fields."""
    try:
        return what(**values) if isinstance(what, type) else dataclasses.replace(what, **values)
    except ValueError as error:
        message = str(error)
        raise ConfigError(message if where in message else f"{where}: {message}") from error


def _recipe(node: Any, where: str) -> Recipe:
    if not isinstance(node, ConfigDict | Mapping):
        raise ConfigError(f"{where} must be a section with keys, {_got(node)}")
    hints = typing.get_type_hints(Recipe)
    if unknown := [key for key in node if key not in ("name", *hints)]:
        name = _join(where, unknown[0])
        raise ConfigError(f"unknown key {name}; {closest(unknown[0], ('name', *hints))}")
    if "name" not in node:
        raise ConfigError(f"missing from the config file: {where}.name, {_one_of(RECIPES)}")
    name = _field(str, node, "name", where)
    if name not in RECIPES:
        raise ConfigError(f"{where}.name must be {_one_of(RECIPES)}, {_got(name)}")
    base, values = RECIPES[name], {}
    for column in (key for key in hints if key in node):
        path, given = _join(where, column), _get(node, column, where)
        kinds = _kinds(hints[column])
        optional = type(None) in typing.get_args(hints[column])
        if kinds and not (given is None and optional):
            values[column] = _column(getattr(base, column), given, path, kinds)
        else:
            values[column] = _value(hints[column], given, path)
    return _made(base, values, where)


def _spelled_recipe(node: Any, where: str) -> Recipe:
    """The recipe whose columns are there, its name forgotten; what lacks is as the class has it."""
    if not isinstance(node, Mapping):
        raise ConfigError(f"{where} must be a section with keys, {_got(node)}")
    values = {}
    for column, hint in typing.get_type_hints(Recipe).items():
        if column not in node:
            continue
        given, kinds = node[column], _kinds(hint)
        path = _join(where, column)
        spelled = kinds and given is not None
        values[column] = _of_kind(kinds, given, path) if spelled else _value(hint, given, path)
    return _made(Recipe, values, where)


def _column(part: Any, node: Any, where: str, kinds: dict[str, type]) -> Any:
    """A column of a recipe: that of the named recipe changed, or one of another class."""
    if not isinstance(node, ConfigDict | Mapping):
        raise ConfigError(f"{where} must be a section with keys, {_got(node)}")
    rest = {key: _get(node, key, where) for key in node if key != "kind"}
    own = None if part is None else type(part).__name__
    name = _field(str, node, "kind", where) if "kind" in node else own
    if name == own and part is not None:
        return section(type(part), rest, where, part)
    if name is None and len(kinds) == 1:
        name = next(iter(kinds))
    return _of_kind(kinds, {"kind": name, **rest}, where)


def _of_kind(kinds: dict[str, type], node: Any, where: str) -> Any:
    """The section of the class that "kind" names, of the first one where there is no "kind"."""
    if not isinstance(node, ConfigDict | Mapping):
        raise ConfigError(f"{where} must be a section with keys, {_got(node)}")
    name = _get(node, "kind", where) if "kind" in node else next(iter(kinds))
    if name not in kinds:
        raise ConfigError(f"{where}.kind must be {_one_of(kinds)}, {_got(name)}")
    return section(kinds[name], {k: _get(node, k, where) for k in node if k != "kind"}, where)


def column_section(column: str, name: str, where: str) -> ConfigDict:
    """What a config file says of recipe column `column` when its class is `name`.

    Fields without a default are there, as None, and have to be set. Raises ConfigError naming the
    classes there are.
    Source: ours: a class chosen on the command line comes with its own fields, not the old one's.
    """
    kinds = _kinds(typing.get_type_hints(Recipe)[column])
    if name not in kinds:
        raise ConfigError(f"{where} must be {_one_of(kinds)}, {_got(name)}")
    hints = typing.get_type_hints(kinds[name])
    section: dict[str, Any] = {"kind": name}
    for field in dataclasses.fields(kinds[name]):
        if field.default is dataclasses.MISSING:
            section[field.name] = config_dict.placeholder(hints[field.name])
        else:
            section[field.name] = field.default
    return ConfigDict(section)


def _kinds(hint: Any) -> dict[str, type]:
    every = typing.get_args(hint) or (hint,)
    return {kind.__name__: kind for kind in every if dataclasses.is_dataclass(kind)}


def _get(node: Any, name: str, where: str) -> Any:
    try:
        return node[name]
    except RequiredValueError as error:
        path = _join(where, name)
        raise ConfigError(f"{path} has no value; set it: --config.{path}=...") from error


def _field(hint: Any, node: Any, name: str, where: str) -> Any:
    return _value(hint, _get(node, name, where), _join(where, name))


def _value(hint: Any, value: Any, where: str) -> Any:
    """`value` as what the annotation `hint` asks for; ConfigError if it is something else."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        if value is None and type(None) in typing.get_args(hint):
            return None
        others = [one for one in typing.get_args(hint) if one is not type(None)]
        if len(others) > 1:
            return _of_kind(_kinds(hint), value, where)
        (inner,) = others
    else:
        inner = hint
    if inner is Recipe:
        return value if isinstance(value, Recipe) else _recipe(value, where)
    if dataclasses.is_dataclass(inner):
        return section(inner, value, where)
    args = typing.get_args(inner)
    if typing.get_origin(inner) is Mapping:
        if not isinstance(value, ConfigDict | Mapping):
            raise ConfigError(f"{where} must be a section with keys, {_got(value)}")
        return {name: _field(args[1], value, name, where) for name in value}
    if typing.get_origin(inner) is tuple and isinstance(value, tuple | list):
        each = args[:1] * len(value) if args[1:] == (...,) else args
        if len(each) == len(value):
            pairs = zip(each, value, strict=True)
            return tuple(_value(one, item, f"{where}[{n}]") for n, (one, item) in enumerate(pairs))
    elif typing.get_origin(inner) is typing.Literal:
        # `in` alone would take True for 1.
        if any(value == one and type(value) is type(one) for one in args):
            return value
    elif inner is float and isinstance(value, float | int) and not isinstance(value, bool):
        if not math.isnan(value):  # not equal to itself: no resume would match
            return float(value)
        raise ConfigError(f"{where} must be a number, got nan")
    elif inner in (bool, int, str) and type(value) is inner:  # a bool is no int here
        return value
    raise ConfigError(f"{where} must be {_expected(hint)}, {_got(value)}")


def _expected(hint: Any) -> str:
    args = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join("None" if one is type(None) else _expected(one) for one in args)
    if typing.get_origin(hint) is typing.Literal:
        return _one_of(args)
    return _NAMES.get(hint, str(hint))


def _one_of(names: Iterable[object]) -> str:
    return " or ".join(map(repr, names))


def _got(value: Any) -> str:
    shown = "a section" if isinstance(value, ConfigDict | Mapping) else repr(value)[:60]
    return "got None" if value is None else f"got {shown} ({type(value).__name__})"


def _join(where: str, name: object) -> str:
    return f"{where}.{name}" if where else str(name)


def plain(
    value: Any,
    hint: Any = None,
    absent: Callable[[Any], Any] = lambda _: None,
    several: type[list] | type[tuple] = list,
) -> Any:
    """`value` as JSON has it: dicts, lists, text, numbers, None.

    hint: its annotation, for the classes that it might be of. absent: what stands for None, by the
    annotation. several: what sequences become. Source: ours.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        hints = typing.get_type_hints(type(value))
        names = [field.name for field in dataclasses.fields(value)]
        tree = {name: plain(getattr(value, name), hints[name], absent, several) for name in names}
        return {"kind": type(value).__name__, **tree} if len(_kinds(hint)) > 1 else tree
    if isinstance(value, Mapping):
        inner = typing.get_args(hint)[1] if hint else None
        return {name: plain(one, inner, absent, several) for name, one in value.items()}
    if isinstance(value, tuple | list):
        return several(plain(one, None, absent, several) for one in value)
    return absent(hint) if value is None else value
