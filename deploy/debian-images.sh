#!/usr/bin/env bash
# Builds images of Prometheus and Alertmanager from Debian's packages, for compose.debian.yaml, in
# places without a container registry:
#
#     deploy/debian-images.sh
#
# Needs apt with Debian's package lists (apt-get update), and Docker. Nothing is installed. The
# images are FROM scratch, with the binaries of the packages and the libraries that they need.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Prepares and builds one image: its tag, the package, the directory of its data, its first program
# (the entry point), and further programs.
build() {
    local tag=$1 package=$2 data=$3 entry=$4 root=$work/$2/root
    shift 3
    mkdir -p "$work/$package/unpacked" "$root/etc" "$root/tmp" "$root$data"
    (cd "$work/$package" && apt-get -o APT::Sandbox::User="$(id -un)" download -qq "$package")
    dpkg-deb -x "$work/$package"/*.deb "$work/$package/unpacked"
    local program path
    for program in "$@"; do
        install -D "$work/$package/unpacked/usr/bin/$program" "$root/bin/$program"
        # A static program has no libraries, and ldd fails.
        { ldd "$root/bin/$program" || true; } | awk '$2 == "=>" {print $3} $1 ~ /^\// {print $1}' >"$work/libraries"
        while read -r path; do
            mkdir -p "$root$(dirname "$path")"
            cp --dereference "$path" "$root$path"
        done <"$work/libraries"
    done
    chmod 1777 "$root/tmp" "$root$data"
    printf 'nobody:x:65534:65534:nobody:/:/nologin\n' >"$root/etc/passwd"
    printf 'hosts: files dns\n' >"$root/etc/nsswitch.conf"
    printf 'FROM scratch\nCOPY root/ /\nENV PATH=/bin\nUSER 65534:65534\nENTRYPOINT ["/bin/%s"]\n' "$entry" \
        >"$work/$package/Dockerfile"
    # Alertmanager reads its templates from there.
    if [ -d "$work/$package/unpacked/usr/share/prometheus" ]; then
        mkdir -p "$root/usr/share"
        cp -R "$work/$package/unpacked/usr/share/prometheus" "$root/usr/share/"
    fi
    rm -rf "$work/$package/unpacked" "$work/$package"/*.deb
    docker build --quiet --tag "$tag" "$work/$package"
}

build zeroshard-prometheus:debian prometheus /prometheus prometheus promtool
build zeroshard-alertmanager:debian prometheus-alertmanager /alertmanager prometheus-alertmanager amtool
