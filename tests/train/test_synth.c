/* test_synth.c - `moetrain synth`: published sizes, weights of a realistic scale, the same bytes for any number of
 * writers, errors; trains on a synthetic checkpoint with the executable alone. */
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "data/file/file.h"
#include "data/tokenizer/tokenizer.h"
#include "kernels/format/quant.h"
#include "tests/checkpoints.h"
#include "tests/process.h"
#include "train/synth/presets.h"
#include "train/synth/random_weights.h"
#include "train/synth/synth.h"
#include "train/synth/synth_tokenizer.h"

/* NAME in a scratch directory; in one of eight static buffers. */
static const char *place(const char *name)
{
    static char path[8][MT_PATH];
    static int next;
    char *p = path[next++ % 8];
    snprintf(p, MT_PATH, "%s/%s", scratch_dir(), name);
    return p;
}

static const char *made(struct synth_options opt)
{
    struct err err;
    opt.dir = place("model");
    if (synth_run(&opt, &err)) fail_msg("%s: %s", opt.arch, err.msg);
    return opt.dir;
}

/* ---- the random numbers */

/* A tensor generated in pieces equals one generated at once. */
static void test_pieces(void **state)
{
    (void)state;
    enum { N = 4096 };
    static uint8_t text[N], whole[N], parts[N];
    for (int i = 0; i < N; i++) text[i] = (uint8_t)(i * 7);
    const struct random_weights draws[] = {{.kind = RANDOM_NORMAL, .std = 1},
                                           {.kind = RANDOM_ROWS, .std = 1, .row = 12},
                                           {.kind = RANDOM_NIBBLES},
                                           {.kind = RANDOM_NF4},
                                           {.kind = RANDOM_E8M0, .std = 0.1},
                                           {.kind = RANDOM_ABSMAX, .std = 1},
                                           {.kind = RANDOM_E4M3},
                                           {.kind = RANDOM_FP8},
                                           {.kind = RANDOM_BYTES, .bytes = text}};
    for (int k = 0; k < MT_LEN(draws); k++)
        for (int64_t piece = 8; piece < N; piece += 504) {
            memset(parts, 0xee, N);
            random_weights_bytes(&draws[k], whole, 0, N - 4); /* not a multiple of 8 bytes */
            for (int64_t at = 0; at < N - 4; at += piece)
                random_weights_bytes(&draws[k], parts + at, at, MT_MIN(piece, N - 4 - at));
            assert_memory_equal(whole, parts, N - 4);
            assert_int_equal(parts[N - 4], 0xee);
        }
}

struct moments {
    double mean, rms, most;
};
static struct moments moments_of(const float *x, int64_t n)
{
    struct moments m = {0};
    for (int64_t i = 0; i < n; i++) {
        m.mean += (double)x[i] / (double)n;
        m.rms += (double)x[i] * (double)x[i] / (double)n;
        m.most = fmax(m.most, fabs((double)x[i]));
    }
    m.rms = sqrt(m.rms);
    return m;
}

