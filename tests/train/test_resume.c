/* test_resume.c - checkpoints that a run resumes from: errors name changed settings; invalid state is refused. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/file/file.h"
#include "data/safetensors.h"
#include "tests/process.h"
#include "train/adapter/peft.h"
#include "train/state/resume.h"

/* ---- the state of a checkpoint of a run with 7 documents, one per sequence, 2 micro-batches a step, 10 steps */

struct small {
    struct dataset ds;
    struct config cfg;
    struct loader *loader;
    struct resume_run run;
    struct resume from;
    int64_t off[8], row[7];
    int32_t ids[14];
    uint8_t mask[14];
};

static void small_open(struct small *s)
{
    struct err err;
    static const char doc[] = "{\"settings\": {}}";
    *s = (struct small){.from = {.found = true}};
    config_defaults(&s->cfg);
    s->cfg.data.packing = false;
    s->cfg.data.seq_len = 4;
    s->cfg.train.grad_accum = 2;
    s->cfg.train.seed = 5;
    for (int64_t d = 0; d < 7; d++) {
        s->off[d + 1] = 2 * (d + 1);
        s->row[d] = d;
        s->mask[2 * d + 1] = 1;
    }
    s->ds = (struct dataset){
        .n_docs = 7, .n_tokens = 14, .doc_off = s->off, .doc_row = s->row, .ids = s->ids, .mask = s->mask};
    const struct loader_options lo = {.seq_len = 4, .micro_batch = 1, .seed = 5};
    s->loader = loader_open(&s->ds, &lo, (struct loader_pos){0, 0});
    s->run = (struct resume_run){
        .cfg = &s->cfg, .schedule = {.total_steps = 10}, .data_hash = 1, .eval_hash = 2, .loader = s->loader};
    snprintf(s->from.path, sizeof(s->from.path), "CHECKPOINT");
    s->from.doc = json_parse(doc, (int64_t)strlen(doc), "state.json", &err);
    assert_non_null(s->from.doc);
    s->from.n_update = 4;
    s->from.state = (struct train_state){.step = 5,
                                         .pos = {.epoch = 1, .index = 3},
                                         .n_nonfinite = 1,
                                         .tokens = 20,
                                         .total_steps = 8,
                                         .smooth_loss = 2,
                                         .best_loss = 1.5,
                                         .best_step = 4,
                                         .eval_step = 4,
                                         .seed = 5,
                                         .data_hash = 1,
                                         .model_hash = 3,
                                         .eval_hash = 2};
}

static void small_close(struct small *s)
{
    loader_close(s->loader);
    resume_free(&s->from);
}

static void refused(const char *name, const struct resume *r, const struct resume_run *run)
{
    struct err err = {.msg = ""};
    char start[80];
    snprintf(start, sizeof(start), "%s = ", name);
    assert_int_equal(resume_check(r, run, &err), -1);
    if (!strstr(err.msg, start)) fail_msg("\"%s\" does not name %s", err.msg, name);
}

#define I64(field)  #field, offsetof(struct train_state, field), false
#define REAL(field) #field, offsetof(struct train_state, field), true
#define BIG         (INT64_C(1) << 62)

static void forged_state_is_refused(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        size_t offset;
        bool real;
        int64_t bad[3];
        double bad_real[3];
    } rows[] = {
        {I64(step), {-1, 11, BIG}, {0}},
        {I64(pos.epoch), {-1, 11, BIG}, {0}},
        {I64(pos.index), {-1, 7, BIG}, {0}},
        {I64(n_nonfinite), {-1, 6, BIG}, {0}},
        {I64(tokens), {-1, 41, BIG}, {0}},
        {I64(total_steps), {-1, 4, BIG}, {0}},
        {I64(best_step), {-1, 6, BIG}, {0}},
        {I64(n_worse), {-1, 6, BIG}, {0}},
        {I64(eval_step), {-2, 6, BIG}, {0}},
        {I64(eval_from), {-1, 6, BIG}, {0}},
        {I64(seed), {-1, 4, BIG}, {0}},
        {REAL(smooth_loss), {0}, {NAN, INFINITY, -INFINITY}},
        {REAL(first_loss), {0}, {NAN, INFINITY, -INFINITY}},
        {REAL(best_loss), {0}, {NAN, -NAN, -INFINITY}},
    };
    struct small s;
    struct err err = {.msg = ""};
    small_open(&s);
    if (resume_check(&s.from, &s.run, &err)) fail_msg("%s", err.msg);
    for (int64_t i = 0; i < MT_LEN(rows); i++)
        for (int k = 0; k < 3; k++) {
            struct resume r = s.from;
            char *at = (char *)&r.state + rows[i].offset;
            memcpy(at, rows[i].real ? (const void *)&rows[i].bad_real[k] : &rows[i].bad[k], 8);
            refused(rows[i].name, &r, &s.run);
        }
    struct resume r = s.from;
    r.n_update = 5; /* of 5 steps one was skipped */
    refused("updates", &r, &s.run);
    r = s.from;
    r.state.best_loss = INFINITY; /* none yet */
    refused("best_step", &r, &s.run);
    r.state.best_step = 0;
    r.state.n_worse = 6; /* steps 0 to 5 were evaluated, and no loss was finite */
    if (resume_check(&r, &s.run, &err)) fail_msg("%s", err.msg);
    r.state.n_worse = 7;
    refused("n_worse", &r, &s.run);
    r = s.from;
    r.state.step = 3; /* its 6 micro-batches are in the first epoch */
    r.state.best_step = r.state.eval_step = 0;
    r.n_update = 1;
    r.state.tokens = 10;
    r.state.pos = (struct loader_pos){.epoch = 0, .index = 5};
    refused("pos.index", &r, &s.run);
    r.state.pos.index = 6;
    assert_int_equal(resume_check(&r, &s.run, &err), 0);
    small_close(&s);
}

