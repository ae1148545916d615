# Snapyard's entry points; `make help` lists them.
#
# Everything that is slow to make lives outside the tree, below $(SNAPYARD_CACHE): a fresh clone on a warm machine starts
# in seconds, and RocksDB is compiled once per machine. Everything is built with one set of profiles (release) and
# over the whole workspace, so that no dependency is ever compiled twice for a different set of features.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:

SNAPYARD_CACHE ?= $(HOME)/.cache/snapyard
export SNAPYARD_CACHE
export CARGO_TARGET_DIR := $(SNAPYARD_CACHE)/target
# deploy/cxx: the C++ compiler that keeps RocksDB from taking half an hour.
export PATH := $(CURDIR)/deploy/cxx:$(SNAPYARD_CACHE)/tools/bin:$(HOME)/.cargo/bin:$(PATH)

RELEASE := $(CARGO_TARGET_DIR)/release
PYTHON := $(SNAPYARD_CACHE)/sdk/bin/python

# What the server and everything that starts one needs to know.
export SNAPYARD_BIN := $(RELEASE)/snapyard
export SNAPYARD_ASSETS := $(SNAPYARD_CACHE)/assets
export SNAPYARD_PRELOAD := $(RELEASE)/libsnapyard_vmm_preload.so
export PYTHONDONTWRITEBYTECODE := 1

LISTEN ?= 127.0.0.1:3000
# Arguments for pytest, e.g. `make test-system PYTEST='-k clone -x'`.
PYTEST ?=

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: setup
setup: ## install what is missing to build and run (Debian 12; root or sudo)
	@deploy/setup.sh

.PHONY: setup-dev
setup-dev:
	@deploy/setup.sh dev

.PHONY: build
build: setup ## the server, its VMM library, the guest's agent, kernel and initrd (release mode)
	cargo build --release --locked --workspace
	deploy/build-guest.sh
	deploy/build-assets.sh "$(SNAPYARD_ASSETS)"

.PHONY: up
up: build ## the server in the foreground on LISTEN (127.0.0.1:3000) until Ctrl-C
	exec "$(SNAPYARD_BIN)" up --listen "$(LISTEN)"

.PHONY: demo
demo: build ## the main job once, on a server of its own; figures in target/demo/report.json
	"$(PYTHON)" benches/demo.py

# Cheap gates first; pytest last, so that its summary closes the run.
.PHONY: test
test: setup-dev fmt deny advisories machete clippy doc build test-rust test-doc fuzz test-system ## every gate and every test

.PHONY: fmt
fmt: ## gate: formatting
	cargo fmt --all --check

.PHONY: clippy
clippy: setup ## gate: no lint, in tests either
	cargo clippy --release --locked --workspace --all-targets -- -D warnings

.PHONY: doc
doc: setup ## gate: documentation without broken links or gaps
	RUSTDOCFLAGS="-Dwarnings -Arustdoc::private_intra_doc_links" cargo doc --release --locked --workspace --no-deps --quiet

.PHONY: deny
deny: setup-dev ## gate: licences, duplicate versions, sources
	cargo deny --locked check bans licenses sources

# The advisory database is a repository of its own, which a closed network does not reach. Where a copy is (made by
# `cargo deny fetch`), it is a gate like the others.
.PHONY: advisories
advisories: setup-dev ## gate: known vulnerabilities, where the advisory database is at hand
	@if compgen -G "$${CARGO_HOME:-$$HOME/.cargo}/advisory-dbs/*" >/dev/null; then \
	  cargo deny --locked check --disable-fetch advisories; \
	else echo "advisories: NOT CHECKED, no copy of the advisory database (get one with 'cargo deny fetch')"; fi

.PHONY: machete
machete: setup-dev ## gate: no unused dependency
	cargo machete

.PHONY: test-rust
test-rust: setup-dev ## tests of the crates
	cargo nextest run --release --locked --workspace

.PHONY: test-doc
test-doc: setup ## examples in the documentation
	cargo test --release --locked --workspace --doc --quiet

# A target directory of its own: everything is compiled with a sanitizer. What the fuzzer found worth keeping stays in the
# cache and is where the next run begins. RUSTC_BOOTSTRAP: sanitizers are not in stable Rust.
FUZZ_SECONDS ?= 10
.PHONY: fuzz
fuzz: export RUSTC_BOOTSTRAP := 1
fuzz: setup-dev ## the stored formats fed with rubbish, FUZZ_SECONDS (10) each
	@for target in frame index_node manifest pack_footer; do \
	  corpus="$(SNAPYARD_CACHE)/fuzz/$$target"; mkdir -p "$$corpus"; \
	  echo "fuzz $$target"; \
	  CARGO_TARGET_DIR="$(SNAPYARD_CACHE)/target-fuzz" cargo fuzz run --fuzz-dir snapstore/fuzz "$$target" "$$corpus" -- \
	    -max_total_time=$(FUZZ_SECONDS) -verbosity=0; \
	done

.PHONY: bench-images
bench-images: build ## images of real guests for the benchmarks of the store (once per machine, two minutes)
	"$(PYTHON)" benches/images.py

.PHONY: bench-format
bench-format: bench-images ## chunk sizes, frames and dictionaries compared: the table of docs/decisions/0004
	"$(RELEASE)/store-bench" format --images "$(SNAPYARD_CACHE)/bench/images"

.PHONY: bench-store
bench-store: build ## the store beside borg, restic, casync, rustic, zstd and qemu-img; figures in target/bench/store.json
	@deploy/setup.sh bench
	"$(PYTHON)" benches/store.py

.PHONY: test-system
test-system: build ## whole-system tests: a running server, real guests, the public SDKs
	"$(PYTHON)" -m pytest $(PYTEST) tests

.PHONY: clean
clean: ## remove what the tree holds; caches outside it stay (rm -r $(SNAPYARD_CACHE) for those)
	rm -rf target
