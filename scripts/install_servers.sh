#!/bin/sh
# Install the real servers that tests marked `stack` talk to, where they are missing, and Grafana's types.
set -eu

# what the dashboards are checked against: two packages of npm, in a folder that git ignores
install_types() {
    folder=grafana/typecheck
    command -v npm >/dev/null || return 0
    cmp -s $folder/package-lock.json $folder/node_modules/.installed && return 0
    if npm ci --prefix $folder --silent --ignore-scripts --no-audit --no-fund; then
        cp $folder/package-lock.json $folder/node_modules/.installed
    else
        echo "npm could not install Grafana's types; the test of the dashboards' types is skipped." >&2
        [ -z "${CI:-}" ]
    fi
}

missing=""
{ command -v prometheus && command -v promtool; } >/dev/null || missing="prometheus"
command -v prometheus-alertmanager >/dev/null || missing="$missing prometheus-alertmanager"
command -v prometheus-pushgateway >/dev/null || missing="$missing prometheus-pushgateway"
command -v prometheus-node-exporter >/dev/null || missing="$missing prometheus-node-exporter"
command -v chromium >/dev/null || missing="$missing chromium"
command -v npm >/dev/null || missing="$missing npm"
[ -n "$missing" ] || { install_types; exit 0; }

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "The tests marked 'stack' need Debian's packages: $missing." >&2
    echo "Install them (as root: apt-get install $missing); until then these tests are skipped." >&2
    [ -z "${CI:-}" ] || exit 1
    install_types
    exit 0
fi

# the tests start servers of their own: the packages' services are neither started now nor at boot
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
    trap 'rm -f "$policy"' EXIT
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# shellcheck disable=SC2086  # one word a package
apt-get install -y -qq --no-install-recommends -o Dpkg::Use-Pty=0 $missing >/dev/null
if [ -d /run/systemd/system ]; then
    # shellcheck disable=SC2086
    systemctl disable --quiet $missing
fi
install_types
