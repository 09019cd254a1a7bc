/* test_preferences.c - rows of two answers, or of an answer and a label: forms, boundaries of tokens, pairs that are
 * dropped whole, their order in micro-batches. */
#include "data/loader.h"
#include "tests/rows.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct dataset_options options(enum data_format format)
{
    struct dataset_options opt = rows_options();
    opt.format = format;
    return opt;
}

/* The text of a document: the prompt, "|" where the loss begins, the completion, "$" for eos. */
static const char *text_of(const struct dataset *ds, int64_t d)
{
    static char text[4][2048];
    static int next;
    char *out = text[next++ % 4];
    size_t n = 0;
    for (int64_t i = ds->doc_off[d]; i < ds->doc_off[d + 1]; i++) {
        int64_t size;
        const char *bytes = tokenizer_bytes(rows_tok, ds->ids[i], &size);
        if (ds->mask[i] == 1 && i > ds->doc_off[d] && ds->mask[i - 1] != 1) out[n++] = '|';
        n += (size_t)snprintf(out + n, 2000 - n, "%.*s", ds->ids[i] == ROWS_EOS ? 1 : (int)size,
                              ds->ids[i] == ROWS_EOS ? "$" : bytes);
    }
    out[n] = 0;
    return out;
}

static void expect(const char *row, enum data_format format, const char *chosen, const char *rejected)
{
    struct dataset ds;
    const struct dataset_options opt = options(format);
    rows_load(&ds, rows_write(row), &opt);
    assert_int_equal(ds.n_docs, rejected ? 2 : 1);
    assert_string_equal(text_of(&ds, 0), chosen);
    if (rejected) assert_string_equal(text_of(&ds, 1), rejected);
    dataset_free(&ds);
}

static void forms_of_texts(void **state)
{
    (void)state;
    expect("{\"prompt\": \"Why? \", \"chosen\": \"So.\", \"rejected\": \"No.\"}", DATA_PREFERENCE, "Why? |So.$",
           "Why? |No.$");
    expect("{\"chosen\": \"Q: a? A: yes\", \"rejected\": \"Q: a? A: no\"}", DATA_PREFERENCE, "Q: a? A:| yes$",
           "Q: a? A:| no$"); /* as TRL: the blank before the first difference belongs to the answers */
    expect("{\"prompt\": \"p\", \"responses\": [\"bad\", \"good\", \"fair\"], \"ratings\": [1, 4.5, 3]}",
           DATA_PREFERENCE, "p|good$", "p|bad$");
    expect("{\"prompt\": \"p\", \"completion\": \"c\", \"label\": true}", DATA_LABELLED, "p|c$", NULL);
    expect("{\"prompt\": \"p\", \"completion\": \"c\", \"label\": 0}", DATA_LABELLED, "p|c$", NULL);
}

/* Labels as programs and tables write them. */
static void labels(void **state)
{
    (void)state;
    static const char *const good[] = {"true", "1", "1.0", "\"true\"", "\"True\"", "\"1\"", "\"desirable\""},
                             *const bad[] = {"false", "0", "\"FALSE\"", "\"0\"", "\"undesirable\""};
    const struct dataset_options opt = options(DATA_LABELLED);
    for (int64_t i = 0; i < MT_LEN(good) + MT_LEN(bad); i++) {
        const bool is_good = i < MT_LEN(good);
        char row[128];
        struct dataset ds;
        snprintf(row, sizeof(row), "{\"prompt\": \"p\", \"completion\": \"c\", \"%s\": %s}",
                 i % 2 ? "kto_tag" : "label", is_good ? good[i] : bad[i - MT_LEN(good)]);
        rows_load(&ds, rows_write(row), &opt);
        assert_int_equal(ds.good[0], is_good);
        dataset_free(&ds);
    }
}

/* Columns with other names. */
static void columns(void **state)
{
    (void)state;
    struct dataset ds;
    struct dataset_options opt = options(DATA_PREFERENCE);
    opt.columns = "prompt=question, chosen=good, rejected=bad";
    rows_load(&ds, rows_write("{\"question\": \"q\", \"good\": \"a\", \"bad\": \"b\", \"id\": 7}"), &opt);
    assert_string_equal(text_of(&ds, 0), "q|a$");
    assert_string_equal(text_of(&ds, 1), "q|b$");
    dataset_free(&ds);
    opt.format = DATA_LABELLED;
    opt.columns = "prompt=q,completion=a,label=ok";
    rows_load(&ds, rows_write("{\"q\": \"q\", \"a\": \"a\", \"ok\": false}"), &opt);
    assert_string_equal(text_of(&ds, 0), "q|a$");
    assert_int_equal(ds.good[0], 0);
    dataset_free(&ds);
}

