/* test_plan_advice.c - what the errors of a plan that does not fit suggest: each suggestion, alone, needs less. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/plan_bed.h"
#include "tests/process.h"

/* train.memory_gb is too small for any plan: with the value that the error suggests, one fits. */
static void suggested_limit(void **state)
{
    (void)state;
    static const double limits[] = {1e-9, 0.02, 0.03};
    static const int modes[] = {CFG_RECOMPUTE_AUTO, CFG_RECOMPUTE_NONE};
    for (int i = 0; i < MT_LEN(limits) * MT_LEN(modes); i++) {
        struct bed *b = bed_open();
        struct err err;
        bed_free = (int64_t)8 << 30;
        bed_fixed = 0;
        b->cfg.train.memory_gb = limits[i / MT_LEN(modes)];
        b->cfg.train.recompute = modes[i % MT_LEN(modes)];
        assert_int_equal(bed_plan(b, &parallel_alone, &err), -1);
        const char *text = strstr(err.msg, "raise train.memory_gb to ");
        if (!text || sscanf(text, "raise train.memory_gb to %lf", &b->cfg.train.memory_gb) != 1)
            fail_msg("%s", err.msg);
        if (bed_plan(b, &parallel_alone, &err)) fail_msg("%s", err.msg);
        bed_free = 1 << 20; /* little memory is free: a higher limit would not help */
        b->cfg.train.memory_gb = 0.02;
        assert_int_equal(bed_plan(b, &parallel_alone, &err), -1);
        assert_null(strstr(err.msg, "raise train.memory_gb"));
        mem_free(b);
    }
}

/* If the weights alone are too large, in training or in an evaluation, the error suggests experts in host memory. */
static void experts_of_a_fixed_offload(void **state)
{
    (void)state;
    static const int ways[] = {CFG_OFFLOAD_NONE, CFG_OFFLOAD_ACTIVATIONS};
    struct err err;
    for (int i = 0; i < 2 * MT_LEN(ways); i++) {
        struct bed *b = bed_of("gpt-oss-tiny", 0);
        struct config *cfg = &b->cfg;
        const bool train = i % 2;
        const struct plan_memory *m = &b->plan.memory;
        b->dev.card = (struct device_card){.bytes = (int64_t)8 << 30, .host_bytes = (int64_t)8 << 30};
        cfg->data.seq_len = 16;
        cfg->train.offload = ways[i / 2];
        cfg->train.decoded_layers = 0;
        if (bed_plan_alone(b, train, &err)) fail_msg("%s", err.msg);
        const int64_t limit[] = {m->experts + m->dense, m->experts};
        for (int few = 0; few < 2; few++) {
            cfg->train.memory_gb = (double)limit[few] / (1 << 30);
            assert_int_equal(bed_plan_alone(b, train, &err), -1);
            assert_says(err.msg, train ? "training needs " : "evaluation needs ");
            assert_int_equal(strstr(err.msg, "the weights alone ") != NULL, few);
            assert_says(err.msg, "set train.offload = auto (needs ");
        }
        cfg->train.memory_gb = 0;
        cfg->train.offload = CFG_OFFLOAD_EXPERTS;
        b->dev.card.host_bytes = 1 << 20;
        assert_int_equal(bed_plan_alone(b, train, &err), -1);
        assert_says(err.msg, train ? "training needs " : "evaluation needs ");
        assert_says(err.msg, " of host memory with train.offload = experts");
        mem_free(b);
    }
}

/* --host-gb is the host memory of the machine, so the error names the need of all its ranks together. */
static void host_memory_of_ranks(void **state)
{
    (void)state;
    struct bed *b = bed_open();
    struct comm ranks = {.world = 8, .local_world = 8}, alone = {.world = 1, .local_world = 1};
    const struct parallel par = {&ranks, &alone, &ranks};
    struct err err;
    b->cfg.train.offload = CFG_OFFLOAD_ALL;
    b->cfg.lora.r = 64;
    b->dev.card = (struct device_card){.bytes = (int64_t)8 << 30, .host_bytes = (int64_t)64 << 20};
    assert_int_equal(bed_plan(b, &par, &err), -1);
    const int64_t need = 8 * b->plan.memory.host;
    char bytes[32], start[160];
    snprintf(start, sizeof(start), "training needs %s of host memory for 8 ranks with train.offload = all, the budget ",
             str_bytes(bytes, need));
    if (!strstr(err.msg, start) || !strstr(err.msg, "is 64.0 MiB (--host-gb)")) fail_msg("%s", err.msg);
    b->dev.card.host_bytes = need;
    if (bed_plan(b, &par, &err)) fail_msg("%s", err.msg);
    assert_int_equal(b->plan.host_free, need);
    mem_free(b);
}

