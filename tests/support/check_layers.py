#!/usr/bin/env python3
"""Checks every #include against the layers of the architecture.

check_layers.py ROOT         checks the tree, exits 1 and names each forbidden include
check_layers.py --self-test  plants violations in a small tree, exits 1 unless all are found
"""
import re
import sys
import tempfile
from pathlib import Path

# Folder of host/ -> folders that it may include; "may include" follows the arrows to their end.
ARROWS = {
    "base": [],
    "core": ["base", "shared.h"],
    "schedule": ["core"],
    "ref": ["schedule"],
    "sim": ["schedule"],
    "strategy": ["schedule"],
    "trace": ["schedule"],
    "choose": ["sim", "strategy"],
    "device": ["base", "core"],  # the KV cache needs the map of core
    "transport": ["device"],
    "exec": ["transport", "schedule", "trace"],
    "api": ["exec", "choose"],
    # Users of the public headers, which everybody may include; base for its small helpers.
    "cli": ["base"],
    "model": ["base"],
}
PURE = {"base", "core", "schedule", "ref", "sim", "strategy", "trace", "choose"}
INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*(.*)", re.M)
NAME = re.compile(r'([<"])([^>"]+)[>"]')


def reachable(folder):
    """The folder and all that its arrows lead to."""
    found, todo = set(), [folder]
    while todo:
        at = todo.pop()
        if at not in found:
            found.add(at)
            todo += ARROWS.get(at, [])
    return found


class Rules:
    """What one folder may include: project folders, OpenCL or not."""

    def __init__(self, folders, opencl):
        self.folders, self.opencl = folders, opencl

    def problem(self, file, quote, name):
        """Why `file` may not include `name`, or None."""
        parts = name.split("/")
        if ".." in parts:
            return "leaves its folder; name the file from the include root"
        if name.startswith("CL/") or name == "kvring/opencl.h":
            return None if self.opencl else "needs OpenCL, which this layer must not"
        if name == "shared.h" or parts[0] in ARROWS:
            folder = name if name == "shared.h" else parts[0]
            return None if folder in self.folders else "is above or beside this layer"
        if quote == "<" or parts[0] == "kvring" or (file.parent / name).is_file():
            return None
        return "belongs to no layer"


def rules_of(root, file):
    """The rules for a file, or None where its folder has none."""
    top, sub = file.relative_to(root).parts[:2]
    if top == "host":
        return Rules(reachable(sub), sub not in PURE) if sub in ARROWS else None
    if top == "include":
        return Rules(set(), file.name == "opencl.h")
    if top == "bench":
        return Rules({"base"}, True)
    return Rules(set(), top == "docs")  # docs: public headers only; kernels_cl: nothing at all


def sources(root):
    for top in ("host", "include", "kernels_cl", "bench", "docs"):
        for file in sorted((root / top).rglob("*")):
            if file.suffix in (".c", ".h", ".cl"):
                yield file


def violations(root):
    for file in sources(root):
        where = file.relative_to(root)
        rules = rules_of(root, file)
        if rules is None:
            yield f"{where}: its folder is in no layer; add it to ARROWS"
            continue
        for text in INCLUDE.findall(file.read_text()):
            match = NAME.match(text)
            if where.parts[0] == "kernels_cl":
                yield f"{where}: kernels are embedded one by one and include nothing"
            elif not match:
                yield f"{where}: an include without a plain name"
            elif why := rules.problem(file, *match.groups()):
                yield f"{where}: {match[2]} {why}"


GOOD = {
    "include/kvring/status.h": "",
    "include/kvring/opencl.h": "#include <CL/cl.h>\n",
    "host/core/layout.c": '#include "core/layout.h"\n#include "base/error.h"\n#include "shared.h"\n'
                          '#include "kvring/status.h"\n#include <math.h>\n',
    "host/choose/choose.c": '#include "core/layout.h"\n#include "strategy/registry.h"\n',
    "host/device/cache.c": '#include <CL/cl.h>\n#include "core/layout.h"\n',
    "host/api/plan.c": '#include "choose/choose.h"\n#include "kvring/opencl.h"\n'
                       '/* #include "cli/options.h" */\n',
    "host/cli/options.h": "",
    "host/cli/main.c": '#include "options.h"\n#include "cli/options.h"\n#include "base/arith.h"\n',
}
# What the self-test adds to a file of the good tree; each line alone must be found.
PLANTED = [
    ("host/base/status.c", '#include "core/layout.h"'),
    ("host/base/status.c", '#include "shared.h"'),
    ("host/core/layout.c", '#include "schedule/schedule.h"'),
    ("host/core/layout.c", "#include <CL/cl.h>"),
    ("host/core/layout.c", "  #  include <kvring/opencl.h>"),
    ("host/core/layout.c", '#include "../device/group.h"'),
    ("host/core/layout.c", '#include "nowhere/file.h"'),
    ("host/core/layout.c", "#include HEADER"),
    ("host/strategy/ring.c", '#include "choose/choose.h"'),
    ("host/choose/choose.c", '#include "device/group.h"'),
    ("host/device/cache.c", '#include "schedule/schedule.h"'),
    ("host/exec/exec_cl.c", '#include "api/session.h"'),
    ("host/cli/main.c", '#include "api/session.h"'),
    ("host/cli/main.c", '#include "core/layout.h"'),
    ("host/model/llama.c", '#include "device/group.h"'),
    ("host/unknown/file.c", ""),
    ("include/kvring/status.h", "#include <CL/cl.h>"),
    ("include/kvring/status.h", '#include "base/error.h"'),
    ("bench/bench_ring.c", '#include "api/session.h"'),
    ("docs/examples/first.c", '#include "base/error.h"'),
    ("kernels_cl/attend.cl", '#include "shared.h"'),
]


def found_in(files):
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return list(violations(Path(folder)))


def self_test():
    wrong = [f"found in the good tree: {v}" for v in found_in(GOOD)]
    for name, line in PLANTED:
        if len(found_in({**GOOD, name: GOOD.get(name, "") + line + "\n"})) != 1:
            wrong.append(f"not found once: {name}: {line}")
    return wrong


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    testing = sys.argv[1] == "--self-test"
    bad = self_test() if testing else list(violations(Path(sys.argv[1]).resolve()))
    print("\n".join(bad) if bad else "ok")
    sys.exit(1 if bad else 0)


main()
