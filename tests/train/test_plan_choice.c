/* test_plan_choice.c - the ranks of a run take one plan, that of the rank with the least free memory; the time of
 * decoding inside products; logits that share memory with activations; host memory; a GPU that other processes use;
 * missing tensors. */
#include <math.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernels/choice.h"
#include "tests/checkpoints.h"
#include "tests/plan_bed.h"
#include "tests/process.h"
#include "train/plan/plan_choice.h"

enum { N_RANK = 2 };

/* What a rank's process hands to the test: the choice of its plan. */
struct chosen {
    struct acts_save save;
    int64_t peak, budget, decoded, expert_group;
    bool embed_on_host, host_moments, done;
};

/* ---- ranks */

static struct chosen plan_on(const struct parallel *par)
{
    struct bed *b = bed_open();
    const struct plan *p = &b->plan;
    struct err err;
    if (bed_plan(b, par, &err)) fail_msg("%s", err.msg);
    const struct chosen c = {.save = p->opt.save,
                             .peak = plan_peak(p, true),
                             .budget = p->budget,
                             .decoded = p->memory.n_decoded,
                             .expert_group = p->opt.expert_group,
                             .embed_on_host = p->opt.embed_on_host,
                             .host_moments = p->opt.host_moments,
                             .done = true};
    mem_free(b);
    return c;
}

static void be_rank(struct comm_place *place, struct chosen *out)
{
    struct comm all;
    struct err err;
    if (comm_open(&all, place, &err)) {
        fprintf(stderr, "%s\n", err.msg);
        _exit(1);
    }
    const struct parallel par = {&all, &comm_alone, &all};
    *out = plan_on(&par);
    comm_close(&all);
    _exit(0);
}

/* The choices of two ranks with so much free memory, and so much in use by others. */
static void plan_ranks(struct chosen out[N_RANK], const int64_t available[N_RANK], const int64_t fixed[N_RANK])
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof(a);
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    struct chosen *shared =
        mmap(NULL, N_RANK * sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pid_t pids[N_RANK];
    assert_true(shared != MAP_FAILED && fd >= 0 && !bind(fd, (struct sockaddr *)&a, size) && !listen(fd, 8) &&
                !getsockname(fd, (struct sockaddr *)&a, &size));
    fflush(NULL);
    for (int r = 0; r < N_RANK; r++) {
        struct comm_place place = {.rank = r,
                                   .world = N_RANK,
                                   .master = "127.0.0.1",
                                   .port = ntohs(a.sin_port),
                                   .listener = r ? -1 : fd,
                                   .timeout_s = 20,
                                   .key = "the key of this test"};
        bed_free = available[r];
        bed_fixed = fixed[r];
        pids[r] = process_fork();
        assert_true(pids[r] >= 0);
        if (!pids[r]) be_rank(&place, &shared[r]);
    }
    close(fd);
    for (int r = 0; r < N_RANK; r++) {
        int status;
        assert_int_equal(waitpid(pids[r], &status, 0), pids[r]);
        assert_int_equal(status, 0);
        out[r] = shared[r];
        assert_true(out[r].done);
    }
    assert_int_equal(munmap(shared, N_RANK * sizeof(*shared)), 0);
}

static void assert_same_choice(const struct chosen *a, const struct chosen *b)
{
    assert_memory_equal(&a->save, &b->save, sizeof(a->save));
    assert_int_equal(a->decoded, b->decoded);
    assert_int_equal(a->expert_group, b->expert_group);
    assert_int_equal(a->embed_on_host, b->embed_on_host);
    assert_int_equal(a->host_moments, b->host_moments);
    assert_int_equal(a->budget, b->budget);
}

