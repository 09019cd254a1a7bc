/* test_tokens.c - runs `moetrain tokens`: conversations, batches, raw text; escaping of text in the page. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "data/file/file.h"
#include "data/json/json.h"
#include "tests/process.h"

#define TOKENIZER "../../configs/tiny-gptoss"

static const char *write_text(const char *dir, const char *name, const char *text)
{
    static char path[4][MT_PATH];
    static int next;
    char *p = path[next++ % 4];
    struct err err;
    snprintf(p, MT_PATH, "%s/%s", dir, name);
    assert_int_equal(file_write_atomic(p, text, (int64_t)strlen(text), &err), 0);
    return p;
}

static void messages(void **state)
{
    (void)state;
    const char *dir = scratch_dir(), *model = fixture(TOKENIZER);
    const char *list = write_text(dir, "m.json",
                                  "[{\"role\": \"user\", \"content\": \"\xc3\xa9?\"},\n{\"role\": "
                                  "\"assistant\", \"content\": \"a\"}]");
    assert_int_equal(RUN("tokens", "--checkpoint", model, "--messages", list), 0);
    struct err err;
    struct json_doc *doc = json_parse(said.out, (int64_t)strlen(said.out), "tokens", &err);
    if (!doc) fail_msg("%s", err.msg);
    const char *text;
    int64_t begin, end;
    struct json root = json_root(doc), spans = json_find(root, "loss_spans");
    assert_int_equal(json_get_str(root, "text", &text, &err), 0);
    assert_int_equal(json_count(spans), 1);
    assert_int_equal(json_i64(json_at(json_at(spans, 0), 0), 0, 1000, &begin, &err), 0);
    assert_int_equal(json_i64(json_at(json_at(spans, 0), 1), 0, 1000, &end, &err), 0);
    assert_string_equal(
        text + begin + 1,
        "<|channel|>final<|message|>a<|return|>"); /* columns count characters, one of which has two bytes */
    assert_int_equal(end + 1, (int64_t)strlen(text));
    assert_false(json_has(root, "samples"));
    json_free(doc);

    const char *rows = write_text(dir, "m.jsonl",
                                  "{\"messages\": [{\"role\": \"user\", \"content\": \"q\"}]}\n\n"
                                  "{\"messages\": [{\"role\": \"tool\", \"content\": \"q\"}]}\n");
    assert_int_equal(RUN("tokens", "--checkpoint", model, "--messages", rows, "--json"), 1);
    assert_says(said.err, "m.jsonl:3: ");
    assert_string_equal(said.out, "");

    const char *mine = write_text(dir, "t.jinja",
                                  "{% for m in messages %}{{ m.role }}{% generation %}{{ m.content }}"
                                  "{% endgeneration %}{% endfor %}");
    assert_int_equal(RUN("tokens", "--checkpoint", model, "--messages", list, "--json", "--template", mine), 0);
    assert_says(said.out, "\"text\": \"user\xc3\xa9?assistanta\"");
    assert_says(said.out, "\"loss_spans\": [[4, 6], [15, 16]]");
}

/* `tokens` also reads JSONL from a pipe, plain or gzip, with the result of the same file; training data must be a file.
 */
static void messages_from_a_pipe(void **state)
{
    (void)state;
    static const char *const scripts[] = {"cat %s | \"$@\"", "gzip < %s | \"$@\""};
    const char *dir = scratch_dir(), *model = fixture(TOKENIZER);
    const char *rows = write_text(dir, "m.jsonl",
                                  "\xef\xbb\xbf{\"messages\": [{\"role\": \"user\", \"content\": \"q\"}]}\r\n \r\n"
                                  "[{\"role\": \"user\", \"content\": \"r\"}]");
    const char *const words[] = {"tokens", "--checkpoint", model, "--messages", "/dev/stdin", NULL};
    assert_int_equal(RUN("tokens", "--checkpoint", model, "--messages", rows), 0);
    char *expected = mem_strdup(said.out), script[MT_PATH + 32];
    assert_says(expected, "<|message|>r<|end|>");
    for (int i = 0; i < MT_LEN(scripts); i++) {
        snprintf(script, sizeof(script), scripts[i], rows);
        if (process_finish(dir, process_start_shell(dir, script, words))) fail_msg("%s: %s", script, said.err);
        assert_string_equal(said.out, expected);
    }
    mem_free(expected);
    write_text(dir, "m.jsonl", "{\"messages\": [{\"role\": \"user\", \"content\": \"q\"}]}\n\n{");
    snprintf(script, sizeof(script), scripts[0], rows);
    assert_int_equal(process_finish(dir, process_start_shell(dir, script, words)), 1);
    assert_says(said.err, "/dev/stdin:3: not valid JSON");
    const char *const training[] = {"tokens", process_config(""), "--set", "data.train=/dev/stdin", NULL};
    assert_int_equal(process_finish(dir, process_start_shell(dir, script, training)), 1);
    assert_says(said.err, "/dev/stdin: a pipe, not a regular file: write its content to a file, and name that");
}

