"""The main job, by the unmodified `cubesandbox` SDK, as its guide to snapshot, rollback and clone tells it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from cubesandbox import ApiError, Sandbox, SandboxNotFoundError, TemplateNotFoundError
from cubesandbox._exceptions import CubeSandboxError

from harness.planted import MARKER, Planted, counter, evaluate, run
from harness.server import Server, wait_for
from harness.world import World


@dataclass(frozen=True)
class Source:
    """A sandbox with planted state, and a snapshot of it."""

    sandbox: Sandbox
    planted: Planted
    snapshot: str


@pytest.fixture(scope="module")
def source(shared: World) -> Source:
    sandbox = shared.cube(metadata={"role": "source"})
    planted = Planted.plant(sandbox)
    return Source(sandbox, planted, shared.snapshot(sandbox))


@pytest.fixture
def clones() -> Iterator[list[Sandbox]]:
    """Clones to be killed through the SDK, which then deletes the snapshot it made them from."""
    made: list[Sandbox] = []
    yield made
    for clone in made:
        clone.kill()


def snapshot_ids(sandbox_id: str | None = None) -> list[str]:
    """A full walk over the pages, by the SDK."""
    found: list[str] = []
    token = None
    while True:
        page, token = Sandbox.list_snapshots(sandbox_id=sandbox_id, next_token=token)
        found += [info.snapshot_id for info in page]
        if token is None:
            return found


# Sandboxes


def test_a_sandbox_runs_commands_and_code_until_it_is_killed(world: World) -> None:
    sandbox = world.cube()
    assert run(sandbox, "echo out; id -un") == "out\nroot"
    assert evaluate(sandbox, "6 * 7") == 42
    sandbox.kill()
    with pytest.raises(SandboxNotFoundError):
        sandbox.kill()
    with pytest.raises(SandboxNotFoundError):
        sandbox.get_info()


def test_a_command_says_its_exit_code_and_both_outputs(source: Source) -> None:
    done = source.sandbox.commands.run("echo out; echo err >&2; exit 3")
    assert (done.exit_code, done.stdout, done.stderr) == (3, "out\n", "err\n")


def test_a_command_has_the_environment_directory_and_user_it_was_given(source: Source) -> None:
    done = source.sandbox.commands.run("echo $COLOUR $PWD $(id -un)", envs={"COLOUR": "blue"}, cwd="/usr", user="user")
    assert done.stdout == "blue /usr user\n"


def test_a_sandbox_has_the_environment_it_was_created_with(world: World) -> None:
    sandbox = world.cube(env_vars={"COLOUR": "green"})
    assert run(sandbox, "echo $COLOUR") == "green"


def test_the_description_of_a_sandbox(server: Server, source: Source) -> None:
    info = source.sandbox.get_info()
    assert info.sandbox_id == source.sandbox.sandbox_id
    assert info.state == "running"
    assert info.metadata == {"role": "source"}
    assert info.cpu_count is not None
    assert info.cpu_count >= 1
    assert info.memory_mb is not None
    assert info.memory_mb >= 256
    assert info.started_at is not None
    assert info.end_at is not None
    assert info.started_at < info.end_at
    for listing in (Sandbox.list(), Sandbox.list_v2()):
        listed = [item for item in listing if item["sandboxID"] == source.sandbox.sandbox_id]
        assert len(listed) == 1
        assert listed[0]["state"] == "running"
    assert Sandbox.health()


def test_connect_finds_the_same_sandbox(source: Source) -> None:
    again = Sandbox.connect(source.sandbox.sandbox_id)
    assert again.sandbox_id == source.sandbox.sandbox_id
    source.planted.find(again)


def test_files_are_written_read_listed_renamed_and_removed(source: Source) -> None:
    files = source.sandbox.files
    files.make_dir("/root/box")
    assert files.write_files([("/root/box/a", "ä\n"), ("/root/box/b", b"\x00\xff")]) == 2
    assert files.read("/root/box/a") == "ä\n"
    assert run(source.sandbox, "od -An -tx1 /root/box/b") == " 00 ff"
    assert sorted(entry["name"] for entry in files.list("/root/box")) == ["a", "b"]
    files.rename("/root/box/a", "/root/box/c")
    assert not files.exists("/root/box/a")
    assert files.exists("/root/box/c")
    assert files.stat("/root/box/c")["name"] == "c"
    files.remove("/root/box")
    assert not files.exists("/root/box")
    with pytest.raises(IOError, match="gone"):
        files.read("/root/box/gone")


# Snapshots


def test_an_unnamed_snapshot_has_an_id_and_no_name(world: World, source: Source) -> None:
    info = source.sandbox.create_snapshot()
    world.keep_snapshot(info.snapshot_id)
    assert str(uuid.UUID(info.snapshot_id)) == info.snapshot_id
    assert info.names == []
    assert info.snapshot_id in snapshot_ids()


def test_a_named_snapshot_has_its_full_name_and_starts_by_it(world: World, source: Source) -> None:
    info = source.sandbox.create_snapshot(" Step-1 ")
    world.keep_snapshot(info.snapshot_id)
    assert info.names == ["default/step-1:default"]
    for reference in ("default/step-1", "default/step-1:default"):
        source.planted.find(world.cube(reference))


def test_a_name_is_taken_until_its_snapshot_is_deleted(world: World, source: Source) -> None:
    first = source.sandbox.create_snapshot("once")
    world.keep_snapshot(first.snapshot_id)
    with pytest.raises(ApiError) as refused:
        source.sandbox.create_snapshot("once:default")
    assert refused.value.status_code == 409
    other = source.sandbox.create_snapshot("once:v1.2")
    world.keep_snapshot(other.snapshot_id)
    assert other.names == ["default/once:v1.2"]
    Sandbox.delete_snapshot("default/once:default")
    again = source.sandbox.create_snapshot("once")
    world.keep_snapshot(again.snapshot_id)
    assert again.names == ["default/once:default"]
    assert again.snapshot_id != first.snapshot_id


def test_listing_walks_every_page_newest_first_and_filters_by_sandbox(world: World, source: Source) -> None:
    other = world.cube()
    mine = [world.snapshot(other) for _ in range(5)]
    strange = world.snapshot(source.sandbox)
    walked: list[str] = []
    token = None
    pages = 0
    while True:
        page, token = Sandbox.list_snapshots(sandbox_id=other.sandbox_id, limit=2, next_token=token)
        assert len(page) <= 2
        walked += [info.snapshot_id for info in page]
        pages += 1
        if token is None:
            break
    assert walked == mine[::-1]
    assert pages == 3
    everything = snapshot_ids()
    assert len(everything) == len(set(everything))
    assert {*mine, strange, source.snapshot} <= set(everything)
    assert snapshot_ids("nosuchsandbox") == []


def test_a_marker_file_is_preserved(world: World, source: Source) -> None:
    copy = world.cube(source.snapshot)
    assert copy.sandbox_id != source.sandbox.sandbox_id
    assert copy.files.read(MARKER) == source.planted.secret


def test_variable_process_and_unlinked_file_survive_a_snapshot(world: World, source: Source) -> None:
    source.planted.find(world.cube(source.snapshot))
    source.planted.find(source.sandbox)


def test_a_snapshot_outlives_its_sandbox(world: World) -> None:
    short = world.cube()
    planted = Planted.plant(short)
    snapshot = world.snapshot(short)
    short.kill()
    assert snapshot in snapshot_ids()
    planted.find(world.cube(snapshot))


def test_a_deleted_snapshot_is_gone_from_the_list_and_cannot_be_used(world: World, source: Source) -> None:
    snapshot = world.snapshot(source.sandbox)
    Sandbox.delete_snapshot(snapshot)
    assert snapshot not in snapshot_ids()
    with pytest.raises(TemplateNotFoundError):
        Sandbox.create(snapshot)
    with pytest.raises(CubeSandboxError) as refused:
        Sandbox.delete_snapshot(snapshot)
    assert refused.value.status_code == 404


def test_a_snapshot_is_not_deleted_while_a_sandbox_made_from_it_exists(world: World, source: Source) -> None:
    snapshot = world.snapshot(source.sandbox)
    copy = world.cube(snapshot)
    with pytest.raises(ApiError) as refused:
        Sandbox.delete_snapshot(snapshot)
    assert refused.value.status_code == 409
    assert snapshot in snapshot_ids()
    source.planted.find(copy)
    copy.kill()
    Sandbox.delete_snapshot(snapshot)
    assert snapshot not in snapshot_ids()


def test_deleting_a_snapshot_leaves_what_was_snapshotted_from_its_guests(world: World, source: Source) -> None:
    parent = world.snapshot(source.sandbox)
    middle = world.cube(parent)
    child = world.snapshot(middle)
    middle.kill()
    Sandbox.delete_snapshot(parent)
    source.planted.find(world.cube(child))


# Clones


def test_clone_3_inherits_and_is_isolated_while_the_source_goes_on(
    server: Server, source: Source, clones: list[Sandbox]
) -> None:
    before = counter(source.sandbox)
    clones += source.sandbox.clone(3)
    assert len({clone.sandbox_id for clone in clones} | {source.sandbox.sandbox_id}) == 4
    for clone in clones:
        assert source.planted.find(clone).count >= before.count
    for number, clone in enumerate(clones):
        run(clone, f"echo {number} > {MARKER}; echo {number} > /root/own-{number}")
        evaluate(clone, f"planted = {number}\n0")
    for number, clone in enumerate(clones):
        assert run(clone, f"cat {MARKER}; ls /root/own-*") == f"{number}\n/root/own-{number}"
        assert evaluate(clone, "planted") == number
    assert source.planted.find(source.sandbox).count > before.count
    assert run(source.sandbox, "ls -d /root/own-* 2>/dev/null || echo none") == "none"


def test_clone_10_with_concurrency_5(server: Server, source: Source, clones: list[Sandbox]) -> None:
    clones += source.sandbox.clone(10, concurrency=5)
    assert len({clone.sandbox_id for clone in clones}) == 10
    with ThreadPoolExecutor(5) as pool:
        readings = list(pool.map(source.planted.find, clones))
    assert len(readings) == 10
    with ThreadPoolExecutor(5) as pool:
        list(pool.map(lambda pair: run(pair[1], f"echo {pair[0]} > /root/number"), enumerate(clones)))
    for number, clone in enumerate(clones):
        assert run(clone, "cat /root/number") == str(number)
    assert not source.sandbox.files.exists("/root/number")


def test_the_snapshot_of_a_clone_call_goes_with_its_last_clone(server: Server, source: Source) -> None:
    before = set(snapshot_ids())
    first, second = source.sandbox.clone(2)
    (temporary,) = set(snapshot_ids()) - before
    first.kill()
    assert temporary in snapshot_ids()
    second.kill()
    assert set(snapshot_ids()) == before


def test_a_clone_of_a_clone_of_a_clone(source: Source, clones: list[Sandbox]) -> None:
    line = source.sandbox
    for generation in range(3):
        (line,) = line.clone(1)
        clones.insert(0, line)
        source.planted.find(line)
        run(line, f"echo {generation} >> /root/generations")
    assert run(line, "cat /root/generations") == "0\n1\n2"


# Rollback


def test_rollback_from_v2_to_v1_keeps_the_id_and_the_object(world: World) -> None:
    sandbox = world.cube()
    planted = Planted.plant(sandbox)
    v1 = world.snapshot(sandbox)
    ends = sandbox.get_info().end_at
    run(sandbox, f"echo v2 > {MARKER}; touch /root/new; pkill -f '[c]ounter.py'")
    evaluate(sandbox, "planted = 'v2'\nunnamed.write('v2')")
    identity = sandbox.sandbox_id
    answer = sandbox.rollback(v1)
    assert answer["sandboxID"] == identity
    assert answer["snapshotID"] == v1
    assert answer["status"] == "success"
    assert answer["operationID"]
    assert sandbox.sandbox_id == identity
    planted.find(sandbox)
    assert not sandbox.files.exists("/root/new")
    assert sandbox.get_info().end_at == ends
    assert sandbox.get_info().state == "running"


def test_rollback_then_continue_then_snapshot_again_then_start_from_that(world: World) -> None:
    sandbox = world.cube()
    planted = Planted.plant(sandbox)
    v1 = world.snapshot(sandbox)
    run(sandbox, "echo lost > /root/lost")
    sandbox.rollback(v1)
    run(sandbox, "echo kept > /root/kept")
    evaluate(sandbox, "later = 'kept'\n0")
    v2 = world.snapshot(sandbox)
    copy = world.cube(v2)
    planted.find(copy)
    assert run(copy, "cat /root/kept; ls /root/lost 2>/dev/null || echo none") == "kept\nnone"
    assert evaluate(copy, "later") == "kept"
    planted.find(sandbox)


def test_rollback_forth_and_back_between_two_snapshots(world: World) -> None:
    sandbox = world.cube()
    run(sandbox, "echo 1 > /root/state")
    sandbox.run_code("state = 1")
    v1 = world.snapshot(sandbox)
    run(sandbox, "echo 2 > /root/state")
    sandbox.run_code("state = 2")
    v2 = world.snapshot(sandbox)
    for snapshot, state in ((v1, 1), (v2, 2), (v1, 1), (v1, 1), (v2, 2)):
        sandbox.rollback(snapshot)
        assert run(sandbox, "cat /root/state") == str(state)
        assert evaluate(sandbox, "state") == state
        run(sandbox, "echo other > /root/state")


def test_rollback_to_a_snapshot_of_another_sandbox(world: World, source: Source) -> None:
    other = world.cube()
    run(other, "echo other > /root/other")
    other.rollback(source.snapshot)
    source.planted.find(other)
    assert not other.files.exists("/root/other")
    assert other.sandbox_id != source.sandbox.sandbox_id
    source.planted.find(source.sandbox)


def test_a_sandbox_that_was_rolled_back_occupies_what_it_runs_on(world: World, source: Source) -> None:
    target = world.snapshot(source.sandbox)
    other = world.cube()
    other.rollback(target)
    with pytest.raises(ApiError) as refused:
        Sandbox.delete_snapshot(target)
    assert refused.value.status_code == 409
    other.kill()
    Sandbox.delete_snapshot(target)


def test_rollback_to_nothing_leaves_the_sandbox_as_it_was(world: World, source: Source) -> None:
    with pytest.raises(CubeSandboxError) as refused:
        source.sandbox.rollback(str(uuid.uuid4()))
    assert refused.value.status_code == 404
    source.planted.find(source.sandbox)


def test_many_sandboxes_at_once_each_with_its_own_state(world: World) -> None:
    with ThreadPoolExecutor(6) as pool:
        sandboxes = list(pool.map(lambda _: world.cube(), range(6)))
        list(pool.map(lambda pair: run(pair[1], f"echo {pair[0]} > /root/own"), enumerate(sandboxes)))
        assert list(pool.map(lambda sandbox: run(sandbox, "cat /root/own"), sandboxes)) == [str(n) for n in range(6)]
        list(pool.map(lambda sandbox: sandbox.kill(), sandboxes))
    wait_for("an empty list", lambda: not {s.sandbox_id for s in sandboxes} & {i["sandboxID"] for i in Sandbox.list()})