static void one_choice(void **state)
{
    (void)state;
    bed_free = (int64_t)8 << 30;
    bed_fixed = 0;
    const struct chosen much = plan_on(&parallel_alone);
    static const struct {
        int64_t available[N_RANK], fixed[N_RANK];
    } rows[] = {{{(int64_t)8 << 30, 60 << 20}, {0, 0}},
                {{60 << 20, (int64_t)8 << 30}, {0, 0}},
                {{70 << 20, 60 << 20}, {5 << 20, 80 << 20}}};
    for (int i = 0; i < MT_LEN(rows); i++) {
        struct chosen ranks[N_RANK];
        bed_free = MT_MIN(rows[i].available[0], rows[i].available[1]);
        bed_fixed = MT_MAX(rows[i].fixed[0], rows[i].fixed[1]);
        const struct chosen least = plan_on(&parallel_alone);
        assert_true(least.decoded < much.decoded && least.peak <= least.budget);
        plan_ranks(ranks, rows[i].available, rows[i].fixed);
        for (int r = 0; r < N_RANK; r++) assert_same_choice(&ranks[r], &least);
    }
}

/* ---- products that decode on the way */

/* choice_packed_share agrees with the measured time of a step of 8 layers of gpt-oss-20b (tests/notebook/decode.md). It
 * is a share of the products' floor: 32 experts of 2880 x 8640 weights at 820 TFLOP/s. */
static void times_are_as_measured(void **state)
{
    (void)state;
    static const struct {
        double rows, decoded_ms, inside_ms;
    } measured[] = {{128, 17.4, 16.9}, {256, 27.5, 27.6}, {512, 52.8, 53.9}};
    for (int i = 0; i < MT_LEN(measured); i++) {
        const double floor_ms = 2 * 2 * (measured[i].rows * 32) * (2880.0 * 8640) / 820e12 * 1e3;
        const double share = (measured[i].inside_ms - measured[i].decoded_ms) / 8 / floor_ms;
        assert_true(fabs(choice_packed_share(measured[i].rows) - (share > 0 ? share : 0)) < 0.02);
    }
    assert_true(!(choice_packed_share(96) > 0) && !(choice_packed_share(32) > 0));
}

/* At 193 to 768 rows per expert decoded layers also save time, so the search decodes as many as fit. */
static void decoded_layers_are_worth_memory(void **state)
{
    (void)state;
    struct bed *b = bed_open();
    struct plan_choice all, less;
    struct plan_memory m;
    struct err err;
    int64_t unused;
    const struct device_card card = {.bytes = (int64_t)8 << 30, .arch = CUDA_SM90};
    assert_int_equal(device_open_card(&b->dev, &card, "auto", &err), 0);
    b->cfg.data.seq_len = 512 * b->memory.arch.n_exp / b->memory.arch.top_k;
    struct plan_request q = bed_request(b, &parallel_alone, PLAN_TRAIN);
    q.rates = (struct roofs){.flops = 800e12, .bytes = 4e12};
    assert_int_equal(plan_choose(&all, &q, 0, (int64_t)8 << 30, &err), 0);
    assert_int_equal(all.opt.decoded_layers, b->memory.arch.n_layer);
    assert_int_equal(plan_choose(&less, &q, 0, all.peak - 1, &err), 0);
    assert_true(less.opt.decoded_layers < all.opt.decoded_layers && less.ms > all.ms);
    double us[2];
    for (int i = 0; i < 2; i++) {
        struct model_options opt = all.opt;
        opt.decoded_layers = i ? all.opt.decoded_layers : 0;
        assert_int_equal(plan_measure(&m, &unused, &q, &opt, &err), 0);
        us[i] = m.floor_ms + m.inside_ms;
    }
    assert_true(us[1] < us[0]);
    mem_free(b);
}

/* A plan adds the time of half a tile of 128 rows per expert: per token eight times as much where an expert has an
 * eighth of the rows. */
static void tiles_cost_small_batches_more(void **state)
{
    (void)state;
    double us[2];
    for (int i = 0; i < 2; i++) {
        struct bed *b = bed_open();
        struct plan_memory m;
        struct err err;
        int64_t unused;
        const struct arch *a = &b->memory.arch;
        b->cfg.data.seq_len = (i ? 1024 : 128) * a->n_exp / a->top_k;
        struct plan_request q = bed_request(b, &parallel_alone, PLAN_TRAIN);
        const struct model_options opt = plan_fixed_options(&q);
        q.rates = (struct roofs){.flops = 800e12, .bytes = 1e18};
        assert_int_equal(plan_measure(&m, &unused, &q, &opt, &err), 0);
        us[i] = m.tile_ms / (double)q.n_tok;
        mem_free(b);
    }
    assert_true(us[1] > 0 && fabs(us[0] / us[1] - 8) < 1e-9);
}

