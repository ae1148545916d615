#!/bin/bash
# Makes what every guest boots from, in ASSETS_DIR (default: ~/.cache/snapyard/assets):
#
#   vmlinuz      Debian's cloud kernel
#   initrd.img   /init (the guest binary) and the virtio modules that this kernel lacks built in
#
#   build-assets.sh [ASSETS_DIR]
#
# Idempotent: does nothing when both are newer than what they are made of. Each appears by rename. The kernel package
# is unpacked, not installed, and its version is pinned by the first run: remove ASSETS_DIR/kernel to take a newer one.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
assets=${1:-$HOME/.cache/snapyard/assets}
mkdir -p "$assets"
assets=$(cd "$assets" && pwd)
# Two at once would step on each other's temporary files.
exec 9>"$assets/.lock"
flock 9

work=$(mktemp -d "$assets/.work.XXXXXX")
trap 'rm -rf "$work"' EXIT
kernel="$assets/kernel"

resolve_kernel() {
    { apt-cache depends linux-image-cloud-amd64 2>/dev/null || true; } |
        sed -n 's/^ *Depends: \(linux-image-[0-9][^ ]*-cloud-amd64\)$/\1/p'
}

if [ ! -e "$kernel/complete" ]; then
    package=$(resolve_kernel)
    if [ -z "$package" ]; then
        if [ "$(id -u)" = 0 ]; then apt-get update -qq; else sudo apt-get update -qq; fi
        package=$(resolve_kernel)
    fi
    [ -n "$package" ] || {
        echo 'build-assets: apt knows no linux-image-cloud-amd64' >&2
        exit 1
    }
    # apt drops its privileges for the download, and can then not write into a private directory.
    (cd "$work" && apt-get download -qq -o APT::Sandbox::User=root "$package")
    dpkg-deb -x "$work"/linux-image-*.deb "$work/kernel"
    touch "$work/kernel/complete"
    rm -rf "$kernel"
    mv "$work/kernel" "$kernel"
fi

vmlinuz=$(echo "$kernel"/boot/vmlinuz-*)
if [ ! -e "$assets/vmlinuz" ] || [ "$vmlinuz" -nt "$assets/vmlinuz" ] || ! cmp -s "$vmlinuz" "$assets/vmlinuz"; then
    cp "$vmlinuz" "$work/vmlinuz"
    mv "$work/vmlinuz" "$assets/vmlinuz"
fi

guest=$("$here/build-guest.sh")
initrd="$assets/initrd.img"
if [ ! -e "$initrd" ] || [ "$guest" -nt "$initrd" ] || [ "$kernel/complete" -nt "$initrd" ] || [ "$0" -nt "$initrd" ]; then
    tree="$work/initrd"
    mkdir -p "$tree/modules" "$tree/dev" "$tree/mnt"
    cp "$guest" "$tree/init"
    # In the order in which they need each other; the number keeps it in the file name.
    number=10
    for module in virtio_ring virtio virtio_mmio virtio_blk failover net_failover virtio_net; do
        file=$(find "$kernel"/lib/modules -name "$module.ko" -print -quit)
        [ -n "$file" ] || {
            echo "build-assets: the kernel package has no module $module" >&2
            exit 1
        }
        cp "$file" "$tree/modules/$number-$module.ko"
        number=$((number + 1))
    done
    # Not compressed: the kernel unpacks it under emulation, where a decompressor costs more than the bytes.
    (cd "$tree" && find . -mindepth 1 | LC_ALL=C sort | cpio --quiet -o -H newc --reproducible -R 0:0) >"$work/initrd.img"
    mv "$work/initrd.img" "$initrd"
fi
