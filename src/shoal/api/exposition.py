"""Metrics in the text format of Prometheus, version 0.0.4.

Written by hand because it is one page of code, and because with 16,000 GPUs the client library
takes half a second of the controller's time and this takes a tenth of that (bench/observe.py)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from shoal.control.counters import Histogram

PIECE = 4000  # samples written before other work gets a turn
CONTENT_TYPE = "text/plain; version=0.0.4"  # the server adds the charset

_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


def family(
    name: str, kind: str, text: str, samples: Iterable[tuple[Mapping[str, str], float | None]]
) -> str:
    """One metric with all its samples; nothing if there are none."""
    lines = [f"{name}{labels(own)} {number(value)}" for own, value in samples if value is not None]
    return _headed(name, kind, text, lines)


def large_family(
    name: str, kind: str, text: str, marks: Sequence[str], values: Sequence[float | None]
) -> Iterator[str]:
    """The same in pieces, with labels that are already text: for a metric of thousands of samples,
    which would otherwise block the controller."""
    begun = False
    for start in range(0, len(marks), PIECE):
        lines = [
            f"{name}{mark} {number(value)}"
            for mark, value in zip(
                marks[start : start + PIECE], values[start : start + PIECE], strict=True
            )
            if value is not None
        ]
        if lines:
            yield "\n".join(lines) + "\n" if begun else _headed(name, kind, text, lines)
            begun = True


def simple(name: str, kind: str, text: str, value: float | None) -> str:
    return family(name, kind, text, [({}, value)])


def histogram(name: str, text: str, seen: Histogram) -> str:
    lines, total = [], 0
    for bound, count in zip((*seen.bounds, None), seen.counts, strict=True):
        total += count
        edge = "+Inf" if bound is None else number(bound)
        lines.append(f'{name}_bucket{{le="{edge}"}} {total}')
    lines += [f"{name}_sum {number(seen.sum)}", f"{name}_count {total}"]
    return _headed(name, "histogram", text, lines)


def labels(own: Mapping[str, str]) -> str:
    if not own:
        return ""
    return "{" + ",".join(f'{name}="{escaped(value)}"' for name, value in own.items()) + "}"


def escaped(value: str) -> str:
    return value if value.isalnum() else value.translate(_ESCAPES)


def number(value: float) -> str:
    if type(value) is int:
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return str(int(value))
    return repr(float(value))


def _headed(name: str, kind: str, text: str, lines: list[str]) -> str:
    if not lines:
        return ""
    return f"# HELP {name} {text}\n# TYPE {name} {kind}\n" + "\n".join(lines) + "\n"