/* Fake quantisation writes the matrices of every product and reads fewer bytes from packed experts, so the plan decodes
 * no layers. Without it each product would decode, so decoded layers save time. */
static void quantised_experts_stay_packed(void **state)
{
    (void)state;
    enum { ALL = 4 };
    static const struct {
        int weights, inputs, start, decoded;
    } rows[] = {{CFG_QUANT_NONE, CFG_QUANT_NONE, 0, ALL},
                {1, CFG_QUANT_NONE, 0, 0},
                {1, 1, 0, 0},
                {CFG_QUANT_NONE, 1, 0, ALL},
                {1, CFG_QUANT_NONE, 50, ALL}};
    struct bed *b = bed_of("gpt-oss-20b", ALL);
    bed_free = (int64_t)64 << 30;
    bed_fixed = 0;
    b->dev.act_dtype = DT_BF16; /* decoded layers are bf16 too */
    for (int i = 0; i < MT_LEN(rows); i++) {
        struct plan_memory m;
        struct err err;
        int64_t unused;
        double ms[2];
        b->cfg.quant.weights = rows[i].weights;
        b->cfg.quant.activations = rows[i].inputs;
        b->cfg.quant.start = rows[i].start;
        if (bed_plan(b, &parallel_alone, &err)) fail_msg("%s", err.msg);
        if (b->plan.memory.n_decoded != rows[i].decoded) fail_msg("%d: %lld", i, (long long)b->plan.memory.n_decoded);
        struct plan eval; /* evaluations are quantised whatever quant.start is */
        const struct plan_request of_eval = bed_request(b, &parallel_alone, PLAN_EVAL);
        if (plan_make(&eval, &of_eval, &err)) fail_msg("%s", err.msg);
        assert_int_equal(eval.memory.n_decoded, rows[i].weights == CFG_QUANT_NONE ? ALL : 0);
        struct plan_request q = bed_request(b, &parallel_alone, PLAN_TRAIN);
        q.rates = (struct roofs){.flops = 800e12, .bytes = 4e12};
        for (int decoded = 0; decoded < 2; decoded++) {
            struct model_options opt = b->plan.opt;
            opt.decoded_layers = decoded ? ALL : 0;
            assert_int_equal(plan_measure(&m, &unused, &q, &opt, &err), 0);
            ms[decoded] = m.floor_ms + m.inside_ms;
        }
        assert_int_equal(ms[1]<ms[0], rows[i].decoded> 0);
    }
    mem_free(b);
}

/* ---- logits */

/* Where memory is short, the plan does not give the loss head so few rows at a time that reading its matrix again costs
 * more time than this memory saves elsewhere. */
static void logits_are_worth_memory(void **state)
{
    (void)state;
    struct bed *b = bed_of("gpt-oss-20b", 4);
    struct plan_choice least, c;
    struct err err;
    bed_free = (int64_t)64 << 30;
    bed_fixed = 0;
    b->cfg.data.seq_len = 2048;
    const struct plan_request q = bed_request(b, &parallel_alone, PLAN_TRAIN);
    assert_int_equal(plan_choose_least(&least, &q, 0, &err), 0);
    assert_int_equal(least.opt.ce_chunk, 64);
    assert_int_equal(plan_choose(&c, &q, 0, least.peak + (300 << 20), &err), 0);
    assert_true(c.opt.ce_chunk >= 128 && c.peak <= least.peak + (300 << 20));
    assert_int_equal(plan_choose(&c, &q, 0, (int64_t)64 << 30, &err), 0);
    assert_int_equal(c.opt.ce_chunk, 1664); /* logits in f32 */
    mem_free(b);
}

