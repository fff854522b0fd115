"""Which variables of the agent's own environment reach a job: a short list.

The operator who starts a cluster has tokens and keys in the shell. A job gets what makes programs,
GPUs and the network work on this machine, and its own `env`. See docs/code-travels.md.
"""

from __future__ import annotations

import os

KEPT = frozenset(
    (
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "LANG",
        "LANGUAGE",
        "TZ",
        "TMPDIR",
        "VIRTUAL_ENV",
        "CONDA_PREFIX",
        "PYTHONPATH",
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",
        "TORCH_HOME",
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
        "HF_HOME",
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
        "REQUESTS_CA_BUNDLE",
        "CURL_CA_BUNDLE",
        "http_proxy",
        "https_proxy",
        "no_proxy",
        "all_proxy",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "NO_PROXY",
        "ALL_PROXY",
    )
)
# Settings of this machine's GPUs and network, which the operator knows and a user does not.
KEPT_PREFIXES = (
    "LC_",
    "XDG_",
    "CUDA_",
    "NVIDIA_",
    "NCCL_",
    "GLOO_",
    "UCX_",
    "FI_",
    "ROCM_",
    "HIP_",
    "OMP_",
    "MKL_",
)


def inherited_env(*more: str) -> dict[str, str]:
    """The environment all members start from; their own `env` comes on top. Variables that begin
    with one of `more` are kept as well."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in KEPT or name.startswith((*KEPT_PREFIXES, *more))
    }
    return {"PYTHONUNBUFFERED": "1", **kept}
