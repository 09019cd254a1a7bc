/* test_checkpoint.c - a run resumes exactly; damaged checkpoints are detected, named and skipped. */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "data/file/file.h"
#include "tests/process.h"
#include "tests/tiny_lora.h"
#include "train/state/checkpoint.h"
#include "train/adapter/peft.h"

static const char *const files[] = {"adapter/adapter_config.json", "adapter/adapter_model.safetensors",
                                    "optimizer.safetensors", "state.json"};

static struct train_state some_state(int64_t step)
{
    return (struct train_state){.step = step,
                                .pos = {.epoch = 2, .index = 5},
                                .n_nonfinite = 1,
                                .tokens = INT64_MAX,
                                .smooth_loss = 1.0 / 3,
                                .best_loss = 2.718281828459045,
                                .best_step = step - 1,
                                .eval_step = -1,
                                .seed = UINT64_MAX,
                                .data_hash = 0x8000000000000001u,
                                .model_hash = 0};
}

static const struct config *settings(void)
{
    static struct config c;
    config_defaults(&c);
    return &c;
}

/* Second moments are not negative. */
static void fill_moments(struct tiny *t, uint64_t seed)
{
    const struct tensor v = t->ad.opt.state[1];
    tiny_fill(t, v, seed);
    for (int64_t i = 0; i < t->ad.n_flat; i++) {
        if (v.dtype == DT_F64)
            ((double *)v.data)[i] = fabs(((double *)v.data)[i]);
        else
            ((float *)v.data)[i] = fabsf(((float *)v.data)[i]);
    }
}

static void open_filled(struct tiny *t, const char *targets, const char *dtype)
{
    struct arch a = tiny_arch();
    struct lora_options opt = tiny_options(targets);
    tiny_open(t, &a, &opt, dtype);
    tiny_fill(t, t->ad.opt.param, 1);
    tiny_fill(t, t->ad.opt.state[0], 2);
    fill_moments(t, 3);
    t->ad.opt.step = 41;
}

static void save(struct tiny *t, const char *out, int64_t step, int64_t keep)
{
    struct err err = {.msg = ""};
    struct train_state state = some_state(step);
    if (checkpoint_save(out, &t->ad, &t->dev, &state, settings(), NULL, "base", NULL, NULL, keep, &err))
        fail_msg("%s", err.msg);
}

static void path_of(char path[MT_PATH], const char *out, int64_t step, const char *file)
{
    struct err err;
    assert_int_equal(
        str_format(path, MT_PATH, &err, "path", "%s/checkpoints/step-%06d%s%s", out, (int)step, *file ? "/" : "", file),
        0);
}

static void assert_equal_arrays(struct tiny *a, struct tiny *b)
{
    struct tensor x[] = {a->ad.opt.param, a->ad.opt.state[0], a->ad.opt.state[1], a->ad.working};
    struct tensor y[] = {b->ad.opt.param, b->ad.opt.state[0], b->ad.opt.state[1], b->ad.working};
    for (int i = 0; i < 4; i++) {
        assert_int_equal(tensor_bytes(x[i]), tensor_bytes(y[i]));
        assert_memory_equal(x[i].data, y[i].data, (size_t)tensor_bytes(x[i]));
    }
}

static void a_checkpoint_restores_the_exact_state(void **state)
{
    (void)state;
    static const char *const dtypes[] = {"fp32", "bf16", "oracle"};
    static const double losses[] = {INFINITY, 5e-324, 0.1};
    for (int64_t i = 0; i < MT_LEN(dtypes); i++) {
        struct tiny a, b;
        struct err err = {.msg = ""};
        struct train_state want = some_state(1234567), got;
        char path[MT_PATH];
        const char *out = scratch_dir();
        memset(&got, 0xff, sizeof(got));
        want.best_loss = losses[i];
        open_filled(&a, ALL_TARGETS, dtypes[i]);
        adapters_refresh(&a.ad, &a.dev);
        open_filled(&b, ALL_TARGETS, dtypes[i]);
        tiny_fill(&b, b.ad.opt.param, 9);
        fill_moments(&b, 9);
        b.ad.opt.step = 0;
        if (!strcmp(dtypes[i], "oracle")) { /* F64 values that F32 cannot represent */
            double *m = a.ad.opt.state[0].data;
            m[0] = 1.0 / 3;
        }
        assert_int_equal(checkpoint_save(out, &a.ad, &a.dev, &want, settings(), NULL, NULL, NULL, NULL, 2, &err), 0);
        assert_int_equal(checkpoint_newest(out, path, &err), 1);
        if (checkpoint_load(path, &b.ad, &b.dev, &got, &err)) fail_msg("%s", err.msg);
        assert_memory_equal(&got, &want, sizeof(got));
        assert_int_equal(b.ad.opt.step, 41);
        assert_equal_arrays(&a, &b);
        tiny_close(&a);
        tiny_close(&b);
    }
}

