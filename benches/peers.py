"""What users would otherwise pick, on the same images: borg, restic, casync, rustic, zstd, qemu-img.

Each stores the four images in turn, every step a process of its own, and is timed as such; what it stored is weighed after
each. Then it gives back the memory of image 3, or the recorded working set alone if it has a way to: a mount, or reads at
an offset. The stores of the peers are local files: none of them all speak S3, and what they would add for a network is left
out, in their favour. Bytes of a restore are those that the process read, by the kernel's count.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

RUNS = 3
IMAGES = (1, 2, 3, 4)
RESTORED = 3
SHARE = 0.05

Say = Callable[[str], None]


def read_bytes(pid: int) -> int:
    """Bytes that a process and its dead children have read, from files or from elsewhere."""
    for line in Path(f"/proc/{pid}/io").read_text().splitlines():
        name, _, value = line.partition(": ")
        if name == "rchar":
            return int(value)
    raise RuntimeError("the kernel does not count what processes read")


def run(command: list[str], cwd: Path, env: Mapping[str, str]) -> tuple[float, int]:
    """Seconds that a command took, and bytes that it read."""
    began = time.monotonic()
    process = subprocess.Popen(
        command, cwd=cwd, env=os.environ | env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    complaint = process.stderr.read()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    took = time.monotonic() - began
    read = read_bytes(process.pid)
    if process.wait() != 0:
        raise RuntimeError(f"{' '.join(command)}: {complaint.decode(errors='replace')[-500:]}")
    return took, read


def weigh(store: Path) -> tuple[int, int]:
    """Bytes and files."""
    sizes = [path.stat().st_size for path in store.rglob("*") if path.is_file()]
    return sum(sizes), len(sizes)


#: What is wanted of each file: offset and length of each stretch of neighbouring pages, in order.
Wanted = dict[str, list[tuple[int, int]]]


def working_set(images: Path) -> Wanted:
    """The first reads of the recorded restore that come to 5 % of the memory."""
    names = json.loads((images / "names.json").read_text())[RESTORED - 1]
    parts = {names["memory"]: "memory.img", names["disk"]: "disk.img"}
    size = names["chunk_size"]
    budget = int((images / str(RESTORED) / "memory.img").stat().st_size * SHARE)
    pages: dict[str, set[int]] = {"memory.img": set(), "disk.img": set()}
    for read in json.loads((images / "working_set.json").read_text()):
        if read["image"] in parts:
            budget -= size
            if budget < 0:
                break
            pages[parts[read["image"]]].add(read["chunk"])
    wanted: Wanted = {}
    for part, chunks in pages.items():
        stretches: list[tuple[int, int]] = []
        for chunk in sorted(chunks):
            if stretches and sum(stretches[-1]) == chunk * size:
                stretches[-1] = (stretches[-1][0], stretches[-1][1] + size)
            else:
                stretches.append((chunk * size, size))
        wanted[part] = stretches
    return wanted


class Peer:
    """A tool: how it stores, and how it gives back."""

    name = ""
    version_of: list[str] = []
    how = "the whole memory image: it has no way to read a part"

    def __init__(self, images: Path, work: Path, wanted: Wanted) -> None:
        self.images = images
        self.work = work
        self.wanted = wanted
        self.store = work / "store"
        self.env: dict[str, str] = {}

    def begin(self) -> None:
        self.store.mkdir()

    def put(self, number: int) -> list[list[str]]:
        raise NotImplementedError

    def restore(self) -> tuple[float, int]:
        raise NotImplementedError

    def source(self, number: int) -> Path:
        return self.images / str(number)

    def version(self) -> str:
        told = subprocess.run(self.version_of, capture_output=True, text=True, check=True)
        return (told.stdout or told.stderr).splitlines()[0].strip()

    @contextmanager
    def mounted(self, command: list[str]) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
        """A file system that the tool serves in the foreground."""
        mount = self.work / "mount"
        mount.mkdir(exist_ok=True)
        process = subprocess.Popen(
            [*command, str(mount)], env=os.environ | self.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            deadline = time.monotonic() + 60
            while not os.path.ismount(mount):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{' '.join(command)}: no mount")
                time.sleep(0.005)
            yield mount, process
        finally:
            subprocess.run(["umount", "--lazy", str(mount)], check=False, stderr=subprocess.DEVNULL)
            process.terminate()
            process.wait()

    def read_mounted(self, command: list[str]) -> tuple[float, int]:
        """From starting the mount until the last page of the working set has been read from it."""
        began = time.monotonic()
        with self.mounted(command) as (mount, process):
            (found,) = [Path(found) for found, _, files in os.walk(mount) if "memory.img" in files][:1]
            for part, stretches in self.wanted.items():
                with open(found / part, "rb", buffering=0) as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
                    for offset, length in stretches:
                        assert len(os.pread(file.fileno(), length, offset)) == length
            return time.monotonic() - began, read_bytes(process.pid)


class Borg(Peer):
    name = "borg"
    version_of = ["borg", "--version"]
    how = "the working set from `borg mount`"

    def begin(self) -> None:
        self.env = {"BORG_BASE_DIR": str(self.work), "BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK": "yes"}
        run(["borg", "init", "-e", "none", str(self.store)], self.work, self.env)

    def put(self, number: int) -> list[list[str]]:
        options = ["--chunker-params", "fixed,65536", "--sparse", "--compression", "zstd,3", "--files-cache", "disabled"]
        return [["borg", "create", *options, f"{self.store}::{number}", "."]]

    def restore(self) -> tuple[float, int]:
        return self.read_mounted(["borg", "mount", "-f", f"{self.store}::{RESTORED}"])


class Restic(Peer):
    name = "restic"
    version_of = ["restic", "version"]
    how = "the working set from `restic mount`"

    def begin(self) -> None:
        self.env = {"RESTIC_REPOSITORY": str(self.store), "RESTIC_PASSWORD": "x", "RESTIC_CACHE_DIR": str(self.work / "c")}
        run(["restic", "init", "--repository-version", "2"], self.work, self.env)

    def put(self, number: int) -> list[list[str]]:
        return [["restic", "backup", "--tag", f"image{number}", "."]]

    def restore(self) -> tuple[float, int]:
        return self.read_mounted(["restic", "mount", "--tag", f"image{RESTORED}"])


class Rustic(Peer):
    name = "rustic"
    version_of = ["rustic", "--version"]
    how = "the working set from `rustic mount`"

    def begin(self) -> None:
        self.env = {
            "RUSTIC_REPOSITORY": str(self.store),
            "RUSTIC_PASSWORD": "x",
            "RUSTIC_CACHE_DIR": str(self.work / "c"),
        }
        run(["rustic", "init"], self.work, self.env)

    def put(self, number: int) -> list[list[str]]:
        return [["rustic", "backup", "--tag", f"image{number}", "."]]

    def restore(self) -> tuple[float, int]:
        return self.read_mounted(["rustic", "mount", "--filter-tags", f"image{RESTORED}"])


class Casync(Peer):
    name = "casync"
    version_of = ["casync", "--version"]

    def put(self, number: int) -> list[list[str]]:
        def make(what: str) -> list[str]:
            return ["casync", "make", f"--store={self.store}/s", f"{self.store}/{number}-{what}.caibx", f"{what}.img"]

        return [make("memory"), make("disk")]

    def restore(self) -> tuple[float, int]:
        out = self.work / "restored"
        took = run(
            ["casync", "extract", f"--store={self.store}/s", f"{self.store}/{RESTORED}-memory.caibx", str(out)],
            self.work,
            self.env,
        )
        out.unlink()
        return took


class Zstd(Peer):
    name = "zstd"
    version_of = ["zstd", "--version"]

    def put(self, number: int) -> list[list[str]]:
        def pack(what: str) -> list[str]:
            return ["zstd", "-q", "-3", "-T2", f"{what}.img", "-o", f"{self.store}/{number}-{what}.zst"]

        return [pack("memory"), pack("disk")]

    def restore(self) -> tuple[float, int]:
        out = self.work / "restored"
        took = run(["zstd", "-q", "-d", f"{self.store}/{RESTORED}-memory.zst", "-o", str(out)], self.work, self.env)
        out.unlink()
        return took


class QemuImg(Peer):
    name = "qemu-img"
    version_of = ["qemu-img", "--version"]
    how = "the working set by reads of `qemu-io`"

    def put(self, number: int) -> list[list[str]]:
        def convert(what: str) -> list[str]:
            out = f"{self.store}/{number}-{what}.qcow2"
            return ["qemu-img", "convert", "-c", "-f", "raw", "-O", "qcow2", f"{what}.img", out]

        return [convert("memory"), convert("disk")]

    def restore(self) -> tuple[float, int]:
        both = [self.read(part, stretches) for part, stretches in self.wanted.items() if stretches]
        return sum(took for took, _ in both), sum(read for _, read in both)

    def read(self, part: str, stretches: list[tuple[int, int]]) -> tuple[float, int]:
        image = f"{self.store}/{RESTORED}-{part.removesuffix('.img')}.qcow2"
        reads = [word for offset, length in stretches for word in ("-c", f"read -q {offset} {length}")]
        return run(["qemu-io", "-r", "-f", "qcow2", *reads, image], self.work, self.env)


PEERS: list[type[Peer]] = [Borg, Restic, Casync, Rustic, Zstd, QemuImg]


def measure(peer: Peer) -> dict[str, Any]:
    samples: list[list[float]] = []
    weights: list[tuple[int, int]] = []
    for _ in range(RUNS):
        shutil.rmtree(peer.work, ignore_errors=True)
        peer.work.mkdir(parents=True)
        peer.begin()
        took = []
        weights = []
        for number in IMAGES:
            took.append(sum(run(command, peer.source(number), peer.env)[0] for command in peer.put(number)))
            weights.append(weigh(peer.store))
        samples.append(took)
    restores = [peer.restore() for _ in range(RUNS)]
    return {
        "version": peer.version(),
        "store_s": [statistics.median(step) for step in zip(*samples, strict=True)],
        "bytes": [size for size, _ in weights],
        "objects": [count for _, count in weights],
        "restore5pct_s": statistics.median(took for took, _ in restores),
        "restore5pct_bytes": round(statistics.median(read for _, read in restores)),
        "restore5pct_how": peer.how,
    }


def measure_all(images: Path, work: Path, say: Say) -> dict[str, dict[str, Any]]:
    """Each peer's figures, by its name."""
    wanted = working_set(images)
    figures = {}
    for kind in PEERS:
        say(f"peer: {kind.name}")
        figures[kind.name] = measure(kind(images, work / kind.name, wanted))
        shutil.rmtree(work / kind.name, ignore_errors=True)
    return figures
