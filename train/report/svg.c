/* svg.c - see svg.h. */
#include "train/report/svg.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define MAX_POINTS 1000 /* points of a path */
#define MAX_DOTS   500
#define MAX_TITLED 10000 /* cells of a heat map that have a tooltip */

void svg_text(FILE *out, const char *text)
{
    for (int n; *text; text += MT_MAX(n, 1)) {
        const char c = *text;
        n = str_printable(text);
        const char *entity = c == '&'          ? "&amp;"
                             : c == '<'        ? "&lt;"
                             : c == '>'        ? "&gt;"
                             : c == '"'        ? "&quot;"
                             : c == '\''       ? "&#39;"
                             : c == '\n'       ? "\n"
                             : !n || c == '\t' ? " "
                                               : NULL;
        if (entity)
            fputs(entity, out);
        else
            fwrite(text, 1, (size_t)n, out);
    }
}

char *svg_number(char buf[32], double v)
{
    double size = fabs(v); /* avoids -0 */
    if (size > 0 && (size < 1e-2 || size >= 1e15)) {
        int exponent = (int)floor(log10(size) + 1e-9);
        snprintf(buf, 32, "%.3ge%d", v / pow(10, exponent), exponent);
    } else if (size < 999.95) {
        snprintf(buf, 32, "%.4g", size > 0 ? v : 0);
    } else { /* an integer, with a comma before each group of three digits */
        char digits[32];
        int n = snprintf(digits, sizeof(digits), "%.0f", size), used = v < 0;
        buf[0] = '-';
        for (int i = 0; i < n; i++) {
            if (i > 0 && (n - i) % 3 == 0) buf[used++] = ',';
            buf[used++] = digits[i];
        }
        buf[used] = 0;
    }
    return buf;
}

/* ---- axes */

struct axis {
    double lo, hi;   /* values */
    double from, to; /* pixels */
};

static double pixel(const struct axis *a, double v)
{
    return a->from + (v - a->lo) / (a->hi - a->lo) * (a->to - a->from);
}