/* A plan for a GPU whose machine has less host memory than a fixed train.offload needs does not fit. `auto` uses half
 * of the host memory; if the GPU is too small as well, the error names what is missing. */
static void host_memory_of_a_card(void **state)
{
    (void)state;
    struct bed *b = bed_open();
    struct err err;
    const struct plan_memory *m = &b->plan.memory;
    double gib = 0;
    b->cfg.train.recompute = CFG_RECOMPUTE_FULL;
    b->cfg.train.offload = CFG_OFFLOAD_ALL;
    b->dev.card = (struct device_card){.bytes = (int64_t)8 << 30};
    if (bed_plan(b, &parallel_alone, &err)) fail_msg("%s", err.msg);
    const int64_t need = m->host;
    assert_true(need > 0);
    assert_int_equal(m->host_shared, need / 512); /* page tables */
    for (int few = 0; few < 2; few++) {
        b->dev.card.host_bytes = need - few;
        assert_int_equal(bed_plan(b, &parallel_alone, &err), -few);
    }
    if (!strstr(err.msg, " of host memory with train.offload = all, the budget is ") ||
        !strstr(err.msg, " (--host-gb), ") || !strstr(err.msg, " short: set train.offload = auto, or raise --host-gb"))
        fail_msg("%s", err.msg);
    assert_false(b->plan.too_large);
    b->cfg.train.offload = CFG_OFFLOAD_AUTO;
    b->dev.card.host_bytes = 2;
    if (bed_plan(b, &parallel_alone, &err)) fail_msg("%s", err.msg);
    assert_int_equal(m->host, 0);
    b->cfg.train.memory_gb = ((double)(m->experts + m->dense - m->decoded) + (64 << 10)) / (1 << 30);
    assert_int_equal(bed_plan(b, &parallel_alone, &err), -1);
    assert_int_equal(m->host, 0);                    /* the embedding does not move to host memory either */
    assert_null(strstr(err.msg, "raise --host-gb")); /* more host memory would not help */
    b->dev.card.host_bytes = 0;
    assert_int_equal(bed_plan(b, &parallel_alone, &err), -1);
    b->cfg.train.memory_gb = 1.01 * (double)plan_peak(&b->plan, true) / (1 << 30);
    b->dev.card.host_bytes = 2;
    assert_int_equal(bed_plan(b, &parallel_alone, &err), -1);
    const char *raise = strstr(err.msg, "or raise --host-gb to ");
    if (!raise || sscanf(raise, "or raise --host-gb to %lf", &gib) != 1) fail_msg("%s", err.msg);
    b->dev.card.host_bytes = (int64_t)(0.98 * gib * (1 << 30));
    assert_int_equal(bed_plan(b, &parallel_alone, &err), -1);
    b->dev.card.host_bytes = (int64_t)(gib * (1 << 30)); /* the plan takes more than half, as nothing else fits */
    if (bed_plan(b, &parallel_alone, &err)) fail_msg("%s", err.msg);
    assert_true(b->plan.host_rest && b->plan.host_free == m->host && 2 * m->host > b->dev.card.host_bytes);
    b->dev.card.host_bytes *= 4;
    if (bed_plan(b, &parallel_alone, &err)) fail_msg("%s", err.msg);
    assert_true(!b->plan.host_rest && b->plan.host_free == 2 * m->host);
    mem_free(b);
}

/* ---- every suggestion, alone */

enum {
    RAISE,
    HOST,
    SEQ,
    BATCH,
    RANK,
    FIRST_VALUE,
    RECOMPUTE = FIRST_VALUE,
    OFFLOAD,
    DECODED,
    PACKED,
    NF4,
    SUGGESTIONS
};
static const char *const suggestions[SUGGESTIONS] = {
    [RAISE] = "raise train.memory_gb to ",
    [HOST] = "raise --host-gb to ",
    [SEQ] = "data.seq_len",
    [BATCH] = "train.micro_batch",
    [RANK] = "lora.r",
    [RECOMPUTE] = "set train.recompute = auto (needs ",
    [OFFLOAD] = "set train.offload = auto (needs ",
    [DECODED] = "set train.decoded_layers = 0 (needs ",
    [PACKED] = "set model.expert_weight_format = packed (needs ",
    [NF4] = "set model.quantize = nf4 with model.quantize_attention = true (needs ",
};

