"""The one reader, checker and writer of dataclasses: every kind of annotation that they know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from zorselike.errors import FileError
from zorselike.text.annotations import AS_TABLE, SIZE, TIME, Key, Must, Natural, OneOf
from zorselike.text.dataclass_tables import (
    check_dataclass,
    list_keys,
    read_dataclass,
    read_table,
    write_dataclass,
)

Even = Annotated[int, Must(lambda number: number % 2 == 0, "give an even one")]
Wait = Annotated[float, TIME, Must(lambda seconds: seconds >= 0, "give 0s or more")]


@dataclass(frozen=True)
class Inner:
    even: Even
    wait_s: Wait = 0.0


@dataclass(frozen=True)
class Outer:
    name: str
    kind: Literal["a", "b"] = "a"
    flag: bool = False
    share: float | None = None
    ranks: tuple[Natural | tuple[Natural, ...], ...] = ()
    pair: Annotated[tuple[str, int], "[name, number]"] | None = None
    level: Annotated[int, OneOf((0, 1, 2))] = 0
    from_: Annotated[str, Key("from")] = ""
    sizes: tuple[Annotated[float, SIZE], ...] = ()
    times: Annotated[tuple[tuple[str, float], ...], AS_TABLE] = ()
    inner: Inner | None = None
    inners: tuple[Inner, ...] = ()
    prices: Mapping[tuple[str, str], float] = field(default_factory=dict)


FULL: dict[str, Any] = {
    "name": "x",
    "kind": "b",
    "flag": True,
    "share": 1,
    "ranks": [0, [1, 2]],
    "pair": ["p", 3],
    "level": 2,
    "from": "here",
    "sizes": ["1GiB", "2kB"],
    "times": {"F": 0.5},
    "inner": {"even": 2, "wait": "10us"},
    "inners": [{"even": 4}],
}
OUTER = Outer(
    name="x",
    kind="b",
    flag=True,
    share=1,
    ranks=(0, (1, 2)),
    pair=("p", 3),
    level=2,
    from_="here",
    sizes=(2.0**30, 2000.0),
    times=(("F", 0.5),),
    inner=Inner(2, 1e-5),
    inners=(Inner(4),),
)


def test_what_is_read_is_written_again() -> None:
    read = read_dataclass(Outer, FULL)
    assert read == OUTER
    check_dataclass(read)
    assert write_dataclass(read, omit_defaults=True) == FULL
    complete = write_dataclass(Outer("x"))
    del complete["prices"]
    assert read_dataclass(Outer, complete) == Outer("x")
    assert write_dataclass(Outer("x"), omit_defaults=True) == {"name": "x"}
    assert list_keys(Inner) == ("even", "wait")


def test_floats_are_written_as_floats_and_pairs_in_order() -> None:
    written = write_dataclass(Outer("x", share=1, prices={("b", "a"): 2, ("a", "b"): 1}))
    assert repr(written["share"]) == "1.0"
    assert written["prices"] == [[("a", "b"), 1.0], [("b", "a"), 2.0]]


def test_a_reader_takes_the_place_of_the_usual_one() -> None:
    def read_inner(value: object, where: str) -> Inner:
        return Inner(int(read_table(value, where)["half"]) * 2)

    table = {"name": "x", "inners": [{"half": 3}], "more": 1}
    readers = {Inner: read_inner}
    assert read_dataclass(Outer, table, readers=readers, extra=("more",)).inners == (Inner(6),)
    assert read_dataclass(Outer, {}, name="given") == Outer("given")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nam": 1}, "nam is not a key; did you mean 'name'?"),
        ({"zzz": 1}, "zzz is not a key; valid keys are name, kind, "),
        ({"name": None}, "name is None; it must be a string"),
        ({"kind": "A"}, "kind is 'A'; give one of 'a', 'b'; did you mean 'a'?"),
        ({"kind": 1}, "kind is 1; it must be a string"),
        ({"flag": 1}, "flag is 1; it must be true or false"),
        ({"share": True}, "share is True; it must be a number"),
        ({"ranks": [0, ["a"]]}, "ranks[1][0] is 'a'; it must be an integer"),
        ({"ranks": 3}, "ranks is 3; it must be a list of integers"),
        ({"pair": ["p"]}, "pair is ['p']; it must be [name, number]"),
        ({"sizes": [3]}, "sizes[0] is 3; write a size with its unit"),
        ({"times": {"F": "x"}}, "times.F is 'x'; it must be a number"),
        ({"inner": 3}, "inner is 3; it must be a table"),
        ({"inner": {}}, "inner.even is missing; add it"),
        ({"inners": {"even": 2}}, "inners is {'even': 2}; it must be a list of tables, in TOML"),
        ({"inners": [{"even": "2"}]}, "inners[0].even is '2'; it must be an integer"),
    ],
)
def test_a_wrong_table_is_refused_naming_place_and_mend(change: dict[str, Any], message: str) -> None:
    with pytest.raises(FileError) as error:
        read_dataclass(Outer, FULL | change)
    assert str(error.value).startswith(message)
    with pytest.raises(FileError) as error:
        read_dataclass(Outer, FULL | change, "here[0]")
    assert str(error.value).startswith(f"here[0].{message}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 3}, "name is 3; it must be a string"),
        ({"level": 3}, "level is 3; give one of 0, 1, 2"),
        ({"ranks": [1]}, "ranks is [1]; it must be a tuple"),
        ({"ranks": (0, (1, -1))}, "ranks[1][1] is -1; give 0 or more"),
        ({"pair": ("p", 1, 2)}, "pair is ('p', 1, 2); it must be a tuple"),
        ({"inner": {}}, "inner is {}; it must be of type Inner"),
        ({"inners": (Inner(3),)}, "inners[0].even is 3; give an even one"),
        ({"inner": Inner(2, -1e-5)}, "inner.wait is -10us; give 0s or more"),
        ({"times": (("F", "x"),)}, "times.F is 'x'; it must be a number"),
    ],
)
def test_a_wrong_value_is_refused_naming_place_and_mend(change: dict[str, Any], message: str) -> None:
    with pytest.raises(FileError) as error:
        check_dataclass(Outer(**({"name": "x"} | change)))
    assert str(error.value).startswith(message)
