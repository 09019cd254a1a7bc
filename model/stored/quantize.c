/* quantize.c - packs dense matrices in 4 bits, one expert at a time; reads and writes the cache file.
 *
 * A packed weight consists of the arrays (planes) of its format, of which each expert has an equal part. The cache is a
 * safetensors file with these arrays (NAME.data, NAME.scale, ..., where NAME is the checkpoint's first tensor of the
 * weight), a checksum per weight (NAME.sum), the sums of the checkpoint's bytes (NAME.source), and one KEY that
 * identifies the checkpoint; a cache with another KEY is not used. A run that uses the cache does not read the
 * checkpoint's bytes, so it adds NAME.source to the base model's hash (base_model.h). Weights with a wrong checksum are
 * encoded again from the checkpoint, and the file is rewritten. */
#include "model/stored/quantize.h"

#include <stdio.h>
#include <string.h>

#include "kernels/format/quant.h"
#include "model/stored/finite.h"

#define VERSION "moetrain packed weights 1" /* changes with the encoders' output */
#define KEY     "moetrain.key.2"            /* changes with the cache's layout */
enum { LOG_MS = 10000 };

/* One array of a packed weight. */
struct part {
    int plane;
    const char *suffix;
    enum dtype dtype;
    int64_t count, bytes; /* per expert */
    char *dst;            /* device memory */
    char *copy;           /* host copy for the cache file, when the device memory is temporary */
    const char *src;      /* where write_cache finds the bytes */
};

struct packed {
    char *name;
    struct part part[PLANES];
    int n_part;
    int64_t n_exp;
    uint64_t sum;
    int64_t n_source;
    hash_sum *source; /* [n_source] sums of the bytes of each matrix in the checkpoint */
};

static const struct format *row_of(const struct quantize *q) { return format_row(q->format, q->nested); }

const char *quantize_name(const struct quantize *q) { return row_of(q)->name; }

uint64_t quantize_key(const struct quantize *q, uint64_t seed)
{
    char text[128];
    if (!q->format) return seed;
    snprintf(text, sizeof(text), VERSION " %s %d", quantize_name(q), q->attention);
    return rng_key(seed, text);
}

static int list_parts(const struct format *f, const struct weight *w, struct part p[PLANES])
{
    int n_part = 0;
    for (int i = 0; i < PLANES; i++) {
        if (!f->plane[i].suffix) continue;
        struct part *to = &p[n_part++];
        *to = (struct part){.plane = i, .suffix = f->plane[i].suffix, .bytes = format_plane_bytes(f, w, i)};
        to->dtype = f->plane[i].bits == 32 ? DT_F32 : DT_U8;
        to->count = to->bytes / dtype_size(to->dtype);
    }
    return n_part;
}

static bool is_permanent(const struct quantizer *z) { return z->arena != &z->dev->work; }

/* Writes the tables that all matrices of the stack share. */
static void put_tables(struct quantizer *z, struct weight *w, const struct format *f)
{
    void *host[PLANES] = {0};
    for (int i = 0; i < PLANES; i++) {
        if (f->plane[i].unit != PLANE_SHARED) continue;
        w->plane[i] = arena_push(z->arena, format_plane_bytes(f, w, i));
        host[i] = mem_alloc(format_plane_bytes(f, w, i));
    }
    f->tables(host);
    for (int i = 0; i < PLANES; i++) {
        if (host[i]) device_upload(z->dev, (void *)(uintptr_t)w->plane[i], host[i], format_plane_bytes(f, w, i));
        mem_free(host[i]);
    }
}

static void alloc_parts(struct quantizer *z, struct weight *w, struct part *p, int n_part)
{
    const struct format *f = row_of(&z->q);
    w->format = z->q.format;
    for (int i = 0; i < n_part; i++)
        w->plane[p[i].plane] = p[i].src = p[i].dst = arena_push(z->arena, w->n_exp * p[i].bytes);
    if (f->tables) put_tables(z, w, f);
}

static uint64_t sum_sources(const struct packed *k)
{
    return hash_sum_fold(hash_sum_of(0, k->source, k->n_source * (int64_t)sizeof(*k->source), 1));
}

/* Uploads the parts of expert e; returns the checksum so far. */
static uint64_t upload_parts(struct quantizer *z, const struct packed *k, int64_t e, const char *const src[PLANES],
                             uint64_t sum)
{
    for (int i = 0; i < k->n_part; i++) {
        const struct part *p = &k->part[i];
        sum = rng_u64(sum, hash_sum_fold(hash_sum_of(0, src[i], p->bytes, z->dev->n_threads)));
        device_upload(z->dev, p->dst + e * p->bytes, src[i], p->bytes);
        if (p->copy) memcpy(p->copy + e * p->bytes, src[i], (size_t)p->bytes);
    }
    return sum;
}

