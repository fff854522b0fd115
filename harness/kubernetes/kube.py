"""A Kubernetes to test with: the tests' own API server in a thread, or a real one if KUBECONFIG
names one. Tests change it as an admin would, over HTTP."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import os
import ssl
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from harness.kubernetes.apiserver import ApiServer, Rule
from harness.waiting import WAIT_S, until
from shoal.engines.kubernetes.access import find, tls
from shoal.engines.kubernetes.options import Place

DEPLOY = Path(__file__).parents[2] / "deploy" / "kubernetes"
REAL = os.environ.get("KUBECONFIG", "")
IMAGE = os.environ.get("KUBE_IMAGE", "")  # of this tree, which the real one's machines have
ADMIN, SHOAL = "admin-token", "shoal-token"
Object = dict[str, Any]
T = TypeVar("T")


class Kube:
    """`namespace` is the test's own. `kubeconfig` is Shoal's, with no more rights than deploy/
    gives; `admin` may do everything."""

    def __init__(self, folder: Path, version: str = "1.29") -> None:
        self.folder = folder
        self.real = bool(REAL)
        self.namespace = f"shoal-test-{uuid.uuid4().hex[:8]}"
        self._machines: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        if self.real:
            access = find(Place(kubeconfig=REAL))
            token, self.url, context = access.token, access.server, tls(access)
        else:
            self.certificate = certificate(folder)
            self.server = ApiServer(server_tls(self.certificate), version)
            self.server.users = {ADMIN: "admin", SHOAL: "shoal"}
            self.server.rules = {
                "admin": [Rule(("*",), ("*",))],
                "shoal": deployed_rules(self.namespace),
            }
            self.port = self.run(self.server.start())
            self.url = f"https://127.0.0.1:{self.port}"
            self.kubeconfig = self.write_config("shoal", SHOAL)
            token, context = ADMIN, ssl.create_default_context(cafile=str(self.certificate))
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.http = httpx.Client(base_url=self.url, verify=context, headers=headers, timeout=30)
        self.add_namespace(self.namespace)
        self.admin("POST", self.path("configmaps"), _named("ConfigMap", "shoal-nodes"))
        if self.real:
            self.kubeconfig = self.write_config("shoal", self._account())

    def _account(self) -> str:
        """The token of an account with the rights of deploy/, at a real API server."""
        self._roles = f"shoal-{self.namespace}"
        here, rbac = self.path("x")[:-2], "/apis/rbac.authorization.k8s.io/v1"
        place = f"{rbac}/namespaces/{self.namespace}"
        self.admin("POST", f"{here}/serviceaccounts", _named("ServiceAccount", "shoal"))
        for kind, base in (("Role", place), ("ClusterRole", rbac)):
            for found in deployed(kind):
                name = found["metadata"]["name"] if kind == "Role" else self._roles
                role = {**found, "metadata": {"name": name}}
                self.admin("POST", f"{base}/{kind.lower()}s", role)
                bound = {
                    "apiVersion": found["apiVersion"],
                    "kind": f"{kind}Binding",
                    "metadata": {"name": name},
                    "roleRef": {"apiGroup": rbac.split("/")[2], "kind": kind, "name": name},
                    "subjects": [
                        {"kind": "ServiceAccount", "name": "shoal", "namespace": self.namespace}
                    ],
                }
                self.admin("POST", f"{base}/{kind.lower()}bindings", bound)
        asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        given = self.admin("POST", f"{here}/serviceaccounts/shoal/token", asked)
        return str(given["status"]["token"])

    def use_admin(self) -> None:
        """Shoal may do everything from now on."""
        self.kubeconfig = REAL or self.write_config("admin", ADMIN)

    def end(self) -> None:
        if self.real:
            for machine in self._machines:
                self.admin("DELETE", f"/api/v1/nodes/{machine}", check=False)
            for kind in ("clusterroles", "clusterrolebindings"):
                path = f"/apis/rbac.authorization.k8s.io/v1/{kind}/{self._roles}"
                self.admin("DELETE", path, check=False)
            self.admin("DELETE", f"/api/v1/namespaces/{self.namespace}", check=False)
        else:
            self.run(self.server.stop())
        self.http.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()

    # -- as an admin -----------------------------------------------------------------------

    def path(self, resource: str, name: str = "") -> str:
        return f"/api/v1/namespaces/{self.namespace}/{resource}{'/' + name if name else ''}"

    def admin(
        self, method: str, path: str, body: Object | None = None, check: bool = True
    ) -> Object:
        headers = {"Content-Type": "application/merge-patch+json"} if method == "PATCH" else {}
        answer = self.http.request(method, path, json=body, headers=headers)
        assert not check or answer.status_code < 400, answer.text
        found: Object = answer.json()
        return found

    def add_namespace(self, name: str, **labels: str) -> None:
        """Pods are refused until it has its service account."""
        body = _named("Namespace", name)
        body["metadata"]["labels"] = labels
        self.admin("POST", "/api/v1/namespaces", body)
        account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
        until(lambda: self.admin("GET", account, check=False)["kind"] == "ServiceAccount")

    def drain(self, machine: str, *, delete_empty_dirs: bool = False) -> list[str]:
        """As `kubectl drain` without --force: nothing is evicted if any pod there may not be. What
        stands in the way, in its words."""
        found = {n: pod for n, pod in self.pods().items() if pod["spec"].get("nodeName") == machine}
        problems = []
        for name, pod in found.items():
            owners = pod["metadata"].get("ownerReferences") or ()
            if not any(owner.get("controller") for owner in owners):
                problems.append(f"cannot delete Pods that declare no controller: {name}")
            local = any("emptyDir" in volume for volume in pod["spec"].get("volumes") or ())
            if local and not delete_empty_dirs:
                problems.append(f"cannot delete Pods with local storage: {name}")
        for name in () if problems else found:
            body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
            self.admin("POST", self.path("pods", name) + "/eviction", body)
        return problems

    def pods(self) -> dict[str, Object]:
        found = self.admin("GET", self.path("pods"))["items"]
        return {one["metadata"]["name"]: one for one in found}

    def set_status(self, pod: str, status: Object) -> None:
        self.admin("PATCH", self.path("pods", pod) + "/status", {"status": status})

    def bind(self, pod: str, machine: str) -> None:
        body = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": pod},
            "target": {"apiVersion": "v1", "kind": "Node", "name": machine},
        }
        self.admin("POST", self.path("pods", pod) + "/binding", body)

    def add_machine(
        self, name: str, labels: dict[str, str] | None = None, amounts: dict[str, str] | None = None
    ) -> None:
        body = _named("Node", name)
        body["metadata"]["labels"] = {"kubernetes.io/hostname": name, **(labels or {})}
        self.admin("POST", "/api/v1/nodes", body)
        self._machines.append(name)
        room = {"cpu": "16", "memory": "64Gi", "pods": "110", **(amounts or {})}
        self.set_machine(name, room, ready=True)

    def lend(self, labels: dict[str, str], amounts: dict[str, str]) -> None:
        """A machine of the real cluster gets these, too. They do not last: its kubelet forgets what
        no device plugin of its own reports."""
        (machine, *_) = self.admin("GET", "/api/v1/nodes")["items"]
        name = machine["metadata"]["name"]
        self.admin("PATCH", f"/api/v1/nodes/{name}", {"metadata": {"labels": labels}})
        status = {"capacity": amounts, "allocatable": amounts}
        self.admin("PATCH", f"/api/v1/nodes/{name}/status", {"status": status})

    def set_machine(self, name: str, room: dict[str, str] | None = None, *, ready: bool) -> None:
        condition = {"type": "Ready", "status": "True" if ready else "Unknown"}
        if not ready:
            condition["message"] = "Kubelet stopped posting node status."
        status: Object = {"conditions": [condition]}
        if room is not None:
            status |= {"capacity": room, "allocatable": room}
        self.admin("PATCH", f"/api/v1/nodes/{name}/status", {"status": status})

    def taint(self, machine: str, *taints: Object) -> None:
        self.admin("PATCH", f"/api/v1/nodes/{machine}", {"spec": {"taints": list(taints)}})

    # -- its own server --------------------------------------------------------------------

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)

    def call(self, function: Callable[[], T]) -> T:
        """On the server's loop."""

        async def work() -> T:
            return function()

        found: T = self.run(work())
        return found

    def write_config(self, name: str, token: str, **user: str) -> str:
        path = self.folder / f"{name}.kubeconfig"
        if self.real:
            written = yaml.safe_load(Path(REAL).read_text())
            cluster = written["clusters"][0]["cluster"]
        else:
            cluster = {"server": self.url, "certificate-authority": str(self.certificate)}
        written = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [
                {
                    "name": "test",
                    "context": {"cluster": "c", "user": "u", "namespace": self.namespace},
                }
            ],
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": {"token": token, **user} if token else user}],
        }
        path.write_text(yaml.safe_dump(written))
        return str(path)


