#!/usr/bin/env python3
"""make_jinja_vectors.py - renders templates with Jinja, configured as in transformers, for tests/data/test_jinja.c.

Writes tests/fixtures/jinja/expressions.json: small templates with one construct each, and their text or an error.
Writes tests/fixtures/jinja/chats.json: whole chat templates (written for the tests) and conversations. Each has the
text, the spans of {% generation %} and the ids from apply_chat_template, and the samples that chat_samples.h defines.
The script computes the samples by rendering prefixes. Needs `pip install transformers jinja2`.

    python tests/parity/make_jinja_vectors.py
"""
import json
from datetime import datetime
from pathlib import Path

from chat_styles import STYLES
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "tests/fixtures/jinja"
VARS = {"n": 7, "f": 2.5, "t": True, "no": None, "s": "Hé llo wörld", "e": "", "l": [3, 1, 2],
        "names": ["b", "A", "c"],
        "d": {"a": 1, "items": "shadow", "b": [1, {"x": None}]}, "m": [
            {"role": "user", "content": " hi\n"}, {"role": "assistant", "content": "yo", "n": {"k": 5}},
            {"role": "user", "content": "a|b|c"}], "q": "it's \"quoted\"\t\\", "tags": "<think>\n why \n</think>\n\nso"}

# Each expression becomes a template that prints it.
EXPRESSIONS = """
n + 1 ;; n - 10 ;; n * 3 ;; n / 2 ;; n // 2 ;; -n // 2 ;; n % 3 ;; -n % 3 ;; n % -3 ;; 2 ** 10 ;; 2 ** -1 ;; f * 2
1e999 ;; -1e999 ;; 1e999 - 1e999 ;; [1e999]|tojson ;; -1e999|tojson ;; 1e999 > 1
f // 1 ;; -f % 2 ;; 1 / 4 ;; 1e3 ;; 1.50 ;; 10 // 0 ;; n == 7 ;; n == 7.0 ;; true == 1 ;; "1" == 1 ;; no == none
l == [3, 1, 2] ;; (1, 2) == [1, 2]|d == {"a": 1} ;; x == y ;; n != 7 ;; 1 < 2 < 3 ;; 3 > 2 > 2 ;; "a" < "b" ;; "a" < 1
n >= 7 and f < 3 ;; not n ;; not e and not no ;; e or "else" ;; n and "then" ;; x or 1 ;; 1 if n else 2 ;; 1 if e
"x" if e else "y" if no else "z" ;; s ;; s[0] ;; s[1] ;; s[-1] ;; s[99] ;; s[1:4] ;; s[::-1] ;; s[:-6] ;; s[-5:]
s[::2] ;; l[::-1] ;; l[1:] ;; l[:1] ;; l[5:] ;; l[-1] ;; l[2:0:-1] ;; l[n] ;; m[-1].role ;; m[1:][0]["role"]
m.0.role ;; d.a ;; d["a"] ;; d["items"] ;; d.zz ;; d["zz"] ;; d.zz.y ;; x ;; x.y ;; no.y ;; n.y ;; d.b.1.x
m[1]["n"]["k"] ;; d["b"][1]["x"] ;; "a" ~ 1 ~ none ~ true ~ 1.5 ;; "a" + "b" ;; "a" + 1 ;; "a" * 3 ;; [1] + [2]
(1,) + (2,) ;; [1] + (2,) ;; x + "a" ;; "a" "b" 'c' ;; '\\n\\t\\'\\x41\\u00e9\\q' ;; "ll" in s ;; "zz" in s ;; 1 in l
9 not in l ;; "a" in d ;; "a" in x ;; "a" in no ;; 1 in "1" ;; "role" in m[0] ;; none in [none]
[1, "a", none, 1.5, true] ;; (1,) ;; () ;; {"a": [1, {"b": 2.0}], 3: none} ;; q ;; [q] ;; ["it's"] ;; ['say "x"']
['both \\' "'] ;; ["é\\n"] ;; {} ;; [] ;; s is string ;; n is string|d is mapping ;; l is mapping ;; l is iterable
s is sequence ;; n is iterable ;; x is iterable ;; x is defined ;; d.a is defined ;; d.zz is defined ;; x is undefined
no is none ;; x is none ;; n is number ;; t is number ;; f is integer ;; n is integer ;; t is integer ;; f is float
t is boolean ;; t is true ;; no is false ;; n is odd ;; n is even ;; n is divisibleby 7 ;; n is divisibleby(2)
n is eq 7 ;; n is equalto(8) ;; n is ne 7 ;; n is gt 6 ;; n is lt 6 ;; n is in [7] ;; n is not none
n is not string and t ;; raise_exception is callable ;; n is callable ;; not n is string ;; n is string or n is number
s|length ;; l|length|d|length ;; x|length ;; n|length ;; e|length ;; "AB c"|lower
"hello wORLD"|capitalize ;; "ab cd"|title ;; "  x\\n "|trim ;; "xxaxx"|trim("x") ;; l|first ;; l|last ;; s|first
[]|first ;; l|join ;; l|join(", ") ;; m|join("-", attribute="role") ;; [1, none, "x"]|join("/") ;; l|list
s[:3]|list|d|list|d|items|list ;; d|tojson ;; q|tojson ;; s|tojson ;; no|tojson ;; 1.0|tojson
[1, [2.5e-8, {"k": true}]]|tojson|d|tojson(indent=2) ;; []|tojson(indent=1) ;; x|tojson ;; {"a": {}}|tojson(indent=4)
x|default("dd") ;; e|default("dd") ;; e|default("dd", true) ;; no|default("dd") ;; x|d(1)
no|default("q", boolean=true) ;; n|string ;; none|string ;; "5"|int ;; "z"|int ;; "z"|int(9) ;; "2.5"|float ;; f|int
-3|abs ;; m|map(attribute="role")|list ;; l|map("string")|list ;; m|map(attribute="n.k", default=0)|list
m|selectattr("role", "equalto", "user")|list|length
m|rejectattr("role", "equalto", "user")|map(attribute="content")|first ;; m|selectattr("n")|list|length
m|selectattr("n", "defined")|list|length ;; l|select("odd")|list ;; l|reject("gt", 1)|list ;; [0, 1, ""]|select|list
l|sort ;; names|sort ;; names|sort(case_sensitive=true) ;; l|sort(reverse=true)
m|sort(attribute="role")|map(attribute="role")|list ;; {"b": 1, "A": 2}|dictsort ;; l|reverse|list ;; s|reverse
[1, 2, 1, 2]|unique|list ;; s|replace("l", "L") ;; s|replace("l", "L", 1) ;; "a\\nb\\n\\nc"|indent(2)
"a\\nb"|indent(1, true) ;; q|safe ;; s.startswith("H") ;; s.startswith("x") ;; s.endswith("world")
s.endswith(("a", "d")) ;; s.split() ;; s.split(" ") ;; s.split(" ", 1) ;; s.split("zz") ;; "a,b,c".rsplit(",", 1)
" a  b ".split() ;; "a b c".split(none, 1) ;; "xyx".strip("x") ;; "xyx".lstrip("x") ;; "xyx".rstrip("x")
"\\n a \\n".strip() ;; "\\n a \\n".lstrip("\\n") ;; "\\u00a0\\u2003a\\u3000".strip() ;; "\\x1ca\\x85".strip()
"éaé".strip("é") ;; "Ab".upper() ;; "Ab".lower() ;; "aB c".title() ;; "aB".capitalize() ;; "abcabc".replace("b", "-")
"abcabc".replace("b", "-", 1) ;; "abc".find("c") ;; "éc".find("c") ;; "abc".find("z") ;; "aXbXc".count("X")
"12".isdigit() ;; "1a".isdigit() ;; "-".join(["a", "b"]) ;; "a\\nb\\r\\nc".splitlines()
"prefix".removeprefix("pre") ;; "prefix".removesuffix("fix") ;; d.get("a") ;; d.get("zz") ;; d.get("zz", 4)
d.keys()|list ;; d.values()|list ;; d.a.b ;; d.items()|list
tags.split("</think>")[0].rstrip("\\n").split("<think>")[-1].lstrip("\\n") ;; tags.split("</think>")[-1].lstrip("\\n")
range(3)|list ;; range(1, 4)|list ;; range(5, 0, -2)|list ;; dict(a=1, b=2) ;; namespace(a=1).a
strftime_now("%d %b %Y, %A %j") ;; raise_exception("no: " ~ n) ;; undefined_function() ;; s.nothing() ;; d.a()
l.append(1) ;; s|nosuchfilter ;; n is nosuchtest ;; n.0 ;; "%d" ;; {"a": 1}.a ;; [1, 2][0] ;; ("a" ~ "b")|upper
-n|abs ;; (-n)|abs ;; n|abs + 1 ;; "a" ~ l|length ;; l|length > 2 ;; not l|length
d|tojson(separators=(",", ":")) ;; d|tojson(separators=["; ", " = "]) ;; d|tojson(indent=1, separators=(",", ":"))
d|tojson(separators=none) ;; d|tojson(separators=(",",)) ;; d|tojson(separators=(1, 2)) ;; [1, {}]|tojson(false, 2)
no|selectattr("a")|list ;; no|map("upper")|list ;; 0|select|list ;; no|reject|list ;; 5|select|list ;; no|join
n if n is defined and n is not none else 0 ;; s|length - 1 ;; (s|length) * 2 ;; m|length - 1 - 1
true and false or true ;; 1 + 2 * 3 - 4 ;; "a" ~ 1 + 2 ;; 1, 2 ;; (1, 2,)
{"b\u00e9": 1, "\u57ce\u5e02": 2, "B\u00c9A": 3, "\u0416": 4, "\u0451": 5}|dictsort
"\u00c0\u00d7\u00de\u00df\u00ff\u0400\u040f\u0410\u042f"|lower
"a\u57ce\u5e02b \u3042c"|upper ;; "\u57cea b"|title ;; "\u57cea".title() ;; "\u57ceAb"|capitalize
"\u05d0a\u1000\u2014\ufa00\uff10\U00020000"|upper
"it's a-b tool_call (x) 3ab"|title ;; "it's tool_call".title() ;; names|unique|list ;; "aAbB"|unique|join
"aAbB"|unique(true)|join ;; m|unique(attribute="role")|list|length ;; ""|indent(2, true)
"a\\n"|indent(2, false, true)
["\\xa0\\u200d\\ufeff\\u00e9"] ;; ["\\U0001f469\\u200d\\U000e0001\\x80"] ;; {"\\u2028": "\\ue000"}
["\\u00e9\\'\\x7f"]
"a\\n\\nb\\n"|indent(2, true, true) ;; "\\na"|indent(1, true) ;; [1, 2]|safe|first ;; 0|safe is string
"""

