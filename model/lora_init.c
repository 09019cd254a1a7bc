/* lora_init.c - the initial values of adapters by lora.init, from decoded weights, on the CPU. For W [out, in] and
 * scale s:
 *   pissa  B A = the best approximation of W = U S V^T of rank r (arXiv:2404.02948): A = (S/s)^1/2 V^T, B = U (S/s)^1/2
 *   olora  B A = Q R of the first r columns of W (arXiv:2406.01775): B = Q, A = Q^T W
 * PEFT trains these on W - s B A. Here the experts stay packed, so W does not change. Instead the lora ranks from r on
 * are frozen at A0 = A, B0 = -B: products use W + s (B A - B0 A0), which is W before the first step. */
#include "model/lora_init.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "kernels/format/quant.h"
#include "model/layer.h"

/* The singular vectors are exact if a side of W is at most EXACT; else they come from ITERATIONS rounds of subspace
 * iteration with 2 r + EXTRA vectors. */
enum { EXACT = 128, EXTRA = 8, ITERATIONS = 8 };

struct work {
    struct device *dev;        /* cpu, fp32 */
    struct tensor w;           /* [out, in] f32 */
    struct tensor left, right; /* [k, out], [k, in] f32 */
    double *gram, *vectors;    /* [k, k] host */
};

static float *row(struct tensor x, int64_t i) { return (float *)x.data + i * x.ld; }

static double dot(const float *x, const float *y, int64_t n)
{
    double lane[8] = {0}, sum = 0;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int k = 0; k < 8; k++) lane[k] += (double)x[i + k] * (double)y[i + k];
    for (; i < n; i++) lane[0] += (double)x[i] * (double)y[i];
    for (int k = 0; k < 8; k++) sum += lane[k];
    return sum;
}

/* right = left W, or left = right W^T. */
static void multiply(struct work *k, bool to_left)
{
    const struct proj p = {
        .w = {.format = WF_F32, .n_exp = 1, .n_out = k->w.shape[0], .n_in = k->w.shape[1], .data = k->w.data}};
    const struct tensor none = {0};
    if (to_left)
        op_linear_fwd(k->dev, k->left, none, k->right, &p, none);
    else
        op_linear_bwd(k->dev, k->right, k->left, k->right, none, &p);
}

/* Row i minus its parts along the rows before it, normalised; twice, against rounding. False: nothing is left. */
static bool orthonormal(struct tensor x, int64_t i)
{
    const int64_t n = x.shape[1];
    float *at = row(x, i);
    const double before = sqrt(dot(at, at, n));
    for (int pass = 0; pass < 2; pass++)
        for (int64_t j = 0; j < i; j++) {
            const float part = (float)dot(at, row(x, j), n);
            for (int64_t c = 0; c < n; c++) at[c] -= part * row(x, j)[c];
        }
    const double length = sqrt(dot(at, at, n));
    if (!(length > 1e-6 * before)) return false;
    for (int64_t c = 0; c < n; c++) at[c] = (float)((double)at[c] / length);
    return true;
}

static void fill_random(struct tensor x, int64_t i, uint64_t key)
{
    for (int64_t c = 0; c < x.shape[1]; c++) row(x, i)[c] = (float)(2 * rng_uniform(key, (uint64_t)c) - 1);
}

/* Makes rows orthonormal. Dependent rows become random ones that are orthogonal to those before. */
static void orthonormal_rows(struct tensor x)
{
    for (int64_t i = 0; i < x.shape[0]; i++)
        for (uint64_t try = 0; !orthonormal(x, i); try++) fill_random(x, i, rng_u64((uint64_t)i, try));
}

/* Eigenvectors of the symmetric gram [k, k] in the columns of vectors, by Jacobi's rotations; gram becomes diagonal. */
static void eigenvectors(double *gram, double *vectors, int64_t k)
{
    double whole = 0, off = 1;
    for (int64_t i = 0; i < k * k; i++) vectors[i] = i % (k + 1) == 0, whole += gram[i] * gram[i];
    for (int sweep = 0; sweep < 30 && off > whole * DBL_EPSILON * DBL_EPSILON; sweep++) {
        off = 0;
        for (int64_t p = 0; p < k; p++)
            for (int64_t q = p + 1; q < k; q++) {
                const double g = gram[p * k + q];
                off += 2 * g * g;
                if (!(g * g > whole * DBL_EPSILON * DBL_EPSILON / (double)(k * k))) continue;
                const double t0 = (gram[q * k + q] - gram[p * k + p]) / (2 * g);
                const double t = (t0 < 0 ? -1 : 1) / (fabs(t0) + sqrt(t0 * t0 + 1)), c = 1 / sqrt(t * t + 1), s = t * c;
                for (int64_t i = 0; i < k; i++) {
                    const double a = gram[i * k + p], b = gram[i * k + q];
                    gram[i * k + p] = c * a - s * b;
                    gram[i * k + q] = s * a + c * b;
                }
                for (int64_t i = 0; i < k; i++) {
                    const double a = gram[p * k + i], b = gram[q * k + i];
                    const double v = vectors[i * k + p], w = vectors[i * k + q];
                    gram[p * k + i] = c * a - s * b;
                    gram[q * k + i] = s * a + c * b;
                    vectors[i * k + p] = c * v - s * w;
                    vectors[i * k + q] = s * v + c * w;
                }
            }
    }
}

