/* html.h - the frame of a self-contained page: head, style, heading; no scripts, nothing from elsewhere. Classes that
 * content uses: cards, three, wide and narrow (one of them is shown), table, facts, sample, key, sub. */
#ifndef MT_HTML_H
#define MT_HTML_H

#include <stdio.h>

/* Up to and with the <h1> that shows `title`, which is escaped here. */
void html_begin(FILE *out, const char *title);
void html_end(FILE *out);

#endif