/* ---- runs */

/* Replaces `old` by `new` in the state of a checkpoint, step-NNNNNN, and updates its manifest. */
static void forge_in(const char *config, const char *step, const char *old, const char *new)
{
    char name[64], path[MT_PATH], manifest[MT_PATH], line[128], text[1 << 14], out[1 << 14];
    struct err err;
    uint32_t crc;
    int64_t bytes;
    snprintf(name, sizeof(name), "checkpoints/%s/state.json", step);
    snprintf(path, sizeof(path), "%s", process_output(config, name));
    process_read(path, text, sizeof(text));
    const char *at = strstr(text, old);
    if (!at) fail_msg("%s is not in %s", old, text);
    snprintf(out, sizeof(out), "%.*s%s%s", (int)(at - text), text, new, at + strlen(old));
    assert_int_equal(file_write_atomic(path, out, (int64_t)strlen(out), &err), 0);
    assert_int_equal(file_crc32(path, &crc, &bytes, &err), 0);
    snprintf(name, sizeof(name), "checkpoints/%s/manifest.json", step);
    snprintf(manifest, sizeof(manifest), "%s", process_output(config, name));
    process_read(manifest, text, sizeof(text));
    char *row = strstr(text, "\"state.json\"");
    assert_non_null(row);
    *row = 0;
    snprintf(line, sizeof(line), "\"state.json\": {\"size\": %" PRId64 ", \"crc32\": \"%08" PRIx32 "\"}\n}\n", bytes,
             crc);
    strcat(text, line);
    assert_int_equal(file_write_atomic(manifest, text, (int64_t)strlen(text), &err), 0);
}

/* Removes the record of the base model from the adapter of a checkpoint. Earlier versions wrote none. */
static void forget_base(const char *config, const char *step)
{
    char name[96], path[MT_PATH], text[1 << 14], crc_text[16];
    struct err err;
    uint32_t crc;
    int64_t size;
    snprintf(name, sizeof(name), "checkpoints/%s/" ADAPTER, step);
    snprintf(path, sizeof(path), "%s", process_output(config, name));
    char *bytes = file_read(path, 64 << 20, &size, &err);
    assert_non_null(bytes);
    for (char *at; (at = strstr(bytes + 8, "\"moetrain_"));) at[1] = 'x';
    assert_int_equal(file_write_atomic(path, bytes, size, &err), 0);
    mem_free(bytes);
    assert_int_equal(file_crc32(path, &crc, &size, &err), 0);
    snprintf(name, sizeof(name), "checkpoints/%s/manifest.json", step);
    snprintf(path, sizeof(path), "%s", process_output(config, name));
    process_read(path, text, sizeof(text));
    char *row = strstr(text, "\"" ADAPTER "\""), *old = row ? strstr(row, "\"crc32\": \"") : NULL;
    assert_non_null(old);
    snprintf(crc_text, sizeof(crc_text), "%08" PRIx32, crc);
    memcpy(old + strlen("\"crc32\": \""), crc_text, 8);
    assert_int_equal(file_write_atomic(path, text, (int64_t)strlen(text), &err), 0);
}

static void forge(const char *config, const char *old, const char *new) { forge_in(config, "step-000002", old, new); }

static void forged_runs_are_refused(void **state)
{
    (void)state;
    const char *config = process_config("");
    assert_int_equal(RUN(config), 0);
    forge(config, "\"step\": 2", "\"step\": -1");
    assert_int_equal(RUN(config), 1);
    assert_says(said.err, "step = -1");
    assert_null(strstr(said.err, "loaded "));
    forge(config, "\"step\": -1", "\"step\": 2");
    forge(config, "\"lora.dropout\": \"0\",", ""); /* as in a checkpoint of an earlier version, without this option */
    assert_int_equal(RUN(config), 0);
    forge(config, "\"lora.r\"", "\"lora.unheard\": \"x\",\n\"lora.r\"");
    assert_int_equal(RUN(config), 1);
    assert_says(said.err, "lora.unheard");
    forge(config, "\"settings\"", "\"other\"");
    assert_int_equal(RUN(config), 1);
    assert_says(said.err, "an older moetrain wrote it");
}