#define ASKED            "{\"role\": \"user\", \"content\": \"Why?\"}"
#define TURN(from, text) "{\"from\": \"" from "\", \"value\": \"" text "\"}"
#define SAID(text)       "{\"role\": \"assistant\", \"content\": \"" text "\"}"

/* Every form of a conversation gives the same two documents. */
static void forms_of_conversations(void **state)
{
    (void)state;
    static const char *const rows[] = {
        "{\"prompt\": [" ASKED "], \"chosen\": [" SAID("So.") "], \"rejected\": [" SAID("No.") "]}",
        "{\"chosen\": [" ASKED ", " SAID("So.") "], \"rejected\": [" ASKED ", " SAID("No.") "]}",
        "{\"prompt\": \"Why?\", \"chosen\": [" ASKED ", " SAID("So.") "], \"rejected\": [" ASKED ", " SAID("No.") "]}",
        "{\"prompt\": \"Why?\", \"chosen\": [" SAID("So.") "], \"rejected\": [" SAID("No.") "]}",
        "{\"prompt\": [" ASKED "], \"chosen\": \"So.\", \"rejected\": \"No.\"}",
        "{\"messages\": [" ASKED ", " SAID("So.") "], \"rejected_response\": \"No.\"}",
        "{\"messages\": [" ASKED ", " SAID("So.") "], \"rejected_messages\": [" ASKED ", " SAID("No.") "]}",
        "{\"prompt\": [" ASKED "], \"responses\": [\"No.\", \"So.\"], \"ratings\": [0, 1]}",
        "{\"prompt\": [" ASKED "], \"responses\": [" SAID("No.") ", " SAID("So.") "], \"ratings\": [0, 1]}",
        "{\"prompt\": [" ASKED "], \"chosen\": [" ASKED ", " SAID("So.") "], \"rejected\": [" ASKED
                                                                         ", " SAID("No.") "]}",
        "{\"messages\": [" ASKED "], \"chosen\": " SAID("So.") ", \"rejected\": " SAID("No.") "}",
        "{\"conversations\": [" TURN("human", "Why?") "], \"chosen\": " TURN("gpt", "So.") ", \"rejected\": " TURN(
            "gpt", "No.") "}",
        "{\"conversations\": [" TURN("human", "Why?") "], \"chosen\": \"So.\", \"rejected\": \"No.\"}",
        "{\"instruction\": \"Why?\", \"input\": \"\", \"history\": [], \"chosen\": \"So.\", \"rejected\": \"No.\"}",
    };
    struct dataset first, ds;
    const struct dataset_options opt = options(DATA_PREFERENCE);
    rows_load(&first, rows_write(rows[0]), &opt);
    assert_non_null(strstr(text_of(&first, 0), "|<|channel|>final<|message|>So."));
    assert_non_null(strstr(text_of(&first, 1), "|<|channel|>final<|message|>No."));
    for (int64_t i = 1; i < MT_LEN(rows); i++) {
        rows_load(&ds, rows_write(rows[i]), &opt);
        for (int64_t d = 0; d < 2; d++) assert_string_equal(text_of(&ds, d), text_of(&first, d));
        assert_true(ds.hash == first.hash);
        dataset_free(&ds);
    }
    static const char *const labelled[] = {
        "{\"messages\": [" ASKED ", " SAID("So.") "], \"label\": false}",
        "{\"conversations\": [" TURN("human", "Why?") ", " TURN("gpt", "So.") "], \"label\": false}",
        "{\"prompt\": [" ASKED "], \"completion\": " SAID("So.") ", \"label\": true}",
        "{\"instruction\": \"Why?\", \"output\": \"So.\", \"label\": true}",
    };
    for (int64_t i = 0; i < MT_LEN(labelled); i++) expect(labelled[i], DATA_LABELLED, text_of(&first, 0), NULL);
    dataset_free(&first);
}

/* Earlier turns, the question with its input, and the system prompt of alpaca are those of supervised rows. */
static void earlier_turns_of_alpaca(void **state)
{
    (void)state;
    static const char *const rows[] = {"{\"system\": \"S\", \"instruction\": \"c\", \"input\": \"d\", \"history\": "
                                       "[[\"a\", \"b\"]], \"output\": \"e\"}",
                                       "{\"system\": \"S\", \"instruction\": \"c\", \"input\": \"d\", \"history\": "
                                       "[[\"a\", \"b\"]], \"chosen\": \"e\", "
                                       "\"rejected\": \"f\"}"};
    struct dataset supervised, pair;
    struct dataset_options opt = options(DATA_AUTO);
    opt.loss_on = LOSS_LAST;
    rows_load(&supervised, rows_write(rows[0]), &opt);
    opt = options(DATA_PREFERENCE);
    rows_load(&pair, rows_write(rows[1]), &opt);
    assert_string_equal(text_of(&pair, 0), text_of(&supervised, 0));
    dataset_free(&supervised);
    dataset_free(&pair);
}

