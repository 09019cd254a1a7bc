/* synth.c - makes a checkpoint of random weights: in a directory, written by all cores, or in memory. */
#include "train/synth/synth.h"

#include <pthread.h>
#include <string.h>
#include <unistd.h>

#include "data/file/file.h"
#include "data/shards.h"
#include "kernels/cgroup.h"
#include "kernels/memory.h"
#include "model/stored/published.h"
#include "data/file/atomic_dir.h"
#include "train/launch/process.h"
#include "train/synth/synth_tensors.h"
#include "train/synth/synth_tokenizer.h"

#define SHARD_BYTES 4500000000
#define PIECE_BYTES (8 << 20) /* bytes that a thread generates and writes at a time */

/* ---- what to write */

static int find_form(struct synth *s, const char *quant, struct err *err)
{
    const enum weight_format own = s->p->family->experts;
    for (int64_t i = 0; (s->form = synth_tensors_form(i)) != NULL; i++)
        if (quant ? !strcmp(s->form->name, quant) : s->form->format == own) break;
    if (!s->form) return err_set(err, "--quant \"%.64s\": expected mxfp4, nf4, bf16, nvfp4 or fp8", quant);
    if (s->form->published && s->form->format != own)
        return err_set(err, "%s has no published layout with experts in MXFP4: use nf4, bf16, nvfp4 or fp8",
                       s->p->name);
    return 0;
}

/* The architecture of the first n_layer layers, as arch_load reads it from the text of config.json. The last layer of
 * Gemma-4 has full attention, whatever the number of layers. */
static int read_arch(struct synth *s, struct err *err)
{
    struct json_out text;
    preset_config(&text, s->p, s->n_layer, s->form->format);
    struct json_doc *doc = json_parse(text.text, text.size, s->p->name, err);
    const int rc = doc ? arch_parse(&s->a, json_root(doc), err) : -1;
    json_free(doc);
    json_out_free(&text);
    return rc;
}

static void synth_close(struct synth *s)
{
    for (int64_t i = 0; i < s->n; i++) {
        mem_free((void *)(uintptr_t)s->entries[i].name);
        mem_free((void *)(uintptr_t)s->entries[i].data);
    }
    mem_free(s->entries);
    *s = (struct synth){0};
}

/* The smallest number of first layers, but at least 2, that include every kind of layer of the model. */
static int64_t layers_of_each_kind(const struct arch *a)
{
    int64_t n = MT_MIN(a->n_layer, 2);
    for (int64_t l = n; l < a->n_layer; l++) {
        bool seen = false;
        for (int64_t k = 0; k < n; k++) seen = seen || arch_same_layer(a, k, l);
        if (!seen) n = l + 1;
    }
    return n;
}

static int synth_open(struct synth *s, const struct synth_options *opt, bool sizes, struct err *err)
{
    *s = (struct synth){.seed = opt->seed, .sizes = sizes};
    s->p = preset_find(opt->arch, err);
    if (!s->p || find_form(s, opt->quant, err)) return -1;
    s->n_layer = opt->n_layer ? opt->n_layer : s->p->n_layer;
    if (s->n_layer < 0 || s->n_layer > s->p->n_layer)
        return err_set(err, "--layers %lld: %s has %lld", (long long)s->n_layer, s->p->name, (long long)s->p->n_layer);
    if (read_arch(s, err)) return -1;
    if (s->a.transposed_experts && s->form->layout && !s->form->stack)
        return err_set(err, "%s has no layout with experts in FP8: use mxfp4, nf4, bf16 or nvfp4", s->p->name);
    if (opt->each_kind && !opt->n_layer) {
        s->n_layer = layers_of_each_kind(&s->a);
        if (read_arch(s, err)) return -1;
    }
    synth_tensors_add(s);
    return 0;
}

/* ---- writing: each thread takes the next part, generates it and writes it */

struct writer {
    struct synth *s;
    struct shards shards;
    pthread_mutex_t lock; /* protects all fields below */
    struct err *err;
    bool failed;
    int64_t entry, done; /* the cursor: this entry, from byte `done` on */
    int64_t written;     /* of s->bytes */
    double start, told;
};

struct piece {
    int64_t entry, at, n; /* bytes [at, at+n) of the tensor */
};

static bool next_piece(struct writer *w, struct piece *piece)
{
    if (w->entry == w->s->n) return false;
    const int64_t bytes = safetensors_entry_bytes(&w->s->entries[w->entry]);
    *piece = (struct piece){w->entry, w->done, MT_MIN(PIECE_BYTES, bytes - w->done)};
    w->done += piece->n;
    if (w->done < bytes) return true;
    w->done = 0;
    w->entry++;
    return true;
}