static void batches(void **state)
{
    (void)state;
    const char *config = process_config("[data]\n");
    assert_int_equal(RUN("tokens", config), 0);
    assert_says(said.out, "micro-batch 0 of ");
    assert_says(said.out, "---- document 0: ");
    assert_says(said.out, "[[");
    assert_null(strchr(said.out, 27)); /* no colours into a file */
    assert_int_equal(RUN("tokens", config, "--html"), 0);
    assert_says(said.out, "<!doctype html>");
    assert_says(said.out, "<span class=t");
    assert_int_equal(RUN("tokens", config, "--json", "--row", "1"), 0);
    assert_says(said.out, "{\"row\": 1, ");
    assert_int_equal(RUN("tokens", config, "--row", "99999"), 1);
    assert_says(said.err, "the first epoch has ");
    char dir[MT_PATH + 32];
    snprintf(dir, sizeof(dir), "output.dir=%s/below", config); /* a path below a file, which cannot be created */
    assert_int_equal(RUN("tokens", config, "--set", dir), 0);
    assert_says(said.out, "micro-batch 0 of ");
    assert_says(said.err, ": not a directory");
    assert_int_equal(RUN("tokens", config, "--set", "data.loss_on=nothing"), 1);
    assert_says(said.err, "loss_on");
}

/* Rollouts are documents, not pairs; here an odd number of them. */
static void rollouts(void **state)
{
    (void)state;
    char set[MT_PATH + 32], text[512] = "";
    for (int i = 0; i < 3; i++)
        strcat(text, "{\"prompt_ids\": [5, 6], \"completion_ids\": [7, 8], \"reward\": 1, \"group\": 0, "
                     "\"logprobs\": [-1, -1]}\n");
    snprintf(set, sizeof(set), "data.train=%s", write_text(scratch_dir(), "rollouts.jsonl", text));
    if (RUN("tokens", process_config("[objective]\nkind = grpo\n"), "--set", set, "--set", "data.eval=", "--set",
            "data.format=rollouts", "--set", "objective.num_generations=3", "--set", "train.micro_batch=3", "--set",
            "train.grad_accum=1"))
        fail_msg("%s", said.err);
    assert_says(said.out, "---- document 2: ");
    assert_null(strstr(said.out, "chosen"));
}

/* The page shows conversations that training refuses, with the reason. A conversation that is trained only as split
 * samples has no loss spans as a whole. */
static void refused_conversations(void **state)
{
    (void)state;
    const char *dir = scratch_dir(), *model = fixture(TOKENIZER);
    const char *list = write_text(dir, "m.json",
                                  "[{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\", \"content\": "
                                  "\"b\"}, {\"role\": \"user\", \"content\": \"c\"}, {\"role\": \"assistant\", "
                                  "\"content\": \"d\"}]");
    const char *other = write_text(dir, "other.jinja",
                                   "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
                                   "{% if add_generation_prompt %}<|model|>{% endif %}");
    assert_int_equal(RUN("tokens", "--checkpoint", model, "--messages", list, "--json", "--template", other), 0);
    assert_says(said.out, "{\"text\": \"<|user|>a<|assistant|>b<|user|>c<|assistant|>d\", \"ids\": [");
    assert_says(said.out, "\"loss_spans\": null, \"error\": \"");
    assert_says(said.out, "m.json: key `messages[3]`: the generation prompt does not match the beginning");
    assert_null(strstr(said.out, "samples"));
    assert_says(said.err, "training skips this conversation: ");
    const char *last =
        write_text(dir, "last.jinja",
                   "{% for m in messages %}<|{{ m.role }}|>{{ m.content if loop.last or m.role == 'user' "
                   "else '' }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}");
    assert_int_equal(RUN("tokens", "--checkpoint", model, "--messages", list, "--json", "--template", last), 0);
    assert_says(said.out, "\"text\": \"<|user|>a<|assistant|><|user|>c<|assistant|>d\", \"ids\": [");
    assert_says(said.out, "\"loss_spans\": null, \"whole_error\": \"");
    assert_says(said.out, "\"samples\": [{\"text\": \"<|user|>a<|assistant|>b\", ");
    assert_null(strstr(said.out, "\"error\""));
}

