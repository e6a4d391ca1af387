#!/usr/bin/env bash
# Builds the image from binaries that exist already, without a network:
#
#     cargo build --release && deploy/image.sh [TAG [BINARIES]]
#
# TAG is zeroshard by default, and BINARIES is target/release. The instructions are those of the
# last stage of the Dockerfile, so that both images differ only in the origin of the binaries.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."

readonly TAG=${1:-zeroshard} BINARIES=${2:-${CARGO_TARGET_DIR:-target}/release}

context=$(mktemp -d)
trap 'rm -rf "$context"' EXIT
deploy/rootfs.sh "$BINARIES" "$context/rootfs"
sed -n '/^FROM scratch$/,$p' deploy/Dockerfile |
    sed 's|^COPY --from=build /rootfs/ /$|COPY rootfs/ /|' >"$context/Dockerfile"
grep -q '^COPY rootfs/ /$' "$context/Dockerfile"
docker build --quiet --tag "$TAG" "$context"
