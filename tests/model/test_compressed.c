/* test_compressed.c - attention to compressed keys, hyper-connections and experts by token id in a model: gradients
 * against finite differences, recomputation, packed documents, adapters, expert parallelism. */
#include "tests/test.h"

#include <stdio.h>
#include <string.h>

#include "data/safetensors.h"
#include "model/lora_table.h"
#include "tests/checkpoints.h"
#include "tests/process.h"
#include "tests/whole_model.h"
#include "train/run/run.h"

enum { HIDDEN = 24, VOCAB = 40, HEADS = 4, DIM = 8, Q_LORA = 6, GROUPS = 2, O_LORA = 5, N_EXP = 4, WIDTH = 8 };
enum { INDEX_HEADS = 16, INDEX_DIM = 6, STREAMS = 4 };

/* Kinds of layers as in compress_ratios. The documents of whole_model.h have 5 and 7 tokens: with 2 tokens per entry
 * the second has 3 entries, of which a token may see `top`. */
struct shape {
    int n_layer, kind[3], sparse, heavy, top, n_hash, window;
    bool yarn;
};
static const struct shape shapes[] = {
    {3, {0, 4, 128}, 2, 3, 2, 1, 2, true},
    {3, {4, 4, 4}, 2, 3, 1, 0, 1, false},
    {2, {128, 4}, 1, 5, 8, 2, 16, true},
    {2, {0, 128}, 2, 8, 2, 0, 3, false}, /* no document is as long as an entry */
};
#define TARGETS "q_a_proj,q_b_proj,kv_proj,o_b_proj,experts,shared_experts"

static const char *kind_name(int kind)
{
    return kind == 0 ? "sliding_attention" : kind == 4 ? "compressed_sparse_attention" : "heavily_compressed_attention";
}

static const char *config_text(const struct shape *s)
{
    static char text[2048];
    char kinds[256] = "";
    for (int l = 0; l < s->n_layer; l++)
        snprintf(kinds + strlen(kinds), sizeof(kinds) - strlen(kinds), "%s\"%s\"", l ? ", " : "",
                 kind_name(s->kind[l]));
    snprintf(text, sizeof(text),
             "{\"model_type\": \"deepseek_v4\", \"num_hidden_layers\": %d, \"hidden_size\": %d, \"vocab_size\": %d, "
             "\"num_attention_heads\": %d, \"num_key_value_heads\": 1, \"head_dim\": %d, \"qk_rope_head_dim\": 4, "
             "\"q_lora_rank\": %d, \"o_groups\": %d, \"o_lora_rank\": %d, \"sliding_window\": %d, "
             "\"layer_types\": [%s], \"compress_rates\": {\"%s\": %d, \"%s\": %d}, \"index_n_heads\": %d, "
             "\"index_head_dim\": %d, \"index_topk\": %d, \"num_hash_layers\": %d, \"hc_mult\": %d, "
             "\"hc_sinkhorn_iters\": 3, \"moe_intermediate_size\": %d, \"n_routed_experts\": %d, "
             "\"num_experts_per_tok\": 2, \"swiglu_limit\": 1.0, \"rope_theta\": 100, \"compress_rope_theta\": 200%s}",
             s->n_layer, HIDDEN, VOCAB, HEADS, DIM, Q_LORA, GROUPS, O_LORA, s->window, kinds, kind_name(4), s->sparse,
             kind_name(128), s->heavy, INDEX_HEADS, INDEX_DIM, s->top, s->n_hash, STREAMS, WIDTH, N_EXP,
             s->yarn ? ", \"rope_scaling\": {\"type\": \"yarn\", \"factor\": 4.0, "
                       "\"original_max_position_embeddings\": 4}"
                     : "");
    return text;
}

/* ---- a random checkpoint with the published names, in F32 */

static void add(struct draft *d, int64_t layer, const char *name, int64_t n_out, int64_t n_in)
{
    draft_random(d, "", layer, name, n_out, n_in);
}

