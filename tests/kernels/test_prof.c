/* test_prof.c - FLOPs and bytes counted by the op wrappers; records and output of a profile. */
#include "kernels/prof.h"

#include <math.h>
#include <signal.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "data/json/json.h"
#include "tests/op_check.h"
#include "tests/process.h"
#include "train/config/config.h"
#include "train/report/profile.h"

static const struct norm norm = {.eps = 1e-5f};

/* y = rmsnorm(x), x [rows, 32] */
static void run_norm(struct device *dev, int64_t rows)
{
    struct tensor x = make_random(dev->act_dtype, 1, 1, rows, 32, -1), y = make_empty(dev->act_dtype, rows, 32, -1);
    struct tensor w = make_random(DT_F32, 2, 1, 32, -1, -1), rstd = make_empty(dev->stat_dtype, rows, -1, -1);
    op_rmsnorm_fwd(dev, y, rstd, x, w, &norm);
}

/* y [rows, n_out] = x [rows, 64] W^T */
static void run_linear(struct device *dev, int64_t rows, int64_t n_out)
{
    const struct proj proj = {.w = make_weight(WF_BF16, 3, 1, 1, n_out, 64)};
    struct tensor x = make_random(dev->act_dtype, 4, 1, rows, 64, -1), y = make_empty(dev->act_dtype, rows, n_out, -1);
    op_linear_fwd(dev, y, (struct tensor){0}, x, &proj, (struct tensor){0});
}

static void test_rows(void **state)
{
    (void)state;
    struct device dev;
    struct prof p;
    op_check_begin(&dev, false);
    prof_open(&p, &dev);
    run_norm(&dev, 5); /* before the profile: not recorded */
    for (int span = 0; span < 2; span++) {
        prof_begin(&p);
        run_norm(&dev, 10);
        run_linear(&dev, 7, 96);
        run_linear(&dev, 7, 128);
        run_norm(&dev, 10);
        prof_end(&p);
        assert_null(dev.recorder);
    }
    run_norm(&dev, 5);
    assert_int_equal(p.n_rows, 3);
    assert_string_equal(p.rows[0].name, "rmsnorm_fwd");
    assert_string_equal(p.rows[1].name, "linear_fwd");
    assert_int_equal(p.rows[1].part, 96);
    assert_int_equal(p.rows[2].part, 128);
    assert_int_equal(p.rows[0].calls, 4);
    assert_int_equal(p.rows[1].calls, 2);
    assert_close(p.rows[0].cost.flops, 0, 0);
    assert_close(p.rows[0].cost.bytes, 4 * (2 * 10 * 32 * 4 + 10 * 4 + 32 * 4), 0);
    assert_close(p.rows[1].cost.flops, 2 * 2.0 * 7 * 96 * 64, 0);
    assert_close(p.rows[1].cost.bytes, 2 * (7 * 64 * 4 + 7 * 96 * 4 + 96 * 64 * 2), 0);
    assert_int_equal(p.n_events, 8);
    assert_int_equal(p.n_spans, 2);
    assert_int_equal(p.n_lost, 0);
    double sum = 0;
    for (int i = 0; i < p.n_rows; i++) {
        assert_true(p.rows[i].ms >= 0);
        assert_close(p.rows[i].floor_ms, 0, 0); /* no roofs */
        sum += p.rows[i].ms;
    }
    assert_true(sum > 0 && sum <= p.span_ms);
    for (int64_t i = 1; i < p.n_events; i++)
        assert_true(p.events[i].start_ms >= p.events[i - 1].start_ms + p.events[i - 1].ms - 1e-9);
    prof_close(&p);
    op_check_end(&dev);
}

