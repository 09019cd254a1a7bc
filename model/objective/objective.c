/* objective.c - the parts of a loss as text. */
#include "model/objective/objective.h"

#include <stdio.h>
#include <string.h>

char *objective_text(char text[64], const struct objective_mean *e)
{
    const int n = snprintf(text, 64, "%s ", e->name);
    snprintf(text + n, (size_t)(64 - n), e->format, e->mean);
    return text;
}

char *objective_texts(char text[128], const struct objective_means *e, const char *before)
{
    char one[64];
    *text = 0;
    for (int i = 0; i < e->n; i++)
        snprintf(text + strlen(text), 128 - strlen(text), "%s%s", before, objective_text(one, &e->of[i]));
    return text;
}
