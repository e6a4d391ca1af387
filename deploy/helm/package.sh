#!/usr/bin/env bash
# Packages the chart as DIRECTORY/zeroshard-VERSION.tgz:
#
#     deploy/helm/package.sh DIRECTORY
#
# Needs Helm; HELM names it if it is not on the PATH. SOURCE_DATE_EPOCH is the time of the files in the
# package, by default that of the last commit, so that equal sources give an equal package.
set -euo pipefail

[ $# = 1 ] || { printf 'usage: %s DIRECTORY\n' "$0" >&2 && exit 2; }
OUT=$(realpath -m "$1")
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
cp -R zeroshard "$copy"
find "$copy/zeroshard" -exec touch --date "@${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}" {} +
"${HELM:-helm}" package "$copy/zeroshard" --destination "$OUT" >/dev/null
