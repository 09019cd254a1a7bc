/* test_generate.c - runs `moetrain generate`: greedy tokens equal those of transformers (+ PEFT) in fp32, and sampled
 * tokens are repeatable. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "data/file/file.h"
#include "data/json/json.h"
#include "tests/checkpoints.h"
#include "tests/process.h"

#define TINY "../../configs/tiny-gptoss"

static const char *write_text(const char *name, const char *text)
{
    static char path[MT_PATH];
    struct err err;
    snprintf(path, MT_PATH, "%s/%s", scratch_dir(), name);
    assert_int_equal(file_write_atomic(path, text, (int64_t)strlen(text), &err), 0);
    return path;
}

static struct json_doc *parse_said(void)
{
    struct err err;
    struct json_doc *doc = json_parse(said.out, (int64_t)strlen(said.out), "generate", &err);
    if (!doc) fail_msg("%s\n%s", err.msg, said.err);
    return doc;
}

static void assert_same_ids(struct json ours, struct json theirs, const char *key)
{
    struct json a = json_find(ours, key), b = json_find(theirs, key);
    assert_true(json_count(b) > 0);
    assert_int_equal(json_count(a), json_count(b));
    for (int64_t i = 0; i < json_count(a); i++) {
        int64_t x, y;
        struct err err;
        assert_int_equal(json_i64(json_at(a, i), 0, INT32_MAX, &x, &err), 0);
        assert_int_equal(json_i64(json_at(b, i), 0, INT32_MAX, &y, &err), 0);
        if (x != y) fail_msg("%s: %lld, expected %lld, at %lld", key, (long long)x, (long long)y, (long long)i);
    }
}

/* fixtures/generate/greedy.json: rows of model, adapter or null, prompt, prompt_ids, ids, text. */
static void greedy(void **state)
{
    (void)state;
    struct err err;
    struct json_doc *expected = json_load(fixture("generate/greedy.json"), 1 << 20, &err);
    assert_non_null(expected);
    const char *config = process_config("");
    for (int64_t i = 0; i < json_count(json_root(expected)); i++) {
        const char *model, *adapter = NULL, *prompt = NULL, *text = NULL, *theirs;
        struct json want = json_at(json_root(expected), i);
        char set[MT_PATH], dir[MT_PATH], n[16];
        if (json_get_str(want, "model", &model, &err) || json_opt_str(want, "adapter", &adapter, &err) ||
            json_get_str(want, "prompt", &prompt, &err) || json_get_str(want, "text", &theirs, &err))
            fail_msg("%s", err.msg);
        snprintf(set, sizeof(set), "model.path=%s", fixture(model));
        snprintf(dir, sizeof(dir), "%s", fixture(adapter ? adapter : model));
        snprintf(n, sizeof(n), "%lld", (long long)json_count(json_find(want, "ids")));
        const char *const words[] = {"generate",
                                     config,
                                     "--set",
                                     set,
                                     "--prompt",
                                     prompt,
                                     "--tokens",
                                     n,
                                     "--json",
                                     adapter ? "--adapter" : "--base",
                                     adapter ? dir : NULL,
                                     NULL};
        if (process_run(words)) fail_msg("%s", said.err);
        assert_says(said.err, "KV cache of ");
        struct json_doc *doc = parse_said();
        assert_same_ids(json_root(doc), want, "prompt_ids");
        assert_same_ids(json_root(doc), want, "ids");
        assert_int_equal(json_get_str(json_root(doc), "text", &text, &err), 0);
        assert_string_equal(text, theirs);
        assert_int_equal(json_type(json_find(json_root(doc), "stop")), JSON_NULL);
        json_free(doc);
    }
    json_free(expected);
}

/* Streamed text equals that of --json, and is valid UTF-8 although single tokens of this model are not. */
static void streamed(void **state)
{
    (void)state;
    char set[MT_PATH], adapter[MT_PATH];
    const char *config = process_config("");
    snprintf(set, sizeof(set), "model.path=%s", fixture("parity/qwen3"));
    snprintf(adapter, sizeof(adapter), "%s", fixture("parity/qwen3/adapter_final"));
#define WORDS "generate", config, "--set", set, "--adapter", adapter, "--prompt", "The house", "--tokens", "32"
    assert_int_equal(RUN(WORDS, "--json"), 0);
    struct json_doc *doc = parse_said();
    const char *text;
    struct err err;
    assert_int_equal(json_get_str(json_root(doc), "text", &text, &err), 0);
    assert_int_equal(RUN(WORDS), 0);
    assert_says(text, "\xef\xbf\xbd");
    assert_memory_equal(said.out, text, strlen(text));
    assert_string_equal(said.out + strlen(text), "\n");
    assert_says(said.err, "as many as --tokens allows");
    json_free(doc);
#undef WORDS
}