/* Two rows read at most two of the 8 experts, with their adapters. */
static void test_expert_bytes(void **state)
{
    (void)state;
    enum { E = 8, R = 8, IN = 64, OUT = 32, ROWS = 2 };
    const int32_t idx[ROWS] = {1, 5}, slots[ROWS] = {0, 1}, offs[E + 1] = {0, 0, 1, 1, 1, 1, 2, 2, 2};
    struct device dev;
    struct prof p;
    op_check_begin(&dev, false);
    struct proj proj = {.w = make_weight(WF_BF16, 1, 0.3, E, OUT, IN)};
    const struct route r = {.idx = tensor_2d(make_i32(idx, ROWS).data, DT_I32, ROWS, 1),
                            .gate = make_random(dev.stat_dtype, 2, 1, ROWS, 1, -1),
                            .offs = make_i32(offs, E + 1),
                            .row_slot = make_i32(slots, ROWS),
                            .slot_row = tensor_2d(make_i32(slots, ROWS).data, DT_I32, ROWS, 1)};
    proj.lora = (struct lora){.r = R, .n_seg = 1, .scale = {1}, .seg_cols = {OUT}};
    proj.lora.a = make_random(dev.act_dtype, 3, 1, E, R, IN);
    proj.lora.b = make_random(dev.act_dtype, 4, 1, E, OUT, R);
    prof_open(&p, &dev);
    prof_begin(&p);
    op_moe_down_fwd(&dev, make_empty(dev.act_dtype, ROWS, OUT, -1), make_empty(dev.act_dtype, ROWS, R, -1),
                    make_random(dev.act_dtype, 5, 1, ROWS, IN, -1), &r, &proj);
    prof_end(&p);
    assert_close(p.rows[0].cost.bytes, 4 * ROWS * (OUT + R + IN) + ROWS * (2 * OUT * IN + 4 * R * (IN + OUT)), 0);
    prof_close(&p);
    op_check_end(&dev);
}

/* With more ops than PROF_RECORDS, the first ones are timed, and the number of the others is reported. */
static void test_overflow(void **state)
{
    (void)state;
    struct device dev;
    struct prof p;
    op_check_begin(&dev, false);
    struct tensor a = make_random(dev.stat_dtype, 1, 1, 8, -1, -1), b = make_empty(dev.act_dtype, 8, -1, -1);
    prof_open(&p, &dev);
    prof_begin(&p);
    for (int i = 0; i < PROF_RECORDS + 3; i++) op_cast(&dev, b, a);
    prof_end(&p);
    assert_int_equal(p.n_events, PROF_RECORDS);
    assert_int_equal(p.n_lost, 3);
    prof_begin(&p);
    op_cast(&dev, b, a);
    prof_end(&p);
    assert_int_equal(p.n_events, PROF_RECORDS + 1);
    assert_int_equal(p.n_lost, 3);
    prof_close(&p);
    op_check_end(&dev);
}

/* floor_ms is counted without a profile, and by a dry run too. */
static void test_floor(void **state)
{
    (void)state;
    struct device dev, measuring;
    op_check_begin(&dev, false);
    dev.roofs = (struct roofs){.flops = 1e9, .bytes = 1e8};
    run_norm(&dev, 10);
    const double norm_bytes = 2 * 10 * 32 * 4 + 10 * 4 + 32 * 4;
    assert_close(dev.floor_ms, 1e3 * norm_bytes / 1e8, 1e-12);
    dev.floor_ms = 0;
    run_linear(&dev, 700, 96);
    assert_close(dev.floor_ms, 1e3 * 2.0 * 700 * 96 * 64 / 1e9, 1e-12);
    device_dry_run(&measuring, &dev);
    run_linear(&measuring, 700, 96);
    assert_close(measuring.floor_ms, dev.floor_ms, 0);
    op_check_end(&dev);
}

