/* svg.h - line plots and heat maps as inline SVG. Colours come from the page's CSS: class "a", "b" per line, "cell" for
 * a heat map, "grid" and text from the defaults. */
#ifndef MT_SVG_H
#define MT_SVG_H

#include <stdio.h>

#include "kernels/base.h"

/* Text with &, <, > and quotes escaped; a byte that is no text in HTML (controls) becomes a blank. */
void svg_text(FILE *out, const char *text);
/* A number for people, at most four digits unless it is large: "0.25", "12,345", "1.5e-4". */
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
    bool from_zero; /* the y axis begins at 0 */
};
/* The y axis spans all of the lines but the outermost half percent of points at both ends, which are clipped. More than
 * about 1000 points are drawn as the extremes of equal pieces. */
void svg_plot(FILE *out, const struct svg_plot *p);

/* A cell's opacity is its value over the largest; at the right of each row, the largest over the mean of that row. */
struct svg_heat {
    const char *row_label, *col_label, *value_label;
    int width;       /* of the view box */
    const double *v; /* [rows, cols] >= 0 */
    int64_t rows, cols;
};
void svg_heat(FILE *out, const struct svg_heat *h);

#endif
