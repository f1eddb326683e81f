"""Types of the values in records, and the function that checks a value against its type.

A Literal lists the allowed values, `| None` allows JSON's null, Annotated gives the smallest and
the largest number, a text's length, or an object's names; a dataclass is an object with its fields.
"""

import functools
import reprlib
import sys
from collections.abc import Mapping
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


def check_fields(record: Mapping[str, Any], schema: type, where: str = "") -> dict[str, Any]:
    """Check the fields of `record` against `schema`; `where` is put before names in messages."""
    known = rules(schema)
    for field in fields(schema):
        if field.default is MISSING and field.name not in record:
            raise BadRecord(f"no field {where + field.name!r}")
    if strange := [name for name in record if name not in known]:
        raise BadRecord(f"unknown field {reprlib.repr(where + strange[0])}")
    return {name: check(value, known[name], where + name) for name, value in record.items()}


def check(value: Any, hint: Any, where: str) -> Any:
    """Check `value` against the type `hint` and return it safe to print; `where` names it."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return None if value is None else check(value, inside[0], where)
    if hint is Any:
        return clean(value)
    if origin is Literal:
        if value not in inside:
            raise bad(where, value, f"one of {', '.join(inside)}")
        return value
    if isinstance(hint, type) and is_dataclass(hint):
        return check_fields(check(value, dict[str, Any], where), hint, f"{where}.")
    if origin is Annotated and get_origin(inside[0]) is dict:
        if {*check(value, inside[0], where)} != {*inside[1]}:
            raise bad(where, value, f"an object with the names {', '.join(inside[1])}")
        return check(value, inside[0], where)
    kind, *limits = inside if origin is Annotated else (origin or hint,)
    words, *bounds = TYPES[kind]
    # Python counts bool as int; a record does not
    if type(value) not in ((int, float) if kind is float else (kind,)):
        raise bad(where, value, words)
    if kind is list:
        return [check(item, inside[0], f"{where}[{i}]") for i, item in enumerate(value)]
    if kind is dict:
        names = {name: f"{where}[{reprlib.repr(name)}]" for name in value}
        return {clean(name): check(x, inside[1], names[name]) for name, x in value.items()}
    if kind is bool:
        return value
    least, most, *code = limits or bounds
    if not least <= (len(value) if kind is str else value) <= most:
        unit = " characters long" if kind is str else ""
        raise bad(where, value, f"{words}, {least:g} to {most:g}{unit}")
    return value if code else clean(value)


def bad(where: str, value: Any, expected: str) -> BadRecord:
    """The error for a `value` that isn't what is expected."""
    return BadRecord(f"{where}: got {reprlib.repr(value)}, expected {expected}")
