/* test_rollout_parts.c - the parts of online RL that need no model: rows of prompts, lines of samples, the journal,
 * recorded experts as text, statistics of a batch. */
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "data/file/file.h"
#include "data/json/text.h"
#include "data/rollout/routing_text.h"
#include "tests/test.h"
#include "train/rollout/journal.h"
#include "train/run/prompt_rows.h"
#include "train/rollout/rollout_lines.h"
#include "train/rollout/rollout_stats.h"

/* ---- prompts ---- */

struct bed {
    struct config cfg;
    struct run run;
};

static void bed_open(struct bed *b)
{
    struct err err = {.msg = ""};
    struct dataset_options opt;
    *b = (struct bed){.run.cfg = NULL};
    config_defaults(&b->cfg);
    snprintf(b->cfg.model.path, sizeof(b->cfg.model.path), "%s", fixture("../../configs/tiny-gptoss"));
    if (config_set(&b->cfg, "train.device=cpu", &err) || run_open_headers(&b->run, &b->cfg, &err) ||
        run_open_tokenizer(&b->run, &opt, NULL, &err))
        fail_msg("%s", err.msg);
}

static const char *write_file(const char *text)
{
    static char path[MT_PATH];
    struct err err;
    snprintf(path, sizeof(path), "%s/rows.jsonl", scratch_dir());
    if (file_write_atomic(path, text, (int64_t)strlen(text), &err)) fail_msg("%s", err.msg);
    return path;
}

static const char rows[] =
    "{\"prompt\": \"2 + 3 =\", \"answer\": \"5\", \"level\": 1.0, \"none\": null}\n"
    "{\"messages\": [{\"role\": \"user\", \"content\": \"Add 2 and 3.\"}, {\"role\": \"assistant\", \"content\": "
    "\"#### 5\"}]}\n"
    "{\"prompt\": [{\"role\": \"user\", \"content\": \"Hi\"}], \"tags\": [\"a\", {\"b\": 1}]}\n"
    "{\"messages\": [{\"role\": \"user\", \"content\": \"Go\"}, {\"role\": \"assistant\", \"content\": \"x\"}], "
    "\"answer\": 7}\n";

static void prompts(void **state)
{
    (void)state;
    static const char *const texts[] = {"\"2 + 3 =\"", "[{\"role\": \"user\", \"content\": \"Add 2 and 3.\"}]",
                                        "[{\"role\": \"user\", \"content\": \"Hi\"}]",
                                        "[{\"role\": \"user\", \"content\": \"Go\"}]"};
    static const char *const columns[] = {"{\"answer\": \"5\", \"level\": 1.0, \"none\": null}",
                                          "{\"answer\": \"#### 5\"}", "{\"tags\": [\"a\", {\"b\": 1}]}",
                                          "{\"answer\": 7}"};
    struct bed b;
    struct prompt_rows p, again;
    struct dataset ds;
    struct err err;
    bed_open(&b);
    if (prompt_rows_load(&p, &b.run, write_file(rows), "", 1000, &err)) fail_msg("%s", err.msg);
    assert_int_equal(p.n, 4);
    for (int i = 0; i < 4; i++) {
        assert_string_equal(p.of[i].text, texts[i]);
        assert_string_equal(p.of[i].columns, columns[i]);
        assert_true(p.of[i].prompt.ids.count > 0 && p.of[i].prompt.n_ends > 0);
    }
    /* messages with an answer give the same prompt as messages without it */
    if (prompt_rows_load(&again, &b.run,
                         write_file("{\"messages\": [{\"role\": \"user\", \"content\": \"Add 2 and 3.\"}]}\n"), "",
                         1000, &err))
        fail_msg("%s", err.msg);
    assert_int_equal(again.of[0].prompt.ids.count, p.of[1].prompt.ids.count);
    assert_memory_equal(again.of[0].prompt.ids.ids, p.of[1].prompt.ids.ids,
                        (size_t)again.of[0].prompt.ids.count * sizeof(int32_t));
    assert_string_equal(again.of[0].columns, "{}");
    prompt_rows_free(&again);
    prompt_rows_documents(&p, &ds);
    assert_int_equal(ds.n_docs, 4);
    assert_int_equal(ds.doc_off[4], ds.n_tokens);
    for (int i = 0; i < 4; i++)
        assert_memory_equal(ds.ids + ds.doc_off[i], p.of[i].prompt.ids.ids,
                            (size_t)p.of[i].prompt.ids.count * sizeof(int32_t));
    dataset_free(&ds);
    prompt_rows_free(&p);
    run_close(&b.run);
}

