#!/usr/bin/env python3
"""Windows, caps, sinks and scales through the tool: verified, reported, and as they are defined.

test_masks.py PATH_OF_KVRING
"""
import json
import math
import struct
import sys

sys.dont_write_bytecode = True
from tool import SMALL, kvring, read_floats, run_tests, write_safetensors

STEP = ["--ranks", 3, "--tokens", 200, "--chunk", 60, *SMALL, "--tile", 16]


def pack(*values):
    return struct.pack(f"<{len(values)}f", *values)


def test_all_together(folder):
    write_safetensors(folder / "sinks.safetensors", {"sinks": ("F32", [4], pack(1.5, -math.inf, 0, -2))})
    for dtype in ["f32", "f16", "bf16"]:
        kvring("prefill", *STEP, "--strategy", "all", "--verify", "--dtype", dtype, "--window", 37, "--soft-cap",
               5, "--sinks", folder / "sinks.safetensors", "--q-scale", 0.3, "--k-scale", -1.5, "--v-scale", 2,
               "--json", folder / "r.json", "--math", "f32", "--timeout", 99.5)
        found = json.loads((folder / "r.json").read_text())
        settings = found["settings"]
        assert settings["window"] == 37 and settings["soft_cap"] == 5 and settings["k_scale"] == -1.5
        assert settings["sinks"] == str(folder / "sinks.safetensors") and settings["q_scale"] == 0.3
        assert settings["math"] == "f32" and settings["timeout_s"] == 99.5
        assert all(s["tolerance_factor"] < 1 for s in found["strategies"]), found


def test_each_alone(_):
    for option in [("--window", 1), ("--window", 1000), ("--soft-cap", 1), ("--sinks", "random"),
                   ("--q-scale", 1e-5), ("--k-scale", 2), ("--v-scale", -0.5), ("--math", "auto")]:
        kvring("prefill", *STEP, "--verify", "--dtype", "f16", "--strategy", "ring,gather-q", *option)


DIM = 64  # as in other tests, since each head dim is compiled anew


def means(folder, tokens):
    """Keys 0, so that all scores are 0; all values of token t are t."""
    zeros, values = pack(*[0] * tokens * DIM), pack(*(t for t in range(tokens) for _ in range(DIM)))
    tensors = {name: ("F32", [tokens, 1, DIM], data) for name, data in (("q", zeros), ("k", zeros), ("v", values))}
    write_safetensors(folder / "in.safetensors", tensors)
    return ["prefill", "--ranks", 2, "--chunk", 4, "--input", folder / "in.safetensors", "--tile", 2, "--output",
            folder / "out.safetensors", "--verify"]


def test_by_hand(folder):
    command = means(folder, 10)
    kvring(*command, "--window", 4)
    assert abs(read_floats(folder / "out.safetensors", "out")[9 * DIM] - 7.5) < 1e-5
    write_safetensors(folder / "sinks.safetensors", {"sinks": ("F32", [1], pack(math.log(10)))})
    kvring(*command, "--sinks", folder / "sinks.safetensors", "--v-scale", 2)
    out, lse = (read_floats(folder / "out.safetensors", name) for name in ("out", "lse"))
    assert abs(out[9 * DIM] - 2 * 45 / 20) < 1e-5 and abs(lse[9] - math.log(20)) < 1e-6
    assert out[0] == 0 and abs(lse[0] - math.log(11)) < 1e-6


def test_random_sinks_depend_on_the_seed(folder):
    command = [*means(folder, 10), "--sinks", "random"]
    lses = []
    for seed in [1, 1, 2]:
        kvring(*command, "--seed", seed)
        lses.append(read_floats(folder / "out.safetensors", "lse"))
    assert lses[0] == lses[1] != lses[2]


run_tests(globals())
