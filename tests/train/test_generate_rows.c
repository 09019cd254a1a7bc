/* test_generate_rows.c - `generate --input`: rows in every form, answers in their order, rollouts, an output that is
 * continued, what is refused; `check --sampler`. */
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "data/file/file.h"
#include "data/json/json.h"
#include "tests/op_check.h"
#include "tests/process.h"
#include "train/generate/later_rows.h"

static char in[MT_PATH], out[MT_PATH], text[1 << 18];

static void write_rows(const char *rows)
{
    struct err err;
    snprintf(in, MT_PATH, "%s/in.jsonl", scratch_dir());
    snprintf(out, MT_PATH, "%.*s/out.jsonl", (int)(strrchr(in, '/') - in), in);
    assert_int_equal(file_write_atomic(in, rows, (int64_t)strlen(rows), &err), 0);
}

/* Replaces the input rows and keeps the output. */
static void change_rows(const char *rows)
{
    struct err err;
    assert_int_equal(file_write_atomic(in, rows, (int64_t)strlen(rows), &err), 0);
}

/* Line i of the output. */
static struct json_doc *line_of(int i)
{
    struct err err;
    process_read(out, text, sizeof(text));
    char *at = text, *end;
    while (i-- && at) at = (at = strchr(at, '\n')) ? at + 1 : NULL;
    assert_true(at && (end = strchr(at, '\n')));
    struct json_doc *doc = json_parse(at, strchr(at, '\n') - at, "answer", &err);
    if (!doc) fail_msg("%s", err.msg);
    return doc;
}

static int n_lines(void)
{
    int n = 0;
    process_read(out, text, sizeof(text));
    for (const char *p = text; (p = strchr(p, '\n')); p++) n++;
    return n;
}

static const char *string_of(struct json j, const char *key)
{
    static char value[4][4096];
    static int next;
    const char *s;
    struct err err;
    if (json_get_str(j, key, &s, &err)) fail_msg("%s", err.msg);
    char *copy = value[next++ % 4];
    snprintf(copy, sizeof(value[0]), "%s", s);
    return copy;
}

static const char rows[] =
    "{\"prompt\": \"The cat\"}\n"
    "\n"
    "{\"prompt_ids\": [5, 6, 7], \"id\": \"b\", \"n\": 3, \"temperature\": 1, \"max_tokens\": 9, \"top_logprobs\": 2}\n"
    "{\"prompt\": \"One two three four five six\", \"id\": 7, \"temperature\": 0.8, \"top_p\": 0.9, \"seed\": 4, "
    "\"extra\": 1}\n"
    "{\"prompt\": \"The house\", \"prompt_logprobs\": true, \"max_tokens\": 0, \"answer\": 1, \"temprature\": 1}\n"
    "{\"prompt\": \"A\", \"stop\": [\"e\"], \"max_tokens\": 40, \"temprature\": 1}\n";

