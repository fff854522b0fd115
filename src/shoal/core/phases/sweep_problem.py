"""What is wrong with the indices and variables of an array."""

from __future__ import annotations

import msgspec

from shoal.model.job import JobSpec
from shoal.model.report import Refused
from shoal.model.sweep import (
    ELEMENTS_MAX,
    INDEX,
    VALUES_MAX,
    VARIABLES_MAX,
    Sweep,
    filled,
    placeholders,
)


def sweep_problem(spec: JobSpec) -> Refused | None:
    sweep = spec.sweep
    assert sweep is not None
    problem = _indices_problem(sweep) or _variables_problem(sweep, spec)
    if problem is not None:
        return problem
    if not sweep.count:
        return Refused("array", "has no element; write e.g. 0-99")
    if sweep.count > ELEMENTS_MAX:
        return Refused("array", f"has {sweep.count:,} elements; the most is {ELEMENTS_MAX:,}")
    return _placeholder_problem(sweep, spec)


def _indices_problem(sweep: Sweep) -> Refused | None:
    if sweep.ranges and sweep.variables:
        fix = "leave the indices out, and write e.g. array: '%8' for 8 at a time"
        return Refused("array", f"and a sweep both say which elements there are; {fix}")
    last = -1
    for one in sweep.ranges:
        if one.last < one.first:
            return Refused("array", f"{one.first}-{one.last} is backwards")
        if one.first <= last:
            what = "is named twice" if one.first == last else f"comes after {last}"
            return Refused("array", f"{one.first} {what}; write the indices in rising order")
        last = one.last
    return None


def _variables_problem(sweep: Sweep, spec: JobSpec) -> Refused | None:
    if sweep.grid and sweep.rows:
        return Refused("grid", "and list exclude each other; leave one out")
    field = "grid" if sweep.grid else "list"
    if len(sweep.variables) > VARIABLES_MAX:
        return Refused(field, f"has more than {VARIABLES_MAX} variables")
    for name, values in sweep.grid.items():
        if not 0 < len(values) <= VALUES_MAX:
            return Refused(field, f"{name} needs 1 to {VALUES_MAX:,} values")
    if sweep.rows and not sweep.variables:
        return Refused(field, "row 0 has no variable; write e.g. {lr: 0.1}")
    for number, row in enumerate(sweep.rows):
        if row.keys() != sweep.rows[0].keys():
            odd = sorted(row.keys() ^ sweep.rows[0].keys())[0]
            lacking = "lacks" if odd not in row else "alone has"
            return Refused(field, f"row {number} {lacking} {odd}; give all rows the same variables")
    for name in sweep.variables:
        if name == INDEX:
            return Refused(field, "index is the index of an element; choose another name")
        if name in spec.env:
            return Refused(field, f"{name} is in env, too; leave one out")
    texts = [text for values in sweep.grid.values() for text in values]
    texts += [text for row in sweep.rows for text in row.values()]
    if any("\0" in text for text in texts):
        return Refused(field, "holds a NUL byte, which no process can be given; remove it")
    return None


def _placeholder_problem(sweep: Sweep, spec: JobSpec) -> Refused | None:
    """Without variables, braces are the command's own, except for {index}."""
    known = (*sweep.variables, INDEX)
    for word in spec.command if sweep.variables else ():
        for name in placeholders(word):
            if name not in known:
                has = f"the sweep has {', '.join(known)}"
                return Refused(
                    "command",
                    f"{{{name}}} is not a variable; {has} (write {{{{{name}}}}} for the "
                    "text itself)",
                )
    return None


def longest_element(spec: JobSpec) -> JobSpec:
    """As long as an element can get, to see whether every element can start."""
    sweep = spec.sweep
    assert sweep is not None
    values = {name: max(texts, key=_size) for name, texts in sweep.grid.items()}
    for name in sweep.variables if sweep.rows else ():
        values[name] = max((row[name] for row in sweep.rows), key=_size)
    fill = {**values, INDEX: "9" * 9}
    command = tuple(filled(word, fill) for word in spec.command)
    return msgspec.structs.replace(spec, command=command, env={**spec.env, **values}, sweep=None)


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))
