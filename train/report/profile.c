/* profile.c - prints and writes what kernels/prof.c recorded. */
#include "train/report/profile.h"

#include <stdlib.h>
#include <string.h>

#include "data/file/file.h"
#include "kernels/comm/comm.h"

/* ---- table ---- */

struct row_name {
    char s[64];
};
static struct row_name row_name(const char *name, int64_t part)
{
    struct row_name n;
    if (part)
        snprintf(n.s, sizeof(n.s), "%s %lld", name, (long long)part);
    else
        snprintf(n.s, sizeof(n.s), "%s", name);
    return n;
}

static int by_time(const void *a, const void *b)
{
    const double x = ((const struct prof_row *)a)->ms, y = ((const struct prof_row *)b)->ms;
    return (x < y) - (x > y);
}

static double moved(const struct cost *c) { return c->bytes + c->decode; }

/* launch_ms: added to the floor of every call in the column "+launch". */
static void print_row(FILE *out, const char *name, const struct prof_row *r, double launch_ms, double all_ms)
{
    char roof[16] = "-", with[16] = "-", calls[24] = "";
    if (r->floor_ms > 0) {
        snprintf(roof, sizeof(roof), "%.1f", 100 * r->floor_ms / r->ms);
        const double floor_ms = r->floor_ms + (double)r->calls * launch_ms;
        if (launch_ms > 0) snprintf(with, sizeof(with), "%.1f", 100 * MT_MIN(1, floor_ms / r->ms));
    }
    if (r->calls) snprintf(calls, sizeof(calls), "%lld", (long long)r->calls);
    fprintf(out, "  %-22s %7s %12.1f %11.1f %9.4g %9.4g %7s %7s %7.1f\n", name, calls, 1e3 * r->ms,
            1e3 * r->ms / (double)MT_MAX(r->calls, 1), r->cost.flops / r->ms / 1e9, moved(&r->cost) / r->ms / 1e6, roof,
            with, 100 * r->ms / all_ms);
}

void profile_table(const struct prof *p, FILE *out)
{
    struct prof_row sorted[PROF_ROWS], all = {.name = "all ops"};
    memcpy(sorted, p->rows, sizeof(sorted));
    qsort(sorted, (size_t)p->n_rows, sizeof(*sorted), by_time);
    for (int i = 0; i < p->n_rows; i++) {
        all.calls += sorted[i].calls;
        all.ms += sorted[i].ms;
        all.floor_ms += sorted[i].floor_ms;
        all.cost.flops += sorted[i].cost.flops;
        all.cost.bytes += sorted[i].cost.bytes;
        all.cost.decode += sorted[i].cost.decode;
    }
    const double span = MT_MAX(p->span_ms, all.ms), launch_ms = p->dev->roofs.launch_ms;
    fprintf(out, "  %-22s %7s %12s %11s %9s %9s %7s %7s %7s\n", "op", "calls", "us", "us/call", "TFLOP/s", "GB/s",
            "% roof", "+launch", "% time");
    for (int i = 0; i < p->n_rows; i++)
        print_row(out, row_name(sorted[i].name, sorted[i].part).s, &sorted[i], launch_ms, span);
    print_row(out, all.name, &all, launch_ms, span);
    fprintf(out, "  %-22s %7s %12.1f %11s %9s %9s %7s %7s %7.1f\n", "between the ops", "", 1e3 * (span - all.ms), "",
            "", "", "", "", 100 * (span - all.ms) / span);
    if (launch_ms > 0)
        fprintf(out, "  +launch: %% roof when every call's floor includes %.2f us, the time of zeroing 4 bytes\n",
                1e3 * launch_ms);
    if (p->n_lost) fprintf(out, "  the profile is full: %lld ops are missing from it\n", (long long)p->n_lost);
}

