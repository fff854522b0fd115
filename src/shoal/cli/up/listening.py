"""Where `shoal up` listens, with which certificate, and how others log in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from shoal.client.transport import Address
    from shoal.control.home import ClusterConfig

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


def print_login(address: Address) -> None:
    """What to type on other machines."""
    if address.url.startswith("https://"):
        from shoal.cli.screen.show import line

        line("to use it from another machine, log in there:")
        print(f"  {login_line(address)}")  # a line that is broken cannot be pasted


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
