"""Writes what follows from the table of calls: `make generate`. A test looks that it was done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent


def asynchronous(text: str) -> str:
    """The calls of the asynchronous client, one line each."""
    from shoal.sdk.asynchronous import NOT_CALLS, OWN
    from shoal.sdk.client import Client

    names = [name for name in dir(Client) if not name.startswith("_")]
    lines = [f"    {name} = _call(Client.{name})" for name in names if name not in NOT_CALLS | OWN]
    return _between(text, "    # -- made by `make generate` --\n", "    # -- end --\n", lines)


FILES: dict[str, Callable[[str], str]] = {
    "src/shoal/sdk/asynchronous.py": asynchronous,
}


def _between(text: str, begin: str, end: str, lines: list[str]) -> str:
    head, _, rest = text.partition(begin)
    return f"{head}{begin}" + "".join(f"{line}\n" for line in lines) + end + rest.partition(end)[2]


def main() -> None:
    for name, make in FILES.items():
        path = ROOT / name
        before = path.read_text() if path.exists() else ""
        path.parent.mkdir(exist_ok=True)
        path.write_text(make(before))


if __name__ == "__main__":
    main()
