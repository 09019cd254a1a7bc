/* models.c - see models.h. */
#include "train/models/models.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#include "train/adapter/adapter_dir.h"
#include "train/adapter/peft.h"

/* ---- names ---- */

static struct served *find_known(const struct models *m, const char *name)
{
    for (int64_t i = 0; i < m->n; i++)
        if (!strcmp(m->items[i]->name, name)) return m->items[i];
    return NULL;
}

static void add(struct models *m, const char *name, int64_t size, const char *dir)
{
    m->items = mem_reserve(m->items, &m->cap, m->n + 1, sizeof(*m->items));
    struct served *s = mem_array(1, sizeof(*s));
    *s = (struct served){
        .name = mem_strndup(name, size), .dir = dir ? mem_strdup(dir) : NULL, .created = (int64_t)time(NULL)};
    m->items[m->n++] = s;
}

/* The last part of a path, without slashes at its end, and the size of this part. For RUN/adapter it is RUN. */
static const char *last_part(const char *path, int64_t *size)
{
    int64_t end = (int64_t)strlen(path);
    for (;;) {
        while (end > 1 && path[end - 1] == '/') end--;
        int64_t at = end;
        while (at > 0 && path[at - 1] != '/') at--;
        *size = end - at;
        if (at < 2 || *size != 7 || strncmp(path + at, "adapter", 7) != 0) return path + at;
        end = at;
    }
}

int models_add(struct models *m, const char *option, const char *word, struct err *err)
{
    const char *equals = strchr(word, '=');
    const bool named = equals && equals > word && !memchr(word, '/', (size_t)(equals - word));
    char dir[MT_PATH];
    int64_t size;
    if (adapter_dir_find(dir, option, named ? equals + 1 : word, err)) return -1;
    const char *name = last_part(named ? equals + 1 : word, &size);
    if (named) name = word, size = equals - word;
    char *copy = mem_strndup(name, size);
    const bool known = find_known(m, copy) != NULL;
    if (known) err_set(err, "%s %s: another model is named %s: write NAME=DIR", option, word, copy);
    if (!known) add(m, name, size, dir);
    mem_free(copy);
    return known ? -1 : 0;
}

/* Adds the adapters below the folder whose names are new. first: warns of a name that another model has. */
static int scan(struct models *m, bool first, struct err *err)
{
    char **names, path[MT_PATH], dir[MT_PATH];
    int64_t n;
    if (!m->folder) return 0;
    if (file_list(m->folder, &names, &n, err)) return err_prefix(err, "--adapters");
    for (int64_t i = 0; i < n; i++) {
        const bool known = find_known(m, names[i]);
        if ((known && !first) || file_in(path, m->folder, names[i], NULL) || !adapter_dir_inside(dir, path)) continue;
        if (known)
            log_warn("%s is not served: another model is named %s: rename the directory", path, names[i]);
        else
            add(m, names[i], (int64_t)strlen(names[i]), dir);
    }
    file_list_free(names, n);
    return 0;
}

int models_open(struct models *m, struct run *r, const struct cli_words *words, const char *folder, struct err *err)
{
    int64_t size = (int64_t)strlen(r->model_name);
    const char *name = file_is_dir(r->model_name) ? last_part(r->model_name, &size) : r->model_name;
    *m = (struct models){.run = r, .folder = folder};
    add(m, name, size, NULL);
    for (int64_t i = 0; i < words->n; i++)
        if (models_add(m, "--adapter", words->v[i], err)) return -1;
    m->n_named = m->n;
    return scan(m, true, err);
}

bool models_has(const struct served *s) { return !s->dir || file_exists_in(s->dir, "adapter_config.json"); }

struct served *models_find(struct models *m, const char *name)
{
    struct err err;
    struct served *known = name && *name ? find_known(m, name) : m->items[0];
    if (!known && m->folder && scan(m, false, &err)) log_warn("%s", err.msg);
    if (!known && m->folder) known = find_known(m, name);
    return known && models_has(known) ? known : NULL;
}

/* ---- memory ---- */

/* Raises cfg->lora and target to what the adapter of dir needs; dir NULL: an adapter by the [lora] section of
 * `asked`. */
static int count_adapter(const struct models *m, struct config *cfg, bool target[LORA_TARGETS],
                         const struct config *asked, const char *dir, struct err *err)
{
    struct adapters ad;
    if (plan_adapters(&ad, &m->run->arch, asked, dir, err)) return -1;
    cfg->lora.r = MT_MAX(cfg->lora.r, adapters_max_rank(&ad));
    cfg->lora.dora |= ad.dora;
    for (int t = 0; t < LORA_TARGETS; t++) target[t] |= ad.target[t];
    adapters_free(&ad);
    return 0;
}

static int64_t bytes_of(const struct models *m, struct adapters *ad)
{
    struct device dry;
    device_dry_run(&dry, &m->run->dev);
    adapters_layout(ad, &m->run->arch, m->run->dev.ops->rank_multiple, &m->run->par);
    adapters_alloc_frozen(ad, &dry, &m->run->arch);
    return dry.state.peak;
}