/* Every kind has the requested mean and root mean square, in any format. */
static void test_moments(void **state)
{
    (void)state;
    enum { N = 1 << 18 };
    static uint8_t data[2 * N], scale[N / 16];
    static float x[N], absmax[N / 64];
    for (double std = 0.01; std < 2; std *= 1.37) {
        const struct random_weights normal = {.kind = RANDOM_NORMAL, .key = 1, .mean = 2 * std, .std = std};
        random_weights_bytes(&normal, data, 0, 2 * N);
        for (int64_t i = 0; i < N; i++) {
            uint16_t h;
            memcpy(&h, data + 2 * i, 2);
            x[i] = bf16_to_f32(h) - (float)(2 * std);
        }
        struct moments m = moments_of(x, N);
        assert_true(fabs(m.mean) < 0.01 * std && fabs(m.rms / std - 1) < 0.02 && m.most < 4.4 * std);
        random_weights_bytes(&(struct random_weights){.kind = RANDOM_NIBBLES, .key = 2}, data, 0, N / 2);
        random_weights_bytes(&(struct random_weights){.kind = RANDOM_E8M0, .key = 3, .std = std}, scale, 0, N / 32);
        random_weights_bytes(&(struct random_weights){.kind = RANDOM_ABSMAX, .key = 4, .std = std}, (uint8_t *)absmax,
                             0, sizeof(absmax));
        struct weight w = {.format = WF_MXFP4, .n_exp = 1, .n_out = 1, .n_in = N, .data = data, .scale = scale};
        for (int64_t i = 0; i < N; i++) x[i] = quant_value(&w, 0, i);
        m = moments_of(x, N);
        assert_true(fabs(m.mean) < 0.01 * std && fabs(m.rms / std - 1) < 0.02);
        random_weights_bytes(&(struct random_weights){.kind = RANDOM_NF4, .key = 5}, data, 0, N / 2);
        w = (struct weight){.format = WF_NF4, .n_exp = 1, .n_out = 1, .n_in = N, .data = data, .block = 64};
        w.absmax = absmax;
        w.code = quant_nf4_code;
        for (int64_t i = 0; i < N; i++) x[i] = quant_value(&w, 0, i);
        m = moments_of(x, N);
        assert_true(fabs(m.mean) < 0.01 * std && fabs(m.rms / std - 1) < 0.02);
        float scale2 = random_weights_scale(WF_NVFP4, std);
        random_weights_bytes(&(struct random_weights){.kind = RANDOM_NIBBLES, .key = 6}, data, 0, N / 2);
        random_weights_bytes(&(struct random_weights){.kind = RANDOM_E4M3, .key = 7}, scale, 0, N / 16);
        w = (struct weight){.format = WF_NVFP4, .n_exp = 1, .n_out = 1, .n_in = N, .data = data, .scale = scale};
        w.scale2 = &scale2;
        for (int64_t i = 0; i < N; i++) x[i] = quant_value(&w, 0, i);
        m = moments_of(x, N);
        assert_true(fabs(m.mean) < 0.01 * std && fabs(m.rms / std - 1) < 0.02);
        scale2 = random_weights_scale(WF_FP8, std);
        random_weights_bytes(&(struct random_weights){.kind = RANDOM_FP8, .key = 8}, data, 0, N);
        w.format = WF_FP8;
        w.block = N;
        for (int64_t i = 0; i < N; i++) x[i] = quant_value(&w, 0, i);
        m = moments_of(x, N);
        assert_true(fabs(m.mean) < 0.01 * std && fabs(m.rms / std - 1) < 0.02 && m.most < 4.4 * std);
    }
}

/* ---- published sizes */

static void test_sizes(void **state)
{
    (void)state;
    static const struct {
        const char *arch;
        int64_t n_params, bytes; /* 0: bf16, 2 bytes a parameter */
    } rows[] = {{"gpt-oss-20b", 20914757184, 13761264768},
                {"gpt-oss-120b", 116829156672, 65248815744},
                {"qwen3-30b-a3b", 30532122624, 0},
                {"qwen3-vl-30b-a3b", 30532122624, 0},
                {"olmoe-1b-7b", 6919161856, 0},
                {"mixtral-8x7b", 46702792704, 0},
                {"glm-4.5-air", 106852251264, 0},
                {"glm-4.7-flash", 29943393920, 0},
                {"deepseek-v3", 671026419200, 0},
                {"moonlight-16b-a3b", 15960110208, 0},
                {"qwen3.5-35b-a3b", 34660610688, 0},
                {"qwen3-next-80b-a3b", 79674391296, 0},
                {"kimi-k2", 1026408232448, 0},
                {"mistral-small-4", 118972826624, 0},
                {"minimax-m2", 228689764864, 0},
                {"nemotron-3-nano-30b-a3b", 31577940288, 31577940288 * 2 + 8832},
                {"lfm2-8b-a1b", 8339930560, 0},
                {"gemma-4-26b-a4b", 25233141790, 0}};
    for (int i = 0; i < MT_LEN(rows); i++) {
        struct err err = {.msg = ""};
        int64_t n = 0, bytes = 0;
        assert_int_equal(synth_size(&(struct synth_options){.arch = rows[i].arch}, &n, &bytes, &err), 0);
        assert_int_equal(n, rows[i].n_params);
        assert_int_equal(bytes, rows[i].bytes ? rows[i].bytes : 2 * n);
    }
}

static void test_special_tokens(void **state)
{
    (void)state;
    struct err err;
    const struct preset *big = preset_find("gpt-oss-20b", &err), *small = preset_find("gpt-oss-tiny", &err);
    assert_int_equal(preset_token(big, "<|start|>"), 200006);
    assert_int_equal(preset_token(big, "<|return|>"), 200002);
    assert_int_equal(preset_token(small, "<|start|>"), 200006 - 201088 + 2048);
    assert_int_equal(preset_token(preset_find("mixtral-tiny", &err), "</s>"), 2);
}

