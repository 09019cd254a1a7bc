/* test_layout.c - adapter files do not depend on the device: one that pads lora ranks (a GPU, to multiples of 8) and
 * one without padding write the same files and read each other's. A CPU whose op table requires multiples of 8 takes
 * the place of the GPU. */
#include <math.h>
#include <stdio.h>

#include "data/file/file.h"
#include "data/safetensors.h"
#include "tests/process.h"
#include "tests/tiny_lora.h"
#include "train/state/checkpoint.h"
#include "train/adapter/peft.h"
#include "train/run/run.h"

#define OPTIMIZER "optimizer.safetensors"
#define OK(rc)    assert_int_equal(check_rc(rc, &err, __LINE__), 0)

static struct run run;
static struct config cfg; /* default values until a run begins */

static int check_rc(int rc, const struct err *err, int line)
{
    if (rc) print_error("line %d: %s\n", line, err->msg);
    return rc;
}

/* ---- adapters of a tiny model, with q, k and v of different ranks */

static struct lora_options mixed_ranks(void)
{
    struct lora_options opt = tiny_options(ALL_TARGETS);
    opt.ranks = "q_proj=3,v_proj=5,experts=4,down_proj=9";
    return opt;
}

/* tiny_open for a device that pads lora ranks to `multiple`, with experts divided among `ep` ranks. */
static void side_open(struct tiny *t, int64_t multiple, struct comm *ep)
{
    const struct lora_options opt = mixed_ranks();
    struct err err = {.msg = ""};
    struct device measure;
    *t = (struct tiny){.arch = tiny_arch()};
    t->arch.n_exp = 4;
    OK(device_open(&t->dev, "cpu", "fp32", &err));
    const struct parallel par = {ep, ep, &comm_alone};
    OK(adapters_plan(&t->ad, &t->arch, &opt, &err));
    adapters_layout(&t->ad, &t->arch, multiple, &par);
    device_dry_run(&measure, &t->dev);
    adapters_alloc(&t->ad, &measure, &t->arch);
    OK(device_reserve(&t->dev, &t->dev.state, "state", measure.state.peak, &err));
    adapters_alloc(&t->ad, &t->dev, &t->arch);
}

/* A host array in the logical layout without zeros; the caller frees it with mem_free. */
static float *some_values(const struct adapters *whole, uint64_t seed)
{
    float *x = mem_array(whole->n_flat, sizeof(*x));
    for (int64_t i = 0; i < whole->n_params; i++) {
        const struct lora_param *p = &whole->params[i];
        for (int64_t k = p->off; k < p->off + lora_param_count(p); k++)
            x[k] = (float)(2 + test_value(seed, (uint64_t)k));
    }
    return x;
}

static void fill_side(struct tiny *t, uint64_t seed)
{
    const struct tensor flat[] = {t->ad.opt.param, t->ad.opt.state[0], t->ad.opt.state[1]};
    for (uint64_t f = 0; f < 3; f++) {
        float *x = some_values(adapters_logical(&t->ad), seed + f);
        adapters_put(&t->ad, &t->dev, flat[f], DT_F32, x);
        mem_free(x);
    }
    t->ad.opt.step = 41;
}

static double absolute_sum(const float *x, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += fabs((double)x[i]);
    return sum;
}

/* The logical layout is the same on every device; values return unchanged, and the padding on the device is zero. */
static void values_are_restored(void **state)
{
    (void)state;
    struct tiny plain;
    side_open(&plain, 1, &comm_alone);
    const struct adapters *want = adapters_logical(&plain.ad);
    float *x = some_values(want, 1);
    for (int64_t multiple = 1; multiple <= 8; multiple += 7) {
        float *sum = mem_array(want->n_flat, sizeof(*sum));
        for (int rank = 0; rank < 2; rank++) {
            struct comm ep = COMM_ALONE;
            struct tiny t;
            ep.rank = rank;
            ep.world = 2;
            side_open(&t, multiple, &ep);
            const struct adapters *whole = adapters_logical(&t.ad);
            assert_int_equal(whole->n_flat, want->n_flat);
            assert_int_equal(whole->n_params, want->n_params);
            assert_memory_equal(whole->params, want->params, (size_t)want->n_params * sizeof(*want->params));
            assert_int_equal(tiny_layer(&t, 0).attention.qkv.lora.r, multiple == 1 ? 5 : 8);
            assert_int_equal(tiny_layer(&t, 0).down.lora.r, multiple == 1 ? 9 : 16);
            float *out = mem_array(want->n_flat, sizeof(*out));
            adapters_put(&t.ad, &t.dev, t.ad.opt.grad, DT_F32, x);
            adapters_get(&t.ad, &t.dev, t.ad.opt.grad, DT_F32, out);
            assert_close(absolute_sum(t.ad.opt.grad.data, t.ad.n_flat), absolute_sum(out, want->n_flat), 1e-12);
            for (int64_t i = 0; i < want->n_flat; i++) {
                assert_true(out[i] == 0 || out[i] == x[i]);
                if (out[i] != 0) sum[i] = out[i];
            }
            mem_free(out);
            tiny_close(&t);
        }
        assert_memory_equal(sum, x, (size_t)want->n_flat * sizeof(*x)); /* the two ranks together hold all values */
        mem_free(sum);
    }
    mem_free(x);
    tiny_close(&plain);
}

