/* test_fingerprint.c - weights.fingerprint and weights.hash: every tensor of every family changes them; device, ranks,
 * decoded layers, files and the cache of packed weights do not. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "model/stored/published.h"
#include "model/stored/source.h"
#include "model/weights.h"
#include "tests/checkpoints.h"
#include "tests/op_check.h"
#include "train/synth/synth.h"

/* A checkpoint whose tensors can be changed. */
struct opened {
    struct arch arch;
    struct safetensors st;
};

static void open_dir(struct opened *o, const char *dir)
{
    struct err err;
    if (arch_load(&o->arch, dir, &err) || safetensors_open(&o->st, dir, &err) ||
        published_rename(&o->st, &o->arch, &err))
        fail_msg("%s", err.msg);
}

/* Tensors that moetrain does not read. */
static bool is_unread(const char *name)
{
    static const char *const parts[] = {"visual", "vision_tower", "multi_modal", "embed_vision", "mtp."};
    for (int i = 0; i < MT_LEN(parts); i++)
        if (strstr(name, parts[i])) return true;
    return source_is_activation_scale(name);
}

/* The hash that loading computed equals one computed directly from the bytes of each tensor in the files. */
static void check_hash(const struct opened *o, const struct base_hash *h)
{
    struct base_hash want;
    base_hash_open(&want, o->arch.n_layer);
    for (int64_t i = 0; i < o->st.n_tensors; i++) {
        const struct st_tensor *t = &o->st.tensors[i];
        if (is_unread(t->name)) continue;
        base_hash_tensor(&want, t, false);
        base_hash_bytes(&want, t, hash_sum_of(0, t->data, t->bytes, 1), false);
    }
    char *loaded = base_hash_text(h), *stored = base_hash_text(&want);
    assert_string_equal(loaded, stored);
    mem_free(loaded);
    mem_free(stored);
    base_hash_close(&want);
}

/* The hashes of the ranks of an expert-parallel group; each rank has hashes of the experts that it holds. */
static struct base_hash group;
static void add_rank(const struct weights *w, const struct comm *ep)
{
    if (!ep->rank) base_hash_open(&group, w->hash.n_layer);
    for (int64_t i = 0; i < w->hash.n_layer + 3; i++) {
        if (ep->rank && group.common[i] != w->hash.common[i]) fail_msg("rank %d, part %d", ep->rank, (int)i);
        group.common[i] = w->hash.common[i];
        group.own[i] += w->hash.own[i];
    }
}

static int load(const struct opened *o, const char *device, const char *dtype, const struct weights_options *opt,
                uint64_t *fingerprint, struct err *err)
{
    struct device dev, plan;
    struct weights w;
    uint64_t dry = 0; /* of a dry run */
    *err = (struct err){.msg = ""};
    if (device_open(&dev, device, dtype, err)) fail_msg("%s", err->msg);
    device_dry_run(&plan, &dev);
    int rc = weights_load(&w, &plan, &o->arch, &o->st, opt, err);
    if (!rc) {
        assert_true(w.fingerprint == 0);
        weights_free(&w);
        struct weights_options hashed = *opt;
        struct device again;
        hashed.hashed = true;
        device_dry_run(&again, &dev);
        if (weights_load(&w, &again, &o->arch, &o->st, &hashed, err)) fail_msg("%s", err->msg);
        dry = w.fingerprint;
        weights_free(&w);
        if (device_reserve(&dev, &dev.weights, "weights", plan.weights.peak, err) ||
            device_reserve(&dev, &dev.work, "work", plan.work.peak, err) ||
            (plan.host.peak && device_reserve_host(&dev, plan.host.peak, err)))
            fail_msg("%s", err->msg);
        rc = weights_load(&w, &dev, &o->arch, &o->st, opt, err);
    }
    if (!rc) {
        assert_true(w.fingerprint == dry);
        *fingerprint = w.fingerprint;
        if (opt->ep)
            add_rank(&w, opt->ep);
        else
            check_hash(o, &w.hash);
        weights_free(&w);
    }
    device_close(&dev);
    return rc;
}

static uint64_t fingerprint_of(const struct opened *o, const char *device, const char *dtype,
                               const struct weights_options *opt)
{
    struct err err;
    uint64_t fingerprint;
    if (load(o, device, dtype, opt, &fingerprint, &err)) fail_msg("%s", err.msg);
    assert_true(fingerprint != 0);
    return fingerprint;
}