/* For every architecture, the tokenizer has a token per byte and per special token. Ids decode to the text and are
 * below the vocabulary size. */
static void test_tokenizer(void **state)
{
    (void)state;
    const struct preset *p;
    for (int64_t row = 0; (p = preset_row(row)) != NULL; row++) {
        const char *dir = scratch_dir();
        struct err err = {.msg = ""};
        char path[MT_PATH], text[300], back[300] = "";
        struct token_list list = {0};
        int n = snprintf(text, sizeof(text), "%sH\xc3\xa9, 12\n\t%s", p->family->eos, p->family->eos), at = 0;
        snprintf(path, sizeof(path), "%s/tokenizer.json", dir);
        assert_int_equal(synth_tokenizer(dir, p, &err), 0);
        struct tokenizer *tok = tokenizer_load(path, &err);
        if (!tok) fail_msg("%s: %s", p->name, err.msg);
        assert_int_equal(tokenizer_encode(tok, text, n, true, &list, &err), 0);
        assert_int_equal(list.count, 9 + 2);
        assert_int_equal(list.ids[0], preset_token(p, p->family->eos));
        for (int64_t i = 0; i < list.count; i++) {
            int64_t size;
            const char *bytes = tokenizer_bytes(tok, list.ids[i], &size);
            assert_true(list.ids[i] < p->vocab);
            memcpy(back + at, bytes, (size_t)size);
            at += (int)size;
        }
        assert_string_equal(text, back);
        for (const struct special_token *t = p->family->tokens; t->text; t++)
            assert_int_equal(tokenizer_id(tok, t->text), preset_token(p, t->text));
        token_list_free(&list);
        tokenizer_free(tok);
    }
}

/* ---- activations of the model */

static const char *const tiny[] = {
    "gpt-oss-tiny",     "qwen3-tiny",    "qwen3-vl-tiny", "olmoe-tiny", "mixtral-tiny",        "glm-tiny",
    "glm-flash-tiny",   "deepseek-tiny", "qwen3.5-tiny",  "kimi-tiny",  "mistral-small-tiny",  "qwen3-next-tiny",
    "deepseek-v4-tiny", "minimax-tiny",  "nemotron-tiny", "lfm2-tiny",  "nemotron-super-tiny", "gemma-tiny"};
static const char *const formats[] = {"mxfp4", "nf4", "bf16", "nvfp4"}; /* FP8 is not for gpt-oss */

/* Runs a forward pass over two documents; gives the RMS of the residual stream after each layer and the rows of each
 * expert of the first layer that has several. */
static void forward(struct model *m, double *rms, int32_t *offs)
{
    enum { N = 31, CUT = 13 };
    int32_t tok[N], pos[N], cu[] = {0, CUT, N}, row[] = {0}, id[] = {1};
    for (int32_t t = 0; t < N; t++) tok[t] = 3 + t, pos[t] = t < CUT ? t : t - CUT;
    const struct model_batch b = {.n_tok = N,
                                  .n_seq = 2,
                                  .n_label = 1,
                                  .max_len = N - CUT,
                                  .tok = tok,
                                  .pos = pos,
                                  .cu = cu,
                                  .label_row = row,
                                  .label_id = id};
    const int64_t n = N * arch_stream_cols(&m->arch);
    float *x = mem_array(n, sizeof(*x));
    model_begin(m, &b, &(struct model_pass){.loss_scale = 1});
    model_fwd(m);
    int64_t first = 0;
    while (!arch_is_routed(&m->arch, first)) first++;
    device_download(m->dev, offs, m->acts.layers[first].moe.route.offs.data,
                    (m->arch.n_exp + 1) * (int64_t)sizeof(*offs));
    device_get_f32(m->dev, x, m->acts.layers[m->arch.n_layer].x);
    *rms = moments_of(x, n).rms;
    model_end(m);
    mem_free(x);
}

static void check_model(const char *arch, const char *quant)
{
    struct loaded l;
    int32_t offs[17];
    double rms;
    int64_t busy = 0, most = 0;
    loaded_open(&l, made((struct synth_options){.arch = arch, .quant = quant, .seed = 5}));
    const int64_t n_exp = l.arch.n_exp;
    forward(&l.model, &rms, offs);
    for (int64_t x = 0; x < n_exp; x++) {
        busy += offs[x + 1] > offs[x];
        most = MT_MAX(most, offs[x + 1] - offs[x]);
    }
    const double loss = l.loss.nll / (double)l.loss.n_label - log((double)l.arch.vocab);
    if (!(rms > 1.2 && rms < 4)) fail_msg("%s %s: the stream ends with RMS %g", arch, quant, rms);
    if (!(loss > -0.5 && loss < 1.5)) fail_msg("%s %s: loss ln(V) + %g", arch, quant, loss);
    if (busy < n_exp * 3 / 4 || most * n_exp < offs[n_exp] * 5 / 4 || most > offs[n_exp] / 2)
        fail_msg("%s %s: %lld of %lld experts work, one has %lld of %d rows", arch, quant, (long long)busy,
                 (long long)n_exp, (long long)most, offs[n_exp]);
    loaded_close(&l);
}