static void answers(void **state)
{
    (void)state;
    const char *config = process_config("");
    char want[4096];
    write_rows(rows);
    assert_int_equal(RUN("generate", config, "--base", "--prompt", "The cat", "--tokens", "6", "--json"), 0);
    snprintf(want, sizeof(want), "%s", said.out);
    if (RUN("generate", config, "--base", "--input", in, "--output", out, "--tokens", "6")) fail_msg("%s", said.err);
    assert_says(said.err, "in.jsonl:4: extra: no key of generate, not used");
    assert_says(said.err, "in.jsonl:5: temprature: no key of generate, not used: did you mean temperature?");
    assert_null(strstr(said.err, "in.jsonl:6: ")); /* said once */
    assert_says(said.err, "in.jsonl:5: answer: no key of generate, not used");
    assert_says(said.err, "7 of 7 samples, ");
    assert_says(said.err, "filters kept at least ");
    assert_int_equal(n_lines(), 7);
    struct json_doc *doc = line_of(0);
    struct json a = json_root(doc);
    char quoted[4200];
    snprintf(quoted, sizeof(quoted), "\"text\": \"%s\"", string_of(a, "text"));
    assert_says(want, quoted); /* the text of one prompt */
    assert_int_equal(json_count(json_find(a, "logprobs")), json_count(json_find(a, "ids")));
    assert_false(json_has(a, "sampling_logprobs") || json_has(a, "top_logprobs") || json_has(a, "prompt_logprobs"));
    json_free(doc);
    for (int i = 1; i < 4; i++) {
        struct err err;
        int64_t sample;
        doc = line_of(i);
        a = json_root(doc);
        assert_string_equal(string_of(a, "id"), "b");
        assert_int_equal(json_get_i64(a, "sample", 0, 9, &sample, &err), 0);
        assert_int_equal(sample, i - 1);
        assert_int_equal(json_count(json_find(a, "prompt_ids")), 3);
        assert_int_equal(json_count(json_at(json_find(a, "top_logprobs"), 0)), 2);
        json_free(doc);
    }
    doc = line_of(4);
    assert_int_equal(json_count(json_find(json_root(doc), "sampling_logprobs")),
                     json_count(json_find(json_root(doc), "ids")));
    json_free(doc);
    doc = line_of(5);
    a = json_root(doc);
    assert_int_equal(json_count(json_find(a, "ids")), 0);
    assert_int_equal(json_count(json_find(a, "prompt_logprobs")), json_count(json_find(a, "prompt_ids")));
    assert_int_equal(json_type(json_at(json_find(a, "prompt_logprobs"), 0)), JSON_NULL);
    json_free(doc);
    doc = line_of(6);
    a = json_root(doc);
    if (json_type(json_find(a, "stop")) == JSON_STRING && !strcmp(string_of(a, "stop"), "e"))
        assert_null(strchr(string_of(a, "text"), 'e'));
    json_free(doc);
}

/* A file cut off at any byte is continued to the same bytes; one of other rows is refused. */
static void continues(void **state)
{
    (void)state;
    const char *config = process_config("");
    struct err err;
    int64_t size;
    write_rows(rows);
#define ALL "generate", config, "--base", "--input", in, "--output", out, "--tokens", "6"
    assert_int_equal(RUN(ALL), 0);
    char *whole = file_read(out, 1 << 20, &size, &err);
    assert_non_null(whole);
    for (int i = 0; i < 4; i++) {
        const int64_t cut = i * (size - 1) / 3;
        assert_int_equal(truncate(out, cut), 0);
        if (RUN(ALL)) fail_msg("%s", said.err);
        process_read(out, text, sizeof(text));
        assert_string_equal(text, whole);
    }
    assert_int_equal(RUN(ALL), 0);
    assert_says(said.err, "has all 5 rows");
    change_rows("{\"prompt\": \"The dog\"}\n");
    assert_int_equal(RUN(ALL), 1);
    assert_says(said.err, "out.jsonl:1 is not sample 0 of row 0");
    mem_free(whole);
}

/* The record of an output: another model, adapter, option or row is refused, and the output keeps its bytes. */
static void continues_the_same_alone(void **state)
{
    (void)state;
    static const char *const other[][3] = {{"--seed", "3", "--seed: 0 -> 3"},
                                           {"--samples", "2", "--samples: 1 -> 2"},
                                           {"--temperature", "0.7", "--temperature: 0 -> 0.7"},
                                           {"--top-k", "3", "--top-k: 0 -> 3"},
                                           {"--set", "data.chat_date=2024-01-01", "data.chat_date: "},
                                           {"--set", "train.dtype=bf16", "activations: fp32 -> bf16"}};
    const char *config = process_trained("train.steps=1");
    char model[MT_PATH], record[MT_PATH + 16], first[1 << 12];
    struct err err;
    write_rows(rows);
    snprintf(record, sizeof(record), "%s.run.json", out);
    snprintf(model, sizeof(model), "model.path=%s", fixture("parity/qwen3"));
    assert_int_equal(RUN(ALL), 0);
    process_read(record, first, sizeof(first));
    assert_says(first, "\"--seed\": \"0\"");
    assert_says(first, "\"adapter\": null");
    assert_int_equal(truncate(out, 100 + file_size(out) / 2), 0);
    char *begun = mem_strdup((process_read(out, text, sizeof(text)), text));
    for (int i = 0; i < MT_LEN(other); i++) {
        assert_int_equal(RUN(ALL, other[i][0], other[i][1]), 1);
        assert_says(said.err, other[i][2]);
        assert_says(said.err, "name another --output");
    }
    assert_int_equal(RUN("generate", config, "--input", in, "--output", out, "--tokens", "6"), 1);
    assert_says(said.err, "adapter files: none -> ");
    assert_int_equal(RUN(ALL, "--set", model), 1);
    assert_says(said.err, "model weights: ");
    process_read(in, text, sizeof(text));
    memcpy(strstr(text, "\"stop\": [\"e\"]"), "\"stop\": [\"i\"]", 13); /* in a row without an answer */
    change_rows(text);
    assert_int_equal(RUN(ALL), 1);
    assert_says(said.err, "there are changes in the rows of ");
    change_rows("{\"prompt\": \"The cat\"}\n");
    assert_int_equal(RUN(ALL), 1);
    process_read(out, text, sizeof(text));
    assert_string_equal(text, begun);
    mem_free(begun);
    change_rows(rows);
    assert_int_equal(unlink(record), 0);
    assert_int_equal(RUN(ALL), 1);
    assert_says(said.err, "out.jsonl.run.json is missing");
    assert_int_equal(file_write_atomic(record, "{}", 2, &err), 0);
    assert_int_equal(RUN(ALL), 1);
    assert_says(said.err, "was not written by generate");
    assert_int_equal(file_write_atomic(record, first, (int64_t)strlen(first), &err), 0);
    snprintf(text, sizeof(text), "%s{\"prompt\": \"A dog\"}\n", rows); /* further rows */
    change_rows(text);
    if (RUN(ALL)) fail_msg("%s", said.err);
    assert_int_equal(n_lines(), 8);
    assert_int_equal(RUN(ALL), 0);
    assert_says(said.err, "has all 6 rows");
}

