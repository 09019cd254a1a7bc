/* arch_rope.c - RoPE and YaRN: their settings in config.json, and the table of angles. */
#include "model/arch/arch_rope.h"

#include <math.h>
#include <string.h>

#include "model/arch/arch_range.h"

bool rope_given(struct json scaling) { return json_count(scaling) > 0; }

static bool has_value(struct json o, const char *key) { return json_type(json_find(o, key)) > JSON_NULL; }

int rope_find(struct json *scaling, struct json *other, struct json root, struct err *err)
{
    *scaling = json_find(root, "rope_parameters");
    *other = json_find(root, "rope_scaling");
    for (int i = 0; i < 2; i++) {
        const struct json one = i ? *other : *scaling;
        const enum json_type type = json_type(one);
        if (type != JSON_ABSENT && type != JSON_NULL && type != JSON_OBJECT)
            return json_error(one, err, "is not an object");
    }
    if (rope_given(*scaling)) return 0;
    *scaling = *other;
    *other = (struct json){0};
    return 0;
}

/* Whether a and b have the same formula and numbers; YaRN's numbers are compared only if both use YaRN. */
bool rope_same(const struct rope_arch *a, const struct rope_arch *b)
{
    if (a->theta != b->theta || a->width != b->width || a->n_pair != b->n_pair || a->yarn != b->yarn) return false;
    return !a->yarn ||
           (a->factor == b->factor && a->beta_fast == b->beta_fast && a->beta_slow == b->beta_slow &&
            a->attention_factor == b->attention_factor && a->softmax_gain == b->softmax_gain &&
            a->query_beta == b->query_beta && a->original_len == b->original_len && a->truncate == b->truncate);
}

int rope_differs(struct json other, struct err *err)
{
    return json_error(other, err, "contradicts rope_parameters: remove the wrong one");
}

int rope_read_theta(double *theta, struct json root, const char *key, struct json scaling, struct err *err)
{
    static const char inner[] = "rope_theta";
    if (json_opt_f64(root, key, theta, err)) return -1;
    const double beside = *theta;
    if (json_opt_f64(scaling, inner, theta, err)) return -1;
    if (has_value(root, key) && beside != *theta)
        return json_error(json_find(scaling, inner), err, "is %.10g, but %s outside it is %.10g: correct one", *theta,
                          key, beside);
    const bool inside = has_value(scaling, inner);
    return range_theta(inside ? scaling : root, inside ? inner : key, *theta, err);
}

/* YaRN's factor for cos and sin, or for the square root of the softmax scale. */
static double yarn_gain(double factor, double mscale) { return factor <= 1 ? 1 : 0.1 * mscale * log(factor) + 1; }

/* Reads DeepSeek's mscale: cos and sin are multiplied by the ratio of two gains, the softmax scale by the square of one
 * gain. Other families refuse the keys. */
static int read_mscale(struct rope_arch *r, struct json scaling, enum rope_keys keys, struct err *err)
{
    double mscale = 0, all = 0;
    r->attention_factor = yarn_gain(r->factor, 1);
    if (keys == ROPE_KEYS_COMMON) {
        if (json_has(scaling, "mscale") || json_has(scaling, "mscale_all_dim"))
            return json_error(scaling, err, "mscale and mscale_all_dim are not supported");
        return 0;
    }
    if (json_opt_f64(scaling, "mscale", &mscale, err) || json_opt_f64(scaling, "mscale_all_dim", &all, err)) return -1;
    if (!(mscale >= 0 && all >= 0)) return json_error(scaling, err, "mscale and mscale_all_dim must not be negative");
    if (mscale > 0 && all > 0) r->attention_factor = yarn_gain(r->factor, mscale) / yarn_gain(r->factor, all);
    if (all > 0) r->softmax_gain = yarn_gain(r->factor, all) * yarn_gain(r->factor, all);
    return range_factor(scaling, "the softmax factor of mscale_all_dim", r->softmax_gain, err) ||
                   range_factor(scaling, "the attention factor of mscale", r->attention_factor, err)
               ? -1
               : 0;
}

/* Reads the growth of queries with their position, in Mistral's YaRN. transformers ignores the key in other
 * families. */
static int read_query_beta(struct rope_arch *r, struct json scaling, enum rope_keys keys, struct err *err)
{
    if (json_opt_f64(scaling, "llama_4_scaling_beta", &r->query_beta, err)) return -1;
    if (!(r->query_beta >= 0)) return json_error(scaling, err, "llama_4_scaling_beta %g is negative", r->query_beta);
    if (r->query_beta > 0 && keys != ROPE_KEYS_GROWTH)
        return json_error(scaling, err, "llama_4_scaling_beta %g is not supported (0)", r->query_beta);
    return r->query_beta > 0 ? range_factor(scaling, "llama_4_scaling_beta", r->query_beta, err) : 0;
}