/* Held-out documents are in no micro-batch. */
static void held_out(void **state)
{
    (void)state;
    char text[4096] = "", set[MT_PATH + 32];
    for (int i = 0; i < 60; i++) strcat(text, "{\"text\": \"abcdefgh\"}\n");
    snprintf(set, sizeof(set), "data.train=%s", write_text(scratch_dir(), "rows.jsonl", text));
    const char *config = process_config("");
    for (int half = 0; half < 2; half++) {
        assert_int_equal(RUN("tokens", config, "--json", "--set", set, "--set", "data.packing=false", "--set",
                             "train.micro_batch=1", "--set", "data.eval=", "--set",
                             half ? "data.eval_split=0.5" : "data.eval_split=0"),
                         0);
        assert_says(said.out, half ? "\"rows\": 30, " : "\"rows\": 60, ");
    }
}

/* A checkpoint without weights: a parity case with this list of eos_token_id. Returns "model.path=DIR". */
static const char *checkpoint_with_eos(const char *ids)
{
    static const char *const files[] = {"config.json", "tokenizer.json", "tokenizer_config.json"};
    static char set[MT_PATH + 32];
    const char *dir = scratch_dir();
    char text[128];
    for (int i = 0; i < MT_LEN(files); i++) {
        char from[MT_PATH + 32], to[MT_PATH + 32];
        snprintf(from, sizeof(from), "%s/%s", fixture("parity/glm4"), files[i]);
        snprintf(to, sizeof(to), "%s/%s", dir, files[i]);
        assert_int_equal(symlink(from, to), 0);
    }
    snprintf(text, sizeof(text), "{\"eos_token_id\": %s}", ids);
    write_text(dir, "generation_config.json", text);
    snprintf(set, sizeof(set), "model.path=%s", dir);
    return set;
}

/* If only the next role's token ends the answers of a template, moetrain appends this token and says so. When
 * eos_token_id does not list it, moetrain warns. */
static void appended_ends(void **state)
{
    (void)state;
    char template[MT_PATH + 32], rows[MT_PATH + 32];
    const char *dir = scratch_dir(), *config = process_config("");
    snprintf(template, sizeof(template), "data.chat_template=%s",
             write_text(dir, "t.jinja",
                        "{% set of = {'user': '<|start|>', 'tool': '<|call|>', 'assistant': '<|message|>'} %}"
                        "{% for m in messages %}{{ of[m.role] }}{{ m.content }}{% for c in m.tool_calls or [] %}"
                        "{{ c.function.name }}{{ c.function.arguments }}{% endfor %}"
                        "{% endfor %}{% if add_generation_prompt %}<|message|>{% endif %}"));
    snprintf(
        rows, sizeof(rows), "data.train=%s",
        write_text(dir, "rows.jsonl",
                   "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}, "
                   "{\"role\": \"assistant\", \"content\": \"b\"}]}\n"
                   "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\", "
                   "\"content\": \"c\", \"tool_calls\": [{\"function\": {\"name\": \"9\", \"arguments\": {}}}]}]}\n"));
#define TOKENS(ids)                                                                                                    \
    RUN("tokens", config, "--set", checkpoint_with_eos(ids), "--set", template, "--set", rows, "--set",                \
        "data.eval=", "--set", "data.packing=false", "--set", "train.micro_batch=2", "--set", "train.grad_accum=1")
    assert_int_equal(TOKENS("[1020, 1023]"), 0);
    assert_says(said.err, "rows.jsonl: the next role's token ends an answer, so moetrain appends it, with loss, to the "
                          "last answer of 2 texts: <|start|>, after a tool call <|call|>");
    assert_says(said.out, "<|start|>|a|<|message|>|[[b|<|start|>|]]");
    assert_says(said.out, "<|start|>|a|<|message|>|[[c|9|{|}|<|call|>|]]");
    assert_int_equal(TOKENS("[1020]"), 0); /* a tool call stays without an end */
    assert_says(said.err, "the last answer of 1 text: <|start|>\n");
    assert_int_equal(TOKENS("1017"), 0);
    assert_says(said.err, "the chat template writes no token after the last answer of 2 texts");
    assert_null(strstr(said.err, "appends"));
    assert_null(strstr(said.err, "empty reasoning block"));
    snprintf(
        template, sizeof(template), "data.chat_template=%s",
        write_text(dir, "u.jinja",
                   "{% for m in messages %}{{ m.role }}: {{ '<think></think>' if m.role == 'assistant' }}"
                   "{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0].function }}{% endif %}<|return|>{% endfor %}"
                   "{% if add_generation_prompt %}assistant: {% endif %}"));
    assert_int_equal(TOKENS("1017"), 0);
    assert_says(said.err, "2 answers without reasoning: the empty reasoning block before the text has loss");
#undef TOKENS
}

