#!/usr/bin/env bash
# Prepares the root directory of the image from built binaries: the binaries without debug
# information, the libraries that they need, certificates, and the files of /etc that glibc reads.
#
#     deploy/rootfs.sh BINARIES DIRECTORY
#
# DIRECTORY is replaced. Runs on Debian 12 and later, and needs binutils.
set -euo pipefail

[ $# = 2 ] || { printf 'usage: %s BINARIES DIRECTORY\n' "$0" >&2 && exit 2; }
readonly BINARIES=$1 ROOT=$2
readonly PROGRAMS=(zeroshard-server zeroshard-worker zsctl)
# Libraries that glibc had before version 2.34. NVIDIA's driver still links to them.
readonly FOR_DRIVERS=(libdl.so.2 libpthread.so.0 librt.so.1)

for program in "${PROGRAMS[@]}"; do
    [ -x "$BINARIES/$program" ] || { printf '%s has no %s\n' "$BINARIES" "$program" >&2 && exit 1; }
done

rm -rf "$ROOT"
mkdir -p "$ROOT"/{usr/local/bin,usr/local/nvidia/lib64,usr/lib64,etc/ssl/certs,data,tmp}
# Volumes that are mounted there take over the mode, so that the user of the image can write.
chmod 1777 "$ROOT"/{data,tmp}

for program in "${PROGRAMS[@]}"; do
    objcopy --strip-debug "$BINARIES/$program" "$ROOT/usr/local/bin/$program"
    chmod 755 "$ROOT/usr/local/bin/$program"
done

# ldd prints "NAME => PATH (ADDRESS)", and the loader as "PATH (ADDRESS)".
libraries=$(for program in "${PROGRAMS[@]}"; do ldd "$BINARIES/$program"; done)
if grep 'not found' <<<"$libraries" >&2; then
    exit 1
fi
paths=$(awk '$2 == "=>" {print $3} $1 ~ /^\// {print $1}' <<<"$libraries" | sort -u)
directory=$(dirname "$(grep '/libc\.so' <<<"$paths")")
for library in "${FOR_DRIVERS[@]}"; do
    paths+=$'\n'$directory/$library
done
while read -r path; do
    # The name stays, and a symbolic link is replaced by the file.
    mkdir -p "$ROOT$(dirname "$path")"
    cp --dereference "$path" "$ROOT$path"
    chmod 755 "$ROOT$path"
done <<<"$paths"

install -m 644 /etc/ssl/certs/ca-certificates.crt "$ROOT/etc/ssl/certs/"
# The toolkit takes the directory of the libraries from this file.
install -m 644 /etc/debian_version "$ROOT/etc/"
printf 'root:x:0:0:root:/:/nologin\nzeroshard:x:65532:65532:ZeroShard:/data:/nologin\n' >"$ROOT/etc/passwd"
printf 'root:x:0:\nzeroshard:x:65532:\n' >"$ROOT/etc/group"
printf 'hosts: files dns\n' >"$ROOT/etc/nsswitch.conf"
printf '%s\n' "$directory" "/usr$directory" /usr/lib64 /usr/local/nvidia/lib64 | sort -u >"$ROOT/etc/ld.so.conf"

# ldconfig changes its root directory, which needs root, or a namespace of this user.
ldconfig=(/sbin/ldconfig)
[ "$(id -u)" = 0 ] || ldconfig=(unshare --map-root-user /sbin/ldconfig)
"${ldconfig[@]}" -r "$ROOT" -X
# All files have the same time, so that equal contents give equal layers.
find "$ROOT" -exec touch --no-dereference --date=@0 {} +
