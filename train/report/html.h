/* html.h - head, style and heading of a page without scripts. Its CSS classes are cards, three, wide and narrow (the
 * screen width decides which of the two is visible), table, facts, sample, key, sub. */
#ifndef MT_HTML_H
#define MT_HTML_H

#include <stdio.h>

/* Writes the page up to the <h1> with `title`; escapes the title. */
void html_begin(FILE *out, const char *title);
void html_end(FILE *out);

#endif
