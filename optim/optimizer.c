/* optimizer.c - states, clipping and steps of an optimizer of any kind. */
#include "optim/optimizer.h"

#include <math.h>
#include <string.h>

#include "kernels/adamw8_code.h"
#include "kernels/format/quant.h"

enum { ZERO_CODE = 127 }; /* of 0 in the map with signs */

int optimizer_count_states(const struct optimizer_kind *kind)
{
    int n = 0;
    while (n < OPTIMIZER_STATES && kind->state[n].name) n++;
    return n;
}

static int64_t n_block(const struct optimizer *opt) { return (opt->n_state + opt->kind->block - 1) / opt->kind->block; }

static void alloc_codes(struct optimizer *opt, struct device *dev, int i)
{
    const bool positive = opt->kind->state[i].positive;
    uint8_t *zeros = mem_alloc(dev->dry_run ? 1 : opt->n_state);
    opt->state[i] = arena_tensor_1d(&dev->state, DT_U8, opt->n_state);
    opt->scale[i] = arena_tensor_1d(&dev->state, DT_F32, n_block(opt));
    if (!dev->dry_run) {
        memset(zeros, positive ? 0 : ZERO_CODE, (size_t)opt->n_state);
        device_upload(dev, opt->state[i].data, zeros, opt->n_state);
        device_zero(dev, opt->scale[i]);
    }
    mem_free(zeros);
}

void optimizer_alloc(struct optimizer *opt, struct device *dev)
{
    float map[512];
    for (int i = 0; i < optimizer_count_states(opt->kind); i++) {
        if (opt->kind->block) {
            alloc_codes(opt, dev, i);
            continue;
        }
        opt->state[i] = arena_tensor_1d(opt->host_states ? &dev->host : &dev->state, dev->stat_dtype, opt->n_state);
        if (!dev->dry_run) device_zero(dev, opt->state[i]);
    }
    if (!opt->kind->block) return;
    opt->map = arena_tensor_2d(&dev->state, DT_F32, 2, 256);
    quant_dynamic_map(map);
    quant_dynamic_map_unsigned(map + 256);
    if (!dev->dry_run) device_upload(dev, opt->map.data, map, (int64_t)sizeof(map));
}

/* A state of 8-bit codes in host memory: codes, scales, and the values of the codes. */
struct codes {
    uint8_t *code;
    float *scale, map[256];
    enum dtype dtype; /* of the values */
};

static struct codes codes_open(const struct optimizer *opt, const struct device *dev, int i)
{
    struct codes c = {.code = mem_alloc(opt->n_state), .scale = mem_array(n_block(opt), sizeof(float))};
    c.dtype = dev->stat_dtype;
    (opt->kind->state[i].positive ? quant_dynamic_map_unsigned : quant_dynamic_map)(c.map);
    return c;
}

static void codes_close(struct codes *c)
{
    mem_free(c->code);
    mem_free(c->scale);
}

void optimizer_get_state(const struct optimizer *opt, struct device *dev, int i, void *values)
{
    struct codes c = codes_open(opt, dev, i);
    device_download(dev, c.code, opt->state[i].data, opt->n_state);
    device_download(dev, c.scale, opt->scale[i].data, tensor_bytes(opt->scale[i]));
    for (int64_t k = 0; k < opt->n_state; k++) {
        const float x = c.map[c.code[k]] * c.scale[k / opt->kind->block];
        if (c.dtype == DT_F64)
            ((double *)values)[k] = (double)x;
        else
            ((float *)values)[k] = x;
    }
    codes_close(&c);
}

void optimizer_set_state(const struct optimizer *opt, struct device *dev, int i, const void *values)
{
    const int block = opt->kind->block;
    struct codes c = codes_open(opt, dev, i);
    for (int64_t b = 0; b < n_block(opt); b++) {
        const int64_t first = b * block, n = MT_MIN(block, opt->n_state - first);
        float x[ADAMW8_BLOCK], least = 0, most = 0;
        for (int64_t k = 0; k < n; k++) {
            x[k] = c.dtype == DT_F64 ? (float)((const double *)values)[first + k] : ((const float *)values)[first + k];
            least = fminf(least, x[k]);
            most = fmaxf(most, x[k]);
        }
        c.scale[b] = adamw8_scale_of(c.map, least, most);
        for (int64_t k = 0; k < n; k++) c.code[first + k] = (uint8_t)adamw8_code(c.map, x[k], c.scale[b]);
    }
    device_upload(dev, opt->state[i].data, c.code, opt->n_state);
    device_upload(dev, opt->scale[i].data, c.scale, tensor_bytes(opt->scale[i]));
    codes_close(&c);
}

int64_t optimizer_state_bytes(const struct optimizer *opt)
{
    int64_t bytes = 0;
    for (int i = 0; i < OPTIMIZER_STATES; i++)
        if (opt->state[i].ndim)
            bytes += tensor_bytes(opt->state[i]) + (opt->scale[i].ndim ? tensor_bytes(opt->scale[i]) : 0);
    return bytes;
}

struct optimizer_step optimizer_next(struct optimizer *opt, double lr, double norm)
{
    const double clip = opt->clip_norm > 0 ? fmin(1, opt->clip_norm / (norm + 1e-6)) : 1;
    return (struct optimizer_step){.lr = lr, .clip = clip, .n = ++opt->step};
}

/* The first element after `first` that has another learning rate. Padding has the learning rate of the group before
 * it. */
static int64_t find_end(const struct optimizer *opt, int64_t first, double *lr_factor)
{
    int64_t i = 0;
    while (i + 1 < opt->n_group && opt->group[i + 1].first <= first) i++;
    *lr_factor = opt->n_group ? opt->group[i].lr_factor : 1;
    for (i++; i < opt->n_group; i++)
        if (opt->group[i].lr_factor != *lr_factor) return opt->group[i].first;
    return INT64_MAX;
}

void optimizer_update(struct optimizer *opt, struct device *dev, double lr, double norm)
{
    struct optimizer_step step = optimizer_next(opt, lr, norm);
    double factor;
    const int64_t end = opt->first + (opt->n_state ? opt->n_state : opt->param.shape[0]);
    for (int64_t first = opt->first, next; first < end; first = next) {
        next = MT_MIN(find_end(opt, first, &factor), end);
        step.lr = lr * factor;
        opt->kind->update(dev, opt, first, next - first, &step);
    }
}
