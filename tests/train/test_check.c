/* test_check.c - `moetrain check` accepts correct ops in every family, and detects wrong ones. */
#include "train/bench/check.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "tests/checkpoints.h"
#include "tests/op_check.h"
#include "tests/process.h"
#include "tests/whole_model.h"

static char text[1 << 16];

/* A configuration of the parity case `name`, on a CPU. */
static struct config case_config(const char *name, const char *dtype)
{
    struct config cfg;
    config_defaults(&cfg);
    snprintf(cfg.model.path, sizeof(cfg.model.path), "%s/%s", fixture("parity"), name);
    snprintf(cfg.data.train, sizeof(cfg.data.train), "%s/%s/train.jsonl", fixture("parity"), name);
    snprintf(cfg.output.dir, sizeof(cfg.output.dir), "%s", scratch_dir());
    cfg.train.device = CFG_DEVICE_CPU;
    cfg.train.threads = 2;
    cfg.data.seq_len = 48;
    cfg.lora.r = 4;
    if (!strcmp(dtype, "bf16")) cfg.train.dtype = CFG_DTYPE_BF16;
    return cfg;
}

/* Runs the check in this process with some ops replaced. */
static int check_config(const struct config *cfg, const struct ops *ops)
{
    struct err err = {{0}};
    FILE *out = fmemopen(text, sizeof(text), "w");
    const int rc = check_run(cfg, 0, ops, out, &err);
    fclose(out);
    if (rc) print_message("%s\n", err.msg);
    return rc;
}

static int check(const char *name, const char *dtype, const struct ops *ops)
{
    const struct config cfg = case_config(name, dtype);
    return check_config(&cfg, ops);
}

static void test_families(void **state)
{
    (void)state;
    static const char *const names[] = {"case_a",    "qwen3",       "olmoe",      "mixtral",  "glm4",
                                        "glm4_lite", "deepseek_v3", "qwen3_5",    "qwen3_vl", "qwen3_next",
                                        "mistral4",  "deepseek_v4", "minimax_m2", "nemotron", "nemotron_latent",
                                        "lfm2",      "gemma4"};
    for (int i = 0; i < 2 * MT_LEN(names); i++) {
        struct config cfg = case_config(names[i / 2], i % 2 ? "bf16" : "fp32");
        snprintf(cfg.lora.targets, sizeof(cfg.lora.targets), "all-linear");
        if (check_config(&cfg, NULL)) fail_msg("%s:\n%s", names[i / 2], text);
        assert_says(text, "verdict: ok");
        assert_says(text, "gradient of down_proj.lora_B");
        assert_null(strstr(text, "after attention                  (layer 0)    0.00e+00"));
        assert_null(strstr(text, "(null)")); /* every target has a name */
    }
}

/* Lines of the summary on which the CPU in bf16 has a larger error than the device. */
static int n_larger(const char *name)
{
    struct config cfg = case_config(name, "bf16");
    int n = 0;
    snprintf(cfg.lora.targets, sizeof(cfg.lora.targets), "all-linear");
    assert_int_equal(check_config(&cfg, NULL), 0);
    for (const char *line = strstr(text, "worst of each"); line; line = strchr(line + 1, '\n')) {
        double device, near;
        const char *at = strchr(line, ')');
        n += at && at < strchr(line + 1, '\n') && sscanf(at + 1, "%lf %lf", &device, &near) == 2 && near > device;
    }
    return n;
}

/* The device here is a CPU in bf16, so one reference run of the CPU has the same errors. With gated DeltaNet the bound
 * is the largest error of several runs of the CPU. */
static void test_several_cpu_runs(void **state)
{
    (void)state;
    assert_int_equal(n_larger("glm4"), 0);
    assert_in_range(n_larger("qwen3_5"), 4, 100);
}

/* A device that pads ranks to multiples of 8, as a GPU does, also passes: r = 4, and q, k and v of different ranks. */
static void test_padded_ranks(void **state)
{
    (void)state;
    static const char *const names[] = {"case_a", "qwen3", "mixtral"}, *const ranks[] = {"",
                                                                                         "q_proj=3,v_proj=5,experts=9"};
    struct ops ops = *ops_cpu();
    ops.rank_multiple = 8;
    for (int i = 0; i < 2 * MT_LEN(names); i++) {
        struct config cfg = case_config(names[i / 2], i % 2 ? "bf16" : "fp32");
        snprintf(cfg.lora.rank_pattern, sizeof(cfg.lora.rank_pattern), "%s", ranks[i % 2]);
        if (check_config(&cfg, &ops)) fail_msg("%s:\n%s", names[i / 2], text);
    }
}

/* ---- ops with one fault each (a dry run calls them too, without memory) */

static void scaled_attention(struct device *dev, struct tensor o, struct tensor lse, struct tensor qkv,
                             struct tensor sinks, const struct seqs *seqs, const struct attn_shape *shape)
{
    cpu_attn_fwd(dev, o, lse, qkv, sinks, seqs, shape);
    for (int64_t i = 0; i < tensor_count(o) && !dev->dry_run; i++) ((float *)o.data)[i] *= 1.01f;
}

