/* svg.h - line plots and heat maps as inline SVG. Colours come from the page's CSS: classes "a", "b", ... for lines,
 * "cell" for a heat map, "grid" for the grid. */
#ifndef MT_SVG_H
#define MT_SVG_H

#include <stdio.h>

#include "kernels/base.h"

/* Writes text with &, <, > and quotes escaped; control characters become blanks. */
void svg_text(FILE *out, const char *text);
/* A number with at most four digits unless it is large: "0.25", "12,345", "1.5e-4". */
char *svg_number(char buf[32], double v);

enum { SVG_LINES = 8 };
struct svg_line {
    const char *css;     /* classes of the path and its dots */
    const double *x, *y; /* [n] x ascending; a y that is not finite is a gap */
    int64_t n;
    bool dots; /* a dot with a tooltip at every point */
};
struct svg_plot {
    const char *x_label, *y_label;
    int width, height; /* of the view box; the page scales it */
    struct svg_line lines[SVG_LINES];
    int n_lines;
    bool from_zero; /* the y axis starts at 0 */
};
/* The y axis spans the points without the lowest and highest half percent; these are clipped. Of more than about 1000
 * points, only the minimum and maximum of equal intervals are drawn. */
void svg_plot(FILE *out, const struct svg_plot *p);

/* A cell's opacity is its value / the largest value. The right column shows maximum / mean of each row. */
struct svg_heat {
    const char *row_label, *col_label, *value_label; /* singular: for one row, one column, one value */
    bool counted;                                    /* values are counts: the label of several has an s */
    int width;                                       /* of the view box */
    const double *v;                                 /* [rows, cols] >= 0 */
    int64_t rows, cols;
};
void svg_heat(FILE *out, const struct svg_heat *h);

#endif
