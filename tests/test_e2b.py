"""The same server by the unmodified `e2b` SDK: sandboxes, commands, files, snapshots."""

from __future__ import annotations

import io
import threading
import uuid

import pytest
from e2b import (
    AuthenticationException,
    CommandExitException,
    FileNotFoundException,
    FileType,
    InvalidArgumentException,
    NotFoundException,
    Sandbox,
    SandboxException,
    SandboxNotFoundException,
    SandboxQuery,
    SandboxState,
    TimeoutException,
)

from harness.server import wait_for
from harness.world import World


@pytest.fixture(scope="module")
def sandbox(shared: World) -> Sandbox:
    return shared.e2b(metadata={"suite": "e2b"}, envs={"FROM_CREATE": "yes"})


# Sandboxes


def test_create_without_arguments_takes_base(world: World) -> None:
    made = Sandbox.create()
    world.keep(made)
    assert made.commands.run("echo hello").stdout == "hello\n"
    assert made.is_running()
    info = made.get_info()
    assert info.sandbox_id == made.sandbox_id
    assert info.name == "base"
    assert info.state == SandboxState.RUNNING


def test_kill_twice_says_true_then_false(world: World) -> None:
    made = world.e2b()
    assert made.kill() is True
    assert made.kill() is False
    assert Sandbox.kill(made.sandbox_id) is False
    assert made.is_running() is False


def test_a_dead_sandbox_says_so(world: World) -> None:
    made = world.e2b()
    made.kill()
    with pytest.raises(TimeoutException, match="not found"):
        made.commands.run("true")
    with pytest.raises(TimeoutException, match="not found"):
        made.files.read("/etc/hostname")
    with pytest.raises(SandboxNotFoundException):
        made.get_info()
    with pytest.raises(SandboxNotFoundException):
        made.create_snapshot()
    with pytest.raises(SandboxNotFoundException):
        Sandbox.connect(made.sandbox_id)


def test_connect_from_another_place(sandbox: Sandbox) -> None:
    sandbox.files.write("connected", "yes")
    again = Sandbox.connect(sandbox.sandbox_id)
    assert again.files.read("connected") == "yes"
    assert again.commands.run("echo $FROM_CREATE").stdout == "yes\n"


def test_listing_filters_by_metadata_and_walks_pages(world: World) -> None:
    mark = uuid.uuid4().hex
    made = {world.e2b(metadata={"mark": mark, "number": str(number)}).sandbox_id for number in range(3)}
    paginator = Sandbox.list(query=SandboxQuery(metadata={"mark": mark}), limit=2)
    found: list[str] = []
    while paginator.has_next:
        page = paginator.next_items()
        assert len(page) <= 2
        found += [item.sandbox_id for item in page]
        assert all(item.metadata["mark"] == mark for item in page)
    assert len(found) == 3
    assert set(found) == made
    one = Sandbox.list(query=SandboxQuery(metadata={"mark": mark, "number": "1"})).next_items()
    assert len(one) == 1
    assert Sandbox.list(query=SandboxQuery(metadata={"mark": "no"})).next_items() == []
    paused = Sandbox.list(query=SandboxQuery(metadata={"mark": mark}, state=[SandboxState.PAUSED]))
    assert paused.next_items() == []


def test_metadata_with_odd_characters_comes_back(world: World) -> None:
    odd = {"key with space": "ä=&%+/?", "empty": ""}
    made = world.e2b(metadata=odd)
    assert made.get_info().metadata == odd
    found = Sandbox.list(query=SandboxQuery(metadata={"key with space": "ä=&%+/?"})).next_items()
    assert [item.sandbox_id for item in found] == [made.sandbox_id]


def test_metrics_of_a_running_sandbox(sandbox: Sandbox) -> None:
    metrics = wait_for("metrics", sandbox.get_metrics, 60, 0.5)
    latest = metrics[-1]
    assert latest.cpu_count == sandbox.get_info().cpu_count
    assert 0 < latest.mem_used < latest.mem_total
    assert 0 < latest.disk_used < latest.disk_total


# Commands


def test_a_command_that_fails_raises_with_code_and_outputs(sandbox: Sandbox) -> None:
    with pytest.raises(CommandExitException) as failed:
        sandbox.commands.run("echo out; echo err >&2; exit 7")
    assert (failed.value.exit_code, failed.value.stdout, failed.value.stderr) == (7, "out\n", "err\n")
    with pytest.raises(CommandExitException) as failed:
        sandbox.commands.run("no-such-program")
    assert failed.value.exit_code == 127
    assert "no-such-program" in failed.value.stderr


def test_standard_error_is_kept_apart(sandbox: Sandbox) -> None:
    done = sandbox.commands.run("echo to-out; echo to-err >&2")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "to-out\n", "to-err\n")