/* Other keys by data.columns; long prompts; every byte of a row is in the hash. */
static void columns_and_hash(void **state)
{
    (void)state;
    static const char one[] = "{\"q\": \"Two?\", \"s\": \"Be brief.\", \"a\": \"2\"}\n";
    struct bed b;
    struct prompt_rows p, plain;
    struct err err;
    bed_open(&b);
    if (prompt_rows_load(&p, &b.run, write_file(one), "prompt=q", 1000, &err)) fail_msg("%s", err.msg);
    assert_string_equal(p.of[0].text, "\"Two?\"");
    assert_string_equal(p.of[0].columns, "{\"q\": \"Two?\", \"s\": \"Be brief.\", \"a\": \"2\"}");
    const uint64_t hash = p.hash;
    prompt_rows_free(&p);
    if (prompt_rows_load(&p, &b.run, write_file("{\"q\": \"Two?\", \"s\": \"Be brief.\", \"a\": \"3\"}\n"), "prompt=q",
                         1000, &err))
        fail_msg("%s", err.msg);
    assert_true(p.hash != hash);
    prompt_rows_free(&p);
    if (prompt_rows_load(&p, &b.run, write_file(one), "system=s, user=q", 1000, &err)) fail_msg("%s", err.msg);
    assert_string_equal(p.of[0].text, "[{\"role\": \"system\", \"content\": \"Be brief.\"}, {\"role\": \"user\", "
                                      "\"content\": \"Two?\"}]");
    prompt_rows_free(&p);
    if (prompt_rows_load(&plain, &b.run, write_file(rows), "", 4, &err) == 0) fail_msg("all prompts are too long");
    assert_non_null(strstr(err.msg, "all 4 prompts have more than 4 tokens"));
    if (prompt_rows_load(&plain, &b.run, write_file("{\"prompt\": \"a\"}\n{\"prompt\": \"a b c d e f g h i j\"}\n"), "",
                         4, &err))
        fail_msg("%s", err.msg);
    assert_int_equal(plain.n, 1);
    assert_int_equal(plain.n_long, 1);
    prompt_rows_free(&plain);
    run_close(&b.run);
}

static void refused_prompts(void **state)
{
    (void)state;
    static const struct {
        const char *rows, *columns, *words;
    } bad[] = {
        {"{\"question\": \"a\"}\n", "", "rows.jsonl:1: the row needs prompt or messages"},
        {"{\"prompt\": \"a\"}\n{\"prompt\": \"a\", \"messages\": []}\n", "", "rows.jsonl:2: prompt and messages"},
        {"{\"prompt\": 3}\n", "", "key `prompt`"},
        {"{\"prompt\": \"\"}\n", "", "the prompt is empty"},
        {"{\"a\": \"b\"}\n", "prompt=q", "has no column `q`"},
        {"{\"a\": \"b\"}\n", "completion=a", "prompts have prompt, messages, user and system"},
        {"\n", "", "no rows"},
    };
    struct bed b;
    struct prompt_rows p;
    struct err err;
    bed_open(&b);
    for (int i = 0; i < MT_LEN(bad); i++) {
        assert_int_equal(prompt_rows_load(&p, &b.run, write_file(bad[i].rows), bad[i].columns, 1000, &err), -1);
        if (!strstr(err.msg, bad[i].words)) fail_msg("row %d: %s", i, err.msg);
    }
    run_close(&b.run);
}

/* ---- recorded experts ---- */

