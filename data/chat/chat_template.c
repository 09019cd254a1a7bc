/* chat_template.c - finds a checkpoint's chat template and sets its variables. */
#include "data/chat/chat_template.h"

#include <stdio.h>
#include <string.h>

#include "data/chat/chat_deepseek.h"
#include "data/chat/chat_named.h"
#include "data/chat/chat_typescript.h"
#include "data/chat/jinja/jinja.h"
#include "data/file/file.h"

#define MAX_BYTES  (16 << 20)
#define MAX_VARS   48
#define MAX_OTHERS 8
#define KIMI_TOOLS "tools_ts_str"

/* The special tokens that transformers passes to a template, by these names. */
static const char *const token_names[] = {"bos_token", "eos_token", "unk_token", "sep_token",
                                          "pad_token", "cls_token", "mask_token"};

struct token_var {
    char *name, *text;
};

struct chat_template {
    struct jinja *main, *tools;          /* tools NULL: main also serves tools; both NULL: DeepSeek V4's rules */
    char *tokens[MT_LEN(token_names)];   /* NULL: the tokenizer has none, and the template no such variable */
    struct token_var others[MAX_OTHERS]; /* of other names, as image_token */
    int64_t n_others;
    struct text_buf stops;   /* a span for each token of chat_template_add_stop */
    int64_t next_role[2][2]; /* spans of `stops`: the token before a user's message, before a tool result; empty:
                                none */
    bool never_ends;
    enum chat_arguments arguments; /* that the template takes */
    struct json_doc *kwargs;       /* NULL: none */
    char *text, *tools_text;       /* of main and tools */
    bool tools_only;               /* main is the template "tool_use": the checkpoint has none for rows without tools */
    bool types;                    /* the template reads KIMI_TOOLS */
    bool foreign;                  /* the tokenizer of transformers does not find this text in the checkpoint */
    uint64_t hash;
};

void chat_template_free(struct chat_template *t)
{
    if (!t) return;
    jinja_free(t->main);
    jinja_free(t->tools);
    for (int64_t i = 0; i < MT_LEN(token_names); i++) mem_free(t->tokens[i]);
    for (int64_t i = 0; i < t->n_others; i++) {
        mem_free(t->others[i].name);
        mem_free(t->others[i].text);
    }
    text_free(&t->stops);
    json_free(t->kwargs);
    mem_free(t->text);
    mem_free(t->tools_text);
    mem_free(t);
}

uint64_t chat_template_hash(const struct chat_template *t) { return t ? t->hash : 0; }
bool chat_template_has_generation(const struct chat_template *t)
{
    return t && t->main && jinja_has_generation(t->main);
}
bool chat_template_is_deepseek(const struct chat_template *t) { return t && !t->main; }
const char *chat_template_eos(const struct chat_template *t) { return t ? t->tokens[1] : NULL; }
const char *chat_template_text(const struct chat_template *t) { return t ? t->text : NULL; }
const char *chat_template_foreign(const struct chat_template *t) { return t && t->foreign ? t->text : NULL; }

/* ---- tokens that end generation ---- */

void chat_template_add_stop(struct chat_template *t, const char *token, int64_t size)
{
    const char *eos = chat_template_eos(t);
    if (size <= 0 || (eos && (int64_t)strlen(eos) == size && !memcmp(eos, token, (size_t)size))) return;
    t->hash = rng_bytes(t->hash, token, size);
    text_put_bytes(&t->stops, token, size);
    text_span(&t->stops, t->stops.size - size, t->stops.size);
}

bool chat_template_stop_before(const struct chat_template *t, const char *text, int64_t size)
{
    for (int64_t i = 0; t && i < t->stops.n_spans; i++) {
        const int64_t *span = t->stops.spans[i], n = span[1] - span[0];
        if (n <= size && !memcmp(text + size - n, t->stops.text + span[0], (size_t)n)) return true;
    }
    return false;
}

/* The longest stop token at the start of text[0..size), or NULL. */
static const int64_t *stop_span(const struct chat_template *t, const char *text, int64_t size)
{
    const int64_t *longest = NULL;
    for (int64_t i = 0; i < t->stops.n_spans; i++) {
        const int64_t *span = t->stops.spans[i], n = span[1] - span[0];
        if (n > size || memcmp(text, t->stops.text + span[0], (size_t)n) != 0) continue;
        if (!longest || n > longest[1] - longest[0]) longest = span;
    }
    return longest;
}