def test_environment_is_that_of_the_sandbox_with_the_command_on_top(sandbox: Sandbox) -> None:
    script = "echo $FROM_CREATE $EXTRA"
    assert sandbox.commands.run(script, envs={"EXTRA": "more"}).stdout == "yes more\n"
    assert sandbox.commands.run(script, envs={"FROM_CREATE": "other"}).stdout == "other\n"
    assert sandbox.commands.run(script).stdout == "yes\n"


def test_working_directory(sandbox: Sandbox) -> None:
    assert sandbox.commands.run("pwd").stdout == "/home/user\n"
    assert sandbox.commands.run("pwd", cwd="/usr/bin").stdout == "/usr/bin\n"
    with pytest.raises((InvalidArgumentException, NotFoundException)):
        sandbox.commands.run("pwd", cwd="/no/such/directory")


def test_users(sandbox: Sandbox) -> None:
    script = "id -un; echo $HOME"
    assert sandbox.commands.run(script).stdout == "user\n/home/user\n"
    assert sandbox.commands.run(script, user="root").stdout == "root\n/root\n"
    with pytest.raises(CommandExitException):
        sandbox.commands.run("touch /root/forbidden")
    with pytest.raises((SandboxException, AuthenticationException)):
        sandbox.commands.run("true", user="nobody-of-that-name")


def test_a_command_in_the_background_streams_is_listed_and_ends(sandbox: Sandbox) -> None:
    handle = sandbox.commands.run("echo begun; read line; echo got $line", background=True, stdin=True)
    output = iter(handle)
    assert next(output)[0] == "begun\n"
    listed = [process for process in sandbox.commands.list() if process.pid == handle.pid]
    assert len(listed) == 1
    assert listed[0].cmd == "/bin/bash"
    assert "read line" in listed[0].args[-1]
    handle.send_stdin("this\n")
    assert next(output)[0] == "got this\n"
    assert handle.wait().exit_code == 0
    assert handle.pid not in [process.pid for process in sandbox.commands.list()]


def test_a_background_command_is_killed_once(sandbox: Sandbox) -> None:
    handle = sandbox.commands.run("sleep 1000", background=True)
    assert handle.kill() is True
    with pytest.raises(CommandExitException):
        handle.wait()
    assert sandbox.commands.kill(handle.pid) is False
    sandbox.commands.run(f"! kill -0 {handle.pid} 2>/dev/null", user="root")


def test_standard_input_is_closed_on_request(sandbox: Sandbox) -> None:
    handle = sandbox.commands.run("sha256sum", background=True, stdin=True)
    handle.send_stdin("abc")
    handle.close_stdin()
    assert handle.wait().stdout.split()[0] == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_standard_input_is_empty_unless_asked_for(sandbox: Sandbox) -> None:
    assert sandbox.commands.run("cat; echo end").stdout == "end\n"


def test_output_is_delivered_as_it_comes(sandbox: Sandbox) -> None:
    """The command waits for a file that is written only when its first output has been seen."""
    sandbox.commands.run("rm -f /home/user/seen")
    pieces: list[str] = []

    def on_stdout(piece: str) -> None:
        pieces.append(piece)
        if piece == "first\n":
            sandbox.files.write("/home/user/seen", "yes")

    script = "echo first; while [ ! -e seen ]; do sleep 0.05; done; echo second"
    done = sandbox.commands.run(script, on_stdout=on_stdout, timeout=100)
    assert pieces == ["first\n", "second\n"]
    assert done.stdout == "first\nsecond\n"


def test_a_command_past_its_time_is_ended(sandbox: Sandbox) -> None:
    with pytest.raises(TimeoutException):
        sandbox.commands.run("sleep 998", timeout=2)
    script = "pgrep -f '[s]leep 998' >/dev/null || echo gone"
    wait_for("the end of the command", lambda: sandbox.commands.run(script).stdout == "gone\n", 30)


def test_a_client_that_disconnects_does_not_end_the_command(sandbox: Sandbox) -> None:
    handle = sandbox.commands.run("echo begun; read line; echo $line > /home/user/heard", background=True, stdin=True)
    assert next(iter(handle))[0] == "begun\n"
    handle.disconnect()
    again = sandbox.commands.connect(handle.pid)
    sandbox.commands.send_stdin(handle.pid, "still here\n")
    assert again.wait().exit_code == 0
    assert sandbox.files.read("/home/user/heard") == "still here\n"


def test_megabytes_of_output_arrive_whole(sandbox: Sandbox) -> None:
    done = sandbox.commands.run("head -c 3000000 /dev/zero | tr '\\0' x", timeout=100)
    assert done.stdout == "x" * 3_000_000