static uint64_t plain_fingerprint(const struct opened *o)
{
    return fingerprint_of(o, "cpu", "fp32", &(struct weights_options){0});
}

/* ---- what changes it ---- */

/* A matrix of one expert, but not of the first one: "mlp.experts.3.up_proj.weight", "mlp.experts.down_projs.3.weight".
 */
static bool is_later_expert(const char *name)
{
    const char *at = strstr(name, ".experts."), *weight = strstr(name, ".weight");
    for (; at && weight && at < weight; at = strchr(at + 1, '.')) {
        char *end;
        const long expert = strtol(at + 1, &end, 10);
        if (end > at + 1 && *end == '.') return expert > 0;
    }
    return false;
}

/* Flips a bit of byte `at` with which the checkpoint still loads, and returns whether the fingerprint then differs from
 * `before`. Also true if no flipped bit of the byte gives a checkpoint that loads. */
static bool notices(struct opened *o, int64_t i, int64_t at, uint64_t before)
{
    struct st_tensor *t = &o->st.tensors[i];
    const struct st_tensor stored = *t;
    struct err err;
    uint64_t after = before;
    uint8_t *copy = mem_alloc(t->bytes);
    int rc = -1;
    t->data = copy;
    for (int bit = 0; bit < 8 && rc; bit++) {
        memcpy(copy, stored.data, (size_t)t->bytes);
        copy[at] ^= (uint8_t)(1 << bit);
        rc = load(o, "cpu", "fp32", &(struct weights_options){0}, &after, &err);
    }
    *t = stored;
    mem_free(copy);
    return rc || after != before;
}

/* Each rank of a group has the fingerprint; their hashes add up. */
static void ranks_load_alike(const struct opened *o, const struct quantize *q, uint64_t want)
{
    const int world = o->arch.n_exp % 2 ? (int)o->arch.n_exp : 2;
    for (int p = 0; p < world; p++) {
        const struct comm ep = {.rank = p, .world = world, .local_world = 1};
        const struct weights_options opt = {.quantize = q, .ep = &ep};
        assert_true(fingerprint_of(o, "cpu", "fp32", &opt) == want);
    }
    check_hash(o, &group);
    base_hash_close(&group);
}

/* Changes one byte of one tensor at a time, at any place in the first 64 KiB. */
static void check_every_tensor(struct opened *o, const char *what)
{
    const int64_t most = 1 << 16;
    const uint64_t before = plain_fingerprint(o);
    for (int64_t i = 0; i < o->st.n_tensors; i++) {
        const struct st_tensor *t = &o->st.tensors[i];
        const int64_t n = MT_MIN(t->bytes, most), at = i % 3 ? i * 7919 % n : n - 1;
        const bool read = !is_unread(t->name), sampled = read && !is_later_expert(t->name);
        if (sampled && !notices(o, i, at, before)) fail_msg("%s: byte %d of %s", what, (int)at, t->name);
        if (!read && notices(o, i, at, before)) fail_msg("%s: %s is not read", what, t->name);
    }
    assert_true(plain_fingerprint(o) == before);
    ranks_load_alike(o, NULL, before);
}

static void every_tensor_of_every_family(void **state)
{
    (void)state;
    static const char *const fixtures[] = {
        "case_a",      "case_b",      "qwen3",    "olmoe",           "mixtral",  "glm4",
        "glm4_lite",   "deepseek_v3", "mistral4", "qwen3_5",         "qwen3_vl", "qwen3_next",
        "deepseek_v4", "minimax_m2",  "nemotron", "nemotron_latent", "lfm2",     "gemma4"};
    for (int i = 0; i < MT_LEN(fixtures); i++) {
        struct opened o;
        char name[64];
        snprintf(name, sizeof(name), "parity/%s", fixtures[i]);
        open_dir(&o, fixture(name));
        check_every_tensor(&o, name);
        safetensors_close(&o.st);
    }
}

/* Matrices with their scales and tables. */
static void every_tensor_of_every_format(void **state)
{
    (void)state;
    static const struct linear_form forms[] = {{.format = WF_NF4, .block = 64},
                                               {.format = WF_NF4, .block = 64, .nested = true},
                                               {.format = WF_NVFP4},
                                               {.format = WF_NVFP4, .nested = true},
                                               {.format = WF_BF16, .fp8 = FP8_ROWS},
                                               {.format = WF_BF16, .fp8 = FP8_BLOCKS_INV}};
    for (int i = 0; i < MT_LEN(forms) + 1; i++) {
        struct draft d;
        struct opened o;
        char what[32];
        draft_open(&d);
        if (i < MT_LEN(forms)) {
            draft_per_expert(&d, &forms[i]);
            draft_attention(&d, &forms[i]);
        } else
            draft_nvfp4_stacks(&d, true, false);
        open_dir(&o, draft_save(&d, 1));
        draft_free(&d);
        snprintf(what, sizeof(what), "format %d", i);
        check_every_tensor(&o, what);
        safetensors_close(&o.st);
    }
}

