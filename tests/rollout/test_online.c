/* test_online.c - the sampled rows of one generation of online RL: the same after interruptions at any pass, and for
 * any number of sequences at once; dynamic sampling; files. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "data/file/file.h"
#include "data/json/text.h"
#include "data/rollout/rollout_rows.h"
#include "tests/test.h"
#include "train/rollout/online_batches.h"

struct bed {
    struct config cfg;
    struct run run;
    struct online o;
    int64_t n_pass;
};

static int64_t passes, stop_after;
static bool stop(void) { return stop_after && ++passes >= stop_after; }

static const char *write_prompts(const char *dir)
{
    static char path[MT_PATH];
    struct text_buf text = {0};
    struct err err;
    char row[128];
    for (int i = 0; i < 7; i++) {
        snprintf(row, sizeof(row), "{\"prompt\": \"Tom has %d apples and %d pears\", \"answer\": \"%d\"}\n", i, 3 * i,
                 4 * i);
        text_put(&text, row);
    }
    snprintf(path, sizeof(path), "%s/prompts.jsonl", dir);
    if (file_write_atomic(path, text.text, text.size, &err)) fail_msg("%s", err.msg);
    text_free(&text);
    return path;
}

static void bed_open(struct bed *b, const char *dir, const char *sets, int64_t n_seq)
{
    struct err err = {.msg = ""};
    char text[1024];
    memset(b, 0, sizeof(*b));
    passes = stop_after = 0;
    config_defaults(&b->cfg);
    snprintf(b->cfg.model.path, sizeof(b->cfg.model.path), "%s", fixture("../../configs/tiny-gptoss"));
    snprintf(text, sizeof(text),
             "train.device=cpu objective.kind=grpo lora.r=4 data.seq_len=64 output.dir=%s data.train=%s "
             "objective.num_generations=4 "
             "objective.max_completion_length=20 train.micro_batch=4 train.grad_accum=3 train.seed=5 %s",
             dir, write_prompts(dir), sets);
    if (config_set(&b->cfg, "reward.various=repetition n=1", &err) ||
        config_set(&b->cfg, "reward.end=length max=20 cache=10", &err) ||
        config_set(&b->cfg, "reward.end.weight=0.5", &err))
        fail_msg("%s", err.msg);
    for (char *set = strtok(text, " "); set; set = strtok(NULL, " ")) {
        for (char *c = set; (c = strchr(c, '$'));) *c = ' '; /* $: a blank */
        if (config_set(&b->cfg, set, &err)) fail_msg("%s", err.msg);
    }
    if (run_open_headers(&b->run, &b->cfg, &err) || online_open(&b->o, &b->run, &err)) fail_msg("%s", err.msg);
    b->run.generation = (struct plan_generation){
        .n_seq = n_seq, .n_tok = 64, .chunk = 1, .routing = b->cfg.rollout.replay, .cache_tok = 1};
    if (run_open_model(&b->run, NULL, PLAN_TRAIN, &err)) fail_msg("%s", err.msg);
}

static void bed_close(struct bed *b)
{
    online_close(&b->o);
    run_close(&b->run);
}

static int batch(struct bed *b, int64_t step, struct loader_pos pos)
{
    struct err err;
    const int rc = online_batch(&b->o, step, pos, stop, &err);
    if (rc < 0) fail_msg("%s", err.msg);
    return rc;
}

static void read_rows(const char *dir, int64_t step, char *text, int64_t cap)
{
    char path[MT_PATH];
    struct err err;
    int64_t size;
    snprintf(path, sizeof(path), "%s/rollouts/step-%06lld.jsonl", dir, (long long)step);
    char *all = file_read(path, cap - 1, &size, &err);
    if (!all) fail_msg("%s", err.msg);
    memcpy(text, all, (size_t)size + 1);
    mem_free(all);
}

enum { FILE_BYTES = 1 << 20 };
static char wanted[FILE_BYTES], got[FILE_BYTES];

/* A batch has whole groups, in the order of the prompts. The batch of the next step has other rows. The rows of step 0
 * are the same when its batch is made again. Its file can be loaded as recorded rollouts, with the same rows. */
