/* chat_file.h - the chat template that a run was trained with, beside its adapter and in its exports. */
#ifndef MT_CHAT_FILE_H
#define MT_CHAT_FILE_H

#include "train/run/run.h"

/* Writes dir/chat_template.jinja if transformers would not find the run's template in the checkpoint, because it is
 * data.chat_template or in chat_template.json. */
int chat_file_save(const struct run *r, const char *dir, struct err *err) MT_CHECK;
/* Finds the template with which the adapter was trained: the file beside the adapter, otherwise that of the settings;
 * mem_free it. *text NULL: it is that of the checkpoint. */
int chat_file_find(char **text, const struct run *r, const char *adapter_dir, struct err *err) MT_CHECK;
/* As chat_file_save, for an export; if there is a file beside the adapter, copies it. Prints a line if the base model
 * has another template. */
int chat_file_export(const struct run *r, const char *adapter_dir, const char *dir, struct err *err) MT_CHECK;
/* Whether chat_file_export writes a file, which programs then use instead of the base model's templates. */
bool chat_file_is_own(const struct run *r, const char *adapter_dir);

#endif
