"""What the tests of the tool share: running it, and safetensors files.

The path of the tool is the first argument of a test."""
import json
import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

TOOL = sys.argv[1]
SMALL = ["--heads", "4", "--kv-heads", "2", "--head-dim", "64", "--tile", "32"]


def kvring(*words, code=0, has="", env=None):
    """Runs the tool; asserts its exit code and that its output has the words of has (one, or many)."""
    done = subprocess.run([TOOL, *map(str, words)], capture_output=True, text=True, timeout=280,
                          env={**os.environ, **(env or {})})
    text = done.stdout + done.stderr
    assert done.returncode == code, f"{words}: exit {done.returncode}, not {code}\n{text}"
    for word in [has] if isinstance(has, str) else has:
        assert word in text, f"{words}: no '{word}' in\n{text}"
    return text


def write_safetensors(path, tensors):
    """tensors: name -> (dtype, shape, bytes)."""
    header, data = {}, b""
    for name, (dtype, shape, values) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def read_safetensors(path):
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    return header, raw[8 + length :]


def read_floats(path, name):
    header, data = read_safetensors(path)
    begin, end = header[name]["data_offsets"]
    return struct.unpack(f"<{(end - begin) // 4}f", data[begin:end])


def floats(count, seed):
    """Bytes of count numbers in [-1, 1)."""
    values = []
    for _ in range(count):
        seed = (seed * 1664525 + 1013904223) % 2**32
        values.append(seed / 2**31 - 1)
    return struct.pack(f"<{count}f", *values)


def qkv(tokens, q=4, kv=2, dim=64):
    """q, k and v of an input file."""
    return {name: ("F32", [tokens, heads, dim], floats(tokens * heads * dim, heads + ord(name)))
            for name, heads in (("q", q), ("k", kv), ("v", kv))}


def run_tests(names):
    """Runs the functions test_* among names (globals()), each in a folder of its own."""
    for name, test in list(names.items()):
        if name.startswith("test_"):
            print(name, flush=True)
            with tempfile.TemporaryDirectory() as folder:
                test(Path(folder))