int models_plan(struct models *m, struct config *cfg, int64_t n_slot, bool later, struct err *err)
{
    static struct config usual; /* large for a stack */
    const struct config asked = *cfg;
    bool target[LORA_TARGETS] = {false};
    size_t n = 0;
    struct adapters ad;
    config_defaults(&usual);
    cfg->lora = usual.lora;
    cfg->lora.r = 1;
    snprintf(cfg->lora.targets, sizeof(cfg->lora.targets), "%s", asked.lora.targets);
    if (later && count_adapter(m, cfg, target, &asked, NULL, err)) return -1;
    for (int64_t i = 1; i < m->n; i++) {
        if (!count_adapter(m, cfg, target, &asked, m->items[i]->dir, err)) continue;
        if (i < m->n_named) return -1;
        log_warn("%s", err->msg); /* an adapter of the folder: requests for it get the error */
    }
    for (enum lora_target t = LORA_Q; t < LORA_TARGETS; t++)
        if (target[t])
            n += (size_t)snprintf(cfg->lora.targets + n, sizeof(cfg->lora.targets) - n, "%s%s", n ? "," : "",
                                  lora_target_name(t));
    if (n >= sizeof(cfg->lora.targets)) return err_set(err, "the adapters have too many targets together");
    if (plan_adapters(&ad, &m->run->arch, cfg, NULL, err)) return -1;
    const int64_t bytes = bytes_of(m, &ad);
    adapters_free(&ad);
    m->n_slot = later ? n_slot : MT_MIN(n_slot, m->n - 1);
    m->slots = mem_array(n_slot, sizeof(*m->slots));
    m->run->set_aside = m->n_slot * bytes;
    return 0;
}

void models_close(struct models *m)
{
    for (int64_t i = 0; i < m->n; i++) {
        mem_free(m->items[i]->name);
        mem_free(m->items[i]->dir);
        mem_free(m->items[i]);
    }
    mem_free(m->items);
    mem_free(m->slots);
    *m = (struct models){.n = 0};
}

/* ---- loading ---- */

/* When the weights of an adapter changed, in ns; 0: unknown. */
static int64_t stamp_of(const char *dir)
{
    char path[MT_PATH];
    struct stat st;
    if (file_in(path, dir, "adapter_model.safetensors", NULL) || stat(path, &st)) return 0;
    return (int64_t)st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec;
}

/* Empties the slot. False: a request uses its adapter, or has ended but is in the engine until its next step. */
static bool empty(const struct models *m, struct slot *slot)
{
    struct err err;
    if (!slot->model) return true;
    if (slot->n_users || engine_drop_adapter(m->engine, slot->adapter, &err)) return false;
    slot->model->slot = NULL;
    *slot = (struct slot){.model = NULL};
    return true;
}

static int fill(const struct models *m, struct slot *slot, struct served *s, struct err *err)
{
    const double start = clock_ms();
    const int64_t stamp = stamp_of(s->dir);
    const int adapter = engine_load_adapter(m->engine, s->dir, err);
    if (adapter < 0) return -1;
    *slot = (struct slot){.model = s, .adapter = adapter, .stamp = stamp};
    s->slot = slot;
    log_info("adapter %s loaded in %.2f s", s->name, (clock_ms() - start) / 1e3);
    return 0;
}

/* An empty slot, or the slot whose adapter was unused for longest; NULL: all are in use. */
static struct slot *free_slot(const struct models *m)
{
    struct slot *best = NULL;
    for (struct slot *s = m->slots; s < m->slots + m->n_slot; s++) {
        if (!s->model) return s;
        if (!s->n_users && (!best || s->used < best->used)) best = s;
    }
    return best;
}

/* Called for a request that finds no free slot. The first one of a round gets `place` (NULL: the slot that was used
 * longest ago) when the requests that use it have ended. Until then models_take takes no other request for that slot's
 * adapter: otherwise such requests could keep the first one waiting for ever. */
static void want_slot(struct models *m, struct slot *place)
{
    for (struct slot *s = m->slots; !place && s < m->slots + m->n_slot; s++) {
        bool least = true;
        for (int64_t i = 0; i < m->n_slot; i++) least &= m->slots[i].used >= s->used;
        if (least) place = s;
    }
    if (!m->wanted) m->wanted = place;
}

void models_round(struct models *m) { m->wanted = NULL; }

int models_take(struct slot **slot, struct models *m, struct served *s, struct err *err)
{
    *slot = NULL;
    if (!s->dir) return 0;
    if (s->slot && s->slot->stamp != stamp_of(s->dir)) (void)empty(m, s->slot);
    if (!s->slot) {
        struct slot *place = free_slot(m);
        if (!place || !empty(m, place)) {
            want_slot(m, place);
            return 1;
        }
        if (fill(m, place, s, err)) return -1;
    }
    if (s->slot == m->wanted) return 1;
    *slot = s->slot;
    s->slot->n_users++;
    s->slot->used = ++m->n_use;
    return 0;
}

void models_release(struct slot *slot)
{
    if (slot) slot->n_users--;
}
