/* routing_text.c - see routing_text.h. */
#include "data/rollout/routing_text.h"

#include <string.h>

/* The value of a character of base64; -1: none. */
static int digit_of(char c)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const char *at = c ? strchr(digits, c) : NULL;
    return at ? (int)(at - digits) : -1;
}

/* n bytes of text[size], which has padding. */
static bool decode(uint8_t *out, int64_t n, const char *text, int64_t size)
{
    int64_t done = 0;
    if (size != (n + 2) / 3 * 4) return false;
    for (int64_t i = 0; i < size; i += 4) {
        uint32_t word = 0;
        for (int64_t c = 0; c < 4; c++) {
            const bool pad = text[i + c] == '=' && i + 4 == size && c >= 2 && done + c > n;
            const int v = pad ? 0 : digit_of(text[i + c]);
            if (v < 0) return false;
            word = word << 6 | (uint32_t)v;
        }
        for (int shift = 16; shift >= 0 && done < n; shift -= 8) out[done++] = (uint8_t)(word >> shift);
    }
    return done == n;
}

static bool is_choice(const uint16_t *idx, int64_t k, int64_t n_exp)
{
    for (int64_t j = 0; j < k; j++)
        if (idx[j] >= n_exp || (j && idx[j] <= idx[j - 1])) return false;
    return true;
}

static int check_form(struct json value, const int64_t want[3], struct err *err)
{
    const char *dtype;
    struct json shape;
    int64_t have;
    if (json_get_str(value, "dtype", &dtype, err) || json_get_array(value, "shape", &shape, err)) return -1;
    if (strcmp(dtype, "uint16") != 0) return json_error(value, err, "dtype is \"%.32s\": expected uint16", dtype);
    if (json_count(shape) != 3) return json_error(shape, err, "expected tokens, layers and experts");
    for (int64_t i = 0; i < 3; i++) {
        if (json_i64(json_at(shape, i), 0, INT64_MAX, &have, err)) return -1;
        if (have != want[i])
            return json_error(shape, err,
                              "%lld at place %lld: this row and model have %lld (tokens of prompt and "
                              "completion but the last, layers that choose, experts of a token)",
                              (long long)have, (long long)i, (long long)want[i]);
    }
    return 0;
}

int routing_text_read(uint16_t **out, struct json value, int64_t n_tok, int64_t n_layer, int64_t k, int64_t n_exp,
                      struct err *err)
{
    const int64_t shape[] = {n_tok, n_layer, k}, n = n_tok * n_layer * k;
    struct json data = json_find(value, "data");
    const char *text;
    int64_t size;
    *out = NULL;
    if (check_form(value, shape, err) || json_str(data, &text, &size, err)) return -1;
    uint8_t *bytes = mem_array(2 * n + 1, 1);
    uint16_t *idx = mem_array(n + 1, sizeof(*idx));
    bool good = decode(bytes, 2 * n, text, size);
    for (int64_t i = 0; i < n; i++) idx[i] = (uint16_t)(bytes[2 * i] | bytes[2 * i + 1] << 8);
    for (int64_t i = 0; good && i < n; i += k) good = is_choice(idx + i, k, n_exp);
    mem_free(bytes);
    if (good) {
        *out = idx;
        return 0;
    }
    mem_free(idx);
    return json_error(data, err, "not base64 of %lld choices of distinct experts below %lld, ascending",
                      (long long)(n_tok * n_layer), (long long)n_exp);
}