int64_t chat_template_stop_at(const struct chat_template *t, const char *text, int64_t size)
{
    const int64_t *span = t ? stop_span(t, text, size) : NULL;
    return span ? span[1] - span[0] : 0;
}

const char *chat_template_next_role(const struct chat_template *t, bool tool, int64_t *size)
{
    if (!t) return NULL;
    const int64_t *span = t->next_role[tool];
    *size = span[1] - span[0];
    return *size ? t->stops.text + span[0] : NULL;
}

enum chat_arguments chat_template_arguments(const struct chat_template *t) { return t->arguments; }
bool chat_template_never_ends(const struct chat_template *t) { return t && t->never_ends; }

/* ---- loading ---- */

/* Sets the template of this name: "default" or "tool_use". Other names are ignored. */
static int set(struct chat_template *t, const char *name, const char *text, int64_t size, const char *path,
               struct err *err)
{
    const bool main = !strcmp(name, "default");
    struct jinja **to = main ? &t->main : !strcmp(name, "tool_use") ? &t->tools : NULL;
    if (!to || *to) return 0;
    if (!main) t->hash = rng_bytes(t->hash, name, (int64_t)strlen(name));
    t->hash = rng_bytes(t->hash, text, size);
    *(main ? &t->text : &t->tools_text) = mem_strdup(text);
    *to = jinja_parse(text, size, path, err);
    return *to ? 0 : -1;
}

static int load_file(struct chat_template *t, const char *name, const char *path, struct err *err)
{
    int64_t size;
    char *text = file_read(path, MAX_BYTES, &size, err);
    if (!text) return -1;
    const int rc = set(t, name, text, size, path, err);
    mem_free(text);
    return rc;
}

/* The text of a token, a string or an added-token object; any other value: "". */
static const char *token_text(struct json token)
{
    const char *text = "";
    int64_t size;
    if (json_type(token) == JSON_OBJECT) token = json_find(token, "content");
    return json_type(token) == JSON_STRING && !json_str(token, &text, &size, NULL) ? text : "";
}

/* Loads the tokens that are members of `from` and whose name ends in `end`. */
static void load_others(struct chat_template *t, struct json from, const char *end)
{
    const char *key;
    struct json value;
    for (int64_t i = 0; json_type(from) == JSON_OBJECT && json_member(from, i, &key, &value); i++) {
        const char *text = token_text(value);
        if (!*text || !str_ends(key, end) || t->n_others == MAX_OTHERS || str_in(key, token_names, MT_LEN(token_names)))
            continue;
        t->hash = rng_key(rng_key(t->hash, key), text);
        t->others[t->n_others++] = (struct token_var){mem_strdup(key), mem_strdup(text)};
    }
}

/* Loads the special tokens. map: special_tokens_map.json, which is used if tokenizer_config.json has no
 * added_tokens_decoder. */
static void load_tokens(struct chat_template *t, struct json config, struct json map)
{
    for (int64_t i = 0; i < MT_LEN(token_names); i++) {
        const char *text = token_text(json_find(json_has(map, token_names[i]) ? map : config, token_names[i]));
        if (*text) t->tokens[i] = mem_strdup(text);
        t->hash = rng_bytes(t->hash, text, (int64_t)strlen(text));
    }
    load_others(t, json_find(config, "extra_special_tokens"), "");
    load_others(t, json_find(config, "model_specific_special_tokens"), "");
    load_others(t, config, "_token");
}

static int load_named(struct chat_template *t, const char *dir, struct json config, struct err *err)
{
    static const char name[] = "special_tokens_map.json";
    struct json_doc *map = NULL;
    if (!json_has(config, "added_tokens_decoder") && file_exists_in(dir, name) &&
        !(map = json_load_in(dir, name, MAX_BYTES, err)))
        return -1;
    load_tokens(t, config, map ? json_root(map) : (struct json){0});
    json_free(map);
    return 0;
}

/* Uses the template "tool_use" for all rows if there is no "default", as transformers does. */
static void use_tools_only(struct chat_template *t)
{
    if (t->main || !t->tools) return;
    t->main = t->tools;
    t->text = t->tools_text;
    t->tools = NULL;
    t->tools_text = NULL;
    t->tools_only = true;
}

