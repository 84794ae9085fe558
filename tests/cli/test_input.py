#!/usr/bin/env python3
"""Wrong input: exit code, a message with value, limit and fix, and nothing written.

test_input.py PATH_OF_KVRING

The rules are those of the specification's section on input validation. Not applicable, since the
tool cannot express them:
  shapes and strides of a cache, page ids, block tables   the tool makes its own cache and tables
  int32 arrays, cu_q_lens, sequence distribution          lengths are the numbers of --requests
  chunks C of a rank with 2 P C < S                       the tool leaves C to the library
  skip flags, position offsets, remaps, KV sharing        no such options exist
  rank of a group, contexts of queues, a busy session     one process owns all ranks
  inputs inside the cache buffer                          inputs come from host memory
  alignment of block sizes to pages                       any size is allowed
  largest allocation, local memory                        properties of a device, not of input
What the specification refuses elsewhere and this project serves is in test_allowed.
"""
import json
import math
import struct
import sys

sys.dont_write_bytecode = True
from tool import SMALL, floats, kvring, qkv, run_tests, write_safetensors

# arguments after `prefill`, words of the message; the exit code is 2
OPTIONS = [
    # counts and ranges
    ("--ranks 0", "--ranks is 0; 1..1024"),
    ("--ranks 1025", "--ranks is 1025; 1..1024"),
    ("--ranks 4x", "'4x' whole number 1..1024"),
    ("--ranks=", "'' whole number"),
    ("--tokens -1", "-1; 0..2147483647"),
    ("--tokens 2147483648", "2147483648; 0..2147483647"),
    ("--tokens 99999999999999999999", "99999999999999999999; 0..2147483647"),
    ("--tokens 2147483647 --cached-tokens 1", "2147483647 new 1 cached limit"),
    ("--cached-tokens -1", "-1; 0..2147483647"),
    ("--chunk 0", "--chunk is 0; 1..2147483647"),
    ("--page-size 0", "--page-size is 0; 1.."),
    ("--tile 0", "--tile is 0; 1.."),
    ("--query-tile -1", "-1; 0.."),
    ("--slots 1", "--slots is 1; 2..1024"),
    ("--slots 1025", "1025; 2..1024"),
    ("--repeat 0", "0; 1..1000"),
    ("--verify=-1", "-1; 0.."),
    ("--seed -1", "'-1' whole number 2^64-1"),
    ("--causal 2", "2; 0..1"),
    ("--memory-budget 2GB", "'2GB' 512M"),
    ("--memory-budget -1", "'-1' 512M"),
    ("--memory-budget 99999999T", "99999999T; limit"),
    # heads
    ("--heads 0", "--heads is 0; 1.."),
    ("--kv-heads 0", "--kv-heads is 0; 1.."),
    ("--heads 3 --kv-heads 2", "3 multiple 2"),
    ("--heads 2147483647 --kv-heads 1", "num_q_heads limit"),
    ("--heads 134217728 --kv-heads 134217728", "num_kv_heads limit"),
    ("--head-dim 0", "--head-dim is 0; 1..512"),
    ("--head-dim 513", "513; 1..512"),
    # types
    ("--dtype i8", "'i8' f32, f16 bf16"),
    ("--dtype fp8", "'fp8' f32, f16 bf16"),
    ("--out-dtype f64", "'f64' f32, f16 bf16"),
    ("--math f64", "'f64' use auto, f32 bf16"),
    # masks and scales
    ("--window -1", "-1; 0..2147483647"),
    ("--window 1.5", "'1.5' whole number"),
    ("--soft-cap -5", "-5; must be in or 0 for none"),
    ("--soft-cap nan", "'nan' finite"),
    ("--soft-cap 1e-300", "1e-300; must be in or 0 for none"),
    ("--soft-cap 1e300", "1e300; must be in or 0 for none"),
    ("--q-scale 0", "--q-scale is 0; use 1"),
    ("--k-scale 0", "--k-scale is 0; use 1"),
    ("--v-scale 0", "--v-scale is 0; use 1"),
    ("--q-scale 1e-300", "1e-300; size must be in"),
    ("--k-scale inf", "'inf' finite"),
    ("--v-scale nan", "'nan' finite"),
    ("--timeout 0", "--timeout is 0; more than 0 at most 1e+06"),
    ("--timeout -3", "-3; more than 0"),
    ("--timeout 1e7", "1e7; at most 1e+06"),
    ("--timeout soon", "'soon' number"),
    # requests
    ("--requests 5", "'5' S:L"),
    ("--requests=", "'' S:L"),
    ("--requests 5:6:7", "'6:7' whole number"),
    ("--requests 5:6,", "'' S:L"),
    ("--requests -1:0", "-1; 0.."),
    ("--requests 1:2147483647", "2147483647; 0..2147483646"),
    ("--requests 2000000000:0,2000000000:0", "4000000000 limit 2147483647"),
    ("--requests 5:6 --tokens 5", "--requests leave --tokens"),
    ("--requests 5:6 --cached-tokens 5", "--requests leave --cached-tokens"),
    # the map
    ("--map zigzag", "'zigzag' striped paged contiguous"),
    ("--map 0", "--map is 0; 1.."),
    ("--map -4", "'-4' striped"),
    ("--weights 1,2 --ranks 3", "2 numbers 3 ranks"),
    ("--weights 1,-2 --ranks 2", "-2; 0.."),
    ("--weights 1,x --ranks 2", "'x' whole number"),
    ("--weights 0,0 --ranks 2", "2 weights are 0 positive"),
    # strategies
    ("--strategy rinng", "'rinng' ring"),
    ("--strategy=", "'' auto, ring"),
    ("--strategy ring,", "'' ring"),
    ("--strategy ring,rinng", "'rinng' ring"),
    ("--strategy ring,auto", "auto list"),
    ("--strategy current-only --cached-tokens 5", "current-only 5 cached use ring"),
    # devices
    ("--devices nosuch", "'nosuch' PLATFORM.DEVICE"),
    ("--devices 99.0", "99.0"),
    ("--devices 0.99", "0.99"),
    # options
    ("--rank 2", "'--rank' did you mean --ranks?"),
    ("--kvheads 2", "did you mean --kv-heads?"),
    ("--zzzzzzzz", "--help lists"),
    ("ring", "'ring' start with --"),
    ("--tokens", "--tokens needs a value --output follows --tokens=T"),
    ("--copy-queue=1", "takes no value '1'"),
    ("--full", "no option of this command"),
    ("--soak 5", "no option of this command"),
]

