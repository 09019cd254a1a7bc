/* source_list.h - the value of data.train: a comma-separated list of files, folders and patterns, with weights. */
#ifndef MT_SOURCE_LIST_H
#define MT_SOURCE_LIST_H

#include "kernels/base.h"

enum source_kind { SOURCE_OTHER, SOURCE_JSON, SOURCE_CSV, SOURCE_TSV, SOURCE_TEXT, SOURCE_PARQUET, SOURCE_ARROW };
/* The kind, by the end of the name without ".gz". */
enum source_kind source_list_kind(const char *path);
#define SOURCE_KINDS "JSONL, JSON, CSV, TSV, .txt, .md, plain or .gz; parquet, Arrow" /* for messages */

/* Copies the next path or pattern of the list, without blanks around it, and moves *list past it; 1, or 0 at the end.
 * *weight: W of PATH*W; 1 without *W. A * not followed by a number is part of a pattern. */
int source_list_next(const char **list, char path[MT_PATH], double *weight, struct err *err) MT_CHECK;

struct source_files {
    char **paths; /* [n] */
    int64_t n, cap;
    int64_t n_texts; /* text files of folders that are left out, because the folders have files of rows */
};
/* Finds the files of one entry; free them with source_files_free, even after an error.
 * - a file: itself
 * - a folder that save_to_disk of datasets wrote: the files that its state.json lists
 * - another folder: all files of rows in it and in its folders, sorted by path; without any, all its texts. Hidden
 *   files and those that describe a data set (README.md, dataset_info.json, ...) are left out
 * - a pattern with * ? [: what matches, sorted; matching folders are read as above
 * Error: a folder or pattern without files. A missing single file is no error here. */
int source_files_find(struct source_files *files, const char *path, struct err *err) MT_CHECK;
void source_files_free(struct source_files *files);
bool source_list_has_text(const char *list); /* the list includes a text file */

#endif