/* ---- checkpoints */

static void path_of(char path[MT_PATH], const char *out, const char *file)
{
    struct err err;
    OK(str_format(path, MT_PATH, &err, "path", "%s/checkpoints/step-000001%s%s", out, *file ? "/" : "", file));
}

static void save(struct tiny *t, const char *out)
{
    const struct train_state now = {.step = 1};
    struct err err = {.msg = ""};
    config_defaults(&cfg);
    OK(checkpoint_save(out, &t->ad, &t->dev, &now, &cfg, NULL, NULL, NULL, NULL, 0, &err));
}

static int load(struct tiny *t, const char *out, struct err *err)
{
    struct train_state now;
    char dir[MT_PATH];
    path_of(dir, out, "");
    return checkpoint_load(dir, &t->ad, &t->dev, &now, err);
}

/* Compares parameters and moments of two checkpoints, file by file. */
static void assert_same_checkpoint(const char *a, const char *b)
{
    static const char *const files[] = {OPTIMIZER, "adapter/adapter_model.safetensors", "state.json"};
    char x[MT_PATH], y[MT_PATH];
    for (int i = 0; i < MT_LEN(files); i++) {
        path_of(x, a, files[i]);
        path_of(y, b, files[i]);
        assert_same_file(x, y);
    }
}

static void devices_read_each_others_checkpoints(void **state)
{
    (void)state;
    static const int64_t rows[][2] = {{8, 1}, {1, 8}, {8, 8}, {1, 1}};
    for (int i = 0; i < MT_LEN(rows); i++) {
        struct tiny a, b;
        struct err err = {.msg = ""};
        char first[MT_PATH], again[MT_PATH];
        snprintf(first, sizeof(first), "%s", scratch_dir());
        snprintf(again, sizeof(again), "%s", scratch_dir());
        side_open(&a, rows[i][0], &comm_alone);
        side_open(&b, rows[i][1], &comm_alone);
        fill_side(&a, 1);
        fill_side(&b, 50);
        save(&a, first);
        OK(load(&b, first, &err));
        save(&b, again);
        assert_same_checkpoint(first, again);
        float *want = some_values(adapters_logical(&a.ad), 3),
              *got = mem_array(adapters_logical(&b.ad)->n_flat, sizeof(*got));
        adapters_get(&b.ad, &b.dev, b.ad.opt.state[1], DT_F32, got);
        assert_memory_equal(got, want, (size_t)adapters_logical(&b.ad)->n_flat * sizeof(*got));
        mem_free(want);
        mem_free(got);
        tiny_close(&a);
        tiny_close(&b);
    }
}

/* ---- checkpoints of earlier versions, in the device's layout */

static void replace_line(const char *out, const char *file)
{
    char path[MT_PATH], manifest[MT_PATH], text[2048], line[256], now[4096];
    struct err err;
    uint32_t crc;
    int64_t bytes;
    path_of(path, out, file);
    path_of(manifest, out, "manifest.json");
    OK(file_crc32(path, &crc, &bytes, &err));
    process_read(manifest, text, sizeof(text));
    snprintf(line, sizeof(line), "\"%s\": {\"size\": ", file);
    char *at = strstr(text, line), *end = at ? strchr(at, '}') : NULL;
    assert_non_null(end);
    *at = '\0';
    snprintf(now, sizeof(now), "%s%s%lld, \"crc32\": \"%08x\"%s", text, line, (long long)bytes, crc, end);
    OK(file_write_atomic(manifest, now, (int64_t)strlen(now), &err));
}

/* Rewrites masters and moments of the checkpoint in the layout of t's device. `spoil` is written into the padding of
 * the first moments of layer 0's q_proj.lora_B. */
