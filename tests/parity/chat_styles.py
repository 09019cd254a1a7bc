"""chat_styles.py - chat templates for make_jinja_vectors.py, in the style of Qwen3.5, Qwen3-Coder, GLM-4.5, GLM-4.7 and
DeepSeek-V3. They were written for these tests: they have the constructs, turns and variables of the published ones, and
other texts."""

QWEN35 = """{%- set seen = namespace(images=0) %}
{%- macro render(content, count, system=false) %}
    {%- if content is string %}
        {{- content }}
    {%- elif content is iterable and content is not mapping %}
        {%- for part in content %}
            {%- if part is string %}
                {{- part }}
            {%- elif 'image' in part or part.type == 'image' %}
                {%- if system %}{{- raise_exception('no image in a system message') }}{%- endif %}
                {%- if count %}{%- set seen.images = seen.images + 1 %}{%- endif %}
                {{- 'Image ' ~ seen.images ~ ': <|image|>' }}
            {%- elif 'text' in part %}
                {{- part.text }}
            {%- else %}
                {{- raise_exception('unknown part') }}
            {%- endif %}
        {%- endfor %}
    {%- elif content is none or content is undefined %}
        {{- '' }}
    {%- else %}
        {{- raise_exception('unknown content') }}
    {%- endif %}
{%- endmacro %}
{%- if not messages %}{{- raise_exception('no messages') }}{%- endif %}
{%- set first = messages[0] %}
{%- if tools and tools is iterable and tools is not mapping %}
    {{- '<|im_start|>system\\n# Functions\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>' }}
    {%- if first.role == 'system' %}
        {%- set content = render(first.content, false, true)|trim %}
        {%- if content %}{{- '\\n\\n' + content }}{%- endif %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- elif first.role == 'system' %}
    {{- '<|im_start|>system\\n' + render(first.content, false, true)|trim + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, query=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" %}
        {%- set content = render(message.content, false)|trim %}
        {%- if not(content.startswith('<tool_response>') and content.endswith('</tool_response>')) %}
            {%- set ns.searching = false %}
            {%- set ns.query = index %}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if ns.searching %}{{- raise_exception('no question') }}{%- endif %}
{%- for message in messages %}
    {%- set content = render(message.content, true)|trim %}
    {%- if message.role == 'system' %}
        {%- if not loop.first %}{{- raise_exception('a late system message') }}{%- endif %}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thinking = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thinking = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thinking = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- set thinking = thinking|trim %}
        {%- if (preserve_thinking is defined and preserve_thinking is true) or loop.index0 > ns.query %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + thinking + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls and message.tool_calls is iterable and message.tool_calls is not mapping %}
            {%- for call in message.tool_calls %}
                {%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
                {{- ('\\n\\n' if content|trim else '') if loop.first else '\\n' }}
                {{- '<tool_call>\\n<function=' + call.name + '>\\n' }}
                {%- if call.arguments is defined %}
                    {%- for name, value in call.arguments|items %}
                        {{- '<parameter=' + name + '>\\n' }}
                        {%- set listed = value is sequence and value is not string %}
                        {%- set value = value | tojson | safe if value is mapping or listed else value | string %}
                        {{- value }}
                        {{- '\\n</parameter>\\n' }}
                    {%- endfor %}
                {%- endif %}
                {{- '</function>\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.previtem and loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}
        {{- raise_exception('unknown role: ' ~ message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- else %}
        {{- '<think>\\n' }}
    {%- endif %}
{%- endif %}
"""

