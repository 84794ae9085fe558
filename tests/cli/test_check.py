#!/usr/bin/env python3
"""kvring check from outside: JSON, soak, and a faulty driver that both must notice.

test_check.py PATH_OF_KVRING; KVRING_FAULTY_DRIVER names the shim of faulty_driver.c
"""
import json
import os
import re
import shlex
import subprocess
import sys

sys.dont_write_bytecode = True
from tool import SMALL, TOOL, kvring, run_tests


def test_one_case(folder):
    kvring("check", "--only", 5, "--json", folder / "c.json", has="passed")
    found = json.loads((folder / "c.json").read_text())
    assert found["failed"] == 0 and found["passed"] >= 6 and found["failures"] == []
    controls = {c["name"]: c["factor"] for c in found["negative_controls"]}
    assert controls["other_cache_contents"] >= 50 and min(controls.values()) > 1, controls
    for name in ["window_off_by_one", "sink_dropped", "sink_counted_twice", "soft_cap_dropped"]:
        assert controls[name] >= 50, controls
    assert {"name", "count"} <= set(found["classes"][0])
    kvring("check", "--only", 5, "--strategy", "ring", "--json", folder / "r.json")
    assert json.loads((folder / "r.json").read_text())["configurations"] == 1


def test_soak(folder):
    kvring("check", "--soak", 5, "--seed", 7, "--json", folder / "s.json", has="configurations/s")
    found = json.loads((folder / "s.json").read_text())
    assert found["mode"] == "soak" and found["seed"] == "7" and found["seconds"] >= 5
    assert found["passed"] == found["configurations"] > 0 and found["failed"] == 0
    assert len(found["negative_controls"]) >= 11


def faulty():
    # The sanitizers' run time need not come first: the shim calls nothing before main.
    options = os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0"
    return {"LD_PRELOAD": os.environ["KVRING_FAULTY_DRIVER"], "ASAN_OPTIONS": options.lstrip(":")}


def first_failure(runs):
    """Output of the first command of runs that fails; one in four sizes of reads has the fault."""
    for words in runs:
        done = subprocess.run([TOOL, *map(str, words)], capture_output=True, text=True, timeout=280,
                              env={**os.environ, **faulty()})
        if done.returncode != 0:
            assert done.returncode == 1, done.stderr
            return done.stdout + done.stderr
    raise AssertionError("nobody noticed the faulty driver")


def test_soak_notices_a_faulty_driver_and_repeats_it(folder):
    text = first_failure(["check", "--soak", 2, "--seed", seed, "--json", folder / "s.json"]
                         for seed in range(1, 20))
    assert "configurations failed" in text and "FAILED" in text, text
    command = shlex.split(re.search(r"repeat: kvring (.*)", text)[1])
    failure = json.loads((folder / "s.json").read_text())["failures"][0]
    assert shlex.split(failure["repeat"]) == ["kvring", *command]
    again = kvring(*command, code=1, has=["FAILED", failure["text"]], env=faulty())
    assert f"--only {failure['case']} --strategy {failure['strategy']}" in again
    kvring(*command, code=0, has="1 passed, 0 failed")


def test_prefill_notices_a_faulty_driver_and_writes_no_output(folder):
    words = ["prefill", "--ranks", 1, *SMALL, "--strategy", "ring", "--verify=1000", "--json", folder / "r.json",
             "--output", folder / "o.safetensors"]

    def runs():
        for tokens in range(40, 60):
            (folder / "o.safetensors").unlink(missing_ok=True)
            yield [*words, "--tokens", tokens, "--chunk", tokens]

    text = first_failure(runs())
    assert "differs from the reference by" in text, text
    assert not json.loads((folder / "r.json").read_text())["strategies"][0]["right"]
    assert sorted(p.name for p in folder.iterdir()) == ["r.json"]
    kvring(*words, "--tokens", 40, "--chunk", 40)  # without the fault
    assert sorted(p.name for p in folder.iterdir()) == ["o.safetensors", "r.json"]


run_tests(globals())
