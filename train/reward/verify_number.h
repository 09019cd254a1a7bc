/* verify_number.h - last_number: the answer's number equals that of the reference.
 *
 * The number of an answer or reference is the last number after its last "####"; without "####", an answer's is in its
 * last balanced \boxed{}, if it has one; otherwise it is the last one in the text.
 *
 * A number is a longest run of digits, "," and "." without "," and "." at its end. Its form is 1234, or 1,234 with
 * groups of three digits, or .5; decimals may follow. 1,23 and 2.0.1 are not numbers. "-" or "-$" before the number is
 * its sign, unless a digit or a letter is before the sign: 5-3 ends with 3. */
#ifndef MT_VERIFY_NUMBER_H
#define MT_VERIFY_NUMBER_H

#include "train/reward/verify_text.h"

/* tolerance 0: the decimals must be equal, as in 18 = 18.0. WRONG: the answer has no number or another one; NONE: the
 * reference has no number. */
enum verdict verify_number(struct verify_text answer, struct verify_text reference, double tolerance);

/* The last number of a text; false: there is none. */
bool verify_last_number(struct verify_text t, double *value);

#endif
