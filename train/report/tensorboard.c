/* tensorboard.c - event files. A record is the length (u64), its masked CRC-32C, the bytes, their masked CRC-32C; the
 * bytes are an Event: 1 wall_time f64, 2 step varint, 3 file_version string, 5 summary, 7 session_log. */
#include "train/report/tensorboard.h"

#include <fcntl.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "data/file/file.h"

struct proto {
    uint8_t bytes[4096];
    int64_t n;
};

static void put_bytes(struct proto *p, const void *bytes, int64_t n)
{
    MT_REQUIRE(p->n + n <= (int64_t)sizeof(p->bytes), "a TensorBoard event of %lld bytes", (long long)(p->n + n));
    memcpy(p->bytes + p->n, bytes, (size_t)n);
    p->n += n;
}

static void put_varint(struct proto *p, uint64_t v)
{
    for (; v > 127; v >>= 7) put_bytes(p, &(uint8_t){(uint8_t)(v | 128)}, 1);
    put_bytes(p, &(uint8_t){(uint8_t)v}, 1);
}

enum wire { WIRE_VARINT = 0, WIRE_F64 = 1, WIRE_BYTES = 2, WIRE_F32 = 5 };
static void put_key(struct proto *p, int field, enum wire wire) { put_varint(p, (uint64_t)field << 3 | wire); }

static void put_field(struct proto *p, int field, const void *bytes, int64_t n)
{
    put_key(p, field, WIRE_BYTES);
    put_varint(p, (uint64_t)n);
    put_bytes(p, bytes, n);
}

static struct proto event_at(int64_t step)
{
    struct proto p = {.n = 0};
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    const double now = (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
    put_key(&p, 1, WIRE_F64);
    put_bytes(&p, &now, 8);
    put_key(&p, 2, WIRE_VARINT);
    put_varint(&p, (uint64_t)step);
    return p;
}

/* CRC-32C (Castagnoli), masked as TFRecord requires: rotated, plus a constant. */
static uint32_t masked_crc(const void *bytes, int64_t n)
{
    uint32_t crc = ~0u;
    for (int64_t i = 0; i < n; i++) {
        crc ^= ((const uint8_t *)bytes)[i];
        for (int k = 0; k < 8; k++) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
    }
    crc = ~crc;
    return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

static void write_record(FILE *f, const struct proto *event)
{
    struct proto r = {.n = 0};
    const uint64_t n = (uint64_t)event->n;
    const uint32_t of_length = masked_crc(&n, 8), of_bytes = masked_crc(event->bytes, event->n);
    put_bytes(&r, &n, 8);
    put_bytes(&r, &of_length, 4);
    put_bytes(&r, event->bytes, event->n);
    put_bytes(&r, &of_bytes, 4);
    fwrite(r.bytes, 1, (size_t)r.n, f);
}

FILE *tensorboard_open(const char *dir, int64_t first_step, struct err *err)
{
    static const char version[] = "brain.Event:2";
    char path[MT_PATH], host[64] = "";
    if (file_make_dirs(dir, err)) return NULL;
    gethostname(host, sizeof(host) - 1);
    if (str_format(path, sizeof(path), err, "path", "%s/events.out.tfevents.%010lld.%s.moetrain", dir,
                   (long long)time(NULL), host))
        return NULL;
    const int fd = file_open_own(path, O_WRONLY | O_APPEND, err); /* a second start in one second adds to the file */
    FILE *f = fd < 0 ? NULL : fdopen(fd, "a");
    if (!f) return NULL;
    setvbuf(f, NULL, _IONBF, 0);
    struct proto p = event_at(0), start = event_at(first_step);
    put_field(&p, 3, version, (int64_t)strlen(version));
    write_record(f, &p);
    put_field(&start, 7, (const uint8_t[]){1 << 3 | WIRE_VARINT, 1}, 2); /* SessionLog.status = START */
    write_record(f, &start);
    return f;
}

void tensorboard_put(FILE *f, int64_t step, const struct scalar *scalars, int64_t n)
{
    struct proto event = event_at(step), summary = {.n = 0};
    for (int64_t i = 0; i < n; i++) {
        struct proto value = {.n = 0};
        const float v = (float)scalars[i].value;
        put_field(&value, 1, scalars[i].tag, (int64_t)strlen(scalars[i].tag));
        put_key(&value, 2, WIRE_F32);
        put_bytes(&value, &v, 4);
        put_field(&summary, 1, value.bytes, value.n);
    }
    put_field(&event, 5, summary.bytes, summary.n);
    write_record(f, &event);
}
