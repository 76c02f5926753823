"""What the trace of a function depends on, as a hashable value: functions of equal states have the same trace.

A trace runs a function, which may refer to what changes: variables, defaults, numbers in modules, other functions. The
state has all that the code can reach, and there is none of what cannot be told: then the function is traced again. So
what is known to be harmless is listed, and the rest is refused; code that writes what outlives its run is refused too.

States hold code, constants and built-in functions, and neither functions nor their globals, which may hold arrays.
"""

from __future__ import annotations

import builtins
import dis
import functools
import math
import operator
import sys
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

from flashgen.ir.expr import text
from flashgen.trace.value import Value

PACKAGE = __name__.partition(".")[0]
LARGEST = 1024  # values in a state: to compare more of them takes longer than a trace
DEEPEST = 32  # functions that call each other, and tuples in each other
KEPT = 1024  # codes whose reads are kept

_CALLED = "abs all any divmod isinstance iter len max min next pow round sorted sum"
_TYPES = "bool dict enumerate filter float frozenset int list map object range reversed set slice str tuple zip"
# What gives the same of the same arguments, and reaches nothing else.
PURE = frozenset(
    [vars(builtins)[name] for name in f"{_CALLED} {_TYPES}".split()]
    + [item for item in vars(builtins).values() if isinstance(item, type) and issubclass(item, BaseException)]
    + [item for module in (math, operator) for item in vars(module).values() if type(item) is BuiltinFunctionType]
    + [functools.reduce]
)

NEWEST = (3, 13)  # whose opcodes the tests have been run with: one that writes may have another name in a later Python
# Code that writes to what outlives it, or reads by names that are not seen here: imports, the bodies of classes.
REFUSED = {"STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR", "IMPORT_NAME", "LOAD_BUILD_CLASS"} | {
    *("LOAD_NAME", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_GLOBALS", "LOAD_FROM_DICT_OR_DEREF", "MATCH_CLASS")
}
ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
# Attributes through which a function gives its globals or its frame away: f.__globals__, "{0.__globals__}".format(f).
HIDDEN = ("__", "gi_", "cr_", "ag_")
FORMATS = ("format", "format_map")

Path = tuple[str, ...]  # attributes that are asked of a variable at once


class _Missing:
    """What a name stands for that is not defined."""


class _Untold(Exception):
    """There is no state."""


def state(value: Any) -> Hashable | None:
    """The state of a function, of a plain value (None, bool, int, float, str), or of a tuple of these.

    None where it cannot be told, and of None. It is that of this moment.
    """
    try:
        return _Walk().of(value)
    except _Untold:
        return None


class _Walk:
    """One look at everything that a value leads to."""

    def __init__(self) -> None:
        self.left = LARGEST
        self.depth = DEEPEST
        self.seen: dict[FunctionType, int] = {}  # by number: functions may call each other

    def of(self, value: Any) -> Hashable:
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:  # with the type, as 1 == True == 1.0
            return kind, value
        if kind is float:
            return kind, value.hex()  # 0.0 == -0.0, and NaN is no number's equal
        if kind is tuple:
            return kind, self.each(value)
        if kind is FunctionType:
            return self.function(value)
        if kind is Value:  # flashgen.seqlen_k and what was computed of it
            return kind, value.kind, text(value.expr)
        if (kind is BuiltinFunctionType or kind is type) and (value in PURE or value is _Missing):
            return value
        raise _Untold

    def each(self, values: tuple) -> Hashable:
        self.left -= len(values)
        self.depth -= 1
        if self.left < 0 or self.depth < 0:
            raise _Untold
        found = tuple([item if item is None or item is False else self.of(item) for item in values])
        self.depth += 1
        return found

    def function(self, function: FunctionType) -> Hashable:
        if function in self.seen:
            return FunctionType, self.seen[function]
        self.seen[function] = len(self.seen)
        code, closure = function.__code__, function.__closure__
        module = function.__globals__.get("__name__")
        trusted = isinstance(module, str) and module.partition(".")[0] == PACKAGE  # whose globals do not change
        if trusted and not closure:
            return FunctionType, code
        named = [tuple(dict.items(x)) if x else None for x in (function.__kwdefaults__, vars(function))]
        reached = [_contents(cell) for cell in closure or ()] if trusted else _reached(function)
        return FunctionType, code, code.co_flags, self.each((function.__defaults__, *named, *reached))


def _reached(function: FunctionType) -> list[Any]:
    """The values of the variables that a function reads, and of attributes of modules among them."""
    reads = _reads(function.__code__)
    own, builtin = function.__globals__, function.__builtins__  # type: ignore[attr-defined]
    if reads is None or type(own) is not dict or type(builtin) is not dict:
        raise _Untold
    found = [_at(own.get(name, builtin.get(name, _Missing)), path) for name, path in reads.globals]
    if function.__closure__:
        found += [_at(_contents(function.__closure__[place]), path) for place, path in reads.cells]
    return found


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _Missing


def _at(value: Any, path: Path) -> Any:
    """What attributes of a module are; those of other things are part of them."""
    for name in path:
        if type(value) is not ModuleType:
            break
        if name not in vars(value) and "__getattr__" in vars(value):
            raise _Untold
        value = vars(value).get(name, _Missing)
    return value


@dataclass
class _Reads:
    """What code reads, each once and in a fixed order: globals by name, cells by their place in the closure."""

    globals: dict[tuple[str, Path], None] = field(default_factory=dict)
    cells: dict[tuple[int, Path], None] = field(default_factory=dict)


@lru_cache(KEPT)
def _reads(code: CodeType) -> _Reads | None:
    """What code and the functions in it read; None for code that has no state."""
    found = _Reads()
    if sys.version_info[:2] > NEWEST:
        return None
    for part in _parts(code):
        steps = [(item.opname, item.argval) for item in dis.get_instructions(part) if item.opname != "EXTENDED_ARG"]
        for place, (op, name) in enumerate(steps):
            if op in REFUSED or (op in ("STORE_DEREF", "DELETE_DEREF") and name in code.co_freevars):
                return None
            if op in ATTRIBUTES and (name.startswith(HIDDEN) or name in FORMATS):
                return None
            if op == "LOAD_GLOBAL":
                found.globals[name, _path(steps, place + 1)] = None
            elif op == "LOAD_DEREF" and name in code.co_freevars:
                found.cells[code.co_freevars.index(name), _path(steps, place + 1)] = None
    return found


def _path(steps: list[tuple[str, Any]], place: int) -> Path:
    """The attributes that are loaded from a place on."""
    end = place
    while end < len(steps) and steps[end][0] in ATTRIBUTES:
        end += 1
    return tuple(name for _, name in steps[place:end])


def _parts(code: CodeType) -> Iterator[CodeType]:
    """The code, and that of lambdas, comprehensions and functions in it."""
    yield code
    for constant in code.co_consts:
        if type(constant) is CodeType:
            yield from _parts(constant)
