"""Which engine brings nodes to a cluster, and which nodes, as `shoal up` was asked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shoal.forms.failure import USAGE, BadField, Failure

if TYPE_CHECKING:
    from shoal.control.home import ClusterConfig, Home
    from shoal.model.supply import Supply
    from shoal.ports import SupplierKind

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


def use(home: Home, supplies: tuple[Supply, ...]) -> None:
    """These replace the policy's supplies of the same names; the others stay."""
    import msgspec

    from shoal.client import Client

    if not supplies:
        return
    with Client.at_home(home.path, patience_s=30) as client:
        policy = client.policy()
        named = {one.name: one for one in (*policy.supply, *supplies)}
        wanted = msgspec.structs.replace(policy, supply=tuple(named.values()))
        if wanted != policy:
            client.set_policy(wanted)


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