/* x [k, n] = the rows sum_i vectors[i, at[j]] x_i, j < r, in place of the first r. */
static void combine(struct work *k, struct tensor x, const int64_t *at, int64_t r)
{
    const int64_t n_vec = x.shape[0];
    float *column = mem_array(n_vec, sizeof(*column));
    for (int64_t c = 0; c < x.shape[1]; c++) {
        for (int64_t i = 0; i < n_vec; i++) column[i] = row(x, i)[c];
        for (int64_t j = 0; j < r; j++) {
            double sum = 0;
            for (int64_t i = 0; i < n_vec; i++) sum += k->vectors[i * n_vec + at[j]] * (double)column[i];
            row(x, j)[c] = (float)sum;
        }
    }
    mem_free(column);
}

/* left [k, out], right = left W: rows j < r become (S_j / scale)^1/2 times the singular vectors. */
static void singular_vectors(struct work *k, int64_t r, double scale)
{
    const int64_t n_vec = k->left.shape[0], n_in = k->w.shape[1], n_out = k->w.shape[0];
    int64_t *at = mem_array(r, sizeof(*at));
    for (int64_t i = 0; i < n_vec; i++)
        for (int64_t j = i; j < n_vec; j++)
            k->gram[i * n_vec + j] = k->gram[j * n_vec + i] = dot(row(k->right, i), row(k->right, j), n_in);
    eigenvectors(k->gram, k->vectors, n_vec);
    for (int64_t j = 0; j < r; j++) {
        at[j] = -1;
        for (int64_t i = 0; i < n_vec; i++) {
            bool taken = false;
            for (int64_t before = 0; before < j; before++) taken |= at[before] == i;
            if (!taken && (at[j] < 0 || k->gram[i * n_vec + i] > k->gram[at[j] * n_vec + at[j]])) at[j] = i;
        }
    }
    combine(k, k->left, at, r);
    combine(k, k->right, at, r);
    for (int64_t j = 0; j < r; j++) {
        const double s = sqrt(fmax(k->gram[at[j] * n_vec + at[j]], 0)), root = sqrt(s / scale);
        for (int64_t c = 0; c < n_out; c++) row(k->left, j)[c] *= (float)root;
        for (int64_t c = 0; c < n_in; c++) row(k->right, j)[c] *= s > 0 ? (float)(root / s) : 0;
    }
    mem_free(at);
}

static void pissa(struct work *k, int64_t r, double scale)
{
    const int64_t n_vec = k->left.shape[0], n_out = k->w.shape[0];
    if (n_vec == n_out) {
        for (int64_t i = 0; i < n_vec * n_out; i++) ((float *)k->left.data)[i] = i % (n_out + 1) == 0;
        multiply(k, false);
    } else {
        for (int64_t i = 0; i < n_vec; i++) fill_random(k->right, i, rng_u64((uint64_t)n_vec, (uint64_t)i));
        for (int i = n_vec == k->w.shape[1] ? ITERATIONS - 1 : 0; i <= ITERATIONS; i++) {
            multiply(k, true);
            orthonormal_rows(k->left);
            multiply(k, false);
        }
    }
    singular_vectors(k, r, scale);
}

static void olora(struct work *k, int64_t r)
{
    k->left = tensor_rows(k->left, 0, r);
    k->right = tensor_rows(k->right, 0, r);
    for (int64_t j = 0; j < r; j++)
        for (int64_t o = 0; o < k->w.shape[0]; o++) row(k->left, j)[o] = row(k->w, o)[j];
    orthonormal_rows(k->left);
    multiply(k, false);
}

/* Computes both parts of the adapter of one matrix: a [2r, in], b [out, ldb]. */
static void start(struct work *k, const struct adapters *ad, enum lora_target t, float *a, float *b, int64_t ldb)
{
    const int64_t r = ad->rank[t] / 2, n_in = k->w.shape[1], n_out = k->w.shape[0];
    if (ad->init == LORA_INIT_PISSA)
        pissa(k, r, (double)ad->scale[t]);
    else
        olora(k, r);
    for (int64_t j = 0; j < r; j++) {
        memcpy(a + j * n_in, row(k->right, j), (size_t)n_in * sizeof(*a));
        memcpy(a + (r + j) * n_in, row(k->right, j), (size_t)n_in * sizeof(*a));
        for (int64_t o = 0; o < n_out; o++) {
            b[o * ldb + j] = row(k->left, j)[o];
            b[o * ldb + r + j] = -row(k->left, j)[o];
        }
    }
}

