/* chat_named.c - chat templates by name. tests/parity/make_named.py renders these texts with transformers. */
#include "data/chat/chat_named.h"

#include <string.h>

static const struct {
    const char *name, *tokens[4], *text;
} named[] = {
    {"chatml",
     {"<|im_start|>", "<|im_end|>"},
     "{%- for message in messages %}"
     "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
     "{%- endfor %}"
     "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"},
    {"llama3",
     {"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"},
     "{{- bos_token }}"
     "{%- for message in messages %}"
     "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
     "{{- message['content'] | trim + '<|eot_id|>' }}"
     "{%- endfor %}"
     "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"},
    /* of Mistral-7B-Instruct and Mixtral-8x7B-Instruct: marks are text; the system prompt is in the first question */
    {"mistral",
     {NULL},
     "{{- bos_token }}"
     "{%- set system = namespace(text='') %}"
     "{%- for message in messages %}"
     "{%- if message['role'] == 'system' %}{%- set system.text = message['content'] + '\\n\\n' %}"
     "{%- elif message['role'] == 'user' %}"
     "{{- ' [INST] ' + system.text + message['content'] + ' [/INST]' }}{%- set system.text = '' %}"
     "{%- elif message['role'] == 'assistant' %}{{- ' ' + message['content'] + eos_token }}"
     "{%- else %}{{- raise_exception('roles are system, user and assistant') }}"
     "{%- endif %}"
     "{%- endfor %}"},
    /* marks are text, and eos_token ends every message */
    {"zephyr",
     {NULL},
     "{%- for message in messages %}"
     "{{- '<|' + message['role'] + '|>\\n' + message['content'] + eos_token + '\\n' }}"
     "{%- endfor %}"
     "{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}"},
};

static int64_t find(const char *name)
{
    int64_t i = 0;
    while (i < MT_LEN(named) && strcmp(named[i].name, name) != 0) i++;
    return i;
}

const char *chat_named_text(const char *name)
{
    const int64_t i = find(name);
    return i < MT_LEN(named) ? named[i].text : NULL;
}

const char *chat_named_token(const char *name, int64_t i)
{
    const int64_t at = find(name);
    return at < MT_LEN(named) && i < MT_LEN(named[at].tokens) ? named[at].tokens[i] : NULL;
}
