#!/bin/sh
# Installs those of the named Debian packages that are not there, if we may. Tests that need one
# that is missing are skipped, and say so.
absent=""
for package in "$@"; do
    dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null \
        | grep -qx installed || absent="$absent $package"
done
[ -z "$absent" ] && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "not installed:$absent (that takes root on Debian); the tests that need it are skipped"
    exit 0
fi
echo "installing$absent"
export DEBIAN_FRONTEND=noninteractive
install() { timeout 600 apt-get install -qq -y --no-install-recommends "$@" >/dev/null; }
# No service is started by its installation: the machine is only borrowed.
if [ ! -e /usr/sbin/policy-rc.d ]; then
    printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d && chmod +x /usr/sbin/policy-rc.d
    trap 'rm -f /usr/sbin/policy-rc.d' EXIT
fi
install $absent 2>/dev/null || { timeout 600 apt-get update -qq && install $absent 2>/dev/null; } \
    || for package in $absent; do
        install "$package" || echo "cannot install $package; the tests that need it are skipped"
    done
exit 0