STATEMENTS = [
    "{% if n > 5 %}big{% elif n > 2 %}mid{% else %}small{% endif %}", "{% if x %}a{% endif %}b",
    "{% for i in l %}{{ i }},{% endfor %}", "{% for i in [] %}x{% else %}none{% endfor %}",
    "{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}", "{% for k in d %}{{ k }} {% endfor %}",
    "{% for (a, b) in [(1, 2), [3, 4]] %}{{ a }}{{ b }} {% endfor %}",
    "{% for a, b in [(1, 2, 3)] %}{{ a }}{% endfor %}", "{% for c in 'é世a' %}[{{ c }}]{% endfor %}",
    "{% for i in x %}a{% endfor %}b", "{% for i in n %}a{% endfor %}", "{% for i in no %}a{% endfor %}",
    "{% for i in l if i > 1 %}{{ loop.index }}/{{ loop.length }}:{{ i }} {% endfor %}",
    "{% for i in l %}{{ loop.index0 }}{{ loop.index }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.firs"
    "t }}{{ loop.last }}{{ loop.length }} {{ loop.previtem }}|{{ loop.nextitem }};{% endfor %}",
    "{% for i in l %}{{ loop.previtem is defined }}{{ loop.nextitem is defined }} {% endfor %}",
    "{% for i in l %}{% for j in l %}{{ loop.index }}{% endfor %}{{ loop.index }} {% endfor %}",
    "{% for i in l %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}",
    "{% for i in l %}{% if i == 1 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "{% for i in l %}{% if i > 2 %}{% break %}{% endif %}{{ i }}{% else %}none{% endfor %}",
    "{% for i in l %}{{ i }}{% continue %}{% else %}none{% endfor %}",
    "{% for i in l %}{% if i == 1 %}{% break %}{% endif %}{{ i }}{% else %}none{% endfor %}",
    "{% for i in [] %}{% else %}{% set a = 1 %}{{ a }}{% endfor %}{{ a is defined }}",
    "{% set a = 1 %}{% for i in l %}{% set a = a + i %}{{ a }} {% endfor %}{{ a }}",
    "{% set ns = namespace(a=0, b='x') %}{% for i in l %}{% set ns.a = ns.a + i %}{% endfor %}"
    "{{ ns.a }}{{ ns.b }}{{ ns.c }}",
    "{% set ns = namespace() %}{% set ns.index = 0 %}{{ ns.index }}", "{% set d.a = 2 %}",
    "{% set a, b = 1, 2 %}{{ b }}{{ a }}", "{% set a = 1, 2 %}{{ a }}",
    "{% set a %}x{{ n }}y{% endset %}{{ a|length }}{{ a }}", "{% if t %}{% set v = 3 %}{% endif %}{{ v }}",
    "{% if e %}{% set v = 3 %}{% endif %}{{ v }}|", "{% for i in l %}{% set inner = i %}{% endfor %}{{ inner }}|",
    "{% macro f(a, b='d', c=none) %}<{{ a }}{{ b }}{{ c }}>{% endmacro %}"
    "{{ f(1) }}{{ f(1, 2) }}{{ f(b=5, a=4) }}{{ f() }}",
    "{% macro f(a) %}{{ a }}{% endmacro %}{{ f(1, 2) }}", "{% macro f(a) %}{{ a }}{% endmacro %}{{ f(z=2) }}",
    "{% macro down(n) %}{{ n }}{% if n > 0 %}{{ down(n - 1) }}{% endif %}{% endmacro %}{{ down(5) }}",
    "{% macro f() %}{{ top }}{{ n }}{% endmacro %}{% set top = 'T' %}{{ f() }}",
    "{% macro f() %}  x {% endmacro %}{{ f()|trim }}{{ f()|length }}{{ f() ~ 'a' }}",
    "{% set r = [] %}{% for i in l %}{% set r = r + [i] %}{% endfor %}{{ r }}",
    "{% raw %}{{ n }}{% if %}{% endraw %}{{ n }}", "  {% raw %}\n a {% endraw %}\n b",
    "{%- raw -%}  a  {%- endraw -%}  b", "a{# comment {{ x }} #}b", "a {#- c -#} b", "  {# c #}\nb", "a\n{# c #}\nb\n",
    "a\n  {% if t %}\n  b\n  {% endif %}\nc\n", "a\n  {%- if t %}\n  b\n  {%- endif -%}\n\n  c", "a  {{- n -}}  b",
    "a\n\n{{ n }}\n\nb\n\n", "a\n  {%+ if t %}\n  b{% endif +%}\n c", "  {{ n }}\n  {{ n }}",
    "{% if t -%}\n\n  b\n{%- endif %}\n", "\n\n{% if t %}x{% endif %}\n\n", "x {% if t %} \n {% endif %} y",
    "{% if t %}\r\nb\r\n{% endif %}\rc", "{{ n }}{% if t %}\n{% endif %}\n\n", "a\t {% if t %}b{% endif %}",
    "{{ {'a': {'b': 1}} }}", "{{ {'a': {'b': 1}}['a']['b'] }}", "{{ '}}' }}{{ \"%}\" }}", "{{ 'multi\nline' }}",
    "{{\n n\n+\n1 }}", "{{ 'a'\n'b' }}", "{{ }}", "{% if %}{% endif %}", "{% endif %}", "{% if t %}",
    "{% for i in l %}", "{{ n", "{% if t", "{# a", "{{ 'a }}", "{{ n n }}", "{{ (n }}", "{{ [1, 2 }}", "{% set = 1 %}",
    "{% for in l %}{% endfor %}", "{{ n | }}", "{{ n. }}", "{{ 1 if }}", "{% macro %}{% endmacro %}", "{{ m }}",
    "{{ m[0] }}", "{{ 1 is string is string }}", "{{ @ }}", "{% break %}", "{% frobnicate %}", "a { b % } c",
    "{ {n} }", "{% generation %}a{% endgeneration %}b",
    "x{% for i in l %}{% generation %}{{ i }}é{% endgeneration %}-{% endfor %}",
    "{% set v = 1 %}{% generation %}{% set v = 2 %}{{ v }}{% endgeneration %}{{ v }}",
    "{%- for message in m %}\n    {{- '<|' + message['role'] + '|>\n' }}\n    {%- generation %}"
    "\n    {{- message.content | trim }}\n    {%- endgeneration %}\n{%- endfor %}",
    "{% for message in m[::-1] %}{% set index = (m|length - 1) - loop.index0 %}"
    "{{ index }}{{ message.role[0] }} {% endfor %}",
    "{{ m[0].content + n }}", "{{ bos_token }}{{ messages[0]['role'] }}",
    "{% if messages is defined and messages[0] %}a{% else %}b{% endif %}",
]

