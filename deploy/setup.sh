#!/usr/bin/env bash
# Installs what building, running and testing Snapyard needs on Debian 12, and nothing that is there already.
#
#   deploy/setup.sh          build and run: Debian packages, the Python environment of the SDKs
#   deploy/setup.sh dev      the same, and the tools of the gates: cargo-nextest, cargo-deny, cargo-machete,
#                            cargo-fuzz
#   deploy/setup.sh bench    build and run, and the tools that the store is measured beside: borg, restic, casync, rustic
#
# Runs as root or with sudo (for apt only). Idempotent: with everything in place it takes a few tens of milliseconds.
# Everything but Debian packages goes below ${SNAPYARD_CACHE:-$HOME/.cache/snapyard}:
#   sdk/     virtual environment of the public SDKs and pytest; stamped with a hash of what it was made from
#   tools/   cargo subcommands and rustic, built once per machine
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cache=${SNAPYARD_CACHE:-$HOME/.cache/snapyard}
mode=${1:-run}
case $mode in run | dev | bench) ;; *) echo "usage: $0 [dev|bench]" >&2; exit 2 ;; esac

# build: clang/libclang (bindgen, RocksDB), cmake, protoc, mold. guests: QEMU, and what makes their kernel, initrd
# and root file system.
packages=(
  build-essential clang libclang-dev cmake mold pkg-config protobuf-compiler libprotobuf-dev
  qemu-system-x86 qemu-utils busybox-static
  mmdebstrap e2fsprogs cpio kmod xz-utils zstd uidmap debian-archive-keyring
  ca-certificates python3 python3-venv
)
# Peers, and what their mounts need.
[ "$mode" != bench ] || packages+=(borgbackup restic casync fuse3 libfuse3-dev python3-pyfuse3)

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

as_root() {
  if [ "$(id -u)" -eq 0 ]; then "$@"
  elif command -v sudo >/dev/null; then sudo -E "$@"
  else die "needs root for '$*': run as root, or install sudo"
  fi
}

mkdir -p "$cache"
exec 9>"$cache/setup.lock"
flock 9 # two `make`s at once must not install into each other's feet

# --- Debian packages -------------------------------------------------------------------------------------------------
command -v dpkg-query >/dev/null || die "only Debian (12 or later) is supported: dpkg-query not found"
installed=$(dpkg-query -W -f='${db:Status-Status} ${Package}\n' "${packages[@]}" 2>/dev/null || true)
missing=()
for package in "${packages[@]}"; do
  grep -qx "installed $package" <<<"$installed" || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
  say "installing Debian packages: ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  as_root apt-get update -qq
  apt_install() { as_root apt-get install -y -qq --no-install-recommends "$@" >"$cache/apt.log" 2>&1; }
  # A machine may carry a backported qemu-utils that conflicts with the release's QEMU: take the release's then.
  release=$(. /etc/os-release && echo "${VERSION_CODENAME:-bookworm}")
  apt_install "${missing[@]}" \
    || apt_install --allow-downgrades "${missing[@]}" "qemu-utils/$release" \
    || { tail -n 20 "$cache/apt.log" >&2; die "apt could not install them; the whole log is $cache/apt.log"; }
fi

command -v cargo >/dev/null || die "Rust is missing: install it with rustup (stable, 1.95 or later)"

# --- the SDKs, as their users install them ---------------------------------------------------------------------------
sdk=$cache/sdk
wanted=$(sha256sum <"$root/tests/requirements.txt" | cut -d' ' -f1)
if [ "$(cat "$sdk/.snapyard-stamp" 2>/dev/null || true)" != "$wanted" ] || ! [ -x "$sdk/bin/python" ]; then
  say "making the Python environment $sdk"
  [ -x "$sdk/bin/python" ] || python3 -m venv "$sdk"
  "$sdk/bin/python" -m pip install -q --disable-pip-version-check -r "$root/tests/requirements.txt"
  echo "$wanted" >"$sdk/.snapyard-stamp"
fi

[ "$mode" != run ] || exit 0

# --- tools of the gates and of the benchmarks ----------------------------------------------------------------------------------------------
tools=$cache/tools
mkdir -p "$tools/bin"
PATH=$tools/bin:$PATH

# cargo_tool CRATE VERSION [OPTION...]: builds it once per machine, away from the project's own target directory.
cargo_tool() {
  say "building $1 $2 (once per machine)"
  local target=$tools/target-$1
  CARGO_TARGET_DIR=$target RUSTFLAGS='' cargo install --quiet --locked --root "$tools" --version "$2" "$1" "${@:3}"
  rm -rf "$target"
}

if [ "$mode" = bench ]; then
  command -v rustic >/dev/null || cargo_tool rustic-rs 0.11.4 --no-default-features --features mount
  exit 0
fi

command -v cargo-nextest >/dev/null || cargo_tool cargo-nextest 0.9.143
command -v cargo-deny >/dev/null || cargo_tool cargo-deny 0.20.2
command -v cargo-machete >/dev/null || cargo_tool cargo-machete 0.9.2
command -v cargo-fuzz >/dev/null || cargo_tool cargo-fuzz 0.13.2
