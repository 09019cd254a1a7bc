/* gguf_meta.h - the keys of a whole model: sizes and tokenizer. */
#ifndef MT_GGUF_META_H
#define MT_GGUF_META_H

#include "data/gguf.h"
#include "model/arch/arch.h"

struct gguf_meta {
    struct gguf_value *values;
    int64_t n, cap;
    void **owned; /* [n_owned] memory that the values point to */
    int64_t n_owned, cap_owned;
};
struct gguf_meta_model {
    const struct arch *arch;
    const char *name, *dir;    /* of the model; its directory, with the tokenizer */
    const char *chat_template; /* NULL: none */
    enum ggml_type matrices;
};
/* Opens m with the keys of the sizes. */
void gguf_meta_open(struct gguf_meta *m, const struct gguf_meta_model *model);
void gguf_meta_close(struct gguf_meta *m); /* zeroed is valid */

/* YaRN's beta_fast and beta_slow as command-line options of llama.cpp, which does not read them from the files of any
 * family here. "": the model has llama.cpp's defaults, 32 and 1. */
#define GGUF_OPTIONS_TEXT 96
void gguf_meta_options(char text[GGUF_OPTIONS_TEXT], const struct arch *a);

/* Append a value. The architecture's name is put before a key that begins with a dot. Texts are copied; arrays must
 * come from gguf_meta_own. */
void gguf_meta_u32(struct gguf_meta *m, const char *key, int64_t v);
void gguf_meta_bool(struct gguf_meta *m, const char *key, bool v);
void gguf_meta_f32(struct gguf_meta *m, const char *key, double v);
void gguf_meta_text(struct gguf_meta *m, const char *key, const char *text);
void gguf_meta_array(struct gguf_meta *m, const char *key, enum gguf_type of, int64_t n, const void *array);
void *gguf_meta_own(struct gguf_meta *m, void *p); /* gguf_meta_close frees p */

#endif