/* A step faster than its floor raises the roofs, for itself and for later steps: no share of the roof exceeds 1. */
static void test_share(void **state)
{
    (void)state;
    struct device dev;
    op_check_begin(&dev, false);
    dev.roofs = (struct roofs){.flops = 1e9, .bytes = 1e8};
    assert_close(prof_share(&dev, 50, 100), 0.5, 0);
    assert_close(prof_share(&dev, 50, 0), 0, 0);
    assert_close(prof_share(&dev, 100, 100), 1, 0);
    assert_close(dev.roofs.flops, 1e9, 0);
    assert_close(prof_share(&dev, 250, 100), 1, 0);
    assert_close(dev.roofs.flops, 2.5e9, 1e-12);
    assert_close(dev.roofs.bytes, 2.5e8, 1e-12);
    /* the portable kernels have another roof; dense layers keep the library's roof */
    dev.roofs.portable_flops = 1e9;
    assert_close(cost_ms(&dev.roofs, &(struct cost){.flops = 1e9}), 1e3, 1e-12);
    assert_close(cost_ms(&dev.roofs, &(struct cost){.flops = 1e9, .dense = true}), 400, 1e-12);
    assert_close(prof_share(&dev, 200, 100), 1, 0);
    assert_close(dev.roofs.portable_flops, 2e9, 1e-12);
    dev.roofs = (struct roofs){.flops = 2.5e9, .bytes = 2.5e8, .portable_flops = 1e9};
    dev.floor_ms = 0;
    run_linear(&dev, 700, 96); /* bound by FLOPs */
    const double ms = 1e3 * 2.0 * 700 * 96 * 64 / 2.5e9;
    assert_close(prof_share(&dev, dev.floor_ms, ms), 1, 1e-12);
    dev.roofs = (struct roofs){0};
    assert_close(prof_share(&dev, 0, 100), 0, 0);
    op_check_end(&dev);
}

/* Packed experts are decoded first; experts that cannot have rows do not count. */
static void test_packed_cost(void **state)
{
    (void)state;
    enum { E = 8, F = 32, D = 64, J = 1 };
    struct device dev;
    op_check_begin(&dev, false);
    struct device measuring;
    device_dry_run(&measuring, &dev);
    measuring.roofs = (struct roofs){.flops = 1e30, .bytes = 1e3};
    const struct proj down = {.w = {.format = WF_MXFP4, .n_exp = E, .n_out = D, .n_in = F}};
    const int64_t rows[] = {4, 16};
    for (int i = 0; i < 2; i++) {
        const int64_t t = rows[i];
        struct route r = {.idx = tensor_2d(NULL, DT_I32, t, J),
                          .gate = tensor_2d(NULL, dev.stat_dtype, t, J),
                          .offs = tensor_1d(NULL, DT_I32, E + 1),
                          .row_slot = tensor_1d(NULL, DT_I32, t * J),
                          .slot_row = tensor_2d(NULL, DT_I32, t, J)};
        measuring.floor_ms = 0;
        op_moe_down_fwd(&measuring, tensor_2d(NULL, dev.act_dtype, t, D), (struct tensor){0},
                        tensor_2d(NULL, dev.act_dtype, t, F), &r, &down);
        const double n = (double)MT_MIN(t, E) * D * F, packed = n / 2 + n / 32;
        assert_close(measuring.floor_ms, (double)(t * (D + F) * 4) + 2 * n + packed + 2 * n, 1e-12);
    }
    op_check_end(&dev);
}

/* The indexer chooses for tokens that see more than K entries: here, from position 11 of a sequence on. A plan has as
 * many sequences as tokens. */
static void test_choice_cost(void **state)
{
    (void)state;
    enum { T = 40, K = 2, RATIO = 4, H = 2, A = 8, FEW = (K + 1) * RATIO - 1 };
    static const double pairs[] = {T * (T + 1) / 2, T * (T + 1) / 2, 2 * 20 * 21 / 2, 4 * 10 * 11 / 2};
    static const int64_t n_seq[] = {1, 1, 2, 4}, most[] = {1, T, 2, 4};
    struct device dev, measuring;
    op_check_begin(&dev, false);
    device_dry_run(&measuring, &dev);
    for (int i = 0; i < MT_LEN(pairs); i++) {
        const struct seqs seqs = {make_empty(DT_I32, most[i] + 1, -1, -1), .n_seq = most[i], .max_len = T,
                                  .pairs = pairs[i]};
        const double few = (double)MT_MIN(T, n_seq[i] * FEW), rows = T - few;
        measuring.flops = measuring.floor_ms = 0;
        measuring.roofs = (struct roofs){.flops = 1e30, .bytes = 1e3};
        op_index_topk(&measuring, make_empty(DT_I32, T, K, -1), make_empty(dev.act_dtype, T, H * A, -1),
                      make_empty(dev.act_dtype, T / RATIO, A, -1), make_empty(dev.act_dtype, T, H, -1), &seqs, RATIO);
        assert_close(measuring.flops, MT_MAX(0, pairs[i] - few * (FEW + 1) / 2) * 2 * H * A / RATIO, 1e-12);
        assert_close(measuring.floor_ms, 4 * (T * K + rows * (H * A + H) + T / RATIO * A), 1e-12);
    }
    op_check_end(&dev);
}

