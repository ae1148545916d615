"""Guests made from one snapshot are strangers: no two draw the same random bytes or have an identity in common, and
all know what time it is, from the first moment that their processes go on."""

from __future__ import annotations

import threading
import time

import pytest
from cubesandbox import Sandbox

from harness.planted import evaluate, run, start, upload
from harness.world import World

CLONES = 3


@pytest.fixture(scope="module")
def snapshot(shared: World) -> str:
    """A snapshot of a warmed interpreter, taken a while before anything is made from it."""
    sandbox = shared.cube()
    evaluate(sandbox, "import random, secrets, uuid\nrandom.random() > 2")
    return shared.snapshot(sandbox)


@pytest.fixture(scope="module")
def clones(shared: World, snapshot: str) -> list[Sandbox]:
    # The age of the snapshot is what a guest with the snapshot's clock would be wrong by.
    time.sleep(10)
    return [shared.cube(snapshot) for _ in range(CLONES)]


def assert_different(values: list[object]) -> None:
    assert len(set(values)) == len(values), f"the same in two guests: {values}"


def test_clones_draw_different_bytes_from_the_kernel(clones: list[Sandbox]) -> None:
    assert_different([run(clone, "head -c 16 /dev/urandom | od -An -tx1") for clone in clones])
    assert_different([run(clone, "cat /proc/sys/kernel/random/uuid") for clone in clones])


def test_clones_draw_different_numbers_from_the_warmed_interpreter(clones: list[Sandbox]) -> None:
    assert_different([evaluate(clone, "random.getrandbits(128)") for clone in clones])
    assert_different([evaluate(clone, "random.SystemRandom().getrandbits(128)") for clone in clones])
    assert_different([evaluate(clone, "(secrets.token_hex(16), str(uuid.uuid4()))") for clone in clones])


def test_the_first_draw_after_each_rollback_is_new(world: World) -> None:
    sandbox = world.cube()
    evaluate(sandbox, "import random\nrandom.random() > 2")
    snapshot = world.snapshot(sandbox)
    draws: list[object] = []
    for _ in range(3):
        draws.append(evaluate(sandbox, "random.getrandbits(128)"))
        draws.append(run(sandbox, "head -c 16 /dev/urandom | od -An -tx1"))
        sandbox.rollback(snapshot)
    assert_different(draws)


def test_clones_know_the_time(clones: list[Sandbox]) -> None:
    for clone in clones:
        earliest = time.time()
        shell = float(run(clone, "date +%s.%N"))
        cell = evaluate(clone, "import time\ntime.time()")
        latest = time.time()
        assert isinstance(cell, float)
        for seen in (shell, cell):
            assert earliest - 2 < seen < latest + 2


def test_clones_have_names_of_their_own(clones: list[Sandbox]) -> None:
    assert_different([run(clone, "cat /etc/machine-id") for clone in clones])
    assert_different([run(clone, "hostname") for clone in clones])
    assert_different([clone.sandbox_id for clone in clones])


def test_the_token_of_the_source_does_not_open_a_clone(world: World) -> None:
    source = world.e2b()
    copy = world.e2b(world.snapshot(source))
    assert source._envd_access_token
    assert copy._envd_access_token
    assert source._envd_access_token != copy._envd_access_token
    assert copy.commands.run("echo mine").stdout == "mine\n"
    assert source.commands.run("echo mine").stdout == "mine\n"


def test_a_clone_does_not_have_the_environment_of_its_source_s_create(world: World) -> None:
    source = world.cube(env_vars={"ONLY_SOURCE": "yes"})
    assert run(source, "echo $ONLY_SOURCE") == "yes"
    copy = world.cube(world.snapshot(source))
    assert run(copy, "echo $ONLY_SOURCE") == ""


def logged_draws(sandbox: Sandbox, path: str) -> list[list[str]]:
    return [line.split() for line in run(sandbox, f"cat {path}").splitlines()]


def assert_disjoint_after_the_common_start(logs: list[list[str]]) -> None:
    """Up to the snapshot the logs are one; after it no value is in two of them."""
    common = 0
    while all(len(log) > common for log in logs) and len({log[common] for log in logs}) == 1:
        common += 1
    assert common > 0, "the logs have no common start: they are not of one process"
    later = [set(log[common:]) for log in logs]
    assert all(later), "a process did not go on"
    for number, one in enumerate(later):
        for other in later[number + 1 :]:
            assert not one & other, "two guests drew the same value after the snapshot"


def test_a_process_that_draws_all_the_time_never_draws_the_same_in_two_clones(world: World) -> None:
    """No gap between the resume and the new seed: the process was in the middle of drawing."""
    source = world.cube()
    upload(source, "draws.py")
    start(source, "python3 /root/draws.py /root/draws")
    run(source, "while [ ! -s /root/draws ]; do sleep 0.05; done; sleep 0.3")
    snapshot = world.snapshot(source)
    guests = [source, world.cube(snapshot), world.cube(snapshot)]
    logs = []
    for guest in guests:
        run(guest, "sleep 0.5; touch /root/draws.stop; while pgrep -f '[d]raws.py' >/dev/null; do sleep 0.05; done")
        logs.append(logged_draws(guest, "/root/draws"))
    assert_disjoint_after_the_common_start([[line[0] for line in log] for log in logs])
    for log in logs:
        monotonic = [int(line[1]) for line in log]
        assert monotonic == sorted(monotonic), "the monotonic clock jumped backwards"
    now = time.time_ns()
    for log in logs[1:]:
        assert abs(now - int(log[-1][2])) < 60e9


def test_a_cell_that_draws_all_the_time_never_draws_the_same_in_two_clones(world: World) -> None:
    source = world.cube()
    code = (
        "import os, random, time\n"
        "with open('/tmp/drawn', 'w', buffering=1) as file:\n"
        "    while not os.path.exists('/tmp/drawn.stop'):\n"
        "        file.write(f'{random.getrandbits(64):x}\\n')\n"
        "        time.sleep(0.002)\n"
        "0"
    )
    cell = threading.Thread(target=source.run_code, args=(code,))
    cell.start()
    run(source, "while [ ! -s /tmp/drawn ]; do sleep 0.05; done; sleep 0.3")
    snapshot = world.snapshot(source)
    guests = [source, world.cube(snapshot), world.cube(snapshot)]
    logs = []
    for guest in guests:
        run(guest, "sleep 0.5; touch /tmp/drawn.stop")
        assert evaluate(guest, "file.closed") is True
        logs.append([line[0] for line in logged_draws(guest, "/tmp/drawn")])
    cell.join(60)
    assert not cell.is_alive()
    assert_disjoint_after_the_common_start(logs)
