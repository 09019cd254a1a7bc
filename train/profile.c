/* profile.c - prints and writes what kernels/prof.c recorded. */
#include "train/profile.h"

#include <stdlib.h>
#include <string.h>

#include "data/file.h"

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

static void print_row(FILE *out, const char *name, const struct prof_row *r, double all_ms)
{
    char roof[16] = "-", calls[24] = "";
    if (r->floor_ms > 0) snprintf(roof, sizeof(roof), "%.1f", 100 * r->floor_ms / r->ms);
    if (r->calls) snprintf(calls, sizeof(calls), "%lld", (long long)r->calls);
    fprintf(out, "  %-22s %7s %12.1f %11.1f %9.4g %9.4g %7s %7.1f\n", name, calls, 1e3 * r->ms,
            1e3 * r->ms / (double)MT_MAX(r->calls, 1), r->cost.flops / r->ms / 1e9, moved(&r->cost) / r->ms / 1e6, roof,
            100 * r->ms / all_ms);
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
    const double span = MT_MAX(p->span_ms, all.ms);
    fprintf(out, "  %-22s %7s %12s %11s %9s %9s %7s %7s\n", "op", "calls", "us", "us/call", "TFLOP/s", "GB/s", "% roof",
            "% time");
    for (int i = 0; i < p->n_rows; i++) print_row(out, row_name(sorted[i].name, sorted[i].part).s, &sorted[i], span);
    print_row(out, all.name, &all, span);
    fprintf(out, "  %-22s %7s %12.1f %11s %9s %9s %7s %7.1f\n", "between the ops", "", 1e3 * (span - all.ms), "", "",
            "", "", 100 * (span - all.ms) / span);
    if (p->n_lost) fprintf(out, "  %lld ops found no room in the profile and are not in it\n", (long long)p->n_lost);
}

char *profile_roofs(char text[256], const struct device *dev)
{
    const struct roofs *r = &dev->roofs;
    if (r->flops > 0)
        snprintf(text, 256, "roofs of %s: %.4g TFLOP/s in a large product, %.4g GB/s in a large copy", dev->name,
                 r->flops / 1e12, r->bytes / 1e9);
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

int profile_trace(const struct prof *p, const char *path, struct err *err)
{
    struct json_out o = {0};
    json_out_open(&o, NULL, '[');
    for (int64_t i = 0; i < p->n_events; i++) {
        const struct prof_event *e = &p->events[i];
        json_out_open(&o, NULL, '{');
        json_out_str(&o, "name", row_name(e->name, e->part).s);
        json_out_str(&o, "ph", "X");
        json_out_f64(&o, "ts", 1e3 * (e->start_ms - p->events[0].start_ms));
        json_out_f64(&o, "dur", 1e3 * e->ms);
        json_out_i64(&o, "pid", 0);
        json_out_i64(&o, "tid", 0);
        json_out_open(&o, "args", '{');
        put_cost(&o, &e->cost, e->ms);
        json_out_close(&o, '}');
        json_out_close(&o, '}');
    }
    json_out_close(&o, ']');
    const int rc = file_write_atomic(path, o.text, o.size, err);
    json_out_free(&o);
    return rc;
}

/* ---- train.profile ---- */

int profile_parse(struct profile *p, const char *range, const char *dir, struct err *err)
{
    long long first = 0, last = 0;
    int used = 0;
    *p = (struct profile){.dir = dir};
    if (!range[0]) return 0;
    if (sscanf(range, "%lld:%lld%n", &first, &last, &used) != 2 || range[used] || first < 1 || last < first)
        return err_set(err, "train.profile is \"%s\": write first:last, two steps of the run, e.g. 10:12", range);
    p->first = first;
    p->last = last;
    return 0;
}

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
    MT_REQUIRE(out, "no memory for the table of ops");
    fprintf(out, "steps %lld to %lld; %s\n", (long long)p->first, (long long)p->last,
            profile_roofs(roofs, p->prof.dev));
    profile_table(&p->prof, out);
    fclose(out);
    const int rc = file_write_atomic(path, text, (int64_t)size, err);
    free(text);
    return rc;
}

int profile_step_end(struct profile *p, int64_t step, struct err *err)
{
    char trace[MT_PATH], table[MT_PATH];
    if (!covers(p, step) || !p->prof.dev) return 0;
    prof_end(&p->prof);
    if (step < p->last) return 0;
    if (str_format(trace, sizeof(trace), err, "path", "%s/trace.json", p->dir) ||
        str_format(table, sizeof(table), err, "path", "%s/profile.txt", p->dir) ||
        profile_trace(&p->prof, trace, err) || write_table(p, table, err))
        return -1;
    log_info("profile of steps %lld to %lld: %s, %s", (long long)p->first, (long long)p->last, table, trace);
    profile_close(p);
    return 0;
}

void profile_close(struct profile *p)
{
    if (p->prof.dev && p->prof.dev->prof == &p->prof) p->prof.dev->prof = NULL;
    prof_close(&p->prof);
    p->first = 0;
}