/* As published: experts in MXFP4, other matrices in FP8 with exponents as scales. */
static void every_tensor_of_deepseek_v4(void **state)
{
    (void)state;
    struct synth_memory m;
    struct err err;
    const struct synth_options opt = {.arch = "deepseek-v4-tiny", .seed = 3};
    if (synth_memory_open(&m, &opt, &err)) fail_msg("%s", err.msg);
    struct opened o = {.arch = m.arch, .st = m.st};
    check_every_tensor(&o, "deepseek-v4-tiny");
    synth_memory_close(&m);
}

/* The fingerprint covers the first 64 KiB of a tensor and, in every layer, the first expert. */
static void bytes_that_it_does_not_cover(void **state)
{
    (void)state;
    struct opened o;
    open_dir(&o, fixture("parity/olmoe"));
    const uint64_t before = plain_fingerprint(&o);
    int64_t n_large = 0, n_expert = 0;
    for (int64_t i = 0; i < o.st.n_tensors; i++) {
        const struct st_tensor *t = &o.st.tensors[i];
        if (t->bytes > 1 << 16) n_large += !notices(&o, i, 1 << 16, before);
        if (is_later_expert(t->name)) n_expert += !notices(&o, i, 0, before);
    }
    assert_int_equal(n_large, 2);          /* embedding and head */
    assert_int_equal(n_expert, 2 * 6 * 3); /* 2 layers, 7 experts */
    safetensors_close(&o.st);
}

/* Two norms change places; the same bytes get another dtype. */
static void names_and_dtypes_count(void **state)
{
    (void)state;
    struct draft d;
    struct opened o;
    draft_open(&d);
    open_dir(&o, draft_save(&d, 1));
    draft_free(&d);
    const uint64_t before = plain_fingerprint(&o);
    struct st_tensor *norm[2];
    for (int i = 0; i < 2; i++) {
        const char *name = i ? "model.norm.weight" : "model.layers.0.input_layernorm.weight";
        const struct st_tensor *t = safetensors_find(&o.st, name);
        assert_non_null(t);
        norm[i] = &o.st.tensors[t - o.st.tensors];
    }
    assert_int_equal(norm[0]->dtype, DT_BF16);
    const uint8_t *data = norm[0]->data;
    norm[0]->data = norm[1]->data;
    norm[1]->data = data;
    assert_true(plain_fingerprint(&o) != before);
    norm[1]->data = norm[0]->data;
    norm[0]->data = data;
    norm[0]->dtype = DT_F16;
    norm[0]->st_dtype = "F16";
    assert_true(plain_fingerprint(&o) != before);
    safetensors_close(&o.st);
}

/* ---- what does not change it ---- */

static void loads_alike(const struct opened *o, const struct quantize *q, bool mxfp4)
{
    const struct weights_options plain = {.quantize = q};
    const uint64_t want = fingerprint_of(o, "cpu", "fp32", &plain);
    struct weights_options opt = plain;
    assert_true(fingerprint_of(o, "cpu", "bf16", &opt) == want);
    for (opt.decoded_layers = 1; opt.decoded_layers <= o->arch.n_layer; opt.decoded_layers++)
        assert_true(fingerprint_of(o, "cpu", "fp32", &opt) == want);
    opt.embed_on_host = true;
    assert_true(fingerprint_of(o, "cpu", "fp32", &opt) == want);
    opt = plain;
    opt.fp8 = mxfp4 ? FP8_ON : FP8_OFF;
    assert_true(fingerprint_of(o, "cpu", "bf16", &opt) == want);
    ranks_load_alike(o, q, want);
}

static void ways_to_load(void **state)
{
    (void)state;
    static const char *const cases[] = {"parity/case_a", "parity/qwen3", "parity/deepseek_v4"};
    const struct quantize none = {.format = WF_NONE};
    for (int i = 0; i < MT_LEN(cases); i++) {
        struct draft d;
        struct opened one, shards;
        draft_open_case(&d, cases[i]);
        open_dir(&one, draft_save(&d, 1));
        open_dir(&shards, draft_save(&d, 3));
        draft_free(&d);
        loads_alike(&one, &none, i == 0);
        assert_int_equal(shards.st.n_shards, 3);
        assert_true(plain_fingerprint(&shards) == plain_fingerprint(&one));
        safetensors_close(&one.st);
        safetensors_close(&shards.st);
    }
}