static void sampled(void **state)
{
    (void)state;
    static char texts[4][sizeof(said.out)];
    static const char *const how[][3] = {{"1", "0.9", "7"}, {"1", "0.9", "7"}, {"1", "0.9", "8"}, {"1", "1e-6", "8"}};
    const char *config = process_config("");
    char set[MT_PATH];
    snprintf(set, sizeof(set), "model.path=%s", fixture(TINY));
#define WORDS "generate", config, "--set", set, "--base", "--prompt", "It was", "--tokens", "24"
    for (int i = 0; i < 4; i++) {
        assert_int_equal(RUN(WORDS, "--temperature", how[i][0], "--top-p", how[i][1], "--seed", how[i][2]), 0);
        memcpy(texts[i], said.out, sizeof(texts[i]));
    }
    assert_string_equal(texts[0], texts[1]);
    assert_string_not_equal(texts[0], texts[2]);
    assert_int_equal(RUN(WORDS), 0);
    assert_string_equal(texts[3], said.out); /* this top-p leaves only the most likely token */
#undef WORDS
}

/* With a head of zeros all tokens are equally likely, and each token is drawn with another random number. */
static void evenly_sampled(void **state)
{
    (void)state;
    static const char *const files[] = {"tokenizer.json", "tokenizer_config.json"};
    const char *config = process_config("");
    char from[MT_PATH], to[MT_PATH], set[MT_PATH];
    int64_t first, id;
    int same = 0;
    struct err err;
    struct draft d;
    draft_open(&d);
    const struct st_entry head = *draft_find(&d, "lm_head.weight");
    draft_put(&d, "lm_head.weight", head.dtype, 2, head.shape, mem_alloc(safetensors_entry_bytes(&head)));
    const char *dir = draft_save(&d, 1);
    for (int i = 0; i < MT_LEN(files); i++) {
        snprintf(from, sizeof(from), "%s/%s", fixture("parity/case_a"), files[i]);
        snprintf(to, sizeof(to), "%s/%s", dir, files[i]);
        assert_int_equal(symlink(from, to), 0);
    }
    snprintf(set, sizeof(set), "model.path=%s", dir);
    assert_int_equal(RUN("generate", config, "--set", set, "--base", "--prompt", "The", "--tokens", "8",
                         "--temperature", "1", "--json"),
                     0);
    struct json_doc *doc = parse_said();
    const struct json ids = json_find(json_root(doc), "ids");
    assert_int_equal(json_i64(json_at(ids, 0), 0, INT32_MAX, &first, &err), 0);
    for (int64_t i = 0; i < json_count(ids); i++)
        same += !json_i64(json_at(ids, i), 0, INT32_MAX, &id, &err) && id == first;
    assert_true(json_count(ids) == 8 && same < 3);
    json_free(doc);
    draft_free(&d);
}

/* The prompt is rendered by the template up to the beginning of the answer, and the end-of-turn token ends
 * generation. */