/* A token's two experts: different ones. */
static void add_table(struct draft *d, int64_t layer)
{
    int64_t *x = mem_array(2 * VOCAB, sizeof(*x));
    char text[96];
    snprintf(text, sizeof(text), "layers.%lld.ffn.gate.tid2eid", (long long)layer);
    for (int64_t i = 0; i < VOCAB; i++) {
        x[2 * i] = i % N_EXP;
        x[2 * i + 1] = (i + 1 + i % 3) % N_EXP;
    }
    draft_put(d, text, DT_I64, 2, (int64_t[]){VOCAB, 2}, x);
}

static void add_compressor(struct draft *d, int64_t l, const char *part, int64_t ratio, int64_t cols, int64_t width)
{
    static const char *const parts[] = {"wkv.weight", "wgate.weight", "ape", "norm.weight"};
    const int64_t shape[][2] = {{cols, HIDDEN}, {cols, HIDDEN}, {ratio, cols}, {width, 0}};
    for (int i = 0; i < MT_LEN(parts); i++) {
        char name[64];
        snprintf(name, sizeof(name), "attn.%s%s", part, parts[i]);
        add(d, l, name, shape[i][0], shape[i][1]);
    }
}

static void add_streams(struct draft *d, int64_t l, const char *site)
{
    static const char *const parts[] = {"fn", "base", "scale"};
    const int64_t n = (2 + STREAMS) * STREAMS, shape[][2] = {{n, STREAMS * HIDDEN}, {n, 0}, {3, 0}};
    for (int i = 0; i < MT_LEN(parts); i++) {
        char name[64];
        snprintf(name, sizeof(name), "hc_%s_%s", site, parts[i]);
        add(d, l, name, shape[i][0], shape[i][1]);
    }
}

static void add_attention(struct draft *d, int64_t l, const struct shape *s)
{
    const int kind = s->kind[l];
    add(d, l, "attn.wq_a.weight", Q_LORA, HIDDEN);
    add(d, l, "attn.q_norm.weight", Q_LORA, 0);
    add(d, l, "attn.wq_b.weight", HEADS * DIM, Q_LORA);
    add(d, l, "attn.wkv.weight", DIM, HIDDEN);
    add(d, l, "attn.kv_norm.weight", DIM, 0);
    add(d, l, "attn.wo_a.weight", GROUPS * O_LORA, HEADS * DIM / GROUPS);
    add(d, l, "attn.wo_b.weight", HIDDEN, GROUPS * O_LORA);
    add(d, l, "attn.attn_sink", HEADS, 0);
    if (kind == 128) add_compressor(d, l, "compressor.", s->heavy, DIM, DIM);
    if (kind != 4) return;
    add_compressor(d, l, "compressor.", s->sparse, 2 * DIM, DIM);
    add_compressor(d, l, "indexer.compressor.", s->sparse, 2 * INDEX_DIM, INDEX_DIM);
    add(d, l, "attn.indexer.wq_b.weight", INDEX_HEADS * INDEX_DIM, Q_LORA);
    add(d, l, "attn.indexer.weights_proj.weight", INDEX_HEADS, HIDDEN);
}

static void add_network(struct draft *d, int64_t l, const char *part)
{
    static const char *const names[] = {"w1", "w3", "w2"};
    for (int i = 0; i < 3; i++) {
        char name[64];
        snprintf(name, sizeof(name), "ffn.%s.%s.weight", part, names[i]);
        add(d, l, name, i < 2 ? WIDTH : HIDDEN, i < 2 ? HIDDEN : WIDTH);
    }
}

