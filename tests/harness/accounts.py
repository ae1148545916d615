"""The accounts of a server: everything that it holds on behalf of guests, so that a test can show that it gave all of
it back.

Two sources that do not know each other: what the kernel says (processes, descriptors, files) and what the server says
(pool, sandboxes, snapshots, memory images, occupancy rows, reservations). A ledger is clean against an earlier one
when nothing grew that has no owner any more.

What may grow: the store (databases, objects, packs on their way to the object store) and the memory images that the
server keeps for snapshots that still exist; the latter are counted by both sources and compared.
"""

from __future__ import annotations

import os
import re
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.rest import all_sandboxes, all_snapshots
from harness.server import Server

#: How long a server may take to finish what it does after it has answered: reaping, refilling the pool, uploading.
SETTLE_S = 25.0

_TEMPORARY = re.compile(r"(^|[._-])(tmp|temp|partial)([._-]|$)|\.tmp\w*$", re.IGNORECASE)


@dataclass(frozen=True)
class Ledger:
    """What a server held at one moment."""

    vmms: int
    pooled: int
    sandboxes: frozenset[str]
    snapshots: frozenset[str]
    images: frozenset[str]
    memfds: int
    userfaultfds: int
    unix_sockets: int
    deleted_files: int
    socket_files: frozenset[str]
    temporary_files: frozenset[str]
    staged_packs: int
    occupancy_rows: int | None
    reservations: int | None

    @property
    def excess_vmms(self) -> int:
        """VMM processes that belong neither to the pool nor to a sandbox."""
        return self.vmms - self.pooled - len(self.sandboxes)  # no server that is measured keeps standbys


def measure(server: Server) -> Ledger:
    """Counts once. Moments while something starts or ends are seen as they are: compare settled ledgers only."""
    stats = server.stats()
    links = _links(server.pid)
    return Ledger(
        vmms=len(server.vmms()),
        pooled=int(stats["pooled_vmms"]),
        sandboxes=frozenset(item["sandboxID"] for item in all_sandboxes(server)),
        snapshots=frozenset(item["snapshotID"] for item in all_snapshots(server)),
        images=frozenset(image["snapshot_id"] for image in stats["images"]),
        memfds=sum(link.startswith("/memfd:") for link in links),
        userfaultfds=sum(link == "anon_inode:[userfaultfd]" for link in links),
        unix_sockets=_unix_sockets(links),
        deleted_files=sum(link.endswith(" (deleted)") and not link.startswith("/memfd:") for link in links),
        socket_files=frozenset(_socket_files(server)),
        temporary_files=frozenset(_temporary_files(server)),
        staged_packs=int(stats["store"]["packs_staged"]),
        occupancy_rows=_optional(stats, "occupancy_rows"),
        reservations=_optional(stats, "reservations"),
    )


def leaks(before: Ledger, after: Ledger) -> list[str]:
    """What `after` holds that `before` did not and that nobody can own."""
    found: list[str] = []

    def grew(what: str, old: int, new: int) -> None:
        if new > old:
            found.append(f"{what}: {old} before, {new} after")

    def extra(what: str, old: frozenset[str], new: frozenset[str]) -> None:
        if new - old:
            found.append(f"{what}: {sorted(new - old)}")

    extra("sandboxes", before.sandboxes, after.sandboxes)
    extra("snapshots", before.snapshots, after.snapshots)
    grew("VMM processes without an owner", before.excess_vmms, after.excess_vmms)
    if after.pooled < before.pooled:
        found.append(f"VMMs in the pool: {before.pooled} before, {after.pooled} after")
    # One memory image is one memfd, and at most one unlinked file for the disk that belongs to it.
    images = max(0, len(after.images) - len(before.images))
    grew("memfds beyond the memory images", before.memfds + images, after.memfds)
    # A sandbox that was snapshotted writes to a new layer of its disk; at most three are open before they are merged.
    layers = 2 * len(after.sandboxes)
    grew("unlinked open files", before.deleted_files + images + layers, after.deleted_files)
    grew("userfaultfds", before.userfaultfds, after.userfaultfds)
    grew("UNIX sockets", before.unix_sockets, after.unix_sockets)
    extra("socket files", before.socket_files, after.socket_files)
    extra("temporary files", before.temporary_files, after.temporary_files)
    grew("packs that are not uploaded", before.staged_packs, after.staged_packs)
    grew("occupancy rows", before.occupancy_rows or 0, after.occupancy_rows or 0)
    grew("reservations", before.reservations or 0, after.reservations or 0)
    return found


def settled(server: Server, pool: int, excess: int = 0, seconds: float = SETTLE_S) -> Ledger:
    """A ledger of a quiet server: the pool is full, every VMM has an owner (but `excess` known ones)."""
    end = time.monotonic() + seconds
    last: Ledger | None = None
    while True:
        now = measure(server)
        if now == last and now.pooled >= pool and now.excess_vmms == excess:
            return now
        if time.monotonic() > end:
            return now
        last = now
        time.sleep(0.05)


def check(server: Server, before: Ledger, seconds: float = SETTLE_S) -> tuple[Ledger, list[str]]:
    """Waits for a ledger that is clean against `before`; after `seconds` it answers what it has and what is wrong."""
    end = time.monotonic() + seconds
    while True:
        now = measure(server)
        found = leaks(before, now)
        if not found or time.monotonic() > end:
            return now, found
        time.sleep(0.1)


def pool_size(server: Server, seconds: float = 30) -> int:
    """How many waiting VMMs the server keeps: what its number comes to rest at."""
    end = time.monotonic() + seconds
    seen = int(server.stats()["pooled_vmms"])
    since = time.monotonic()
    while time.monotonic() < end:
        now = int(server.stats()["pooled_vmms"])
        if now != seen:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since > 2 and now > 0:
            break
        time.sleep(0.1)
    return seen


def _optional(stats: dict[str, Any], key: str) -> int | None:
    return int(stats[key]) if key in stats else None


def _links(pid: int) -> list[str]:
    links = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            links.append(os.readlink(f"/proc/{pid}/fd/{name}"))
        except OSError:
            continue
    return links


def _unix_sockets(links: list[str]) -> int:
    inodes = {line.split()[6] for line in Path("/proc/net/unix").read_text().splitlines()[1:]}
    return sum(link.startswith("socket:[") and link[len("socket:[") : -1] in inodes for link in links)


def _files(root: Path) -> list[tuple[Path, os.stat_result]]:
    found = []
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            try:
                found.append((path, path.lstat()))
            except OSError:
                continue
    return found


def _socket_files(server: Server) -> list[str]:
    places = _files(server.data_dir) + _files(server.tmp_dir)
    return [str(path) for path, status in places if stat.S_ISSOCK(status.st_mode)]


def _temporary_files(server: Server) -> list[str]:
    """Everything in the server's temporary and run directories, and what is named like a temporary file elsewhere."""
    found = [str(path) for path, status in _files(server.tmp_dir)]
    for path, status in _files(server.data_dir):
        parts = path.relative_to(server.data_dir).parts
        if "run" in parts or "tmp" in parts or (stat.S_ISREG(status.st_mode) and _TEMPORARY.search(parts[-1])):
            found.append(str(path))
    return found
