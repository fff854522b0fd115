"""A job's labels and its newest note, each on one line."""

from __future__ import annotations

from shoal.model.job import Note
from shoal.model.phrases import printable, shortened
from shoal.model.resources import plural

WIDTH = 86


def annotation_lines(labels: dict[str, str], notes: list[Note]) -> list[str]:
    lines = []
    if labels:
        words = (f"{key}={value}" if value else key for key, value in labels.items())
        lines.append(shortened(f"labels: {', '.join(words)}", WIDTH))
    if notes:
        newest = notes[-1]
        text = f"note by {newest.who}: " if newest.who else "note: "
        more = f" ({plural(len(notes) - 1, 'older note')})" if len(notes) > 1 else ""
        said = printable(text + " ".join(newest.text.split()))
        lines.append(shortened(said, WIDTH - len(more)) + more)
    return lines
