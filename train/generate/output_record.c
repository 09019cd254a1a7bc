/* output_record.c - see output_record.h. */
#include "train/generate/output_record.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "train/adapter/amax_file.h"
#include "train/adapter/changes.h"
#include "train/generate/row_answer.h"

#define ROWS     "rows"
#define LINES    "rows_sha256"
#define PROMPTS  "prompts_sha256"
#define SETTINGS "settings"

int output_record_open(struct output_record *r, const char *output, struct err *err)
{
    const char *text;
    struct json settings;
    *r = (struct output_record){.n_row = 0};
    hash_init(&r->rows);
    hash_init(&r->prompts);
    if (str_format(r->path, MT_PATH, err, "path", "%s.run.json", output)) return -1;
    if (!file_exists(r->path)) return 0;
    if (!(r->saved = json_load(r->path, 1 << 20, err))) return -1;
    const struct json j = json_root(r->saved);
    if (json_get_i64(j, ROWS, 1, INT64_MAX, &r->n_saved, err) || json_get_str(j, LINES, &text, err) ||
        json_get_str(j, PROMPTS, &text, err) || json_get_object(j, SETTINGS, &settings, err))
        return err_prefix(err, "%s was not written by generate: name another --output", r->path);
    return 0;
}

void output_record_add(struct output_record *r, const char *line, int64_t size, const struct sample_request *q)
{
    const int64_t counts[] = {q->n_ids, q->n_end_ids};
    hash_add(&r->rows, line, size);
    hash_add(&r->rows, "\n", 1);
    hash_add(&r->prompts, counts, sizeof(counts));
    hash_add(&r->prompts, q->ids, q->n_ids * (int64_t)sizeof(*q->ids));
    hash_add(&r->prompts, q->end_ids, q->n_end_ids * (int64_t)sizeof(*q->end_ids));
    if (++r->n_row != r->n_saved) return;
    struct hash rows = r->rows, prompts = r->prompts;
    hash_hex(&rows, r->first[0]);
    hash_hex(&prompts, r->first[1]);
}

/* ---- settings ---- */

static int add_file(struct hash *h, const char *dir, const char *name, struct err *err)
{
    char path[MT_PATH];
    struct file_map map;
    if (!file_exists_in(dir, name)) return 0;
    if (file_in(path, dir, name, err) || file_map_open(&map, path, err)) return -1;
    hash_add(h, &map.size, sizeof(map.size));
    hash_add(h, map.data, map.size);
    file_map_close(&map);
    return 0;
}

/* Puts hashes of the adapter's files that generate reads. */
static int put_adapter(struct json_out *o, const char *dir, struct err *err)
{
    static const char *const files[] = {"adapter_config.json", "adapter_model.safetensors", AMAX_FILE};
    struct hash h;
    char hex[HASH_HEX] = "none";
    hash_init(&h);
    for (int i = 0; i < MT_LEN(files) && dir; i++)
        if (add_file(&h, dir, files[i], err)) return -1;
    if (dir) hash_hex(&h, hex);
    json_out_str(o, "adapter files", hex);
    return 0;
}

static int put_weights(struct json_out *o, struct run *run, struct err *err)
{
    uint64_t fingerprint;
    char hex[20];
    if (run_fingerprint(run, &fingerprint, err)) return -1;
    snprintf(hex, sizeof(hex), "%016" PRIx64, fingerprint);
    json_out_str(o, "model weights", hex);
    json_out_str(o, "activations", run->dev.round_bf16 || run->dev.act_dtype == DT_BF16 ? "bf16" : "fp32");
    return 0;
}

static void put_keys(struct json_out *o, const struct config *cfg)
{
    static const char *const keys[] = {"model.quantize",
                                       "model.quantize_attention",
                                       "data.chat_template",
                                       "data.chat_kwargs",
                                       "data.chat_date",
                                       "quant.weights",
                                       "quant.activations",
                                       "quant.narrow",
                                       "quant.mode",
                                       "quant.targets",
                                       "quant.amax",
                                       "train.expert_dtype",
                                       "generate.batch_invariant"};
    struct config_value v;
    for (int64_t i = 0; config_value(cfg, i, &v); i++)
        if (str_in(v.name, keys, MT_LEN(keys))) json_out_str(o, v.name, v.text);
}

static void put_real(struct json_out *o, const char *name, double v)
{
    char text[32];
    snprintf(text, sizeof(text), "%.15g", v);
    json_out_str(o, name, text);
}