static void steps_and_rates_may_change(void **state)
{
    (void)state;
    const char *config = process_config("");
    assert_int_equal(RUN(config), 0);
    assert_int_equal(RUN(config, "--set", "train.steps=4", "--set", "eval.every=2", "--set", "output.keep=1"), 0);
    assert_says(said.err, "continuing after step 2 of 4");
    assert_says(said.err, "other settings from step 3 on: train.steps: 2 -> 4\n");
    assert_says(said.err, "learning rate: cosine over 4 steps (was cosine over 2): ");
    assert_int_equal(RUN(config, "--set", "train.steps=0", "--set", "train.epochs=9", "--set", "optim.lr=1e-3", "--set",
                         "optim.schedule=constant"),
                     0);
    assert_says(said.err, "other settings from step 5 on: optim.lr: auto -> 0.001, optim.schedule: cosine -> constant, "
                          "train.steps: 4 -> 0, train.epochs: 1 -> 9\n");
    assert_int_equal(RUN(config, "--set", "train.steps=0", "--set", "train.epochs=10", "--set", "optim.lr=1e-3",
                         "--set", "optim.schedule=constant"),
                     0);
    assert_says(said.err, ", as before\n");
    assert_int_equal(RUN(config, "--set", "train.steps=192", "--set", "optim.schedule=restarts"), 0);
    assert_says(said.err, "learning rate: restarts over 192 steps (was constant over 190): ");
    assert_int_equal(RUN(config, "--set", "train.steps=3"), 1);
    assert_says(said.err, "is past the end of this run, which has 3 steps: raise train.steps, or start anew");
    const char *by_epochs = process_trained("train.steps=0 train.epochs=0.5");
    assert_int_equal(process_run_sets(by_epochs, "train.steps=0 train.epochs=0.5"), 0);
    assert_says(said.err, "this run is complete: to train longer, raise train.epochs\n");
    assert_int_equal(process_run_sets(by_epochs, "train.steps=0 train.epochs=0.1"), 1);
    assert_says(said.err, " steps: raise train.epochs, or start anew");
    assert_int_equal(process_run_sets(by_epochs, "train.steps=0 train.epochs=1 optim.warmup_steps=1000"), 1);
    assert_says(said.err, "optim.warmup_steps = 1000 is more than the run's ");
}

static void changed_mathematics_is_refused(void **state)
{
    (void)state;
    static const char *const rows[][2] = {
        {"train.seed=1", "train.seed: 0 -> 1"},
        {"lora.targets=q_proj", "lora.targets: attention,experts -> q_proj"},
        {"data.seq_len=63", "data.seq_len: 64 -> 63"},
    };
    const char *config = process_config("");
    assert_int_equal(RUN(config), 0);
    for (int64_t i = 0; i < MT_LEN(rows); i++) {
        assert_int_equal(RUN(config, "--set", rows[i][0]), 1);
        assert_says(said.err, rows[i][1]);
        assert_says(said.err, "train.resume = never");
        assert_null(strstr(said.err, "documents")); /* before data and model are read */
    }
    assert_int_equal(RUN(config, "--set", "train.seed=1", "--set", "lora.r=4", "--set", "optim.lr=1"), 1);
    assert_says(said.err, ", lora.r: 2 -> 4, train.seed: 0 -> 1: ");
    assert_int_equal(RUN(config, "--set", "data.eval=", "--set", "data.eval_split=0.5"), 1);
    assert_says(said.err, "other training data, data.eval_split: 0 -> 0.5: ");
    assert_null(strstr(said.err, "loaded "));
    assert_int_equal(RUN(config, "--set", "data.format=text"), 0); /* the same rows */
}

/* Writes config.json of the parity case to dir, with `old` replaced by `new`. */
static void edit_model(const char *dir, const char *old, const char *new)
{
    char path[MT_PATH], text[1 << 13], out[1 << 13];
    struct err err;
    process_read(fixture("parity/case_a/config.json"), text, sizeof(text));
    const char *at = strstr(text, old);
    assert_non_null(at);
    snprintf(out, sizeof(out), "%.*s%s%s", (int)(at - text), text, new, at + strlen(old));
    snprintf(path, sizeof(path), "%s/config.json", dir);
    if (file_write_atomic(path, out, (int64_t)strlen(out), &err)) fail_msg("%s", err.msg);
}

