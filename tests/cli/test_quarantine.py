"""Kernel variants under test when the tool ends: killed, they are quarantined; interrupted, not."""
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TOOL = sys.argv[1]
STEP = [TOOL, "prefill", "--ranks", "2", "--tokens", "64", "--chunk", "32", "--heads", "4", "--kv-heads", "2",
        "--head-dim", "20", "--strategy", "ring", "--verify"]


def environment(folder):
    # PoCL keeps its own compiled kernels: without them there is time to interrupt. Its compiler leaks.
    leaks = os.environ.get("ASAN_OPTIONS", "") + ":detect_leaks=0"
    return {**os.environ, "KVRING_CACHE_DIR": str(folder / "kvring"), "POCL_CACHE_DIR": str(folder / "pocl"),
            "ASAN_OPTIONS": leaks}


def run(command, folder):
    (folder / "pocl").mkdir(exist_ok=True)
    return subprocess.run(command, env=environment(folder), capture_output=True, text=True, timeout=600)


def end_in_trial(folder, number):
    """Starts a step and ends it with a signal while a kernel is tested."""
    (folder / "pocl").mkdir()
    with subprocess.Popen(STEP, env=environment(folder), stdout=subprocess.DEVNULL,
                          stderr=subprocess.DEVNULL) as process:
        while process.poll() is None and not list(folder.glob("kvring/*.trial")):
            time.sleep(0.001)
        assert process.poll() is None, "it ended before a kernel was tested"
        process.send_signal(number)
        assert process.wait() == -number, process.returncode


def test_interrupted():
    for number in (signal.SIGINT, signal.SIGTERM):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            end_in_trial(folder, number)
            assert not list(folder.glob("kvring/*.trial")), "the trial is not forgotten"
            result = run(STEP, folder)
            assert result.returncode == 0 and "not used" not in result.stderr, result.stderr


def test_killed():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        end_in_trial(folder, signal.SIGKILL)
        assert len(list(folder.glob("kvring/*.trial"))) == 1
        result = run(STEP, folder)
        assert result.returncode == 0, result.stderr
        assert result.stderr.count("ended the process") == 1, result.stderr
        again = run(STEP, folder)
        assert again.returncode == 0 and "ended the process" not in again.stderr, again.stderr
        doctor = run([TOOL, "doctor"], folder)
        assert doctor.returncode == 0 and "kernels that failed their test: 1" in doctor.stdout, doctor.stdout


test_interrupted()
test_killed()
