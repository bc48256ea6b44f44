#!/bin/sh
# Install the servers that the tests need and that PyPI does not have. Quick when they are there.
set -eu
missing=""
ls /usr/lib/postgresql/15/bin/postgres >/dev/null 2>&1 || missing="$missing postgresql-15"
ls /usr/lib/rabbitmq/bin/rabbitmq-server >/dev/null 2>&1 || missing="$missing rabbitmq-server"
# One library of the tests is compiled.
command -v gcc >/dev/null 2>&1 || missing="$missing gcc libc6-dev"
ls /usr/include/openssl/ssl.h >/dev/null 2>&1 || missing="$missing libssl-dev"
ls /usr/bin/chromium >/dev/null 2>&1 || missing="$missing chromium"
command -v redis-server >/dev/null 2>&1 || missing="$missing redis-server"
# It comes with promtool, which checks metrics and alert rules.
command -v promtool >/dev/null 2>&1 || missing="$missing prometheus"
# Shells that complete what is typed; bash is everywhere.
command -v zsh >/dev/null 2>&1 || missing="$missing zsh"
command -v fish >/dev/null 2>&1 || missing="$missing fish"
# Debian installs the pooler in a folder that not every user has on the path.
ls /usr/sbin/pgbouncer >/dev/null 2>&1 || command -v pgbouncer >/dev/null 2>&1 || missing="$missing pgbouncer"
[ -z "$missing" ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "Installing$missing"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    # The package would start a cluster of its own; the tests start theirs.
    mkdir -p /etc/postgresql-common
    grep -qs '^create_main_cluster' /etc/postgresql-common/createcluster.conf ||
        echo 'create_main_cluster = false' >> /etc/postgresql-common/createcluster.conf
    # The packages would also start their services; the tests start theirs. While this file exists, no service starts.
    policy=/usr/sbin/policy-rc.d
    if [ ! -e "$policy" ]; then
        printf '#!/bin/sh\nexit 101\n' > "$policy"
        chmod +x "$policy"
        trap 'rm -f "$policy"' EXIT
    fi
    # shellcheck disable=SC2086
    apt-get install -y -qq --no-install-recommends $missing >/dev/null
else
    echo "The tests need:$missing. Install with: sudo apt-get install --no-install-recommends$missing" >&2
    exit 1
fi
