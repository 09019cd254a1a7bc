/* eos_ids.c - eos_token_id of generation_config.json or config.json. */
#include "data/eos_ids.h"

#include "data/file/file.h"
#include "data/json/json.h"

static void add(struct eos_ids *e, struct json j)
{
    int64_t id;
    if (e->n < MT_LEN(e->ids) && json_type(j) == JSON_INT && !json_i64(j, 0, INT32_MAX, &id, NULL))
        e->ids[e->n++] = (int32_t)id;
}

static int load(struct eos_ids *out, const char *dir, const char *file, struct err *err)
{
    char path[MT_PATH];
    if (str_format(path, sizeof(path), err, "path", "%s/%s", dir, file)) return -1;
    if (!file_exists(path)) return 0;
    struct json_doc *doc = json_load(path, 16 << 20, err);
    if (!doc) return -1;
    const struct json eos = json_find(json_root(doc), "eos_token_id");
    add(out, eos);
    for (int64_t i = 0; json_type(eos) == JSON_ARRAY && i < json_count(eos); i++) add(out, json_at(eos, i));
    json_free(doc);
    return 0;
}

int eos_ids_load(struct eos_ids *out, const char *dir, struct err *err)
{
    *out = (struct eos_ids){0};
    if (load(out, dir, "generation_config.json", err)) return -1;
    return out->n ? 0 : load(out, dir, "config.json", err);
}
