"""Which variables of the agent's own environment reach a job: a short list.

The operator who starts a cluster has tokens and keys in the shell. A job gets what makes programs,
GPUs and the network work on this machine, and its own `env`. A tenant that is kept apart gets
nothing that leads into the operator's home. See docs/environment.md.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping

# What this machine is like: for every job.
MACHINE = frozenset(
    (
        *("PATH", "LD_LIBRARY_PATH", "TZ", "LANG", "LANGUAGE"),
        *(  # not LC_*: any of those gets through ssh, so people carry tokens in them
            f"LC_{what}"
            for what in (
                *("ALL", "CTYPE", "NUMERIC", "TIME", "COLLATE", "MONETARY", "MESSAGES"),
                *("PAPER", "NAME", "ADDRESS", "TELEPHONE", "MEASUREMENT", "IDENTIFICATION"),
            )
        ),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
        *("CUDA_HOME", "CUDA_PATH", "CUDA_ROOT", "CUDA_DEVICE_ORDER", "CUDA_MODULE_LOADING"),
        *("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_CACHE_DISABLE", "CUDA_CACHE_MAXSIZE"),
        *("NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_TF32_OVERRIDE", "ROCM_PATH", "ROCM_HOME"),
    )
)
# Settings of its network and its processors, which the operator knows and a user does not.
# Of Open MPI not all: whoever starts an agent with mpirun has the name of that run there, too.
MACHINE_PREFIXES = (
    *("NCCL_", "GLOO_", "UCX_", "FI_", "HIP_", "OMP_", "MKL_"),
    *(f"OMPI_MCA_{what}" for what in ("btl", "pml", "mtl", "coll", "oob_", "plm")),
)
# What the operator's own programs are like: for the operator's own jobs.
OWN = frozenset(
    (
        *("HOME", "USER", "LOGNAME", "SHELL", "TMPDIR"),
        *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME"),
        *("XDG_CONFIG_DIRS", "XDG_DATA_DIRS"),
        *("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "LD_PRELOAD", "CUDA_CACHE_PATH"),
        *("TORCH_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "HF_HOME"),
    )
)
PROXIES = frozenset(("http_proxy", "https_proxy", "all_proxy", "no_proxy"))  # and in capitals
# A variable with a harmless prefix may be a key all the same.
SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|KEY$|_KEY_", re.IGNORECASE)
URL_LOGIN = re.compile(r"(://)[^/\s@]*@")
LOGIN = re.compile(r"^((?:[a-z0-9+.-]+:)?//)?[^/]*@", re.IGNORECASE)


def inherited_env(*more: str, apart: bool = False) -> dict[str, str]:
    """The environment all members start from; their own `env` comes on top. Variables that begin
    with one of `more` are kept as well. `apart`: for a tenant that is kept apart."""
    kept = {"PYTHONUNBUFFERED": "1"}
    prefixes = (*MACHINE_PREFIXES, *more)
    for name, value in os.environ.items():
        if name.lower() in PROXIES:
            kept[name] = LOGIN.sub(r"\1", value)  # a password for the proxy is the operator's
            continue
        if apart and more and name.startswith(more):  # a tenant builds with the operator's settings
            value = URL_LOGIN.sub(r"\1", value)
        tuned = name.startswith(prefixes) and not SECRET.search(name)
        if tuned or name in MACHINE or (name in OWN and not apart):
            kept[name] = value
    return kept


# Lists of paths, from which those are removed that a tenant's user cannot reach.
PATHS = frozenset(
    (
        *("PATH", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "CUDA_ROOT", "ROCM_PATH"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "ROCM_HOME"),
    )
)


def for_tenant(
    env: Mapping[str, str], home: str, user: str, usable: Callable[[str], bool]
) -> dict[str, str]:
    """The environment that members of a tenant start from, who have a Unix user of their own."""
    kept = {"HOME": home, "USER": user, "LOGNAME": user, "SHELL": "/bin/sh"}
    # torch would choose a place in /tmp, which goes with the member: each job would compile again.
    kept["TORCHINDUCTOR_CACHE_DIR"] = f"{home}/.cache/torchinductor"
    for name, value in env.items():
        kept[name] = usable_paths(value, usable) if name in PATHS else value
        if not kept[name]:
            del kept[name]
    return kept


def usable_paths(value: str, usable: Callable[[str], bool]) -> str:
    return ":".join(part for part in value.split(":") if part and usable(part))


def build_env(env: Mapping[str, str]) -> dict[str, str]:
    """No variable that would make pip install elsewhere, and no secret: a package can run code of
    its own while it is built."""
    odd = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PIP_TARGET", "PIP_PREFIX", "PIP_USER")
    return {name: value for name, value in env.items() if name not in odd}
