/* dataset.h - rows of data files -> token ids and loss mask, in memory, cached on disk by content. */
#ifndef MT_DATASET_H
#define MT_DATASET_H

#include "data/dataset/dataset_types.h"

/* Advice for a missing path that may name a data set on the hub: "; ...", or "". */
const char *dataset_hub_hint(const char *path);

/* files: comma-separated files, folders and patterns (source_list.h), read in order. "PATH*2.5" repeats its documents
 * twice and adds half of them, "PATH*0.1" takes a tenth, chosen at random but reproducibly.
 *
 * Bad rows (invalid JSON, keys missing or of the wrong type, messages that cannot be rendered) are skipped; the first
 * few are shown with file and line. More than 1 % bad rows is an error. It is raised early, from 1000 bad rows on, if
 * all rows so far are bad or more than 1 % of the rows estimated from the files' size.
 *
 * Also errors: no documents, and an id at or above vocab. ds needs no dataset_free after an error. */
int dataset_load(struct dataset *ds, const char *files, const struct tokenizer *tok, const struct dataset_options *opt,
                 struct err *err) MT_CHECK;
/* Moves a fraction of the documents, chosen by seed, from ds to held, in order; at least one if fraction > 0. Documents
 * of one row stay together. Error: none would be left; ds is then unchanged. */
int dataset_split(struct dataset *ds, struct dataset *held, double fraction, uint64_t seed, struct err *err) MT_CHECK;
/* A unit is drawn and dropped as a whole: a document, or the two of a pair. */
int64_t dataset_per_unit(const struct dataset *ds); /* documents of a unit */
int64_t dataset_units(const struct dataset *ds);
int64_t dataset_targets(const struct dataset *ds); /* number of tokens with mask 1 */
void dataset_free(struct dataset *ds);

#endif
