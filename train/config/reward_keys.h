/* reward_keys.h - the settings of [reward] whose names the user chooses: NAME = KIND ARGUMENTS, and NAME.weight = W.
 * The configuration stores them in one text, config.reward.NAME: entries KEY=VALUE, separated by tabs. */
#ifndef MT_REWARD_KEYS_H
#define MT_REWARD_KEYS_H

#include "train/config/words.h"

/* Kinds of rewards; train/reward/README.md defines them. Verifiers give 1 for right and 0 for wrong. */
#define VERIFIERS       "exact|last_number|boxed|regex|json|think_format|format"
#define REWARD_BUILTINS VERIFIERS "|length|repetition"
#define REWARD_KINDS    REWARD_BUILTINS "|environment|command|judge"
enum reward_kind {
    REWARD_EXACT,
    REWARD_LAST_NUMBER,
    REWARD_BOXED,
    REWARD_REGEX,
    REWARD_JSON,
    REWARD_THINK_FORMAT,
    REWARD_FORMAT,
    REWARD_LENGTH,
    REWARD_REPETITION,
    REWARD_ENVIRONMENT,
    REWARD_COMMAND,
    REWARD_JUDGE
};

enum { REWARDS_MOST = 16, REWARD_NAME = 40 };

struct reward_key {
    char name[REWARD_NAME];
    double weight;
    enum reward_kind kind;
    struct words words; /* the words of the value. The first word is the kind. COMMAND: the others are program and
                           arguments. JUDGE: the second is the address */
    const char *model, *prompt, *key; /* JUDGE: a name and two files; NULL: not given */
    /* arguments KEY=VALUE of built-in rewards */
    const char *reference, *pattern; /* reference: a column of the row, NULL: none; pattern: REGEX */
    const char *schema;              /* JSON: a file; then the default of reference is none */
    bool ignore_case;                /* EXACT, REGEX */
    double tolerance;                /* LAST_NUMBER */
    int64_t max, cache;              /* LENGTH */
    int64_t n;                       /* REPETITION */
};
/* Reward i of the list; false: there are no more. Free it. */
bool reward_keys_get(const char *list, int64_t i, struct reward_key *key);
void reward_key_free(struct reward_key *key); /* key may be zeroed */

/* Sets the key, for example correct or correct.weight, in a list of `size` bytes. The key "NAME" itself sets the whole
 * list. Errors begin with `where`. */
int reward_keys_set(char *list, int64_t size, const char *key, const char *value, const char *where,
                    struct err *err) MT_CHECK;
/* The number of a key's entry in the list, below 2 REWARDS_MOST; -1: the list does not have the key. */
int64_t reward_keys_place(const char *list, const char *key);
/* Entry i: the name is [*key, *value), its value [*value + 1, *end). False: the list has fewer entries. */
bool reward_keys_entry(const char *list, int64_t i, const char **key, const char **value, const char **end);

#endif
