/* export_card.h - README.md of an export: how to load exactly this format. */
#ifndef MT_EXPORT_CARD_H
#define MT_EXPORT_CARD_H

#include "train/export/export_job.h"

/* The adapter's model card with the format's section "Use", library and title; adapter NULL: it has none. warns:
 * peft_config_warns. The caller frees the text (mem_free). */
char *export_card(const char *adapter, enum export_format format, const char *base_model, const struct arch *a,
                  int64_t max_rank, bool warns);

#endif