static void routing(void **state)
{
    (void)state;
    enum { N = 5, L = 2, K = 2, E = 300 };
    static const char *const wrong[] = {"{\"dtype\": \"uint8\", \"shape\": [5, 2, 2], \"data\": \"\"}",
                                        "{\"dtype\": \"uint16\", \"shape\": [5, 2], \"data\": \"\"}",
                                        "{\"dtype\": \"uint16\", \"shape\": [4, 2, 2], \"data\": \"\"}",
                                        "{\"dtype\": \"uint16\", \"shape\": [5, 2, 2], \"data\": \"AA==\"}",
                                        "{\"dtype\": \"uint16\", \"shape\": [5, 2, 2]}"};
    uint16_t idx[N * L * K], *got;
    struct err err;
    for (int i = 0; i < N * L; i++)
        idx[K * i] = (uint16_t)(i * 7), idx[K * i + 1] = (uint16_t)(i * 7 + 1 + 29 * i % 200);
    for (int damage = 0; damage < 4; damage++) {
        struct text_buf text = {0};
        uint16_t copy[N * L * K];
        memcpy(copy, idx, sizeof(idx));
        if (damage == 1) copy[5] = copy[4];
        if (damage == 2) copy[7] = E;
        text_put(&text, "{\"dtype\": \"uint16\", \"shape\": [5, 2, 2], \"data\": \"");
        text_put_base64(&text, copy, sizeof(copy));
        if (damage == 3) text.text[text.size - 3] = '*';
        text_put(&text, "\"}");
        struct json_doc *doc = json_parse(text.text, text.size, "routing", &err);
        assert_non_null(doc);
        const int rc = routing_text_read(&got, json_root(doc), N, L, K, E, &err);
        assert_int_equal(rc, damage ? -1 : 0);
        if (!rc) assert_memory_equal(got, idx, sizeof(idx));
        mem_free(got);
        json_free(doc);
        text_free(&text);
    }
    for (int i = 0; i < MT_LEN(wrong); i++) {
        struct json_doc *doc = json_parse(wrong[i], (int64_t)strlen(wrong[i]), "routing", &err);
        assert_int_equal(routing_text_read(&got, json_root(doc), N, L, K, E, &err), -1);
        assert_null(got);
        json_free(doc);
    }
}

/* ---- the journal ---- */

enum { REWARDS = 2 };
static const char *const key = "0abc.1", *const other = "0abd.1";

static void put(struct journal *j, int64_t group, int64_t sample, const char *more)
{
    char line[256];
    struct err err;
    snprintf(line, sizeof(line), "{\"id\": \"%lld-%lld\", \"batch\": \"%s\", \"text\": \"%s\"}\n", (long long)group,
             (long long)sample, j->key, more);
    if (journal_add_line(j, line, (int64_t)strlen(line), &err)) fail_msg("%s", err.msg);
}

static void reopen(struct journal *j, const char *dir, int64_t step, int rank, const char *k)
{
    struct err err;
    if (journal_open(j, dir, step, rank, k, REWARDS, &err)) fail_msg("%s", err.msg);
}

/* What was written is read back by any number of ranks, after a kill at any byte. */
static void journal(void **state)
{
    (void)state;
    const double values[REWARDS] = {0.25, NAN};
    char dir[MT_PATH], part[MT_PATH];
    struct journal j;
    struct err err;
    struct file_map map;
    snprintf(dir, sizeof(dir), "%s/rollouts", scratch_dir());
    for (int rank = 0; rank < 2; rank++) {
        reopen(&j, dir, 12, rank, key);
        for (int i = 0; i < 3; i++) put(&j, 40 + rank, 2 - i, "a");
        if (journal_add_rewards(&j, 40 + rank, 1, values, &err)) fail_msg("%s", err.msg);
        journal_close(&j);
    }
    reopen(&j, dir, 12, -1, key);
    assert_int_equal(j.n, 6);
    for (int g = 40; g < 42; g++)
        for (int i = 0; i < 3; i++) {
            const struct journal_entry *e = journal_find(&j, g, i);
            assert_non_null(e);
            assert_int_equal(e->values != NULL, i == 1);
            if (i == 1) assert_true(e->values[0] == 0.25 && isnan(e->values[1]));
        }
    assert_null(journal_find(&j, 42, 0));
    assert_null(journal_find(&j, 40, 3));
    journal_close(&j);
    /* the journal gives no samples to another batch or step */
    reopen(&j, dir, 12, -1, other);
    assert_int_equal(j.n, 0);
    journal_close(&j);
    reopen(&j, dir, 13, -1, key);
    assert_int_equal(j.n, 0);
    journal_close(&j);
    reopen(&j, dir, 12, -1, "0abc.2"); /* other adapters */
    assert_int_equal(j.n, 0);
    journal_close(&j);
    reopen(&j, dir, 12, -1, "0abc"); /* any adapters */
    assert_int_equal(j.n, 6);
    assert_string_equal(j.key, key);
    journal_close(&j);
    /* cut at every byte: whole lines remain, and the rest can be written again */
    snprintf(part, sizeof(part), "%s/step-000012.part-1", dir);
    if (file_map_open(&map, part, &err)) fail_msg("%s", err.msg);
    const int64_t size = map.size;
    char *all = mem_strndup((const char *)map.data, size);
    file_map_close(&map);
    for (int64_t n = 0; n <= size; n += n < size - 7 ? 7 : 1) {
        int lines = 0;
        for (int64_t i = 0; i < n; i++) lines += all[i] == '\n';
        if (file_write_atomic(part, all, n, &err)) fail_msg("%s", err.msg);
        reopen(&j, dir, 12, 1, key);
        assert_int_equal(j.n, 3 + MT_MIN(lines, 3));
        put(&j, 77, 0, "new");
        journal_close(&j);
        reopen(&j, dir, 12, -1, key);
        assert_int_equal(j.n, 4 + MT_MIN(lines, 3));
        assert_non_null(journal_find(&j, 77, 0));
        journal_close(&j);
    }
    mem_free(all);
    assert_int_equal(journal_remove(dir, 11, &err), 0);
    assert_true(file_exists(part));
    assert_int_equal(journal_remove(dir, 12, &err), 0);
    assert_false(file_exists(part));
    assert_int_equal(journal_remove("/nowhere/at/all", 12, &err), 0);
}

