"""One Python context: runs cells in an IPython shell and reports what they do.

Descriptors: 3 requests, one JSON object a line; 4 replies, one line each, the first byte says what it is:

    R           the kernel is ready
    E{json}     an event for the client, passed on as it is
    D           the request is done

Standard output and error are the process's own 1 and 2, so that what a cell's subprocesses print comes out as well; they
are flushed before each reply, so the agent finds in the pipes everything that was printed before it.

Requests: {"code", "env", "defaults", "generation"} or {"warm": true}. A generation that is new says that this process
may be a copy of another: seed every generator anew before the user's code goes on. A signal says the same to a kernel
that is in the middle of a cell.
"""

import base64
import gc
import json
import os
import random
import signal
import sys

from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from traitlets import Type
from traitlets.config import Config

REQUESTS, REPLIES = 3, 4
FIELDS = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "text/latex": "latex",
    "application/json": "json",
    "application/javascript": "javascript",
}


def flush():
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        try:
            stream.flush()
        except Exception:  # A cell may have replaced or closed it.
            pass


def reply(line):
    flush()
    data = line.encode() + b"\n"
    while data:
        data = data[os.write(REPLIES, data) :]


def event(kind, **fields):
    reply("E" + json.dumps({"type": kind, **fields}, default=repr))


def result(bundle, is_main):
    fields = {"is_main_result": is_main}
    extra = {}
    for mime, value in bundle.items():
        if isinstance(value, bytes):
            value = base64.b64encode(value).decode()
        if isinstance(value, str) and mime in ("image/png", "image/jpeg"):
            value = value.replace("\n", "")
        if mime in FIELDS:
            fields[FIELDS[mime]] = value
        else:
            extra[mime] = value
    text = fields.get("text")
    # As the reference server does: a string's result is shown without its quotes.
    if text and len(text) > 1 and text.startswith("'") and text.endswith("'"):
        fields["text"] = text[1:-1]
    if extra:
        fields["extra"] = extra
    event("result", **fields)


class ResultHook(DisplayHook):
    def write_output_prompt(self):
        pass

    def write_format_data(self, format_dict, md_dict=None):
        result(format_dict, True)

    def log_output(self, format_dict):
        pass


class ResultPublisher(DisplayPublisher):
    def publish(self, data, metadata=None, source=None, **kwargs):
        result(data, False)

    def clear_output(self, wait=False):
        pass


class Shell(InteractiveShell):
    displayhook_class = Type(ResultHook)
    display_pub_class = Type(ResultPublisher)
    # Subprocesses write to our descriptors directly: their output comes when they print it.
    system = InteractiveShell.system_raw
    traceback_text = ""

    def _showtraceback(self, etype, evalue, stb):
        self.traceback_text = "\n".join(stb)

    def ask_exit(self):
        """`exit` ends a session at a terminal; here it ends nothing."""

    def enable_gui(self, gui=None):
        pass


def reseed(*_):
    """Gives every generator that this process may have used fresh bytes of the kernel's."""
    random.seed(os.urandom(32))
    tempfile = sys.modules.get("tempfile")
    if tempfile is not None:
        tempfile._name_sequence = None
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        numpy.random.seed(int.from_bytes(os.urandom(4), "little"))
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "seed"):
        torch.seed()


def make_shell():
    config = Config()
    # Its thread and its file would be in every snapshot.
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "NoColor"
    config.InteractiveShell.xmode = "Context"
    return Shell.instance(config=config)


def run(shell, code):
    event("number_of_executions", execution_count=shell.execution_count)
    shell.traceback_text = ""
    outcome = shell.run_cell(code, store_history=True)
    error = outcome.error_before_exec or outcome.error_in_exec
    if error is not None:
        event("error", name=type(error).__name__, value=str(error), traceback=shell.traceback_text)


def with_environment(env, work):
    before = {name: os.environ.get(name) for name in env}
    os.environ.update(env)
    try:
        work()
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def warm(shell):
    """Walks the paths of a first cell once, for the template's snapshot, and leaves no trace of it."""
    for code in ("import random\nrandom.random()\nstr(1 + 1)", "print('warm')", "1/0"):
        run(shell, code)
    shell.reset(new_session=True)
    shell.execution_count = 1
    # The collector writes into the head of every object that it visits: what is alive now is not visited again, so its
    # pages stay shared between the copies of this process.
    gc.collect()
    gc.freeze()


def serve(shell, requests, generation):
    home = os.getpid()
    while True:
        try:
            line = requests.readline()
            if not line:
                return
            request = json.loads(line)
            if request.get("warm"):
                warm(shell)
            else:
                if request["generation"] != generation:
                    generation = request["generation"]
                    reseed()
                if request.get("defaults"):
                    os.environ.update(request["defaults"])
                with_environment(request.get("env") or {}, lambda: run(shell, request["code"]))
        except KeyboardInterrupt:
            pass
        except BaseException as error:  # The shell reports a cell's errors itself: this one is ours.
            event("error", name=type(error).__name__, value=str(error), traceback="")
        if os.getpid() != home:
            # The cell forked, and this is its child, which must not answer.
            flush()
            os._exit(0)
        reply("D")


def main():
    for descriptor in (REQUESTS, REPLIES):
        os.set_inheritable(descriptor, False)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    generation = int(sys.argv[1])
    sys.argv[:] = [""]
    sys.path[0] = ""
    signal.signal(signal.SIGRTMIN + 5, reseed)
    shell = make_shell()
    reply("R")
    serve(shell, os.fdopen(REQUESTS, "rb"), generation)


if __name__ == "__main__":
    main()