char *profile_roofs(char text[256], const struct device *dev)
{
    const struct roofs *r = &dev->roofs;
    char portable[64] = "";
    if (r->portable_flops > 0) snprintf(portable, 64, ", %.4g without wgmma", r->portable_flops / 1e12);
    if (r->flops > 0)
        snprintf(text, 256, "roofs of %s: %.4g TFLOP/s in a large product%s, %.4g GB/s in a large copy", dev->name,
                 r->flops / 1e12, portable, r->bytes / 1e9);
    else
        snprintf(text, 256, "roofs of %s: not measured", dev->name);
    return text;
}

char *profile_calls(char text[128], const struct dev_calls *calls, int64_t steps)
{
    const double n = (double)MT_MAX(steps, 1);
    if (calls->missing)
        snprintf(text, 128, "launches and waits not counted: %s", calls->missing);
    else
        snprintf(text, 128, "%.6g launches, %.6g waits a step", (double)calls->launches / n, (double)calls->waits / n);
    return text;
}

/* ---- JSON ---- */

static void put_cost(struct json_out *o, const struct cost *c, double ms)
{
    json_out_f64(o, "flops", c->flops);
    json_out_f64(o, "bytes", c->bytes);
    json_out_f64(o, "decode_bytes", c->decode);
    json_out_f64(o, "tflops", c->flops / ms / 1e9);
    json_out_f64(o, "gbs", moved(c) / ms / 1e6);
}

void profile_json(const struct prof *p, struct json_out *o, const char *key)
{
    json_out_open(o, key, '[');
    for (int i = 0; i < p->n_rows; i++) {
        const struct prof_row *r = &p->rows[i];
        json_out_open(o, NULL, '{');
        json_out_str(o, "op", r->name);
        json_out_i64(o, "part", r->part);
        json_out_i64(o, "calls", r->calls);
        json_out_f64(o, "us", 1e3 * r->ms);
        put_cost(o, &r->cost, r->ms);
        json_out_f64(o, "floor_us", 1e3 * r->floor_ms);
        json_out_close(o, '}');
    }
    json_out_close(o, ']');
}

static void open_event(struct json_out *o, const char *name, const char *kind, int rank)
{
    json_out_open(o, NULL, '{');
    json_out_str(o, "name", name);
    json_out_str(o, "ph", kind);
    json_out_i64(o, "pid", rank);
}

static void put_counter(struct json_out *o, const struct prof_event *e, double ms, int rank)
{
    static const char *const arenas[DEV_ARENAS] = {"weights", "state", "work"};
    open_event(o, "arenas, bytes", "C", rank);
    json_out_f64(o, "ts", 1e3 * ms);
    json_out_open(o, "args", '{');
    for (int i = 0; i < DEV_ARENAS; i++) json_out_i64(o, arenas[i], e->used[i]);
    json_out_close(o, '}');
    json_out_close(o, '}');
}

/* Writes complete events, and counters of the arenas wherever their use changes and at the end. */
static void put_events(const struct prof *p, struct json_out *o, int rank)
{
    for (int64_t i = 0; i < p->n_events; i++) {
        const struct prof_event *e = &p->events[i];
        if (!i || memcmp(e->used, e[-1].used, sizeof(e->used))) put_counter(o, e, e->start_ms, rank);
        open_event(o, row_name(e->name, e->part).s, "X", rank);
        json_out_i64(o, "tid", 0);
        json_out_f64(o, "ts", 1e3 * e->start_ms);
        json_out_f64(o, "dur", 1e3 * e->ms);
        json_out_open(o, "args", '{');
        put_cost(o, &e->cost, e->ms);
        json_out_close(o, '}');
        json_out_close(o, '}');
        if (i + 1 == p->n_events) put_counter(o, e, e->start_ms + e->ms, rank);
    }
}

