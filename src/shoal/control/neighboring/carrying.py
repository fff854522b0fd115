"""What travels with a job: its package, its saved work and the secrets that it names go there, and
its output, its kept files and its newest checkpoint come back. Nothing is sent twice, or fetched
twice, unless it has changed."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping
from concurrent.futures import Future
from typing import NamedTuple

import msgspec

from shoal.calls.jobs import JobCalls
from shoal.calls.people import SecretCalls
from shoal.client.transport import ShoalError, Unreachable
from shoal.control.filedesk import FileDesk, NotGiven, copied_of
from shoal.control.loop import ControlLoop
from shoal.control.neighboring.wire import CALL_S, NOT_FOUND, Anything, Wire, one_line
from shoal.control.outputs import Kept
from shoal.control.secretstore import SecretError
from shoal.model.job import JobSpec, MemberRef
from shoal.model.kept import (
    FILES_MAX,
    FileAnswer,
    FilePart,
    FilePiece,
    FilesView,
    KeptFile,
    Kind,
    Received,
    Snapshot,
)
from shoal.model.neighbor import mark_of
from shoal.model.report import LogChunk
from shoal.model.secret import SecretView, file_of, split
from shoal.model.views import LogView, PackageView

log = logging.getLogger("shoal.neighbors")

LOG_BYTES_MAX = 512 << 20  # fetched of one member; the store keeps its beginning and its end
GAP_BYTES_MAX = 1 << 40
MEMBERS_MAX = 1_024  # whose output is fetched
WAITERS_MAX = 32  # readers that wait for output there
PART_S = 60.0  # for a piece of saved work
TRIES_MAX = 3  # of a file that changes while it is fetched
PREFIX = "home"  # of names of our secrets there

Hidden = Mapping[str, tuple[str, int, str]]  # a name there -> tenant, since when it is, name here


class Incomplete(Exception):
    """It could not be kept here now; it is fetched again."""


class _Tail:
    """How far the output of a member is here: attempts there follow each other in one log here.
    `base`: where that of the present one begins."""

    def __init__(self) -> None:
        self.attempt, self.base, self.moved = 1, 0, 0
        self.lock = asyncio.Lock()


class Sent(NamedTuple):
    version: int
    set_ms: int


class Carrier:
    def __init__(self, loop: ControlLoop, cluster: str, name: str, wire: Wire) -> None:
        self._loop, self._cluster, self._name, self._wire = loop, cluster, name, wire
        self._packages: set[str] = set()  # that are there
        self._sending: dict[str, asyncio.Lock] = {}
        self._secrets: dict[str, Sent] = {}
        self._tidied = False
        self._tails: dict[MemberRef, _Tail] = {}
        self._waiters = 0
        self._serial = 0

    # -- there -----------------------------------------------------------------------------------

    def has_all(self, package: str, hidden: Hidden) -> bool:
        return (not package or package in self._packages) and all(
            self._secrets.get(there) == self._here(*here) for there, here in hidden.items()
        )

    async def bring(self, package: str, hidden: Hidden) -> None:
        """ShoalError if there is no hope."""
        for there in hidden:
            await self._send_secret(there, hidden[there])
        if not package or package in self._packages:
            return
        async with self._sending.setdefault(package, asyncio.Lock()):
            if package not in self._packages:
                await self._send_package(package)
                self._packages.add(package)

    def keep_packages(self, wanted: set[str]) -> None:
        """Others may have been removed there by the next time that a job has them."""
        self._packages &= wanted
        self._sending = {one: lock for one, lock in self._sending.items() if one in wanted}

    async def _send_package(self, package: str) -> None:
        try:
            await self._wire.ask(PackageView, JobCalls.package, package)
            return
        except ShoalError as error:
            if error.status != NOT_FOUND:
                raise
        store = self._loop.packages
        size = store.size(package) if store is not None else None
        if store is None or size is None:
            raise ShoalError("its package is not here any more; submit the job again")

        async def pieces() -> AsyncIterator[bytes]:
            offset = 0
            while offset < size:
                piece = await asyncio.to_thread(store.piece, package, offset)
                if not piece.data:
                    raise Unreachable(f"its package cannot be read: {piece.problem}")
                yield piece.data
                offset += len(piece.data)

        await self._wire.send(JobCalls.put_package, package, size, pieces())

    # Secrets have names there that say nothing, so that tenants here cannot meet there.

    def hidden(self, spec: JobSpec, since_ms: int) -> dict[str, tuple[str, int, str]]:
        names = (split(wanted)[0] for wanted in spec.secrets)
        return {
            self._there(spec.tenant, since_ms, name): (spec.tenant, since_ms, name)
            for name in names
        }

    def renamed(self, spec: JobSpec, hidden: Hidden) -> JobSpec:
        if not spec.secrets:
            return spec
        there = {here[2]: name for name, here in hidden.items()}
        pairs = [(wanted, *split(wanted)) for wanted in spec.secrets]
        secrets = tuple(
            f"{there[name]}={variable or f'/{file_of(wanted)}'}" for wanted, name, variable in pairs
        )
        return msgspec.structs.replace(spec, secrets=secrets)

    async def hide(self, needed: Iterable[Hidden]) -> None:
        """Of jobs that are there or on their way: values that have changed go there once, and those
        that no job needs any more are removed."""
        wanted = {there: here for hidden in needed for there, here in hidden.items()}
        if not self._tidied:  # what a controller before this one has left there
            known: list[SecretView] = []
            try:
                known = await self._wire.ask(list[SecretView], SecretCalls.secrets)
                self._tidied = True
            except ShoalError as error:  # in another round
                log.info("the secrets at %s: %s", self._name, error)
            ours = [one.name for one in known if one.name.startswith(f"{PREFIX}-{self._cluster}-")]
            self._secrets = {name: Sent(0, 0) for name in ours} | self._secrets
        for there in [one for one in self._secrets if one not in wanted]:
            try:
                await self._wire.ask(Anything, SecretCalls.remove_secret, there)
            except ShoalError as error:
                if error.status != NOT_FOUND:
                    raise
            del self._secrets[there]
        for there, here in wanted.items():
            if there in self._secrets and self._secrets[there] != self._here(*here):
                try:
                    await self._send_secret(there, here)
                except Unreachable:
                    raise
                except ShoalError as error:  # its jobs keep the value that they have
                    log.warning("a secret for %s: %s", self._name, error)

    async def _send_secret(self, there: str, here: tuple[str, int, str]) -> None:
        sealed, store = self._here(*here), self._loop.secrets
        if self._secrets.get(there) == sealed:
            return
        try:
            if store is None or sealed is None:
                raise SecretError(f"{here[0]} has no secret {here[2]}")
            value = await asyncio.to_thread(store.value, *here)
        except SecretError as error:
            raise ShoalError(str(error)) from None
        await self._wire.ask(Anything, SecretCalls.set_secret, there, value)
        self._secrets[there] = sealed

    def _here(self, tenant: str, since_ms: int, name: str) -> Sent | None:
        store = self._loop.secrets
        sealed = store.find(tenant, since_ms, name) if store is not None else None
        return Sent(sealed.version, sealed.set_ms) if sealed is not None else None

    def _there(self, tenant: str, since_ms: int, name: str) -> str:
        digest = hashlib.sha256(f"{self._cluster}/{tenant}/{since_ms}/{name}".encode())
        return f"{PREFIX}-{self._cluster}-{digest.hexdigest()[:24]}"

    # Saved work comes before the job: the host starts it with what is there.

    async def has_work(self, job: str, attempt: int) -> bool:
        """Whether any is to be sent."""
        if attempt < 2 or not self._loop.policy.checkpoint_copy_mb:
            return False
        return bool(await self._saved(job))

    async def _saved(self, job: str, kind: Kind = Kind.CHECKPOINT) -> list[KeptFile]:
        """Its files here."""
        desk = self._loop.files
        if not isinstance(desk, FileDesk):
            return []
        try:
            return await asyncio.to_thread(desk.store.listing, job, kind)
        except OSError as error:
            raise Unreachable(f"the files of {job} cannot be read now: {error}") from None

    async def bring_work(self, job: str, attempt: int) -> None:
        """All of it is there when this returns. ShoalError if there is no hope."""
        files, mark = await self._saved(job), mark_of(self._cluster, job, attempt)
        view = await self._wire.ask(FilesView, JobCalls.handed, mark)
        come = {one.path: one for one in view.files}
        for file in files:
            there = come.get(file.path)
            if there is None or there.modified_ms != file.modified_ms:
                await self._send_file(job, mark, file, 0)
            elif there.size < file.size:
                await self._send_file(job, mark, file, there.size)
        await self._wire.ask(Anything, JobCalls.hand_files, mark, files, within_s=PART_S)

    async def _send_file(self, job: str, mark: str, file: KeptFile, at: int) -> None:
        desk = self._loop.files
        assert isinstance(desk, FileDesk), "it has listed the file"
        assert desk.part is not None, "the API sets it before the first round"
        for _ in range(TRIES_MAX):
            kept = at
            while True:
                try:
                    part = await desk.part(job, file.path, at, Kind.CHECKPOINT)
                except (OSError, NotGiven) as error:
                    raise Unreachable(f"its saved work cannot be read now: {error}") from None
                known = await self._wire.ask(
                    Received, JobCalls.hand_part, mark, part, within_s=PART_S
                )
                kept, at = at, max(0, min(file.size, known.kept))
                if at >= file.size:
                    return
                if at <= kept:
                    break  # a part was lost there, or it lies
        raise ShoalError(f"{self._name} does not keep {one_line(file.path, 80)}")

    # -- back ------------------------------------------------------------------------------------

    async def fetch_work(self, ref: MemberRef, id_: str) -> None:
        """What it has saved there comes here. ShoalError: it cannot; Unreachable or Incomplete:
        not now."""
        desk = self._loop.files
        bound = self._loop.policy.checkpoint_copy_mb << 20
        if not isinstance(desk, FileDesk) or not bound:
            return
        for _ in range(TRIES_MAX):
            view = await self._wire.ask(FilesView, JobCalls.files, id_, kind=Kind.CHECKPOINT)
            files = view.files[:FILES_MAX]
            here = {one.path: one for one in await self._saved(ref.job)}
            if not files or {one.path: one for one in files} == here:
                return
            if sum(max(0, one.size) for one in files) > bound:
                raise ShoalError(f"it is more than the {bound >> 20} MiB that may travel")
            try:
                for file in (one for one in files if here.get(one.path) != one):
                    problem = await self._fetch_file(desk, ref, id_, file, Kind.CHECKPOINT)
                    if problem:
                        raise ShoalError(f"{one_line(file.path, 80)}: {problem}")
            except ShoalError as error:
                if error.status != NOT_FOUND:
                    raise
                continue  # it has saved again
            settled: Future[FileAnswer] = Future()
            self._serial += 1
            snapshot = Snapshot(ref, self._serial, tuple(files))
            node = f"neighbor {self._name}"
            desk.store.settle(snapshot, node, bound, settled.set_result, lambda _: None)
            answer = await asyncio.wrap_future(settled)
            if answer.problem and answer.again:
                raise Incomplete(answer.problem)
            if answer.problem:
                raise ShoalError(answer.problem)
            self._loop.tick.copied(copied_of(Kept(ref, snapshot.files)))
            return
        raise Incomplete("it saves faster than that can be fetched")

    async def fetch(self, job: str, attempt: int, spec: JobSpec, id_: str, last: int) -> str:
        """Its output and kept files. What could not be had, and why; empty: nothing. Unreachable,
        or Incomplete: it has to be tried again."""
        missing = ""
        try:
            for member in range(min(MEMBERS_MAX, max(spec.members, spec.members_max))):
                while await self.pull(MemberRef(job, attempt, member), id_, last):
                    pass
            missing = await self._fetch_files(MemberRef(job, attempt, 0), id_)
        except Unreachable:
            raise
        except ShoalError as error:
            missing = f"what it left could not be fetched: {error}"
        return missing

    async def bring_output(self, ref: MemberRef, id_: str, last: int, wait_s: float) -> None:
        """For a reader here: what is there and not here, or what comes within the time."""
        tail = self._tails.get(ref)
        if self._waiters >= WAITERS_MAX or (tail is not None and tail.lock.locked()):
            await self._loop.changed(ref.job, wait_s)  # another reader brings it
            return
        self._waiters += 1
        try:
            more = await self.pull(ref, id_, last, wait_s)
            if more and not wait_s:
                await self.pull(ref, id_, last)
        except (ShoalError, Incomplete):
            await asyncio.sleep(min(wait_s, 1.0))  # what is here is all that can be shown now
        finally:
            self._waiters -= 1

    async def pull(self, ref: MemberRef, id_: str, last: int, wait_s: float = 0) -> bool:
        """The next piece of its output; whether there may be more. `last`: its attempts there."""
        if len(self._tails) > 4 * WAITERS_MAX:
            self._tails.pop(next(iter(self._tails)))
        tail = self._tails.setdefault(ref, _Tail())
        async with tail.lock:
            kept = self._loop.logs.kept(ref)
            view = await self._wire.ask(
                LogView,
                JobCalls.logs,
                id_,
                member=ref.member,
                attempt=tail.attempt,
                offset=max(0, kept - tail.base),
                wait_s=wait_s,
                within_s=wait_s + CALL_S,
            )
            size, end = view.next_offset - view.offset, tail.base + view.next_offset
            if (
                min(size, view.offset) < 0
                or not 0 <= end <= GAP_BYTES_MAX
                or tail.moved > LOG_BYTES_MAX
            ):
                raise ShoalError(f"{self._name} says what cannot be, or far too much")
            if size and end > kept:
                gap = size != len(view.data)  # where nothing is kept, it says so in words
                data, dropped = (b"", size) if gap else (view.data, 0)
                tail.moved += len(data)
                offset = end if gap else end - size
                if self._loop.log(LogChunk(ref, offset, data, dropped)) < end:
                    raise Incomplete("its output cannot be kept now")
                return True
            if view.ended and tail.attempt < last:
                tail.base, tail.attempt = end, tail.attempt + 1
                return True
            return False

    async def _fetch_files(self, ref: MemberRef, id_: str) -> str:
        desk = self._loop.files
        if not isinstance(desk, FileDesk):
            return ""
        view = await self._wire.ask(FilesView, JobCalls.files, id_)
        here = {one.path: one for one in await self._saved(ref.job, Kind.OUTPUT)}
        problems = list(view.notes[:1])
        for file in view.files[:FILES_MAX]:
            known = here.get(file.path)
            if known and (known.size, known.modified_ms) == (file.size, file.modified_ms):
                continue
            if problem := await self._fetch_file(desk, ref, id_, file):
                problems.append(f"{one_line(file.path, 80)}: {problem}")
        return f"not all of its files are here: {problems[0]}" if problems else ""

    async def _fetch_file(
        self,
        desk: FileDesk,
        ref: MemberRef,
        id_: str,
        file: KeptFile,
        kind: Kind = Kind.OUTPUT,
    ) -> str:
        """What is wrong with it; empty: it is here."""
        for _ in range(TRIES_MAX):
            self._serial += 1
            offset, version = 0, ""
            while True:
                part = await self._wire.ask(
                    FilePart, JobCalls.file_part, id_, file.path, offset, kind=kind
                )
                if part.version != (version or part.version) or part.offset != offset:
                    break  # it was replaced meanwhile
                size, version = max(0, part.size), part.version
                if not part.data and offset < size:
                    raise Unreachable(f"{self._name} sends nothing of {one_line(file.path, 80)}")
                data = part.data[: size - offset]
                made_ms = max(0, part.modified_ms)
                where = ref, kind, file.path, self._serial, size, offset
                piece = FilePiece(*where, data, made_ms)
                answer = await _kept(desk, piece, f"neighbor {self._name}")
                if answer.problem and answer.again:
                    raise Incomplete(answer.problem)
                if answer.problem:
                    return answer.problem
                offset += len(data)
                if offset >= size:
                    return ""
        return "it changes all the time"


def _kept(desk: FileDesk, piece: FilePiece, node: str) -> Awaitable[FileAnswer]:
    """Answered by the store's own thread."""
    answer: Future[FileAnswer] = Future()
    desk.store.take(piece, node, over=True, answer=answer.set_result)
    return asyncio.wrap_future(answer)
