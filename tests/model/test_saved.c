/* test_saved.c - what a layer saves for the backward and where: any choice gives the same bytes, fits the limit, and is
 * the same in a plan and in a run. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/op_check.h"
#include "tests/process.h"
#include "tests/whole_model.h"

/* ---- inputs of layers in host memory, with copies as late as a device may run them */

enum { MAX_COPIES = 64 };
static struct {
    struct {
        void *dst;
        const void *src;
        int64_t bytes;
        int ticket;
    } copies[MAX_COPIES];
    int n, n_total;
} late;

static void late_copy(void *dst, const void *src, int64_t bytes, int ticket, bool after_ops)
{
    assert_true(late.n < MAX_COPIES && after_ops);
    late.copies[late.n].dst = dst;
    late.copies[late.n].src = src;
    late.copies[late.n].bytes = bytes;
    late.copies[late.n++].ticket = ticket;
    late.n_total++;
}

static void late_join(int ticket)
{
    int left = 0;
    for (int i = 0; i < late.n; i++) {
        if (late.copies[i].ticket == ticket)
            memcpy(late.copies[i].dst, late.copies[i].src, (size_t)late.copies[i].bytes);
        else
            late.copies[left++] = late.copies[i];
    }
    late.n = left;
}

static struct ops late_ops;
static bool on_gpu; /* the GPU with its own copies, instead of the CPU with late ones */

/* Opens the device for a model of 4 layers with the settings of `offload`. */
static void open_device(struct run *r, struct config *cfg, int offload)
{
    struct err err = {.msg = ""};
    config_defaults(cfg);
    snprintf(cfg->model.path, sizeof(cfg->model.path), "%s", fixture("../../configs/tiny-gptoss"));
    cfg->data.seq_len = 16;
    cfg->train.device = on_gpu ? CFG_DEVICE_CUDA : CFG_DEVICE_CPU;
    cfg->train.offload = offload;
    cfg->train.threads = 4; /* with fewer the GPU makes the update */
    cfg->train.recompute = CFG_RECOMPUTE_FULL;
    if (run_open_headers(r, cfg, &err)) fail_msg("%s", err.msg);
    late_ops = *r->dev.ops;
    late_ops.host_copy = late_copy;
    late_ops.host_join = late_join;
    if (offload != CFG_OFFLOAD_NONE && !on_gpu) r->dev.ops = &late_ops;
}

static void open_model(struct run *r, struct config *cfg, int offload)
{
    struct err err = {.msg = ""};
    open_device(r, cfg, offload);
    if (run_open_model(r, NULL, PLAN_TRAIN, &err)) fail_msg("%s", err.msg);
}

static double *trained(struct run *r, double loss[3], int64_t *n)
{
    struct adapters *ad = &r->model.adapters;
    *n = ad->n_flat;
    ad->opt.beta1 = 0.9;
    ad->opt.beta2 = 0.999;
    ad->opt.eps = 1e-8;
    ad->opt.clip_norm = 0;
    double *x = mem_array(2 * *n, sizeof(*x));
    for (int i = 0; i < 3; i++) { /* B is zero until the first update */
        loss[i] = whole_model_loss_of_12(&r->model, x);
        model_norm(&r->model);
        adapters_update(ad, &r->dev, 1e-2, 1);
    }
    adapters_settle(ad, &r->dev);
    device_get(&r->dev, x + *n, ad->opt.param);
    return x;
}