/* The fingerprint differs between packing formats, but not between the first load, which writes the cache, and later
 * loads, which read it. */
static void packed_while_loading(void **state)
{
    (void)state;
    struct draft d;
    struct opened o;
    struct quantize q[] = {{.format = WF_NF4},
                           {.format = WF_NF4, .nested = true},
                           {.format = WF_NF4, .attention = true},
                           {.format = WF_MXFP4}};
    uint64_t fingerprint[MT_LEN(q)];
    char path[MT_PATH];
    draft_open(&d);
    draft_dense(&d, DT_BF16);
    draft_transposed(&d, DT_BF16);
    open_dir(&o, draft_save(&d, 1));
    draft_free(&d);
    const uint64_t dense = plain_fingerprint(&o);
    for (int i = 0; i < MT_LEN(q); i++) {
        loads_alike(&o, &q[i], false);
        fingerprint[i] = fingerprint_of(&o, "cpu", "fp32", &(struct weights_options){.quantize = &q[i]});
        snprintf(path, sizeof(path), "%s/packed", scratch_dir());
        q[i].cache = path;
        for (int n = 0; n < 2; n++)
            assert_true(fingerprint_of(&o, "cpu", "fp32", &(struct weights_options){.quantize = &q[i]}) ==
                        fingerprint[i]);
        assert_int_equal(access(path, F_OK), 0);
        assert_true(fingerprint[i] != dense);
        for (int k = 0; k < i; k++) assert_true(fingerprint[k] != fingerprint[i]);
    }
    safetensors_close(&o.st);
}

/* The head is the embedding; the fingerprint has it once. */
static void tied_embeddings(void **state)
{
    (void)state;
    const struct quantize none = {.format = WF_NONE};
    struct draft d;
    struct opened o;
    draft_open(&d);
    draft_remove(&d, "lm_head.weight");
    draft_config(&d, "\"tie_word_embeddings\": false", "\"tie_word_embeddings\": true");
    open_dir(&o, draft_save(&d, 1));
    draft_free(&d);
    assert_true(o.arch.tied);
    loads_alike(&o, &none, true);
    check_every_tensor(&o, "tied");
    safetensors_close(&o.st);
}

/* A read of the data would end the test with SIGSEGV. */
static void dry_runs_read_no_data(void **state)
{
    (void)state;
    const size_t bytes = 16 << 20;
    struct opened o;
    struct device dev, plan;
    struct weights w;
    struct err err;
    void *none = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(none != MAP_FAILED);
    open_dir(&o, fixture("parity/case_a"));
    for (int64_t i = 0; i < o.st.n_tensors; i++) {
        assert_true(o.st.tensors[i].bytes <= (int64_t)bytes);
        o.st.tensors[i].data = none;
    }
    assert_int_equal(device_open(&dev, "cpu", "fp32", &err), 0);
    device_dry_run(&plan, &dev);
    if (weights_load(&w, &plan, &o.arch, &o.st, &(struct weights_options){0}, &err)) fail_msg("%s", err.msg);
    assert_true(w.fingerprint == 0);
    weights_free(&w);
    device_close(&dev);
    safetensors_close(&o.st);
    munmap(none, bytes);
}

static void the_gpu_gives_the_same(void **state)
{
    (void)state;
    op_check_need_gpu();
    struct opened o;
    open_dir(&o, fixture("parity/case_a"));
    assert_true(fingerprint_of(&o, "cuda", "bf16", &(struct weights_options){0}) == plain_fingerprint(&o));
    safetensors_close(&o.st);
}

int test_fingerprint(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_tensor_of_every_family), cmocka_unit_test(every_tensor_of_every_format),
        cmocka_unit_test(every_tensor_of_deepseek_v4),  cmocka_unit_test(bytes_that_it_does_not_cover),
        cmocka_unit_test(names_and_dtypes_count),       cmocka_unit_test(ways_to_load),
        cmocka_unit_test(packed_while_loading),         cmocka_unit_test(tied_embeddings),
        cmocka_unit_test(dry_runs_read_no_data),        cmocka_unit_test(the_gpu_gives_the_same),
    };
    return cmocka_run_group_tests_name("fingerprint", tests, NULL, NULL);
}
