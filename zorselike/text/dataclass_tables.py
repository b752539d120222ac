"""Dataclasses as the tables of TOML and JSON files, by their annotations: read, checked, written.

A key is the name of its field, without the unit that the file's value carries (`annotations.Unit`), or what
`annotations.Key` says. Reading is strict: a key that does not exist, one that is missing, a value of another
type is a `FileError` that names the place, such as `groups[0].ranks`, and the mend; whoever reads the file
adds its name. A string in a field's annotation is how messages describe what belongs there. A mapping is
written as sorted pairs, which serves fingerprints; to be read it needs a reader.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from types import MappingProxyType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from zorselike.errors import FileError
from zorselike.text.annotations import AS_TABLE, Key, Must, OneOf, Unit
from zorselike.text.wording import show_value, suggest

T = TypeVar("T")

Readers = Mapping[Any, Callable[[object, str], Any]]
"""How values of some types are read, from the value and the name of its place, in place of the usual way."""
_NO_READERS: Readers = MappingProxyType({})

_NOUNS = {
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    str: ("a string", "strings"),
    bool: ("true or false", "truth values"),
}


# -- reading ---------------------------------------------------------------------------------


def read_dataclass(
    kind: type[T],
    value: object,
    where: str = "",
    /,
    *,
    readers: Readers = _NO_READERS,
    extra: Sequence[str] = (),
    **given: Any,
) -> T:
    """An instance from the table at a place of a file.

    Args:
        kind: a dataclass.
        value: what should be the table.
        where: name of the place, empty for the whole file.
        readers: of types that are read in a way of their own, here and below.
        extra: keys that the file may have beside the fields', for the caller to read.
        given: fields that are not read from the table.

    Raises:
        FileError: Names place, value and mend.
    """
    table = read_table(value, where or "the file")
    known = {entry.key: entry for entry in _list_fields(cast(Any, kind)) if entry.field.name not in given}
    check_keys(table, where, (*known, *extra))
    for key, (_, field, hint) in known.items():
        if key in table:
            given[field.name] = read_value(hint, table[key], join(where, key), readers)
        elif _default(field) is MISSING:
            raise FileError(f"{join(where, key)} is missing; add it")
    return kind(**given)


def read_value(hint: Any, value: object, where: str, readers: Readers = _NO_READERS) -> Any:
    """The value of a type from what stands at a place of a file."""
    plain, notes, _ = _unpack(hint)
    if plain in readers:
        return readers[plain](value, where)
    for note in notes:
        if isinstance(note, Unit):
            return note.read(value, where)
    if AS_TABLE in notes:
        of_value = get_args(get_args(plain)[0])[1]
        table = read_table(value, where)
        return tuple((name, read_value(of_value, item, join(where, name))) for name, item in table.items())
    if get_origin(plain) is dict:
        return read_table(value, where)
    if is_dataclass(plain):
        return read_dataclass(cast(type, plain), value, where, readers=readers)
    if get_origin(plain) is Union:
        return read_value(_choose(plain, isinstance(value, list)), value, where, readers)
    if get_origin(plain) is tuple:
        hints = _hints_of_items(plain, value) if isinstance(value, list) else None
        if hints is None:
            raise wrong_value(where, value, _describe(hint, where))
        items = zip(hints, cast(list[object], value), strict=True)
        return tuple(read_value(each, item, f"{where}[{i}]", readers) for i, (each, item) in enumerate(items))
    _check_scalar(plain, value, where)
    try:
        return float(cast(float, value)) if plain is float else value
    except OverflowError:  # A whole number of more than 308 digits.
        raise wrong_value(where, math.inf, _NOUNS[float][0]) from None


def read_table(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise wrong_value(where, value, "a table")
    return value


def check_keys(table: Mapping[str, Any], where: str, valid: Sequence[str]) -> None:
    for key in table:
        if key not in valid:
            hint = suggest(key, valid) or f"; valid keys are {', '.join(valid)}"
            raise FileError(f"{join(where, key if key.isprintable() else repr(key))} is not a key{hint}")


def join(where: str, key: str) -> str:
    """`groups[0].zero`; after a colon, as in `node a: fabric`, without a dot."""
    return f"{where}.{key}" if where and not where.endswith(" ") else f"{where}{key}"


def wrong_value(where: str, value: object, expected: str) -> FileError:
    """The error for a value that is not what was expected."""
    return FileError(f"{where} is {show_value(value)}; it must be {expected}")


# -- checking --------------------------------------------------------------------------------


def check_dataclass(instance: Any, where: str = "") -> None:
    """Raises `FileError` unless every field, and every one below, is of its type and what it `Must` be."""
    for key, field, hint in _list_fields(cast(Any, type(instance))):
        check_value(hint, getattr(instance, field.name), join(where, key))


def check_value(hint: Any, value: Any, where: str) -> None:
    """Raises `FileError` unless the value is of a type and what it `Must` be."""
    plain, notes, optional = _unpack(hint)
    if value is None and optional:
        return
    if get_origin(plain) is Union:
        plain, more, _ = _unpack(_choose(plain, isinstance(value, tuple)))
        notes = (*notes, *more)
    if AS_TABLE in notes:
        of_value = get_args(get_args(plain)[0])[1]
        for name, item in value:
            check_value(of_value, item, join(where, name))
    elif is_dataclass(plain):
        if not isinstance(value, cast(type, plain)):
            raise wrong_value(where, value, f"of type {cast(type, plain).__name__}")
        check_dataclass(value, where)
    elif get_origin(plain) is tuple:
        hints = _hints_of_items(plain, value) if isinstance(value, tuple) else None
        if hints is None:
            raise wrong_value(where, value, "a tuple")
        for i, (each, item) in enumerate(zip(hints, value, strict=True)):
            check_value(each, item, f"{where}[{i}]")
    elif get_origin(plain) is None or get_origin(plain) is Literal:
        _check_scalar(plain, value, where)
    for note in notes:
        if isinstance(note, OneOf):
            _check_choice(value, note.choices, where)
        if isinstance(note, Must) and not note.holds(value):
            raise FileError(f"{where} is {_show(value, notes)}; {note.mend}")


def _show(value: Any, notes: Sequence[object]) -> str:
    if value in ("", ()):
        return "empty"
    units = (note.show for note in notes if isinstance(note, Unit) and math.isfinite(value))
    return next(units, show_value)(value)


def _check_scalar(hint: Any, value: object, where: str) -> None:
    choices = get_args(hint)
    kind = type(choices[0]) if choices else hint
    is_bool = isinstance(value, bool)  # Which is an int to isinstance.
    if is_bool != (kind is bool) or not isinstance(value, (int, float) if kind is float else kind):
        raise wrong_value(where, value, _NOUNS[kind][0])
    if choices:
        _check_choice(value, choices, where)


def _check_choice(value: object, choices: Collection[Any], where: str) -> None:
    if value not in choices:
        hint = suggest(value, choices) if isinstance(value, str) else ""
        raise FileError(f"{where} is {value!r}; give one of {', '.join(map(repr, choices))}{hint}")


# -- writing ---------------------------------------------------------------------------------


def write_dataclass(instance: Any, *, omit_defaults: bool = False) -> dict[str, Any]:
    """The table that `read_dataclass` reads back equal, without fields that are None.

    Args:
        instance: of a dataclass.
        omit_defaults: whether fields that have their default are left out, here and below.
    """
    table = {}
    for key, field, hint in _list_fields(cast(Any, type(instance))):
        value = getattr(instance, field.name)
        if value is not None and not (omit_defaults and value == _default(field)):
            table[key] = _write_value(hint, value, omit_defaults)
    return table


def _write_value(hint: Any, value: Any, omit_defaults: bool) -> Any:
    plain, notes, _ = _unpack(hint)
    if AS_TABLE in notes:
        return dict(value)
    for note in notes:
        if isinstance(note, Unit):
            return note.show(value)
    if get_origin(plain) is Union:
        return _write_value(_choose(plain, isinstance(value, tuple)), value, omit_defaults)
    if get_origin(plain) is tuple:
        hints = _hints_of_items(plain, value) or ()
        return [_write_value(each, item, omit_defaults) for each, item in zip(hints, value, strict=True)]
    if get_origin(plain) is Mapping:
        of_value = get_args(plain)[1]
        return [[key, _write_value(of_value, item, omit_defaults)] for key, item in sorted(value.items())]
    if is_dataclass(plain):
        return write_dataclass(value, omit_defaults=omit_defaults)
    return float(value) if plain is float else value


# -- annotations -----------------------------------------------------------------------------


class _Entry(NamedTuple):
    key: str
    field: Field[Any]
    hint: Any


def list_keys(kind: type) -> tuple[str, ...]:
    """The keys of a dataclass's table."""
    return tuple(entry.key for entry in _list_fields(kind))