static void write_padded(struct tiny *t, const char *out, float spoil)
{
    static const char *const names[] = {"param", "m", "v"};
    const struct tensor flat[] = {t->ad.opt.param, t->ad.opt.state[0], t->ad.opt.state[1]};
    const int64_t n = t->ad.n_params;
    struct st_entry *entries = mem_array(3 * n, sizeof(*entries));
    char(*text)[80] = mem_array(3 * n, sizeof(*text)), path[MT_PATH];
    struct err err = {.msg = ""};
    for (int64_t i = 0; i < 3 * n; i++) {
        const struct lora_param *p = &t->ad.params[i % n];
        float *values = (float *)flat[i / n].data + p->off;
        char name[64];
        lora_param_name(p, name);
        snprintf(text[i], sizeof(*text), "%s.%s", names[i / n], name);
        if (!strcmp(text[i], "m.layers.0.q_proj.lora_B")) values[p->cols - 1] = spoil;
        entries[i] = (struct st_entry){
            .name = text[i], .dtype = DT_F32, .ndim = 3, .shape = {p->n_exp, p->rows, p->cols}, .data = values};
    }
    path_of(path, out, OPTIMIZER);
    OK(safetensors_write(path, entries, 3 * n, &err));
    replace_line(out, OPTIMIZER);
    mem_free(entries);
    mem_free(text);
}

static void padded_checkpoints_are_read(void **state)
{
    (void)state;
    for (int64_t multiple = 1; multiple <= 8; multiple += 7)
        for (int64_t old = 1; old <= 8; old += 7) {
            struct tiny a, b;
            struct err err = {.msg = ""};
            char want[MT_PATH], out[MT_PATH], again[MT_PATH];
            snprintf(want, sizeof(want), "%s", scratch_dir());
            snprintf(out, sizeof(out), "%s", scratch_dir());
            snprintf(again, sizeof(again), "%s", scratch_dir());
            side_open(&a, old, &comm_alone);
            side_open(&b, multiple, &comm_alone);
            fill_side(&a, 1);
            save(&a, want);
            save(&a, out);
            write_padded(&a, out, 0);
            OK(load(&b, out, &err));
            save(&b, again);
            assert_same_checkpoint(want, again);

            write_padded(&a, out, 1e-30f); /* nonzero padding */
            assert_int_equal(load(&b, out, &err), -1);
            assert_says(err.msg, old == 8 ? "\"m.layers.0.q_proj.lora_B\" has rank 8, but 3 is configured"
                                          : "\"m.layers.0.q_proj.lora_B\" has rank 5, but 3 is configured");
            tiny_close(&a);
            side_open(&a, 7, &comm_alone); /* a multiple that no version wrote */
            fill_side(&a, 1);
            write_padded(&a, out, 0);
            assert_int_equal(load(&b, out, &err), -1);
            assert_says(err.msg, "\"param.layers.0.q_proj.lora_A\" has a different shape");
            tiny_close(&a);
            tiny_close(&b);
        }
}

/* ---- training */

/* The parity case on a CPU that pads lora ranks to `multiple`. */
static struct loader *run_begin(int64_t multiple)
{
    static struct ops table;
    struct err err;
    config_defaults(&cfg);
    snprintf(cfg.model.path, sizeof(cfg.model.path), "%s", fixture("parity/case_a"));
    snprintf(cfg.data.train, sizeof(cfg.data.train), "%s/train.jsonl", fixture("parity/case_a"));
    snprintf(cfg.output.dir, sizeof(cfg.output.dir), "%s", scratch_dir());
    snprintf(cfg.lora.rank_pattern, sizeof(cfg.lora.rank_pattern), "q_proj=3,v_proj=5");
    cfg.lora.r = 4;
    cfg.lora.dropout = 0.1;
    cfg.data.seq_len = 64;
    cfg.train.device = CFG_DEVICE_CPU;
    cfg.train.threads = 2;
    OK(run_open_headers(&run, &cfg, &err));
    table = *run.dev.ops;
    table.rank_multiple = multiple;
    run.dev.ops = &table;
    OK(run_open_data(&run, true, &err));
    OK(run_open_model(&run, NULL, PLAN_TRAIN, &err));
    struct optimizer *opt = &run.model.adapters.opt;
    opt->beta1 = 0.9, opt->beta2 = 0.999, opt->eps = 1e-8, opt->weight_decay = 0.01, opt->clip_norm = 0.5;
    const struct loader_options lo = run_loader_options(&cfg, true);
    return loader_open(&run.train, &lo, (struct loader_pos){0, 0});
}

/* Trains steps from .. to - 1. */
static void run_steps(struct loader *l, uint64_t from, uint64_t to)
{
    struct model *m = &run.model;
    for (uint64_t s = 0; s < to; s++) {
        struct batch b;
        struct model_sums sum;
        loader_next(l, &b, NULL);
        const struct model_pass pass = {
            .backward = true, .loss_scale = 1 / (double)MT_MAX(b.n_label, 1), .aux_share = 1, .dropout_key = s + 1};
        if (s >= from) {
            device_zero(&run.dev, m->adapters.opt.grad);
            model_clear(m);
            run_micro_batch(&run, &b, &pass);
            model_end(m);
            model_norm(m);
            model_read(m, &sum);
            adapters_update(&m->adapters, &run.dev, 1e-3, sum.grad_norm);
        }
        batch_free(&b);
    }
}

