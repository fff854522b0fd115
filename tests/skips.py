"""Which tests may be skipped on a machine like CI's: root on Debian, with every package that
`make test` installs. Any other skip there fails the run, because a promise went untested."""

from __future__ import annotations

import os
from pathlib import Path

# Test, or the beginning of its name: why it may be skipped there.
BY_NAME = {
    "bench/tests/test_placement.py::test_when_demand_equals_capacity": "needs published traces",
    "bench/tests/test_tokens.py::test_cache_halves": "needs published traces",
    "bench/tests/test_tokens.py::test_the_published_order": "needs published traces",
    "bench/tests/test_sleep_traces.py::test_sleep_loses_less_work": "needs published traces",
    "tests/plan/test_serving.py::test_real_arrivals_have": "needs published traces",
    "tests/sim/test_replay.py::test_a_public_trace_is_replayed": "needs published traces",
    "tests/agent/test_sleep_cuda.py::test_on_a_real_gpu": "needs an NVIDIA GPU",
    "tests/probes/test_probe.py::test_real_gpus_compute": "needs an NVIDIA GPU",
    "tests/cli/test_bad_input.py::test_an_unreadable_job_file": "root reads everything",
    "tests/train/test_checkpoints.py::test_a_directory_that_is_not": "root may write anywhere",
    "tests/live/test_launchers.py::test_nanogpt_trains": "needs a checkout of nanoGPT",
    "tests/tasks/test_files.py::test_rows_of_a_parquet_file": "needs pyarrow, which is large",
    "tests/web/test_served_apps.py::test_a_gradio_app_works": "needs gradio, which is large",
}
# The beginning of a reason: what root may be denied in a container.
BY_REASON = (
    "needs cgroups",
    "needs a mounted cgroup2",
    "no cgroup of one's own can be made here",
    "mount is not allowed here",
    "cannot mount a file system here",
    "no network namespace can be made here",
    "no interface of WireGuard can be made here",
    "needs the repository's history",
    "processes may not be traced here",
    "dockerd cannot start here",
    "this kernel has no NFS client",
)


def must_run_everything() -> bool:
    return bool(os.environ.get("CI")) and os.geteuid() == 0 and Path("/etc/debian_version").exists()


def is_expected(test: str, reason: str) -> bool:
    real = "KUBECONFIG" in os.environ and "API server" in reason  # ours has faults that it has not
    return real or test.startswith(tuple(BY_NAME)) or reason.startswith(BY_REASON)
