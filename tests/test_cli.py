"""The operator's command line: for people, for programs, and when something is wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.planted import run
from harness.rest import call
from harness.server import Server, binary, wait_for
from harness.world import World

NOT_FOUND, CONFLICT, UNREACHABLE, OWN_FAILURE = 3, 4, 5, 125


@pytest.fixture
def sandbox_id(world: World, server: Server) -> str:
    done = server.run_cli("sandbox", "create", "base", "--timeout", "30m", "-m", "made-by=cli", "-e", "COLOUR=red")
    assert done.returncode == 0, done.stderr
    identity = done.stdout.strip()
    assert re.fullmatch(r"[a-z0-9]+", identity)
    world.keep_id(identity)
    return identity


def test_a_sandbox_from_create_to_kill(server: Server, sandbox_id: str) -> None:
    (listed,) = [item for item in server.cli("sandbox", "ls") if item["sandbox_id"] == sandbox_id]
    assert listed["state"] == "running"
    assert listed["metadata"] == {"made-by": "cli"}
    assert listed["alias"] == "base"
    table = server.run_cli("sandbox", "ls").stdout
    assert re.search(rf"{sandbox_id}\s+running\s+base", table)
    assert server.run_cli("sandbox", "ls", "-q", "-m", "made-by=cli").stdout == f"{sandbox_id}\n"
    done = server.run_cli("sandbox", "kill", sandbox_id)
    assert (done.returncode, done.stdout) == (0, f"killed {sandbox_id}\n")
    done = server.run_cli("sandbox", "kill", sandbox_id)
    assert done.returncode == NOT_FOUND
    assert sandbox_id in done.stderr


def test_exec_passes_outputs_and_exit_code_through(server: Server, sandbox_id: str) -> None:
    done = server.run_cli("sandbox", "exec", sandbox_id, "echo $COLOUR; echo err >&2; id -un; exit 5")
    assert (done.returncode, done.stdout, done.stderr) == (5, "red\nuser\n", "err\n")
    done = server.run_cli("sandbox", "exec", "-u", "root", "-C", "/usr", "-e", "A=b", sandbox_id, "--", "env")
    assert done.returncode == 0
    assert {"A=b", "PWD=/usr"} <= set(done.stdout.splitlines())
    done = server.run_cli("sandbox", "exec", sandbox_id, "kill -TERM $$")
    assert done.returncode == 128 + 15
    done = server.run_cli("sandbox", "exec", "nosuchsandbox", "true")
    assert done.returncode == OWN_FAILURE
    assert "nosuchsandbox" in done.stderr


def test_exec_with_standard_input(server: Server, sandbox_id: str) -> None:
    command = [str(binary()), "--data-dir", str(server.data_dir), "sandbox", "exec", "-i", sandbox_id, "wc -c"]
    data = b"x" * 200_000
    done = subprocess.run(command, input=data, capture_output=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, b"200000")


def test_a_snapshot_from_create_to_rm(world: World, server: Server, sandbox_id: str) -> None:
    assert server.run_cli("sandbox", "exec", sandbox_id, "echo 1 > state").returncode == 0
    name = f"cli-{uuid.uuid4().hex[:6]}"
    snapshot = world.keep_snapshot(server.cli("snapshot", "create", sandbox_id, "--name", name)["snapshotID"])
    info = server.cli("snapshot", "info", snapshot)
    assert info["snapshot_id"] == snapshot
    assert info["names"] == [f"default/{name}:default"]
    assert info["sandbox_id"] == sandbox_id
    assert info["remote_status"] in ("pending", "inprogress", "ready")
    assert info["pause_us"] > 0
    assert info["logical_bytes"] == info["memory_bytes"] + info["disk_bytes"]
    assert server.cli("snapshot", "info", f"default/{name}")["snapshot_id"] == snapshot
    listed = server.cli("snapshot", "ls", "--sandbox", sandbox_id)
    assert [item["snapshot_id"] for item in listed] == [snapshot]
    assert f"default/{name}:default" in server.run_cli("snapshot", "ls").stdout
    assert server.run_cli("snapshot", "info", snapshot).stdout.splitlines()[0].split() == ["snapshot", snapshot]

    assert server.run_cli("sandbox", "exec", sandbox_id, "echo 2 > state").returncode == 0
    assert server.run_cli("rollback", sandbox_id, f"default/{name}").returncode == 0
    assert server.run_cli("sandbox", "exec", sandbox_id, "cat state").stdout == "1\n"

    done = server.run_cli("snapshot", "rm", snapshot)
    assert done.returncode == CONFLICT, "it is in use since the rollback"
    assert server.run_cli("sandbox", "kill", sandbox_id).returncode == 0
    assert server.run_cli("snapshot", "rm", f"default/{name}").returncode == 0
    done = server.run_cli("snapshot", "rm", snapshot)
    assert done.returncode == NOT_FOUND
    assert snapshot in done.stderr


def test_pause_resume_and_fork(world: World, server: Server, sandbox_id: str) -> None:
    assert server.run_cli("sandbox", "exec", sandbox_id, "echo kept > state").returncode == 0
    done = server.run_cli("sandbox", "pause", sandbox_id)
    assert (done.returncode, done.stdout) == (0, f"paused {sandbox_id}\n")
    assert server.run_cli("sandbox", "pause", sandbox_id).returncode == CONFLICT
    assert re.search(rf"{sandbox_id}\s+paused", server.run_cli("sandbox", "ls").stdout)
    assert server.run_cli("sandbox", "resume", sandbox_id, "--timeout", "20m").returncode == 0
    forks = server.run_cli("sandbox", "fork", sandbox_id, "-n", "2").stdout.split()
    assert len(forks) == 2
    for identity in (sandbox_id, *map(world.keep_id, forks)):
        assert server.run_cli("sandbox", "exec", identity, "cat state").stdout == "kept\n"
    assert server.run_cli("sandbox", "fork", "nosuchsandbox").returncode == NOT_FOUND


@pytest.mark.parametrize("operation", ["create", "snapshot", "clone", "rollback", "pause"])
def test_bench_measures_and_leaves_nothing(server: Server, operation: str) -> None:
    arguments = ("bench", operation, "-n", "3", "-c", "2", "--dirty-mib", "2")
    measured = server.cli(*arguments)
    assert (measured["operation"], measured["count"], measured["errors"]) == (operation, 3, 0)
    series = measured["series"][0]
    assert (series["name"], series["count"]) == (operation, 3)
    assert 0 < series["p50_ms"] <= series["max_ms"]
    assert series["p99_ms"] is None, "of three samples there is none"
    assert sum(bar["count"] for bar in series["histogram"]) == 3


def test_bench_says_what_is_wrong(server: Server) -> None:
    done = server.run_cli("bench", "create", "--from", "nosuch", "-n", "2")
    assert done.returncode == 1
    assert "nosuch" in done.stderr
    assert "2 operations, 2 failed" in done.stdout
    done = server.run_cli("bench", "snapshot", "--from", "nosuch")
    assert done.returncode == NOT_FOUND
    assert "nothing was measured" in done.stderr


def test_a_sandbox_from_a_snapshot(world: World, server: Server) -> None:
    source = world.cube()
    run(source, "echo here > /root/marker")
    snapshot = world.snapshot(source)
    created = server.cli("sandbox", "create", snapshot)
    identity = world.keep_id(created["sandboxID"])
    assert created["timing_ms"]["running"] > 0
    assert server.run_cli("sandbox", "exec", "-u", "root", identity, "cat /root/marker").stdout == "here\n"
    refused = server.run_cli("sandbox", "create", snapshot, "-e", "A=1")
    assert refused.returncode == 1
    assert "envVars" in refused.stderr


def test_templates_are_listed(server: Server) -> None:
    (base,) = [item for item in server.cli("template", "ls") if item["alias"] == "base"]
    assert base["build_status"] == "ready"
    assert re.fullmatch(r"tpl-[0-9a-f]+", base["template_id"])
    assert re.search(r"tpl-[0-9a-f]+\s+base\s+ready", server.run_cli("template", "ls").stdout)


def test_a_template_that_is_ready_is_not_built_again(server: Server) -> None:
    before = server.cli("template", "ls")
    built = server.cli("template", "build", "base")
    assert built["template_id"] in [item["template_id"] for item in before]
    assert server.cli("template", "ls") == before


def test_templates_over_rest(server: Server) -> None:
    (base,) = [item for item in call(server, "GET", "/templates").json() if "base" in item["aliases"]]
    identity = base["templateID"]
    assert call(server, "GET", f"/templates/{identity}").json()["templateID"] == identity
    assert call(server, "GET", "/templates/aliases/base").json()["templateID"] == identity
    call(server, "GET", "/templates/aliases/no-such").assert_error(404)
    assert call(server, "GET", "/v2/templates").status == 200
    created = call(server, "POST", "/sandboxes", {"templateID": identity})
    assert created.status == 201
    assert call(server, "DELETE", f"/sandboxes/{created.json()['sandboxID']}").status == 204


def test_statistics_for_people_and_programs(world: World, server: Server) -> None:
    sandbox = world.cube()
    stats = server.stats()
    assert sandbox.sandbox_id in [vm["sandbox_id"] for vm in stats["vms"]]
    assert stats["accelerator"] in ("tcg", "kvm")
    assert stats["images"]
    assert stats["store"]["chunks"] > 0
    assert "object store" in server.run_cli("store", "stats").stdout


def test_the_accounts_of_occupancy_and_reservations_are_published(world: World, server: Server) -> None:
    """Without these figures the check after each test could not see a row that was left."""
    before = server.stats()
    sandbox = world.cube()
    assert server.stats()["occupancy_rows"] == before["occupancy_rows"] + 1
    # A reservation outlives its create until the node's reports name the sandbox.
    wait_for("the release of the reservation", lambda: server.stats()["reservations"] == 0)
    sandbox.kill()
    assert server.stats()["occupancy_rows"] == before["occupancy_rows"]


def test_failures_are_json_for_programs(server: Server) -> None:
    done = server.run_cli("--json", "snapshot", "info", "default/no-such")
    assert done.returncode == NOT_FOUND
    failure = json.loads(done.stderr)["error"]
    assert failure["kind"] == "not_found"
    assert failure["message"]


def test_without_a_server_the_error_says_what_to_do(tmp_path: Path) -> None:
    command = [str(binary()), "--data-dir", str(tmp_path), "--url", "http://127.0.0.1:9", "sandbox", "create"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == UNREACHABLE
    assert "snapyard up" in done.stderr
    command = [str(binary()), "--data-dir", str(tmp_path), "store", "stats"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == UNREACHABLE
    assert "snapyard up" in done.stderr


def test_a_wrong_command_line_is_2() -> None:
    for arguments in (["sandbox", "fly"], ["up", "--listen", "0.0.0.0:3000"], ["sandbox", "create", "--timeout", "1x"]):
        done = subprocess.run([str(binary()), *arguments], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        assert done.stderr


def test_a_second_server_on_the_same_data_is_refused(server: Server) -> None:
    command = [str(binary()), "up", "--data-dir", str(server.data_dir), "--listen", "127.0.0.1:0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == CONFLICT
    assert str(server.data_dir) in done.stderr


def test_an_address_in_use_is_refused(new_server: Callable[..., Server], server: Server) -> None:
    other = new_server()
    command = [str(binary()), "up", "--data-dir", str(other.data_dir), "--listen", f"127.0.0.1:{server.port}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == CONFLICT
    assert str(server.port) in done.stderr


def test_the_variables_that_up_prints_are_enough_for_every_sdk(server: Server) -> None:
    printed = dict(re.findall(r"^export (\w+)=(\S+)$", server.log.read_text(), re.MULTILINE))
    assert printed["E2B_API_URL"] == server.url
    script = (
        "import cubesandbox, e2b, e2b_code_interpreter\n"
        "with cubesandbox.Sandbox.create() as one: print(one.commands.run('echo cube').stdout, end='')\n"
        "two = e2b.Sandbox.create(); print(two.commands.run('echo e2b').stdout, end=''); two.kill()\n"
        "three = e2b_code_interpreter.Sandbox.create('base'); print(three.run_code('6*7').text); three.kill()\n"
    )
    env = {"PATH": "/usr/bin:/bin", **printed}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (0, "cube\ne2b\n42\n"), done.stderr
