/* test_jinja.c - compares the Jinja engine and chat templates with Jinja (tests/parity/make_jinja_vectors.py); error
 * messages and work limits of templates. */
#include "tests/test.h"

#include <stdio.h>
#include <string.h>

#include "data/chat/chat_samples.h"
#include "data/chat/jinja/jinja.h"
#include "data/file/file.h"
#include "data/json/text.h"
#include "data/tokenizer/tokenizer.h"

#define MAX_VARS 32

static struct json_doc *load_json(const char *name)
{
    struct err err;
    struct json_doc *doc = json_load(fixture(name), 4 << 20, &err);
    if (!doc) fail_msg("%s", err.msg);
    return doc;
}

static void json_text(struct json j, const char *key, const char **s, int64_t *size)
{
    struct err err;
    if (json_str(json_find(j, key), s, size, &err)) fail_msg("%s", err.msg);
}

/* Renders the template with the members of vars (NULL: none). Returns -1 when jinja_parse or jinja_render does. */
static int render(struct text_buf *out, const char *text, int64_t size, const struct json *vars, struct err *err)
{
    struct jinja_var list[MAX_VARS] = {{0}};
    int64_t n = 0;
    for (; vars && n < MAX_VARS && json_member(*vars, n, &list[n].name, &list[n].json); n++) list[n].kind = JINJA_JSON;
    struct jinja *t = jinja_parse(text, size, "t.jinja", err);
    out->size = out->n_spans = 0;
    text_put(out, "");
    int rc = t ? jinja_render(out, t, list, n, "2025-06-28", err) : -1;
    jinja_free(t);
    return rc;
}

static void assert_text(const struct text_buf *t, const char *text, int64_t size, const char *what)
{
    if (t->size != size || memcmp(t->text, text, (size_t)size))
        fail_msg("%s\ngives \"%s\"\nnot   \"%s\"", what, t->text, text);
}

/* ---- single constructs */

static void constructs(void **state)
{
    (void)state;
    struct json_doc *doc = load_json("jinja/expressions.json");
    struct json cases = json_find(json_root(doc), "cases"), vars = json_find(json_root(doc), "vars");
    struct text_buf t = {0};
    assert_true(json_count(cases) > 350);
    for (int64_t i = 0; i < json_count(cases); i++) {
        struct json c = json_at(cases, i);
        struct err err = {""};
        const char *template, *text;
        int64_t size, n;
        json_text(c, "template", &template, &size);
        int rc = render(&t, template, size, &vars, &err);
        if (json_type(json_find(c, "text")) == JSON_NULL) {
            if (!rc) fail_msg("%s is not refused: \"%s\"", template, t.text);
            if (strncmp(err.msg, "t.jinja:", 8)) fail_msg("%s: no place in: %s", template, err.msg);
            continue;
        }
        if (rc) fail_msg("%s: %s", template, err.msg);
        json_text(c, "text", &text, &n);
        assert_text(&t, text, n, template);
    }
    text_free(&t);
    json_free(doc);
}

static void refusals(void **state)
{
    (void)state;
    static const struct {
        const char *template, *words;
    } rows[] = {
        {"a\n{% include 'x' %}", "t.jinja:2: {% include %} is not supported"},
        {"{% extends 'x' %}", "{% extends %} is not supported"},
        {"{% call f() %}{% endcall %}", "{% call %} is not supported"},
        {"{% for a in [] recursive %}{% endfor %}", "recursive for is not supported"},
        {"\n\n{{ [1]|batch(2) }}", "t.jinja:3: the filter `batch` is not supported"},
        {"{{ 1 is sameas 1 }}", "the test `sameas` is not supported"},
        {"{{ 'a'.zfill(3) }}", "the method `zfill` of a str is not supported"},
        {"{{ lipsum(1) }}", "the function `lipsum` is not supported"},
        {"{{ 'a'|trim(1, 2) }}", "too many arguments"},
        {"{{ 'a'|trim(what=1) }}", "the argument `what` is not supported"},
        {"{{ '\xc3\xa9'|upper }}", "beyond ASCII"},
        {"{{ a.b.c }}", "'a' is undefined"},
        {"{{ 'x' + a }}", "'a' is undefined"},
        {"{{ 'x' + 1 }}", "`+` is not defined between str and int"},
        {"{{ [1].append(2) }}", "the method `append` of a list"},
        {"{{ raise_exception('Roles must alternate!') }}",
         "the template refuses this conversation: Roles must alternate!"},
        {"{% if true %}\n\n", "endif"},
        {"{{ 9223372036854775807 }}", "18 digits"},
        {"{{ 999999999999999999 * 999999999999999999 }}", "64 bits"},
        {"{% macro m() %}{% generation %}a{% endgeneration %}{% endmacro %}{{ m() }}", "inside a macro"},
        {"{% generation %}{% generation %}a{% endgeneration %}{% endgeneration %}", "inside another"},
        {"{{ '\\ud800' }}", "not a Unicode character"},
    };
    struct text_buf t = {0};
    for (int64_t i = 0; i < MT_LEN(rows); i++) {
        struct err err = {""};
        if (!render(&t, rows[i].template, (int64_t)strlen(rows[i].template), NULL, &err))
            fail_msg("%s is not refused", rows[i].template);
        if (!strstr(err.msg, rows[i].words)) fail_msg("\"%s\" is not in: %s", rows[i].words, err.msg);
        assert_int_equal(t.size, 0);
        assert_int_equal(t.n_spans, 0);
    }
    text_free(&t);
}

