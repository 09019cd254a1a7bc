/* hub_push.h - uploads a folder to a model repository on the hub. Token and address as for downloads (hub.h). */
#ifndef MT_HUB_PUSH_H
#define MT_HUB_PUSH_H

#include "kernels/base.h"

struct hub_push {
    const char *dir, *to; /* the folder; hub:OWNER/NAME */
    bool private;         /* create the repository private; an error for one that is public */
    const char *message;  /* of the commit */
};
/* Sends the folder's files, except hidden ones, in one commit; creates the repository if missing. Contents that the hub
 * has are not sent again, so a call after an interruption continues. Files of the repository that the folder lacks
 * stay. url: the repository's address; *changed: files in the commit, 0: none differed. */
int hub_push(const struct hub_push *push, char url[MT_PATH], int64_t *changed, struct err *err) MT_CHECK;

#endif