/* The distance of ticks: 1, 2 or 5 times a power of ten, so that the axis has about n of them. */
static double tick_step(const struct axis *a, int n)
{
    double raw = (a->hi - a->lo) / n, power = pow(10, floor(log10(raw)));
    double lead = raw / power;
    return power * (lead <= 1 ? 1 : lead <= 2 ? 2 : lead <= 5 ? 5 : 10);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Extends the axis to the finite values of v, without the lowest and highest half percent. */
static void axis_include(struct axis *a, const double *v, int64_t n)
{
    double *sorted = mem_array(n, (int64_t)sizeof(double));
    int64_t m = 0;
    for (int64_t i = 0; i < n; i++)
        if (isfinite(v[i])) sorted[m++] = v[i];
    qsort(sorted, (size_t)m, sizeof(double), by_value);
    if (m > 0) {
        int64_t aside = (m + 100) / 200;
        if (m < 20) aside = 0;
        a->lo = fmin(a->lo, sorted[aside]);
        a->hi = fmax(a->hi, sorted[m - 1 - aside]);
    }
    mem_free(sorted);
}

/* Widens an axis of length 0; adds a margin to the y axis. False: no value was included. */
static bool axis_finish(struct axis *a, double air)
{
    if (a->lo > a->hi) return false;
    double extent = a->hi - a->lo;
    if (!(extent > 1e-9 * fabs(a->hi))) {
        extent = a->hi != 0 ? 0.1 * fabs(a->hi) : 1;
        air = 1;
    }
    a->lo -= air * extent;
    a->hi += air * extent;
    return true;
}

static void draw_axes(FILE *out, const struct svg_plot *p, const struct axis *x, const struct axis *y)
{
    char text[32];
    double step = tick_step(y, 5);
    for (double k = ceil(y->lo / step - 1e-9); k * step <= y->hi + 1e-9 * step; k++) {
        double at = pixel(y, k * step);
        fprintf(out,
                "<path class=\"grid\" d=\"M%.1f %.1fH%.1f\"/><text x=\"%.1f\" y=\"%.1f\" class=\"end\">%s</text>\n",
                x->from, at, x->to, x->from - 7, at + 4, svg_number(text, k * step));
    }
    step = fmax(tick_step(x, p->width > 600 ? 10 : 5), 1); /* steps are whole */
    for (double k = ceil(x->lo / step - 1e-9); k * step <= x->hi + 1e-9 * step; k++)
        fprintf(out, "<text x=\"%.1f\" y=\"%.1f\" class=\"mid\">%s</text>\n", pixel(x, k * step), y->from + 17,
                svg_number(text, k * step));
    fprintf(out, "<path class=\"axis\" d=\"M%.1f %.1fH%.1f\"/>\n", x->from, y->from, x->to);
    fprintf(out, "<text x=\"%.1f\" y=\"%.1f\" class=\"mid label\">%s</text>\n", (x->from + x->to) / 2, y->from + 34,
            p->x_label);
    fprintf(out, "<text transform=\"translate(13 %.1f) rotate(-90)\" class=\"mid label\">%s</text>\n",
            (y->from + y->to) / 2, p->y_label);
}

/* ---- lines */

struct pen {
    FILE *out;
    const struct axis *x, *y;
    bool down;
};

/* Extends the line to a point. "h0" after a move makes a single point visible as a dot, because of the round line
 * cap. */
static void pen_to(struct pen *pen, double x, double y)
{
    if (!isfinite(y)) {
        pen->down = false;
        return;
    }
    double far = pen->y->hi + 9 * (pen->y->hi - pen->y->lo), near = pen->y->lo - 9 * (pen->y->hi - pen->y->lo);
    fprintf(pen->out, pen->down ? "L%.1f %.1f" : "M%.1f %.1fh0", pixel(pen->x, x),
            pixel(pen->y, fmax(near, fmin(far, y))));
    pen->down = true;
}

/* Draws the lowest and the highest of the points [first, last), in their order; a gap if none is finite. */
static void pen_extremes(struct pen *pen, const struct svg_line *l, int64_t first, int64_t last)
{
    int64_t lo = -1, hi = -1;
    for (int64_t i = first; i < last; i++) {
        if (!isfinite(l->y[i])) continue;
        if (lo < 0 || l->y[i] < l->y[lo]) lo = i;
        if (hi < 0 || l->y[i] > l->y[hi]) hi = i;
    }
    if (lo < 0) {
        pen->down = false;
        return;
    }
    pen_to(pen, l->x[MT_MIN(lo, hi)], l->y[MT_MIN(lo, hi)]);
    if (lo != hi) pen_to(pen, l->x[MT_MAX(lo, hi)], l->y[MT_MAX(lo, hi)]);
}

static void draw_line(FILE *out, const struct svg_line *l, const struct axis *x, const struct axis *y)
{
    struct pen pen = {out, x, y, false};
    fprintf(out, "<path class=\"line %s\" d=\"", l->css);
    int64_t pieces = l->n <= MAX_POINTS ? l->n : MAX_POINTS / 2;
    for (int64_t i = 0; i < pieces; i++) pen_extremes(&pen, l, i * l->n / pieces, (i + 1) * l->n / pieces);
    fputs("\"/>\n", out);
    if (!l->dots && l->n > 1) return;
    int64_t stride = (l->n + MAX_DOTS - 1) / MAX_DOTS;
    for (int64_t i = 0; i < l->n; i += stride) {
        if (!isfinite(l->y[i])) continue;
        fprintf(out, "<circle class=\"%s\" cx=\"%.1f\" cy=\"%.1f\" r=\"3.5\"><title>step %.0f: %.4f</title></circle>\n",
                l->css, pixel(x, l->x[i]), pixel(y, l->y[i]), l->x[i], l->y[i]);
    }
}

void svg_plot(FILE *out, const struct svg_plot *p)
{
    struct axis x = {INFINITY, -INFINITY, 62, p->width - 12}, y = {INFINITY, -INFINITY, p->height - 42, 8};
    for (int i = 0; i < p->n_lines; i++) {
        const struct svg_line *l = &p->lines[i];
        if (l->n > 0) x.lo = fmin(x.lo, l->x[0]), x.hi = fmax(x.hi, l->x[l->n - 1]);
        axis_include(&y, l->y, l->n);
    }
    if (!axis_finish(&y, 0.04) || !axis_finish(&x, 0)) {
        fputs("<p>no finite value</p>\n", out);
        return;
    }
    if (p->from_zero) y.lo = 0;
    if (x.lo == 1) x.lo = 0; /* a run from its start */
    fprintf(out, "<svg viewBox=\"0 0 %d %d\" role=\"img\">\n", p->width, p->height);
    draw_axes(out, p, &x, &y);
    fprintf(out, "<svg x=\"%.0f\" y=\"%.0f\" width=\"%.0f\" height=\"%.0f\" viewBox=\"%.0f %.0f %.0f %.0f\">\n",
            x.from - 5, y.to - 5, x.to - x.from + 10, y.from - y.to + 6, x.from - 5, y.to - 5, x.to - x.from + 10,
            y.from - y.to + 6);
    for (int i = 0; i < p->n_lines; i++) draw_line(out, &p->lines[i], &x, &y);
    fputs("</svg>\n</svg>\n", out);
}

/* ---- heat map */

struct grid {
    const struct svg_heat *heat;
    double largest, left, top, width, height; /* of all values; pixels of the first cell */
};

static const char *plural(const struct svg_heat *h, double v) { return h->counted ? str_plural((int64_t)v) : ""; }

static void draw_row(FILE *out, const struct grid *g, int64_t row)
{
    const struct svg_heat *h = g->heat;
    const double *v = h->v + row * h->cols;
    char text[32];
    double largest = 0, sum = 0, y = g->top + (double)row * g->height, gap = 0.08 * fmin(g->width, 12);
    fprintf(out, "<text x=\"%.1f\" y=\"%.1f\" class=\"end\">%lld</text>\n", g->left - 7, y + g->height / 2 + 4,
            (long long)row);
    for (int64_t c = 0; c < h->cols; c++) {
        largest = fmax(largest, v[c]);
        sum += v[c];
        fprintf(out, "<rect class=\"cell\" x=\"%.2f\" y=\"%.1f\" width=\"%.2f\" height=\"%.1f\" fill-opacity=\"%.3g\"",
                g->left + (double)c * g->width, y, g->width - gap, g->height - 1, v[c] / g->largest);
        if (h->rows * h->cols > MAX_TITLED)
            fputs("/>\n", out);
        else
            fprintf(out, "><title>%s %lld, %s %lld: %s %s%s</title></rect>\n", h->row_label, (long long)row,
                    h->col_label, (long long)c, svg_number(text, v[c]), h->value_label, plural(h, v[c]));
    }
    if (sum > 0)
        fprintf(out, "<text x=\"%.1f\" y=\"%.1f\">%.2f</text>\n", g->left + (double)h->cols * g->width + 8,
                y + g->height / 2 + 4, largest / sum * (double)h->cols);
}

static void draw_legend(FILE *out, const struct grid *g, double left, double top)
{
    char text[32];
    for (int i = 0; i <= 20; i++)
        fprintf(out, "<rect class=\"cell\" x=\"%.1f\" y=\"%.1f\" width=\"8\" height=\"10\" fill-opacity=\"%.2f\"/>\n",
                left + 8 * i, top, i / 20.0);
    fprintf(out, "<text x=\"%.1f\" y=\"%.1f\" class=\"end\">0</text>\n", left - 6, top + 9);
    fprintf(out, "<text x=\"%.1f\" y=\"%.1f\">%s %s%s</text>\n", left + 174, top + 9, svg_number(text, g->largest),
            g->heat->value_label, plural(g->heat, g->largest));
}

void svg_heat(FILE *out, const struct svg_heat *h)
{
    const bool wide = h->width > 600;
    struct axis x = {0, (double)h->cols, wide ? 62 : 44, h->width - (wide ? 86 : 60)};
    struct grid g = {h, 0, x.from, 26, (x.to - x.from) / (double)h->cols, h->rows > 48 ? 12 : 20};
    double bottom = g.top + (double)h->rows * g.height;
    for (int64_t i = 0; i < h->rows * h->cols; i++) g.largest = fmax(g.largest, h->v[i]);
    if (!(g.largest > 0)) return;
    fprintf(out, "<svg viewBox=\"0 0 %d %.0f\" role=\"img\">\n", h->width, bottom + 58);
    for (int64_t row = 0; row < h->rows; row++) draw_row(out, &g, row);

    double step = fmax(tick_step(&x, wide ? 16 : 6), 1);
    for (double c = 0; c < (double)h->cols; c += step)
        fprintf(out, "<text x=\"%.1f\" y=\"%.1f\" class=\"mid\">%.0f</text>\n", pixel(&x, c + 0.5), bottom + 15, c);
    fprintf(out, "<text x=\"%.1f\" y=\"%.1f\" class=\"mid label\">%s</text>\n", (x.from + x.to) / 2, bottom + 34,
            h->col_label);
    fprintf(out, "<text transform=\"translate(13 %.1f) rotate(-90)\" class=\"mid label\">%s</text>\n",
            (g.top + bottom) / 2, h->row_label);
    fprintf(out, "<text x=\"%.1f\" y=\"%.1f\" class=\"label\">max/mean</text>\n", x.to + 8, g.top - 10);
    draw_legend(out, &g, g.left + 12, bottom + 44);
    fputs("</svg>\n", out);
}
