"""The table of breaks. A find-text must stand in its file exactly once."""
from breaks import Break, Edit, Test, one

# Pure tests: no OpenCL.
STRATEGIES = Test("pure_test_strategies", "test_every_strategy*")
COPIES = Test("pure_test_strategies", "test_one_copy*")
LAYOUT = Test("pure_test_layout")
PAGES = Test("pure_test_pages")
VALIDATE = Test("pure_test_validate")
CHOOSE = Test("pure_test_choose")

# Device tests, each with few kernels to compile.
CACHE = Test("device_test_cache")
COUNTS = Test("device_test_counts", "test_ring_with_window")
GROUP = Test("device_test_group")
STEPS = Test("device_test_step", "test_every_strategy*")
DELAYS = Test("device_test_step", "test_random_delays*")
EVENTS = Test("device_test_step", "test_waits_and_rank_events")
FAILED_WAIT = Test("device_test_step", "test_failed_wait*")
CHUNKS = Test("device_test_shapes", "test_chunks*")
LEAKS = Test("device_test_shapes", "test_a_thousand*")
FAILING_STEPS = Test("device_test_faults", "test_steps_that_fail")
FAILING_COMMANDS = Test("device_test_faults", "test_commands_that_fail")
FLUSHES = Test("device_test_faults", "test_queues_are_flushed*")

# Edits that take the verifier out, so that the tests behind it must notice.
NO_VERIFIER = (Edit("host/schedule/verify.c", "  KVR_TRY(kvr_verify_order(s));\n", ""),
               Edit("host/schedule/verify.c", "  KVR_TRY(kvr_verify_data(s));\n", ""))

KEEP_READERS = Edit("host/schedule/schedule.c",
                    "if (!accesses[a].write || (s->drop & KVR_DROP_WRITE_AFTER_READ)) continue;", "continue;")
DOWNSTREAM = Edit("host/strategy/ring_pass.c", "(r + P - 1) % P, v - 1), slot)", "(r + 1) % P, v - 1), slot)")

SCHEDULE = [
    one("a comment (control)", "host/schedule/schedule.c", "/* ---- questions ---- */", "/* ---- ---- */",
        STRATEGIES, harmless=True),
    Break("write-after-read dependency dropped", (KEEP_READERS,), STRATEGIES),
    Break("write-after-read dependency dropped, no verifier", (KEEP_READERS, *NO_VERIFIER), STRATEGIES),
    one("read-after-write dependency dropped", "host/schedule/schedule.c",
        "if (!(s->drop & rule)) KVR_TRY(add_dep(s, op, e->writer));",
        "if (!(s->drop & rule) && accesses[a].write) KVR_TRY(add_dep(s, op, e->writer));", STRATEGIES),
    one("links are no resource: two copies at once", "host/schedule/schedule.c",
        "n = add_access(s, link, true, out, n);", "(void)link;", COPIES),
    one("window off by one in block skipping", "host/schedule/schedule.c", "token - s->problem.window + 1",
        "token - s->problem.window + 2", STRATEGIES),
    one("first visible block rounded up", "host/schedule/schedule.c",
        "kvr_min(block, below / s->options.tile)", "kvr_min(block, (below + 1) / s->options.tile)", STRATEGIES),
    one("last block one token short", "host/schedule/schedule.c", "left < s->options.tile ? (int)left :",
        "left < s->options.tile ? (int)left - 1 :", STRATEGIES),
    one("sink counted in every launch without carry", "host/schedule/build.c",
        "a->sinks && s->problem.sinks != NULL", "s->problem.sinks != NULL", STRATEGIES),
    one("non-causal step attends only earlier tokens", "host/schedule/build.c",
        ": s->problem.requests[i].num_new;", ": kvr_rows_token_end(a->rows);", STRATEGIES),
    one("cache write of one token too few", "host/schedule/build.c",
        "if (owned > 0) KVR_TRY(kvr_build_cache_write(", "if (owned > 1) KVR_TRY(kvr_build_cache_write(", STRATEGIES),
    Break("hop from the wrong rank", (DOWNSTREAM,), STRATEGIES),
    Break("hop from the wrong rank, no verifier", (DOWNSTREAM, *NO_VERIFIER), STRATEGIES),
    one("carry forgotten in the ring", "host/strategy/ring_pass.c",
        "a.carry_in = has_carry(s, at.request, r, v);", "a.carry_in = false;", STRATEGIES),
    one("positions of another share", "host/strategy/ring_pass.c", "a.shard = kvr_ring_source(s, r, v);",
        "a.shard = r;", STRATEGIES),
    one("partial states received in another order", "host/strategy/gather_q.c", "to, from, from * len, len)",
        "to, from, to * len, len)", STRATEGIES),
    one("state comes home to the wrong rank", "host/strategy/rotate_q.c", "const int prev = (j + P - 1) % P;",
        "const int prev = (j + 1) % P;", STRATEGIES),
    one("blocks below the window travel", "host/schedule/schedule.c",
        "s->first_block[i] = find_first_block(s, i);", "s->first_block[i] = 0 * find_first_block(s, i);", COUNTS),
    one("formula of bytes without one rank", "host/strategy/registry.c",
        "return (int64_t)(s->layout.num_ranks - 1) * s->layout.num_tokens",
        "return (int64_t)s->layout.num_ranks * s->layout.num_tokens", STRATEGIES),
    one("LSE guard of the host merge", "host/core/merge.c", "isinf(max) ? 0.0f : max", "max", VALIDATE),
    one("host merge in base 2", "host/core/merge.c", "shift + logf(sum)", "shift + log2f(sum)", VALIDATE),
]

