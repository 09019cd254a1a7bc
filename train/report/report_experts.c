/* report_experts.c - see report_experts.h. */
#include "train/report/report_experts.h"

#include <stdlib.h>

#include "train/report/svg.h"

enum { LISTED = 10 }; /* experts in the table */

static void write_heat(FILE *out, const struct history_experts *x, const double *v, const char *label, bool counted)
{
    static const struct {
        const char *css;
        int width;
    } sizes[] = {{"wide", 1120}, {"narrow", 360}};
    for (int i = 0; i < MT_LEN(sizes); i++) {
        fprintf(out, "<div class=\"%s\">\n", sizes[i].css);
        svg_heat(out, &(struct svg_heat){"layer", "expert", label, counted, sizes[i].width, v, x->n_layer, x->n_exp});
        fputs("</div>\n", out);
    }
}

static bool any(const double *v, int64_t n)
{
    for (int64_t i = 0; v && i < n; i++)
        if (v[i] > 0) return true;
    return false;
}

static void write_maps(FILE *out, const struct history_experts *x)
{
    int64_t idle = 0;
    const int64_t cells = x->n_layer * x->n_exp;
    for (int64_t i = 0; i < cells; i++) idle += !(x->rows[i] > 0);
    fprintf(out, "<h2>Tokens per expert and layer <small>%lld of %lld experts without tokens</small></h2>\n",
            (long long)idle, (long long)cells);
    write_heat(out, x, x->rows, "token", true);
    if (any(x->gates, cells)) {
        fputs("<h2>Gate mass <small>sum of the router's weights of an expert's tokens</small></h2>\n", out);
        write_heat(out, x, x->gates, "gate mass", false);
    }
    if (any(x->norms, cells)) {
        fputs("<h2>Adapter norm <small>of scale B A of an expert's matrices, at the last checkpoint</small></h2>\n",
              out);
        write_heat(out, x, x->norms, "norm", false);
    }
    if (any(x->ranks, cells)) {
        fputs("<h2>Ranks of the adapters <small>lora.r_by = routing</small></h2>\n", out);
        write_heat(out, x, x->ranks, "rank", true);
    }
}

static void write_over_time(FILE *out, const struct history_experts *x)
{
    const struct {
        const char *title, *unit;
        const struct series *y;
    } plots[] = {{"Routing entropy", "1: all experts equally often", &x->entropy},
                 {"Experts without tokens", "share, between two checkpoints", &x->idle},
                 {"Fullest expert", "its tokens over the mean", &x->hottest}};
    fputs("<div class=\"three\">\n", out);
    for (int i = 0; i < MT_LEN(plots); i++) {
        fprintf(out, "<section><h2>%s <small>mean of the layers</small></h2>\n", plots[i].title);
        struct svg_plot plot = {"step", plots[i].unit, 360, 250, .n_lines = 1, .from_zero = true};
        plot.lines[0] = (struct svg_line){"a", x->step.v, plots[i].y->v, x->step.n, true};
        svg_plot(out, &plot);
        fputs("</section>\n", out);
    }
    fputs("</div>\n", out);
}

struct used {
    int64_t cell;
    double share; /* of the rows of its layer */
};

static int by_share(const void *a, const void *b)
{
    const struct used *x = a, *y = b;
    if (x->share > y->share || x->share < y->share) return x->share < y->share ? 1 : -1;
    return (x->cell > y->cell) - (x->cell < y->cell);
}

static void write_hottest(FILE *out, const struct history_experts *x)
{
    const int64_t cells = x->n_layer * x->n_exp;
    struct used *used = mem_array(cells, sizeof(*used));
    for (int64_t i = 0; i < cells; i++) {
        double sum = 0;
        const double *layer = x->rows + i / x->n_exp * x->n_exp;
        for (int64_t e = 0; e < x->n_exp; e++) sum += layer[e];
        used[i] = (struct used){i, sum > 0 ? x->rows[i] / sum : 0};
    }
    qsort(used, (size_t)cells, sizeof(*used), by_share);
    fputs("<h2>Experts with the largest share of their layer</h2>\n<div class=\"table\"><table><tr><th>layer<th>expert"
          "<th>share<th>mean gate<th>adapter norm",
          out);
    fputs(x->ranks ? "<th>rank</tr>\n" : "</tr>\n", out);
    for (int64_t i = 0; i < MT_MIN(cells, LISTED) && used[i].share > 0; i++) {
        const int64_t c = used[i].cell;
        fprintf(out, "<tr><td>%lld<td>%lld<td>%.1f %%", (long long)(c / x->n_exp), (long long)(c % x->n_exp),
                100 * used[i].share);
        if (any(x->gates, cells))
            fprintf(out, "<td>%.3f", x->gates[c] / x->rows[c]);
        else
            fputs("<td>", out);
        if (x->norms)
            fprintf(out, "<td>%.4g", x->norms[c]);
        else
            fputs("<td>", out);
        if (x->ranks) fprintf(out, "<td>%.0f", x->ranks[c]);
        fputs("</tr>\n", out);
    }
    fputs("</table></div>\n", out);
    mem_free(used);
}

void report_experts(FILE *out, const struct history_experts *x)
{
    if (!x->rows) return;
    write_maps(out, x);
    if (x->step.n > 1) write_over_time(out, x);
    write_hottest(out, x);
}
