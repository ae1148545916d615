"""State that is planted in a guest, and found again in what comes of it: after a snapshot, in a clone, after a
rollback.

Four kinds, each of which a cheaper design could lose: a file; a variable of the interpreter; a running process, known
by a token that is nowhere but in its memory; a file that is open but has no name any more.
"""

from __future__ import annotations

import ast
import secrets
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cubesandbox import Sandbox

GUEST_SCRIPTS = Path(__file__).parent.parent / "guest"
MARKER = "/root/marker"
COUNTER = "/root/counter"


def upload(sandbox: Sandbox, *names: str) -> None:
    """Puts scripts of `tests/guest` into the guest's `/root`."""
    for name in names:
        sandbox.files.write(f"/root/{name}", (GUEST_SCRIPTS / name).read_text())


def run(sandbox: Sandbox, command: str, **options: Any) -> str:
    """A command that must succeed; what it printed, without the last line end."""
    done = sandbox.commands.run(command, timeout=120, **options)
    assert done.exit_code == 0, f"{command!r}: exit code {done.exit_code}\n{done.stdout}{done.stderr}"
    return done.stdout.rstrip("\n")


def start(sandbox: Sandbox, command: str) -> int:
    """Starts a command that goes on in the background, tied to nothing; its pid."""
    return int(run(sandbox, f"setsid {command} </dev/null >/dev/null 2>&1 & echo $!"))


def evaluate(sandbox: Sandbox, code: str) -> object:
    """The value of the last expression of a cell, which must be a Python literal."""
    done = sandbox.run_code(code)
    assert done.error is None, done.error
    assert done.text is not None, done
    try:
        return ast.literal_eval(done.text)
    except (ValueError, SyntaxError):
        return done.text  # a string is shown without its quotes


@dataclass(frozen=True)
class Count:
    """One reading of the counter."""

    token: str
    pid: int
    count: int


def counter(sandbox: Sandbox) -> Count:
    """Reads the counter, after it has been seen to go on."""
    text = run(
        sandbox,
        f"old=$(cat {COUNTER}); for i in $(seq 600); do new=$(cat {COUNTER});"
        f' [ "$new" != "$old" ] && echo "$new" && exit 0; sleep 0.05; done; echo "stands still: $old" >&2; exit 1',
    )
    token, pid, count = text.split()
    return Count(token, int(pid), int(count))


@dataclass(frozen=True)
class Planted:
    """What was planted, so that it can be recognised."""

    secret: str
    first: Count

    @classmethod
    def plant(cls, sandbox: Sandbox) -> Planted:
        secret = secrets.token_hex(8)
        upload(sandbox, "counter.py")
        sandbox.files.write(MARKER, secret)
        start(sandbox, f"python3 /root/counter.py {COUNTER}")
        run(sandbox, f"for i in $(seq 600); do [ -e {COUNTER} ] && exit 0; sleep 0.05; done; exit 1")
        evaluate(
            sandbox,
            "import os\n"
            f"planted = {secret!r}\n"
            "unnamed = open('/tmp/unnamed', 'w+')\n"
            "unnamed.write('open ' + planted)\n"
            "unnamed.flush()\n"
            "os.unlink('/tmp/unnamed')\n"
            "1",
        )
        return cls(secret, counter(sandbox))

    def find(self, sandbox: Sandbox) -> Count:
        """All of it, or a failed assertion that names the kind that is lost."""
        assert sandbox.files.read(MARKER) == self.secret, "the marker file"
        state = evaluate(sandbox, "unnamed.seek(0)\n(planted, unnamed.read(), os.fstat(unnamed.fileno()).st_nlink)")
        assert state == (self.secret, f"open {self.secret}", 0), "the variable, and the open file without a name"
        now = counter(sandbox)
        assert (now.token, now.pid) == (self.first.token, self.first.pid), "the background process"
        assert now.count > self.first.count, "the background process's counter"
        return now


def write_text(sandbox: Sandbox, path: str, text: str) -> None:
    """Writes from inside the guest, by the shell."""
    run(sandbox, f"printf %s {shlex.quote(text)} > {shlex.quote(path)}")