static void add_layer(struct draft *d, int64_t l, const struct shape *s)
{
    add(d, l, "attn_norm.weight", HIDDEN, 0);
    add(d, l, "ffn_norm.weight", HIDDEN, 0);
    add_attention(d, l, s);
    add_streams(d, l, "attn");
    add_streams(d, l, "ffn");
    add(d, l, "ffn.gate.weight", N_EXP, HIDDEN);
    if (l < s->n_hash)
        add_table(d, l);
    else
        add(d, l, "ffn.gate.bias", N_EXP, 0);
    for (int e = 0; e < N_EXP; e++) {
        char part[32];
        snprintf(part, sizeof(part), "experts.%d", e);
        add_network(d, l, part);
    }
    add_network(d, l, "shared_experts");
}

static const char *write_model(const struct shape *s)
{
    struct draft d;
    draft_begin(&d, config_text(s));
    add(&d, -1, "embed.weight", VOCAB, HIDDEN);
    add(&d, -1, "head.weight", VOCAB, HIDDEN);
    add(&d, -1, "norm.weight", HIDDEN, 0);
    add(&d, -1, "hc_head_fn", STREAMS, STREAMS * HIDDEN);
    add(&d, -1, "hc_head_base", STREAMS, 0);
    add(&d, -1, "hc_head_scale", 1, 0);
    for (int64_t l = 0; l < s->n_layer; l++) add_layer(&d, l, s);
    const char *dir = draft_save(&d, 1);
    draft_free(&d);
    return dir;
}

/* ---- runs in F64 with random adapters */

static void gradients(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(shapes); i++) {
        struct config cfg;
        struct run r;
        whole_model_open(&r, &cfg, write_model(&shapes[i]), TARGETS, CFG_RECOMPUTE_NONE);
        whole_model_check_slopes(&r);
        run_close(&r);
    }
}

static void recomputation(void **state)
{
    (void)state;
    whole_model_check_recomputation(write_model(&shapes[0]), TARGETS);
}

static void packed_equals_separate(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(shapes); i++) whole_model_check_packing(write_model(&shapes[i]), TARGETS);
}

/* ---- processes */

#define CASE "parity/deepseek_v4"

/* Trains the parity case up to a step, in the directory of `config` (NULL: a new one). */
static const char *train(const char *parallel, int steps, const char *config)
{
    char sets[8 * MT_PATH];
    char dir[MT_PATH];
    snprintf(dir, sizeof(dir), "%s", fixture(CASE));
    if (!config)
        config = process_config("[optim]\nschedule = constant\nwarmup_ratio = 0\n[output]\nsave_every = 1\n"
                                "[train]\nthreads = 1\ngrad_accum = 2\n[lora]\nalpha = 16\n");
    snprintf(sets, sizeof(sets),
             "model.path=%s data.train=%s/train.jsonl data.eval=%s/eval.jsonl lora.init_from=%s/adapter_init "
             "lora.targets=" TARGETS " lora.r=4 train.steps=%d "
             "data.packing=yes %s",
             dir, dir, dir, dir, steps, parallel);
    if (process_run_sets(config, sets)) fail_msg("%s", said.err);
    return config;
}

/* Data parallel; expert parallel, with checkpoints that other numbers of ranks continue. Hash layers need the token ids
 * on every rank. */
static void ranks_and_resuming(void **state)
{
    (void)state;
    const char *one = train("parallel.cpu_ranks=1", 2, NULL);
    const char *divided = train("parallel.cpu_ranks=2 parallel.ep=2", 1, NULL);
    assert_true(adapter_error(divided, one) > 1e-4); /* a step more */
    assert_true(adapter_error(train("parallel.cpu_ranks=2", 2, NULL), one) < 1e-5);
    train("parallel.cpu_ranks=2 parallel.ep=2 train.recompute=full", 2, divided);
    assert_says(said.err, "continuing after step 1 of 2");
    assert_true(adapter_error(divided, one) < 1e-5);
    divided = train("parallel.cpu_ranks=2 parallel.ep=2", 1, NULL);
    train("parallel.cpu_ranks=1", 2, divided);
    assert_true(adapter_error(divided, one) < 1e-5);
}

/* ---- adapters and sizes */