static void host_memory_gives_the_same_bytes(void **state)
{
    (void)state;
    static const int ways[] = {CFG_OFFLOAD_NONE, CFG_OFFLOAD_ACTIVATIONS, CFG_OFFLOAD_MOMENTS, CFG_OFFLOAD_EXPERTS,
                               CFG_OFFLOAD_ALL};
    double *first = NULL, first_loss[3];
    for (int i = 0; i < MT_LEN(ways); i++) {
        struct config cfg;
        struct run r;
        double loss[3];
        int64_t n;
        late.n_total = 0;
        open_model(&r, &cfg, ways[i]);
        const struct plan_memory *m = &r.plan.memory;
        double *x = trained(&r, loss, &n);
        const bool all = ways[i] == CFG_OFFLOAD_ALL, inputs = ways[i] == CFG_OFFLOAD_ACTIVATIONS || all;
        const bool experts = ways[i] == CFG_OFFLOAD_EXPERTS || all;
        /* 3 passes, each with 2 of the 5 inputs copied out and in */
        const int n_input = inputs ? 3 * 2 * 2 : 0;
        /* copies of experts: 4 layers while loading; per pass 2 in the forward and 2 in the backward; 2 more at the
         * start, since loading leaves layers 2 and 3 in the ring's slots */
        const int n_expert = experts ? 4 + 2 + 3 * (2 + 2) : 0;
        assert_int_equal(m->host_inputs > 0, inputs);
        assert_int_equal(m->host_moments > 0, ways[i] == CFG_OFFLOAD_MOMENTS || all);
        assert_int_equal(r.model.adapters.opt.cpu_update, m->host_moments > 0 && on_gpu);
        assert_int_equal(m->host_experts > 0, experts);
        if (!on_gpu) assert_int_equal(late.n_total, n_input + n_expert);
        assert_int_equal(late.n, 0);
        assert_int_equal(r.dev.host.peak, m->host);
        run_close(&r);
        if (!first) {
            first = x;
            memcpy(first_loss, loss, sizeof(loss));
            assert_true(loss[2] < loss[0]);
            continue;
        }
        assert_memory_equal(loss, first_loss, sizeof(loss));
        assert_memory_equal(x, first, (size_t)(2 * n) * sizeof(*x));
        mem_free(x);
    }
    mem_free(first);
}

static struct tensor input_of(const struct host_ring *r, int64_t l)
{
    return tensor_2d(r->slot[l % r->n_slot], DT_F32, 1, 8);
}

/* Calls the ring as model.c does. Layer l reads input l and writes input l + 1 in the forward; the backward must find
 * input l again. */
static void inputs_pass(struct host_ring *r, struct device *dev, int64_t n_layer, int64_t lowest)
{
    set_value(input_of(r, 0), 0, 1000);
    for (int64_t l = 0; l < n_layer; l++) {
        host_ring_done(r, dev, l, PASS_FORWARD);
        host_ring_need(r, dev, l + 1, PASS_FORWARD);
        assert_true(value_at(input_of(r, l), 0) == (double)(1000 + l));
        set_value(input_of(r, l + 1), 0, (double)(1001 + l));
    }
    for (int64_t l = n_layer - 1; l >= lowest; l--) {
        host_ring_done(r, dev, l + 1, PASS_BACKWARD);
        host_ring_need(r, dev, l, PASS_BACKWARD);
        if (!(value_at(input_of(r, l), 0) == (double)(1000 + l)))
            fail_msg("input of layer %d of %d: %g", (int)l, (int)n_layer, value_at(input_of(r, l), 0));
        set_value(input_of(r, l + 1), 0, NAN); /* input l + 1 was read, and another input may use its slot */
    }
    host_ring_join(r, dev);
    assert_int_equal(late.n, 0);
}

/* Rings of every size: half of the inputs, 3 to HOST_RING_SLOTS. */
static void inputs_come_back(void **state)
{
    static const int64_t ring[] = {3, 3, 3, 3, 3, 4, 4, 5, 5, 5, 5, 5};
    struct config cfg;
    struct run r;
    struct err err = {.msg = ""};
    (void)state;
    open_device(&r, &cfg, CFG_OFFLOAD_ACTIVATIONS);
    if (device_reserve(&r.dev, &r.dev.work, "work", 1 << 20, &err) || device_reserve_host(&r.dev, 1 << 20, &err))
        fail_msg("%s", err.msg);
    for (int64_t n_layer = 1; n_layer <= MT_LEN(ring); n_layer++)
        for (int64_t lowest = 0; lowest < n_layer; lowest++) {
            struct host_ring inputs;
            const int64_t n_slot = acts_input_slots(n_layer), n_host = MT_MAX(n_layer + 1 - n_slot, 0);
            assert_int_equal(n_slot, ring[n_layer - 1]);
            r.dev.n_ticket = 0;
            host_ring_open(&inputs, &r.dev,
                           &(struct host_ring_use){
                               .n_layer = n_layer + 1, .n_slot = n_slot, .n_host = n_host, .bytes = 32, .keep = true});
            host_ring_end(&inputs, lowest);
            inputs.on = n_host > 0;
            for (int64_t i = 0; i < n_slot; i++) inputs.slot[i] = arena_push(&r.dev.work, 32);
            for (int64_t i = 0; i <= n_layer; i++) inputs.bytes[i] = 32;
            inputs_pass(&inputs, &r.dev, n_layer, lowest);
            host_ring_close(&inputs);
            arena_release(&r.dev.work, 0);
            arena_release(&r.dev.host, 0);
        }
    run_close(&r);
}

