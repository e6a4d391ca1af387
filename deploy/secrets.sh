#!/usr/bin/env bash
# Creates the secrets that compose.yaml mounts as files, unless they exist:
#
#     deploy/secrets.sh [DIRECTORY]
#
# DIRECTORY is deploy/secrets by default. The processes in the containers have another user, so that
# each file is readable for all; the directory is not, which protects them on this machine.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"

readonly DIRECTORY=${1:-secrets}
umask 077
mkdir -p "$DIRECTORY"
chmod 700 "$DIRECTORY"
for name in token grafana-password; do
    [ -s "$DIRECTORY/$name" ] || od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$DIRECTORY/$name"
    chmod 444 "$DIRECTORY/$name"
done
printf 'secrets are in %s\n' "$(realpath "$DIRECTORY")"
