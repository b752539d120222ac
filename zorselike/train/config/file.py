"""Reads a job's configuration: command line over TOML file over defaults, and nothing silently.

Paths in a file are relative to that file's folder; paths on the command line to where the
command runs.
"""

from __future__ import annotations

import difflib
import sys
import tomllib
import types
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from zorselike.errors import ConfigError
from zorselike.text.toml import format_table
from zorselike.train.config.config import AUTO, Config, check_config
from zorselike.train.config.titan_keys import REFUSED_KEYS, REFUSED_SECTIONS, REFUSED_VALUES, refusal

_PATH_KEYS = (
    ("hetero", "plan"),
    ("hetero", "profile"),
    ("hetero", "cluster"),
    ("training", "dataset_path"),
    ("model", "hf_assets_path"),
)


@dataclass(frozen=True)
class CommandLine(Config):
    """Trains one model on the devices and in the way that a plan says."""

    config: str = ""
    """The recipe, a TOML file; `--job.config_file` is the same."""

    dry_run: bool = False
    """Build everything without memory, devices or processes; print plan, ranks and schedule; exit."""


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    config: Config
    config_path: Path | None
    dry_run: bool


def parse_command_line(arguments: Sequence[str] | None = None) -> Request:
    """The merged and checked configuration of a command line (`sys.argv` unless given).

    `--help` prints every key with its merged value and exits, and so does tyro, with code 2,
    for a flag that does not exist.

    Raises:
        ConfigError: An unknown, refused, mistyped or impossible key, or an unreadable file.
    """
    import tyro

    arguments = [_rename_flag(argument) for argument in (sys.argv[1:] if arguments is None else arguments)]
    _refuse_flags(arguments)
    path = _find_config_path(arguments)
    base = Config() if path is None else load_config(path)
    sections = {field.name: getattr(base, field.name) for field in fields(Config)}
    parsed = tyro.cli(
        CommandLine,
        prog="python -m zorselike.train",
        args=arguments,
        default=CommandLine(**sections, config=str(path or "")),
        use_underscores=True,
    )
    config = Config(**{field.name: getattr(parsed, field.name) for field in fields(Config)})
    check_config(config)
    return Request(config=config, config_path=path, dry_run=parsed.dry_run)


def load_config(path: str | Path) -> Config:
    """The configuration in a TOML file, its paths made absolute or relative to where we run.

    Raises:
        ConfigError: Naming file, section and key of what is unknown, refused or mistyped.
    """
    path = Path(path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); give the recipe by --config"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from error
    for name in table:
        _check_section(name, table[name], path)
    config: Config = _build(Config, table, path=path, section="")
    return _resolve_paths(config, path.parent)


def dump_config(config: Config, *, comment: str = "") -> str:
    """TOML that `load_config` reads back equal, under a comment."""
    head = "".join(f"# {line}\n" for line in comment.splitlines())
    lines = []
    for name, section in asdict(config).items():
        tables = {f"{name}.{key}": value for key, value in section.items() if isinstance(value, dict)}
        keys = {key: value for key, value in section.items() if not isinstance(value, dict)}
        for title, table in ({name: keys} | tables).items():
            lines += ["", f"[{title}]", *format_table(table)]
    return head + "\n".join(lines[1:]) + "\n"


# -- the command line ------------------------------------------------------------------------


def _rename_flag(argument: str) -> str:
    """`--job.config_file` is `--config`; flags may be written with hyphens, as tyro has it."""
    flag, equals, value = argument.partition("=")
    if flag.replace("-", "_") == "__job.config_file":
        return f"--config{equals}{value}"
    return argument


def _find_config_path(arguments: Sequence[str]) -> Path | None:
    """The last one given, which is also the one that tyro takes."""
    found = None
    for number, argument in enumerate(arguments):
        if argument.startswith("--config="):
            found = Path(argument.partition("=")[2])
        elif argument == "--config" and number + 1 < len(arguments):
            found = Path(arguments[number + 1])
    return found