/* A file that generate did not write keeps its bytes. */
static void keeps_foreign_files(void **state)
{
    (void)state;
    const char *config = process_config("");
    static const struct {
        const char *text, *error;
    } foreign[] = {{"my notes", "out.jsonl:1: not an answer"},
                   {"my notes\n", "out.jsonl:1: not an answer"},
                   {"\x1f\x8b\x08", "compressed"},
                   {"{\"id\": null}\r\n", "CR LF"}};
    struct err err;
    write_rows(rows);
    for (int i = 0; i < MT_LEN(foreign); i++) {
        assert_int_equal(file_write_atomic(out, foreign[i].text, (int64_t)strlen(foreign[i].text), &err), 0);
        assert_int_equal(RUN(ALL), 1);
        assert_says(said.err, foreign[i].error);
        process_read(out, text, sizeof(text));
        assert_string_equal(text, foreign[i].text);
    }
    assert_int_equal(RUN("generate", config, "--base", "--input", in, "--output", in), 1);
    assert_says(said.err, "is the file of --input");
    process_read(in, text, sizeof(text));
    assert_string_equal(text, rows);
}

static int64_t number_at(struct json list, int64_t i)
{
    struct err err;
    int64_t v;
    if (json_i64(json_at(list, i), 0, INT32_MAX, &v, &err)) fail_msg("%s", err.msg);
    return v;
}

/* Decodes the base64. */
enum { N_LAYER = 2, TOP_K = 2, N_EXP = 8 }; /* of case_a */
static void check_routing(struct json row)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const struct json routing = json_find(row, "routing"), shape = json_find(routing, "shape"),
                      layers = json_find(routing, "layers");
    const int64_t n = json_count(json_find(row, "prompt_ids")) + json_count(json_find(row, "completion_ids")) - 1;
    const char *data = string_of(routing, "data");
    assert_string_equal(string_of(routing, "dtype"), "uint16");
    const int64_t n_layer = number_at(shape, 1), k = number_at(shape, 2), bytes = 2 * n * n_layer * k;
    assert_true(json_count(shape) == 3 && number_at(shape, 0) == n && n_layer == N_LAYER && k == TOP_K);
    for (int64_t l = 0; l < n_layer; l++) assert_int_equal(number_at(layers, l), l);
    assert_int_equal(json_count(layers), n_layer);
    assert_int_equal(strlen(data), (bytes + 2) / 3 * 4);
    int64_t byte[2 * TOP_K];
    for (int64_t i = 0; i < bytes; i++) {
        uint32_t v = 0;
        for (int c = 0; c < 4; c++) {
            const char *d = strchr(digits, data[i / 3 * 4 + c]);
            v = v << 6 | (d && *d ? (uint32_t)(d - digits) : 0);
        }
        byte[i % (2 * k)] = v >> (16 - 8 * (i % 3)) & 255;
        if (i % (2 * k) < 2 * k - 1) continue;
        for (int64_t j = 0; j < k; j++) {
            assert_true(byte[2 * j] < N_EXP && byte[2 * j + 1] == 0);
            if (j) assert_true(byte[2 * j] > byte[2 * j - 2]);
        }
    }
}