static void conversation(void **state)
{
    (void)state;
    char set[MT_PATH + 32], template[MT_PATH + 32], model[MT_PATH];
    const char *config = process_config("");
    snprintf(model, sizeof(model), "%s", fixture(TINY));
    snprintf(set, sizeof(set), "model.path=%s", model);
    const char *file = write_text("m.json", "[{\"role\": \"user\", \"content\": \"Hi\"}, "
                                            "{\"role\": \"assistant\", \"content\": \"left out\"}]");
    assert_int_equal(RUN("generate", config, "--set", set, "--base", "--messages", file, "--tokens", "3", "--json"), 0);
    struct json_doc *ours = parse_said();
    file = write_text("p.json", "[{\"role\": \"user\", \"content\": \"Hi\"}]");
    assert_int_equal(RUN("generate", config, "--set", set, "--base", "--messages", file, "--tokens", "3", "--json",
                         "--set", "eval.every=1", "--set", "eval.patience=2", "--set", "data.eval_format=text"),
                     0); /* settings of evaluations change no answer */
    struct json_doc *same = parse_said();
    assert_same_ids(json_root(ours), json_root(same), "prompt_ids");
    assert_same_ids(json_root(ours), json_root(same), "ids");
    json_free(ours);
    json_free(same);

    /* In this template, the model writes the token that ends a turn. */
    const char *jinja = write_text("t.jinja", "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}"
                                              "<|end|>{% endif %}{% endfor %}");
    snprintf(template, sizeof(template), "data.chat_template=%s", jinja);
    snprintf(set, sizeof(set), "model.path=%s", fixture("parity/mixtral"));
    snprintf(model, sizeof(model), "%s", fixture("parity/mixtral/adapter_final"));
    file = write_text("q.json", "{\"messages\": [{\"role\": \"user\", \"content\": \"The house\"}]}");
    assert_int_equal(
        RUN("generate", config, "--set", set, "--set", template, "--adapter", model, "--messages", file, "--json"), 0);
    assert_says(said.out, "\"text\": \"ftct\xef\xbf\xbd expend seie\", \"stop\": \"<|end|>\"}");
}

/* Without a generation_config.json, eos_token_id of config.json ends the text. */
static void eos_of_config(void **state)
{
    (void)state;
    static const char *const files[] = {"tokenizer.json", "tokenizer_config.json", "model-00001-of-00002.safetensors",
                                        "model-00002-of-00002.safetensors", "model.safetensors.index.json"};
    const char *dir = scratch_dir(), *config = process_config("");
    char from[MT_PATH + 64], to[MT_PATH + 64], set[MT_PATH + 32], text[8192];
    for (int i = 0; i < MT_LEN(files); i++) {
        snprintf(from, sizeof(from), "%s/%s", fixture("parity/mixtral"), files[i]);
        snprintf(to, sizeof(to), "%s/%s", dir, files[i]);
        assert_int_equal(symlink(from, to), 0);
    }
    snprintf(from, sizeof(from), "%s/config.json", fixture("parity/mixtral"));
    process_read(from, text, sizeof(text));
    char *key = strstr(text, "\"eos_token_id\": "), edited[sizeof(text) + 64];
    assert_non_null(key);
    snprintf(set, sizeof(set), "model.path=%s", fixture("parity/mixtral"));
    assert_int_equal(RUN("generate", config, "--set", set, "--base", "--prompt", "The", "--tokens", "4", "--json"), 0);
    struct json_doc *doc = parse_said();
    int64_t id;
    struct err err;
    assert_int_equal(json_i64(json_at(json_find(json_root(doc), "ids"), 1), 0, 1023, &id, &err), 0);
    json_free(doc);
    *key = 0;
    snprintf(edited, sizeof(edited), "%s\"eos_token_id\": [1017, %lld]%s", text, (long long)id, strchr(key + 1, ','));
    snprintf(to, sizeof(to), "%s/config.json", dir);
    assert_int_equal(file_write_atomic(to, edited, (int64_t)strlen(edited), &err), 0);
    snprintf(set, sizeof(set), "model.path=%s", dir);
    assert_int_equal(RUN("generate", config, "--set", set, "--base", "--prompt", "The", "--tokens", "4", "--json"), 0);
    doc = parse_said();
    assert_true(json_count(json_find(json_root(doc), "ids")) < 4);
    assert_int_equal(json_type(json_find(json_root(doc), "stop")), JSON_STRING);
    json_free(doc);
}

