/* models.h - models by name: the base model and adapters of one directory or several; which adapters are in memory. A
 * slot is the memory of one adapter; when all are full, the adapter that was unused for longest is removed. Names may
 * be looked up by any thread, under the caller's lock; slots belong to the engine's thread. */
#ifndef MT_MODELS_H
#define MT_MODELS_H

#include "train/cli/cli.h"
#include "train/generate/engine.h"
#include "train/run/run.h"

struct served {
    char *name, *dir;  /* dir: with adapter_config.json; NULL: the base model */
    int64_t created;   /* Unix time */
    struct slot *slot; /* NULL: not in memory */
};

struct slot {
    struct served *model; /* NULL: empty */
    int adapter;          /* of the engine */
    int64_t n_users, used,
        stamp; /* n_users: requests that run; used: number of the last use; stamp: time of the adapter's file */
};

struct models {
    struct served **items;   /* [n], 0 is the base model; entries are never removed */
    int64_t n, n_named, cap; /* items from n_named on are of the folder */
    const char *folder;      /* --adapters; NULL: none */
    struct run *run;
    struct engine *engine; /* set before models_take */
    struct slot *slots;    /* [n_slot] */
    int64_t n_slot, n_use;
    struct slot *wanted; /* a request waits for this slot, so no new request may use its adapter; NULL: none */
};

/* Adds the base model, the adapters of words (DIR or NAME=DIR), then the adapters below `folder`. */
int models_open(struct models *m, struct run *r, const struct cli_words *words, const char *folder,
                struct err *err) MT_CHECK;
/* Adds another adapter. option: the option that has the word, for messages. */
int models_add(struct models *m, const char *option, const char *word, struct err *err) MT_CHECK;
/* Sets [lora] of cfg so that run_open_model plans passes with any of the adapters, and set_aside of the run that
 * models_open got to the memory of n_slot adapters of the largest size. later: adapters of the size that [lora] gives
 * may be added later. */
int models_plan(struct models *m, struct config *cfg, int64_t n_slot, bool later, struct err *err) MT_CHECK;
void models_close(struct models *m); /* m may be zeroed */

/* Whether the adapter of s still has files; true for the base model. */
bool models_has(const struct served *s);
/* Finds a model by name; NULL or "": the base model. Reads the folder again if the name is unknown. NULL: no model has
 * it. */
struct served *models_find(struct models *m, const char *name);

/* Begins a round of models_take: the waiting requests take in the order of their arrival. */
void models_round(struct models *m);
/* Sets *slot to the slot of an adapter, which it loads if it is not in memory; NULL for the base model. 1: no slot is
 * free now, or the slot is wanted by an earlier request of the round; -1: an error. After 0 the caller must call
 * models_release. */
int models_take(struct slot **slot, struct models *m, struct served *s, struct err *err) MT_CHECK;
void models_release(struct slot *slot); /* NULL is fine */

#endif
