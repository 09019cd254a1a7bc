/* reference_cache.c - see reference_cache.h. The reference's pass computes the log-probabilities in the micro-batches
 * of the first epoch. So a step of this epoch has the same bytes with and without the cache. In later epochs other
 * micro-batches may round otherwise. */
#include "train/session/reference_cache.h"

#include <stdio.h>
#include <string.h>

#include "data/file/file.h"
#include "train/objective/micro_batch.h"
#include "train/objective/run_objective.h"

#define MAGIC "MTREFER1"

struct header {
    char magic[8];
    uint64_t key, sum; /* sum: hash of the numbers */
    int64_t n;
};

static uint64_t key_of(const struct run *r, const struct dataset *ds, bool train)
{
    const struct config *cfg = r->cfg;
    const int64_t parts[] = {(int64_t)ds->hash,         (int64_t)r->model.weights.fingerprint,
                             (int64_t)r->dev.act_dtype, r->dev.round_bf16,
                             cfg->train.expert_dtype,   cfg->train.micro_batch,
                             cfg->train.seed,           train && cfg->data.shuffle,
                             r->model.ce_chunk,         micro_batch_shares(&r->model),
                             r->plan.opt.decoded_layers};
    uint64_t key = rng_key(0, r->dev.name);
    for (int i = 0; i < MT_LEN(parts); i++) key = rng_u64(key, (uint64_t)parts[i]);
    return key;
}

static bool read_file(const char *path, uint64_t key, int64_t n, double *out)
{
    struct file_map map;
    struct header h;
    const int64_t bytes = n * (int64_t)sizeof(*out);
    if (!file_exists(path) || file_map_open(&map, path, NULL)) return false;
    bool good = map.size == (int64_t)sizeof(h) + bytes;
    if (good) {
        memcpy(&h, map.data, sizeof(h));
        good = !memcmp(h.magic, MAGIC, sizeof(h.magic)) && h.key == key && h.n == n &&
               h.sum == rng_bytes(key, map.data + sizeof(h), bytes);
    }
    if (good) memcpy(out, map.data + sizeof(h), (size_t)bytes);
    file_map_close(&map);
    return good;
}

static int write_file(const char *dir, const char *path, uint64_t key, const double *values, int64_t n, struct err *err)
{
    const int64_t bytes = n * (int64_t)sizeof(*values);
    struct header h = {.key = key, .n = n, .sum = rng_bytes(key, values, bytes)};
    memcpy(h.magic, MAGIC, sizeof(h.magic));
    const struct file_part parts[] = {{&h, sizeof(h)}, {values, bytes}};
    return file_make_dirs(dir, err) ? -1 : file_write_parts(path, parts, MT_LEN(parts), err);
}

/* Runs the reference's pass of one micro-batch; writes the log-probabilities to `out`, by document. */
static void compute_batch(struct run *r, const struct batch *b, double *out)
{
    const struct model_pass pass = {.objective = true};
    const struct model_batch mb = micro_batch_of(b);
    double *some = mem_array(2 * b->n_answer + 1, sizeof(*some));
    model_begin(&r->model, &mb, &pass);
    model_read_reference(&r->model, some);
    model_end(&r->model);
    for (int64_t a = 0; a < b->n_answer; a++) memcpy(out + 2 * b->answer_doc[a], some + 2 * a, 2 * sizeof(*out));
    mem_free(some);
}

/* Computes all log-probabilities: the ranks divide the micro-batches of an epoch, and all ranks get all results. */
static void compute(struct run *r, const struct dataset *ds, bool train, double *out)
{
    const struct loader_options opt = run_loader_options(r->cfg, train);
    struct comm *all = r->par.all;
    struct loader *l = loader_open(ds, &opt, (struct loader_pos){0, 0});
    const int64_t n = loader_epoch_batches(l, 0), count = 2 * ds->n_docs;
    const int64_t shares = micro_batch_shares(&r->model);
    struct step_counts counts = {0};
    struct batch b;
    for (int64_t i = 0; i < n; i++) {
        micro_batch_next(&b, l, NULL, shares, &counts);
        if (i % all->world == all->rank) compute_batch(r, &b, out);
        batch_free(&b);
        progress();
        if (i + 1 == n && r->par.ep->world > 1 && all->rank > i % all->world) {
            b = micro_batch_none();
            compute_batch(r, &b, out);
        }
    }
    loader_close(l);
    if (all->world == 1) return;
    double *of = mem_array(count * all->world, sizeof(*of));
    comm_host_gather(all, of, out, count * (int64_t)sizeof(*out));
    for (int64_t i = 0; i < count; i++) /* zero on all ranks but one */
        for (int k = 0; k < all->world; k++)
            if (of[k * count + i] != 0) out[i] = of[k * count + i];
    mem_free(of);
}

static int open_one(struct run *r, struct dataset *ds, bool train, struct err *err)
{
    char dir[MT_PATH], path[MT_PATH];
    struct comm *all = r->par.all;
    const uint64_t key = key_of(r, ds, train);
    const double start = clock_ms();
    struct err why;
    if (!ds->n_docs) return 0;
    if (file_in(dir, r->cfg->output.dir, "cache", err) ||
        str_format(path, sizeof(path), err, "the path of the reference's cache", "%s/reference-%016llx.bin", dir,
                   (unsigned long long)key))
        return -1;
    double *values = mem_array(2 * ds->n_docs, sizeof(*values));
    const bool found = comm_host_min(all, read_file(path, key, 2 * ds->n_docs, values)) > 0;
    if (!found) {
        memset(values, 0, (size_t)(2 * ds->n_docs) * sizeof(*values));
        compute(r, ds, train, values);
    }
    ds->reference = values;
    if (all->rank) return 0;
    if (!found && write_file(dir, path, key, values, 2 * ds->n_docs, &why))
        log_warn("%s; without this cache a run that continues computes the reference again", why.msg);
    log_info("reference: log-probabilities of %lld %s answers %s %s in %.1f s", (long long)ds->n_docs,
             train ? "training" : "held-out", found ? "from" : "computed, kept in", path, (clock_ms() - start) / 1e3);
    return 0;
}

int reference_cache_open(struct run *r, struct err *err)
{
    if (r->cfg->objective.reference_cache != CFG_REFERENCE_CACHE_AUTO || !r->plan.opt.has_reference) return 0;
    return open_one(r, &r->train, true, err) || open_one(r, &r->eval, false, err) ? -1 : 0;
}