static void rows_of_a_batch(void **state)
{
    (void)state;
    struct bed b;
    char dir[MT_PATH], path[MT_PATH];
    struct rollouts read = {.n = 0};
    struct err err;
    snprintf(dir, sizeof(dir), "%s", scratch_dir());
    bed_open(&b, dir, "", 6);
    assert_int_equal(batch(&b, 0, (struct loader_pos){0, 0}), 0);
    const struct rollouts *r = &b.o.rows;
    assert_int_equal(r->n, 12);
    assert_int_equal(rollouts_check_groups(r, 4, &err), 0);
    assert_true(r->n_logprobs == 12 && r->n_routing > 0 && r->routing[11]);
    assert_true(b.o.after.epoch == 0 && b.o.after.index == 3);
    for (int64_t i = 0; i < r->n; i++) {
        const struct rollout row = rollouts_row(r, i);
        assert_true(row.n_completion <= 20 && row.group == i / 4);
        assert_true(row.reward > -1.5 && row.reward <= 0);
    }
    assert_true(b.o.stats.n == 12 && b.o.stats.reward < 0 && b.o.stats.reward_std > 0);
    /* the next step has other samples; its prompts continue in the order of the data, into the next epoch */
    const uint64_t first = rollouts_hash(r);
    assert_int_equal(batch(&b, 1, (struct loader_pos){0, 6}), 0);
    assert_true(rollouts_hash(&b.o.rows) != first);
    assert_true(b.o.after.epoch == 1 && b.o.after.index == 2);
    assert_true(rollouts_row(&b.o.rows, 0).group == 6 && rollouts_row(&b.o.rows, 4).group == 7);
    /* the rollouts file gives the same rows, without routing */
    snprintf(path, sizeof(path), "%s/rollouts/step-000001.jsonl", dir);
    const struct rollout_options opt = {.vocab = b.run.arch.vocab, .seq_len = 64};
    if (rollout_rows_load(&read, path, &opt, &err)) fail_msg("%s", err.msg);
    assert_int_equal(batch(&b, 0, (struct loader_pos){0, 0}), 0);
    assert_int_equal(read.n, r->n);
    assert_memory_equal(read.ids, r->ids, (size_t)r->n_tok * sizeof(*r->ids));
    assert_memory_equal(read.reward, r->reward, (size_t)r->n * sizeof(*r->reward));
    assert_memory_equal(read.logprobs, r->logprobs, (size_t)r->n_tok * sizeof(*r->logprobs));
    rollouts_free(&read);
    bed_close(&b);
}

/* A batch that is interrupted after any pass, and continued when the run is opened again, has the same bytes. Samples
 * that were complete are not sampled again. */
static void interrupted(void **state)
{
    (void)state;
    struct bed b;
    char dir[MT_PATH], again[MT_PATH];
    snprintf(dir, sizeof(dir), "%s", scratch_dir());
    bed_open(&b, dir, "", 6);
    assert_int_equal(batch(&b, 3, (struct loader_pos){0, 2}), 0);
    const uint64_t want = rollouts_hash(&b.o.rows);
    const double all = b.o.sample_tok;
    read_rows(dir, 4, wanted, FILE_BYTES);
    bed_close(&b);
    snprintf(again, sizeof(again), "%s", scratch_dir());
    for (int after = 3, more = 1; more; after += 9) {
        bed_open(&b, again, after % 2 ? "" : "train.threads=1", after % 3 ? 5 : 2);
        stop_after = after;
        more = batch(&b, 3, (struct loader_pos){0, 2});
        if (!more) {
            assert_true(b.o.n_journal > 0 && b.o.sample_tok < all);
            assert_true(rollouts_hash(&b.o.rows) == want);
        }
        bed_close(&b);
    }
    read_rows(again, 4, got, FILE_BYTES);
    assert_string_equal(got, wanted);
    /* a complete journal: all samples are read from it, until a checkpoint of the step deletes it */
    bed_open(&b, again, "", 6);
    assert_int_equal(batch(&b, 3, (struct loader_pos){0, 2}), 0);
    assert_true(b.o.n_journal == 12 && b.o.sample_tok == 0 && rollouts_hash(&b.o.rows) == want);
    online_saved(&b.o, 4);
    b.o.first = -1;
    assert_int_equal(batch(&b, 3, (struct loader_pos){0, 2}), 0);
    assert_true(b.o.n_journal == 0 && b.o.sample_tok == all && rollouts_hash(&b.o.rows) == want);
    bed_close(&b);
    /* a run with other settings does not use these samples */
    bed_open(&b, again, "objective.temperature=0.9", 6);
    assert_int_equal(batch(&b, 3, (struct loader_pos){0, 2}), 0);
    assert_int_equal(b.o.n_journal, 0);
    bed_close(&b);
}

