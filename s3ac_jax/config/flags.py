"""Flags of the launch apps, and bad input told in one line: nothing else here parses arguments.

Left alone, ml_collections answers a typo in `--config.critic.lrr=1` with a traceback of 40 lines.
So the config file is loaded and the names of the overrides are checked here, before ml_collections
reads them; the values go through its own parsers.
"""

import inspect
import pathlib
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from absl import app, flags
from ml_collections import config_flags
from ml_collections.config_dict import ConfigDict, RequiredValueError
from ml_collections.config_flags.config_flags import FlagOrderError

from s3ac_jax.config.boundary import ConfigError, closest, column_section
from s3ac_jax.core.errors import RunError

# Flags belong to the app that calls `run_app`, so that its --help shows them.
flags.disclaim_key_flags()

_REQUIRED = {
    "config": "the config file, say --config=configs/tiny.py",
    "workdir": "the folder of the run, say --workdir=runs/tiny",
}
_OVERRIDE = re.compile(r"--?(?:no)?config\.([^=]*)")
_COLUMN_KIND = re.compile(r"--?config\.((?:.*\.)?recipe)\.(\w+)\.kind=(.*)")
# What absl and ml_collections raise on a bad argument, beside flags.Error.
_PARSING = (AttributeError, LookupError, TypeError, ValueError)


class CommandLineError(RunError):
    """A command line that can't be read; the message is one line for the user.

    Source: ours: exit code 2, the custom of Unix.
    """

    exit_code = 2


