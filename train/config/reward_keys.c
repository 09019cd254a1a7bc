/* reward_keys.c - see reward_keys.h. */
#include "train/config/reward_keys.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "train/config/ranges.h"

#define WEIGHT ".weight"

/* ---- the list ---- */

bool reward_keys_entry(const char *list, int64_t i, const char **key, const char **value, const char **end)
{
    for (; i > 0 && *list; i--) list += strcspn(list, "\t") + (list[strcspn(list, "\t")] != 0);
    if (!*list) return false;
    *key = list;
    *value = list + strcspn(list, "=");
    *end = list + strcspn(list, "\t");
    return true;
}

int64_t reward_keys_place(const char *list, const char *key)
{
    const char *at, *value, *end;
    for (int64_t i = 0; reward_keys_entry(list, i, &at, &value, &end); i++)
        if ((size_t)(value - at) == strlen(key) && !memcmp(at, key, strlen(key))) return i;
    return -1;
}

static bool is_weight(const char *key, int64_t size)
{
    const int64_t n = (int64_t)strlen(WEIGHT);
    return size > n && !memcmp(key + size - n, WEIGHT, (size_t)n);
}

static int check_name(const char *name, int64_t size, const char *where, struct err *err)
{
    int64_t n = 0;
    while (n < size && (name[n] == '_' || name[n] == '-' || (name[n] >= '0' && name[n] <= '9') ||
                        ((name[n] | 32) >= 'a' && (name[n] | 32) <= 'z')))
        n++;
    if (size && n == size && size < REWARD_NAME) return 0;
    return err_set(err, "%s: reward.%.*s: expected a name of letters, digits, _ and -, below %d of them", where,
                   (int)MT_MIN(size, 64), name, REWARD_NAME);
}

/* ---- arguments of built-in rewards ---- */

static const struct argument {
    const char *name, *of, *range; /* kinds that take it; NULL: a text; "": true or false */
    size_t offset;
    bool required;
} arguments[] = {
    {"reference", "exact|last_number|boxed|regex|json", NULL, offsetof(struct reward_key, reference), false},
    {"ignore_case", "exact|regex", "", offsetof(struct reward_key, ignore_case), false},
    {"tolerance", "last_number", "[0, 1e300]", offsetof(struct reward_key, tolerance), false},
    {"schema", "json", NULL, offsetof(struct reward_key, schema), false},
    {"pattern", "regex", NULL, offsetof(struct reward_key, pattern), true},
    {"max", "length", "[1, 1e9]", offsetof(struct reward_key, max), true},
    {"cache", "length", "[0, 1e9]", offsetof(struct reward_key, cache), true},
    {"model", "judge", NULL, offsetof(struct reward_key, model), false},
    {"prompt", "judge", NULL, offsetof(struct reward_key, prompt), false},
    {"key", "judge", NULL, offsetof(struct reward_key, key), false},
    {"n", "repetition", "[1, 64]", offsetof(struct reward_key, n), false},
};

static bool takes(const struct argument *a, const char *kind) { return config_choice_index(a->of, kind) >= 0; }

static int set_argument(struct reward_key *key, const struct argument *a, const char *value, struct err *err)
{
    char *field = (char *)key + a->offset, *end;
    const double number = strtod(value, &end);
    if (!a->range) {
        if (!*value) return err_set(err, "%s is empty", a->name);
        *(const char **)(void *)field = value;
    } else if (!*a->range) {
        if (strcmp(value, "true") && strcmp(value, "false"))
            return err_set(err, "%s=%.80s: expected true or false", a->name, value);
        *(bool *)field = !strcmp(value, "true");
    } else {
        const bool real = a->offset == offsetof(struct reward_key, tolerance);
        if (end == value || *end || !config_in_interval(number, a->range) || (!real && number != floor(number)))
            return err_set(err, "%s=%.80s: expected %s in %s", a->name, value, real ? "a number" : "an integer",
                           a->range);
        if (real)
            *(double *)(void *)field = number;
        else
            *(int64_t *)(void *)field = (int64_t)number;
    }
    return 0;
}