/* A plan of the largest micro-batch is quick, and its bytes do not overflow, also with the largest receive buffers. */
static void two_billion_tokens(void **state)
{
    (void)state;
    struct comm ranks = {.world = 8, .local_world = 8}, alone = {.world = 1, .local_world = 1};
    const struct parallel divided = {&ranks, &ranks, &alone};
    double needs[3];
    struct bed *b = bed_of("gpt-oss-20b", 4);
    bed_free = (int64_t)64 << 30;
    bed_fixed = 0;
    b->memory.arch.max_len = b->cfg.data.seq_len = 1 << 20;
    b->cfg.train.micro_batch = 2047;
    b->cfg.parallel.capacity_factor = 4096;
    b->cfg.parallel.chunks = 1;
    for (int i = 0; i < MT_LEN(needs); i++) {
        struct err err;
        const double start = clock_ms();
        b->table.own_memory = i == 0;
        assert_int_equal(bed_plan(b, i == 2 ? &divided : &parallel_alone, &err), -1);
        if (!strstr(err.msg, " short: lower data.seq_len") || strstr(err.msg, "(needs ")) fail_msg("%s", err.msg);
        needs[i] = (double)plan_peak(&b->plan, true);
        assert_true(clock_ms() - start < 30e3);
    }
    mem_free(b);
    assert_true(needs[0] > 1e14 && needs[1] > 1e14 && needs[2] > needs[1] && needs[2] < 1e17);
}

/* Rows of the table with the same saved groups differ in the chunk of the loss head, which has at most the tokens of a
 * micro-batch. */
static void rows_of_the_table_differ(void **state)
{
    (void)state;
    static char text[1 << 14], *rows[16];
    struct bed *b = bed_of("gpt-oss-20b", 4);
    const struct roofs rates = {0};
    struct err err;
    FILE *f = tmpfile();
    int n = 0, n_alike = 0;
    assert_non_null(f);
    bed_free = (int64_t)64 << 30;
    bed_fixed = 0;
    b->cfg.data.seq_len = 1024;
    b->cfg.train.recompute = CFG_RECOMPUTE_FULL;
    b->cfg.train.offload = CFG_OFFLOAD_NONE;
    b->cfg.train.decoded_layers = 0;
    const struct plan_request q = bed_request(b, &parallel_alone, PLAN_TRAIN);
    if (plan_make(&b->plan, &q, &err) || plan_frontier(&b->plan, &q, &rates, f, &err)) fail_msg("%s", err.msg);
    rewind(f);
    text[fread(text, 1, sizeof(text) - 1, f)] = 0;
    fclose(f);
    for (char *at = text; (at = strstr(at, "train.memory_gb=")); n++) {
        rows[n] = strchr(at, ' ');
        at = strchr(at, '\n');
        *at++ = 0;
        for (int i = 0; i < n; i++) {
            if (!strcmp(rows[i], rows[n])) fail_msg("twice: %s", rows[n]);
            n_alike += !strcmp(strstr(rows[i], " of "), strstr(rows[n], " of "));
        }
        const long chunk = strtol(rows[n], NULL, 10);
        assert_true(chunk >= 64 && chunk <= 1024);
    }
    assert_true(n_alike > 0);
    mem_free(b);
}

/* ---- places */

/* The search compares all choices of host memory, also after one that saves everything. With the larger of two limits,
 * 200 MiB apart, the device can save everything if moments are in host memory, but with networks there instead a step
 * takes less time. */
static void places_with_all_are_compared(void **state)
{
    (void)state;
    struct bed *b = bed_of("gpt-oss-20b", 24);
    struct plan_choice all, less, more;
    struct err err;
    bed_free = (int64_t)64 << 30;
    bed_fixed = 0;
    b->cfg.data.seq_len = 4096;
    b->cfg.lora.r = 64;
    b->cfg.train.decoded_layers = 0;
    const struct plan_request q = bed_request(b, &parallel_alone, PLAN_TRAIN);
    assert_int_equal(plan_choose(&all, &q, 0, (int64_t)64 << 30, &err), 0);
    assert_int_equal(plan_choose(&less, &q, 0, all.peak - ((int64_t)8200 << 20), &err), 0);
    assert_int_equal(plan_choose(&more, &q, 0, all.peak - ((int64_t)8000 << 20), &err), 0);
    assert_true(more.ms <= less.ms);
    mem_free(b);
}