/* ---- the cache, reading */

static const struct st_tensor *cached(const struct quantizer *z, const char *name, const char *suffix, enum dtype dtype,
                                      int64_t bytes)
{
    char full[512];
    if (str_format(full, sizeof(full), NULL, "tensor name", "%s%s", name, suffix)) return NULL;
    const struct st_tensor *t = safetensors_find(&z->cache, full);
    return t && t->dtype == dtype && t->bytes == bytes ? t : NULL;
}

static void open_cache(struct quantizer *z)
{
    struct err why;
    uint64_t key = 0;
    if (safetensors_open(&z->cache, z->q.cache, &why)) {
        log_warn("the cache of packed weights is damaged and will be rewritten: %s", why.msg);
        return;
    }
    const struct st_tensor *t = cached(z, KEY, "", DT_I64, sizeof(key));
    if (t) memcpy(&key, t->data, sizeof(key));
    if (t && key == z->key) return;
    log_warn("%s %s and will be rewritten", z->q.cache,
             t ? "was made from another checkpoint" : "is no cache of packed weights of this version");
    safetensors_close(&z->cache);
}

/* False when the cache does not have the weight, or its checksum is wrong. */
static bool read_cached(struct quantizer *z, struct packed *k, const struct source *s)
{
    const int64_t sums = k->n_source * (int64_t)sizeof(*k->source);
    const struct st_tensor *t[PLANES], *stored = cached(z, k->name, ".sum", DT_I64, sizeof(k->sum));
    const struct st_tensor *source = cached(z, k->name, ".source", DT_I64, sums);
    uint64_t want = 0;
    bool good = stored && source;
    for (int i = 0; i < k->n_part && good; i++) {
        t[i] = cached(z, k->name, k->part[i].suffix, k->part[i].dtype, k->n_exp * k->part[i].bytes);
        good = t[i] != NULL;
    }
    for (int64_t e = 0; e < k->n_exp && good; e++) {
        const char *src[PLANES] = {0};
        for (int i = 0; i < k->n_part; i++) src[i] = (const char *)t[i]->data + e * k->part[i].bytes;
        k->sum = upload_parts(z, k, e, src, k->sum);
        for (int i = 0; i < k->n_part; i++) source_drop(&z->cache, t[i], e * k->part[i].bytes, k->part[i].bytes);
    }
    if (good) {
        memcpy(&want, stored->data, sizeof(want));
        memcpy(k->source, source->data, (size_t)sums);
        k->sum = rng_u64(k->sum, sum_sources(k));
    }
    if (good && k->sum == want) {
        for (int i = 0; i < k->n_part && !is_permanent(z); i++) k->part[i].src = (const char *)t[i]->data;
        for (int64_t i = 0; i < k->n_source; i++) checkpoint_hash_known(z->ck, s[i].data, k->source[i]);
        return true;
    }
    if (!z->warned) log_warn("%s is damaged at %s and will be rewritten", z->q.cache, k->name);
    z->warned = true;
    return false;
}

/* ---- encoding */

static void log_progress(struct quantizer *z, double done)
{
    const double now = clock_ms(), left = done > 0 ? (now - z->start_ms) * (1 - done) / done / 1e3 : 0;
    char text[32];
    if (now - z->logged_ms < LOG_MS || done <= 0) return;
    z->logged_ms = now;
    log_info("quantising to %s: %.0f%%, left %s", quantize_name(&z->q), 100 * done, str_seconds(text, left));
}

static int encode_all(struct quantizer *z, struct packed *k, const struct weight *w, const struct source *s,
                      struct err *err)
{
    const int64_t n_row_block = k->n_source / k->n_exp;
    const struct format *from = format_row(s->format, false);
    struct weight dense = {.format = s->format, .n_exp = 1, .n_out = w->n_out, .n_in = w->n_in};
    char *values = mem_alloc(weight_bytes(&dense)), *out[PLANES] = {0};
    void *plane[PLANES] = {0};
    int rc = 0;
    dense.data = values;
    for (int i = 0; i < k->n_part; i++) {
        struct part *p = &k->part[i];
        plane[p->plane] = out[i] = mem_alloc(p->bytes);
        if (z->q.cache && !is_permanent(z)) p->src = p->copy = mem_array(k->n_exp, p->bytes);
    }
    k->sum = 0;
    for (int64_t e = 0; e < k->n_exp && !rc; e++) {
        const struct source *of = s + e * n_row_block;
        for (int64_t i = 0, at = 0; i < n_row_block && !rc; at += source_bytes(&of[i++], from, PLANE_DATA)) {
            k->source[e * n_row_block + i] = checkpoint_hash(z->ck, of[i].data, 0, of[i].data->bytes);
            rc = finite_check_data(z->ck->st, &of[i], err) || finite_check_scaled(z->ck->st, &of[i], err);
            if (!rc) source_copy(&of[i], from, PLANE_DATA, values + at, z->dev->n_threads);
            source_drop(z->ck->st, of[i].data, 0, of[i].data->bytes);
        }
        if (rc) break;
        const int64_t bad = row_of(&z->q)->encode(plane, &dense, z->dev->n_threads);
        MT_REQUIRE(!bad, "%lld values of %s are not finite", (long long)bad, of->data->name);
        k->sum = upload_parts(z, k, e, (const char *const *)out, k->sum);
    }
    k->sum = rng_u64(k->sum, sum_sources(k));
    z->n_encoded++;
    for (int i = 0; i < k->n_part; i++) mem_free(out[i]);
    mem_free(values);
    return rc;
}

