/* test_interrupted.c - metrics.jsonl of a run that was interrupted anywhere and continued has the events of an
 * uninterrupted one. */
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "data/file/file.h"
#include "tests/process.h"

/* Event, step and loss or prompt of every line, as two equal runs have them. Leaves out `start` and `experts`, of which
 * an interruption adds lines. */
static const char *events_of(const char *config)
{
    static char text[2][1 << 16], list[2][1 << 14];
    static int next;
    char *in = text[next ^= 1], *out = list[next], event[16];
    long long step;
    *out = 0;
    process_read(process_output(config, "metrics.jsonl"), in, sizeof(text[0]));
    for (char *line = strtok(in, "\n"); line; line = strtok(NULL, "\n")) {
        if (sscanf(line, "{\"event\":\"%15[a-z]\",\"step\":%lld", event, &step) != 2) fail_msg("%s", line);
        if (!strcmp(event, "start") || !strcmp(event, "experts")) continue;
        const char *more = strstr(line, "\"loss\":"), *prompt = strstr(line, "\"prompt\":");
        if (!more) more = prompt ? prompt : "";
        out += sprintf(out, "%s %lld %.*s\n", event, step, (int)strcspn(more, ","), more);
    }
    return list[next];
}

static void assert_same_events(const char *config, const char *whole)
{
    const char *a = events_of(config), *b = events_of(whole);
    assert_string_equal(a, b);
}

/* Starts a run and sends it `number` once metrics.jsonl has `part`. */
static void interrupt_after(const char *config, const char *const *words, const char *part, int number)
{
    static char text[1 << 16];
    const char *dir = scratch_dir(), *path = process_output(config, "metrics.jsonl");
    const pid_t pid = process_start(dir, words);
    for (int i = 0; i < 20000; i++) {
        if (file_exists(path)) process_read(path, text, sizeof(text));
        if (strstr(text, part)) break;
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    text[0] = 0;
    kill(pid, number);
    const int code = process_finish(dir, pid);
    if (code != 130 && code != 1000 + number && code) fail_msg("exit code %d:\n%s", code, said.err);
}

/* A run that is interrupted before its first step does not repeat the evaluation at step 0. */
static void the_first_evaluation_stays(void **state)
{
    (void)state;
    const char *more = "[train]\ngrad_accum = 40\n[eval]\nmax_batches = 1\n";
    const char *whole = process_config(more), *config = process_config(more);
    if (RUN(whole)) fail_msg("%s", said.err);
    const char *const words[] = {config, "--set", "log.tensorboard=true", NULL};
    interrupt_after(config, words, "\"event\":\"eval\"", SIGTERM);
    if (process_run(words)) fail_msg("%s", said.err);
    assert_null(strstr(said.out, "eval at step 0"));
    assert_same_events(config, whole);
}

/* A run that is interrupted while it answers prompts repeats the evaluation. */
static void answers_are_complete(void **state)
{
    (void)state;
    static const char *const data[] = {"eval.at_start=no", "data.eval="};
    char path[MT_PATH], more[MT_PATH + 256];
    snprintf(path, sizeof(path), "%s/prompts.jsonl", scratch_dir());
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    for (int i = 0; i < 10; i++) fprintf(f, "{\"prompt\": \"the king %d\"}\n", i);
    assert_int_equal(fclose(f), 0);
    snprintf(more, sizeof(more), "[eval]\nevery = 1\nprompts = %s\nprompt_tokens = 16\n", path);
    for (int i = 0; i < MT_LEN(data); i++) {
        const char *whole = process_config(more), *config = process_config(more);
        const char *const words[] = {config, "--set", data[i], NULL};
        if (RUN(whole, "--set", data[i])) fail_msg("%s", said.err);
        interrupt_after(config, words, "\"event\":\"sample\"", SIGTERM);
        if (process_run(words)) fail_msg("%s", said.err);
        assert_same_events(config, whole);
    }
}

/* A run was killed after the evaluation of a step whose checkpoint had been written before: the continued run has the
 * evaluation once. */
static void an_evaluation_is_there_once(void **state)
{
    (void)state;
    static const char killed[] = "{\"event\":\"eval\",\"step\":2,\"loss\":1}\n";
    const char *config = process_trained("eval.at_start=no eval.at_end=no");
    FILE *f = fopen(process_output(config, "metrics.jsonl"), "a");
    assert_true(f && fputs(killed, f) >= 0 && !fclose(f));
    if (process_run_sets(config, "train.steps=3 eval.at_start=no eval.every=2")) fail_msg("%s", said.err);
    const char *events = events_of(config), *eval = strstr(events, "eval 2 ");
    if (!eval || strstr(eval + 1, "eval 2 ")) fail_msg("%s", events);
    assert_null(strstr(events, "\"loss\":1\n"));
}

/* A run is killed between the write of a checkpoint and the deletion of the oldest one: the next start deletes the
 * oldest one, also when no step is left to train. */
static void a_kill_leaves_no_checkpoint_too_many(void **state)
{
    (void)state;
    static const char *const steps[] = {"train.steps=3", "train.steps=4"};
    for (int i = 0; i < MT_LEN(steps); i++) {
        const char *config = process_trained("train.steps=3 output.save_every=1 output.keep=3");
        const char *const words[] = {config, "--set", steps[i], "--set", "output.keep=2", NULL};
        if (process_run(words)) fail_msg("%s", said.err);
        assert_int_equal(file_exists(process_output(config, "checkpoints/step-000001")), 0);
        assert_int_equal(file_exists(process_output(config, "checkpoints/step-000002")), i == 0);
        assert_int_equal(file_exists(process_output(config, "checkpoints/step-000003")), 1);
    }
}

int test_interrupted(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_first_evaluation_stays),
        cmocka_unit_test(answers_are_complete),
        cmocka_unit_test(an_evaluation_is_there_once),
        cmocka_unit_test(a_kill_leaves_no_checkpoint_too_many),
    };
    return cmocka_run_group_tests_name("interrupted", tests, NULL, NULL);
}