/* ---- other processes */

static int n_asked, asked_until;
static int64_t crowd(void) { return ++n_asked > asked_until ? 0 : (int64_t)8 << 30; }

/* The memory of a process stays in use for some seconds after its end; the plan asks again. */
static void others_end(void **state)
{
    (void)state;
    struct bed *b = bed_open();
    struct err err;
    bed_free = (int64_t)8 << 30;
    b->table.fixed_bytes = crowd;
    b->cfg.train.memory_gb = 0.125;
    asked_until = 1;
    n_asked = 0;
    assert_int_equal(bed_plan(b, &parallel_alone, &err), 0);
    assert_int_equal(b->plan.fixed, 0);
    asked_until = 1 << 30;
    assert_int_equal(bed_plan(b, &parallel_alone, &err), -1);
    assert_non_null(strstr(err.msg, "other processes of the GPU take 8.00 GiB, the budget is 128 MiB"));
    assert_non_null(strstr(err.msg, "end the other processes and wait some seconds"));
    char text[PLAN_TEXT];
    assert_non_null(strstr(plan_others(text, &b->plan), "8.00 GiB of it for context, libraries and other processes"));
    assert_non_null(strstr(text, "some seconds after its end"));
    mem_free(b);
}

static bool yes(void) { return true; }

/* A CPU, an integrated GPU of this machine, one of the table. */
enum { CPU, INTEGRATED, CARD, ONE_MEMORY };
static struct bed *bed_of_one_memory(int kind)
{
    struct bed *b = bed_open();
    bed_free = (int64_t)8 << 30;
    bed_fixed = 0;
    b->table.own_memory = kind != CPU;
    if (kind == INTEGRATED) b->table.integrated = yes;
    if (kind == CARD) b->dev.card = (struct device_card){.bytes = (int64_t)8 << 30, .integrated = true};
    return b;
}

/* If host memory and device memory are one, the plan counts tensors in host memory too, and no error suggests to move
 * any there. */
static void host_memory_of_the_device(void **state)
{
    (void)state;
    int64_t none = 0;
    for (int i = 0; i < ONE_MEMORY * (CFG_OFFLOAD_ALL - CFG_OFFLOAD_NONE + 1); i++) {
        const int way = CFG_OFFLOAD_NONE + i / ONE_MEMORY;
        struct bed *b = bed_of_one_memory(i % ONE_MEMORY);
        struct err err;
        b->cfg.train.recompute = CFG_RECOMPUTE_FULL;
        b->cfg.train.offload = way;
        if (bed_plan(b, &parallel_alone, &err)) fail_msg("%s", err.msg);
        const struct plan_memory *m = &b->plan.memory;
        const int64_t device = m->experts + m->dense + m->state + MT_MAX(MT_MAX(m->work, m->work_eval), m->work_load);
        assert_int_equal(m->host > 0, way != CFG_OFFLOAD_NONE);
        assert_int_equal(plan_peak(&b->plan, true), device + m->host);
        if (i == CPU) none = device;
        if (i % ONE_MEMORY == CPU) assert_true(device + m->host >= none);
        b->cfg.train.memory_gb = ((double)(m->experts + m->dense - m->decoded) + (1 << 20)) / (1 << 30);
        assert_int_equal(bed_plan(b, &parallel_alone, &err), -1);
        assert_null(strstr(err.msg, "host memory"));
        assert_null(strstr(err.msg, way == CFG_OFFLOAD_NONE ? "train.offload" : "train.offload = all"));
        mem_free(b);
    }
}

/* On a device that shares the host's memory, `auto` keeps nothing in host memory, down to the smallest limit with which
 * training fits. */
