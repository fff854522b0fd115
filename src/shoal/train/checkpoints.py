"""The checkpoint directory: what is saved, what makes a checkpoint whole, and which are kept.

    DIRECTORY/checkpoint-000007-step-1200-3fa9/
        __0_0.distcp, __1_0.distcp, ...   the members' shards, by torch.distributed.checkpoint
        .metadata                         its index
        manifest.json                     written last and atomically: checksums and the position

A checkpoint without a manifest is incomplete and does not count. The first number grows with each
save, so the newest checkpoint is known even if steps were repeated.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import re
import secrets
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import msgspec

from shoal.train.errors import TrainError
from shoal.train.shuffle import Stretch

FORMAT = 2
MANIFEST = "manifest.json"
DAMAGED = "manifest.damaged.json"
NAME = re.compile(r"^checkpoint-(\d{6,})-step-(\d+)-[0-9a-f]{4}\Z")
PART_BYTES = 8 * 1024 * 1024
READERS_MAX = 8


class FileSum(msgspec.Struct, frozen=True):
    """A file's checksum is computed from those of its parts, so they can be verified in
    parallel."""

    size: int
    sha256: str
    part: int = PART_BYTES


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Makes a checkpoint whole."""

    format: int = FORMAT
    step: int  # the step to continue with
    position: int  # in the stream of samples
    seed: int
    stretch: Stretch | None = None
    mark: dict[str, Any] | None = None  # of a stream, in its own words
    world: int
    trained_s: float = 0.0  # over all attempts, for the observed failure rate
    restarts: int = 0
    files: dict[str, FileSum]


class Found(NamedTuple):
    """One checkpoint in the directory."""

    serial: int
    step: int
    name: str
    whole: bool


class Damage(Exception):
    """A checkpoint that must not be used, with the reason."""


