"""Shared memory segments of a group of devices of several processes, without JAX in the other processes."""

import fcntl
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from parameters import in_turns

from te_jax import native

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "tests/parallel/shared_segments_test.cc", *(ROOT / "cuda_ext/collective_gemm").glob("shared_*.cc")


@pytest.mark.slow  # compiles C++
def test_participants_that_wait_learn_of_those_that_do_not_arrive(tmp_path):
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    program = tmp_path / "shared_segments"
    flags = ["-std=c++20", "-O1", "-pthread", f"-I{ROOT / 'cuda_ext'}"]
    subprocess.run([compiler, *flags, *map(str, SOURCES), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


needs_extension = pytest.mark.skipif(not native.available(), reason="needs te_jax's extension")
MEMORY = Path("/dev/shm")
GROUP = (7 << 16, 8 << 16)  # devices that no process of these tests has
BYTES = 4096


def introduced():
    """The extension; this process stands for two, which share memory by their files alone."""
    extension = native.extension_module("cpu")
    extension.introduce({place: 1000 + rank for rank, place in enumerate(GROUP)})
    return extension


@pytest.fixture
def module():
    extension = introduced()
    yield extension
    extension.forget_attempt(GROUP, 1)


@pytest.fixture
def texts(module):
    return [module.create_segment(GROUP, 1, rank, BYTES) for rank in (0, 1)]


def file_in(text, line):
    """The file that a text names: in line 2 the record, in line 3 the segment."""
    return MEMORY / text.splitlines()[line]


def replaced(text, line, by):
    lines = text.splitlines()
    lines[line] = by
    return "".join(f"{line}\n" for line in lines)


@needs_extension
@pytest.mark.parametrize(
    ("name", "line"), in_turns(["/etc/hostname", "../../etc/hostname", f"te_jax-1-{'g' * 16}", ""], [2, 3])
)
def test_names_that_the_package_does_not_make(name, line, module, texts):
    texts[1] = replaced(texts[1], line, name)
    with pytest.raises(RuntimeError, match="device 0 of process 8 cannot be opened: its text is malformed"):
        module.join_segments(GROUP, 1, 0, texts, 5.0)


@needs_extension
@pytest.mark.parametrize("line", [2, 3])
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("link", "Too many levels of symbolic links"),
        ("empty", "has 0 bytes instead of"),
        ("large", "has 1048576 bytes instead of"),
        ("pipe", "is not a regular file of this user"),
        ("absent", "its process has ended, or has a /dev/shm of its own"),
    ],
)
def test_files_that_are_not_what_was_shared(kind, reason, line, module, texts, request):
    file = MEMORY / f"te_jax-{os.getpid()}-{'0' * 16}"
    if kind == "link":
        file.symlink_to(file_in(texts[1], line))
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind != "absent":
        # Locked before it has a name of te_jax's: processes remove what nobody has locked.
        unnamed = MEMORY / f"unnamed-{os.getpid()}"
        held = unnamed.open("wb")
        request.addfinalizer(held.close)
        fcntl.flock(held, fcntl.LOCK_EX)
        held.truncate({"empty": 0, "large": 1 << 20}[kind])
        unnamed.rename(file)
    texts[1] = replaced(texts[1], line, file.name)
    try:
        with pytest.raises(RuntimeError, match=f"the memory of device 0 of process 8 cannot be opened: .*{reason}"):
            module.join_segments(GROUP, 1, 0, texts, 5.0)
    finally:
        file.unlink(missing_ok=True)


@needs_extension
@pytest.mark.parametrize(
    "text", ["", "\n", "x\n" * 3, "x\n" * 5, "\0" * 100, "{host}\n99999999999999999999\n{record}\nx\n"]
)
def test_texts_that_describe_nothing(text, module, texts):
    host, _, record, _ = texts[1].splitlines()
    texts[1] = text.format(host=host, record=record)
    with pytest.raises(RuntimeError, match="device 0 of process 8 cannot be opened: its text is malformed"):
        module.join_segments(GROUP, 1, 0, texts, 5.0)


@needs_extension
@pytest.mark.parametrize(
    ("group", "rank", "count", "reason"),
    [
        (GROUP, 2, BYTES, "a group of 2 devices has no rank 2"),
        (GROUP, -1, BYTES, "a group of 2 devices has no rank -1"),
        ((), 0, BYTES, "a group of 0 devices has no rank 0"),
        (GROUP[:1] * 65, 0, BYTES, "a group has 65 devices; at most 64"),
        (GROUP, 0, 0, "0 bytes cannot be shared"),
        (GROUP, 0, -(2**63), "-9223372036854775808 bytes cannot be shared"),
        ((99 << 16, *GROUP), 0, BYTES, "this process does not drive device 0 of process 99"),
    ],
)
def test_impossible_segments(group, rank, count, reason, module):
    with pytest.raises(RuntimeError, match=reason):
        module.create_segment(group, 1, rank, count)


