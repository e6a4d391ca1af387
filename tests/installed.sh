#!/usr/bin/env bash
# Installs the files of a release in a fresh Debian 12, which has neither Rust nor a compiler, and
# trains there, as root:
#
#     tests/installed.sh FILES
#
# FILES is the directory that deploy/release/release.sh has made. Prints the seconds of each part.
# torch is a download of 3 GB.
set -euo pipefail

[ $# = 1 ] || { printf 'usage: %s FILES\n' "$0" >&2 && exit 2; }
FILES=$(realpath "$1")
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
[ "$(id -u)" = 0 ] || { printf 'a fresh Debian can only be made by root\n' && exit 1; }
command -v debootstrap >/dev/null || apt-get install -qq -y debootstrap >/dev/null
ROOT=$(mktemp -d)
clean() {
    umount "$ROOT/proc" "$ROOT/dev" 2>/dev/null || true
    rm -rf --one-file-system "$ROOT"
}
trap clean EXIT

part() {
    local name=$1 began=$SECONDS
    shift
    "$@"
    printf '%5s s  %s\n' $((SECONDS - began)) "$name"
}

debian() {
    debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv bookworm "$ROOT" >"$ROOT.log" ||
        { cat "$ROOT.log" && return 1; }
    mount --bind /dev "$ROOT/dev"
    mount -t proc proc "$ROOT/proc"
    # The network of this machine: names, certificates of a proxy, and the index of packages.
    local file
    for file in /etc/resolv.conf /etc/hosts /etc/pip.conf /etc/ssl/certs/ca-certificates.crt; do
        [ ! -e "$file" ] || cp --dereference "$file" "$ROOT$file"
    done
    mkdir "$ROOT/files"
    cp "$FILES"/*.whl "$FILES"/*.deb "$ROOT/files"
    sed -n '/^```python$/,/^```$/{/^```/d;p}' README.md >"$ROOT/files/quickstart.py"
}

# Runs a command in the new Debian. Variables of pip may name an index.
inside() {
    env -i PATH=/venv/bin:/usr/bin:/bin:/usr/sbin:/sbin HOME=/root LANG=C.UTF-8 $(env | grep '^PIP_INDEX_URL=' || true) \
        chroot "$ROOT" "$@"
}

is_without() {
    local program
    for program in cargo rustc gcc cc; do
        ! inside sh -c "command -v $program" || { printf 'the new Debian has %s\n' "$program" && return 1; }
    done
}

train() {
    inside python /files/quickstart.py | tail -1
    inside zeroshard launch --servers 2 -- python /files/quickstart.py | tail -1
}

package() {
    inside apt-get install -qq -y "/files/$(basename "$FILES"/*_amd64.deb)" >/dev/null
    inside id zeroshard
    inside ls /lib/systemd/system/zeroshard-coordinator.service /etc/zeroshard/zeroshard.toml
    inside /usr/bin/zeroshard-server --version
    inside /usr/bin/zsctl --version
}

part "a fresh Debian" debian
is_without
part "environment" inside python3 -m venv /venv
part "pip install zeroshard torch" inside pip install --quiet "/files/$(basename "$FILES"/*_x86_64.whl)" torch
inside zeroshard --version
part "the script of README.md, alone and with zeroshard launch" train
part "the Debian package" package