/* Compressors and the indexer have modules with the names of targets: PEFT must not adapt these. */
static void adapters_name_their_modules(void **state)
{
    (void)state;
    char text[8192];
    process_read(process_output(train("", 1, NULL), "adapter/adapter_config.json"), text, sizeof(text));
    assert_says(text, "\"self_attn.q_a_proj\",\n    \"self_attn.q_b_proj\",\n    \"self_attn.kv_proj\",\n    "
                      "\"self_attn.o_b_proj\",\n    \"mlp.shared_experts.gate_proj\"");
}

/* The share of adapted weights counts every matrix, also matrices that cannot have an adapter. */
static void frozen_matrices_are_counted(void **state)
{
    (void)state;
    struct safetensors st;
    struct adapters ad;
    struct arch a;
    struct err err = {.msg = ""};
    const struct lora_options opt = {.r = 4, .alpha = 4, .targets = TARGETS, .layers = ""};
    double attention = 0, all = 0, adapted = 0;
    if (arch_load(&a, fixture(CASE), &err) || safetensors_open(&st, fixture(CASE), &err) ||
        adapters_plan(&ad, &a, &opt, &err))
        fail_msg("%s", err.msg);
    for (int64_t i = 0; i < st.n_tensors; i++) {
        const struct st_tensor *t = &st.tensors[i];
        const bool mixer = strstr(t->name, ".attn.");
        const double n = t->ndim == 2 ? (double)(t->shape[0] * t->shape[1]) : 0;
        if (strstr(t->name, "tid2eid") || strstr(t->name, ".ape")) continue;
        all += n;
        attention += mixer ? n : 0;
        adapted +=
            mixer && !strstr(t->name, "wo_a") && !strstr(t->name, "compressor") && !strstr(t->name, "indexer") ? n : 0;
    }
    char share[64], total[64], count[32], *table = lora_table(&ad, &a);
    snprintf(share, sizeof(share), "adapters cover %.3g %% of the parameters", 100 * adapted / attention);
    snprintf(total, sizeof(total), "of the model's %s (", str_count(count, (int64_t)all));
    assert_says(table, share);
    assert_says(table, total);
    mem_free(table);
    adapters_free(&ad);
    safetensors_close(&st);
}

static void other_targets_are_refused(void **state)
{
    (void)state;
    struct arch a;
    struct adapters ad;
    struct err err = {.msg = ""};
    const struct lora_options opt = {.r = 2, .alpha = 4, .targets = "o_proj", .layers = ""};
    if (arch_load(&a, fixture(CASE), &err)) fail_msg("%s", err.msg);
    assert_int_equal(adapters_plan(&ad, &a, &opt, &err), -1);
    assert_says(err.msg, "the targets of deepseek_v4 are q_a_proj, q_b_proj, kv_proj, o_b_proj, gate_up_proj, ");
}

/* Sizes that the CUDA kernels do not support are errors when the model is opened. */
static void sizes_for_a_gpu(void **state)
{
    (void)state;
    struct err err = {.msg = ""};
    assert_int_equal(whole_model_open_gpu(write_model(&shapes[0]), TARGETS, &err), -1);
    assert_says(err.msg, "q_lora_rank is 6; the CUDA kernels need a multiple of 8");
    assert_int_equal(whole_model_open_gpu(fixture(CASE), TARGETS, &err), -1);
    assert_says(err.msg, "o_lora_rank is 12; the CUDA kernels need a multiple of 8");
}

int test_compressed(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients),
        cmocka_unit_test(recomputation),
        cmocka_unit_test(packed_equals_separate),
        cmocka_unit_test(ranks_and_resuming),
        cmocka_unit_test(adapters_name_their_modules),
        cmocka_unit_test(frozen_matrices_are_counted),
        cmocka_unit_test(other_targets_are_refused),
        cmocka_unit_test(sizes_for_a_gpu),
    };
    return cmocka_run_group_tests_name("compressed", tests, NULL, NULL);
}
