#!/usr/bin/env python3
"""The kvring tool from outside: commands, files and JSON keys.

test_tool.py PATH_OF_KVRING
"""
import json
import sys

sys.dont_write_bytecode = True
from tool import SMALL, kvring, qkv, read_floats, read_safetensors, run_tests, write_safetensors


def test_usage(_):
    kvring(code=2, has="Usage")
    kvring("--help", has="prefill")
    kvring("--version", has="kvring ")
    kvring("prefil", code=2, has="did you mean prefill?")
    for command in ["devices", "doctor", "check", "plan", "prefill"]:
        kvring(command, "--help", has="--json")


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
    kvring("plan", "--cached-tokens", 20000, "--chunk", 4096, "--window", 500, "--json", folder / "w.json")
    windowed = json.loads((folder / "w.json").read_text())
    assert windowed["settings"]["window"] == 500 and windowed["settings"]["requests"] == [[4096, 20000]]
    narrow = next(c for c in windowed["candidates"] if c["name"] == "ring")
    assert narrow["bytes"] < ring["bytes"] / 2  # blocks that no window sees do not travel


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
           "--query-tile", 5, "--slots", 3, "--copy-queue", "--causal", 0, "--timeout", 300)


def test_input_and_output(folder):
    tokens = 90
    write_safetensors(folder / "in.safetensors", qkv(tokens))
    outs = []
    for ranks, chunk in [(1, 90), (3, 32)]:
        path = folder / f"out{ranks}.safetensors"
        kvring("prefill", "--ranks", ranks, "--chunk", chunk, "--input", folder / "in.safetensors", "--output",
               path, "--verify", "--strategy", "ring")
        header, _ = read_safetensors(path)
        assert header["out"]["shape"] == [tokens, 4, 64] and header["lse"]["shape"] == [tokens, 4]
        outs.append(read_floats(path, "out"))
    assert max(abs(a - b) for a, b in zip(*outs)) < 1e-5


run_tests(globals())
