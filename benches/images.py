"""Images of real guests for the store's benchmarks: what `make bench-store` measures on.

One guest of the template `base` is captured three times with work in between, a second guest once after other work:

    1  a Python process that has allocated and freed, the page cache warm
    2  after compiling part of the Python library, and a commit of the result in a git repository
    3  after churn of the page cache and of files
    4  the second guest: the same template, other work

Then image 3 is restored by a server with nothing in memory, and the chunks that it reads until the first command has
answered are recorded: its working set. Everything goes below `--out`: `<n>/memory.img`, `<n>/disk.img` (sparse)
and `working_set.json`. Kept as long as the guest's parts are the same: making them takes two minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
sys.dont_write_bytecode = True

from harness.rest import call, shell  # noqa: E402
from harness.server import CACHE, Server, binary  # noqa: E402

#: Raised when the work below changes: images made by another recipe are made again.
RECIPE = 1

ALLOCATE = """
nohup python3 -c '
import random, time
random.seed({seed})
kept = [{{"id": n, "name": "row %d" % n, "value": random.random()}} for n in range({rows})]
text = [("%d " % (n * n)) * 40 for n in range({rows} // 4)]
del kept[::3]
open("/tmp/allocated", "w").write("ready")
time.sleep(100000)
' >/dev/null 2>&1 &
for i in $(seq 600); do [ -e /tmp/allocated ] && exit 0; sleep 0.1; done; exit 1
"""
COMPILE = (
    "mkdir -p /tmp/src{n} && cd /usr/lib/python3.11 && cp -r asyncio email json unittest /tmp/src{n} && "
    "python3 -m compileall -q /tmp/src{n} && cd /tmp/src{n} && git init -q . && git add . && "
    "git -c user.email=a@b -c user.name=a commit -q -m all && sync"
)
CHURN = (
    "cat /usr/lib/python3.11/*.py /usr/bin/git /usr/lib/x86_64-linux-gnu/*.so* >/dev/null; "
    "for n in $(seq 40); do head -c 200000 /dev/urandom | base64 >/tmp/churn$n; done; rm -f /tmp/churn*[02468]; "
    "find / -xdev -type f -name '*.py' 2>/dev/null | wc -l >/tmp/count; sync"
)


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


def create(server: Server, reference: str) -> str:
    answer = call(server, "POST", "/sandboxes", {"templateID": reference, "timeout": 3600})
    assert answer.status == 201, answer
    return answer.json()["sandboxID"]


def snapshot(server: Server, sandbox: str) -> str:
    answer = call(server, "POST", f"/sandboxes/{sandbox}/snapshots", {})
    assert answer.status == 201, answer
    return answer.json()["snapshotID"]


def capture(server: Server) -> list[str]:
    """Four snapshots, as the module says."""
    made = []
    say("guest one: allocation, warm page cache")
    one = create(server, "base")
    shell(server, one, ALLOCATE.format(seed=1, rows=120_000))
    made.append(snapshot(server, one))
    say("guest one: compile and commit")
    shell(server, one, COMPILE.format(n=1))
    made.append(snapshot(server, one))
    say("guest one: churn of page cache and files")
    shell(server, one, CHURN)
    made.append(snapshot(server, one))
    say("guest two: allocation and compile")
    two = create(server, "base")
    shell(server, two, ALLOCATE.format(seed=2, rows=60_000))
    shell(server, two, COMPILE.format(n=2))
    made.append(snapshot(server, two))
    server.uploaded()
    return made


def record(server: Server, snapshot_id: str) -> list[dict[str, object]]:
    """What a first restore of the snapshot reads of the store until its first command has answered."""
    start = server.log.stat().st_size
    sandbox = create(server, snapshot_id)
    shell(server, sandbox, "echo ready")
    with server.log.open("rb") as log:
        log.seek(start)
        text = log.read().decode(errors="replace")
    reads = re.findall(r"read image=([0-9a-f]+) chunk=(\d+) zero=(true|false)", text)
    seen: dict[tuple[str, int], None] = {}
    for image, chunk, zero in reads:
        if zero == "false":
            seen[(image, int(chunk))] = None
    return [{"image": image, "chunk": chunk} for image, chunk in seen]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=CACHE / "bench" / "images")
    out: Path = parser.parse_args().out
    stamp = out / "recipe"
    if stamp.is_file() and stamp.read_text() == str(RECIPE):
        say(f"images are in {out} (remove it to make them anew)")
        return
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    data = out / "data"
    with Server(data, standby=0) as server:
        say("server and template base")
        server.start()
        made = capture(server)
        server.stop()
    os.environ["SNAPYARD_LOG"] = "info,snapyard_snapstore::reader=trace"
    with Server(data, standby=0) as server:
        server.start()
        say("working set of image 3")
        working_set = record(server, made[2])
        server.stop()
    del os.environ["SNAPYARD_LOG"]
    say("images to files")
    tool = binary().with_name("store-bench")
    subprocess.run([str(tool), "export", "--data-dir", str(data), "--out", str(out), *made], check=True)
    (out / "working_set.json").write_text(json.dumps(working_set))
    shutil.rmtree(data)
    for path in (data.with_name("data.log"), data.with_name("data.tmp")):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    stamp.write_text(str(RECIPE))
    say(f"done: {out}")


if __name__ == "__main__":
    main()
