/* hub_server.c - starts tests/hub_server.py and checks the requests that it logged, and the cache. */
#include "tests/hub_server.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "data/file/file.h"
#include "data/hub/hub.h"
#include "kernels/hash.h"
#include "tests/process.h"

struct hub_server hub_server;
char *hub_home;

/* ---- the server, the environment, the log */

static bool start_server(void)
{
    int in[2], out[2];
    char port[16] = "", model[MT_PATH], script[MT_PATH];
    snprintf(hub_server.log, sizeof(hub_server.log), "%s/requests", scratch_dir());
    snprintf(model, sizeof(model), "%s", fixture("parity/case_a"));
    snprintf(script, sizeof(script), "%s", fixture("../hub_server.py"));
    assert_int_equal(pipe(in) | pipe(out), 0);
    fflush(NULL);
    hub_server.pid = fork();
    if (hub_server.pid == 0) {
        dup2(in[0], STDIN_FILENO);
        dup2(out[1], STDOUT_FILENO);
        for (int i = 0; i < 2; i++) close(in[i]), close(out[i]);
        execlp("python3", "python3", script, hub_server.log, model, (char *)NULL);
        _exit(127);
    }
    close(in[0]);
    close(out[1]);
    hub_server.keep = in[1];
    fcntl(hub_server.keep, F_SETFD, FD_CLOEXEC);
    const ssize_t n = read(out[0], port, sizeof(port) - 1);
    close(out[0]);
    if (n <= 0) return false;
    snprintf(hub_server.endpoint, sizeof(hub_server.endpoint), "http://127.0.0.1:%d/", atoi(port));
    return true;
}

void hub_stop(void)
{
    close(hub_server.keep);
    waitpid(hub_server.pid, NULL, 0);
    mem_free(hub_home);
    hub_home = NULL;
}

int hub_fresh(void **state)
{
    static const char *const cleared[] = {
        "HF_TOKEN",   "HF_TOKEN_PATH", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HUGGINGFACE_HUB_CACHE",
        "http_proxy", "https_proxy",   "all_proxy"};
    (void)state;
    for (int i = 0; i < MT_LEN(cleared); i++) unsetenv(cleared[i]);
    mem_free(hub_home);
    hub_home = mem_strdup(scratch_dir());
    setenv("HF_HOME", hub_home, 1);
    setenv("HF_ENDPOINT", hub_server.endpoint, 1);
    return truncate(hub_server.log, 0);
}

/* Requests in the log whose line contains both texts. */
int hub_requests(const char *a, const char *b)
{
    char line[1024];
    int n = 0;
    FILE *f = fopen(hub_server.log, "r");
    assert_non_null(f);
    while (fgets(line, sizeof(line), f)) n += strncmp(line, "bytes ", 6) && strstr(line, a) && strstr(line, b);
    fclose(f);
    return n;
}

const char *hub_shard(int i)
{
    static char name[4][48];
    snprintf(name[i], sizeof(name[i]), "model-0000%d-of-00003.safetensors", i + 1);
    return name[i];
}

/* ---- checks after a download */

const char *hub_in_cache(const char *repo, const char *below)
{
    static char path[4][MT_PATH];
    static int next;
    char *p = path[next++ % 4];
    snprintf(p, MT_PATH, "%s/hub/models--test--%s/%s", hub_home, repo, below);
    return p;
}

/* Fails unless every link leads to a blob whose name is the hash of its content, and there are no other files. */
void assert_verified(const char *dir)
{
    char **names, path[MT_PATH], target[MT_PATH], hex[HASH_HEX];
    int64_t n, size;
    struct err err;
    assert_int_equal(file_list(dir, &names, &n, &err), 0);
    for (int64_t i = 0; i < n; i++) {
        snprintf(path, sizeof(path), "%s/%s", dir, names[i]);
        const ssize_t length = readlink(path, target, sizeof(target) - 1);
        assert_true(length > 0);
        target[length] = 0;
        assert_int_equal(strncmp(target, "../../blobs/", 12), 0);
        char *text = file_read(path, 1 << 24, &size, &err);
        assert_non_null(text);
        struct hash h;
        if (strlen(target + 12) == 64)
            hash_init(&h);
        else
            hash_init_git(&h, size);
        hash_add(&h, text, size);
        hash_hex(&h, hex);
        assert_string_equal(target + 12, hex);
        mem_free(text);
    }
    file_list_free(names, n);
    snprintf(path, sizeof(path), "%s/../../blobs", dir);
    assert_int_equal(file_list(path, &names, &size, &err), 0);
    assert_int_equal(n, size);
    file_list_free(names, size);
}

void assert_downloads(const char *repo)
{
    char dir[MT_PATH], id[64];
    struct err err;
    snprintf(id, sizeof(id), "hub:test/%s", repo);
    if (hub_model(dir, id, "main", NULL, &err)) fail_msg("%s", err.msg);
    assert_verified(dir);
    assert_int_equal(file_is_dir(dir), 1);
}

void assert_refused(const char *repo, const char *revision, const char *a, const char *b)
{
    char dir[MT_PATH], id[64];
    struct err err = {{0}};
    snprintf(id, sizeof(id), "hub:test/%s", repo);
    assert_int_equal(hub_model(dir, id, revision, NULL, &err), -1);
    assert_says(err.msg, a);
    assert_says(err.msg, b);
}

/* False after a message that names what this machine lacks. */
bool hub_can_run(void)
{
    char dir[MT_PATH];
    struct err err;
    if (!start_server()) {
        print_message("skip: no python3, which tests/hub_server.py needs\n");
        return false;
    }
    hub_fresh(NULL);
    if (!hub_model(dir, "hub:test/plain", "main", NULL, &err) || !strstr(err.msg, "needs libcurl")) return true;
    print_message("skip: %s\n", err.msg);
    hub_stop();
    return false;
}
