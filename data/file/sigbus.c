/* sigbus.c - a table of the mapped files, and a SIGBUS handler that looks up the address in it, without locks or
 * allocations. An entry is valid once its begin is not 0. SIGBUS at any other address goes to the previous handler. */
#define _GNU_SOURCE /* sigaction */
#include "data/file/sigbus.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

enum { ENTRIES = 1024 }; /* files beyond this number are not named */

static struct {
    atomic_uintptr_t begin; /* 0: free */
    uintptr_t end;
    char *path;
} entries[ENTRIES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct sigaction before;

/* Appends text to line [cap], with control characters replaced. */
static size_t append(char *line, size_t used, size_t cap, const char *text)
{
    for (int n; *text && used < cap; text++) {
        for (n = str_printable(text); n > 1 && used < cap; n--) line[used++] = *text++;
        if (used < cap) line[used++] = n ? *text : '?';
    }
    return used;
}

static void on_bus_error(int number, siginfo_t *info, void *context)
{
    const uintptr_t at = (uintptr_t)info->si_addr;
    char line[MT_PATH + 256];
    (void)context;
    for (int i = 0; i < ENTRIES; i++) {
        const uintptr_t begin = atomic_load_explicit(&entries[i].begin, memory_order_acquire);
        if (!begin || at < begin || at >= entries[i].end) continue;
        size_t n = append(line, 0, sizeof(line) - 1, "moetrain: error: ");
        n = append(line, n, MT_PATH, entries[i].path);
        n = append(
            line, n, sizeof(line) - 1,
            ": the file was truncated, or its disk failed, while it was read: restore it and run the command again");
        line[n++] = '\n';
        if (write(STDERR_FILENO, line, n) < 0) _exit(1);
        _exit(1);
    }
    sigaction(number, &before, NULL); /* the instruction is repeated and raises the signal again */
}

static void install(void)
{
    struct sigaction action = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, &action, &before);
}

void sigbus_watch(const void *begin, int64_t bytes, const char *path)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, install);
    pthread_mutex_lock(&lock);
    int i = 0;
    while (i < ENTRIES && atomic_load_explicit(&entries[i].begin, memory_order_relaxed)) i++;
    if (i < ENTRIES) {
        entries[i].end = (uintptr_t)begin + (uintptr_t)bytes;
        entries[i].path = mem_strdup(path);
        atomic_store_explicit(&entries[i].begin, (uintptr_t)begin, memory_order_release);
    }
    pthread_mutex_unlock(&lock);
}

void sigbus_forget(const void *begin)
{
    pthread_mutex_lock(&lock);
    for (int i = 0; i < ENTRIES; i++) {
        if (atomic_load_explicit(&entries[i].begin, memory_order_relaxed) != (uintptr_t)begin) continue;
        atomic_store_explicit(&entries[i].begin, 0, memory_order_release);
        mem_free(entries[i].path);
        entries[i].path = NULL;
    }
    pthread_mutex_unlock(&lock);
}