static void a_checkpoint_contains_the_adapter(void **state)
{
    (void)state;
    struct tiny a, b;
    struct err err = {.msg = ""};
    char path[MT_PATH];
    const char *out = scratch_dir();
    open_filled(&a, ALL_TARGETS, "fp32");
    open_filled(&b, ALL_TARGETS, "fp32");
    tiny_fill(&b, b.ad.opt.param, 9);
    save(&a, out, 7, 0);
    path_of(path, out, 7, "adapter");
    assert_int_equal(peft_load(&b.ad, &b.dev, path, &err), 0);
    assert_memory_equal(a.ad.opt.param.data, b.ad.opt.param.data, (size_t)tensor_bytes(a.ad.opt.param));
    tiny_close(&a);
    tiny_close(&b);
}

static void flip_byte(const char *path, int64_t at, uint8_t bit)
{
    struct err err = {.msg = ""};
    int64_t size;
    char *text = file_read(path, 1 << 20, &size, &err);
    assert_non_null(text);
    text[at < 0 ? size + at : at] ^= (char)bit;
    assert_int_equal(file_write_atomic(path, text, size, &err), 0);
    mem_free(text);
}

/* One flipped bit anywhere in any file is detected, and the error names the file. */
static void every_damaged_file_is_named(void **state)
{
    (void)state;
    struct tiny t;
    struct err err = {.msg = ""};
    struct train_state got;
    char dir[MT_PATH], path[MT_PATH];
    const char *out = scratch_dir();
    open_filled(&t, "q_proj", "fp32");
    save(&t, out, 1, 0);
    path_of(dir, out, 1, "");
    for (int64_t f = 0; f < MT_LEN(files); f++) {
        static const int64_t places[] = {0, 9, 100, -1};
        path_of(path, out, 1, files[f]);
        for (int64_t i = 0; i < MT_LEN(places); i++) {
            flip_byte(path, places[i], 1);
            assert_int_equal(checkpoint_load(dir, &t.ad, &t.dev, &got, &err), -1);
            if (!strstr(err.msg, files[f])) fail_msg("\"%s\" does not name %s", err.msg, files[f]);
            flip_byte(path, places[i], 1);
        }
        assert_int_equal(checkpoint_load(dir, &t.ad, &t.dev, &got, &err), 0);
        char away[MT_PATH + 8];
        snprintf(away, sizeof(away), "%s.away", path);
        assert_int_equal(rename(path, away), 0);
        assert_int_equal(checkpoint_load(dir, &t.ad, &t.dev, &got, &err), -1);
        assert_non_null(strstr(err.msg, files[f]));
        assert_int_equal(rename(away, path), 0);
    }
    path_of(path, out, 1, "manifest.json");
    int64_t size;
    char *text = file_read(path, 1 << 20, &size, &err);
    mem_free(text);
    for (int64_t at = 0; at < size; at++) {
        flip_byte(path, at, 4);
        assert_int_equal(checkpoint_load(dir, &t.ad, &t.dev, &got, &err), -1);
        assert_non_null(strstr(err.msg, "manifest.json"));
        flip_byte(path, at, 4);
    }
    assert_int_equal(unlink(path), 0);
    assert_int_equal(checkpoint_load(dir, &t.ad, &t.dev, &got, &err), -1);
    assert_non_null(strstr(err.msg, "manifest.json"));
    tiny_close(&t);
}