/* Initialises target i of product q in a layer whose weight is w. */
static void start_target(struct device *dev, const struct adapters *ad, int64_t layer, const struct product *q, int i,
                         const struct weight *w, float *values)
{
    const enum lora_target t = q->target[i];
    const struct lora_param *a = adapters_find(ad, layer, t, false), *b = adapters_find(ad, layer, t, true);
    const int64_t mark = arena_mark(&dev->work), n_in = q->n_in, n_out = q->rows[i], least = MT_MIN(n_in, n_out);
    const int64_t n_vec = least <= EXACT ? least : MT_MIN(least, ad->rank[t] + EXTRA);
    int64_t first = 0;
    if (!a) return;
    for (int s = 0; s < i; s++) first += q->rows[s];
    struct work k = {.dev = dev,
                     .w = arena_tensor_2d(&dev->work, DT_F32, n_out, n_in),
                     .left = arena_tensor_2d(&dev->work, DT_F32, n_vec, n_out),
                     .right = arena_tensor_2d(&dev->work, DT_F32, n_vec, n_in)};
    if (dev->dry_run) {
        multiply(&k, true);
        multiply(&k, false);
    } else {
        k.gram = mem_array(2 * n_vec * n_vec, sizeof(*k.gram));
        k.vectors = k.gram + n_vec * n_vec;
        for (int64_t e = 0; e < a->n_exp; e++) {
            struct work one = k;
            quant_decode(k.w.data, w, a->first_exp + e, first * n_in, n_out * n_in, dev->n_threads);
            start(&one, ad, t, values + a->off + e * a->rows * n_in, values + b->off + e * b->rows * b->cols, b->cols);
        }
        mem_free(k.gram);
    }
    arena_release(&dev->work, mark);
}

static int start_layers(struct device *dev, const struct adapters *ad, const struct weights_source *from,
                        const struct quantize *quantize, float *values, struct err *err)
{
    for (int64_t l = 0; l < ad->n_layer; l++) {
        const int64_t mark = arena_mark(&dev->weights);
        struct product q[LAYER_PRODUCTS];
        struct layer_weights lw;
        if (!ad->layer_on[l]) continue;
        if (weights_load_layer(&lw, dev, from, quantize, l, err)) return -1;
        layer_products(from->arch, l, q);
        for (int i = 0; i < LAYER_PRODUCTS * PRODUCT_TARGETS; i++) {
            const struct product *one = &q[i / PRODUCT_TARGETS];
            const struct proj *p = (const struct proj *)((const char *)&lw + one->proj);
            if (one->n_out && i % PRODUCT_TARGETS < one->n_target)
                start_target(dev, ad, l, one, i % PRODUCT_TARGETS, &p->w, values);
        }
        arena_release(&dev->weights, mark);
    }
    return 0;
}

int lora_init_check(const struct adapters *ad, const struct arch *a, struct err *err)
{
    struct product q;
    int64_t rows;
    for (int64_t l = 0; ad->init && l < ad->n_layer; l++)
        for (enum lora_target t = LORA_Q; t < LORA_TARGETS; t++)
            if (adapters_find(ad, l, t, false) && lora_find_product(a, l, t, &q, &rows) &&
                ad->rank[t] / 2 > MT_MIN(rows, q.n_in))
                return err_set(
                    err, "lora.init with r = %lld: %s of layer %lld is [%lld, %lld] and has no more than %lld ranks",
                    (long long)ad->rank[t] / 2, lora_target_name(t), (long long)l, (long long)rows, (long long)q.n_in,
                    (long long)MT_MIN(rows, q.n_in));
    return 0;
}

int lora_init_values(struct adapters *ad, struct device *dev, const struct weights_source *from,
                     const struct quantize *quantize, struct err *err)
{
    struct device cpu = {.ops = NULL}, measure;
    const struct quantize plain = {
        .format = quantize->format, .nested = quantize->nested, .attention = quantize->attention};
    float *values = mem_array(ad->n_flat, sizeof(*values));
    int rc = device_open(&cpu, "cpu", "fp32", err);
    if (!rc) {
        device_dry_run(&measure, &cpu);
        rc = start_layers(&measure, ad, from, &plain, NULL, err) ||
                     device_reserve(&cpu, &cpu.weights, "weights", measure.weights.peak, err) ||
                     device_reserve(&cpu, &cpu.work, "work", measure.work.peak, err) ||
                     start_layers(&cpu, ad, from, &plain, values, err)
                 ? -1
                 : 0;
        device_close(&cpu);
    }
    if (!rc) {
        device_set_f32(dev, ad->opt.param, values);
        adapters_refresh(ad, dev);
    }
    mem_free(values);
    return rc;
}
