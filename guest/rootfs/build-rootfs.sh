#!/bin/bash
# Makes a template's root file system: Debian packages in, one sparse ext4 image out.
#
#   build-rootfs.sh --packages CSV --size-mib N --out FILE [--users CSV] [--suite NAME] [--mirror URL]
#
# Needs mmdebstrap and mke2fs. Nothing is mounted, and root is not needed: without it mmdebstrap works in a user
# namespace, and mke2fs runs in there too (as a customize hook), so that the owners of files come out right.
#
# The image has no kernel and no agent: the kernel is loaded by the VMM, and the agent brings itself from the initial
# RAM disk, so neither makes a template stale. It has no journal: memory and disk of a guest are captured together, a
# guest never comes back from a power cut, and each journal write would be one more block in each snapshot.
#
# Idempotent: a finished FILE is left as it is. FILE appears by rename, so a half-made one is never seen.
set -euo pipefail

packages='' size_mib='' out='' users='user' suite='bookworm' mirror=''
usage() {
    sed -n '2,5p' "$0" | cut -c3- >&2
    exit 2
}
while [ $# -gt 0 ]; do
    [ $# -ge 2 ] || usage
    case "$1" in
        --packages) packages=$2 ;;
        --size-mib) size_mib=$2 ;;
        --out) out=$2 ;;
        --users) users=$2 ;;
        --suite) suite=$2 ;;
        --mirror) mirror=$2 ;;
        *) usage ;;
    esac
    shift 2
done
case "$size_mib" in '' | *[!0-9]*) usage ;; esac
if [ -z "$packages" ] || [ -z "$out" ]; then usage; fi
if [ -e "$out" ]; then
    echo "build-rootfs: $out is there already" >&2
    exit 0
fi
export PATH="$PATH:/usr/sbin:/sbin"
for tool in mmdebstrap mke2fs; do
    command -v "$tool" >/dev/null || {
        echo "build-rootfs: $tool is missing: apt-get install mmdebstrap e2fsprogs" >&2
        exit 1
    }
done

# Without a mirror given, the machine's own apt sources are used, as long as they are for the same suite.
sources=()
if [ -n "$mirror" ]; then
    sources=("deb $mirror $suite main")
elif [ -r /etc/apt/sources.list ] && grep -q "^deb .*[ /]$suite[ /]" /etc/apt/sources.list; then
    sources=(/etc/apt/sources.list)
elif compgen -G '/etc/apt/sources.list.d/*.sources' >/dev/null &&
    grep -lq "^Suites:.*$suite" /etc/apt/sources.list.d/*.sources; then
    sources=()
    for file in /etc/apt/sources.list.d/*.sources; do
        if grep -q "^Suites:.*$suite" "$file"; then sources+=("$file"); fi
    done
fi

mkdir -p "$(dirname "$out")"
# A user namespace reaches neither a private home directory nor files of its caller: hence a place under /tmp, and a
# file that anybody may write inside a directory that nobody else may list.
work=$(mktemp -d /tmp/snapyard-rootfs.XXXXXX)
part="$out.part.$$"
trap 'rm -rf "$work" "$part"' EXIT
chmod 711 "$work"
: >"$work/image" && chmod 666 "$work/image"
mkdir -m 777 "$work/tree"

cat >"$work/customize" <<HOOK
#!/bin/bash
set -euo pipefail
root=\$1
users='$users'
uid=1000
for name in \${users//,/ }; do
    if [ "\$name" = root ]; then continue; fi
    chroot "\$root" useradd --uid "\$uid" --create-home --shell /bin/bash "\$name"
    if [ -d "\$root/etc/sudoers.d" ]; then
        echo "\$name ALL=(ALL:ALL) NOPASSWD: ALL" >"\$root/etc/sudoers.d/\$name"
        chmod 440 "\$root/etc/sudoers.d/\$name"
    fi
    uid=\$((uid + 1))
done
# Names that change at each restore are in memory: nothing is written to the disk for them, and what a user writes into
# /etc/hosts stays. The guest's own name is resolved by nss-myhostname.
ln -sf /proc/sys/kernel/hostname "\$root/etc/hostname"
ln -sf /run/snapyard/machine-id "\$root/etc/machine-id"
printf '127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n' >"\$root/etc/hosts"
rm -f "\$root/etc/resolv.conf"
echo 'nameserver 10.0.2.3' >"\$root/etc/resolv.conf"
: >"\$root/etc/fstab"
mkdir -p "\$root/code" && chmod 777 "\$root/code"
# Login shells are what every command starts with: no process for what the shell knows itself, or has no use for.
if [ -e "\$root/etc/profile" ]; then sed -i 's/\$(id -u)/\${EUID:-\$(id -u)}/' "\$root/etc/profile"; fi
if [ -e "\$root/root/.profile" ]; then sed -i 's/^mesg n/[ ! -t 0 ] || mesg n/' "\$root/root/.profile"; fi
rm -rf "\$root"/var/lib/apt/lists/* "\$root"/var/cache/apt/* "\$root"/var/log/*.log "\$root"/var/log/apt/* "\$root"/tmp/*
mkdir -p "\$root/var/lib/apt/lists/partial" "\$root/var/cache/apt/archives/partial"
# /proc, /sys and /dev of the machine are mounted in there now. A bind mount in a mount namespace of its own shows the
# tree without them.
export root
unshare --mount bash -euo pipefail -c '
    mount --make-rprivate /
    mount --bind "\$root" "$work/tree"
    find "$work/tree/dev" -mindepth 1 ! -type d -delete
    # A fixed UUID and hash seed: two images of the same packages share their chunks.
    mke2fs -q -F -t ext4 -b 4096 -m 0 -L root \
        -U 5a5a5a5a-0000-4000-8000-736e61707964 \
        -E hash_seed=5a5a5a5a-0000-4000-8000-736e61707964,lazy_itable_init=0,root_owner=0:0,nodiscard \
        -O ^has_journal \
        -d "$work/tree" "$work/image" ${size_mib}M
'
HOOK
chmod 755 "$work/customize"

SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-1700000000}
export SOURCE_DATE_EPOCH
mmdebstrap --quiet --variant=minbase --format=null \
    --include="$packages,libnss-myhostname" \
    --aptopt='APT::Install-Recommends "false"' \
    --aptopt='Acquire::Languages "none"' \
    --dpkgopt='force-unsafe-io' \
    --dpkgopt='path-exclude=/usr/share/doc/*' \
    --dpkgopt='path-exclude=/usr/share/man/*' \
    --dpkgopt='path-exclude=/usr/share/info/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' \
    --dpkgopt='path-include=/usr/share/doc/*/copyright' \
    --customize-hook="$work/customize \"\$1\"" \
    "$suite" - ${sources[@]+"${sources[@]}"} </dev/null

[ -s "$work/image" ] || {
    echo "build-rootfs: mmdebstrap ended well, but there is no image" >&2
    exit 1
}
cp --sparse=always "$work/image" "$part"
sync "$part"
mv "$part" "$out"
