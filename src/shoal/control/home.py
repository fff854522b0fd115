"""Where a cluster keeps its files on this machine."""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path

import msgspec

from shoal.client.address import SOCKET_NAME, Address
from shoal.control.reach import is_loopback
from shoal.machine.bytecode import BYTECODE
from shoal.machine.files import SUPERVISOR_LOCK, read_own, require_own, tighten, write_private
from shoal.model.node import NodeSpec
from shoal.model.service import Domain

DEFAULT_PORT = 7700


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `shoal up` was asked for. Port 0: any free one. `engine` brings nodes when the policy
    wants them; `reach` is the URL at which nodes reach the head, if it differs from the API's.
    With a `database`, several heads are one cluster, and none of them has a local node."""

    nodes: tuple[NodeSpec, ...]
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    engine: str = "local"
    reach: str = ""
    domain: Domain = "localhost"  # services are found under NAME.DOMAIN
    certificate: str = ""  # file that the operator brought; without one we make our own
    key: str = ""
    database: str = ""  # URL of a PostgreSQL server; without one, SQLite files in the home
    shared: str = ""  # folder that all heads see: logs, packages, outputs, checkpoints
    head: str = ""  # the name of this head among those of the same database
    supplied: tuple[str, ...] = ()  # the supplies that the file of `--supply` named last

    @property
    def encrypted(self) -> bool:
        """Does the port speak TLS? The socket file never does."""
        return bool(self.certificate) or not is_loopback(self.host)


class Home:
    """One directory, private to its user."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.config = self.path / "cluster.json"
        self.id = self.path / "cluster-id"
        self.address = self.path / "controller.json"
        self.socket = self.path / SOCKET_NAME
        self.token = self.path / "token"
        self.tls = self.path / "tls"  # our own CA, and the certificate that it made
        self.database = self.path / "shoal.db"
        self.marks = self.path / "marks.json"  # job numbers and epochs that were ever given out
        self.clock = self.path / "clock.json"  # the cluster's time by this machine's clocks
        self.spare = self.path / "spare"  # room that is freed when the disk is full
        self.salvaged = self.path / "shoal.db.salvaged"  # until a salvage has put it in place
        self.salvage_report = self.path / "salvage.txt"  # an alarm is raised while it is there
        self.restoring = self.path / "restoring"  # while a restore puts files into place
        self.ledger = self.path / "ledger.db"
        self.prices = self.path / "prices.json"
        self.history = self.path / "history.db"
        self.bars = self.path / "bars.db"  # who held which GPUs when
        self.controller_log = self.path / "controller.log"
        self.controller_lock = self.path / "controller.lock"
        self.supervisor_lock = self.path / SUPERVISOR_LOCK
        self.logs = self.path / "logs"
        self.nodes = self.path / "nodes"
        self.gateway = self.path / "gateway"
        self.gateway_port = self.path / "gateway.port"
        self.join_token = self.path / "join-token"  # with it, machines become nodes
        self.packages = self.path / "packages"  # working directories that were sent
        self.secrets = self.path / "secrets"  # encrypted; the key is beside it
        self.checkpoints = self.path / "checkpoints"  # a directory for each job
        self.bytecode = self.path / BYTECODE  # if the code came without, and none may be beside it
        self.outputs = self.path / "outputs"  # files that jobs have written, and nodes have sent

    def share(self, folder: str) -> None:
        """What jobs leave is in a folder that all heads see; empty: in this home. OSError if it is
        not the folder of this cluster, because it is not mounted, say."""
        if not folder:
            return
        root = Path(folder)
        mark = root / self.id.name
        try:
            found = mark.read_text().strip()
        except FileNotFoundError:
            raise OSError(errno.ENOENT, f"it has no file {mark.name} of this cluster") from None
        if found != self.cluster_id():
            raise OSError(errno.EINVAL, f"it is of the cluster {found[:16]}, not this one")
        self.logs, self.packages = root / "logs", root / "packages"
        self.checkpoints, self.outputs = root / "checkpoints", root / "outputs"
        self.marks = root / self.marks.name
        for made in (self.logs, self.packages, self.checkpoints, self.outputs):
            made.mkdir(mode=0o700, exist_ok=True)
            if not os.access(made, os.W_OK | os.X_OK):
                raise OSError(errno.EACCES, f"{made.name} in it cannot be written")

    def node(self, node_id: str) -> Path:
        return self.nodes / node_id

    def create(self) -> None:
        """Create it if needed, and close it to other users. PermissionError if it is not ours."""
        require_own(self.path)
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        require_own(self.path)  # somebody may have made it meanwhile
        tighten(self.path)
        self.logs.mkdir(mode=0o700, exist_ok=True)
        self.nodes.mkdir(mode=0o700, exist_ok=True)
        if not self.token.exists() or not self.read_token():
            write_private(self.token, secrets.token_urlsafe(32).encode() + b"\n")

    def read_token(self) -> str:
        """An empty file is not a token: an empty token would let everybody in."""
        return read_own(self.token).decode().strip()

    def cluster_id(self) -> str:
        """8 hex digits that name this cluster where others can see what is ours: in the names of
        Slurm's jobs or Kubernetes' pods. Never changes."""
        try:
            return self.id.read_text().strip()
        except FileNotFoundError:
            write_private(self.id, secrets.token_hex(4).encode() + b"\n")
            return self.id.read_text().strip()

    def read_config(self) -> ClusterConfig | None:
        try:
            return msgspec.json.decode(self.config.read_bytes(), type=ClusterConfig)
        except FileNotFoundError:
            return None
        except msgspec.ValidationError as error:
            if "unknown field" not in str(error):
                raise
            # To leave it out could start another cluster than the one that was asked for.
            message = f"a newer version of shoal wrote it: {error}; install that version"
            raise msgspec.ValidationError(message) from None

    def write_config(self, config: ClusterConfig) -> None:
        write_private(self.config, msgspec.json.format(msgspec.json.encode(config)) + b"\n")


def node_url(config: ClusterConfig, home: Home) -> str:
    """The URL at which nodes of other machines reach the head; empty before it is up."""
    if "://" in config.reach:
        return config.reach
    try:
        return msgspec.json.decode(home.address.read_bytes(), type=Address).url
    except (OSError, msgspec.DecodeError):
        return ""