def define_flags(flag_values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines --config (locked, with --config.a.b=c overrides), --workdir and --traceback.

    `none` overrides a number by None. `run_app` calls this.

    Source: ours: every launch app takes the same flags.
    """
    _define_config(flag_values)
    flags.DEFINE_string("workdir", None, "Folder of the run, made or resumed.", flag_values)
    _define_traceback(flag_values)


def _define_config(flag_values: flags.FlagValues) -> None:
    # The table of ml_collections is the process's own: only launch apps come here.
    config_flags.register_flag_parser_for_type(float, _NumberParser(float, "a float or none"))
    config_flags.register_flag_parser_for_type(int, _NumberParser(int, "an int"))
    config_flags.register_flag_parser_for_type(bool, _BoolParser())
    config_flags.DEFINE_config_file(
        "config",
        help_string="Config file, a preset after a colon: configs/tiny.py:s3ac_group.",
        flag_values=flag_values,
        lock_config=True,
    )
    flag_values["config"].parser = _ConfigFileParser()


def _define_traceback(flag_values: flags.FlagValues) -> None:
    flags.DEFINE_bool("traceback", False, "Show the traceback of an error too.", flag_values)


def parse_flags(
    argv: Sequence[str],
    flag_values: flags.FlagValues = flags.FLAGS,
    required: Mapping[str, str] = _REQUIRED,
    positional: str = "",
) -> list[str]:
    """Parses the command line, program name first; returns it without the flags.

    required: flags that must be given, and what each is. positional: what the arguments that are
    no flags are, of which there must be one then; empty if there can be none.

    Raises CommandLineError, or ConfigError when the config file itself is at fault.
    Source: ours.
    """
    if positional:
        flag_values.set_gnu_getopt()  # flags may stand behind arguments too
    try:
        _, *rest = flag_values(list(argv))
    except SystemExit:
        sys.exit(0)  # --help: shown as asked; absl would exit with 1
    except (flags.Error, *_PARSING) as error:
        raise CommandLineError(_reworded(error, flag_values)) from error
    if positional and not rest:
        raise CommandLineError(f"an argument is required: {positional}")
    if rest and not positional:
        raise CommandLineError(f"unexpected argument {rest[0]!r}; flags are --name=value")
    for name, what in required.items():
        if name in flag_values and not flag_values[name].value:
            raise CommandLineError(f"--{name} is required: {what}")
    if "verbosity" in flag_values and flag_values["verbosity"].using_default_value:
        # absl would go down to INFO, and orbax reports there at length.
        flag_values["verbosity"].value = -1
        flag_values["verbosity"].using_default_value = False
    return [argv[0], *rest]


def run_app(
    main: Callable[[list[str]], None],
    required: Sequence[str] | None = None,
    positional: str = "",
) -> NoReturn:
    """Runs `main([program, *arguments])` with the flags of sys.argv, then exits.

    required: given by an app that has flags of its own in place of --config and --workdir; those
    of them that can't be left out. With "config" among them, --config is defined here.
    positional: as for `parse_flags`.

    Exit codes: 0 done, 1 bad input or a run that can't go on, 2 bad command line, 130 stopped by
    Ctrl-C or SIGTERM.

    A RunError is one line on stderr, after its traceback with --traceback. Other exceptions are
    bugs and pass through.

    Source: ours: one clear line that says what, where and what to do.
    """
    try:
        try:
            if required is not None:
                _define_traceback(flags.FLAGS)
                if "config" in required:
                    _define_config(flags.FLAGS)
            elif "config" not in flags.FLAGS:
                define_flags()
        except flags.Error as error:  # ml_collections reads --flagfile when a flag is defined
            raise CommandLineError(_reworded(error, flags.FLAGS)) from error
        needed = {name: _REQUIRED.get(name, flags.FLAGS[name].help) for name in required or ()}
        app.run(
            main,
            flags_parser=lambda argv: parse_flags(
                argv, required=_REQUIRED if required is None else needed, positional=positional
            ),
        )
    except KeyboardInterrupt:
        # Before the first tick or by a second Ctrl-C; what was saved earlier is whole.
        print("stopped at once; the same command goes on from what is saved", file=sys.stderr)
        sys.exit(130)
    except RunError as error:
        # From sys.argv: the flags may be what could not be parsed.
        if any(re.fullmatch("--?traceback(=true)?", argument) for argument in sys.argv):
            traceback.print_exc()
        print(error.prefix + _one_line(error), file=sys.stderr)
        sys.exit(error.exit_code)
    sys.exit(0)


class _NumberParser(flags.ArgumentParser):
    def __init__(self, kind: type[float] | type[int], name: str):
        self._kind, self._name = kind, name

    def parse(self, argument: Any) -> float | int | None:
        if isinstance(argument, str) and argument.lower() == "none":
            return None
        try:
            return self._kind(argument)
        except ValueError:
            raise ValueError(f"must be {self._name}") from None

    def flag_type(self) -> str:
        return self._kind.__name__


class _BoolParser(flags.BooleanParser):
    def parse(self, argument: Any) -> bool:
        try:
            return super().parse(argument)
        except ValueError:
            raise ValueError("must be true or false") from None


class _ConfigFileParser(flags.ArgumentParser):
    """Stands in for ml_collections' parser, which wraps what goes wrong in a traceback."""

    def parse(self, argument: str) -> ConfigDict:
        path, colon, preset = argument.partition(":")
        config = _load(path, [preset] if colon else [])
        config.lock()
        overrides = flags.FLAGS.read_flags_from_files(sys.argv[1:], force_gnu=False)
        # First the kinds of columns: which fields there are to set depends on them, in any order.
        for named in filter(None, map(_OVERRIDE.match, overrides)):
            if column := _COLUMN_KIND.fullmatch(named.string):
                _check_override(config, named[1])
                _replace_column(config, *column.groups())
        for named in filter(None, map(_OVERRIDE.match, overrides)):
            _check_override(config, named[1])
        return config

    def flag_type(self) -> str:
        return "config file"


def _load(path: str, presets: list[str]) -> ConfigDict:
    if not path:
        raise CommandLineError(f"--config is required: {_REQUIRED['config']}")
    if not pathlib.Path(path).is_file():
        raise CommandLineError(f"--config: no file {path!r} below {pathlib.Path.cwd()}")
    # Not imported: a cached .pyc is stale for a second after an edit of equal length.
    module: dict[str, Any] = {"__name__": "config_file", "__file__": path}
    try:
        exec(compile(pathlib.Path(path).read_bytes(), path, "exec"), module)
        if "get_config" not in module:
            raise ConfigError(f"{path} defines no get_config()")
        get_config = module["get_config"]
        try:
            inspect.signature(get_config).bind(*presets)
        except TypeError:
            takes = "no preset" if presets else "a preset, say"
            given = f", got :{presets[0]}" if presets else f" --config={path}:PRESET"
            raise ConfigError(f"{path} takes {takes}{given}") from None
        config = get_config(*presets)
    except ConfigError:
        raise
    except Exception as error:
        what = error.msg if isinstance(error, SyntaxError) else _one_line(error)
        place = f"{path}:{_line_in(path, error)}"
        raise ConfigError(f"{place}: {type(error).__name__}: {what}") from error
    if not isinstance(config, ConfigDict):
        got = type(config).__name__
        raise ConfigError(f"{path}: get_config() must return a ConfigDict, got {got}")
    return config


def _line_in(path: str, error: Exception) -> int:
    """The line of the config file that raised, the innermost one."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno or 0 for frame in frames if frame.filename == path]
    return (error.lineno or 0) if isinstance(error, SyntaxError) else [0, *lines][-1]


def _replace_column(config: ConfigDict, recipe: str, column: str, name: str) -> None:
    """Gives a recipe's column the fields of its new class, so that they can be set beside it."""
    node = config
    for key in recipe.split("."):
        node = node[key]
    with node.unlocked(), node.ignore_type():
        node[column] = column_section(column, name, f"--config.{recipe}.{column}.kind")


def _check_override(config: ConfigDict, dotted: str) -> None:
    flag, node, place, kind = f"--config.{dotted}", config, "config", ConfigDict
    for key in dotted.split("."):
        if kind is type(None):
            raise CommandLineError(f"{flag}: {place} is None; set all of it in the config file")
        if not isinstance(node, ConfigDict):
            raise CommandLineError(f"{flag}: {place} is a value and has no keys")
        if key not in node:
            raise CommandLineError(f"{flag}: {place} has no key {key!r}; {closest(key, node)}")
        kind, place = node.get_type(key), f"{place}.{key}"
        try:
            node = node[key]
        except RequiredValueError:
            node = None
    if isinstance(node, ConfigDict):
        raise CommandLineError(f"{flag}: {place} is a section; set its keys: {', '.join(node)}")
    if kind is type(None):
        raise CommandLineError(f"{flag}: {place} is None and of no type; set it in the file")
    if dotted == "recipe.name" or dotted.endswith(".recipe.name"):
        # The columns beside it are spelled out, so a new name would change nothing but the name.
        raise CommandLineError(f"{flag}: a recipe is chosen by preset: --config=FILE.py:RECIPE")


def _reworded(error: Exception, flag_values: flags.FlagValues) -> str:
    if isinstance(error, FlagOrderError):
        return "--config=FILE.py must stand before its overrides, --config.a.b=c"
    if isinstance(error, flags.UnrecognizedFlagError):
        if error.flagname.startswith(("config.", "noconfig.")):
            return f"--config=FILE.py must stand before --{error.flagname}"
        return f"no flag --{error.flagname}; {closest(error.flagname, _own(flag_values))}"
    return re.sub(r"^(flag (?=--)|ERROR:: )", "", _one_line(error))


def _own(flag_values: flags.FlagValues) -> list[str]:
    app = [flag.name for flag in flag_values.get_key_flags_for_module(sys.argv[0])]
    names = dict.fromkeys([*_REQUIRED, *app, "traceback"])
    return [f"--{name}" for name in (*names, "help") if name in flag_values]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