static void print_progress(struct writer *w, int64_t n)
{
    char done[32], all[32], left[32], speed[32];
    const double now = clock_ms(), seconds = (now - w->start) / 1e3;
    w->written += n;
    if (now - w->told < 2000) return;
    w->told = now;
    const double rate = (double)w->written / seconds;
    log_info("%s of %s  %s/s  left %s", str_bytes(done, w->written), str_bytes(all, w->s->bytes),
             str_bytes(speed, (int64_t)rate), str_seconds(left, (double)(w->s->bytes - w->written) / rate));
}

static void *work(void *arg)
{
    struct writer *w = arg;
    struct piece piece;
    struct err err;
    uint8_t *bytes = mem_alloc(PIECE_BYTES);
    pthread_mutex_lock(&w->lock);
    while (!w->failed && next_piece(w, &piece)) {
        pthread_mutex_unlock(&w->lock);
        random_weights_bytes(w->s->entries[piece.entry].data, bytes, piece.at, piece.n);
        const int rc = shards_put(&w->shards, piece.entry, piece.at, bytes, piece.n, &err);
        pthread_mutex_lock(&w->lock);
        print_progress(w, piece.n);
        if (rc && !w->failed) w->failed = err_set(w->err, "%s", err.msg);
    }
    pthread_mutex_unlock(&w->lock);
    mem_free(bytes);
    return NULL;
}

static int write_tensors(struct synth *s, const char *dir, const struct synth_options *opt, struct err *err)
{
    const double start = clock_ms();
    struct writer w = {.s = s, .err = err, .start = start, .told = start};
    const int64_t most = opt->shard_bytes ? opt->shard_bytes : SHARD_BYTES;
    const int64_t cpus = MT_MIN(MT_MAX(sysconf(_SC_NPROCESSORS_ONLN), 1), cgroup_cpus(""));
    const int n = opt->n_threads ? opt->n_threads : (int)cpus;
    if (shards_open(&w.shards, dir, s->entries, s->n, most, err)) return -1;
    pthread_t *threads = mem_array(n, sizeof(*threads));
    MT_REQUIRE(!pthread_mutex_init(&w.lock, NULL), "no lock");
    for (int i = 0; i < n; i++) thread_start(&threads[i], work, &w);
    for (int i = 0; i < n; i++) pthread_join(threads[i], NULL);
    pthread_mutex_destroy(&w.lock);
    mem_free(threads);
    const int rc = w.failed || shards_finish(&w.shards, err) ? -1 : 0;
    shards_close(&w.shards);
    return rc;
}

/* ---- the directory */

static int check_space(const struct synth *s, const char *dir, struct err *err)
{
    struct err why;
    if (!file_check_space(dir, s->bytes, &why)) return 0;
    return err_set(err, "%s; --layers N writes the first N layers", why.msg);
}

static int write_config(const struct synth *s, const char *dir, struct err *err)
{
    struct json_out o;
    preset_config(&o, s->p, s->n_layer, s->form->format);
    const int rc = file_write_in(dir, "config.json", o.text, o.size, err);
    json_out_free(&o);
    return rc;
}

/* Writes to a hidden directory next to dir, and renames it to dir at the end. config.json is written last. */
static int write_all(struct synth *s, const struct synth_options *opt, struct err *err)
{
    char tmp[MT_PATH];
    if (atomic_dir_begin(opt->dir, tmp, err)) return -1;
    process_delete_on_signal(tmp);
    const bool done = !check_space(s, tmp, err) && !write_tensors(s, tmp, opt, err) &&
                      !synth_tokenizer(tmp, s->p, err) && !write_config(s, tmp, err) &&
                      !atomic_dir_commit(tmp, opt->dir, err);
    process_delete_on_signal(NULL);
    if (!done) (void)!file_remove_tree(tmp, NULL);
    return done ? 0 : -1;
}

int synth_run(const struct synth_options *opt, struct err *err)
{
    struct synth s;
    char params[32], bytes[32];
    const double start = clock_ms();
    int rc = synth_open(&s, opt, false, err) || atomic_dir_check_new(opt->dir, "name a new directory", err) ? -1 : 0;
    if (!rc) {
        log_info("%s: %lld of %lld layer%s, %s parameters, experts %s, %s in %lld tensors, seed %llu", s.p->name,
                 (long long)s.n_layer, (long long)s.p->n_layer, str_plural(s.p->n_layer), str_count(params, s.n_params),
                 weight_format_name(s.form->format), str_bytes(bytes, s.bytes), (long long)s.n,
                 (unsigned long long)s.seed);
        rc = write_all(&s, opt, err);
    }
    if (!rc) log_info("%s written in %.1f s", opt->dir, (clock_ms() - start) / 1e3);
    synth_close(&s);
    return rc;
}