static void run_end(struct loader *l, char out[MT_PATH])
{
    const struct train_state now = {.step = 1};
    struct err err = {.msg = ""};
    snprintf(out, MT_PATH, "%s", scratch_dir());
    OK(checkpoint_save(out, &run.model.adapters, &run.dev, &now, &cfg, NULL, NULL, NULL, NULL, 0, &err));
    loader_close(l);
    run_close(&run);
}

static struct loader *run_continue(int64_t multiple, const char *out)
{
    struct err err = {.msg = ""};
    struct train_state now;
    char dir[MT_PATH];
    struct loader *l = run_begin(multiple);
    path_of(dir, out, "");
    OK(checkpoint_load(dir, &run.model.adapters, &run.dev, &now, &err));
    return l;
}

/* A run that stops on a device with padding, continues on one without, and returns, gives the bytes of an uninterrupted
 * run. */
static void resuming_elsewhere_gives_the_same_bytes(void **state)
{
    (void)state;
    static const int64_t rows[][2] = {{8, 1}, {1, 8}};
    for (int i = 0; i < MT_LEN(rows); i++) {
        char straight[MT_PATH], half[MT_PATH], carried[MT_PATH], end[MT_PATH];
        struct loader *l = run_begin(rows[i][0]);
        run_steps(l, 0, 4);
        run_end(l, straight);
        l = run_begin(rows[i][0]);
        run_steps(l, 0, 2);
        run_end(l, half);
        run_end(run_continue(rows[i][1], half), carried);
        assert_same_checkpoint(half, carried);
        l = run_continue(rows[i][0], carried);
        run_steps(l, 2, 4);
        run_end(l, end);
        assert_same_checkpoint(straight, end);
    }
}

/* Different lora ranks of q, k and v; experts and moments divided among processes; one process continues the run. */
static void processes_share_one_layout(void **state)
{
    (void)state;
    static const char common[] = "[parallel]\ncpu_ranks = %d\nep = %d\nzero = yes\n[optim]\nschedule = constant\n"
                                 "warmup_ratio = 0\n";
    char more[512], alone[MT_PATH], many[MT_PATH], pattern[] = "lora.rank_pattern=q_proj=3,v_proj=5";
    for (int i = 0; i < 2; i++) {
        snprintf(more, sizeof(more), common, i ? 4 : 1, i ? 2 : 1);
        snprintf(i ? many : alone, MT_PATH, "%s", process_config(more));
        const char *config = i ? many : alone;
        if (RUN(config, "--set", pattern, "--set", "train.grad_accum=4", "--set", "train.threads=1"))
            fail_msg("%s", said.err);
    }
    assert_true(adapter_error(many, alone) < 1e-4);
    if (RUN(many, "--set", pattern, "--set", "train.grad_accum=4", "--set", "train.threads=1", "--set",
            "parallel.cpu_ranks=1", "--set", "parallel.ep=1", "--set", "train.steps=3"))
        fail_msg("%s", said.err);
    assert_says(said.err, "continuing after step 2 of 3");
}

/* The names of an adapter's file stay, here those with language_model, whether or not the device pads lora ranks. */
static void names_of_a_file_stay(void **state)
{
    (void)state;
    char dir[3][MT_PATH], file[3][MT_PATH];
    for (int i = 0; i < 3; i++) {
        struct tiny t;
        struct err err = {.msg = ""};
        side_open(&t, i == 1 ? 8 : 1, &comm_alone);
        if (i == 0) fill_side(&t, 1);
        if (i == 0) t.ad.nested = t.ad.logical->nested = true;
        if (i > 0) OK(peft_load(&t.ad, &t.dev, dir[i - 1], &err));
        snprintf(dir[i], MT_PATH, "%s", scratch_dir());
        OK(peft_save(&t.ad, &t.dev, dir[i], "org/base", NULL, &err));
        OK(str_format(file[i], MT_PATH, &err, "path", "%s/adapter_model.safetensors", dir[i]));
        if (i > 0) assert_same_file(file[i - 1], file[i]);
        tiny_close(&t);
    }
}

int test_layout(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(values_are_restored),         cmocka_unit_test(devices_read_each_others_checkpoints),
        cmocka_unit_test(padded_checkpoints_are_read), cmocka_unit_test(resuming_elsewhere_gives_the_same_bytes),
        cmocka_unit_test(processes_share_one_layout),  cmocka_unit_test(names_of_a_file_stay),
    };
    return cmocka_run_group_tests_name("layout", tests, NULL, NULL);
}