static void wrong_arguments(void **state)
{
    (void)state;
    const char *config = process_config("");
    assert_int_equal(RUN("generate", "--help"), 0);
    assert_says(said.out, "--temperature");
    assert_int_equal(RUN("generate", config), 2);
    assert_says(said.err, "--prompt TEXT or --messages FILE");
    assert_int_equal(RUN("generate", config, "--prompt", "a"), 1);
    assert_says(said.err, "out/adapter: train first");
    assert_int_equal(RUN("generate", config, "--prompt", "a", "--base", "--adapter", "x"), 2);
    assert_int_equal(RUN("generate", config, "--prompt", "", "--base"), 2);
    assert_says(said.err, "--prompt is empty");
    assert_int_equal(RUN("generate", config, "--prompt", "a", "--base", "--tokens", "100000000"), 1);
    assert_says(said.err, "lower --tokens");
    static const char *const empty[] = {"[]", "{\"messages\": []}"};
    for (int i = 0; i < MT_LEN(empty); i++) {
        struct err err;
        char path[MT_PATH];
        snprintf(path, sizeof(path), "%s/m.json", scratch_dir());
        assert_int_equal(file_write_atomic(path, empty[i], (int64_t)strlen(empty[i]), &err), 0);
        assert_int_equal(RUN("generate", config, "--messages", path, "--base"), 1);
        assert_says(said.err, "m.json: the list of messages is empty");
    }
    /* --tokens exceeds the memory, though not the model's context: the error gives the largest value that fits. */
    long long fits = 0;
#define TIGHT                                                                                                          \
    "generate", config, "--prompt", "a", "--base", "--set", "train.memory_gb=0.0043", "--set", "train.threads=2",      \
        "--tokens"
    assert_int_equal(RUN(TIGHT, "2000"), 1);
    assert_says(said.err, "--tokens 2000: ");
    assert_null(strstr(said.err, "data.seq_len"));
    assert_says(said.err, " (KV cache ");
    const char *at = strstr(said.err, "(train.memory_gb): --tokens ");
    if (!at || sscanf(at, "(train.memory_gb): --tokens %lld fits", &fits) != 1) fail_msg("%s", said.err);
    assert_true(fits > 0 && fits < 2000);
    char text[32];
    snprintf(text, sizeof(text), "%lld", fits + 64);
    assert_int_equal(RUN(TIGHT, text), 1);
    snprintf(text, sizeof(text), "%lld", fits);
    assert_says(said.err, text);
    assert_int_equal(RUN(TIGHT, text), 0);
    assert_int_equal(RUN("generate", config, "--prompt", "a", "--base", "--tokens", "1.5"), 2);
    assert_int_equal(RUN("generate", config, "--prompt", "a", "--base", "--temperature", "-1"), 2);
    assert_int_equal(RUN("generate", config, "--prompt", "a", "--base", "--top-p", "0.5"), 1);
    assert_says(said.err, "without --temperature");
    assert_int_equal(RUN("generate", config, "--prompt", "a", "--base", "--temperature", "0.001"), 1);
    assert_says(said.err, "--temperature: temperature = 0.001 is neither 0 nor at least 0.01");
    assert_int_equal(RUN("generate", config, "--prompt", "\xff", "--base"), 1);
    assert_int_equal(RUN("generate", config, "--prompt", "a", "--frobnicate", "1"), 2);
    assert_says(said.err, "--frobnicate");
    assert_int_equal(RUN("generate", config, "--prompt"), 2);
    assert_int_equal(RUN("generate", config, "--messages", "/nowhere", "--base"), 1);
    assert_says(said.err, "/nowhere");
    const char *file = write_text("m.json", "[{\"role\": \"assistant\", \"content\": \"x\"}]");
    assert_int_equal(RUN("generate", config, "--messages", file, "--base"), 1);
}

/* The text of sample `n` in the run's metrics.jsonl, or NULL; the caller frees it with mem_free. */
static char *sample_text(const char *config, int n)
{
    static char text[1 << 16];
    struct err err;
    process_read(process_output(config, "metrics.jsonl"), text, sizeof(text));
    for (char *line = text, *end; (end = strchr(line, '\n')); line = end + 1) {
        if (strncmp(line, "{\"event\":\"sample\"", 17) || n--) continue;
        struct json_doc *doc = json_parse(line, end - line, "sample", &err);
        const char *said_text;
        assert_non_null(doc);
        assert_int_equal(json_get_str(json_root(doc), "text", &said_text, &err), 0);
        char *copy = mem_strdup(said_text);
        json_free(doc);
        return copy;
    }
    return NULL;
}

/* eval.prompts gives the texts of `generate --base` before step 1, and those of `generate` with the adapter at the end:
 * on one rank, on two data parallel ranks, and on two expert parallel ranks. */
