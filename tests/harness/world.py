"""What a test makes on a server, and gives back when it is done: sandboxes first, then snapshots.

A test that makes things past these calls must take them away itself; the accounts are checked after each test.
"""

from __future__ import annotations

from typing import Any

import cubesandbox
import e2b as e2b_sdk
from e2b_code_interpreter import Sandbox as Interpreter

from harness.rest import call
from harness.server import Server

#: Long enough for any test; a sandbox that outlives its test is found by the accounts, not by its timeout.
TIMEOUT_S = 1800


class World:
    """Sandboxes and snapshots on one server that end with this object."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._sandboxes: list[str] = []
        self._snapshots: list[str] = []

    def cube(self, template: str = "base", **options: Any) -> cubesandbox.Sandbox:
        """A sandbox by `cubesandbox`."""
        options.setdefault("timeout", TIMEOUT_S)
        sandbox = cubesandbox.Sandbox.create(template, config=self.server.cube(), **options)
        return self.keep(sandbox)

    def e2b(self, template: str = "base", **options: Any) -> e2b_sdk.Sandbox:
        """A sandbox by `e2b`."""
        options.setdefault("timeout", TIMEOUT_S)
        return self.keep(e2b_sdk.Sandbox.create(template, **options, **self.server.e2b()))

    def interpreter(self, template: str = "base", **options: Any) -> Interpreter:
        """A sandbox by `e2b-code-interpreter`."""
        options.setdefault("timeout", TIMEOUT_S)
        return self.keep(Interpreter.create(template, **options, **self.server.e2b()))

    def snapshot(self, sandbox: cubesandbox.Sandbox | e2b_sdk.Sandbox, name: str | None = None) -> str:
        """A snapshot; its id."""
        info = sandbox.create_snapshot(name)
        self._snapshots.append(info.snapshot_id)
        return info.snapshot_id

    def keep(self, sandbox: Any) -> Any:
        """Takes over a sandbox that was made otherwise; answers it."""
        self._sandboxes.append(sandbox.sandbox_id)
        return sandbox

    def keep_id(self, sandbox_id: str) -> str:
        """The same for one of which only the id is known."""
        self._sandboxes.append(sandbox_id)
        return sandbox_id

    def keep_snapshot(self, snapshot_id: str) -> str:
        """Takes over a snapshot that was made otherwise; answers its id."""
        self._snapshots.append(snapshot_id)
        return snapshot_id

    def close(self) -> None:
        """Kills and deletes. What is gone already is fine; anything else but success is not."""
        wrong: list[str] = []
        while self._sandboxes:
            sandbox_id = self._sandboxes.pop()
            answer = call(self.server, "DELETE", f"/sandboxes/{sandbox_id}")
            if answer.status not in (204, 404):
                wrong.append(f"sandbox {sandbox_id}: {answer.status} {answer.body!r}")
        while self._snapshots:
            snapshot_id = self._snapshots.pop()
            answer = call(self.server, "DELETE", f"/templates/{snapshot_id}")
            if answer.status not in (204, 404):
                wrong.append(f"snapshot {snapshot_id}: {answer.status} {answer.body!r}")
        assert not wrong, wrong
