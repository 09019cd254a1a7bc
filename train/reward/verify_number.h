/* verify_number.h - last_number: the answer's number equals that of the reference.
 *
 * The number of an answer is the last one after its last "####"; without "####" that in its last balanced \boxed{};
 * without a box the last one of the text. That of a reference is the last one after its last "####", else of all.
 *
 * A number is a longest run of digits, "," and "." without "," and "." at its end. It is 1234, 1,234 with groups of
 * three digits, or .5, with decimals; 1,23 and 2.0.1 are none. "-" or "-$" before it is its sign, unless a digit or a
 * letter is before that: 5-3 ends with 3. */
#ifndef MT_VERIFY_NUMBER_H
#define MT_VERIFY_NUMBER_H

#include "train/reward/verify_text.h"

/* tolerance 0: equal decimals, as 18 = 18.0. No number in the answer: WRONG; none in the reference: NONE. */
enum verdict verify_number(struct verify_text answer, struct verify_text reference, double tolerance);

/* The last number of a text; false: there is none. */
bool verify_last_number(struct verify_text t, double *value);

#endif
