/* test_push.c - pushes to tests/hub_server.py, which follows the hub's published protocol: what arrives, what is not
 * sent again, retries, refusals, and where the token goes. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/file/file.h"
#include "data/hub/hub.h"
#include "data/hub/hub_push.h"
#include "tests/hub_server.h"
#include "tests/process.h"

static void put_file(const char *dir, const char *name, int64_t size, int seed)
{
    char path[MT_PATH];
    struct err err;
    char *data = mem_alloc(size + 1);
    for (int64_t i = 0; i < size; i++) data[i] = (char)rng_u64((uint64_t)seed, (uint64_t)i);
    snprintf(path, sizeof(path), "%s/%s", dir, name);
    if (file_write_atomic(path, data, size, &err)) fail_msg("%s", err.msg);
    mem_free(data);
}

/* A model of large and small files, in two folders. */
static const char *make_folder(void)
{
    static char dir[4][MT_PATH];
    static int next;
    char below[MT_PATH + 8], *d = dir[next++ % 4];
    snprintf(d, MT_PATH, "%s", scratch_dir());
    snprintf(below, sizeof(below), "%s/below", d);
    assert_int_equal(mkdir(below, 0755), 0);
    put_file(d, "config.json", 100, 1 + next);
    put_file(d, "tokenizer.json", 1001, 2);
    put_file(d, "chat_template.jinja", 0, 3);
    put_file(d, "model.safetensors", 350001, 4 + 10 * next); /* four parts */
    put_file(d, "below/small.bin", 5000, 5 + 10 * next);     /* one */
    put_file(d, "below/a.txt", 2, 6);
    put_file(d, "ignored.txt", 2, 6);
    put_file(d, ".hidden", 7, 7);
    return d;
}

/* The number of files in the commit; -1: err is set. */
static int64_t pushed(const char *dir, const char *to, bool private, struct err *err)
{
    char url[MT_PATH], id[128];
    int64_t changed;
    snprintf(id, sizeof(id), "hub:test/%s", to);
    const struct hub_push push = {dir, id, private, "first weights"};
    if (hub_push(&push, url, &changed, err)) return -1;
    snprintf(id, sizeof(id), "/test/%s", to);
    assert_true(str_ends(url, id));
    return changed;
}

static void assert_pushes(const char *dir, const char *to, int64_t n)
{
    struct err err;
    const int64_t got = pushed(dir, to, false, &err);
    if (got < 0) fail_msg("%s", err.msg);
    assert_int_equal(got, n);
}

static void assert_fails(const char *dir, const char *to, const char *why)
{
    struct err err;
    assert_int_equal(pushed(dir, to, false, &err), -1);
    assert_says(err.msg, why);
}