static void bad_rows(void **state)
{
    (void)state;
    static const struct {
        enum data_format format;
        const char *row, *why;
    } rows[] = {
        {DATA_PREFERENCE, "{\"text\": \"a\"}", "has no two answers: write `chosen` and `rejected`"},
        {DATA_PREFERENCE, "{\"prompt\": \"a\", \"chosen\": \"b\"}", "has no two answers"},
        {DATA_PREFERENCE, "{\"prompt\": \"a\", \"chosen\": 1, \"rejected\": \"b\"}",
         "`chosen` must be a text, a message or"},
        {DATA_PREFERENCE, "{\"chosen\": \"a\", \"rejected\": \"b\"}", "no common beginning"},
        {DATA_PREFERENCE, "{\"chosen\": [" SAID("a") "], \"rejected\": [" SAID("b") "]}", "no common beginning"},
        {DATA_PREFERENCE, "{\"prompt\": \"a\", \"chosen\": \"b\", \"rejected\": [" SAID("b") "]}",
         "one answer is a text"},
        {DATA_PREFERENCE, "{\"prompt\": [" ASKED "], \"chosen\": [" SAID("b") "], \"rejected\": \"c\"}",
         "one answer is a text"},
        {DATA_PREFERENCE, "{\"prompt\": \"a\", \"responses\": [[" SAID("b") "], \"c\"], \"ratings\": [1, 0]}",
         "one answer is a text"},
        {DATA_PREFERENCE, "{\"prompt\": \"a\", \"responses\": [\"b\"], \"ratings\": [1]}", "at least two"},
        {DATA_PREFERENCE, "{\"prompt\": \"a\", \"responses\": [\"b\", \"c\"], \"ratings\": [1]}", "equally many"},
        {DATA_LABELLED, "{\"prompt\": \"a\", \"completion\": \"b\"}", "has no `label` (true or false)"},
        {DATA_PREFERENCE, "{\"instruction\": \"a\", \"history\": \"b\", \"chosen\": \"c\", \"rejected\": \"d\"}",
         "`history` must be a list"},
        {DATA_PREFERENCE, "{\"chosen\": " SAID("a") ", \"rejected\": " SAID("b") "}", "no common beginning"},
        {DATA_PREFERENCE, "{\"prompt\": \"a\", \"responses\": [\"b\", \"c\"], \"ratings\": [1, 1]}",
         "in every row all answers have the same rating"},
        {DATA_LABELLED, "{\"prompt\": \"a\", \"completion\": \"b\", \"label\": 2}", "`label`: must be true or false"},
        {DATA_LABELLED, "{\"prompt\": \"a\", \"completion\": \"b\", \"label\": \"yes\"}", "must be true or false"},
        {DATA_LABELLED, "{\"prompt\": \"a\", \"chosen\": \"b\", \"rejected\": \"c\"}",
         "has two answers and no `label`"},
        {DATA_LABELLED, "{\"prompt\": \"a\", \"label\": true}", "`completion` must be a text"},
        {DATA_AUTO, "{\"prompt\": \"a\", \"chosen\": \"b\", \"rejected\": \"c\"}", "set objective.kind = dpo"},
        {DATA_LABELLED, "{\"prompt\": \"a\", \"completion\": \"b\", \"label\": true, \"kto_tag\": false}",
         "`label` and `kto_tag` differ"},
        {DATA_PREFERENCE,
         "{\"prompt\": \"a\", \"responses\": [{\"text\": \"b\"}, {\"text\": \"c\"}], \"ratings\": [1, 2]}",
         "`responses` must be texts, messages or"},
        {DATA_PREFERENCE, "{\"system\": \"s\", \"prompt\": \"a\", \"chosen\": \"b\", \"rejected\": \"c\"}",
         "chosen answer: `system` is beside a prompt that is a text"},
        {DATA_LABELLED, "{\"tools\": [{}], \"prompt\": \"a\", \"completion\": \"b\", \"label\": true}",
         "`tools` is beside a prompt that is a text"},
        {DATA_AUTO, "{\"system\": \"s\", \"prompt\": \"a\", \"completion\": \"b\"}",
         "data.columns = instruction=prompt,system=system, ...; data.dropped = warn leaves it out"},
    };
    for (int64_t i = 0; i < MT_LEN(rows); i++) {
        const struct dataset_options opt = options(rows[i].format);
        rows_refused(rows_write(rows[i].row), &opt, rows[i].why);
    }
}