static void truncated_files_are_errors(void **state)
{
    (void)state;
    struct tiny t;
    struct err err = {.msg = ""};
    struct train_state got;
    char dir[MT_PATH], path[MT_PATH];
    const char *out = scratch_dir();
    open_filled(&t, "q_proj", "fp32");
    save(&t, out, 1, 0);
    path_of(dir, out, 1, "");
    for (int64_t f = 0; f <= MT_LEN(files); f++) {
        int64_t size;
        path_of(path, out, 1, f < MT_LEN(files) ? files[f] : "manifest.json");
        char *text = file_read(path, 1 << 20, &size, &err);
        assert_non_null(text);
        for (int64_t cut = 0; cut < size; cut += cut < 64 || cut > size - 64 ? 1 : 37) {
            assert_int_equal(truncate(path, cut), 0);
            assert_int_equal(checkpoint_load(dir, &t.ad, &t.dev, &got, &err), -1);
            FILE *out_file = fopen(path, "wb");
            assert_int_equal(fwrite(text, 1, (size_t)size, out_file), size);
            fclose(out_file);
        }
        mem_free(text);
    }
    assert_int_equal(checkpoint_load(dir, &t.ad, &t.dev, &got, &err), 0);
    /* The size of a sparse file of one terabyte is an error; reading it would take an hour. */
    path_of(path, out, 1, "optimizer.safetensors");
    if (truncate(path, (off_t)1 << 40)) {
        printf("skip: no file of 1 TiB here: %s\n", strerror(errno));
    } else {
        assert_int_equal(checkpoint_load(dir, &t.ad, &t.dev, &got, &err), -1);
        assert_non_null(strstr(err.msg, "optimizer.safetensors is damaged"));
    }
    tiny_close(&t);
}

static void assert_newest(const char *out, int64_t step)
{
    struct err err = {.msg = ""};
    char path[MT_PATH], want[MT_PATH];
    path_of(want, out, step, "");
    assert_int_equal(checkpoint_newest(out, path, &err), 1);
    assert_string_equal(path, want);
}

static void damaged_checkpoints_are_skipped(void **state)
{
    (void)state;
    struct tiny t;
    struct err err = {.msg = ""};
    char path[MT_PATH];
    const char *out = scratch_dir();
    open_filled(&t, "q_proj", "fp32");
    assert_int_equal(checkpoint_newest(out, path, &err), 0);
    save(&t, out, 8, 0);
    save(&t, out, 10, 0);
    save(&t, out, 999999, 0);
    save(&t, out, 1000000, 0); /* newer, though its name sorts earlier */
    assert_newest(out, 1000000);
    path_of(path, out, 1000000, "optimizer.safetensors");
    flip_byte(path, 500, 16);
    assert_newest(out, 999999);
    path_of(path, out, 999999, "manifest.json");
    assert_int_equal(unlink(path), 0);
    assert_newest(out, 10);
    path_of(path, out, 10, "state.json");
    assert_int_equal(truncate(path, 20), 0);
    path_of(path, out, 8, "adapter/adapter_config.json");
    assert_int_equal(unlink(path), 0);
    assert_int_equal(checkpoint_newest(out, path, &err), -1);
    assert_non_null(strstr(err.msg, "all 4 checkpoints are damaged"));
    save(&t, out, 10, 0); /* replaces the damaged one */
    assert_newest(out, 10);
    tiny_close(&t);
}

static void assert_steps(const char *out, const char *want)
{
    struct err err = {.msg = ""};
    char folder[MT_PATH], text[512] = "", **names;
    int64_t n;
    snprintf(folder, sizeof(folder), "%s/checkpoints", out);
    assert_int_equal(file_list(folder, &names, &n, &err), 0);
    for (int64_t i = 0; i < n; i++) {
        if (i) strcat(text, " ");
        strcat(text, names[i]);
    }
    file_list_free(names, n);
    assert_string_equal(text, want);
}

static void only_the_newest_are_kept(void **state)
{
    (void)state;
    struct tiny t;
    const char *out = scratch_dir();
    open_filled(&t, "q_proj", "fp32");
    for (int64_t step = 1; step <= 5; step++) save(&t, out, step, 3);
    assert_steps(out, "step-000003 step-000004 step-000005");
    save(&t, out, 6, 0);
    assert_steps(out, "step-000003 step-000004 step-000005 step-000006");
    save(&t, out, 4, 1); /* resumed from an earlier checkpoint: later ones are unchanged */
    assert_steps(out, "step-000004 step-000005 step-000006");
    save(&t, out, 7, 1);
    assert_steps(out, "step-000007");
    tiny_close(&t);
}

