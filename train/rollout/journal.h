/* journal.h - the samples and rewards of a generation batch that is not complete, in files of output.dir. After a kill
 * the next run reads them and samples only the rest. */
#ifndef MT_JOURNAL_H
#define MT_JOURNAL_H

#include "kernels/base.h"

/* A sample in the journal. */
struct journal_entry {
    int64_t group, sample;
    char *line; /* of rollout_lines.h, without its line feed; NULL: none */
    int64_t size;
    double *values; /* [n_reward] NaN: null; NULL: not rewarded yet */
};
/* A key is SETTINGS or SETTINGS.ADAPTERS: hashes of the settings that samples depend on, and of the adapters. */
enum { JOURNAL_KEY = 34 };
struct journal {
    struct journal_entry *of; /* [n] by group and sample */
    int64_t n, cap, n_reward;
    int fd; /* of this rank's file; -1: none */
    char path[MT_PATH], key[JOURNAL_KEY];
};

/* Reads the lines with this key from the files DIR/step-NNNNNN.part-* of all ranks. Then opens the file of `rank` for
 * appending, after its last complete line; rank -1: this rank writes no file. If key is only SETTINGS, ADAPTERS is that
 * of the first line with these settings. The ranks must wait for each other before the call. */
int journal_open(struct journal *j, const char *dir, int64_t step, int rank, const char *key, int64_t n_reward,
                 struct err *err) MT_CHECK;
void journal_close(struct journal *j); /* j may be zeroed */

/* NULL: there is none. */
const struct journal_entry *journal_find(const struct journal *j, int64_t group, int64_t sample);
/* Appends a sample, a line of rollout_lines.h with its line feed; journal_add_rewards appends the rewards of a
 * sample. */
int journal_add_line(struct journal *j, const char *line, int64_t size, struct err *err) MT_CHECK;
int journal_add_rewards(struct journal *j, int64_t group, int64_t sample, const double *values,
                        struct err *err) MT_CHECK;

/* Deletes the journals of steps up to `last`. DIR may be missing. */
int journal_remove(const char *dir, int64_t last, struct err *err) MT_CHECK;

#endif
