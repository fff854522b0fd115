"""How Ray is started on a machine: its arguments, its environment, its ports. Pure."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from shoal.kernel import RAY_MARK

NAMESPACE = "shoal"
LABEL_NODE = "shoal-node"  # the Shoal node that a Ray node belongs to
LABEL_STAMP = "shoal-stamp"  # when it was started: of two with one name the later counts
MAILBOX_DIR = "SHOAL_RAY_NODE_DIR"  # where the mailbox of a machine finds its agent

# Each machine uses a block of 100 ports, the first free one from here on.
FIRST_PORTS = range(7701, 9701, 100)
PORTS_EACH = 99
OFFSETS = {
    "--node-manager-port": 1,
    "--object-manager-port": 2,
    "--runtime-env-agent-port": 3,
    "--dashboard-agent-listen-port": 4,
    "--dashboard-agent-grpc-port": 5,
    "--metrics-export-port": 6,
}
HEAD_OFFSETS = {"--port": 0, "--dashboard-port": 7}
WORKER_OFFSETS = (9, 98)

# What Shoal sends is small; Ray's default would be a third of the memory.
OBJECT_STORE_BYTES = 200_000_000
# Ray's defaults notice a dead raylet after 15 s and a cut link after 65 s: 2 and 6 s with these.
HEALTH_CHECKS = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "4",
    # A link that was cut and is whole again must be noticed, too: without these a connection sleeps
    # for as long again as the cut took.
    "RAY_grpc_client_keepalive_time_ms": "5000",
    "RAY_grpc_client_keepalive_timeout_ms": "3000",
    "RAY_gcs_grpc_min_reconnect_backoff_ms": "500",
    "RAY_gcs_grpc_max_reconnect_backoff_ms": "1000",
}
# The kernel allows 107 bytes for the name of a socket, and Ray adds some 65 of its own.
TEMP_DIR_BYTES_MAX = 40


class RayNode(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the starter of a machine keeps running; lies in `ray/node.json` of its home. `node` is
    empty where the machine only leads. `head` is where the head answers, HOST:PORT."""

    head: str
    ip: str
    first_port: int
    leads: bool = False
    node: str = ""


def arguments(node: RayNode, temp_dir: Path, stamp: str) -> list[str]:
    """Of `ray start`, which stays in the foreground until one of its processes ends."""
    offsets = {**OFFSETS, **HEAD_OFFSETS} if node.leads else OFFSETS
    first, last = (node.first_port + offset for offset in WORKER_OFFSETS)
    where = ["--head", "--include-dashboard", "false"] if node.leads else ["--address", node.head]
    labels = {LABEL_STAMP: stamp} | ({LABEL_NODE: node.node} if node.node else {})
    return [
        *("start", *where, "--block", "--node-ip-address", node.ip),
        *(
            word
            for flag, offset in offsets.items()
            for word in (flag, f"{node.first_port + offset}")
        ),
        *("--min-worker-port", str(first), "--max-worker-port", str(last)),
        # Shoal places the jobs: Ray must not think that it has resources to assign.
        *("--num-cpus", "0", "--num-gpus", "0"),
        *("--object-store-memory", str(OBJECT_STORE_BYTES)),
        *("--include-log-monitor", "false", "--disable-usage-stats"),
        *("--temp-dir", str(temp_dir)),
        *("--labels", ",".join(f"{name}={value}" for name, value in labels.items())),
    ]


def environment(home: Path, node: str = "") -> dict[str, str]:
    """What every process that talks to Ray needs in its environment."""
    return {
        **HEALTH_CHECKS,
        # Ray would refuse 3.11.2 beside 3.11.7.
        "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_path(home)),
        RAY_MARK: str(home),
        **({MAILBOX_DIR: str(home / "nodes" / node)} if node else {}),
    }


def without_ray(env: dict[str, str]) -> dict[str, str]:
    """A user's own settings for Ray must not reach the Ray that Shoal runs, nor ours their jobs."""
    return {
        k: v
        for k, v in env.items()
        if not k.startswith("RAY_") and k not in (RAY_MARK, MAILBOX_DIR)
    }


def token_path(home: Path) -> Path:
    return home / "ray" / "token"


def temp_dir(home: Path, fallback: Path) -> Path:
    """In the home if socket names stay short enough, else in a short directory of its own."""
    inside = home / "ray" / "tmp"
    if len(str(inside).encode()) <= TEMP_DIR_BYTES_MAX:
        return inside
    digest = hashlib.sha256(str(home).encode()).hexdigest()[:8]
    return fallback / f"shoal-ray-{digest}"
