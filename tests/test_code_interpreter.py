"""The interpreter, by the unmodified `e2b-code-interpreter` SDK."""

from __future__ import annotations

import json
import re

import pytest
from e2b import NotFoundException, SandboxException, TimeoutException
from e2b_code_interpreter import Sandbox

from harness.world import World


@pytest.fixture(scope="module")
def sandbox(shared: World) -> Sandbox:
    return shared.interpreter()


def test_the_last_expression_is_the_result(sandbox: Sandbox) -> None:
    done = sandbox.run_code("x = 20\nx + 1")
    assert done.error is None
    assert done.text == "21"
    assert [result.is_main_result for result in done.results] == [True]
    assert sandbox.run_code("x = 1").results == []


def test_state_lives_across_calls_and_the_count_goes_up(sandbox: Sandbox) -> None:
    first = sandbox.run_code("def double(n):\n    return 2 * n\nkept = double(4)")
    second = sandbox.run_code("double(kept)")
    assert second.text == "16"
    assert first.execution_count is not None
    assert second.execution_count == first.execution_count + 1


def test_both_outputs_come_as_they_are_written(sandbox: Sandbox) -> None:
    """The cell waits for a file that is written only when its first output has been seen."""
    sandbox.commands.run("rm -f /tmp/seen")
    heard: list[tuple[str, bool]] = []

    def on_stdout(message) -> None:  # noqa: ANN001
        heard.append((message.line, message.error))
        if "first" in message.line:
            sandbox.files.write("/tmp/seen", "yes")

    def on_stderr(message) -> None:  # noqa: ANN001
        heard.append((message.line, message.error))

    done = sandbox.run_code(
        "import os, sys, time\n"
        "print('first', flush=True)\n"
        "while not os.path.exists('/tmp/seen'): time.sleep(0.05)\n"
        "print('trouble', file=sys.stderr)\n"
        "print('last')",
        on_stdout=on_stdout,
        on_stderr=on_stderr,
    )
    assert "".join(done.logs.stdout) == "first\nlast\n"
    assert "".join(done.logs.stderr) == "trouble\n"
    assert heard[0] == ("first\n", False)
    assert ("trouble\n", True) in heard


def test_output_of_subprocesses_is_heard(sandbox: Sandbox) -> None:
    done = sandbox.run_code("import subprocess\nsubprocess.run(['sh', '-c', 'echo from-child'], check=True).returncode")
    assert done.text == "0"
    assert "".join(done.logs.stdout) == "from-child\n"
    assert "from-shell" in "".join(sandbox.run_code("!echo from-shell").logs.stdout)


def test_an_exception_comes_with_name_value_and_traceback(sandbox: Sandbox) -> None:
    done = sandbox.run_code("before = 1\nraise KeyError('lost')")
    assert done.error is not None
    assert done.error.name == "KeyError"
    assert done.error.value == "'lost'"
    assert "raise KeyError" in re.sub(r"\x1b\[[0-9;]*m", "", done.error.traceback)
    assert done.text is None
    assert sandbox.run_code("before").text == "1"


def test_a_cell_that_does_not_parse(sandbox: Sandbox) -> None:
    done = sandbox.run_code("def broken(:")
    assert done.error is not None
    assert done.error.name == "SyntaxError"


def test_exit_does_not_end_the_interpreter_s_state(sandbox: Sandbox) -> None:
    sandbox.run_code("survivor = 5")
    sandbox.run_code("raise SystemExit(3)")
    assert sandbox.run_code("survivor").text == "5"


def test_rich_results(sandbox: Sandbox) -> None:
    done = sandbox.run_code(
        "class Rich:\n"
        "    def _repr_html_(self): return '<b>bold</b>'\n"
        "    def _repr_markdown_(self): return '**bold**'\n"
        "    def _repr_svg_(self): return '<svg/>'\n"
        "    def _repr_latex_(self): return '$x$'\n"
        "    def _repr_json_(self): return {'x': [1, 2]}\n"
        "    def _repr_png_(self): return b'\\x89PNG\\r\\n\\x1a\\n'\n"
        "    def __repr__(self): return 'plain'\n"
        "Rich()"
    )
    (result,) = done.results
    assert result.is_main_result
    assert result.text == "plain"
    assert result.html == "<b>bold</b>"
    assert result.markdown == "**bold**"
    assert result.svg == "<svg/>"
    assert result.latex == "$x$"
    assert result.json == {"x": [1, 2]}
    assert result.png is not None
    assert result.png.startswith("iVBORw0KGgo")