static void check_roofs(struct device *dev, double flops, double bytes)
{
    struct err err = {{0}};
    const struct arena before = dev->work;
    const double start = clock_ms();
    if (prof_measure_roofs(dev, &err)) fail_msg("%s", err.msg);
    print_message("%s: %.4g TFLOP/s, %.4g GB/s, smallest op %.3g us, measured in %.0f ms\n", dev->name,
                  dev->roofs.flops / 1e12, dev->roofs.bytes / 1e9, 1e3 * dev->roofs.launch_ms, clock_ms() - start);
    assert_true(dev->roofs.flops > flops && dev->roofs.bytes > bytes);
    assert_true(dev->ops->own_memory == (dev->roofs.launch_ms > 0) && dev->roofs.launch_ms < 1);
    assert_true(dev->roofs.portable_flops < dev->roofs.flops);
    assert_true(!strstr(dev->name, "portable") || !strstr(dev->name, "NVIDIA H") || dev->roofs.portable_flops > flops);
    assert_memory_equal(&before, &dev->work, sizeof(before));
    struct device roomy = *dev;
    roomy.work.cap = roomy.work.used = 0;
    assert_close(prof_sustained_flops(&roomy, 1e-3), 0, 0);
    if (device_reserve(&roomy, &roomy.work, "products", 1 << 30, &err)) fail_msg("%s", err.msg);
    const double sustained = prof_sustained_flops(&roomy, 1e-3);
    dev->ops->free(roomy.work.base);
    if (!(sustained > flops)) fail_msg("%g FLOP/s in products one after the other", sustained);
    assert_close(dev->flops, 0, 0);
}

static void test_roofs(void **state)
{
    (void)state;
    struct device dev;
    struct err err;
    op_check_begin(&dev, false);
    check_roofs(&dev, 1e8, 1e8);
    op_check_end(&dev);
    device_open_oracle(&dev);
    check_roofs(&dev, 1e8, 1e8);
    device_close(&dev);
    if (device_open(&dev, "cpu", "bf16", &err)) fail_msg("%s", err.msg);
    check_roofs(&dev, 1e8, 1e8);
    device_close(&dev);
}

static void test_gpu(void **state)
{
    (void)state;
    struct device dev;
    struct err err;
    struct prof p;
    struct dev_calls calls;
    op_check_need_gpu();
    if (device_open(&dev, "cuda-portable", "auto", &err)) fail_msg("%s", err.msg);
    check_roofs(&dev, 1e13, 1e11);
    device_close(&dev);
    if (device_open(&dev, "cuda", "auto", &err)) fail_msg("%s", err.msg);
    check_roofs(&dev, 1e13, 1e11);
    if (device_reserve(&dev, &dev.work, "work", 64 << 20, &err)) fail_msg("%s", err.msg);
    struct tensor from = arena_tensor_1d(&dev.work, DT_F32, 4 << 20), to = arena_tensor_1d(&dev.work, DT_BF16, 4 << 20);
    device_zero(&dev, from);
    prof_open(&p, &dev);
    dev.ops->count_calls(true, &calls);
    prof_begin(&p);
    for (int i = 0; i < 10; i++) op_cast(&dev, to, from);
    prof_end(&p);
    dev.ops->count_calls(false, &calls);
    assert_int_equal(p.n_events, 10);
    assert_true(p.rows[0].ms > 0 && p.rows[0].ms <= p.span_ms);
    assert_true(p.rows[0].floor_ms > 0);
    char text[128];
    print_message("%s\n", profile_calls(text, &calls, 1));
    if (!calls.missing) {
        assert_int_equal(calls.launches, 10);
        assert_int_equal(calls.waits, 1);
    }
    prof_close(&p);
    device_close(&dev);
}

/* ---- output */

