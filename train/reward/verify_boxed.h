/* verify_boxed.h - boxed: the content of the answer's last \boxed{} or \fbox{} equals that of the reference, or the
 * whole reference if it has no box.
 *
 * Braces must be balanced, without counting \{ and \}; an answer whose last box has no end is wrong. Before the
 * comparison \left, \right, \, \! \; $, white space and \text around its text are removed, and \dfrac is \frac. There
 * is no algebra: 1/2 is not 0.5. */
#ifndef MT_VERIFY_BOXED_H
#define MT_VERIFY_BOXED_H

#include "train/reward/verify_text.h"

enum verdict verify_boxed(struct verify_text answer, struct verify_text reference);
/* The content of the last \boxed{} whose braces are balanced; its text is NULL if there is none. */
struct verify_text boxed_balanced(struct verify_text t);

#endif