CORE = [
    one("owner of a position off by one", "kernels_cl/shared.h", "o >= 0 && o < run ?", "o >= 0 && o <= run ?",
        STRATEGIES),
    one("token equal to the query hidden", "kernels_cl/shared.h", "(key <= row)", "(key < row)", STRATEGIES),
    one("tail chunk of the next rank", "host/core/layout.c", "2 * (int64_t)num_ranks - 1 - rank",
        "2 * (int64_t)num_ranks - 2 - rank", LAYOUT),
    one("share counts a token too many", "host/core/layout.c", "if (rest > run) rest = run;",
        "if (rest > run) rest = run + 1;", LAYOUT),
    one("block table one page short", "host/core/layout.c",
        "kvr_ceil_div(kvr_map_count(cache, num_tokens, r), cache->page_size)",
        "kvr_map_count(cache, num_tokens, r) / cache->page_size", LAYOUT),
    one("page freed while another request shares it", "host/core/pages.c", "if (--pages->users[page] == 0)",
        "if (--pages->users[page] >= 0)", PAGES),
    one("page that a table names twice accepted", "host/core/pages.c", "own[page] = 2;", "own[page] = 1;", PAGES),
    one("heads that are no multiple accepted", "host/core/validate.c",
        "if (p->num_q_heads % p->cache.num_kv_heads != 0)", "if (p->num_q_heads < p->cache.num_kv_heads)", VALIDATE),
    one("a single slot accepted", "host/core/validate.c", "o->num_slots < 0 || o->num_slots == 1",
        "o->num_slots < 0", VALIDATE),
    one("auto at its threshold", "host/choose/choose.c", "move_kv >= move_q", "move_kv > move_q", CHOOSE),
]

DEVICE = [
    one("shared page written", "host/device/cache.c", "if (shared < 0) return KVR_OK;",
        "if (shared < 0 || shared > 0) return KVR_OK;", CACHE),
    one("rows read from the page before", "host/device/cache_rows.c",
        "const int page = m->table->entries[local / c->desc.page_size];",
        "const int page = m->table->entries[(local > 0 ? local - 1 : 0) / c->desc.page_size];", CACHE),
    one("run of rows over the end of a buffer", "host/device/cache_rows.c",
        "next != page + 1 || next % per_buffer == 0", "next != page + 1", CACHE),
    one("memory given back but not counted", "host/device/group.c", "clReleaseMemObject(mem);\n  atomic_fetch_sub(&group->ranks[rank].allocated, bytes);",
        "clReleaseMemObject(mem);\n  (void)bytes;", LEAKS),
    one("two platforms in a group", "host/device/device_select.c", "places->list[0].root.platform != d->platform",
        "false", GROUP),
]

EXECUTOR = [
    one("executor forgets a dependency", "host/exec/exec_cl.c", "for (int d = 0; d < op->num_deps; d++) {",
        "for (int d = 1; d < op->num_deps; d++) {", DELAYS),
    one("launch before its inputs are there", "host/exec/exec_cl.c",
        "  KVR_TRY(kvr_exec_waits_add(x, x->ranks[op->rank].input_ready));\n", "", STEPS),
    one("copy before the inputs of its source", "host/exec/exec_cl.c",
        "return kvr_exec_waits_add(x, x->ranks[op->peer].input_ready);", "return KVR_OK;", EVENTS),
    one("status of commands ignored", "host/device/watch.c",
        'if (status <= CL_COMPLETE) return kvr_cl_check(status, "command");',
        "if (status <= CL_COMPLETE) return KVR_OK;", FAILING_COMMANDS),
    one("clSetKernelArg unchecked", "host/exec/launch.c",
        'return kvr_cl_check(clSetKernelArg(kernel, index, size, value), "clSetKernelArg");',
        "clSetKernelArg(kernel, index, size, value);\n  return KVR_OK;", FAILING_STEPS),
    one("queue not flushed", "host/exec/queue.c", "  KVR_CL(clFlush, (kvr_exec_queue(exec, rank, queue)));\n", "",
        FLUSHES),
    one("event not released", "host/exec/complete.c",
        "  clReleaseEvent(x->events[i]);\n  x->events[i] = NULL;\n  return KVR_OK;",
        "  x->events[i] = NULL;\n  return KVR_OK;", FAILING_STEPS),
    one("tail rows uploaded over the head's", "host/exec/io.c", "rows.first + rows.split, rows.num - rows.split}",
        "rows.first, rows.num - rows.split}", CHUNKS),
    one("K and V exchanged", "host/exec/io.c", "(size_t)part * width", "(size_t)(1 - part) * width", CHUNKS),
    one("cache lengths after a failed step", "host/api/plan.c", "status == KVR_OK && i < p->num_requests",
        "i < p->num_requests", FAILED_WAIT),
    one("failed plan may run again", "host/api/plan.c", "status == KVR_OK ? PLAN_DONE : PLAN_POISONED",
        "PLAN_DONE", FAILING_COMMANDS),
]

BREAKS = SCHEDULE + CORE + DEVICE + EXECUTOR
