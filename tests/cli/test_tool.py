#!/usr/bin/env python3
"""The kvring tool from outside: exit codes, messages, files and JSON keys.

test_tool.py PATH_OF_KVRING
"""
import json
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

TOOL = sys.argv[1]
SMALL = ["--heads", "4", "--kv-heads", "2", "--head-dim", "64", "--tile", "32"]


def kvring(*words, code=0, has=""):
    done = subprocess.run([TOOL, *map(str, words)], capture_output=True, text=True, timeout=280)
    text = done.stdout + done.stderr
    assert done.returncode == code, f"{words}: exit {done.returncode}, not {code}\n{text}"
    assert has in text, f"{words}: no '{has}' in\n{text}"
    return text


def write_safetensors(path, tensors):
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


def floats(count, seed):
    values = []
    for i in range(count):
        seed = (seed * 1664525 + 1013904223) % 2**32
        values.append(seed / 2**31 - 1)
    return struct.pack(f"<{count}f", *values)


def test_usage(_):
    kvring(code=2, has="Usage")
    kvring("--help", has="prefill")
    kvring("--version", has="kvring ")
    kvring("prefil", code=2, has="did you mean prefill?")
    for command in ["devices", "doctor", "check", "plan", "prefill"]:
        kvring(command, "--help", has="--json")
    kvring("prefill", "--rank", 2, code=2, has="did you mean --ranks?")
    kvring("prefill", "--ranks", 0, code=2, has="1..1024")
    kvring("prefill", "--math", "bf16", code=2, has="not supported yet")
    kvring("prefill", "--ranks", 3, "--tokens", 200, "--chunk", 60, "--window", 37, "--soft-cap", 5,
           "--v-scale", 2, "--tile", 16, "--strategy", "all", "--verify")
    kvring("prefill", "--strategy", "rinng", code=2, has="rinng")
    kvring("prefill", "--heads", 3, "--kv-heads", 2, code=2, has="multiple")
    kvring("prefill", "--strategy", "current-only", "--cached-tokens", 5, code=2, has="current-only")
    kvring("prefill", "--requests", "5", code=2, has="S:L")
    kvring("prefill", "--weights", "1,2", "--ranks", 3, code=2, has="--weights")
    kvring("prefill", "--map", "zigzag", code=2, has="striped")
    kvring("check", "--quick", "--full", code=2, has="exclude")
    kvring("prefill", "--input", "/nonexistent", code=1, has="/nonexistent")


def test_devices_and_doctor(folder):
    kvring("devices", "--ranks", 3, "--json", folder / "d.json", has="rank 2")
    found = json.loads((folder / "d.json").read_text())
    assert len(found["ranks"]) == 3 and found["devices"][0]["index"]
    kvring("doctor", has="ok")


def test_plan(folder):
    kvring("plan", "--cached-tokens", 20000, "--chunk", 4096, "--json", folder / "p.json", has="choice")
    plan = json.loads((folder / "p.json").read_text())
    assert plan["choice"] == "gather-kv" and plan["reason"]
    names = {c["name"] for c in plan["candidates"]}
    assert {"ring", "gather-kv", "gather-q", "rotate-q", "rotate-all", "current-only"} <= names
    ring = next(c for c in plan["candidates"] if c["name"] == "ring")
    assert ring["predicted_ms"] is None and ring["bytes"] > 0 and ring["peak_bytes"] > 0