CHECK = [
    ("--quick --full", "exclude leave one out"),
    ("--soak 5 --full", "--soak --full leave one out"),
    ("--soak 5 --only 3", "--soak --only leave one out"),
    ("--soak 0", "0; 1..31536000"),
    ("--soak 1.5", "'1.5' whole number"),
    ("--only -2", "-2; -1.."),
    ("--strategy ring,gather-kv", "'ring,gather-kv' use all the name of one"),
    ("--timeout 0", "0; more than 0"),
    ("--devices nosuch", "'nosuch'"),
    ("--window 5", "no option of this command"),
]

PLAN = [
    ("--tokens -1", "-1; 0.."),
    ("--heads 3 --kv-heads 2", "3 multiple 2"),
    ("--k-scale 0", "use 1"),
    ("--strategy rinng", "'rinng' ring"),
    ("--timeout 5", "no option of this command"),
]


def refuse(folder, command, arguments, words, code=2):
    """Runs a wrong command that names files for all its results; no file may appear or change."""
    outputs = {"prefill": ["output", "json", "trace", "op-log"]}.get(command, ["json"])
    files = [word for name in outputs for word in (f"--{name}", folder / f"result.{name}")]
    before = {p: p.read_bytes() for p in folder.iterdir()}
    arguments = arguments.split() if isinstance(arguments, str) else arguments
    text = kvring(command, *arguments, *files, code=code, has=["kvring " + command + ":", *words.split()])
    assert text.count("\n") == 1, f"{arguments}: more than one line in\n{text}"
    assert {p: p.read_bytes() for p in folder.iterdir()} == before, f"{arguments}: files were written"


def test_options(folder):
    for command, table in [("prefill", OPTIONS), ("check", CHECK), ("plan", PLAN)]:
        for arguments, words in table:
            refuse(folder, command, arguments, words)
    kvring("devices", "--devices", "nosuch", "--json", folder / "result.json", code=2, has="'nosuch'")
    assert not (folder / "result.json").exists()
    refuse(folder, "prefill", ["--memory-budget", "10K", "--tokens", 256, *SMALL], "budget", code=1)


