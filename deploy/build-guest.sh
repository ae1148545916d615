#!/bin/bash
# Builds the guest's one static binary and prints its path.
#
#   build-guest.sh
#
# Static, since it runs before and beside root file systems that we know nothing of. Its target directory is its own:
# the flags differ from those of everything else, and a shared one would be rebuilt at each change of sides.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-$HOME/.cache/snapyard/target}/guest
linker=''
if command -v mold >/dev/null; then linker='-C link-arg=-fuse-ld=mold'; fi
CARGO_TARGET_DIR=$target RUSTFLAGS="-C target-feature=+crt-static $linker" \
    cargo build --quiet --profile guest -p snapyard-guest --target x86_64-unknown-linux-gnu >&2
echo "$target/x86_64-unknown-linux-gnu/guest/snapyard-guest"
