"""Checks what `writer.py` left on disk against what it knew in memory when it ended, and prints the verdict as JSON.

As root it drops the page cache first, so that the bytes come from the disk and not from the memory that was captured
with it. Usage: verify.py LOG REPORT
"""

import json
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import writer  # noqa: E402


def main(log, report):
    os.sync()
    try:
        with open("/proc/sys/vm/drop_caches", "w") as file:
            file.write("3")
        dropped = True
    except OSError:
        dropped = False
    with open(report) as file:
        known = json.load(file)
    disk = os.open(log, os.O_RDONLY)
    complaints = writer.check(lambda place: os.pread(disk, writer.RECORD, place), known["last"], known["chain"])
    print(json.dumps({"records": known["last"] + 1, "memory": known["memory"], "disk": complaints, "dropped": dropped}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
