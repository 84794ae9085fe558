#!/usr/bin/env python3
"""Every kernel under oclgrind: data races, accesses out of bounds, divergent barriers, wrong API
calls, and values that nobody set.

run.py controls KVRING PLANT MOVES           planted mistakes are found, and nothing else is
run.py kernels KVRING PLANT MOVES            steps with each variant of kvr_attend, all kernels
run.py one KVRING PLANT MOVES                a single look, for tests/breaks
run.py test_slow_kernels KVRING PLANT MOVES  larger steps

KVRING is the tool, PLANT and MOVES are built from plant.c and moves.c.
"""
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SKIPPED = 77
SOURCES = Path(__file__).resolve().parents[2] / "kernels_cl"
OF_STEPS = {"kvr_attend", "kvr_stage", "kvr_cache_write", "kvr_merge_states", "kvr_merge_outputs"}
TEST_KERNEL = "moved_by_the_test"

# What is looked for in one run. Values that nobody set need moves.c in front of OpenCL, and races
# are found much faster without it, so there are two ways to run.
RACES = {"OCLGRIND_DATA_RACES": "1", "OCLGRIND_CHECK_API": "1"}
UNSET = {"OCLGRIND_UNINITIALIZED": "1"}

CONTROLS = [  # name of the plant, how it runs, what the log must say
    ("clean", RACES, None),
    ("clean", UNSET, None),
    ("local-race", RACES, "data race at local memory"),
    ("global-race", RACES, "data race at global memory"),
    ("read-overrun", RACES, "Invalid read of size 4 at global memory"),
    ("write-overrun", RACES, "Invalid write of size 4 at global memory"),
    ("local-overrun", RACES, "Invalid write of size 4 at local memory"),
    ("private-overrun", RACES, "Invalid read of size 4 at private memory"),
    ("divergent-barrier", RACES, "Work-group divergence"),
    ("api", RACES, "Function: clEnqueueCopyBuffer"),
    ("uninitialized", UNSET, "depends on uninitialized value"),
    ("uninitialized-part", UNSET, "depends on uninitialized value"),
]

# Steps of the tool. The first one runs every kernel, the others each variant of kvr_attend. They
# have one head dim and type, so that there is one program per variant.
HEADS = ["--heads", "4", "--kv-heads", "2"]
EVERY_KERNEL = ["--ranks", "3", "--requests", "9:13,0:5,7:0", "--chunk", "11", *HEADS, "--head-dim", "20",
                "--tile", "4", "--page-size", "2", "--query-tile", "5", "--copy-queue", "--strategy", "all"]
STEPS = [
    ["--ranks", "2", "--requests", "13:9,0:5", "--chunk", "11", *HEADS, "--head-dim", "20", "--tile", "8",
     "--page-size", "2", "--window", "7", "--soft-cap", "5", "--q-scale", "0.5", "--v-scale", "2",
     "--sinks", "random", "--query-tile", "3", "--strategy", "ring"],
    ["--ranks", "2", "--cached-tokens", "290", "--chunk", "3", *HEADS, "--head-dim", "20", "--tile", "150",
     "--sinks", "random", "--strategy", "ring"],
]
LONG_STEPS = [
    ["--ranks", "3", "--tokens", "150", "--chunk", "130", "--heads", "8", "--kv-heads", "1", "--head-dim", "36",
     "--tile", "40", "--dtype", "bf16", "--out-dtype", "bf16", "--strategy", "rotate-all"],
    ["--ranks", "2", "--cached-tokens", "300", "--chunk", "15", "--heads", "7", "--kv-heads", "1", "--head-dim",
     "64", "--tile", "512", "--causal", "0", "--dtype", "f16", "--out-dtype", "f16", "--strategy", "gather-kv"],
    ["--ranks", "2", "--cached-tokens", "40", "--chunk", "6", "--heads", "2", "--kv-heads", "2", "--head-dim",
     "256", "--tile", "16", "--window", "20", "--strategy", "gather-q"],
]


class Runner:
    """Runs programs on oclgrind's simulator and reads its log. Compiled kernels are kept, because
    the library tests each of them once before its first use, which takes long on a simulator."""

    def __init__(self, tool, plant, moves, folder):
        self.tool, self.plant, self.moves, self.folder = tool, plant, moves, folder
        vendors, cache = folder / "vendors", folder / "cache"
        vendors.mkdir()
        cache.mkdir()
        (vendors / "oclgrind.icd").write_text(f"{find_icd()}\n")
        self.environment = {**os.environ, "OCL_ICD_VENDORS": str(vendors), "KVRING_CACHE_DIR": str(cache),
                            "OCLGRIND_INST_COUNTS": "1", "OCLGRIND_BUILD_OPTIONS": "-cl-opt-disable",
                            "OCLGRIND_LOG": str(folder / "log")}

    def run(self, command, how, **more):
        """Output, findings and names of the kernels that stored something. oclgrind always exits
        with the program's code, so only its log says what it found."""
        log = self.folder / "log"
        log.unlink(missing_ok=True)
        environment = {**self.environment, **how, **more}
        if how is UNSET:
            environment["LD_PRELOAD"] = self.moves
        done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace",
                              timeout=1500)
        output = done.stdout + done.stderr
        if not log.is_file():
            raise AssertionError(f"{command}: no log, so oclgrind did not run\n{output[-2000:]}")
        findings = findings_in(log.read_text(errors="replace")) + api_errors_in(output)
        return done.returncode, output, findings, kernels_in(output)