/* config.json was edited after the first steps; the weights are the same. */
static void changed_config_json_is_refused(void **state)
{
    (void)state;
    static const char *const files[] = {"model.safetensors", "tokenizer.json", "tokenizer_config.json"};
    static const char *const rows[][3] = {
        {"\"num_experts_per_tok\": 2", "\"num_experts_per_tok\": 1", "num_experts_per_tok: 2 -> 1: set it back"},
        {"\"rope_theta\": 150000.0", "\"rope_theta\": 10000.0", "rope_theta: 150000 -> 10000: set it back"},
        {"\"full_attention\"", "\"sliding_attention\"",
         "layers.1: full_attention, sparse -> sliding_attention of 8, sparse: set it back"},
    };
    char dir[MT_PATH], model[MT_PATH + 16], from[MT_PATH], to[MT_PATH + 32];
    const char *config = process_config("");
    snprintf(dir, sizeof(dir), "%s", scratch_dir());
    snprintf(model, sizeof(model), "model.path=%s", dir);
    for (int i = 0; i < MT_LEN(files); i++) {
        snprintf(from, sizeof(from), "%s/%s", fixture("parity/case_a"), files[i]);
        snprintf(to, sizeof(to), "%s/%s", dir, files[i]);
        assert_int_equal(symlink(from, to), 0);
    }
    edit_model(dir, "", "");
    if (RUN(config, "--set", model)) fail_msg("%s", said.err);
    for (int i = 0; i < MT_LEN(rows); i++) {
        edit_model(dir, rows[i][0], rows[i][1]);
        assert_int_equal(RUN(config, "--set", "train.steps=4", "--set", model), 1);
        assert_says(said.err, "step-000002 was made with other values in the model's config.json, ");
        assert_says(said.err, rows[i][2]);
        assert_null(strstr(said.err, "documents")); /* before data and weights are read */
    }
    /* the greatest position changes no result */
    edit_model(dir, "\"max_position_embeddings\": 2048", "\"max_position_embeddings\": 4096");
    if (RUN(config, "--set", "train.steps=4", "--set", model)) fail_msg("%s", said.err);
    edit_model(dir, rows[0][0], rows[0][1]);
    forge_in(config, "step-000004", "\"model\": {", "\"other\": {"); /* as if an earlier version had written it */
    forget_base(config, "step-000004");
    if (RUN(config, "--set", "train.steps=5", "--set", model)) fail_msg("%s", said.err);
}