static void test_models(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(tiny); i++)
        for (int q = i > 0; q < MT_LEN(formats); q++)
            check_model(tiny[i], formats[q]); /* MXFP4: gpt-oss, DeepSeek-V4 */
    for (int i = 1; i < MT_LEN(tiny); i++) check_model(tiny[i], "fp8");
    check_model("deepseek-v4-tiny", "mxfp4");
}

/* Runs only the executable: writes a checkpoint, prints its table, trains a step on text; on messages with synth's
 * template, and with DeepSeek-V4's encoder, which needs none. */
static void test_commands(void **state)
{
    (void)state;
    const char *text = "{\"text\": \"A machine is tried with numbers that mean nothing.\"}\n";
    const char *messages = "{\"messages\": [{\"role\": \"user\", \"content\": \"2 + 2?\"}, "
                           "{\"role\": \"assistant\", \"content\": \"4\"}]}\n";
    struct err err;
    for (int i = 0; i < MT_LEN(tiny) + 2; i++) {
        const char *arch = i <= MT_LEN(tiny) ? tiny[i % MT_LEN(tiny)] : "deepseek-v4-tiny",
                   *rows = i < MT_LEN(tiny) ? text : messages;
        const char *dir = place("model"), *data = place("rows.jsonl"), *config = process_config("");
        char set[2][MT_PATH];
        assert_int_equal(file_write_atomic(data, rows, (int64_t)strlen(rows), &err), 0);
        const struct preset_family *f = preset_find(arch, &err)->family;
        const bool linear = f->delta || f->compress || f->nemotron; /* the fourth layer is the first of its kind */
        assert_int_equal(RUN("synth", arch, dir, "--layers", linear ? "4" : "2", "--seed", "7"), 0);
        assert_says(said.err, f->nemotron ? (f->nemotron->d_latent ? "4 of 5 layers" : "4 of 10 layers")
                              : linear    ? "4 of 4 layers"
                                          : "2 of 4 layers");
        assert_int_equal(RUN("inspect", dir), 0);
        snprintf(set[0], MT_PATH, "model.path=%s", dir);
        snprintf(set[1], MT_PATH, "data.train=%s", data);
        const int rc = RUN(config, "--set", set[0], "--set", set[1], "--set", "data.eval=", "--set", "train.steps=1",
                           "--set", "data.seq_len=1024", "--set", "lora.targets=all-linear");
        if (rc) fail_msg("%s: %s", arch, said.err);
        assert_says(said.out, "step 1/1");
    }
}

/* ---- the same bytes */

static void assert_same_files(const char *a, const char *b)
{
    struct err err;
    char **names, path[MT_PATH];
    int64_t n, size[2];
    assert_int_equal(file_list(a, &names, &n, &err), 0);
    for (int64_t i = 0; i < n; i++) {
        uint32_t crc[2];
        for (int k = 0; k < 2; k++) {
            snprintf(path, sizeof(path), "%s/%s", k ? b : a, names[i]);
            assert_int_equal(file_crc32(path, &crc[k], &size[k], &err), 0);
        }
        if (crc[0] != crc[1] || size[0] != size[1]) fail_msg("%s differs", names[i]);
    }
    file_list_free(names, n);
}

/* The number of tensors of `part` that have the same bytes in `whole`; fails if `whole` lacks a tensor. */
static int64_t same_tensors(const char *part, const char *whole, int64_t *n)
{
    struct safetensors a, b;
    struct err err;
    int64_t same = 0;
    assert_int_equal(safetensors_open(&a, part, &err), 0);
    assert_int_equal(safetensors_open(&b, whole, &err), 0);
    for (int64_t i = 0; i < a.n_tensors; i++) {
        const struct st_tensor *t = &a.tensors[i], *u = safetensors_find(&b, t->name);
        assert_non_null(u);
        same += t->bytes == u->bytes && !memcmp(t->data, u->data, (size_t)t->bytes);
    }
    *n = a.n_tensors;
    safetensors_close(&a);
    safetensors_close(&b);
    return same;
}