static int check_blocks(const struct quantizer *z, const struct weight *w, const char *name, struct err *err)
{
    const long long out = w->n_out, in = w->n_in;
    const long long block = row_of(&z->q)->block;
    if (block && in % block)
        return err_set(err,
                       "tensor %s cannot be packed: model.quantize = %s takes blocks of %lld inputs, which do not "
                       "divide its %lld (a matrix of %lld x %lld); choose nf4 or none",
                       name, quantize_name(&z->q), block, in, out, in);
    if (!block && w->n_out * w->n_in % QUANT_BLOCK)
        return err_set(err,
                       "tensor %s cannot be packed: model.quantize = %s takes blocks of %d values, which do not divide "
                       "a matrix of %lld x %lld; choose none",
                       name, quantize_name(&z->q), QUANT_BLOCK, out, in);
    return 0;
}

/* Adds "shared experts (fp8)", once. */
static void note_kind(struct quantizer *z, const char *what, const struct source *s)
{
    char kind[64];
    const size_t used = strlen(z->kinds);
    const char *from = source_decoded(s);
    snprintf(kind, sizeof(kind), "%s (%s)", what, from ? from : weight_format_name(s->format));
    if (!strstr(z->kinds, kind)) snprintf(z->kinds + used, sizeof(z->kinds) - used, "%s%s", used ? ", " : "", kind);
}

int quantizer_stack(struct quantizer *z, struct weight *w, const struct source *s, int64_t n, const char *what,
                    double done, struct err *err)
{
    struct packed k = {.n_exp = w->n_exp, .n_source = n};
    if (check_blocks(z, w, safetensors_stored(s->data), err)) return -1;
    if (!row_of(&z->q)->block) w->block = QUANT_BLOCK;
    k.n_part = list_parts(row_of(&z->q), w, k.part);
    alloc_parts(z, w, k.part, k.n_part);
    if (z->dev->dry_run) return 0;
    log_progress(z, done);
    note_kind(z, what, s);
    k.name = mem_strdup(s->data->name);
    k.source = mem_array(n, sizeof(*k.source));
    const bool read = z->cache.n_shards && read_cached(z, &k, s);
    const int rc = read ? 0 : encode_all(z, &k, w, s, err);
    z->packed = mem_grow(z->packed, z->n_packed, z->n_packed + 1, sizeof(*z->packed));
    z->packed[z->n_packed++] = k;
    return rc;
}

/* ---- opening, finishing */

void quantizer_open(struct quantizer *z, const struct quantize *q, struct device *dev, struct checkpoint *ck)
{
    *z = (struct quantizer){
        .dev = dev, .arena = &dev->weights, .ck = ck, .start_ms = clock_ms(), .logged_ms = clock_ms()};
    if (q) z->q = *q;
    if (!z->q.cache || !z->q.format || dev->dry_run) return;
    z->key = quantize_key(&z->q, safetensors_fingerprint(ck->st));
    if (file_exists(z->q.cache)) open_cache(z);
}

int quantizer_wants(const struct quantizer *z, enum weight_format format, bool nested, const char *name,
                    struct err *err)
{
    const bool dense = weight_is_dense(format);
    if (dense || !z->q.format) return dense && z->q.format;
    if (format == z->q.format && nested == z->q.nested) return 0;
    return err_set(err,
                   "tensor %s is packed in the checkpoint as %s, but model.quantize = %s: set model.quantize = none "
                   "to keep its format, model.quantize_attention to pack attention alone, or use a bf16 checkpoint",
                   name, format_row(format, nested)->name, quantize_name(&z->q));
}

