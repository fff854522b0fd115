"""How an API server is reached, as kubectl knows it: a kubeconfig, or a pod's service account.

Tokens in files are read again when they change, because Kubernetes replaces a pod's token about
once an hour. Plugins that print credentials (`exec`) are run when theirs have expired.
"""

from __future__ import annotations

import base64
import binascii
import calendar
import contextlib
import json
import os
import ssl
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import yaml

from shoal.engines.kubernetes.options import Place
from shoal.ports import SupplyError

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
FILE_BYTES_MAX = 4 * 1024 * 1024
PLUGIN_S = 30.0
PLUGIN_BYTES_MAX = 256 * 1024
EARLY_S = 60.0  # a credential is renewed this long before it expires
TOKEN_AGE_S = 30.0  # a token's file is read again after this time


class Plugin(msgspec.Struct, frozen=True):
    """A program that prints a credential: aws, gke-gcloud-auth-plugin, kubelogin."""

    command: tuple[str, ...]
    version: str
    env: dict[str, str] = {}
    hint: str = ""


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """One API server, one user of it, and the namespace that is meant if none is named."""

    server: str
    namespace: str = "default"
    ca: str = ""  # PEM; empty: the system's
    server_name: str = ""
    insecure: bool = False
    token: str = ""
    token_file: str = ""
    certificate: str = ""  # PEM, with its key
    key: str = ""
    plugin: Plugin | None = None
    proxy: str = ""
    source: str = ""  # where this was found, for errors


