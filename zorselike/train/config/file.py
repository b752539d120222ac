"""Reads a job's configuration: command line over TOML file over defaults, and nothing silently.

Paths in a file are relative to that file's folder; paths on the command line to where the
command runs.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from zorselike.errors import ConfigError, FileError
from zorselike.runtime.processes.launcher import is_first_of_node, parse_once
from zorselike.text.dataclass_tables import list_keys, read_dataclass
from zorselike.text.document import parse_text, refuse_other
from zorselike.text.files import read_text
from zorselike.text.toml import format_table
from zorselike.text.wording import suggest
from zorselike.train.config.checks import check_config, check_given
from zorselike.train.config.config import AUTO, Config
from zorselike.train.config.titan_keys import REFUSED_VALUES, refusal
from zorselike.version import __version__

PATH_KEYS = (
    ("hetero", "plan"),
    ("hetero", "profile"),
    ("hetero", "cluster"),
    ("training", "dataset_path"),
    ("validation", "dataset_path"),
    ("model", "path"),
    ("model", "hf_assets_path"),
    ("lora", "initial_load_path"),
    ("checkpoint", "initial_load_path"),
)
"""What a recipe names relative to itself."""


@dataclass(frozen=True)
class CommandLine(Config):
    """Trains one model on the devices and in the way that a plan says."""

    config: str = ""
    """The recipe, a TOML file; `--job.config_file` is the same."""

    dry_run: bool = False
    """Build everything without memory, devices or processes; print plan, ranks and schedule; exit, with 2
    where a run here would end for want of data."""

    version: bool = False
    """Print the version of zorselike; exit."""


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    config: Config
    config_path: Path | None
    dry_run: bool


def parse_command_line(arguments: Sequence[str] | None = None) -> Request:
    """The merged and checked configuration of a command line (`sys.argv` unless given).

    `--help` prints every key with its merged value and exits, `--version` the version, and tyro exits with
    code 2 for a flag that does not exist; each prints on the first process of a node alone.

    Raises:
        ConfigError: An unknown, refused, mistyped or impossible key, or an unreadable file.
    """
    import tyro

    arguments = [_rename_flag(argument) for argument in (sys.argv[1:] if arguments is None else arguments)]
    _refuse_flags(arguments)
    path = _find_config_path(arguments)
    base = Config() if path is None else load_config(path)
    sections = {field.name: getattr(base, field.name) for field in fields(Config)}
    parsed = parse_once(
        lambda prints: tyro.cli(
            CommandLine,
            prog="python -m zorselike.train",
            args=arguments,
            default=CommandLine(**sections, config=str(path or "")),
            use_underscores=True,
            console_outputs=prints,
        )
    )
    if parsed.version:
        if is_first_of_node():
            print(f"zorselike {__version__}")
        raise SystemExit(0)
    config = Config(**{field.name: getattr(parsed, field.name) for field in fields(Config)})
    config = _expand_home(config)
    given = _list_given(arguments)
    check_config(config, said={*given, *_list_said(path)})
    check_given(config, given)
    return Request(config=config, config_path=path, dry_run=parsed.dry_run)


def load_config(path: str | Path) -> Config:
    """The configuration in a TOML file, its paths made absolute or relative to where we run.

    Raises:
        ConfigError: Naming file, section and key of what is unknown, refused or mistyped.
    """
    path, sections = Path(path), {}
    try:
        content = parse_text(read_text(path, "recipe"), "TOML")
        refuse_other(content, "recipe")
        for name, table in content.items():
            if reason := refusal(name):
                raise FileError(f"[{name}] is a TorchTitan section without a place here: {reason}")
            if not isinstance(table, dict):
                raise FileError(
                    f"{name} stands outside of any section; write it below one, such as [training]"
                )
            if name not in list_keys(Config):
                hint = suggest(name, list_keys(Config)) or f"; there are {', '.join(list_keys(Config))}"
                raise FileError(f"[{name}] is not a section{hint}")
            section = getattr(Config(), name)
            _refuse_keys(table, section, name)
            sections[name] = read_dataclass(type(section), table, f"[{name}] ")
    except FileError as error:
        raise ConfigError(f"{path}: {error}") from None
    try:
        config = _expand_home(Config(**sections))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
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


def _list_given(arguments: Sequence[str]) -> list[str]:
    """`section.key` of the flags of the recipe's keys, in their order; what tyro has parsed."""
    names = [
        argument[2:].partition("=")[0].replace("-", "_") for argument in arguments if argument[:2] == "--"
    ]
    parts = [name.partition(".") for name in names]
    found = [f"{section}.{key.removeprefix('no_')}" for section, _, key in parts]
    return [name for name in found if name in _ALL_KEYS]


def _list_said(path: Path | None) -> list[str]:
    """`section.enable` of the sections of which a recipe, which has been read, says whether they are on."""
    content = {} if path is None else parse_text(read_text(path, "recipe"), "TOML")
    return [f"{section}.enable" for section, table in content.items() if "enable" in table]


_ALL_KEYS = frozenset(
    f"{section.name}.{key}"
    for section in fields(Config)
    for key in list_keys(type(getattr(Config(), section.name)))
)


# -- TOML into dataclasses -------------------------------------------------------------------


def _refuse_keys(table: Mapping[str, Any], section: object, name: str) -> None:
    """Names what takes the place of a key or value of TorchTitan, and the section that a key belongs to."""
    for key, value in table.items():
        if reason := refusal(name, key):
            raise FileError(f"[{name}] {key} is a TorchTitan key without a place here: {reason}")
        homes = [home.name for home in fields(Config) if key in list_keys(type(getattr(Config(), home.name)))]
        if homes and not hasattr(section, key):
            raise FileError(
                f"[{name}] {key} is not a key; {key} is one of {' and '.join(f'[{home}]' for home in homes)}"
            )
        refused = REFUSED_VALUES.get(f"{name}.{key}", {})
        for item in value if isinstance(value, list) else [value]:
            if str(item) in refused:
                raise FileError(f'[{name}] {key} = "{item}": {refused[str(item)]}')
        if isinstance(value, dict) and hasattr(section, key):
            _refuse_keys(value, getattr(section, key), f"{name}.{key}")


def _resolve_paths(config: Config, folder: Path) -> Config:
    for section, key in PATH_KEYS:
        value = getattr(getattr(config, section), key)
        if value and (section, key, value) != ("hetero", "plan", AUTO):
            config = _replace(config, section, key, str(folder / value))
    return config


def _expand_home(config: Config) -> Config:
    """`~` and `~name` at the beginning of a path stand for a home folder, wherever the path is used."""
    for section, key in (("job", "dump_folder"), *PATH_KEYS):
        value = getattr(getattr(config, section), key)
        if "\0" in value:
            raise ConfigError(f"[{section}] {key} = {value!r}: a path has no such character")
        if value.startswith("~"):
            try:
                config = _replace(config, section, key, str(Path(value).expanduser()))
            except RuntimeError as error:
                raise ConfigError(
                    f"[{section}] {key} = {value!r}: there is no such home folder; write the whole path"
                ) from error
    return config


def _replace(config: Config, section: str, key: str, value: str) -> Config:
    return replace(config, **{section: replace(getattr(config, section), **{key: value})})