def _refuse_flags(arguments: Sequence[str]) -> None:
    """Names what takes the place of a TorchTitan flag; tyro would only say that it is unknown."""
    for argument in arguments:
        if not argument.startswith("--"):
            continue
        name = argument[2:].partition("=")[0].replace("-", "_")
        section, _, key = name.rpartition(".")
        reason = refusal(name.partition(".")[0]) or refusal(section, key.removeprefix("no_"))
        if reason is not None:
            raise ConfigError(f"command line: --{name} is a TorchTitan key without a place here: {reason}")


# -- TOML into dataclasses -------------------------------------------------------------------


def _check_section(name: str, value: object, path: Path) -> None:
    valid = [field.name for field in fields(Config)]
    if name in REFUSED_SECTIONS:
        raise ConfigError(
            f"{path}: [{name}] is a TorchTitan section without a place here: {REFUSED_SECTIONS[name]}"
        )
    if name not in valid:
        kind = (
            f"[{name}]: no such section"
            if isinstance(value, dict)
            else f"{name}: stands outside of any section"
        )
        raise ConfigError(f"{path}: {kind}; {_suggest(name, valid, 'sections')}")


def _build(cls: Any, table: Mapping[str, Any], *, path: Path, section: str) -> Any:
    """A dataclass from a TOML table, every key known and of its type."""
    hints = get_type_hints(cls)
    valid = [field.name for field in fields(cls)]
    values: dict[str, Any] = {}
    for key, value in table.items():
        inner = f"{section}.{key}" if section else key
        if key not in valid:
            raise ConfigError(_describe_unknown(section, key, valid, path))
        if is_dataclass(hints[key]):
            if not isinstance(value, dict):
                raise ConfigError(f"{path}: {inner} = {value!r} must be a section, [{inner}]")
            values[key] = _build(hints[key], value, path=path, section=inner)
        else:
            values[key] = _convert(hints[key], value, path=path, section=section, key=key)
    return cls(**values)


def _describe_unknown(section: str, key: str, valid: Sequence[str], path: Path) -> str:
    reason = REFUSED_KEYS.get(section, {}).get(key)
    if reason is not None:
        return f"{path}: [{section}] {key} is a TorchTitan key without a place here: {reason}"
    elsewhere = [
        field.name
        for field in fields(Config)
        if field.name != section and key in get_type_hints(get_type_hints(Config)[field.name])
    ]
    if elsewhere:
        homes = " and ".join(f"[{name}]" for name in elsewhere)
        return f"{path}: [{section}] {key}: no such key; {key} is a key of {homes}"
    return f"{path}: [{section}] {key}: no such key; {_suggest(key, valid, 'keys')}"


def _suggest(name: str, valid: Sequence[str], kind: str) -> str:
    nearest = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    return f"the nearest is {nearest[0]}" if nearest else f"the {kind} are {', '.join(sorted(valid))}"


def _convert(hint: Any, value: Any, *, path: Path, section: str, key: str) -> Any:
    """The value if it is of the key's type; an integer serves where a float is expected."""
    shown = (
        f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else value
    )
    where = f"{path}: [{section}] {key} = {shown}"
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (option for option in get_args(hint) if option is not type(None))
    if get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{where}: must be a list")
        return tuple(
            _convert(get_args(hint)[0], entry, path=path, section=section, key=key) for entry in value
        )
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        if value in choices:
            return value
        refused = REFUSED_VALUES.get(f"{section}.{key}", {}).get(str(value))
        if refused is not None:
            raise ConfigError(f"{where}: {refused}")
        expected = " or ".join(f'"{choice}"' for choice in choices)
        raise ConfigError(f"{where}: must be {expected}")
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if hint is float and (is_int or isinstance(value, float)):
        return float(value)
    if (hint is int and is_int) or (hint in (bool, str) and isinstance(value, hint)):
        return value
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
    raise ConfigError(f"{where}: must be {names[hint]}")


def _resolve_paths(config: Config, folder: Path) -> Config:
    for section, key in _PATH_KEYS:
        value = getattr(getattr(config, section), key)
        if value and (section, key, value) != ("hetero", "plan", AUTO):
            resolved = str(folder / Path(value).expanduser())
            config = replace(config, **{section: replace(getattr(config, section), **{key: resolved})})
    return config
