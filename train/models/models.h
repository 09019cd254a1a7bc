/* models.h - models by name: the base model and adapters of one directory or several; the adapters that
 * are in memory.
 *
 * When all slots are full, the adapter that was unused for longest makes room. Names may be looked up by any thread,
 * under the caller's lock; slots belong to the engine's thread. */
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
    struct served *model;         /* NULL: empty */
    int adapter;                  /* of the engine */
    int64_t n_users, used, stamp; /* requests that run; number of the last use; when the adapter's file changed */
};

struct models {
    struct served **items;   /* [n], 0 is the base model; entries are never removed */
    int64_t n, n_named, cap; /* items from n_named on are of the folder */
    const char *folder;      /* --adapters; NULL: none */
    struct run *run;
    struct engine *engine; /* set before models_take */
    struct slot *slots;    /* [n_slot] */
    int64_t n_slot, n_use;
};

/* The base model and the adapters: words are DIR or NAME=DIR. Then the adapters below `folder`. */
int models_open(struct models *m, struct run *r, const struct cli_words *words, const char *folder,
                struct err *err) MT_CHECK;
/* Another adapter; option: where the word comes from, for messages. */
int models_add(struct models *m, const char *option, const char *word, struct err *err) MT_CHECK;
/* Sets [lora] so that run_open_model plans passes with any of the adapters, and r->set_aside for n_slot of the largest.
 * later: other adapters may come, as large as [lora] says. */
int models_plan(struct models *m, struct config *cfg, int64_t n_slot, bool later, struct err *err) MT_CHECK;
void models_close(struct models *m); /* m may be zeroed */

/* Its adapter still has files; true of the base model. */
bool models_has(const struct served *s);
/* NULL: no model has this name. Reads the folder again for an unknown name. name NULL or "": the base model. */
struct served *models_find(struct models *m, const char *name);

/* The slot of an adapter, loaded if it is not in memory; NULL for the base model. 0: done, 1: no slot is free now, -1:
 * an error. Balance it with models_release. */
int models_take(struct slot **slot, struct models *m, struct served *s, struct err *err) MT_CHECK;
void models_release(struct slot *slot); /* NULL is fine */

#endif