/* The number of rows that a step trains on; only these rows have labels. */
static int64_t count_rows(const struct bed *b, int64_t step)
{
    int64_t n = 0;
    for (int64_t i = 0; i < b->cfg.train.grad_accum; i++) {
        struct batch mb;
        online_micro_batch(&b->o, step, i, &mb);
        assert_true((mb.n_label > 0) == (mb.n_unit > 0));
        n += mb.n_unit;
        batch_free(&mb);
    }
    return n;
}

/* Dynamic sampling replaces groups of equal rewards, in at most rollout.dynamic_rounds rounds. If too few other groups
 * are found, the batch has its full size, but only the rows of those groups are trained on. */
static void dynamic(void **state)
{
    (void)state;
    struct bed b;
    char dir[MT_PATH];
    snprintf(dir, sizeof(dir), "%s", scratch_dir());
    bed_open(&b, dir, "rollout.dynamic_rounds=6 reward.NAME= reward.word=regex$pattern=the", 6);
    assert_int_equal(batch(&b, 0, (struct loader_pos){0, 0}), 0);
    const struct rollouts *r = &b.o.rows;
    int64_t last = -1;
    assert_true(b.o.n_flat > 0 && b.o.n_round > 1);
    for (int g = 0; g < 3; g++) {
        assert_false(rollout_is_flat(r->reward + 4 * g, 4));
        assert_true(rollouts_row(r, 4 * g).group > last);
        last = rollouts_row(r, 4 * g).group;
    }
    assert_int_equal(b.o.after.epoch * 7 + b.o.after.index, 3 + b.o.n_flat);
    const uint64_t want = rollouts_hash(r);
    b.o.first = -1;
    assert_int_equal(batch(&b, 0, (struct loader_pos){0, 0}), 0);
    assert_true(b.o.sample_tok == 0 && rollouts_hash(r) == want);
    bed_close(&b);
    bed_open(&b, dir, "rollout.dynamic_rounds=2 reward.NAME= reward.never=exact", 6);
    assert_int_equal(batch(&b, 0, (struct loader_pos){0, 0}), 0);
    assert_true(b.o.n_flat == 6 && b.o.n_round == 2 && b.o.rows.n == 12 && b.o.stats.zero_std == 1);
    assert_true(b.o.after.index == 6);
    assert_int_equal(count_rows(&b, 0), 0);
    bed_close(&b);
    /* too few groups: the others have neither loss nor reward, and count in no mean */
    bed_open(&b, dir, "rollout.dynamic_rounds=2 reward.NAME= reward.word=regex$pattern=the train.seed=18", 6);
    assert_int_equal(batch(&b, 0, (struct loader_pos){0, 0}), 0);
    assert_true(b.o.n_kept > 0 && b.o.n_kept < 12);
    assert_int_equal(count_rows(&b, 0), b.o.n_kept);
    for (int64_t i = 0; i < 12; i++) assert_true(isnan(b.o.rows.reward[i]) == (i >= b.o.n_kept));
    bed_close(&b);
    /* with one round groups of equal rewards are not replaced */
    bed_open(&b, dir, "reward.NAME= reward.never=exact", 6);
    assert_int_equal(batch(&b, 0, (struct loader_pos){0, 0}), 0);
    assert_true(b.o.n_flat == 0 && count_rows(&b, 0) == 12 && b.o.rows.reward[11] < 1);
    bed_close(&b);
}

int test_online(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(rows_of_a_batch), cmocka_unit_test(interrupted),
                                       cmocka_unit_test(dynamic)};
    return cmocka_run_group_tests_name("online", tests, NULL, NULL);
}
