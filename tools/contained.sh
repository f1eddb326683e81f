#!/bin/sh
# Grade in namespaces of Linux (unshare, of util-linux): no network, no process but its own, and
# nothing that can be written to but the folder OUT and a /tmp that is thrown away.
#
#     sh tools/contained.sh OUT submissions --stage 5
#
# The table is OUT/grades.csv. What the kernel itself lets through is let through.
set -eu
[ $# -ge 2 ] || { sed -n '2,7s/^# \{0,1\}//p' "$0" >&2; exit 2; }
mkdir -p "$1"
out=$(realpath "$1")
given=$(realpath "$2")
shift 2
ladder=$(realpath "$(dirname "$0")/..")/.venv/bin/ladder
root=$(mktemp -d)
trap 'rmdir "$root"' EXIT
unshare --map-root-user --net --pid --fork --kill-child --mount-proc --mount sh -euc '
    root=$1 out=$2 given=$3 ladder=$4; shift 4
    seal() {  # read-only, with the flags that it has
        flags=$(findmnt --raw --noheadings --output VFS-OPTIONS --mountpoint "$1" | tail -n 1)
        flags=$(echo "$flags" | tr , "\n" | grep -vx "r[ow]" | paste -sd ,)
        mount -o "remount,bind,ro,$flags" "$1"
    }
    mount --rbind / "$root"
    findmnt --raw --noheadings --output TARGET --submounts "$root" | while read -r at; do
        seal "$at"
    done
    mount -t tmpfs none "$root/tmp"
    mount -t tmpfs none "$root/dev/shm"
    for at in "$given" "$out"; do  # they may lie in /tmp
        [ -e "$root$at" ] || mkdir -p "$root$at"
        mount --bind "$at" "$root$at"
    done
    seal "$root$given"
    exec chroot "$root" env HOME=/tmp sh -c "cd /tmp && exec \"\$@\"" - \
        "$ladder" lab grade "$given" --out "$out/grades.csv" "$@"
' - "$root" "$out" "$given" "$ladder" "$@"
