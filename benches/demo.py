"""Snapyard's main job, done once, with figures: what `make demo` runs.

A server of its own on a free port (its data directory is kept, so the template is built only once) and then, by the
public `cubesandbox` SDK and raw HTTP: template → sandbox with state in it → snapshot → 8 clones at once → changes →
rollback → snapshot again → everything killed. Each step is checked; a check that fails is counted and told, and makes
the exit code 1. Figures go to `target/demo/report.json` and, beside their goals, into the table at the end; a goal
that is missed is marked there and changes nothing else. `benches/README.md` says how each figure is taken.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
sys.dont_write_bytecode = True

from cubesandbox import Sandbox  # noqa: E402

from harness.planted import MARKER, Planted, evaluate, run  # noqa: E402
from harness.rest import Answer, all_sandboxes, all_snapshots, call, shell  # noqa: E402
from harness.server import CACHE, Server, ServerError, wait_for  # noqa: E402

CLONES = 8
SAMPLES = 5
ROLLBACKS = 4
#: What the server keeps restored for a snapshot in frequent use (`--standby`, its default).
STANDBYS = 2
MIB = 1 << 20
COMMAND = "echo ready"

#: Figure, goal, and whether the figure must be at most or at least that.
GOALS: list[tuple[str, float, str]] = [
    ("snapshot.pause_ms.p50", 60, "<="),
    ("create.running_ms.p50", 50, "<="),
    ("create.first_command_over_warm", 3, "<="),
    ("image.filled_at_first_answer_pct", 10, "<="),
    ("clone8.all_answered_ms", 6000, "<="),
    ("rollback.first_command_ms.p50", 400, "<="),
    ("demo.seconds", 90, "<="),
    ("checks.failed", 0, "<="),
]


@dataclass
class Report:
    """Figures and checks as they come."""

    metrics: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    passed: int = 0
    began: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:6.1f} s  {text}", flush=True)

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """One step of the job. If it breaks, that is a failed check, and the job ends."""
        self.say(what)
        try:
            yield
        except Exception as error:
            self.failures.append(f"{what}: {type(error).__name__}: {error}")
            raise

    def check(self, what: str, test: Callable[[], object]) -> None:
        """One check: `test` must answer something true and raise nothing."""
        try:
            good, why = bool(test()), ""
        except Exception as error:  # noqa: BLE001 - whatever it is, the check has failed
            good, why = False, f": {type(error).__name__}: {error}"
        if good:
            self.passed += 1
        else:
            self.failures.append(what + why)
            self.say(f"FAILED: {what}{why}")

    def median(self, name: str, samples: list[float]) -> None:
        self.metrics[name] = round(statistics.median(samples), 2)


def milliseconds(since: float) -> float:
    return (time.monotonic() - since) * 1000


def create(server: Server, reference: str) -> tuple[Sandbox, Answer]:
    """A sandbox by raw HTTP, for the headers of the answer, as an object of the SDK."""
    answer = call(server, "POST", "/sandboxes", {"templateID": reference, "timeout": 900})
    if answer.status != 201:
        raise RuntimeError(f"create from {reference}: {answer.status} {answer.body.decode(errors='replace')}")
    return Sandbox(answer.json(), server.cube()), answer


def snapshot(server: Server, sandbox: Sandbox) -> tuple[str, Answer, float]:
    """A snapshot by raw HTTP: id, answer, and how long the call took, ms."""
    began = time.monotonic()
    answer = call(server, "POST", f"/sandboxes/{sandbox.sandbox_id}/snapshots", {})
    took = milliseconds(began)
    if answer.status != 201:
        raise RuntimeError(f"snapshot of {sandbox.sandbox_id}: {answer.status} {answer.body.decode(errors='replace')}")
    return answer.json()["snapshotID"], answer, took


def sees_only(clone: Sandbox, number: int) -> bool:
    """Whether file and variable are what this clone wrote."""
    return run(clone, f"cat {MARKER}") == str(number) and evaluate(clone, "planted") == number


def image_filled(server: Server, snapshot_id: str) -> float:
    """How much of the snapshot's memory image is there, per cent of the guest's RAM."""
    images = [image for image in server.stats()["images"] if image["snapshot_id"] == snapshot_id]
    if not images:
        raise RuntimeError(f"no memory image of snapshot {snapshot_id}")
    return 100 * images[0]["filled_bytes"] / images[0]["size_bytes"]


class Demo:
    """The job on one server."""

    def __init__(self, server: Server, report: Report) -> None:
        self.server = server
        self.report = report
        self.sandboxes: list[Sandbox] = []
        self.snapshots: list[str] = []

    def run(self) -> None:
        report = self.report
        with report.step("sandbox from the template; a variable, a file and a running process set in it"):
            source, _ = create(self.server, "base")
            self.sandboxes.append(source)
            planted = Planted.plant(source)
            memory = int(source.get_info().memory_mb or 0) * MIB
            report.metrics["guest.memory_mib"] = memory / MIB
        with report.step("commands on a warm sandbox"):
            self.warm_commands(source)
        with report.step("snapshot"):
            first = self.take(source)
            report.check("the source goes on after its snapshot", lambda: planted.find(source))
        with report.step("first sandbox from that snapshot"):
            self.first_restore(first, memory, planted)
        with report.step(f"{SAMPLES} more sandboxes from it, one after the other"):
            self.restores(first)
        with report.step(f"{CLONES} clones at once"):
            clones = self.clones(first)
        with report.step("each clone has the file, the variable and the process, and writes are its own"):
            self.check_clones(source, clones, planted)
            self.private_memory(clones)
        with report.step("changes, then rollback"):
            self.rollbacks(source, first, planted)
        with report.step(f"{SAMPLES} snapshots of the same sandbox"):
            last = self.resnapshot(source, planted)
        with report.step("everything killed"):
            self.clean_up(last)

    def warm_commands(self, sandbox: Sandbox) -> None:
        samples = []
        shell(self.server, sandbox.sandbox_id, COMMAND)
        for _ in range(2 * SAMPLES):
            began = time.monotonic()
            shell(self.server, sandbox.sandbox_id, COMMAND)
            samples.append(milliseconds(began))
        self.report.median("command.warm_ms.p50", samples)

    def take(self, sandbox: Sandbox) -> str:
        snapshot_id, _, _ = snapshot(self.server, sandbox)
        self.snapshots.append(snapshot_id)
        return snapshot_id

    def first_restore(self, snapshot_id: str, memory: int, planted: Planted) -> None:
        """Before anybody else has filled the snapshot's image."""
        sandbox, answer = create(self.server, snapshot_id)
        shell(self.server, sandbox.sandbox_id, COMMAND)
        metrics = self.report.metrics
        metrics["image.filled_at_first_answer_pct"] = round(image_filled(self.server, snapshot_id), 2)
        for moment in ("running", "ready"):
            filled = int(answer.headers[f"x-snapyard-filled-at-{moment}"])
            metrics[f"image.filled_at_{moment}_pct"] = round(100 * filled / memory, 2)
        self.report.check("the first restored sandbox has all state", lambda: planted.find(sandbox))
        sandbox.kill()

    def restores(self, snapshot_id: str) -> None:
        phases: dict[str, list[float]] = {}
        answered: list[float] = []
        for number in range(SAMPLES + 1):
            self.at_rest(standbys=number > 0)
            began = time.monotonic()
            sandbox, answer = create(self.server, snapshot_id)
            call_took = milliseconds(began)
            shell(self.server, sandbox.sandbox_id, COMMAND)
            took = milliseconds(began)
            sandbox.kill()
            if number == 0:
                # The second start ever: this snapshot has no standby yet.
                self.report.metrics["create.without_standby.running_ms"] = answer.timing()["running"]
                self.report.metrics["create.without_standby.first_command_ms"] = round(took, 2)
                continue
            answered.append(took)
            for phase, moment in (answer.timing() | {"call": call_took}).items():
                phases.setdefault(phase, []).append(moment)
        for phase, samples in phases.items():
            self.report.median(f"create.{phase}_ms.p50", samples)
        self.report.median("create.first_command_ms.p50", answered)
        metrics = self.report.metrics
        ratio = metrics["create.first_command_ms.p50"] / metrics["command.warm_ms.p50"]
        metrics["create.first_command_over_warm"] = round(ratio, 2)

    def at_rest(self, standbys: bool = True) -> None:
        """What is measured is a node at rest, not one that makes ready for the next at the same time."""
        pool, standby = self.report.metrics.get("pool.vmms", 1), STANDBYS if standbys else 0

        def full() -> bool:
            stats = self.server.stats()
            return int(stats["pooled_vmms"]) >= pool and int(stats["standbys"]) >= standby

        wait_for("pool and standbys", full, 60)

    def clones(self, snapshot_id: str) -> list[Sandbox]:
        self.at_rest()
        began = time.monotonic()

        def one(_: int) -> tuple[Sandbox, float, float]:
            sandbox, answer = create(self.server, snapshot_id)
            shell(self.server, sandbox.sandbox_id, COMMAND)
            return sandbox, milliseconds(began), answer.timing().get("running", 0)

        with ThreadPoolExecutor(CLONES) as pool:
            made = list(pool.map(one, range(CLONES)))
        metrics = self.report.metrics
        metrics["clone8.all_answered_ms"] = round(max(answered for _, answered, _ in made), 2)
        metrics["clone8.first_answered_ms"] = round(min(answered for _, answered, _ in made), 2)
        metrics["clone8.all_running_ms"] = round(max(running for _, _, running in made), 2)
        metrics["clone8.image_filled_pct"] = round(image_filled(self.server, snapshot_id), 2)
        clones = [sandbox for sandbox, _, _ in made]
        self.sandboxes += clones
        return clones

    def check_clones(self, source: Sandbox, clones: list[Sandbox], planted: Planted) -> None:
        check = self.report.check
        check("the clones are different sandboxes", lambda: len({s.sandbox_id for s in clones}) == CLONES)
        for number, clone in enumerate(clones):
            check(f"clone {number} has file, variable, open file and process", partial(planted.find, clone))
        for number, clone in enumerate(clones):
            run(clone, f"echo {number} > {MARKER}")
            evaluate(clone, f"planted = {number}\n0")
        for number, clone in enumerate(clones):
            check(f"clone {number} sees its own writes only", partial(sees_only, clone, number))
        check("the source sees no write of a clone", lambda: planted.find(source))
        names = [run(clone, "cat /etc/machine-id") for clone in clones]
        check("the clones have different identities", lambda: len(set(names)) == CLONES)
        draws = [evaluate(clone, "import random\nrandom.getrandbits(64)") for clone in clones]
        check("the clones draw different random numbers", lambda: len(set(draws)) == CLONES)
        now = time.time()
        told = float(run(clones[0], "date +%s"))
        check("a clone knows the time", lambda: abs(told - now) < 5)

    def private_memory(self, clones: list[Sandbox]) -> None:
        """What a clone costs beyond a VMM that waits in the pool."""
        self.at_rest()
        vms = self.server.stats()["vms"]
        idle = [vm["private_bytes"] for vm in vms if not vm["sandbox_id"] and not vm["standby"]]
        ids = {clone.sandbox_id for clone in clones}
        used = [vm for vm in vms if vm["sandbox_id"] in ids]
        self.report.check("every clone has its VMM", lambda: len(used) == CLONES)
        waiting = statistics.median(idle)
        self.report.median("clone.private_mib.p50", [(vm["private_bytes"] - waiting) / MIB for vm in used])
        self.report.median("clone.guest_private_mib.p50", [vm["guest_private_bytes"] / MIB for vm in used])
        self.report.median("clone.faults.p50", [float(vm["faults"]) for vm in used])
        self.report.metrics["pool.vmm_private_mib"] = round(waiting / MIB, 2)
        self.report.median("standby.private_mib", [vm["private_bytes"] / MIB for vm in vms if vm["standby"]])

    def rollbacks(self, source: Sandbox, snapshot_id: str, planted: Planted) -> None:
        report, running, answered = self.report, [], []
        identity, path = source.sandbox_id, f"/sandboxes/{source.sandbox_id}/rollback"
        for number in range(ROLLBACKS):
            run(source, f"echo changed > {MARKER}; pkill -f '[c]ounter.py'")
            evaluate(source, "planted = 'changed'\n0")
            self.at_rest()
            began = time.monotonic()
            answer = call(self.server, "POST", path, {"snapshotID": snapshot_id})
            if answer.status != 200:
                raise RuntimeError(f"rollback: {answer.status} {answer.body.decode(errors='replace')}")
            shell(self.server, identity, COMMAND)
            answered.append(milliseconds(began))
            source.close()  # the SDK's own rollback drops its connections too
            running.append(answer.timing().get("running", 0))
            report.check(f"rollback {number} brought everything back", lambda: planted.find(source))
        report.check("the sandbox is the same after rollback", lambda: source.get_info().sandbox_id == identity)
        report.median("rollback.running_ms.p50", running)
        report.median("rollback.first_command_ms.p50", answered)

    def resnapshot(self, source: Sandbox, planted: Planted) -> str:
        pauses, calls = [], []
        last = ""
        for number in range(SAMPLES):
            run(source, f"echo {number} > /root/round; head -c 1000000 /dev/urandom > /root/dirt")
            self.at_rest()
            last, answer, took = snapshot(self.server, source)
            self.snapshots.append(last)
            pauses.append(answer.timing()["pause"])
            calls.append(took)
        self.report.median("snapshot.pause_ms.p50", pauses)
        self.report.metrics["snapshot.pause_ms.max"] = round(max(pauses), 2)
        self.report.median("snapshot.call_ms.p50", calls)
        copy, _ = create(self.server, last)
        self.sandboxes.append(copy)
        self.report.check("a sandbox from the last snapshot has all state", lambda: planted.find(copy))
        self.report.check(
            "and what was written after the rollback", lambda: run(copy, "cat /root/round") == str(SAMPLES - 1)
        )
        return last

    def clean_up(self, last: str) -> None:
        report = self.report
        listed = [item["snapshotID"] for item in all_snapshots(self.server)]
        report.check("every snapshot is listed", lambda: set(self.snapshots) <= set(listed))
        refused = call(self.server, "DELETE", f"/templates/{last}")
        report.check("a snapshot in use is not deleted", lambda: refused.status == 409)
        for sandbox in self.sandboxes:
            sandbox.kill()
        report.check("no sandbox is left", lambda: not all_sandboxes(self.server))
        self.server.uploaded(300)
        self.storage()
        for snapshot_id in self.snapshots:
            Sandbox.delete_snapshot(snapshot_id, config=self.server.cube())
        report.check("no snapshot is left", lambda: not all_snapshots(self.server))
        report.check("no VMM is left but the pool's", lambda: wait_for("their end", self.only_the_pool, 30))

    def only_the_pool(self) -> bool:
        stats = self.server.stats()
        return len(self.server.vmms()) == int(stats["pooled_vmms"]) + int(stats["standbys"])

    def storage(self) -> None:
        store = self.server.stats()["store"]
        metrics = self.report.metrics
        for name in ("chunks_new", "chunks_deduplicated", "bytes_new", "cache_bytes", "bad_copies"):
            metrics[f"store.{name}"] = store[name]
        metrics["s3.bytes"] = store["s3_bytes"]
        metrics["s3.objects"] = store["s3_objects"]
        metrics["s3.puts"] = store["s3_puts"]
        self.report.check("no stored copy was bad", lambda: store["bad_copies"] == 0)