def test_refuse_would_notice_a_file(folder):
    try:
        refuse(folder, "plan", ["--tokens", 10], "", code=0)
    except AssertionError:
        assert (folder / "result.json").exists()
        return
    raise AssertionError("a file was written, and refuse() did not notice")


def test_input_files(folder):
    def case(words, code=2, arguments=(), **changes):
        """q, k, v with tensors changed; None drops one."""
        tensors = {**qkv(10), **changes}
        write_safetensors(folder / "in", {name: t for name, t in tensors.items() if t is not None})
        refuse(folder, "prefill", ["--input", folder / "in", *arguments], words, code)

    def tensor(*shape, dtype="F32", size=4):
        return dtype, list(shape), floats(math.prod(shape) * size // 4, 1)

    case("tensor 'q' 2 dimensions needs 3", q=tensor(10, 256))
    case("dimension 0 of tensor 'k' is 0; 1..", k=tensor(0, 2, 64))
    case("k is (10, 2, 64) v is (10, 1, 64)", v=tensor(10, 1, 64))
    case("q is (10, 4, 32) k (10, 2, 64) head_dim agree", q=tensor(10, 4, 32))
    case("q is (9, 4, 64) k (10, 2, 64) tokens", q=tensor(9, 4, 64))
    case("num_q_heads 3 multiple 2", q=tensor(10, 3, 64))
    case("head_dim is 640, the limit is 512", q=tensor(2, 1, 640), k=tensor(2, 1, 640), v=tensor(2, 1, 640))
    case("q is f16, k f32, v f32 one dtype", q=tensor(10, 4, 64, dtype="F16", size=2))
    case("'q' has dtype I64; F32, F16 BF16", 1, q=tensor(10, 4, 64, dtype="I64", size=8))
    case("no tensor 'v'; it has: q, k", 1, v=None)
    case("--heads is 8 has 4 leave --heads out", arguments=["--heads", 8])
    case("--dtype is f16 has f32 leave --dtype out", arguments=["--dtype", "f16"])
    case("--tokens is 11 has 10", arguments=["--tokens", 11])
    case("--cached-tokens is 11 only 10", arguments=["--cached-tokens", 11])
    case("--requests has 11 tokens has 10", arguments=["--requests", "5:6"])
    values = bytearray(qkv(10)["k"][2])
    struct.pack_into("<f", values, 4 * (3 * 128 + 64 + 7), math.nan)
    case("k[3, 1, 7] is not finite leave --verify out", k=("F32", [10, 2, 64], bytes(values)),
         arguments=["--verify"])


def test_broken_files(folder):
    write_safetensors(folder / "in", qkv(10))
    whole = (folder / "in").read_bytes()
    for name, raw, words in [
        ("empty", b"", "0 bytes at least 8"),
        ("short", whole[:7], "7 bytes at least 8"),
        ("header", whole[:30], "header claims at most 22"),
        ("cut", whole[:-1], "truncated"),
        ("huge", b"\xff" * 8 + whole[8:], "18446744073709551615 at most"),
        ("text", b"hello, world: this is text", "header claims"),
        ("list", struct.pack("<Q", 2) + b"[]", "not a JSON object"),
        ("offsets", struct.pack("<Q", 59) + b'{"q":{"dtype":"F32","shape":[1,1,1],"data_offsets":[4,0]}} ', "truncated"),
    ]:
        (folder / name).write_bytes(raw)
        refuse(folder, "prefill", ["--input", folder / name], f"{folder}/{name} {words}", code=1)
    refuse(folder, "prefill", ["--input", folder / "none"], "No such file", code=1)
    refuse(folder, "prefill", ["--input", "/dev/null"], "/dev/null regular file", code=1)


def test_sinks(folder):
    def case(words, code=2, command="prefill", **tensors):
        write_safetensors(folder / "sinks", tensors)
        refuse(folder, command, ["--sinks", folder / "sinks", *SMALL], f"{folder}/sinks {words}", code)

    def sinks(*values, dtype="F32"):
        return dtype, [len(values)], struct.pack(f"<{len(values)}{'f' if dtype == 'F32' else 'e'}", *values)

    case("'sinks' has 3 numbers 4 query heads", sinks=sinks(1, 2, 3))
    case("'sinks' has 5 numbers 4 query heads", sinks=sinks(1, 2, 3, 4, 5))
    case("'sinks' has 3 numbers 4 query heads", command="plan", sinks=sinks(1, 2, 3))
    case("'sinks' is f16 F32", sinks=sinks(1, 2, 3, 4, dtype="F16"))
    case("'sinks' has 2 dimensions needs 1", sinks=("F32", [4, 1], floats(4, 1)))
    case("sinks[2] is nan -inf for none", sinks=sinks(1, 2, math.nan, 4))
    case("sinks[1] is inf -inf for none", sinks=sinks(1, math.inf, 3, 4))
    case("no tensor 'sinks'; it has: sink", 1, sink=sinks(1, 2, 3, 4))
    refuse(folder, "prefill", ["--sinks", folder / "none"], "No such file", code=1)
    refuse(folder, "prefill", ["--sinks="], "cannot open", code=1)


def test_outputs(folder):
    """Files are refused before any work: a prefill of this size would take hours."""
    long = ["prefill", "--tokens", 10**7]
    write_safetensors(folder / "in", qkv(10))
    (folder / "kept").write_text("kept")
    before = sorted(folder.iterdir())
    for arguments, words, code in [
        (["--json", folder / "no/where"], "cannot write No such file", 1),
        (["--output", folder / "no/where", "--json", folder / "kept"], "cannot write No such file", 1),
        (["--json", folder], "folder name a file", 2),
        (["--json="], "'' name of a file", 2),
        (["--output", "-"], "'-' --json standard output", 2),
        (["--trace", "-"], "'-' --json standard output", 2),
        (["--trace", "/dev/null"], "/dev/null no regular file", 2),
        (["--json", folder / "kept", "--trace", folder / "kept"], "--json --trace two files", 2),
        (["--output", folder / "a", "--op-log", f"{folder}/../{folder.name}/a"], "--output --op-log two files", 2),
        (["--input", folder / "in", "--output", folder / "in"], "--output overwrite --input", 2),
        (["--sinks", folder / "in", "--json", folder / "in"], "--json overwrite --sinks", 2),
    ]:
        kvring(*long, *arguments, code=code, has=words.split())
        assert sorted(folder.iterdir()) == before and (folder / "kept").read_text() == "kept", arguments
    kvring("check", "--full", "--json", folder / "no/where", code=1, has="cannot write")
    kvring("doctor", "--json", folder, code=2, has="folder")
    kvring("plan", "--json", "/dev/null")
    assert not open("/dev/null").read()  # still a device


def test_failures_while_running(folder):
    """A timeout that steps exceed, sooner or later: files were opened by then, and must not stay."""
    refuse(folder, "prefill", ["--ranks", 4, "--tokens", 8000, "--chunk", 400, *SMALL, "--timeout", "1e-6"],
           "nothing completed for 1e-06 s", code=1)
    words = ["check", "--timeout", "1e-6", "--json", folder / "r.json"]
    kvring(*words, code=1, has=["nothing completed for 1e-06 s", "--timeout 1e-06"])
    found = json.loads((folder / "r.json").read_text())
    # a device that is stuck ends the run
    assert found["failed"] == len(found["failures"]) == 1, found


def test_allowed(folder):
    """Odd ranks, chunks of one token, requests without tokens or cache, no causal mask, any sizes."""
    for arguments in [
        ["--ranks", 3, "--requests", "1:9,0:7,5:0", "--page-size", 3, "--tile", 5],
        ["--ranks", 5, "--tokens", 11, "--chunk", 11, "--causal", 0, "--window", 4, "--query-tile", 1],
        ["--ranks", 2, "--requests", "0:0"],
        ["--ranks", 4, "--tokens", 0, "--chunk", 5],
        ["--ranks", 4, "--cached-tokens", 3, "--chunk", 1, "--weights", "0,0,1,0"],
    ]:
        kvring("prefill", *arguments, "--heads", 4, "--kv-heads", 2, "--head-dim", 64, "--verify", "--strategy", "all",
               "--json", folder / "r.json")
        found = json.loads((folder / "r.json").read_text())
        assert len(found["strategies"]) == 6 and all(s["right"] for s in found["strategies"]), found


run_tests(globals())