/* Sends one token to its least likely expert. */
static void confused_router(struct device *dev, struct route *r, struct tensor logits, struct tensor x,
                            const struct weight *w, struct tensor bias, const struct router *router)
{
    cpu_router_fwd(dev, r, logits, x, w, bias, router);
    if (dev->dry_run) return;
    const float *row = logits.data;
    int32_t *idx = r->idx.data, least = 0;
    for (int32_t e = 1; e < w->n_out; e++)
        if (row[e] < row[least]) least = e;
    for (int64_t j = 0; j < r->idx.shape[1]; j++)
        if (idx[j] == least) return;
    idx[least < idx[0] ? 0 : r->idx.shape[1] - 1] = least;
}

static void forgetful_down(struct device *dev, struct tensor dpre, struct tensor dgate, struct tensor act,
                           struct tensor dout, struct tensor pre, struct tensor ha, const struct route *r,
                           const struct proj *down, const struct glu *glu)
{
    cpu_moe_down_bwd(dev, dpre, dgate, act, dout, pre, ha, r, down, glu);
    if (!dev->dry_run) memset(down->grad.b.data, 0, 64);
}

static void broken_norm(struct device *dev, struct tensor y, struct tensor rstd, struct tensor x, struct tensor w,
                        const struct norm *norm)
{
    cpu_rmsnorm_fwd(dev, y, rstd, x, w, norm);
    if (!dev->dry_run) ((float *)y.data)[5] = NAN;
}

/* An op that overwrites the free part of the work arena, which every op may use as scratch. It is the last op of a
 * step. */
static void littering_sums(struct device *dev, struct tensor rows, struct tensor gates, const struct route *r)
{
    const struct arena *work = &dev->work;
    if (!dev->dry_run) memset(work->base + work->used, 0xff, (size_t)(work->cap - work->used));
    cpu_expert_sums(dev, rows, gates, r);
}

static void test_scratch(void **state)
{
    (void)state;
    struct ops ops = *ops_cpu();
    ops.expert_sums = littering_sums;
    assert_int_equal(check("case_a", "fp32", &ops), 0);
}

static void assert_noticed(const struct ops *ops, const char *dtype, const char *what)
{
    assert_int_equal(check("case_a", dtype, ops), -1);
    assert_says(text, "verdict: FAILED");
    assert_says(text, what);
}

/* The gradient of gated DeltaNet with an error of 3e-3 in the part of the decay. */
static void wrong_decay(struct device *dev, struct tensor dqkv, struct tensor dba, struct tensor dout,
                        struct tensor qkv, struct tensor ba, struct tensor a_log, struct tensor dt_bias,
                        const struct seqs *seqs, const struct delta_shape *shape)
{
    cpu_delta_bwd(dev, dqkv, dba, dout, qkv, ba, a_log, dt_bias, seqs, shape);
    for (int64_t i = 0; i < tensor_count(dba) && !dev->dry_run; i++) ((float *)dba.data)[i] *= 1.003f;
}

static void test_wrong_delta(void **state)
{
    (void)state;
    struct ops ops = *ops_cpu();
    struct config cfg = case_config("qwen3_5", "fp32");
    snprintf(cfg.lora.targets, sizeof(cfg.lora.targets), "all-linear");
    ops.delta_bwd = wrong_decay;
    assert_int_equal(check_config(&cfg, &ops), -1);
    assert_says(text, "verdict: FAILED");
    assert_says(text, "beyond");
}

/* Entries chosen by scores of the wrong sign. */
static void worst_entries(struct device *dev, struct tensor idx, struct tensor q, struct tensor k, struct tensor w,
                          const struct seqs *seqs, int64_t ratio)
{
    for (int64_t i = 0; i < tensor_count(w) && !dev->dry_run; i++) ((float *)w.data)[i] *= -1;
    cpu_index_topk(dev, idx, q, k, w, seqs, ratio);
}

static void test_wrong_entries(void **state)
{
    (void)state;
    static const char *const dtypes[] = {"fp32", "bf16"};
    struct ops ops = *ops_cpu();
    ops.index_topk = worst_entries;
    for (int i = 0; i < MT_LEN(dtypes); i++) {
        struct config cfg = case_config("deepseek_v4", dtypes[i]);
        snprintf(cfg.lora.targets, sizeof(cfg.lora.targets), "all-linear");
        assert_int_equal(check_config(&cfg, &ops), -1);
        assert_says(text, "entries: F64 would have chosen other entries for ");
        assert_says(text, "more than rounding explains: beyond");
        assert_null(strstr(text, "!")); /* all errors are within the bound, as all sides take the same entries */
    }
}

static void test_wrong_ops(void **state)
{
    (void)state;
    struct ops ops = *ops_cpu();
    ops.attn_fwd = scaled_attention;
    assert_noticed(&ops, "fp32", "after attention");
    assert_says(text, "! ");
    ops = *ops_cpu();
    ops.router_fwd = confused_router;
    assert_noticed(&ops, "fp32", "more than rounding explains");
    assert_noticed(&ops, "bf16", "more than rounding explains");
    ops = *ops_cpu();
    ops.moe_down_bwd = forgetful_down;
    assert_noticed(&ops, "fp32", "beyond");
    ops = *ops_cpu();
    ops.rmsnorm_fwd = broken_norm;
    assert_noticed(&ops, "fp32", "nan");
}

