"""Memory and disk of a snapshot are of one instant, however busy the guest is and however little of it is loaded."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from cubesandbox import Sandbox

from harness.planted import Planted, evaluate, run, start, upload
from harness.world import World

SNAPSHOTS = 20


def begin_writing(sandbox: Sandbox) -> int:
    """Starts the writer; its pid, once it has gone around its rings."""
    upload(sandbox, "writer.py", "verify.py")
    pid = start(sandbox, "python3 /root/writer.py /root/log /root/report")
    run(sandbox, "while [ ! -s /root/log ]; do sleep 0.05; done; sleep 2")
    return pid


def verdict(sandbox: Sandbox, pid: int) -> int:
    """Ends the writer and checks what it left; the number of records. Fails if the two rings are not of one instant."""
    run(sandbox, f"kill -TERM {pid}; while [ ! -e /root/report ]; do sleep 0.05; done")
    found = json.loads(run(sandbox, "python3 /root/verify.py /root/log /root/report"))
    assert found["dropped"], "the page cache could not be dropped: the disk was not looked at"
    assert found["memory"] == []
    assert found["disk"] == []
    return found["records"]


@pytest.mark.timeout(600)
def test_twenty_snapshots_of_a_guest_that_writes_at_full_speed(world: World) -> None:
    source = world.cube()
    pid = begin_writing(source)
    records = 0
    for _ in range(SNAPSHOTS):
        snapshot = world.snapshot(source)
        copy = world.cube(snapshot)
        found = verdict(copy, pid)
        assert found > records, "the writer did not get on between two snapshots"
        records = found
        assert run(copy, "dmesg | grep -ci 'ext4.*error\\|I/O error' || true") == "0"
        copy.kill()
        Sandbox.delete_snapshot(snapshot)
    assert verdict(source, pid) > records


def test_rollback_of_a_guest_that_writes_at_full_speed(world: World) -> None:
    sandbox = world.cube()
    pid = begin_writing(sandbox)
    snapshot = world.snapshot(sandbox)
    run(sandbox, "sleep 1")
    sandbox.rollback(snapshot)
    assert verdict(sandbox, pid) > 0


def test_snapshots_of_guests_that_have_loaded_next_to_nothing(world: World) -> None:
    """Each generation is captured at once, before what it was made of is all there."""
    first = world.cube()
    planted = Planted.plant(first)
    checksum = run(first, "head -c 24000000 /dev/urandom > /root/big; sync; sha256sum < /root/big")
    evaluate(first, "big = os.urandom(8_000_000)\nimport hashlib\ndigest = hashlib.sha256(big).hexdigest()\n0")
    snapshot = world.snapshot(first)
    first.kill()
    for _ in range(4):
        middle = world.cube(snapshot)
        snapshot = world.snapshot(middle)
        middle.kill()
    last = world.cube(snapshot)
    planted.find(last)
    assert evaluate(last, "hashlib.sha256(big).hexdigest() == digest") is True
    assert run(last, "echo 3 > /proc/sys/vm/drop_caches; sha256sum < /root/big") == checksum


def test_snapshots_of_several_guests_at_once(world: World) -> None:
    sandboxes = [world.cube() for _ in range(3)]
    for number, sandbox in enumerate(sandboxes):
        run(sandbox, f"head -c 4000000 /dev/urandom > /root/own; echo {number} > /root/number")
    with ThreadPoolExecutor(3) as pool:
        sums = list(pool.map(lambda sandbox: run(sandbox, "sha256sum < /root/own"), sandboxes))
        snapshots = list(pool.map(world.snapshot, sandboxes))
        copies = list(pool.map(world.cube, snapshots))
    for number, copy in enumerate(copies):
        assert run(copy, "cat /root/number; sha256sum < /root/own") == f"{number}\n{sums[number]}"


def test_a_snapshot_stays_what_it_was_whatever_its_guests_write(world: World) -> None:
    source = world.cube()
    before = run(source, "head -c 8000000 /dev/urandom > /root/data; sync; sha256sum < /root/data")
    snapshot = world.snapshot(source)
    writers = [source, world.cube(snapshot), world.cube(snapshot)]
    for writer in writers:
        run(writer, "head -c 8000000 /dev/zero > /root/data; sync; echo 3 > /proc/sys/vm/drop_caches")
    late = world.cube(snapshot)
    assert run(late, "sha256sum < /root/data") == before


def test_deleted_and_zeroed_blocks_do_not_come_back(world: World) -> None:
    source = world.cube()
    run(source, "head -c 6000000 /dev/urandom > /root/full; sync")
    first = world.snapshot(source)
    run(source, "head -c 6000000 /dev/zero | dd of=/root/full conv=notrunc status=none; sync")
    second = world.snapshot(source)
    zero = run(source, "head -c 6000000 /dev/zero | sha256sum")
    copy = world.cube(second)
    assert run(copy, "echo 3 > /proc/sys/vm/drop_caches; sha256sum < /root/full") == zero
    old = world.cube(first)
    assert run(old, "sha256sum < /root/full") != zero
