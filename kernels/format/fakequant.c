/* fakequant.c - the table of the formats of fake quantisation, and the merged matrix that training quantises. */
#include "kernels/format/fakequant.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const struct {
    const char *name;
    struct fakequant format;
} formats[] = {
    {"int8", {.kind = FQ_INT, .bits = 8, .qmin = -128, .qmax = 127}},
    {"int8-32", {.kind = FQ_INT, .bits = 8, .qmin = -128, .qmax = 127, .block = 32}},
    {"int8-128", {.kind = FQ_INT, .bits = 8, .qmin = -128, .qmax = 127, .block = 128}},
    {"int4", {.kind = FQ_INT, .bits = 4, .qmin = -8, .qmax = 7}},
    {"int4-32", {.kind = FQ_INT, .bits = 4, .qmin = -8, .qmax = 7, .block = 32}},
    {"int4-128", {.kind = FQ_INT, .bits = 4, .qmin = -8, .qmax = 7, .block = 128}},
    {"fp8", {.kind = FQ_FP8, .bits = 8}},
    {"fp8-recip", {.kind = FQ_FP8, .bits = 8, .rule = FQ_RECIP}},
    {"fp8-stored", {.kind = FQ_FP8_STORED, .bits = 8}},
    {"nvfp4", {.kind = FQ_NVFP4, .bits = 4, .block = 16}},
    {"nvfp4-fake", {.kind = FQ_NVFP4, .bits = 4, .block = 16, .rule = FQ_KERNEL}},
    {"mxfp4", {.kind = FQ_MXFP4, .bits = 4, .block = 32}},
    {"mxfp4-ceil", {.kind = FQ_MXFP4, .bits = 4, .block = 32, .rule = FQ_CEIL}},
};

int fakequant_parse(struct fakequant *f, const char *name, struct err *err)
{
    static const char narrow[] = "-narrow";
    const size_t n = strlen(name), n_narrow = sizeof(narrow) - 1;
    const bool is_narrow = n > n_narrow && !strcmp(name + n - n_narrow, narrow);
    const size_t n_base = is_narrow ? n - n_narrow : n;
    char list[512];
    const char *names[MT_LEN(formats)];
    int used = 0;
    for (int i = 0; i < MT_LEN(formats); i++) {
        *f = formats[i].format;
        names[i] = formats[i].name;
        if (strlen(formats[i].name) == n_base && !memcmp(formats[i].name, name, n_base) &&
            (!is_narrow || f->kind == FQ_INT)) {
            if (is_narrow) f->qmin = -f->qmax;
            return 0;
        }
        used += snprintf(list + used, sizeof(list) - (size_t)used, "%s%s", i ? ", " : "", formats[i].name);
    }
    const char *near = str_nearest(name, names, MT_LEN(formats));
    return err_set(err, "unknown format %s: %s%s%smust be one of %s; int8* and int4* also with -narrow", name,
                   near ? "did you mean " : "", near ? near : "", near ? "? It " : "", list);
}

enum { COLS = 256 };

static void merge_row(float *w, const float *b, const float *a, int64_t r, float scale, int64_t n_in)
{
    for (int64_t first = 0; first < n_in; first += COLS) {
        float sum[COLS] = {0};
        const int64_t n = MT_MIN(COLS, n_in - first);
        for (int64_t k = 0; k < r; k++)
            for (int64_t i = 0; i < n; i++) sum[i] = fmaf(b[k], a[k * n_in + first + i], sum[i]);
        for (int64_t i = 0; i < n; i++) w[first + i] = fl_add(w[first + i], fl_mul(scale, sum[i]));
    }
}

void fakequant_merge(float *w, const float *b, const float *a, int64_t r, float scale, int64_t n_row, int64_t n_in,
                     int n_threads)
{
#pragma omp parallel for num_threads(n_threads)
    for (int64_t o = 0; o < n_row; o++) merge_row(w + o * n_in, b + o * r, a, r, scale, n_in);
}
