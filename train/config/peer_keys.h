/* peer_keys.h - keys of other trainers (PEFT, TRL, Axolotl, Unsloth, torchtune) and of moetrain for them. */
#ifndef MT_PEER_KEYS_H
#define MT_PEER_KEYS_H

#include <stdbool.h>
#include <stdint.h>

struct peer_key {
    const char *name;
    const char *key;  /* "section.key"; NULL: moetrain has none, `note` says why */
    const char *note; /* difference in unit or meaning; NULL: none */
};

/* Whether given and key are one name; '-' in `given` counts as '_'. */
bool peer_key_same(const char *given, const char *key);
/* By peer_key_same; NULL: unknown. */
const struct peer_key *peer_key_find(const char *name);
/* "use optim.lr", with the note, into buf; returns buf. */
char *peer_key_advice(char buf[256], const struct peer_key *peer);
/* Advice for a value that the key "section.key" has in other trainers but not here; NULL: none. */
const char *peer_value_advice(const char *section, const char *key, const char *value);
/* Row i of the table; NULL: past its end. */
const struct peer_key *peer_key_at(int64_t i);

#endif
