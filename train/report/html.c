/* html.c - see html.h. */
#include "train/report/html.h"

#include "train/report/svg.h"

static const char style[] =
    ":root{--bg:#fff;--fg:#1d2330;--dim:#667085;--line:#e6e8ee;--card:#f7f8fa;--a:#2563eb;--b:#e4572e;--faint:.3}\n"
    "@media(prefers-color-scheme:dark){:root{--bg:#12151c;--fg:#e6e9f0;--dim:#98a2b3;--line:#2a303c;--card:#1a1f29;"
    "--a:#6ea8fe;--b:#ff8a65;--faint:.45}}\n"
    "*{box-sizing:border-box}\n"
    "body{margin:0;background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,-apple-system,\"Segoe UI\",Roboto,"
    "\"Helvetica Neue\",\"DejaVu Sans\",sans-serif}\n"
    "main{max-width:1180px;margin:0 auto;padding:36px 24px 60px}\n"
    "h1{font-size:26px;margin:0 0 2px;letter-spacing:-.01em;overflow-wrap:anywhere}\n"
    "h2{font-size:16px;margin:36px 0 8px}h2 small,.sub{font-size:13px;font-weight:400;color:var(--dim)}\n"
    ".cards{display:flex;flex-wrap:wrap;gap:10px;margin:22px 0 8px}\n"
    ".cards div{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:11px 14px;"
    "flex:1 1 auto}\n"
    ".cards span{display:block;font-size:12.5px;color:var(--dim)}\n"
    ".cards b{display:block;font-size:19px;font-weight:600;font-variant-numeric:tabular-nums;white-space:nowrap}\n"
    ".three{display:grid;grid-template-columns:repeat(auto-fit,minmax(310px,1fr));gap:0 24px}\n"
    "svg{display:block;width:100%;height:auto;overflow:visible}svg svg{overflow:hidden}\n"
    ".narrow{display:none}.table{overflow-x:auto}\n"
    "@media(max-width:720px){main{padding:24px 14px 40px}.wide{display:none}.narrow{display:block}}\n"
    "svg text{font-size:12px;fill:var(--dim);font-variant-numeric:tabular-nums}\n"
    ".mid{text-anchor:middle}.end{text-anchor:end}.grid{stroke:var(--line)}.axis{stroke:var(--dim);opacity:.6}\n"
    ".line{fill:none;stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round}\n"
    ".thin{stroke-width:1.2}.faint{opacity:var(--faint);stroke-width:1}\n"
    ".c2{stroke:#2a9d58}.c3{stroke:#a855f7}.c4{stroke:#d4a017}.c5{stroke:#0ea5a5}.c6{stroke:#e0559b}.c7{stroke:#8d99ae}"
    "\n"
    ".a{stroke:var(--a)}.b{stroke:var(--b)}circle{fill:var(--bg);stroke-width:2}\n"
    ".cell{fill:var(--a);stroke:var(--line);stroke-width:.5}\n"
    ".key{margin-left:14px;white-space:nowrap}"
    ".key:before{content:\"\";display:inline-block;width:18px;border-top:3px solid;"
    "margin-right:6px;vertical-align:4px}.key.ka:before{color:var(--a)}.key.kb:before{color:var(--b)}"
    ".key.kf:before{color:var(--a);opacity:var(--faint)}"
    ".key.k2:before{color:#2a9d58}.key.k3:before{color:#a855f7}.key.k4:before{color:#d4a017}"
    ".key.k5:before{color:#0ea5a5}.key.k6:before{color:#e0559b}.key.k7:before{color:#8d99ae}\n"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums}\n"
    "th,td{text-align:right;white-space:nowrap;padding:5px 22px 5px 0;border-bottom:1px solid var(--line)}"
    "th{font-size:12.5px;font-weight:500;color:var(--dim)}\n"
    "tr.best td{font-weight:600}td.op{text-align:left}.bar{width:40vw;max-width:640px}"
    ".bar i{display:block;height:12px;background:var(--a);border-radius:3px}\n"
    ".facts{display:grid;grid-template-columns:max-content 1fr;gap:0 14px;margin:8px 0 0;font-size:13px}"
    ".facts dt{color:var(--dim)}.facts dd{margin:0;overflow-wrap:anywhere}\n"
    ".sample{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:11px 14px;margin:0 0 10px}"
    ".sample p{margin:0 0 6px;white-space:pre-wrap;overflow-wrap:anywhere}.sample .sub{white-space:normal}\n"
    "pre{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px 18px;margin:0;"
    "font:12.5px/1.55 ui-monospace,Menlo,Consolas,\"DejaVu Sans Mono\",monospace;columns:2 420px;column-gap:36px;"
    "white-space:pre-wrap;overflow-wrap:anywhere}\n";

void html_begin(FILE *out, const char *title)
{
    fputs("<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\">\n"
          "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n"
          "<meta name=\"color-scheme\" content=\"light dark\">\n<title>",
          out);
    svg_text(out, title);
    fprintf(out, "</title>\n<style>\n%s</style>\n<main>\n<h1>", style);
    svg_text(out, title);
    fputs("</h1>\n", out);
}

void html_end(FILE *out) { fputs("</main>\n</html>\n", out); }