def _named(kind: str, name: str) -> Object:
    return {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}}


def deployed(kind: str) -> list[Object]:
    """All objects of this kind in deploy/kubernetes."""
    return [
        one
        for path in sorted(DEPLOY.glob("*.yaml"))
        for one in yaml.safe_load_all(path.read_text())
        if one and one.get("kind") == kind
    ]


def deployed_rules(namespace: str) -> list[Rule]:
    """The rights that deploy/kubernetes gives, and no others."""
    found: list[Rule] = []
    for kind, where in (("Role", namespace), ("ClusterRole", "")):
        for role in deployed(kind):
            for rule in role["rules"]:
                assert rule["apiGroups"] == [""]
                names = tuple(rule.get("resourceNames", ()))
                found.append(Rule(tuple(rule["verbs"]), tuple(rule["resources"]), names, where))
    return found


def certificate(folder: Path, days: float = 1.0) -> Path:
    """Signed by itself, for the loopback address."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kubernetes")])
    now = datetime.datetime.now(datetime.UTC)
    until = now + datetime.timedelta(days=days)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, until) - datetime.timedelta(days=1))
        .not_valid_after(until)
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = folder / f"server-{uuid.uuid4().hex[:6]}.pem"
    path.write_bytes(
        made.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return path


def server_tls(path: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    return context
