/* eos_ids.c - eos_token_id of generation_config.json or config.json, and eos_token of the tokenizer. */
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
    if (!file_exists_in(dir, file)) return 0;
    struct json_doc *doc = json_load_in(dir, file, 16 << 20, err);
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

/* Reads eos_token of a file, a string or an added-token object. *text NULL: none. Free *doc; NULL: no such file. */
static int load_token(struct json_doc **doc, const char **text, const char *dir, const char *file, struct err *err)
{
    *doc = NULL;
    *text = NULL;
    if (!file_exists_in(dir, file)) return 0;
    if (!(*doc = json_load_in(dir, file, 64 << 20, err))) return -1;
    const struct json root = json_root(*doc), token = json_find(root, "eos_token");
    if (!json_given(token)) return 0;
    return json_type(token) == JSON_OBJECT ? json_get_str(token, "content", text, err)
                                           : json_get_str(root, "eos_token", text, err);
}

int eos_ids_main(int32_t *out, const char *dir, const struct tokenizer *tok, struct err *err)
{
    struct json_doc *config = NULL, *map = NULL;
    const char *text, *mapped;
    struct eos_ids ids = {0};
    int rc = -1;
    if (load_token(&config, &text, dir, "tokenizer_config.json", err) ||
        load_token(&map, &mapped, dir, "special_tokens_map.json", err))
        goto out;
    if (mapped && !(text && config && json_has(json_root(config), "added_tokens_decoder"))) text = mapped;
    if (!text && eos_ids_load(&ids, dir, err)) goto out;
    *out = text ? tokenizer_id(tok, text) : ids.n ? ids.ids[0] : -1;
    if (*out >= 0)
        rc = 0;
    else if (text)
        rc = json_error(json_root(text == mapped ? map : config), err,
                        "eos_token \"%s\" is not a token of the tokenizer", text);
    else
        err_set(err,
                "%s: no token ends a document: set eos_token in tokenizer_config.json, or eos_token_id in "
                "generation_config.json",
                dir);
out:
    json_free(config);
    json_free(map);
    return rc;
}