static void rollouts(void **state)
{
    (void)state;
    const char *config = process_config("");
    write_rows("{\"prompt\": \"The cat\"}\n{\"prompt\": \"A\", \"max_tokens\": 3}\n");
    if (RUN("generate", config, "--base", "--input", in, "--output", out, "--tokens", "5", "--samples", "2",
            "--temperature", "1", "--format", "rollouts", "--routing"))
        fail_msg("%s", said.err);
    assert_int_equal(n_lines(), 4);
    for (int i = 0; i < 4; i++) {
        struct json_doc *doc = line_of(i);
        struct json a = json_root(doc);
        int64_t group;
        struct err err;
        assert_int_equal(json_get_i64(a, "group", 0, 9, &group, &err), 0);
        assert_int_equal(group, i / 2);
        assert_int_equal(json_count(json_find(a, "completion_ids")), json_count(json_find(a, "logprobs")));
        assert_true(json_count(json_find(a, "completion_ids")) > 0);
        assert_int_equal(json_type(json_find(a, "reward")), JSON_NULL);
        assert_true(strstr("stop length", string_of(a, "finish_reason")) != NULL);
        check_routing(a);
        json_free(doc);
    }
}

static void refuses(void **state)
{
    (void)state;
    static const char *const bad[][2] = {
        {"{\"id\": 1}\n", "in.jsonl:1: the row needs prompt, prompt_ids or messages"},
        {"{\"prompt\": \"a\", \"prompt_ids\": [1]}\n", "exclude each other"},
        {"{\"prompt\": \"a\"}\n{\"prompt\": \"\"}\n", "in.jsonl:2: the prompt is empty"},
        {"{\"prompt_ids\": [-1]}\n", "in.jsonl:1: key `prompt_ids[0]`: -1"},
        {"{\"prompt_ids\": []}\n", "`prompt_ids`: an empty list: a prompt has at least one token"},
        {"{\"prompt\": \"a\", \"max_tokens\": 0}\n", "at least 1, or 0 with prompt_logprobs"},
        {"{\"prompt\": \"a\", \"temperature\": 0.001}\n", "in.jsonl:1: temperature"},
        {"{\"prompt\": \"a\", \"top_p\": 2}\n", "top_p = 2"},
        {"{\"prompt\": \"a\", \"n\": 0}\n", "`n`"},
        {"{\"prompt\": \"a\", \"stop\": [\"\"]}\n", "stop string is empty"},
        {"{\"prompt\": \"a\", \"max_tokens\": 1000000}\n", "over the model's"},
        {"{\"prompt\": \"a\", \"id\": []}\n", "`id`: an id is a text or a finite number"},
        {"{\"prompt\": \"a\", \"id\": NaN}\n", "`id`: an id is a text or a finite number"},
        {"{\"prompt\": \"a\", \"id\": -1e999}\n", "`id`: an id is a text or a finite number"},
        {"{\"prompt\": \"a\", \"logit_bias\": {\"05\": 1}}\n", "`logit_bias.05`: not a token id"},
        {"{\"prompt\": \"a\"\n", "in.jsonl:1: not valid JSON: byte 14: "},
        {"[1]\n", "in.jsonl:1"},
        {"\n", "has no rows"},
    };
    const char *config = process_config("");
    for (int i = 0; i < MT_LEN(bad); i++) {
        write_rows(bad[i][0]);
        assert_int_equal(RUN("generate", config, "--base", "--input", in, "--output", out), 1);
        assert_says(said.err, bad[i][1]);
        assert_false(file_exists(out));
    }
    snprintf(text, sizeof(text), "{\"prompt\": \"a\", \"stop_token_ids\": [5");
    for (int i = 0; i < 1024; i++) strcat(text, ", 5");
    strcat(text, "], \"logit_bias\": {\"5\": 1}}\n");
    write_rows(text);
    assert_int_equal(RUN("generate", config, "--base", "--input", in, "--output", out), 1);
    assert_says(said.err, "end tokens are over the limit of 1024 together");
    assert_null(strstr(said.err, "loaded"));
    write_rows("{\"prompt\": \"a\", \"prompt_logprobs\": true, \"max_tokens\": 0}\n");
    assert_int_equal(RUN("generate", config, "--base", "--input", in, "--output", out, "--format", "rollouts"), 1);
    assert_says(said.err, "in.jsonl:1: max_tokens = 0: a rollout has at least one token");
    assert_int_equal(RUN("generate", config, "--base", "--input", in), 2);
    assert_int_equal(RUN("generate", config, "--base", "--prompt", "a", "--samples", "2"), 2);
    assert_says(said.err, "--samples needs --input");
    assert_int_equal(RUN("generate", config, "--base", "--prompt", "a", "--format", "rollouts"), 2);
    assert_int_equal(RUN("generate", config, "--base", "--prompt", "a", "--format", "rollouts", "--output", out), 2);
    assert_int_equal(RUN("plan", config), 0);
    assert_says(said.out, "a text of data.seq_len tokens takes ");
    write_rows("{\"prompt\": \"a\"}\n");
    assert_int_equal(
        RUN("generate", config, "--base", "--input", in, "--output", out, "--set", "generate.memory_gb=1e-6"), 1);
    assert_says(said.err, "generate.memory_gb = 1e-06: the cache of a sequence of ");
}