def test_display_gives_results_beside_the_main_one(sandbox: Sandbox) -> None:
    seen: list[str | None] = []
    done = sandbox.run_code(
        "from IPython.display import HTML, display\ndisplay(HTML('<i>1</i>'))\ndisplay('two')\n'main'",
        on_result=lambda result: seen.append(result.text),
    )
    assert [result.is_main_result for result in done.results] == [False, False, True]
    assert done.results[0].html == "<i>1</i>"
    assert done.results[1].text == "two"
    assert done.text == "main"
    assert len(seen) == 3


def test_environment_of_one_call(sandbox: Sandbox) -> None:
    code = "import os\nos.environ.get('ONCE')"
    assert sandbox.run_code(code, envs={"ONCE": "now"}).text == "now"
    assert sandbox.run_code(code).text is None


def test_contexts_are_apart_and_have_their_directory(sandbox: Sandbox) -> None:
    sandbox.run_code("here = 'default'")
    context = sandbox.create_code_context(cwd="/usr")
    assert context.language == "python"
    assert context.cwd == "/usr"
    assert context.id in [listed.id for listed in sandbox.list_code_contexts()]
    assert sandbox.run_code("import os\nos.getcwd()", context=context).text == "/usr"
    lost = sandbox.run_code("here", context=context)
    assert lost.error is not None
    assert lost.error.name == "NameError"
    sandbox.run_code("here = 'other'", context=context)
    assert sandbox.run_code("here").text == "default"
    sandbox.restart_code_context(context)
    assert sandbox.run_code("'here' in globals()", context=context).text == "False"
    sandbox.remove_code_context(context)
    assert context.id not in [listed.id for listed in sandbox.list_code_contexts()]
    with pytest.raises(NotFoundException):
        sandbox.run_code("1", context=context)
    with pytest.raises(NotFoundException):
        sandbox.remove_code_context(context)


def test_a_language_that_is_not_there_is_a_clear_error(sandbox: Sandbox) -> None:
    try:
        message = str(sandbox.run_code("1", language="cobol").error)
    except SandboxException as error:
        message = str(error)
    assert "cobol" in message.lower()
    assert sandbox.run_code("1", language="python").text == "1"


def test_a_client_that_gives_up_does_not_end_the_cell(sandbox: Sandbox) -> None:
    with pytest.raises(TimeoutException):
        sandbox.run_code("import time\ntime.sleep(4)\nfinished = True", timeout=1)
    assert sandbox.run_code("finished").text == "True"


def test_a_long_output_arrives_whole(sandbox: Sandbox) -> None:
    done = sandbox.run_code("for n in range(20000): print(n)")
    assert "".join(done.logs.stdout) == "".join(f"{n}\n" for n in range(20000))
    assert sandbox.run_code("'y' * 1_000_000").text == "y" * 1_000_000


def test_text_beyond_ascii(sandbox: Sandbox) -> None:
    done = sandbox.run_code("print('ü \\u2028 \\U0001f600')\n'ü \\U0001f600'")
    assert "".join(done.logs.stdout) == "ü \u2028 \U0001f600\n"
    assert done.text == "ü \U0001f600"


def test_variables_survive_snapshot_and_copy(world: World, sandbox: Sandbox) -> None:
    sandbox.run_code("import json\ntable = {'rows': list(range(1000))}\nhandle = open('/etc/hostname')")
    copy = world.interpreter(world.snapshot(sandbox))
    assert json.loads("".join(copy.run_code("print(json.dumps(table))").logs.stdout)) == {"rows": list(range(1000))}
    assert copy.run_code("handle.closed").text == "False"
    copy.run_code("table = None")
    assert sandbox.run_code("len(table['rows'])").text == "1000"


def test_a_cell_that_runs_during_the_snapshot_goes_on_in_both(world: World, sandbox: Sandbox) -> None:
    import threading

    sandbox.commands.run("rm -f /tmp/go /tmp/begun")
    code = (
        "import os, time\nopen('/tmp/begun', 'w').close()\n"
        "while not os.path.exists('/tmp/go'): time.sleep(0.05)\nresult = 'done'\nresult"
    )
    answers: list[str | None] = []
    cell = threading.Thread(target=lambda: answers.append(sandbox.run_code(code).text))
    cell.start()
    sandbox.commands.run("while [ ! -e /tmp/begun ]; do sleep 0.05; done")
    copy = world.interpreter(world.snapshot(sandbox))
    sandbox.files.write("/tmp/go", "")
    cell.join(60)
    assert answers == ["done"]
    copy.files.write("/tmp/go", "")
    assert copy.run_code("result").text == "done"