def machine(stats: dict[str, Any]) -> dict[str, object]:
    """Where the figures were taken."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu[0] if cpu else platform.machine(),
        "cpus": os.cpu_count(),
        "memory_mib": total // MIB,
        "kernel": platform.release(),
        "accelerator": stats.get("accelerator"),
        "vmm": stats.get("vmm_version"),
        "python": platform.python_version(),
    }


def table(report: Report) -> str:
    """All figures, with their goals beside them."""
    goals = {name: (goal, how) for name, goal, how in GOALS}
    lines = [f"{'figure':<38} {'measured':>14}   {'goal':>9}", "-" * 66]
    for name, value in report.metrics.items():
        goal, mark = "", ""
        if name in goals:
            limit, how = goals[name]
            goal = f"{how} {limit:g}"
            mark = "" if value <= limit else "  missed"
        shown = f"{value:,.2f}".rstrip("0").rstrip(".")
        lines.append(f"{name:<38} {shown:>14}   {goal:>9}{mark}")
    return "\n".join(lines)


def open_server(data_dir: Path, report: Report) -> Server:
    """The demo's server, with the template ready."""
    report.say(f"server on its own data directory, {data_dir}")
    data_dir.parent.mkdir(parents=True, exist_ok=True)
    server = Server(data_dir, standby=STANDBYS)
    began = time.monotonic()
    server.start(wait_base=False)
    report.metrics["server.start_ms"] = round(milliseconds(began), 2)
    report.say("template base: built on first use, then reused")
    steps: list[str] = []

    def ready() -> bool:
        for template in server.cli("template", "ls"):
            if template["alias"] == "base":
                step = f"{template['build_status']} {template.get('build_message') or ''}".strip()
                if step not in steps:
                    steps.append(step)
                    report.say(f"  {step}")
                if template["build_status"] == "error":
                    raise ServerError(f"the template base: {step}\n{server.tail()}")
                return template["build_status"] == "ready"
        return False

    wait_for("the template base", ready, 20 * 60, 0.5)
    report.metrics["template.ready_ms"] = round(milliseconds(began), 2)
    wait_for("a VMM in the pool", lambda: int(server.stats()["pooled_vmms"]) > 0, 60)
    return server


