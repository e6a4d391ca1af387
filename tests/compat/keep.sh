#!/usr/bin/env bash
# Keeps what later versions are compared with, in tests/compat/VERSION: checkpoints and their
# hashes, the messages of the wire, and all public names. Run it once for each release, before its
# tag: git then has what the release had.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../.."
TARGET=$(realpath -m "${CARGO_TARGET_DIR:-target}")
VERSION=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml)
KEPT=$PWD/tests/compat/$VERSION
rm -rf "$KEPT"
mkdir -p "$KEPT"
python3 tests/compat/names.py --write "$KEPT/names.txt"
# tests/run installs buf.
"$TARGET/buf/node_modules/.bin/buf" build proto --exclude-source-info --output "$KEPT/wire.binpb"
ZEROSHARD_WRITE_RELEASE=$KEPT cargo test --locked --profile try --workspace --test cluster -- \
    --ignored --exact released::checkpoints_of_this_version_are_kept
du -sh "$KEPT"