/* Arguments of the kind, for messages. */
static const char *expected(char text[128], const char *kind)
{
    int n = 0;
    text[0] = 0;
    for (int i = 0; i < MT_LEN(arguments); i++)
        if (takes(&arguments[i], kind))
            n += snprintf(text + n, 128 - (size_t)n, "%s%s=", n ? ", " : "", arguments[i].name);
    return n ? text : "none";
}

static int read_arguments(struct reward_key *key, struct err *err)
{
    const char *kind = key->words.words[0];
    bool given[MT_LEN(arguments)] = {0};
    char known[128];
    key->reference = NULL;
    key->n = 3;
    for (int64_t w = key->kind == REWARD_JUDGE ? 2 : 1; w < key->words.n; w++) {
        const char *word = key->words.words[w];
        int i = 0;
        for (; i < MT_LEN(arguments); i++) {
            const size_t n = strlen(arguments[i].name);
            if (!strncmp(word, arguments[i].name, n) && word[n] == '=' && takes(&arguments[i], kind)) break;
        }
        if (i == MT_LEN(arguments))
            return err_set(err, "%s does not take \"%.80s\": its arguments are %s", kind, word, expected(known, kind));
        if (given[i]) return err_set(err, "%s is given twice", arguments[i].name);
        given[i] = true;
        if (set_argument(key, &arguments[i], word + strlen(arguments[i].name) + 1, err)) return -1;
    }
    for (int i = 0; i < MT_LEN(arguments); i++)
        if (arguments[i].required && !given[i] && takes(&arguments[i], kind))
            return err_set(err, "%s needs %s=", kind, arguments[i].name);
    if (!key->reference && !key->schema) key->reference = "answer";
    if (key->kind == REWARD_LENGTH && key->cache > key->max)
        return err_set(err, "cache=%lld is more than max=%lld", (long long)key->cache, (long long)key->max);
    return 0;
}

static int read_value(struct reward_key *key, const char *value, struct err *err)
{
    if (words_split(&key->words, value, err)) return -1;
    const char *kind = key->words.n ? key->words.words[0] : "";
    const int i = config_choice_index(REWARD_KINDS, kind);
    if (i < 0) return err_set(err, "unknown kind of reward \"%.40s\": expected %s", kind, REWARD_KINDS);
    key->kind = (enum reward_kind)i;
    const char *second = key->words.n > 1 ? key->words.words[1] : "";
    if (key->kind == REWARD_JUDGE && strncmp(second, "http://", 7) && strncmp(second, "https://", 8))
        return err_set(err, "judge needs an address, http://... or https://...");
    if (key->kind != REWARD_COMMAND) return read_arguments(key, err);
    return *second ? 0 : err_set(err, "command needs a program");
}

void reward_key_free(struct reward_key *key)
{
    words_free(&key->words);
    *key = (struct reward_key){.n = 0};
}

bool reward_keys_get(const char *list, int64_t i, struct reward_key *key)
{
    const char *at, *value, *end;
    char weight[REWARD_NAME + 8], *copy;
    int64_t entry = 0;
    *key = (struct reward_key){.weight = 1};
    for (;; entry++) {
        if (!reward_keys_entry(list, entry, &at, &value, &end)) return false;
        if (!is_weight(at, value - at) && i-- == 0) break;
    }
    snprintf(key->name, sizeof(key->name), "%.*s", (int)(value - at), at);
    copy = mem_strndup(value + 1, end - value - 1);
    MT_REQUIRE(!read_value(key, copy, NULL), "reward.%s was checked when it was set", key->name);
    mem_free(copy);
    snprintf(weight, sizeof(weight), "%s" WEIGHT, key->name);
    entry = reward_keys_place(list, weight);
    if (entry >= 0 && reward_keys_entry(list, entry, &at, &value, &end)) key->weight = strtod(value + 1, NULL);
    return true;
}

/* ---- setting ---- */

