/* gpu_table.c - see gpu_table.h. */
#include "train/plan/gpu_table.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* mib: total memory as nvidia-smi or the driver shows it, with ECC on if the card has it. tflops: published rate of
 * dense bf16 products with fp32 sums, of GeForce cards twice their published FLOP/s of fp32. gbs: published rate of the
 * memory. link_gbs: PCIe in one direction; 4.0 x16 has 31.5, 5.0 x16 twice that. mib of the smaller RTX PRO cards is
 * 0.5 % below their nominal size. */
static const struct {
    const char *name, *title;
    int64_t mib;
    int capability;
    double tflops, gbs, link_gbs;
    bool integrated;
} cards[] = {
    {"v100", "V100", 32768, 70, 125, 900, 15.75, false},
    {"t4", "T4", 15360, 75, 65, 320, 15.75, false},
    {"a100", "A100 80 GB", 81920, 80, 312, 2039, 31.5, false},
    {"a100-40gb", "A100 40 GB", 40960, 80, 312, 1555, 31.5, false},
    {"a30", "A30", 24576, 80, 165, 933, 31.5, false},
    {"a10", "A10", 23028, 86, 125, 600, 31.5, false},
    {"a40", "A40", 46068, 86, 149.7, 696, 31.5, false},
    {"a6000", "RTX A6000", 49140, 86, 154.8, 768, 31.5, false},
    {"a5500", "RTX A5500", 24564, 86, 136.4, 768, 31.5, false},
    {"a5000", "RTX A5000", 24564, 86, 111.1, 768, 31.5, false},
    {"a4500", "RTX A4500", 20470, 86, 94.6, 640, 31.5, false},
    {"a4000", "RTX A4000", 16376, 86, 76.7, 448, 31.5, false},
    {"rtx3050", "RTX 3050 8 GB", 8192, 86, 18.2, 224, 15.75, false},
    {"rtx3060", "RTX 3060 12 GB", 12288, 86, 25.6, 360, 31.5, false},
    {"rtx3060ti", "RTX 3060 Ti", 8192, 86, 32.4, 448, 31.5, false},
    {"rtx3070", "RTX 3070", 8192, 86, 40.6, 448, 31.5, false},
    {"rtx3070ti", "RTX 3070 Ti", 8192, 86, 43.5, 608, 31.5, false},
    {"rtx3080", "RTX 3080 10 GB", 10240, 86, 59.5, 760, 31.5, false},
    {"rtx3080ti", "RTX 3080 Ti", 12288, 86, 68.2, 912, 31.5, false},
    {"rtx3090", "RTX 3090", 24576, 86, 71.2, 936, 31.5, false},
    {"rtx3090ti", "RTX 3090 Ti", 24564, 86, 80, 1008, 31.5, false},
    {"l4", "L4", 23034, 89, 121, 300, 31.5, false},
    {"l40", "L40", 46068, 89, 181, 864, 31.5, false},
    {"l40s", "L40S", 46068, 89, 362, 864, 31.5, false},
    {"rtx6000ada", "RTX 6000 Ada", 49140, 89, 364, 960, 31.5, false},
    {"rtx5000ada", "RTX 5000 Ada", 32760, 89, 261.1, 576, 31.5, false},
    {"rtx4500ada", "RTX 4500 Ada", 24570, 89, 158.5, 432, 31.5, false},
    {"rtx4000ada", "RTX 4000 Ada", 20475, 89, 106.9, 360, 31.5, false},
    {"rtx4060", "RTX 4060", 8188, 89, 30.2, 272, 15.75, false},
    {"rtx4060ti", "RTX 4060 Ti 8 GB", 8188, 89, 44.1, 288, 15.75, false},
    {"rtx4060ti-16gb", "RTX 4060 Ti 16 GB", 16380, 89, 44.1, 288, 15.75, false},
    {"rtx4070", "RTX 4070", 12282, 89, 58.3, 504, 31.5, false},
    {"rtx4070super", "RTX 4070 SUPER", 12282, 89, 71, 504, 31.5, false},
    {"rtx4070ti", "RTX 4070 Ti", 12282, 89, 80.2, 504, 31.5, false},
    {"rtx4070tisuper", "RTX 4070 Ti SUPER", 16376, 89, 88.2, 672, 31.5, false},
    {"rtx4080", "RTX 4080", 16376, 89, 97.5, 717, 31.5, false},
    {"rtx4080super", "RTX 4080 SUPER", 16376, 89, 104.4, 736, 31.5, false},
    {"rtx4090", "RTX 4090", 24564, 89, 165.2, 1008, 31.5, false},
    {"h100", "H100 80 GB", 81559, 90, 989, 3350, 63, false},
    {"h100-pcie", "H100 PCIe", 81559, 90, 756, 2000, 63, false},
    {"h100-nvl", "H100 NVL", 95830, 90, 835, 3938, 63, false},
    {"h200", "H200", 143771, 90, 989, 4800, 63, false},
    {"gh200", "GH200 96 GB", 97871, 90, 989, 4000, 450, false},
    {"b200", "B200", 183359, 100, 2250, 8000, 63, false},
    {"b300", "B300", 275040, 103, 2250, 8000, 63, false},
    {"thor", "Jetson Thor", 125748, 110, 258.5, 273, 63, true},
    {"rtx5060", "RTX 5060", 8151, 120, 38.4, 448, 31.5, false},
    {"rtx5060ti-16gb", "RTX 5060 Ti 16 GB", 16311, 120, 47.4, 448, 31.5, false},
    {"rtx5070", "RTX 5070", 12227, 120, 61.7, 672, 63, false},
    {"rtx5070ti", "RTX 5070 Ti", 16303, 120, 87.9, 896, 63, false},
    {"rtxpro4000", "RTX PRO 4000 Blackwell", 24450, 120, 187.6, 672, 63, false},
    {"rtxpro4500", "RTX PRO 4500 Blackwell", 32600, 120, 219.8, 896, 63, false},
    {"rtxpro5000", "RTX PRO 5000 Blackwell", 48900, 120, 294.8, 1344, 63, false},
    {"rtx5080", "RTX 5080", 16303, 120, 112.6, 960, 63, false},
    {"rtx5090", "RTX 5090", 32607, 120, 209.5, 1792, 63, false},
    {"rtxpro6000", "RTX PRO 6000 Blackwell", 97887, 120, 503.8, 1792, 63, false},
    {"gb10", "GB10", 124546, 121, 125, 273, 63, true},
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

/* Reads a size such as "24gb" or "24 GiB", as n gibibytes. 1: read; 0: not a size. */
static int read_size(struct gpu_model *card, const char *name, struct err *err)
{
    char *end;
    const bool digit = isdigit((unsigned char)name[strspn(name, "+-")]);
    const double gib = digit ? strtod(name, &end) : 0;
    if (!digit || (!same(end, "gb") && !same(end, "gib"))) return 0;
    if (gib < 1 || gib > 4096) return err_set(err, "--gpu %s: a size is from 1gb to 4096gb", name);
    snprintf(card->title, sizeof(card->title), "a GPU of %g GB", gib);
    card->bytes = (int64_t)(gib * (1 << 30));
    card->capability = 0;
    card->integrated = false;
    card->rates = (struct roofs){0};
    return 1;
}

/* The rates that training reaches with full tiles. With these factors the estimated step times of five models with
 * large micro-batches were within a sixth of those measured in RESULTS.md. */
static struct roofs rates_of(int i)
{
    return (struct roofs){.flops = 0.52e12 * cards[i].tflops, .bytes = 0.85e9 * cards[i].gbs};
}

/* Whether `text` contains the n letters and digits of `word`, without a letter or digit after them: "L40" does not
 * contain "l4". */
static bool has_word(const char *text, const char *word, size_t n)
{
    for (; *text; text++) {
        const char *t = text;
        size_t i = 0;
        while (i < n && next(&t) == word[i]) i++;
        if (i == n && !isalnum((unsigned char)*t)) return true;
    }
    return false;
}

/* Whether `device` contains every word of a card's name: "A100-SXM4-40GB" contains those of "a100-40gb". */
static bool is_named(const char *device, const char *name)
{
    bool all = true;
    for (size_t n; *name && all; name += n + (name[n] == '-')) all = has_word(device, name, n = strcspn(name, "-"));
    return all;
}

/* -1: none. */
static int card_of(const char *device)
{
    int best = -1;
    for (int i = 0; i < MT_LEN(cards); i++)
        if (is_named(device, cards[i].name) && (best < 0 || strlen(cards[i].name) > strlen(cards[best].name))) best = i;
    return best;
}

struct roofs gpu_table_rates(const char *device)
{
    const int i = card_of(device);
    return i < 0 ? (struct roofs){0} : rates_of(i);
}

struct gpu_scale gpu_table_scale(const char *device)
{
    const int i = card_of(device), h200 = card_of("H200");
    if (i < 0 || cards[i].capability == cards[h200].capability) return (struct gpu_scale){1, 1, 1};
    return (struct gpu_scale){cards[i].tflops / cards[h200].tflops, cards[i].gbs / cards[h200].gbs,
                              cards[i].link_gbs / cards[h200].link_gbs};
}

/* Whether a card's name without its first letters is `number`, as in rtx4090 and "4090". begins: or begins with it. */
static bool has_number(int i, const char *number, bool begins)
{
    const char *name = cards[i].name;
    int a, b;
    while (isalpha((unsigned char)*name)) name++;
    do {
        a = next(&number);
        b = next(&name);
    } while (a && a == b);
    return a == b || (begins && !a);
}

enum { NONE = -1, SEVERAL = -2 };

/* The only card with a number of at least three digits, such as "4090" or "4070 Ti"; NONE; SEVERAL cards. */
static int card_of_number(const char *number)
{
    int found = NONE;
    if (strspn(number, "0123456789") < 3) return NONE;
    for (int i = 0; i < MT_LEN(cards); i++)
        if (has_number(i, number, false)) found = found == NONE ? i : SEVERAL;
    return found;
}

/* Finds a card by the name in the table, by the name that nvidia-smi prints, or by its number. */
static int find_card(const char *name)
{
    for (int i = 0; i < MT_LEN(cards); i++)
        if (same(cards[i].name, name)) return i;
    const int i = card_of(name);
    return i >= 0 ? i : card_of_number(name);
}

/* The cards that the kernels support; of a number, or all. */
static void list_cards(char names[768], const char *number)
{
    size_t used = 0;
    names[0] = 0;
    for (int i = 0; i < MT_LEN(cards); i++)
        if (cards[i].capability >= GPU_CAPABILITY && (!number || has_number(i, number, true)))
            used += (size_t)snprintf(names + used, 768 - used, "%s%s", used ? ", " : "", cards[i].name);
}

int gpu_table_find(struct gpu_model *card, const char *name, struct err *err)
{
    char names[768];
    const int size = read_size(card, name, err), i = size ? NONE : find_card(name);
    if (size) return size < 0 ? -1 : 0;
    if (i >= 0 && cards[i].capability < GPU_CAPABILITY)
        return err_set(err, "--gpu %s: the %s has compute capability %d.%d, and the CUDA kernels need %d.%d or later",
                       name, cards[i].title, cards[i].capability / 10, cards[i].capability % 10, GPU_CAPABILITY / 10,
                       GPU_CAPABILITY % 10);
    if (i >= 0) {
        snprintf(card->title, sizeof(card->title), "%s", cards[i].title);
        card->bytes = cards[i].mib << 20;
        card->capability = cards[i].capability;
        card->integrated = cards[i].integrated;
        card->rates = rates_of(i);
        return 0;
    }
    list_cards(names, i == SEVERAL ? name : NULL);
    if (i == SEVERAL) return err_set(err, "--gpu %s is the number of several cards: %s", name, names);
    return err_set(err, "--gpu %s is unknown: give its memory, as in 24gb, or one of %s", name, names);
}
