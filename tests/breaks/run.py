#!/usr/bin/env python3
"""Breaks the library on purpose, one edit at a time, and requires that a test notices each.

run.py texts ROOT     checks that every edit of table.py still applies to the tree, and that
                      docs/testing.md names every break
run.py rows           prints the rows of the table in docs/testing.md
run.py run ROOT       builds a copy of the tree, and in it each break and its test
         --only TEXT  only breaks whose name, file or test program contains TEXT
         --verbose    prints what the failing test said
run.py self-test      the same machinery on a tiny project; exits 1 unless it sees what it must
"""
import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from breaks import Break, Edit, Test, one

SKIPPED = 77
LEAST_LIMIT = 60  # seconds; else ten times what the unbroken test takes
PASSED = re.compile(r"^\[  PASSED  \] (\d+) test", re.M)


class Stop(Exception):
    """The run cannot go on, or found something wrong."""


def left_out(root, at, names):
    """What of a folder is not copied: at the top, .git and build folders."""
    top = Path(at) == Path(root)
    return [n for n in names if n == "__pycache__" or top and (n == ".git" or n.startswith("build"))]


class Copy:
    """A copy of the tree, with a build folder and kernel caches of its own."""

    def __init__(self, root, folder):
        self.root, self.build, self.folder = folder / "tree", folder / "build", folder
        shutil.copytree(root, self.root, ignore=lambda at, names: left_out(root, at, names), symlinks=True)
        self.environment = dict(os.environ)
        for name in ("KVRING_CACHE_DIR", "POCL_CACHE_DIR"):
            path = folder / name.lower()
            path.mkdir()
            self.environment[name] = str(path)
        self.filter = None
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        self.must(["cmake", "-S", self.root, "-B", self.build, *generator])

    def must(self, command):
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        if done.returncode != 0:
            raise Stop(f"{' '.join(map(str, command))}\n{done.stdout[-3000:]}{done.stderr[-1000:]}")

    def make(self, test):
        targets = test.targets or (test.target,)
        self.must(["cmake", "--build", self.build, "--parallel", "2", "--target", *targets])

    def command(self, test):
        if test.command:
            return [word.format(tree=self.root, build=self.build) for word in test.command]
        for path in (self.build / "tests" / test.target, self.build / test.target):
            if path.is_file():
                return [path]
        raise Stop(f"the build made no {test.target}")

    def preload(self):
        """The library that filters cmocka tests: cmocka has no option for that."""
        if self.filter is None:
            self.filter = self.folder / "filter.so"
            source = Path(__file__).parent / "filter.c"
            self.must([os.environ.get("CC", "cc"), "-shared", "-fPIC", source, "-o", self.filter, "-lcmocka"])
        return self.filter

    def run(self, test, limit):
        """Exit code (None past the limit), output and seconds of a test."""
        environment = dict(self.environment)
        if test.filter:
            environment.update(LD_PRELOAD=str(self.preload()), KVRING_BREAK_FILTER=test.filter)
        start = time.monotonic()
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(self.command(test), env=environment, stdout=output,
                                       stderr=subprocess.STDOUT, cwd=self.folder, start_new_session=True)
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                code = None
            output.seek(0)
            text = output.read().decode(errors="replace")
        return code, text, time.monotonic() - start


def check_unbroken(copy, test):
    """Seconds of a test in the unbroken copy, where it must pass; None: it skips itself."""
    copy.make(test)
    code, text, seconds = copy.run(test, 1800)
    if code == SKIPPED:
        return None
    if code != 0:
        raise Stop(f"{test} fails in the unbroken tree (exit {code}):\n{text[-3000:]}")
    counts = PASSED.findall(text)
    if test.filter and sum(map(int, counts)) == 0:
        raise Stop(f"{test}: the filter matches no test")
    return seconds


def last_words(text):
    """The line of a failed test that says most."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = [line for line in lines if re.search(r"error|!=|seed|rank|not ", line, re.I)]
    return (said or lines or ["nothing was printed"])[0][:160]


def verdict(b, code):
    """Why the outcome of a break's test is not the one wanted, or None."""
    if code is None:
        return None if b.may_hang else "the test hangs: only ctest's time limit would notice"
    if b.harmless:
        return None if code == 0 else "a control: the edit is harmless, and yet the test fails"
    return "not noticed" if code == 0 else None


def try_break(copy, b, unbroken_seconds):
    """What is wrong (or None), and what the test said."""
    if problems := b.problems(copy.root):
        return problems[0], ""
    before = {edit.file: (copy.root / edit.file).read_bytes() for edit in b.edits}
    try:
        for edit in b.edits:
            edit.apply(copy.root)
        copy.make(b.test)
        code, text, _ = copy.run(b.test, max(LEAST_LIMIT, 10 * unbroken_seconds))
        return verdict(b, code), last_words(text) if code != 0 else "passed"
    except Stop as error:
        return f"does not build, so no test was asked: {error}", ""
    finally:
        for file, data in before.items():
            (copy.root / file).write_bytes(data)


def run_all(root, table, folder, verbose=False):
    """Breaks with a wrong outcome and skipped ones; prints a line for each."""
    copy = Copy(root, Path(folder))
    seconds = {}
    for test in dict.fromkeys(b.test for b in table):
        seconds[test] = check_unbroken(copy, test)
        took = "SKIPPED" if seconds[test] is None else f"passes, {seconds[test]:.1f} s"
        print(f"unbroken: {test}: {took}", flush=True)
    wrong, skipped = [], []
    for b in table:
        if seconds[b.test] is None:
            skipped.append(b)
            continue
        start = time.monotonic()
        problem, said = try_break(copy, b, seconds[b.test])
        if problem:
            wrong.append(b)
        noticed = problem or ("harmless" if b.harmless else "noticed")
        print(f"{b.name} | {b.test} | {noticed} ({time.monotonic() - start:.0f} s)", flush=True)
        if verbose or problem:
            print(f"    {said}", flush=True)
    return wrong, skipped