static void one_memory_is_spent_once(void **state)
{
    (void)state;
    for (int kind = 0; kind < ONE_MEMORY; kind++) {
        struct bed *b = bed_of_one_memory(kind);
        const struct plan *p = &b->plan;
        const struct plan_memory *m = &p->memory;
        struct err err;
        if (bed_plan(b, &parallel_alone, &err)) fail_msg("%s", err.msg);
        assert_true(p->budget <= ((int64_t)8 << 30) / 10 * 9); /* the rest is for other processes of the machine */
        b->cfg.train.memory_gb = 1e-9;
        assert_int_equal(bed_plan(b, &parallel_alone, &err), -1);
        const double least = (double)plan_peak(p, true) / (1 << 30);
        for (int i = 0; i < 4; i++) {
            b->cfg.train.memory_gb = least * (1 + 1e-9 + 0.2 * i);
            if (bed_plan(b, &parallel_alone, &err)) fail_msg("%s", err.msg);
            assert_int_equal(m->host, 0);
            assert_false(p->opt.embed_on_host || p->opt.host_moments || p->opt.expert_layers);
        }
        b->cfg.train.memory_gb = least * (1 - 1e-6);
        assert_int_equal(bed_plan(b, &parallel_alone, &err), -1);
        mem_free(b);
    }
}

static void find_longest(struct bed *b)
{
    struct err err;
    const struct plan_request q = bed_request(b, &parallel_alone, PLAN_TRAIN);
    if (plan_longest(&b->plan, &q, &err)) fail_msg("%s", err.msg);
}

/* Where host memory takes the experts of some layers only, the longest sequence fits and the next one does not. */
static void longest_sequence_of_a_card(void **state)
{
    (void)state;
    static const int64_t mib[][2] = {{9 << 10, 6 << 10}, {10 << 10, 4608}}; /* memory of the card and of the host */
    for (int i = 0; i < MT_LEN(mib); i++) {
        struct bed *b = bed_of("gpt-oss-20b", 16);
        struct config *cfg = &b->cfg;
        struct err err;
        b->dev.card = (struct device_card){.bytes = mib[i][0] << 20, .host_bytes = mib[i][1] << 20};
        b->memory.arch.max_len = 1 << 13;
        bed_fixed = 0;
        cfg->data.seq_len = 64;
        if (bed_plan(b, &parallel_alone, &err)) fail_msg("%s", err.msg);
        find_longest(b);
        const int64_t longest = b->plan.longest;
        assert_true(longest > 0 && !b->plan.longest_fits);
        cfg->data.seq_len = longest;
        if (bed_plan(b, &parallel_alone, &err)) fail_msg("%s", err.msg);
        assert_in_range(b->plan.opt.expert_layers, 1, 15);
        cfg->data.seq_len = longest + 64;
        assert_int_equal(bed_plan(b, &parallel_alone, &err), -1);
        b->memory.arch.max_len = 64; /* now the model is the limit */
        find_longest(b);
        assert_true(b->plan.longest == 64 && b->plan.longest_fits);
        mem_free(b);
    }
}

/* Layers whose experts are in host memory. */
static int64_t far_experts(int64_t card_bytes, int objective)
{
    struct bed *b = bed_of("gpt-oss-20b", 16);
    struct err err;
    b->dev.card = (struct device_card){.bytes = card_bytes, .host_bytes = (int64_t)64 << 30};
    bed_fixed = 0;
    b->cfg.objective.kind = objective;
    b->cfg.objective.max_completion_length = 256;
    if (bed_plan(b, &parallel_alone, &err)) fail_msg("%s", err.msg);
    const int64_t n = b->plan.opt.expert_layers;
    assert_int_equal(b->plan.generation.n_seq > 0 && b->plan.generation.keeps_experts, objective != CFG_SFT && !n);
    mem_free(b);
    return n;
}

/* Sampling in online RL reads all experts for every token, so `auto` moves experts to host memory only where nothing
 * else fits. */
static void sampling_keeps_experts_near(void **state)
{
    (void)state;
    const int64_t room = (int64_t)10 << 30, less = (int64_t)6 << 30;
    assert_true(far_experts(room, CFG_SFT) > 0);
    assert_int_equal(far_experts(room, CFG_GRPO), 0);
    assert_true(far_experts(less, CFG_GRPO) > 0);
}

