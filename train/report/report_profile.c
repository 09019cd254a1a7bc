/* report_profile.c - see report_profile.h. */
#include "train/report/report_profile.h"

#include "train/report/svg.h"

enum { SHOWN = 12 }; /* ops with a bar; the others are summed */

static void write_bar(FILE *out, const char *name, double ms, double all_ms)
{
    char text[32];
    const double share = all_ms > 0 ? 100 * ms / all_ms : 0;
    fputs("<tr><td class=\"op\">", out);
    svg_text(out, name);
    fprintf(out, "<td class=\"bar\"><i style=\"width:%.1f%%\"></i><td>%s ms<td>%.1f %%</tr>\n", share,
            svg_number(text, ms), share);
}

static void write_ops(FILE *out, const struct history_profile *p)
{
    double all = 0, rest = 0;
    const double steps = (double)p->steps;
    for (int64_t i = 0; i < p->n_op; i++) {
        all += p->ops[i].ms;
        if (i >= SHOWN) rest += p->ops[i].ms;
    }
    const double span = MT_MAX(p->span_ms, all);
    fprintf(out, "<h2>Time of a step <small>mean of %lld until step %lld</small></h2>\n<div class=\"table\"><table>\n",
            (long long)p->steps, (long long)p->last);
    for (int64_t i = 0; i < MT_MIN(p->n_op, SHOWN); i++)
        write_bar(out, p->ops[i].name, p->ops[i].ms / steps, span / steps);
    if (rest > 0) write_bar(out, "other ops", rest / steps, span / steps);
    write_bar(out, "between the ops", (span - all) / steps, span / steps);
    fputs("</table></div>\n", out);
}

static void write_memory(FILE *out, const struct history_profile *p)
{
    const double weights = p->weights / (1 << 30), fixed = weights + p->state / (1 << 30);
    const int64_t n = p->at_ms.n;
    const double ends[] = {p->at_ms.v[0], p->at_ms.v[n - 1]}, low[] = {weights, weights}, high[] = {fixed, fixed};
    static const struct {
        const char *css;
        int width, height;
    } sizes[] = {{"wide", 1120, 300}, {"narrow", 360, 250}};
    fprintf(out,
            "<h2>Memory over %lld step%s <small class=\"key ka\">in use</small><small class=\"key kb\">weights</small>"
            "<small class=\"key k2\">weights, adapters, optimizer</small></h2>\n",
            (long long)p->steps, str_plural(p->steps));
    for (int i = 0; i < MT_LEN(sizes); i++) {
        struct svg_plot plot = {"ms", "GiB", sizes[i].width, sizes[i].height, .n_lines = 3, .from_zero = true};
        plot.lines[0] = (struct svg_line){"a", p->at_ms.v, p->memory.v, n, false};
        plot.lines[1] = (struct svg_line){"b", ends, low, 2, false};
        plot.lines[2] = (struct svg_line){"c2", ends, high, 2, false};
        fprintf(out, "<div class=\"%s\">\n", sizes[i].css);
        svg_plot(out, &plot);
        fputs("</div>\n", out);
    }
}

void report_profile(FILE *out, const struct history_profile *p)
{
    if (!p->steps) return;
    write_ops(out, p);
    if (p->at_ms.n > 1) write_memory(out, p);
}