static struct json load(const char *path, struct json_doc **doc)
{
    struct err err;
    *doc = json_load(path, 1 << 20, &err);
    if (!*doc) fail_msg("%s", err.msg);
    return json_root(*doc);
}

static void test_profile_range(void **state)
{
    (void)state;
    static const char *const bad[] = {"3", "0:2", "5:4", "1:2x", "a:b", "-1:3"};
    struct profile p;
    struct err err = {{0}};
    assert_int_equal(config_profile("", &p.first, &p.last, &err), 0);
    assert_int_equal(p.first, 0);
    assert_int_equal(config_profile("3:14", &p.first, &p.last, &err), 0);
    assert_int_equal(p.first, 3);
    assert_int_equal(p.last, 14);
    for (int i = 0; i < MT_LEN(bad); i++) {
        assert_int_equal(config_profile(bad[i], &p.first, &p.last, &err), -1);
        assert_non_null(strstr(err.msg, bad[i]));
    }
}

static void test_profile_files(void **state)
{
    (void)state;
    const char *dir = scratch_dir();
    char path[MT_PATH];
    struct device dev;
    struct profile p = {.first = 2, .last = 3, .dir = dir};
    struct err err = {{0}};
    struct json_doc *doc;
    double ts = -1, last = -1;
    const char *name;
    op_check_begin(&dev, false);
    snprintf(path, sizeof(path), "%s/trace.json", dir);
    for (int64_t step = 1; step <= 5; step++) {
        profile_step_begin(&p, &dev, step);
        run_linear(&dev, 7, 96);
        run_norm(&dev, 9);
        assert_int_equal(profile_step_end(&p, step, &err), 0);
        assert_int_equal(access(path, F_OK), step < 3 ? -1 : 0);
        assert_null(dev.recorder);
    }
    struct json events = load(path, &doc);
    assert_int_equal(json_count(events), 7); /* a process name, four ops, two arena counters */
    for (int64_t i = 2; i < 6; i++) {
        assert_int_equal(json_get_str(json_at(events, i), "name", &name, &err), 0);
        assert_string_equal(name, i % 2 ? "rmsnorm_fwd" : "linear_fwd 96");
        assert_int_equal(json_get_f64(json_at(events, i), "ts", &ts, &err), 0);
        assert_true(ts > last);
        last = ts;
    }
    json_free(doc);
    snprintf(path, sizeof(path), "%s/profile.txt", dir);
    assert_int_equal(access(path, F_OK), 0);
    profile_close(&p);
    op_check_end(&dev);
}

/* The use of the arenas when an op is issued is a counter in the trace, at every change and at the end. */
static void test_arena_counters(void **state)
{
    (void)state;
    const char *dir = scratch_dir();
    char path[MT_PATH];
    struct device dev;
    struct prof p;
    struct err err = {{0}};
    struct json_doc *doc;
    int64_t n = 0, work[8] = {0}, weights = -1;
    op_check_begin(&dev, false);
    prof_open(&p, &dev);
    prof_begin(&p);
    dev.weights.used = 1 << 20;
    for (int i = 0; i < 4; i++) {
        dev.work.used = i < 2 ? 512 : 4096 * i;
        run_norm(&dev, 9);
    }
    prof_end(&p);
    dev.weights.used = dev.work.used = 0;
    snprintf(path, sizeof(path), "%s/trace.json", dir);
    assert_int_equal(profile_trace(&p, 0, 1, path, &err), 0);
    struct json events = load(path, &doc);
    for (int64_t i = 0; i < json_count(events) && n < 8; i++) {
        const char *kind;
        assert_int_equal(json_get_str(json_at(events, i), "ph", &kind, &err), 0);
        if (strcmp(kind, "C")) continue;
        const struct json args = json_find(json_at(events, i), "args");
        assert_int_equal(json_get_i64(args, "weights", 0, INT64_MAX, &weights, &err), 0);
        assert_int_equal(weights, 1 << 20);
        assert_int_equal(json_get_i64(args, "work", 0, INT64_MAX, &work[n++], &err), 0);
    }
    const int64_t want[8] = {512, 8192, 12288, 12288};
    assert_int_equal(n, 4);
    assert_memory_equal(work, want, sizeof(want));
    json_free(doc);
    prof_close(&p);
    op_check_end(&dev);
}