static void put_options(struct json_out *o, const struct generate_options *g)
{
    const struct {
        const char *name;
        int64_t value;
    } integers[] = {{"--tokens", g->tokens}, {"--top-k", g->top_k}, {"--seed", g->seed}, {"--samples", g->n}};
    char text[32];
    for (int i = 0; i < MT_LEN(integers); i++) {
        snprintf(text, sizeof(text), "%lld", (long long)integers[i].value);
        json_out_str(o, integers[i].name, text);
    }
    put_real(o, "--temperature", g->temperature);
    put_real(o, "--top-p", g->top_p);
    json_out_str(o, "--format", g->format);
    json_out_str(o, "--prompt-logprobs", g->prompt_logprobs ? "true" : "false");
    json_out_str(o, "--routing", g->routing ? "true" : "false");
}

int output_record_set(struct output_record *r, struct run *run, const struct generate_options *o, const char *adapter,
                      struct err *err)
{
    struct json_out out = {0};
    r->model = run->cfg->model.path;
    r->adapter = adapter;
    json_out_open(&out, NULL, '{');
    const int rc = put_weights(&out, run, err) || put_adapter(&out, adapter, err) ? -1 : 0;
    put_options(&out, o);
    put_keys(&out, run->cfg);
    json_out_close(&out, '}');
    if (!rc) r->settings = json_parse(out.text, out.size, SETTINGS, err);
    json_out_free(&out);
    return r->settings ? 0 : -1;
}

/* ---- comparison ---- */

/* Setting i of this run; false: there are no more. */
static bool next_setting(const struct output_record *r, int64_t i, const char **name, const char **text)
{
    struct json value;
    int64_t size;
    return json_member(json_root(r->settings), i, name, &value) && !json_str(value, text, &size, NULL);
}

int output_record_check_settings(const struct output_record *r, const char *output, struct err *err)
{
    struct changes c = {.n = 0};
    const char *name, *now, *then;
    const struct json saved = json_find(json_root(r->saved), SETTINGS);
    for (int64_t i = 0; next_setting(r, i, &name, &now); i++) {
        if (json_get_str(saved, name, &then, NULL)) then = "unknown";
        if (strcmp(now, then)) changes_add(&c, name, then, now);
    }
    if (!c.n) return 0;
    return err_set(err, "%s was begun with other settings (see %s): %s: use the first ones, or name another --output",
                   output, r->path, changes_text(&c));
}

int output_record_check_rows(const struct output_record *r, const struct generate_options *o, struct err *err)
{
    static const char *const keys[] = {LINES, PROMPTS};
    const char *then;
    for (int i = 0; i < MT_LEN(keys); i++) {
        if (json_get_str(json_root(r->saved), keys[i], &then, err)) return -1;
        if (!strcmp(then, r->first[i])) continue;
        return err_set(err, "%s was begun with other rows: %s of %s: undo the change, or name another --output",
                       o->output,
                       !r->first[i][0] ? "rows are missing at the end"
                       : i             ? "tokenizer or chat template give other tokens for the rows"
                                       : "there are changes in the rows",
                       o->input);
    }
    return 0;
}

int output_record_write(struct output_record *r, const char *input, struct err *err)
{
    struct json_out o = {.indent = true};
    const char *name, *text;
    char hex[HASH_HEX];
    json_out_open(&o, NULL, '{');
    json_out_str(&o, "moetrain", MT_VERSION);
    json_out_str(&o, "model", r->model);
    json_out_str(&o, "adapter", r->adapter);
    json_out_str(&o, "input", input);
    json_out_i64(&o, ROWS, r->n_row);
    hash_hex(&r->rows, hex);
    json_out_str(&o, LINES, hex);
    hash_hex(&r->prompts, hex);
    json_out_str(&o, PROMPTS, hex);
    json_out_open(&o, SETTINGS, '{');
    for (int64_t i = 0; next_setting(r, i, &name, &text); i++) json_out_str(&o, name, text);
    json_out_close(&o, '}');
    json_out_close(&o, '}');
    const int rc = file_write_atomic(r->path, o.text, o.size, err);
    json_out_free(&o);
    return rc;
}

void output_record_close(struct output_record *r)
{
    json_free(r->saved);
    json_free(r->settings);
    *r = (struct output_record){.n_row = 0};
}