/* Copies the files of a parity case to a new directory and flips the lowest bit of the first byte of `tensor`. */
static const char *changed_model(const char *name, const char *tensor)
{
    static const char *const files[] = {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"};
    static char dir[MT_PATH];
    char from[MT_PATH], to[2 * MT_PATH];
    struct safetensors st;
    struct err err;
    int64_t size;
    snprintf(dir, sizeof(dir), "%s", scratch_dir());
    for (int i = 0; i < MT_LEN(files); i++) {
        snprintf(from, sizeof(from), "%s/%s", fixture(name), files[i]);
        snprintf(to, sizeof(to), "%s/%s", dir, files[i]);
        char *bytes = file_read(from, 1 << 26, &size, &err);
        assert_non_null(bytes);
        if (i == 3) {
            assert_int_equal(safetensors_open(&st, from, &err), 0);
            const struct st_tensor *t = safetensors_find(&st, tensor);
            if (!t) fail_msg("%s", tensor);
            bytes[t->data - st.maps[0].data] ^= 1;
            safetensors_close(&st);
        }
        assert_int_equal(file_write_atomic(to, bytes, size, &err), 0);
        mem_free(bytes);
    }
    return dir;
}

/* Starts or continues a run of `model` on the data in the directory `rows`. */
static int run_case(const char *config, const char *model, const char *rows, int steps, const char *more)
{
    char sets[8 * MT_PATH];
    snprintf(sets, sizeof(sets),
             "model.path=%s data.train=%s/train.jsonl data.eval=%s/eval.jsonl data.packing=no train.grad_accum=2 "
             "lora.targets=all-linear train.steps=%d %s",
             model, rows, rows, steps, more);
    return process_run_sets(config, sets);
}

/* A changed bit of any tensor is detected, here one outside the first layer's attention. Other numbers of ranks and of
 * decoded layers are not a change. */
static void changed_weights_are_refused(void **state)
{
    (void)state;
    static const char *const rows[][3] = {
        {"parity/case_a", "model.layers.1.mlp.experts.down_proj_scales", "2"},
        {"parity/qwen3", "model.layers.1.mlp.gate.weight", "2"},
        {"parity/olmoe", "model.layers.1.mlp.experts.0.down_proj.weight", "1"},
        {"parity/deepseek_v3", "lm_head.weight", "2"},
        {"parity/deepseek_v4", "layers.0.hc_ffn_base", "2"},
        {"parity/deepseek_v4", "layers.1.ffn.shared_experts.w2.weight", "1"},
    };
    for (int i = 0; i < MT_LEN(rows); i++) {
        const char *config = process_config(""), *model = fixture(rows[i][0]);
        if (run_case(config, model, model, 1, "")) fail_msg("%s", said.err);
        assert_int_equal(run_case(config, changed_model(rows[i][0], rows[i][1]), model, 2, ""), 1);
        assert_says(said.err, "step-000001 was made with another base model, model.path: ");
        char more[96];
        snprintf(more, sizeof(more), "train.decoded_layers=1 parallel.cpu_ranks=2 parallel.ep=%s", rows[i][2]);
        if (run_case(config, model, model, 2, more)) fail_msg("%s", said.err);
        assert_says(said.err, "continuing after step 1 of 2");
    }
}

/* A finished run is started again after a run to more steps was killed, or after files were removed: metrics.jsonl,
 * report.html and config.ini are again those of the finished run. */
static void finished_files_follow_the_checkpoint(const char *config, const char *model)
{
    static const char *const names[] = {"metrics.jsonl", "config.ini", "report.html"};
    static const char killed[] = "{\"event\":\"step\",\"step\":2,\"loss\":987654321}\n";
    for (int removed = 0; removed < 2; removed++) {
        static char text[1 << 17];
        FILE *f = fopen(process_output(config, "metrics.jsonl"), "a");
        assert_non_null(f);
        fputs(killed, f);
        assert_int_equal(fclose(f), 0);
        assert_non_null(f = fopen(process_output(config, "config.ini"), "w"));
        fputs("[train]\nsteps = 987654321\n", f);
        assert_int_equal(fclose(f), 0);
        for (int i = 0; removed && i < MT_LEN(names); i++)
            assert_int_equal(unlink(process_output(config, names[i])), 0);
        if (run_case(config, model, model, 1, "")) fail_msg("%s", said.err);
        assert_null(strstr(said.err, "loaded "));
        for (int i = 0; i < MT_LEN(names); i++) {
            process_read(process_output(config, names[i]), text, sizeof(text));
            if (strstr(text, "987654321")) fail_msg("%s: %s", names[i], text);
        }
    }
}

/* A run that continues from an earlier checkpoint of the same output.dir archives the later checkpoints, so that
 * train.resume = auto then continues this run. */
static void later_checkpoints_are_left(void **state)
{
    (void)state;
    const char *config = process_config(""), *from = process_output(config, "checkpoints/step-000001");
    char resume[MT_PATH];
    snprintf(resume, sizeof(resume), "train.resume=%s optim.lr=1e-3 train.steps=2", from);
    assert_int_equal(process_run_sets(config, "output.save_every=1 train.steps=3"), 0);
    assert_int_equal(process_run_sets(config, resume), 0);
    assert_says(said.err, "this run continues from step 1: moved the 2 checkpoints of later steps to ");
    assert_true(file_is_dir(process_output(config, "archive-1/checkpoints/step-000002")));
    assert_true(file_is_dir(process_output(config, "archive-1/checkpoints/step-000003")));
    assert_false(file_is_dir(process_output(config, "checkpoints/step-000003")));
    assert_true(file_is_dir(process_output(config, "checkpoints/step-000002")));
    /* the state after a kill before the last rename of the archive */
    assert_int_equal(rename(process_output(config, "archive-1"), process_output(config, ".archiving")), 0);
    assert_int_equal(process_run_sets(config, "optim.lr=1e-3 train.steps=3"), 0);
    assert_says(said.err, "a start was killed while it archived");
    assert_true(file_is_dir(process_output(config, "archive-1/checkpoints/step-000002")));
    assert_says(said.err, "continuing after step 2 of ");
    assert_null(strstr(said.err, "moved the "));
}

/* If the step of best/ is after that of the resumed checkpoint, best/ is archived with the later checkpoints. Otherwise
 * best/ stays. */
static void best_of_later_steps_is_left(void **state)
{
    (void)state;
    const char *config = process_config("[eval]\nevery = 3\nat_start = false\nat_end = false\n"
                                        "[output]\nsave_every = 1\n");
    char two[MT_PATH], three[MT_PATH];
    snprintf(two, sizeof(two), "train.steps=4 train.resume=%s", process_output(config, "checkpoints/step-000002"));
    snprintf(three, sizeof(three), "train.steps=4 train.resume=%s", process_output(config, "checkpoints/step-000003"));
    if (process_run_sets(config, "train.steps=4")) fail_msg("%s", said.err);
    assert_int_equal(peft_step(process_output(config, "best")), 3);
    assert_says(said.err, "adapter/ is of step 4; to use the best one, add --adapter ");
    if (process_run_sets(config, two)) fail_msg("%s", said.err);
    assert_says(said.err, "moved the 2 checkpoints of later steps and best/, of a later step, to ");
    assert_int_equal(peft_step(process_output(config, "archive-1/best")), 3);
    assert_int_equal(peft_step(process_output(config, "archive-1/checkpoints/step-000004/adapter")), 4);
    assert_int_equal(peft_step(process_output(config, "best")), 3);
    if (process_run_sets(config, three)) fail_msg("%s", said.err);
    assert_says(said.err, "moved the 1 checkpoint of later steps to ");
    assert_int_equal(peft_step(process_output(config, "best")), 3);
    assert_false(file_is_dir(process_output(config, "archive-2/best")));
    if (process_run_sets(config, strcat(two, " eval.every=0"))) fail_msg("%s", said.err);
    assert_false(file_is_dir(process_output(config, "best")));
    if (process_run_sets(config, "train.steps=6 eval.every=5")) fail_msg("%s", said.err);
    assert_int_equal(peft_step(process_output(config, "best")), 5);
    struct err err;
    if (file_remove_tree(process_output(config, "best"), &err)) fail_msg("%s", err.msg);
    if (process_run_sets(config, "train.steps=7 eval.every=0")) fail_msg("%s", said.err);
    assert_says(said.err, "the best adapter, of step 5, is gone: the next evaluation writes best/ again");
    assert_null(strstr(said.err, "to use the best one"));
    if (process_run_sets(config, "train.steps=8 eval.at_end=yes")) fail_msg("%s", said.err);
    assert_int_equal(peft_step(process_output(config, "best")), 8);
    assert_null(strstr(said.err, "to use the best one")); /* adapter/ has the best adapter */
}

/* If train.resume names a checkpoint in another output.dir, outputs of an earlier run that are in this run's output.dir
 * move to archive-1 there. */
static void another_run_is_archived(void **state)
{
    (void)state;
    static const char *const old[] = {"best", "adapter", "checkpoints/step-000004", "report.html"};
    char more[MT_PATH + 128], name[64];
    static char text[1 << 16];
    const char *from = process_trained("optim.lr=0"), *config = process_trained("train.steps=4 train.seed=7 lora.r=4 "
                                                                                "eval.at_start=no eval.every=1");
    /* the path of the checkpoint has a link and a slash at its end */
    assert_int_equal(symlink(process_output(from, ""), process_output(config, "link")), 0);
    snprintf(more, sizeof(more), "train.steps=6 optim.lr=0 train.resume=%s/",
             process_output(config, "link/checkpoints/step-000002"));
    if (process_run_sets(config, more)) fail_msg("%s", said.err);
    assert_says(said.err, "moved the earlier run in ");
    assert_null(strstr(said.err, "of a later step"));
    for (int i = 0; i < MT_LEN(old); i++) {
        snprintf(name, sizeof(name), "archive-1/%s", old[i]);
        assert_true(file_exists(process_output(config, name)));
    }
    assert_false(file_exists(process_output(config, "best")));
    assert_false(file_exists(process_output(config, "checkpoints/step-000004")));
    assert_true(file_exists(process_output(config, "checkpoints/step-000006")));
    process_read(process_output(config, "metrics.jsonl"), text, sizeof(text));
    assert_null(strstr(text, "\"step\":1,"));
    assert_says(text, "{\"event\":\"start\",\"step\":2,");
    if (process_run_sets(config, "train.steps=7 optim.lr=0")) fail_msg("%s", said.err);
    assert_says(said.err, "continuing after step 6 of 7");
    assert_false(file_exists(process_output(config, "archive-2")));
}

/* A finished run compares its weights and ends without loading them, unless an evaluation or an output is missing. */
static void finished_runs_load_nothing(void **state)
{
    (void)state;
    static const struct {
        const char *more;
        bool removed, loads;
    } rows[] = {{"", false, false}, {"parallel.cpu_ranks=2 parallel.ep=2", false, false},
                {"", true, true},   {"eval.max_batches=1", false, true},
                {"", false, true}, /* the held-out data change back */
                {"", false, false}};
    const char *name = "parity/case_a", *config = process_config(""), *model = fixture(name), *complete;
    const char *adapter = "adapter/adapter_model.safetensors", *saved = "checkpoints/step-000001/";
    char of_checkpoint[MT_PATH];
    if (run_case(config, model, model, 1, "")) fail_msg("%s", said.err);
    for (int i = 0; i < MT_LEN(rows); i++) {
        if (rows[i].removed) assert_int_equal(unlink(process_output(config, adapter)), 0);
        if (run_case(config, model, model, 1, rows[i].more)) fail_msg("%s", said.err);
        if (!(complete = strstr(said.err, "this run is complete: to train longer, "))) fail_msg("%s", said.err);
        if ((strstr(said.err, "loaded ") != NULL) != rows[i].loads) fail_msg("%d: %s", i, said.err);
        assert_non_null(strstr(complete, "adapter:     "));
        snprintf(of_checkpoint, sizeof(of_checkpoint), "%s%s", process_output(config, saved), adapter);
        assert_same_file(process_output(config, adapter), of_checkpoint);
    }
    finished_files_follow_the_checkpoint(config, model);
    assert_int_equal(run_case(config, changed_model(name, "model.norm.weight"), model, 1, ""), 1);
    assert_says(said.err, "step-000001 was made with another base model, model.path: ");
}

static void stat_output(struct stat *st, const char *config, const char *name)
{
    if (stat(process_output(config, name), st)) fail_msg("%s: no %s", config, name);
}

/* A finished run that is started with another learning rate trains no step, so its files do not change. */
static void finished_runs_keep_their_record(void **state)
{
    (void)state;
    static const char *const names[] = {
        "config.ini", "metrics.jsonl",           "report.html", "adapter", "adapter/README.md",
        "best",       "checkpoints/step-000003", "tensorboard"};
    const char *base = process_trained("train.steps=1");
    char sets[MT_PATH + 128], text[1 << 14];
    for (int teacher = 0; teacher < 2; teacher++) {
        struct stat before[MT_LEN(names)], after;
        snprintf(sets, sizeof(sets),
                 "train.steps=3 log.tensorboard=yes eval.every=1 eval.at_start=no "
                 "distill.teacher=%s%s optim.lr=",
                 teacher ? "adapter:" : "none", teacher ? process_output(base, "adapter") : "");
        const size_t n = strlen(sets);
        const char *config = process_trained(strcat(sets, "2e-3"));
        for (int i = 0; i < MT_LEN(names); i++) stat_output(&before[i], config, names[i]);
        snprintf(sets + n, sizeof(sets) - n, "1e-3 log.every=2");
        if (process_run_sets(config, sets)) fail_msg("%s", said.err);
        assert_says(said.err, "other settings are not used, as no step is left: optim.lr: 0.002 -> 0.001\n");
        for (int i = 0; i < MT_LEN(names); i++) {
            stat_output(&after, config, names[i]);
            if (after.st_ino != before[i].st_ino || memcmp(&after.st_mtim, &before[i].st_mtim, sizeof(after.st_mtim)))
                fail_msg("%s changed", names[i]);
        }
        /* a new evaluation does not change the learning rate in the files either */
        strcat(sets, " eval.max_batches=1");
        if (process_run_sets(config, sets)) fail_msg("%s", said.err);
        for (int i = 0; i < 5; i += 4) {
            process_read(process_output(config, names[i]), text, sizeof(text));
            assert_says(text, "\nlr = 0.002\n");
            assert_says(text, "\nmax_batches = 1\n");
        }
        if (process_run_sets(config, strcat(sets, " train.steps=4"))) fail_msg("%s", said.err);
        assert_says(said.err, "other settings from step 4 on: optim.lr: 0.002 -> 0.001, train.steps: 3 -> 4\n");
    }
}

/* Earlier versions wrote a hash of few tensors, under another name. */
static void older_hashes_are_not_compared(void **state)
{
    (void)state;
    const char *name = "parity/case_a", *config = process_config(""), *model = fixture(name);
    if (run_case(config, model, model, 1, "")) fail_msg("%s", said.err);
    forge_in(config, "step-000001", "\"model_hash\"", "\"model_mark\"");
    forget_base(config, "step-000001");
    const char *changed = changed_model(name, "model.norm.weight");
    if (run_case(config, changed, model, 2, "parallel.cpu_ranks=2")) fail_msg("%s", said.err);
    assert_says(said.err, "warning: ");
    assert_says(said.err, "step-000001 is from an older moetrain, which hashed less of the weights: ");
    assert_says(said.err, "continuing after step 1 of 2");
    if (run_case(config, changed, model, 3, "")) fail_msg("%s", said.err);
    assert_null(strstr(said.err, "older moetrain"));
    assert_int_equal(run_case(config, model, model, 4, ""), 1);
    assert_says(said.err, "step-000003 was made with another base model, model.path: ");
}

/* Different lists of targets that select the same adapters are no change. */
static void lists_are_compared_by_meaning(void **state)
{
    (void)state;
    const char *config = process_config("[lora]\ntargets = q_proj,experts\n");
    assert_int_equal(RUN(config), 0);
    assert_int_equal(RUN(config, "--set", "lora.targets=experts, q_proj", "--set", "lora.layers=0-1"), 0);
    assert_int_equal(
        RUN(config, "--set", "lora.targets=down_proj,gate_up_proj,q_proj", "--set", "lora.rank_pattern=experts=2"), 0);
    assert_int_equal(RUN(config, "--set", "lora.targets=experts,q_proj", "--set", "lora.layers=1"), 1);
    assert_says(said.err, "lora.layers: all -> 1: ");
    assert_int_equal(RUN(config, "--set", "lora.rank_pattern=q_proj=1"), 1);
    assert_says(said.err, "lora.rank_pattern: (empty) -> q_proj=1: ");
    assert_int_equal(RUN(config, "--set", "lora.alpha_pattern=q_proj=32,experts=32"), 0);
    assert_int_equal(RUN(config, "--set", "lora.alpha_pattern=q_proj=1"), 1);
    assert_says(said.err, "lora.alpha_pattern: (empty) -> q_proj=1: ");
    assert_int_equal(RUN(config, "--set", "lora.targets=experts,q_proj", "--set", "train.seed=1"), 1);
    assert_says(said.err, "other settings, train.seed: 0 -> 1: ");
}

/* A checkpoint of a version whose default learning rate was written as a number. */
static void the_default_rate_is_no_other_setting(void **state)
{
    (void)state;
    const char *config = process_config("");
    assert_int_equal(RUN(config), 0);
    forge(config, "\"optim.lr\": \"auto\"", "\"optim.lr\": \"0.0002\"");
    assert_int_equal(RUN(config), 0);
    assert_says(said.err, "this run is complete");
    assert_null(strstr(said.err, "other settings"));
    assert_int_equal(RUN(config, "--set", "optim.lr=2e-5"), 0);
    assert_says(said.err, "other settings are not used, as no step is left: optim.lr: 0.0002 -> 2e-05\n");
    assert_int_equal(RUN(config, "--set", "train.steps=3"), 0);
    assert_says(said.err, "other settings from step 3 on: train.steps: 2 -> 3\n");
    assert_int_equal(RUN(config, "--set", "train.steps=4", "--set", "optim.lr=2e-4"), 0);
    assert_says(said.err, "other settings from step 4 on: train.steps: 3 -> 4\n");
}

/* 8-bit moments: a run continues with the same bytes, also with other ranks that divide the moments. */
static void eight_bit_moments_continue(void **state)
{
    (void)state;
    static const char sets[] = "optim.kind=adamw8 optim.schedule=constant optim.warmup_ratio=0 train.grad_accum=2";
    char four[256], two[256], divided[256];
    snprintf(four, sizeof(four), "%s train.steps=4", sets);
    snprintf(two, sizeof(two), "%s train.steps=2", sets);
    snprintf(divided, sizeof(divided), "%s parallel.cpu_ranks=2 parallel.zero=yes", two);
    const char *whole = process_trained(four), *parts = process_trained(two), *ranks = process_trained(divided);
    assert_int_equal(process_run_sets(parts, four), 0);
    assert_int_equal(process_run_sets(ranks, four), 0);
    assert_says(said.err, "continuing after step 2 of 4");
    assert_same_output(whole, parts, ADAPTER);
    assert_same_output(whole, parts, "checkpoints/step-000004/optimizer.safetensors");
    assert_same_output(whole, ranks, ADAPTER);
    assert_int_equal(RUN(whole, "--set", "optim.kind=adamw8", "--set", "train.offload=moments"), 1);
    assert_says(said.err, "optim.kind = adamw8 keeps its moments on the device");
    assert_int_equal(RUN(whole, "--set", "optim.kind=adamw8", "--set", "optim.lr_ratio_b=16"), 1);
    assert_says(said.err, "optim.lr_ratio_b = 16 with optim.kind = adamw8");
}

/* The warning compares with the loss before the first update, which the checkpoint stores. */
static void divergence_is_a_warning(void **state)
{
    (void)state;
    const char *config = process_config("[eval]\nat_start = false\nat_end = false\n");
    assert_int_equal(RUN(config, "--set", "train.steps=10"), 0);
    assert_null(strstr(said.err, "diverges"));
    forge_in(config, "step-000010", "\"first_loss\": \"", "\"first_loss\": \"-");
    assert_int_equal(RUN(config, "--set", "train.steps=12"), 0);
    assert_says(said.err, "warning: the loss diverges: ");
    assert_says(said.err, " before the first update");
    assert_null(strstr(strstr(said.err, "diverges") + 1, "diverges"));
}

int test_resume(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(forged_state_is_refused),         cmocka_unit_test(forged_runs_are_refused),
        cmocka_unit_test(steps_and_rates_may_change),      cmocka_unit_test(divergence_is_a_warning),
        cmocka_unit_test(changed_mathematics_is_refused),  cmocka_unit_test(lists_are_compared_by_meaning),
        cmocka_unit_test(eight_bit_moments_continue),      cmocka_unit_test(changed_config_json_is_refused),
        cmocka_unit_test(changed_weights_are_refused),     cmocka_unit_test(later_checkpoints_are_left),
        cmocka_unit_test(best_of_later_steps_is_left),     cmocka_unit_test(another_run_is_archived),
        cmocka_unit_test(finished_runs_keep_their_record), cmocka_unit_test(finished_runs_load_nothing),
        cmocka_unit_test(older_hashes_are_not_compared),   cmocka_unit_test(the_default_rate_is_no_other_setting),
    };
    return cmocka_run_group_tests_name("resume", tests, NULL, NULL);
}