static void samples_at_evaluations(void **state)
{
    (void)state;
    static const char *const texts[] = {"The cat", "One two three"}, *const ranks[] = {"1", "2", "2"},
                             *const ep[] = {"1", "1", "2"};
    char set[3][MT_PATH + 32];
    const char *prompts = write_text("prompts.jsonl", "{\"prompt\": \"The cat\"}\n\n{\"prompt\": \"One two three\"}\n");
    snprintf(set[0], sizeof(set[0]), "eval.prompts=%s", prompts);
    for (int i = 0; i < MT_LEN(ranks); i++) {
        const char *config = process_config("");
        snprintf(set[1], sizeof(set[1]), "parallel.cpu_ranks=%s", ranks[i]);
        snprintf(set[2], sizeof(set[2]), "parallel.ep=%s", ep[i]);
        assert_int_equal(RUN(config, "--set", set[0], "--set", "eval.prompt_tokens=6", "--set", "train.grad_accum=2",
                             "--set", "optim.lr=0.05", "--set", set[1], "--set", set[2]),
                         0);
        assert_says(said.out, "  prompt: One two three\n  answer: ");
        for (int k = 0; k < 4; k++) { /* two prompts at step 0, two at the end */
            char *got = sample_text(config, k);
            if (k < 2)
                assert_int_equal(RUN("generate", config, "--base", "--prompt", texts[k % 2], "--tokens", "6", "--json"),
                                 0);
            else
                assert_int_equal(RUN("generate", config, "--prompt", texts[k % 2], "--tokens", "6", "--json"), 0);
            struct err err;
            const char *want;
            struct json_doc *doc = parse_said();
            assert_int_equal(json_get_str(json_root(doc), "text", &want, &err), 0);
            assert_non_null(got);
            assert_string_equal(got, want);
            json_free(doc);
            mem_free(got);
        }
        assert_null(sample_text(config, 4));
    }
    const char *config = process_config("");
    assert_int_equal(RUN(config, "--set", set[0], "--set", "eval.prompt_tokens=64"), 1);
    assert_says(said.err, "prompts.jsonl:1: ");
    assert_says(said.err, "data.seq_len = 64");
    prompts =
        write_text("prompts.jsonl", "{\"prompt\": \"A\", \"messages\": [{\"role\": \"user\", \"content\": \"B\"}]}\n");
    snprintf(set[0], sizeof(set[0]), "eval.prompts=%s", prompts);
    assert_int_equal(RUN(config, "--set", set[0]), 1);
    assert_says(said.err, "prompts.jsonl:1: prompt and messages exclude each other");
    assert_int_equal(RUN(config, "--set", "eval.prompts=/nowhere"), 1);
    assert_says(said.err, "/nowhere");
}

/* Prompts of different lengths are answered in one batch, in their order, with the texts that each gets alone. */
static void samples_of_many_prompts(void **state)
{
    (void)state;
    enum { N = 20 };
    char set[MT_PATH + 32], rows[4096] = "", words[N][64];
    const char *config = process_config("");
    for (int i = 0; i < N; i++) {
        snprintf(words[i], sizeof(words[i]), "%.*s%d", i, "One two three four five", i);
        const size_t end = strlen(rows);
        snprintf(rows + end, sizeof(rows) - end, "{\"prompt\": \"%s\"}\n", words[i]);
    }
    snprintf(set, sizeof(set), "eval.prompts=%s", write_text("prompts.jsonl", rows));
    assert_int_equal(RUN(config, "--set", set, "--set", "eval.prompt_tokens=9", "--set", "optim.lr=0.05"), 0);
    for (int i = 0; i < 2 * N; i += 3) {
        char *got = sample_text(config, i);
        struct err err;
        const char *want, *prompt = words[i % N];
        if (i < N)
            assert_int_equal(RUN("generate", config, "--base", "--prompt", prompt, "--tokens", "9", "--json"), 0);
        else
            assert_int_equal(RUN("generate", config, "--prompt", prompt, "--tokens", "9", "--json"), 0);
        struct json_doc *doc = parse_said();
        assert_int_equal(json_get_str(json_root(doc), "text", &want, &err), 0);
        assert_non_null(got);
        assert_string_equal(got, want);
        json_free(doc);
        mem_free(got);
    }
    assert_null(sample_text(config, 2 * N));
}