/* Every bad row has its line and reason; rows that are only strange have a warning each. */
static void lists_bad_rows(void **state)
{
    (void)state;
    const char *config = process_config("[data]\nchat_template = chatml\n");
    write_rows("{\"prompt\": \"a\"}\n{\"prompt\": \"\"}\n\n{\"id\": 3}\n{\"prompt\": \"a\"}\n{\"prompt\": 3}\n");
    for (int i = 0; i < 2; i++) {
        const int code = i ? RUN("eval", config, "--base", "--generate", "--verifier", "exact", "--input", in)
                           : RUN("generate", config, "--base", "--input", in, "--output", out);
        assert_int_equal(code, 1);
        assert_says(said.err, "in.jsonl:2: the prompt is empty");
        assert_says(said.err, "in.jsonl:4: the row needs prompt");
        assert_says(said.err, "in.jsonl:6: key `prompt`: must be a string");
        assert_says(said.err, "in.jsonl: 3 of the first 5 rows are bad");
        assert_null(strstr(said.err, "loaded"));
    }
    text[0] = 0;
    for (int i = 0; i < 1100; i++) strcat(text, "{\"id\": 3}\n");
    write_rows(text);
    assert_int_equal(RUN("generate", config, "--base", "--input", in, "--output", out), 1);
    assert_says(said.err, "further bad rows are counted, not shown");
    assert_says(said.err, "1000 of the first 1000 rows are bad");
    write_rows("{\"messages\": [{\"role\": \"usr\", \"content\": \"a\"}], \"n\": 2}\n");
    if (RUN("generate", config, "--base", "--input", in, "--output", out, "--tokens", "2")) fail_msg("%s", said.err);
    assert_says(said.err, "in.jsonl:1: the role \"usr\" is rare");
    assert_says(said.err, "in.jsonl:1: 2 samples at temperature 0 are equal");
}

/* A prompt that is a list is messages. */
static void prompts_of_messages(void **state)
{
    (void)state;
    const char *config = process_config("");
    write_rows("{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}\n"
               "{\"prompt\": [{\"role\": \"user\", \"content\": \"a\"}]}\n");
    if (RUN("generate", config, "--base", "--input", in, "--output", out, "--tokens", "2", "--set",
            "data.chat_template=chatml"))
        fail_msg("%s", said.err);
    process_read(out, text, sizeof(text));
    const char *first = strstr(text, "\"prompt_ids\""), *second = first ? strstr(first + 1, "\"prompt_ids\"") : NULL;
    assert_non_null(second);
    assert_memory_equal(first, second, strcspn(first, "]"));
    assert_true(strcspn(first, "]") > 40);
}