/* Loads [{name, template}, ...] or {name: template, ...}. */
static int load_list(struct chat_template *t, struct json list, const char *path, struct err *err)
{
    const bool map = json_type(list) == JSON_OBJECT;
    const char *name, *text;
    struct json value;
    for (int64_t i = 0; i < json_count(list); i++) {
        struct json entry = map ? list : json_at(list, i);
        if (map ? !json_member(list, i, &name, &value) : json_get_str(entry, "name", &name, err)) return -1;
        if (json_get_str(entry, map ? name : "template", &text, err)) return -1;
        if (set(t, name, text, (int64_t)strlen(text), path, err)) return err_prefix(err, "chat_template \"%s\"", name);
    }
    use_tools_only(t);
    return t->main ? 0 : json_error(list, err, "has no template named \"default\" or \"tool_use\"");
}

/* Loads `chat_template` of a JSON file; with `tokens` also the special tokens, with tokens_only only these. */
static int load_config(struct chat_template *t, const char *dir, const char *name, bool tokens, bool tokens_only,
                       struct err *err)
{
    char path[MT_PATH];
    if (file_in(path, dir, name, err)) return -1;
    if (!file_exists(path)) return 0;
    struct json_doc *doc = json_load(path, MAX_BYTES, err);
    if (!doc) return -1;
    struct json root = json_root(doc), source = json_find(root, "chat_template");
    const char *text;
    int rc = 0;
    if (tokens) rc = load_named(t, dir, root, err);
    if (rc || tokens_only || !json_given(source))
        ;
    else if (json_type(source) == JSON_ARRAY || json_type(source) == JSON_OBJECT)
        rc = load_list(t, source, path, err);
    else if (!(rc = json_get_str(root, "chat_template", &text, err)) &&
             (rc = set(t, "default", text, (int64_t)strlen(text), path, err)))
        (void)err_prefix(err, "chat_template");
    json_free(doc);
    return rc;
}

/* Loads chat_template.jinja and additional_chat_templates/NAME.jinja. If there are any, transformers ignores
 * tokenizer_config.json. */
static int load_files(struct chat_template *t, const char *dir, struct err *err)
{
    static const char *const files[][2] = {{"default", CHAT_TEMPLATES_DIR "/default.jinja"},
                                           {"default", CHAT_TEMPLATE_FILE},
                                           {"tool_use", CHAT_TEMPLATES_DIR "/tool_use.jinja"}};
    char path[MT_PATH];
    for (int64_t i = 0; i < MT_LEN(files); i++)
        if (file_in(path, dir, files[i][1], err) || (file_exists(path) && load_file(t, files[i][0], path, err)))
            return -1;
    use_tools_only(t);
    return 0;
}

/* Loads the first template in transformers' order: files of templates, tokenizer_config.json, the file of older
 * processors. */
static int load_found(struct chat_template *t, const char *dir, struct err *err)
{
    if (load_files(t, dir, err) || load_config(t, dir, "tokenizer_config.json", true, t->main != NULL, err)) return -1;
    if (t->main) return 0;
    t->foreign = true;
    return load_config(t, dir, "chat_template.json", false, false, err);
}

static bool reads(const struct chat_template *t, const char *name)
{
    return jinja_reads(t->main, name) || (t->tools && jinja_reads(t->tools, name));
}

int chat_template_load(struct chat_template **out, const char *dir, const char *file, struct err *err)
{
    struct chat_template *t = mem_alloc(sizeof(*t));
    const bool given = file && *file;
    int rc;
    *out = NULL;
    if (!given) {
        rc = load_found(t, dir, err);
    } else {
        t->foreign = true;
        const char *named = chat_named_text(file);
        rc = load_config(t, dir, "tokenizer_config.json", true, true, err);
        if (!rc)
            rc = named ? set(t, "default", named, (int64_t)strlen(named), file, err)
                       : load_file(t, "default", file, err);
        if (!rc && !jinja_reads(t->main, "messages"))
            rc = err_set(err, "%s is no chat template: it does not read `messages`", file);
    }
    if (!rc && t->main) {
        t->types = reads(t, KIMI_TOOLS);
        *out = t;
    } else {
        chat_template_free(t);
    }
    return rc;
}

