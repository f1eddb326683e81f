"""Types of the values in records, and the function that checks a value against its type.

A Literal lists the allowed values, `| None` allows JSON's null, Annotated gives the smallest and
the largest number, a text's length, or an object's names; a dataclass is an object with its fields.
"""

import functools
import reprlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from harness.records.units import clean

SHORTEST, LONGEST = 1e-9, 1e15  # ms of a call: no clock measures less, nobody waits longer
LARGEST = 10**36  # far above every count of a problem
Time = Annotated[float, SHORTEST, LONGEST]
Spread = Annotated[float, 0, LONGEST]  # ms
Rate = Annotated[float, 0, 1e40]
Loss = Annotated[float, -1e15, 1e15]
Size = Annotated[int, 1, 2**63 - 1]  # torch's largest integer
Count = Annotated[int, 0, 2**63 - 1]
Bytes = Annotated[int, 1, LARGEST]
Name = Annotated[str, 1, 200]
Check = Callable[[Any, str], Any]  # of a value, which has a name; returns it safe to print
Code = Annotated[str, 0, 100_000, "kept as it is"]
# a type -> its name in messages, and its smallest and largest value
TYPES: dict[type, tuple[str, float, float]] = {
    int: ("a whole number", 0, LARGEST),
    float: ("a number", -sys.float_info.max, sys.float_info.max),
    str: ("a text", 0, 100_000),
    bool: ("true or false", 0, 1), list: ("a list", 0, 0), dict: ("an object", 0, 0),
}  # fmt: skip


class BadRecord(ValueError):
    """A line of a results file is not a record; the message says which line and why."""


@functools.cache
def rules(schema: type) -> dict[str, Any]:
    """Map each field of `schema` to its type."""
    return get_type_hints(schema, include_extras=True)


@functools.cache
def checks(schema: type) -> tuple[list[str], dict[str, Check]]:
    """The fields of `schema` that every record has, and the check of each that it may have."""
    needed = [field.name for field in fields(schema) if field.default is MISSING]
    return needed, {name: made(hint) for name, hint in rules(schema).items()}


def check_fields(record: Mapping[str, Any], schema: type, where: str = "") -> dict[str, Any]:
    """Check the fields of `record` against `schema`; `where` is put before names in messages."""
    needed, known = checks(schema)
    for name in needed:
        if name not in record:
            raise BadRecord(f"no field {where + name!r}")
    if strange := [name for name in record if name not in known]:
        raise BadRecord(f"unknown field {reprlib.repr(where + strange[0])}")
    return {name: known[name](value, where + name) for name, value in record.items()}


def check(value: Any, hint: Any, where: str) -> Any:
    """Check `value` against the type `hint` and return it safe to print; `where` names it."""
    return made(hint)(value, where)


@functools.cache
def made(hint: Any) -> Check:
    """Make the function that checks a value, named in messages, against the type `hint`.

    It is made once for each type: a file has hundreds of thousands of values.
    """
    origin, inside = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        present = made(inside[0])
        return lambda value, where: None if value is None else present(value, where)
    if hint is Any:
        return lambda value, where: clean(value)
    if origin is Literal:

        def one_of(value: Any, where: str) -> Any:
            if value not in inside:
                raise bad(where, value, f"one of {', '.join(inside)}")
            return value

        return one_of
    if isinstance(hint, type) and is_dataclass(hint):

        def an_object(value: Any, where: str) -> Any:
            if type(value) is not dict:
                raise bad(where, value, TYPES[dict][0])
            return check_fields(value, hint, f"{where}.")

        return an_object
    if origin is Annotated and get_origin(inside[0]) is dict:
        held = made(inside[0])

        def complete(value: Any, where: str) -> Any:
            if {*(found := held(value, where))} != {*inside[1]}:
                raise bad(where, value, f"an object with the names {', '.join(inside[1])}")
            return found

        return complete
    return of_kind(*inside) if origin is Annotated else of_kind(origin or hint, inside=inside)


def of_kind(kind: type, *limits: Any, inside: tuple[Any, ...] = ()) -> Check:
    """Make the check of a value of one of TYPES, within `limits` or with values as `inside`."""
    words, *bounds = TYPES[kind]
    # Python counts bool as int; a record does not
    types = (int, float) if kind is float else (kind,)
    least, most, *code = limits or bounds
    each = made(inside[-1]) if kind in (list, dict) else None

    def checked(value: Any, where: str) -> Any:
        if type(value) not in types:
            raise bad(where, value, words)
        if each and kind is list:
            return [each(item, f"{where}[{i}]") for i, item in enumerate(value)]
        if each:
            names = {name: f"{where}[{reprlib.repr(name)}]" for name in value}
            return {clean(name): each(x, names[name]) for name, x in value.items()}
        if kind is bool:
            return value
        if not least <= (len(value) if kind is str else value) <= most:
            unit = " characters long" if kind is str else ""
            raise bad(where, value, f"{words}, {least:g} to {most:g}{unit}")
        return clean(value) if kind is str and not code else value

    return checked


def bad(where: str, value: Any, expected: str) -> BadRecord:
    """The error for a `value` that isn't what is expected."""
    return BadRecord(f"{where}: got {reprlib.repr(value)}, expected {expected}")