/* ---- train.profile of whole runs */

/* Counts in a trace: optimizer steps, by their AdamW, and arena counters; pid is that of all events. */
static int64_t steps_in(const char *path, int64_t pid)
{
    static char table[1 << 16];
    struct json_doc *doc;
    struct err err;
    struct json events = load(path, &doc);
    int64_t updates = 0, counters = 0, names = 0, taken = 0;
    for (int64_t i = 0; i < json_count(events); i++) {
        const char *name, *kind;
        int64_t id;
        assert_int_equal(json_get_str(json_at(events, i), "name", &name, &err), 0);
        assert_int_equal(json_get_str(json_at(events, i), "ph", &kind, &err), 0);
        assert_int_equal(json_get_i64(json_at(events, i), "pid", 0, 99, &id, &err), 0);
        assert_int_equal(id, pid);
        updates += !strcmp(name, "adamw");
        names += !strcmp(name, "process_name") && *kind == 'M';
        counters += *kind == 'C';
        if (*kind != 'C') continue;
        int64_t now;
        assert_int_equal(json_get_i64(json_find(json_at(events, i), "args"), "work", 0, INT64_MAX, &now, &err), 0);
        taken = MT_MAX(taken, now);
    }
    json_free(doc);
    assert_int_equal(names, 1);
    assert_true(counters > 10 && taken > 10000);
    char file[MT_PATH];
    snprintf(file, sizeof(file), "%.*s", (int)(strrchr(path, '/') - path), path);
    snprintf(file + strlen(file), 64, pid ? "/profile-rank%d.txt" : "/profile.txt", (int)pid);
    process_read(file, table, sizeof(table));
    assert_says(table, "adamw");
    return updates;
}

/* A range that extends beyond the last step, one after the last step, and two ranks. */
static void test_runs_that_end_early(void **state)
{
    (void)state;
    const char *config = process_config("[eval]\nat_start = no\nat_end = no\n");
    if (RUN(config, "--set", "train.profile=2:9", "--set", "train.steps=3")) fail_msg("%s", said.err);
    assert_says(said.err, "profile of steps 2 to 3 (train.profile = 2:9; the run made no others): ");
    assert_int_equal(steps_in(process_output(config, "trace.json"), 0), 2);

    config = process_config("[eval]\nat_start = no\nat_end = no\n");
    if (RUN(config, "--set", "train.profile=4:9", "--set", "train.steps=3")) fail_msg("%s", said.err);
    assert_says(said.err, "train.profile = 4:9, but this run makes steps 1 to 3: there will be no profile");
    assert_int_equal(access(process_output(config, "trace.json"), F_OK), -1);

    config = process_config("[parallel]\ncpu_ranks = 2\n[eval]\nat_start = no\nat_end = no\n");
    if (RUN(config, "--set", "train.profile=2:2", "--set", "train.steps=3", "--set", "train.grad_accum=2"))
        fail_msg("%s", said.err);
    assert_says(said.err, "profile of steps 2 to 2: ");
    assert_int_equal(steps_in(process_output(config, "trace.json"), 0), 1);
    assert_int_equal(steps_in(process_output(config, "trace-rank1.json"), 1), 1);
}

/* SIGTERM within the range: the records so far are written. */
static void test_interrupted_run(void **state)
{
    (void)state;
    const struct timespec pause = {.tv_nsec = 20000000};
    const char *config = process_config("[eval]\nat_start = no\nat_end = no\n"), *dir = scratch_dir();
    static char metrics[1 << 16];
    const char *words[] = {config, "--set", "train.profile=2:100000", "--set", "train.steps=100000", NULL};
    const pid_t pid = process_start(dir, words);
    for (int i = 0; i < 1500 && !strstr(metrics, "\"step\": 4,") && !strstr(metrics, "\"step\":4,"); i++) {
        nanosleep(&pause, NULL);
        if (!access(process_output(config, "metrics.jsonl"), R_OK))
            process_read(process_output(config, "metrics.jsonl"), metrics, sizeof(metrics));
    }
    kill(pid, SIGTERM);
    assert_int_equal(process_finish(dir, pid), 130);
    assert_says(said.err, "profile of steps 2 to ");
    const int64_t n = steps_in(process_output(config, "trace.json"), 0);
    assert_true(n >= 3);
}

