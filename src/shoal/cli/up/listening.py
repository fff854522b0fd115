"""Where `shoal up` listens, with which certificate, and how others log in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from shoal.control.home import ClusterConfig
    from shoal.transport import Address

PORT_MAX = 65_535


class Where(NamedTuple):
    """The flags; None means not given."""

    host: str | None
    port: int | None
    domain: str | None
    certificate: str | None
    key: str | None

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
        return found


def _full(path: str) -> str:
    return str(Path(path).expanduser().absolute()) if path else ""


def check(config: ClusterConfig) -> None:
    """EngineError, in one line, if the operator's certificate cannot be used."""
    if config.certificate:
        from shoal.control.certificates import brought

        brought(Path(config.certificate), Path(config.key or config.certificate))


def print_login(address: Address) -> None:
    """What to type on other machines."""
    if address.url.startswith("https://"):
        from shoal.cli.screen.show import line

        line("to use it from another machine, log in there:")
        line(f"  {login_line(address)}")


def note_context() -> None:
    """Whoever starts a cluster expects that commands use it."""
    from shoal import contexts
    from shoal.cli.screen.show import note

    current = contexts.load().current
    if current:
        note(f"commands use the context {current}; to use this cluster: shoal context use local")


def login_line(address: Address) -> str:
    fingerprint = f" --fingerprint {address.fingerprint}" if address.fingerprint else ""
    return f"shoal login {address.url}{fingerprint}"
