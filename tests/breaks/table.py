"""The table of breaks. A find-text must stand in its file exactly once."""
import sys

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
WATCHDOG = Test("device_test_watchdog", "test_ops_that_hang")
SLOW_STEPS = Test("device_test_watchdog", "test_slow_steps*")
HELD = Test("device_test_delays", "test_commands_start_at_flushes")
FLUSHES = Test("device_test_faults", "test_queues_are_flushed*")

# Kernel tests that compile few kernels; each runs the tiled and the plain kernels of kvr_attend.
MASKS = Test("device_test_kernels", "test_comparison_sees_wrong_masks")
POISON = Test("device_test_kernels", "test_poison")
BLIND = Test("device_test_kernels", "test_blind_rows")
CARRY = Test("device_test_kernels", "test_empty_axis")
LONG_AXIS = Test("device_test_kernels", "test_long_axis*")
WINDOW = Test("device_test_mask_kernels", "test_window_by_hand")
CAP = Test("device_test_mask_kernels", "test_soft_cap_by_hand")
CAP_AND_MASK = Test("device_test_mask_kernels", "test_soft_cap_does_not_unmask")
SINKS = Test("device_test_mask_kernels", "test_sinks")
SINKS_ALONE = Test("device_test_mask_kernels", "test_sinks_alone")
CLIPPED = Test("device_test_mask_kernels", "test_queries_are_clipped")
MERGES = Test("device_test_merge_kernels")
ROWS = Test("device_test_row_kernels")
MICROSCOPE = Test(
    "microscope/kernels",
    command=(sys.executable, "{tree}/tests/microscope/run.py", "one", "{build}/kvring",
             "{build}/tests/microscope_plant", "{build}/tests/libmicroscope_moves.so"),
    targets=("kvring_cli", "microscope_plant", "microscope_moves"))
VARIANTS = Test("device_test_variants", "test_every_variant_alone")
SELF_TEST = Test("device_test_variants", "test_wrong_results")

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
        "kvr_min(block, below / s->options.tile)", "kvr_min(block, (below + 1) / s->options.tile)",
        STRATEGIES),
    one("last block one token short", "host/schedule/schedule.c", "left < s->options.tile ? (int)left :",
        "left < s->options.tile ? (int)left - 1 :", STRATEGIES),
    one("sink counted in every launch without carry", "host/schedule/build.c",
        "a->sinks && s->problem.sinks != NULL", "s->problem.sinks != NULL", STRATEGIES),
    one("non-causal step attends only earlier tokens", "host/schedule/build.c",
        ": s->problem.requests[i].num_new;", ": kvr_rows_token_end(a->rows);", STRATEGIES),
    one("cache write of one token too few", "host/schedule/build.c",
        "if (owned > 0) KVR_TRY(kvr_build_cache_write(", "if (owned > 1) KVR_TRY(kvr_build_cache_write(",
        STRATEGIES),
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
        "s->first_block[i] = find_first_block(s, i);", "s->first_block[i] = 0 * find_first_block(s, i);",
        COUNTS),
    one("formula of bytes without one rank", "host/strategy/registry.c",
        "return (int64_t)(s->layout.num_ranks - 1) * s->layout.num_tokens",
        "return (int64_t)s->layout.num_ranks * s->layout.num_tokens", STRATEGIES),
    Break("cap before the scale, in the reference executor",
          (Edit("host/ref/exec_host.c", "  score *= rule->score_scale;\n", ""),
           Edit("host/ref/exec_host.c", "  const double m = score > ml[0] ? score : ml[0];",
                "  score *= rule->score_scale;\n  const double m = score > ml[0] ? score : ml[0];")), STRATEGIES),
    one("LSE guard of the host merge", "host/core/merge.c", "isinf(max) ? 0.0f : max", "max", VALIDATE),
    one("host merge in base 2", "host/core/merge.c", "shift + logf(sum)", "shift + log2f(sum)", VALIDATE),
]

