"""The shell scripts that run on a host, and the parsing of their output."""

from __future__ import annotations

import contextlib

import msgspec

from shoal.hosts.spec import Facts, Receipt

HOME = 'home="${SHOAL_HOME:-$HOME/.shoal}"\n'

# $1: the preferred Python version, $2: the interpreter from the hosts file, or empty.
LOOK = (
    HOME
    + r"""
echo "home $home"
version='import sys; print("%d.%d" % sys.version_info[:2])'
new_enough='import sys; sys.exit(sys.version_info < (3, 11))'
installed='from importlib.metadata import version; print("shoal", version("shoal"))'
case "$2" in "~/"*) given="$HOME/${2#??}" ;; *) given="$2" ;; esac
names="python$1 python3 python3.14 python3.13 python3.12 python3.11 /usr/local/bin/python3"
for python in ${given:-$names $HOME/.local/bin/python$1}; do
    found=$("$python" -c "$version" 2>/dev/null) || continue
    if [ -n "$given" ] || "$python" -c "$new_enough"; then
        echo "python $(command -v "$python")"
        echo "version $found"
        break
    fi
    echo "found $found ($python)"
done
"${given:-$home/venv/bin/python}" -c "$installed" 2>/dev/null
parent="$home"
while [ ! -d "$parent" ]; do parent=$(dirname "$parent"); done
echo "free_kb $(df -Pk "$parent" | awk 'END { print $4 }')"
for link in "$home"/nodes/*/link.json; do
    [ ! -e "$link" ] || echo "node $(basename "$(dirname "$link")")"
done
[ ! -r "$home/host.json" ] || echo "receipt $(cat "$home/host.json")"
"""
)

# $1: the interpreter, $2: the wheel's name. The wheel is on stdin.
INSTALL = (
    HOME
    + r"""
set -e
umask 077
mkdir -p "$home"
wheel="$home/$2"
cat >"$wheel"
receipt="$home/host.json"
[ ! -e "$receipt" ] || mv "$receipt" "$receipt.before"
venv="$home/venv"
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    rm -rf "$venv"
    "$1" -m venv "$venv" >"$home/install.log" 2>&1 || {
        rm -rf "$venv"
        echo "it cannot make a virtual environment: install the venv module of $1 there" \
            "(Debian: apt install python3-venv)" >&2
        exit 1
    }
fi
pip() { "$venv/bin/python" -m pip --quiet --disable-pip-version-check --no-input "$@"; }
{
    # Not removed first: if pip fails, the node still has what it runs.
    before=$("$venv/bin/python" -c "import shoal; print(shoal.__version__)" 2>/dev/null) || before=
    # pip does not replace another build of the same version.
    pip install "$wheel" && case "$2" in
        "shoal-$before-"*) pip install --force-reinstall --no-deps "$wheel" ;;
    esac
} >"$home/install.log" 2>&1 || {
    echo "pip failed there: $(grep -i error "$home/install.log" | tail -n 1)" \
        "(all of it is in $home/install.log)" >&2
    [ ! -e "$receipt.before" ] || mv "$receipt.before" "$receipt"
    exit 1
}
rm -f "$wheel" "$receipt.before"
"""
)

# The receipt is on stdin.
NOTE = (
    HOME + 'set -e\numask 077\ncat >"$home/.host.json"\nmv "$home/.host.json" "$home/host.json"\n'
)
FORGET = HOME + 'rm -f "$home/host.json"\n'

# $1: the interpreter, or empty for the environment's; then the arguments of shoal. The token is on
# stdin, because other users can read command lines.
SHOAL = (
    HOME
    + r"""
python="${1:-$home/venv/bin/python}"
case "$python" in "~/"*) python="$HOME/${python#??}" ;; esac
shift
IFS= read -r SHOAL_JOIN_TOKEN && export SHOAL_JOIN_TOKEN
exec "$python" -m shoal.main "$@"
"""
)


def read_facts(text: str) -> Facts:
    told: dict[str, str] = {}
    others: list[str] = []
    nodes: list[str] = []
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == "found":
            others.append(value)
        elif name == "node":
            nodes.append(value)
        else:
            told[name] = value
    return Facts(
        home=told.get("home", ""),
        python=told.get("python", ""),
        version=told.get("version", ""),
        found=", ".join(others),
        shoal=told.get("shoal", ""),
        free_mb=int(told.get("free_kb") or 0) // 1024,
        nodes=tuple(nodes),
        receipt=_receipt(told.get("receipt", "")),
    )


def _receipt(text: str) -> Receipt | None:
    """A receipt that cannot be read counts as none: everything is done again."""
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(text, type=Receipt)
    return None
