"""Finds code that changes the state's facts or indexes, by reading it.

What counts as a fact is read from the classes: the fields of `Facts` and `Indexes`, and every
mutable class that these fields hold, such as Job, Member, Room. A name is followed from where it is
bound (a parameter's type, an assignment, a loop) to where something is stored through it. Private
fields of such a class are its own caches and may be written by its own methods.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Iterable, Iterator
from enum import Enum
from functools import cache
from typing import Any

import msgspec

from shoal.core.state.facts import Facts
from shoal.core.state.indexes import Indexes

FIELDS = frozenset(vars(Indexes()))
STATES = {"state", "_state"}  # what a state is called, wherever it is used
# Methods that change a list, dict or set; and functions that change their first argument.
CHANGING = {
    *("add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove"),
    *("reverse", "setdefault", "sort", "update"),
    *("difference_update", "intersection_update", "symmetric_difference_update"),
}
CHANGING_FUNCTIONS = {"heappush", "heappop", "heapify", "heapreplace", "insort", "setattr"}
INSIDE = {"get", "items", "keys", "pop", "popitem", "setdefault", "values"}  # give what is inside
AROUND = {"dict", "enumerate", "iter", "list", "map", "reversed", "sorted", "tuple", "zip"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
THROUGH = {"next", "min", "max", "cast"}


class Held(Enum):
    """What an expression is: nothing of the state, a part of it, or a new list of such parts."""

    NO = 0
    PART = 1
    LIST = 2


@cache
def kinds() -> dict[str, str]:
    """The mutable classes that facts and indexes are made of, with the modules they are in."""
    found: dict[str, str] = {}
    todo: list[type] = [Facts, Indexes]
    while todo:
        kind = todo.pop()
        module = vars(sys.modules[kind.__module__])
        for node in ast.walk(ast.parse(inspect.getsource(kind))):
            other: Any = module.get(node.id) if isinstance(node, ast.Name) else None
            if _is_mutable(other) and other.__name__ not in found:
                found[other.__name__] = other.__module__
                todo.append(other)
    return found


def _is_mutable(kind: Any) -> bool:
    if not isinstance(kind, type) or not kind.__module__.startswith("shoal."):
        return False
    if kind.__name__.startswith("_"):
        return False
    if issubclass(kind, (Enum, tuple)):
        return False
    return not (issubclass(kind, msgspec.Struct) and kind.__struct_config__.frozen)


@cache
def changers() -> frozenset[str]:
    """Methods of these classes, and functions of their modules, that change what they are given."""
    names: set[str] = set()
    for module in sorted(set(kinds().values())):
        tree = ast.parse(inspect.getsource(sys.modules[module]))
        known, before = set(kinds()), None
        while before != names:  # until no more are found that call one
            before = set(names)
            for function in functions(tree):
                found = frozenset(names)
                if any(Search(function, known, set(), found, found, own=True).writes()):
                    names.add(function.name)
    return frozenset(name for name in names if not name.startswith("__"))


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]


def writes(tree: ast.Module) -> Iterator[ast.AST]:
    """Every place in a module where a fact or an index is changed."""
    imported = [
        (node.module or "", alias)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    known = {alias.asname or alias.name for module, alias in imported if _is_kind(module, alias)}
    if not known and not any(_is_state(node) for node in ast.walk(tree)):
        return
    homes = set(kinds().values())
    given = frozenset(alias.name for module, alias in imported if module in homes) & changers()
    scopes = functions(tree)
    returning = {one.name for one in scopes if one.returns and _names(one.returns) & known}
    rest = [one for one in tree.body if not isinstance(one, (*FUNCTIONS, ast.ClassDef))]
    seen: set[int] = set()
    for scope in [*scopes, ast.Module(rest, [])]:
        for node in Search(scope, known, returning, changers(), given).writes():
            if node.lineno not in seen:
                seen.add(node.lineno)
                yield node


def _is_kind(module: str, alias: ast.alias) -> bool:
    home = kinds().get(alias.name)
    if home is None or not module.startswith("shoal."):
        return False
    found = getattr(importlib.import_module(module), alias.name)  # it may be passed on from there
    return bool(found.__module__ == home)


def _is_state(node: ast.AST) -> bool:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name in STATES
    return False


def _names(annotation: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)}


class Search:
    """One function, or a module outside its functions. `known`: names of the classes; `returning`:
    functions that return one; `methods` and `given`: methods and functions that change what they
    are given. `own`: it is in the module of the class that it may change."""

    def __init__(
        self,
        scope: ast.AST,
        known: set[str],
        returning: set[str],
        methods: frozenset[str],
        given: frozenset[str],
        *,
        own: bool = False,
    ) -> None:
        self.nodes = list(ast.walk(scope))
        self.known = known
        self.returning = returning | {"job_numbered"}
        self.methods = CHANGING | methods
        self.given = CHANGING_FUNCTIONS | given
        self.own = own
        self.names: dict[str, Held] = {}
        before = None
        while before != self.names:  # a name may be bound below where it is used, in a loop
            before = dict(self.names)
            self._bind()

    def _bind(self) -> None:
        for node in self.nodes:
            if isinstance(node, ast.arg):
                if node.annotation is not None and _names(node.annotation) & self.known:
                    self.names[node.arg] = Held.PART
                if self.own and node.arg == "self":
                    self.names["self"] = Held.PART
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    self._bind_to(target, node.value)
            elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
                self._bind_to(node.target, node.value)
            elif isinstance(node, (ast.For, ast.comprehension)) and self.held(node.iter).value:
                self._mark(node.target, Held.PART)

    def _bind_to(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, other in zip(target.elts, value.elts, strict=False):
                self._bind_to(one, other)
        elif (held := self.held(value)) is not Held.NO:
            self._mark(target, Held.PART if isinstance(target, ast.Tuple) else held)

    def _mark(self, target: ast.expr, held: Held) -> None:
        for node in ast.walk(target):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.names[node.id] = held
        if isinstance(target, ast.Attribute):
            self.names[ast.unparse(target)] = held

    def held(self, node: ast.expr | None) -> Held:
        match node:
            case ast.Name(id=name):
                return self.names.get(name, Held.NO)
            case ast.Attribute(value=base, attr=attr):
                if _is_state(base) and attr in FIELDS:
                    return Held.PART
                if self.own and attr.startswith("_"):
                    return Held.NO  # its own cache
                if self.held(base) is Held.PART:
                    return Held.PART
                return self.names.get(ast.unparse(node), Held.NO)
            case ast.Subscript(value=base):
                return Held.NO if self.held(base) is Held.NO else Held.PART
            case ast.Starred(value=base):
                return self.held(base)
            case ast.Call():
                return self._held_by_call(node)
            case ast.IfExp(body=one, orelse=other):
                return _any([self.held(one), self.held(other)])
            case ast.BoolOp(values=values):
                return _any(self.held(value) for value in values)
            case ast.NamedExpr(value=value):
                return self.held(value)
            case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
                some = _any(self.held(part) for part in parts)
                return Held.NO if some is Held.NO else Held.LIST
            case ast.ListComp(elt=part) | ast.SetComp(elt=part) | ast.GeneratorExp(elt=part):
                return Held.NO if self.held(part) is Held.NO else Held.LIST
            case ast.DictComp(value=part):
                return Held.NO if self.held(part) is Held.NO else Held.LIST
        return Held.NO

    def _held_by_call(self, node: ast.Call) -> Held:
        arguments = _any(self.held(argument) for argument in node.args)
        match node.func:
            case ast.Attribute(value=base, attr=attr) if attr in INSIDE:
                return Held.NO if self.held(base) is Held.NO else Held.PART
            case ast.Attribute(attr=attr) if attr in self.returning:
                return Held.PART
            case ast.Name(id=name) if name in AROUND and arguments is not Held.NO:
                return Held.LIST
            case ast.Name(id=name) if name in THROUGH and arguments is not Held.NO:
                return Held.PART
            case ast.Name(id=name) if name in self.returning:
                return Held.PART
        return Held.NO

    def writes(self) -> Iterator[ast.expr | ast.stmt]:
        for node in self.nodes:
            match node:
                case ast.Assign(targets=targets) | ast.Delete(targets=targets):
                    found = any(self._stores(target) for target in targets)
                case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
                    found = self._stores(target)
                case ast.Call():
                    found = self._changes(node)
                case _:
                    continue
            if found:
                yield node

    def _stores(self, target: ast.expr) -> bool:
        match target:
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                return any(self._stores(part) for part in parts)
            case ast.Attribute(value=base, attr=attr):
                if self.own and attr.startswith("_"):
                    return False
                return self.held(base) is Held.PART or (_is_state(base) and attr in FIELDS)
            case ast.Subscript(value=base):
                return self.held(base) is Held.PART
        return False

    def _changes(self, node: ast.Call) -> bool:
        match node.func:
            case ast.Attribute(value=base, attr=attr) if attr in self.methods:
                if self.held(base) is Held.PART:
                    return True
        name = getattr(node.func, "id", "")
        if name in self.given or getattr(node.func, "attr", "") in CHANGING_FUNCTIONS:
            return self.held(node.args[0] if node.args else None) is Held.PART
        return False


def _any(helds: Iterable[Held]) -> Held:
    return next((held for held in helds if held is not Held.NO), Held.NO)