# Written for these tests; together they use the features of the published templates of three families.
CHATML = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "Tools:" }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- "<|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_query=messages|length - 1, open=true) %}
{%- for message in messages[::-1] %}
    {%- if ns.open and message.role == 'user' %}
        {%- set ns.last_query = messages|length - 1 - loop.index0 %}
        {%- set ns.open = false %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thinking = message.reasoning_content or '' %}
        {%- if not thinking and '</think>' in content %}
            {%- set thinking = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        MARK
        {%- if loop.index0 > ns.last_query and (loop.last or thinking) %}
            {{- '<think>\\n' + thinking.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}{{- '\\n' }}{%- endif %}
            {%- set call = call.function or call %}
            {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
        ENDMARK
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
TULU = """{{ bos_token }}{% for message in messages %}
{{ '<|' + message['role'] + '|>
' + message['content'] }}{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}
{% if not loop.last or message['role'] != 'assistant' %}{{ '
' }}{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>
' }}{% endif %}"""
INST = """{%- if messages[0].role == 'system' %}
    {%- set system, rest = messages[0].content, messages[1:] %}
{%- else %}
    {%- set rest = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in rest %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must take turns: user, assistant') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {%- set before = system + '\\n\\n' if loop.first and system is defined else '' %}
        {{- ' [INST] ' + before + message.content + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message.content + eos_token }}
    {%- endif %}
{%- endfor %}"""
TEMPLATES = {
    "chatml": (CHATML.replace("        ENDMARK\n", "").replace("        MARK\n", ""), None, "<|im_end|>"),
    "chatml marked": (CHATML.replace("ENDMARK", "{%- endgeneration %}").replace("MARK", "{%- generation %}"), None,
                      "<|im_end|>"),
    "tulu": (TULU, "<|endoftext|>", "<|endoftext|>"),
    "inst": (INST, "<s>", "</s>"),
}


def user(text):
    return {"role": "user", "content": text}


def answer(text, **more):
    return {"role": "assistant", "content": text, **more}


TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
CALL = [{"type": "function", "function": {"name": "f", "arguments": {"a": [1, 2.5, "é\n"], "b": None}}}]
RESULT = {"role": "tool", "content": "20"}
CONVERSATIONS = [
    {"messages": [user("What is 2 + 2?"), answer("2 + 2 = 4.")]},
    {"messages": [{"role": "system", "content": "Short."}, user("你好"), answer(" Hé \n"), user(""), answer("")]},
    {"messages": [user("a"), answer("b", reasoning_content="why b"), user("c"),
                  answer("d", reasoning_content="why\nd")]},
    {"messages": [user("a"), answer("b"), user("c"), answer("d"), user("e"), answer("f")]},
    {"messages": [user("a"), answer("b"), user("c")]},
    {"messages": [user("a")]},
    {"messages": [user("a"), answer("<think>\nhm\n</think>\n\nb"), user("c"), answer("d")]},
    {"messages": [user("w?"), answer("", reasoning_content="need f", tool_calls=CALL), RESULT,
                  answer("It is 20.", reasoning_content="say it")], "tools": [TOOL]},
    {"messages": [user("w?"), answer("one", tool_calls=CALL * 2), RESULT, RESULT, answer("20, 20."), user("thanks"),
                  answer("bye")], "tools": [TOOL]},
    {"messages": [user("a"), answer("b", train=False), user("c"), answer("d")]},
    {"messages": [user("a"), answer("b"), user("c"), answer("d", weight=0)]},
    {"messages": [user("a"), user("b")]},
    {"messages": [answer("a"), user("b"), answer("c")]},
]


# For STYLES: with variables of the template, with parts, and with arguments in both forms.
ARGUMENTS = {"city": "東京 \"x\"\n", "n": 2, "f": 1.5, "t": True, "no": None, "l": [1, "a", {"b": []}], "d": {"é": {}}}
PARAMETERS = {"type": "object", "properties": {
    "city": {"type": "string", "description": " The «city» \n", "enum": ["a", 1]}, "n": {"type": ["integer", "null"]}},
    "required": ["city"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<b> & 'd'\n", "parameters": PARAMETERS}},
         {"type": "function", "function": {"name": "now", "description": "x", "parameters": {"type": "object"}}}]
KWARGS = [{}, {"enable_thinking": False}, {"enable_thinking": True, "clear_thinking": False, "preserve_thinking": True}]


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


def calls(*arguments):
    return [{"id": "c", "type": "function", "function": {"name": "f", "arguments": a}} for a in arguments]


def style_conversations(as_text):
    form = (lambda a: json.dumps(a, ensure_ascii=False)) if as_text else (lambda a: a)
    last = answer("It is 20.", reasoning_content="say\nit")
    return [
        {"messages": [user("a"), answer("b", reasoning_content="why b"), user("c"),
                      answer("\nd\n", reasoning_content="\nwhy\n\nd\n")]},
        {"messages": [{"role": "system", "content": "Short.\n"}, user(" 你\u3000好 "), answer(" Hé \n"), user(""),
                      answer("")]},
        {"messages": [user("a"), answer("<think>\nhm\n</think>\n\nb"), user("c"), answer("x</think>y")]},
        {"messages": [user("w?"), answer("", reasoning_content="need f", tool_calls=calls(form(ARGUMENTS))), RESULT,
                      last], "tools": TOOLS},
        {"messages": [{"role": "system", "content": "S"}, user("w?"),
                      answer("two", reasoning_content="r", tool_calls=calls(form(ARGUMENTS), form({}))), RESULT, RESULT,
                      last, user("thanks"), answer("bye")], "tools": TOOLS},
        {"messages": [user("w?"), answer("", tool_calls=calls(form({"a": 1}))), RESULT,
                      answer("again", reasoning_content="q", tool_calls=calls(form({"a": 2})))], "tools": TOOLS[1:]},
        {"messages": [user(parts("a ", "b")), answer(parts("c", " d")), user(["e"]), answer("f")]},
        {"messages": [user("a"), answer("b", train=False), user("<tool_response>x</tool_response>"),
                      answer("d", reasoning_content="e")]},
        {"messages": [user("a"), answer("b", reasoning_content="r"), user("c")]},
        {"messages": [user("a"), {"role": "judge", "content": "x"}, answer("b")]},
        {"messages": [{"role": "system", "content": "only"}]},
    ]


def expressions():
    return ["{{ " + e + " }}" for line in EXPRESSIONS.strip().splitlines() for e in line.split(" ;; ")]


def run(template, values):
    try:
        compiled = _compile_jinja_template(template)
        compiled.globals["strftime_now"] = lambda form: datetime(2025, 6, 28).strftime(form)
        return compiled.render(**values)
    except Exception:  # any exception in a template is an error
        return None


def chars_to_bytes(text, spans):
    return [[len(text[:a].encode()), len(text[:b].encode())] for a, b in spans]


def apply(tok, row, n=None, **more):
    if n == 0:  # apply_chat_template itself takes no empty conversation
        values = {"messages": [], "tools": row.get("tools"), **tok.words, **more}
        return _compile_jinja_template(tok.chat_template).render(values)
    return tok.apply_chat_template(row["messages"][:n], tools=row.get("tools"), **{"tokenize": False, **more})


def begin_of(prompt, full):
    """Where the answer begins: after the prompt or, if the full text does not begin with the prompt, at the "<" before
    the first difference."""
    if full.startswith(prompt):
        return len(prompt)
    same = next(i for i, (a, b) in enumerate(zip(prompt, full)) if a != b)
    mark = full.find("<", full.rfind(">", 0, same) + 1, same)
    return mark if mark >= 0 else same


def is_empty(message):
    """An answer that says nothing carries no loss."""
    said = [message.get("tool_calls"), message.get("function_call")]
    texts = [message.get(key) for key in ("content", "thinking", "reasoning_content", "reasoning")]
    return not any(said) and not any(text.strip() if isinstance(text, str) else text for text in texts)


def samples_of(tok, row, eos, roles):
    """[text, byte spans] of each sample, as chat_samples.h says. roles: what ends an answer before a user's message and
    before a tool result, when eos does not."""
    apply(tok, row)
    found = []
    messages = row["messages"]
    for i, message in reversed(list(enumerate(messages))):
        if message["role"] != "assistant" or message.get("train") is False or message.get("weight") == 0 \
                or is_empty(message):
            continue
        try:
            prompt, full = apply(tok, row, i, add_generation_prompt=True), apply(tok, row, i + 1)
            begin = begin_of(prompt, full)
        except Exception:
            if any(m["role"] == "user" for m in messages[:i]):
                raise
            continue  # an answer before the first question has no loss
        end = len(full.rstrip()) if full.rstrip().endswith(eos) else len(full)
        if not found or not found[0][0].startswith(full):
            found.insert(0, [full, []])
            if roles and not full.rstrip().endswith(eos):
                tool = message.get("tool_calls") or messages[i + 1:] and messages[i + 1]["role"] == "tool"
                found[0][0] += roles[bool(tool)]
        for role in roles if not full.rstrip().endswith(eos) else []:
            end += len(role) if found[0][0].startswith(role, end) else 0
        found[0][1].insert(0, [begin, end])
    return [{"text": text, "spans": chars_to_bytes(text, spans)} for text, spans in found]


def chat_case(tok, name, template, eos, row, roles=()):
    case = {"template": name, "row": row}
    try:
        case["text"] = apply(tok, row)
        case["prompt"] = apply(tok, row, add_generation_prompt=True)
        case["ids"] = apply(tok, row, tokenize=True, return_dict=True)["input_ids"]
    except Exception:
        return {"template": name, "row": row, "error": True}
    if "{%- generation" in template:
        _, spans = render_jinja_template([row["messages"]], tools=row.get("tools"), chat_template=template,
                                         return_assistant_tokens_mask=True, eos_token=eos)
        case["generation"] = chars_to_bytes(case["text"], spans[0])
        return case
    try:
        case["samples"] = samples_of(tok, row, eos, roles)
    except Exception:  # the template refuses this prefix
        case["samples_error"] = True
    return case


def style_cases(tok, name, template, eos, roles, as_text):
    """Each conversation with the variables that change it; then with arguments in the form that the template refuses:
    moetrain gives it the other form, so the text is the same."""
    cases, seen = [], set()
    words = dict(tok.words)
    for kwargs in KWARGS:
        tok.words = {**words, **kwargs}
        for here, there in zip(style_conversations(as_text), style_conversations(not as_text)):
            case = chat_case(tok, name, template, eos, here, roles)
            case.pop("ids", None)
            key = json.dumps(case)
            if key in seen:
                continue
            seen.add(key)
            cases.append({**case, "row": {**here, "chat_template_kwargs": kwargs}})
            if here != there and not kwargs:
                cases.append({**case, "row": there})
    tok.words = words
    return cases


class Tokenizer(PreTrainedTokenizerFast):
    """Special tokens are template variables only; tokens of the vocabulary would have separate ids."""
    def apply_chat_template(self, *args, **kwargs):
        return super().apply_chat_template(*args, **{**self.words, **kwargs})


def main():
    OUT.mkdir(exist_ok=True)
    cases = [{"template": t, "text": run(t, VARS)} for t in expressions() + STATEMENTS]
    lines = ",\n".join(json.dumps(c) for c in cases)
    (OUT / "expressions.json").write_text('{"vars": ' + json.dumps(VARS) + ',\n"cases": [\n' + lines + "\n]}\n")
    chats = []
    for name, (template, bos, eos) in TEMPLATES.items():
        tok = Tokenizer(tokenizer_file=str(ROOT / "configs/tiny-gptoss/tokenizer.json"), chat_template=template)
        tok.words = {"eos_token": eos, **({"bos_token": bos} if bos else {})}
        chats += [chat_case(tok, name, template, eos, row) for row in CONVERSATIONS]
    head = {name: {"chat_template": t, "bos_token": bos, "eos_token": eos} for name, (t, bos, eos) in TEMPLATES.items()}
    for name, (template, eos, roles, as_text) in STYLES.items():
        tok = Tokenizer(tokenizer_file=str(ROOT / "configs/tiny-gptoss/tokenizer.json"), chat_template=template)
        tok.words = {"eos_token": eos}
        head[name] = {"chat_template": template, "bos_token": None, "eos_token": eos, "roles": roles}
        chats += style_cases(tok, name, template, eos, roles, as_text)
    lines = ",\n".join(json.dumps(c) for c in chats)
    head = '{"templates": ' + json.dumps(head, indent=1)
    (OUT / "chats.json").write_text(head + ',\n"cases": [\n' + lines + "\n]}\n")
    print(len(cases), "templates,", sum(c["text"] is None for c in cases), "fail;", len(chats), "chats,",
          sum("error" in c for c in chats), "refused")


if __name__ == "__main__":
    main()
