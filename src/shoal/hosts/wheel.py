"""Builds a wheel of the running Shoal, however it was installed, so that hosts get the same."""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from shoal import extensions

# The same files always make the same bytes, so that the digest identifies the content.
THEN = (1980, 1, 1, 0, 0, 0)
LEFT_OUT = ("__pycache__",)


class Wheel(NamedTuple):
    name: str
    data: bytes
    digest: str


def build(version: str) -> Wheel:
    info = f"shoal-{version}.dist-info"
    files = dict(_package())
    files[f"{info}/METADATA"] = _metadata(version)
    files[f"{info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: shoal\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    files[f"{info}/entry_points.txt"] = _entry_points()
    record = "".join(f"{name},sha256={_hash(data)},{len(data)}\n" for name, data in files.items())
    files[f"{info}/RECORD"] = (record + f"{info}/RECORD,,\n").encode()
    data = _pack(files)
    return Wheel(f"shoal-{version}-py3-none-any.whl", data, hashlib.sha256(data).hexdigest())


def _package() -> list[tuple[str, bytes]]:
    root = Path(__file__).parent.parent
    return [
        (f"shoal/{path.relative_to(root)}", path.read_bytes())
        for path in sorted(root.rglob("*"))
        if path.is_file() and not any(part in LEFT_OUT for part in path.parts)
    ]


def _metadata(version: str) -> bytes:
    """With dependencies and extras. An editable install's metadata may be of an older version."""
    told = metadata.metadata("shoal")
    kept = [
        f"{name}: {value}"
        for name in ("Requires-Python", "Requires-Dist", "Provides-Extra")
        for value in told.get_all(name) or ()
    ]
    return "\n".join(
        ["Metadata-Version: 2.1", "Name: shoal", f"Version: {version}", *kept, ""]
    ).encode()


def _entry_points() -> bytes:
    """The command, and the extensions that are ours."""
    text = ""
    for group in ("console_scripts", *extensions.GROUPS):
        found = metadata.entry_points(group=group)
        ours = [entry for entry in found if entry.module.startswith("shoal.")]
        text += f"[{group}]\n" + "".join(f"{entry.name} = {entry.value}\n" for entry in ours)
    return text.encode()


def _hash(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _pack(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, THEN)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data)
    return packed.getvalue()