/* Downloads the model and compares its files with those of the folder. */
static void assert_arrived(const char *dir, const char *to)
{
    static const char *const names[] = {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"};
    char id[128], there[MT_PATH], a[2 * MT_PATH], b[2 * MT_PATH];
    struct err err;
    snprintf(id, sizeof(id), "hub:test/%s", to);
    if (hub_model(there, id, "main", NULL, &err)) fail_msg("%s", err.msg);
    for (int i = 0; i < MT_LEN(names); i++) {
        snprintf(a, sizeof(a), "%s/%s", dir, names[i]);
        snprintf(b, sizeof(b), "%s/%s", there, names[i]);
        assert_same_file(a, b);
    }
}

static void files_arrive(void **state)
{
    (void)state;
    struct err err;
    setenv("HF_TOKEN", "hf_good", 1);
    const char *dir = make_folder();
    assert_int_equal(pushed(dir, "pushed", true, &err), 6);
    assert_int_equal(hub_requests("commit test/pushed first weights: below/a.txt below/small.bin chat_template.jinja "
                                  "config.json model.safetensors tokenizer.json\n",
                                  ""),
                     1);
    assert_int_equal(hub_requests("cdn PUT", ""), 5);
    assert_int_equal(hub_requests("cdn PUT", "hf_good"), 0); /* another host gets no token */
    assert_int_equal(hub_requests("POST /lfs/verify", "hf_good"), 1);
    assert_int_equal(hub_requests("POST /api/repos/create", ""), 1);
    assert_arrived(dir, "pushed");
}

/* Files that the hub already has are not sent; a push without changes makes no commit. */
static void a_second_push_sends_what_changed(void **state)
{
    (void)state;
    setenv("HF_TOKEN", "hf_good", 1);
    const char *dir = make_folder();
    assert_pushes(dir, "twice", 6);
    hub_fresh(NULL);
    setenv("HF_TOKEN", "hf_good", 1);
    assert_pushes(dir, "twice", 0);
    assert_int_equal(hub_requests("PUT", "") + hub_requests("commit", "") + hub_requests("create", ""), 0);
    put_file(dir, "tokenizer.json", 50, 9);
    assert_pushes(dir, "twice", 1);
    assert_int_equal(hub_requests("commit test/twice first weights: tokenizer.json\n", ""), 1);
    assert_int_equal(hub_requests("PUT", ""), 0);
}

/* After a failed commit the contents that were sent are not sent again. */
static void a_push_continues(void **state)
{
    (void)state;
    setenv("HF_TOKEN", "hf_good", 1);
    const char *dir = make_folder();
    assert_fails(dir, "refuse-once", "test/refuse-once: the hub refuses to make the commit (HTTP 400): Your README.md");
    assert_int_equal(hub_requests("PUT", ""), 5);
    assert_pushes(dir, "refuse-once", 6);
    assert_int_equal(hub_requests("PUT", ""), 5);
    assert_arrived(dir, "refuse-once");
}

static void breaks_are_retried(void **state)
{
    (void)state;
    setenv("HF_TOKEN", "hf_good", 1);
    const char *dir = make_folder();
    assert_pushes(dir, "flaky-push", 6);
    assert_int_equal(hub_requests("cdn PUT", ""), 15);
    assert_arrived(dir, "flaky-push");
}

static void refusals(void **state)
{
    (void)state;
    struct err err;
    const char *dir = make_folder(), *empty = scratch_dir();
    assert_fails(dir, "none", "push needs a token with write access: set HF_TOKEN");
    assert_int_equal(hub_requests("", ""), 0);
    setenv("HF_TOKEN", "hf_other", 1);
    assert_fails(dir, "none", "refuses to create it (HTTP 403): You don't have the rights to create a model");
    setenv("HF_TOKEN", "hf_good", 1);
    assert_int_equal(pushed(dir, "plain", true, &err), -1);
    assert_says(err.msg, "--private: test/plain exists and is public");
    assert_fails(dir, "a/b", "expected hub:OWNER/NAME");
    assert_fails(empty, "none", "no files in it");
    assert_fails(dir, "foreign", "is not used: the connection would be unencrypted");
    assert_fails(dir, "no-etag", "gives no ETag");
    assert_fails(dir, "short-parts", "no address for part 4");
    assert_int_equal(hub_requests("commit", ""), 0);
    setenv("HF_HUB_OFFLINE", "1", 1);
    assert_fails(dir, "none", "HF_HUB_OFFLINE");
}

/* The command takes an adapter, and not the folder of a run. */
static void the_command(void **state)
{
    (void)state;
    setenv("HF_TOKEN", "hf_good", 1);
    const char *config = process_trained("log.report=no"), *adapter = process_output(config, "adapter");
    assert_int_equal(RUN("push", process_output(config, ""), "hub:test/run"), 1);
    assert_says(said.err, "is the output.dir of a run: push its adapter/");
    assert_int_equal(RUN("push", scratch_dir(), "hub:test/run"), 1);
    assert_says(said.err, "no adapter_config.json, config.json or .gguf in it");
    if (RUN("push", adapter, "hub:test/run", "--message", "two steps")) fail_msg("%s", said.err);
    assert_says(said.out, "/test/run\n");
    assert_null(strstr(said.err, "hf_good"));
    assert_int_equal(hub_requests("commit test/run two steps: README.md adapter_config.json adapter_model.safeten", ""),
                     1);
    if (RUN("push", adapter, "hub:test/run")) fail_msg("%s", said.err);
    assert_says(said.out, "nothing to send");
    assert_null(strstr(said.err, "no export has"));
    put_file(adapter, "notes.txt", 3, 1);
    put_file(adapter, "weights.bin", 3, 1);
    if (RUN("push", adapter, "hub:test/run")) fail_msg("%s", said.err);
    assert_says(said.err, ": push also sends files that no export has: notes.txt, weights.bin\n");
    const char *model = make_folder();
    assert_int_equal(RUN("push", model, "hub:test/model"), 1);
    assert_says(said.err, ": a checkpoint whose README.md is not that of an export");
    assert_int_equal(hub_requests("test/model", ""), 0);
    char path[2 * MT_PATH];
    struct err err;
    static const char card[] = "# Merged with a LoRA adapter: x\n";
    snprintf(path, sizeof(path), "%s/README.md", model);
    assert_int_equal(file_write_atomic(path, card, (int64_t)strlen(card), &err), 0);
    if (RUN("push", model, "hub:test/model")) fail_msg("%s", said.err);
}

static int stop(void **state)
{
    (void)state;
    hub_stop();
    return 0;
}

int test_push(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(files_arrive, hub_fresh),
        cmocka_unit_test_setup(a_second_push_sends_what_changed, hub_fresh),
        cmocka_unit_test_setup(a_push_continues, hub_fresh),
        cmocka_unit_test_setup(breaks_are_retried, hub_fresh),
        cmocka_unit_test_setup(refusals, hub_fresh),
        cmocka_unit_test_setup(the_command, hub_fresh),
    };
    if (!hub_can_run()) return 0;
    return cmocka_run_group_tests_name("push", tests, NULL, stop);
}
