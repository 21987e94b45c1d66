"""The `te-jax` command itself: its subcommands, its manners, its exit status."""

import os
import subprocess
import sys

import pytest

import te_jax
from te_jax.cli import main, train
from te_jax.cli.errors import UserError

COMMANDS = ("train", "plot", "generate", "export", "doctor", "bench")


def test_help_names_every_command_and_starts_no_backend():
    program = (
        "import sys\n"
        "from te_jax.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as exit: assert exit.code == 0\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized()\n"
        "assert not {'optax', 'orbax', 'matplotlib'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    for name in COMMANDS:
        assert f"\n    {name} " in done.stdout


def test_version(capsys):
    with pytest.raises(SystemExit) as exit_:
        main.main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"te_jax {te_jax.__version__}\n"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "COMMAND"),
        (["fly"], "fly is unknown: choose one of train, plot, "),
        (["trian"], "trian is unknown (did you mean train?): choose one of train, plot, "),
        (["train", "--preset", "tny"], "--preset tny is unknown (did you mean tiny?): choose one of nano, "),
        (["train", "--receipe", "block"], "--receipe is unknown (did you mean --recipe?); see `te-jax train --help`"),
        (["plot", "here", "there"], "there is unknown; see `te-jax plot --help`"),
        (["train", "--steps", "many"], "--steps"),
        (["train", "--step", "1"], "--step"),  # an abbreviation
        (["train", "--dtype", "int8"], "--dtype int8 is unknown: choose one of auto, float32, bfloat16"),
    ],
)
def test_a_mistake_is_one_sentence_and_status_2(argv, words, capsys):
    assert main.main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("te-jax: error: ")
    assert captured.err.count("\n") == 1
    assert words in captured.err


@pytest.mark.parametrize(
    ("error", "status", "shown"),
    [
        (UserError("the moon is missing"), 2, "te-jax: error: the moon is missing\n"),
        (KeyboardInterrupt(), 130, "te-jax: interrupted\n"),
        (ZeroDivisionError(), None, None),
    ],
)
def test_what_a_command_raises_is_one_sentence_unless_it_is_a_fault_of_ours(error, status, shown, monkeypatch, capsys):
    def run(args):
        raise error

    monkeypatch.setattr(train, "run", run)
    if status is None:
        with pytest.raises(type(error)):
            main.main(["train"])
        return
    assert main.main(["train"]) == status
    assert capsys.readouterr().err == shown


_PRINTS = (
    "import sys\n"
    "from te_jax.cli import doctor, main\n"
    "doctor.run = lambda args: print('6.1 → 3.2') or 0\n"
    "sys.exit(main.main(['doctor']))\n"
)


def printed(stdout=subprocess.PIPE, **environment):
    command, environment = [sys.executable, "-c", _PRINTS], {**os.environ, **environment}
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, env=environment, timeout=60, check=False)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_closed_pipe_is_no_traceback(unbuffered):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as output:
        done = printed(output, PYTHONUNBUFFERED=unbuffered)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize(("closed", "shown"), [(">&-", b""), ("2>&-", "6.1 → 3.2\n".encode()), (">&- 2>&-", b"")])
def test_a_closed_stream_is_no_traceback(closed, shown):
    """And files that are opened later do not get its descriptor."""
    program = _PRINTS.replace("0\n", "print('!', file=sys.stderr, flush=True) or open(os.devnull).fileno() < 3\n")
    command = ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, "import os\n" + program]
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(command, capture_output=True, env=environment, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, shown), done.stderr
    assert b"Traceback" not in done.stderr


def test_output_to_a_full_disk_is_one_sentence():
    with open("/dev/full", "wb") as output:
        done = printed(output)
    assert (done.returncode, done.stderr) == (2, b"te-jax: error: cannot write: No space left on device\n")


def test_a_locale_without_arrows_is_no_traceback():
    done = printed(PYTHONIOENCODING="latin-1")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"6.1 ? 3.2\n", b"")
