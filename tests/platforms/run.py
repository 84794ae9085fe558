#!/usr/bin/env python3
"""kvring on one OpenCL platform, while all platforms of the machine are there at once.

run.py NAME KVRING   NAME of PLATFORMS: checks the library on it, once as the first platform of the
                     machine and once behind the others, so that nothing may assume an order
run.py mixed KVRING  devices of two platforms are refused in one group
run.py self-test     a tool that errs is noticed

Skips (77) where a platform is not installed. KVRING_INTEL_OPENCL names the folder that
scripts/install-intel-opencl has filled, where it is not the default.
"""
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SKIPPED = 77
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "kvring")
INTEL = Path(os.environ.get("KVRING_INTEL_OPENCL") or CACHE / "intel-opencl")
VENDORS = Path("/etc/OpenCL/vendors")


class Platform:
    """An OpenCL implementation: its library, as a file or as the loader finds it, and a word by
    which a user would name it."""

    def __init__(self, opencl_name, word, library):
        self.opencl_name, self.word, self.library = opencl_name, word, library


def loads(library):
    """Whether a library can be loaded; in a process of its own, since drivers hold different LLVMs."""
    code = f"import ctypes; ctypes.CDLL({str(library)!r})"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


PLATFORMS = {
    "pocl": Platform("Portable Computing Language", "portable", "libpocl.so.2"),
    "rusticl": Platform("rusticl", "rusticl", "libRusticlOpenCL.so.1"),
    "intel": Platform("Intel(R) OpenCL", "intel", INTEL / "lib/libintelocl.so"),
}
# Only there to be in the way: it lists no device.
CLOVER = "libMesaOpenCL.so.1"


class Skip(Exception):
    """There is nothing to test here."""


class Bed:
    """A folder with the .icd files of all platforms, and the tool in that environment."""

    def __init__(self, tool, folder, libraries, wanted, first):
        self.tool, self.wanted, self.first, self.folder = tool, wanted, first, folder
        vendors = self.order(libraries)
        self.environment = {**os.environ, "OCL_ICD_VENDORS": str(vendors), "RUSTICL_ENABLE": "llvmpipe",
                            "OCL_ICD_PLATFORM_SORT": "none"}

    def order(self, libraries):
        """Loaders take the files as the folder lists them, an order that only the file system
        knows: names are changed until the wanted file is the first, or the last."""
        for attempt in range(1000):
            vendors = self.folder / f"vendors{attempt}"
            vendors.mkdir()
            for name, library in libraries.items():
                (vendors / f"{name}{attempt}.icd").write_text(f"{library}\n")
            listed = os.listdir(vendors)
            if listed[0 if self.first else -1].startswith(self.wanted):
                return vendors
        raise AssertionError("the folder never listed the platform where it should be")

    def run(self, *words, code=0):
        done = subprocess.run([*self.tool, *map(str, words)], capture_output=True, text=True,
                              env=self.environment, timeout=3000)
        text = done.stdout + done.stderr
        assert done.returncode == code, f"{words}: exit {done.returncode}, not {code}\n{text[-4000:]}"
        return text

    def json_of(self, *words):
        path = self.folder / "out.json"
        path.unlink(missing_ok=True)
        text = self.run(*words, "--json", path)
        return json.loads(path.read_text()), text


def usable(found, platform):
    return [d for d in found["devices"] if d["usable"] and d["platform"].startswith(platform.opencl_name)]


def check_choice(bed, platform, found):
    """The devices of the platform, and that names, indices and the default lead where they should."""
    devices = usable(found, platform)
    assert devices, f"{platform.opencl_name} has no usable device: {found['devices']}"
    index, first = devices[0]["index"], next(d for d in found["devices"] if d["usable"])
    position = int(index.split(".")[0])
    assert (position == 0) == bed.first, f"{platform.opencl_name} is platform {position}"
    for words, want in ([["--devices", index], index], [["--devices", platform.word], index],
                        [[], first["index"]]):
        ranks = bed.json_of("devices", "--ranks", 2, *words)[0]["ranks"]
        got = {f"{r['platform_index']}.{r['device_index']}" for r in ranks}
        assert got == {want}, f"devices {words}: ranks are on {got}, not on {want}"
    return index