static const int32_t two_tok[2] = {1, 2}, two_pos[2] = {0, 1}, two_cu[2] = {0, 2}, two_row[1] = {0}, two_id[1] = {2};
static const struct model_batch two = {.n_tok = 2,
                                       .n_seq = 1,
                                       .n_label = 1,
                                       .max_len = 2,
                                       .tok = two_tok,
                                       .pos = two_pos,
                                       .cu = two_cu,
                                       .label_row = two_row,
                                       .label_id = two_id};

static const int32_t other_tok[2] = {5, 3}, other_id[1] = {7};
static const struct model_batch other = {.n_tok = 2,
                                         .n_seq = 1,
                                         .n_label = 1,
                                         .max_len = 2,
                                         .tok = other_tok,
                                         .pos = two_pos,
                                         .cu = two_cu,
                                         .label_row = two_row,
                                         .label_id = other_id};

static double loss_of(struct model *m, const struct model_batch *b, bool backward)
{
    const struct model_pass pass = {.backward = backward, .loss_scale = 1, .aux_share = 1, .last = true};
    struct model_sums loss;
    model_clear(m);
    model_begin(m, b, &pass);
    model_fwd(m);
    model_loss(m);
    if (backward) model_bwd(m);
    model_end(m);
    model_read(m, &loss);
    return loss.nll;
}

static double loss_of_two(struct model *m, bool backward) { return loss_of(m, &two, backward); }

/* Gradients of a skipped step do not reach later steps. Every second step is skipped, after its only micro-batch;
 * before the last update no pass has completed gradients. */
static void skipped_steps(void **state)
{
    (void)state;
    static const int ways[] = {CFG_OFFLOAD_NONE, CFG_OFFLOAD_MOMENTS};
    double *x[MT_LEN(ways)], loss[MT_LEN(ways)];
    int64_t n = 0;
    for (int i = 0; i < MT_LEN(ways); i++) {
        struct config cfg;
        struct run r;
        open_model(&r, &cfg, ways[i]);
        struct adapters *ad = &r.model.adapters;
        ad->opt.beta1 = 0.9;
        ad->opt.beta2 = 0.999;
        ad->opt.eps = 1e-8;
        n = ad->n_flat;
        x[i] = mem_array(n, sizeof(double));
        for (int step = 0; step < 4; step++) {
            device_zero(&r.dev, ad->opt.grad);
            loss_of(&r.model, step % 2 ? &other : &two, true);
            if (step % 2) adapters_update(ad, &r.dev, 1e-2, 1);
        }
        device_zero(&r.dev, ad->opt.grad); /* removes the sums of passes without `last` */
        adapters_settle(ad, &r.dev);
        loss[i] = loss_of_two(&r.model, false);
        adapters_update(ad, &r.dev, 1e-2, 1);
        adapters_settle(ad, &r.dev);
        device_get(&r.dev, x[i], ad->opt.param);
        run_close(&r);
    }
    assert_true(loss[0] == loss[1]);
    assert_memory_equal(x[0], x[1], (size_t)n * sizeof(double));
    for (int i = 0; i < MT_LEN(ways); i++) mem_free(x[i]);
}

/* A pass without a backward leaves the experts of the first layers in the slots, for the next one. */
static void experts_of_every_order_of_passes(void **state)
{
    (void)state;
    static const bool backward[] = {false, false, true, true, false, true};
    double first = 0;
    for (int away = 0; away < 2; away++) {
        struct config cfg;
        struct run r;
        open_model(&r, &cfg, away ? CFG_OFFLOAD_EXPERTS : CFG_OFFLOAD_NONE);
        for (int i = 0; i < MT_LEN(backward); i++) {
            late.n_total = 0;
            const double loss = loss_of_two(&r.model, backward[i]);
            if (fabs(first) <= 0) first = loss;
            assert_true(loss == first);
            if (away && !on_gpu)
                assert_int_equal(late.n_total, i ? 4 : 6); /* 6: loading left the last layers in the slots */
        }
        assert_int_equal(late.n, 0);
        run_close(&r);
    }
}

