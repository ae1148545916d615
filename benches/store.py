"""The store beside the tools that a user would otherwise pick, on images of real guests: what `make bench-store` runs.

The images are made once (`images.py`): three states of one guest and one of a second, memory and disk each. Everything is
stored in that order by this store and by each peer (`peers.py`), every step a process of its own, on the same two cores
and file system, in one run; each sequence is repeated and the median of each step counts. Then the recorded working set
of image 3 is read back from S3, cold. Figures go to `target/bench/store.json` and, beside their goals, into the table.

How this store is run: image 1 whole; images 2 and 3 as children of the one before, image 4 of image 1. A guest's capture
knows which parts changed, and `put` gets that list (units of 64 KiB, as the VMM has it); what it takes without the list,
reading every byte as the peers must, is measured too (`ingest.image2.full_read_s`).
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
sys.dont_write_bytecode = True

import peers  # noqa: E402
from harness.objectstore import BUCKET, ObjectStore  # noqa: E402
from harness.server import CACHE, binary  # noqa: E402

MIB = 1 << 20
RUNS = 3
#: Of which image each is stored as a child.
PARENTS = {1: None, 2: 1, 3: 2, 4: 1}
RESTORED = 3
DEDUP_PEERS = ("borg", "restic", "casync", "rustic")

#: Figure, goal, and whether the figure must be at most or at least that.
GOALS: list[tuple[str, float, str]] = [
    ("ingest.image1.speedup_vs_fastest_dedup_peer", 2, ">="),
    ("ingest.image2.speedup_vs_fastest_dedup_peer", 4, ">="),
    ("stored_bytes.ratio_to_best_peer", 0.9, "<="),
    ("restore5pct.bytes_ratio_to_best_peer", 0.1, "<="),
    ("restore5pct.time_ratio_to_best_peer", 0.2, "<="),
    ("s3.mib_per_put", 8, ">="),
    ("ingest.peak_rss_mib", 256, "<="),
    ("snapshot_1mib.cost_ratio_4gib_to_256mib", 1.5, "<="),
    ("gc.mark_1m_chunks_s", 60, "<="),
]


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


class Ours:
    """This store: `store-bench`, one process for each step."""

    def __init__(self, images: Path, work: Path, objects: ObjectStore) -> None:
        self.images = images
        self.work = work
        self.tool = binary().with_name("store-bench")
        self.s3 = ["--endpoint", objects.url, "--bucket", BUCKET, "--access-key", "test", "--secret-key", "test-secret"]

    def run(self, *args: str | Path) -> tuple[float, dict[str, Any]]:
        """Seconds of the whole process, and what it printed."""
        began = time.monotonic()
        done = subprocess.run([str(self.tool), *map(str, args)], check=True, capture_output=True, text=True)
        took = time.monotonic() - began
        return took, json.loads(done.stdout) if done.stdout.strip() else {}

    def manifest(self, number: int) -> Path:
        return self.work / f"manifest-{number}"

    def changes(self) -> None:
        """The lists of what changed, as a capture would have them."""
        for number, parent in PARENTS.items():
            if parent is not None:
                out = self.work / f"changed-{number}.json"
                self.run("changed", "--from", self.images / str(parent), "--to", self.images / str(number), "--out", out)

    def put(self, store: Path, number: int, *, whole: bool = False) -> tuple[float, dict[str, Any]]:
        parent = PARENTS[number]
        args: list[str | Path] = ["put", "--store", store, "--image", self.images / str(number)]
        args += ["--manifest", self.manifest(number)]
        if parent is not None:
            args += ["--parent", self.manifest(parent)]
            if not whole:
                args += ["--changed", self.work / f"changed-{number}.json"]
        return self.run(*args)

    def sequence(self, *, whole: bool = False) -> tuple[Path, list[float], list[dict[str, Any]]]:
        """All images into a new store."""
        store = self.work / "store"
        shutil.rmtree(store, ignore_errors=True)
        steps = [self.put(store, number, whole=whole) for number in PARENTS]
        return store, [took for took, _ in steps], [told for _, told in steps]

    def upload(self, store: Path) -> dict[str, Any]:
        _, told = self.run("upload", "--store", store, *self.s3, *[self.manifest(number) for number in PARENTS])
        return told

    def restore(self) -> tuple[float, dict[str, Any]]:
        cold = self.work / "cold"
        shutil.rmtree(cold, ignore_errors=True)
        manifest = self.manifest(RESTORED)
        return self.run("restore", "--store", cold, *self.s3, "--manifest", manifest, "--images", self.images)


def medians(samples: list[list[float]]) -> list[float]:
    return [statistics.median(step) for step in zip(*samples, strict=True)]


def measure_ours(ours: Ours, metrics: dict[str, float]) -> dict[str, Any]:
    """Fills in what concerns this store alone; answers its raw figures in the form of a peer's."""
    ours.changes()
    whole = medians([ours.sequence(whole=True)[1] for _ in range(RUNS)])
    samples = []
    for _ in range(RUNS):
        store, took, told = ours.sequence()
        samples.append(took)
    seconds = medians(samples)
    after, total = [], 0
    for step in told:
        total += step["bytes_new"]
        after.append(total)
    metrics["ingest.peak_rss_mib"] = round(max(step["peak_rss_kib"] for step in told) / 1024, 1)
    for number, (changed, full) in enumerate(zip(seconds, whole, strict=True), 1):
        metrics[f"ingest.image{number}.s"] = round(changed, 3)
        if number > 1:
            metrics[f"ingest.image{number}.full_read_s"] = round(full, 3)
    packs = list((store / "staging").glob("*.pack"))
    stored = sum(pack.stat().st_size for pack in packs)
    sent = ours.upload(store)
    metrics["s3.puts"] = sent["puts"]
    metrics["s3.mib_per_put"] = round(sent["bytes"] / MIB / sent["puts"], 2)
    metrics["s3.puts_per_snapshot"] = sent["puts"] / len(PARENTS)
    restores = [ours.restore() for _ in range(RUNS)]
    told_last = restores[-1][1]
    metrics["restore5pct.s"] = round(statistics.median(took for took, _ in restores), 3)
    metrics["restore5pct.bytes"] = told_last["bytes"]
    metrics["restore5pct.requests"] = told_last["gets"]
    _, hits = ours.run("hits", "--store", store, *ours.s3, "--manifest", ours.manifest(1), "--image", ours.images / "1")
    for what, percentiles in hits.items():
        for name, value in percentiles.items():
            metrics[f"cache.{what}.{name}"] = round(value, 2)
    metrics["cache.hit_p50_ratio_to_pread"] = round(hits["chunk"]["p50_us"] / hits["pread"]["p50_us"], 2)
    return {
        "store_s": seconds,
        "bytes": after,
        "objects": [len(packs)],
        "stored_bytes": stored,
        "restore5pct_s": metrics["restore5pct.s"],
        "restore5pct_bytes": metrics["restore5pct.bytes"],
        "restore5pct_how": "the frames that hold the wanted chunks, neighbours in one range read",
    }