def find(place: Place) -> Access:
    """As kubectl finds it: the named file, $KUBECONFIG, the pod's own account, ~/.kube/config."""
    named = place.kubeconfig or os.environ.get("KUBECONFIG", "").split(os.pathsep)[0]
    if not named and (ACCOUNT / "token").exists():
        return _in_cluster(place)
    path = Path(named).expanduser() if named else Path.home() / ".kube" / "config"
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise SupplyError(f"kubeconfig: {path} is larger than {FILE_BYTES_MAX} bytes")
        written = yaml.safe_load(path.read_text())
    except OSError as error:
        raise SupplyError(
            f"kubeconfig: {path} cannot be read ({error.strerror}); name another with kubeconfig"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise SupplyError(f"kubeconfig: {path} is not YAML") from None
    return parse(written, place, path)


def _in_cluster(place: Place) -> Access:
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise SupplyError("kubeconfig: is missing, and KUBERNETES_SERVICE_HOST is not set either")
    return Access(
        server=f"https://{f'[{host}]' if ':' in host else host}:{port}",
        namespace=place.namespace or (ACCOUNT / "namespace").read_text().strip(),
        ca=(ACCOUNT / "ca.crt").read_text(),
        token_file=str(ACCOUNT / "token"),
        source="the pod's service account",
    )


def parse(written: Any, place: Place, path: Path) -> Access:
    """What a kubeconfig says of one context."""
    try:
        current = place.context or str(written.get("current-context") or "")
        context = _named(written, "contexts", "context", current, f"context: {path}")
        cluster = _named(written, "clusters", "cluster", str(context.get("cluster")), str(path))
        user = _named(written, "users", "user", str(context.get("user")), str(path))
        return Access(
            server=str(cluster["server"]).rstrip("/"),
            namespace=place.namespace or str(context.get("namespace") or "default"),
            ca=_pem(cluster, "certificate-authority", path),
            server_name=str(cluster.get("tls-server-name") or ""),
            insecure=cluster.get("insecure-skip-tls-verify") is True,
            token=str(user.get("token") or ""),
            token_file=_beside(str(user.get("tokenFile") or ""), path),
            certificate=_pem(user, "client-certificate", path),
            key=_pem(user, "client-key", path),
            plugin=_plugin(user.get("exec"), path),
            proxy=str(cluster.get("proxy-url") or ""),
            source=f"context {current} of {path}",
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise SupplyError(f"kubeconfig: {path} is not a kubeconfig: {error}") from None


def _named(written: Any, group: str, kind: str, name: str, where: str) -> dict[str, Any]:
    found = {one["name"]: one.get(kind) or {} for one in written.get(group) or ()}
    if name not in found:
        there = f"there are {', '.join(sorted(found))}" if found else "there are none"
        raise SupplyError(f"{where} has no {kind} {name!r}; {there}")
    chosen: dict[str, Any] = found[name]
    return chosen


def _beside(name: str, path: Path) -> str:
    """A kubeconfig's files are named relative to it."""
    return str(path.parent / name) if name else ""


def _pem(found: dict[str, Any], field: str, path: Path) -> str:
    data = found.get(f"{field}-data")
    try:
        if data:
            return base64.b64decode(str(data), validate=True).decode()
        name = str(found.get(field) or "")
        return Path(_beside(name, path)).read_text() if name else ""
    except (binascii.Error, UnicodeDecodeError):
        raise SupplyError(f"kubeconfig: {field}-data in {path} is not base64") from None
    except OSError as error:
        raise SupplyError(f"kubeconfig: {field} in {path}: {error.strerror}: {name}") from None


def _plugin(found: Any, path: Path) -> Plugin | None:
    if not found:
        return None
    command = str(found["command"])
    if "/" in command:
        command = _beside(command, path)
    return Plugin(
        command=(command, *(str(one) for one in found.get("args") or ())),
        version=str(found["apiVersion"]),
        env={str(one["name"]): str(one["value"]) for one in found.get("env") or ()},
        hint=str(found.get("installHint") or "").partition("\n")[0],
    )


def tls(access: Access, certificate: str = "", key: str = "") -> ssl.SSLContext:
    """Whom we trust, and our own certificate, if that is how we say who we are."""
    try:
        context = ssl.create_default_context(cadata=access.ca or None)
        if access.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if certificate or access.certificate:
            # OpenSSL reads them from a file only. It is private, and gone at once.
            with tempfile.NamedTemporaryFile("w", suffix=".pem") as pair:
                pair.write((certificate or access.certificate) + "\n" + (key or access.key))
                pair.flush()
                context.load_cert_chain(pair.name)
    except (ssl.SSLError, ValueError) as error:
        raise SupplyError(f"kubeconfig: a certificate in {access.source}: {error}") from None
    return context


class Credentials:
    """Says who we are, with a token that may change."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self._token = access.token
        self._good_until = 0.0  # by the monotonic clock
        self.certificate, self.key = access.certificate, access.key

    @property
    def stale(self) -> bool:
        changes = self.access.token_file or self.access.plugin
        return bool(changes) and time.monotonic() >= self._good_until

    def renew(self) -> None:
        """Read the token's file, or run the plugin. It may take seconds: not on the loop."""
        if self.access.token_file:
            try:
                self._token = Path(self.access.token_file).read_text().strip()
            except OSError as error:
                raise SupplyError(
                    f"kubeconfig: the token's file {self.access.token_file}: {error.strerror}"
                ) from None
            self._good_until = time.monotonic() + TOKEN_AGE_S
        elif self.access.plugin is not None:
            self._run(self.access.plugin)

    def refused(self) -> None:
        """The API server no longer accepts it."""
        self._good_until = 0.0

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token}"} if self._token else {}

    def _run(self, plugin: Plugin) -> None:
        asked = {
            "apiVersion": plugin.version,
            "kind": "ExecCredential",
            "spec": {"interactive": False},
        }
        env = {**os.environ, **plugin.env, "KUBERNETES_EXEC_INFO": json.dumps(asked)}
        name = plugin.command[0]
        try:
            ran = subprocess.run(
                plugin.command, env=env, stdin=subprocess.DEVNULL, capture_output=True,
                timeout=PLUGIN_S, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            hint = f"; {plugin.hint}" if plugin.hint else ""
            raise SupplyError(
                f"kubeconfig: {name} in {self.access.source}: {error}{hint}"
            ) from None
        if ran.returncode != 0 or len(ran.stdout) > PLUGIN_BYTES_MAX:
            said = ran.stderr.decode(errors="replace").strip().splitlines()
            raise SupplyError(
                f"kubeconfig: {name} in {self.access.source} ended with code {ran.returncode}: "
                f"{said[-1] if said else 'it printed nothing'}"
            )
        try:
            status = json.loads(ran.stdout)["status"]
            self._token = str(status.get("token") or "")
            self.certificate = str(status.get("clientCertificateData") or "")
            self.key = str(status.get("clientKeyData") or "")
        except (ValueError, KeyError, TypeError, AttributeError):
            raise SupplyError(f"kubeconfig: {name} printed no ExecCredential") from None
        left_s = 3600.0
        with contextlib.suppress(ValueError, TypeError):
            ends = time.strptime(str(status.get("expirationTimestamp"))[:19], "%Y-%m-%dT%H:%M:%S")
            left_s = calendar.timegm(ends) - time.time()
        self._good_until = time.monotonic() + max(EARLY_S, left_s - EARLY_S)