static struct json_doc *parse_kwargs(const char *kwargs, struct err *err)
{
    struct json_doc *doc = json_parse(kwargs, (int64_t)strlen(kwargs), "chat_template_kwargs", err);
    if (!doc || (json_type(json_root(doc)) == JSON_OBJECT && json_count(json_root(doc)) <= MAX_VARS / 4)) return doc;
    json_error(json_root(doc), err, "must be an object of at most %d members, as in {\"thinking\": true}",
               MAX_VARS / 4);
    json_free(doc);
    return NULL;
}

int chat_template_check_kwargs(const char *kwargs, struct err *err)
{
    struct json_doc *doc = parse_kwargs(kwargs, err);
    if (!doc) return -1;
    json_free(doc);
    return 0;
}

/* Variables of every conversation, which moetrain sets. */
static const char *const row_names[] = {"messages", "tools", "documents", "add_generation_prompt"};

/* Lists the variables that the template reads, for errors: "; it reads thinking, ...". */
static void known_text(char text[320], const struct chat_template *t)
{
    const char *names[MAX_VARS];
    int64_t n = jinja_inputs(t->main, names, MT_LEN(names));
    int shown = 0;
    if (t->tools) n += jinja_inputs(t->tools, names + n, MT_LEN(names) - n);
    text[0] = 0;
    for (int64_t i = 0; i < n; i++) {
        const size_t used = strlen(text);
        if (str_in(names[i], row_names, MT_LEN(row_names)) || str_in(names[i], token_names, MT_LEN(token_names)) ||
            str_in(names[i], names, i) || used + strlen(names[i]) + 16 > 320)
            continue;
        snprintf(text + used, 320 - used, "%s%s", shown++ ? ", " : "; it reads ", names[i]);
    }
    if (!shown) snprintf(text, 320, "; it reads none");
}

/* Refuses a variable that the template never reads, because it would have no effect. */
static int check_names(const struct chat_template *t, struct json kwargs, struct err *err)
{
    const char *key;
    struct json value;
    char known[320];
    if (chat_template_is_deepseek(t)) return chat_deepseek_check(kwargs, err);
    for (int64_t i = 0; json_member(kwargs, i, &key, &value); i++) {
        if (str_in(key, row_names, MT_LEN(row_names)))
            return err_set(err, "\"%s\" comes from the conversation; remove it", key);
        if (reads(t, key)) continue;
        known_text(known, t);
        return err_set(err, "the chat template does not read the variable \"%s\"%s", key, known);
    }
    return 0;
}

int chat_template_set_kwargs(struct chat_template *t, const char *kwargs, struct err *err)
{
    struct json_doc *doc = parse_kwargs(kwargs, err);
    if (!doc) return -1;
    if (check_names(t, json_root(doc), err)) {
        json_free(doc);
        return -1;
    }
    json_free(t->kwargs);
    t->kwargs = doc;
    t->hash = rng_bytes(t->hash, kwargs, (int64_t)strlen(kwargs));
    return 0;
}

struct chat_template *chat_template_deepseek(void)
{
    struct chat_template *t = mem_alloc(sizeof(*t));
    t->tokens[1] = mem_strdup(DEEPSEEK_EOS);
    t->hash = rng_key(0, "DeepSeek V4");
    return t;
}

/* ---- rendering ---- */

struct vars {
    struct jinja_var items[MAX_VARS];
    int64_t n;
};

/* Later variables override earlier ones: the template sees the last of a name. */
static struct jinja_var *add(struct vars *v, const char *name, enum jinja_var_kind kind)
{
    MT_REQUIRE(v->n < MAX_VARS, "more than %d template variables", MAX_VARS);
    struct jinja_var *var = &v->items[v->n++];
    *var = (struct jinja_var){.name = name, .kind = kind};
    return var;
}

static void add_text(struct vars *v, const char *name, const char *text)
{
    if (text) add(v, name, JINJA_TEXT)->text = text;
}

static void add_json(struct vars *v, const char *name, struct json j)
{
    add(v, name, json_type(j) == JSON_ABSENT ? JINJA_NONE : JINJA_JSON)->json = j;
}