/* train.decoded_layers has no effect on experts that already have the dtype of decoded layers: bf16 on a GPU, f32 on a
 * CPU. */
static void decoding_without_effect(void **state)
{
    (void)state;
    const char *config = process_config("");
    char model[2 * MT_PATH];
    struct draft d;
    for (int i = 0; i < 2; i++) {
        draft_open_case(&d, "parity/olmoe");
        if (i) draft_dense(&d, DT_F32);
        snprintf(model, sizeof(model), "model.path=%s", draft_save(&d, 1));
        assert_int_equal(
            RUN("plan", config, "--set", model, "--set", "train.decoded_layers=1", "--set", "data.format=text"), 0);
        const char *says = "warning: train.decoded_layers = 1 has no effect: the experts are f32 already\n";
        assert_int_equal(strstr(said.err, says) != NULL, i);
        draft_free(&d);
    }
}

/* The device always holds two layers of packed experts. In a model with no more layers train.offload = experts has no
 * effect, and a warning says so. */
static void experts_without_effect(void **state)
{
    (void)state;
    const char *config = process_config("");
    static const char *const says[] = {"train.offload = experts has no effect",
                                       "train.offload = experts saves nothing"};
    char set[2][2 * MT_PATH];
    snprintf(set[0], sizeof(set[0]), "model.path=%s", fixture("parity/olmoe"));
    snprintf(set[1], sizeof(set[1]), "model.path=%s", fixture("../../configs/tiny-gptoss"));
    for (int i = 0; i < 2; i++) {
        assert_int_equal(
            RUN("plan", config, "--set", set[i], "--set", "train.offload=experts", "--set", "data.format=text"), 0);
        assert_says(said.err, says[i]);
        assert_null(strstr(said.err, says[1 - i]));
    }
}

/* One dry run of a plan looks for the tensors of every expert; the others do not. */
static void every_tensor_is_looked_for(void **state)
{
    (void)state;
    const char *config = process_config("");
    char model[MT_PATH];
    struct draft d;
    draft_open_case(&d, "parity/olmoe");
    draft_put(&d, "model.extra", DT_F32, 1, (int64_t[]){1}, mem_alloc(4));
    snprintf(model, sizeof(model), "model.path=%s", draft_save(&d, 1));
    assert_int_equal(RUN("plan", config, "--set", model), 0);
    assert_says(said.err, "1 tensor of the checkpoint is not used, the first is model.extra");
    draft_remove(&d, "model.layers.1.mlp.experts.3.up_proj.weight");
    snprintf(model, sizeof(model), "model.path=%s", draft_save(&d, 1));
    assert_int_equal(RUN("plan", config, "--set", model), 1);
    assert_says(said.err, "tensor model.layers.1.mlp.experts.3.up_proj.weight is not in the checkpoint");
    draft_free(&d);
}

int test_plan_choice(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_choice),
        cmocka_unit_test(times_are_as_measured),
        cmocka_unit_test(decoded_layers_are_worth_memory),
        cmocka_unit_test(quantised_experts_stay_packed),
        cmocka_unit_test(logits_are_worth_memory),
        cmocka_unit_test(two_billion_tokens),
        cmocka_unit_test(rows_of_the_table_differ),
        cmocka_unit_test(places_with_all_are_compared),
        cmocka_unit_test(others_end),
        cmocka_unit_test(tiles_cost_small_batches_more),
        cmocka_unit_test(longest_sequence_of_a_card),
        cmocka_unit_test(sampling_keeps_experts_near),
        cmocka_unit_test(host_memory_of_the_device),
        cmocka_unit_test(one_memory_is_spent_once),
        cmocka_unit_test(decoding_without_effect),
        cmocka_unit_test(experts_without_effect),
        cmocka_unit_test(every_tensor_is_looked_for),
    };
    return cmocka_run_group_tests_name("plan_choice", tests, NULL, NULL);
}