/* A killed save leaves a hidden directory with some of the files, which the next save deletes. */
static void leftovers_of_killed_saves_are_deleted(void **state)
{
    (void)state;
    static const char *const stages[] = {".tmp-step-000002", ".tmp-step-000002/adapter",
                                         ".tmp-step-000003/adapter/.tmp-adapter", ".old-step-000001"};
    struct tiny t;
    struct err err = {.msg = ""};
    char path[MT_PATH];
    const char *out = scratch_dir();
    open_filled(&t, "q_proj", "fp32");
    for (int64_t i = 0; i < MT_LEN(stages); i++) {
        snprintf(path, sizeof(path), "%s/checkpoints/%s", out, stages[i]);
        assert_int_equal(file_make_dirs(path, &err), 0);
        strcat(path, "/state.json.tmp");
        assert_int_equal(file_write_atomic(path, "{", 1, &err), 0);
        assert_int_equal(checkpoint_newest(out, path, &err), i > 0);
        save(&t, out, 1, 2);
        assert_steps(out, "step-000001");
        assert_newest(out, 1);
    }
    snprintf(path, sizeof(path), "%s/checkpoints/notes", out); /* not a checkpoint: stays */
    assert_int_equal(file_make_dirs(path, &err), 0);
    save(&t, out, 2, 1);
    assert_steps(out, "notes step-000002");
    assert_newest(out, 2);
    tiny_close(&t);
}

/* A child that saves in a loop until it is killed. */
static _Noreturn void save_until_killed(const char *out, const char *best)
{
    struct tiny t;
    struct err err;
    open_filled(&t, "q_proj", "fp32");
    for (int64_t step = 1;; step++) {
        struct train_state now = some_state(step);
        if (checkpoint_save(out, &t.ad, &t.dev, &now, settings(), NULL, "base", NULL, NULL, 2, &err) ||
            peft_save(&t.ad, &t.dev, best, "base", NULL, &err))
            _exit(1);
    }
}

/* Creates a directory so deep that it can be renamed, but not deleted: its paths are too long. */
static void make_deep(const char *dir)
{
    char name[201] = "";
    memset(name, 'd', sizeof(name) - 1);
    int at = open(dir, O_RDONLY | O_DIRECTORY);
    for (int i = 0; i < 25; i++) {
        assert_int_equal(mkdirat(at, name, 0777), 0);
        const int next = openat(at, name, O_RDONLY | O_DIRECTORY);
        close(at);
        at = next;
        assert_true(at >= 0);
    }
    close(at);
}

static void failed_deletions_are_warnings(void **state)
{
    (void)state;
    struct tiny t;
    struct err err = {.msg = ""};
    char path[MT_PATH], command[MT_PATH + 16];
    const char *out = scratch_dir();
    open_filled(&t, "q_proj", "fp32");
    save(&t, out, 1, 1);
    path_of(path, out, 1, "");
    make_deep(path);
    save(&t, out, 2, 1);
    assert_steps(out, ".deleting-step-000001 step-000002");
    path_of(path, out, 2, "");
    make_deep(path);
    save(&t, out, 2, 1); /* the directory that it replaces cannot be deleted */
    assert_steps(out, ".deleting-step-000001 .deleting-step-000002 step-000002");
    assert_newest(out, 2);
    assert_int_equal(checkpoint_sweep(out, &err), 0);
    save(&t, out, 3, 1);
    assert_steps(out, ".deleting-step-000001 .deleting-step-000002 step-000003");
    snprintf(command, sizeof(command), "rm -rf %s/checkpoints", out);
    assert_int_equal(system(command), 0);
    tiny_close(&t);
}

