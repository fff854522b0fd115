"""Reads node and pod lists in the openb format and draws the published order of arrivals."""

from __future__ import annotations

import csv
import gzip
import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TextIO, TypeVar

from shoal.core.books.vacancy import WHOLE, Footprint, Vacancy

NODE_FIELDS = ("sn", "cpu_milli", "memory_mib", "gpu", "model")
POD_FIELDS = ("name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli")

T = TypeVar("T")


class BadList(Exception):
    """The list cannot be read; the message names file, row and field."""


class Node(NamedTuple):
    name: str
    room: Vacancy  # when it is empty


class Pod(NamedTuple):
    name: str
    task: Footprint


def read_nodes(path: Path) -> list[Node]:
    """The nodes, by name."""
    nodes = sorted(_read(path, NODE_FIELDS, _node))
    for first, second in pairwise(nodes):
        if first.name == second.name:
            raise BadList(f"{path}: two nodes are named {first.name}")
    if not sum(len(node.room.gpus) for node in nodes):
        raise BadList(f"{path}: no node has a GPU")
    return nodes


def read_pods(path: Path) -> list[Pod]:
    """The pods, by name: the order that the shuffle starts from."""
    pods = sorted(_read(path, POD_FIELDS, _pod))
    if not any(pod.task.milli for pod in pods):
        raise BadList(f"{path}: no pod asks for a GPU, so the cluster would never fill")
    return pods


def capacity_milli(nodes: list[Node]) -> int:
    return sum(sum(node.room.gpus) for node in nodes)


def arrivals(pods: list[Pod], capacity: int, arrived: float, seed: int) -> list[Footprint]:
    """Each pod once in random order, then drawn with replacement, until the demand is reached.

    A list that asks for more is cut by random removal, so that its mix is kept.
    """
    generator = random.Random(seed)
    tasks = [pod.task for pod in pods]
    generator.shuffle(tasks)
    demand = sum(task.milli for task in tasks)
    goal = arrived * capacity
    while demand < goal:
        task = pods[generator.randrange(len(pods))].task
        tasks.append(task)
        demand += task.milli
    while demand > goal:
        index = generator.randrange(len(tasks))
        if demand - tasks[index].milli < goal:
            break
        demand -= tasks.pop(index).milli
    return tasks


def _read(path: Path, fields: tuple[str, ...], parse: Callable[[_Row], T]) -> Iterator[T]:
    """One parsed value per row. Row 1 is the header, as in an editor."""
    try:
        with _open(path) as file:
            reader = csv.DictReader(file)
            missing = [field for field in fields if field not in (reader.fieldnames or ())]
            if missing:
                raise BadList(f"{path}: the header lacks the field {missing[0]}")
            count = 0
            for row in reader:
                count += 1
                yield parse(_Row(path, reader.line_num, row))
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise BadList(f"{path}: cannot be read: {error}") from error
    if not count:
        raise BadList(f"{path}: holds a header but no rows")


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


class _Row(NamedTuple):
    path: Path
    number: int
    fields: dict[str, str | None]

    def text(self, field: str) -> str:
        value = (self.fields.get(field) or "").strip()
        if not value:
            raise self.bad(field, "is empty")
        return value

    def integer(self, field: str, most: int | None = None) -> int:
        text = self.text(field)
        try:
            value = int(text)
        except ValueError:
            raise self.bad(field, f"is not an integer: {text!r}") from None
        if value < 0 or (most is not None and value > most):
            allowed = "0 or more" if most is None else f"between 0 and {most}"
            raise self.bad(field, f"must be {allowed}, not {value}")
        return value

    def bad(self, field: str, why: str) -> BadList:
        return BadList(f"{self.path}, row {self.number}, field {field}: {why}")


def _node(row: _Row) -> Node:
    gpus = row.integer("gpu", most=1024)
    room = Vacancy(
        cpu_milli=row.integer("cpu_milli"),
        memory_mb=row.integer("memory_mib"),
        gpus=(WHOLE,) * gpus,
        model=row.text("model") if gpus else "",
    )
    return Node(row.text("sn"), room)


def _pod(row: _Row) -> Pod:
    gpus = row.integer("num_gpu")
    gpu_milli = row.integer("gpu_milli", most=WHOLE) if gpus else 0
    if gpus and not gpu_milli:
        raise row.bad("gpu_milli", "is 0 although num_gpu is not")
    if gpus > 1 and gpu_milli < WHOLE:
        raise row.bad("gpu_milli", f"must be {WHOLE} where num_gpu is above 1, not {gpu_milli}")
    models = {name.strip() for name in (row.fields.get("gpu_spec") or "").split("|")} - {""}
    task = Footprint(
        cpu_milli=row.integer("cpu_milli"),
        memory_mb=row.integer("memory_mib"),
        gpus=gpus,
        gpu_milli=gpu_milli,
        models=tuple(sorted(models)) if gpus else (),
    )
    return Pod(row.text("name"), task)