@cache
def _list_fields(kind: type) -> tuple[_Entry, ...]:
    hints = get_type_hints(kind, include_extras=True)
    entries = []
    for field in fields(kind):
        key = field.name
        for note in _unpack(hints[key])[1]:
            if isinstance(note, Unit):
                key = key.removesuffix(note.suffix)
            elif isinstance(note, Key):
                key = note.name
        entries.append(_Entry(key, field, hints[field.name]))
    return tuple(entries)


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


@cache
def _unpack(hint: Any) -> tuple[Any, tuple[Any, ...], bool]:
    """The bare type, what `Annotated` says of it, and whether it may be None."""
    notes: tuple[Any, ...] = ()
    optional = False
    while True:
        if get_origin(hint) is Annotated:
            notes += hint.__metadata__
            hint = hint.__origin__
        elif get_origin(hint) in (Union, UnionType):
            options = tuple(option for option in get_args(hint) if option is not type(None))
            optional |= len(options) < len(get_args(hint))
            hint = Union[options]  # noqa: UP007  # One option is itself.
            if len(options) > 1:
                return hint, notes, optional
        else:
            return hint, notes, optional


def _choose(union: Any, is_list: bool) -> Any:
    """Of a union of a list and something else, the one that a value is meant for."""
    return next(o for o in get_args(union) if (get_origin(_unpack(o)[0]) is tuple) == is_list)


def _hints_of_items(hint: Any, items: Sequence[object]) -> tuple[Any, ...] | None:
    """The type of each item of a tuple; None if there must be another number of them."""
    hints = get_args(hint)
    if hints[-1] is ...:
        return hints[:1] * len(items)
    return hints if len(hints) == len(items) else None


def _describe(hint: Any, where: str) -> str:
    """What a list must be."""
    plain, notes, _ = _unpack(hint)
    if texts := [note for note in notes if isinstance(note, str)]:
        return texts[0]
    of_item, notes, _ = _unpack(get_args(plain)[0])
    texts = [note for note in notes if isinstance(note, str)]
    if get_origin(of_item) is Union:
        of_item = _unpack(get_args(of_item)[0])[0]
    if get_origin(of_item) is Literal:
        of_item = type(get_args(of_item)[0])
    if not texts and (is_dataclass(of_item) or get_origin(of_item) is dict):
        return f"a list of tables, in TOML each under a line [[{where}]]"
    return f"a list of {texts[0] if texts else _NOUNS[of_item][1]}"