int synth_size(const struct synth_options *opt, int64_t *n_params, int64_t *bytes, struct err *err)
{
    struct synth s;
    const int rc = synth_open(&s, opt, true, err);
    *n_params = s.n_params;
    *bytes = s.bytes;
    synth_close(&s);
    return rc;
}

/* ---- in memory ---- */

static bool same_content(const struct st_entry *a, const struct st_entry *b)
{
    const struct random_weights *x = a->data, *y = b->data;
    return x->kind == y->kind && x->mean == y->mean && x->std == y->std && x->row == y->row && x->bytes == y->bytes &&
           safetensors_entry_bytes(a) == safetensors_entry_bytes(b);
}

/* The bytes of entry i: those of an earlier equal entry, or drawn now. A large tensor repeats its first part. */
static const uint8_t *memory_bytes(struct synth_memory *m, const struct synth *s, int64_t i, int64_t *n_drawn)
{
    const struct st_entry *e = &s->entries[i];
    for (int64_t k = 0; k < i; k++)
        if (same_content(&s->entries[k], e)) return m->st.tensors[k].data;
    const int64_t bytes = safetensors_entry_bytes(e), drawn = MT_MIN(bytes, (int64_t)64 << 20);
    uint8_t *data = mem_alloc(bytes);
    random_weights_bytes(e->data, data, 0, drawn);
    for (int64_t at = drawn; at < bytes; at += drawn) memcpy(data + at, data, (size_t)MT_MIN(drawn, bytes - at));
    m->buffers[(*n_drawn)++] = data;
    return data;
}

int synth_memory_open(struct synth_memory *m, const struct synth_options *opt, struct err *err)
{
    struct synth s;
    int64_t n_drawn = 0;
    *m = (struct synth_memory){0};
    if (synth_open(&s, opt, false, err)) {
        synth_close(&s);
        return -1;
    }
    m->arch = s.a;
    m->arch.n_layer = s.n_layer;
    m->n = m->st.n_tensors = s.n;
    m->names = mem_array(s.n, sizeof(*m->names));
    m->buffers = mem_array(s.n, sizeof(*m->buffers));
    m->st.tensors = mem_array(s.n, sizeof(*m->st.tensors));
    for (int64_t i = 0; i < s.n; i++) {
        const struct st_entry *e = &s.entries[i];
        struct st_tensor *t = &m->st.tensors[i];
        m->names[i] = mem_strdup(e->name);
        *t = (struct st_tensor){.name = m->names[i], .dtype = safetensors_entry_dtype(e), .ndim = e->ndim};
        t->st_dtype = e->st_dtype ? e->st_dtype : dtype_name(e->dtype);
        memcpy(t->shape, e->shape, sizeof(t->shape));
        t->bytes = safetensors_entry_bytes(e);
        t->data = opt->no_bytes ? NULL : memory_bytes(m, &s, i, &n_drawn);
    }
    safetensors_sort(&m->st);
    synth_close(&s);
    return published_rename(&m->st, &m->arch, err);
}

void synth_memory_close(struct synth_memory *m)
{
    safetensors_close(&m->st);
    for (int64_t i = 0; i < m->n; i++) {
        mem_free(m->names[i]);
        mem_free(m->buffers[i]);
    }
    mem_free(m->names);
    mem_free(m->buffers);
    *m = (struct synth_memory){0};
}

void synth_list(FILE *out)
{
    const struct preset *p;
    const struct form *form;
    fprintf(out, "%-18s  %6s  %10s", "architecture", "layers", "parameters");
    for (int64_t k = 0; (form = synth_tensors_form(k)) != NULL; k++) fprintf(out, "  %10s", form->name);
    fputc('\n', out);
    for (int64_t i = 0; (p = preset_row(i)) != NULL; i++) {
        char sizes[256] = "", params[32] = "";
        for (int64_t k = 0, at = 0; (form = synth_tensors_form(k)) != NULL; k++) {
            struct err err;
            int64_t n, bytes;
            char text[32] = "-";
            const struct synth_options opt = {.arch = p->name, .quant = form->name};
            if (!synth_size(&opt, &n, &bytes, &err)) str_bytes(text, bytes), str_count(params, n);
            at += snprintf(sizes + at, sizeof(sizes) - (size_t)at, "  %10s", text);
        }
        fprintf(out, "%-18s  %6lld  %10s%s\n", p->name, (long long)p->n_layer, params, sizes);
    }
}