def find_icd():
    """oclgrind as an OpenCL platform: the library, or None."""
    program = shutil.which("oclgrind")
    if program is None:
        return None
    found = sorted(Path(program).resolve().parents[1].glob("lib*/**/liboclgrind-rt-icd.so"))
    return found[0] if found else None


def findings_in(log):
    """Every paragraph of the log, but for those about the kernel of moves.c."""
    parts = [part.strip() for part in log.split("\n\n") if part.strip()]
    return [part for part in parts if f"Kernel: {TEST_KERNEL}" not in part]


def api_errors_in(output):
    """Wrong calls, which are not in the log but among what the program prints."""
    return re.findall(r"OpenCL runtime error detected\n(?:\t.*\n)+", output)


def kernels_in(output):
    """Names of the kernels that stored something in global memory in some launch."""
    launches = re.findall(r"^Instructions executed for kernel '(\w+)':\n((?: +\d+ - .*\n)+)", output, re.M)
    return {name for name, counts in launches if re.search(r"store global|vstore", counts)}


def check_controls(runner):
    for name, how, want in CONTROLS:
        code, output, findings, kernels = runner.run([runner.plant, name], how)
        assert code == 0, f"{name}: exit {code}\n{output}"
        assert "plant" in kernels or name == "divergent-barrier", f"{name}: the kernel did not run\n{output}"
        if want is None:
            assert not findings, f"{name}: found what is not there\n{findings[0]}"
        else:
            assert any(want in f for f in findings), f"{name}: no '{want}' in the log\n{findings[:3]}"
        print(f"{name}: {len(findings)} findings", flush=True)


def variants(runner):
    """Names of the variants of kvr_attend, as the tool lists them when it is asked for another."""
    _, output, _, _ = runner.run([runner.tool, "prefill", *STEPS[0]], RACES, KVRING_VARIANT="?")
    match = re.search(r"the kernel variants are:([\w ,]+)", output)
    assert match, f"the tool does not list its kernel variants\n{output[-2000:]}"
    return re.findall(r"\w+", match[1])


def check_step(runner, step, how, variant):
    what = f"{variant}, {'races, bounds, API' if how is RACES else 'unset values'}: {' '.join(step)}"
    code, output, findings, kernels = runner.run([runner.tool, "prefill", *step, "--verify"], how,
                                                 KVRING_VARIANT=variant)
    assert code == 0, f"{what}: exit {code}\n{output[-3000:]}"
    assert "Oclgrind Simulator" in output, f"{what}: another device\n{output[-2000:]}"
    assert not findings, f"{what}: {len(findings)} findings, the first:\n{findings[0]}"
    assert {"kvr_attend", "kvr_cache_write"} <= kernels, f"{what}: only {kernels} have run"
    print(what, flush=True)
    return kernels


def variants_for(runner, how):
    """oclgrind 21.10 takes lanes of a wrong operand where a vector is cut to fewer lanes, which ends
    the process when it follows unset values through the bf16 variants."""
    names = variants(runner)
    return names if how is RACES else [name for name in names if not name.startswith("bf16")]


def kernels_of_sources():
    text = "".join(path.read_text() for path in SOURCES.glob("*.cl"))
    return set(re.findall(r"__kernel\s+void\s+(\w+)", text))


def check_kernels(runner):
    missing = kernels_of_sources()
    assert missing >= OF_STEPS, missing
    for how in (RACES, UNSET):
        kernels = check_step(runner, EVERY_KERNEL, how, "plain")
        assert kernels >= OF_STEPS, f"only these kernels have run: {kernels}"
        missing -= kernels
        for variant in variants_for(runner, how):
            for step in STEPS:
                missing -= check_step(runner, step, how, variant)
    assert not missing, f"no run needs the kernels {missing}"


def check_one(runner):
    check_step(runner, EVERY_KERNEL, RACES, "rows16")


def check_long(runner):
    for how in (RACES, UNSET):
        for variant in variants_for(runner, how):
            for step in LONG_STEPS:
                check_step(runner, step, how, variant)


def main():
    checks = {"controls": check_controls, "kernels": check_kernels, "one": check_one,
              "test_slow_kernels": check_long}
    if len(sys.argv) != 5 or sys.argv[1] not in checks:
        sys.exit(__doc__)
    if find_icd() is None:
        print("SKIPPED: oclgrind is not installed")
        sys.exit(SKIPPED)
    with tempfile.TemporaryDirectory() as folder:
        checks[sys.argv[1]](Runner(*sys.argv[2:], Path(folder)))


main()