def check_texts(root, table):
    problems = [f"{b.name}: {p}" for b in table for p in b.problems(root)]
    names = [b.name for b in table]
    return problems + [f"two breaks are named '{n}'" for n in set(names) if names.count(n) > 1]


def rows(table):
    """Lines of the table in docs/testing.md."""
    return [f"| {b.name} | `{str(b.test).replace(': ', '`: `')}` |" for b in table if not b.harmless]


def check_rows(root, table):
    text = Path(root, "docs/testing.md").read_text()
    return [f"docs/testing.md lacks the line {row}" for row in rows(table) if row not in text.splitlines()]


# ---- self-test ----

TINY = {
    "CMakeLists.txt": "cmake_minimum_required(VERSION 3.22)\nproject(tiny LANGUAGES C)\n"
                      "add_executable(tiny_test_sum sum.c)\n",
    "sum.c": "#include <stdio.h>\nstatic int sum(int a, int b) { return a + b; }\n"
             "int main(void) { while (sum(1, 1) == 7) continue; return sum(2, 3) != 5; }\n",
}
SUM = Test("tiny_test_sum")
# Each with what must be said of it; None: all is well.
TINY_BREAKS = [
    (one("minus", "sum.c", "a + b", "a - b", SUM), None),
    (one("the same sum", "sum.c", "a + b", "b + a", SUM), "not noticed"),
    (one("a control", "sum.c", "a + b", "b + a", SUM, harmless=True), None),
    (one("a control that is none", "sum.c", "a + b", "a - b", SUM, harmless=True), "a control"),
    (one("no such text", "sum.c", "a * b", "a - b", SUM), "found 0 times"),
    (one("a text found twice", "sum.c", "return", "return 1 +", SUM), "found 2 times"),
    (one("no such file", "product.c", "a * b", "a - b", SUM), "no such file"),
    (one("no C", "sum.c", "a + b", "a +", SUM), "does not build"),
    (one("a hang", "sum.c", "== 7", "== 2", SUM), "hangs"),
    (one("a hang that is expected", "sum.c", "== 7", "== 2", SUM, may_hang=True), None),
    (Break("two edits", (Edit("sum.c", "a + b", "a * b"), Edit("sum.c", "!= 5", "!= 6")), SUM), "not noticed"),
]


def self_test():
    global LEAST_LIMIT
    LEAST_LIMIT = 1
    bad = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "root")
        root.mkdir()
        for name, text in TINY.items():
            (root / name).write_text(text)
        copy = Copy(root, Path(folder))
        seconds = check_unbroken(copy, SUM)
        for b, want in TINY_BREAKS:
            problem, _ = try_break(copy, b, seconds)
            if (problem is None) != (want is None) or (want and want not in problem):
                bad.append(f"{b.name}: '{problem}', not '{want}'")
            if (copy.root / "sum.c").read_text() != TINY["sum.c"]:
                bad.append(f"{b.name}: was not undone")
        table = [b for b, _ in TINY_BREAKS]
        if len(check_texts(root, table)) != 3:
            bad.append("texts: three of them do not apply")
        (root / "docs").mkdir()
        (root / "docs/testing.md").write_text("\n".join(rows(table)[1:]))
        if len(check_rows(root, table)) != 1:
            bad.append("rows: one of them is missing")
        (copy.root / "sum.c").write_text(TINY["sum.c"].replace("!= 5", "!= 4"))
        try:
            check_unbroken(copy, SUM)
            bad.append("a tree that fails without any break was accepted")
        except Stop:
            pass
    return bad


def arguments():
    parser = argparse.ArgumentParser(usage=__doc__, add_help=False)
    parser.add_argument("what", choices=["texts", "rows", "run", "self-test"])
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parents[2])
    parser.add_argument("--only", default="")
    parser.add_argument("--verbose", action="store_true")
    return parser.parse_args()


def main():
    options = arguments()
    if options.what == "self-test":
        bad = self_test()
        print("\n".join(bad) if bad else "ok")
        return 1 if bad else 0
    from table import BREAKS
    if options.what == "rows":
        print("\n".join(rows(BREAKS)))
        return 0
    problems = check_texts(options.root, BREAKS)
    if options.what == "texts":
        problems += check_rows(options.root, BREAKS)
    if problems:
        print("\n".join(problems) + "\nPlease mend tests/breaks/table.py or docs/testing.md (run.py rows).")
        return 1
    if options.what == "texts":
        print(f"ok: {len(BREAKS)} breaks apply")
        return 0
    table = [b for b in BREAKS if any(options.only in text for text in
                                      (b.name, b.test.target, *(e.file for e in b.edits)))]
    with tempfile.TemporaryDirectory(prefix="kvring-breaks-") as folder:
        wrong, skipped = run_all(options.root, table, folder, options.verbose)
    print(f"\n{len(table) - len(wrong) - len(skipped)} as they should be, {len(wrong)} wrong, "
          f"{len(skipped)} skipped")
    for b in skipped:
        print(f"SKIPPED: {b.name}: {b.test} skips itself here")
    return 1 if wrong else SKIPPED if skipped else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Stop as error:
        sys.exit(f"{error}")