/* Each template reaches the work limit and ends with an error. */
static void endless_templates(void **state)
{
    (void)state;
    static const struct {
        const char *template, *words;
    } rows[] = {
        {"{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "without an end"},
        {"{% for i in range(1000000000) %}{% endfor %}", "exceeded its work limit"},
        {"{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "exceeded its work limit"},
        {"{% set ns = namespace(s='ab') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
         "exceeded its work limit"},
        {"{{ 'x' * 999999999999 }}", "exceeded its work limit"},
        {"{% for i in range(9999) %}{% for j in range(99) %}{% set x = 1.2345678901234567e-300 ~ '' %}{% endfor %}"
         "{% endfor %}",
         "exceeded its work limit"},
        {"{% set l = [-999999999999999999, -999999999999999999, -999999999999999999] %}"
         "{% for i in range(99999) %}{% for j in range(9) %}{% set x = l ~ '' %}{% endfor %}{% endfor %}",
         "exceeded its work limit"},
        {"{{ 'x'|indent(99999999999, true) }}", "exceeded its work limit"},
        {"{{ 2 ** 99999999999 }}", "64 bits"},
        {"{{ 1 ** 99999999999 }}", "exceeded its work limit"},
        {"{% set ns = namespace(l=[]) %}{% for i in range(999) %}{% set ns.l = [ns.l] %}{% endfor %}{{ ns.l }}",
         "nest too deeply"},
        {"{% set ns = namespace(l=[]) %}{% for i in range(999) %}{% set ns.l = [ns.l] %}{% endfor %}{{ ns.l == ns.l }}",
         "nest too deeply"},
    };
    struct text_buf t = {0};
    for (int64_t i = 0; i < MT_LEN(rows); i++) {
        struct err err = {""};
        if (!render(&t, rows[i].template, (int64_t)strlen(rows[i].template), NULL, &err))
            fail_msg("%s is not refused", rows[i].template);
        if (!strstr(err.msg, rows[i].words)) fail_msg("\"%s\" is not in: %s", rows[i].words, err.msg);
    }
    text_free(&t);
}

/* Long loops with operations on a text of 1 MiB, or on a list with it. Work counts by size, so the loops reach the
 * limit. */
static void work_by_size(void **state)
{
    (void)state;
    static const char *const operations[] = {
        "'ab' in s",   "s.count('ab')", "s.split('ab')", "s.splitlines()", "s.startswith([s ~ s, 'b'])",
        "d.isdigit()", "d|int",         "d|float",       "b|indent(0)",    "s|map(attribute=s)",
        "{}[s]",
    };
    struct text_buf t = {0};
    for (int64_t i = 0; i < MT_LEN(operations); i++) {
        char template[512];
        struct err err = {""};
        int n = snprintf(template, sizeof(template),
                         "{%% set s = 'a' * 1000000 ~ 'c' %%}{%% set t = 'a' * 1000000 ~ 'c' %%}"
                         "{%% set b = ' ' * 1000000 %%}{%% set d = '7' * 1000000 %%}"
                         "{%% for i in range(3000) %%}{%% set x = %s %%}{%% endfor %%}",
                         operations[i]);
        if (!render(&t, template, n, NULL, &err)) fail_msg("3000 times %s is not stopped", operations[i]);
        if (!strstr(err.msg, "work limit")) fail_msg("%s: %s", operations[i], err.msg);
    }
    text_free(&t);
}

/* Integers beyond 64 bits are printed digit by digit, as Python prints them; arithmetic converts them to doubles. */
static void wide_numbers(void **state)
{
    (void)state;
    static const char vars[] = "{\"tool\": {\"maximum\": 18446744073709551615, \"x\": [-1e999, NaN]}}";
    static const char template[] =
        "{{ tool }} {{ tool|tojson }} {{ tool.maximum }} {{ tool.maximum + 1.5 }} {{ tool.maximum > 7 }}";
    static const char text[] =
        "{'maximum': 18446744073709551615, 'x': [-inf, nan]} {\"maximum\": 18446744073709551615, \"x\": [-Infinity, "
        "NaN]} 18446744073709551615 1.8446744073709552e+19 True";
    struct err err;
    struct text_buf t = {0};
    struct json_doc *doc = json_parse(vars, sizeof(vars) - 1, "vars", &err);
    if (!doc) fail_msg("%s", err.msg);
    const struct json root = json_root(doc);
    if (render(&t, template, sizeof(template) - 1, &root, &err)) fail_msg("%s", err.msg);
    assert_text(&t, text, sizeof(text) - 1, template);
    t.size = 0;
    assert_int_equal(text_put_json(&t, json_find(root, "tool"), &err), 0);
    assert_text(&t, "{\"maximum\": 18446744073709551615, \"x\": [-Infinity, NaN]}", 56, "as JSON");
    json_free(doc);
    text_free(&t);
}

/* Limits of memory and nesting: many small values, long values in the template, nested keys. */
#define EMPTY "[] or [] or [] or [] or [] or [] or [] or [] or [] or [] or [] or [] or [] or [] or "
static void memory_and_nesting(void **state)
{
    (void)state;
    static const struct {
        const char *template, *words;
    } rows[] = {
        {"{% for i in range(200000) %}{{ " EMPTY EMPTY EMPTY EMPTY EMPTY "'' }}{% endfor %}",
         "memory limit of 256 MiB"},
        {"{% set a = namespace(k=1) %}{% set b = namespace(k=1) %}{% for i in range(100000) %}{% set a.k = {a.k: 1} %}"
         "{% set b.k = {b.k: 1} %}{% endfor %}{{ a.k == b.k }}",
         "a dict cannot be a key"},
        {"{% set a = namespace(k=1) %}{% set b = namespace(k=1) %}{% for i in range(100000) %}{% set a.k = (a.k,) %}"
         "{% set b.k = (b.k,) %}{% endfor %}{{ {a.k: 1} == {b.k: 1} }}",
         "nests too deeply"},
        {"{{ {} in {'a': 1} }}", "a dict cannot be a key"},
        {"{{ {([],): 1} }}", "a list cannot be a key"},
        {"{{ [[[1]]]|tojson(indent=900000000000000000 * 9) }}", "indent is above the limit of 1000"},
    };
    struct text_buf t = {0}, text = {0};
    struct err err = {""};
    for (int64_t i = 0; i < MT_LEN(rows); i++) {
        if (!render(&t, rows[i].template, (int64_t)strlen(rows[i].template), NULL, &err))
            fail_msg("%s is not refused", rows[i].template);
        if (!strstr(err.msg, rows[i].words)) fail_msg("\"%s\" is not in: %s", rows[i].words, err.msg);
    }
    text_put(&text, "{{ ");
    for (int i = 0; i < 300; i++) text_put(&text, "a");
    text_put(&text, " }}");
    assert_int_equal(render(&t, text.text, text.size, NULL, &err), -1);
    assert_non_null(strstr(err.msg, "t.jinja:1: a name has more than 256 bytes"));
    while (text.size <= 1 << 20) text_put(&text, "0123456789abcdef");
    assert_int_equal(render(&t, text.text, text.size, NULL, &err), -1);
    assert_non_null(strstr(err.msg, "t.jinja: the template has "));
    text_free(&text);
    text_free(&t);
}

/* Brackets, blocks, signs and negations, nested to the limit of a file's size. */
static void deep_templates(void **state)
{
    (void)state;
    static const char *const pieces[] = {"(",
                                         "[",
                                         "{0:",
                                         "-",
                                         "not ",
                                         "a.b(",
                                         "1 if ",
                                         "{% if 1 %}",
                                         "{% for a in b %}",
                                         "{% macro a() %}",
                                         "{% elif 1 %}",
                                         "1 + "};
    struct text_buf t = {0}, text = {0};
    for (int64_t i = 0; i < MT_LEN(pieces); i++) {
        struct err err;
        bool block = pieces[i][0] == '{' && pieces[i][1] == '%';
        text.size = 0;
        text_put(&text, block ? "{% if 1 %}" : "{{ ");
        for (int k = 0; k < 100000; k++) text_put(&text, pieces[i]);
        assert_int_equal(render(&t, text.text, text.size, NULL, &err), -1);
    }
    text_free(&text);
    text_free(&t);
}

/* The parser returns for a template truncated at any byte. */
static void truncation(void **state)
{
    (void)state;
    struct json_doc *doc = load_json("jinja/chats.json");
    struct json templates = json_find(json_root(doc), "templates"), entry;
    const char *name, *text;
    int64_t size;
    struct text_buf t = {0};
    for (int64_t i = 0; json_member(templates, i, &name, &entry); i++) {
        json_text(entry, "chat_template", &text, &size);
        for (int64_t n = 0; n < size; n++) {
            struct err err = {""};
            if (render(&t, text, n, NULL, &err) && strncmp(err.msg, "t.jinja:", 8)) fail_msg("%s", err.msg);
        }
    }
    text_free(&t);
    json_free(doc);
}

/* ---- chat templates of a checkpoint */

static struct chat_template *load_template(struct json entry)
{
    struct json_out o = {0};
    struct err err;
    char path[MT_PATH];
    const char *dir = scratch_dir(), *keys[] = {"chat_template", "bos_token", "eos_token"};
    struct chat_template *t;
    json_out_open(&o, NULL, '{');
    for (int i = 0; i < 3; i++) {
        const char *text = NULL;
        if (json_opt_str(entry, keys[i], &text, &err)) fail_msg("%s", err.msg);
        json_out_str(&o, keys[i], text);
    }
    json_out_close(&o, '}');
    snprintf(path, sizeof(path), "%s/tokenizer_config.json", dir);
    assert_int_equal(file_write_atomic(path, o.text, o.size, &err), 0);
    json_out_free(&o);
    if (chat_template_load(&t, dir, NULL, &err)) fail_msg("%s", err.msg);
    assert_non_null(t);
    const struct json roles = json_find(entry, "roles");
    for (int64_t i = 0; json_type(roles) == JSON_ARRAY && i < json_count(roles); i++) {
        const char *token;
        int64_t size;
        assert_int_equal(json_str(json_at(roles, i), &token, &size, &err), 0);
        chat_template_add_stop(t, token, size);
    }
    chat_template_probe(t);
    return t;
}

static void assert_spans(const struct text_buf *t, struct json spans, const char *what)
{
    struct err err;
    if (t->n_spans != json_count(spans))
        fail_msg("%s\nhas %lld spans, not %lld", what, (long long)t->n_spans, (long long)json_count(spans));
    for (int64_t i = 0; i < t->n_spans; i++)
        for (int side = 0; side < 2; side++) {
            int64_t at;
            assert_int_equal(json_i64(json_at(json_at(spans, i), side), 0, INT64_MAX, &at, &err), 0);
            if (t->spans[i][side] != at)
                fail_msg("%s\nspan %lld: %lld, not %lld", what, (long long)i, (long long)t->spans[i][side],
                         (long long)at);
        }
}

static void check_ids(const struct tokenizer *tok, const struct text_buf *t, struct json ids)
{
    struct token_list list = {0};
    struct err err;
    assert_int_equal(tokenizer_encode(tok, t->text, t->size, true, &list, &err), 0);
    assert_int_equal(list.count, json_count(ids));
    for (int64_t i = 0; i < list.count; i++) {
        int64_t id;
        assert_int_equal(json_i64(json_at(ids, i), 0, INT64_MAX, &id, &err), 0);
        assert_int_equal(list.ids[i], id);
    }
    token_list_free(&list);
}

static void check_samples(const struct chat_template *t, struct json c)
{
    struct json samples = json_find(c, "samples"), marked = json_find(c, "generation"), row = json_find(c, "row");
    const struct chat_options opt = {0};
    struct chat_samples found = {0};
    struct err err = {""};
    int rc = chat_samples_make(&found, t, row, LOSS_ASSISTANT, false, &opt, &err);
    if (json_has(c, "samples_error")) {
        assert_int_equal(rc, -1);
    } else if (json_type(marked) == JSON_ARRAY) { /* all answers carry loss; other settings are in what_carries_loss */
        if (rc) fail_msg("%s", err.msg);
        if (json_count(marked) == found.items[0].n_spans) assert_spans(&found.items[0], marked, found.items[0].text);
    } else {
        if (rc) fail_msg("%s", err.msg);
        assert_int_equal(found.count, json_count(samples));
        for (int64_t i = 0; i < found.count; i++) {
            const char *text;
            int64_t size;
            json_text(json_at(samples, i), "text", &text, &size);
            assert_text(&found.items[i], text, size, "a sample");
            assert_spans(&found.items[i], json_find(json_at(samples, i), "spans"), text);
        }
    }
    chat_samples_free(&found);
}

static void chat_case(const struct chat_template *t, const struct tokenizer *tok, struct json c)
{
    struct text_buf text = {0};
    struct err err = {""};
    const struct chat_options plain = {0}, prompt = {.generation_prompt = true};
    const char *expected;
    int64_t size;
    int rc = chat_template_render(&text, t, json_find(c, "row"), &plain, &err);
    if (json_has(c, "error")) {
        assert_int_equal(rc, -1);
        text_free(&text);
        return;
    }
    if (rc) fail_msg("%s", err.msg);
    json_text(c, "text", &expected, &size);
    assert_text(&text, expected, size, "text");
    if (json_has(c, "ids")) check_ids(tok, &text, json_find(c, "ids"));
    if (json_has(c, "generation")) assert_spans(&text, json_find(c, "generation"), expected);
    text.size = text.n_spans = 0;
    if (chat_template_render(&text, t, json_find(c, "row"), &prompt, &err)) fail_msg("%s", err.msg);
    json_text(c, "prompt", &expected, &size);
    assert_text(&text, expected, size, "prompt");
    check_samples(t, c);
    text_free(&text);
}

/* Text, ids and spans equal those of transformers' apply_chat_template; samples equal rendered prefixes. */
static void chats(void **state)
{
    (void)state;
    struct err err;
    struct json_doc *doc = load_json("jinja/chats.json");
    struct json cases = json_find(json_root(doc), "cases"), templates = json_find(json_root(doc), "templates"), entry;
    struct tokenizer *tok = tokenizer_load(fixture("../../configs/tiny-gptoss/tokenizer.json"), &err);
    if (!tok) fail_msg("%s", err.msg);
    const char *name, *of;
    int64_t n = 0;
    for (int64_t i = 0; json_member(templates, i, &name, &entry); i++) {
        struct chat_template *t = load_template(entry);
        for (int64_t k = 0; k < json_count(cases); k++) {
            if (json_get_str(json_at(cases, k), "template", &of, &err)) fail_msg("%s", err.msg);
            if (strcmp(of, name)) continue;
            chat_case(t, tok, json_at(cases, k));
            n++;
        }
        chat_template_free(t);
    }
    assert_int_equal(n, json_count(cases));
    assert_true(n > 150);
    tokenizer_free(tok);
    json_free(doc);
}

static const char two_turns[] = "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\", "
                                "\"content\": \"b\"%s}, {\"role\": \"user\", \"content\": \"c\"}, {\"role\": "
                                "\"assistant\", \"content\": \"d\"}]}";

/* The texts of all loss spans, each followed by "|", each sample by "/". */
static void assert_trained(const struct chat_template *t, const char *more, enum loss_on loss, bool whole,
                           const char *expected)
{
    char row[512], got[512] = "";
    struct err err = {""};
    struct chat_samples s = {0};
    const struct chat_options opt = {0};
    snprintf(row, sizeof(row), two_turns, more);
    struct json_doc *doc = json_parse(row, (int64_t)strlen(row), "row", &err);
    assert_non_null(doc);
    if (chat_samples_make(&s, t, json_root(doc), loss, whole, &opt, &err)) fail_msg("%s", err.msg);
    for (int64_t i = 0; i < s.count; i++) {
        for (int64_t k = 0; k < s.items[i].n_spans; k++) {
            int64_t *span = s.items[i].spans[k];
            size_t n = strlen(got);
            snprintf(got + n, sizeof(got) - n, "%.*s|", (int)(span[1] - span[0]), s.items[i].text + span[0]);
        }
        strcat(got, "/");
    }
    assert_string_equal(got, expected);
    chat_samples_free(&s);
    json_free(doc);
}

static void what_carries_loss(void **state)
{
    (void)state;
    struct json_doc *doc = load_json("jinja/chats.json");
    struct json templates = json_find(json_root(doc), "templates");
    struct chat_template *think = load_template(json_find(templates, "chatml")),
                         *marked = load_template(json_find(templates, "chatml marked")),
                         *tulu = load_template(json_find(templates, "tulu")), *gptoss;
    struct err err;
    assert_int_equal(chat_template_load(&gptoss, fixture("../../configs/tiny-gptoss"), NULL, &err), 0);
    assert_trained(think, "", LOSS_ASSISTANT, false,
                   "<think>\n\n</think>\n\nb<|im_end|>|/<think>\n\n</think>\n\nd<|im_end|>|/");
    assert_trained(think, "", LOSS_ASSISTANT, true, "b<|im_end|>|<think>\n\n</think>\n\nd<|im_end|>|/");
    assert_trained(think, "", LOSS_LAST, false, "<think>\n\n</think>\n\nd<|im_end|>|/");
    assert_trained(think, ", \"train\": false", LOSS_ASSISTANT, false, "<think>\n\n</think>\n\nd<|im_end|>|/");
    assert_trained(think, ", \"weight\": 0", LOSS_ASSISTANT, true, "<think>\n\n</think>\n\nd<|im_end|>|/");
    assert_trained(marked, "", LOSS_ASSISTANT, false, "b<|im_end|>\n|<think>\n\n</think>\n\nd<|im_end|>\n|/");
    assert_trained(marked, "", LOSS_LAST, false, "<think>\n\n</think>\n\nd<|im_end|>\n|/");
    assert_trained(marked, ", \"loss_weight\": 0", LOSS_ASSISTANT, false, "<think>\n\n</think>\n\nd<|im_end|>\n|/");
    assert_trained(tulu, "", LOSS_ASSISTANT, false, "b<|endoftext|>|d<|endoftext|>|/");
    assert_trained(tulu, ", \"thinking\": \"x\"", LOSS_LAST, false, "d<|endoftext|>|/");
    assert_trained(
        tulu, "", LOSS_ALL, false,
        "<|endoftext|><|user|>\na\n<|assistant|>\nb<|endoftext|>\n<|user|>\nc\n<|assistant|>\nd<|endoftext|>|/");
    assert_trained(gptoss, "", LOSS_LAST, false, "<|channel|>final<|message|>d<|return|>|/");
    chat_template_free(think);
    chat_template_free(marked);
    chat_template_free(tulu);
    chat_template_free(gptoss);
    json_free(doc);
}

static void write_text(const char *dir, const char *name, const char *text)
{
    char path[MT_PATH];
    struct err err;
    snprintf(path, sizeof(path), "%s/%s", dir, name);
    assert_int_equal(file_write_atomic(path, text, (int64_t)strlen(text), &err), 0);
}

static void assert_rendered(const char *dir, const char *file, const char *row, const char *expected)
{
    struct chat_template *t;
    struct text_buf text = {0};
    struct err err = {""};
    const struct chat_options opt = {0};
    if (chat_template_load(&t, dir, file, &err)) fail_msg("%s", err.msg);
    assert_non_null(t);
    struct json_doc *doc = json_parse(row, (int64_t)strlen(row), "row", &err);
    assert_non_null(doc);
    if (chat_template_render(&text, t, json_root(doc), &opt, &err)) fail_msg("%s", err.msg);
    assert_string_equal(text.text, expected);
    text_free(&text);
    json_free(doc);
    chat_template_free(t);
}

/* chat_template.jinja overrides the key of tokenizer_config.json, data.chat_template overrides both. The key holds a
 * text or a list; special tokens are strings or objects. */
static void places_of_the_template(void **state)
{
    (void)state;
    static const char row[] = "{\"messages\": [], \"tools\": null, \"chat_template_kwargs\": {\"k\": 7}}",
                      tools[] = "{\"messages\": [], \"tools\": \"[{}]\"}";
    const char *dir = scratch_dir();
    struct chat_template *t;
    struct err err = {""};
    assert_int_equal(chat_template_load(&t, dir, "", &err), 0);
    assert_null(t);
    write_text(dir, "tokenizer_config.json", "{\"chat_template\": null}");
    assert_int_equal(chat_template_load(&t, dir, NULL, &err), 0);
    assert_null(t);
    write_text(dir, "tokenizer_config.json",
               "{\"chat_template\": [{\"name\": \"tool_use\", \"template\": \"T{{ tools|length }}\"}, "
               "{\"name\": \"default\", \"template\": \"D{{ k }}{{ eos_token }}{{ tools }}\"}], "
               "\"eos_token\": {\"content\": \"</s>\"}, \"bos_token\": \"<s>\"}");
    assert_rendered(dir, NULL, row, "D7</s>None");
    assert_rendered(dir, NULL, tools, "T1");
    write_text(dir, "chat_template.jinja", "F{{ bos_token }}{{ eos_token }}{{ pad_token }}");
    assert_rendered(dir, NULL, row, "F<s></s>");
    write_text(dir, "mine.jinja", "M{{ messages }}{{ add_generation_prompt }}");
    char mine[MT_PATH];
    snprintf(mine, sizeof(mine), "%s/mine.jinja", dir);
    assert_rendered(dir, mine, row, "M[]False");
    write_text(dir, "mine.jinja", "a\n{% if %}");
    assert_int_equal(chat_template_load(&t, dir, mine, &err), -1);
    assert_non_null(strstr(err.msg, "mine.jinja:2: "));
}

static void assert_refused(const char *dir, const char *json, const char *words)
{
    struct chat_template *t;
    struct err err = {""};
    struct text_buf out = {0};
    struct json_doc *doc = json_parse(json, (int64_t)strlen(json), "row", &err);
    assert_int_equal(chat_template_load(&t, dir, NULL, &err), 0);
    chat_template_probe(t);
    assert_int_equal(chat_template_render(&out, t, json_root(doc), &(struct chat_options){0}, &err), -1);
    if (!strstr(err.msg, words)) fail_msg("%s", err.msg);
    json_free(doc);
    text_free(&out);
    chat_template_free(t);
}

/* A list with "tool_use" and no "default" serves rows with tools, as in transformers. */
static void only_a_template_for_tools(void **state)
{
    (void)state;
    static const char row[] = "{\"messages\": []}", tools[] = "{\"messages\": [], \"tools\": [{}]}";
    const char *dir = scratch_dir();
    struct chat_template *t;
    struct err err = {""};
    write_text(dir, "tokenizer_config.json", "{\"chat_template\": [{\"name\": \"tool_use\", \"template\": \"T\"}]}");
    assert_rendered(dir, NULL, tools, "T");
    assert_refused(dir, row, "only the chat template \"tool_use\"");
    assert_refused(dir, "{\"messages\": [], \"tools\": null}", "none named \"default\"");
    write_text(dir, "tokenizer_config.json", "{\"chat_template\": [{\"name\": \"rag\", \"template\": \"R\"}]}");
    assert_int_equal(chat_template_load(&t, dir, NULL, &err), -1);
    assert_non_null(strstr(err.msg, "has no template named \"default\" or \"tool_use\""));
}

/* An unknown filter is an error of the template; in an `if` or a macro only where it is used, as in jinja2. */
static void unknown_filters(void **state)
{
    (void)state;
    static const char *const always[] = {"{{ 1|nothing }}",
                                         "{% if 1 %}{% endif %}{% for i in [] %}{{ i|nothing }}{% endfor %}",
                                         "{% set a = [1|string|nothing] %}", "{{ (1 if x else 2)|nothing }}"};
    static const char *const at_use[] = {"{% if 0 %}{{ 1|nothing }}{% endif %}", "{{ 1|nothing if x else 2 }}",
                                         "{{ 2 if 1 else 1|nothing }}", "{% macro m() %}{{ 1|nothing }}{% endmacro %}"};
    struct err err = {""};
    for (int i = 0; i < MT_LEN(always); i++) {
        assert_null(jinja_parse(always[i], (int64_t)strlen(always[i]), "t.jinja", &err));
        if (!strstr(err.msg, "t.jinja:1: the filter `nothing` is not supported")) fail_msg("%s", err.msg);
    }
    for (int i = 0; i < MT_LEN(at_use); i++) {
        struct jinja *t = jinja_parse(at_use[i], (int64_t)strlen(at_use[i]), "t.jinja", &err);
        if (!t) fail_msg("%s", err.msg);
        jinja_free(t);
    }
}

/* As in transformers 5: files of templates hide tokenizer_config.json, tool_use is for rows that have tools, and the
 * template of an old processor is the last choice. */
static void additional_templates(void **state)
{
    (void)state;
    static const char row[] = "{\"messages\": []}", none[] = "{\"messages\": [], \"tools\": null}",
                      empty[] = "{\"messages\": [], \"tools\": []}", tools[] = "{\"messages\": [], \"tools\": [{}]}";
    const char *dir = scratch_dir();
    char path[256];
    struct chat_template *t;
    struct err err = {""};
    write_text(dir, "chat_template.json", "{\"chat_template\": \"P\"}");
    assert_rendered(dir, NULL, row, "P");
    assert_int_equal(chat_template_load(&t, dir, NULL, &err), 0);
    assert_string_equal(chat_template_foreign(t), "P");
    chat_template_free(t);
    write_text(dir, "tokenizer_config.json", "{\"chat_template\": \"C\"}");
    assert_rendered(dir, NULL, tools, "C");
    assert_int_equal(chat_template_load(&t, dir, NULL, &err), 0);
    assert_null(chat_template_foreign(t));
    assert_string_equal(chat_template_text(t), "C");
    chat_template_free(t);
    snprintf(path, sizeof(path), "%s/additional_chat_templates", dir);
    assert_int_equal(file_make_dirs(path, &err), 0);
    write_text(path, "rag.jinja", "{{ not parsed");
    assert_rendered(dir, NULL, tools, "C");
    write_text(path, "tool_use.jinja", "T");
    assert_rendered(dir, NULL, tools, "T");
    assert_refused(dir, row, "only the chat template \"tool_use\"");
    write_text(dir, "chat_template.jinja", "F");
    assert_rendered(dir, NULL, row, "F");
    assert_rendered(dir, NULL, none, "F");
    assert_rendered(dir, NULL, empty, "T");
    assert_rendered(dir, NULL, tools, "T");
    snprintf(path, sizeof(path), "%s/mine.jinja", dir);
    write_text(dir, "mine.jinja", "M{{ messages }}");
    assert_rendered(dir, path, tools, "M[]");
    snprintf(path, sizeof(path), "%s/additional_chat_templates", dir);
    write_text(path, "default.jinja", "G");
    assert_rendered(dir, NULL, row, "G");
}

/* As in transformers: special_tokens_map.json gives the special tokens if tokenizer_config.json has no
 * added_tokens_decoder. Special tokens with other names; a template for rows with tools. */
static void special_tokens(void **state)
{
    (void)state;
    static const char row[] = "{\"messages\": []}", tools[] = "{\"messages\": [], \"tools\": [{}]}";
    static const char text[] = "{\"chat_template\": {\"default\": \"{{ bos_token }}{{ boi_token }}{{ image_token }}\", "
                               "\"tool_use\": \"T\"}, \"bos_token\": \"<s>\", \"image_token\": \"<i>\", "
                               "\"audio_token\": null, \"extra_special_tokens\": {\"boi_token\": \"<b>\"}%s}";
    const char *dir = scratch_dir();
    char config[512];
    snprintf(config, sizeof(config), text, "");
    write_text(dir, "tokenizer_config.json", config);
    assert_rendered(dir, NULL, row, "<s><b><i>");
    assert_rendered(dir, NULL, tools, "T");
    write_text(dir, "special_tokens_map.json", "{\"bos_token\": {\"content\": \"<m>\"}}");
    assert_rendered(dir, NULL, row, "<m><b><i>");
    snprintf(config, sizeof(config), text, ", \"added_tokens_decoder\": {}");
    write_text(dir, "tokenizer_config.json", config);
    assert_rendered(dir, NULL, row, "<s><b><i>");
}

/* Variables that a template never reads would have no effect. */
static void variables_that_are_read(void **state)
{
    (void)state;
    static const char text[] =
        "{% macro put(x, y=shade) %}{{ x }}{% endmacro %}{{ bos_token }}{% if not thinking is defined %}"
        "{% set thinking = false %}{% endif %}{% set ns = namespace(a=1) %}{% set ns.a = effort | default('low') %}"
        "{% for m in messages if m.role != skip %}{{ put(m['content'] + range(3)|string) }}{{ loop.index }}"
        "{{ m.kind if [{'a': deep}] }}{% endfor %}{{ tools }}";
    static const struct {
        const char *kwargs, *says;
    } rows[] = {{"{\"thinking\": true, \"effort\": \"x\", \"shade\": 1, \"skip\": 1, \"deep\": 1}", NULL},
                {"{\"bos_token\": \"<b>\"}", NULL},
                {"{}", NULL},
                {"{\"kind\": 1}", "does not read the variable \"kind\"; it reads shade, thinking, effort, skip, deep"},
                {"{\"messages\": []}", "\"messages\" comes from the conversation; remove it"},
                {"{\"enable_thinking\": true}", "does not read the variable \"enable_thinking\"; it reads shade, "}};
    const char *dir = scratch_dir();
    struct chat_template *t;
    struct err err = {""};
    write_text(dir, "chat_template.jinja", text);
    if (chat_template_load(&t, dir, NULL, &err)) fail_msg("%s", err.msg);
    for (int i = 0; i < MT_LEN(rows); i++) {
        const int rc = chat_template_set_kwargs(t, rows[i].kwargs, &err);
        if (rows[i].says ? !rc || !strstr(err.msg, rows[i].says) : rc) fail_msg("%s: %s", rows[i].kwargs, err.msg);
    }
    chat_template_free(t);
    write_text(dir, "chat_template.jinja", "{% for m in messages %}{{ m }}{% endfor %}");
    if (chat_template_load(&t, dir, NULL, &err)) fail_msg("%s", err.msg);
    assert_int_equal(chat_template_set_kwargs(t, "{\"thinking\": true}", &err), -1);
    assert_non_null(strstr(err.msg, "it reads none"));
    chat_template_free(t);
}

int test_jinja(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(variables_that_are_read),
        cmocka_unit_test(constructs),
        cmocka_unit_test(refusals),
        cmocka_unit_test(endless_templates),
        cmocka_unit_test(deep_templates),
        cmocka_unit_test(truncation),
        cmocka_unit_test(chats),
        cmocka_unit_test(what_carries_loss),
        cmocka_unit_test(places_of_the_template),
        cmocka_unit_test(additional_templates),
        cmocka_unit_test(only_a_template_for_tools),
        cmocka_unit_test(unknown_filters),
        cmocka_unit_test(special_tokens),
        cmocka_unit_test(work_by_size),
        cmocka_unit_test(wide_numbers),
        cmocka_unit_test(memory_and_nesting),
    };
    return cmocka_run_group_tests_name("jinja", tests, NULL, NULL);
}