static void test_same_bytes(void **state)
{
    (void)state;
    int64_t n;
    for (int q = 0; q < MT_LEN(formats); q++) {
        struct synth_options opt = {.arch = "gpt-oss-tiny", .quant = formats[q], .seed = 1, .n_threads = 1};
        const char *first = made(opt);
        opt.n_threads = 5;
        assert_same_files(first, made(opt));
        opt.n_layer = 2;
        int64_t same = same_tensors(made(opt), first, &n);
        assert_int_equal(same, n); /* --layers writes the first layers */
        opt.n_layer = 0;
        opt.shard_bytes = 1 << 20;
        const char *shards = made(opt);
        same = same_tensors(shards, first, &n);
        assert_int_equal(same, n);
        struct safetensors st;
        struct err err;
        assert_int_equal(safetensors_open(&st, shards, &err), 0);
        assert_true(st.n_shards > 8);
        safetensors_close(&st);
        opt.shard_bytes = 0;
        opt.seed = 2;
        same = same_tensors(made(opt), first, &n);
        assert_true(same == (q == 1 ? 4 * 16 * 2 * 2 : q == 3 ? 4 * 2 : 0)); /* tables of NF4, global scales of NVFP4 */
    }
}

/* ---- in memory */

/* A checkpoint in memory has the tensors, with the dtypes, that the reader of its file gives: the loader decides by
 * dtypes. */
static void test_memory(void **state)
{
    (void)state;
    static const char *const rows[][2] = {{"qwen3-tiny", "fp8"}, {"mixtral-tiny", "nvfp4"}, {"gpt-oss-tiny", "nvfp4"}};
    for (int k = 0; k < MT_LEN(rows); k++) {
        const struct synth_options opt = {.arch = rows[k][0], .quant = rows[k][1], .n_layer = 1};
        struct synth_memory m;
        struct safetensors st;
        struct err err = {.msg = ""};
        if (synth_memory_open(&m, &opt, &err) || safetensors_open(&st, made(opt), &err)) fail_msg("%s", err.msg);
        assert_int_equal(m.st.n_tensors, st.n_tensors);
        for (int64_t i = 0; i < st.n_tensors; i++) {
            const struct st_tensor *a = &m.st.tensors[i], *b = safetensors_find(&st, a->name);
            assert_non_null(b);
            assert_int_equal(a->dtype, b->dtype);
            if (a->dtype == DT_NONE) assert_string_equal(a->st_dtype, b->st_dtype);
            assert_int_equal(a->bytes, b->bytes);
        }
        safetensors_close(&st);
        synth_memory_close(&m);
    }
}

/* ---- refusals */

static void assert_refused(struct synth_options opt, const char *says)
{
    struct err err = {.msg = ""};
    if (!opt.dir) opt.dir = place("model");
    assert_int_equal(synth_run(&opt, &err), -1);
    assert_says(err.msg, says);
}

/* A plan of an architecture by its name is that of its checkpoint. */
static void test_plan(void **state)
{
    (void)state;
    static const char *const archs[] = {"gpt-oss-tiny", "deepseek-v4-tiny", "qwen3-tiny"};
    const char *config = process_config("[train]\nmemory_gb = 1\n"); /* by default the limit depends on what is free */
    for (int i = 0; i < MT_LEN(archs); i++) {
        char path[MT_PATH + 16], by_name[sizeof(said.out)];
        const char *dir = place("planned");
        snprintf(path, sizeof(path), "model.path=%s", dir);
        assert_int_equal(RUN("plan", config, "--arch", archs[i], "--set", "model.path=/nowhere"), 0);
        memcpy(by_name, said.out, sizeof(by_name));
        assert_says(by_name, " as published, not model.path\n");
        assert_int_equal(RUN("synth", archs[i], dir), 0);
        assert_int_equal(RUN("plan", config, "--set", path), 0);
        assert_string_equal(strchr(by_name, '\n') + 1, said.out);
    }
    assert_int_equal(RUN("plan", config, "--arch", "gpt-oss-tiny", "--set", "model.path="), 0);
    assert_int_equal(RUN("plan", config, "--arch", "gpt-oss-2"), 1);
    assert_says(said.err, "unknown architecture \"gpt-oss-2\"");
}