/* ---- lines ---- */

static void lines(void **state)
{
    (void)state;
    static const char line[] = "{\"id\": \"5-1\", \"prompt_ids\": [1], \"completion_ids\": [2], \"reward\": null, "
                               "\"group\": 5, \"text\": \"\\\"reward\\\": null\"}";
    struct config *cfg = mem_alloc(sizeof(*cfg));
    struct text_buf out = {0};
    struct err err;
    int64_t group, sample;
    config_defaults(cfg);
    if (config_set(cfg, "reward.NAME=right=exact\tform=exact", &err)) fail_msg("%s", err.msg);
    struct rewards *rewards = rewards_open(cfg, true, &err);
    assert_non_null(rewards);
    rollout_line_reward(&out, line, sizeof(line) - 1, rewards, 0.75, (double[]){0.5, NAN});
    rewards_close(rewards);
    mem_free(cfg);
    assert_string_equal(out.text, "{\"id\": \"5-1\", \"prompt_ids\": [1], \"completion_ids\": [2], \"reward\": 0.75, "
                                  "\"rewards\": {\"right\": 0.5, \"form\": null}, \"group\": 5, \"text\": "
                                  "\"\\\"reward\\\": null\"}\n");
    struct json_doc *doc = json_parse(line, sizeof(line) - 1, "line", &err);
    assert_true(rollout_line_id(json_root(doc), &group, &sample));
    assert_true(group == 5 && sample == 1);
    json_free(doc);
    doc = json_parse("{\"id\": \"5-1x\"}", 14, "line", &err);
    assert_false(rollout_line_id(json_root(doc), &group, &sample));
    json_free(doc);
    text_free(&out);
}

/* ---- figures ---- */

static void figures(void **state)
{
    (void)state;
    const double rewards[] = {1, 0, 0, 0, NAN, 1, NAN, NAN};
    const double values[] = {1, 5, 0, NAN, 0, 5, 0, NAN, NAN, 8, 1, NAN, NAN, NAN, NAN, NAN};
    const int32_t ids[] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
    struct rollouts r = {.n = 0};
    struct rollout_stats s;
    for (int i = 0; i < 8; i++)
        rollouts_add(&r, &(struct rollout){.n_prompt = 1,
                                           .n_completion = i + 1,
                                           .prompt_ids = ids,
                                           .completion_ids = ids,
                                           .reward = rewards[i],
                                           .group = i / 2,
                                           .truncated = i >= 6});
    rollout_stats_of(&s, &r, 2, values, 2);
    assert_close(s.reward, 0.4, 1e-12);
    assert_close(s.reward_std, sqrt(0.3), 1e-12);
    assert_close(s.mean[0], 0.4, 1e-12);
    assert_close(s.mean[1], 6, 1e-12);
    assert_close(s.std[1], sqrt(3), 1e-12);
    assert_close(s.zero_std, 0.75, 1e-12);
    assert_close(s.length, 4.5, 1e-12);
    assert_true(s.shortest == 1 && s.longest == 8);
    assert_close(s.ended_length, 3.5, 1e-12);
    assert_true(s.ended_shortest == 1 && s.ended_longest == 6);
    assert_close(s.cut, 0.25, 1e-12);
    rollouts_free(&r);
}

int test_rollout_parts(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(prompts),         cmocka_unit_test(columns_and_hash),
                                       cmocka_unit_test(refused_prompts), cmocka_unit_test(routing),
                                       cmocka_unit_test(journal),         cmocka_unit_test(lines),
                                       cmocka_unit_test(figures)};
    return cmocka_run_group_tests_name("rollout_parts", tests, NULL, NULL);
}
