/* objective.c - the parts of a loss as text. */
#include "model/objective/objective.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

void objective_put(struct objective_means *e, const char *name, const char *line, const char *format, double sum,
                   double n)
{
    MT_REQUIRE(e->n < OBJECTIVE_PARTS, "more than %d parts of an objective", OBJECTIVE_PARTS);
    e->of[e->n++] = (struct objective_mean){name, line, format, n > 0 ? sum / n : NAN};
}

char *objective_text(char text[64], const struct objective_mean *e)
{
    *text = 0;
    if (!e->line || isnan(e->mean)) return text; /* KTO: rows of one label have no margin */
    const int n = snprintf(text, 64, "%s ", e->line);
    snprintf(text + n, (size_t)(64 - n), e->format, e->mean);
    return text;
}

char *objective_texts(char text[128], const struct objective_means *e, const char *before)
{
    char one[64];
    *text = 0;
    for (int i = 0; i < e->n; i++)
        if (*objective_text(one, &e->of[i])) snprintf(text + strlen(text), 128 - strlen(text), "%s%s", before, one);
    return text;
}
