"""What the flags of `shoal up` change: where it listens, what brings nodes, several heads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shoal.forms.failure import USAGE, BadField, Failure

if TYPE_CHECKING:
    from shoal.client.address import Address
    from shoal.control.home import ClusterConfig, Home
    from shoal.model.supply import Supply
    from shoal.ports import SupplierKind


PORT_MAX = 65_535


class Where(NamedTuple):
    """The flags; None means not given."""

    host: str | None
    port: int | None
    domain: str | None
    certificate: str | None
    key: str | None
    node_address: str | None = None

    def changes(self) -> dict[str, object]:
        """What they change in the configuration of the last time."""
        import re

        from shoal.forms.failure import USAGE, Failure
        from shoal.model.service import DOMAIN_PATTERN

        found: dict[str, object] = {}
        if self.host is not None:
            found["host"] = self.host
        if self.port is not None:
            if not 0 <= self.port <= PORT_MAX:
                raise Failure(f"--port: must be from 0 to {PORT_MAX}, not {self.port}", USAGE)
            found["port"] = self.port
        if self.domain is not None:
            if not re.search(DOMAIN_PATTERN, self.domain):
                message = f"{self.domain!r} is not a name such as ai.example.com"
                raise Failure(f"--domain: {message}", USAGE)
            found["domain"] = self.domain
        if self.key and not self.certificate:
            raise Failure("--key: has no effect without --certificate", USAGE)
        if self.certificate is not None:
            found["certificate"], found["key"] = _full(self.certificate), _full(self.key or "")
        if self.node_address is not None:
            found["reach"] = _reach(self.node_address)
        return found


def _reach(text: str) -> str:
    """As a URL; a name alone is one with the usual port of the API."""
    from shoal.client.transport import ShoalError, at
    from shoal.control.home import DEFAULT_PORT
    from shoal.forms.failure import USAGE, Failure

    text = text.strip()
    if not text:
        return ""
    try:
        if "://" not in text:
            named = at(f"https://{text}", "")
            bare = text.endswith("]") or ":" not in text
            return f"{named.url}:{DEFAULT_PORT}" if bare else named.url
        return at(text, "").url
    except ShoalError as error:
        raise Failure(f"--node-address: {error}", USAGE) from None


def open_host(flag: str | None, last: ClusterConfig | None) -> str | None:
    """Whoever lists hosts wants them to reach the head, which then listens everywhere."""
    from shoal.control.reach import is_loopback

    closed = last is None or (is_loopback(last.host) and not last.reach)
    return "0.0.0.0" if flag is None and closed else flag


def check_reachable(config: ClusterConfig) -> None:
    """Other machines have to reach the head."""
    from shoal.control.reach import is_loopback
    from shoal.forms.failure import USAGE, Failure

    if is_loopback(config.host) and not config.reach:
        message = "other machines cannot reach the head; add e.g. --host 0.0.0.0"
        raise Failure(f"--hosts: {message}", USAGE)


def _full(path: str) -> str:
    return str(Path(path).expanduser().absolute()) if path else ""


def check(config: ClusterConfig, *, hosts: bool = False) -> None:
    """EngineError, in one line, if the operator's certificate cannot be used. `hosts`: other
    machines have to reach the head."""
    if hosts:
        check_reachable(config)
    if config.certificate:
        from shoal.control.certificates import brought

        brought(Path(config.certificate), Path(config.key or config.certificate))


def print_login(home: Path) -> None:
    """What to type on other machines."""
    address = login_address(home)
    if address.url.startswith("https://"):
        from shoal.cli.screen.show import line

        line("to use it from another machine, log in there:")
        print(f"  {login_line(address)}")  # a line that is broken cannot be pasted


def login_address(home: Path) -> Address:
    """Where others find the head of this home: as its operator said, because its own address may be
    one that only its pod or its network knows."""
    import msgspec

    from shoal.client.address import Address
    from shoal.control.home import Home
    from shoal.machine.files import read_own

    address = msgspec.json.decode(read_own(home / "controller.json"), type=Address)
    config = Home(home).read_config()
    reach = config.reach if config is not None else ""
    return msgspec.structs.replace(address, url=reach) if "://" in reach else address


def note_context() -> None:
    """Whoever starts a cluster expects that commands use it."""
    from shoal.cli.screen.show import note
    from shoal.client import contexts

    current = contexts.load().current
    if current:
        note(f"commands use the context {current}; to use this cluster: shoal context use local")


def login_line(address: Address) -> str:
    fingerprint = f" --fingerprint {address.fingerprint}" if address.fingerprint else ""
    return f"shoal login {address.url}{fingerprint}"


# Which engine brings nodes to a cluster, and which nodes, as `shoal up` was asked.


LOCAL = "local"


class Wanted(NamedTuple):
    """The flags; None means not given."""

    engine: str | None
    supply: str | None
    address: str | None
    namespace: str | None

    def name(self, last: ClusterConfig | None) -> str:
        """The engine: the flag, or what the cluster had before."""
        if self.engine is None and last is not None and last.engine == "ray":
            _refuse_carrying(last)
        if self.engine is None:
            return last.engine if last is not None else LOCAL
        if self.engine != LOCAL and self.engine not in _names():
            names = f"{', '.join(_names())} or {LOCAL}"
            raise Failure(f"--engine: must be {names}, not '{self.engine[:40]}'", USAGE)
        return self.engine

    @property
    def whole(self) -> bool:
        """A file names all supplies that are to be. A line of words adds one."""
        return bool(self.supply) and "=" not in (self.supply or "")

    def supplies(self, engine: str) -> tuple[Supply, ...]:
        """What the flags describe; empty: the policy is left as it is."""
        import msgspec

        from shoal.forms.supply import supplies
        from shoal.model.supply import Supply, problem_with_supplies

        flags = {"address": self.address, "namespace": self.namespace}
        given: dict[str, Any] = {word: text for word, text in flags.items() if text is not None}
        for word in given:
            wanted = [name for name in _names() if word in _kind(name).words]
            if engine not in wanted:
                names = " or ".join(wanted)
                raise Failure(f"--{word}: has no effect without --engine {names}", USAGE)
        if self.supply is None and not given:
            if self.engine not in (None, LOCAL) and (needs := _kind(engine).needs):
                raise Failure(f"--engine {engine}: needs {needs}", USAGE)
            return ()
        if engine == LOCAL:
            raise Failure("--supply: has no effect without --engine, e.g. --engine slurm", USAGE)
        try:
            rows = [{"engine": engine, **row, **given} for row in _rows(self.supply or "")]
            for row in rows:
                if row["engine"] != engine:
                    message = f"is for {row['engine']}, and --engine says {engine}"
                    raise Failure(f"--supply: {message}", USAGE)
            found = msgspec.convert(tuple(supplies(rows)), tuple[Supply, ...])
        except (BadField, msgspec.ValidationError) as error:
            raise Failure(f"--supply: {error}", USAGE) from None
        problem = problem_with_supplies(found)  # before anything is started
        if problem is not None:
            raise Failure(f"--{problem}", USAGE)
        return found


def use(home: Home, supplies: tuple[Supply, ...], *, whole: bool = False) -> None:
    """These replace the policy's supplies of the same names; the others stay. `whole`: they are all
    of a file, so what an earlier version of it gave is no longer wanted."""
    import msgspec

    from shoal.client import Client

    config = home.read_config() if whole else None
    before = config.supplied if config is not None else ()
    if not supplies and not before:
        return
    with Client.at_home(home.path, patience_s=30) as client:
        policy = client.policy()
        stay = [one for one in policy.supply if one.name not in before]
        named = {one.name: one for one in (*stay, *supplies)}
        wanted = msgspec.structs.replace(policy, supply=tuple(named.values()))
        if wanted != policy:
            client.set_policy(wanted)
    if config is not None:
        names = tuple(one.name for one in supplies)
        home.write_config(msgspec.structs.replace(config, supplied=names))


def _names() -> list[str]:
    from shoal import extensions

    return extensions.names(extensions.SUPPLIER)


def _kind(engine: str) -> SupplierKind:
    from shoal import extensions

    try:
        return extensions.supplier(engine)
    except extensions.Missing as error:
        raise Failure(f"--engine: {error}") from None


def _rows(text: str) -> list[dict[str, Any]]:
    """`partition=gpu,gpus=8,most=16`, or a file with the same words, or with `supply:`."""
    from shoal.forms import datafile
    from shoal.forms.supply import from_words

    path = Path(text).expanduser()
    if "=" in text or not text:
        return [from_words(text)]
    ending = path.suffix if path.suffix in (".yaml", ".yml", ".toml", ".json") else ".yaml"
    found = dict(datafile.load(datafile.read_text(path, "supply file"), ending))
    listed = found.get("supply", [found])
    rows = listed if isinstance(listed, list) else [{"name": k, **v} for k, v in listed.items()]
    return [dict(row) for row in rows]


def _refuse_carrying(last: ClusterConfig) -> None:
    if last.reach and "://" not in last.reach:
        message = "this cluster was started by an earlier version, in which Ray carried messages"
        advice = "start it with: shoal up --engine local --host 0.0.0.0 --node-address ''"
        raise Failure(f"{message}; {advice}, then join the other machines again")


# `shoal up` for a cluster with several heads: its database, shared folder and invitation.


class Several(NamedTuple):
    """The flags; None means not given."""

    database: str | None
    shared: Path | None
    head: Path | None

    def changes(self, home: Home, last: ClusterConfig | None) -> dict[str, object]:
        """What they change in the configuration of the last time; a home that is invited becomes
        one of that cluster."""
        if self.head is not None:
            return self._invited(home)
        if last is not None and last.database:
            return self._as_before()
        if self.database is None:
            if self.shared is not None:
                raise Failure("--shared: has no effect without --database", USAGE)
            return {}
        return self._first(home)

    def _first(self, home: Home) -> dict[str, object]:
        from shoal.control.invitation import InvitationError, free_name, mark_shared

        if self.shared is None:
            raise Failure("--shared: name a folder that all heads see, with --database", USAGE)
        if home.database.exists():
            text = f"--database: the cluster in {home.path} has its own file, {home.database.name}"
            raise Failure(f"{text}; see docs/several-heads.md for how to move it")
        others = _heads(self.database or "")
        if others:
            text = f"--database: it already has a cluster (its heads: {', '.join(others)})"
            raise Failure(f"{text}; to add a head, run there: shoal heads invite")
        folder = self.shared.expanduser().absolute()
        home.create()
        try:
            mark_shared(folder, home.cluster_id(), first=True)
        except InvitationError as error:
            raise Failure(str(error), USAGE) from None
        return {"database": self.database, "shared": str(folder), "head": free_name(())}

    def _as_before(self) -> dict[str, object]:
        """The server may have another address by now; the head keeps its name."""
        changes: dict[str, object] = {}
        if self.database is not None:
            _heads(self.database)
            changes["database"] = self.database
        if self.shared is not None:
            changes["shared"] = str(self.shared.expanduser().absolute())
        return changes

    def _invited(self, home: Home) -> dict[str, object]:
        from shoal.control.invitation import (
            InvitationError,
            accept,
            free_name,
            mark_shared,
            read,
        )

        assert self.head is not None
        try:
            found = read(self.head)
            database = self.database or found.database
            folder = (self.shared or Path(found.shared)).expanduser().absolute()
            mark_shared(folder, found.cluster, first=False)
            taken = (*_heads(database), *(one.name for one in found.heads))
            accept(home, found)
        except InvitationError as error:
            raise Failure(str(error), USAGE) from None
        before = home.read_config()
        name = before.head if before is not None and before.head else free_name(taken)
        return {
            "database": database,
            "shared": str(folder),
            "head": name,
            "engine": found.engine,
            "domain": found.domain,
        }


def _heads(database: str) -> tuple[str, ...]:
    """Their names. A database that cannot be used is refused in one line."""
    from shoal.database.lease import Lease
    from shoal.ports import StoreError

    lease = None
    try:
        lease = Lease(database)
        return tuple(one.name for one in lease.heads())
    except StoreError as error:
        raise Failure(f"--database: {error}") from None
    finally:
        if lease is not None:
            lease.close()


def with_names(config: ClusterConfig) -> ClusterConfig:
    """Virtual nodes of several heads must not have the same names."""
    import re

    import msgspec

    if not config.database:
        return config
    named = [
        msgspec.structs.replace(one, id=f"{config.head}-{one.id}")
        if re.fullmatch(r"n[0-9]+", one.id)
        else one
        for one in config.nodes
    ]
    return msgspec.structs.replace(config, nodes=tuple(named))