/* Follows suggestion i of a message. For a smaller seq_len it takes two thirds, for other numbers the extreme value. */
static void follow(struct bed *b, int i, const char *text)
{
    struct config *cfg = &b->cfg;
    const double value = strtod(text + strlen(suggestions[i]), NULL);
    switch (i) {
    case RAISE: cfg->train.memory_gb = value; break;
    case HOST: b->dev.card.host_bytes = (int64_t)(value * (1 << 30)); break;
    case SEQ: cfg->data.seq_len = cfg->data.seq_len * 2 / 3; break;
    case BATCH: cfg->train.micro_batch = 1; break;
    case RANK: cfg->lora.r = 1; break;
    case RECOMPUTE: cfg->train.recompute = CFG_RECOMPUTE_AUTO; break;
    case OFFLOAD: cfg->train.offload = CFG_OFFLOAD_AUTO; break;
    case DECODED: cfg->train.decoded_layers = 0; break;
    case PACKED: cfg->model.expert_weight_format = CFG_EXPERTS_PACKED; break;
    default: cfg->model.quantize = CFG_QUANTIZE_NF4, cfg->model.quantize_attention = true;
    }
}

/* b does not fit. Follows each suggestion alone; counts them in n. Returns how many the message has. */
static int follow_each(struct bed *b, int n[SUGGESTIONS], const char *message)
{
    const struct config before = b->cfg;
    const struct device_card card = b->dev.card;
    const int64_t peak = plan_peak(&b->plan, true);
    int found = 0;
    for (int i = 0; i < SUGGESTIONS; i++) {
        const char *text = strstr(message, suggestions[i]);
        char bytes[32], needs[48];
        struct err err;
        if (!text) continue;
        follow(b, i, text);
        const int rc = bed_plan(b, &parallel_alone, &err);
        const int64_t now = plan_peak(&b->plan, true);
        if (i < SEQ ? rc != 0 : rc && now >= peak)
            fail_msg("%s: %s\nthen: %s", suggestions[i], message, rc ? err.msg : "fits");
        snprintf(needs, sizeof(needs), "%s)", str_bytes(bytes, now)); /* a plan that fits may use more */
        if (i >= FIRST_VALUE && rc && strncmp(text + strlen(suggestions[i]), needs, strlen(needs)))
            fail_msg("%s is not %s in: %s", suggestions[i], needs, message);
        b->cfg = before;
        b->dev.card = card;
        n[i]++;
        found++;
    }
    return found;
}

/* Runs over a grid of options, of memory limits between the weights and the whole need, and of host memory. The model
 * has two layers, one of each kind of attention. */
static void every_suggestion_needs_less(void **state)
{
    (void)state;
    static const double shares[] = {0.2, 0.7, 0.97}, host_mib[] = {0.001, 12, 4096};
    int n[SUGGESTIONS] = {0}, n_none = 0;
    for (int i = 0; i < 144; i++) {
        struct bed *b = bed_of("gpt-oss-tiny", 2);
        struct config *cfg = &b->cfg;
        struct err err;
        const int kind = i / 9 % 16;
        b->dev.card = (struct device_card){.bytes = (int64_t)(i % 2 ? 8 << 10 : 40) << 20,
                                           .host_bytes = (int64_t)(host_mib[i / 3 % 3] * (1 << 20))};
        cfg->train.recompute = kind & 1 ? CFG_RECOMPUTE_NONE : CFG_RECOMPUTE_AUTO;
        cfg->train.offload = kind & 2 ? CFG_OFFLOAD_NONE : CFG_OFFLOAD_AUTO;
        if (kind & 4)
            cfg->model.expert_weight_format = CFG_EXPERTS_BF16;
        else
            cfg->train.decoded_layers = kind & 8 ? 2 : 0;
        cfg->lora.r = kind & 8 ? 1 : 64;
        cfg->train.micro_batch = kind & 4 ? 4 : 1;
        cfg->train.memory_gb = 1e-9;
        assert_int_equal(bed_plan(b, &parallel_alone, &err), -1);
        cfg->train.memory_gb = shares[i % 3] * (double)plan_peak(&b->plan, true) / (1 << 30);
        if (bed_plan(b, &parallel_alone, &err)) {
            if (strlen(err.msg) + 1 >= sizeof(err.msg) || !strstr(err.msg, " short: ")) fail_msg("%s", err.msg);
            const bool device = strstr(err.msg, "use a device with more memory");
            const char *short_of = strstr(err.msg, " short: ");
            char *message = mem_strdup(short_of);
            const int found = follow_each(b, n, message);
            if (!found && !device) fail_msg("nothing suggested: %s", err.msg);
            n_none += device;
            mem_free(message);
        }
        mem_free(b);
    }
    for (int i = 0; i < SUGGESTIONS; i++)
        if (!n[i]) fail_msg("never suggested: %s", suggestions[i]);
    assert_true(n_none > 0);
}

int test_plan_advice(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(suggested_limit),
        cmocka_unit_test(experts_of_a_fixed_offload),
        cmocka_unit_test(host_memory_of_ranks),
        cmocka_unit_test(host_memory_of_a_card),
        cmocka_unit_test(every_suggestion_needs_less),
    };
    return cmocka_run_group_tests_name("plan_advice", tests, NULL, NULL);
}
