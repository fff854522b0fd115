"""The TLS of a controller: the certificate it shows, kept valid while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

from shoal.control import certificates, reach
from shoal.control.alarms import Alarms
from shoal.control.home import ClusterConfig, Home
from shoal.ports import EngineError

LOOK_S = 600.0
WARN_DAYS = 14  # before a certificate ends that only the operator can renew


class Encryption:
    """EngineError, in one line, if there is no certificate that could be used."""

    def __init__(self, home: Home, config: ClusterConfig) -> None:
        self._home = home
        self._config = config
        self.served = self.find()
        self.context = certificates.context_of(self.served)
        self.host = reach.shown_host(config.host, self.served.names)
        public = bool(config.certificate) and certificates.is_public(self.served, self.host)
        self._public = public

    @property
    def fingerprint(self) -> str:
        """Empty if clients trust the certificate without it."""
        return "" if self._public else self.served.fingerprint

    def find(self) -> certificates.Served:
        """The operator's certificate as its file is now, or our own, made again if it ends soon."""
        if self._config.certificate:
            chain = Path(self._config.certificate)
            return certificates.brought(chain, Path(self._config.key or chain))
        try:
            names = reach.names_of(self._config.host)
            named = urlsplit(self._config.reach).hostname  # nodes may see the head under another
            names += [named] if named and named not in names else []
            return certificates.own(self._home.tls, names)
        except OSError as error:
            where = error.filename or self._home.tls
            raise EngineError(f"cannot make a certificate: {where}: {error.strerror}") from None

    def use(self, found: certificates.Served) -> bool:
        """True if it is another one. Connections that begin from now on see it."""
        if found == self.served:
            return False
        certificates.load(self.context, found)
        self.served = found
        return True

    async def run(self, alarms: Alarms, changed: Callable[[], None]) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                if self.use(await asyncio.to_thread(self.find)):
                    changed()
                alarms.clear("certificate")
            except EngineError as error:
                alarms.raise_("certificate", f"the certificate cannot be renewed: {error}")
            left = self.served.until - datetime.now(UTC)
            if left < timedelta(days=WARN_DAYS):
                text = f"{self.served.chain} ends on {self.served.until:%Y-%m-%d}"
                alarms.raise_("certificate ends", f"the certificate {text}; replace the file")
            else:
                alarms.clear("certificate ends")