def check_platform(tool, name, libraries):
    platform = PLATFORMS[name]
    for first in (True, False) if len(libraries) > 1 else (True,):
        with tempfile.TemporaryDirectory() as folder:
            bed = Bed(tool, Path(folder), libraries, name, first)
            found = bed.json_of("devices")[0]
            index = check_choice(bed, platform, found)
            how = ["--only", 5] if first and len(libraries) > 1 else ["--quick"]
            result, text = bed.json_of("check", *how, "--devices", index)
            assert result["failed"] == 0 and result["passed"] > 0, text[-4000:]
            print(f"{platform.opencl_name} as device {index} of {sorted(libraries)}: "
                  f"{result['passed']} configurations passed, {result['skipped']} skipped", flush=True)


def check_mixed(tool, libraries):
    names = [name for name in libraries if name in PLATFORMS]
    if len(names) < 2:
        raise Skip(f"only {names} here, two platforms are needed")
    with tempfile.TemporaryDirectory() as folder:
        bed = Bed(tool, Path(folder), libraries, names[0], True)
        found = bed.json_of("devices")[0]
        devices = [usable(found, PLATFORMS[name])[0]["index"] for name in names[:2]]
        text = bed.run("devices", "--ranks", 2, "--devices", ",".join(devices), code=1)
        for name in names[:2]:
            assert PLATFORMS[name].opencl_name in text, f"the message does not name {name}\n{text}"
        assert "two platforms" in text, text
        print(f"{devices} in one group are refused")


def stem(library):
    """libpocl of libpocl.so.2.10.0"""
    return Path(library).name.split(".so")[0]


def installed():
    """Libraries by name; .icd files of the system that name no library of ours are taken too."""
    known = {**{name: p.library for name, p in PLATFORMS.items()}, "clover": CLOVER}
    found = {name: library for name, library in known.items() if loads(library)}
    for file in sorted(VENDORS.glob("*.icd")) if VENDORS.is_dir() else []:
        library = file.read_text().strip()
        if stem(library) not in map(stem, found.values()) and loads(library):
            found[file.stem] = library
    return found


def check(name, tool):
    libraries = installed()
    if name == "mixed":
        return check_mixed(tool, libraries)
    if name not in libraries:
        raise Skip(f"{PLATFORMS[name].opencl_name} is not installed")
    return check_platform(tool, name, libraries)


# ---- self-test ----

# A tool with two platforms, in the order of the .icd files, that plays what FAKE says.
FAKE = """
import json, os, sys
play, words = os.environ["FAKE"], sys.argv[1:]
names = [{"p": "Portable Computing Language", "r": "rusticl"}[file[0]]
         for file in os.listdir(os.environ["OCL_ICD_VENDORS"])]
if play == "order":
    names.reverse()
asked = words[words.index("--devices") + 1] if "--devices" in words else "0.0"
if "," in asked and play != "mixes":
    sys.exit("two platforms: " + str(names))
at = int(asked[0]) if asked[0].isdigit() else [asked[0].lower() in n[0].lower() for n in names].index(True)
if play == "elsewhere":
    at = 1 - at
out = {"devices": [{"index": f"{i}.0", "platform": n, "usable": play != "unusable"}
                   for i, n in enumerate(names)],
       "ranks": [{"platform_index": at, "device_index": 0}] * 2,
       "passed": 0 if play == "nothing" else 3, "failed": int(play == "wrong"), "skipped": 0}
with open(words[words.index("--json") + 1] if "--json" in words else os.devnull, "w") as file:
    json.dump(out, file)
sys.exit(1 if play == "crash" else 0)
"""


def outcome_of(play, tool):
    libraries = {"pocl": "libpocl.so.2", "rusticl": "libRusticlOpenCL.so.1"}
    os.environ["FAKE"] = play
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            check_platform(tool, "pocl", libraries)
            check_mixed(tool, libraries)
        return "passes"
    except AssertionError:
        return "fails"


def self_test():
    bad = []
    with tempfile.TemporaryDirectory() as folder:
        fake = Path(folder, "fake.py")
        fake.write_text(FAKE)
        for play in ("well", "order", "unusable", "elsewhere", "nothing", "wrong", "crash", "mixes"):
            outcome = outcome_of(play, [sys.executable, fake])
            if outcome != ("passes" if play == "well" else "fails"):
                bad.append(f"a tool that plays '{play}': the test {outcome}")
    print("\n".join(bad) if bad else "ok")
    return 1 if bad else 0


def main():
    if sys.argv[1:] == ["self-test"]:
        return self_test()
    if len(sys.argv) != 3 or sys.argv[1] not in (*PLATFORMS, "mixed"):
        sys.exit(__doc__)
    try:
        check(sys.argv[1], [sys.argv[2]])
        return 0
    except Skip as reason:
        print(f"SKIPPED: {reason}")
        return SKIPPED


if __name__ == "__main__":
    sys.exit(main())
