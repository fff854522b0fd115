"""What of the operator's environment reaches a job: a short list, and no secret in it."""

from __future__ import annotations

import pytest

from shoal.agent.inherited import inherited_env

CANARY = "canary-of-the-operator"
SECRETS = (
    *("AWS_SECRET_ACCESS_KEY", "GITHUB_TOKEN", "HF_TOKEN", "SSH_AUTH_SOCK", "SHOAL_JOIN_TOKEN"),
    *(
        "NVIDIA_API_KEY",
        "NCCL_TOKEN",
        "UCX_PASSWORD",
        "FI_CREDENTIALS",
        "OMP_SECRET",
        "MKL_API_KEY",
    ),
    *("LC_MY_TOKEN", "LC_SECRET", "XDG_RUNTIME_DIR", "XDG_SESSION_ID", "DBUS_SESSION_BUS_ADDRESS"),
    *("LD_AUDIT", "PYTHONSTARTUP", "PYTHONHOME", "BASH_ENV", "ENV", "PROMPT_COMMAND"),
    *("OMPI_MCA_orte_hnp_uri", "OMPI_MCA_ess_base_jobid", "OMPI_COMM_WORLD_RANK", "PMIX_RANK"),
    *("CUDA_MPS_PIPE_DIRECTORY", "SHOAL_SECRETS_KEY", "SHOAL_HOME", "PIP_INDEX_URL"),
)


@pytest.mark.parametrize("apart", [False, True])
def test_no_secret_of_the_operator_is_on_the_list(
    monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    for name in SECRETS:
        monkeypatch.setenv(name, CANARY)
    assert CANARY not in inherited_env(apart=apart).values()


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        (f"http://me:{CANARY}@proxy:3128", "http://proxy:3128"),
        (f"http://me:{CANARY}@[::1]:3128/x@y", "http://[::1]:3128/x@y"),
        (f"me:{CANARY}@proxy:3128", "proxy:3128"),
        (f"//me:p@ss{CANARY}@proxy", "//proxy"),
        ("socks5h://proxy:1080", "socks5h://proxy:1080"),
        ("localhost,.example.org", "localhost,.example.org"),
    ],
)
@pytest.mark.parametrize("name", ["http_proxy", "HTTPS_PROXY", "All_Proxy"])
def test_a_proxy_is_passed_without_its_password(
    monkeypatch: pytest.MonkeyPatch, name: str, given: str, passed: str
) -> None:
    monkeypatch.setenv(name, given)
    assert inherited_env()[name] == passed


def test_a_tenant_that_is_kept_apart_gets_nothing_that_leads_into_the_operators_home(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("HOME", "PYTHONPATH", "LD_PRELOAD", "XDG_CACHE_HOME", "HF_HOME", "TMPDIR"):
        monkeypatch.setenv(name, "/root/own")
    for name in ("NCCL_SOCKET_IFNAME", "OMPI_MCA_plm_rsh_agent", "CUDA_HOME", "LC_ALL"):
        monkeypatch.setenv(name, "machine")
    assert list(inherited_env().values()).count("/root/own") == 6
    apart = inherited_env(apart=True)
    assert "/root/own" not in apart.values()
    assert list(apart.values()).count("machine") == 4


def test_a_tenants_build_does_not_get_the_password_of_an_index(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", f"https://me:{CANARY}@a/s https://b/s http://x@c/")
    own = inherited_env("PIP_")
    assert CANARY in own["PIP_EXTRA_INDEX_URL"], "the operator's own builds need it"
    apart = inherited_env("PIP_", apart=True)
    assert apart["PIP_EXTRA_INDEX_URL"] == "https://a/s https://b/s http://c/"