int profile_trace(const struct prof *p, int rank, int world, const char *path, struct err *err)
{
    struct json_out o = {0};
    char name[128];
    snprintf(name, sizeof(name), "rank %d of %d, %.80s", rank, world, p->dev->name);
    json_out_open(&o, NULL, '[');
    open_event(&o, "process_name", "M", rank);
    json_out_open(&o, "args", '{');
    json_out_str(&o, "name", name);
    json_out_close(&o, '}');
    json_out_close(&o, '}');
    put_events(p, &o, rank);
    json_out_close(&o, ']');
    const int rc = file_write_atomic(path, o.text, o.size, err);
    json_out_free(&o);
    return rc;
}

/* ---- train.profile ---- */

static bool covers(const struct profile *p, int64_t step) { return p->first && step >= p->first && step <= p->last; }

void profile_step_begin(struct profile *p, struct device *dev, int64_t step)
{
    if (!covers(p, step)) return;
    if (!p->prof.dev) prof_open(&p->prof, dev);
    prof_begin(&p->prof);
}

static int write_table(const struct profile *p, const char *path, struct err *err)
{
    char *text = NULL, roofs[256];
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);
    MT_REQUIRE(out, "out of memory for the table of ops");
    fprintf(out, "steps %lld to %lld; %s\n", (long long)p->from, (long long)p->to, profile_roofs(roofs, p->prof.dev));
    profile_table(&p->prof, out);
    fclose(out);
    const int rc = file_write_atomic(path, text, (int64_t)size, err);
    free(text);
    return rc;
}

/* DIR/stem.ext of rank 0, DIR/stem-rankN.ext of the others. */
static int path_of(char path[MT_PATH], const struct profile *p, const char *stem, const char *ext, struct err *err)
{
    char who[32] = "";
    if (p->rank) snprintf(who, sizeof(who), "-rank%d", p->rank);
    return str_format(path, MT_PATH, err, "path", "%s/%s%s.%s", p->dir, stem, who, ext);
}

static int write_files(struct profile *p, struct err *err)
{
    char trace[MT_PATH], table[MT_PATH], part[128] = "";
    if (path_of(trace, p, "trace", "json", err) || path_of(table, p, "profile", "txt", err) ||
        profile_trace(&p->prof, p->rank, p->world, trace, err) || write_table(p, table, err))
        return -1;
    if (p->metrics) profile_event(&p->prof, p->metrics, p->from, p->to);
    if (p->from != p->first || p->to != p->last)
        snprintf(part, sizeof(part), " (train.profile = %lld:%lld; the run made no others)", (long long)p->first,
                 (long long)p->last);
    log_info("profile of steps %lld to %lld%s: %s, %s%s", (long long)p->from, (long long)p->to, part, table, trace,
             p->world > 1 ? "; those of the other ranks end in -rankN" : "");
    return 0;
}

int profile_step_end(struct profile *p, int64_t step, struct err *err)
{
    if (!covers(p, step) || !p->prof.dev) return 0;
    prof_end(&p->prof);
    if (!p->from) p->from = step;
    p->to = step;
    return step < p->last ? 0 : profile_finish(p, err);
}

void profile_step_cancel(struct profile *p) { prof_cancel(&p->prof); }

void profile_plan(struct profile *p, int64_t first, int64_t last, int rank, int world)
{
    p->rank = rank;
    p->world = world;
    if (!p->first || (p->first <= last && p->last >= first)) return;
    if (first <= last)
        log_warn("train.profile = %lld:%lld, but this run makes steps %lld to %lld: there will be no profile",
                 (long long)p->first, (long long)p->last, (long long)first, (long long)last);
    p->first = 0;
}

int profile_finish(struct profile *p, struct err *err)
{
    int rc = 0;
    if (p->to)
        rc = write_files(p, err);
    else if (p->first)
        log_warn("train.profile = %lld:%lld: the run ended before one of these steps was made: there is no profile",
                 (long long)p->first, (long long)p->last);
    profile_close(p);
    return rc;
}

void profile_close(struct profile *p)
{
    prof_cancel(&p->prof);
    prof_close(&p->prof);
    p->first = p->to = 0;
}