@needs_extension
@pytest.mark.parametrize(
    ("rank", "count", "seconds", "reason"),
    [
        (2, 2, 5.0, "the segment was not created"),
        (-1, 2, 5.0, "the segment was not created"),
        (0, 2, float("nan"), "seconds is none from 0 to 1e9"),
        (0, 2, 1e300, "seconds is none from 0 to 1e9"),
        (0, 0, 5.0, "a group of 2 devices is described by 0 texts"),
        (0, 3, 5.0, "a group of 2 devices is described by 3 texts"),
    ],
)
def test_joining_with_impossible_arguments(rank, count, seconds, reason, module, texts):
    with pytest.raises(RuntimeError, match=reason):
        module.join_segments(GROUP, 1, rank, (texts * 2)[:count], seconds)


@needs_extension
def test_joining_twice(module, texts):
    """And in vain, because nobody comes."""
    with pytest.raises(RuntimeError, match="device 0 of process 8 did not open the memory of device 0 of process 7"):
        module.join_segments(GROUP, 1, 0, texts, 0.1)
    with pytest.raises(RuntimeError, match="joins its segment for the second time"):
        module.join_segments(GROUP, 1, 0, texts, 0.1)


# Another process: its second device, with or without a child that it leaves behind.
OTHER = """
import importlib.util, os, sys, time
spec = importlib.util.spec_from_file_location("_te_cpu", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
group = 7 << 16, 8 << 16
module.introduce({group[1]: 1001})
text = module.create_segment(group, 1, 1, 4096)
if "fork" in sys.argv:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        module.introduce({group[1]: 1001})
        own = module.create_segment(group, 2, 1, 4096)
        module.forget_attempt(group, 1)  # its parent's, which stays
        os.write(writing, own.encode())
        time.sleep(60)
        os._exit(0)
    own = module.create_segment(group, 2, 1, 4096)
    print(child, *own.split(), *os.read(reading, 1000).decode().split())
print(*text.split(), flush=True)
time.sleep(60)
"""


@needs_extension
@pytest.mark.parametrize("forks", [False, True])
def test_a_process_that_is_killed_while_it_shares_memory(forks, module):
    """Its peers do not wait for it, nor for a child that it leaves behind; and its files are gone."""
    arguments = [sys.executable, "-c", OTHER, module.__file__, *(["fork"] if forks else [])]
    child = None
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as other:
        try:
            if forks:
                child, *names = other.stdout.readline().split()
                own, inherited = names[:4], names[4:]
                assert not {*own[2:]} & {*inherited[2:]}  # a child uses other names than its parent
            text = "".join(f"{line}\n" for line in other.stdout.readline().split())
            assert file_in(text, 2).stat().st_size > 0
            assert file_in(text, 3).stat().st_size == BYTES
            texts = [module.create_segment(GROUP, 1, 0, BYTES), text]
            assert file_in(text, 3).exists()  # of a process that lives
            other.kill()
            other.wait()
            begin = time.monotonic()
            with pytest.raises(RuntimeError, match="the process of device 0 of process 8 has ended"):
                module.join_segments(GROUP, 1, 0, texts, 60.0)
            assert time.monotonic() - begin < 5
            assert not file_in(text, 2).exists()
            assert not file_in(text, 3).exists()
            texts[0] = module.create_segment(GROUP, 1, 0, BYTES)
            with pytest.raises(RuntimeError, match="its process has ended, or has a /dev/shm of its own"):
                module.join_segments(GROUP, 1, 0, texts, 60.0)
        finally:
            other.kill()
            if child is not None:
                os.kill(int(child), 9)


@needs_extension
def test_files_of_dead_processes_are_removed_when_others_share_memory(module):
    """Those of living ones, and files with other names, stay."""
    arguments = [sys.executable, "-c", OTHER, module.__file__]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as other:
        left = [MEMORY / name for name in other.stdout.readline().split()[2:]]
        text = module.create_segment(GROUP, 1, 0, BYTES)
        assert all(file.exists() for file in left)
        other.kill()
    foreign = MEMORY / f"te_jax-{os.getpid()}-of-somebody-else"
    foreign.touch()
    try:
        module.create_segment(GROUP, 1, 1, BYTES)
        assert not any(file.exists() for file in left)
        assert foreign.exists()
        assert all(file_in(text, line).exists() for line in (2, 3))
    finally:
        foreign.unlink()