static int put_entry(struct quantizer *z, struct file_writer *out, const struct st_entry *e, char *host, int64_t cap,
                     struct err *err)
{
    const int64_t bytes = safetensors_entry_bytes(e);
    const struct arena *a = &z->dev->weights;
    const uintptr_t first = (uintptr_t)a->base, data = (uintptr_t)e->data;
    if (data < first || data >= first + (uintptr_t)a->used) return file_writer_put(out, e->data, bytes, err);
    int rc = 0;
    for (int64_t at = 0; at < bytes && !rc; at += cap) {
        const int64_t n = MT_MIN(cap, bytes - at);
        device_download(z->dev, host, (const char *)e->data + at, n);
        rc = file_writer_put(out, host, n, err);
    }
    return rc;
}

static void add_entry(struct st_entry *e, const char *name, const char *suffix, enum dtype dtype, int64_t count,
                      const void *data)
{
    const size_t size = strlen(name) + strlen(suffix) + 1;
    char *full = mem_alloc((int64_t)size);
    snprintf(full, size, "%s%s", name, suffix);
    *e = (struct st_entry){.name = full, .dtype = dtype, .ndim = 1, .shape = {count}, .data = data};
}

static int make_folder(const char *file, struct err *err)
{
    char *dir = mem_strdup(file), *slash = strrchr(dir, '/');
    if (slash) *slash = 0;
    const int rc = slash && slash > dir ? file_make_dirs(dir, err) : 0;
    mem_free(dir);
    return rc;
}

static int write_cache(struct quantizer *z, struct err *err)
{
    const int64_t cap = 8 << 20;
    int64_t n = 0, size;
    char *head = NULL;
    if (make_folder(z->q.cache, err)) return -1;
    struct st_entry *entries = mem_array(1 + z->n_packed * (PLANES + 2), sizeof(*entries));
    struct file_writer out;
    add_entry(&entries[n++], KEY, "", DT_I64, 1, &z->key);
    for (int64_t i = 0; i < z->n_packed; i++) {
        const struct packed *k = &z->packed[i];
        add_entry(&entries[n++], k->name, ".sum", DT_I64, 1, &k->sum);
        add_entry(&entries[n++], k->name, ".source", DT_I64, 2 * k->n_source, k->source);
        for (int p = 0; p < k->n_part; p++)
            add_entry(&entries[n++], k->name, k->part[p].suffix, k->part[p].dtype, k->n_exp * k->part[p].count,
                      k->part[p].src);
    }
    int rc = safetensors_head(entries, n, &head, &size, err) || file_writer_open(&out, z->q.cache, err) ? -1 : 0;
    if (!rc) {
        char *host = mem_alloc(cap);
        rc = file_writer_put(&out, head, size, err);
        for (int64_t i = 0; i < n && !rc; i++) rc = put_entry(z, &out, &entries[i], host, cap, err);
        rc = file_writer_close(&out, !rc, err);
        mem_free(host);
    }
    mem_free(head);
    for (int64_t i = 0; i < n; i++) mem_free((void *)(uintptr_t)entries[i].name);
    mem_free(entries);
    return rc;
}

void quantizer_moved(struct quantizer *z, const char *from, int64_t bytes, const char *to)
{
    for (int64_t i = 0; i < z->n_packed; i++)
        for (int p = 0; p < z->packed[i].n_part; p++) {
            struct part *part = &z->packed[i].part[p];
            const uintptr_t at = (uintptr_t)part->src - (uintptr_t)from;
            if (at < (uintptr_t)bytes) part->src = to + at;
        }
}

void quantizer_finish(struct quantizer *z)
{
    struct err why;
    if (!z->q.format || z->dev->dry_run) return;
    if (!z->n_packed) {
        log_info("model.quantize: nothing to pack, the checkpoint is already packed in this format");
        return;
    }
    if (!z->n_encoded) {
        log_info("packed weights read from %s: %s", z->q.cache, z->kinds);
        return;
    }
    log_info("%lld of %lld weights quantised to %s in %.1f s: %s", (long long)z->n_encoded, (long long)z->n_packed,
             quantize_name(&z->q), (clock_ms() - z->start_ms) / 1e3, z->kinds);
    if (!z->q.cache) return;
    if (write_cache(z, &why))
        log_warn("%s; without this cache every start quantises the weights again", why.msg);
    else
        log_info("packed weights saved to %s", z->q.cache);
}

void quantizer_close(struct quantizer *z)
{
    for (int64_t i = 0; i < z->n_packed; i++) {
        for (int p = 0; p < z->packed[i].n_part; p++) mem_free(z->packed[i].part[p].copy);
        mem_free(z->packed[i].source);
        mem_free(z->packed[i].name);
    }
    mem_free(z->packed);
    safetensors_close(&z->cache);
    *z = (struct quantizer){0};
}
