#!/usr/bin/env bash
# Makes the files of a release from this source tree, and uploads nothing:
#
#     deploy/release/release.sh DIRECTORY [ARCHITECTURE...]
#
# For each architecture (x86_64 and aarch64 by default): a wheel with the servers and zsctl, a
# tarball with all programs and systemd units, and a Debian package. With a Docker daemon also the
# image of this machine's architecture. For all: the Helm chart, a bill of materials (SBOM) and
# checksums. DIRECTORY is replaced.
#
# Needs Rust with rustup, Helm, maturin, cargo-zigbuild and zig (tests/python/requirements-release.txt)
# on the PATH, and dpkg-deb. The programs need glibc 2.28 or later: Debian 10, Ubuntu 20.04, RHEL 8.
set -euo pipefail

[ $# -ge 1 ] || { printf 'usage: %s DIRECTORY [ARCHITECTURE...]\n' "$0" >&2 && exit 2; }
OUT=$(realpath -m "$1")
shift
readonly OUT
[ $# -gt 0 ] || set -- x86_64 aarch64
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../.."
TARGET=$(realpath -m "${CARGO_TARGET_DIR:-target}")
export CARGO_TARGET_DIR=$TARGET
VERSION=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml)
readonly GLIBC=2.28 VERSION TARGET
readonly PROGRAMS=(zeroshard-server zeroshard-worker zsctl)
# Equal sources give equal files.
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH

programs() {
    local triple=$1
    rustup --quiet target add "$triple"
    cargo zigbuild --locked --release --config 'profile.release.strip=true' --target "$triple.$GLIBC" \
        "${PROGRAMS[@]/#/--bin=}"
}

# The wheel installs the programs in this directory, which maturin finds by the name of the module,
# as commands.
wheel() {
    local triple=$1 program scripts=client/python/zeroshard._native.data/scripts
    trap 'rm -rf client/python/zeroshard._native.data' RETURN
    install -D -t "$scripts" "$STAGE"/zeroshard-server "$STAGE"/zsctl
    maturin build --quiet --locked --release --zig --target "$triple" \
        --compatibility "manylinux_${GLIBC/./_}" --manifest-path client/python/Cargo.toml --out "$OUT"
    for program in zeroshard-server zsctl; do
        python3 -m zipfile --list "$OUT"/*"${triple%%-*}".whl | grep "/scripts/$program" >/dev/null ||
            { printf 'the wheel lacks %s\n' "$program" >&2 && return 1; }
    done
}

tarball() {
    local name=zeroshard-$VERSION-$1-linux
    local root=$STAGE/$name
    install -D -t "$root/bin" "${PROGRAMS[@]/#/$STAGE/}"
    install -D -m 644 -t "$root/systemd" deploy/systemd/*
    install -m 644 LICENSE README.md CHANGELOG.md "$root"
    tar --create --gzip --file "$OUT/$name.tar.gz" --directory "$STAGE" --sort name --owner 0 --group 0 \
        --mtime "@$SOURCE_DATE_EPOCH" "$name"
}

deb() {
    local architecture=amd64 root=$STAGE/deb
    [ "$1" = x86_64 ] || architecture=arm64
    install -D -t "$root/usr/bin" "${PROGRAMS[@]/#/$STAGE/}"
    install -D -m 644 -t "$root/lib/systemd/system" deploy/systemd/*.service
    install -D -m 644 deploy/systemd/sysusers.conf "$root/usr/lib/sysusers.d/zeroshard.conf"
    install -D -m 644 -t "$root/etc/zeroshard" deploy/systemd/zeroshard.toml
    install -D -m 644 LICENSE "$root/usr/share/doc/zeroshard/copyright"
    install -D -m 755 deploy/release/postinst "$root/DEBIAN/postinst"
    printf '/etc/zeroshard/zeroshard.toml\n' >"$root/DEBIAN/conffiles"
    sed -e "s/@VERSION@/$VERSION/" -e "s/@ARCHITECTURE@/$architecture/" deploy/release/control \
        >"$root/DEBIAN/control"
    dpkg-deb --root-owner-group --build "$root" "$OUT/zeroshard_${VERSION}_$architecture.deb" >/dev/null
}

# The programs of the image are those of the tarball.
image() {
    docker info >/dev/null 2>&1 || { printf 'no image: no Docker daemon answers\n' && return; }
    local tag=zeroshard:$VERSION
    deploy/image.sh "$tag" "$STAGE"
    docker save "$tag" | gzip --no-name >"$OUT/zeroshard-$VERSION-$1-image.tar.gz"
}

rm -rf "$OUT"
mkdir -p "$OUT"
for architecture; do
    triple=$architecture-unknown-linux-gnu
    printf '%s: programs\n' "$architecture"
    programs "$triple"
    STAGE=$TARGET/release-stage/$architecture
    rm -rf "$STAGE"
    mkdir -p "$STAGE"
    install -t "$STAGE" "${PROGRAMS[@]/#/$TARGET/$triple/release/}"
    printf '%s: wheel, tarball and Debian package\n' "$architecture"
    wheel "$triple"
    tarball "$architecture"
    deb "$architecture"
    if [ "$architecture" = "$(uname -m)" ]; then
        image "$architecture"
    fi
done
deploy/helm/package.sh "$OUT"
python3 deploy/release/sbom.py >"$OUT/zeroshard-$VERSION.cdx.json"
(cd "$OUT" && sha256sum -- * >SHA256SUMS)
ls -l "$OUT"
