"""Writes to memory and to disk at full speed until SIGTERM, so that a copy of the guest can be checked for being of
one instant.

Record n is 4 KiB: number, checksum of record n-1, payload, own checksum. It goes to the same place in a ring on disk
and in a ring in memory, and the process knows the number and the checksum of the last one. A copy whose disk is older
than its memory lacks the last records; one whose disk is newer has one too many; a torn one breaks the chain.

Usage: writer.py LOG REPORT     (the report is written when it ends)
"""

import json
import mmap
import os
import signal
import struct
import sys
import zlib

RECORD = 4096
SLOTS = 2048
HEAD = struct.Struct("<QI")
TAIL = struct.Struct("<I")


def check(read, last, chain):
    """Follows the ring backwards from record `last`, which must have the checksum `chain`; the complaints."""
    complaints = []
    expected = chain
    for number in range(last, max(-1, last - SLOTS), -1):
        record = read((number % SLOTS) * RECORD)
        body, (crc,) = record[: -TAIL.size], TAIL.unpack(record[-TAIL.size :])
        found, before = HEAD.unpack(body[: HEAD.size])
        if found != number:
            complaints.append(f"record {number}: its place holds {found}")
        elif zlib.crc32(body) != crc:
            complaints.append(f"record {number}: wrong checksum")
        elif crc != expected:
            complaints.append(f"record {number}: the chain is broken")
        if complaints:
            break
        expected = before
    return complaints


def main(log, report):
    disk = os.open(log, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    os.ftruncate(disk, SLOTS * RECORD)
    memory = mmap.mmap(-1, SLOTS * RECORD)
    noise = os.urandom(2 * RECORD)
    size = RECORD - HEAD.size - TAIL.size
    running = True

    def stop(*_):
        nonlocal running
        running = False

    signal.signal(signal.SIGTERM, stop)
    number, chain = -1, 0
    while running:
        number += 1
        start = number % RECORD
        body = HEAD.pack(number, chain) + noise[start : start + size]
        chain = zlib.crc32(body)
        record = body + TAIL.pack(chain)
        place = (number % SLOTS) * RECORD
        os.pwrite(disk, record, place)
        memory[place : place + RECORD] = record
        if number % 64 == 63:
            os.fdatasync(disk)
    os.fsync(disk)
    complaints = check(lambda place: memory[place : place + RECORD], number, chain)
    with open(report + ".new", "w") as file:
        json.dump({"last": number, "chain": chain, "memory": complaints}, file)
    os.rename(report + ".new", report)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