CORE = [
    one("owner of a position off by one", "kernels_cl/shared.h", "o >= 0 && o < run ?",
        "o >= 0 && o <= run ?", STRATEGIES),
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
    one("page that a table names twice accepted", "host/core/pages.c", "own[page] = 2;", "own[page] = 1;",
        PAGES),
    one("heads that are no multiple accepted", "host/core/validate.c",
        "if (p->num_q_heads % p->cache.num_kv_heads != 0)", "if (p->num_q_heads < p->cache.num_kv_heads)",
        VALIDATE),
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
    one("memory given back but not counted", "host/device/group.c",
        "clReleaseMemObject(mem);\n  atomic_fetch_sub(&group->ranks[rank].allocated, bytes);",
        "clReleaseMemObject(mem);\n  (void)bytes;", LEAKS),
    one("two platforms in a group", "host/device/device_select.c",
        "places->list[0].root.platform != d->platform", "false", GROUP),
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
    one("commands that never end waited for", "host/device/watch.c",
        "if (is_over(&l, now, count, data)) return give_up(group);", "(void)is_over(&l, now, count, data);",
        WATCHDOG, may_hang=True),
    one("slow step given up although it moves", "host/device/watch.c",
        "if (num != l->num && l->num >= 0) l->moved = now;", "", SLOW_STEPS),
    one("clSetKernelArg unchecked", "host/exec/launch.c",
        'return kvr_cl_check(clSetKernelArg(kernel, index, size, value), "clSetKernelArg");',
        "clSetKernelArg(kernel, index, size, value);\n  return KVR_OK;", FAILING_STEPS),
    one("queue not flushed", "host/exec/queue.c",
        "  KVR_CL(clFlush, (kvr_exec_queue(exec, rank, queue)));\n", "", FLUSHES),
    one("queue not flushed, and the driver waits for it", "host/exec/queue.c",
        "  KVR_CL(clFlush, (kvr_exec_queue(exec, rank, queue)));\n", "", HELD),
    one("event not released", "host/exec/complete.c",
        "  clReleaseEvent(x->events[i]);\n  x->events[i] = NULL;\n  return KVR_OK;",
        "  x->events[i] = NULL;\n  return KVR_OK;", FAILING_STEPS),
    one("tail rows uploaded over the head's", "host/exec/io.c",
        "rows.first + rows.split, rows.num - rows.split}", "rows.first, rows.num - rows.split}", CHUNKS),
    one("K and V exchanged", "host/exec/io.c", "(size_t)part * width", "(size_t)(1 - part) * width", CHUNKS),
    one("cache lengths after a failed step", "host/api/plan.c", "status == KVR_OK && i < p->num_requests",
        "i < p->num_requests", FAILED_WAIT),
    one("failed plan may run again", "host/api/plan.c", "status == KVR_OK ? PLAN_DONE : PLAN_POISONED",
        "PLAN_DONE", FAILED_WAIT),
]

TILES, BF16, PLAIN, MERGE, ROW = (
    f"kernels_cl/{name}.cl" for name in ("attend", "attend_bf16", "attend_plain", "merge", "rows"))
SPANS = "kernels_cl/spans.h"