static void a_save_may_be_killed_at_any_moment(void **state)
{
    (void)state;
    struct tiny t;
    struct err err = {.msg = ""};
    struct train_state got;
    const char *out = scratch_dir();
    char best[MT_PATH], path[MT_PATH];
    snprintf(best, sizeof(best), "%s/best", out);
    open_filled(&t, "q_proj", "fp32");
    save(&t, out, 1, 2);
    assert_int_equal(peft_save(&t.ad, &t.dev, best, "base", NULL, &err), 0);
    for (uint64_t round = 0; round < 30; round++) {
        pid_t child = fork();
        if (!child) save_until_killed(out, best);
        assert_true(child > 0);
        usleep((useconds_t)(2000 + rng_u64(1, round) % 40000));
        assert_int_equal(kill(child, SIGKILL), 0);
        int status;
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_true(WIFSIGNALED(status));
        assert_int_equal(checkpoint_newest(out, path, &err), 1);
        assert_int_equal(checkpoint_load(path, &t.ad, &t.dev, &got, &err), 0);
        assert_int_equal(peft_load(&t.ad, &t.dev, best, &err), 0);
    }
    tiny_close(&t);
}

/* Fails unless every directory with the name of a step is a complete checkpoint. */
static void assert_all_whole(const char *out, struct tiny *t)
{
    char folder[MT_PATH], path[2 * MT_PATH], **names;
    struct train_state got;
    struct err err = {.msg = ""};
    int64_t n;
    snprintf(folder, sizeof(folder), "%s/checkpoints", out);
    assert_int_equal(file_list(folder, &names, &n, &err), 0);
    for (int64_t i = 0; i < n; i++) {
        snprintf(path, sizeof(path), "%s/%s", folder, names[i]);
        if (names[i][0] != '.' && checkpoint_load(path, &t->ad, &t->dev, &got, &err)) fail_msg("%s", err.msg);
    }
    file_list_free(names, n);
}

/* A process killed while it deletes a large checkpoint: directories with the name of a step are complete. */
static void a_deletion_may_be_killed_at_any_moment(void **state)
{
    (void)state;
    struct tiny t;
    struct err err = {.msg = ""};
    char path[MT_PATH], name[32];
    const char *out = scratch_dir();
    open_filled(&t, "q_proj", "fp32");
    for (uint64_t round = 0; round < 5; round++) {
        const int64_t step = 1 + 2 * (int64_t)round;
        save(&t, out, step, 1);
        path_of(path, out, step, "adapter");
        const int dir = open(path, O_RDONLY | O_DIRECTORY);
        for (int i = 0; i < 100; i++) {
            snprintf(name, sizeof(name), "z%d", i);
            close(openat(dir, name, O_CREAT | O_WRONLY, 0666));
        }
        close(dir);
        pid_t child = fork();
        if (!child) {
            struct train_state now = some_state(step + 1);
            _exit(checkpoint_save(out, &t.ad, &t.dev, &now, settings(), NULL, "base", NULL, NULL, 1, &err) != 0);
        }
        path_of(path, out, step + 1, "");
        for (int i = 0; i < 20000 && !file_exists(path); i++) usleep(100);
        usleep((useconds_t)(rng_u64(2, round) % 5000));
        assert_int_equal(kill(child, SIGKILL), 0);
        assert_int_equal(waitpid(child, NULL, 0), child);
        assert_newest(out, step + 1);
        assert_all_whole(out, &t);
    }
    assert_int_equal(checkpoint_sweep(out, &err), 0);
    assert_all_whole(out, &t);
    tiny_close(&t);
}

/* Values that training cannot produce. */
static void forged_tensors_are_refused(void **state)
{
    (void)state;
    static const struct {
        int flat;
        float value;
        const char *name;
    } rows[] = {{0, NAN, "\"param.layers.0.q_proj.lora_A\""},
                {0, INFINITY, "\"param.layers.0.q_proj.lora_A\""},
                {1, -INFINITY, "\"m.layers.0.q_proj.lora_A\""},
                {2, NAN, "\"v.layers.0.q_proj.lora_A\""},
                {2, -1, "\"v.layers.0.q_proj.lora_A\""}};
    struct tiny t;
    struct err err = {.msg = ""};
    struct train_state got;
    char dir[MT_PATH];
    const char *out = scratch_dir();
    open_filled(&t, "q_proj", "fp32");
    path_of(dir, out, 1, "");
    for (int64_t i = 0; i < MT_LEN(rows); i++) {
        const struct tensor flat[] = {t.ad.opt.param, t.ad.opt.state[0], t.ad.opt.state[1]};
        float *at = (float *)flat[rows[i].flat].data + t.ad.params[0].off, good = *at;
        *at = rows[i].value;
        save(&t, out, 1, 0);
        *at = good;
        assert_int_equal(checkpoint_load(dir, &t.ad, &t.dev, &got, &err), -1);
        if (!strstr(err.msg, rows[i].name)) fail_msg("\"%s\" does not name %s", err.msg, rows[i].name);
    }
    tiny_close(&t);
}