/* Opens the model with other saved groups: `differs` has for each layer the bits that differ from saving all groups on
 * the device. */
static void open_with_groups(struct run *r, struct config *cfg, const uint8_t *differs)
{
    struct err err = {.msg = ""};
    struct adapters ad;
    open_model(r, cfg, CFG_OFFLOAD_ALL);
    struct model_options opt = r->plan.opt;
    opt.save = acts_save_mode(RECOMPUTE_NONE);
    for (int k = 0; k < OFFLOAD_KINDS; k++) opt.host_bytes[k] = 1 << 20;
    for (int64_t l = 0; l < r->arch.n_layer; l++) opt.save.groups[l] ^= differs[l];
    run_close(r);
    if (run_open_headers(r, cfg, &err) || plan_adapters(&ad, &r->arch, cfg, NULL, &err)) fail_msg("%s", err.msg);
    if (!on_gpu) r->dev.ops = &late_ops;
    if (device_reserve(&r->dev, &r->dev.weights, "weights", 64 << 20, &err) ||
        device_reserve(&r->dev, &r->dev.state, "state", 64 << 20, &err) ||
        device_reserve(&r->dev, &r->dev.work, "work", 512 << 20, &err) ||
        device_reserve_host(&r->dev, 64 << 20, &err) ||
        model_open(&r->model, &r->dev, &r->arch, &r->st, &ad, &opt, (uint64_t)cfg->train.seed, &err))
        fail_msg("%s", err.msg);
}

static void groups_in_host_memory_give_the_same_bytes(void **state)
{
    (void)state;
    enum { M = SAVE_MIXER_HOST, F = SAVE_FFN_HOST, N = SAVE_NORMS, C = SAVE_CORE | SAVE_NORMS };
    static const uint8_t ways[][4] = {{F, F, F, F}, {F, N, F, F | N},     {0, F, 0, F},
                                      {M, M, M, M}, {M, M | F, 0, M | F}, {M | F, M | F, M | F, M | F},
                                      {C, C, C, C}, {M | C, C, M, M | C}, {M | C, F | C, F | M | N, F | M | C}};
    /* groups that move to host memory; of each kind those of the last two layers stay on the device */
    static const int moved[] = {2, 1, 0, 2, 1, 4, 0, 1, 2};
    struct config cfg;
    struct run r;
    double first_loss[3], loss[3];
    int64_t n;
    open_model(&r, &cfg, CFG_OFFLOAD_NONE);
    double *first = trained(&r, first_loss, &n);
    run_close(&r);
    for (int i = 0; i < MT_LEN(ways); i++) {
        open_with_groups(&r, &cfg, ways[i]);
        late.n_total = 0;
        double *x = trained(&r, loss, &n);
        if (!on_gpu) /* copies per pass: groups, 2 inputs of layers in each direction, experts of 2 layers in forward
                        and in backward; experts of 2 more layers at the start */
            assert_int_equal(late.n_total, 3 * 2 * (2 + moved[i]) + 2 + 3 * (2 + 2));
        assert_int_equal(late.n, 0);
        assert_memory_equal(loss, first_loss, sizeof(loss));
        assert_memory_equal(x, first, (size_t)(2 * n) * sizeof(*x));
        mem_free(x);
        run_close(&r);
    }
    mem_free(first);
}

static void the_same_on_the_gpu(void **state)
{
    struct err err;
    if (!ops_cuda(false, &err)) {
        print_message("skip: no GPU\n");
        skip();
    }
    on_gpu = true;
    host_memory_gives_the_same_bytes(state);
    skipped_steps(state);
    experts_of_every_order_of_passes(state);
    groups_in_host_memory_give_the_same_bytes(state);
    on_gpu = false;
}

/* An input in host memory is found when it is not finite. */
static void bad_values_in_host_memory_are_named(void **state)
{
    (void)state;
    struct config cfg;
    struct run r;
    char name[64];
    const struct model_pass pass = {.backward = true, .loss_scale = 1, .aux_share = 1};
    open_model(&r, &cfg, CFG_OFFLOAD_ACTIVATIONS);
    float *norm = (float *)r.model.weights.layers[0].ffn_norm.data;
    norm[0] = NAN;
    model_begin(&r.model, &two, &pass);
    model_fwd(&r.model);
    model_loss(&r.model);
    model_first_bad(&r.model, name);
    model_end(&r.model);
    assert_string_equal(name, "output of layer 0");
    run_close(&r);
}

