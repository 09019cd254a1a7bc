/* test_adapter_norms.c - norms of the adapters of experts against the product B A itself. */
#include "tests/test.h"

#include <math.h>

#include "train/adapter/adapter_norms.h"

enum { E = 3, LAYERS = 2 };

static float value_of(int64_t i) { return (float)(int)(rng_u64(11, (uint64_t)i) % 2001) / 1000 - 1; }

/* |B A|^2 of matrix e of a stack. */
static double product_norm(const float *a, const float *b, int64_t e, int64_t r, int64_t n_in, int64_t n_out)
{
    double all = 0;
    for (int64_t o = 0; o < n_out; o++) {
        for (int64_t i = 0; i < n_in; i++) {
            double sum = 0;
            for (int64_t k = 0; k < r; k++)
                sum += (double)b[(e * n_out + o) * r + k] * (double)a[(e * r + k) * n_in + i];
            all += sum * sum;
        }
    }
    return all;
}

static void norms_of_experts(void **state)
{
    (void)state;
    /* q_proj of layer 0; both stacks of layer 1, with ranks 2 and 5 */
    struct lora_param p[6] = {{LORA_Q, .n_exp = 1, .rows = 2, .cols = 7},
                              {LORA_Q, .is_b = true, .n_exp = 1, .rows = 4, .cols = 2},
                              {LORA_UP, .experts = true, .layer = 1, .n_exp = E, .rows = 2, .cols = 7},
                              {LORA_UP, .is_b = true, .experts = true, .layer = 1, .n_exp = E, .rows = 6, .cols = 2},
                              {LORA_DOWN, .experts = true, .layer = 1, .n_exp = E, .rows = 5, .cols = 3},
                              {LORA_DOWN, .is_b = true, .experts = true, .layer = 1, .n_exp = E, .rows = 7, .cols = 5}};
    struct adapters ad = {.n_layer = LAYERS, .n_params = MT_LEN(p), .params = p};
    float v[400];
    double norms[LAYERS * E];
    int64_t n = 0;
    for (int i = 0; i < MT_LEN(p); i++) p[i].off = n, n += p[i].n_exp * p[i].rows * p[i].cols;
    assert_true(n <= MT_LEN(v));
    for (int64_t i = 0; i < n; i++) v[i] = value_of(i);
    ad.scale[LORA_UP] = 2;
    ad.scale[LORA_DOWN] = 0.5F;
    assert_true(adapter_norms(&ad, v, E, norms));
    for (int64_t e = 0; e < E; e++) {
        const double up = product_norm(v + p[2].off, v + p[3].off, e, 2, 7, 6),
                     down = product_norm(v + p[4].off, v + p[5].off, e, 5, 3, 7);
        assert_close(norms[e], 0, 0);
        assert_close(norms[E + e], sqrt(4 * up + 0.25 * down), 1e-5);
    }
    ad.n_params = 2; /* no expert is adapted */
    assert_false(adapter_norms(&ad, v, E, norms));
}

int test_adapter_norms(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(norms_of_experts)};
    return cmocka_run_group_tests_name("adapter_norms", tests, NULL, NULL);
}