static void other_adapters_are_refused(void **state)
{
    (void)state;
    static const struct {
        const char *targets, *dtype, *word;
    } rows[] = {{"q_proj,k_proj", "fp32", "tensors, but the configuration's adapters have"},
                {"k_proj", "fp32", "\"param.layers.0.k_proj.lora_A\" is missing"},
                {"q_proj", "oracle", "\"param.layers.0.q_proj.lora_A\" has a different shape or dtype"}};
    struct tiny t, other;
    struct err err = {.msg = ""};
    struct train_state got;
    char dir[MT_PATH];
    const char *out = scratch_dir();
    open_filled(&t, "q_proj", "fp32");
    save(&t, out, 1, 0);
    path_of(dir, out, 1, "");
    for (int64_t i = 0; i < MT_LEN(rows); i++) {
        open_filled(&other, rows[i].targets, rows[i].dtype);
        assert_int_equal(checkpoint_load(dir, &other.ad, &other.dev, &got, &err), -1);
        if (!strstr(err.msg, rows[i].word)) fail_msg("\"%s\" does not say \"%s\"", err.msg, rows[i].word);
        tiny_close(&other);
    }
    tiny_close(&t);
}

/* Peak of the process's memory as step n of a run reports it. */
static double peak_at(const char *text, int n)
{
    char event[48];
    double bytes = 0;
    snprintf(event, sizeof(event), "{\"event\":\"step\",\"step\":%d,", n);
    const char *at = strstr(text, event), *says = at ? strstr(at, "\"mem_bytes\":") : NULL;
    assert_true(says && sscanf(says, "\"mem_bytes\":%lf", &bytes) == 1);
    return bytes;
}

/* On a CPU parameters and moments are written from where they are: a save takes less than copies of all three. */
static void a_save_on_a_cpu_takes_little_memory(void **state)
{
    (void)state;
    enum { R = 512 };
    const double parameters = 10496. * R; /* of all targets */
    static char text[1 << 16];
    const char *config = process_config("save_every = 1\n");
    /* AddressSanitizer keeps freed memory, up to this size. Other builds do not read the variable. */
    setenv("ASAN_OPTIONS", "quarantine_size_mb=1", 0);
    if (process_run_sets(config, "lora.r=512 lora.alpha=512 train.steps=2")) fail_msg("%s", said.err);
    process_read(process_output(config, "metrics.jsonl"), text, sizeof(text));
    const double more = peak_at(text, 2) - peak_at(text, 1);
    if (more > 8 * parameters) fail_msg("saving takes %.3g bytes of %.3g parameters", more, parameters);
}

int test_checkpoint(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_checkpoint_restores_the_exact_state),
        cmocka_unit_test(a_checkpoint_contains_the_adapter),
        cmocka_unit_test(every_damaged_file_is_named),
        cmocka_unit_test(truncated_files_are_errors),
        cmocka_unit_test(damaged_checkpoints_are_skipped),
        cmocka_unit_test(only_the_newest_are_kept),
        cmocka_unit_test(leftovers_of_killed_saves_are_deleted),
        cmocka_unit_test(a_save_may_be_killed_at_any_moment),
        cmocka_unit_test(a_deletion_may_be_killed_at_any_moment),
        cmocka_unit_test(failed_deletions_are_warnings),
        cmocka_unit_test(forged_tensors_are_refused),
        cmocka_unit_test(other_adapters_are_refused),
        cmocka_unit_test(a_save_on_a_cpu_takes_little_memory),
    };
    return cmocka_run_group_tests_name("checkpoint", tests, NULL, NULL);
}