def small_change(ours: Ours, metrics: dict[str, float]) -> None:
    work = ours.work / "small"
    _, sizes = ours.run("small-change", "--dir", work)
    shutil.rmtree(work)
    for size, cost in sizes.items():
        metrics[f"snapshot_1mib.{size}.ms"] = round(cost["ms"], 2)
        metrics[f"snapshot_1mib.{size}.bytes"] = cost["bytes"]
    ratio = max(sizes["4096mib"][what] / sizes["256mib"][what] for what in ("ms", "bytes"))
    metrics["snapshot_1mib.cost_ratio_4gib_to_256mib"] = round(ratio, 2)


def collect(ours: Ours, metrics: dict[str, float]) -> None:
    work = ours.work / "gc"
    _, told = ours.run("gc", "--dir", work)
    shutil.rmtree(work)
    # The collector decides by packs; that alone would flatter. Going through every chunk of every snapshot counts too.
    metrics["gc.mark_1m_chunks_s"] = round(told["collect_s"] + told["census_s"], 2)
    metrics["gc.collect_s"] = round(told["collect_s"], 2)
    metrics["gc.census_s"] = round(told["census_s"], 2)
    for name in ("chunks", "snapshots", "packs", "stored_meanwhile"):
        metrics[f"gc.{name}"] = told[name]