/* A row of texts with a key `system`: with data.dropped = warn it is left out; with the columns that the error
 * recommends it becomes a system message. An empty text counts as absent. */
static void system_beside_texts(void **state)
{
    (void)state;
    struct dataset ds;
    struct dataset_options opt = options(DATA_PREFERENCE);
    const char *row = "{\"system\": \"s\", \"prompt\": \"a\", \"chosen\": \"b\", \"rejected\": \"c\"}";
    expect("{\"system\": \"\", \"tools\": [], \"prompt\": \"a\", \"chosen\": \"b\", \"rejected\": \"c\"}",
           DATA_PREFERENCE, "a|b$", "a|c$");
    opt.dropped = DROPPED_WARN;
    rows_load(&ds, rows_write(row), &opt);
    assert_string_equal(text_of(&ds, 0), "a|b$");
    assert_int_equal(ds.counts.n_dropped, 1);
    dataset_free(&ds);
    opt.dropped = DROPPED_REFUSE;
    opt.columns = "instruction=prompt,system=system,chosen=chosen,rejected=rejected";
    rows_load(&ds, rows_write(row), &opt);
    assert_int_equal(ds.n_docs, 2);
    assert_non_null(strchr(text_of(&ds, 0), 's'));
    dataset_free(&ds);
}

#define PAIR(p, c, r) "{\"prompt\": \"" p "\", \"chosen\": \"" c "\", \"rejected\": \"" r "\"}\n"

/* A pair with one side that is too long, empty or as good as the other is dropped; equal sides are counted. */
static void pairs_are_dropped_whole(void **state)
{
    (void)state;
    struct dataset ds;
    struct dataset_options opt = options(DATA_PREFERENCE);
    opt.seq_len = 8;
    rows_load(
        &ds,
        rows_write(PAIR("ab", "c", "d") PAIR("ab", "c", "defghi") PAIR("ab", "cdefgh", "d") PAIR("ab", " ", "d")
                       PAIR("ab", "same", "same") "{\"prompt\": \"a\", \"responses\": [\"b\", \"c\"], \"ratings\": "
                                                  "[2, 2]}\n" PAIR("ab", "e", "fghij")),
        &opt);
    assert_int_equal(ds.n_docs, 6);
    assert_int_equal(dataset_units(&ds), 3);
    assert_int_equal(ds.n_overlong, 2);
    assert_int_equal(ds.n_unlabelled, 2);
    assert_int_equal(ds.counts.n_unanswered, 1);
    assert_int_equal(ds.counts.n_tied, 1);
    assert_int_equal(ds.counts.n_identical, 1);
    assert_string_equal(text_of(&ds, 5), "ab|fghij$");
    dataset_free(&ds);
}

/* Tokens of a prompt never depend on its answer. */
static void boundaries(void **state)
{
    (void)state;
    struct dataset ds;
    struct err err;
    struct dataset_options opt = options(DATA_PREFERENCE);
    struct tokenizer *tok = tokenizer_open(fixture("parity/case_a"), &err);
    assert_non_null(tok);
    opt.vocab = 1 << 20;
    opt.eos = 1;
    assert_int_equal(dataset_load(&ds, rows_write(PAIR("some wo", "rds of mine", ", not these")), tok, &opt, &err), 0);
    int64_t prompt[2] = {0, 0};
    struct token_list list = {0};
    for (int64_t d = 0; d < 2; d++)
        while (!ds.mask[ds.doc_off[d] + prompt[d]]) prompt[d]++;
    assert_int_equal(prompt[0], prompt[1]);
    assert_int_equal(tokenizer_encode(tok, "some wo", 7, true, &list, &err), 0);
    assert_int_equal(prompt[0], list.count);
    for (int64_t d = 0; d < 2; d++)
        assert_memory_equal(ds.ids + ds.doc_off[d], list.ids, (size_t)list.count * sizeof(*list.ids));
    token_list_free(&list);
    dataset_free(&ds);
    tokenizer_free(tok);
}

static const char *numbered_rows(int64_t n, bool labelled)
{
    char *text = mem_alloc(96 * n + 1);
    int64_t size = 0;
    for (int64_t i = 0; i < n; i++) {
        const int c = 'a' + (int)i;
        size += labelled ? sprintf(text + size, "{\"prompt\": \"p\", \"completion\": \"%c\", \"label\": %s}\n", c,
                                   i % 2 ? "true" : "false")
                         : sprintf(text + size, "{\"prompt\": \"p\", \"chosen\": \"%c\", \"rejected\": \"%c%c\"}\n", c,
                                   c, c);
    }
    const char *path = rows_write_text(text, size);
    mem_free(text);
    return path;
}

