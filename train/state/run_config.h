/* run_config.h - writes config.ini of a run; finds out whether its report is out of date. */
#ifndef MT_RUN_CONFIG_H
#define MT_RUN_CONFIG_H

#include "train/state/resume.h"

/* Writes output.dir/config.ini, always with train.resume = auto, so that a run with this file continues. */
int run_config_write(const struct config *cfg, struct err *err) MT_CHECK;
/* Whether the settings in output.dir/config.ini are those of the checkpoint (resume_has_settings). */
bool run_config_is_of(const struct config *cfg, const struct resume *from);
/* Whether output.dir/report.html is missing, or older than a file that it shows. */
bool run_config_report_is_old(const struct config *cfg);

#endif