class CheckpointStore:
    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise TrainError("checkpoints need fsspec: pip install 'shoal[train]'") from None
        self.url = url.rstrip("/") or "/"
        try:
            self.fs, self._root = url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise TrainError(f"checkpoint directory {url}: {error}") from None
        self.local = "file" in _protocols(self.fs)

    def path(self, *parts: str) -> str:
        return "/".join((self._root, *parts))

    def address(self, name: str) -> str:
        """The path in the form that torch.distributed.checkpoint wants."""
        return f"{self.url}/{name}"

    def probe(self) -> str:
        """Fails at once if nothing can be written here, not after an hour. Returns the name of a
        file that every member should see."""
        name = f".probe-{secrets.token_hex(4)}"
        try:
            self.fs.makedirs(self._root, exist_ok=True)
            with self.fs.open(self.path(name), "wb") as file:
                file.write(b"shoal")
        except Exception as error:
            raise TrainError(
                f"checkpoint directory {self.url} cannot be written: {reason(error)}"
            ) from None
        return name

    def sees(self, name: str) -> bool:
        self.fs.invalidate_cache()
        return bool(self.fs.exists(self.path(name)))

    def remove_probe(self, name: str) -> None:
        with contextlib.suppress(Exception):
            self.fs.rm_file(self.path(name))

    def find(self) -> list[Found]:
        """Newest first."""
        self.fs.invalidate_cache()
        try:
            names = [path.rstrip("/").rsplit("/", 1)[-1] for path in self.fs.ls(self._root, False)]
        except FileNotFoundError:
            return []
        found = []
        for name in names:
            match = NAME.match(name)
            if match:
                whole = self.fs.exists(self.path(name, MANIFEST))
                found.append(Found(int(match[1]), int(match[2]), name, whole))
        return sorted(found, reverse=True)

    def new_name(self, step: int) -> str:
        serial = max((found.serial for found in self.find()), default=0) + 1
        return f"checkpoint-{serial:06}-step-{step}-{secrets.token_hex(2)}"

    # -- whole or not ----------------------------------------------------------------------

    def write_manifest(self, name: str, manifest: Manifest) -> None:
        data = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
        if not self.local:
            self.fs.pipe_file(self.path(name, MANIFEST), data)  # an object store writes atomically
            return
        folder = self.path(name)
        with open(f"{folder}/{MANIFEST}.new", "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{folder}/{MANIFEST}.new", f"{folder}/{MANIFEST}")
        for directory in (folder, self._root):  # and the new directory entries
            handle = os.open(directory, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    def manifest(self, name: str) -> Manifest:
        try:
            data = self.fs.cat_file(self.path(name, MANIFEST))
            manifest = msgspec.json.decode(data, type=Manifest)
        except FileNotFoundError:
            raise Damage("its manifest is gone") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Damage(f"its manifest cannot be read: {error}") from None
        if manifest.format != FORMAT:
            raise Damage(f"it has format {manifest.format}, this version reads {FORMAT}")
        return manifest

    def verify(self, name: str, files: dict[str, FileSum]) -> None:
        """Compares every byte with the checksums in the manifest. Parts are read in parallel,
        because a restart waits for this."""
        with ThreadPoolExecutor(min(READERS_MAX, os.cpu_count() or 1)) as readers:
            for file, expected in files.items():
                path = self.path(name, file)
                try:
                    size = self.fs.size(path)
                except FileNotFoundError:
                    raise Damage(f"{file} is missing") from None
                if size != expected.size:
                    raise Damage(f"{file} has {size} bytes, not {expected.size}")
                starts = range(0, size, expected.part)
                sums = readers.map(partial(self._part_sum, path, expected.part), starts)
                if hashlib.sha256(b"".join(sums)).hexdigest() != expected.sha256:
                    raise Damage(f"the checksum of {file} differs")

    def _part_sum(self, path: str, length: int, start: int) -> bytes:
        return hashlib.sha256(self.fs.read_block(path, start, length)).digest()

    def set_aside(self, name: str) -> None:
        """A damaged checkpoint no longer counts, but is kept for inspection."""
        with contextlib.suppress(Exception):
            self.fs.mv(self.path(name, MANIFEST), self.path(name, DAMAGED))

    # -- which are kept --------------------------------------------------------------------

    def prune(self, keep: int) -> None:
        """Keeps the newest `keep` whole checkpoints, and anything newer than the newest of them."""
        found = self.find()
        whole = [one for one in found if one.whole]
        if not whole:
            return
        kept = {one.name for one in whole[:keep]}
        for one in found:
            if one.serial < whole[0].serial and one.name not in kept:
                self.remove(one.name)

    def remove(self, name: str) -> None:
        """Removes the manifest first: a half-removed checkpoint must not look whole."""
        with contextlib.suppress(Exception):
            if self.fs.exists(self.path(name, MANIFEST)):
                self.fs.rm_file(self.path(name, MANIFEST))
            self.fs.rm(self.path(name), recursive=True)


def reason(error: BaseException) -> str:
    """An error in a few words, without its type if the text is clear by itself."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__


def _protocols(fs: Any) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


# Turns a run's state into what torch.distributed.checkpoint wants: parameter names, no wrappers.
#
# So a state that DDP saved with 4 members can be restored by FSDP2 with 3.


State = dict[str, Any]


def collect(state: State) -> State:
    """The current values: models and optimizers under torch's own names, other objects through
    their `state_dict`, tensors and plain values as they are."""
    from torch import nn, optim
    from torch.distributed.checkpoint import state_dict as by_name

    collected: State = {}
    for name, value in state.items():
        if isinstance(value, nn.Module):
            collected[name] = by_name.get_model_state_dict(value)
        elif isinstance(value, optim.Optimizer):
            collected[name] = by_name.get_optimizer_state_dict(model_of(value, state, name), value)
        elif hasattr(value, "state_dict"):
            collected[name] = value.state_dict()
        else:
            collected[name] = value
    return collected


def put_back(state: State, collected: State) -> None:
    """The reverse of `collect`: into the same objects; plain values go into the dict itself."""
    from torch import Tensor, nn, optim
    from torch.distributed.checkpoint import state_dict as by_name

    for name, value in state.items():
        if isinstance(value, nn.Module):
            by_name.set_model_state_dict(value, collected[name])
        elif isinstance(value, optim.Optimizer):
            model = model_of(value, state, name)
            by_name.set_optimizer_state_dict(model, value, collected[name])
        elif hasattr(value, "load_state_dict"):
            value.load_state_dict(collected[name])
        elif not isinstance(value, Tensor):  # a tensor is filled in place
            state[name] = collected[name]


def frozen(value: Any) -> Any:
    """Copies plain values now, so that the loop may change them. The stager copies tensors."""
    from torch import Tensor

    if isinstance(value, Tensor):
        return value
    if isinstance(value, dict):
        return {key: frozen(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(frozen(item) for item in value)
    return copy.deepcopy(value)


def model_of(optimizer: Any, state: State, name: str) -> Any:
    """The model whose parameters an optimizer changes: the optimizer's state uses their names."""
    from torch import nn

    changed = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for model in state.values():
        if isinstance(model, nn.Module) and any(id(p) in changed for p in model.parameters()):
            return model
    raise TrainError(
        f"state[{name!r}] is an optimizer whose model is not in the state: "
        "save both, as ctx.save({'model': model, 'optimizer': optimizer})"
    )


def check(state: object) -> State:
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise TrainError(
            "the state to save is a dict of names, as {'model': model, 'optimizer': optimizer}, "
            f"not {type(state).__name__}"
        )
    return state