static int check_weight(const char *list, const char *key, const char *value, const char *where, struct err *err)
{
    char name[REWARD_NAME];
    char *end;
    const double w = strtod(value, &end);
    snprintf(name, sizeof(name), "%.*s", (int)(strlen(key) - strlen(WEIGHT)), key);
    if (reward_keys_place(list, name) < 0)
        return err_set(err, "%s: reward.%s: no reward \"%s\" is set before it", where, key, name);
    if (end == value || *end || !isfinite(w) || fabs(w) > 1e6)
        return err_set(err, "%s: reward.%s = \"%.80s\": expected a number in [-1e6, 1e6]", where, key, value);
    return 0;
}

static int check_reward(const char *list, const char *key, const char *value, const char *where, struct err *err)
{
    struct reward_key read = {.n = 0};
    struct err why;
    int64_t n = 0;
    const char *at, *v, *end;
    const int rc = read_value(&read, value, &why);
    reward_key_free(&read);
    if (rc) return err_set(err, "%s: reward.%s = \"%.80s\": %s", where, key, value, why.msg);
    for (int64_t i = 0; reward_keys_entry(list, i, &at, &v, &end); i++) n += !is_weight(at, v - at);
    if (n < REWARDS_MOST || reward_keys_place(list, key) >= 0) return 0;
    return err_set(err, "%s: reward.%s: there are more than %d rewards", where, key, REWARDS_MOST);
}

/* Replaces the entry of the key, or adds one. */
static int put(char *list, int64_t size, const char *key, const char *value, const char *where, struct err *err)
{
    const int64_t place = reward_keys_place(list, key), n = (int64_t)(strlen(key) + strlen(value)) + 1;
    const char *at = list + strlen(list), *v, *end = at;
    if (place >= 0) reward_keys_entry(list, place, &at, &v, &end);
    const bool more = place < 0 && *list;
    const int64_t first = at - list, total = (int64_t)strlen(list) - (end - at) + n + more;
    if (total >= size)
        return err_set(err, "%s: reward.%s: the rewards take %lld bytes; the limit is %lld", where, key,
                       (long long)total, (long long)size - 1);
    char *rest = mem_strdup(end);
    snprintf(list + first, (size_t)(size - first), "%s%s=%s%s", more ? "\t" : "", key, value, rest);
    memset(list + total, 0, (size_t)(size - total)); /* equal lists have equal bytes */
    mem_free(rest);
    return 0;
}

static int set_one(char *list, int64_t size, const char *key, const char *value, const char *where, struct err *err)
{
    const int64_t n = (int64_t)strlen(key);
    const bool weight = is_weight(key, n);
    if (check_name(key, weight ? n - (int64_t)strlen(WEIGHT) : n, where, err)) return -1;
    if (strchr(value, '\t'))
        return err_set(err, "%s: reward.%s has a tab: write a blank, or \\t in a pattern", where, key);
    if (weight ? check_weight(list, key, value, where, err) : check_reward(list, key, value, where, err)) return -1;
    return put(list, size, key, value, where, err);
}

static int set_all(char *list, int64_t size, const char *all, const char *where, struct err *err)
{
    const char *at, *value, *end;
    char *other = mem_alloc(size);
    int rc = 0;
    for (int64_t i = 0; !rc && reward_keys_entry(all, i, &at, &value, &end); i++) {
        char *key = mem_strndup(at, MT_MIN(value, end) - at);
        while (end > value && end[-1] == ' ') end--; /* a file would not keep it */
        char *text = mem_strndup(value + 1, MT_MAX(end - value - 1, 0));
        rc = value < end ? set_one(other, size, key, text, where, err)
                         : err_set(err, "%s: \"%.80s\": expected NAME=KIND ARGUMENTS", where, key);
        mem_free(key);
        mem_free(text);
    }
    if (!rc) memcpy(list, other, (size_t)size);
    mem_free(other);
    return rc;
}

int reward_keys_set(char *list, int64_t size, const char *key, const char *value, const char *where, struct err *err)
{
    return strcmp(key, "NAME") ? set_one(list, size, key, value, where, err) : set_all(list, size, value, where, err);
}