def test_output_that_is_not_text(sandbox: Sandbox) -> None:
    assert sandbox.commands.run("printf 'a\\xffb'; printf '\\xc3'; sleep 0.2; printf '\\xa4'").stdout == "a\ufffdbä"


def test_several_commands_at_once(sandbox: Sandbox) -> None:
    outputs: dict[int, str] = {}

    def one(number: int) -> None:
        outputs[number] = sandbox.commands.run(f"sleep 0.2; echo {number}").stdout

    threads = [threading.Thread(target=one, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outputs == {number: f"{number}\n" for number in range(6)}


# Files


def test_text_and_bytes_go_there_and_back(sandbox: Sandbox) -> None:
    written = sandbox.files.write("notes.txt", "grüße\n")
    assert (written.name, written.path, written.type) == ("notes.txt", "/home/user/notes.txt", FileType.FILE)
    assert sandbox.files.read("notes.txt") == "grüße\n"
    blob = bytes(range(256)) * 5000
    sandbox.files.write("/home/user/blob", blob)
    assert bytes(sandbox.files.read("/home/user/blob", format="bytes")) == blob
    assert b"".join(sandbox.files.read("/home/user/blob", format="stream")) == blob
    assert sandbox.commands.run("stat -c '%U %s' blob").stdout == f"user {len(blob)}\n"
    sandbox.files.write("empty", "")
    assert sandbox.files.read("empty") == ""


def test_both_forms_of_upload(sandbox: Sandbox) -> None:
    for number, octets in enumerate((False, True)):
        path = f"/home/user/deep/form-{number}/file"
        sandbox.files.write(path, "same", use_octet_stream=octets)
        assert sandbox.files.read(path) == "same"
    sandbox.files.write("streamed", io.BytesIO(b"from a reader" * 1000))
    assert sandbox.files.read("streamed") == "from a reader" * 1000
    sandbox.files.write("pieces", iter([b"one ", b"two ", b"three"]))
    assert sandbox.files.read("pieces") == "one two three"


def test_compressed_upload_and_download(sandbox: Sandbox) -> None:
    text = "the same line\n" * 10_000
    sandbox.files.write("squeezed", text, gzip=True)
    assert sandbox.commands.run("wc -c < squeezed").stdout.strip() == str(len(text))
    assert sandbox.files.read("squeezed", gzip=True) == text


def test_several_files_in_one_upload(sandbox: Sandbox) -> None:
    written = sandbox.files.write_files(
        [{"path": "/home/user/many/a", "data": "A"}, {"path": "/home/user/many/b", "data": b"B"}]
    )
    assert [info.path for info in written] == ["/home/user/many/a", "/home/user/many/b"]
    assert sandbox.files.read("/home/user/many/a") + sandbox.files.read("/home/user/many/b") == "AB"


def test_overwriting_shortens(sandbox: Sandbox) -> None:
    sandbox.files.write("short", "a long first version")
    sandbox.files.write("short", "short")
    assert sandbox.files.read("short") == "short"


def test_list_with_depth(sandbox: Sandbox) -> None:
    sandbox.commands.run("mkdir -p tree/sub/deeper && touch tree/file tree/sub/leaf && ln -s file tree/link")
    flat = {entry.name: entry for entry in sandbox.files.list("/home/user/tree")}
    assert set(flat) == {"file", "sub", "link"}
    assert flat["file"].type == FileType.FILE
    assert flat["sub"].type == FileType.DIR
    assert flat["file"].path == "/home/user/tree/file"
    assert flat["link"].symlink_target is not None
    deep = {entry.path for entry in sandbox.files.list("/home/user/tree", depth=2)}
    assert deep == {f"/home/user/tree/{name}" for name in ("file", "link", "sub", "sub/leaf", "sub/deeper")}
    with pytest.raises(FileNotFoundException):
        sandbox.files.list("/home/user/no-such-tree")


def test_entry_information(sandbox: Sandbox) -> None:
    sandbox.files.write("described", "12345")
    sandbox.commands.run("chmod 640 described")
    info = sandbox.files.get_info("described")
    assert (info.name, info.size, info.owner, info.group) == ("described", 5, "user", "user")
    assert info.mode & 0o777 == 0o640
    assert info.type == FileType.FILE


def test_exists_rename_remove(sandbox: Sandbox) -> None:
    sandbox.files.write("old-name", "content")
    assert sandbox.files.exists("old-name") is True
    moved = sandbox.files.rename("old-name", "new-name")
    assert moved.path == "/home/user/new-name"
    assert sandbox.files.exists("old-name") is False
    assert sandbox.files.read("new-name") == "content"
    sandbox.files.remove("new-name")
    assert sandbox.files.exists("new-name") is False
    with pytest.raises(FileNotFoundException):
        sandbox.files.rename("old-name", "anything")
    with pytest.raises(FileNotFoundException):
        sandbox.files.read("new-name")


def test_make_dir_says_whether_it_was_new(sandbox: Sandbox) -> None:
    assert sandbox.files.make_dir("fresh/inner") is True
    assert sandbox.files.make_dir("fresh/inner") is False
    sandbox.files.write("fresh/inner/file", "x")
    sandbox.files.remove("fresh")
    assert sandbox.files.exists("fresh") is False


def test_files_of_another_user(sandbox: Sandbox) -> None:
    sandbox.files.write("/root/secret", "root's", user="root")
    assert sandbox.files.read("/root/secret", user="root") == "root's"
    assert sandbox.commands.run("stat -c %U /root/secret", user="root").stdout == "root\n"


# Snapshots


def test_create_snapshot_and_create_from_it(world: World, sandbox: Sandbox) -> None:
    sandbox.files.write("marker", "before")
    info = sandbox.create_snapshot()
    world.keep_snapshot(info.snapshot_id)
    assert info.names == []
    sandbox.files.write("marker", "after")
    copy = world.e2b(info.snapshot_id)
    assert copy.sandbox_id != sandbox.sandbox_id
    assert copy.files.read("marker") == "before"
    assert sandbox.files.read("marker") == "after"
    copy.files.write("marker", "copy")
    assert sandbox.files.read("marker") == "after"


def test_a_running_command_goes_on_in_source_and_copy(world: World, sandbox: Sandbox) -> None:
    handle = sandbox.commands.run("echo begun; while [ ! -e end ]; do sleep 0.05; done; echo ended", background=True)
    assert next(iter(handle))[0] == "begun\n"
    copy = world.e2b(world.snapshot(sandbox))
    sandbox.files.write("end", "")
    assert handle.wait().stdout.endswith("ended\n")
    assert handle.pid in [process.pid for process in copy.commands.list()]
    again = copy.commands.connect(handle.pid)
    copy.files.write("end", "")
    assert again.wait().stdout == "ended\n"
    sandbox.files.remove("end")


def test_the_paginator_of_snapshots(world: World) -> None:
    made = world.e2b()
    ids = [world.snapshot(made, name) for name in ("paged:one", "paged:two", None)]
    paginator = made.list_snapshots(limit=1)
    walked = []
    while paginator.has_next:
        walked += paginator.next_items()
    assert [info.snapshot_id for info in walked] == ids[::-1]
    assert [info.names for info in walked] == [[], ["default/paged:two"], ["default/paged:one"]]
    everywhere = Sandbox.list_snapshots()
    found = []
    while everywhere.has_next:
        found += [info.snapshot_id for info in everywhere.next_items()]
    assert set(ids) <= set(found)
    by_short = Sandbox.list_snapshots(name="paged").next_items()
    assert [info.snapshot_id for info in by_short] == [ids[1], ids[0]]
    by_tag = Sandbox.list_snapshots(name="paged:two").next_items()
    assert [info.snapshot_id for info in by_tag] == [ids[1]]
    assert Sandbox.list_snapshots(name="no-such-name").next_items() == []


def test_delete_twice_says_true_then_false(world: World, sandbox: Sandbox) -> None:
    unnamed = sandbox.create_snapshot().snapshot_id
    assert Sandbox.delete_snapshot(unnamed) is True
    assert Sandbox.delete_snapshot(unnamed) is False
    named = sandbox.create_snapshot("deleted-by-name")
    assert Sandbox.delete_snapshot(named.names[0]) is True
    assert Sandbox.delete_snapshot(named.names[0]) is False
    assert Sandbox.delete_snapshot("default/never-was:default") is False


def test_creating_from_what_is_not_there(world: World) -> None:
    for reference in (str(uuid.uuid4()), "no-such-template", "default/no-such-snapshot"):
        with pytest.raises(SandboxException) as refused:
            Sandbox.create(reference)
        assert refused.value.status_code == 404
        assert reference in str(refused.value)


# Access


def test_the_agent_wants_the_sandbox_s_own_token(world: World, sandbox: Sandbox) -> None:
    import requests

    other = world.e2b()
    head = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "49983"}
    url = f"{world.server.url}/files"
    query = {"path": "/etc/hostname", "username": "user"}
    wrong: list[dict[str, str]] = [{}, {"X-Access-Token": "wrong"}, {"X-Access-Token": str(other._envd_access_token)}]
    for token in wrong:
        headers = head | token
        assert requests.get(url, params=query, headers=headers, timeout=60).status_code == 401
    right = head | {"X-Access-Token": str(sandbox._envd_access_token)}
    assert requests.get(url, params=query, headers=right, timeout=60).status_code == 200
    assert requests.get(f"{world.server.url}/health", headers=head, timeout=60).status_code == 204