static void test_table(void **state)
{
    (void)state;
    static struct device dev = {.roofs = {.launch_ms = 0.1}};
    static struct prof p = {.dev = &dev, .n_rows = 2, .span_ms = 10, .n_lost = 7};
    char text[4096] = "";
    p.rows[0] = (struct prof_row){.name = "cast", .calls = 2, .ms = 2, .floor_ms = 1, .cost = {.bytes = 4e6}};
    p.rows[1] = (struct prof_row){
        .name = "linear_fwd", .part = 5120, .calls = 4, .ms = 4, .floor_ms = 3, .cost = {.flops = 8e9, .bytes = 1e6}};
    FILE *out = fmemopen(text, sizeof(text), "w");
    profile_table(&p, out);
    fclose(out);
    const char *first = strstr(text, "linear_fwd 5120"), *second = strstr(text, "cast");
    assert_true(first && second && first < second);
    assert_non_null(strstr(text, "4       4000.0      1000.0         2      0.25    75.0    85.0    40.0"));
    assert_non_null(strstr(text, "2       2000.0      1000.0         0         2    50.0    60.0    20.0"));
    assert_non_null(strstr(text, "between the ops"));
    assert_non_null(strstr(text, "4000.0")); /* 10 - 6 ms */
    assert_non_null(strstr(text, "includes 100.00 us, the time of zeroing 4 bytes"));
    assert_non_null(strstr(text, "the profile is full: 7 ops"));
    dev.roofs.launch_ms = 10; /* at most 100 % */
    out = fmemopen(text, sizeof(text), "w");
    profile_table(&p, out);
    fclose(out);
    assert_non_null(strstr(text, "75.0   100.0    40.0"));
    dev.roofs.launch_ms = 0;
    out = fmemopen(text, sizeof(text), "w");
    profile_table(&p, out);
    fclose(out);
    assert_non_null(strstr(text, "75.0       -    40.0"));
    assert_null(strstr(text, "zeroing 4 bytes"));
    struct json_out o = {0};
    struct err err;
    json_out_open(&o, NULL, '{');
    profile_json(&p, &o, "ops");
    json_out_close(&o, '}');
    struct json_doc *doc = json_parse(o.text, o.size, "profile", &err);
    double floor_us = 0;
    assert_int_equal(json_count(json_find(json_root(doc), "ops")), 2);
    assert_int_equal(json_get_f64(json_at(json_find(json_root(doc), "ops"), 1), "floor_us", &floor_us, &err), 0);
    assert_close(floor_us, 3000, 1e-12);
    json_free(doc);
    json_out_free(&o);
}

static void test_middle(void **state)
{
    (void)state;
    double one[] = {3}, two[] = {5, 2}, three[] = {9, 1, 4}, four[] = {8, 1, 3, 2};
    assert_true(prof_middle(one, 1) == 3 && prof_middle(two, 2) == 3.5);
    assert_true(prof_middle(three, 3) == 4 && prof_middle(four, 4) == 2.5);
    assert_true(four[0] == 1 && four[1] == 2 && four[2] == 3 && four[3] == 8); /* sorted */
}

int test_prof(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows),
        cmocka_unit_test(test_overflow),
        cmocka_unit_test(test_expert_bytes),
        cmocka_unit_test(test_floor),
        cmocka_unit_test(test_share),
        cmocka_unit_test(test_middle),
        cmocka_unit_test(test_packed_cost),
        cmocka_unit_test(test_choice_cost),
        cmocka_unit_test(test_roofs),
        cmocka_unit_test(test_gpu),
        cmocka_unit_test(test_profile_range),
        cmocka_unit_test(test_profile_files),
        cmocka_unit_test(test_table),
        cmocka_unit_test(test_arena_counters),
        cmocka_unit_test(test_runs_that_end_early),
        cmocka_unit_test(test_interrupted_run),
    };
    return cmocka_run_group_tests_name("prof", tests, NULL, NULL);
}