/* Ctrl-C: complete rows are in the output, exit code 130, and the same command continues after them. */
static void interrupted(void **state)
{
    (void)state;
    const char *config = process_config(""), *dir = scratch_dir();
    const struct timespec pause = {.tv_nsec = 2000000};
    text[0] = 0;
    for (int i = 0; i < 400; i++) strcat(text, "{\"prompt\": \"The cat\", \"ignore_eos\": true}\n");
    write_rows(text);
    const char *const words[] = {"generate",
                                 config,
                                 "--base",
                                 "--input",
                                 in,
                                 "--output",
                                 out,
                                 "--tokens",
                                 "40",
                                 "--set",
                                 "generate.memory_gb=1e-4",
                                 NULL};
    for (int i = 0; i < 2; i++) {
        const int64_t before = i ? file_size(out) : 0;
        const pid_t pid = process_start(dir, words);
        for (int k = 0; k < 10000 && file_size(out) <= before; k++) nanosleep(&pause, NULL);
        assert_int_equal(kill(pid, SIGINT), 0);
        assert_int_equal(process_finish(dir, pid), 130);
        assert_says(said.err, "moetrain: complete rows are written; a second signal ends the run at once");
        char want[64];
        snprintf(want, sizeof(want), "has %d of 400 rows; run the same command to continue", n_lines());
        assert_says(said.err, want);
        assert_true(file_size(out) > before && text[strlen(text) - 1] == '\n');
        if (i) assert_says(said.err, "of 400 rows: continues after them");
    }
}

/* An interrupted run keeps finished rows whose turn has not come in a file. The continued run writes them at their
 * place and does not compute them again. */
static void keeps_later_rows(void **state)
{
    (void)state;
    const char *config = process_config("");
    char later[MT_PATH];
    static char whole[sizeof(text)];
    struct text_buf lines[4] = {{0}}, file = {0};
    struct later_rows l;
    struct err err = {.msg = ""};
    int64_t n, at = 0;
    write_rows("{\"prompt\": \"a\"}\n{\"prompt\": \"b\", \"n\": 2, \"temperature\": 1}\n{\"prompt\": \"c\"}\n");
    snprintf(later, sizeof(later), "%s.later.jsonl", out);
    const char *const words[] = {"generate", config, "--base", "--input", in, "--output", out, "--tokens", "4", NULL};
    if (process_run(words)) fail_msg("%s", said.err);
    process_read(out, whole, sizeof(whole));
    for (int i = 0; i < 4; i++) {
        const int64_t size = (int64_t)strcspn(whole + at, "\n") + 1;
        text_put_bytes(&lines[i], whole + at, size);
        at += size;
    }
    later_rows_put(&file, 1, &lines[1], 2);
    later_rows_put(&file, 2, &lines[3], 1);
    assert_int_equal(file_write_atomic(later, file.text, file.size, &err), 0);
    file.size = 0;
    assert_int_equal(later_rows_open(&l, out, &err), 0);
    assert_int_equal(json_count(later_rows_take(&l, 0)), 0);
    assert_int_equal(json_count(later_rows_take(&l, 1)), 2);
    assert_int_equal(later_rows_write(&l, &file, 0, &n, &err), 0); /* row 2 remains */
    assert_int_equal(n, 1);
    later_rows_close(&l);
    file.size = 0;
    later_rows_put(&file, 1, &lines[1], 2);
    process_read(later, text, sizeof(text));
    text_put(&file, text);
    char *stop = strstr(file.text, "\\\"stop\\\": null"); /* an answer that no run gives shows that it was copied */
    assert_non_null(stop);
    memcpy(stop + 10, "true", 4);
    assert_int_equal(file_write_atomic(later, file.text, file.size, &err), 0);
    assert_int_equal(truncate(out, 0), 0);
    if (process_run(words)) fail_msg("%s", said.err);
    assert_says(said.err, ".later.jsonl has 2 complete rows");
    assert_false(file_exists(later));
    process_read(out, text, sizeof(text));
    stop = strstr(text, "\"stop\": true");
    assert_non_null(stop);
    memcpy(stop + 8, "null", 4);
    assert_string_equal(text, whole);
    char *ids = strstr(file.text, "prompt_ids");
    memcpy(ids, "prompt_idx", 10);
    assert_int_equal(file_write_atomic(later, file.text, file.size, &err), 0);
    assert_int_equal(truncate(out, 0), 0);
    assert_int_equal(process_run(words), 1);
    assert_says(said.err, "its answers of row 1 are not those of ");
    for (int i = 0; i < 4; i++) text_free(&lines[i]);
    text_free(&file);
}