/* A template whose answers end with a special token that does not end generation: a warning, and what to do. */
static void other_ends(void **state)
{
    (void)state;
    char template[MT_PATH + 32], rows[MT_PATH + 32];
    const char *dir = scratch_dir(), *config = process_config("");
    snprintf(rows, sizeof(rows), "data.train=%s",
             write_text(dir, "rows.jsonl",
                        "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}, "
                        "{\"role\": \"assistant\", \"content\": \"b\"}]}\n"));
    snprintf(template, sizeof(template), "data.chat_template=%s",
             write_text(dir, "t.jinja",
                        "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }} <|end|>\n{% endfor %}"
                        "{% if add_generation_prompt %}<|start|>assistant<|message|>{% endif %}"));
    static const char *const ids[] = {"[1017]", "[1017, 1021]", "1021"};
    for (int i = 0; i < MT_LEN(ids); i++) {
        assert_int_equal(RUN("tokens", config, "--set", checkpoint_with_eos(ids[i]), "--set", template, "--set", rows,
                             "--set", "data.eval=", "--set", "train.grad_accum=1"),
                         0);
        const bool warns = strstr(said.err, "the chat template ends answers with <|end|> (id 1021), which is not in "
                                            "eos_token_id") != NULL;
        if (warns != (i == 0)) fail_msg("%s: %s", ids[i], said.err);
    }
}

static void text_is_escaped(void **state)
{
    (void)state;
    const char *rows = write_text(scratch_dir(), "rows.jsonl", "{\"text\": \"<b>&\\u001b[31m\\u0000\\u0085\"}\n");
    char set[MT_PATH + 32];
    snprintf(set, sizeof(set), "data.train=%s", rows);
    const char *config = process_config("");
    assert_int_equal(RUN("tokens", config, "--set", set, "--html"), 0);
    assert_null(strstr(said.out, "<b>"));
    assert_null(strchr(said.out, 27));
    assert_int_equal(RUN("tokens", config, "--set", set), 0);
    assert_null(strchr(said.out, 27));
    assert_says(said.out, "<0x1B>");
    assert_says(said.out, "<0x00>");
    assert_says(said.out, "micro-batch 0 of 1: 1 document, ");
    assert_int_equal(RUN("tokens", config, "--set", set, "--row", "1"), 1);
    assert_says(said.err, "the first epoch has 1 micro-batch, counted from 0");
}

static void raw_text(void **state)
{
    (void)state;
    char command[3 * MT_PATH], out[256] = "";
    snprintf(command, sizeof(command), "printf '<|start|>hi' | %s tokens --tokenizer %s/tokenizer.json",
             moetrain_binary(), fixture(TOKENIZER));
    for (int special = 1; special >= 0; special--) {
        if (!special) strcat(command, " --no-special");
        FILE *pipe = popen(command, "r");
        assert_non_null(pipe);
        assert_non_null(fgets(out, sizeof(out), pipe));
        assert_int_equal(pclose(pipe), 0);
        assert_string_equal(out, special ? "{\"ids\": [4092, 71, 72]}\n"
                                         : "{\"ids\": [27, 91, 303, 448, 91, 29, 71, 72]}\n");
    }
}

static void wrong_arguments(void **state)
{
    (void)state;
    assert_int_equal(RUN("tokens", "--help"), 0);
    assert_says(said.out, "loss_spans");
    assert_int_equal(RUN("tokens"), 2);
    assert_int_equal(RUN("tokens", "--frobnicate"), 2);
    assert_says(said.err, "--frobnicate");
    assert_int_equal(RUN("tokens", "a.ini", "--row", "-1"), 2);
    assert_int_equal(RUN("tokens", "--tokenizer", "/nowhere", "--json"), 1);
    assert_says(said.err, "/nowhere");
}

int test_tokens(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(messages),
        cmocka_unit_test(batches),
        cmocka_unit_test(rollouts),
        cmocka_unit_test(text_is_escaped),
        cmocka_unit_test(raw_text),
        cmocka_unit_test(wrong_arguments),
        cmocka_unit_test(refused_conversations),
        cmocka_unit_test(held_out),
        cmocka_unit_test(appended_ends),
        cmocka_unit_test(other_ends),
        cmocka_unit_test(messages_from_a_pipe),
    };
    return cmocka_run_group_tests_name("tokens", tests, NULL, NULL);
}
