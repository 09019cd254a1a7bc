/* dense.c - matrices in BF16, F16 or F32; stacks of experts [E, out, in] or, as transformers has gpt-oss, [E, in, out].
 */
#include "model/stored/stored.h"

static int found(struct source *s, struct checkpoint *ck, const char *name, int ndim, const int64_t *shape,
                 struct err *err)
{
    if (checkpoint_check_matrix(ck, name, ndim, shape, err)) return -1;
    s->data = checkpoint_take(ck, name, false, ndim, shape, err);
    if (!s->data) return -1;
    s->format = checkpoint_dense_format(s->data->dtype);
    return 1;
}

static int find(struct source *s, struct checkpoint *ck, const char *name, struct err *err)
{
    return found(s, ck, name, 2, (int64_t[]){s->n_out, s->n_in}, err);
}

static int find_stack(struct source *s, struct checkpoint *ck, const char *name, int64_t n_exp, struct err *err)
{
    const int64_t shape[] = {n_exp, s->transposed ? s->n_in : s->n_out, s->transposed ? s->n_out : s->n_in};
    return checkpoint_has(ck, name) ? found(s, ck, name, 3, shape, err) : 0;
}

const struct stored_layout stored_as_dense = {.data = {"", "BF16", 1, 1}};
const struct stored stored_dense = {.find = find, .find_stack = find_stack};