def settle_pool(server: Server) -> float:
    """How many waiting VMMs there are when nothing happens."""
    seen, same = -1, 0
    while same < 10:
        now = int(server.stats()["pooled_vmms"])
        same = same + 1 if now == seen else 0
        seen = now
        time.sleep(0.1)
    return float(seen)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--data-dir", type=Path, default=CACHE / "demo" / "data", help="kept between runs")
    parser.add_argument("--fresh", action="store_true", help="start from an empty data directory")
    parser.add_argument("--report", type=Path, default=ROOT / "target" / "demo" / "report.json")
    options = parser.parse_args()
    if options.fresh:
        shutil.rmtree(options.data_dir, ignore_errors=True)
    report = Report()
    server: Server | None = None
    about: dict[str, object] = {}
    try:
        server = open_server(options.data_dir, report)
        report.metrics["pool.vmms"] = settle_pool(server)
        about = machine(server.stats())
        remove_leftovers(server, report)
        Demo(server, report).run()
        vmms = server.vmms()
        code = server.stop()
        report.check("the server ends in order", lambda: code == 0)
        report.check("no VMM outlives it", lambda: not [vmm for vmm in vmms if vmm.alive()])
    except Exception as error:  # noqa: BLE001 - whatever ended the job is told, and the figures so far are kept
        if not report.failures or str(error) not in report.failures[-1]:
            report.failures.append(f"{type(error).__name__}: {error}")
        if server is not None:
            print(f"\n{server.tail()}\nlog of the server: {server.log}", file=sys.stderr)
    finally:
        if server is not None:
            server.kill()
    report.metrics["demo.seconds"] = round(time.monotonic() - report.began, 1)
    report.metrics["checks.passed"] = report.passed
    report.metrics["checks.failed"] = len(report.failures)
    options.report.parent.mkdir(parents=True, exist_ok=True)
    options.report.write_text(json.dumps({"machine": about, "metrics": report.metrics}, indent=2) + "\n")
    print(f"\n{table(report)}\n\nfigures: {options.report}")
    for failure in report.failures:
        print(f"FAILED: {failure}")
    return 1 if report.failures else 0


def remove_leftovers(server: Server, report: Report) -> None:
    """A run that was cut off leaves its snapshots behind; they are nobody's."""
    for item in all_snapshots(server):
        report.say(f"removing snapshot {item['snapshotID']} of an earlier run")
        call(server, "DELETE", f"/templates/{item['snapshotID']}")


if __name__ == "__main__":
    sys.exit(main())
