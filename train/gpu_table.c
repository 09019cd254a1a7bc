/* gpu_table.c - the table of GPUs. */
#include "train/gpu_table.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* mib: total memory as nvidia-smi shows it, with ECC on where the card has it. */
static const struct {
    const char *name, *title;
    int64_t mib;
    int capability;
} cards[] = {
    {"a100", "A100 80 GB", 81920, 80},
    {"a100-40gb", "A100 40 GB", 40960, 80},
    {"a30", "A30", 24576, 80},
    {"a10", "A10", 23028, 86},
    {"a40", "A40", 46068, 86},
    {"a6000", "RTX A6000", 49140, 86},
    {"rtx3060", "RTX 3060 12 GB", 12288, 86},
    {"rtx3080", "RTX 3080 10 GB", 10240, 86},
    {"rtx3090", "RTX 3090", 24576, 86},
    {"l4", "L4", 23034, 89},
    {"l40s", "L40S", 46068, 89},
    {"rtx6000ada", "RTX 6000 Ada", 49140, 89},
    {"rtx4060ti-16gb", "RTX 4060 Ti 16 GB", 16380, 89},
    {"rtx4070", "RTX 4070", 12282, 89},
    {"rtx4080", "RTX 4080", 16376, 89},
    {"rtx4090", "RTX 4090", 24564, 89},
    {"h100", "H100 80 GB", 81559, 90},
    {"h100-nvl", "H100 NVL", 95830, 90},
    {"h200", "H200", 143771, 90},
    {"gh200", "GH200 96 GB", 97871, 90},
    {"b200", "B200", 183359, 100},
    {"rtx5080", "RTX 5080", 16303, 120},
    {"rtx5090", "RTX 5090", 32607, 120},
    {"rtxpro6000", "RTX PRO 6000 Blackwell", 97887, 120},
};

/* The next letter or digit, in lower case; 0: end of the text. */
static int next(const char **p)
{
    while (**p && strchr(" -_", **p)) ++*p;
    return **p ? tolower((unsigned char)*(*p)++) : 0;
}

static bool same(const char *a, const char *b)
{
    int x, y;
    do {
        x = next(&a);
        y = next(&b);
    } while (x && x == y);
    return x == y;
}

/* "24gb", "24 GiB": a card sold with n GB; n gibibytes. */
static bool read_size(struct gpu_model *card, const char *name)
{
    char *end;
    const bool digit = isdigit((unsigned char)name[0]);
    const double gib = digit ? strtod(name, &end) : 0;
    if (!digit || gib < 1 || gib > 4096 || (!same(end, "gb") && !same(end, "gib"))) return false;
    snprintf(card->title, sizeof(card->title), "a GPU of %g GB", gib);
    card->bytes = (int64_t)(gib * (1 << 30));
    card->capability = 0;
    return true;
}

int gpu_table_find(struct gpu_model *card, const char *name, struct err *err)
{
    char names[512] = "";
    size_t used = 0;
    for (int i = 0; i < MT_LEN(cards); i++) {
        used += (size_t)snprintf(names + used, sizeof(names) - used, "%s%s", i ? ", " : "", cards[i].name);
        if (!same(cards[i].name, name)) continue;
        snprintf(card->title, sizeof(card->title), "%s", cards[i].title);
        card->bytes = cards[i].mib << 20;
        card->capability = cards[i].capability;
        return 0;
    }
    if (read_size(card, name)) return 0;
    return err_set(err, "--gpu %s is unknown: give its memory, as in 24gb, or one of %s", name, names);
}
