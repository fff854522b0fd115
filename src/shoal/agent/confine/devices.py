"""The files of this machine's GPUs: those that a member was not given cannot be opened by it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from shoal.model.commands import Launch
from shoal.model.resources import WHOLE_GPU_MILLI

GPU_DEVICES = "SHOAL_GPU_DEVICES"
DEFAULT = "/dev/nvidia*"  # `*` stands for the number
VISIBLE = "CUDA_VISIBLE_DEVICES"


class Device(NamedTuple):
    path: str
    major: int
    minor: int


def devices(pattern: str = "") -> dict[int, Device]:
    """The GPUs' files by number, as they are now: a driver may make them late."""
    before, _, after = (pattern or os.environ.get(GPU_DEVICES) or DEFAULT).partition("*")
    folder, start = os.path.split(before)
    found = {}
    try:
        names = os.listdir(folder)
    except OSError:
        return {}
    for name in names:
        number = name.removeprefix(start).removesuffix(after)
        if not name.startswith(start) or f"{start}{number}{after}" != name:
            continue
        if not (number.isascii() and number.isdecimal()):
            continue
        path = f"{folder}/{name}"
        if stat.S_ISCHR((info := os.stat(path)).st_mode):
            found[int(number)] = Device(path, os.major(info.st_rdev), os.minor(info.st_rdev))
    return found


def given(launch: Launch) -> set[int]:
    """Members of a gang that share their GPUs as torchrun's processes do may open all of them. The
    controller sets the variable, not the job; a share's daemon changes its meaning."""
    found = set(launch.gpus)
    if launch.gpu_milli == WHOLE_GPU_MILLI:
        words = launch.env.get(VISIBLE, "").split(",")
        found |= {int(word) for word in words if word.isdecimal()}
    return found


def withheld(launch: Launch, found: Mapping[int, Device]) -> dict[int, Device]:
    mine = given(launch)
    return {number: device for number, device in found.items() if number not in mine}


def renumbered(visible: str, found: Iterable[int], gone: Iterable[int]) -> str:
    """CUDA counts only the GPUs that it can open, from 0."""
    left = sorted(set(found) - set(gone))
    place = {str(number): str(index) for index, number in enumerate(left)}
    return ",".join(place.get(word, word) for word in visible.split(","))