/* ---- the table of memory against speed */

static const char *four_layers(void)
{
    static char set[MT_PATH];
    snprintf(set, sizeof(set), "model.path=%s", fixture("../../configs/tiny-gptoss"));
    return set;
}

/* Each row of the table of memory against speed names a key. A plan with this key has the row's peak and choice, and a
 * run prints the same line. */
static void rows_are_plans(void **state)
{
    (void)state;
    const char *config = process_config("");
    char table[16384], peak[32], unit[8], key[64], line[512];
    int n = 0, n_own = 0, speed, before = 0;
    assert_int_equal(RUN("plan", config, "--set", four_layers()), 0);
    const char *at = strstr(said.out, "memory against speed");
    assert_non_null(at);
    snprintf(table, sizeof(table), "%s", at);
    for (char *save, *row = strtok_r(table, "\n", &save); row; row = strtok_r(NULL, "\n", &save)) {
        if (sscanf(row + 1, " %31s %7s %d %% %63s", peak, unit, &speed, key) != 4) continue;
        n_own += row[0] == '>';
        assert_true(strtod(strchr(key, '=') + 1, NULL) * 1024 <= 1.01 * strtod(peak, NULL)); /* GiB, MiB */
        assert_true(speed >= before && speed <= 100);
        before = speed;
        assert_int_equal(RUN("plan", config, "--set", four_layers(), "--set", key), 0);
        snprintf(line, sizeof(line), "%s", strstr(row, " of ") + 1);
        assert_says(said.out, line);
        if (n++ % 3) continue;
        assert_int_equal(
            RUN(config, "--set", four_layers(), "--set", key, "--set", "train.steps=1", "--set", "train.resume=never"),
            0);
        assert_says(said.err, line);
    }
    assert_true(n >= 4);
    assert_int_equal(n_own, 1);
    assert_int_equal(before, 100);
}

/* At long context attention takes the most time per byte: its output is saved first. */
static void attention_first_at_long_context(void **state)
{
    (void)state;
    const char *config = process_config("");
    int core = 0, mixer = -1, network = -1;
    assert_int_equal(RUN("plan", config, "--set", four_layers(), "--set", "data.seq_len=4096"), 0);
    const char *at = strstr(said.out, "memory against speed");
    assert_non_null(at);
    for (int row = 0; row < 2; row++) at = strstr(at, "attention output ") + 1;
    assert_int_equal(sscanf(at, "ttention output %d, mixer %d, network %d", &core, &mixer, &network), 3);
    assert_true(core > 0);
    assert_int_equal(mixer, 0);
    assert_int_equal(network, 0);
}

/* At any limit the adapter has the same bytes. */
static void limits_give_the_same_bytes(void **state)
{
    (void)state;
    char base[2 * MT_PATH], sets[3 * MT_PATH];
    double full, none;
    const char *all = process_config("");
    snprintf(base, sizeof(base), "train.steps=2 %s ", four_layers());
    assert_int_equal(process_run_sets(all, base), 0);
    assert_int_equal(RUN("plan", all, "--set", four_layers()), 0);
    const char *at = strstr(said.out, ": none ");
    assert_int_equal(sscanf(at, ": none %lf MiB, selective %*f MiB, full %lf MiB", &none, &full), 2);
    for (int i = 1; i < 4; i++) {
        const char *one = process_config("");
        snprintf(sets, sizeof(sets), "%strain.memory_gb=%.9f", base, (full + (none - full) * i / 4) / 1024);
        assert_int_equal(process_run_sets(one, sets), 0);
        assert_says(said.err, "recompute = per layer");
        assert_same_output(one, all, ADAPTER);
    }
}

int test_saved(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(inputs_come_back),
        cmocka_unit_test(host_memory_gives_the_same_bytes),
        cmocka_unit_test(skipped_steps),
        cmocka_unit_test(experts_of_every_order_of_passes),
        cmocka_unit_test(groups_in_host_memory_give_the_same_bytes),
        cmocka_unit_test(the_same_on_the_gpu),
        cmocka_unit_test(bad_values_in_host_memory_are_named),
        cmocka_unit_test(rows_are_plans),
        cmocka_unit_test(attention_first_at_long_context),
        cmocka_unit_test(limits_give_the_same_bytes),
    };
    return cmocka_run_group_tests_name("saved", tests, NULL, NULL);
}