static void check_sampler(void **state)
{
    (void)state;
    static const char *const models[] = {"parity/case_b", "parity/qwen3", "parity/qwen3_next", "parity/deepseek_v3",
                                         "parity/deepseek_v4"};
    const char *config = process_config("");
    for (int i = 0; i < MT_LEN(models); i++) {
        char set[MT_PATH + 32];
        snprintf(set, sizeof(set), "model.path=%s", fixture(models[i]));
        if (RUN("check", config, "--sampler", "--set", set)) fail_msg("%s\n%s", said.out, said.err);
        assert_says(said.out, " tokens in layers\n  verdict: ok");
        assert_says(said.out, "training takes the sampler's");
        assert_says(strstr(said.out, "training takes the sampler's"),
                    "(at most 0.0001) nats\n  training chooses other");
    }
}

/* In bf16 `check --sampler` limits the mean difference, and how often training chooses other experts. */
static void check_sampler_bf16(void **state)
{
    (void)state;
    const char *config = process_config("");
    char set[MT_PATH + 32];
    snprintf(set, sizeof(set), "model.path=%s", fixture("parity/case_b"));
    if (RUN("check", config, "--sampler", "--set", set, "--set", "train.dtype=bf16"))
        fail_msg("%s\n%s", said.out, said.err);
    assert_says(said.out, "two training forwards that choose experts: mean difference 0.0");
    assert_says(said.out, "training takes the sampler's: mean difference 0.0");
    assert_says(strstr(said.out, "training takes the sampler's"), " (at most 0.02), largest ");
    assert_says(said.out, " %)\n  verdict: ok");
}

/* Answers `rows` on a GPU; returns the output, owned by the caller. */
static char *answers_on(const char *model, const char *device, const char *of_rows)
{
    write_rows(of_rows);
    if (RUN("generate", process_config(""), "--base", "--input", in, "--output", out, "--tokens", "24", "--temperature",
            "1", "--set", "generate.batch_invariant=true", "--set", device, "--set", model))
        fail_msg("%s", said.err);
    process_read(out, text, sizeof(text));
    return mem_strdup(text);
}

/* With generate.batch_invariant a GPU answers a row alone with the bytes that it has among other rows. */
static void rows_alone_on_the_gpu(void **state)
{
    (void)state;
    static const char *const devices[] = {"train.device=cuda", "train.device=cuda-portable"};
    static const char *const models[] = {"parity/case_b", "parity/olmoe", "parity/glm4_lite", "parity/gemma4",
                                         "parity/minimax_m2"};
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(models) * MT_LEN(devices); i++) {
        const char *device = devices[i % MT_LEN(devices)];
        char model[MT_PATH + 32], all[1 << 13];
        snprintf(model, sizeof(model), "model.path=%s", fixture(models[i / MT_LEN(devices)]));
        int n = 0;
        for (int k = 0; k < 40; k++)
            n +=
                snprintf(all + n, sizeof(all) - (size_t)n, "{\"prompt\": \"%.*s\", \"seed\": %d, \"max_tokens\": %d}\n",
                         1 + 7 * k % 30, "The cat sat down on the old mat", k, k < 3 ? 24 : 1 + k % 24);
        char *together = answers_on(model, device, all);
        *strchr(all, '\n') = 0;
        char *alone = answers_on(model, device, strcat(all, "\n"));
        assert_memory_equal(together, alone, strlen(alone));
        mem_free(together);
        mem_free(alone);
    }
}

int test_generate_rows(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(answers),
        cmocka_unit_test(continues),
        cmocka_unit_test(rollouts),
        cmocka_unit_test(keeps_foreign_files),
        cmocka_unit_test(refuses),
        cmocka_unit_test(keeps_later_rows),
        cmocka_unit_test(check_sampler),
        cmocka_unit_test(check_sampler_bf16),
        cmocka_unit_test(rows_alone_on_the_gpu),
        cmocka_unit_test(continues_the_same_alone),
        cmocka_unit_test(lists_bad_rows),
        cmocka_unit_test(prompts_of_messages),
        cmocka_unit_test(interrupted),
    };
    return cmocka_run_group_tests_name("generate_rows", tests, NULL, NULL);
}