/* Adds the row's variables. null counts as absent: Arrow adds it for the keys of other rows. */
static int add_kwargs(struct vars *v, struct json kwargs, struct err *err)
{
    const char *key;
    struct json value;
    if (!json_given(kwargs)) return 0;
    if (json_type(kwargs) != JSON_OBJECT) return json_error(kwargs, err, "must be an object");
    if (json_count(kwargs) > MAX_VARS / 4) return json_error(kwargs, err, "has more than %d members", MAX_VARS / 4);
    for (int64_t i = 0; json_member(kwargs, i, &key, &value); i++)
        if (json_given(value)) add_json(v, key, value);
    return 0;
}

/* What the tokenizer of Kimi-K2.5 and K2.6 gives to its template: sorted tools, their TypeScript (the template writes
 * JSON if that fails), and two switches. */
struct kimi {
    struct json_doc *tools;
    struct text_buf typescript;
};

static void kimi_free(struct kimi *k)
{
    json_free(k->tools);
    text_free(&k->typescript);
}

static int kimi_prepare(struct kimi *k, struct vars *v, struct json *tools, struct err *err)
{
    add(v, "thinking", JINJA_TRUTH)->truth = true;
    add(v, "preserve_thinking", JINJA_TRUTH)->truth = false;
    if (!json_truthy(*tools)) return 0;
    if (!(k->tools = chat_typescript_sorted(*tools, err))) return -1;
    *tools = json_root(k->tools);
    if (!chat_typescript_put(&k->typescript, *tools, NULL)) add_text(v, KIMI_TOOLS, k->typescript.text);
    return 0;
}

static int render(struct text_buf *out, const struct chat_template *t, struct json row, struct json tools,
                  const struct chat_options *opt, struct err *err)
{
    const struct json kwargs = t->kwargs ? json_root(t->kwargs) : (struct json){0};
    struct vars v = {0};
    struct kimi kimi = {0};
    struct json messages;
    struct json_doc *copy = NULL;
    if (chat_template_is_deepseek(t)) return chat_deepseek_render(out, row, tools, kwargs, opt, err);
    if (json_get_array(row, "messages", &messages, err)) return -1;
    for (int64_t i = 0; i < MT_LEN(token_names); i++) add_text(&v, token_names[i], t->tokens[i]);
    for (int64_t i = 0; i < t->n_others; i++) add_text(&v, t->others[i].name, t->others[i].text);
    if (t->types && kimi_prepare(&kimi, &v, &tools, err)) return -1;
    if (add_kwargs(&v, kwargs, err) || add_kwargs(&v, json_find(row, "chat_template_kwargs"), err) ||
        chat_arguments_as(&copy, messages, t->arguments, err)) {
        kimi_free(&kimi);
        return -1;
    }
    struct jinja_var *var = add(&v, "messages", JINJA_JSON);
    var->json = copy ? json_root(copy) : messages;
    var->leave_out = opt->leave_out;
    var->places = opt->places;
    var->twins[0] = "thinking";
    var->twins[1] = "reasoning_content";
    var->twins[2] = "reasoning";
    add_json(&v, "tools", tools);
    add_json(&v, "documents", json_find(row, "documents"));
    add(&v, "add_generation_prompt", JINJA_TRUTH)->truth = opt->generation_prompt;
    const bool has_tools = json_given(tools);
    const struct jinja *which = has_tools && t->tools ? t->tools : t->main;
    struct err why;
    const int rc = jinja_render(out, which, v.items, v.n, opt->date ? opt->date : CHAT_DATE, &why);
    json_free(copy);
    kimi_free(&kimi);
    return rc ? json_error(messages, err, "%s", why.msg) : 0;
}

static int render_row(struct text_buf *out, const struct chat_template *t, struct json row,
                      const struct chat_options *opt, struct err *err)
{
    struct json tools = json_find(row, "tools");
    const char *text;
    int64_t size;
    if (json_type(tools) != JSON_STRING) return render(out, t, row, tools, opt, err);
    if (json_str(tools, &text, &size, err)) return -1;
    struct json_doc *doc = json_parse(text, size, "tools", err);
    if (!doc) return json_error(tools, err, "is a string that is not valid JSON");
    int rc = render(out, t, row, json_root(doc), opt, err);
    json_free(doc);
    return rc;
}