/* ---- head widths that the fixtures do not have */

/* Saves the parity case with heads of width `dim`; returns the directory. */
static const char *save_heads(int64_t dim)
{
    struct draft d;
    draft_open(&d);
    draft_head_width(&d, dim);
    const char *dir = draft_save(&d, 1);
    draft_free(&d);
    return dir;
}

static const int64_t head_widths[] = {8, 16, 24, 40, 48, 80, 96, 112, 160, 192, 256, 264, 512};

static void test_head_widths(void **state)
{
    (void)state;
    static const int64_t refused[] = {4, 12, 20, 520, 1024};
    struct err err = {{0}};
    for (int i = 0; i < MT_LEN(head_widths); i++)
        if (whole_model_open_gpu(save_heads(head_widths[i]), "q_proj,experts", &err)) fail_msg("%s", err.msg);
    for (int i = 0; i < MT_LEN(refused); i++) {
        char says[128];
        snprintf(says, sizeof(says), "head_dim is %lld; the CUDA kernels need a multiple of 8 from 8 to 512",
                 (long long)refused[i]);
        assert_int_equal(whole_model_open_gpu(save_heads(refused[i]), "q_proj,experts", &err), -1);
        assert_says(err.msg, says);
    }
}

/* A whole model, forward and backward. */
static void check_heads(int64_t dim, enum cfg_device device)
{
    static const char *const files[] = {"tokenizer.json", "tokenizer_config.json"};
    struct config cfg = case_config("case_a", "bf16");
    snprintf(cfg.model.path, sizeof(cfg.model.path), "%s", save_heads(dim));
    for (int i = 0; i < MT_LEN(files); i++) {
        char from[2 * MT_PATH], to[2 * MT_PATH];
        snprintf(from, sizeof(from), "%s/case_a/%s", fixture("parity"), files[i]);
        snprintf(to, sizeof(to), "%s/%s", cfg.model.path, files[i]);
        assert_int_equal(symlink(from, to), 0);
    }
    cfg.lora.r = 8;
    cfg.train.device = (int)device;
    if (check_config(&cfg, NULL)) fail_msg("heads of %lld: %s", (long long)dim, text);
    assert_says(text, "verdict: ok");
}

static void test_head_widths_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(head_widths); i++) {
        check_heads(head_widths[i], CFG_DEVICE_CUDA);
        check_heads(head_widths[i], CFG_DEVICE_CUDA_PORTABLE);
    }
}

/* With offload, tensors in host memory are compared too. */
static void test_offload(void **state)
{
    (void)state;
    static const char *const ways[] = {"none", "activations", "experts", "all"};
    const char *config = process_config("");
    char *first = NULL;
    for (int i = 0; i < MT_LEN(ways); i++) {
        char model[MT_PATH], set[64];
        snprintf(model, sizeof(model), "model.path=%s", fixture("../../configs/tiny-gptoss"));
        snprintf(set, sizeof(set), "train.offload=%s", ways[i]);
        assert_int_equal(RUN("check", config, "--set", model, "--set", set), 0);
        assert_says(said.out, ": 4 layers, ");
        if (!first) first = mem_strdup(said.out);
        if (strcmp(said.out, first)) fail_msg("%s:\n%s", set, said.out);
    }
    mem_free(first);
}

static void test_command(void **state)
{
    (void)state;
    const char *config = process_config("");
    assert_int_equal(RUN("check", config, "--layers", "1"), 0);
    assert_says(said.out, "verdict: ok");
    assert_says(said.out, ": 1 layer, ");
    assert_int_equal(RUN("check", config, "--layers", "99"), 1);
    assert_says(said.err, "--layers 99");
    /* the error advises on no option that check itself sets */
    assert_int_equal(RUN("check", config, "--set", "train.memory_gb=0.001"), 1);
    assert_says(said.err, " (train.memory_gb): use fewer layers (--layers N), or raise train.memory_gb\n");
    assert_int_equal(RUN("check", config, "--layers", "x"), 2);
    assert_int_equal(RUN(config, "--layers", "1"), 2);
    assert_int_equal(RUN("check"), 2);
}

int test_check(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_families),     cmocka_unit_test(test_several_cpu_runs),
        cmocka_unit_test(test_padded_ranks), cmocka_unit_test(test_wrong_ops),
        cmocka_unit_test(test_wrong_delta),  cmocka_unit_test(test_wrong_entries),
        cmocka_unit_test(test_head_widths),  cmocka_unit_test(test_head_widths_on_the_gpu),
        cmocka_unit_test(test_scratch),      cmocka_unit_test(test_offload),
        cmocka_unit_test(test_command),
    };
    return cmocka_run_group_tests_name("check", tests, NULL, NULL);
}