static void test_refusals(void **state)
{
    (void)state;
    struct err err;
    const char *full = scratch_dir(), *file = place("file"), *link = place("link");
    char inside[MT_PATH], slash[MT_PATH + 1];
    snprintf(inside, sizeof(inside), "%s/kept", full);
    assert_int_equal(file_write_atomic(inside, "x", 1, &err), 0);
    assert_int_equal(file_write_atomic(file, "x", 1, &err), 0);
    assert_refused((struct synth_options){.arch = "gpt-oss-tiny", .dir = full}, "not empty");
    assert_true(file_exists(inside));
    assert_refused((struct synth_options){.arch = "gpt-oss-tiny", .dir = file}, "not a directory");
    assert_int_equal(symlink(scratch_dir(), link), 0); /* to an empty directory */
    snprintf(slash, sizeof(slash), "%s/", link);
    assert_refused((struct synth_options){.arch = "olmoe-tiny", .dir = link}, "is a symbolic link to /");
    assert_refused((struct synth_options){.arch = "olmoe-tiny", .dir = slash}, "is a symbolic link to /");
    assert_refused((struct synth_options){.arch = "gpt-os-20b"}, "\"gpt-oss-20b\"");
    assert_refused((struct synth_options){.arch = "llama"}, "moetrain synth");
    assert_refused((struct synth_options){.arch = "gpt-oss-tiny", .quant = "int8"}, "mxfp4, nf4, bf16, nvfp4 or fp8");
    assert_refused((struct synth_options){.arch = "olmoe-tiny", .quant = "mxfp4"}, "nf4, bf16, nvfp4 or fp8");
    assert_refused((struct synth_options){.arch = "gpt-oss-tiny", .quant = "fp8"}, "no layout with experts in FP8");
    assert_refused((struct synth_options){.arch = "olmoe-tiny", .n_layer = 5}, "has 4");
    made((struct synth_options){.arch = "olmoe-tiny", .n_layer = 1}); /* the other arguments are valid */
    assert_int_equal(RUN("synth", "olmoe-tiny"), 2);
    assert_int_equal(RUN("synth", "olmoe-tiny", place("model"), "--layers", "0"), 2);
    assert_int_equal(RUN("synth", "olmoe-tiny", place("model"), "--seed", "1x"), 2);
    assert_int_equal(RUN("synth", "olmoe-tiny", place("model"), "--adapter", "x"), 2);
    assert_int_equal(RUN("synth"), 0);
    assert_says(said.out, "gpt-oss-120b");
}

static void test_no_space(void **state)
{
    (void)state;
    struct statvfs fs;
    const char *dir = place("model");
    assert_int_equal(statvfs(scratch_dir(), &fs), 0);
    if ((double)fs.f_bavail * (double)fs.f_frsize > 200e9) {
        print_message("skip: there is room for gpt-oss-120b in bf16\n");
        return;
    }
    assert_refused((struct synth_options){.arch = "gpt-oss-120b", .quant = "bf16", .dir = dir},
                   "218 GiB of disk space are needed");
    assert_false(file_exists(dir));
}

/* A write that fails at a limit on the file size leaves no files. */
static void test_failed_write(void **state)
{
    (void)state;
    struct rlimit old, low;
    char **names;
    int64_t n;
    struct err err;
    const char *parent = scratch_dir();
    char dir[MT_PATH];
    snprintf(dir, sizeof(dir), "%s/model", parent);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    low = old;
    low.rlim_cur = 1 << 20;
    void (*const handler)(int) = signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &low), 0);
    const int rc = synth_run(&(struct synth_options){.arch = "gpt-oss-tiny", .dir = dir, .n_threads = 3}, &err);
    setrlimit(RLIMIT_FSIZE, &old);
    signal(SIGXFSZ, handler);
    assert_int_equal(rc, -1);
    assert_says(err.msg, "model.safetensors: cannot write");
    assert_int_equal(file_list(parent, &names, &n, &err), 0);
    file_list_free(names, n);
    assert_int_equal(n, 0);
}

int test_synth(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pieces),         cmocka_unit_test(test_moments),    cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_special_tokens), cmocka_unit_test(test_tokenizer),  cmocka_unit_test(test_models),
        cmocka_unit_test(test_commands),       cmocka_unit_test(test_same_bytes), cmocka_unit_test(test_memory),
        cmocka_unit_test(test_plan),           cmocka_unit_test(test_refusals),   cmocka_unit_test(test_no_space),
        cmocka_unit_test(test_failed_write),
    };
    return cmocka_run_group_tests_name("synth", tests, NULL, NULL);
}