int chat_template_render(struct text_buf *out, const struct chat_template *t, struct json row,
                         const struct chat_options *opt, struct err *err)
{
    if (t->tools_only && !json_given(json_find(row, "tools")))
        return err_set(err, "a row without tools: the checkpoint has only the chat template \"tool_use\", none named "
                            "\"default\"; set data.chat_template");
    return render_row(out, t, row, opt, err);
}

/* ---- what a template does, found by rendering short conversations ---- */

/* Renders a question, this answer and a message of `role`, without the last leave_out of these. */
static int render_turn(struct text_buf *out, const struct chat_template *t, const char *answer, const char *role,
                       int64_t leave_out)
{
    const struct chat_options opt = {.leave_out = leave_out};
    char row[512];
    struct err err;
    snprintf(row, sizeof(row),
             "{\"messages\": [{\"role\": \"user\", \"content\": \"Ready?\"}, {\"role\": \"assistant\", %s}, "
             "{\"role\": \"%s\", \"tool_call_id\": \"callabcde\", \"content\": \"Go\"}]}",
             answer, role);
    struct json_doc *doc = json_parse(row, (int64_t)strlen(row), "an answer", &err);
    out->size = out->n_spans = 0;
    int rc = doc ? render_row(out, t, json_root(doc), &opt, &err) : -1;
    json_free(doc);
    return rc;
}

#define YES "\"content\": \"Yes\""
#define CALL(arguments)                                                                                                \
    "\"content\": \"\", \"tool_calls\": [{\"id\": \"callabcde\", \"type\": \"function\", \"function\": {\"name\": "    \
    "\"f\", \"arguments\": " arguments "}}]"

static void find_turn_ends(struct chat_template *t)
{
    static const char *const roles[] = {"user", "tool"};
    struct text_buf last = {0}, more = {0};
    if (chat_template_has_generation(t) || render_turn(&last, t, YES, "user", 1)) goto out;
    int64_t end = last.size;
    while (end && text_is_space(last.text[end - 1])) end--;
    if (end < 3 || memcmp(last.text + end - 3, "Yes", 3) != 0) goto out; /* a token ends the answer */
    t->never_ends = true;
    for (int64_t i = 0; i < MT_LEN(roles); i++) {
        if (render_turn(&more, t, YES, roles[i], 0) || more.size < last.size) continue;
        const int64_t *span = stop_span(t, more.text + last.size, more.size - last.size);
        if (!span || memcmp(more.text, last.text, (size_t)last.size) != 0) continue;
        memcpy(t->next_role[i], span, sizeof(t->next_role[i]));
        t->hash = rng_bytes(t->hash, t->stops.text + span[0], span[1] - span[0]);
        t->never_ends = false;
    }
out:
    text_free(&last);
    text_free(&more);
}

int64_t chat_template_end(struct text_buf *out, const struct chat_template *t)
{
    if (!t || !t->main || render_turn(out, t, YES, "user", 1)) return 0;
    for (int64_t i = out->size - 3; i >= 0; i--)
        if (!memcmp(out->text + i, "Yes", 3)) return i + 3;
    return out->size;
}

/* Whether the template writes arguments of this form: it neither fails nor omits them, nor writes them as a JSON
 * string, as gpt-oss's template does with a string. */
static bool writes_arguments(const struct chat_template *t, const char *answer)
{
    struct text_buf text = {0};
    const bool yes = !render_turn(&text, t, answer, "tool", 1) && text.size && strstr(text.text, "width") &&
                     strstr(text.text, "731") && !strstr(text.text, "\\\"width");
    text_free(&text);
    return yes;
}

static void find_arguments(struct chat_template *t)
{
    const bool object = writes_arguments(t, CALL("{\"width\": 731}"));
    const bool string = writes_arguments(t, CALL("\"{\\\"width\\\": 731}\""));
    t->arguments = object == string ? CHAT_ARGUMENTS_ANY : object ? CHAT_ARGUMENTS_OBJECT : CHAT_ARGUMENTS_STRING;
    if (t->arguments != CHAT_ARGUMENTS_ANY) t->hash = rng_bytes(t->hash, object ? "object" : "string", 6);
}

void chat_template_probe(struct chat_template *t)
{
    if (!t || !t->main) return;
    find_turn_ends(t);
    find_arguments(t);
}