/* For a row of eval.prompts with an answer the run shows the question, the model's answer and the row's answer. */
static void samples_with_answers(void **state)
{
    (void)state;
    char set[MT_PATH + 32], template[MT_PATH + 32];
    const char *config = process_config("");
    const char *prompts =
        write_text("prompts.jsonl", "{\"messages\": [{\"role\": \"user\", \"content\": \"Blue?\"}, {\"role\": "
                                    "\"assistant\", \"content\": \"Reference\"}]}\n"
                                    "{\"prompt\": \"The cat\", \"completion\": \" sat\"}\n{\"prompt\": \"A\"}\n");
    snprintf(set, sizeof(set), "eval.prompts=%s", prompts);
    snprintf(template, sizeof(template), "data.chat_template=%s",
             fixture("../../configs/tiny-gptoss/chat_template.jinja"));
    assert_int_equal(
        RUN(config, "--set", set, "--set", template, "--set", "eval.prompt_tokens=2", "--set", "data.seq_len=256"), 0);
    assert_says(said.out, "  prompt: Blue?\n  answer: ");
    assert_says(said.out, "\n  expected: Reference\n  prompt: The cat\n");
    assert_says(said.out, "\n  expected:  sat\n  prompt: A\n");
    assert_null(strstr(said.out, "prompt: Reference"));
    static char metrics[1 << 16];
    process_read(process_output(config, "metrics.jsonl"), metrics, sizeof(metrics));
    assert_says(metrics, "\"prompt\":\"Blue?\",\"text\":");
    assert_says(metrics, "\"expected\":\"Reference\"");
}

/* The model card of every adapter of a run gives its base model, data and results. */
static void model_cards(void **state)
{
    (void)state;
    static const char *const dirs[] = {"adapter", "best", "checkpoints/step-000002/adapter"};
    const char *config = process_config("");
    assert_int_equal(RUN(config, "--set", "optim.lr=1e-3", "--set", "eval.every=1"), 0);
    for (int i = 0; i < MT_LEN(dirs); i++) {
        static char card[1 << 16];
        char name[64];
        snprintf(name, sizeof(name), "%s/README.md", dirs[i]);
        process_read(process_output(config, name), card, sizeof(card));
        assert_memory_equal(card, "---\nlibrary_name: peft\n", 23); /* a local model has no base_model */
        assert_says(card, "/train.jsonl: ");
        assert_says(card, " documents, ");
        assert_says(card, "content hash ");
        assert_says(card, "r 2, alpha ");
        assert_says(card, " of 2, ");
        assert_says(card, "| 0 | ");
        assert_says(card, "moetrain " MT_VERSION);
        assert_says(card, "\n[optim]\nkind = adamw\nlr = 0.001\n");
    }
}

/* The model card shows file names unchanged, also with characters that Markdown interprets. */
static void model_card_of_odd_names(void **state)
{
    (void)state;
    static char card[1 << 16];
    const char *config = process_config("");
    char dir[MT_PATH], link[2][MT_PATH + 32], set[2 * MT_PATH + 128], there[MT_PATH];
    snprintf(dir, sizeof(dir), "%s", scratch_dir());
    snprintf(link[0], sizeof(link[0]), "%s/a|b`<i>.jsonl", dir);
    snprintf(link[1], sizeof(link[1]), "%s/c.jsonl", dir);
    snprintf(there, sizeof(there), "%s", fixture("parity/case_a/train.jsonl"));
    assert_int_equal(symlink(there, link[0]) | symlink(there, link[1]), 0);
    snprintf(set, sizeof(set), "data.train=%s*0.5,%s*0.5", link[0], link[1]);
    assert_int_equal(RUN(config, "--set", set), 0);
    process_read(process_output(config, "adapter/README.md"), card, sizeof(card));
    assert_says(card, "/a\\|b\\`\\<i\\>.jsonl\\*0.5,");
    assert_says(card, "/c.jsonl\\*0.5: ");
}

int test_generate(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(greedy),
        cmocka_unit_test(streamed),
        cmocka_unit_test(sampled),
        cmocka_unit_test(evenly_sampled),
        cmocka_unit_test(conversation),
        cmocka_unit_test(eos_of_config),
        cmocka_unit_test(wrong_arguments),
        cmocka_unit_test(samples_at_evaluations),
        cmocka_unit_test(samples_of_many_prompts),
        cmocka_unit_test(samples_with_answers),
        cmocka_unit_test(model_cards),
        cmocka_unit_test(model_card_of_odd_names),
    };
    return cmocka_run_group_tests_name("generate", tests, NULL, NULL);
}
