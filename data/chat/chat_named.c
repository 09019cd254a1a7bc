/* chat_named.c - chat templates by name. tests/parity/make_named.py renders these texts with transformers. */
#include "data/chat/chat_named.h"

#include <string.h>

/* Reasoning is rendered after the last question only. */
#define LAST_QUESTION                                                                                                  \
    "{%- set last = namespace(user=-1) %}"                                                                             \
    "{%- for message in messages %}"                                                                                   \
    "{%- if message['role'] == 'user' %}{%- set last.user = loop.index0 %}{%- endif %}"                                \
    "{%- endfor %}"

static const struct {
    const char *name, *tokens[6], *text;
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
    {"gemma4",
     {"<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>"},
     "{{- bos_token }}"
     "{%- set thinks = enable_thinking is defined and enable_thinking %}"
     "{%- if thinks and (not messages or messages[0]['role'] != 'system') %}"
     "{{- '<|turn>system\\n<|think|>\\n<turn|>\\n' }}{%- endif %}" LAST_QUESTION "{%- for message in messages %}"
     "{{- '<|turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' }}"
     "{%- if thinks and loop.first and message['role'] == 'system' %}{{- '<|think|>\\n' }}{%- endif %}"
     "{%- if message['reasoning_content'] and message['role'] == 'assistant' and loop.index0 > last.user %}"
     "{{- '<|channel>thought\\n' + message['reasoning_content'] + '\\n<channel|>' }}{%- endif %}"
     "{{- message['content'] | trim + '<turn|>\\n' }}"
     "{%- endfor %}"
     "{%- if add_generation_prompt %}{{- '<|turn>model\\n' }}{%- endif %}"},
    /* of LFM2 and LFM2.5 */
    {"lfm2",
     {"<|im_start|>", "<|im_end|>"},
     "{{- bos_token }}" LAST_QUESTION "{%- for message in messages %}"
     "{{- '<|im_start|>' + message['role'] + '\\n' }}"
     "{%- if message['reasoning_content'] and message['role'] == 'assistant' and loop.index0 > last.user %}"
     "{{- '<think>' + message['reasoning_content'] + '</think>' }}{%- endif %}"
     "{{- message['content'] + '<|im_end|>\\n' }}"
     "{%- endfor %}"
     "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"},
    {"minimax",
     {"]~!b[", "]~b]", "[e~["},
     "{{- ']~!b[' }}"
     "{%- if not messages or messages[0]['role'] != 'system' %}"
     "{{- ']~b]system\\nYou are a helpful assistant.[e~[\\n' }}{%- endif %}" LAST_QUESTION
     "{%- for message in messages %}"
     "{{- ']~b]' + ('ai' if message['role'] == 'assistant' else message['role']) + '\\n' }}"
     "{%- if message['reasoning_content'] and message['role'] == 'assistant' and loop.index0 > last.user %}"
     "{{- '<think>\\n' + message['reasoning_content'] + '\\n</think>\\n\\n' }}{%- endif %}"
     "{{- message['content'] + '[e~[\\n' }}"
     "{%- endfor %}"
     "{%- if add_generation_prompt %}{{- ']~b]ai\\n<think>\\n' }}{%- endif %}"},
    /* every answer has a block of reasoning, which is empty in earlier ones */
    {"nemotron",
     {"<|im_start|>", "<|im_end|>"},
     "{%- if not messages or messages[0]['role'] != 'system' %}"
     "{{- '<|im_start|>system\\n<|im_end|>\\n' }}{%- endif %}" LAST_QUESTION "{%- for message in messages %}"
     "{{- '<|im_start|>' + message['role'] + '\\n' }}"
     "{%- if message['role'] != 'assistant' %}{{- message['content'] }}"
     "{%- elif message['reasoning_content'] and loop.index0 > last.user %}"
     "{{- ('<think>\\n' + message['reasoning_content'] + '\\n</think>\\n' + message['content']) | trim }}"
     "{%- else %}{{- ('<think></think>' + ('\\n' if message['reasoning_content'] else '') + message['content']) | trim "
     "}}"
     "{%- endif %}"
     "{{- '<|im_end|>\\n' }}"
     "{%- endfor %}"
     "{%- if add_generation_prompt %}"
     "{{- '<|im_start|>assistant\\n' + ('<think></think>' if enable_thinking is defined and not enable_thinking else "
     "'<think>\\n') }}"
     "{%- endif %}"},
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
