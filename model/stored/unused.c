/* unused.c - counts the tensors of a checkpoint that were not read, by purpose. */
#include "model/stored/unused.h"

#include <string.h>

int64_t unused_count(const struct checkpoint *ck, const struct arch *a, bool quiet, const char **first)
{
    int64_t n = 0, n_scale = 0, n_mtp = 0, n_other = 0;
    bool vision = false;
    for (int64_t i = ck->st->n_tensors - 1; i >= 0; i--) {
        const char *name = ck->st->tensors[i].name;
        if (ck->used[i]) continue;
        if (source_is_activation_scale(name))
            n_scale++;
        else if (arch_is_prediction(a, name))
            n_mtp++;
        else if (arch_is_other_part(name))
            n_other++, vision |= strncmp(name, "mtp.", 4) != 0;
        else
            n++, *first = safetensors_stored(&ck->st->tensors[i]);
    }
    if (quiet) return n;
    if (ck->st->n_missing)
        log_info("%lld tensor%s of the index %s not in the checkpoint, and not needed, such as %s of %s",
                 (long long)ck->st->n_missing, str_plural(ck->st->n_missing), ck->st->n_missing == 1 ? "is" : "are",
                 ck->st->missing[0].name, ck->st->missing[0].file);
    if (n_scale)
        log_info("%lld scale%s of activations in the checkpoint %s not used: only its weights are quantised",
                 (long long)n_scale, str_plural(n_scale), n_scale == 1 ? "is" : "are");
    if (n_mtp)
        log_info(
            "%lld tensor%s of multi-token prediction (model.layers.%lld.*) %s not read: the adapter does not train it",
            (long long)n_mtp, str_plural(n_mtp), (long long)a->n_layer, n_mtp == 1 ? "is" : "are");
    if (n_other)
        log_info("%lld tensor%s of %s %s not used: %s", (long long)n_other, str_plural(n_other),
                 vision ? "the vision tower and of multi-token prediction" : "multi-token prediction (mtp.*)",
                 n_other == 1 ? "is" : "are",
                 vision ? "only the text part is trained" : "the adapter does not train it");
    return n;
}
