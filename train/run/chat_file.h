/* chat_file.h - the chat template that a run was trained with, beside its adapter and in its exports. */
#ifndef MT_CHAT_FILE_H
#define MT_CHAT_FILE_H

#include "train/run/run.h"

/* Writes dir/chat_template.jinja when transformers does not find the run's template in the checkpoint:
 * data.chat_template or chat_template.json. */
int chat_file_save(const struct run *r, const char *dir, struct err *err) MT_CHECK;
/* The template beside the adapter, which the run has trained with, else that of the settings; mem_free it. *text NULL:
 * that of the checkpoint. */
int chat_file_find(char **text, const struct run *r, const char *adapter_dir, struct err *err) MT_CHECK;
/* Writes the same into an export, or the file beside the adapter, and says when the base model has another. */
int chat_file_export(const struct run *r, const char *adapter_dir, const char *dir, struct err *err) MT_CHECK;
/* Whether chat_file_export writes a file, which hides the templates of the base model. */
bool chat_file_is_own(const struct run *r, const char *adapter_dir);

#endif