/* Reads original_max_position_embeddings, also from outside rope_parameters, as transformers does. */
static int read_original_len(struct rope_arch *r, struct json root, struct json scaling, struct err *err)
{
    static const char key[] = "original_max_position_embeddings";
    int64_t beside = 0;
    if (json_opt_i64(root, key, 1, 1 << 24, &beside, err)) return -1;
    r->original_len = beside;
    if (beside ? json_opt_i64(scaling, key, 1, 1 << 24, &r->original_len, err)
               : json_get_i64(scaling, key, 1, 1 << 24, &r->original_len, err))
        return -1;
    if (beside && beside != r->original_len)
        return json_error(json_find(scaling, key), err, "is %lld, but %s outside it is %lld: correct one",
                          (long long)r->original_len, key, (long long)beside);
    return 0;
}

/* Reads rope_type, or its older name type. Without either, transformers ignores the keys of YaRN; here this is an
 * error, since no published file means it. */
static int read_type(const char **type, struct json scaling, struct err *err)
{
    static const char *const keys[] = {"factor", "beta_fast", "beta_slow", "original_max_position_embeddings"};
    const char *older = NULL;
    *type = NULL;
    if (json_opt_str(scaling, "type", &older, err) || json_opt_str(scaling, "rope_type", type, err)) return -1;
    if (older && *type && strcmp(older, *type))
        return json_error(scaling, err, "type is \"%s\", but rope_type is \"%s\": correct one", older, *type);
    if (!*type) *type = older;
    for (int i = 0; i < MT_LEN(keys) && !*type; i++)
        if (has_value(scaling, keys[i]))
            return json_error(scaling, err, "has %s, but no rope_type: add \"rope_type\": \"yarn\", or remove %s",
                              keys[i], keys[i]);
    if (!*type) *type = "default";
    return 0;
}

int rope_read_type(struct rope_arch *r, struct json root, struct json scaling, enum rope_keys keys, struct err *err)
{
    const char *type;
    double beta = 0;
    if (read_type(&type, scaling, err)) return -1;
    if (!strcmp(type, "default")) {
        if (keys == ROPE_KEYS_GROWTH && json_opt_f64(scaling, "llama_4_scaling_beta", &beta, err)) return -1;
        return beta > 0 ? json_error(scaling, err, "llama_4_scaling_beta %g needs rope_type \"yarn\"", beta) : 0;
    }
    if (strcmp(type, "yarn"))
        return json_error(scaling, err, "rope_type \"%s\" is not supported (default, yarn)", type);
    r->yarn = true;
    if (json_get_f64(scaling, "factor", &r->factor, err) || read_original_len(r, root, scaling, err) ||
        json_opt_f64(scaling, "beta_fast", &r->beta_fast, err) ||
        json_opt_f64(scaling, "beta_slow", &r->beta_slow, err) ||
        json_opt_flag(scaling, "truncate", &r->truncate, err) || range_stretch(scaling, "factor", r->factor, err) ||
        range_factor(scaling, "beta_fast", r->beta_fast, err) || range_factor(scaling, "beta_slow", r->beta_slow, err))
        return -1;
    if (r->beta_fast < r->beta_slow)
        return json_error(scaling, err, "beta_fast %g is below beta_slow %g", r->beta_fast, r->beta_slow);
    if (read_mscale(r, scaling, keys, err) || read_query_beta(r, scaling, keys, err) ||
        json_opt_f64(scaling, "attention_factor", &r->attention_factor, err))
        return -1;
    return range_factor(scaling, "attention_factor", r->attention_factor, err);
}

/* Computes the frequencies of RoPE, proportional RoPE, or YaRN (arXiv 2309.00071), which divides low frequencies by
 * `factor`, keeps high ones, and interpolates between. Frequencies and angles are rounded to f32 as in transformers,
 * because models are trained with its angles (it matters near position 100,000). */
static void frequencies(const struct rope_arch *r, float *inv_freq)
{
    const double d = (double)r->width, ln_base = log(r->theta), pi = 3.14159265358979323846;
    double low = 0, high = 0;
    if (r->yarn) {
        low = d * log((double)r->original_len / (2 * pi * r->beta_fast)) / (2 * ln_base);
        high = d * log((double)r->original_len / (2 * pi * r->beta_slow)) / (2 * ln_base);
        if (r->truncate) low = floor(low), high = ceil(high);
        low = fmax(low, 0);
        high = fmin(high, d - 1);
        if (low == high) high += 0.001;
    }
    for (int64_t i = 0; i < r->width / 2; i++) {
        double pos = pow(r->theta, 2 * (double)i / d);
        double ramp = r->yarn ? fmin(fmax(((double)i - low) / (high - low), 0), 1) : 0;
        inv_freq[i] = (float)(ramp / (r->factor * pos) + (1 - ramp) / pos);
        if (r->n_pair) inv_freq[i] = i < r->n_pair ? (float)(1 / pos) / (float)r->factor : 0;
    }
}

void arch_rope_table(const struct rope_arch *r, int64_t n, float *table)
{
    const int64_t width = r->width, half = width / 2;
    float *inv_freq = mem_array(half, sizeof(float));
    frequencies(r, inv_freq);
    for (int64_t p = 0; p < n; p++)
        for (int64_t i = 0; i < half; i++) {
            float angle = (float)p * inv_freq[i];
            table[p * width + i] = (float)(cos((double)angle) * r->attention_factor);
            table[p * width + half + i] = (float)(sin((double)angle) * r->attention_factor);
        }
    mem_free(inv_freq);
}