KERNELS = [
    one("window off by one", SPANS, "max(token + 1 - a.window, -a.num_cached)",
        "max(token - a.window, -a.num_cached)", WINDOW),
    one("first key of the window skipped", SPANS, "if (ring_token(middle, a) < l.firsts.low)",
        "if (ring_token(middle, a) <= l.firsts.low)", WINDOW),
    one("window off by one in the shared mask", "kernels_cl/shared.h", "(distance < a.window)",
        "(distance <= a.window)", WINDOW),
    one("own token hidden", SPANS, "clamp(l.lasts.high - token + 1, 0, num_keys)",
        "clamp(l.lasts.high - token, 0, num_keys)", MASKS),
    one("last key of a run left out", SPANS, "const int num_keys = max(end - begin, 0);",
        "const int num_keys = max(end - begin - 1, 0);", MASKS),
    one("last row of a tile left out", TILES, "r->num_rows = min(ROW_TILE, total - p0);",
        "r->num_rows = min(ROW_TILE - 1, total - p0);", MASKS),
    one("wrong query heads for a KV head", SPANS, "{p / group, h * group + p % group}",
        "{p / group, h + p % group * a.num_kv_heads}", MASKS),
    one("soft cap after the mask", TILES, "s[j][i] = seen ? s[j][i] : (float16)(-INFINITY);",
        "s[j][i] = seen ? s[j][i] : (float16)(cap != 0.0f ? -cap : -INFINITY);", CAP_AND_MASK),
    one("soft cap in another base", TILES, "const float inv_cap = 1.0f / cap;",
        "const float inv_cap = 1.0f / (cap * LN_2);", CAP),
    one("value of a masked key read (NaN)", TILES, "b->strange_v |= any(top >= 0x7f800000u);",
        "b->strange_v |= any(top > 0x7fffffffu);", POISON),
    one("-inf less -inf in rows that see nothing", TILES,
        "base[i] = top[i] == -INFINITY ? (float16)(0.0f) : top[i];", "base[i] = top[i];", BLIND),
    one("acc not rescaled to the new maximum", TILES, "acc[r * DIM_VECS + i] * (float16)(alpha[r]) + o[r][i];",
        "acc[r * DIM_VECS + i] + o[r][i];", LONG_AXIS),
    one("carried state not loaded", TILES, "const int carried = a.carry_in && ml[0] != -INFINITY;",
        "const int carried = a.carry_in && ml[0] == INFINITY;", CARRY),
    one("sink counted in every launch", TILES, "((float *)r->l)[i] = carried ? ml[1] :",
        "((float *)r->l)[i] = carried ? ml[1] + (a.use_sinks ? exp2(sinks[w.head] * LOG2_E - ml[0]) : 0.0f) :",
        SINKS),
    one("sink in base 2", TILES, "sinks[w.head] * LOG2_E", "sinks[w.head]", SINKS_ALONE),
    one("LSE in base 2", TILES, "m * LN_2 + log(l)", "m + log2(l)", MASKS),
    one("queries not clipped", "kernels_cl/numbers.h", "  x = x > LARGEST ? (float16)(LARGEST) : x;\n", "",
        CLIPPED),
    one("bf16 truncated instead of rounded", "kernels_cl/numbers.h",
        "const uint16 u = as_uint16(x);\n"
        "  return isnan(x) ? u >> 16 | 64u : (u + 0x7fffu + (u >> 16 & 1u)) >> 16;",
        "const uint16 u = as_uint16(x);\n  return u >> 16;", MERGES),
    one("bf16: padded keys not masked", BF16, "b->token[i] = INT_LAST;", "b->token[i] = 0;", MASKS),
    one("bf16: acc not rescaled", BF16, "if (all(alpha == 1.0f)) continue;", "if (all(alpha <= 1.0f)) continue;",
        LONG_AXIS),
    one("bf16: value of a masked key read (NaN)", BF16, "b->strange_v |= any(strange >= 0x7f80u);", "", POISON),
    one("bf16: carried state not loaded", BF16, "const int carried = a.carry_in && ml[0] != -INFINITY;",
        "const int carried = a.carry_in && ml[0] == INFINITY;", CARRY),
    one("bf16: halves of a pair exchanged", BF16, "r->p[pair][i] = low >> 16 | high;",
        "r->p[pair][i] = low | high >> 16;", MASKS),
    one("plain: carried state not loaded", PLAIN, "const int carried = a.carry_in && ml[0] != -INFINITY;",
        "const int carried = a.carry_in && ml[0] == INFINITY;", CARRY),
    one("plain: wrong query heads for a KV head", PLAIN, "const int head = h * group + p % group;",
        "const int head = h + p % group * a.num_kv_heads;", MASKS),
    one("plain: window ignored in the cache", PLAIN, "if (!kvr_visible(row, key, a)) continue;",
        "if (key >= a.ring_end && !kvr_visible(row, key, a)) continue;", WINDOW),
    one("part without weight read (NaN)", MERGE, "  if (!(w > 0.0f)) return;\n", "", MERGES),
    one("-inf less -inf in a merge", MERGE, "isinf(top) ? 0.0f : top;", "top;", MERGES),
    one("merged LSE in base 2", MERGE, "top * LN_2 + log(sum)", "top + log2(sum)", MERGES),
    one("row of a page off by one", ROW, "page * a.page_size + x % a.page_size",
        "page * a.page_size + (x + 1) % a.page_size", ROWS),
    one("page of another buffer", ROW, "table[x / a.page_size] - a.page_first;",
        "table[x / a.page_size] % a.page_count;", ROWS),
    one("last word of a row left out", ROW, "i = wide * WORDS + part; i < words; i += n",
        "i = wide * WORDS + part; i < words - 1; i += n", ROWS),
    one("tail of a row read as a whole vector", "kernels_cl/numbers.h",
        "for (int d = 0; d < HEAD_DIM % LANES; d++) ((float *)&x)[d] = load1(p + d);",
        "const float16 y = load16(p);\n"
        "  for (int d = 0; d < HEAD_DIM % LANES; d++) ((float *)&x)[d] = ((const float *)&y)[d];", MICROSCOPE),
    one("merge reads a part too many", MERGE, "  for (int j = 0; j <= a.num_parts; j++)\n    top =",
        "  for (int j = 0; j <= a.num_parts + 1; j++)\n    top =", MICROSCOPE),
    one("a wrong kernel in the library", SPANS, "max(token + 1 - a.window, -a.num_cached)",
        "max(token - a.window, -a.num_cached)", VARIANTS),
    one("self-test that compares nothing", "host/device/self_test.c",
        "if (!(fabs(got - lse) <= (bf16_products(t) ? 1e-2 : 1e-4) * (1 + fabs(lse))))", "if (got > HUGE_VAL * lse)", SELF_TEST),
]

BREAKS = SCHEDULE + CORE + DEVICE + EXECUTOR + KERNELS
