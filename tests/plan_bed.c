/* plan_bed.c - see plan_bed.h. */
#include "tests/plan_bed.h"

#include <string.h>

#include "tests/test.h"

int64_t bed_free, bed_fixed;
static int64_t read_free(void) { return bed_free; }
static int64_t read_fixed(void) { return bed_fixed; }

/* The model of the last call stays: gpt-oss-20b has 3 GiB in memory. Plans change no tensors. */
static struct synth_memory memory_of(const char *arch, int64_t n_layer)
{
    static struct synth_memory last;
    static struct synth_options opt;
    struct err err;
    if (!opt.arch || strcmp(opt.arch, arch) != 0 || opt.n_layer != n_layer) {
        synth_memory_close(&last);
        opt = (struct synth_options){.arch = arch, .n_layer = n_layer};
        if (synth_memory_open(&last, &opt, &err)) fail_msg("%s", err.msg);
    }
    return last;
}

struct bed *bed_of(const char *arch, int64_t n_layer)
{
    struct bed *b = mem_array(1, sizeof(*b));
    struct err err;
    config_defaults(&b->cfg);
    b->cfg.data.seq_len = 512;
    b->memory = memory_of(arch, n_layer);
    if (device_open(&b->dev, "cpu", "auto", &err)) fail_msg("%s", err.msg);
    b->table = *b->dev.ops;
    b->table.own_memory = true;
    b->table.free_bytes = read_free;
    b->table.fixed_bytes = read_fixed;
    b->dev.ops = &b->table;
    return b;
}

struct bed *bed_open(void) { return bed_of("gpt-oss-tiny", 0); }

struct plan_request bed_request(const struct bed *b, const struct parallel *par, enum plan_use use)
{
    return plan_request_of(&b->dev, par, &b->memory.arch, &b->memory.st, &b->cfg, NULL, use);
}

int bed_plan(struct bed *b, const struct parallel *par, struct err *err)
{
    const struct plan_request q = bed_request(b, par, PLAN_TRAIN);
    return plan_make(&b->plan, &q, err);
}

int bed_plan_alone(struct bed *b, bool train, struct err *err)
{
    const struct plan_request q = bed_request(b, &parallel_alone, train ? PLAN_TRAIN : PLAN_EVAL);
    return plan_make(&b->plan, &q, err);
}