CODER = """{% macro others(object, known) %}
    {%- if object is mapping %}
        {%- for key in object if key not in known %}
            {%- set value = object[key] %}
            {%- if value is mapping or (value is sequence and value is not string) %}
                {{- '\\n<' ~ key ~ '>' ~ (value | tojson | safe) ~ '</' ~ key ~ '>' }}
            {%- else %}
                {{-'\\n<' ~ key ~ '>' ~ (value | string) ~ '</' ~ key ~ '>' }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
{% endmacro %}

{%- if messages and messages[0]["role"] == "system" %}
    {%- set system = messages[0]["content"] %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set rest = messages %}
{%- endif %}
{%- if not tools is defined %}{%- set tools = [] %}{%- endif %}
{%- set with_tools = tools is iterable and tools | length > 0 %}
{%- if system is defined or with_tools %}
    {{- "<|im_start|>system\\n" + (system if system is defined else "You call functions.") }}
    {%- for tool in (tools if with_tools else []) %}
        {%- set tool = tool.function if tool.function is defined else tool %}
        {{- "\\n<function>\\n<name>" ~ tool.name ~ "</name>" }}
        {%- if tool.description is defined %}
            {{- '\\n<description>' ~ (tool.description | trim) ~ '</description>' }}
        {%- endif %}
        {%- if tool.parameters is defined and tool.parameters is mapping and tool.parameters.properties is mapping %}
            {%- for name, fields in tool.parameters.properties|items %}
                {{- '\\n<parameter>\\n<name>' ~ name ~ '</name>' }}
                {{- others(fields, ['name', 'description']) }}
                {{- '\\n</parameter>' }}
            {%- endfor %}
        {%- endif %}
        {{- others(tool.parameters, ['type', 'properties']) }}
        {{- others(tool, ['type', 'name', 'description', 'parameters']) }}
        {{- '\\n</function>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in rest %}
    {%- set calls = message.tool_calls if message.tool_calls is defined else [] %}
    {%- if message.role == "assistant" and calls is iterable and calls | length > 0 %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content is defined and message.content is string and message.content | trim | length > 0 %}
            {{- '\\n' + message.content | trim + '\\n' }}
        {%- endif %}
        {%- for call in message.tool_calls %}
            {%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n<function=' + call.name + '>\\n' }}
            {%- for name, value in (call.arguments|items if call.arguments is defined else []) %}
                {{- '<parameter=' + name + '>\\n' }}
                {%- set value = value if value is string else value | tojson | safe %}
                {{- value }}{{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.previtem and loop.previtem.role != "tool" %}{{- '<|im_start|>user\\n' }}{%- endif %}
        {{- '<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>\\n' }}
        {%- if not loop.last and loop.nextitem.role != "tool" %}
            {{- '<|im_end|>\\n' }}
        {%- elif loop.last %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

GLM = """[gMASK]<sop>
{%- if tools -%}
<|system|>
# Functions
<tools>
{% for tool in tools %}
{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}
</tools>{%- endif -%}
{%- macro visible(content) -%}
    {%- if content is string -%}
        {{- content }}
    {%- elif content is iterable and content is not mapping -%}
        {%- for item in content -%}
            {%- if item is mapping and item.type == 'text' -%}
                {{- item.text }}
            {%- elif item is string -%}
                {{- item }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{- content }}
    {%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {% set ns.last = loop.index0 -%}
    {%- endif %}
{%- endfor %}
{% for m in messages %}
{%- if m.role == 'user' -%}<|user|>LINE{{ visible(m.content) }}NOTHINK
{%- elif m.role == 'assistant' -%}
<|assistant|>
{%- set thinking = '' %}
{%- set content = visible(m.content) %}
{%- if m.reasoning_content is string %}
    {%- set thinking = m.reasoning_content %}
{%- elif '</think>' in content %}
    {%- set thinking = content.rsplit('</think>', 1)[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
    {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{%- if ((clear_thinking is defined and not clear_thinking) or loop.index0 > ns.last) and thinking -%}
{{ 'BREAK<think>' + thinking.strip() +  '</think>'}}
{%- else -%}
{{ 'EMPTY' }}
{%- endif -%}
{%- if content.strip() -%}
{{ 'BREAK' + content.strip() }}
{%- endif -%}
{% if m.tool_calls %}
{% for call in m.tool_calls %}
{%- if call.function %}
    {%- set call = call.function %}
{%- endif %}
{{ 'BREAK<tool_call>' + call.name -}}
{% set _args = call.arguments %}
{% for k, v in _args.items() %}
{{ 'BREAK' -}}
<arg_key>{{ k }}</arg_key>
{{- 'BREAK' -}}
<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>
{%- endfor %}
{{- 'BREAK</tool_call>' -}}
{% endfor %}
{% endif %}
{%- elif m.role == 'tool' -%}
{%- if m.content is string -%}
{%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
    {{- '<|observation|>' }}
{%- endif %}
{{- 'BREAK<tool_response>BREAK' }}
{{- m.content }}
{{- 'BREAK</tool_response>' }}
{%- else -%}
<|observation|>{% for part in m.content %}

<tool_response>
{{ part.output if part.output is defined else part }}
</tool_response>{% endfor -%}
{% endif -%}
{%- elif m.role == 'system' -%}
<|system|>LINE{{ visible(m.content) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    <|assistant|>{{- PROMPT -}}
{%- endif -%}
"""

GLM45 = GLM.replace("NOTHINK", """
{{- '/nothink' if (enable_thinking is defined and not enable_thinking and not
    visible(m.content).endswith("/nothink")) else '' -}}""")
GLM45 = GLM45.replace("LINE", "\n").replace("BREAK", "\\n").replace("EMPTY", "\\n<think></think>").replace(
    "PROMPT", "'\\n<think></think>' if (enable_thinking is defined and not enable_thinking) else ''")
GLM47 = GLM.replace("NOTHINK", "").replace("LINE", "").replace("BREAK", "").replace("EMPTY", "</think>").replace(
    "PROMPT", "'</think>' if (enable_thinking is defined and not enable_thinking) else '<think>'")

DEEPSEEK = """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{%- set ns = namespace(first=true, system='', results=false) %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}{%- set ns.system = ns.system + message['content'] %}{%- endif %}
{%- endfor %}
{{- ns.system }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {%- set ns.results = false %}
        {{- '<|User|>' + message['content'] }}
    {%- elif message['role'] == 'assistant' and message['tool_calls'] %}
        {%- set ns.first = true %}
        {%- for tool in message['tool_calls'] %}
            {%- if ns.first %}
                {{- '<|Assistant|>' + (message['content'] or '') + '<|calls|>' }}
                {%- set ns.first = false %}
            {%- else %}
                {{- '\\n' }}
            {%- endif %}
            {{- '<|call|>' + tool['type'] + '<|sep|>' + tool['function']['name'] }}
            {{- '\\n```json\\n' + tool['function']['arguments'] + '\\n```' }}
        {%- endfor %}
        {{- '<|end_calls|>' + eos_token }}
    {%- elif message['role'] == 'assistant' %}
        {%- set content = message['content'] %}
        {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
        {{- ('' if ns.results else '<|Assistant|>') + content + eos_token }}
        {%- set ns.results = false %}
    {%- elif message['role'] == 'tool' %}
        {{- ('' if ns.results else '<|outputs|>') + '\\n<|output|>' + message['content'] }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|end_outputs|>' }}{%- endif %}
        {%- set ns.results = true %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not ns.results %}{{- '<|Assistant|>' }}{%- endif %}
"""

ROLES = ["<|user|>", "<|observation|>"]
# name: template, eos_token, the tokens that end an answer instead of it, arguments of tool calls as text
STYLES = {
    "qwen3.5 style": (QWEN35, "<|im_end|>", [], False),
    "qwen3-coder style": (CODER, "<|im_end|>", [], False),
    "glm-4.5 style": (GLM45, "<|endoftext|>", ROLES, False),
    "glm-4.7 style": (GLM47, "<|endoftext|>", ROLES, False),
    "deepseek-v3 style": (DEEPSEEK, "<|eos|>", [], True),
}