def compare(metrics: dict[str, float], ours: dict[str, Any], others: dict[str, dict[str, Any]]) -> None:
    dedup = [others[name] for name in DEDUP_PEERS]
    for image in (1, 2):
        fastest = min(peer["store_s"][image - 1] for peer in dedup)
        metrics[f"ingest.image{image}.fastest_dedup_peer_s"] = round(fastest, 3)
        name = f"ingest.image{image}.speedup_vs_fastest_dedup_peer"
        metrics[name] = round(fastest / ours["store_s"][image - 1], 2)
    full = metrics["ingest.image2.full_read_s"]
    metrics["ingest.image2.full_read_speedup"] = round(metrics["ingest.image2.fastest_dedup_peer_s"] / full, 2)
    metrics["stored_bytes.ours"] = ours["stored_bytes"]
    metrics["stored_bytes.best_peer"] = min(peer["bytes"][-1] for peer in others.values())
    metrics["stored_bytes.ratio_to_best_peer"] = round(ours["stored_bytes"] / metrics["stored_bytes.best_peer"], 3)
    for what, name in (("bytes", "restore5pct_bytes"), ("time", "restore5pct_s")):
        best = min(peer[name] for peer in others.values())
        metrics[f"restore5pct.{what}_ratio_to_best_peer"] = round(ours[name] / best, 3)


def raw_table(all_figures: dict[str, dict[str, Any]]) -> str:
    lines = [f"{'':<10} {'image 1':>9} {'2':>8} {'3':>8} {'4':>8}   {'MiB 1':>7} {'all':>7}   {'5 %: s':>8} {'MiB':>7}"]
    for name, figures in all_figures.items():
        seconds = " ".join(f"{took:8.2f}" for took in figures["store_s"])
        stored = f"{figures['bytes'][0] / MIB:7.1f} {figures['bytes'][-1] / MIB:7.1f}"
        restore = f"{figures['restore5pct_s']:8.2f} {figures['restore5pct_bytes'] / MIB:7.1f}"
        lines.append(f"{name:<10}  {seconds}   {stored}   {restore}")
    return "\n".join(lines)


def table(metrics: dict[str, float]) -> str:
    goals = {name: (limit, how) for name, limit, how in GOALS}
    lines = [f"{'figure':<48} {'value':>16}   {'goal':>8}"]
    for name, value in metrics.items():
        goal, mark = "", ""
        if name in goals:
            limit, how = goals[name]
            goal = f"{how} {limit:g}"
            good = value <= limit if how == "<=" else value >= limit
            mark = "" if good else "  missed"
        shown = f"{value:,.3f}".rstrip("0").rstrip(".")
        lines.append(f"{name:<48} {shown:>16}   {goal:>8}{mark}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, default=CACHE / "bench" / "images")
    parser.add_argument("--work", type=Path, default=CACHE / "bench" / "work", help="emptied before and after")
    parser.add_argument("--report", type=Path, default=ROOT / "target" / "bench" / "store.json")
    parser.add_argument("--without-peers", action="store_true", help="this store alone: no ratios")
    options = parser.parse_args()
    subprocess.run([sys.executable, str(ROOT / "benches" / "images.py"), "--out", str(options.images)], check=True)
    shutil.rmtree(options.work, ignore_errors=True)
    (options.work / "ours").mkdir(parents=True)
    objects = ObjectStore()
    metrics: dict[str, float] = {}
    figures: dict[str, dict[str, Any]] = {}
    steps: list[tuple[str, Callable[[], None]]] = []
    ours = Ours(options.images, options.work / "ours", objects)
    steps.append(("this store", lambda: figures.update(snapyard=measure_ours(ours, metrics))))
    steps.append(("a snapshot in which 1 MiB has changed", lambda: small_change(ours, metrics)))
    steps.append(("a collection among a million chunks", lambda: collect(ours, metrics)))
    if not options.without_peers:
        steps.append(("peers", lambda: figures.update(peers.measure_all(options.images, options.work / "peers", say))))
    try:
        for what, step in steps:
            say(what)
            step()
    finally:
        objects.close()
        shutil.rmtree(options.work, ignore_errors=True)
    if not options.without_peers:
        compare(metrics, figures["snapyard"], {name: peer for name, peer in figures.items() if name != "snapyard"})
    about = {"cpu": platform.processor() or platform.machine(), "kernel": platform.release()}
    options.report.parent.mkdir(parents=True, exist_ok=True)
    report = {"machine": about, "metrics": metrics, "tools": figures}
    options.report.write_text(json.dumps(report, indent=2) + "\n")
    print(f"\n{raw_table(figures)}\n\n{table(metrics)}\n\nfigures: {options.report}")


if __name__ == "__main__":
    main()