/* Shuffles keep pairs together, and an epoch has each once; micro-batches count pairs. */
static void shuffles(void **state)
{
    (void)state;
    struct dataset ds;
    enum { N = 9 };
    struct dataset_options opt = options(DATA_PREFERENCE);
    opt.prompt_loss = true;
    rows_load(&ds, numbered_rows(N, false), &opt);
    const struct loader_options lo = {
        .seq_len = opt.seq_len, .micro_batch = 2, .shuffle = true, .pairs = true, .seed = 3};
    struct loader *l = loader_open(&ds, &lo, (struct loader_pos){0, 0});
    bool moved = false;
    assert_int_equal(loader_epoch_batches(l, 0), 5);
    for (int epoch = 0; epoch < 2; epoch++) {
        bool seen[N] = {false};
        for (int64_t i = 0, at = 0; i < 5; i++) {
            struct batch b;
            loader_next(l, &b, NULL);
            assert_int_equal(b.n_unit, i < 4 ? 2 : 1);
            assert_int_equal(b.n_answer, 2 * b.n_unit);
            assert_int_equal(b.n_chosen, 2 * b.n_unit); /* a letter and eos */
            for (int64_t a = 0; a < b.n_answer; a += 2, at++) {
                const int32_t first = b.tok[b.cu[a] + 1], second = b.tok[b.cu[a + 1] + 1];
                assert_int_equal(first, second);
                assert_int_equal(b.cu[a + 1] - b.cu[a], 3);
                assert_int_equal(b.cu[a + 2] - b.cu[a + 1], 4);
                assert_int_equal(b.answer_cu[a + 1] - b.answer_first[a], 2);
                assert_int_equal(b.answer_cu[a + 2] - b.answer_first[a + 1], 3);
                assert_int_equal(b.answer_first[a], b.answer_cu[a]); /* the prompt has one token, the first */
                assert_false(seen[first - ds.ids[1]]);
                seen[first - ds.ids[1]] = true;
                moved = moved || first - ds.ids[1] != at;
            }
            batch_free(&b);
        }
    }
    assert_true(moved);
    loader_close(l);
    dataset_free(&ds);
}

/* Weights, splits and the cache keep pairs and labels. */
static void parts_of_a_data_set(void **state)
{
    (void)state;
    struct err err;
    char path[MT_PATH + 8];
    for (int labelled = 0; labelled < 2; labelled++) {
        struct dataset ds, held, again;
        struct dataset_options opt = options(labelled ? DATA_LABELLED : DATA_PREFERENCE);
        opt.cache_dir = scratch_dir();
        snprintf(path, sizeof(path), "%s*0.5", numbered_rows(8, labelled));
        rows_load(&ds, path, &opt);
        rows_load(&again, path, &opt); /* from the cache */
        assert_true(ds.hash == again.hash && again.pairs == !labelled && !again.good == !labelled);
        assert_int_equal(dataset_units(&ds), 4);
        assert_int_equal(dataset_split(&ds, &held, 0.5, 1, &err), 0);
        for (int part = 0; part < 2; part++) {
            const struct dataset *of = part ? &held : &ds;
            assert_int_equal(dataset_units(of), 2);
            for (int64_t d = 0; d < of->n_docs && labelled; d++)
                assert_int_equal(of->good[d], (of->ids[of->doc_off[d] + 1] - 'a') % 2);
            for (int64_t d = 0; d < of->n_docs && !labelled; d++)
                assert_int_equal(of->doc_off[d + 1] - of->doc_off[d], 3 + d % 2);
        }
        dataset_free(&ds);
        dataset_free(&held);
        dataset_free(&again);
    }
}

int test_preferences(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(forms_of_texts),
        cmocka_unit_test(labels),
        cmocka_unit_test(earlier_turns_of_alpaca),
        cmocka_unit_test(forms_of_conversations),
        cmocka_unit_test(columns),
        cmocka_unit_test(bad_rows),
        cmocka_unit_test(system_beside_texts),
        cmocka_unit_test(pairs_are_dropped_whole),
        cmocka_unit_test(boundaries),
        cmocka_unit_test(shuffles),
        cmocka_unit_test(parts_of_a_data_set),
    };
    return cmocka_run_group_tests_name("preferences", tests, rows_load_tokenizer, rows_free_tokenizer);
}