def test_prefill_all(folder):
    kvring("prefill", "--ranks", 3, "--tokens", 500, "--chunk", 200, *SMALL, "--strategy", "all", "--verify",
           "--repeat", 2, "--json", folder / "r.json", "--trace", folder / "t.json", "--op-log",
           folder / "ops.jsonl", has="TTFT")
    strategies = json.loads((folder / "r.json").read_text())["strategies"]
    assert len(strategies) == 6
    for s in strategies:
        assert s["bytes_moved"] == s["bytes_formula"] > 0, s
        assert s["max_err_reference"] < 2e-5 and s["max_err_gather_kv"] < 5e-6, s
        assert len(s["chunk_ms"]) == 3 and s["ttft_ms"] > 0 and s["launches"] > 0, s
        for key in ["state_traffic_bytes", "slot_bytes", "state_bytes", "peak_bytes_per_rank", "gflops",
                    "fraction_of_peak"]:
            assert key in s, key
    by_name = {s["name"]: s for s in strategies}
    assert by_name["ring"]["launches"] < by_name["ring-two-launch"]["launches"]
    records = [json.loads(line) for line in (folder / "ops.jsonl").read_text().splitlines()]
    moved = sum(r["bytes"] for r in records if r["strategy"] == "ring" and r["launched"]
                and r["kind"] in ("hop", "gather", "send_state"))
    assert moved == by_name["ring"]["bytes_moved"]
    trace = json.loads((folder / "t.json").read_text())
    assert trace


def test_prefill_shapes(_):
    kvring("prefill", "--ranks", 4, "--requests", "40:0,1:77,0:9,33:20", "--chunk", 16, *SMALL, "--verify",
           "--map", "paged", "--page-size", 4, "--dtype", "f16", "--strategy", "all")
    kvring("prefill", "--ranks", 2, "--cached-tokens", 300, "--chunk", 50, *SMALL, "--verify", "--map",
           "contiguous", "--weights", "1,3", "--dtype", "bf16", "--out-dtype", "bf16", "--strategy", "auto",
           has="auto took")
    kvring("prefill", "--ranks", 3, "--tokens", 100, "--chunk", 50, *SMALL, "--strategy", "all", "--verify",
           "--query-tile", 5, "--slots", 3, "--copy-queue", "--causal", 0)


def test_input_and_output(folder):
    tokens, shape = 90, {"q": 4, "k": 2, "v": 2}
    tensors = {name: ("F32", [tokens, heads, 64], floats(tokens * heads * 64, heads + ord(name)))
               for name, heads in shape.items()}
    write_safetensors(folder / "in.safetensors", tensors)
    outs = []
    for ranks, chunk in [(1, 90), (3, 32)]:
        path = folder / f"out{ranks}.safetensors"
        kvring("prefill", "--ranks", ranks, "--chunk", chunk, "--input", folder / "in.safetensors", "--output",
               path, "--verify", "--strategy", "ring")
        header, data = read_safetensors(path)
        assert header["out"]["shape"] == [tokens, 4, 64] and header["lse"]["shape"] == [tokens, 4]
        begin, end = header["out"]["data_offsets"]
        outs.append(struct.unpack(f"<{tokens * 4 * 64}f", data[begin:end]))
    assert max(abs(a - b) for a, b in zip(*outs)) < 1e-5
    kvring("prefill", "--input", folder / "in.safetensors", "--heads", 8, code=2, has="--heads is 8")
    tensors["v"] = ("F32", [tokens, 1, 64], floats(tokens * 64, 1))
    write_safetensors(folder / "bad.safetensors", tensors)
    kvring("prefill", "--input", folder / "bad.safetensors", code=2, has="(90, 1, 64)")
    raw = (folder / "in.safetensors").read_bytes()
    (folder / "short.safetensors").write_bytes(raw[:-100])
    kvring("prefill", "--input", folder / "short.safetensors", code=1, has="truncated")


def test_budget(folder):
    kvring("prefill", "--ranks", 2, "--tokens", 256, "--chunk", 128, *SMALL, "--memory-budget", "10K", code=1,
           has="budget")


def test_check(folder):
    kvring("check", "--only", 5, "--json", folder / "c.json", has="passed")
    found = json.loads((folder / "c.json").read_text())
    assert found["failed"] == 0 and found["passed"] >= 6
    controls = {c["name"]: c["factor"] for c in found["negative_controls"]}
    assert controls["other_cache_contents"] >= 50 and min(controls.values()) > 1, controls
    assert {"name", "count"} <= set(found["classes"][0])


def main():
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            print(name, flush=True)
            with tempfile.TemporaryDirectory() as folder:
                test(Path(folder))


main()
