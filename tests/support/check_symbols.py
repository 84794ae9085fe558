#!/usr/bin/env python3
"""Compares the functions that libkvring.so exports with those its headers declare KVR_API.

check_symbols.py LIBRARY INCLUDE_DIR              exits 1 and names each difference
check_symbols.py --self-test LIBRARY INCLUDE_DIR  adds and drops a declaration, exits 1 unless
                                                  both differences are found
"""
import os
import re
import subprocess
import sys
from pathlib import Path

NOT_CODE = re.compile(r"/\*.*?\*/|//[^\n]*|^[ \t]*#(?:\\\n|[^\n])*", re.S | re.M)
FUNCTION = re.compile(r"\bKVR_API\b[^;{(]*?(\w+)\s*\(")


def declared(folder):
    headers = sorted(Path(folder).glob("kvring/*.h"))
    return {name for h in headers for name in FUNCTION.findall(NOT_CODE.sub("", h.read_text()))}


def exported(library):
    nm = os.environ.get("NM", "nm")
    lines = subprocess.run([nm, "-D", "--defined-only", library], check=True, text=True,
                           stdout=subprocess.PIPE).stdout.splitlines()
    return {line.split()[-1].split("@")[0] for line in lines}


def differences(names, symbols):
    return ([f"declared but not exported: {n}" for n in sorted(names - symbols)] +
            [f"exported but not declared: {n}" for n in sorted(symbols - names)])


def self_test(names, symbols):
    known = differences(names, symbols)
    dropped = max(names & symbols)
    found = differences(names - {dropped} | {"kvr_planted"}, symbols)
    wanted = {"declared but not exported: kvr_planted", f"exported but not declared: {dropped}"}
    return [f"not found: {w}" for w in sorted(wanted - (set(found) - set(known)))]


def main():
    arguments = sys.argv[1:]
    testing = arguments[:1] == ["--self-test"]
    if len(arguments) != 2 + testing:
        sys.exit(__doc__)
    library, folder = arguments[-2:]
    check = self_test if testing else differences
    names = declared(folder)
    bad = check(names, exported(library)) or ([] if names else ["no KVR_API function found"])
    print("\n".join(bad) if bad else f"ok: {len(names)} functions")
    sys.exit(1 if bad else 0)


main()
