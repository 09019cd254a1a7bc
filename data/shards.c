/* shards.c - names, headers and index of sharded checkpoints, as transformers writes them. */
#include "data/shards.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "data/json/json.h"

static int io_error(const struct shards *s, const struct shard *shard, const char *doing, struct err *err)
{
    return err_set(err, "%s/%s: cannot %s: %s", s->dir, shard->name, doing, strerror(errno));
}

static int write_at(int fd, const void *data, int64_t n, int64_t at)
{
    while (n > 0) {
        const ssize_t put = pwrite(fd, data, (size_t)n, at);
        if (put < 0 && errno == EINTR) continue;
        if (put < 0) return -1;
        data = (const char *)data + put;
        at += put;
        n -= put;
    }
    return 0;
}

static void deal(struct shards *s, int64_t most)
{
    int64_t bytes = 0;
    s->shards = mem_array(s->n, sizeof(*s->shards));
    for (int64_t i = 0; i < s->n; i++) {
        const int64_t more = safetensors_entry_bytes(&s->entries[i]);
        if (i == 0 || bytes + more > most) {
            s->shards[s->n_shards++] = (struct shard){.first = i, .fd = -1};
            bytes = 0;
        }
        s->in[i] = s->n_shards - 1;
        s->shards[s->in[i]].n++;
        bytes += more;
        s->bytes += more;
    }
    for (int i = 0; i < s->n_shards; i++)
        if (s->n_shards == 1)
            snprintf(s->shards[i].name, sizeof(s->shards[i].name), "model.safetensors");
        else
            snprintf(s->shards[i].name, sizeof(s->shards[i].name), "model-%05d-of-%05d.safetensors", i + 1,
                     s->n_shards);
}

/* Creates a shard's file and writes its header. safetensors_head sorts the entries, so each `data` points to the
 * element of s->at that gets the entry's offset. */
static int create(struct shards *s, struct shard *shard, struct err *err)
{
    char path[MT_PATH], *head;
    int64_t size;
    struct st_entry *sorted = mem_array(shard->n, sizeof(*sorted));
    for (int64_t i = 0; i < shard->n; i++) {
        sorted[i] = s->entries[shard->first + i];
        sorted[i].data = &s->at[shard->first + i];
    }
    int rc = safetensors_head(sorted, shard->n, &head, &size, err);
    for (int64_t i = 0, at = size; i < shard->n && !rc; at += safetensors_entry_bytes(&sorted[i++]))
        *(int64_t *)(uintptr_t)sorted[i].data = at;
    mem_free(sorted);
    if (!rc) rc = str_format(path, sizeof(path), err, "path of the shard", "%s/%s", s->dir, shard->name);
    if (!rc) {
        shard->fd = file_open_own(path, O_WRONLY, err);
        if (shard->fd < 0)
            rc = -1;
        else if (ftruncate(shard->fd, 0) || write_at(shard->fd, head, size, 0))
            rc = io_error(s, shard, "write", err);
    }
    mem_free(head);
    return rc;
}

int shards_open(struct shards *s, const char *dir, struct st_entry *entries, int64_t n, int64_t most, struct err *err)
{
    *s = (struct shards){.n = n, .entries = entries};
    s->at = mem_array(n, sizeof(*s->at));
    s->in = mem_array(n, sizeof(*s->in));
    deal(s, most);
    int rc = str_format(s->dir, sizeof(s->dir), err, "path", "%s", dir);
    for (int i = 0; i < s->n_shards && !rc; i++) rc = create(s, &s->shards[i], err);
    if (rc) shards_close(s);
    return rc;
}

int shards_put(struct shards *s, int64_t i, int64_t at, const void *data, int64_t size, struct err *err)
{
    struct shard *shard = &s->shards[s->in[i]];
    MT_REQUIRE(at >= 0 && size <= safetensors_entry_bytes(&s->entries[i]) - at, "%s has no such bytes",
               s->entries[i].name);
    return write_at(shard->fd, data, size, s->at[i] + at) ? io_error(s, shard, "write", err) : 0;
}

static int write_index(const struct shards *s, struct err *err)
{
    struct json_out o = {.indent = true};
    json_out_open(&o, NULL, '{');
    json_out_open(&o, "metadata", '{');
    json_out_i64(&o, "total_size", s->bytes);
    json_out_close(&o, '}');
    json_out_open(&o, "weight_map", '{');
    for (int64_t i = 0; i < s->n; i++) json_out_str(&o, s->entries[i].name, s->shards[s->in[i]].name);
    json_out_close(&o, '}');
    json_out_close(&o, '}');
    const int rc = file_write_in(s->dir, "model.safetensors.index.json", o.text, o.size, err);
    json_out_free(&o);
    return rc;
}

int shards_finish(struct shards *s, struct err *err)
{
    for (int i = 0; i < s->n_shards; i++) {
        struct shard *shard = &s->shards[i];
        const int failed = fsync(shard->fd), fd = shard->fd;
        shard->fd = -1;
        if (failed || close(fd)) return io_error(s, shard, "write", err);
    }
    return s->n_shards > 1 ? write_index(s, err) : 0;
}

void shards_close(struct shards *s)
{
    for (int i = 0; i < s->n_shards; i++)
        if (s->shards[i].fd >= 0) close(s->shards[i].fd);
    mem_free(s->shards);
    mem_free(s->at);
    mem_free(s->in);
    *s = (struct shards){.n = 0};
}
